"""Draw two figures of the papers anew on images of Glyphs, and print their numbers; each takes less than a minute.

    python examples/figures.py                 # both
    python examples/figures.py ap_error

The figures are written to docs/images/reproduce and shown in docs/reproduce.md. A network of two layers is trained for
seconds, so the numbers are not the papers'.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results_file import write_file
from torch import Tensor, nn

from lightning_retrieval import SmoothAPLoss
from lightning_retrieval.datamodules import Glyphs, PKSampler
from lightning_retrieval.losses import BlackboxAPLoss, QuantizedAPLoss

OUTPUT = Path(__file__).parents[1] / "docs" / "images" / "reproduce"
PER_CLASS = 4
MOST_IMAGES = {"train": 6000, "test": 5000}


class Images(NamedTuple):
    """Images as rows of 256 pixels, or their embeddings, and their labels."""

    rows: Tensor
    labels: Tensor


@cache
def glyphs(split: str) -> Images:
    """Return the images of a split of Glyphs, 16 x 16 pixels, without augmentation."""
    data = getattr(Glyphs(augment=False), f"{split}_set")
    images = torch.stack([data[index]["images"] for index in range(min(len(data.labels), MOST_IMAGES[split]))])
    return Images(nn.functional.avg_pool2d(images, 2).flatten(1), data.labels[: len(images)])


def batches(images: Images, classes: int) -> PKSampler:
    """Return the sampler of an epoch, with four images of each class in a batch."""
    return PKSampler(images.labels, classes_per_batch=classes, samples_per_class=PER_CLASS, seed=0)


def train(after_step: Callable[[int, Tensor, Tensor], None] | None = None) -> nn.Module:
    """Train a network of two layers on Glyphs with Smooth-AP for 200 steps, and return it.

    Args:
        after_step: gets the number of each step, and the embeddings and the labels of its batch.
    """
    torch.manual_seed(0)
    images, network = glyphs("train"), nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.002)
    sampler, loss, step = batches(images, 32), SmoothAPLoss(tau=0.01), 0
    while step < 200:
        sampler.set_epoch(step // len(sampler))
        for batch in list(sampler)[: 200 - step]:
            embeddings, labels = network(images.rows[batch]), images.labels[batch]
            optimizer.zero_grad()
            loss(embeddings, labels).backward()
            optimizer.step()
            step += 1
            if after_step is not None:
                after_step(step, embeddings.detach(), labels)
    return network


@torch.no_grad()
def mean_average_precision(embeddings: Tensor, labels: Tensor) -> float:
    """Return the exact mAP of the queries that have a positive."""
    losses: Tensor = BlackboxAPLoss(margin=0.0, reduction="none")(embeddings, labels)
    return (1 - losses).nanmean().item()


def name_axes(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Name the axes, and draw grid and legend."""
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def new_figure(columns: int) -> tuple[Figure, Any]:
    """Return a figure with axes, `columns` beside each other."""
    figure = Figure(figsize=(4.8 * columns + 1.6, 3.6), dpi=100, layout="constrained")
    return figure, figure.subplots(1, columns)


def draw_ap_error() -> Figure:
    """Smooth-AP, Fig. 4."""
    losses: dict[str, nn.Module] = {}
    for tau in (0.1, 0.05, 0.01, 0.005, 0.001):
        losses[f"tau {tau:g}"] = SmoothAPLoss(tau=tau)
    for bins in (5, 10, 20, 50, 200):
        losses[f"{bins} bins"] = QuantizedAPLoss(num_bins=bins)
    errors: dict[str, list[float]] = {name: [] for name in losses}
    steps: list[int] = []

    def measure(step: int, embeddings: Tensor, labels: Tensor) -> None:
        if step % 4:
            return
        steps.append(step)
        exact = mean_average_precision(embeddings, labels)
        for name, loss in losses.items():
            errors[name].append(abs(1 - loss(embeddings, labels).item() - exact))

    train(measure)
    figure, axes = new_figure(2)
    for name, values in errors.items():
        axes[int("bins" in name)].plot(steps, values, label=name)
        print(f"{name}: mean error {sum(values) / len(values):.4f}")
    for part, title in zip(axes, ("sigmoid", "soft bins (AP_Q)")):
        part.set_yscale("log")
        name_axes(part, "training step", "AP_e = |AP_pred - AP|", title)
    return figure


def batch_values(images: Images, batch_size: int) -> Tensor:
    """Return the mAP within each of at least 20 random batches with four images of each class."""
    values: list[float] = []
    sampler, epoch = batches(images, batch_size // PER_CLASS), 0
    while len(values) < 20:
        sampler.set_epoch(epoch)
        values += [mean_average_precision(images.rows[batch], images.labels[batch]) for batch in sampler]
        epoch += 1
    return torch.tensor(values)


def draw_batch_ap() -> Figure:
    """RaMBO, Fig. 2."""
    network, (rows, labels) = train(), glyphs("test")
    with torch.no_grad():
        test = Images(network(rows), labels)
    full, sizes = mean_average_precision(*test), (8, 16, 32, 64, 128, 256, 512, 1024)
    means, spreads = [], []
    for size in sizes:
        values = batch_values(test, size)
        means.append(values.mean().item())
        spreads.append(values.std().item())
        print(f"batches of {size}: mAP {means[-1]:.2f}, standard deviation {spreads[-1]:.3f}")
    print(f"all {len(labels):,} images: mAP {full:.2f}")
    figure, axes = new_figure(1)
    axes.errorbar(sizes, means, yerr=spreads, marker="o", capsize=3, label="mean and standard\ndeviation of batches")
    axes.axhline(full, color="tab:gray", linestyle="--", label=f"mAP of all\n{len(labels):,} images")
    axes.set_xscale("log", base=2)
    name_axes(axes, "images in a batch", "mAP")
    return figure


FIGURES = {"ap_error": draw_ap_error, "batch_ap": draw_batch_ap}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*FIGURES, []], default=[], help="of the figures; default both")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the figures")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the tensors are small: a second thread waits more than it computes
    for name in options.names or FIGURES:
        write_file(options.output / f"{name}.png", FIGURES[name]())


if __name__ == "__main__":
    main()
