"""Supervised whitening of embeddings from matching pairs, the "learned whitening" of cirtorch.

    f = P (x - m), normalised, with P = V^T L^-1

    m   the mean of the first images q of the matching pairs (q, p)
    S   the mean of (q - p) (q - p)^T over the pairs
    L   the Cholesky factor of S: S = L L^T
    V   the eigenvectors of the second moments of L^-1 (x - m) over all rows x, the largest eigenvalue first

L^-1 shrinks the directions in which images of the same class differ. V^T rotates the result so that the first rows of P
keep most of the variance; keeping only the first `dim` rows reduces the dimension. If S is singular, the official code
adds multiples of the identity until S is invertible. Here, a singular S is an error, because the directions without
any difference would outweigh all others.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.arguments import PositiveInt, checked
from lightning_retrieval.checks import as_int64
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.models.whitening import (
    FitRows,
    PrincipalComponents,
    WhiteningOfSums,
    count_varying,
    covariance_about,
    top_directions,
    with_positive_largest_entry,
)
from lightning_retrieval.ranking.labels import check_nesting, finest

_FIT_PAIRS = 8192  # number of pairs that are converted to float64 at a time


def matching_pairs(labels: Int[Tensor, " row"], pairs_per_image: int) -> Int[Tensor, "pair 2"]:
    """The indices of the pairs. Each image is paired with the next `pairs_per_image` images of its class, cyclically.

    Images of a class are in the order of the rows, so the pairs are always the same. In a class with too few images,
    each image is paired with all others; a class with a single image has no pair.
    """
    if len(labels) == 0:
        return torch.empty(0, 2, dtype=torch.int64, device=labels.device)
    by_class = labels.argsort(stable=True)
    _, class_of_row, sizes = torch.unique_consecutive(labels[by_class], return_inverse=True, return_counts=True)
    start = (sizes.cumsum(0) - sizes)[class_of_row]
    size = sizes[class_of_row]
    position = torch.arange(len(labels), device=labels.device) - start
    pairs = [torch.empty(0, 2, dtype=torch.int64, device=labels.device)]
    for step in range(1, min(pairs_per_image, int(sizes.max()) - 1) + 1):
        partner = start + (position + step) % size
        pairs_of_step = torch.stack([by_class, by_class[partner]], 1)
        pairs.append(pairs_of_step[step < size])
    return torch.cat(pairs)


def pair_statistics(
    rows: FitRows, pairs: Int[Tensor, "pair 2"]
) -> tuple[Float[Tensor, " from_dim"], Float[Tensor, "from_dim from_dim"]]:
    """The mean m of the pairs' first rows, and the mean S of (q - p) (q - p)^T, in float64 and block by block.

    Each process adds up the pairs whose first row it holds. With several processes, this is a collective operation.

    Args:
        rows: the rows of all processes.
        pairs: all pairs, the same on all processes.
    """
    m = torch.zeros(rows.local.shape[1], dtype=torch.float64, device=rows.local.device)
    S = m.new_zeros(len(m), len(m))
    holder = rows.holder(pairs[:, 0])
    pairs_of_process = pairs[holder == rows.shard.index]
    most = int(torch.bincount(holder).max())
    for start in range(0, most, _FIT_PAIRS):
        block = pairs_of_process[start : start + _FIT_PAIRS]
        query, partner = rows.local[block[:, 0] - rows.begin].double(), rows.fetch(block[:, 1]).double()
        m += query.sum(0)
        S.addmm_((query - partner).T, query - partner)
    return rows.sum(m) / len(pairs), rows.sum(S) / len(pairs)


def whitening_of_pairs(
    rows: FitRows, m: Float[Tensor, " from_dim"], S: Float[Tensor, "from_dim from_dim"], dim: int
) -> PrincipalComponents:
    """The mean m, the first `dim` rows of P, and the variances along these rows.

    The sign of each row of P is arbitrary; it is chosen so that the entry with the largest absolute value is positive.
    With several processes, this is a collective operation.
    """
    L = torch.linalg.cholesky(S)
    half = torch.linalg.solve_triangular(L, covariance_about(rows, m), upper=False)  # L^-1 C
    covariance = torch.linalg.solve_triangular(L, half.T.contiguous(), upper=False)  # L^-1 C L^-T
    variances, V = top_directions((covariance + covariance.T) / 2, dim)
    P = torch.linalg.solve_triangular(L.T.contiguous(), V.T.contiguous(), upper=True).T  # V^T L^-1
    return PrincipalComponents(m, with_positive_largest_entry(P), variances)


class SupervisedWhitening(WhiteningOfSums):
    """Whitens the differences of matching pairs, rotates to the directions of largest variance, and normalises.

    The whitening is learned by `fit` from embeddings and their labels, and applied to other embeddings. Matching pairs
    are images of the same class: each image is paired with the next `pairs_per_image` images of its class, cyclically
    in the order of the rows. So each image is the first image of at most `pairs_per_image` pairs, whatever the sizes of
    the classes, and the pairs are always the same. With labels of several levels, the finest level defines the classes.

    Args:
        dim: number of directions to keep, >= 1; the directions with the largest variance are kept. If None, all are
            kept.
        pairs_per_image: largest number of pairs in which an image is the first image, >= 1.

    Raises:
        ValueError: if a number is out of its range; in `fit`, if there are no labels or no pairs, `dim` is larger than
            the dimension of the rows, a number is not finite, or there is a direction in which no pair differs; when
            called, if nothing has been learned.
        TypeError: if `dim` or `pairs_per_image` is not an integer, embeddings are not floating point, or labels are not
            integers.

    Example:
        >>> import torch
        >>> from lightning_retrieval import SupervisedWhitening
        >>> labels = torch.arange(100) // 4
        >>> embeddings = torch.randn(25, 8)[labels] + torch.randn(100, 8) * torch.arange(1.0, 9.0)
        >>> whitening = SupervisedWhitening(dim=4).fit(embeddings, labels)
        >>> whitening(embeddings).shape
        torch.Size([100, 4])

    Cost:
        `fit` needs D^2 numbers in float64 and time proportional to (N + pairs) D^2 + D^3. `fit_over_processes`
        distributes the work of (N + pairs) D^2 over the processes. The processes also send the second row of each pair
        to the process that holds the first row. Images of a class are ordered by rank, then by row.

    Relations:
        `RetrievalModule(whitening=...)` applies the whitening in evaluation and prediction, and
        `lightning_retrieval.callbacks.LearnWhitening` fits it to training images and their labels before each
        validation. `PCAWhitening` needs no labels. The official code learns from unit rows; here, rows are not
        normalised before fitting.

    Source:
        Mikolajczyk and Matas, ICCV 2007; Radenovic, Tolias and Chum, TPAMI 2019, and `whitenlearn` in the code of this
        paper, filipradenovic/cnnimageretrieval-pytorch (cirtorch).
    """

    needs_labels = True

    def __init__(self, dim: PositiveInt | None = None, pairs_per_image: PositiveInt = 5) -> None:
        super().__init__(dim, power=0.0)
        self.pairs_per_image = checked(self, pairs_per_image=pairs_per_image)

    def _learn(self, rows: FitRows, labels: Tensor | None, dtype: torch.dtype) -> PrincipalComponents:
        pairs = matching_pairs(finest(_required(labels)).to(rows.local.device), self.pairs_per_image)
        if len(pairs) == 0:
            raise InvalidValue("must hold a label with several rows", argument="labels", got="no pair")
        m, S = pair_statistics(rows, pairs)
        _check_differences(S, len(pairs), dtype)
        return whitening_of_pairs(rows, m, S, self.dim or len(m))

    def _check_given(self, embeddings: Tensor, labels: Tensor | None) -> None:
        super()._check_given(embeddings, labels)
        labels = _required(labels)
        if labels.ndim == 2:
            check_nesting(labels)


def _required(labels: Tensor | None) -> Tensor:
    """The labels, of a signed type."""
    if labels is None:
        raise InvalidValue("must be given, because they define the pairs", argument="labels", got="None")
    signed: Tensor = as_int64("labels", labels)
    return signed


def _check_differences(S: Float[Tensor, "from_dim from_dim"], pairs: int, dtype: torch.dtype) -> None:
    """Raise if there is a direction in which the pairs differ only by rounding errors."""
    eigenvalues = torch.linalg.eigvalsh(S).flip(0)
    varying = count_varying(eigenvalues, dtype)
    if varying < len(eigenvalues):
        rule = f"of matching pairs must differ in each of {len(eigenvalues)} directions"
        got = f"{pairs} pairs that differ in only {varying}"
        cure = "give more rows with several of each label, or a larger pairs_per_image"
        raise InvalidValue(rule, argument="embeddings", got=got, cure=cure)
