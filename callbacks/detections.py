"""A picture of detections, with the AP of each class."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_retrieval.arguments import PositiveInt, checked
from lightning_retrieval.backend import pl
from lightning_retrieval.callbacks.base import Callback
from lightning_retrieval.callbacks.csv_logger import run_folder
from lightning_retrieval.callbacks.curves import Drawing, new_figure, save_and_log

COLUMNS = 4
FOUND, MISSED = "tab:orange", "tab:green"


class DetectionPicture(Callback):
    """Draws the first test images with their objects and detections, and the AP50 of each class, at the end of a test.

    The file is `detections.png` in the log folder of the run. Every logger that accepts images (TensorBoard, Weights &
    Biases) gets the picture too. An object has a solid green box; a detection has a dashed orange box with its class
    and score.

    Args:
        images: number of images, >= 1.
        detections: number of detections to draw in each image, >= 1. The detections with the highest scores are drawn,
            without a score threshold, since a rank-based loss determines only the order of scores, not their values.

    Raises:
        ValueError: if a number is out of its range.

    Example:
        >>> from lightning_retrieval.callbacks import DetectionPicture
        >>> trainer = pl.Trainer(callbacks=[DetectionPicture(images=4)], logger=False, enable_checkpointing=False)

    Relations:
        This callback is for `DetectionModule`, whose `test_step` returns the detections.
    """

    def __init__(self, images: PositiveInt = 8, *, detections: PositiveInt = 5) -> None:
        self.images = checked(self, images=images)
        self.detections = checked(self, detections=detections)
        self._shown: list[tuple[Tensor, Mapping[str, Tensor], Mapping[str, Tensor]]] = []

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove the images of the last test."""
        self._shown = []

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Store the first images. If the module returns no detections, nothing is drawn."""
        if "detections" not in outputs:
            return
        found = zip(outputs["images"], outputs["targets"], outputs["detections"])
        for image, target, detections in found:
            if len(self._shown) < self.images:
                self._shown.append((image.cpu(), target, detections))

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the picture on rank 0."""
        folder = run_folder(trainer)  # a collective call, so it comes before the check of the rank
        if trainer.is_global_zero and self._shown:
            names: list[str] = getattr(pl_module, "class_names", list)()
            drawing = self._draw(names, _class_values(trainer))
            save_and_log(trainer, folder / "detections.png", "detections", drawing)
        self._shown = []

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remove the images of a test that an error has ended."""
        self._shown = []

    def _draw(self, names: Sequence[str], values: Mapping[str, float]) -> Drawing:
        rows = -(-len(self._shown) // COLUMNS)
        figure = new_figure(2.2 * COLUMNS, 2.2 * rows + 2.2)
        grid = figure.add_gridspec(rows + 1, COLUMNS)
        for number, (image, target, detections) in enumerate(self._shown):
            axes = figure.add_subplot(grid[number // COLUMNS, number % COLUMNS])
            axes.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
            axes.set_axis_off()
            for box in target["boxes"].tolist():
                _draw_box(axes, box, MISSED, "-", "")
            shown = detections["scores"].argsort(descending=True)[: self.detections]
            parts = (detections[key][shown].tolist() for key in ("boxes", "labels", "scores"))
            for box, label, score in zip(*parts):
                _draw_box(axes, box, FOUND, "--", f"{_name(names, label)} {score:.2f}")
        axes = figure.add_subplot(grid[rows, :])
        axes.bar(list(values), list(values.values()))
        axes.set_ylim(0, 1)
        axes.set_ylabel("AP50")
        return figure


def _class_values(trainer: pl.Trainer) -> dict[str, float]:
    """Return the AP50 of each class that the module has logged, with 0 instead of NaN."""
    prefix = "test/AP50/"
    found = {}
    for key, value in trainer.callback_metrics.items():
        if key.startswith(prefix):
            found[key.removeprefix(prefix)] = float(torch.nan_to_num(value))
    return found


def _name(names: Sequence[str], label: int) -> str:
    if label <= len(names):
        return names[label - 1]
    return str(label)


def _draw_box(axes: Any, box: Sequence[float], color: str, style: str, text: str) -> None:
    left, top, right, bottom = box
    axes.plot([left, right, right, left, left], [top, top, bottom, bottom, top], style, color=color, linewidth=1)
    if text:
        axes.text(left, top - 1, text, color=color, fontsize=6)
