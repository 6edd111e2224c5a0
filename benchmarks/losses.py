"""Forward and backward pass of every loss: time and peak memory at several batch sizes, compared with a peer.

    python benchmarks/losses.py             # about five minutes on two cores
    python benchmarks/losses.py --products  # compared with their matrix products alone, about three minutes
    python benchmarks/losses.py --processes  # the work of one of many processes, about two minutes
    python benchmarks/losses.py --classes  # with few and large classes, half a minute
    python benchmarks/losses.py --rounding  # with embeddings in half precision, a few seconds
    python benchmarks/losses.py --compile  # compiled by torch.compile, ten minutes

The peer is the loss of the same name in pytorch-metric-learning if there is one, else a direct implementation of the
formula with a tensor of shape (B, B, B) or (B, bins, B); for the black-box losses it is one argsort of the (B, B) score
matrix, and for log rank, which no other library has, it is the Smooth-AP of this one. A loss and its peer are timed
alternately in one process, on the same embeddings. Classes of 4 images are contiguous, since the Smooth-AP of
pytorch-metric-learning needs that. Its losses have other values, because they count the query in its own list or form
groups differently. Memory is the peak that a step adds, measured in a separate process.

The matrix products of a loss are one of B x B x D in the forward pass and two in the backward pass. They and the losses
run in turn in one process, and the ratio is the median of the ratios of each turn. On a CPU the time is CPU time, so
that other work on the machine hardly counts; it is measured with one thread and with two.

With W processes, each computes the loss of 1 / W of the queries; what is not divided is the work of every process. The
share of counting is the CPU time in which the first process counts the positives of the queries, divided by that of its
loss, with one thread; the processes need not exist for this.

With `--classes`, the time of losses over soft ranks is divided by the time of log rank, which counts negatives only.
CPU time, one thread, in turn. "One large" is a batch with one class of 300 images and classes of 4.

With `--compile`, each loss and `torch.compile(loss, dynamic=True)` run in turn, after two compiled steps. CPU time, one
thread.

With `--rounding`, unit rows are rounded to half precision, as if processes sent them so, and the loss is computed in
float32, as always. The errors are those of the loss and of the norm of its gradient for the embeddings, relative to
those without rounding, the largest of several batches. "One direction": the mean similarity of two images is 0.98, as
in an untrained network. "In classes": as in training, with a Smooth-AP loss of 0.14. Where the loss is nearly 0,
relative errors mean nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from timing import (
    arguments,
    cpu_clock,
    environment,
    interleaved,
    peak_added_memory,
    range_of,
    report,
    timed_in_turn,
)
from torch import Tensor, nn
from torch.nn.functional import normalize

from lightning_retrieval import losses
from lightning_retrieval.ranking.lists import Lists, QueryRange
from lightning_retrieval.ranking.rows import Rows

DIM, PER_CLASS, MIB = 512, 4, 1 << 20
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "SmoothAPLoss": losses.SmoothAPLoss,
    "FastAPLoss": losses.FastAPLoss,
    "QuantizedAPLoss": losses.QuantizedAPLoss,
    "BlackboxAPLoss": losses.BlackboxAPLoss,
    "BlackboxRecallLoss": losses.BlackboxRecallLoss,
    "SupAPLoss": losses.SupAPLoss,
    "CalibrationLoss": losses.CalibrationLoss,
    "ROADMAPLoss": losses.ROADMAPLoss,
    "HAPLoss": losses.HAPLoss,
    "RecallAtKLoss": losses.RecallAtKLoss,
    "LogRankLoss": losses.LogRankLoss,
}

OF_SOFT_RANKS = ("SmoothAPLoss", "SupAPLoss", "ROADMAPLoss", "LogRankLoss")


def their_smooth_ap() -> nn.Module:
    from pytorch_metric_learning.losses import SmoothAPLoss

    loss: nn.Module = SmoothAPLoss(temperature=0.01)
    return loss


def their_fast_ap() -> nn.Module:
    from pytorch_metric_learning.losses import FastAPLoss

    loss: nn.Module = FastAPLoss(num_bins=10)
    return loss


class PlainAPQ(nn.Module):
    """AP_Q with a tensor of shape (B, bins, B)."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        x = normalize(embeddings)
        centres = torch.linspace(1, -1, 20, device=x.device)[:, None]
        others = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
        positive = (labels[:, None] == labels) & others
        q = (1 - (x @ x.T)[:, None].sub(centres).abs() * 19 / 2).clamp(min=0)  # (B, bins, B)
        h, h_pos = (q * others[:, None]).sum(2), (q * positive[:, None]).sum(2)
        precision = h_pos.cumsum(1) / h.cumsum(1).clamp(min=1e-12)
        return 1 - ((precision * h_pos).sum(1) / positive.sum(1)).mean()


class PlainSoftRanks(nn.Module):
    """A loss of soft ranks with a tensor of shape (B, B, B); `value` computes it from ranks and positives."""

    def __init__(self, value: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.value = value

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        x = normalize(embeddings)
        if labels.ndim > 1:
            labels = labels[:, 0]
        s = x @ x.T
        others = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
        above = torch.sigmoid((s[:, None] - s[:, :, None]) / 0.01) * others[:, None]  # (query, i, j)
        return self.value(0.5 + above.sum(2), (labels[:, None] == labels) & others)


def recall_of_ranks(rank: Tensor, positive: Tensor) -> Tensor:
    ks = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], device=rank.device)[:, None, None]
    found = (torch.sigmoid(ks - rank) * positive).sum(2).minimum(ks[:, 0])  # (k, query)
    return 1 - (found / positive.sum(1).minimum(ks[:, 0])).mean()


def precision_of_ranks(rank: Tensor, positive: Tensor) -> Tensor:
    return 1 - ((positive / rank).sum(1) / positive.sum(1)).mean()


class Argsort(nn.Module):
    """One argsort of the score matrix, without gradient: a lower bound for a loss that ranks."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        x = normalize(embeddings.detach())
        if not hasattr(self, "scores"):
            self.scores = x @ x.T
        self.scores.argsort(dim=1, descending=True)
        return embeddings[0, 0] * 0


# The peer of each loss, and the batch size at which the two are compared.
PEERS: dict[str, tuple[str, Callable[[], nn.Module], int]] = {
    "SmoothAPLoss": ("pytorch-metric-learning SmoothAPLoss", their_smooth_ap, 384),
    "FastAPLoss": ("pytorch-metric-learning FastAPLoss", their_fast_ap, 2048),
    "QuantizedAPLoss": ("plain (B, bins, B)", PlainAPQ, 2048),
    "BlackboxAPLoss": ("argsort of the scores", Argsort, 2048),
    "BlackboxRecallLoss": ("argsort of the scores", Argsort, 2048),
    "SupAPLoss": ("pytorch-metric-learning SmoothAPLoss", their_smooth_ap, 384),
    "ROADMAPLoss": ("pytorch-metric-learning SmoothAPLoss", their_smooth_ap, 384),
    "HAPLoss": ("plain (B, B, B)", lambda: PlainSoftRanks(precision_of_ranks), 384),
    "RecallAtKLoss": ("plain (B, B, B)", lambda: PlainSoftRanks(recall_of_ranks), 384),
    "LogRankLoss": ("SmoothAPLoss of this library", losses.SmoothAPLoss, 4096),
}


def step(
    loss: nn.Module, batch: int, device: str, levels: bool = False, labels: Tensor | None = None
) -> Callable[[], Any]:
    """A function that computes the loss of a batch and its gradient; by default, classes have 4 images."""
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(batch, DIM, generator=generator).to(device).requires_grad_()
    if labels is None:
        labels = torch.arange(batch, device=device) // PER_CLASS
    if levels:  # four classes form one coarse class
        labels = torch.stack([labels, labels // 4], 1)

    def run() -> None:
        embeddings.grad = None
        loss(embeddings, labels).backward()

    return run


def measured(name: str, batch: int, device: str) -> Callable[[], Any]:
    """To measure memory: runs a small step first, which loads what the first use loads."""
    step(LOSSES[name](), 2 * PER_CLASS, device, name == "HAPLoss")()
    return step(LOSSES[name](), batch, device, name == "HAPLoss")


def batch_sizes(name: str, device: str, quick: bool) -> tuple[int, ...]:
    if quick:
        return (32,)
    if device != "cpu" or name == "SmoothAPLoss":
        return (384, 2048, 4096, 16384)
    return (384, 2048, 4096)


def number_of_runs(batch: int, quick: bool) -> int:
    if quick or batch > 4096:
        return 1
    return 9 if batch == 384 else 5


def measure(name: str, batch: int, device: str, quick: bool) -> dict[str, Any]:
    """One row of the table, without memory."""
    peer, make_peer, compared_at = PEERS.get(name, ("", None, 0))
    functions = {"ours": step(LOSSES[name](), batch, device, name == "HAPLoss")}
    if make_peer is not None and (quick or batch == compared_at):
        functions["peer"] = step(make_peer(), batch, device)
    times = interleaved(functions, number_of_runs(batch, quick), device)
    row: dict[str, Any] = {"loss": name, "batch": batch, "time": times["ours"]}
    if "peer" in times:
        ratio = times["peer"].median / times["ours"].median
        row |= {"peer": peer, "peer's time": times["peer"], "times faster": ratio}
    return row


def products(batch: int, device: str) -> Callable[[], Any]:
    """A function that computes the matrix products of a loss and its gradient, and nothing else."""
    embeddings = normalize(torch.randn(batch, DIM, device=device))
    scores = embeddings @ embeddings.T

    def run() -> None:
        torch.mm(embeddings, embeddings.T, out=scores)
        scores @ embeddings
        scores.T @ embeddings

    return run


def compare_with_products(device: str, quick: bool) -> list[dict[str, Any]]:
    """Every loss and its matrix products alone, with one thread and with two."""
    batch, runs = (32, 1) if quick else (4096, 9)
    threads = (1, 2) if device == "cpu" else (1,)
    rows: list[dict[str, Any]] = []
    for number in threads:
        torch.set_num_threads(number)
        functions = {"products": products(batch, device)}
        for name, make in LOSSES.items():
            functions[name] = step(make(), batch, device, name == "HAPLoss")
        turns = timed_in_turn(functions, runs, device, clock=cpu_clock(device))
        for name in LOSSES:
            row: dict[str, Any] = {"loss": name, "batch": batch, "threads": number}
            row |= range_of("over its products", [turn[name] / turn["products"] for turn in turns])
            rows.append(row | {"runs": runs})
    return rows


def of_one_process(processes: int, batch: int, device: str) -> dict[str, Callable[[], Any]]:
    """The Smooth-AP of the queries of the first of some processes, and its counting of positives alone."""
    embeddings = torch.randn(batch, DIM, device=device).requires_grad_()
    labels, ids = torch.arange(batch, device=device) // PER_CLASS, torch.arange(batch, device=device)
    queries = QueryRange(0, batch // processes, total=lambda sums: sums)
    loss = losses.SmoothAPLoss()

    def run() -> None:
        embeddings.grad = None
        loss(embeddings, labels, ids=ids, queries=queries).backward()

    def count() -> None:
        rows = Rows(labels, ids)
        Lists(rows, rows).count_positives({"embeddings": embeddings}, queries)

    return {"loss": run, "counting": count}


def share_of_counting(device: str, quick: bool) -> list[dict[str, Any]]:
    """How much of the work of a process is counting, by the number of processes."""
    batches, runs = ((512,), 1) if quick else ((4096, 8192), 9)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for batch in batches:
        for processes in (1, 8, 64, 512):
            functions = of_one_process(processes, batch, device)
            turns = timed_in_turn(functions, runs, device, clock=cpu_clock(device))
            of_loss = interleaved({"loss": functions["loss"]}, runs, device, clock=cpu_clock(device))["loss"]
            counting = [turn["counting"] / turn["loss"] for turn in turns]
            row: dict[str, Any] = {"batch": batch, "processes": processes, "loss": of_loss}
            rows.append(row | range_of("share of counting", counting) | {"runs": runs})
    return rows


def classes_of(batch: int, size: int | None) -> Tensor:
    """Labels of classes of one size, or of one class of 300 (or half of the batch) and classes of 4."""
    if size is not None:
        return torch.arange(batch) // size
    large = min(300, batch // 2)
    small = 1 + torch.arange(batch - large) // PER_CLASS
    return torch.cat([torch.zeros(large, dtype=torch.long), small])


def with_large_classes(device: str, quick: bool) -> list[dict[str, Any]]:
    """The losses over soft ranks and log rank, by the number of images of a class."""
    batch, runs = (32, 1) if quick else (768, 5)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for size in (PER_CLASS, batch // 16, batch // 4, batch // 2, batch, None):
        labels = classes_of(batch, size).to(device)
        functions = {name: step(LOSSES[name](), batch, device, labels=labels) for name in OF_SOFT_RANKS}
        turns = timed_in_turn(functions, runs, device, clock=cpu_clock(device))
        for name in OF_SOFT_RANKS[:-1]:
            row: dict[str, Any] = {"loss": name, "batch": batch, "images of a class": size or "one large"}
            row |= range_of("over log rank", [turn[name] / turn["LogRankLoss"] for turn in turns])
            rows.append(row | {"runs": runs})
    return rows


def compare_compiled(quick: bool) -> list[dict[str, Any]]:
    """Each loss as it is, and compiled."""
    batch, runs, names = (32, 1, ["CalibrationLoss"]) if quick else (384, 9, list(LOSSES))
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    rows: list[dict[str, Any]] = []
    for name in names:
        torch._dynamo.reset()
        loss = LOSSES[name]()
        compiled = torch.compile(loss, dynamic=True)
        has_levels = name == "HAPLoss"
        functions = {
            "plain": step(loss, batch, "cpu", has_levels),
            "compiled": step(compiled, batch, "cpu", has_levels),
        }
        turns = timed_in_turn(functions, runs, "cpu", warm_up=2, clock=cpu_clock("cpu"))
        ratio = range_of("compiled over plain", [turn["compiled"] / turn["plain"] for turn in turns])
        rows.append({"loss": name, "batch": batch} | ratio | {"runs": runs})
    return rows


# The lengths of the vectors that all images, the images of a class and a single image have in common.
ROUNDED_BATCHES = {"one direction": (3.0, 0.3, 0.3), "unrelated": (0.0, 0.0, 1.0), "in classes": (0.0, 1.0, 2.2)}
ROUNDED_LOSSES = ("SmoothAPLoss", "SupAPLoss", "FastAPLoss", "QuantizedAPLoss", "ROADMAPLoss", "BlackboxAPLoss")


def unit_rows(kind: str, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Embeddings of length 1 and their labels."""
    of_all, of_class, of_image = ROUNDED_BATCHES[kind]
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(batch) // PER_CLASS
    rows = of_image * torch.randn(batch, DIM, generator=generator)
    rows += of_class * torch.randn(batch // PER_CLASS, DIM, generator=generator)[labels]
    return normalize(rows + of_all * torch.randn(1, DIM, generator=generator)), labels


def errors_of_rounding(loss: nn.Module, rows: Tensor, labels: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """The relative errors of the loss and of its gradient."""
    values, gradients = [], []
    for embeddings in (rows.clone(), rows.to(dtype).float()):
        value = loss(embeddings.requires_grad_(), labels)
        value.backward()
        values.append(value.detach())
        gradients.append(embeddings.grad)
    exact, rounded = gradients
    return float((values[1] - values[0]).abs() / values[0]), float((rounded - exact).norm() / exact.norm())


def compare_rounded(quick: bool) -> list[dict[str, Any]]:
    """Every loss with each kind of batch, in both types."""
    batch, seeds = (32, 1) if quick else (384, 5)
    rows: list[dict[str, Any]] = []
    for name in ROUNDED_LOSSES:
        for kind in ROUNDED_BATCHES:
            row: dict[str, Any] = {"loss": name, "batch": batch, "embeddings": kind}
            for dtype in (torch.bfloat16, torch.float16):
                batches = (unit_rows(kind, batch, seed) for seed in range(seeds))
                errors = [errors_of_rounding(LOSSES[name](), *drawn, dtype) for drawn in batches]
                of_losses, of_gradients = zip(*errors)
                short = str(dtype).removeprefix("torch.")
                row |= {f"{short} loss %": 100 * max(of_losses), f"{short} gradient %": 100 * max(of_gradients)}
            rows.append(row)
    return rows


def main() -> None:
    options = arguments(
        "Forward and backward pass of every loss, compared with a peer.",
        products="compare them with their matrix products instead",
        classes="compare losses over soft ranks with log rank, with few and large classes, instead",
        processes="measure the work of one of many processes instead",
        rounding="measure the errors of embeddings in half precision instead",
        compile="compare them with themselves, compiled, instead",
    )
    device, quick = options.device, options.quick
    if options.rounding:
        title = f"Errors of losses whose embeddings are rounded, K = {PER_CLASS}, D = {DIM}; largest of the batches"
        report(title, environment("cpu"), compare_rounded(quick), options.json)
        return
    if options.compile:
        title = f"Compiled losses over plain ones, K = {PER_CLASS}, D = {DIM}; CPU time"
        report(title, environment("cpu"), compare_compiled(quick), options.json)
        return
    if options.classes:
        title = f"Losses over soft ranks, over log rank, D = {DIM}; CPU time on a CPU"
        report(title, environment(device), with_large_classes(device, quick), options.json)
        return
    if options.processes:
        title = f"Smooth-AP of one of W processes, K = {PER_CLASS}, D = {DIM}; CPU time on a CPU"
        report(title, environment(device), share_of_counting(device, quick), options.json)
        return
    if options.products:
        title = f"Losses over their matrix products, K = {PER_CLASS}, D = {DIM}; CPU time on a CPU"
        rows = compare_with_products(device, quick)
        report(title, environment(device), rows, options.json)
        return
    rows = []
    for name in LOSSES:
        for batch in batch_sizes(name, device, quick):
            row = measure(name, batch, device, quick)
            measure_memory = not rows if quick else batch >= 4096
            if measure_memory:
                row["added MiB"] = peak_added_memory(measured, device, name, batch, device) / MIB
            rows.append(row)
    title = f"Losses, forward and backward, K = {PER_CLASS}, D = {DIM}; median (lowest to highest)"
    report(title, environment(device, "pytorch-metric-learning"), rows, options.json)


if __name__ == "__main__":
    main()
