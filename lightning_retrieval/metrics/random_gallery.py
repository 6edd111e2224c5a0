"""Retrieval with random galleries of one image of each class: the protocol of vehicle re-identification."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lightning_retrieval.checks import check_integer
from lightning_retrieval.metrics.gathering import Rows
from lightning_retrieval.metrics.retrieval import RetrievalMetrics
from lightning_retrieval.ranking.roles import Role, has_role


def draw_one_of_each(labels: Int[Tensor, " row"], generator: torch.Generator) -> Bool[Tensor, " row"]:
    """True for one random row of each label."""
    unique, inverse = torch.unique(labels, return_inverse=True)
    random_order = torch.randperm(len(labels), generator=generator).to(labels.device)
    first = torch.full_like(unique, len(labels)).scatter_reduce(0, inverse, random_order, "amin")
    return random_order == first[inverse]


def _with_any_role(rows: Rows) -> Rows:
    return rows.select(has_role(rows.roles, Role.BOTH))


class RandomGalleryMetrics(RetrievalMetrics):
    """`RetrievalMetrics` whose gallery is one random image of each label and whose queries are all other images.

    The gallery is drawn several times, and the values are means over the draws. The draws depend on `seed` and the ids
    only. Images without a role, such as images that could not be read, are skipped; otherwise roles are ignored.

    Args:
        ks: the k of R@k, each >= 1.
        draws: number of galleries, from 1 to 1,000,000.
        seed: seed of the draws, >= 0.
        settings: settings of `RetrievalMetrics` (`map_ks`, `map_divisor`, `extra_metrics`, `alpha`), of
            `EmbeddingMetric` (`query_expansion`, `database_augmentation`, `embeddings_on_cpu`) and of
            `torchmetrics.Metric`.

    Raises:
        ValueError: if `draws` is below 1 or `seed` below 0; else as `RetrievalMetrics`.
        TypeError: if `draws` or `seed` is not an integer; else as `RetrievalMetrics`.

    Example:
        >>> import torch
        >>> from lightning_retrieval.metrics import RandomGalleryMetrics
        >>> metrics = RandomGalleryMetrics(ks=(1,), draws=10)
        >>> metrics.update(torch.eye(6)[[0, 0, 0, 1, 1, 1]], torch.tensor([5, 5, 5, 2, 2, 2]), ids=torch.arange(6))
        >>> metrics.compute()["R@1"]
        tensor(1., dtype=torch.float64)

    Relations:
        `per_query` returns one row for each draw and query.

    Source:
        Liu, Tian, Wang, Pang and Huang, CVPR 2016: the test protocol of VehicleID.
    """

    def __init__(self, ks: Sequence[int] = (1, 5), *, draws: int = 10, seed: int = 0, **settings: Any) -> None:
        super().__init__(ks, **settings)
        self.draws = check_integer(type(self).__name__, "draws", draws, least=1, most=1_000_000)
        self.seed = check_integer(type(self).__name__, "seed", seed, least=0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, draws={self.draws}, seed={self.seed}"

    def _query_values(self, rows: Rows) -> dict[str, Tensor]:
        """The results of `per_query`, of one draw after the other."""
        rows = _with_any_role(rows)
        generator = torch.Generator().manual_seed(self.seed)
        draws = []
        for _ in range(self.draws):
            in_gallery = draw_one_of_each(rows.labels[:, 0], generator)
            roles = torch.where(in_gallery, int(Role.GALLERY), int(Role.QUERY))
            draws.append(super()._query_values(rows._replace(roles=roles)))
        values = {}
        for name in draws[0]:
            values[name] = torch.cat([draw[name] for draw in draws])
        return values
