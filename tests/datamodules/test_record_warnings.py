"""Warnings are recorded, issued as usual, and repeated from the cache of an index."""

import warnings

import pytest

from lightning_retrieval.datamodules import (
    LandmarksClean,
)
from lightning_retrieval.datamodules.image_check import record_warnings
from tests.datamodules.trees_more import write_landmarks

refusal = pytest.mark.refusal
LATIN = "é".encode("latin-1")


def test_warnings_are_recorded_and_issued(tmp_path):
    def read():
        warnings.warn("a message", stacklevel=1)
        return 7

    with pytest.warns(UserWarning, match="a message"):
        assert record_warnings(read) == (7, ["a message"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert record_warnings(lambda: 7) == (7, [])
        with pytest.raises(UserWarning, match="a message"):
            record_warnings(read)


def test_warnings_of_reading_are_repeated_from_the_cache_and_in_the_report(tmp_path):
    written = write_landmarks(tmp_path / "data")
    (tmp_path / "data" / written["train"][0][0]).unlink()
    messages = []
    for _ in range(2):
        data = LandmarksClean(tmp_path / "data", cache_dir=tmp_path / "cache")
        with pytest.warns(UserWarning, match="skipped 1 images that are not in") as caught:
            data.prepare_data()
        messages.append([str(warning.message) for warning in caught])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = data.check()
        assert report.problems == messages[-1]
        assert not report.ok
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert messages[0] == messages[1]
