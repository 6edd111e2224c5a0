"""Backbones by name: networks from images to feature maps (N, C, H, W) or vectors (N, C), one builder per family.

| name | family | builder |
| --- | --- | --- |
| `"glyph_net"` | `GlyphNet` | here |
| `"resnet50"`, `"vit_b_16"` | torchvision | `torchvision_backbones.py` |
| `"timm/vit_small_patch14_dinov2.lvd142m"` | timm | `timm_backbones.py` |
| `"hf/facebook/dinov2-small"`, `"hf/path/of/a/folder"` | transformers | `hugging_face_backbones.py` |

To add a family, add its prefix and its builder to `FAMILIES`. A builder takes a `BackboneRequest` and returns a
`BuiltBackbone`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

from jaxtyping import Float
from torch import Tensor, nn

from lightning_retrieval.arguments import checked, integers
from lightning_retrieval.checks import first_line, short_repr
from lightning_retrieval.invalid import Invalid, InvalidValue
from lightning_retrieval.models.backbone_request import GLYPH_NET, BackboneRequest, BuiltBackbone
from lightning_retrieval.models.hugging_face_backbones import build_hugging_face
from lightning_retrieval.models.pretrained import is_rebuilding
from lightning_retrieval.models.timm_backbones import build_timm
from lightning_retrieval.models.torchvision_backbones import build_torchvision
from lightning_retrieval.plain_data import check_plain_data
from lightning_retrieval.preparation.preparation import Preparation

MOST_CHANNELS = 1024


class GlyphNet(nn.Module):
    """Six 3 x 3 convolutions, each with batch norm and ReLU, that map a glyph to a feature map of 1/8 of its size.

    It is small enough to be trained from scratch on a CPU.

    Args:
        width: number of channels of the first convolution, from 1 to 1024; the feature map has 8 times as many.
        in_channels: number of channels of the images, from 1 to 1024: 1 for grey, 3 for colour.

    Raises:
        ValueError: if `width` or `in_channels` is out of its range.
        TypeError: if `width` or `in_channels` is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval.models import GlyphNet
        >>> GlyphNet()(torch.rand(2, 1, 32, 32)).shape
        torch.Size([2, 256, 4, 4])

    Cost:
        0.6 million parameters and 12 million multiply-adds for a 32 x 32 image; both grow with the square of `width`.

    Relations:
        `Embedder("glyph_net")` uses the network with the default settings, `Embedder(GlyphNet(width=64))` with another
        width.
    """

    def __init__(
        self,
        width: Annotated[int, integers(1, MOST_CHANNELS)] = 32,
        in_channels: Annotated[int, integers(1, MOST_CHANNELS)] = 1,
    ) -> None:
        super().__init__()
        self.width = checked(self, width=width)
        self.in_channels = checked(self, in_channels=in_channels)
        self.layers = nn.Sequential()
        channels = in_channels
        for factor, stride in ((1, 2), (2, 2), (2, 1), (4, 2), (4, 1), (8, 1)):
            convolution = nn.Conv2d(channels, factor * width, 3, stride=stride, padding=1, bias=False)
            self.layers.extend([convolution, nn.BatchNorm2d(factor * width), nn.ReLU(inplace=True)])
            channels = factor * width

    def forward(
        self, images: Float[Tensor, "batch channel height width"]
    ) -> Float[Tensor, "batch channel_out height_out width_out"]:
        features: Tensor = self.layers(images)
        return features


# Libraries whose modules compute the same in each memory format.
KNOWN_LIBRARIES = ("lightning_retrieval", "torchvision", "timm")

FAMILIES: dict[str, Callable[[BackboneRequest], BuiltBackbone]] = {
    "timm/": build_timm,
    "hf/": build_hugging_face,
}


def build_backbone(request: BackboneRequest) -> BuiltBackbone:
    """Build a backbone by its name, without its classifier.

    Args:
        request: name, weights, pooling, image size and further arguments.

    Raises:
        ValueError: if the name, the weights or the pooling is unknown, `weights` are given for a backbone without
            pretrained weights, or the arguments come from a file and would fetch data or run code.
        ModuleNotFoundError: if the package of the family is not installed.
    """
    if is_rebuilding():
        check_plain_data("backbone_args", dict(request.arguments))
    build: Callable[[BackboneRequest], BuiltBackbone] = build_torchvision
    if request.name == GLYPH_NET:
        build = _build_glyph_net
    for prefix, of_family in FAMILIES.items():
        if request.name.startswith(prefix):
            build = of_family
            request = replace(request, name=request.name.removeprefix(prefix))
    try:
        return build(request)
    except Invalid:
        raise
    except (TypeError, AssertionError, AttributeError, LookupError, RuntimeError, ValueError) as error:
        argument: str = "image_size"
        given: Any = request.image_size
        if request.arguments:
            argument, given = "backbone_args", dict(request.arguments)
        if given is None:
            raise
        rule = f"must fit {request.name}"
        raise InvalidValue(rule, "Embedder", argument, got=f"{short_repr(given)} ({first_line(error)})") from None


def of_module(request: BackboneRequest, module: nn.Module) -> BuiltBackbone:
    """Use a module that the user has built as a backbone.

    Args:
        request: a request without weights or further arguments.
        module: maps images to feature maps or vectors.
    """
    check_no_weights(request.weights, f"a module ({request.name})")
    if request.arguments:
        got = f"{short_repr(dict(request.arguments))} for a module ({request.name})"
        raise InvalidValue("must be empty unless `backbone` is a name", "Embedder", "backbone_args", got=got)
    preparation = {}
    size = getattr(module, "image_size", None)
    if isinstance(size, int):
        preparation["image_size"] = size
    return BuiltBackbone(module, request.checked_pooling(), preparation, {})


def is_known_convolutional(name: str | None, module: nn.Module) -> bool:
    """Whether a backbone is a convolutional network of this library or of those whose models have names.

    Args:
        name: the name by which the backbone was built, or None.
        module: the backbone. A vision transformer has a single convolution, that of its patches.
    """
    is_known = name is not None or type(module).__module__.partition(".")[0] in KNOWN_LIBRARIES
    convolutions = 0
    for part in module.modules():
        convolutions += isinstance(part, nn.Conv2d)
    return is_known and convolutions > 1


def check_no_weights(weights: str | None, backbone: str) -> None:
    """Raise if `weights` are given for a backbone without pretrained weights."""
    if weights is not None:
        rule = "must be None unless `backbone` is the name of a torchvision, timm or Hugging Face model"
        raise InvalidValue(rule, "Embedder", "weights", got=f"{short_repr(weights)} for {backbone}")


def _build_glyph_net(request: BackboneRequest) -> BuiltBackbone:
    check_no_weights(request.weights, repr(request.name))
    pooling = request.checked_pooling()
    network = GlyphNet(**request.arguments)
    preparation = Preparation.named("glyphs").as_dict()
    if network.in_channels == 3:
        preparation |= {"channels": 3, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return BuiltBackbone(network, pooling, preparation, dict(request.arguments))
