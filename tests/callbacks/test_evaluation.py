"""RetrievalEvaluation logs the metrics of whole sets in each stage, before training too, and their best values."""

import io
import sys
import warnings

import pytest
import pytorch_lightning as pl
import torch
import yaml
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger
from rich.console import Console
from rich.file_proxy import FileProxy
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_retrieval import (
    Embedder,
    GalleryOnly,
    OtherCamera,
    PCAWhitening,
    RetrievalMetrics,
    RetrievalModule,
    SharedTags,
    SmoothAPLoss,
)
from lightning_retrieval.callbacks import APMonitor, LearnWhitening, RetrievalEvaluation
from lightning_retrieval.datamodules import PKSampler
from tests.callbacks.point_runs import KS, PointsModule, expected_metrics, labelled_points, make_trainer
from tests.csv_logs import logged
from tests.point_set import Points


def test_metrics_are_those_of_the_whole_set():
    module, evaluation = PointsModule(), RetrievalEvaluation(KS)
    (validated,) = make_trainer(evaluation).validate(module, verbose=False)
    (tested,) = make_trainer(evaluation).test(module, verbose=False)
    expected = expected_metrics(module, 2, "val"), expected_metrics(module, 3, "test")
    assert (validated, tested) == tuple(pytest.approx(values, abs=1e-12) for values in expected)
    assert 0.1 < validated["val/mAP"] < 0.9


def test_one_label_for_all_images_warns_that_the_metrics_are_1(monkeypatch):
    module = PointsModule()
    one_label = TensorDataset(torch.randn(9, 6), torch.full((9,), 7))
    monkeypatch.setattr(module, "evaluation_loaders", lambda stage: DataLoader(one_label, batch_size=5))
    with pytest.warns(UserWarning, match="have the same label"):
        (validated,) = make_trainer(RetrievalEvaluation((1,))).validate(module, verbose=False)
    assert validated["val/mAP"] == 1


def test_fit_logs_each_epoch_and_skips_the_sanity_check():
    """The two batches of the sanity check are not a whole gallery, so nothing is computed of them."""
    module, seen, computed = PointsModule(), [], []

    class Compare(pl.Callback):
        def on_sanity_check_end(self, trainer, module):
            assert not any(name.startswith("val") for name in trainer.callback_metrics)

        def on_validation_end(self, trainer, module):
            if not trainer.sanity_checking:
                seen.append({name: value.item() for name, value in trainer.callback_metrics.items() if "val" in name})

        def on_train_epoch_end(self, trainer, module):
            computed.append(expected_metrics(module, 2, "val"))
            module.train()

    fitted = make_trainer(RetrievalEvaluation(KS), Compare(), max_epochs=3)
    fitted.fit(module)
    assert len(seen) == 3
    assert seen == [pytest.approx(values, abs=1e-6) for values in computed]  # Lightning logs in float32
    assert len({values["val/mAP"] for values in seen}) == 3


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"dims": (2, 3)}, {"val/mAP/2d", "val/mAP/3d"}),
        (
            {"map_ks": (2,), "map_divisor": "R", "extra_metrics": ("mINP", "NDCG@3", "recall@2")},
            {"val/mAP@2", "val/mINP", "val/NDCG@3", "val/recall@2"},
        ),
    ],
)
def test_further_metrics_are_logged_by_their_names(settings, names):
    module = PointsModule()
    (found,) = make_trainer(RetrievalEvaluation(KS, **settings)).validate(module, verbose=False)
    points, labels = labelled_points(2).tensors
    metrics = RetrievalMetrics(KS, **settings)
    with torch.no_grad():
        metrics.update(module.eval()(points), labels)
    assert found == pytest.approx({f"val/{name}": value.item() for name, value in metrics.compute().items()}, abs=1e-6)
    assert names < set(found)


@pytest.mark.parametrize(("images", "fitting"), [(10, (1,)), (11, (1, 10)), (101, (1, 10, 100))])
def test_without_ks_those_that_fit_are_logged(images, fitting, monkeypatch):
    """The list of a query holds all images but itself. A warning would be an error here."""
    points = TensorDataset(torch.randn(images, 6), torch.arange(images) // 2)
    monkeypatch.setattr(PointsModule, "evaluation_loaders", lambda module, stage: DataLoader(points, batch_size=50))
    evaluation = RetrievalEvaluation(before_fit=True, dims=(2,))
    run, module = make_trainer(evaluation, max_epochs=2), PointsModule()
    run.fit(module)
    logged_in = {"val": set(run.callback_metrics), "test": set(evaluation.results["untrained"])}
    for stage, names in logged_in.items():
        expected = {f"{stage}/R@{k}{dims}" for k in fitting for dims in ("", "/2d")}
        assert {name for name in names if name.startswith(f"{stage}/R@")} == expected


def test_what_a_callback_monitors_is_logged_whatever_its_k(tmp_path):
    points = TensorDataset(torch.randn(6, 6), torch.arange(6) // 2)
    module = PointsModule()
    module.evaluation_loaders = lambda stage: DataLoader(points)
    run = make_trainer(RetrievalEvaluation(), EarlyStopping("val/R@100", mode="max"), max_epochs=1)
    run.fit(module)
    assert run.callback_metrics["val/R@100"] == 1
    assert "val/R@10" not in run.callback_metrics


def means_of_equal_sets(values, stage):
    """The means of two sets with equally many queries."""
    names = [name.rpartition("/")[2] for name in values if "/0/" in name and "skipped" not in name]
    return {f"{stage}/{name}": (values[f"{stage}/0/{name}"] + values[f"{stage}/1/{name}"]) / 2 for name in names}


@pytest.mark.parametrize("reverse", [False, True])
def test_the_mean_over_the_queries_of_all_sets_can_be_monitored(reverse):
    """The sets have 30, 8 and 5 queries with a value, and the last two have fewer than 10 images to rank."""
    module, sizes = PointsModule(), {"large": (30, 3), "small": (9, 4), "tiny": (5, 3)}
    sets = {}
    for name, (images, per_class) in sizes.items():
        sets[name] = TensorDataset(labelled_points(3, images).tensors[0], torch.arange(images) // per_class)
        sets[name].two_sided = reverse
    module.evaluation_loaders = lambda stage: {name: DataLoader(data, batch_size=5) for name, data in sets.items()}
    run = make_trainer(RetrievalEvaluation(), EarlyStopping("val/mAP", mode="max"), max_epochs=2)
    run.fit(module)
    values, queries = [], []
    for name, data in sets.items():
        metrics = RetrievalMetrics((1,), reverse=reverse)
        images, labels = data.tensors
        metrics.update(module.eval()(images).detach(), labels)
        values.append(metrics.compute())
        queries.append(len(images) - int(values[-1]["skipped_queries"]))
        assert run.callback_metrics[f"val/{name}/mAP"].item() == pytest.approx(values[-1]["mAP"].item())
    assert queries == [30, 8, 5]
    for name in ("mAP", "R@1", "mAP@R", *(["reverse/mAP"] if reverse else [])):
        expected = sum(n * value[name].item() for n, value in zip(queries, values, strict=True)) / sum(queries)
        assert run.callback_metrics[f"val/{name}"].item() == pytest.approx(expected)
    assert "val/R@10" not in run.callback_metrics


def test_several_sets_are_numbered():
    module = PointsModule(val=(2, 5), test=(3, 6))
    run = make_trainer(RetrievalEvaluation(KS, before_fit=True))
    run.fit(module)
    expected = {**expected_metrics(module, 2, "val/0"), **expected_metrics(module, 5, "val/1")}
    expected |= means_of_equal_sets(expected, "val")
    found = {name: value.item() for name, value in run.callback_metrics.items() if name.startswith("val")}
    assert found == pytest.approx(expected, abs=1e-6)
    assert set(run.callbacks[0].results["untrained"]) == {name.replace("val", "test") for name in expected}
    (first, second) = make_trainer(RetrievalEvaluation(KS)).test(module, verbose=False)
    tested = {**expected_metrics(module, 3, "test/0"), **expected_metrics(module, 6, "test/1")}
    tested |= means_of_equal_sets(tested, "test")
    assert {**first, **second} == pytest.approx(tested, abs=1e-12)


def evaluation_warnings(loader, stage="validate", **settings) -> list[str]:
    """What RetrievalEvaluation warns of in an evaluation."""
    run = make_trainer(RetrievalEvaluation(KS), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(run, stage)(PointsModule(), loader, verbose=False)
    return [str(w.message) for w in caught if "RetrievalEvaluation" in str(w.message)]


POINTS = labelled_points(2)
REPEATING = DistributedSampler(POINTS, 2, 0)  # the other process of two has the rest
WRAPPED = DistributedSamplerWrapper(SubsetRandomSampler(range(11)), num_replicas=2, rank=1)


@pytest.mark.parametrize(
    ("settings", "covered"),
    [
        ({"drop_last": True}, "20 of 23 images"),
        ({"sampler": SubsetRandomSampler(range(11))}, "11 of 23 images"),
        ({"sampler": RandomSampler(POINTS, num_samples=9)}, "9 of 23 images"),
        ({"sampler": SubsetRandomSampler(range(11)), "drop_last": True}, "10 of 23 images"),
        ({"sampler": WeightedRandomSampler(torch.ones(23), 23)}, "with replacement, of 23 images"),
        ({"sampler": DistributedSampler(POINTS, 2, 0, drop_last=True)}, "22 of 23 images"),
        ({"sampler": REPEATING, "drop_last": True}, "19 of 23 images"),
        ({"sampler": WRAPPED}, "11 of 23 images"),
    ],
)
def test_a_loader_that_loses_images_warns_once(settings, covered):
    (message,) = evaluation_warnings(DataLoader(POINTS, batch_size=5, **settings))
    assert covered in message


def test_a_test_set_a_sampler_of_training_and_a_limit_warn_once():
    (message,) = evaluation_warnings(DataLoader(POINTS, batch_size=5, drop_last=True), "test")
    assert "20 of 23 images" in message
    sampler = PKSampler(POINTS.tensors[1], classes_per_batch=2, samples_per_class=2)
    (message,) = evaluation_warnings(DataLoader(POINTS, batch_sampler=sampler))
    assert "PKSampler" in message
    (message,) = evaluation_warnings(DataLoader(POINTS, batch_size=5), limit_val_batches=2)
    assert "cover 2 of 5 batches" in message


class Stream(IterableDataset):
    """A set without a length, of which nothing is known to be lost."""

    def __iter__(self):
        return iter(POINTS)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(POINTS, batch_size=5, shuffle=True),
        DataLoader(labelled_points(2, 20), batch_size=5, drop_last=True),
        DataLoader(POINTS, batch_sampler=[[*range(23)]]),
        DataLoader([POINTS[:10], POINTS[10:]], batch_size=None),
        DataLoader(Stream(), batch_size=5),
        DataLoader(POINTS, batch_size=5, sampler=REPEATING),
    ],
    ids=["shuffled", "whole batches", "own batches", "batches", "stream", "two processes"],
)
def test_a_loader_that_loses_nothing_does_not_warn(loader):
    assert evaluation_warnings(loader) == []


# --- the test set before training


def test_before_fit_is_logged_at_step_0(tmp_path):
    module, evaluation = PointsModule(), RetrievalEvaluation(KS, before_fit=True)
    untrained, in_evaluation_mode = expected_metrics(PointsModule(), 3, "test"), []
    module.embedder[2].eval()  # as frozen layers are

    class Modes(pl.Callback):
        """Records the modes after the untrained evaluation: callbacks are called in order."""

        def on_train_start(self, trainer, module):
            in_evaluation_mode.extend(name for name, part in module.named_modules() if not part.training)

    run = make_trainer(evaluation, Modes(), logger=CSVLogger(tmp_path, version=0), max_epochs=2)
    run.fit(module)
    assert in_evaluation_mode == ["embedder.2"]
    assert evaluation.results["untrained"] == pytest.approx(untrained, abs=1e-12)
    first = logged(tmp_path)[0]
    assert {name: first[name] for name in untrained} == pytest.approx(untrained, abs=1e-6)


class Weights(pl.Callback):
    """Records the weights after each epoch."""

    def __init__(self):
        self.weights = []

    def on_train_epoch_end(self, trainer, module):
        self.weights += map(torch.clone, (*module.parameters(), *module.buffers(), *module.whitening.learned))


class Normed(PointsModule):
    """With statistics that change in training, and a whitening that is learned in the first validation."""

    def __init__(self):
        super().__init__()
        self.embedder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.whitening = PCAWhitening()


@pytest.mark.filterwarnings("ignore:PCAWhitening. nothing has been learned yet:UserWarning")
def test_training_goes_on_as_if_the_untrained_network_were_not_evaluated():
    runs = {}
    for before_fit in (True, False):
        evaluation, watch = RetrievalEvaluation(KS, before_fit=before_fit), Weights()
        run = make_trainer(LearnWhitening(), evaluation, watch, max_epochs=3)
        torch.manual_seed(5)
        run.fit(Normed())
        metrics = {name: value for name, value in run.callback_metrics.items() if name != "train/images/s"}
        runs[before_fit] = watch.weights, metrics, evaluation.results
    (weights, metrics, results), (plain, of_plain, without) = runs.values()
    assert len(weights) == len(plain) > 0
    assert all(map(torch.equal, weights, plain))
    assert metrics == of_plain
    torch.manual_seed(5)
    assert results["untrained"] == pytest.approx(expected_metrics(Normed(), 3, "test"), abs=1e-12)
    assert "untrained" not in without


@pytest.mark.filterwarnings("ignore:RetrievalEvaluation. test metrics cover 2 of 5 batches")
@pytest.mark.parametrize("limit", [2, 0.5])
def test_before_fit_evaluates_the_same_batches_as_the_test(limit):
    evaluation, module = RetrievalEvaluation(KS, before_fit=True), PointsModule(lr=0)
    run = make_trainer(evaluation, limit_test_batches=limit, limit_val_batches=0)
    run.fit(module)
    (tested,) = run.test(module, verbose=False)
    assert evaluation.results["untrained"] == pytest.approx(tested)
    assert tested["test/mAP"] != pytest.approx(expected_metrics(module, 3, "test")["test/mAP"])


class Pooled(Embedder):
    """An embedder of points, with a fixed backbone of 3 features."""

    def __init__(self):
        torch.manual_seed(2)
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), 4, feature_dim=3, pooling="avg")


def test_before_fit_evaluates_the_backbone_without_the_new_head(tmp_path):
    module, evaluation = PointsModule(), RetrievalEvaluation(KS, before_fit=True, dims=(4,))
    module.embedder = Pooled()
    bare = PointsModule()
    bare.embedder = Pooled().backbone
    expected = expected_metrics(bare, 3, "test")
    run = make_trainer(evaluation, logger=CSVLogger(tmp_path, version=0), limit_val_batches=0)
    run.fit(module)
    assert evaluation.results["backbone"] == pytest.approx(expected, abs=1e-6)
    first = logged(tmp_path)[0]
    assert first["backbone/test/mAP"] == pytest.approx(expected["test/mAP"], abs=1e-6)
    assert first["test/mAP"] != first["backbone/test/mAP"]


# --- best values


def best_in(folder, version=0):
    return yaml.safe_load((folder / f"lightning_logs/version_{version}/hparams.yaml").read_text())["best"]


def test_best_is_the_highest_number_of_the_run(tmp_path):
    """Of five epochs with a large learning rate; NaN, where no query has a positive, is no best value."""
    without_positive = TensorDataset(torch.randn(4, 6), torch.arange(4))
    run = make_trainer(RetrievalEvaluation((1,)), max_epochs=5, logger=CSVLogger(tmp_path), num_sanity_val_steps=0)
    module = PointsModule(lr=3.0)
    module.val_dataloader = lambda: [DataLoader(POINTS, batch_size=5), DataLoader(without_positive)]
    with pytest.warns(UserWarning, match="none of the 4 queries"):
        run.fit(module)
    values = [step["val/0/mAP"] for step in logged(tmp_path).values() if "val/0/mAP" in step]
    assert len(values) == 5
    best = best_in(tmp_path)
    assert best["val/0/mAP"] == pytest.approx(max(values))
    assert best["val/0/mAP"] > values[-1]
    assert "val/1/mAP" not in best
    again = make_trainer(run.callbacks[0], max_epochs=1, logger=CSVLogger(tmp_path), num_sanity_val_steps=0)
    again.fit(PointsModule(seed=1))
    assert best_in(tmp_path, 1)["val/mAP"] == pytest.approx(again.callback_metrics["val/mAP"].item())


def test_the_results_are_shown_below_a_progress_bar_of_a_notebook(monkeypatch):
    """There, Rich displays what is printed, and a display first flushes the output, which is Rich's."""
    shown = []

    def display(*_, **__):
        sys.stdout.flush()
        shown.append(True)

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(sys, "stdout", FileProxy(Console(force_jupyter=True), io.StringIO()))
    make_trainer(RetrievalEvaluation(KS)).fit(PointsModule())
    assert shown


class Interrupt(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            raise RuntimeError("the machine was stopped")


def test_interrupted_run_logs_its_best(tmp_path):
    run = make_trainer(RetrievalEvaluation(KS), Interrupt(), max_epochs=2, logger=CSVLogger(tmp_path))
    with pytest.raises(RuntimeError, match=r"^the machine was stopped$"):
        run.fit(PointsModule())
    assert best_in(tmp_path)["val/mAP"] > 0


def test_a_resumed_run_skips_what_is_before_it_and_continues_its_best(tmp_path):
    run = make_trainer(RetrievalEvaluation(KS))
    run.fit(PointsModule())
    run.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    saved["callbacks"]["RetrievalEvaluation"]["best"]["val/mAP"] = 1.5
    torch.save(saved, tmp_path / "last.ckpt")
    evaluation = RetrievalEvaluation(KS, before_fit=True)
    resumed = make_trainer(evaluation, max_epochs=2, logger=CSVLogger(tmp_path))
    resumed.fit(PointsModule(), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert best_in(tmp_path)["val/mAP"] == 1.5
    assert resumed.callback_metrics["val/mAP"] <= 1
    assert set(evaluation.results) == {"val"}


# --- a module with a rule of relevance


class SeenPoints(Points):
    """Points with tags, cameras and roles, and the metric of a data set that has its own."""

    def __init__(self, **entries):
        super().__init__(2)
        self.entries = entries

    def __getitem__(self, index):
        return {**super().__getitem__(index), **{name: values[index] for name, values in self.entries.items()}}


class WithOwnMetric(SeenPoints):
    def metrics(self, ks, **settings):
        self.settings = settings
        return RetrievalMetrics(ks, **settings)


def module_with(rule):
    torch.manual_seed(0)
    return RetrievalModule(nn.Linear(6, 4), SmoothAPLoss(), relevance=rule)


def seen_points(kind=SeenPoints):
    generator = torch.Generator().manual_seed(4)
    tags = torch.randint(-1, 6, (27, 2), generator=generator).clamp(min=-1)
    return kind(tags=tags, cameras=torch.arange(27) % 3, roles=torch.arange(27) % 3 + 1)


@pytest.mark.parametrize("rule", [None, SharedTags(at_least=1), OtherCamera(), GalleryOnly()])
def test_evaluation_follows_the_rule_of_the_module(rule):
    """Cameras and roles are evaluated without a rule, tags only by their rule."""
    module, points = module_with(rule), seen_points()
    run = make_trainer(RetrievalEvaluation(KS))
    (found,) = run.validate(module, DataLoader(points, batch_size=5), verbose=False)
    entries, labels = points.entries, points.labels
    if isinstance(rule, SharedTags):
        metrics, given = RetrievalMetrics(KS, relevance=rule), {}
        labels = entries["tags"]
    else:
        metrics, given = RetrievalMetrics(KS), {"cameras": entries["cameras"]}
    with torch.no_grad():
        metrics.update(module(points.images), labels, torch.arange(27), entries["roles"], **given)
    expected = {f"val/{name}": value.item() for name, value in metrics.compute().items()}
    assert found == pytest.approx(expected, abs=1e-6)


def test_predictions_keep_their_labels_and_need_no_tags():
    """What an index stores of an image is its class, whatever is relevant to it."""
    module, loader = module_with(SharedTags()), DataLoader(Points(2), batch_size=5)
    predicted = make_trainer().predict(module, loader)
    assert torch.cat([batch["labels"] for batch in predicted]).tolist() == Points(2).labels.tolist()


@pytest.mark.parametrize(("rule", "given"), [(None, False), (OtherCamera(), False), (SharedTags(), True)])
def test_a_data_set_with_its_own_metric_gets_the_rule(rule, given):
    module, points = module_with(rule), seen_points(WithOwnMetric)
    make_trainer(RetrievalEvaluation(KS)).validate(module, DataLoader(points, batch_size=5), verbose=False)
    assert points.settings.get("relevance") is (rule if given else None)


def test_no_decomposability_gap_under_a_rule_without_classes():
    module, loader = module_with(SharedTags()), DataLoader(seen_points(), batch_size=9)
    run = make_trainer(RetrievalEvaluation(KS), APMonitor(), max_epochs=2)
    with pytest.warns(UserWarning, match="decomposability_gap is not logged") as caught:
        run.fit(module, loader, loader)
    assert sum("decomposability_gap" in str(each.message) for each in caught) == 1
    assert "val/mAP" in run.callback_metrics
    assert "val/decomposability_gap" not in run.callback_metrics


class NotesIds(RetrievalMetrics):
    """The metric of a data set, which notes the ids that it is given."""

    def __init__(self, ks):
        super().__init__(ks)
        self.given = []

    def update(self, embeddings, labels, ids=None, **kwargs):
        self.given.append(ids if ids is None else ids.tolist())
        super().update(embeddings, labels, ids, **kwargs)


class PairsWithOwnMetric(TensorDataset):
    def metrics(self, ks, **_):
        self.metric = NotesIds(ks)
        return self.metric


def test_ids_are_the_dataset_indices_if_the_batches_have_none():
    """They are known if the loader reads in order, and unknown if it shuffles or has a sampler of its own."""
    points = PairsWithOwnMetric(*labelled_points(2).tensors)
    in_order = [list(range(23))[i : i + 5] for i in range(0, 23, 5)]
    batches = torch.randperm(20).view(4, 5).tolist()  # another sampler may give other batches the next time
    for settings, expected in (
        ({"batch_size": 5}, in_order),
        ({"batch_size": 5, "shuffle": True}, [None] * 5),
        ({"batch_sampler": batches}, [None] * 4),
    ):
        loader = DataLoader(points, **settings)
        make_trainer(RetrievalEvaluation(KS)).validate(PointsModule(), loader, verbose=False)
        assert points.metric.given == expected


def test_before_fit_evaluates_no_data_module_of_an_earlier_call():
    class Data(pl.LightningDataModule):
        def test_dataloader(self):
            return DataLoader(labelled_points(9), batch_size=8)

    module, evaluation = PointsModule(test=(3,)), RetrievalEvaluation(KS, before_fit=True)
    run = make_trainer(evaluation)
    run.test(module, datamodule=Data(), verbose=False)
    run.fit(module, DataLoader(labelled_points(1), batch_size=8))
    untrained = evaluation.results["untrained"]
    (expected,) = make_trainer(RetrievalEvaluation(KS)).test(PointsModule(test=(3,)), verbose=False)
    assert untrained == pytest.approx(expected, abs=1e-6)
