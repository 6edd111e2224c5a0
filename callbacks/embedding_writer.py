"""Write the embeddings of `Trainer.predict` to the files that `lightning-retrieval embed` writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.utilities import CombinedLoader

from lightning_retrieval.callbacks.dealt_loader import DealtLoader, is_in_order
from lightning_retrieval.callbacks.prediction_set import LoadedSet, PredictionSet, describe_prediction
from lightning_retrieval.checks import check_choice, check_integer, check_path, first_line
from lightning_retrieval.distributed import gather_objects
from lightning_retrieval.search.embedding_folder import SHARD_SIZE, EmbeddingManifest, digest_of_list
from lightning_retrieval.search.embedding_shards import DTYPES, FILE_FORMATS, load_pyarrow
from lightning_retrieval.search.shard_collector import ShardCollector
from lightning_retrieval.search.shared_folder import SharedFolder, share_folder


class EmbeddingWriter(pl.Callback):
    """Writes what `predict_step` returns to a folder of Parquet or .npy files, instead of keeping it in memory.

    Each file has the embeddings of `shard_size` images with their ids, paths and labels, and appears when it is
    complete. Several prediction sets get a folder each, by their names or numbers.

    Each process embeds whole files that are missing, whatever the number of processes. So no image is embedded twice,
    the files are the same for any number, and after a kill the same command continues, also with another number.

    Args:
        output: folder of the embeddings: new, or one that was begun with the same model and images; files that are
            there are not written again, unless the size or the modification time of one of their images has changed.
        file_format: `"parquet"`, or `"npy"` with a JSON file beside each.
        shard_size: number of images of a file, >= 1.
        dtype: type of the numbers in the files, `"float32"` or `"float16"`, which takes half of the space.

    Raises:
        ValueError: if a value is out of its range; when the prediction begins, on all processes, if the folder holds
            embeddings of another model or of other images, a damaged file, or something else, if processes have
            different images, or if there are several processes and the loader does not give all images in order; with
            any batch, if ids or labels do not fit the embeddings, or images do not come in the order of their ids.
        ModuleNotFoundError: when the prediction begins, if pyarrow is not installed and the format is Parquet.
        TypeError: if `predict_step` returns no dict with `embeddings`.
        ConnectionError: at the end, if another process has ended early.

    Example:
        >>> import pytorch_lightning as pl, torch
        >>> from lightning_retrieval import RetrievalModule, SmoothAPLoss
        >>> from lightning_retrieval.callbacks import EmbeddingWriter
        >>> module = RetrievalModule(torch.nn.Linear(8, 4), SmoothAPLoss())
        >>> loader = torch.utils.data.DataLoader(torch.randn(10, 8), batch_size=4)
        >>> quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
        >>> trainer = pl.Trainer(callbacks=EmbeddingWriter("embeddings", file_format="npy"), **quiet)
        >>> trainer.predict(module, loader, return_predictions=False)
        >>> import numpy as np
        >>> np.load("embeddings/part-00000.npy").shape
        (10, 4)

    Cost:
        Memory for the embeddings of one file. At the end, processes wait for each other, at most for the timeout of the
        process group, which is 30 minutes by default.

    Relations:
        `lightning-retrieval predict` uses it, and `lightning-retrieval embed`, which needs no data module.
        `lightning-retrieval index --embeddings` makes an index of the folder. A loader that does not give all images in
        order, or `limit_predict_batches`, needs a single process; complete files are then embedded, but not written
        again.
    """

    owner = "EmbeddingWriter"  # prefix of error messages

    def __init__(
        self,
        output: str | Path,
        *,
        file_format: Literal["parquet", "npy"] = "parquet",
        shard_size: int = SHARD_SIZE,
        dtype: Literal["float32", "float16"] = "float32",
    ) -> None:
        self.output = check_path(self.owner, "output", output)
        self.file_format = check_choice(self.owner, "file_format", file_format, FILE_FORMATS)
        self.shard_size = check_integer(self.owner, "shard_size", shard_size, least=1)
        self.dtype = check_choice(self.owner, "dtype", dtype, DTYPES)
        self.written = 0
        """Number of files that the last prediction has written, in all processes."""
        self.renewed = 0
        """Number of these files that were there, with images that have changed since."""
        self._begun: list[_BegunSet] = []
        self._current: _BegunSet | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let Lightning load those images only that this process embeds.

        The loaders are replaced where the prediction loop asks for them, which is after the weights were restored.
        """
        if stage != "predict":
            return
        source = trainer.predict_loop._data_source
        ask = partial(type(source).dataloader, source)
        vars(source)["dataloader"] = lambda: self._deal(trainer, pl_module, ask())

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect the embeddings of a batch, and write a file that is complete."""
        current = self._begun[dataloader_idx]
        if current is not self._current:
            self._finish()
            self._current = current
        current.add(outputs)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the last file."""
        self._finish()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Wait until all processes have written their files."""
        if self._begun:
            self.written = sum(len(begun.shared.missing) for begun in self._begun)
            self.renewed = sum(len(begun.shared.changed) for begun in self._begun)
            self._wait()
        self._forget(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Drop the rows of the file that is not complete."""
        self._forget(trainer)

    def describe_set(self, trainer: pl.Trainer, pl_module: pl.LightningModule, dataset: Any) -> PredictionSet:
        """What is known of the images of a prediction set."""
        return LoadedSet(self.owner, dataset, describe_prediction(trainer, pl_module, dataset))

    def _deal(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loaders: Any) -> Any:
        """The loaders of the images that this process embeds, in the place of loaders of all images."""
        if isinstance(loaders, CombinedLoader):
            loaders = loaders.iterables
        if isinstance(loaders, Mapping):
            return {name: self._deal_set(trainer, pl_module, one, str(name)) for name, one in loaders.items()}
        if not isinstance(loaders, (list, tuple)):
            return self._deal_set(trainer, pl_module, loaders, "")
        names = list(map(str, range(len(loaders))))
        if len(loaders) == 1:
            names = [""]
        return [self._deal_set(trainer, pl_module, one, name) for name, one in zip(names, loaders)]

    def _deal_set(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loader: Any, name: str) -> Any:
        """The loader of one set, whose folder is begun or continued."""
        is_dealt = is_in_order(loader) and trainer.limit_predict_batches == 1.0
        images = self.describe_set(trainer, pl_module, loader.dataset)
        shared = share_folder(
            self.owner, self.output / name, lambda: self._manifest(trainer, loader, images), images.image_files
        )
        self._begun.append(_BegunSet(shared, images))
        if not is_dealt:
            images.begin([range(shared.folder.manifest.images)])
            return loader
        ranges = list(shared.ranges)
        images.begin(ranges)
        return DealtLoader(loader, ranges, has_length=shared.every_rank_has_images)

    def _manifest(self, trainer: pl.Trainer, loader: Any, images: PredictionSet) -> EmbeddingManifest:
        """What is going to be in the folder; raise if the files cannot be written."""
        if self.file_format == "parquet":
            load_pyarrow(self.owner)
        if trainer.world_size > 1 and not (is_in_order(loader) and trainer.limit_predict_batches == 1.0):
            raise ValueError(
                f"{self.owner}: with several processes, the loader must be a DataLoader of a map-style data set that "
                "gives all images in order, without `sampler`, `shuffle`, `drop_last` or `limit_predict_batches`; "
                "or set devices=1 and num_nodes=1."
            )
        count = _number_of_images(self.owner, loader, trainer.limit_predict_batches)
        return EmbeddingManifest(
            images=count,
            images_sha256=digest_of_list(images.fields(count)),
            model_sha256=images.about["checkpoint_sha256"],
            preparation=images.about["preparation"],
            dim=images.dim,
            shard_size=self.shard_size,
            file_format=self.file_format,
            dtype=self.dtype,
            precision=str(trainer.precision),
            about=images.about,
        )

    def _wait(self) -> None:
        """Wait for the other processes.

        Raises:
            ConnectionError: if one of them has ended before it has written all of its files.
        """
        try:
            gather_objects(None)
        except RuntimeError as error:
            raise ConnectionError(
                f"{self.owner}: all files of this process are written, but another process has ended early or is late "
                f"({first_line(error)}); run the same command again, which continues."
            ) from None

    def _finish(self) -> None:
        """Write the last file of the set that was embedded until now."""
        if self._current is not None:
            self._current.finish()
        self._current = None

    def _forget(self, trainer: pl.Trainer) -> None:
        """Release the folders, and the rows that are not written."""
        vars(trainer.predict_loop._data_source).pop("dataloader", None)
        for begun in self._begun:
            begun.shared.close()
        self._begun = []
        self._current = None


@dataclass
class _BegunSet:
    """A prediction set with the folder that it is written to.

    Args:
        shared: whose lock is held.
        images: what is known of the images.
    """

    shared: SharedFolder
    images: PredictionSet
    collector: ShardCollector | None = None

    def add(self, outputs: Any) -> None:
        """Collect the rows of a batch."""
        dim = self.images.dim_of(outputs)
        if self.collector is None:
            shared = self.shared
            self.collector = ShardCollector(shared.begin(dim), shared.missing, shared.image_files)
        self.images.collect(outputs, self.collector)

    def finish(self) -> None:
        """Write the last file."""
        if self.collector is not None:
            self.images.finish(self.collector)
            self.collector.finish()


def _number_of_images(owner: str, loader: Any, limit: float) -> int:
    """Number of images that the loader gives, at most those of the batches that `limit_predict_batches` allows."""
    try:
        images = len(loader.dataset)
    except TypeError:
        raise TypeError(
            f"{owner}: the prediction set must have a length, which {type(loader.dataset).__name__} has not; use a "
            "map-style data set."
        ) from None
    batch_size = loader.batch_size
    if batch_size is None:
        return images
    batches: float = limit
    if isinstance(limit, float):
        batches = int(len(loader) * limit)
    return int(min(images, batches * batch_size))
