"""Short embeddings on Glyphs: truncated, trained with `NestedLoss`, and projected by PCA; and the time of a step.

    python benchmarks/nested.py [--device cuda]

Trains `Embedder("glyph_net", 128)` twice on batches of 384 glyphs, with Smooth-AP and with Smooth-AP in a
`NestedLoss`, and evaluates the test set, whose characters are not those of training, at several lengths. The PCA is
learned from the training images' embeddings of the model without `NestedLoss`. The steps of the two models are timed in
turn, on the same batch. Takes about ten minutes on two cores.
"""

from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from timing import Timing, arguments, environment, interleaved, report
from torch import Tensor, nn

from lightning_retrieval import Embedder, NestedLoss, RetrievalMetrics, RetrievalModule, SmoothAPLoss, Updates
from lightning_retrieval.datamodules import Glyphs
from lightning_retrieval.models import PCAWhitening

DIM = 128
LENGTHS = (8, 16, 32, 64, 128)  # of the evaluation, and of `NestedLoss`
STEPS = 608  # 16 epochs
CLASSES = 96


def trainer(steps: int, device: str) -> pl.Trainer:
    """A Trainer that only trains."""
    accelerator = "gpu" if device == "cuda" else "cpu"
    return pl.Trainer(
        max_steps=steps,
        accelerator=accelerator,
        devices=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def trained(loss: nn.Module, steps: int, data: Glyphs, device: str) -> RetrievalModule:
    """The model of the example with this loss."""
    pl.seed_everything(0, verbose=False)
    module = RetrievalModule(
        Embedder("glyph_net", DIM),
        loss,
        optimizer=partial(torch.optim.AdamW, lr=0.002, fused=True),
        lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps),
        lr_scheduler_interval="step",
        updates=Updates(gradient_clip_val=1.0),
    )
    trainer(steps, device).fit(module, datamodule=data)
    return module.to(device).eval()


@torch.no_grad()
def embed(module: RetrievalModule, images: Tensor, device: str) -> Tensor:
    """The embeddings of these glyphs, on the CPU."""
    parts = [module(part[:, None].float().div(255).to(device)).cpu() for part in images.split(512)]
    return torch.cat(parts)


def mean_ap(embeddings: Tensor, labels: Tensor, dims: tuple[int, ...] = ()) -> dict[int, float]:
    """mAP at each length, and at the full one."""
    metrics = RetrievalMetrics(ks=(1,), dims=dims)
    metrics.update(embeddings, labels)
    values = metrics.compute()
    result = {dim: float(values[f"mAP/{dim}d"]) for dim in dims}
    return {**result, embeddings.shape[1]: float(values["mAP"])}


def row(name: str, values: dict[int, float], step: Timing | None = None) -> dict[str, Any]:
    """A row of the table: mAP at each length, and what is left of it at 16 dimensions."""
    cells: dict[str, Any] = {"model": name}
    cells |= {f"mAP at {dim}": values[dim] for dim in LENGTHS}
    cells["16 / 128"] = values[16] / values[128]
    if step is not None:
        cells["step"] = step
    return cells


def step(module: RetrievalModule, data: Glyphs, device: str) -> Any:
    """A function that computes the loss of one batch and its gradient."""
    batch = next(iter(data.train_dataloader()))
    images, labels, _ = module.unpack_batch(batch)
    images, labels = images.to(device), labels.to(device)
    module.train()

    def run() -> None:
        module.zero_grad()
        loss: Any = module.loss(module(images), labels)
        loss.backward()

    return run


def main() -> None:
    options = arguments("Short embeddings on Glyphs: truncated, nested and by PCA.")
    device, steps, classes, runs = options.device, STEPS, CLASSES, 15
    if options.quick:
        steps, classes, runs = 2, 8, 2
    data = Glyphs(classes_per_batch=classes, samples_per_class=4, num_workers=0)
    test, train = data.test_set, data.train_set
    if options.quick:
        test.images, test.labels = test.images[:600], test.labels[:600]
    plain = trained(SmoothAPLoss(), steps, data, device)
    nested = trained(NestedLoss(SmoothAPLoss(), dims=LENGTHS), steps, data, device)
    steps_of = {"plain": step(plain, data, device), "nested": step(nested, data, device)}
    times = interleaved(steps_of, runs, device)
    plain.eval()
    nested.eval()
    shorter = LENGTHS[:-1]
    rows = []
    for name, module in (("plain", plain), ("nested", nested)):
        rows.append(row(name, mean_ap(embed(module, test.images, device), test.labels, shorter), times[name]))
    of_training, of_test = embed(plain, train.images, device), embed(plain, test.images, device)
    projected = {}
    for dim in LENGTHS:
        whitening = PCAWhitening(dim, power=0.0).fit(of_training)
        projected |= mean_ap(whitening(of_test), test.labels)
    rows.append(row("plain, PCA", projected))
    ratio = times["nested"].median / times["plain"].median
    title = f"Glyphs, seed 0; nested: dims {LENGTHS}; a nested step takes {ratio:.2f} times as long"
    report(title, environment(device), rows, options.json)


if __name__ == "__main__":
    main()
