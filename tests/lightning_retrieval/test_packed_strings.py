"""Packed strings behave as the list of strings that they were made of."""

import pickle

import numpy as np
import pytest

from lightning_retrieval.packed_strings import PackedStrings

STRINGS = ["a/b.jpg", "é/ü ñ.PNG", "", "x" * 300, "日本/語.jpg"]


@pytest.mark.parametrize("block", [1, 3, 1 << 16])
def test_selection_matches_a_loop_over_the_strings(monkeypatch, block):
    monkeypatch.setattr("lightning_retrieval.packed_strings.BLOCK", block)
    strings = [*STRINGS, "", b"\xff\xfe/caf\xe9.jpg".decode(errors="surrogateescape"), "𝄞.png", "z"]
    packed, n = PackedStrings(strings), len(strings)
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
        wanted = [strings[position] for position in np.arange(n)[rows].tolist()]
        assert list(found) == wanted
        assert [found[position] for position in range(len(found))] == wanted
        assert found.ends.tolist() == PackedStrings(wanted).ends.tolist()
    assert list(packed) == list(pickle.loads(pickle.dumps(packed))) == strings
    assert list(PackedStrings([])[np.zeros(0, dtype=bool)]) == []
    for invalid in (n, [n]):
        with pytest.raises(IndexError):
            packed[invalid]


@pytest.mark.parametrize("ends", [[2, 1, 4], [1, 2, 5], [-1, 2, 4]])
def test_end_positions_outside_of_the_bytes_raise(ends):
    """They may come from a file; nothing outside of the bytes may be read."""
    damaged = PackedStrings.from_arrays(np.frombuffer(b"abcd", np.uint8), np.array(ends))
    for read in (list, lambda strings: strings[[0, 2]], lambda strings: PackedStrings.join([strings])):
        with pytest.raises(ValueError, match="offset"):
            read(damaged)
