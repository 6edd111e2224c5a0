"""Values that NumPy and PyTorch accept where nobody means them."""

import numpy as np
import torch

from lightning_retrieval import CrossBatchMemory, RetrievalIndex, RetrievalMetrics, SmoothAPLoss
from lightning_retrieval.datamodules import ImageIndex, PKSampler
from lightning_retrieval.invalid import InvalidType, InvalidValue
from tests.refusals import refusal_test

ROWS = np.eye(4, dtype=np.float32)
LABELS = np.array([0, 0, 1, 1])
TOO_LARGE = torch.tensor([1, 2, 3, 2**63 + 9], dtype=torch.uint64)


def masked(array):
    """The array with its last row masked: the values below the mask are not meant."""
    mask = np.zeros(array.shape, bool)
    mask[-1] = True
    return np.ma.masked_array(array, mask)


def index(**settings):
    made = RetrievalIndex(4)
    made.add(**{"embeddings": torch.eye(4), "ids": torch.arange(4), **settings})
    return made


TABLE = {
    "PKSampler": [
        (lambda: PKSampler(masked(LABELS), classes_per_batch=2, samples_per_class=2), InvalidValue, "labels")
    ],
    "ImageIndex": [
        (lambda: ImageIndex(list("abcd"), masked(LABELS)), InvalidValue, "labels"),
        (lambda: ImageIndex(list("abcd"), LABELS, roles=masked(np.full(4, 3))), InvalidValue, "roles"),
    ],
    "RetrievalIndex": [
        (lambda: index(embeddings=masked(ROWS)), InvalidValue, "embeddings"),
        (lambda: index(ids=masked(np.arange(4))), InvalidValue, "ids"),
        (lambda: index(columns={"price": masked(np.arange(4.0))}), InvalidValue, "columns"),
        (lambda: index().search(masked(ROWS), 1), InvalidValue, "queries"),
        (lambda: index(ids=TOO_LARGE), InvalidValue, "ids"),
        (lambda: index().save("~nobody-of-this-name/a"), InvalidValue, "folder"),
    ],
    "SmoothAPLoss": [
        (lambda: SmoothAPLoss()(ROWS, torch.arange(4)), InvalidType, "embeddings"),
        (lambda: SmoothAPLoss()(torch.eye(4), LABELS), InvalidType, "labels"),
        (lambda: SmoothAPLoss()(torch.eye(4).long(), torch.arange(4)), InvalidType, "embeddings"),
        (lambda: SmoothAPLoss()(torch.eye(4).to_sparse(), torch.arange(4)), InvalidType, "embeddings"),
        (lambda: SmoothAPLoss()(torch.eye(4, device="meta"), torch.arange(4)), InvalidValue, "embeddings"),
        (lambda: SmoothAPLoss()(torch.eye(4), torch.arange(4, device="meta")), InvalidValue, "labels"),
        (lambda: SmoothAPLoss()(torch.eye(4), TOO_LARGE), InvalidValue, "labels"),
    ],
    "RetrievalMetrics": [
        (lambda: RetrievalMetrics().update(torch.eye(4), torch.arange(4), TOO_LARGE), InvalidValue, "ids"),
    ],
    "CrossBatchMemory": [
        (lambda: CrossBatchMemory(9).update(torch.eye(4), TOO_LARGE, torch.arange(4)), InvalidValue, "labels"),
    ],
}
test_invalid_arguments_raise = refusal_test(TABLE)
