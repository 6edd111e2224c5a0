"""What the callbacks that draw have in common: when they draw, where their PNGs lie, which loggers get them."""

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_warn

from lightning_retrieval.callbacks.evaluation import RetrievalEvaluation, _listed, _names
from lightning_retrieval.checks import check_integer
from lightning_retrieval.metrics import RandomGalleryMetrics, RetrievalMetrics
from lightning_retrieval.training.run_folder import run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = Union[Image.Image, "Figure"]


class EvaluationPicture(pl.Callback, ABC):
    """Base of the callbacks that write a PNG of what `RetrievalEvaluation` has collected of each evaluation set.

    The pictures lie in `retrieval/` of the run's log folder, and go to every logger that takes images (TensorBoard,
    Weights & Biases).

    Args:
        every_n_epochs: validation pictures are written after every so many epochs, >= 1; test pictures always.
    """

    # What names begin with, and whether only sets can be drawn in which the same label is what makes an image right.
    prefix = ""
    by_label = True

    def __init__(self, every_n_epochs: int = 1) -> None:
        self.every_n_epochs = check_integer(type(self).__name__, "every_n_epochs", every_n_epochs, least=1)
        self._left_out: set[str] = set()

    @abstractmethod
    def draw(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: Any, dataset: Any, name: str
    ) -> Picture | None:
        """The picture of one evaluation set, asked for on all ranks; only rank 0's is written.

        Args:
            trainer: that evaluates.
            pl_module: that is evaluated.
            metrics: hold the set's embeddings.
            dataset: of the set's loader, None where it has none.
            name: what stands before the names of the set's metrics, such as `val/` or `test/small/`.
        """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        evaluation_of(self, trainer)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        due = (trainer.current_epoch + 1) % self.every_n_epochs == 0
        if not trainer.sanity_checking and (due or trainer.state.fn == "validate"):
            self._write(trainer, pl_module, "val", f"-epoch={trainer.current_epoch:03d}", trainer.val_dataloaders)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, pl_module, "test", "", trainer.test_dataloaders)

    def _write(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str, epoch: str, loaders: Any) -> None:
        folder = run_folder(trainer) / "retrieval"
        for name, metrics, loader in evaluated_sets(self, trainer, stage, loaders, self._left_out, self.by_label):
            picture = self.draw(trainer, pl_module, metrics, getattr(loader, "dataset", None), name)
            if trainer.is_global_zero and picture is not None:
                of_set = name.removeprefix(f"{stage}/").rstrip("/").replace("/", "-")
                of_set = f"-set={of_set}" if of_set else ""
                path = folder / f"{self.prefix}{stage}{epoch}{of_set}.png"
                publish(trainer, path, f"retrieval/{self.prefix}{stage}{of_set}", picture)


def evaluation_of(callback: pl.Callback, trainer: pl.Trainer) -> RetrievalEvaluation:
    """The callback that collects the evaluation sets."""
    for other in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(other, RetrievalEvaluation):
            return other
    raise ValueError(
        f"{type(callback).__name__}: it shows what RetrievalEvaluation collects, which is not among the callbacks; "
        "give the Trainer both."
    )


def evaluated_sets(
    callback: pl.Callback, trainer: pl.Trainer, stage: str, loaders: Any, left_out: set[str], by_label: bool = True
) -> Iterator[tuple[str, Any, Any]]:
    """Of each evaluation set what the names of its metrics begin with, its metrics and its loader.

    Where `by_label`, sets that are measured in another way than `RetrievalMetrics` does are left out. A warning says so
    unless `left_out` says that it has been said.
    """
    names, loaders = _names(loaders), _listed(loaders)
    for index, metrics in sorted(evaluation_of(callback, trainer).metrics.items()):
        name = f"{stage}/{names[index]}"
        own_way = not isinstance(metrics, RetrievalMetrics) or isinstance(metrics, RandomGalleryMetrics)
        if not (by_label and own_way):
            yield name, metrics, loaders[index]
        elif name not in left_out:
            left_out.add(name)
            rank_zero_warn(
                f"{type(callback).__name__}: it shows evaluation sets that are measured by RetrievalMetrics; {name}, "
                f"measured by {type(metrics).__name__}, is left out."
            )


def publish(trainer: pl.Trainer, path: Path, key: str, picture: Picture) -> None:
    """Write a PNG and give it to every logger that takes images, under a name that is the same at all times."""
    image = picture if isinstance(picture, Image.Image) else _drawn(picture)
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


def new_figure(width: float = 6.4, height: float = 3.6) -> "Figure":
    """An empty figure, in inches, without pyplot, which would keep global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def _drawn(figure: "Figure") -> Image.Image:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=figure.dpi)
    return Image.open(file).convert("RGB")
