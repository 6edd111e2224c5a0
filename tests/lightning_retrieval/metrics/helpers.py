"""What several tests of the metrics share."""

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_retrieval.callbacks.gallery import nearest_images
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.ranking.labels import Role


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


def nearest_of(metrics, queries, count):
    """{id of a query: {id of an image: whether it is relevant}} of the images that a gallery shows."""
    found = nearest_images(metrics.ranked_lists(), queries, count)
    return {query: {hit.id: hit.relevant for hit in hits} for query, hits in found}


def quarters(rows, dtype=torch.float32):
    """Rows of six coordinates, four of them +-1: cosine scores are exact multiples of 1/4, with many ties."""
    x = torch.zeros(rows, 6, dtype=dtype)
    for row in x:
        row[torch.randperm(6)[:4]] = torch.randint(0, 2, (4,)).to(dtype) * 2 - 1
    return x


# --- an evaluation set on which the curves and the decomposability gap are tested

SIZE = 301  # of the evaluation set below: two blocks of queries, the last one smaller
IDS = torch.randperm(4 * SIZE, generator=torch.Generator().manual_seed(7))[:SIZE]


def points(size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes of one to many images, some of which are one and the same, so that scores tie."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 12, (size,), generator=generator) ** 2 // 4 * 3 - 20
    labels[6] = 999
    centres = torch.randn(150, 4, dtype=torch.float64, generator=generator)
    rows = centres[labels % 150] + torch.randn(size, 4, dtype=torch.float64, generator=generator)
    rows[::7] = rows[0]
    return rows, labels


def roles_of(kind: str, size: int = SIZE) -> torch.Tensor:
    both = torch.full((size,), int(Role.BOTH))
    return both if kind == "all" else torch.where(torch.arange(size) % 3 == 0, int(Role.QUERY), int(Role.GALLERY))


def filled(kind: str, part: slice = slice(None), **settings) -> RetrievalMetrics:
    rows, labels = points()
    metrics, roles = RetrievalMetrics((1,), **settings), roles_of(kind)
    metrics.update(rows[part], labels[part], IDS[part], roles[part])
    return metrics


def lists(kind: str, chosen=None):
    """Scores and relevance of each query's candidates, one query at a time."""
    rows, labels = points()
    unit, roles = nn.functional.normalize(rows, dim=1).numpy(), roles_of(kind).numpy()
    labels, chosen = labels.numpy(), np.arange(SIZE) if chosen is None else np.asarray(chosen)
    for query in chosen[roles[chosen] & Role.QUERY > 0]:
        others = chosen[(roles[chosen] & Role.GALLERY > 0) & (chosen != query)]
        yield (unit[others] @ unit[query]).round(12), labels[others] == labels[query]
