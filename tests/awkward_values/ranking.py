"""Valid calls of query expansion and database augmentation."""

import torch

from lightning_retrieval import DatabaseAugmentation, QueryExpansion
from tests.awkward_values.calls import Call


def settings():
    return {"alpha": 2.0, "k": 2}


def queries():
    return torch.tensor([[1.0, 0.0], [0.0, 1.0]])


def gallery():
    return torch.tensor([[1.0, 0.1], [0.6, 0.8], [-1.0, 0.5], [0.1, 1.0]])


def rows():
    return {"queries": queries(), "gallery": gallery(), "self_index": torch.tensor([0, -1])}


CALLS = {
    "QueryExpansion": [
        Call("QueryExpansion", QueryExpansion, settings, use=lambda expand: expand(**rows())),
        Call("QueryExpansion", QueryExpansion(k=2), rows, signature=QueryExpansion.__call__),
    ],
    "DatabaseAugmentation": [
        Call("DatabaseAugmentation", DatabaseAugmentation, settings, use=lambda augment: augment(gallery())),
        Call(
            "DatabaseAugmentation",
            DatabaseAugmentation(k=2),
            lambda: {"gallery": gallery()},
            signature=DatabaseAugmentation.__call__,
        ),
    ],
}
