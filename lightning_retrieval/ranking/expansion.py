"""What the papers do between embedding and ranking: several scales, whitening, query and database expansion.

In the order in which they are applied (Revaud, Almazan, Rezende, de Souza: "Learning with Average Precision: Training
Image Retrieval with a Listwise Loss", ICCV 2019, and its code, naver/deep-image-retrieval):

    several scales   normalised mean of the embeddings of resized copies of an image
    whitening        f = W (x - m) / v^power, normalised: m the mean and W, v the principal directions and variances of
                     other images' embeddings; power 0.5 divides by the standard deviation (Jegou and Chum, ECCV 2012),
                     0.25 by its square root, 0 rotates only
    database         each gallery row is replaced by d + sum over its k nearest d' of s^alpha d', normalised
    query            q + sum over its k nearest d of s^alpha d, normalised (Radenovic, Tolias, Chum, TPAMI 2019)

Symbols: s the cosine similarity, `alpha` the exponent, `k` the number of neighbours. As in the official code s is not
clamped, so a negative one with an even `alpha` counts as the positive one would; where `alpha` is not an integer its
power does not exist (there NaN), and it weighs 0 here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import interpolate

from lightning_retrieval.checks import (
    check_embeddings,
    check_integer,
    check_integers,
    check_matrix,
    check_not_negative,
    check_positive,
    check_tensor,
)
from lightning_retrieval.similarity import normalize

__all__ = [
    "DatabaseAugmentation",
    "PCAWhitening",
    "QueryExpansion",
    "database_augmentation",
    "multi_scale",
    "query_expansion",
]

_BLOCK_NUMBERS = 1 << 26  # of the scores, or of the neighbours, that are held at a time
_FIT_ROWS = 8192  # that are widened to float64 at a time


class Learned(NamedTuple):
    """Mean and principal directions of a set of embeddings, the largest variance first."""

    mean: Float[Tensor, " from_dim"]
    components: Float[Tensor, "dim from_dim"]
    variances: Float[Tensor, " dim"]  # with the divisor n - 1


class PCAWhitening(nn.Module):
    """Centres, rotates and scales embeddings so that their principal directions vary alike, then L2-normalises.

    It is learned on one set, by `fit`, and applied to others. What it has learned (`learned`: mean, components,
    variances; None before) is saved in checkpoints, and comes back without its size being known before.

    Args:
        dim: directions kept, those of the largest variance, >= 1; all where None.
        power: of the variance, by which each direction is divided, >= 0: 0.5 makes all variances equal, 0 keeps them.

    Raises:
        ValueError: if a number is out of its range; in `fit`, if there are too few rows, `dim` is larger than theirs, a
            number is not finite, or embeddings do not vary in a direction that is to be scaled; at a call, if nothing
            has been learned or the dimension is another.
        TypeError: if `dim` is not an integer, or embeddings are not floating point.

    Example:
        >>> import torch
        >>> from lightning_retrieval import PCAWhitening
        >>> embeddings = torch.randn(100, 8) * torch.arange(1.0, 9.0)
        >>> whitening = PCAWhitening(dim=4).fit(embeddings)
        >>> whitening(embeddings).shape
        torch.Size([100, 4])

    Cost:
        `fit` takes D^2 numbers in float64 and the time of N D^2 + D^3.

    Relations:
        `RetrievalModule(whitening=...)` applies it in evaluation and prediction, and
        `lightning_retrieval.callbacks.LearnWhitening` fits it on training images before each validation. Its state is
        part of `state_dict()`, but no buffer, so DDP does not send it around at each step and half precision does not
        round it.

    Source:
        Jegou and Chum, ECCV 2012; Revaud et al., ICCV 2019, whose code whitens with 0.25 in evaluation and 0.5 else.
    """

    def __init__(self, dim: int | None = None, power: float = 0.5) -> None:
        super().__init__()
        self.dim = None if dim is None else check_integer("PCAWhitening", "dim", dim, least=1)
        self.power = check_not_negative("PCAWhitening", "power", power)
        self.learned: Learned | None = None

    @torch.inference_mode(False)  # what is learned in an evaluation may be used outside of it
    @torch.no_grad()
    def fit(self, embeddings: Float[Tensor, "batch dim"]) -> "PCAWhitening":
        """Learn mean, directions and variances of these rows, in float64; returns itself.

        Args:
            embeddings: one row an image, as they will be whitened; more rows than directions that are kept.
        """
        check_embeddings("PCAWhitening", "embeddings", embeddings)
        rows, from_dim = embeddings.shape
        dim = self.dim or from_dim
        if dim > from_dim:
            raise ValueError(f"PCAWhitening: `dim` must be at most that of the embeddings, {from_dim}, got {dim}.")
        needed = dim + 1 if self.power else 2
        if rows < needed:
            raise ValueError(
                f"PCAWhitening: `embeddings` must have at least {needed} rows to learn {dim} directions from, got "
                f"{rows}; give more, or a smaller dim."
            )
        mean = embeddings.mean(0, dtype=torch.float64)
        covariance = mean.new_zeros(from_dim, from_dim)
        for block in embeddings.split(_FIT_ROWS):
            centred = block.double() - mean
            covariance.addmm_(centred.T, centred)
        values, vectors = torch.linalg.eigh(covariance / (rows - 1))  # the largest comes last
        variances, components = values[-dim:].flip(0).clamp(min=0), vectors[:, -dim:].T.flip(0)
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        if self.power:
            _refuse_flat(variances, float(values[-1]), from_dim, dtype)
        # A direction and its opposite are equally good; the same is taken on every machine.
        largest = components.gather(1, components.abs().argmax(1, keepdim=True))
        self.learned = Learned(mean.to(dtype), (components * largest.sign()).to(dtype), variances.to(dtype))
        return self

    def forward(self, embeddings: Float[Tensor, "batch from_dim"]) -> Float[Tensor, "batch dim"]:
        """Whitened unit rows, in float32 or better, also under autocast.

        Args:
            embeddings: one row an image; NaN and infinities become NaN, which metrics and indexes refuse by the id.
        """
        check_matrix("PCAWhitening", "embeddings", embeddings)
        if self.learned is None:
            raise ValueError(
                "PCAWhitening: nothing has been learned yet; call fit with embeddings of other images, or load a "
                "checkpoint that holds it."
            )
        if embeddings.shape[1] != len(self.learned.mean):
            raise ValueError(
                f"PCAWhitening: `embeddings` must have the dimension of those it was learned from, "
                f"{len(self.learned.mean)}, got {embeddings.shape[1]}."
            )
        if self.learned.mean.device != embeddings.device:
            self.learned = Learned(*(part.to(embeddings.device) for part in self.learned))
        x = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        mean, components, variances = (part.to(x.dtype) for part in self.learned)
        with torch.autocast(x.device.type, enabled=False):
            return normalize((x - mean) @ components.T / variances**self.power)

    def get_extra_state(self) -> Any:
        """What was learned, for checkpoints."""
        return None if self.learned is None else self.learned._asdict()

    def set_extra_state(self, state: Any) -> None:
        """Take it back from a checkpoint; of more directions than `dim`, the first."""
        if state is None:
            self.learned = None
            return
        found = len(state["components"])
        if self.dim is not None and found < self.dim:
            raise ValueError(
                f"PCAWhitening: `dim` must be at most the number of directions in the checkpoint, {found}, got "
                f"{self.dim}; leave it at that, or fit again."
            )
        self.learned = Learned(
            state["mean"].clone(), state["components"][: self.dim].clone(), state["variances"][: self.dim].clone()
        )

    def extra_repr(self) -> str:
        return f"dim={self.dim}, power={self.power}"

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        """Also from a checkpoint of a model that had no whitening: it is learned afterwards."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, False, *lists)


def _refuse_flat(variances: Tensor, largest: float, from_dim: int, dtype: torch.dtype) -> None:
    """Refuse directions whose variance is but that of rounding: of the rows, or of the covariance in float64."""
    rounding = max(torch.finfo(dtype).eps ** 2, torch.finfo(torch.float64).eps) * from_dim * largest
    varying = int((variances > rounding).sum())
    if varying < len(variances):
        cure = f"set dim to at most {varying}, or power=0" if varying else "the rows are all equal"
        raise ValueError(
            f"PCAWhitening: `embeddings` must vary in each of the {len(variances)} directions that are scaled, got "
            f"only {varying} in which they do; {cure}."
        )


def query_expansion(
    queries: Float[Tensor, "query dim"],
    gallery: Float[Tensor, "gallery dim"],
    alpha: float = 2.0,
    k: int = 10,
    own: Int[Tensor, " query"] | None = None,
) -> Float[Tensor, "query dim"]:
    """Alpha query expansion: each query joined by its `k` nearest gallery rows, weighted by similarity^alpha.

    Args:
        queries: one row a query, normalised here.
        gallery: one row an image, normalised here.
        alpha: exponent, >= 0; 0 weighs all neighbours alike (average query expansion).
        k: neighbours, >= 1; all where the gallery has fewer.
        own: the query's own row in the gallery, which is not among its neighbours, or -1; -1 for all where None.

    Returns:
        Unit rows.

    Raises:
        ValueError: if a number is out of its range, or shapes or dtypes do not fit.
        TypeError: if `k` or `own` is not integer, or rows are not floating point.

    Example:
        >>> import torch
        >>> from lightning_retrieval.postprocessing import query_expansion
        >>> query, gallery = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.6, 0.8], [-1.0, 0.0]])
        >>> query_expansion(query, gallery, alpha=2.0, k=1)  # (1, 0) + 0.36 (0.6, 0.8), normalised
        tensor([[0.9731, 0.2305]])

    Cost:
        One block of scores, or of neighbours, at a time; the time of the score product.

    Relations:
        `QueryExpansion` is the same with its settings stored, for `RetrievalEvaluation` and configuration files.

    Source:
        Radenovic et al., TPAMI 2019; code: naver/deep-image-retrieval, `expand_descriptors`.
    """
    who = "query_expansion"
    _check_expansion(who, alpha, k)
    check_embeddings(who, "queries", queries)
    check_embeddings(who, "gallery", gallery)
    if queries.shape[1] != gallery.shape[1] or queries.dtype != gallery.dtype:
        raise ValueError(
            f"{who}: `gallery` must have the dimension and dtype of `queries`, got {tuple(gallery.shape)} of "
            f"{gallery.dtype} for {tuple(queries.shape)} of {queries.dtype}."
        )
    if own is None:
        own = torch.full((len(queries),), -1, device=queries.device)
    check_integers(who, "own", own, len(queries), "queries")
    if bool(((own < -1) | (own >= len(gallery))).any()):
        raise ValueError(
            f"{who}: `own` must hold rows of the gallery, 0 to {len(gallery) - 1}, or -1, got {int(own.min())} to "
            f"{int(own.max())}."
        )
    return _expand(normalize(queries), normalize(gallery), alpha, k, own.long(), -torch.inf)


def database_augmentation(
    gallery: Float[Tensor, "gallery dim"], alpha: float = 2.0, k: int = 10
) -> Float[Tensor, "gallery dim"]:
    """Database-side augmentation: each gallery row joined by its `k` nearest others, weighted by similarity^alpha.

    As in the official code a row's similarity with itself counts as 0, so that it may be among its own neighbours where
    fewer than `k` others are similar at all; it then weighs 0 unless `alpha` is 0.

    Args:
        gallery: one row an image, normalised here.
        alpha: exponent, >= 0.
        k: neighbours, >= 1; all where there are fewer.

    Returns:
        Unit rows, each made of the gallery as it was.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if `k` is not an integer, or rows are not floating point.

    Example:
        >>> import torch
        >>> from lightning_retrieval.postprocessing import database_augmentation
        >>> database_augmentation(torch.tensor([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]]), alpha=2.0, k=1)
        tensor([[ 0.9731,  0.2305],
                [ 0.7682,  0.6402],
                [-1.0000,  0.0000]])

    Cost:
        One block of scores, or of neighbours, at a time; the time of the score product, N^2 D.

    Relations:
        `DatabaseAugmentation` is the same with its settings stored. Queries are expanded with the augmented gallery;
        where they are part of it, each goes into its neighbours' rows, also when it is left out of its own list.

    Source:
        Gordo et al., IJCV 2017; code: naver/deep-image-retrieval, `expand_descriptors`.
    """
    _check_expansion("database_augmentation", alpha, k)
    check_embeddings("database_augmentation", "gallery", gallery)
    rows = normalize(gallery)
    return _expand(rows, rows, alpha, k, torch.arange(len(rows), device=rows.device), 0.0)


def _expand(
    queries: Float[Tensor, "query dim"],
    gallery: Float[Tensor, "gallery dim"],
    alpha: float,
    k: int,
    own: Int[Tensor, " query"],
    own_score: float,
) -> Float[Tensor, "query dim"]:
    k = min(k, len(gallery))
    rows = max(1, _BLOCK_NUMBERS // max(1, len(gallery), k * gallery.shape[1]))
    expanded = torch.empty_like(queries)
    for start in range(0, len(queries), rows):
        block, mine = queries[start : start + rows], own[start : start + rows]
        scores = block @ gallery.T
        has = (mine >= 0).nonzero()[:, 0]
        scores[has, mine[has]] = own_score
        nearest = scores.topk(k, dim=1)
        counts = nearest.values > -torch.inf if float(alpha).is_integer() else nearest.values >= 0
        weights = torch.where(counts, nearest.values.pow(alpha), 0.0)  # (query, k)
        expanded[start : start + rows] = normalize(block + (weights[:, None] @ gallery[nearest.indices])[:, 0])
    return expanded


def _check_expansion(who: str, alpha: float, k: int) -> None:
    check_not_negative(who, "alpha", alpha)
    check_integer(who, "k", k, least=1)


@dataclass(frozen=True)
class QueryExpansion:
    """`query_expansion` with its settings stored; called with queries, gallery and perhaps `own`.

    Args:
        alpha: exponent, >= 0.
        k: neighbours, >= 1.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if `k` is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval.postprocessing import QueryExpansion
        >>> expand = QueryExpansion(alpha=3.0, k=5)
        >>> expand(torch.randn(2, 4), torch.randn(9, 4)).shape
        torch.Size([2, 4])

    Relations:
        An argument of `lightning_retrieval.callbacks.RetrievalEvaluation`.
    """

    alpha: float = 2.0
    k: int = 10

    def __post_init__(self) -> None:
        _check_expansion("QueryExpansion", self.alpha, self.k)

    def __call__(
        self,
        queries: Float[Tensor, "query dim"],
        gallery: Float[Tensor, "gallery dim"],
        own: Int[Tensor, " query"] | None = None,
    ) -> Float[Tensor, "query dim"]:
        return query_expansion(queries, gallery, self.alpha, self.k, own)


@dataclass(frozen=True)
class DatabaseAugmentation:
    """`database_augmentation` with its settings stored; called with the gallery.

    Args:
        alpha: exponent, >= 0.
        k: neighbours, >= 1.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if `k` is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval.postprocessing import DatabaseAugmentation
        >>> DatabaseAugmentation(k=5)(torch.randn(9, 4)).shape
        torch.Size([9, 4])

    Relations:
        An argument of `lightning_retrieval.callbacks.RetrievalEvaluation`.
    """

    alpha: float = 2.0
    k: int = 10

    def __post_init__(self) -> None:
        _check_expansion("DatabaseAugmentation", self.alpha, self.k)

    def __call__(self, gallery: Float[Tensor, "gallery dim"]) -> Float[Tensor, "gallery dim"]:
        return database_augmentation(gallery, self.alpha, self.k)


def multi_scale(
    embed: Callable[[Tensor], Tensor],
    images: Float[Tensor, "batch channel height width"],
    scales: Sequence[float],
    p: float = 1.0,
) -> Float[Tensor, "batch dim"]:
    """Embed images at several scales: the normalised mean of the normalised embeddings.

    Resizing is bilinear and, where it makes smaller, averages over what it drops (antialiasing), as PIL does and with
    it naver/deep-image-retrieval; filipradenovic/cnnimageretrieval-pytorch does not average.

    Args:
        embed: from images to embeddings (batch, D).
        images: of one size.
        scales: factors of height and width, each > 0; sizes are rounded.
        p: exponent of the mean over scales, > 0: 1 is the average; larger ones weigh larger entries more. Entries keep
            their signs.

    Returns:
        Unit rows.

    Raises:
        ValueError: if `scales` is empty, a number is out of its range, or images have another shape.
        TypeError: if a number is none, or images are not floating point.

    Example:
        >>> import torch
        >>> from lightning_retrieval.models import Embedder
        >>> from lightning_retrieval.postprocessing import multi_scale
        >>> embedder = Embedder("resnet18", embedding_dim=16).eval()
        >>> multi_scale(embedder, torch.rand(2, 3, 64, 64), scales=(1.0, 0.5**0.5, 0.5)).shape
        torch.Size([2, 16])

    Relations:
        `RetrievalModule(eval_scales=...)` does this in evaluation and prediction.

    Source:
        Radenovic et al., TPAMI 2019; Revaud et al., ICCV 2019.
    """
    scales = check_scales("multi_scale", "scales", scales)
    check_positive("multi_scale", "p", p)
    check_tensor("multi_scale", "images", images)
    if images.ndim != 4:
        raise ValueError(
            f"multi_scale: `images` must have shape (batch, channels, height, width), got {tuple(images.shape)}."
        )
    if not images.is_floating_point():
        raise TypeError(f"multi_scale: `images` must be floating point, got {images.dtype}.")
    total = torch.stack([_signed_power(normalize(embed(_resized(images, scale))), p) for scale in scales]).sum(0)
    return normalize(_signed_power(total, 1 / p))


def check_scales(who: str, name: str, scales: Sequence[float]) -> tuple[float, ...]:
    """Return scales as a tuple, refused unless there is one and all are finite numbers > 0."""
    if not isinstance(scales, (list, tuple)) or len(scales) == 0:
        raise ValueError(f"{who}: `{name}` must hold at least one scale, such as (1.0,), got {scales!r}.")
    return tuple(check_positive(who, name, scale) for scale in scales)


def _resized(images: Float[Tensor, "batch channel height width"], scale: float) -> Float[Tensor, "batch channel _ _"]:
    if scale == 1:
        return images
    size = [max(1, round(scale * length)) for length in images.shape[-2:]]
    return interpolate(images, size=size, mode="bilinear", antialias=True)


def _signed_power(x: Float[Tensor, "batch dim"], p: float) -> Float[Tensor, "batch dim"]:
    return x.sign() * x.abs().pow(p)
