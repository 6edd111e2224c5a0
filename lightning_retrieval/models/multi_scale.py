"""Embedding an image at several scales (Radenovic et al., TPAMI 2019; Revaud et al., ICCV 2019)."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_retrieval.checks import check_positive, check_tensor
from lightning_retrieval.ranking.similarity import normalize


def multi_scale(
    embed: Callable[[Tensor], Tensor],
    images: Float[Tensor, "batch channel height width"],
    scales: Sequence[float],
    p: float = 1.0,
) -> Float[Tensor, "batch dim"]:
    """Embed images at several scales: the normalised mean of the normalised embeddings.

    Resizing is bilinear, with antialiasing when an image becomes smaller, as in PIL and therefore in
    naver/deep-image-retrieval; filipradenovic/cnnimageretrieval-pytorch resizes without antialiasing.

    Args:
        embed: maps images to embeddings of shape (batch, D).
        images: a batch of images, all of the same size.
        scales: factors of height and width, each > 0; the resulting sizes are rounded.
        p: exponent of the mean over scales, > 0: 1 is the average; larger values give larger entries more weight.
            Entries keep their signs.

    Returns:
        Unit rows.

    Raises:
        ValueError: if `scales` is empty, a number is out of its range, or the images have another shape.
        TypeError: if a number has another type, or the images are not floating point.

    Example:
        >>> import torch
        >>> from lightning_retrieval.models import Embedder
        >>> from lightning_retrieval.models.multi_scale import multi_scale
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
    powers = []
    for scale in scales:
        unit_rows = normalize(embed(_resized(images, scale)))  # (batch, dim)
        powers.append(_signed_power(unit_rows, p))
    # The sum serves as the mean, since the result is normalised.
    total = torch.stack(powers).sum(0)  # (batch, dim)
    return normalize(_signed_power(total, 1 / p))


def check_scales(owner: str, name: str, scales: Sequence[float]) -> tuple[float, ...]:
    """Return the scales as a tuple; raise unless there is at least one and all are finite numbers > 0."""
    if not isinstance(scales, (list, tuple)) or len(scales) == 0:
        raise ValueError(f"{owner}: `{name}` must hold at least one scale, such as (1.0,), got {scales!r}.")
    return tuple(check_positive(owner, name, scale) for scale in scales)


def _resized(images: Float[Tensor, "batch channel height width"], scale: float) -> Float[Tensor, "batch channel _ _"]:
    if scale == 1:
        return images
    size = [max(1, round(scale * length)) for length in images.shape[-2:]]
    return interpolate(images, size=size, mode="bilinear", antialias=True)


def _signed_power(x: Float[Tensor, "batch dim"], p: float) -> Float[Tensor, "batch dim"]:
    return x.sign() * x.abs().pow(p)
