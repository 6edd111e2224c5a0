"""What several tests of the metrics share."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_retrieval.metrics import RetrievalMetrics


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def compute(embeddings, labels, ks=(1, 2, 4, 8), **kwargs):
    """The results of `RetrievalMetrics` as numbers."""
    metrics = RetrievalMetrics(ks=ks)
    metrics.update(embeddings, labels, **kwargs)
    return numbers(metrics.compute())


def numbers(results):
    return {name: value.item() for name, value in results.items()}


def quarters(rows, dtype=torch.float32):
    """Rows of six coordinates, four of them +-1: cosine scores are exact multiples of 1/4, with many ties."""
    x = torch.zeros(rows, 6, dtype=dtype)
    for row in x:
        row[torch.randperm(6)[:4]] = torch.randint(0, 2, (4,)).to(dtype) * 2 - 1
    return x
