"""The study of detectors runs, continues where it was stopped, and compares the paper's findings with its results."""

import importlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.examples.scripts import imported

pytestmark = pytest.mark.slow

RAMBO = Path(__file__).parents[2] / "examples" / "rambo"


@pytest.fixture(scope="module")
def study():
    threads = torch.get_num_threads()
    with imported(RAMBO, "detection_study") as script:
        yield script
    torch.set_num_threads(threads)


@pytest.fixture
def trained(study, monkeypatch):
    """The runs that were requested, without training them; AP50 is 0.5, more with a higher seed and with a margin."""
    calls = []

    def train(run, folder):
        calls.append(run)
        value = 0.5 + 0.1 * run.seed + 0.3 * (run.arm == "margin 0.15")
        versions = {"torch": "2"}
        return {"run": asdict(run), "metrics": {"AP50": value}, "cpu_seconds": 60.0, "versions": versions}

    monkeypatch.setattr(study, "train", train)
    return calls


def test_it_trains_from_scratch_and_from_a_trained_detector(study, tmp_path):
    arguments = ["--quick", "--arms", "cross entropy", "margin 0.15", "--seeds", "3", "--runs", str(tmp_path)]
    assert study.main(arguments) == 0
    results = [json.loads(file.read_text()) for file in tmp_path.glob("*seed_3.json")]
    found = {(each["run"]["arm"], each["run"]["start"], each["run"]["steps"]) for each in results}
    starts = {(arm, *start) for arm in ("cross entropy", "margin 0.15") for start in (("scratch", 5), ("trained", 1))}
    assert found == {*starts, ("cross entropy", "scratch", 7)}
    assert all(0 <= each["metrics"]["AP50"] <= 1 for each in results)
    assert all(each["versions"]["torch"] and each["cpu_seconds"] > 0 for each in results)
    # Only the classifier of the trained detector differs much after one step with another loss.
    trained = torch.load(tmp_path / "cross_entropy_scratch_7_seed_3.pt", weights_only=True)
    more = torch.load(tmp_path / "cross_entropy_trained_1_seed_3.pt", weights_only=True)
    fresh = torch.load(tmp_path / "cross_entropy_scratch_5_seed_3.pt", weights_only=True)
    key = "backbone.stem.0.weight"
    assert (more[key] - trained[key]).abs().max() < 0.1 * (fresh[key] - trained[key]).abs().max()


def test_no_run_is_repeated(study, trained, tmp_path):
    folders = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "docs")]
    assert study.main(["--seeds", "0", "1", *folders]) == 0
    names = [run.name for run in trained]
    assert len(names) == len(set(names)) == 2 * (1 + 2 * len(study.ARMS))
    trained.clear()
    assert study.main(["--seeds", "0", "1", *folders]) == 0
    assert not trained
    file = tmp_path / "runs" / "no_memory_scratch_500_seed_1.json"
    changed = json.loads(file.read_text())
    changed["run"]["lr"] = 0.1
    file.write_text(json.dumps(changed))
    assert study.main(["--seeds", "0", "1", "--report", *folders]) == 0
    assert not trained
    assert "| no memory | not complete |" in (tmp_path / "docs/detection.md").read_text()
    assert study.main(["--seeds", "0", "1", *folders]) == 0
    assert [run.name for run in trained] == ["no_memory_scratch_500_seed_1"]


def test_a_run_that_fails_is_reported_and_repeated(study, trained, tmp_path, monkeypatch, capsys):
    folders = ["--arms", "weight 1", "--seeds", "0", "--runs", str(tmp_path), "--output", str(tmp_path)]
    train = study.train

    def broken(run, folder):
        if run.start == "trained":
            raise ValueError("the loss is nan")
        return train(run, folder)

    monkeypatch.setattr(study, "train", broken)
    assert study.main(folders) == 1
    assert "weight_1_trained_150_seed_0 failed: ValueError('the loss is nan')" in capsys.readouterr().err
    assert "| weight 1 | 50.0 (50.0 to 50.0) | not complete |" in (tmp_path / "detection.md").read_text()
    monkeypatch.setattr(study, "train", train)
    assert study.main(folders) == 0


def test_the_table_and_the_verdicts(study, trained, tmp_path):
    study.main(["--runs", str(tmp_path), "--output", str(tmp_path)])
    page = (tmp_path / "detection.md").read_text()
    assert "| cross entropy | 60.0 (50.0 to 70.0) | 60.0 (50.0 to 70.0) |" in page
    assert "The trained detectors have 60.0 (50.0 to 70.0) after" in page
    content = json.loads((tmp_path / "detection.json").read_text())
    verdicts = {(each["finding"].split(" (")[0], each["start"]): each["verdict"] for each in content["findings"]}
    assert verdicts["The margin helps", "scratch, 500 steps"] == "same direction"
    assert verdicts["The memory helps", "scratch, 500 steps"] == "no difference beyond the spread of seeds"
    assert len(content["runs"]) == len(trained)
    rows = {(row["arm"], row["start"], row["steps"]): row for row in content["rows"]}
    assert rows["margin 0.15", "trained", 150]["AP50"] == pytest.approx(90)


def test_findings_name_arms(study):
    report = importlib.import_module("detection_report")
    assert {finding.one for finding in report.FINDINGS} | {finding.other for finding in report.FINDINGS} == {
        *study.ARMS
    }
    assert set(report.STARTS.values()) == {*study.STEPS.items()}
