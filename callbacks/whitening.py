"""The callback that learns the whitening of a module from training images."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_retrieval.arguments import Several, checked
from lightning_retrieval.backend import ModelParallelStrategy, pl, rank_zero_warn
from lightning_retrieval.callbacks.base import Callback
from lightning_retrieval.callbacks.evaluation_sets import batches_on_device, loader_list
from lightning_retrieval.distributed import kept_integers, kept_rows, rank, world_size
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.models.whitening import Whitening
from lightning_retrieval.training.module import RetrievalModule
from lightning_retrieval.training.sides import is_two_sided


class LearnWhitening(Callback):
    """Fits `RetrievalModule(whitening=...)` on training images at the start of each validation of a fit.

    The validation metrics are therefore those of whitened embeddings, and a checkpoint written after a validation
    contains the whitening for its weights. A checkpoint written between validations contains the whitening of the last
    validation.
    `validate`, `test` and `predict` learn the whitening only if the checkpoint has none. The sanity check and the
    evaluation before a fit are not whitened.

    The images are spread evenly over the training set. They are read as in evaluation: with the data module's
    `eval_transform` instead of the data set's `transform`, and without `augment`, if these attributes exist. Of data
    with two sides, only candidates are read; queries get the same whitening. The work is distributed over the
    processes, and all of them get the same whitening.

    Args:
        images: number of training images, larger than the whitening's `dim`. If the training set has fewer images, all
            are used.

    Raises:
        ValueError: if the module has no whitening, if there are too few images, or if the training images are not
            known. To learn a whitening, `validate`, `test` and `predict` need a data module with a `train_set`.
        TypeError: if `images` is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval import PCAWhitening, RetrievalModule, SmoothAPLoss
        >>> from lightning_retrieval.callbacks import LearnWhitening, RetrievalEvaluation
        >>> module = RetrievalModule(torch.nn.Linear(8, 4), SmoothAPLoss(), whitening=PCAWhitening(dim=2))
        >>> callbacks = [LearnWhitening(images=5000), RetrievalEvaluation()]

    Cost:
        Each time a whitening is learned, the images are embedded once. Each process keeps the embeddings of its images,
        and sends only sums of products of embeddings. For a whitening class of your own, each process gathers all
        embeddings (`Whitening.fit_over_processes`).

    Relations:
        `PCAWhitening.fit` and `SupervisedWhitening.fit` learn a whitening from any embeddings, such as those of another
        data set. A `SupervisedWhitening` pairs images of the same label. Since the chosen images are spread over the
        data set, `images` must be large enough to include several images of a class.
    """

    def __init__(self, images: Several = 20_000) -> None:
        self.images = checked(self, images=images)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, ModelParallelStrategy) and trainer.world_size > 1:
            raise InvalidValue(
                "the processes may embed unequal numbers of batches, for which ModelParallelStrategy would wait "
                "forever",
                "LearnWhitening",
                cure="learn the whitening with Trainer(strategy='ddp') from a checkpoint",
            )
        dim = _whitening(pl_module).dim
        if dim is not None and self.images <= dim:
            rule = f"must be larger than the whitening's dim, {dim}"
            raise InvalidValue(rule, "LearnWhitening", "images", got=self.images)
        _whitening(pl_module).is_awaited = True

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _whitening(pl_module).is_awaited = False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._learn(trainer, pl_module, trainer.val_dataloaders)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._learn(trainer, pl_module, trainer.test_dataloaders)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._learn(trainer, pl_module, trainer.predict_dataloaders)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if _whitening(pl_module).learned is None:
            rank_zero_warn("LearnWhitening: no whitening was learned, because the fit ended without a validation.")

    def _learn(self, trainer: pl.Trainer, pl_module: Any, loaders: Any) -> None:
        whitening = _whitening(pl_module)
        if whitening.learned is not None and trainer.state.fn != "fit":
            return
        dataset = _training_images(trainer)
        first = getattr(dataset, "num_queries", 0)  # only candidates are used of data with two sides
        available = len(dataset) - first
        count = min(self.images, available)
        if count < world_size():
            rule = f"each of the {world_size()} processes needs at least one training image"
            raise InvalidValue(rule, "LearnWhitening", got=f"{count} images")
        if world_size() > 1:
            for buffer in pl_module.buffers():  # such as batch-norm statistics; DDP also sends them before evaluation
                dist.broadcast(buffer, 0)
        chosen = first + torch.arange(count) * available // count
        shard = chosen.tensor_split(world_size())[rank()]
        loader = _create_loader(dataset, shard.tolist(), loader_list(loaders)[0])
        rows, labels = _embed(trainer, pl_module, loader)
        whitening.fit_over_processes(rows, labels)


def _whitening(pl_module: pl.LightningModule) -> Whitening:
    whitening = pl_module.whitening if isinstance(pl_module, RetrievalModule) else None
    if whitening is None:
        cure = "create it with one: RetrievalModule(..., whitening=PCAWhitening())"
        raise InvalidValue(f"{type(pl_module).__name__} has no whitening to learn", "LearnWhitening", cure=cure)
    return whitening


def _training_images(trainer: pl.Trainer) -> Any:
    """Return a copy of the training set that reads its images as in evaluation."""
    datamodule: Any = getattr(trainer, "datamodule", None)
    dataset: Any = getattr(datamodule, "train_set", None)
    if dataset is None:
        dataset = getattr(trainer.train_dataloader, "dataset", None)
    if not hasattr(dataset, "__len__"):
        raise InvalidValue(
            "the training images must be known, as the data module's `train_set` or, in a fit, as the "
            "train_dataloader's dataset with a length",
            "LearnWhitening",
            got=type(dataset).__name__,
            cure="pass the Trainer a RetrievalDataModule, or fit first",
        )
    if getattr(dataset, "two_sided", False):
        return dataset.map_sides(lambda side, of_side: _as_evaluated(of_side, datamodule.modules[side]))
    return _as_evaluated(dataset, datamodule)


def _as_evaluated(dataset: Any, datamodule: Any) -> Any:
    """Return a copy of a training set that reads its images as in evaluation."""
    evaluated: Any = copy.copy(dataset)
    if hasattr(datamodule, "eval_transform") and hasattr(evaluated, "transform"):
        evaluated.transform = datamodule.eval_transform
    if hasattr(evaluated, "augment"):
        evaluated.augment = False
    return evaluated


def _create_loader(dataset: Any, indices: list[int], evaluation_loader: Any) -> DataLoader[Any]:
    """Create a data loader of the images at some indices with the settings of an evaluation loader."""
    return DataLoader(
        dataset,
        batch_size=getattr(evaluation_loader, "batch_size", None) or 64,
        sampler=indices,
        num_workers=getattr(evaluation_loader, "num_workers", 0),
        collate_fn=getattr(evaluation_loader, "collate_fn", None),
        generator=torch.Generator(),  # its own generator leaves the global random state unchanged
    )


def _embed(
    trainer: pl.Trainer, pl_module: RetrievalModule, loader: Any
) -> tuple[Float[Tensor, "row dim"], Int[Tensor, "row ..."]]:
    """Return the embeddings of this process's images, in float32 or float64, and their labels."""
    embeddings, labels = [], []
    with trainer.precision_plugin.val_step_context():
        for batch in batches_on_device(trainer, loader, "Learning whitening"):
            if is_two_sided(batch):
                batch = batch["candidates"]
            images, labels_of_batch, _ = pl_module.unpack_batch(batch)
            rows = pl_module.embed(images, whiten=False)
            if isinstance(batch, dict) and "roles" in batch:
                is_image = batch["roles"] > 0  # placeholders for unreadable images have role 0
                rows, labels_of_batch = rows[is_image], labels_of_batch[is_image]
            embeddings.append(kept_rows(rows.to(torch.promote_types(rows.dtype, torch.float32))))
            labels.append(kept_integers(labels_of_batch))
    return torch.cat(embeddings), torch.cat(labels)
