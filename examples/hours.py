"""Compute how long the configs of the papers train: a table in Markdown.

    python examples/hours.py --images_per_second 400

The hours are the images of all epochs / (throughput x 3,600). An epoch has as many images as the data set (the
published number), rounded up to whole batches. The hours are computed, not measured, and leave out evaluation. The
throughput depends on the GPU, the network, the size of the images and the processes that read them. `fit` shows it in
the progress bar and logs it as `train/images/s`: train a config for two minutes, and give its value here.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_retrieval import datamodules

EXAMPLES = Path(__file__).parent


def training_images(data: dict[str, Any]) -> int | None:
    """Return the published number of training images of a data set, or None if none is known.

    Args:
        data: the section of a config.
    """
    dataset = getattr(datamodules, data["class_path"].rpartition(".")[2])
    counts = getattr(dataset, "published_counts", {}).get("train")
    if not counts:
        return None
    images: int = counts[0][0]
    return images


def images_of_a_batch(data: dict[str, Any]) -> int:
    """Return the number of images in a batch.

    Args:
        data: the section of a config.
    """
    settings = data["init_args"]
    images: int = settings["classes_per_batch"] * settings["samples_per_class"]
    return images


def images_of_an_epoch(data: dict[str, Any], images: int) -> int:
    """Return the number of images in the batches of an epoch.

    Args:
        data: the section of a config.
        images: of the training set.
    """
    batch = images_of_a_batch(data)
    return math.ceil(images / batch) * batch


def rows(folder: Path, images_per_second: float) -> list[tuple[str, int, int, float, float]]:
    """Return a row for each config that trains for a number of epochs.

    A row is the name, the epochs, the training images, the millions of images in all epochs, and the hours.
    """
    found = []
    for path in sorted(folder.glob("*/*.yaml")):
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        epochs = config["trainer"].get("max_epochs", 0)
        images = training_images(config["data"])
        if epochs < 1 or images is None:
            continue
        total = epochs * images_of_an_epoch(config["data"], images)
        steps: int = config["trainer"].get("max_steps", -1)
        if steps > 0:
            total = min(total, steps * images_of_a_batch(config["data"]))
        hours = total / images_per_second / 3600
        found.append((path.relative_to(folder).as_posix(), epochs, images, total / 1e6, hours))
    return found


def markdown(table: Sequence[tuple[str, int, int, float, float]], images_per_second: float) -> str:
    """Return the table as text."""
    lines = [
        f"| config | epochs | training images | millions in all epochs | hours at {images_per_second:g} images/s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, epochs, images, millions, hours in table:
        lines.append(f"| {name} | {epochs} | {images:,} | {millions:.1f} | {hours:.1f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images_per_second", type=float, default=400)
    options = parser.parse_args(arguments)
    if not 0 < options.images_per_second < float("inf"):
        parser.error(f"--images_per_second must be a number > 0, got {options.images_per_second}.")
    print(markdown(rows(EXAMPLES, options.images_per_second), options.images_per_second))


if __name__ == "__main__":
    main()
