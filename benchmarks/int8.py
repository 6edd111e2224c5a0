"""What eight bits cost and gain on Glyphs, for a convolutional network and a vision transformer.

    python benchmarks/int8.py

Trains `Embedder("glyph_net", 128)` on 608 batches of 384 glyphs, and a small vision transformer of timm on a quarter
as many. `lightning-retrieval export --int8` writes each with 32 and with 8 bits: static quantisation of the
convolutional network, calibrated on 256 test images, and dynamic quantisation of the transformer. R@1 is that of the
test set, whose characters are not those of training. The two files embed batches of 64 images in turn; the speed of
eight bits depends on the processor's instructions. Takes about ten minutes on two cores.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from PIL import Image
from timing import arguments, environment, interleaved, report

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss, Updates
from lightning_retrieval.datamodules import Glyphs
from lightning_retrieval.search.commands.export import INT8, ONNX, TIMED_IMAGES, Int8Cost, export_model
from lightning_retrieval.search.export.onnx_file import OnnxModel

DIM = 128
GLYPH_NET_STEPS, TRANSFORMER_STEPS = 608, 152
TRANSFORMER = "timm/vit_tiny_patch16_224"
TRANSFORMER_ARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 128, "depth": 4, "num_heads": 4}


def glyph_net() -> Embedder:
    """The network of the example."""
    return Embedder("glyph_net", DIM)


def transformer() -> Embedder:
    """A vision transformer of 0.8 million parameters, for images of 16 patches."""
    return Embedder(TRANSFORMER, DIM, image_size=32, backbone_args=TRANSFORMER_ARGS)


def train(embedder: Embedder, steps: int, data: Glyphs, checkpoint: Path) -> None:
    """Train with the settings of the example, and write a checkpoint."""
    module = RetrievalModule(
        embedder,
        SmoothAPLoss(),
        optimizer=partial(torch.optim.AdamW, lr=0.002, fused=True),
        lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps),
        lr_scheduler_interval="step",
        updates=Updates(gradient_clip_val=1.0),
    )
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    module.preparation = data.serialised_preparation  # which is otherwise noted in the evaluation
    trainer.save_checkpoint(checkpoint)


def write_images(data: Glyphs, folder: Path, count: int | None) -> None:
    """Write the test images in one folder for each class."""
    test = data.test_set
    for number, (image, label) in enumerate(zip(test.images[:count], test.labels[:count].tolist())):
        path = folder / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.numpy()).save(path)


def rows_of(name: str, cost: Int8Cost, folder: Path, channels: int, runs: int) -> list[dict[str, Any]]:
    """A row of the table for each of the two files."""
    images = torch.randint(0, 256, (TIMED_IMAGES, channels, 32, 32), dtype=torch.uint8)
    models = {file: OnnxModel(folder / file) for file in (ONNX, INT8)}
    times = interleaved({file: partial(model.embed, images) for file, model in models.items()}, runs, "cpu")
    rows = []
    for file, bits, recall in ((ONNX, "32", cost.recall_before), (INT8, f"8, {cost.kind}", cost.recall)):
        size = (folder / file).stat().st_size
        rows.append(
            {
                "network": name,
                "bits": bits,
                "R@1": recall,
                "MB": size / 1e6,
                "times the size": size / (folder / ONNX).stat().st_size,
                "64 images": times[file],
                "times the speed": times[ONNX].median / times[file].median,
            }
        )
    return rows


def main() -> None:
    options = arguments("What eight bits cost and gain on Glyphs.")
    shorter, classes, runs, count = 1, 96, 101, None
    if options.quick:
        shorter, classes, runs, count = 152, 4, 2, 100
    rows: list[dict[str, Any]] = []
    networks = {
        "glyph_net": (glyph_net, GLYPH_NET_STEPS, 1),
        "vision transformer": (transformer, TRANSFORMER_STEPS, 3),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for network, (make, steps, channels) in networks.items():
            pl.seed_everything(0, verbose=False)
            data = Glyphs(classes_per_batch=classes, samples_per_class=4, channels=channels)
            train(make(), steps // shorter, data, folder / "model.ckpt")
            if not (folder / "images").exists():
                write_images(data, folder / "images", count)
            made = export_model(folder / "model.ckpt", folder / network, int8=True, images=folder / "images")
            rows += rows_of(network, made.int8, folder / network, channels, runs)
    report("Eight bits on Glyphs, seed 0", environment("cpu", "onnxruntime", "timm"), rows, options.json)


if __name__ == "__main__":
    main()
