"""What the callbacks that draw figures share: when they draw, where their PNG files are, which loggers get them."""

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.loggers import TensorBoardLogger

from lightning_retrieval.callbacks.evaluation_access import find_evaluation, sets_ranked_by_label
from lightning_retrieval.callbacks.evaluation_set import EvaluationSet
from lightning_retrieval.checks import check_integer
from lightning_retrieval.training.run_folder import run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drawing = Union[Image.Image, "Figure"]


def new_figure(width: float = 6.4, height: float = 3.6) -> "Figure":
    """Create an empty figure; sizes are in inches. It does not use pyplot, which would keep global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def save_and_log(trainer: pl.Trainer, path: Path, key: str, drawing: Drawing) -> None:
    """Write a drawing as a PNG file, and send it to every logger that accepts images.

    Args:
        trainer: with the loggers.
        path: of the file. An existing file is replaced as a whole.
        key: the name in the loggers, the same for all steps.
        drawing: an image, or a figure of matplotlib.
    """
    image = _as_image(drawing)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    image.save(partial, format="PNG")
    os.replace(partial, path)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            array = pixels.view(image.height, image.width, 3)
            logger.experiment.add_image(key, array, trainer.global_step, dataformats="HWC")
        elif hasattr(logger, "log_image"):
            logger.log_image(key=key, images=[str(path)])


def _as_image(drawing: Drawing) -> Image.Image:
    if isinstance(drawing, Image.Image):
        return drawing
    file = io.BytesIO()
    drawing.savefig(file, format="png", dpi=drawing.dpi)
    return Image.open(file).convert("RGB")


class EvaluationFigure(pl.Callback, ABC):
    """Base class of the callbacks that draw each evaluation set that `RetrievalEvaluation` has collected.

    The PNG files are in `retrieval/` of the run's log folder. Every logger that accepts images (TensorBoard, Weights &
    Biases) gets them too. A subclass defines `draw`, and may set `file_prefix`, the prefix of its file names, and
    `ranked_by_label_only = False` if it can also draw sets that are not evaluated by `RetrievalMetrics`.

    Args:
        every_n_epochs: number of epochs between two figures of the validation sets, >= 1. Test sets are always drawn.
    """

    file_prefix = ""
    ranked_by_label_only = True

    def __init__(self, every_n_epochs: int = 1) -> None:
        self.every_n_epochs = check_integer(type(self).__name__, "every_n_epochs", every_n_epochs, least=1)
        self._warned: set[str] = set()

    @abstractmethod
    def draw(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: Any, dataset: Any, prefix: str
    ) -> Drawing | None:
        """Draw one evaluation set. All processes call this; the drawing of rank 0 is written, unless it is None.

        Args:
            trainer: the Trainer that evaluates.
            pl_module: the module that is evaluated.
            metrics: the metric with the set's embeddings.
            dataset: the data set, or None if the set's data loader has none.
            prefix: of the names of the set's metrics, such as `val/` or `test/small/`.
        """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        find_evaluation(type(self).__name__, trainer)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        is_due = (trainer.current_epoch + 1) % self.every_n_epochs == 0
        if is_due or trainer.state.fn == "validate":
            self._draw_all(trainer, pl_module, "val", f"-epoch={trainer.current_epoch:03d}")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw_all(trainer, pl_module, "test", "")

    def _draw_all(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str, epoch: str) -> None:
        folder = run_folder(trainer) / "retrieval"
        for evaluation_set in self._sets(trainer):
            prefix = evaluation_set.prefix
            drawing = self.draw(trainer, pl_module, evaluation_set.metrics, evaluation_set.dataset, prefix)
            if not trainer.is_global_zero or drawing is None:
                continue
            set_name = prefix.removeprefix(f"{stage}/").rstrip("/").replace("/", "-")
            suffix = ""
            if set_name:
                suffix = f"-set={set_name}"
            path = folder / f"{self.file_prefix}{stage}{epoch}{suffix}.png"
            save_and_log(trainer, path, f"retrieval/{self.file_prefix}{stage}{suffix}", drawing)

    def _sets(self, trainer: pl.Trainer) -> Iterable[EvaluationSet]:
        owner = type(self).__name__
        if self.ranked_by_label_only:
            return sets_ranked_by_label(owner, trainer, self._warned)
        return find_evaluation(owner, trainer).sets
