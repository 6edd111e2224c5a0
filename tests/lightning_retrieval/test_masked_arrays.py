"""NumPy arrays with masked values raise, since the values below the mask are not meant."""

import numpy as np
import pytest
import torch

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.datamodules import ImageIndex, PKSampler, TagSampler

ROWS = np.eye(4, dtype=np.float32)
NUMBERS = np.array([0, 0, 1, 1])


def masked(array):
    """The array with its last row masked."""
    mask = np.zeros(array.shape, bool)
    mask[-1] = True
    return np.ma.masked_array(array, mask)


def index(**settings):
    made = RetrievalIndex(4)
    made.add(**{"embeddings": torch.eye(4), "ids": torch.arange(4), **settings})
    return made


CALLS = {
    "labels of a sampler": lambda of: PKSampler(of(NUMBERS), classes_per_batch=2, samples_per_class=2),
    "tags of a sampler": lambda of: TagSampler(of(NUMBERS[:, None]), tags_per_batch=2, samples_per_tag=2),
    "labels of images": lambda of: ImageIndex(list("abcd"), of(NUMBERS)),
    "roles of images": lambda of: ImageIndex(list("abcd"), NUMBERS, roles=of(np.full(4, 3))),
    "embeddings of an index": lambda of: index(embeddings=of(ROWS)),
    "ids of an index": lambda of: index(ids=of(np.arange(4))),
    "columns of an index": lambda of: index(columns={"price": of(np.arange(4.0))}),
    "queries": lambda of: index().search(of(ROWS), 1),
}


@pytest.mark.refusal
@pytest.mark.parametrize("name", CALLS)
def test_masked_values_raise(name):
    CALLS[name](lambda array: np.ma.masked_array(array, False))  # nothing is masked
    with pytest.raises(ValueError, match=r"^\w+: `\w+` must have no masked values, got a masked NumPy array; leave "):
        CALLS[name](masked)
