"""PCA whitening of embeddings (Jegou and Chum, ECCV 2012), as in naver/deep-image-retrieval.

    f = W (x - m) / v^power, normalised

m is the mean and W, v are the principal directions and variances of other images' embeddings. Power 0.5 divides by the
standard deviation, 0.25 by its square root, 0 rotates only.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_retrieval.checks import check_embeddings, check_integer, check_matrix, check_not_negative
from lightning_retrieval.ranking.similarity import normalize

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
