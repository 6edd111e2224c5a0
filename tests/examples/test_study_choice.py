"""The choice of settings follows its written steps, repeats no run, and continues behind a line that was cut off."""

import importlib
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_retrieval.losses import LogRankLoss
from tests.examples.scripts import imported

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def choice():
    with imported(REPOSITORY / "examples", "study_choice") as script:
        yield script


@pytest.fixture
def peers(choice):
    return importlib.import_module("study_peers")


def entrants(choice):
    return importlib.import_module("study_entrants")


def finish(choice, entrant, value, chosen=None):
    """The runs that an entrant asks for, in order, and what it chooses, if `value` gives the mAP of a setting."""
    results, asked = {}, []
    while True:
        progress = choice.follow(entrant, "head", chosen or {}, results, False)
        if progress.chosen is not None:
            assert progress.runs.keys() == results.keys()
            return asked, progress.chosen
        assert progress.missing
        for key, (setting, seed) in progress.missing.items():
            assert key not in results
            results[key] = {"metrics": {"mAP": value(setting)}}
            asked.append((setting, seed))


def closeness(**best):
    """A function of settings that is the higher, the closer the logarithms of some of their numbers are to these."""

    def value(setting):
        distance = 0.0
        for name, number in best.items():
            distance += abs(math.log(setting.loss_args.get(name) or getattr(setting, name)) - math.log(number))
        return 1 / (1 + distance)

    return value


def test_the_steps_of_the_choice(choice):
    """Log rank: 8 rates and scales, 7 more taus, the best four with all images, and two more seeds of the best."""
    asked, chosen = finish(choice, choice.ENTRANTS["log rank"], closeness(lr=0.002, loss_scale=20, tau=0.03))
    assert (chosen.lr, chosen.loss_scale, chosen.loss_args["tau"]) == (0.002, 20, 0.03)
    images = [setting.images for setting, _ in asked]
    assert images == [20_000] * 15 + [40_000] * 6
    assert {setting.loss_args["tau"] for setting, _ in asked[:8]} == {0.005}
    assert len({(setting.lr, setting.loss_scale) for setting, _ in asked[:8]}) == 8
    assert {(setting.lr, setting.loss_scale) for setting, _ in asked[8:15]} == {(0.002, 20)}
    assert sorted(setting.loss_args["tau"] for setting, _ in asked[15:19]) == [0.015, 0.02, 0.03, 0.05]
    assert [seed for _, seed in asked] == [0] * 19 + [1, 2]
    assert all(setting.held_out for setting, _ in asked)


@pytest.mark.parametrize("name", ["weighted log rank", "multi-similarity", "triplets", "Circle"])
def test_each_entrant_has_as_many_runs(choice, name):
    """Those with few combinations of their own continue with the second best learning rate and scale."""
    entrant = choice.ENTRANTS[name]
    asked, _ = finish(choice, entrant, lambda setting: 0.5)
    half = [setting for setting, _ in asked if setting.images == 20_000]
    again = 4 if name == "weighted log rank" else 1
    assert len(half) == 16 - again
    assert len(half) + 4 + 2 == choice.expected_runs(entrant)
    assert [setting.images for setting, _ in asked[len(half) :][:4]] == [40_000] * 4
    assert len({(setting.lr, setting.loss_scale) for setting in half[8:]}) == again


@pytest.mark.parametrize(
    ("best", "found", "further"),
    [(1e-9, 0.002, [0.003, 0.002]), (0.0031, 0.003, [0.003, 0.002]), (1e9, 0.2, [0.15, 0.2]), (0.05, 0.05, [])],
)
def test_values_beyond_an_end_are_tried_at_most_twice(choice, best, found, further):
    asked, chosen = finish(choice, choice.ENTRANTS["log rank"], closeness(lr=0.002, tau=best))
    assert chosen.loss_args["tau"] == found
    assert [setting.loss_args["tau"] for setting, _ in asked[19:-2]] == further
    assert all(setting.images == 40_000 for setting, _ in asked[19:])


def test_learning_rates_beyond_an_end_are_tried(choice):
    asked, chosen = finish(choice, choice.ENTRANTS["log rank"], closeness(lr=1.0, tau=0.03))
    assert chosen.lr == 0.032
    assert [setting.lr for setting, _ in asked[19:-2]] == [0.016, 0.032]


def test_a_peer_far_below_log_rank_leaves_after_half_of_the_images(choice):
    """It is trained with all images only as it was best; the peers that candidates need, and candidates, stay."""

    def value(setting):
        of_log_rank = setting.loss in ("LogRankLoss", "SupConLoss")
        return 0.5 + 0.2 * of_log_rank + 0.05 * (setting.lr == 0.004)

    results = {}
    while True:
        progresses = choice.follow_all("emoji", results, False)
        missing = [run for progress in progresses.values() for run in progress.missing.values()]
        if not missing:
            break
        for setting, seed in missing:
            results[setting.key(seed)] = {"metrics": {"mAP": value(setting)}}
    whole = {}
    for name, progress in progresses.items():
        runs = list(progress.runs.values())
        whole[name] = [(setting.lr, seed) for setting, seed in runs if setting.images == progress.chosen.images]
    for name in ("triplets", "Circle", "ArcFace", "ProxyAnchor"):
        assert whole[name] == [(0.004, 0), (0.004, 1), (0.004, 2)]
        assert len(progresses[name].runs) == 15 + 3
    for name in ("log rank", "supervised contrastive", "multi-similarity", "NormalizedSoftmax", "weighted log rank"):
        assert len(whole[name]) >= 6


@pytest.mark.parametrize("better", ["random", "class means"])
def test_the_better_begin_of_proxies_is_taken(choice, better):
    entrant = choice.ENTRANTS["ArcFace"]
    asked, chosen = finish(choice, entrant, lambda setting: 0.5 + 0.1 * (setting.proxies == better))
    assert chosen.proxies == better
    random = [setting for setting, seed in asked if setting.proxies == "random" and seed == 0]
    assert len(random) == 1
    assert random[0].images == 40_000
    assert {setting.sampler for setting, _ in asked} == {"pk", "shuffled"}


def test_a_candidate_has_the_settings_that_its_peers_have_chosen(choice):
    chosen = {}
    for name in ("multi-similarity", "NormalizedSoftmax"):
        _, chosen[name] = finish(choice, choice.ENTRANTS[name], closeness(lr=0.004))
    for name, entrant in entrants(choice).CANDIDATES.items():
        asked, _ = finish(choice, entrant, lambda setting: 0.5, chosen)
        for setting, _ in asked:
            assert setting.loss_args["lambda_"] == 1
            assert setting.loss_args["tau"] == 0.02, name
            assert setting.sampler == "pk"
            if entrant.adds is not None:
                assert setting.added_args == chosen[entrant.adds].loss_args
                assert setting.proxy_rate == chosen[entrant.adds].proxy_rate
            assert (setting.first_loss == "MultiSimilarityLoss") == ("20 %" in name)
    assert all(not progress.runs for name, progress in choice.follow_all("head", {}, False).items() if " + " in name)


def test_the_sum_of_longer_lists_has_the_log_rank_that_was_chosen(choice):
    """Its own learning rate and scale are chosen anew, and whether it begins with multi-similarity."""
    one, both = entrants(choice).LATER_CANDIDATES
    chosen = {}
    _, chosen["multi-similarity"] = finish(choice, choice.ENTRANTS["multi-similarity"], closeness(lr=0.004))
    _, chosen[one] = finish(choice, choice.ENTRANTS[one], closeness(lr=0.008, tau=0.03, lambda_=3.0, c=100.0))
    assert chosen[one].loss_args == {"tau": 0.03, "lambda_": 3.0, "c": 100.0}
    asked, found = finish(choice, choice.ENTRANTS[both], closeness(lr=0.001, added_weight=10.0), chosen)
    assert (found.lr, found.added_weight) == (0.001, 10.0)
    for setting, _ in asked:
        assert chosen[one].loss_args.items() <= setting.loss_args.items()
        assert setting.added_args == chosen["multi-similarity"].loss_args
        assert setting.first_args == ({} if setting.first_loss is None else setting.added_args)
    assert {setting.first_loss for setting, _ in asked} == {None, "MultiSimilarityLoss"}
    assert {setting.loss_args["p"] for setting, _ in asked} == {0.0, 1.0}


def test_log_rank_has_the_tau_that_the_study_chose(choice):
    pairs = importlib.import_module("study_pairs")
    results = choice.read_results(REPOSITORY / "docs/study/results.jsonl")
    for name, task in pairs.TASKS.items():
        tried = pairs.ARMS[pairs.LOG_RANK].tried(task, results)
        assert pairs.best(tried, results).loss_args["tau"] == entrants(choice).TAUS[name]


def test_the_page_lists_what_is_tried(choice):
    """Each number of the page's tables is tried, and no others before those beyond the ends."""
    page = (REPOSITORY / "docs/study/candidates.md").read_text()
    tried = {}
    for name, entrant in entrants(choice).PEERS.items():
        for own in entrant.own:
            if own.name not in ("proxy_rate", "sampler", "mining"):
                tried.setdefault(name, set()).update(np.ravel(own.values).tolist())
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page.partition("## Peers")[2], re.MULTILINE))
    expected = {}
    for name, settings in rows.items():
        numbers = set(map(float, re.findall(r"\d+(?:\.\d+)?", settings.partition("; factor")[0])))
        expected[name.partition(",")[0]] = numbers
    assert tried["log rank"] == expected["log rank"]
    for name in ("multi-similarity", "supervised contrastive", "Circle", "ArcFace", "CosFace", "NormalizedSoftmax"):
        assert tried[name] == expected[name]
    for name in ("ProxyAnchor", "SoftTriple", "triplets"):
        assert tried[name] == expected[name]
    assert tried["InfoNCE"] == tried["supervised contrastive"]
    assert tried["sub-centre ArcFace"] == tried["ArcFace"]


@pytest.fixture
def folder(tmp_path):
    """A folder of 120 classes of three images in the layout of emoji.py."""
    generator = np.random.default_rng(0)
    for number in range(120):
        of_class = tmp_path / "emoji" / f"category {number % 2}" / f"class {number}"
        of_class.mkdir(parents=True)
        colour = generator.integers(0, 200, 3, dtype=np.uint8)
        for maker in ("apple", "google", "twitter"):
            pixels = colour + generator.integers(0, 50, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(of_class / f"{maker}.png")
    return tmp_path


def test_a_killed_choice_continues_where_it_stopped(choice, folder, capsys):
    """The last line was being written. What was there is kept, and the other runs are those of a choice at once."""
    command = ["--quick", "--tasks", "emoji", "--entrants", "log rank", "--emoji", str(folder / "emoji")]
    command += ["--output", str(folder / "out")]
    file = folder / "out" / "choice.jsonl"
    assert choice.main(command) == 0
    lines = file.read_text().splitlines(keepends=True)
    keys = [json.loads(line)["key"] for line in lines]
    assert len(set(keys)) == len(keys) >= 21
    printed = capsys.readouterr().out
    assert f"emoji: {len(lines)} runs done" in printed

    kept = [line.replace('"seconds"', '"before": 1, "seconds"') for line in lines[:-2]]
    file.write_text("".join(kept) + lines[-2][:40])
    assert choice.main([*command, "--report"]) == 0
    assert f"emoji: {len(kept)} runs done" in capsys.readouterr().out
    assert choice.main(command) == 0
    again = file.read_text().splitlines(keepends=True)
    assert again[: len(kept)] == kept
    assert [json.loads(line)["key"] for line in again] == keys
    assert [json.loads(line)["metrics"] for line in again] == [json.loads(line)["metrics"] for line in lines]


def test_a_run_that_fails_does_not_hold_up_the_others(choice, folder, capsys, monkeypatch):
    def run(setting, seed, place):
        if setting.loss == "CircleLoss" and setting.lr == 0.002:
            raise ValueError("embeddings must be finite")
        return {"key": setting.key(seed), "metrics": {"mAP": 0.5}, "cpu_seconds": 1.0}

    monkeypatch.setattr(importlib.import_module("study_runs"), "run", run)
    command = ["--tasks", "emoji", "--entrants", "Circle", "log rank", "--output", str(folder / "out")]
    assert choice.main(command) == 1
    captured = capsys.readouterr()
    assert "2 runs failed" in captured.err
    assert "log rank | lr 0.001" in captured.out
    assert "Circle |  |  |  | 6 | " in captured.out


def unit(rows, dim, seed=0):
    values = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(values).requires_grad_()


LABELS = torch.tensor([7, 7, 7, 3, 3, 9, 9, 9, 9, 3])


@pytest.mark.parametrize(
    ("p", "c", "a"), [(1.0, 1.0, 0.0), (0.0, 30.0, 0.0), (0.5, 0.2, 0.0), (0.0, 1.0, -0.5), (1.0, 3.0, 0.5)]
)
def test_weights_and_longer_lists_of_log_rank(peers, p, c, a):
    """With p 0, c 1 and a 0 it is log rank. The k-th best positive has the weight k^-p, each negative counts c times,
    and a is the power of ranks."""
    x = unit(10, 5)
    plain = LogRankLoss(0.1, lambda_=1.0)(x, LABELS)
    torch.testing.assert_close(peers.WeightedLogRankLoss(tau=0.1, lambda_=1.0)(x, LABELS), plain)
    scores = (x @ x.T).tolist()
    queries = []
    for query, label in enumerate(LABELS.tolist()):
        positives = [i for i in range(10) if LABELS[i] == label and i != query]
        positives.sort(key=lambda i: -scores[query][i])
        total = weights = 0.0
        for k, i in enumerate(positives, start=1):
            rank = 0.0
            for j in range(10):
                if LABELS[j] != label:
                    rank += math.log1p(math.exp((scores[query][j] - scores[query][i]) / 0.1)) / math.log(2)
            of_rank = ((1 + c * rank) ** a - 1) / a if a else math.log1p(c * rank)
            total += k**-p * (of_rank + 1 - scores[query][i])
            weights += k**-p
        queries.append(total / weights)
    loss = peers.WeightedLogRankLoss(p=p, c=c, a=a, tau=0.1, lambda_=1.0)
    assert loss(x, LABELS).item() == pytest.approx(sum(queries) / 10)
    assert torch.autograd.gradcheck(lambda y: loss(y, LABELS), x)


def test_moving_averages_of_ranks_replace_them_in_the_gradient(peers):
    """With gamma 1 and one positive of each class and place, the gradient is that of log rank. With less, the averages
    of a class and a place keep 1 - gamma of what they were."""
    labels = torch.tensor([7, 7, 3, 3, 9, 4])
    pairs = [(7, (0, 1)), (7, (1, 0)), (3, (2, 3)), (3, (3, 2))]  # label, query and positive
    loss = peers.MovingRankLoss(gamma=0.25, tau=0.1, lambda_=1.0)
    averages = {}
    for seed in range(3):
        x = unit(6, 5, seed)
        scores = (x @ x.T).tolist()
        ranks = {}
        for label, (query, positive) in pairs:
            behind = [scores[query][j] - scores[query][positive] for j in range(6) if labels[j] != label]
            ranks[query] = sum(math.log1p(math.exp(value / 0.1)) for value in behind) / math.log(2)
        for label, queries in ((7, (0, 1)), (3, (2, 3))):
            mean = sum(ranks[query] for query in queries) / 2
            averages[label] = 0.75 * averages.get(label, mean) + 0.25 * mean
        expected = sum(ranks[query] / (1 + averages[label]) + 1 - scores[query][i] for label, (query, i) in pairs) / 4
        assert loss(x, labels).item() == pytest.approx(expected)
    classes = torch.tensor([0, 0, 1, 2, 3, 4])
    gradients = []
    for rank_loss in (peers.MovingRankLoss(gamma=1.0, tau=0.1, lambda_=1.0), LogRankLoss(0.1, lambda_=1.0)):
        # The two queries with a positive have the same rank, which is then their average.
        x = torch.eye(6, dtype=torch.float64)
        x[1, 0] = 0.5
        x.requires_grad_()
        rank_loss(x, classes).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_info_nce_is_that_of_pytorch_metric_learning(peers):
    from pytorch_metric_learning.losses import NTXentLoss

    values = []
    for loss in (peers.InfoNCELoss(temperature=0.2), NTXentLoss(temperature=0.2)):
        x = 3 * unit(10, 5).detach()
        x.requires_grad_()
        value = loss(torch.nn.functional.normalize(x), LABELS)
        value.backward()
        values.append((value, x.grad))
    torch.testing.assert_close(values[0], values[1])


def test_semi_hard_triplets(peers):
    """Each triplet whose negative is behind its positive, by less than the margin."""
    x, margin = unit(10, 5), 0.3
    distances = torch.cdist(x, x).tolist()
    found = []
    for a, p, n in itertools.product(range(10), repeat=3):
        if a != p and LABELS[a] == LABELS[p] != LABELS[n]:
            gap = distances[a][n] - distances[a][p]
            if 0 < gap < margin:
                found.append(margin - gap)
    loss = peers.MinedTripletLoss(mining="semi-hard", margin=margin)(x, LABELS)
    assert found
    assert loss.item() == pytest.approx(sum(found) / len(found))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ArcFaceLoss", {"margin": 14.3, "scale": 16.0}),
        ("SubCenterArcFaceLoss", {"margin": 14.3, "scale": 16.0}),
        ("CosFaceLoss", {"margin": 0.1, "scale": 16.0}),
        ("NormalizedSoftmaxLoss", {"temperature": 0.1}),
        ("ProxyAnchorLoss", {"alpha": 16.0}),
        ("SoftTripleLoss", {"gamma": 0.1, "la": 20.0, "centers_per_class": 2}),
    ],
)
def test_an_image_at_the_mean_of_its_class_has_a_lower_loss(peers, name, arguments):
    """Proxies that begin at class means are those of the right class, whatever numbers the labels have."""
    classes, means = torch.tensor([3, 7, 9]), torch.eye(3, 5)
    loss = peers.ProxyLoss(name, classes, {"embedding_size": 5, **arguments})
    loss.begin_at(means)
    right = loss(means, classes).item()
    for wrong in itertools.permutations(classes.tolist()):
        if list(wrong) != classes.tolist():
            assert loss(means, torch.tensor(wrong)).item() > right + 0.1


def test_proxies_are_trained_apart(choice, peers, folder):
    """They begin at the means of untrained embeddings, have their own rate and no decay, and are not clipped."""
    runs = importlib.import_module("study_runs")
    setting = choice.Setting(
        data="emoji", loss="NormalizedSoftmaxLoss", loss_args={"temperature": 0.001}, proxies="class means",
        classes=4, per_class=2, images=8, width=2, dim=4, lr=0.01, proxy_rate=30.0, weight_decay=0.5,
        freeze_batch_norm=True, held_out=True, loss_scale=100.0,
    )  # fmt: skip
    place = choice.Place("cpu", {"emoji": folder / "emoji"}, folder / "weights")
    begun, norms = [], []

    def proxies_of(module):
        [loss] = peers.proxy_losses(module)
        return loss.loss.W

    class Watched(runs.ProxyTraining):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            begun.append(proxies_of(pl_module).detach().clone())
            dataset = trainer.train_dataloader.dataset
            with torch.no_grad():
                embeddings = pl_module.embed(torch.stack([dataset[i]["images"] for i in range(len(dataset))]))
            for column, label in enumerate(dataset.labels.unique()):
                mean = torch.nn.functional.normalize(embeddings[dataset.labels == label].mean(0), dim=0)
                torch.testing.assert_close(begun[0][:, column], mean, rtol=0, atol=1e-5)

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            super().on_before_optimizer_step(trainer, pl_module, optimizer)
            rates = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
            assert rates == [(0.01, 0.5), (0.3, 0.0)]
            gradients = [parameter.grad for parameter in pl_module.embedder.parameters() if parameter.grad is not None]
            norms.append(torch.nn.utils.get_total_norm(gradients).item())
            norms.append(proxies_of(pl_module).grad.norm().item())

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runs, "ProxyTraining", Watched)
        patched.setattr(runs, "random_affine", lambda images, random: images)
        runs.run(setting, 0, place)
    assert norms[0] == pytest.approx(1, abs=1e-4)
    assert norms[1] > 2


def test_shuffled_batches(choice):
    """They hold each image at most once in an epoch, and not several of each class."""
    runs = importlib.import_module("study_runs")
    labels = torch.arange(40).repeat_interleave(5)
    sampler = runs.ShuffledSampler(labels, batch_size=40)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 5
    assert sorted(np.concatenate(batches).tolist()) == list(range(200))
    assert all(len(labels[torch.tensor(batch)].unique()) > 20 for batch in batches)
    sampler.set_epoch(1)
    assert list(sampler) != batches


@pytest.fixture
def decisions(choice):
    return importlib.import_module("study_decision")


def test_the_candidate_and_the_peers_that_meet(choice, decisions):
    """The best in the mean over tasks and seeds; a peer that is .03 below log rank on one task is none of them."""
    candidates = list(entrants(choice).CANDIDATES)
    names = [*entrants(choice).PEERS, *candidates]
    chosen, results = {}, {}
    for number, task in enumerate(choice.ORDER):
        chosen[task] = {}
        for place, name in enumerate(names):
            setting = choice.Setting(lr=place + 1, images=number)
            chosen[task][name] = setting
            for seed in (0, 1, 2):
                mean = 0.6 - 0.001 * place
                if name == "InfoNCE" and task == "emoji" and seed == 0:
                    mean = 0.57
                if name == names[-1]:
                    mean = (0.55, 0.7, 0.7)[seed]
                results[setting.key(seed)] = {"metrics": {"mAP": mean}}
    candidate, peers = decisions.finalists(chosen, results, candidates)
    assert candidate == names[-1]
    assert peers == [name for name in names[:7] if name != "InfoNCE"]


def spread(mean, error):
    """Ten differences with this mean and this standard error."""
    values = np.linspace(-1, 1, 10)
    return (mean + values / values.std(ddof=1) * error * 10**0.5).tolist()


def test_the_quantiles_are_those_of_students_distribution(decisions):
    stats = pytest.importorskip("scipy.stats")
    for number, quantile in enumerate(decisions.QUANTILES, start=1):
        assert 2 * stats.t.sf(quantile, 9) == pytest.approx(0.05 / number, rel=1e-4)


@pytest.mark.parametrize(
    ("statistics", "expected"),
    [
        ([3.4, 3.3, 3.2, 3.0, 2.7, 2.3], {0, 1, 2, 3, 4, 5}),  # each above the quantile of its step
        ([3.3, 3.3, 3.3, 3.3, 3.3, 3.3], set()),  # the first step ends
        ([9.0, 3.0, 3.0, 3.0, 3.0, 3.0], {0}),  # the second step ends
        ([-9.0, 3.3, 0.0, 0.0, 0.0, 0.0], {1}),  # the first is below, and counts as a step
        ([2.3], {0}),
    ],
)
def test_holms_correction(decisions, statistics, expected):
    of_peers = {number: spread(0.01 * value, 0.01) for number, value in enumerate(statistics)}
    assert decisions.above(of_peers) == expected


def test_verdicts(decisions):
    means = {"far below": -9, "below": -3.0, "level": 1.0, "above": 5.0, "worse at one": 5.0}
    at_one = {**dict.fromkeys(means, 0.0), "worse at one": -3.0}
    of_metrics = {
        "mAP": {peer: spread(0.01 * mean, 0.01) for peer, mean in means.items()},
        "R@1": {peer: spread(0.01 * mean, 0.01) for peer, mean in at_one.items()},
    }
    assert decisions.verdicts(of_metrics) == {
        "far below": "neither",
        "below": "neither",
        "level": "level",
        "above": "above",
        "worse at one": "below in R@1",
    }


@pytest.mark.parametrize(
    ("last", "won"),
    [(("above", "above"), True), (("level", "above"), True), (("neither", "above"), False)],
)
def test_when_the_candidate_has_won(decisions, last, won):
    tasks = {number: {"a": "above", "b": "above"} for number in range(4)}
    tasks[4] = dict(zip("ab", last))
    assert decisions.has_won(tasks) == won
    tasks[0] = {"a": "level", "b": "above"}
    assert decisions.has_won(tasks) == (last == ("above", "above"))
    tasks[0] = {"a": "below in R@1", "b": "above"}
    assert not decisions.has_won(tasks)


def test_the_decisions_are_run_when_all_is_chosen(choice, decisions, tmp_path, capsys, monkeypatch):
    """All runs have one mAP but those that begin with another loss, which are above all peers on the test set."""
    asked = []

    def run(setting, seed, place):
        asked.append((setting, seed))
        noise = 0.001 * math.sin(seed + len(setting.loss) + len(setting.added_args))
        value = 0.5 + 0.2 * (setting.first_loss is not None) + noise
        metrics = {"mAP": value, "R@1": value, "mAP@R": value}
        return {"key": setting.key(seed), "metrics": metrics, "cpu_seconds": 1.0}

    monkeypatch.setattr(importlib.import_module("study_runs"), "run", run)
    command = ["--output", str(tmp_path / "out"), "--decide"]
    assert choice.main([*command, "--tasks", "head"]) == 1
    assert "the choice of log rank on photographs is not complete" in capsys.readouterr().err
    assert choice.main(command) == 0
    printed = capsys.readouterr().out
    trained = [seed for setting, seed in asked if setting.trained_classes and seed < 30]
    assert sorted(trained) == sorted(len(choice.ENTRANTS) * 2 * [0, 1, 2])
    assert {seed for setting, seed in asked if setting.held_out} == {0, 1, 2}
    for decision in decisions.DECISIONS:
        candidate = decision.candidates[-1]
        assert f"{candidate} has won" in printed
        final = [(setting, seed) for setting, seed in asked if not setting.held_out and seed in decision.seeds]
        assert len(final) == 7 * 10 * (5 + 2)
        assert {seed for _, seed in final} == set(decision.seeds)
        assert sum(setting.trained_classes for setting, _ in final) == 7 * 10 * 2
        page = (tmp_path / "out" / f"{decision.page}.md").read_text()
        first = page.splitlines()[2:6]
        assert " ".join(first).startswith(
            f"{candidate[0].upper()}{candidate[1:]}, the best of the candidates, **has won**."
        )
        for task in choice.TASKS.values():
            assert f"- {task.title[0].upper()}{task.title[1:]}: above " in page
        rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| multi-similarity |")]
        assert len(rows) == 5 + 2 + (decision.page == "choice") * (1 + 5)
        of_test_set = [row for row in rows if re.fullmatch(r"0\.\d{4}", row[1])]
        assert len(of_test_set) == 7
        for row in of_test_set:
            assert float(row[4].split()[0]) == pytest.approx(0.2, abs=0.001)
            assert re.match(r"[+-]0\.00", row[7])  # minus log rank, which has the same mAP
        assert (tmp_path / "out" / f"{decision.page}.png").stat().st_size > 1000
    asked.clear()
    assert choice.main(command) == 0
    assert not asked
