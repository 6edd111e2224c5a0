"""Retrieval with a gallery of one random image of each class, drawn several times: re-identification of vehicles."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_retrieval.checks import check_integer
from lightning_retrieval.metrics.retrieval import RetrievalMetrics
from lightning_retrieval.metrics.base import GALLERY, QUERY, Rows


class RandomGalleryMetrics(RetrievalMetrics):
    """`RetrievalMetrics` whose gallery is one random image of each label and whose queries are all other images.

    The values are means over several draws of the gallery, which follow from `seed` and the ids alone. Rows that are
    neither query nor gallery, such as images that could not be read, stay out; else roles are not looked at.

    Args:
        ks: the k of R@k, each >= 1.
        draws: how many galleries, >= 1.
        seed: what the draws follow from, >= 0.
        settings: those of `RetrievalMetrics`.

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
        `per_query` has a row for each draw and query.

    Source:
        Liu, Tian, Wang, Pang and Huang, CVPR 2016: the test protocol of VehicleID.
    """

    def __init__(self, ks: Sequence[int] = (1, 5), draws: int = 10, seed: int = 0, **settings: Any) -> None:
        super().__init__(ks, **settings)
        self.draws = check_integer(type(self).__name__, "draws", draws, least=1)
        self.seed = check_integer(type(self).__name__, "seed", seed, least=0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, draws={self.draws}, seed={self.seed}"

    def _per_query(self) -> dict[str, Tensor]:
        rows = self._rows()
        rows = Rows(*(part[(rows.roles > 0).to(part.device)] for part in rows))
        tables = []
        generator = torch.Generator().manual_seed(self.seed)
        unique, inverse = torch.unique(rows.labels[:, 0], return_inverse=True)
        for _ in range(self.draws):
            order = torch.randperm(len(rows.ids), generator=generator).to(inverse.device)
            first = torch.full_like(unique, len(order)).scatter_reduce(0, inverse, order, "amin")
            drawn = order == first[inverse]  # the image of each label whose random number is least
            roles = torch.where(drawn, GALLERY, QUERY)
            tables.append(self._values(rows, self._ranking(rows._replace(roles=roles))))
        return {name: torch.cat([table[name] for table in tables]) for name in tables[0]}
