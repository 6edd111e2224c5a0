"""Faster R-CNN on a feature pyramid over any backbone of timm, with mmdetection's sizes for Pascal VOC."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FasterRCNN, FastRCNNPredictor, TwoMLPHead
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from lightning_retrieval.arguments import NotNegative, PositiveInt, checked, integers
from lightning_retrieval.checks import check_integer, first_line
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.models.pretrained import are_skipped
from lightning_retrieval.optional_packages import optional_import

LEVELS = (1, 2, 3, 4)  # timm's indices of the maps of stride 4, 8, 16 and 32
ROI_SIZE = 7
ANCHOR_SIZES = ((32,), (64,), (128,), (256,), (512,))  # in pixels, for each of `LEVELS` and for a level of stride 64


class PyramidFasterRCNN(FasterRCNN):  # type: ignore[misc]
    """torchvision's Faster R-CNN on a feature pyramid over a backbone of timm.

    The statistics and parameters of the backbone's BatchNorm layers are frozen, since batches of detectors are small.
    The layers before the map of stride 8 are frozen, too.

    Args:
        num_classes: number of classes of objects, >= 1, without the background.
        backbone_name: timm's name of a network with maps of stride 4, 8, 16 and 32, such as `"resnet50.tv_in1k"`.
        pretrained: whether timm's weights are loaded. `load_from_checkpoint` does not load them, since the checkpoint
            has all weights.
        min_size: shorter side to which images are resized, in pixels, >= 32.
        max_size: largest longer side, in pixels, >= `min_size`.
        pyramid_channels: channels of each map of the pyramid, >= 1.
        head_features: width of the two layers before the box classifier, >= 1.
        rois_per_image: number of regions that the classifier is trained with in each image, >= 1.
        score_thresh: detections with a lower score are dropped, >= 0.
        detections_per_image: largest number of detections, >= 1.

    Raises:
        ModuleNotFoundError: if timm is not installed.
        ValueError: if a number is out of its range, or the backbone lacks one of the maps.
        TypeError: if an argument has the wrong type.

    Example:
        >>> from lightning_retrieval.detection import PyramidFasterRCNN
        >>> detector = PyramidFasterRCNN(20, "resnet18", pretrained=False)
        >>> detector.roi_heads.box_predictor.cls_score.out_features
        21

    Relations:
        `TinyFasterRCNN` is small enough for a CPU. torchvision's own detectors have other backbones.
    """

    def __init__(
        self,
        num_classes: PositiveInt,
        backbone_name: str = "resnet50.tv_in1k",
        *,
        pretrained: bool = True,
        min_size: Annotated[int, integers(32)] = 600,
        max_size: int = 1000,
        pyramid_channels: PositiveInt = 256,
        head_features: PositiveInt = 1024,
        rois_per_image: PositiveInt = 512,
        score_thresh: NotNegative = 0.05,
        detections_per_image: PositiveInt = 100,
    ) -> None:
        checked(self, num_classes=num_classes)
        checked(self, min_size=min_size)
        check_integer("max_size", max_size, least=min_size, owner=type(self).__name__)
        checked(self, pyramid_channels=pyramid_channels)
        checked(self, head_features=head_features)
        checked(self, rois_per_image=rois_per_image)
        checked(self, score_thresh=score_thresh)
        checked(self, detections_per_image=detections_per_image)
        super().__init__(
            TimmPyramid(backbone_name, pretrained=pretrained, channels=pyramid_channels),
            min_size=min_size,
            max_size=max_size,
            rpn_anchor_generator=AnchorGenerator(ANCHOR_SIZES, ((0.5, 1.0, 2.0),) * len(ANCHOR_SIZES)),
            box_head=TwoMLPHead(pyramid_channels * ROI_SIZE**2, head_features),
            box_predictor=FastRCNNPredictor(head_features, num_classes + 1),  # given instead of num_classes
            box_batch_size_per_image=rois_per_image,
            box_score_thresh=score_thresh,
            box_detections_per_img=detections_per_image,
        )
        self.num_classes, self.backbone_name, self.pretrained = num_classes, backbone_name, pretrained
        self.min_size, self.max_size = min_size, max_size
        self.pyramid_channels, self.head_features = pyramid_channels, head_features
        self.rois_per_image, self.score_thresh = rois_per_image, score_thresh
        self.detections_per_image = detections_per_image


class TimmPyramid(nn.Module):
    """A backbone of timm with frozen BatchNorm, and a feature pyramid over its maps of stride 4 to 32.

    Args:
        name: timm's name of the backbone.
        pretrained: whether timm's weights are loaded, except while a checkpoint is loaded.
        channels: number of channels of each map of the pyramid.
    """

    def __init__(self, name: str, *, pretrained: bool, channels: int) -> None:
        super().__init__()
        self.body = make_body(name, pretrained)
        below = self.body.feature_info.channels()
        self.pyramid = FeaturePyramidNetwork(below, channels, extra_blocks=LastLevelMaxPool())
        self.out_channels = channels  # torchvision's detectors read this attribute
        for layer in self.body.modules():
            if isinstance(layer, _BatchNorm):
                layer.requires_grad_(False)
        self._freeze_first_layers()

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> dict[str, Tensor]:
        """Maps of stride 4 (`"0"`), 8, 16 and 32 (`"3"`), and `"pool"` of stride 64."""
        maps = self.body(images)
        named = {str(level): map_ for level, map_ in enumerate(maps)}
        pyramid: dict[str, Tensor] = self.pyramid(named)
        return pyramid

    def train(self, mode: bool = True) -> "TimmPyramid":
        """Set the training mode, except that BatchNorm layers of the backbone stay in eval mode."""
        super().train(mode)
        for layer in self.body.modules():
            if isinstance(layer, _BatchNorm):
                layer.eval()
        return self

    def _freeze_first_layers(self) -> None:
        """Freeze all layers up to the map of stride 4."""
        last = self.body.feature_info.module_name()[0]
        for name, layer in self.body.named_children():
            layer.requires_grad_(False)
            if name == last:
                break


def make_body(name: str, pretrained: bool) -> Any:
    """The backbone of timm, which returns a list of maps of stride 4, 8, 16 and 32.

    Raises:
        ModuleNotFoundError: if timm is not installed.
        ValueError: if timm does not have this backbone, or the backbone does not have these maps.
    """
    missing = 'timm must be installed for `backbone_name`: pip install "lightning-retrieval[timm]".'
    with optional_import(missing, "PyramidFasterRCNN"):
        import timm
    build = partial(timm.create_model, name, features_only=True, out_indices=LEVELS)
    is_loaded = pretrained and not are_skipped()
    try:
        if not timm.is_model(name):  # a name like "hf-hub:..." would start a download
            raise ValueError("no model of timm")
        body: Any = build(pretrained=is_loaded)
    except Exception as error:
        if is_loaded and timm.is_model(name) and _can_be_built(build):
            rule = f"must be False unless timm can load the weights of {name!r}"
            got = f"True ({first_line(error)})"
            cure = "without a network, load them once with one, after which they are in the cache"
            raise InvalidValue(rule, "PyramidFasterRCNN", "pretrained", got=got, cure=cure) from None
        rule = "must be a name that timm can build with features_only=True and maps of stride 4, 8, 16 and 32"
        cure = "such names are timm.list_models('resnet*')"
        raise InvalidValue(rule, "PyramidFasterRCNN", "backbone_name", got=f"{name!r} ({error})", cure=cure) from None
    reductions = body.feature_info.reduction()
    if reductions != [4, 8, 16, 32]:
        rule = "must have maps of stride 4, 8, 16 and 32"
        raise InvalidValue(rule, "PyramidFasterRCNN", "backbone_name", got=f"strides {reductions} of {name!r}")
    return body


def _can_be_built(build: Callable[..., Any]) -> bool:
    """Whether timm can build a backbone without weights."""
    try:
        with torch.device("meta"):
            build(pretrained=False)
    except Exception:  # timm raises errors of many types
        return False
    return True
