"""Small blocks, in which a few rows are computed in as many parts as thousands are with the sizes of the library.

Promise 1: losses, gradients and metrics are equal for any size of the blocks and on any device. The sizes are not
settings, and no test has an accelerator, so this is seen only if they are changed: here, and nowhere else.
"""

from contextlib import contextmanager

import pytest

from lightning_retrieval.losses import blockwise, score_block, scores
from lightning_retrieval.metrics import gathering, ranked_lists
from lightning_retrieval.ranking import entries, expansion, lists, positive_ranks, ranks, relevance

EVALUATION = [
    (positive_ranks, "_CPU_PRODUCTS", 1),
    (positive_ranks, "_CPU_COLUMNS", 384),
    (positive_ranks, "_COLUMNS_OF_A_POSITIVE", 0),
    (positive_ranks, "_CPU_POSITIVES", 500),
    (positive_ranks, "_MAX_GROUP_POSITIVES", 1 << 13),
    (entries, "_MAX_PAIRS", 20_000),
    (ranked_lists, "_BLOCK_GALLERY", 200),
    (gathering, "_BLOCK_NUMBERS", 1 << 11),
    (gathering, "_COMPARED_ROWS", 7),
    (expansion, "_BLOCK_ROWS", 64),
    (relevance, "_TABLE_ELEMENTS", 6000),
]


@contextmanager
def small_blocks(elements=60, *, numbers=1200, queries=64, kept_tiles=4):
    """Small blocks of losses, metrics and query expansion.

    Args:
        elements: elements of a block of a loss, and half of those of a group of blocks.
        numbers: numbers in a block of query expansion.
        queries: 64 or 256 queries in a block of an evaluation.
        kept_tiles: tiles of a gallery that an evaluation keeps instead of computing them twice.
    """
    sizes = [
        *EVALUATION,
        (expansion, "_BLOCK_NUMBERS", numbers),
        (blockwise, "BLOCK_ELEMENTS", elements),
        (blockwise, "GROUP_ELEMENTS", 2 * elements),
        (lists, "COUNTED_ELEMENTS", elements),
        (scores, "CPU_TILE", 4),
        (entries, "_MAX_BLOCK_POSITIVES", 1 if queries == 64 else 1 << 12),
        (positive_ranks, "_KEPT_TILES", kept_tiles),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module, name, size in sizes:
            patch.setattr(module, name, size)
        yield


@contextmanager
def way_of_an_accelerator():
    """Compute as on a device for which the host must not wait."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (score_block, ranks):
            patch.setattr(module, "is_accelerator", lambda device: True)
        yield
