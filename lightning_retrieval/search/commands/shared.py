"""Options that several commands share; no torch is imported."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.paths import ExistingPath


@dataclass(frozen=True)
class PretrainedBackbone:
    """A pretrained network in place of a checkpoint: its embeddings are the pooled features of the backbone.

    Args:
        backbone: as for `Embedder`, like the other arguments.
        weights: `"DEFAULT"`, the name of other weights, or the path of a file.
        image_size: height and width of the images; if None, the size that belongs to the weights.
        preparation: settings of the preparation that differ from those of the weights.
    """

    backbone: str
    weights: str
    image_size: int | None = None
    preparation: dict[str, Any] | None = None

    def prepared_as(self, recorded: dict[str, Any] | None) -> "PretrainedBackbone":
        """The same backbone for the recorded preparation of earlier images, unless settings are given here."""
        if self.image_size is not None or self.preparation is not None:
            return self
        return replace(self, preparation=recorded)


@dataclass(frozen=True)
class ModelOptions:
    """The options that name a model, and how images are prepared for it.

    Args:
        checkpoint: checkpoint that `fit` wrote, or the folder of its runs, whose newest best.ckpt is used. For
            embeddings or an index, the checkpoint that made them if it was moved, or another one with the same network.
        backbone: in place of --checkpoint, a pretrained network of torchvision, timm/NAME or hf/NAME; embeddings are
            its pooled features.
        weights: with --backbone, DEFAULT, the name of other weights, which are downloaded once, or a file of weights.
        image_size: with --backbone, height and width of the images; by default those of the weights.
        preparation: with --backbone, how else images are prepared than for the weights, as {"resize": 224}.
        import_module: module with classes of the checkpoint that are not of this library, torch, torchvision, timm or
            pytorch_metric_learning; it is imported, which runs its code. May be repeated.
    """

    checkpoint: ExistingPath | None = None
    backbone: str | None = None
    weights: str | None = None
    image_size: int | None = None
    preparation: dict[str, Any] | None = None
    import_module: Sequence[str] = ()

    def given(self, transform: str | None = None) -> Path | PretrainedBackbone | None:
        """The checkpoint or the `PretrainedBackbone` that the user has given; None without one.

        Raises:
            ValueError: if options of a backbone are given without `backbone` or `weights`, with a checkpoint, or with
                a transform that replaces the preparation.
        """
        if self.import_module:
            from lightning_retrieval.plain_data import import_named_module

            for name in self.import_module:
                import_named_module("import_module", name)
        of_backbone = {
            "backbone": self.backbone,
            "weights": self.weights,
            "image_size": self.image_size,
            "preparation": self.preparation,
        }
        names = [name for name, value in of_backbone.items() if value is not None]
        if not names:
            return self.checkpoint
        if self.checkpoint is not None:
            rule = "must not be given with `checkpoint`, which is another model"
            raise InvalidValue(rule, argument=names[0], cure="give one of them")
        if self.backbone is None or self.weights is None:
            missing = "backbone" if self.backbone is None else "weights"
            raise InvalidValue(f"must be given with `{missing}`", argument=names[0])
        if transform is not None and len(names) > 2:
            rule = "must not be given with `transform`, which replaces the preparation of the backbone"
            raise InvalidValue(rule, argument=names[2])
        return PretrainedBackbone(self.backbone, self.weights, self.image_size, self.preparation)

    def needed(self, transform: str | None = None) -> Path | PretrainedBackbone:
        """The same model; raises if there is none."""
        given = self.given(transform)
        if given is None:
            raise InvalidValue("must be given", argument="checkpoint", cure="`backbone` with `weights` replaces it")
        return given


@dataclass(frozen=True)
class EmbeddingOptions:
    """How images are embedded.

    Args:
        batch_size: number of images embedded at a time.
        num_workers: number of processes that read images.
        device: device that the model runs on; by default cuda if there is one, else cpu.
    """

    batch_size: int = 32
    num_workers: int = 0
    device: str | None = None


@dataclass(frozen=True)
class TableOptions:
    """How a table is read.

    Args:
        columns: names of the table's columns, if they differ, as image=path,label=class; oml, those of
            open-metric-learning.
        delimiter: character that separates the fields of a CSV file, such as ';' or tab.
    """

    columns: str | None = None
    delimiter: str = ","
