"""The decomposability gap of ROADMAP: mean AP within batches of a set, minus mean AP of the whole set.

Ramzi et al., "Robust and Decomposable Average Precision for Image Retrieval", NeurIPS 2021. Training optimises the
lists of batches, but the list of the whole set is reported. In a batch a query has fewer candidates that could come
before its positives, so AP within batches is higher.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.distributed import Shard
from lightning_retrieval.metrics.definitions import average_precision
from lightning_retrieval.metrics.gathering import Rows
from lightning_retrieval.metrics.query_gallery import query_gallery
from lightning_retrieval.metrics.retrieval import RetrievalMetrics, query_values
from lightning_retrieval.metrics.table import QueryMetric
from lightning_retrieval.metrics.unit_rows import unit_rows
from lightning_retrieval.ranking.float64 import float64_device

_AP = QueryMetric(average_precision, "AP", "mAP")


def decomposability_gap(metrics: RetrievalMetrics, classes: int, samples: int) -> Float[Tensor, ""]:
    """Mean AP of the queries within batches of the set, minus mAP of the set.

    This is a collective operation of the metric's processes, like `compute`, and has the same result for any number of
    them.

    Args:
        metrics: holds the embeddings of the set.
        classes: number of classes of a batch.
        samples: number of images of each class in a batch.
    """
    rows, shard = metrics.gather()
    batches = cut_into_batches(rows.labels[:, 0].cpu(), classes, samples)
    sums = torch.zeros(len(batches), 2, dtype=torch.float64, device=float64_device(rows.ids.device))
    for first in range(0, len(batches), shard.count):
        batch = _own_batch(rows, batches[first : first + shard.count], shard)
        if len(batch.ids) == 0:  # the last batches are of other processes
            continue
        index = first + shard.index
        lists = query_gallery(
            batch, metrics.query_expansion, metrics.database_augmentation, owner=type(metrics).__name__
        )
        ap = query_values(lists, [_AP])["AP"]
        sums[index] = torch.stack([ap.nansum(), (~ap.isnan()).sum()])
    shard.add_up(sums)  # other processes have zeros for each batch: the sum is exact
    total, queries = sums.sum(0)
    gap: Tensor = total / queries - metrics.compute()["mAP"]
    return gap


def _own_batch(rows: Rows, batches: Sequence[Int[Tensor, " batch"]], shard: Shard) -> Rows:
    """The rows of this process's batch as if a metric had been updated with them, with the finest level of labels.

    This is a collective operation if there are several processes.

    Args:
        rows: of the set.
        batches: the rows of each process's batch; the last processes may have none.
        shard: this process.
    """
    nothing = batches[0][:0]
    of_process = [batch.sort().values for batch in batches] + [nothing] * (shard.count - len(batches))
    every = torch.cat(of_process).to(rows.ids.device)
    embeddings = rows.embeddings.select(every).distribute([len(batch) for batch in of_process])
    own = rows.select(of_process[shard.index].to(rows.ids.device))
    return own._replace(embeddings=unit_rows([embeddings.to(rows.ids.device)]), labels=own.labels[:, :1])


def cut_into_batches(labels: Int[Tensor, " row"], classes: int, samples: int) -> list[Int[Tensor, " _"]]:
    """Cut a set into batches like those of a PK sampler.

    The images of each class are cut into groups of `samples` images, in random order; the last group of a class may be
    smaller. Batches take `classes` groups at a time: the first group of every class, then the second groups, and so on.
    The groups of a batch are from different classes, except in a batch that contains, for example, both first and
    second groups. The last batch is dropped if it has fewer groups, unless it is the only one. The random order is
    always the same.

    Args:
        labels: of the images of the set.
        classes: number of groups in a batch.
        samples: number of images in a group.

    Returns:
        The rows of each batch.
    """
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(len(labels), generator=generator)
    rows = shuffled[labels[shuffled].argsort(stable=True)]  # class by class
    _, class_of_row, class_sizes = torch.unique_consecutive(labels[rows], return_inverse=True, return_counts=True)
    class_starts = class_sizes.cumsum(0) - class_sizes
    position_in_class = torch.arange(len(rows)) - class_starts[class_of_row]
    random_class_order = torch.randperm(len(class_sizes), generator=generator)
    # All first groups of the classes, then all second groups, and so on.
    group_round = position_in_class // samples
    group_key = (group_round * len(class_sizes) + random_class_order[class_of_row]).sort(stable=True)
    group = torch.unique_consecutive(group_key.values, return_inverse=True)[1]
    batch_sizes = torch.bincount(group // classes)
    batches = list(rows[group_key.indices].split(batch_sizes.tolist()))
    groups = int(group[-1]) + 1
    last_is_smaller = groups % classes != 0
    if last_is_smaller and len(batches) > 1:
        return batches[:-1]
    return batches
