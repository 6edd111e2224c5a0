"""Train on your own images: a folder with one subfolder for each class.

python examples/own_images.py photos

Half of the classes are used for training. `val/mAP` is measured on the other half, where each image is a query against
all others. Figures, metrics and checkpoints are written to logs/own_images/version_*.
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
from lightning_retrieval.datamodules import ImageFolder, ImageSet


def classes_with_positives(images: ImageSet) -> int:
    """Return the number of classes that have at least two images."""
    sizes = torch.unique(images.labels, return_counts=True)[1]
    return int((sizes > 1).sum())


def make_embedder(backbone: str, weights: str) -> Embedder:
    """Create the network, and freeze the batch norm of pretrained weights."""
    if weights == "none":
        return Embedder(backbone, embedding_dim=128)
    return Embedder(backbone, embedding_dim=128, weights=weights, freeze_batch_norm=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with a subfolder of images for each class")
    parser.add_argument("--categories", action="store_true", help="class folders are in category folders")
    parser.add_argument("--backbone", default="resnet18", help="a torchvision model")
    parser.add_argument("--weights", default="DEFAULT", help="torchvision's pretrained weights, downloaded; or none")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2, help="number of processes that read images")
    options = parser.parse_args()

    pl.seed_everything(0)
    data = ImageFolder(options.folder, categories=options.categories, num_workers=options.workers, on_error="skip")
    print(data.check())
    train_classes = classes_with_positives(data.train_set)
    test_classes = classes_with_positives(data.test_set)
    if min(train_classes, test_classes) < 2:
        parser.error(
            "training and evaluation need at least two classes each that have two or more images, got "
            f"{train_classes} and {test_classes} in {options.folder}."
        )
    data.classes_per_batch = min(data.classes_per_batch, train_classes)

    try:
        embedder = make_embedder(options.backbone, options.weights)
    except URLError as error:
        parser.error(f"the weights cannot be downloaded ({error}); --weights none trains without pretrained weights.")
    optimizer = partial(torch.optim.AdamW, lr=1e-4)
    # The gradient is that of the whole batch; the memory needed is that of 32 images.
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
    print("\nTo search with the trained network:")
    command = ("lightning-retrieval", "index", "--checkpoint", best, "--images", str(options.folder))
    print(shlex.join([*command, "--output", "photos.index"]))
    print("lightning-retrieval search --index photos.index IMAGE --html results.html")


if __name__ == "__main__":
    main()
