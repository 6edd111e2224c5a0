"""Train on your own images: a folder with one folder for each class.

python examples/own_images.py photos

Half of the classes are trained on, the other half is what `val/mAP` is measured on: each image is a query against all
others of that half. Pictures, metrics and checkpoints lie in logs/own_images/version_*.
"""

import argparse
import shlex
from functools import partial
from pathlib import Path
from urllib.error import URLError

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import APMonitor, RetrievalEvaluation, RetrievalGallery, TrainingCurve
from lightning_retrieval.datamodules import ImageFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds a folder of images for each class")
    parser.add_argument("--categories", action="store_true", help="the folders of classes lie in folders of categories")
    parser.add_argument("--backbone", default="resnet18", help="a torchvision model")
    parser.add_argument("--weights", default="DEFAULT", help="torchvision's weights to begin with, downloaded; or none")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2, help="processes that read images")
    options = parser.parse_args()

    pl.seed_everything(0)
    data = ImageFolder(options.folder, categories=options.categories, num_workers=options.workers, on_error="skip")
    print(data.check())
    several, tested = (
        int((torch.unique(images.labels, return_counts=True)[1] > 1).sum())
        for images in (data.train_set, data.test_set)
    )
    if min(several, tested) < 2:
        parser.error(
            f"training and evaluation need two classes each with two images or more, got {several} and {tested} in "
            f"{options.folder}."
        )
    data.classes_per_batch = min(data.classes_per_batch, several)

    weights = None if options.weights == "none" else options.weights
    try:
        embedder = Embedder(options.backbone, embedding_dim=128, weights=weights, freeze_batch_norm=weights is not None)
    except URLError as error:
        parser.error(f"the weights cannot be downloaded ({error}); --weights none begins without.")
    optimizer = partial(torch.optim.AdamW, lr=1e-4)
    # The gradient is that of the whole batch, the memory that of 32 images.
    module = RetrievalModule(embedder, SmoothAPLoss(tau=0.01), chunk_size=32, optimizer=optimizer, head_lr_factor=10)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        logger=CSVLogger("logs", "own_images"),
        log_every_n_steps=1,
        callbacks=[
            RetrievalEvaluation(ks=(1, 5)),
            APMonitor(),
            RetrievalGallery(),
            TrainingCurve(),
            ModelCheckpoint(monitor="val/mAP", mode="max", save_last=True),
        ],
    )
    trainer.fit(module, data)
    best = trainer.checkpoint_callback.best_model_path
    print("\nTo search with what was trained:")
    command = ("lightning-retrieval", "index", "--checkpoint", best, "--images", str(options.folder))
    print(shlex.join([*command, "--output", "photos.index"]))
    print("lightning-retrieval search --index photos.index IMAGE --html results.html")


if __name__ == "__main__":
    main()
