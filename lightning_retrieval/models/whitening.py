"""PCA whitening of embeddings (Jegou and Chum, ECCV 2012), as in naver/deep-image-retrieval.

    f = W (x - m) / v^power, normalised

The mean m, the principal directions W and the variances v are those of the embeddings from which the whitening is
learned. Power 0.5 divides by the standard deviation, 0.25 by its square root, and 0 only rotates.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_retrieval.arguments import Fraction, PositiveInt, checked, settings_repr
from lightning_retrieval.checks import check_integers, check_matrix
from lightning_retrieval.distributed import (
    UNSHARDED,
    Shard,
    fetch_rows,
    gather_rows,
    rank,
    sum_over_ranks,
    together,
    world_size,
)
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.ranking.rows import float64_device, normalize

_FIT_ROWS = 8192  # number of rows that are converted to float64 at a time


@dataclass(frozen=True)
class FitRows:
    """The rows from which a whitening is learned, sharded over all processes in rank order.

    Args:
        local: the rows of this process.
        counts: number of rows of each process.
        shard: the shard of this process.
    """

    local: Float[Tensor, "local dim"]
    counts: Sequence[int]
    shard: Shard = UNSHARDED

    def __len__(self) -> int:
        return sum(self.counts)

    @cached_property
    def begin(self) -> int:
        """The position of the first row of this process."""
        return sum(self.counts[: self.shard.index])

    def sum(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The sum of values over all processes. With several processes, this is a collective operation."""
        if self.shard.count == 1:
            return values
        return sum_over_ranks(values)

    def holder(self, positions: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
        """The process that holds each of these rows."""
        ends = torch.tensor(list(accumulate(self.counts)), device=positions.device)
        return torch.searchsorted(ends, positions.contiguous(), right=True)

    def fetch(self, positions: Int[Tensor, " row"]) -> Float[Tensor, "row dim"]:
        """The rows at these positions. Each process may give different positions.

        With several processes, this is a collective operation.
        """
        if self.shard.count == 1:
            return self.local[positions]
        process = self.holder(positions)
        starts = torch.tensor([0, *accumulate(self.counts)], device=positions.device)
        return fetch_rows(self.local, process, positions - starts[process], self.shard)


def rows_of_one_process(rows: Float[Tensor, "row dim"]) -> FitRows:
    """Rows that only this process has."""
    return FitRows(rows, [len(rows)])


def rows_of_all_processes(rows: Float[Tensor, "local dim"]) -> FitRows:
    """The rows of all processes. With several processes, this is a collective operation."""
    if world_size() == 1:
        return rows_of_one_process(rows)
    counts = gather_rows(torch.tensor([len(rows)], device=rows.device), [1] * world_size()).tolist()
    return FitRows(rows, counts, Shard(rank(), world_size(), device=rows.device))


class PrincipalComponents(NamedTuple):
    """Mean, principal directions and variances of a set of embeddings, in order of decreasing variance."""

    mean: Float[Tensor, " from_dim"]
    components: Float[Tensor, "dim from_dim"]
    variances: Float[Tensor, " dim"]  # computed with the divisor n - 1


def principal_components(rows: FitRows, dim: int) -> PrincipalComponents:
    """The `dim` principal directions of the rows with the largest variance, computed and returned in float64.

    The sign of a direction is arbitrary; it is chosen so that the entry with the largest absolute value is positive, so
    that all machines choose the same sign. With several processes, this is a collective operation.
    """
    mean = rows.sum(rows.local.sum(0, dtype=torch.float64)) / len(rows)
    variances, components = top_directions(covariance_about(rows, mean), dim)
    return PrincipalComponents(mean, with_positive_largest_entry(components), variances)


def covariance_about(rows: FitRows, mean: Float[Tensor, " from_dim"]) -> Float[Tensor, "from_dim from_dim"]:
    """The second moments of the rows about `mean`, with the divisor n - 1, in float64 and block by block.

    With several processes, this is a collective operation.
    """
    scatter = mean.new_zeros(len(mean), len(mean))
    for block in rows.local.split(_FIT_ROWS):
        centred = block.double() - mean
        scatter.addmm_(centred.T, centred)
    return rows.sum(scatter) / (len(rows) - 1)


def top_directions(
    covariance: Float[Tensor, "from_dim from_dim"], dim: int
) -> tuple[Float[Tensor, " dim"], Float[Tensor, "dim from_dim"]]:
    """The `dim` largest variances in descending order, and their directions."""
    eigenvalues, eigenvectors = torch.linalg.eigh(covariance)  # in ascending order
    return eigenvalues[-dim:].flip(0).clamp(min=0), eigenvectors[:, -dim:].T.flip(0)


def with_positive_largest_entry(components: Float[Tensor, "dim from_dim"]) -> Float[Tensor, "dim from_dim"]:
    """Choose the sign of each row so that its entry with the largest absolute value is positive on all machines."""
    largest_entry = components.gather(1, components.abs().argmax(1, keepdim=True))  # (dim, 1)
    return components * largest_entry.sign()


def whiten(
    embeddings: Float[Tensor, "batch from_dim"], learned: PrincipalComponents, power: float
) -> Float[Tensor, "batch dim"]:
    """W (x - m) / v^power, normalised, in float32 or better, also under autocast."""
    x = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    mean, components, variances = (part.to(x.dtype) for part in learned)
    with torch.autocast(x.device.type, enabled=False):
        return normalize((x - mean) @ components.T / variances**power)


class Whitening(nn.Module):
    """Base class of whitenings, which are learned from one set of embeddings and applied to others.

    A subclass implements `fit`, which sets `learned`. `RetrievalModule` and `LearnWhitening` accept every whitening.
    The state is part of `state_dict()`, but not a buffer, so that DDP does not broadcast it at each step and half
    precision does not round it. The state can be loaded without knowing its size in advance.

    Args:
        dim: number of directions to keep, >= 1; the first directions are kept. If None, all are kept.
        power: exponent of the variance by which each direction is divided.
    """

    def __init__(self, dim: PositiveInt | None, power: Fraction) -> None:
        super().__init__()
        self.dim = checked(self, dim=dim)
        self.power = checked(self, power=power)
        self.learned: PrincipalComponents | None = None
        self.is_awaited = False  # whether a callback will learn it in the current run

    def extra_repr(self) -> str:
        return settings_repr(self)

    def fit(
        self, embeddings: Float[Tensor, "batch dim"], labels: Int[Tensor, "batch ..."] | None = None
    ) -> "Whitening":
        """Learn from these rows, and return the whitening.

        Args:
            embeddings: one row per image, from the same model as the embeddings to whiten.
            labels: labels of the images, for whitenings that need labels.
        """
        raise NotImplementedError

    @owned
    def fit_over_processes(
        self, embeddings: Float[Tensor, "batch dim"], labels: Int[Tensor, "batch ..."] | None = None
    ) -> "Whitening":
        """Learn from the rows of all processes, and return the whitening. Each process passes its shard of the rows.

        This is a collective operation. Unless a subclass overrides this method, each process gathers all rows for
        `fit`.

        Args:
            embeddings: one row per image of this process, from the same model as the embeddings to whiten.
            labels: labels of these images, for whitenings that need labels.
        """
        together(partial(check_matrix, "embeddings", embeddings))  # raises on all processes if one has invalid rows
        if labels is not None:
            labels = gather_rows(labels)
        return self.fit(gather_rows(embeddings), labels)

    def forward(self, embeddings: Float[Tensor, "batch from_dim"]) -> Float[Tensor, "batch dim"]:
        """Return the whitened unit rows, in float32 or better, also under autocast.

        Args:
            embeddings: one row per image. A row with NaN or infinities becomes NaN, so that metrics and indexes can
                raise an error with its id.
        """
        if self.learned is None:
            cure = "call fit with embeddings of other images, or load a checkpoint of a fitted whitening"
            raise InvalidValue("nothing has been learned yet", type(self).__name__, cure=cure)
        if self.learned.mean.device != embeddings.device:
            self.learned = PrincipalComponents(*(part.to(embeddings.device) for part in self.learned))
        return whiten(embeddings, self.learned, self.power)

    def warn_of_plain(self, embeddings: Float[Tensor, "batch from_dim"]) -> None:
        """Warn that these embeddings are used without whitening, unless a callback will learn it in this run.

        Args:
            embeddings: embeddings of a module whose whitening has learned nothing.
        """
        if self.is_awaited or rank() > 0:
            return
        warnings.warn(
            f"{type(self).__name__}: nothing has been learned yet, so embeddings are used without whitening, with "
            f"{embeddings.shape[-1]} dimensions; give the Trainer the callback LearnWhitening(), or call `fit` of the "
            "whitening with embeddings of training images, before you evaluate or index.",
            stacklevel=2,
        )

    def get_extra_state(self) -> Any:
        """The learned values, for checkpoints."""
        if self.learned is None:
            return None
        return self.learned._asdict()

    def set_extra_state(self, state: Any) -> None:
        """Restore the learned values of a checkpoint, but at most the first `dim` directions."""
        if state is None:
            self.learned = None
            return
        found = len(state["components"])
        if self.dim is not None and found < self.dim:
            rule = f"must be at most the number of directions in the checkpoint, {found}"
            cure = f"set it to at most {found}, or fit again"
            raise InvalidValue(rule, type(self).__name__, "dim", got=self.dim, cure=cure)
        self.learned = PrincipalComponents(
            mean=state["mean"].clone(),
            components=state["components"][: self.dim].clone(),
            variances=state["variances"][: self.dim].clone(),
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        """Load the state. The checkpoint may lack a whitening, which must then be learned."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, False, *lists)


class WhiteningOfSums(Whitening):
    """Base class of whitenings that are learned from sums over rows, which can be computed shard by shard."""

    needs_labels = False

    @owned
    @torch.inference_mode(False)  # values learned in an evaluation may also be used in training
    @torch.no_grad()
    def fit(
        self, embeddings: Float[Tensor, "batch dim"], labels: Int[Tensor, "batch ..."] | None = None
    ) -> "Whitening":
        """Learn from these rows, in float64, and return the whitening.

        Args:
            embeddings: one row per image, from the same model as the embeddings to whiten.
            labels: labels of the images, possibly of several levels, the finest first. They are always validated, but
                only some whitenings use them.
        """
        self._check_given(embeddings, labels)
        return self._fit(embeddings, labels, rows_of_one_process)

    @owned
    @torch.inference_mode(False)
    @torch.no_grad()
    def fit_over_processes(
        self, embeddings: Float[Tensor, "batch dim"], labels: Int[Tensor, "batch ..."] | None = None
    ) -> "Whitening":
        """Learn from the rows of all processes, and return the whitening. Each process passes its shard of the rows.

        This is a collective operation. Each process sends only sums, which are D^2 + D numbers.

        Args:
            embeddings: one row per image of this process, from the same model as the embeddings to whiten.
            labels: labels of these images. They are always validated, but only some whitenings use them.
        """
        if type(self).fit is not WhiteningOfSums.fit:  # a subclass overrides `fit`, which needs all rows
            return super().fit_over_processes(embeddings, labels)
        together(partial(self._check_given, embeddings, labels))  # raises on all processes if one has invalid rows
        if self.needs_labels and labels is not None:
            labels = gather_rows(labels)
        return self._fit(embeddings, labels, rows_of_all_processes)

    def _fit(
        self,
        embeddings: Float[Tensor, "batch from_dim"],
        labels: Int[Tensor, "row ..."] | None,
        of_rows: Callable[[Tensor], FitRows],
    ) -> "Whitening":
        """Learn from embeddings and, if needed, from the labels of the rows of all processes."""
        rows = of_rows(embeddings.to(float64_device(embeddings.device)))
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        found = self._learn(rows, labels, dtype)
        self.learned = PrincipalComponents(*(part.to(dtype).to(embeddings.device) for part in found))
        return self

    def _check_given(self, embeddings: Tensor, labels: Tensor | None) -> None:
        """Raise unless the rows and labels of this process are valid."""
        check_matrix("embeddings", embeddings, finite=True)
        if labels is not None:
            check_integers("labels", labels, len(embeddings), "embeddings", levels=True)
        from_dim = embeddings.shape[1]
        if self.dim is not None and self.dim > from_dim:
            raise InvalidValue(f"must be at most that of the embeddings, {from_dim}", argument="dim", got=self.dim)

    def _learn(self, rows: FitRows, labels: Tensor | None, dtype: torch.dtype) -> PrincipalComponents:
        """Compute the learned values from all rows, in float64; `dtype` is the original dtype of the rows."""
        raise NotImplementedError


class PCAWhitening(WhiteningOfSums):
    """Centres, rotates and scales embeddings so that all principal directions have equal variance, and normalises them.

    The whitening is learned from one set of embeddings by `fit` and applied to others. The result (`learned`: mean,
    components and variances; None before `fit`) is saved in checkpoints, and can be loaded without knowing its size in
    advance.

    Args:
        dim: number of directions to keep, >= 1; the directions with the largest variance are kept. If None, all are
            kept.
        power: exponent of the variance by which each direction is divided, from 0 to 1: 0.5 makes all variances equal,
            0 keeps them.

    Raises:
        ValueError: if a number is out of its range; in `fit`, if there are too few rows, `dim` is larger than their
            dimension, a number is not finite, or a direction that is to be scaled has no variance beyond rounding
            errors; when called, if nothing has been learned.
        TypeError: if `dim` is not an integer, or the embeddings are not floating point.

    Example:
        >>> import torch
        >>> from lightning_retrieval import PCAWhitening
        >>> embeddings = torch.randn(100, 8) * torch.arange(1.0, 9.0)
        >>> whitening = PCAWhitening(dim=4).fit(embeddings)
        >>> whitening(embeddings).shape
        torch.Size([100, 4])

    Cost:
        `fit` needs D^2 numbers in float64 and time proportional to N D^2 + D^3. `fit_over_processes` distributes the
        work of N D^2 over the processes.

    Relations:
        `RetrievalModule(whitening=...)` applies the whitening in evaluation and prediction, and
        `lightning_retrieval.callbacks.LearnWhitening` fits it to training images before each validation. The state of
        the whitening is part of `state_dict()`, but not a buffer, so that DDP does not broadcast it at each step and
        half precision does not round it. `SupervisedWhitening` learns from matching pairs instead.

    Source:
        Jegou and Chum, ECCV 2012; Revaud et al., ICCV 2019, whose code uses the power 0.25 in evaluation and 0.5
        otherwise.
    """

    def __init__(self, dim: PositiveInt | None = None, power: Fraction = 0.5) -> None:
        super().__init__(dim, power)

    def _learn(self, rows: FitRows, labels: Tensor | None, dtype: torch.dtype) -> PrincipalComponents:
        from_dim = rows.local.shape[1]
        dim = self.dim or from_dim
        needed = 2
        if self.power:  # because n rows vary in at most n - 1 directions
            needed = dim + 1
        if len(rows) < needed:
            rule = f"must have at least {needed} rows to learn {dim} directions from"
            raise InvalidValue(rule, argument="embeddings", got=len(rows), cure="give more rows, or a smaller dim")
        found = principal_components(rows, dim)
        if self.power:
            _check_variances(found.variances, from_dim, dtype)
        return found


def count_varying(variances: Float[Tensor, " dim"], dtype: torch.dtype, from_dim: int | None = None) -> int:
    """The number of variances that are larger than what rounding alone causes.

    Args:
        variances: variances in descending order.
        dtype: type of the rows, whose rounding errors count.
        from_dim: dimension of the rows; by default the number of variances.
    """
    relative = max(torch.finfo(dtype).eps ** 2, torch.finfo(torch.float64).eps)
    rounding = relative * (from_dim or len(variances)) * float(variances[0])
    return int((variances > rounding).sum())


def _check_variances(variances: Float[Tensor, " dim"], from_dim: int, dtype: torch.dtype) -> None:
    """Raise if rounding the rows to `dtype`, or their covariance to float64, explains a variance by itself."""
    varying = count_varying(variances, dtype, from_dim)
    if varying == len(variances):
        return
    cure = f"set dim to at most {varying}, or power=0"
    if varying == 0:
        cure = "the rows are all equal"
    rule = f"must vary in each of the {len(variances)} directions that are scaled"
    raise InvalidValue(rule, argument="embeddings", got=f"only {varying} in which they do", cure=cure)
