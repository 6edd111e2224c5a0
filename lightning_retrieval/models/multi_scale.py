"""Embedding an image at several scales (Radenovic et al., TPAMI 2019; Revaud et al., ICCV 2019)."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_retrieval.checks import (
    check_finite_number,
    check_positive,
    short_repr,
)
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.ranking.rows import normalize

LEAST_SCALE, MOST_SCALE = 1e-3, 100.0
# The settings of `multi_scale` for each way to combine scales. "gem" is `--pooling gem` of dirtorch.
SCALE_POOLING: dict[str, dict[str, float]] = {"mean": {"p": 1.0, "eps": 0.0}, "gem": {"p": 3.0, "eps": 1e-6}}


def multi_scale(
    embed: Callable[[Tensor], Tensor],
    images: Float[Tensor, "batch channel height width"],
    scales: Sequence[float],
    p: float = 1.0,
    *,
    eps: float = 0.0,
) -> Float[Tensor, "batch dim"]:
    """Embed images at several scales, and return the normalised power mean of the normalised embeddings.

    With x the normalised embedding at a scale, the power mean is sympow(mean over scales of sympow(x, p), 1 / p), where
    sympow(x, p) = sign(x) max(|x|, eps)^p for each entry. With p = 1 and eps = 0, the result is the mean. With eps = 0,
    the result equals `extract_ms` of filipradenovic/cnnimageretrieval-pytorch, where p is the exponent of the pooling.
    With p = 3 and eps = 1e-6, the result equals `--pooling gem` of naver/deep-image-retrieval: every entry with an
    absolute value below eps^(1 / p) = 0.01 becomes 0.01, with its sign.

    Resizing is bilinear, with antialiasing when an image becomes smaller, as in PIL and therefore in
    naver/deep-image-retrieval; filipradenovic/cnnimageretrieval-pytorch resizes without antialiasing.

    Args:
        embed: maps images to embeddings of shape (batch, D).
        images: a batch of images, all of the same size.
        scales: factors of height and width, each from 0.001 to 100; the resulting sizes are rounded.
        p: exponent of the mean over scales, from 0.1 to 10: 1 is the average; larger values give larger entries more
            weight. Entries keep their signs.
        eps: smallest absolute value that is raised to a power, from 0 to 1. With a single scale, `eps` has no effect.

    Returns:
        One unit row per image.

    Raises:
        ValueError: if `scales` is empty, or a number is out of its range.
        TypeError: if a number has the wrong type.

    Example:
        >>> import torch
        >>> from lightning_retrieval.models import Embedder
        >>> from lightning_retrieval.models.multi_scale import multi_scale
        >>> embedder = Embedder("resnet18", embedding_dim=16).eval()
        >>> multi_scale(embedder, torch.rand(2, 3, 64, 64), scales=(1.0, 0.5**0.5, 0.5)).shape
        torch.Size([2, 16])

    Relations:
        `RetrievalModule(eval_scales=...)` embeds at several scales in evaluation and prediction.

    Source:
        Radenovic et al., TPAMI 2019; Revaud et al., ICCV 2019.
    """
    with owned_by("multi_scale"):
        scales = check_scales("scales", scales)
    check_positive("p", p, least=0.1, most=10, owner="multi_scale")
    check_finite_number("eps", eps, least=0, most=1, owner="multi_scale")
    unit_rows = []  # (batch, dim) each
    for scale in scales:
        embeddings = embed(_resized(images, scale))
        unit_rows.append(normalize(embeddings))
    if len(scales) == 1:
        return unit_rows[0]
    powers = _signed_power(torch.stack(unit_rows), p, eps)  # (scale, batch, dim)
    return normalize(_signed_power(powers.mean(0), 1 / p, eps))


def check_scales(name: str, scales: Sequence[float]) -> tuple[float, ...]:
    """Return the scales as a tuple; raise unless there is at least one and all are numbers from 0.001 to 100."""
    if not isinstance(scales, (list, tuple)) or len(scales) == 0:
        raise InvalidValue("must hold at least one scale, such as (1.0,)", argument=name, got=short_repr(scales))
    return tuple(check_positive(name, scale, least=LEAST_SCALE, most=MOST_SCALE) for scale in scales)


def _resized(images: Float[Tensor, "batch channel height width"], scale: float) -> Float[Tensor, "batch channel _ _"]:
    if scale == 1:
        return images
    size = [max(1, round(scale * length)) for length in images.shape[-2:]]
    return interpolate(images, size=size, mode="bilinear", antialias=True)


def _signed_power(x: Float[Tensor, "..."], p: float, eps: float) -> Float[Tensor, "..."]:
    return x.sign() * x.abs().clamp(min=eps).pow(p)
