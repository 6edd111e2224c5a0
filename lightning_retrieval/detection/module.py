"""The LightningModule that trains a torchvision detector, and evaluates it."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import Metric

from lightning_retrieval.arguments import Seed, checked
from lightning_retrieval.detection.metric import COCOMetrics
from lightning_retrieval.detection.roi_heads import RankedRoIHeads, check_roi_heads
from lightning_retrieval.detection.targets import check_targets, num_classes
from lightning_retrieval.distributed import rank
from lightning_retrieval.invalid import InvalidValue, owned, owned_by
from lightning_retrieval.plain_data import rebuild
from lightning_retrieval.random_state import seed_or_default, step_random_state
from lightning_retrieval.training.manual_training import OptimizedModule

MAX_BATCHES = 1 << 24  # maximum number of batches per epoch


class DetectionModule(OptimizedModule):
    """Trains a detector whose box classifier ranks the regions of all images of the global batch.

    The module uses automatic optimization, so flags of the Trainer such as `gradient_clip_val` and
    `accumulate_grad_batches` work. A batch is a list of images and a list of targets, in the format of torchvision's
    detectors. In evaluation, the results of `metrics` are logged; in a test, also the AP50 of each class.

    Args:
        detector: a torchvision detector with RoI heads and a box classifier, such as Faster and Mask R-CNN.
        loss: replaces the cross entropy of the box classifier; None keeps the cross entropy.
        optimizer: called with the parameter groups. It is a class, or `functools.partial(torch.optim.SGD, lr=0.1)`.
            None means `torch.optim.AdamW`, with `fused=True` where `RetrievalModule` gives it.
        lr_scheduler: called with the optimizer; None for no scheduler. A scheduler with an end needs the number of
            steps as an argument, such as `functools.partial(OneCycleLR, max_lr=0.01, total_steps=1000)`.
        lr_scheduler_interval: step the scheduler after each `"step"` or `"epoch"`.
        lr_scheduler_frequency: number of steps or epochs between two steps of the scheduler, >= 1.
        lr_scheduler_monitor: name of the logged metric for `ReduceLROnPlateau`.
        metrics: a metric with `update(detections, targets)`, which computes a dict of scalar tensors and, optionally,
            the vector `AP50_per_class`; None for `COCOMetrics`.
        seed: the regions sampled in a step are a function of (seed, epoch, batch, rank). None stands for the
            seed of `seed_everything` or, without such a seed, for 0.

    Raises:
        ValueError: if a number is out of its range; in training, if a box or a label is invalid.
        TypeError: if `detector` has no RoI heads with a box classifier, or `loss` is not a module.

    Example:
        >>> from lightning_retrieval.detection import DetectionAPLoss, DetectionModule, TinyFasterRCNN
        >>> module = DetectionModule(TinyFasterRCNN(num_classes=15), DetectionAPLoss())
        >>> module.hparams["loss"]["init_args"]["batch_memory"]
        7

    Relations:
        `RankedRoIHeads` adds the loss to a detector in your own training loop. `GlyphScenes`, `PascalVOC` and
        `CocoDetection` are data modules for this module.
    """

    def __init__(
        self,
        detector: nn.Module,
        loss: nn.Module | None = None,
        *,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        lr_scheduler: Callable[[Optimizer], LRScheduler | ReduceLROnPlateau] | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "epoch",
        lr_scheduler_frequency: int = 1,
        lr_scheduler_monitor: str = "val/AP50",
        metrics: Metric | None = None,
        seed: Seed | None = None,
    ) -> None:
        super().__init__()
        objects: dict[str, Any] = {"detector": detector, "loss": loss, "metrics": metrics}
        objects |= {"optimizer": optimizer, "lr_scheduler": lr_scheduler}
        self._keep_hyperparameters(objects, inspect.currentframe())
        with owned_by(type(self).__name__):
            self.detector = rebuild("detector", detector, nn.Module)
            check_roi_heads("detector", getattr(self.detector, "roi_heads", self.detector))
            heads: Any = self.detector.roi_heads
            if loss is not None:
                self.detector.roi_heads = RankedRoIHeads(heads, rebuild("loss", loss, nn.Module))
            self._set_optimizer(
                optimizer,
                lr_scheduler,
                interval=lr_scheduler_interval,
                frequency=lr_scheduler_frequency,
                monitor=lr_scheduler_monitor,
            )
            self.num_classes = num_classes(self.detector)
            self.metrics = None
            if metrics is not None:
                self.metrics = rebuild("metrics", metrics, Metric)  # type: ignore[type-abstract]
        self.seed = seed_or_default(checked(self, seed=seed))

    @property
    def loss(self) -> nn.Module | None:
        """The loss of the box classifier; None for the cross entropy."""
        heads = self.detector.roi_heads
        if isinstance(heads, RankedRoIHeads):
            return heads.loss
        return None

    def forward(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Detections of each image: `boxes`, `scores` and `labels`."""
        detections: list[dict[str, Tensor]] = self.detector(list(images))
        return detections

    def unpack_batch(self, batch: Any) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """Images and targets of a batch of the DataLoader. Override this method if batches have another form."""
        images, targets = batch
        return list(images), list(targets)

    def configure_optimizers(self) -> Any:
        """One optimizer over the trainable parameters, and its scheduler."""
        return self._make_optimizer({"monitor": self.lr_scheduler_monitor})

    @owned
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The sum of the detector's losses. All random choices are a function of (seed, epoch, batch, rank)."""
        images, targets = self.unpack_batch(batch)
        if self.num_classes is not None:
            check_targets(images, targets, self.num_classes)
        number = self.current_epoch * MAX_BATCHES + batch_idx
        with step_random_state(self.seed, number, rank()):
            losses: dict[str, Tensor] = self.detector(images, targets)
        total = torch.stack(list(losses.values())).sum()
        self.log("train/loss", total, prog_bar=True, batch_size=len(images))
        for name, value in losses.items():
            self.log(f"train/{name}", value, batch_size=len(images))
        return total

    def on_validation_epoch_start(self) -> None:
        """Forget the images of the last evaluation."""
        self._evaluation_metrics.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Update the metrics, and return detections, targets and images for callbacks."""
        images, targets = self.unpack_batch(batch)
        detections = self(images)
        self._evaluation_metrics.update(detections, targets)
        return {"detections": detections, "targets": targets, "images": images}

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the validation set."""
        if not self.trainer.sanity_checking:
            self._log_metrics("val")

    def on_test_epoch_start(self) -> None:
        """Forget the images of the last evaluation."""
        self._evaluation_metrics.reset()

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """The same as `validation_step`."""
        return self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the test set, and the AP50 of each class."""
        per_class = self._log_metrics("test").get("AP50_per_class", torch.zeros(0))
        for name, value in zip(self.class_names(), per_class.tolist()):
            self.log(f"test/AP50/{name}", value)

    def predict_step(self, batch: Any, batch_idx: int) -> list[dict[str, Tensor]]:
        """Detections of a batch."""
        images, _ = self.unpack_batch(batch)
        detections: list[dict[str, Tensor]] = self(images)
        return detections

    def class_names(self) -> list[str]:
        """Names of the classes, from the data module if it has `class_names`, else their labels."""
        datamodule: Any = getattr(self.trainer, "datamodule", None)
        names = getattr(datamodule, "class_names", None)
        if names is None:
            return [str(label) for label in range(1, 1 + (self.num_classes or 0))]
        return list(names)

    @property
    def _evaluation_metrics(self) -> Metric:
        """The metrics, created at the first use, because training alone does not need their backend."""
        if self.metrics is None:
            if self.num_classes is None:
                rule = "must be given, since the number of classes of the detector's box classifier is unknown"
                raise InvalidValue(rule, type(self).__name__, "metrics", cure="pass COCOMetrics(classes)")
            self.metrics = COCOMetrics(self.num_classes).to(self.device)
        return self.metrics

    def _log_metrics(self, stage: str) -> Mapping[str, Tensor]:
        """Compute the metrics, which are equal on all processes, and log the numbers."""
        result: Mapping[str, Tensor] = self._evaluation_metrics.compute()
        for name, value in result.items():
            if value.ndim == 0:
                self.log(f"{stage}/{name}", value, prog_bar=name == "AP50")
        return result
