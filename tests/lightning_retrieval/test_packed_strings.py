"""The paths of images are kept as bytes, and behave as the list of strings that they were made of."""

import pickle

import numpy as np
import pytest

from lightning_retrieval.datamodules import ImageIndex

STRINGS = ["a/b.jpg", "é/ü ñ.PNG", "x" * 300, "日本/語.jpg", b"\xff\xfe/caf\xe9.jpg".decode(errors="surrogateescape")]
STRINGS += ["𝄞.png", "y", "z"]


def test_selection_matches_a_loop_over_the_strings():
    packed, n = ImageIndex(STRINGS, range(len(STRINGS))).paths, len(STRINGS)
    mask = np.arange(n) % 3 != 1
    for rows in (
        mask,
        mask.tolist(),
        ~mask & False,
        np.array([7, 0, -1, 3, 3, 6]),
        [2, 5],
        [],
        slice(None, None, -2),
        slice(3, 3),
        slice(-4, None),
        slice(1, 4),
        np.random.default_rng(0).integers(-n, n, 50),
    ):
        found = packed[rows]
        wanted = [STRINGS[position] for position in np.arange(n)[rows].tolist()]
        assert list(found) == wanted
        assert [found[position] for position in range(len(found))] == wanted
    assert list(packed) == list(pickle.loads(pickle.dumps(packed))) == STRINGS
    for invalid in (n, [n]):
        with pytest.raises(IndexError):
            packed[invalid]
