"""The hours of the configs follow from their epochs, the published sizes and the throughput."""

import runpy
from pathlib import Path

import pytest
import torch

from lightning_retrieval.datamodules import AllClassesSampler, CategorySampler, PKSampler

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hours():
    return runpy.run_path(str(REPOSITORY / "examples" / "hours.py"))


def test_hours_worked_by_hand(hours):
    found = {row[0]: row for row in hours["rows"](REPOSITORY / "examples", 100)}
    # 11,318 classes with 59,551 images: 156 batches of 384, 400 times
    assert found["smooth_ap/online_products.yaml"][1:4] == (400, 59_551, pytest.approx(23.9616))
    assert found["smooth_ap/online_products.yaml"][4] == pytest.approx(156 * 384 * 400 / 100 / 3600)
    assert found["roadmap/cub.yaml"][1:4] == (200, 5_864, pytest.approx(46 * 128 * 200 / 1e6))


def test_every_config_that_trains_an_embedding_has_a_row(hours):
    found = {row[0] for row in hours["rows"](REPOSITORY / "examples", 100)}
    folders = ("ap_gem", "fast_ap", "rambo", "roadmap", "smooth_ap")
    paths = [path for folder in folders for path in (REPOSITORY / "examples" / folder).glob("*.yaml")]
    trained = [path for path in paths if "max_epochs" in path.read_text() and "detection" not in path.read_text()]
    assert found == {f"{path.parent.name}/{path.name}" for path in trained}


def test_an_epoch_of_each_sampler_has_the_images_of_the_set_in_full_batches(hours):
    labels = torch.arange(23 * 7) // 7  # 161 images
    data = {"init_args": {"classes_per_batch": 4, "samples_per_class": 5}}
    expected = hours["images_of_an_epoch"](data, len(labels))
    assert expected == 180
    sizes = {"classes_per_batch": 4, "samples_per_class": 5}
    categories = labels // 12
    for sampler in (PKSampler(labels, **sizes), CategorySampler(labels, categories, **sizes)):
        assert 20 * len(sampler) == expected
    assert 50 * len(AllClassesSampler(labels, batch_size=50)) == hours["images_of_an_epoch"](
        {"init_args": {"classes_per_batch": 25, "samples_per_class": 2}}, len(labels)
    )


def test_the_table_of_the_documentation_is_that_of_the_command(hours, capsys):
    hours["main"](["--images_per_second", "400"])
    assert capsys.readouterr().out in (REPOSITORY / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_a_throughput_is_a_positive_number(hours, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        hours["main"](["--images_per_second=nan"])
    assert "--images_per_second must be a number > 0, got" in capsys.readouterr().err
