"""Draw figures and tables of the papers anew, on data of the library, each in less than a minute of CPU time.

    python examples/figures.py                 # all of them
    python examples/figures.py ap_error collapse

The figures are written to docs/images/reproduce, with their numbers in `figures.json`; `python examples/papers.py` then
writes them into docs/reproduce.md. Networks are trained here for seconds on Glyphs, so the numbers are not the papers'.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results_file import write_file
from torch import Tensor, nn

from lightning_retrieval import SmoothAPLoss, chunked_backward
from lightning_retrieval.datamodules import Glyphs, PKSampler
from lightning_retrieval.losses import (
    BlackboxAPLoss,
    BlackboxRecallLoss,
    FastAPLoss,
    QuantizedAPLoss,
    ROADMAPLoss,
    SupAPLoss,
)
from lightning_retrieval.ranking.rows import normalize

OUTPUT = Path(__file__).parents[1] / "docs" / "images" / "reproduce"
SEEDS = (0, 1, 2)
PER_CLASS = 4
MOST_IMAGES = {"train": 6000, "val": 1500, "test": 5000}
POSITIVE, NEGATIVE = "tab:green", "tab:red"
PAPER = "tab:gray"


class Drawn(NamedTuple):
    """A figure, what it shows here, and its numbers as rows of text, of which the first has the titles."""

    figure: Figure
    finding: str
    table: list[list[str]]


class Images(NamedTuple):
    """Images as rows of 256 pixels, and their labels."""

    pixels: Tensor
    labels: Tensor


def new_figure(columns: int = 1, rows: int = 1, height: float = 3.6) -> tuple[Figure, Any]:
    """Return a figure with axes, `columns` beside each other."""
    figure = Figure(figsize=(4.8 * columns + 1.6, height), dpi=100, layout="constrained")
    return figure, figure.subplots(rows, columns)


def name_axes(axes: Axes, x: str, y: str, *, legend: str = "best", title: str = "") -> None:
    """Name the axes, and draw grid and legend.

    Args:
        axes: to be named.
        x: name of the horizontal axis.
        y: name of the vertical axis.
        legend: its place within the axes, `beside` them or `none`.
        title: above the axes.
    """
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    if legend == "beside":
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    elif legend != "none":
        axes.legend(fontsize="small", loc=legend)


# --- a network of a second


@cache
def glyphs(split: str) -> Images:
    """Return the images of a split of Glyphs, 16 x 16 pixels, without augmentation."""
    data = getattr(Glyphs(augment=False), f"{split}_set")
    images = torch.stack([data[index]["images"] for index in range(min(len(data.labels), MOST_IMAGES[split]))])
    return Images(nn.functional.avg_pool2d(images, 2).flatten(1), data.labels[: len(images)])


def new_network(seed: int) -> nn.Sequential:
    """Return a network of two layers with random weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))


def batches(images: Images, classes: int, per_class: int, seed: int) -> PKSampler:
    """Return the sampler of an epoch."""
    return PKSampler(images.labels, classes_per_batch=classes, samples_per_class=per_class, seed=seed)


def train(
    loss: nn.Module,
    *,
    steps: int = 200,
    classes: int = 32,
    per_class: int = PER_CLASS,
    seed: int = 0,
    after_step: Callable[[int, Tensor, Tensor], None] | None = None,
) -> nn.Module:
    """Train a network on Glyphs, and return it.

    Args:
        loss: of embeddings and labels.
        steps: number of updates.
        classes: of a batch.
        per_class: images of each of them.
        seed: of the weights and the batches.
        after_step: gets the number of each step, and the embeddings and the labels of its batch.
    """
    images, network = glyphs("train"), new_network(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.002)
    sampler, step = batches(images, classes, per_class, seed), 0
    while step < steps:
        sampler.set_epoch(step // len(sampler))
        for batch in list(sampler)[: steps - step]:
            embeddings, labels = network(images.pixels[batch]), images.labels[batch]
            optimizer.zero_grad()
            loss(embeddings, labels).backward()
            optimizer.step()
            step += 1
            if after_step is not None:
                after_step(step, embeddings.detach(), labels)
    return network


@torch.no_grad()
def average_precisions(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Return the exact AP of each query; NaN for a query without a positive."""
    values: Tensor = BlackboxAPLoss(margin=0.0, reduction="none")(embeddings, labels)
    return 1 - values


@torch.no_grad()
def embed(network: nn.Module, split: str = "test") -> Images:
    """Return the embeddings of a split in place of its pixels."""
    images = glyphs(split)
    return Images(network(images.pixels), images.labels)


def batch_values(images: Images, batch_size: int, *, least: int = 20) -> Tensor:
    """Return the mean AP within each of at least `least` random batches with four images of each class."""
    values: list[float] = []
    sampler, epoch = batches(images, batch_size // PER_CLASS, PER_CLASS, 0), 0
    while len(values) < least:
        sampler.set_epoch(epoch)
        for batch in sampler:
            values.append(average_precisions(images.pixels[batch], images.labels[batch]).nanmean().item())
        epoch += 1
    return torch.tensor(values)


# --- Smooth-AP


def draw_indicator() -> Drawn:
    """Smooth-AP, Fig. 2."""
    difference = torch.linspace(-0.8, 0.8, 3201, dtype=torch.float64, requires_grad=True)
    forms: dict[str, Tensor] = {f"sigmoid, tau {tau:g}": (difference / tau).sigmoid() for tau in (0.01, 0.05, 0.1)}
    forms["linear (hinge, margin 0.1)"] = (difference / 0.1 + 1).clamp(min=0)
    forms["exponential"] = (difference / 0.1).exp()
    figure, (above, below) = new_figure(2)
    table = [["form", "width with more than 1 % of the largest slope"]]
    above.plot(difference.detach(), (difference > 0).double(), color="black", label="indicator")
    for name, form in forms.items():
        (slope,) = torch.autograd.grad(form.sum(), difference)
        above.plot(difference.detach(), form.detach(), label=name)
        below.plot(difference.detach(), slope, label=name)
        if name.startswith("sigmoid"):
            wide = difference[slope > 0.01 * slope.max()]
            table.append([name, f"{(wide.max() - wide.min()).item():.3f}"])
    above.set_ylim(-0.1, 3)
    below.set_ylim(-1, 28)
    name_axes(above, "score of the other item minus score of the positive", "value")
    name_axes(below, "score of the other item minus score of the positive", "slope", legend="none")
    finding = (
        "A sigmoid has a gradient only near 0, at a width of about 12 tau. A hinge pulls with the same force at every "
        "difference above minus its margin, and an exponential pulls the more, the larger the difference."
    )
    return Drawn(figure, finding, table)


def draw_ap_error() -> Drawn:
    """Smooth-AP, Fig. 4 and Table 5."""
    losses: dict[str, Any] = {}
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
        exact = average_precisions(embeddings, labels).mean()
        for name, loss in losses.items():
            errors[name].append((1 - loss(embeddings, labels) - exact).abs().item())

    train(SmoothAPLoss(tau=0.01), steps=200, after_step=measure)
    figure, axes = new_figure(2)
    for name, values in errors.items():
        axes[int("bins" in name)].plot(steps, values, label=name)
    for part, title in zip(axes, ("sigmoid", "soft bins (AP_Q)")):
        part.set_yscale("log")
        name_axes(part, "training step", "AP_e = |AP_pred - AP|", legend="beside", title=title)
    table = [["approximation", "mean AP_e of the training"]]
    table += [[name, f"{np.mean(values):.4f}"] for name, values in errors.items()]
    return Drawn(figure, "The lower the temperature, the tighter the approximation, as in the paper.", table)


# --- RaMBO


def interpolated_loss(scores: Tensor, relevant: Tensor, lambda_: float) -> Tensor:
    """Return RaMBO's interpolation of the mean rank of the positives, at each row of scores.

    With g the gradient of the loss with respect to the ranks, this is g rk(y + lambda g) - y (rk(y) - rk(y + lambda g))
    / lambda, whose gradient is that of equation 10. Ranks are divided by the length of the list, and 1 is the highest.

    Args:
        scores: of shape (points, length).
        relevant: of shape (length,).
        lambda_: above 0; 0 means the loss itself.
    """
    length = scores.shape[1]
    gradient = relevant.to(scores.dtype) / relevant.sum()
    ranks = ranks_of(scores) / length
    if lambda_ == 0:
        return ranks @ gradient
    moved = ranks_of(scores + lambda_ * gradient) / length
    return moved @ gradient - (scores * (ranks - moved)).sum(1) / lambda_


def ranks_of(scores: Tensor) -> Tensor:
    """Return the rank of each score in its row, 1 for the highest."""
    order = scores.argsort(1, descending=True)
    return (order.argsort(1) + 1).to(scores.dtype)


def draw_interpolation() -> Drawn:
    """RaMBO, Fig. 1."""
    generator = torch.Generator().manual_seed(3)
    begin, across, along = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    relevant = torch.arange(12) < 3
    side = torch.linspace(-2, 2, 161, dtype=torch.float64)
    x, y = torch.meshgrid(side, side, indexing="xy")
    scores = begin + x.reshape(-1, 1) * across + y.reshape(-1, 1) * along
    figure, axes = new_figure(3)
    table = [["lambda", "distinct values of the section", "largest difference from the loss"]]
    exact = interpolated_loss(scores, relevant, 0)
    for part, lambda_ in zip(axes, (0, 1.5, 6)):
        values = interpolated_loss(scores, relevant, lambda_)
        drawn = part.contourf(side, side, values.reshape(161, 161), levels=40, cmap="viridis")
        title = "the loss" if lambda_ == 0 else f"interpolated, lambda {lambda_:g}"
        part.set(xlabel="first direction in the space of scores", ylabel="second direction", title=title)
        figure.colorbar(drawn, ax=part, label="mean rank of the positives / length")
        distinct = len(torch.unique((values * 1e9).round()))
        table.append([f"{lambda_:g}", str(distinct), f"{(values - exact).abs().max().item():.3f}"])
    return Drawn(figure, "The loss is constant on pieces; a larger lambda gives wider slopes between them.", table)


def draw_batch_ap() -> Drawn:
    """RaMBO, Fig. 2."""
    test = embed(train(SmoothAPLoss(tau=0.01)))
    full = average_precisions(test.pixels, test.labels).nanmean().item()
    sizes = (8, 16, 32, 64, 128, 256, 512, 1024)
    table = [["batch", "mean of the batches' mAP", "standard deviation"]]
    means, spreads = [], []
    for size in sizes:
        values = batch_values(test, size)
        means.append(values.mean().item())
        spreads.append(values.std().item())
        table.append([f"{size}", f"{means[-1]:.2f}", f"{spreads[-1]:.3f}"])
    table.append([f"all {len(test.labels):,} images", f"{full:.2f}", ""])
    figure, axes = new_figure()
    axes.errorbar(sizes, means, yerr=spreads, marker="o", capsize=3, label="mean and standard deviation of batches")
    axes.axhline(full, color=PAPER, linestyle="--", label=f"mAP of all {len(test.labels):,} images")
    axes.set_xscale("log", base=2)
    name_axes(axes, "images in a batch", "mAP")
    return Drawn(
        figure, "The smaller the batch, the more its mAP overestimates that of the whole set, as in the paper.", table
    )


def draw_collapse() -> Drawn:
    """RaMBO, Fig. 3."""
    figure, axes = new_figure(2)
    table = [["margin", "median of the positives", "median of the negatives", "difference"]]
    for part, margin in zip(axes, (0.0, 0.2)):
        quantiles: list[Tensor] = []

        def measure(_: int, embeddings: Tensor, labels: Tensor, quantiles: list[Tensor] = quantiles) -> None:
            scores = normalize(embeddings) @ normalize(embeddings).T
            same = labels[:, None] == labels
            positive = scores[same & ~torch.eye(len(labels), dtype=torch.bool)]
            levels = torch.tensor([0.1, 0.5, 0.9])
            quantiles.append(torch.stack([positive.quantile(levels), scores[~same].quantile(levels)]))

        train(BlackboxRecallLoss(lambda_=4.0, margin=margin), steps=200, after_step=measure)
        curves = torch.stack(quantiles)
        for number, (name, color) in enumerate((("positives", POSITIVE), ("negatives", NEGATIVE))):
            low, middle, high = curves[:, number].T
            part.plot(middle, color=color, label=name)
            part.fill_between(range(len(low)), low, high, color=color, alpha=0.2)
        name_axes(part, "training step", "score: median, 10 % to 90 %", legend="beside", title=f"margin {margin:g}")
        positive, negative = curves[-20:, :, 1].mean(0).tolist()
        table.append([f"{margin:g}", f"{positive:.2f}", f"{negative:.2f}", f"{positive - negative:.2f}"])
    return Drawn(figure, "With a margin, the scores of positives and negatives move further apart.", table)


def draw_list_length() -> Drawn:
    """RaMBO, Table 6."""
    loss, seconds = BlackboxAPLoss(lambda_=4.0, margin=0.02), {}
    for length in (10**5, 10**6, 10**7):
        torch.manual_seed(0)
        scores = torch.randn(1, length, requires_grad=True)
        relevant = torch.rand(1, length) < 0.01
        times = []
        for _ in range(3):
            start = time.process_time()  # the paper's is of one core; another program's work does not count
            loss.from_scores(scores, relevant).backward()
            times.append(time.process_time() - start)
        seconds[length] = min(times)
    published = {"Xeon Gold, one core": (0.033, 0.331, 3.86), "Tesla V100": (0.0013, 0.007, 0.061)}
    figure, axes = new_figure()
    axes.plot(list(seconds), list(seconds.values()), marker="o", label="here")
    for number, (name, values) in enumerate(published.items()):
        axes.plot(list(seconds), values, color=PAPER, linestyle=(":", "--")[number], marker="s", label=f"paper, {name}")
    axes.set(xscale="log", yscale="log")
    name_axes(axes, "length of the list", "CPU seconds, forward and backward")
    table = [["length", "here", *(f"paper, {name}" for name in published)]]
    for number, (length, value) in enumerate(seconds.items()):
        table.append([f"{length:,}", f"{value:.3g} s", *(f"{values[number]:g} s" for values in published.values())])
    finding = (
        "Most of the time is that of sorting. Ten times the length takes 10 to 12 times as long on the paper's CPU, as "
        "by n log n, and somewhat longer than that here for the longest list."
    )
    return Drawn(figure, finding, table)


# --- FastAP


def draw_bins_and_margin() -> Drawn:
    """FastAP, Fig. 4c."""
    relevant = torch.arange(20)[None] < 10
    margins = np.linspace(0.005, 1.2, 120)
    figure, (above, below) = new_figure(2)
    table = [["bins", "width of a bin", "smallest margin with a loss of 0"]]
    for bins in (5, 10, 20, 40):
        loss, values, lengths = FastAPLoss(num_bins=bins), [], []
        for margin in margins:
            generator = torch.Generator().manual_seed(0)
            spread = 0.05 * torch.rand(20, generator=generator)
            scores = torch.where(relevant, 0.3 + margin / 2 + spread, 0.3 - margin / 2 - spread).requires_grad_()
            value = loss.from_scores(scores, relevant)
            (gradient,) = torch.autograd.grad(value, scores)
            values.append(value.item())
            lengths.append(gradient.norm().item())
        above.plot(margins, values, label=f"{bins} bins")
        below.plot(margins, lengths, label=f"{bins} bins")
        enough = [margin for margin, value in zip(margins, values) if value < 1e-6]
        table.append([str(bins), f"{2 / bins:.2f}", f"{enough[0]:.2f}"])
    name_axes(above, "margin between positives and negatives", "FastAP loss of a perfect ranking")
    name_axes(below, "margin between positives and negatives", "length of the gradient")
    finding = (
        "Coarse bins keep pushing a perfect ranking apart, up to one to two times the width of a bin, 2 / bins, "
        "depending on where the scores lie among the bins."
    )
    return Drawn(figure, finding, table)


# --- ROADMAP


def gaps_of(make: Callable[[], nn.Module], sizes: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
    """Return, for the training and the test images, the mAP of all and the gap of each size, in a row for each seed."""
    rows: dict[str, list[list[float]]] = {"train": [], "test": []}
    for seed in SEEDS:
        network = train(make(), steps=300, classes=8, seed=seed)
        for split, found in rows.items():
            images = embed(network, split)
            full = average_precisions(images.pixels, images.labels).nanmean().item()
            gaps = [batch_values(images, size, least=10).mean().item() - full for size in sizes]
            found.append([full, *gaps])
    return {split: np.array(found) for split, found in rows.items()}


def draw_decomposability() -> Drawn:
    """ROADMAP, abstract."""
    sizes = (16, 32, 64, 128, 256, 512, 1024)
    losses: dict[str, Callable[[], nn.Module]] = {"SupAP alone": SupAPLoss, "with the calibration": ROADMAPLoss}
    found = {name: gaps_of(make, sizes) for name, make in losses.items()}
    figure, axes = new_figure(2)
    table = [["images", "loss", "mAP of all", *(f"gap at {size}" for size in sizes)]]
    titles = {"train": "training images", "test": "classes not in training"}
    for part, (split, title) in zip(axes, titles.items()):
        for name, results in found.items():
            means = results[split].mean(0)
            low, high = results[split].min(0), results[split].max(0)
            part.errorbar(
                sizes, means[1:], yerr=[(means - low)[1:], (high - means)[1:]], marker="o", capsize=3, label=name
            )
            table.append([title, name, *(f"{value:.3f}" for value in means)])
        part.set_xscale("log", base=2)
        name_axes(part, "images in a batch", "mAP within batches minus mAP of all", title=title)
    gains = {}
    for split in titles:
        alone, both = (results[split].mean(0)[1:] for results in found.values())
        gains[split] = alone - both
    late = {split: gain[sizes.index(256) :] for split, gain in gains.items()}
    finding = (
        f"The effect is small. After training in batches of 32, the calibration makes the gap at 16 images smaller by "
        f"{gains['train'][0]:.3f} on the training images, of which the abstract speaks, and by {gains['test'][0]:.3f} "
        f"on other classes. From 256 images on it is gone: the gap is smaller by at most {late['train'].max():.3f} on "
        f"the training images, and between {-late['test'].min():.3f} larger and {late['test'].max():.3f} smaller on "
        f"other classes (means of three seeds)."
    )
    return Drawn(figure, finding, table)


# --- AP-GeM


def draw_classes_in_a_batch() -> Drawn:
    """Revaud et al., Fig. 6."""
    batch, numbers = 256, (8, 16, 32, 64, 128)
    results: dict[int, list[float]] = {}
    for classes in numbers:
        results[classes] = []
        for seed in SEEDS:
            test = embed(
                train(QuantizedAPLoss(num_bins=20), steps=100, classes=classes, per_class=batch // classes, seed=seed)
            )
            results[classes].append(average_precisions(test.pixels, test.labels).nanmean().item())
    figure, axes = new_figure()
    means = [float(np.mean(values)) for values in results.values()]
    below = [mean - min(values) for mean, values in zip(means, results.values())]
    above = [max(values) - mean for mean, values in zip(means, results.values())]
    axes.errorbar(numbers, means, yerr=[below, above], marker="o", capsize=3)
    axes.set_xscale("log", base=2)
    name_axes(axes, f"classes in a batch of {batch} images", "mAP", legend="none")
    table = [["classes", "mAP, mean of three seeds"]]
    table += [[str(classes), f"{mean:.3f}"] for classes, mean in zip(numbers, means)]
    finding = (
        "Here more classes are better up to 64. The paper finds little effect, with 586 landmarks of 72 images on "
        "average; classes of Glyphs have about ten, so a batch of few classes repeats images."
    )
    return Drawn(figure, finding, table)


class Effort:
    """Counts the images that a network embeds forward and backward, the updates and the seconds."""

    def __init__(self) -> None:
        self.forwards = self.backwards = self.updates = 0
        self.start = time.perf_counter()
        self.curve: list[tuple[float, float]] = []  # passes and mAP

    def measure(self, network: nn.Module) -> None:
        """Record the mAP; the time for this does not count."""
        start = time.perf_counter()
        images = embed(network, "val")
        value = average_precisions(images.pixels, images.labels).nanmean().item()
        self.curve.append((self.forwards + self.backwards, value))
        self.start += time.perf_counter() - start

    def row(self, name: str) -> list[str]:
        """Return the line of the table."""
        counts = [f"{number:,}" for number in (self.backwards, self.forwards, self.updates)]
        return [name, *counts, f"{time.perf_counter() - self.start:.1f} s", f"{self.curve[-1][1]:.3f}"]


def train_by_ap(iterations: int, batch: int = 1024) -> Effort:
    """Train with large batches: each image is embedded twice, and propagated back once."""
    images, network, effort, loss = glyphs("train"), new_network(0), Effort(), QuantizedAPLoss(num_bins=20)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
    sampler = batches(images, batch // PER_CLASS, PER_CLASS, 0)
    while effort.updates < iterations:
        sampler.set_epoch(effort.updates // len(sampler))
        for rows in list(sampler)[: iterations - effort.updates]:
            optimizer.zero_grad()
            loss_of_batch = partial(loss, labels=images.labels[rows])
            chunked_backward(network, images.pixels[rows], loss_of_batch, chunk_size=64)
            optimizer.step()
            effort.updates += 1
            effort.forwards += 2 * batch
            effort.backwards += batch
            if effort.updates % 5 == 0:
                effort.measure(network)
    return effort


def mined_triplets(images: Images, pool: Tensor, network: nn.Module, count: int) -> Tensor:
    """Return rows of anchors, positives and negatives: for each anchor of a pool, its hardest negative."""
    with torch.no_grad():
        embeddings = normalize(network(images.pixels[pool]))
    labels = images.labels[pool]
    same = labels[:, None] == labels
    scores = embeddings @ embeddings.T
    anchors = torch.randperm(len(pool))[:count]
    negatives = scores.masked_fill(same, -2)[anchors].argmax(1)
    positives = (same & ~torch.eye(len(pool), dtype=torch.bool))[anchors].float().multinomial(1)[:, 0]
    return pool[torch.stack([anchors, positives, negatives])]  # (3, count)


def train_by_triplets(updates: int, triplets: int = 64, pool: int = 512, reuse: int = 8) -> Effort:
    """Train with triplets, whose negatives are mined in a pool that is embedded for every eighth update."""
    images, network, effort = glyphs("train"), new_network(0), Effort()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.001)
    sampler = batches(images, pool // PER_CLASS, PER_CLASS, 0)
    pools: list[Any] = []
    while effort.updates < updates:
        if not pools:
            sampler.set_epoch(effort.updates)
            pools = list(sampler)
        mined = mined_triplets(images, torch.as_tensor(pools.pop()), network, min(reuse * triplets, pool))
        effort.forwards += pool
        for part in mined.split(triplets, dim=1):
            optimizer.zero_grad()
            anchor, positive, negative = normalize(network(images.pixels[part.flatten()])).view(3, part.shape[1], -1)
            gap = (anchor * negative).sum(1) - (anchor * positive).sum(1)
            (gap + 0.1).clamp(min=0).mean().backward()
            optimizer.step()
            effort.updates += 1
            effort.forwards += part.numel()
            effort.backwards += part.numel()
            if effort.updates % 40 == 0:
                effort.measure(network)
    return effort


def draw_triplets() -> Drawn:
    """Revaud et al., Table 1."""
    efforts = {"AP, batches of 1,024": train_by_ap(60), "64 triplets, mined": train_by_triplets(800)}
    figure, axes = new_figure()
    table = [["method", "images backward", "images forward", "updates", "time", "mAP"]]
    for name, effort in efforts.items():
        passes, values = zip(*effort.curve)
        axes.plot([number / 1000 for number in passes], values, label=name)
        table.append(effort.row(name))
    name_axes(axes, "thousands of images, forward and backward", "mAP of the validation classes")
    finding = (
        "For the same mAP the AP loss needs fewer updates and passes, as in the paper (819K backward and 200 updates "
        "against 1572K and 8,192). With this network of two layers it takes more time, since ranking 1,024 images "
        "takes longer than embedding them."
    )
    return Drawn(figure, finding, table)


FIGURES: dict[str, tuple[str, Callable[[], Drawn]]] = {
    "indicator": ("Smooth-AP, Fig. 2: forms of the indicator", draw_indicator),
    "ap_error": ("Smooth-AP, Fig. 4 and Table 5: error of the approximation by tau, and by bins", draw_ap_error),
    "interpolation": ("RaMBO, Fig. 1: a rank-based loss and its interpolations", draw_interpolation),
    "batch_ap": ("RaMBO, Fig. 2: mAP within a batch, by its size", draw_batch_ap),
    "collapse": ("RaMBO, Fig. 3: scores with and without a margin", draw_collapse),
    "list_length": ("RaMBO, Table 6: time by the length of the list", draw_list_length),
    "bins_and_margin": ("FastAP, Fig. 4c: bins and the margin of a perfect ranking", draw_bins_and_margin),
    "decomposability": ("ROADMAP, abstract: the decomposability gap by the size of the batch", draw_decomposability),
    "classes_in_a_batch": ("Revaud et al., Fig. 6: classes in a batch", draw_classes_in_a_batch),
    "triplets": ("Revaud et al., Table 1: effort of the AP loss and of triplets with mining", draw_triplets),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*FIGURES, []], default=[], help="of the figures; default all")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the figures and of figures.json")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the tensors are small: a second thread waits more than it computes
    file = options.output / "figures.json"
    written: dict[str, Any] = {}
    if file.exists():
        written = json.loads(file.read_text(encoding="utf-8"))
    for name in options.names or FIGURES:
        title, draw = FIGURES[name]
        start = time.perf_counter()
        drawn = draw()
        write_file(options.output / f"{name}.png", drawn.figure)
        written[name] = {"title": title, "finding": drawn.finding, "table": drawn.table}
        ordered = {key: written[key] for key in FIGURES if key in written}
        write_file(file, json.dumps(ordered, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
