"""The decomposability gap of ROADMAP: mean AP within the batches that a set is cut into, minus AP of the set.

Ramzi et al., "Robust and Decomposable Average Precision for Image Retrieval", NeurIPS 2021. Training sees the lists of
batches; what is reported is the list of the whole set. In a batch a query has fewer candidates that could come before
its positives, so that AP there is higher.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.distributed import sum_over_ranks
from lightning_retrieval.metrics.retrieval import RetrievalMetrics
from lightning_retrieval.metrics.base import GALLERY, QUERY
from lightning_retrieval.ranking.labels import finest


def decomposability_gap(metrics: RetrievalMetrics, classes: int, samples: int) -> Float[Tensor, ""]:
    """Mean AP of the queries within batches of the set, minus mAP of the set.

    Collective where there are several processes, as `compute` is, and the same for any number of them.

    Args:
        metrics: with the set's embeddings.
        classes: of a batch.
        samples: images of each class in a batch.
    """
    rows, (part, parts) = metrics.gathered()
    batches = cut_into_batches(finest(rows.labels).cpu(), classes, samples)
    sums = torch.zeros(len(batches), 2, dtype=torch.float64, device=rows.ids.device)
    for place in range(part, len(batches), parts):
        batch = batches[place].to(rows.ids.device)
        within = RetrievalMetrics(
            query_expansion=metrics.query_expansion,
            database_augmentation=metrics.database_augmentation,
            sync_on_compute=False,
        ).to(batch.device)
        roles = rows.roles[batch]
        within.update(
            rows.embeddings[batch.to(rows.embeddings.device)].to(batch.device),
            finest(rows.labels)[batch],
            rows.ids[batch],
            is_query=roles & QUERY > 0,
            is_gallery=roles & GALLERY > 0,
        )
        ap = within._per_query()["AP"]  # `compute` would warn of a batch without any positive
        sums[place] = torch.stack([ap.nansum(), (~ap.isnan()).sum()])
    total, queries = sum_over_ranks(sums).sum(0)  # each row is another rank's zero: the sum is exact
    gap: Tensor = total / queries - metrics.compute()["mAP"]
    return gap


def cut_into_batches(labels: Int[Tensor, " row"], classes: int, samples: int) -> list[Int[Tensor, " batch"]]:
    """Rows of batches of `classes` groups of `samples` images of one class, each image in one group, in random order.

    The order is the same every time. The last group of a class may be smaller. The last batch is left out where it has
    fewer groups, unless it is the only one.
    """
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(len(labels), generator=generator)
    rows = shuffled[labels[shuffled].argsort(stable=True)]  # class by class
    _, of_class, sizes = torch.unique_consecutive(labels[rows], return_inverse=True, return_counts=True)
    place = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[of_class]
    turn = torch.randperm(len(sizes), generator=generator)
    # All first groups, then all second ones, and so on: the groups of a batch are of different classes but at a seam.
    order = (place // samples * len(sizes) + turn[of_class]).sort(stable=True)
    group = torch.unique_consecutive(order.values, return_inverse=True)[1]
    batches = list(rows[order.indices].split(torch.bincount(group // classes).tolist()))
    whole = (int(group[-1]) + 1) % classes == 0
    return batches if whole or len(batches) == 1 else batches[:-1]
