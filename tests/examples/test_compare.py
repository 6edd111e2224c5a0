"""The comparison of settings repeats no run, continues where it was stopped, and its intervals are those of scipy."""

import csv
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.examples.scripts import imported

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--weights", "none", "--backbone", "squeezenet1_1", "--size", "32", "--epochs", "1", "--workers", "0"]


@pytest.fixture(scope="module")
def compare():
    with imported(EXAMPLES, "compare") as script:
        yield script


@pytest.fixture
def photos(tmp_path):
    """Four classes of four images for training and as many for evaluation."""
    generator = np.random.default_rng(0)
    for label in range(8):
        for number in range(4):
            path = tmp_path / "photos" / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.clip(generator.normal(30 * label, 20, (32, 32, 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    return tmp_path / "photos"


@pytest.fixture
def trained(compare, monkeypatch):
    """The runs that were requested, without training them; FastAP is better by 0.1, 0.2, ... with seed 0, 1, ..."""
    calls = []

    def train(setting, seed, options):
        calls.append((setting, seed))
        value = 0.3 + 0.05 * seed + 0.1 * (1 + seed) * (setting.loss == "fast_ap")
        return {"mAP": value, "R@1": value}

    monkeypatch.setattr(compare, "train", train)
    return calls


def rows(folder):
    with (folder / "table.csv").open() as file:
        return list(csv.DictReader(file))


def test_an_interval_is_that_of_scipy(compare):
    scipy_stats = pytest.importorskip("scipy.stats")
    quantiles = importlib.import_module("intervals").T_QUANTILES
    for degrees, quantile in enumerate(quantiles, 1):
        assert quantile == pytest.approx(scipy_stats.t.ppf(0.975, degrees), abs=6e-4)
    one, other = [0.31, 0.35, 0.30, 0.41], [0.33, 0.36, 0.35, 0.42]
    mean, low, high = compare.interval([b - a for a, b in zip(one, other)])
    expected = scipy_stats.ttest_rel(other, one).confidence_interval(0.95)
    assert mean == pytest.approx(0.0225)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-5)


def test_a_grid_has_all_combinations_and_names_what_differs(compare):
    _, options = compare.parse(["photos", "--loss", "sup_ap", "smooth_ap", "--lr", "0.1", "0.2", "--size", "64"])
    settings = compare.grid(options)
    assert list(settings) == ["sup_ap, lr 0.1", "sup_ap, lr 0.2", "smooth_ap, lr 0.1", "smooth_ap, lr 0.2"]
    assert settings["smooth_ap, lr 0.2"] == compare.Setting("smooth_ap", "resnet18", "DEFAULT", 64, 128, 0.2, 20)


def test_a_finished_run_is_not_repeated(compare, photos, trained):
    command = [str(photos), "--output", str(photos.parent / "out"), *SMALL]
    three_by_three = [*command, "--loss", "smooth_ap", "roadmap", "fast_ap", "--seeds", "0", "1", "2"]
    assert compare.main(three_by_three) == 0
    assert len(trained) == 9
    assert [seed for _, seed in trained] == [0, 0, 0, 1, 1, 1, 2, 2, 2]

    assert compare.main(three_by_three) == 0
    assert len(trained) == 9  # nothing was run
    assert compare.main([*three_by_three, "3"]) == 0
    assert [seed for _, seed in trained[9:]] == [3, 3, 3]
    assert compare.main([*three_by_three, "--lr", "0.5"]) == 0
    assert [setting.lr for setting, _ in trained[12:]] == [0.5] * 9
    (photos / "0/0.png").rename(photos / "0/new.png")
    assert compare.main([*command, "--loss", "roadmap", "--seeds", "0"]) == 0
    assert len(trained) == 22


def test_differences_are_those_of_the_same_seed(compare, photos, trained, capsys):
    out = photos.parent / "out"
    losses = ["--loss", "smooth_ap", "fast_ap"]
    assert compare.main([str(photos), "--output", str(out), *SMALL, *losses]) == 0
    first, second = rows(out)
    assert (first["setting"], second["setting"], second["seeds"]) == ("smooth_ap", "fast_ap", "3")
    assert first["difference"] == ""
    assert float(first["mAP"]) == pytest.approx(0.35)
    assert float(second["difference"]) == pytest.approx(0.2)
    half = 4.303 * 0.1 / 3**0.5  # the differences are 0.1, 0.2 and 0.3
    assert (float(second["low"]), float(second["high"])) == pytest.approx((0.2 - half, 0.2 + half))
    line = f"| fast_ap | 3 | 0.5500 | 0.5500 | +0.2000 ({0.2 - half:+.4f} to {0.2 + half:+.4f}) |"
    assert line in (out / "table.md").read_text()
    assert line in capsys.readouterr().out


def test_runs_that_fail_or_are_interrupted_are_repeated(compare, photos, trained, monkeypatch, capsys):
    out, train, errors = photos.parent / "out", compare.train, {}

    def failing(setting, seed, options):
        if (setting.loss, seed) in errors:
            raise errors[setting.loss, seed]
        return train(setting, seed, options)

    command = [str(photos), "--output", str(out), *SMALL, "--loss", "smooth_ap", "fast_ap"]
    monkeypatch.setattr(compare, "train", failing)
    errors["fast_ap", 1] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        compare.main(command)
    assert [row["seeds"] for row in rows(out)] == ["2", "1"]
    assert rows(out)[1]["difference"] == ""  # one difference has no interval
    errors["fast_ap", 1] = ValueError("Embedder: no such weights.")
    assert compare.main(command) == 1
    assert "compare: fast_ap, seed 1, failed: Embedder: no such weights." in capsys.readouterr().err
    assert [row["seeds"] for row in rows(out)] == ["3", "2"]
    assert float(rows(out)[1]["difference"]) == pytest.approx(0.2)  # of seeds 0 and 2: 0.1 and 0.3
    errors.clear()
    assert compare.main(command) == 0
    assert len(trained) == 6


def test_an_invalid_option_is_named(compare, photos, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        compare.main([str(photos), "--batch", "4", "64"])
    assert "--batch must be at least 8, two classes, got 4." in capsys.readouterr().err


def test_no_run_begins_if_no_network_can_be_created(compare, photos, trained, monkeypatch, capsys):
    class Unreachable:
        def __init__(self, backbone, **settings):
            if backbone != "glyph_net":
                raise ValueError(f"Embedder: `weights` of {backbone} could not be loaded.")

    monkeypatch.setattr(importlib.import_module("own_images"), "Embedder", Unreachable)
    command = [str(photos), "--output", str(photos.parent / "out"), "--loss", "smooth_ap", "fast_ap"]
    with pytest.raises(SystemExit, match=r"^2$"):
        compare.main([*command, "--backbone", "resnet18", "resnet50"])
    printed = capsys.readouterr().err
    assert "error: Embedder: `weights` of resnet18 could not be loaded. --backbone timm/tf_eff" in printed
    assert printed.count("\n") == 1
    assert trained == []
    assert not (photos.parent / "out").exists()
    assert compare.main([*command, "--backbone", "resnet18", "glyph_net"]) == 0
    assert len(trained) == 12


@pytest.mark.slow
def test_a_run_is_a_function_of_setting_and_seed(compare, photos, monkeypatch):
    monkeypatch.setenv("PL_TRAINER_ENABLE_PROGRESS_BAR", "False")
    out = photos.parent / "out"
    command = [str(photos), "--output", str(out), *SMALL, "--loss", "smooth_ap", "fast_ap", "--seeds", "1", "2"]
    assert compare.main(command) == 0
    lines = (out / "results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    assert [(result["setting"]["loss"], result["seed"]) for result in results] == [
        ("smooth_ap", 1), ("fast_ap", 1), ("smooth_ap", 2), ("fast_ap", 2),
    ]  # fmt: skip
    assert all(0 < result["metrics"]["mAP"] <= 1 for result in results)
    assert len({result["metrics"]["mAP"] for result in results}) > 1
    (out / "results.jsonl").write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    assert compare.main(command) == 0
    again = {json.loads(line)["key"]: line for line in (out / "results.jsonl").read_text().splitlines()}
    assert again[results[1]["key"]] == lines[1]
