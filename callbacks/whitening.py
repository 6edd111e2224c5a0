"""Whitening of the model that is being trained, learned on training images."""

import copy
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from jaxtyping import Float
from pytorch_lightning.callbacks.progress.tqdm_progress import Tqdm
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_retrieval.callbacks.evaluation import _listed
from lightning_retrieval.checks import check_integer
from lightning_retrieval.distributed import gather_rows, rank, world_size
from lightning_retrieval.models.whitening import PCAWhitening
from lightning_retrieval.training.module import RetrievalModule


class LearnWhitening(pl.Callback):
    """Fits `RetrievalModule(whitening=...)` on training images at the start of each validation of a fit.

    So the metrics are those of whitened embeddings, and the checkpoint written after a validation holds the whitening
    of its own weights; one written between validations holds that of the last. In `validate`, `test` and `predict` it
    is learned only where the checkpoint has none. The sanity check, and the evaluation before a fit, are not whitened.

    The images are spread evenly over the training set and seen as in evaluation: with the data module's
    `eval_transform` in place of the set's `transform`, and without `augment`, where these attributes are there. All
    processes share the work and end with the same whitening.

    Args:
        images: how many are taken, all where there are fewer; more than the whitening's `dim`.

    Raises:
        ValueError: if the module has no whitening, there are fewer images than needed, or the training images are not
            known: of a data module that has no `train_set`, in `validate`, `test` and `predict`.
        TypeError: if `images` is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval import PCAWhitening, RetrievalModule, SmoothAPLoss
        >>> from lightning_retrieval.callbacks import LearnWhitening, RetrievalEvaluation
        >>> module = RetrievalModule(torch.nn.Linear(8, 4), SmoothAPLoss(), whitening=PCAWhitening(dim=2))
        >>> callbacks = [LearnWhitening(images=5000), RetrievalEvaluation()]

    Cost:
        Each time, the images are embedded once, and all their embeddings held by every process.

    Relations:
        `PCAWhitening.fit` does it by hand, also with images of another set.
    """

    def __init__(self, images: int = 20_000) -> None:
        self.images = check_integer("LearnWhitening", "images", images, least=2)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        dim = _whitening(pl_module).dim
        if dim is not None and self.images <= dim:
            raise ValueError(
                f"LearnWhitening: `images` must be more than the whitening's dim, {dim}, got {self.images}."
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._learn(trainer, pl_module, trainer.val_dataloaders)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._learn(trainer, pl_module, trainer.test_dataloaders)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._learn(trainer, pl_module, trainer.predict_dataloaders)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if _whitening(pl_module).learned is None:
            rank_zero_warn("LearnWhitening: nothing was learned, since the fit ended without a validation.")

    def _learn(self, trainer: pl.Trainer, pl_module: Any, loaders: Any) -> None:
        whitening = _whitening(pl_module)
        if whitening.learned is not None and trainer.state.fn != "fit":
            return
        dataset = _training_images(trainer)
        count = min(self.images, len(dataset))
        if count < world_size():
            raise ValueError(
                f"LearnWhitening: there must be a training image for each of the {world_size()} processes, got {count}."
            )
        if world_size() > 1:
            for buffer in pl_module.buffers():  # batch norm's, as DDP does before it evaluates
                dist.broadcast(buffer, 0)
        chosen = torch.arange(count) * len(dataset) // count
        loader = _loader(dataset, chosen.tensor_split(world_size())[rank()].tolist(), loaders)
        rows = gather_rows(_embeddings(trainer, pl_module, loader))
        whitening.fit(rows)


def _whitening(pl_module: pl.LightningModule) -> PCAWhitening:
    whitening = pl_module.whitening if isinstance(pl_module, RetrievalModule) else None
    if whitening is None:
        raise ValueError(
            f"LearnWhitening: {type(pl_module).__name__} has no whitening to be learned; give it one: "
            "RetrievalModule(..., whitening=PCAWhitening())."
        )
    return whitening


def _training_images(trainer: pl.Trainer) -> Any:
    """The training set as evaluation would see it."""
    datamodule: Any = getattr(trainer, "datamodule", None)
    dataset = getattr(datamodule, "train_set", None)
    if dataset is None:
        dataset = getattr(trainer.train_dataloader, "dataset", None)
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            "LearnWhitening: the training images must be known, as the data module's `train_set` or, in a fit, the "
            f"train_dataloader's dataset with a length, got {type(dataset).__name__}; give the Trainer a "
            "RetrievalDataModule, or fit first."
        )
    plain: Any = copy.copy(dataset)
    if hasattr(datamodule, "eval_transform") and hasattr(plain, "transform"):
        plain.transform = datamodule.eval_transform
    if hasattr(plain, "augment"):
        plain.augment = False
    return plain


def _loader(dataset: Any, indices: list[int], loaders: Any) -> DataLoader[Any]:
    """These images in batches like those of the first evaluation set."""
    like = _listed(loaders)[0]
    return DataLoader(
        dataset,
        batch_size=getattr(like, "batch_size", None) or 64,
        sampler=indices,
        num_workers=getattr(like, "num_workers", 0),
        collate_fn=getattr(like, "collate_fn", None),
        generator=torch.Generator(),  # leaves the global random state alone
    )


def _embeddings(trainer: pl.Trainer, pl_module: RetrievalModule, loader: Any) -> Float[Tensor, "share dim"]:
    """This process' rows, in float32 or better."""
    silent = trainer.progress_bar_callback is None or not trainer.is_global_zero
    rows = []
    with trainer.precision_plugin.val_step_context():
        for batch in Tqdm(loader, desc="Learning whitening", disable=silent, leave=False):
            batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
            embeddings = pl_module.embed(pl_module.unpack_batch(batch)[0], whiten=False)
            if isinstance(batch, dict) and "roles" in batch:
                embeddings = embeddings[batch["roles"] > 0]  # without what stands in for images that cannot be read
            rows.append(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)))
    return torch.cat(rows)
