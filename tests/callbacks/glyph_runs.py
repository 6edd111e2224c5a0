"""Small runs on Glyphs whose logs are read back."""

import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import APMonitor, RetrievalEvaluation
from lightning_retrieval.datamodules import Glyphs
from tests.quiet_trainer import quiet_trainer
from tests.wandb_files import OfflineRun

BATCHES = 3  # of an epoch
SMALL_LISTS = [  # warnings of runs that are as short as these
    "ignore:RetrievalEvaluation. (val|test) metrics cover .* of .* batches:UserWarning",
    "ignore:RetrievalModule. BatchNorm sees:UserWarning",
]


def small_glyphs() -> Glyphs:
    return Glyphs(classes_per_batch=6, samples_per_class=3, eval_batch_size=64, seed=2)


def fit_glyphs(logger, glyphs, folder, epochs=2, callbacks=(), **settings):
    torch.manual_seed(0)
    network = Embedder("glyph_net", embedding_dim=8)
    trainer = quiet_trainer(
        enable_checkpointing=True,
        enable_progress_bar=True,
        default_root_dir=folder,
        max_epochs=epochs,
        logger=logger,
        log_every_n_steps=1,
        limit_train_batches=BATCHES,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=[
            RetrievalEvaluation((1, 5)),
            APMonitor(),
            ModelCheckpoint(monitor="val/mAP", mode="max", save_last=True, filename="{epoch}"),
            *callbacks,
        ],
    )
    module = RetrievalModule(network, SmoothAPLoss(tau=0.02), chunk_size=7, memory=CrossBatchMemory(20, start_step=1))
    trainer.fit(module, glyphs, **settings)
    return trainer


def offline_runs(folder):
    return [OfflineRun(path) for path in sorted(folder.glob("*/*/wandb/offline-run-*"))]
