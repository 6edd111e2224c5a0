"""Values that NumPy and PyTorch accept where nobody means them."""

import numpy as np
import torch

from lightning_retrieval import CrossBatchMemory, RetrievalIndex, RetrievalMetrics, SmoothAPLoss
from lightning_retrieval.invalid import InvalidType, InvalidValue
from tests.refusals import refusal_test

ROWS = np.eye(4, dtype=np.float32)
LABELS = np.array([0, 0, 1, 1])
TOO_LARGE = torch.tensor([1, 2, 3, 2**63 + 9], dtype=torch.uint64)


TABLE = {
    "RetrievalIndex": [(lambda: RetrievalIndex(4).add(torch.eye(4), ids=TOO_LARGE), InvalidValue, "ids")],
    "SmoothAPLoss": [
        (lambda: SmoothAPLoss()(ROWS, torch.arange(4)), InvalidType, "embeddings"),
        (lambda: SmoothAPLoss()(torch.eye(4), LABELS), InvalidType, "labels"),
        (lambda: SmoothAPLoss()(torch.eye(4).long(), torch.arange(4)), InvalidType, "embeddings"),
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
