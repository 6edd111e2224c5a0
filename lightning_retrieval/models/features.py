"""The features that a backbone returns, maps (N, C, H, W) or vectors (N, C), and the pooling of feature maps.

GeM: Radenovic, Tolias, Chum: "Fine-tuning CNN Image Retrieval with No Human Annotation", TPAMI 2019, eq. 3:

    f_k = (1 / |X_k| * sum over x in X_k of x^p_k)^(1 / p_k)

X_k are the activations of channel k. The exponent p_k is `p`, here the same for all channels: p = 1 gives the average
(eq. 2), and p -> infinity the maximum (eq. 1). As in the official code, activations below `eps` are replaced by `eps`.
Unlike in the official code, each channel is divided by its largest activation before the powers are computed, and the
power mean is multiplied by this activation afterwards. This changes neither the result nor its gradient, and prevents
overflow and underflow for every p.
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from lightning_retrieval.arguments import Positive, checked, numbers
from lightning_retrieval.checks import check_maps, check_positive, first_line
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.models.backbone_request import OWN
from lightning_retrieval.preparation.preparation import DEFAULT_IMAGE_SIZE

# For exponents below LEAST_P, powers round to 1 in float32.
LEAST_P, MOST_P = 1e-2, 1e6
Exponent = Annotated[float, numbers(LEAST_P, MOST_P)]


def gem(
    features: Float[Tensor, "batch channel height width"], p: Float[Tensor, "..."] | float = 3.0, eps: float = 1e-6
) -> Float[Tensor, "batch channel"]:
    """The generalized mean of each channel, computed in float32 or better and returned in the dtype of `features`.

    Args:
        features: feature maps.
        p: exponent, from 0.01 to 1e6: a number, or a tensor with one element, whose value is not checked.
        eps: a number > 0 that replaces all smaller activations, also negative ones.

    Example:
        >>> import torch
        >>> from lightning_retrieval.models import gem
        >>> features = torch.tensor([3.0, 4.0]).reshape(1, 1, 1, 2)
        >>> [round(gem(features, p).item(), 4) for p in (1.0, 2.0, 1000.0)]  # average, root of the mean square, maximum
        [3.5, 3.5355, 3.9972]
    """
    check_maps("features", features, owner="gem")
    check_positive("eps", eps, owner="gem")
    if not isinstance(p, Tensor):  # the value of a tensor is not checked, to avoid a wait for the GPU
        check_positive("p", p, least=LEAST_P, most=MOST_P, owner="gem")
    return _gem(features, p, eps)


def _gem(
    features: Float[Tensor, "batch channel height width"], p: Float[Tensor, "..."] | float, eps: float
) -> Float[Tensor, "batch channel"]:
    x = features.to(torch.promote_types(features.dtype, torch.float32)).clamp(min=eps)
    if isinstance(p, Tensor):
        p = p.to(x.dtype)
    # GeM is homogeneous (a feature map scaled by 2 has a mean scaled by 2), so `largest` needs no gradient.
    largest = x.detach().amax((-2, -1), keepdim=True)
    powers = ((x / largest).log() * p).exp()  # in less time than `pow`, whose gradients are further powers
    mean = powers.mean((-2, -1))  # (batch, channel)
    return (largest[..., 0, 0] * mean.pow(1 / p)).to(features.dtype)


class GeM(nn.Module):
    """Generalized mean pooling: between the average (p = 1) and the maximum (p -> infinity).

    Args:
        p: initial exponent, from 0.01 to 1e6. Larger values give the strongest activations more weight.
        eps: a number > 0 that replaces all smaller activations, also negative ones.
        learnable: whether `p` is a parameter, trained with the network, instead of a buffer. The keys of the state dict
            are the same in both cases.

    Raises:
        ValueError: if `p` or `eps` is out of its range; when called, if the features are not feature maps.
        TypeError: if `p` or `eps` is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.models import GeM
        >>> pool = GeM(p=2.0)
        >>> pool
        GeM(p=2, eps=1e-06, learnable=True)
        >>> pool(torch.tensor([3.0, 4.0]).reshape(1, 1, 1, 2)).detach()
        tensor([[3.5355]])

    Cost:
        A few float32 copies of the feature map are kept for the backward pass.

    Relations:
        `gem` is the underlying function. `GlobalAvgPool` and `GlobalMaxPool` are the limits of GeM, but do not clamp
        negative activations.

    Source:
        Radenovic et al., TPAMI 2019, eq. 3; the paper starts from p = 3.
    """

    p: Float[Tensor, "1"]

    def __init__(self, p: Exponent = 3.0, eps: Positive = 1e-6, learnable: bool = True) -> None:
        super().__init__()
        initial_p = torch.tensor([float(checked(self, p=p))])
        self.eps = checked(self, eps=eps)
        self.learnable = learnable
        if learnable:
            self.p = nn.Parameter(initial_p)
        else:
            self.register_buffer("p", initial_p)

    def forward(self, features: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch channel"]:
        check_maps("features", features, owner="GeM")
        return _gem(features, self.p, self.eps)

    def extra_repr(self) -> str:
        p = "?"
        if not self.p.is_meta:  # a meta tensor has no value
            p = f"{self.p.item():.6g}"
        return f"p={p}, eps={self.eps}, learnable={self.learnable}"


class GlobalAvgPool(nn.Module):
    """The average of each channel.

    Example:
        >>> import torch
        >>> from lightning_retrieval.models import GlobalAvgPool
        >>> GlobalAvgPool()(torch.tensor([-3.0, 4.0]).reshape(1, 1, 1, 2))
        tensor([[0.5000]])

    Relations:
        The result is that of `nn.AdaptiveAvgPool2d(1)`, flattened, but the backward pass is deterministic on GPUs.
    """

    def forward(self, features: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch channel"]:
        check_maps("features", features, owner="GlobalAvgPool")
        return features.mean((-2, -1))


class GlobalMaxPool(nn.Module):
    """The maximum of each channel; the gradient is divided equally between activations that tie for the maximum.

    Example:
        >>> import torch
        >>> from lightning_retrieval.models import GlobalMaxPool
        >>> GlobalMaxPool()(torch.tensor([-3.0, 4.0]).reshape(1, 1, 1, 2))
        tensor([[4.]])

    Relations:
        The result is that of `nn.AdaptiveMaxPool2d(1)`, flattened, but the backward pass is deterministic on GPUs.
    """

    def forward(self, features: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch channel"]:
        check_maps("features", features, owner="GlobalMaxPool")
        return features.amax((-2, -1))


def feature_shape(backbone: nn.Module, cure: str) -> tuple[int, ...]:
    """The shape of the features of one image, found in eval mode on meta tensors, which hold no numbers.

    Neither the random state nor any parameter, buffer or training mode of the backbone changes.

    Args:
        backbone: maps images to features; its attribute `image_size`, if any, is the size of the image.
        cure: advice in the error message if the backbone does not run on meta tensors.

    Raises:
        ValueError: if the backbone fails on meta tensors, or the features are neither maps nor vectors.
        TypeError: if the backbone does not return a tensor.
    """
    tensors = (*backbone.parameters(), *backbone.buffers())
    images = _meta_image(backbone, tensors)
    try:
        features = _features_on_meta(backbone, images)
    except Exception as error:
        raise InvalidValue(
            f"{type(backbone).__name__} could not be run on an image (a meta tensor) of shape {tuple(images.shape)} "
            f"({type(error).__name__}: {first_line(error)})",
            "Embedder",
            "backbone",
            cure=cure,
        ) from None
    check_features(features, images.shape)
    return tuple(features.shape)


def _features_on_meta(backbone: nn.Module, images: Tensor) -> Any:
    """The features of images on the meta device, in eval mode; the backbone does not change."""
    tensors = {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}
    meta_tensors = {name: value.to("meta") for name, value in tensors.items()}
    modes = [(module, module.training) for module in backbone.modules()]
    backbone.eval()
    try:
        with torch.no_grad():
            return functional_call(backbone, meta_tensors, (images,))
    finally:
        for module, mode in modes:
            module.training = mode


def check_features(features: Any, images: torch.Size) -> None:
    """Raise unless the features are a tensor of feature maps or vectors; `images` is the shape of the images."""
    if not isinstance(features, Tensor):
        raise InvalidType("must return a tensor", "Embedder", "backbone", got=type(features).__name__)
    if features.ndim not in (2, 4):
        got = f"{tuple(features.shape)} for images of shape {tuple(images)}"
        raise InvalidValue("must return feature maps (N, C, H, W) or vectors (N, C)", "Embedder", "backbone", got=got)


def patch_map(
    tokens: Float[Tensor, "batch token channel"], prefix_tokens: int
) -> Float[Tensor, "batch channel patch 1"]:
    """The patch tokens as a feature map with a single column; poolings do not depend on the order of the tokens.

    Args:
        tokens: all tokens of a transformer.
        prefix_tokens: number of tokens before the patch tokens, such as class token and registers.
    """
    return tokens[:, prefix_tokens:].transpose(1, 2).unsqueeze(-1)


def default_pooling(features: Callable[[Tensor], Any], model: nn.Module, image_size: tuple[int, int]) -> str:
    """The default pooling of a model: `"gem"` for feature maps, `"own"` for tokens (N, T, C).

    Args:
        features: maps images to the features of the model.
        model: the model that `features` belongs to.
        image_size: size of the images.
    """
    try:
        shape = feature_shape(_WithoutChannels(features, model, image_size), "")
    except (TypeError, ValueError):  # several feature maps or lists of tokens: only the model itself can pool them
        return OWN
    if len(shape) == 2:
        return OWN
    return "gem"


class _WithoutChannels(nn.Module):
    """Returns feature maps unchanged, and a tensor (N, T) for tokens (N, T, C)."""

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
    """Number of channels of a model's images, taken from its first convolution; 3 if there is none."""
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            return part.in_channels
    return 3


def height_and_width(image_size: Any) -> tuple[int, int]:
    """A size as height and width; None gives the size of most models."""
    if image_size is None:
        image_size = DEFAULT_IMAGE_SIZE
    if isinstance(image_size, int):
        return image_size, image_size
    height, width = image_size
    return height, width


def _meta_image(backbone: nn.Module, tensors: tuple[Tensor, ...]) -> Tensor:
    """A meta tensor of one image with the size, the channels and the dtype that the backbone expects."""
    size = getattr(backbone, "image_size", None)  # a ViT accepts only this size
    if not isinstance(size, (int, tuple)):
        size = None
    dtype = next((value.dtype for value in tensors if value.is_floating_point()), torch.get_default_dtype())
    return torch.empty(1, image_channels(backbone), *height_and_width(size), dtype=dtype, device="meta")
