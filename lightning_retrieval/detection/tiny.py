"""A Faster R-CNN that is small enough to train on a CPU in a minute, for images of about 112 pixels."""

from collections import OrderedDict
from typing import Annotated

from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FasterRCNN, FastRCNNPredictor, TwoMLPHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign

from lightning_retrieval.arguments import NotNegative, PositiveInt, checked, integers

PYRAMID_CHANNELS = 32
ROI_SIZE = 5
ROI_FEATURES = 128


class TinyFasterRCNN(FasterRCNN):  # type: ignore[misc]
    """torchvision's Faster R-CNN on a feature pyramid of strides 4 and 8.

    Args:
        num_classes: number of classes of objects, >= 1, without the background.
        width: channels of the first layer, >= 1.
        image_size: length of the longer side to which images are resized, in pixels, >= 32.
        rois_per_image: number of regions that the classifier is trained with in each image, >= 1.
        score_thresh: detections with a lower score are dropped, >= 0.
        detections_per_image: largest number of detections, >= 1.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if a number has the wrong type.

    Example:
        >>> import torch
        >>> from lightning_retrieval.detection import TinyFasterRCNN
        >>> detector = TinyFasterRCNN(num_classes=15).eval()
        >>> sorted(detector([torch.rand(3, 112, 112)])[0])
        ['boxes', 'labels', 'scores']

    Relations:
        This detector has the interface and the state of torchvision's detectors, so `DetectionModule` can train it.
    """

    def __init__(
        self,
        num_classes: PositiveInt,
        *,
        width: PositiveInt = 16,
        image_size: Annotated[int, integers(32)] = 112,
        rois_per_image: PositiveInt = 32,
        score_thresh: NotNegative = 0.01,
        detections_per_image: PositiveInt = 100,
    ) -> None:
        checked(self, num_classes=num_classes)
        checked(self, image_size=image_size)
        checked(self, rois_per_image=rois_per_image)
        checked(self, score_thresh=score_thresh)
        checked(self, detections_per_image=detections_per_image)
        checked(self, width=width)
        levels = ["0", "1"]
        super().__init__(
            TinyPyramid(width),
            min_size=image_size,
            max_size=image_size,
            rpn_anchor_generator=AnchorGenerator(((14, 20), (28, 40)), ((0.7, 1.0, 1.4),) * 2),
            rpn_pre_nms_top_n_train=200,
            rpn_pre_nms_top_n_test=200,
            rpn_post_nms_top_n_train=100,
            rpn_post_nms_top_n_test=50,
            rpn_batch_size_per_image=64,
            box_roi_pool=MultiScaleRoIAlign(levels, ROI_SIZE, sampling_ratio=1),
            box_head=TwoMLPHead(PYRAMID_CHANNELS * ROI_SIZE**2, ROI_FEATURES),
            box_predictor=FastRCNNPredictor(ROI_FEATURES, num_classes + 1),  # given instead of num_classes
            box_batch_size_per_image=rois_per_image,
            box_score_thresh=score_thresh,
            box_detections_per_img=detections_per_image,
        )
        self.num_classes, self.width, self.image_size = num_classes, width, image_size
        self.rois_per_image, self.score_thresh = rois_per_image, score_thresh
        self.detections_per_image = detections_per_image


class TinyPyramid(nn.Module):
    """Three convolutions with BatchNorm, and a feature pyramid over the last two.

    Args:
        width: channels of the first convolution; each further convolution has twice as many.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = _convolution(3, width)
        self.stride_4 = _convolution(width, 2 * width)
        self.stride_8 = _convolution(2 * width, 4 * width)
        self.pyramid = FeaturePyramidNetwork([2 * width, 4 * width], PYRAMID_CHANNELS)
        self.out_channels = PYRAMID_CHANNELS  # torchvision's detectors read this attribute

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> dict[str, Tensor]:
        """Maps of stride 4 (`"0"`) and 8 (`"1"`)."""
        fine = self.stride_4(self.stem(images))
        maps: dict[str, Tensor] = self.pyramid(OrderedDict([("0", fine), ("1", self.stride_8(fine))]))
        return maps


def _convolution(in_channels: int, out_channels: int) -> nn.Sequential:
    convolution = nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.ReLU())
