"""What a backbone returns for an image: feature maps (N, C, H, W) or vectors (N, C), found without arithmetic."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from lightning_retrieval.checks import first_line
from lightning_retrieval.models.preparation import DEFAULT_IMAGE_SIZE


def feature_shape(owner: str, backbone: nn.Module, cure: str) -> tuple[int, ...]:
    """The shape of the features of one image, found in eval mode on meta tensors, which hold no numbers.

    Neither the random state nor any parameter, buffer or training mode of the backbone changes.

    Args:
        owner: prefix of error messages.
        backbone: from images to features; its attribute `image_size` is the size of the image.
        cure: what to do if it does not run on meta tensors, for the error message.

    Raises:
        ValueError: if the backbone fails on meta tensors, or the features are neither maps nor vectors.
        TypeError: if the backbone does not return a tensor.
    """
    tensors = {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}
    meta_tensors = {name: value.to("meta") for name, value in tensors.items()}
    images = _meta_image(backbone, tuple(tensors.values()))
    modes = [(module, module.training) for module in backbone.modules()]
    backbone.eval()
    try:
        with torch.no_grad():
            features = functional_call(backbone, meta_tensors, (images,))
    except Exception as error:
        raise ValueError(
            f"{owner}: `backbone` {type(backbone).__name__} could not be run on an image (a meta tensor) of shape "
            f"{tuple(images.shape)} ({type(error).__name__}: {first_line(error)}); {cure}."
        ) from None
    finally:
        for module, mode in modes:
            module.training = mode
    check_features(owner, features, tuple(images.shape))
    return tuple(features.shape)


def check_features(owner: str, features: Any, images: tuple[int, ...]) -> None:
    """Raise unless the features are a tensor of feature maps or vectors; `images` is the shape of the images."""
    if not isinstance(features, Tensor):
        raise TypeError(f"{owner}: `backbone` must return a tensor, got {type(features).__name__}.")
    if features.ndim not in (2, 4):
        raise ValueError(
            f"{owner}: `backbone` must return feature maps (N, C, H, W) or vectors (N, C), got "
            f"{tuple(features.shape)} for images of shape {images}."
        )


def patch_map(
    tokens: Float[Tensor, "batch token channel"], prefix_tokens: int
) -> Float[Tensor, "batch channel patch 1"]:
    """The patch tokens as a feature map with one column, since a pooling does not depend on their arrangement.

    Args:
        tokens: of a transformer.
        prefix_tokens: number of tokens before those of the patches: class token, registers.
    """
    return tokens[:, prefix_tokens:].transpose(1, 2).unsqueeze(-1)


def check_image_shape(
    owner: str, name: str, images: Tensor, backbone: nn.Module, built_for: Any, error: Exception
) -> None:
    """Raise in place of the error of a backbone if the images have another shape than that for which it was built.

    Args:
        owner: prefix of error messages.
        name: of the backbone.
        images: the batch.
        backbone: itself.
        built_for: height and width, or one number for both.
        error: of the backbone.
    """
    reason = first_line(error)
    if "memory" in reason:
        return
    channels = image_channels(backbone)
    if images.ndim != 4 or images.shape[1] != channels:
        raise ValueError(
            f"{owner}: `images` must have the shape (batch, {channels}, height, width) for {name}, got "
            f"{tuple(images.shape)}; let the transform return tensors (channels, height, width)."
        ) from None
    size = tuple(images.shape[-2:])
    built_for = height_and_width(built_for)
    if size == built_for:
        return
    raise ValueError(
        f"{owner}: `images` must have a size that {name}, built for {built_for}, takes, got {size} "
        f"({type(error).__name__}: {reason}); give Embedder the `image_size` of the images."
    ) from None


def returns_tokens(features: Callable[[Tensor], Any], model: nn.Module, image_size: tuple[int, int]) -> bool:
    """Whether the features of a model are tokens (N, T, C), not a feature map.

    Args:
        features: from images to the features of the model.
        model: of which it is a method or which it calls.
        image_size: of the images.
    """
    try:
        shape = feature_shape("", _WithoutChannels(features, model, image_size), "")
    except (TypeError, ValueError):  # several feature maps or lists of tokens, which only the model itself can pool
        return True
    return len(shape) == 2


class _WithoutChannels(nn.Module):
    """Feature maps as they are, and (N, T) for tokens (N, T, C)."""

    def __init__(self, features: Callable[[Tensor], Any], model: nn.Module, image_size: tuple[int, int]) -> None:
        super().__init__()
        self.features = features
        self.model = model
        self.image_size = image_size

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.features(images)
        if features.ndim == 3:
            return features[..., 0]
        return features


def image_channels(model: nn.Module) -> int:
    """Number of channels of the images that a model takes: that of its first convolution, 3 if it has none."""
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            return part.in_channels
    return 3


def height_and_width(image_size: Any) -> tuple[int, int]:
    """A size as height and width; that of most models if it is None."""
    if image_size is None:
        image_size = DEFAULT_IMAGE_SIZE
    if isinstance(image_size, int):
        return image_size, image_size
    height, width = image_size
    return height, width


def _meta_image(backbone: nn.Module, tensors: tuple[Tensor, ...]) -> Tensor:
    """A meta tensor of one image with the size, the channels and the dtype that the backbone expects."""
    size = getattr(backbone, "image_size", None)  # a ViT accepts no other size
    if not isinstance(size, (int, tuple)):
        size = None
    dtype = torch.get_default_dtype()
    for value in tensors:
        if value.is_floating_point():
            dtype = value.dtype
            break
    return torch.empty(1, image_channels(backbone), *height_and_width(size), dtype=dtype, device="meta")
