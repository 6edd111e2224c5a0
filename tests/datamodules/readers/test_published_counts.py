"""The published numbers of images and classes, with which `check` compares a copy of a data set."""

import pytest

from lightning_retrieval import datamodules

COUNTS = {
    "CUB200": {"train": [(5_864, 100)], "test": [(5_924, 100)]},
    "StanfordOnlineProducts": {"train": [(59_551, 11_318)], "test": [(60_502, 11_316)]},
    "VehicleID": {  # of the papers, and of fast-reid
        "train": [(110_178, 13_134), (113_346, 13_164)],
        "small": [(7_332, 800), (6_493, 800)],
        "medium": [(12_995, 1_600), (13_377, 1_600)],
        "large": [(20_038, 2_400), (19_777, 2_400)],
    },
    "VGGFace2": {"train": [(3_141_890, 8_631)], "test": [(169_396, 500)]},
    "INaturalist": {"train": [(325_846, 5_690)], "test": [(136_093, 2_452)]},
    "LandmarksClean": {"train": [(42_410, 586)], "test": [(6_382, 554)]},
    "IJBC": {"test": [(148_824, 3_531)]},
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_counts_are_the_published_ones(name):
    assert getattr(datamodules, name).published_counts == COUNTS[name]
