"""The callback that learns the whitening of a module from training images."""

import functools
from typing import Any

import torch
import torch.distributed as dist

from lightning_retrieval.arguments import Several, checked
from lightning_retrieval.backend import ModelParallelStrategy, pl, rank_zero_warn
from lightning_retrieval.callbacks.base import Callback
from lightning_retrieval.callbacks.evaluation_sets import loader_list
from lightning_retrieval.callbacks.training_images import batches_of, candidates_of, embedded, training_images
from lightning_retrieval.distributed import rank, world_size
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.models.whitening import Whitening
from lightning_retrieval.training.module import RetrievalModule


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

    @owned
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, ModelParallelStrategy) and trainer.world_size > 1:
            raise InvalidValue(
                "the processes may embed unequal numbers of batches, for which ModelParallelStrategy would wait "
                "forever",
                cure="run it with Trainer(strategy='ddp'), and continue from a checkpoint",
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

    @owned
    def _learn(self, trainer: pl.Trainer, pl_module: Any, loaders: Any) -> None:
        whitening = _whitening(pl_module)
        if whitening.learned is not None and trainer.state.fn != "fit":
            return
        dataset = training_images(trainer)
        indices = candidates_of(dataset)
        count = min(self.images, len(indices))
        if count < world_size():
            rule = f"each of the {world_size()} processes needs at least one training image"
            raise InvalidValue(rule, "LearnWhitening", got=f"{count} images")
        if world_size() > 1:
            for buffer in pl_module.buffers():  # such as batch-norm statistics; DDP also sends them before evaluation
                dist.broadcast(buffer, 0)
        evaluation_loader = loader_list(loaders)[0]
        chosen = indices[0] + torch.arange(count) * len(indices) // count
        shard = chosen.tensor_split(world_size())[rank()]
        batches = shard.split(getattr(evaluation_loader, "batch_size", None) or 64)
        loader = batches_of(dataset, batches, evaluation_loader)
        embed = functools.partial(pl_module.embed, whiten=False)
        pairs = list(embedded(trainer, pl_module, loader, embed, "Learning whitening"))
        rows, labels = map(torch.cat, zip(*pairs))
        whitening.fit_over_processes(rows, labels)


def _whitening(pl_module: pl.LightningModule) -> Whitening:
    whitening = pl_module.whitening if isinstance(pl_module, RetrievalModule) else None
    if whitening is None:
        cure = "create it with one: RetrievalModule(..., whitening=PCAWhitening())"
        raise InvalidValue(f"{type(pl_module).__name__} has no whitening to learn", "LearnWhitening", cure=cure)
    return whitening
