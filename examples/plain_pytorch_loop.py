"""A training loop in plain PyTorch: loss, memory, chunks, sampler and metrics without a Trainer.

python examples/plain_pytorch_loop.py [STEPS]
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalMetrics, SmoothAPLoss, chunked_backward
from lightning_retrieval.datamodules import Glyphs, PKSampler, RetrievalDataLoader


def backward(
    embed: nn.Module, loss: nn.Module, memory: CrossBatchMemory, batch: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of one batch, 128 images at a time, and return the loss and the embeddings."""
    batch_embeddings: list[Tensor] = []

    def batch_loss(embeddings: Tensor) -> Tensor:
        batch_embeddings.append(embeddings.detach())
        ranked = memory.references(embeddings, batch["labels"], batch["ids"])
        return loss.of_batch(ranked)

    value = chunked_backward(embed, batch["images"], batch_loss, chunk_size=128)
    return value, batch_embeddings[0]


def train(steps: int) -> nn.Module:
    images = Glyphs().train_set  # or any other data set whose items are dicts with images, labels and ids
    sampler = PKSampler(images.labels, classes_per_batch=96, samples_per_class=4)
    batches = RetrievalDataLoader(images, sampler)
    embed, loss, memory = Embedder("glyph_net", embedding_dim=128), SmoothAPLoss(tau=0.01), CrossBatchMemory(size=1024)
    optimizer = torch.optim.AdamW(embed.parameters(), lr=0.002)
    step = 0
    while step < steps:
        batches.set_epoch(step // len(batches))
        for batch in batches:
            optimizer.zero_grad()
            value, embeddings = backward(embed, loss, memory, batch)
            optimizer.step()
            memory.update(embeddings, batch["labels"], batch["ids"])
            step += 1
            print(f"step {step}: loss {value.item():.4f}")
            if step == steps:
                break
    return embed


@torch.no_grad()
def evaluate(embed: nn.Module) -> dict[str, Tensor]:
    metrics = RetrievalMetrics(ks=(1, 10))
    for batch in torch.utils.data.DataLoader(Glyphs().val_set, batch_size=512):
        metrics.update(embed.eval()(batch["images"]), batch["labels"], batch["ids"])
    return metrics.compute()


if __name__ == "__main__":
    steps = 100
    if len(sys.argv) > 1:
        steps = int(sys.argv[1])
    results = evaluate(train(steps))
    print({name: round(float(value), 4) for name, value in results.items()})
