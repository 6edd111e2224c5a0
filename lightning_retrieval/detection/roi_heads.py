"""The RoI heads of a torchvision detector, with another loss instead of the cross entropy of the box classifier.

torchvision computes the cross entropy in a function that cannot be replaced. So a subclass takes over the layers of the
original heads, records the labels of the sampled RoIs and the logits of the classifier, and replaces one entry of the
losses.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads

from lightning_retrieval.checks import short_repr
from lightning_retrieval.detection.targets import check_class_labels
from lightning_retrieval.invalid import InvalidType, owned, owned_by

NEEDED = "RoI heads with a box classifier, as those of torchvision's FasterRCNN and MaskRCNN"


class RankedRoIHeads(RoIHeads):  # type: ignore[misc]
    """RoI heads that train the box classifier with a loss of ranked lists. Detection is unchanged.

    To use them, assign `detector.roi_heads = RankedRoIHeads(detector.roi_heads, DetectionAPLoss())`. The layers of the
    original heads keep their names, so checkpoints of the plain detector can be loaded.

    Args:
        roi_heads: the heads of a detector; their layers are shared, and the heads do not change.
        loss: called as `loss(class_logits, labels)` with the RoIs of the batch.

    Raises:
        TypeError: if `roi_heads` are not RoI heads, or `loss` is not a module.
        ValueError: in training, if the label of an object is not from 1 to C.

    Example:
        >>> from lightning_retrieval.detection import DetectionAPLoss, RankedRoIHeads, TinyFasterRCNN
        >>> detector = TinyFasterRCNN(num_classes=3)
        >>> detector.roi_heads = RankedRoIHeads(detector.roi_heads, DetectionAPLoss())

    Relations:
        `DetectionModule` does this for its `detector`.
    """

    def __init__(self, roi_heads: nn.Module, loss: nn.Module) -> None:
        with owned_by("RankedRoIHeads"):
            check_roi_heads("roi_heads", roi_heads)
        if not isinstance(loss, nn.Module):
            raise InvalidType(
                "must be a module such as DetectionAPLoss", "RankedRoIHeads", "loss", got=short_repr(loss)
            )
        nn.Module.__init__(self)
        for name, value in vars(roi_heads).items():
            if isinstance(value, dict):  # layers, parameters, hooks: the original heads must not get the loss
                value = value.copy()
            self.__dict__[name] = value
        self.loss = loss
        self.register_load_state_dict_post_hook(_ignore_missing_memory)

    @owned
    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """The detections in evaluation, or the losses in training.

        Args:
            features: maps of the backbone.
            proposals: boxes of each image.
            image_shapes: height and width of each image.
            targets: boxes and labels of each image, in training.
        """
        if not self.training or targets is None:
            found: tuple[list[dict[str, Tensor]], dict[str, Tensor]] = super().forward(
                features, proposals, image_shapes, targets
            )
            return found
        notes = _Notes(torch.cat([target["labels"] for target in targets]))
        self._notes = notes
        hook = self.box_predictor.register_forward_hook(notes.add_logits)
        try:
            detections, losses = super().forward(features, proposals, image_shapes, targets)
        finally:
            hook.remove()
            del self._notes  # tensors with a graph cannot be copied
        losses["loss_classifier"] = self.loss(notes.class_logits, notes.labels)
        return detections, losses

    def select_training_samples(self, proposals: Any, targets: Any) -> Any:
        """Like torchvision's method, but records the labels of the samples.

        Args:
            proposals: boxes of each image.
            targets: boxes and labels of each image.
        """
        samples = super().select_training_samples(proposals, targets)
        self._notes.labels = torch.cat(samples[2])
        return samples


class _Notes:
    """The inputs of the loss, recorded in one forward pass of the heads."""

    labels: Tensor
    class_logits: Tensor

    def __init__(self, object_labels: Tensor) -> None:
        self.object_labels = object_labels

    def add_logits(self, box_predictor: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
        """Record the logits, and raise for invalid labels before torchvision's own loss would fail on them."""
        self.class_logits = outputs[0]
        check_class_labels(self.object_labels, 1, self.class_logits.shape[1] - 1)


def check_roi_heads(name: str, value: Any) -> None:
    """Raise unless `value` is a module of RoI heads with a box classifier.

    Args:
        name: name of the argument.
        value: value of the argument.
    """
    if isinstance(value, RoIHeads):
        return
    hint = ""
    if hasattr(value, "anchor_generator") and not hasattr(value, "roi_heads"):
        hint = ", which classifies anchors directly; take a detector of two stages such as fasterrcnn_resnet50_fpn"
    elif hasattr(value, "roi_heads"):
        hint = "; give its attribute `roi_heads`"
    raise InvalidType(f"must be {NEEDED}", argument=name, got=f"{type(value).__name__}{hint}")


def _ignore_missing_memory(heads: nn.Module, incompatible_keys: Any) -> None:
    """Allow strict loading of a checkpoint of the plain detector, which lacks the memory of past scores."""
    missing: list[str] = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if not (".loss." in f".{key}" and key.endswith("_extra_state"))]
