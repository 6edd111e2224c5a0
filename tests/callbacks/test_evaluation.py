"""RetrievalEvaluation logs the metrics of whole sets in each stage, before training too, and their best values."""

import math
import warnings

import pytest
import pytorch_lightning as pl
import torch
import yaml
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger
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
from lightning_retrieval.callbacks import (
    APMonitor,
    LearnWhitening,
    PrecisionRecallCurve,
    RetrievalEvaluation,
    RetrievalGallery,
    ScoreHistogram,
)
from lightning_retrieval.callbacks.evaluation import results_table, worse_than_before
from lightning_retrieval.callbacks.evaluation_sets import (
    EvaluationSet,
    batch_indices,
    is_sharded,
    loader_list,
    set_prefixes,
    what_is_lost,
)
from lightning_retrieval.datamodules import PKSampler
from lightning_retrieval.models.retrieval_network import evaluation_mode
from tests.callbacks.point_runs import KS, PointsModule, expected_metrics, labelled_points, make_trainer
from tests.csv_logs import logged
from tests.point_set import Points


def test_metrics_are_those_of_the_whole_set(capsys):
    module, evaluation = PointsModule(), RetrievalEvaluation(KS)
    (validated,) = make_trainer(evaluation).validate(module, verbose=False)
    assert evaluation.sets == []  # the embeddings are freed
    (tested,) = make_trainer(evaluation).test(module, verbose=False)
    expected = expected_metrics(module, 2, "val"), expected_metrics(module, 3, "test")
    assert (validated, tested) == tuple(pytest.approx(values, abs=1e-12) for values in expected)
    assert 0.1 < validated["val/mAP"] < 0.9
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["val/mAP", f"{validated['val/mAP']:.4f}"] in lines
    assert ["test/skipped_queries", "0"] in lines


def test_one_label_for_all_images_warns_that_the_metrics_are_1(monkeypatch):
    module = PointsModule()
    one_label = TensorDataset(torch.randn(9, 6), torch.full((9,), 7))
    monkeypatch.setattr(module, "evaluation_loaders", lambda stage: DataLoader(one_label, batch_size=5))
    with pytest.warns(UserWarning, match="RetrievalEvaluation: all images of the set of val/mAP have the same label"):
        (validated,) = make_trainer(RetrievalEvaluation((1,))).validate(module, verbose=False)
    assert validated["val/mAP"] == 1


def test_fit_logs_each_epoch_and_skips_the_sanity_check(capsys):
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
    assert capsys.readouterr().out.count("val/mAP ") == 1  # the table is printed once, at the end


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
def test_further_metrics_are_logged_by_their_names(settings, names, capsys):
    module = PointsModule()
    (found,) = make_trainer(RetrievalEvaluation(KS, **settings)).validate(module, verbose=False)
    points, labels = labelled_points(2).tensors
    metrics = RetrievalMetrics(KS, **settings)
    with torch.no_grad():
        metrics.update(module.eval()(points), labels)
    assert found == pytest.approx({f"val/{name}": value.item() for name, value in metrics.compute().items()}, abs=1e-6)
    assert names < set(found)
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in names)


@pytest.mark.parametrize(("images", "fitting"), [(4, (1,)), (10, (1,)), (11, (1, 10)), (101, (1, 10, 100))])
def test_without_ks_those_that_fit_are_logged_and_named_once(images, fitting, monkeypatch, caplog, capsys):
    """The list of a query holds all images but itself. A warning would be an error here."""
    points = TensorDataset(torch.randn(images, 6), torch.arange(images) // 2)
    monkeypatch.setattr(PointsModule, "evaluation_loaders", lambda module, stage: DataLoader(points, batch_size=50))
    evaluation = RetrievalEvaluation(before_fit=True, dims=(2,))
    run, module, logged_in = make_trainer(evaluation, max_epochs=2), PointsModule(), {}
    with caplog.at_level("INFO"):
        run.fit(module)
        logged_in["val"] = set(run.callback_metrics)
        (tested,) = run.test(module, verbose=False)
    logged_in |= {"test": set(tested), "untrained": set(evaluation.results["untrained"])}
    for stage, names in logged_in.items():
        prefix = stage.replace("untrained", "test")
        expected = {f"{prefix}/R@{k}{dims}" for k in fitting for dims in ("", "/2d")}
        assert {name for name in names if name.startswith(f"{prefix}/R@")} == expected
    lines = [record.message for record in caplog.records if f" has {images - 1} images, so it logs " in record.message]
    if fitting == (1, 10, 100):
        assert lines == []
    else:
        assert [line.split(" list of ")[1].split()[0] for line in lines] == ["val/", "test/"]
        assert all(f" {' and '.join(f'R@{k}' for k in fitting)}, but not R@" in line for line in lines)
    assert ("R@100 " in capsys.readouterr().out) == (100 in fitting)


def test_what_a_callback_monitors_is_logged_whatever_its_k(tmp_path):
    points = TensorDataset(torch.randn(6, 6), torch.arange(6) // 2)
    module = PointsModule()
    module.evaluation_loaders = lambda stage: DataLoader(points)
    run = make_trainer(RetrievalEvaluation(), EarlyStopping("val/R@100", mode="max"), max_epochs=1)
    run.fit(module)
    assert run.callback_metrics["val/R@100"] == 1
    assert "val/R@10" not in run.callback_metrics


def test_a_resumed_run_says_that_the_untrained_network_is_not_evaluated(tmp_path, caplog):
    make_trainer(RetrievalEvaluation(KS, before_fit=True), max_epochs=1).fit(module := PointsModule())
    module.trainer.save_checkpoint(tmp_path / "first.ckpt")
    evaluation = RetrievalEvaluation(KS, before_fit=True)
    with caplog.at_level("INFO"):
        make_trainer(evaluation, max_epochs=2).fit(PointsModule(), ckpt_path=tmp_path / "first.ckpt")
    assert "so the untrained network is not evaluated" in caplog.text
    assert "untrained" not in evaluation.results


@pytest.mark.refusal
def test_dims_larger_than_the_embeddings_raise_in_the_sanity_check():
    with pytest.raises(ValueError, match=r"^RetrievalMetrics: `dims` must be at most the dimension of the embeddings"):
        make_trainer(RetrievalEvaluation(KS, dims=(2, 64)), max_epochs=1).fit(PointsModule())


def test_several_sets_are_numbered(capsys):
    module = PointsModule(val=(2, 5), test=(3, 6))
    run = make_trainer(RetrievalEvaluation(KS, before_fit=True))
    run.fit(module)
    expected = {**expected_metrics(module, 2, "val/0"), **expected_metrics(module, 5, "val/1")}
    found = {name: value.item() for name, value in run.callback_metrics.items() if name.startswith("val")}
    assert found == pytest.approx(expected, abs=1e-6)
    assert set(run.callbacks[0].results["untrained"]) == {name.replace("val", "test") for name in expected}
    (first, second) = make_trainer(RetrievalEvaluation(KS)).test(module, verbose=False)
    tested = {**expected_metrics(module, 3, "test/0"), **expected_metrics(module, 6, "test/1")}
    assert {**first, **second} == pytest.approx(tested, abs=1e-12)
    assert "test/1/mAP" in capsys.readouterr().out


@pytest.mark.parametrize("stage", ["val", "test"])
def test_limited_set_gives_one_warning(stage):
    run = make_trainer(RetrievalEvaluation(KS), **{f"limit_{stage}_batches": 2})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (run.validate if stage == "val" else run.test)(PointsModule(), verbose=False)
    messages = [str(w.message) for w in caught if "RetrievalEvaluation" in str(w.message)]
    assert [message.split(":")[1] for message in messages] == [
        f" {stage} metrics cover 2 of 5 batches (limit_{stage}_batches)"
    ]


def evaluation_warnings(module, loader, stage="validate", **settings) -> list[str]:
    """What RetrievalEvaluation warns of in an evaluation, without its name."""
    run = make_trainer(RetrievalEvaluation(KS), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(run, stage)(module, loader, verbose=False)
    messages = [str(w.message) for w in caught]
    return [message.partition(": ")[2] for message in messages if message.startswith("RetrievalEvaluation: ")]


class Stream(IterableDataset):
    """A set without a length, of which nothing is known to be lost."""

    def __init__(self, points):
        self.points = points

    def __iter__(self):
        return iter(self.points)


POINTS = labelled_points(2)
LABELS = POINTS.tensors[1]
INCOMPLETE = {
    "drop_last": ({"drop_last": True}, "20 of 23 images (drop_last=True)"),
    "subset": ({"sampler": SubsetRandomSampler(range(11))}, "11 of 23 images (SubsetRandomSampler)"),
    "number": ({"sampler": RandomSampler(POINTS, num_samples=9)}, "9 of 23 images (RandomSampler)"),
    "both": (
        {"sampler": SubsetRandomSampler(range(11)), "drop_last": True},
        "10 of 23 images (SubsetRandomSampler, drop_last=True)",
    ),
    "weighted": (
        {"sampler": WeightedRandomSampler(torch.ones(23), 23)},
        "images that are drawn with replacement, of 23 images (WeightedRandomSampler)",
    ),
    "a process": (
        {"sampler": DistributedSampler(POINTS, 2, 0, drop_last=True)},
        "22 of 23 images (DistributedSampler)",
    ),
    "ours": (
        {"batch_sampler": PKSampler(LABELS, classes_per_batch=2, samples_per_class=2)},
        "the images of batches for training (PKSampler)",
    ),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_a_loader_may_lose_images(name):
    settings, covered = INCOMPLETE[name]
    if "batch_sampler" not in settings:
        settings = {"batch_size": 5, **settings}
    assert what_is_lost(DataLoader(POINTS, **settings)) == covered


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_loader_that_loses_images_warns(stage):
    (message,) = evaluation_warnings(PointsModule(), DataLoader(POINTS, batch_size=5, drop_last=True), stage)
    name = stage.removesuffix("idate")
    assert message.startswith(f"{name} metrics cover 20 of 23 images (drop_last=True): the gallery is incomplete")
    assert evaluation_warnings(PointsModule(), DataLoader(POINTS, batch_size=5), stage) == []


def test_a_loader_may_lose_nothing():
    for loader in (
        DataLoader(POINTS, batch_size=5, shuffle=True),
        DataLoader(labelled_points(2, 20), batch_size=5, drop_last=True),
        DataLoader(POINTS, batch_sampler=[[*range(23)]]),
        DataLoader([POINTS[:10], POINTS[10:]], batch_size=None),
        DataLoader(Stream(POINTS), batch_size=5),
    ):
        assert what_is_lost(loader) is None


@pytest.mark.refusal
@pytest.mark.filterwarnings("ignore:Total length of .DataLoader. across ranks is zero")
@pytest.mark.parametrize("stage", ["validate", "test", "fit"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_loader_that_drops_its_only_batch_raises(stage, number):
    loaders = [DataLoader(POINTS, batch_size=5), DataLoader(POINTS, batch_size=24, drop_last=True)][-number:]
    run = make_trainer(RetrievalEvaluation(KS), logger=False, max_epochs=1)
    name = "test" if stage == "test" else "val"
    prefix = f"{name}/1" if number == 2 else name
    sentence = rf"{prefix} metrics must have a batch, got 0 of 23 images \(drop_last=True\), for batch_size=24; set"
    argument = "val_dataloaders" if stage == "fit" else "dataloaders"
    with pytest.raises(ValueError, match=f"^RetrievalEvaluation: the loader of the {sentence} drop_last=False"):
        getattr(run, stage)(PointsModule(), **{argument: loaders})
    if stage == "test":
        module = PointsModule()
        module.test_dataloader = lambda: loaders
        before = make_trainer(RetrievalEvaluation(KS, before_fit=True), logger=False, max_epochs=1)
        with pytest.raises(ValueError, match=f"^RetrievalEvaluation: the loader of the {sentence} drop_last=False"):
            before.fit(module)


def test_each_process_of_two_knows_what_is_lost():
    """A sampler that Lightning has put in for two processes, of which each drops one of 11 or 6 images."""
    repeating = DistributedSampler(POINTS, 2, 0)
    assert what_is_lost(DataLoader(POINTS, batch_size=5, sampler=repeating)) is None
    dropped = what_is_lost(DataLoader(POINTS, batch_size=5, sampler=repeating, drop_last=True))
    assert dropped == "19 of 23 images (drop_last=True)"
    wrapped = DistributedSamplerWrapper(SubsetRandomSampler(range(11)), num_replicas=2, rank=1)
    assert what_is_lost(DataLoader(POINTS, batch_size=5, sampler=wrapped)) == "11 of 23 images (SubsetRandomSampler)"


# --- the test set before training


def test_before_fit_is_logged_at_step_0_and_printed_beside_the_trained_results(tmp_path, capsys):
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

    capsys.readouterr()
    run.test(module, verbose=False)
    trained = expected_metrics(module, 3, "test")
    lines = capsys.readouterr().out.splitlines()
    assert next(line.split() for line in lines if line.strip()) == ["untrained", "trained", "95", "%", "interval"]
    assert [line.split()[:3] for line in lines if line.strip()][1:] == [
        *(
            [name, *(f"{table[name]:.{0 if 'skipped' in name else 4}f}" for table in (untrained, trained))]
            for name in untrained
        ),
    ]
    assert untrained["test/mAP"] != pytest.approx(trained["test/mAP"], abs=1e-4)


class Order(pl.Callback):
    """Records in which order batches are trained and tested, and the weights after each epoch."""

    def __init__(self):
        self.steps, self.weights = [], []

    def setup(self, trainer, module, stage):
        real = module.test_step
        module.test_step = lambda *arguments: self.steps.append("test") or real(*arguments)

    def on_train_batch_end(self, *_):
        self.steps.append("train")

    def on_train_epoch_end(self, trainer, module):
        self.weights += map(torch.clone, (*module.parameters(), *module.buffers(), *module.whitening.learned))


class Normed(PointsModule):
    """With statistics that change in training, and a whitening that is learned in the first validation."""

    def __init__(self):
        super().__init__()
        self.embedder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.whitening = PCAWhitening()


@pytest.mark.filterwarnings("ignore:PCAWhitening. nothing has been learned yet:UserWarning")
def test_training_comes_first_and_goes_on_as_if_the_untrained_network_were_not_evaluated(caplog):
    runs = {}
    for before_fit in (True, False):
        evaluation, order = RetrievalEvaluation(KS, before_fit=before_fit), Order()
        run = make_trainer(LearnWhitening(), evaluation, order, max_epochs=3)
        torch.manual_seed(5)
        with caplog.at_level("INFO"):
            run.fit(Normed())
        measured = ("train/images/s", "train/loader_wait")
        metrics = {name: value for name, value in run.callback_metrics.items() if name not in measured}
        runs[before_fit] = order, metrics, evaluation.results
    (order, metrics, results), (plain, of_plain, without) = runs.values()
    assert order.steps == ["train"] * 3 + ["test"] * 5 + ["train"] * 6
    assert all(map(torch.equal, order.weights, plain.weights))
    assert len(order.weights) == len(plain.weights)
    assert metrics == of_plain
    torch.manual_seed(5)
    assert results["untrained"] == pytest.approx(expected_metrics(Normed(), 3, "test"), abs=1e-12)
    assert "untrained" not in without
    (line,) = [record.message for record in caplog.records if "before training" in record.message]
    assert line.endswith(f", 1 of 1, the untrained network: test/mAP {results['untrained']['test/mAP']:.4f}.")


def test_an_error_in_the_first_epoch_ends_the_wait_for_its_end():
    evaluation = RetrievalEvaluation(KS, before_fit=True)

    class Stops(pl.Callback):
        def on_train_batch_end(self, *_):
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match=r"^stopped$"):
        make_trainer(evaluation, Stops()).fit(PointsModule())
    make_trainer(evaluation).test(PointsModule(), verbose=False)
    assert set(evaluation.results) == {"test"}
    assert evaluation._untrained is None


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_an_evaluation_that_an_error_ends_keeps_no_embeddings(stage):
    evaluation, collected = RetrievalEvaluation(KS), []

    class Stops(pl.Callback):
        def on_validation_epoch_end(self, *_):
            collected.extend(evaluation.sets[0].metrics.labels)
            raise RuntimeError("stopped")

        on_test_epoch_end = on_validation_epoch_end

    with pytest.raises(RuntimeError, match=r"^stopped$"):
        getattr(make_trainer(evaluation, Stops()), stage)(PointsModule(), verbose=False)
    assert collected
    assert evaluation.sets == []


@pytest.mark.parametrize("limit", [2, 0.5])
def test_before_fit_evaluates_the_same_batches_as_the_test(monkeypatch, limit):
    given, real = [], RetrievalMetrics.update

    def update(self, embeddings, labels, ids=None, **kwargs):
        given.append(ids.tolist())
        real(self, embeddings, labels, ids, **kwargs)

    monkeypatch.setattr(RetrievalMetrics, "update", update)
    run = make_trainer(RetrievalEvaluation(KS, before_fit=True), limit_test_batches=limit, limit_val_batches=0)
    run.fit(PointsModule())
    before = len(given)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RetrievalEvaluation: test metrics cover 2 of 5 batches")
        run.test(run.lightning_module, verbose=False)
    assert given[:before] == given[before:]
    assert len(given) == 2 * 2


def test_each_module_returns_to_its_own_mode_after_an_error():
    layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5).eval())
    with pytest.raises(TypeError), evaluation_mode(layers):
        layers("no tensor")
    assert [layer.training for layer in layers.modules()] == [True, True, False]


class Pooled(Embedder):
    """An embedder of points, with a fixed backbone of 3 features."""

    def __init__(self):
        torch.manual_seed(2)
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), 4, feature_dim=3, pooling="avg")


def test_before_fit_evaluates_the_backbone_without_the_new_head(tmp_path, capsys, caplog):
    module, evaluation = PointsModule(), RetrievalEvaluation(KS, before_fit=True, dims=(4,))
    module.embedder = Pooled()
    bare = PointsModule()
    bare.embedder = Pooled().backbone
    expected = expected_metrics(bare, 3, "test")
    run = make_trainer(evaluation, logger=CSVLogger(tmp_path, version=0), limit_val_batches=0)
    computed = []
    module.embedder.backbone.register_forward_hook(lambda backbone, *_: computed.append(backbone.training))
    with caplog.at_level("INFO"):
        run.fit(module)
    assert computed.count(False) == 5  # each batch of the test set runs once through the backbone
    assert evaluation.results["backbone"] == pytest.approx(expected, abs=1e-6)
    first = logged(tmp_path)[0]
    assert first["backbone/test/mAP"] == pytest.approx(expected["test/mAP"], abs=1e-6)
    assert first["test/mAP"] != first["backbone/test/mAP"]
    (line,) = [record.message for record in caplog.records if "before training" in record.message]
    of_backbone, of_head = (
        f"test/mAP {evaluation.results[name]['test/mAP']:.4f}" for name in ("backbone", "untrained")
    )
    assert f": before training, 1 of 2, the pooled features of its backbone: {of_backbone}; 2 of 2, " in line
    assert line.endswith(f"the untrained network: {of_head}.")
    capsys.readouterr()
    run.test(module, verbose=False)
    assert capsys.readouterr().out.split()[:3] == ["backbone", "untrained", "trained"]
    with module.embedder.without_head():
        assert module(torch.randn(2, 6)).shape == (2, 3)
    assert module(torch.randn(2, 6)).shape == (2, 4)


# --- best values


class ValuesOf(RetrievalEvaluation):
    """Computes the given values of mAP."""

    def __init__(self, values):
        super().__init__((1,))
        self.values = values

    def _create_metrics(self, loader, sync_on_compute, dims, relevance):
        metrics = super()._create_metrics(loader, sync_on_compute, dims, relevance)
        counts = dict.fromkeys(("skipped_queries", "skipped_queries/easy"), torch.tensor(3.0))
        metrics.compute = lambda: {"mAP": torch.tensor(next(self.values)), **counts}
        return metrics


def best_in(folder, version=0):
    return yaml.safe_load((folder / f"lightning_logs/version_{version}/hparams.yaml").read_text())["best"]


@pytest.mark.filterwarnings("ignore:RetrievalEvaluation. .* have a k above the number of ranked images:UserWarning")
def test_best_is_the_highest_number_of_the_run(tmp_path):
    evaluation = ValuesOf(iter([0.9, math.nan, 0.6, 0.4, math.nan]))
    for version, (epochs, best) in enumerate([(3, 0.9), (2, 0.4)]):
        run = make_trainer(evaluation, max_epochs=epochs, logger=CSVLogger(tmp_path), num_sanity_val_steps=0)
        run.fit(PointsModule())
        assert best_in(tmp_path, version) == {"val/mAP": pytest.approx(best)}


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


@pytest.mark.refusal
@pytest.mark.parametrize("kind", [APMonitor, RetrievalGallery, ScoreHistogram, PrecisionRecallCurve])
def test_callbacks_that_show_the_evaluation_require_it(kind):
    message = rf"^{kind.__name__}: .* must have the callback RetrievalEvaluation, .* it has none; pass both"
    with pytest.raises(ValueError, match=message):
        make_trainer(kind()).validate(PointsModule(), verbose=False)


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
    with pytest.raises(ValueError, match=r"^SharedTags: `batch` must have the entry 'tags', got "):
        make_trainer(RetrievalEvaluation(KS)).validate(module, loader, verbose=False)


@pytest.mark.parametrize(("rule", "given"), [(None, set()), (OtherCamera(), set()), (SharedTags(), {"relevance"})])
def test_a_data_set_with_its_own_metric_gets_the_rule(rule, given):
    module, points = module_with(rule), seen_points(WithOwnMetric)
    make_trainer(RetrievalEvaluation(KS)).validate(module, DataLoader(points, batch_size=5), verbose=False)
    settings = {"query_expansion", "database_augmentation", "embeddings_on_cpu", "sync_on_compute"}
    assert points.settings.keys() == settings | given
    assert points.settings.get("relevance") in (None, rule)


def test_no_decomposability_gap_under_a_rule_without_classes():
    module, loader = module_with(SharedTags()), DataLoader(seen_points(), batch_size=9)
    run = make_trainer(RetrievalEvaluation(KS), APMonitor(), max_epochs=2)
    with pytest.warns(UserWarning, match=r"APMonitor: val/decomposability_gap is not logged.*SharedTags\(") as caught:
        run.fit(module, loader, loader)
    assert sum("decomposability_gap" in str(each.message) for each in caught) == 1
    assert "val/mAP" in run.callback_metrics
    assert "val/decomposability_gap" not in run.callback_metrics


# --- the table that is printed


def test_a_table_has_the_metrics_of_its_last_column_and_titles_if_there_are_several():
    assert results_table({"trained": {"test/mAP": 0.25, "test/skipped_queries": 3.0}}).splitlines() == [
        "test/mAP                  0.2500",
        "test/skipped_queries           3",
    ]
    table = results_table({"untrained": {"test/mAP": 0.25}, "trained": {"test/mAP": 0.5, "test/R@1": 1.0}})
    assert table.splitlines() == [
        "           untrained     trained",
        "test/mAP      0.2500      0.5000",
        "test/R@1         nan      1.0000",
    ]
    table = results_table({"trained": {"test/mAP": 0.25, "test/skipped_queries": 3.0}}, {"test/mAP": (0.125, 0.5)})
    assert table.splitlines() == [
        "                                       95 % interval",
        "test/mAP                  0.2500    0.1250 to 0.5000",
        "test/skipped_queries           3",
    ]


@pytest.mark.parametrize(
    ("backbone", "untrained", "trained", "named"),
    [
        (0.280, 0.254, 0.202, "the pooled features of its backbone: test/mAP is 0.2020, and was 0.2800; train for"),
        (0.180, 0.254, 0.202, "the untrained network: test/mAP is 0.2020, and was 0.2540; train for more epochs, try"),
        (0.180, 0.154, 0.202, None),
        (0.202, 0.20201, 0.202, None),  # as printed
        (0.1, 0.50001, 0.49999, None),
        (math.nan, 0.1, math.nan, None),
    ],
)
def test_a_network_that_training_made_worse(backbone, untrained, trained, named):
    scores = {"backbone": backbone, "untrained": untrained, "trained": trained}
    columns = {}
    for title, score in scores.items():
        columns[title] = {"test/skipped_queries": 0.0, "test/mAP": score, "test/R@1": 1.0}
    columns["trained"]["test/R@1"] = 0.5
    sentence = worse_than_before(columns)
    assert (sentence is None) == (named is None)
    if named is not None:
        assert sentence.startswith(f"The trained network is worse than {named}")
        assert "begin with pretrained weights" in sentence
        assert "begin with" not in worse_than_before(columns, weights="DEFAULT")
    assert worse_than_before({"trained": columns["trained"]}) is None


def test_each_set_counts_and_the_first_metric_where_there_is_no_map():
    before = {"test/a/mAP": 0.5, "test/b/mAP": 0.5}
    assert "test/b/mAP is 0.4000" in worse_than_before({"untrained": before, "trained": {**before, "test/b/mAP": 0.4}})
    assert "test/TAR is 0.1000" in worse_than_before({"untrained": {"test/TAR": 0.2}, "trained": {"test/TAR": 0.1}})


# --- what a set reads from its loader and data set, and accepts from evaluation steps


@pytest.mark.refusal
@pytest.mark.parametrize(("answer", "came"), [(None, "NoneType"), ({"loss": torch.zeros(())}, r"the keys \['loss'\]")])
def test_steps_without_embeddings_and_labels_raise(answer, came):
    class Other(PointsModule):
        def validation_step(self, batch, batch_idx):
            return answer

    with pytest.raises(TypeError, match=rf"^RetrievalEvaluation: Other's validation .* ids, got {came}"):
        make_trainer(RetrievalEvaluation(KS)).validate(Other(), verbose=False)


@pytest.mark.refusal
def test_roles_must_be_integers():
    evaluation_set = EvaluationSet("test/", DataLoader(labelled_points(3)), RetrievalMetrics(KS))
    message = r"the `roles` that Module's steps return must be a tensor of integers .*, got torch.float32"
    with pytest.raises(TypeError, match=message):
        evaluation_set.add("Module", {"embeddings": torch.ones(2, 3), "labels": torch.ones(2), "roles": torch.ones(2)})


@pytest.mark.parametrize("shuffle", [False, True])
def test_ids_are_the_dataset_indices_if_the_batches_have_none(monkeypatch, shuffle):
    """They are known if the loader reads in order, and unknown if it shuffles."""
    given, real = [], RetrievalMetrics.update

    def update(self, embeddings, labels, ids=None, **kwargs):
        given.append(ids if ids is None else ids.tolist())
        real(self, embeddings, labels, ids, **kwargs)

    monkeypatch.setattr(RetrievalMetrics, "update", update)
    loader = DataLoader(labelled_points(2), batch_size=5, shuffle=shuffle)
    make_trainer(RetrievalEvaluation(KS)).validate(PointsModule(), loader, verbose=False)
    assert given == [None if shuffle else list(range(23))[i : i + 5] for i in range(0, 23, 5)]
    given.clear()
    batches = torch.randperm(20).view(4, 5).tolist()  # another sampler may give other batches the next time
    loader = DataLoader(labelled_points(2), batch_sampler=batches)
    make_trainer(RetrievalEvaluation(KS)).validate(PointsModule(), loader, verbose=False)
    assert given == [None] * 4


@pytest.mark.refusal
@pytest.mark.parametrize("owner", ["module", "datamodule"])
def test_before_fit_needs_a_test_set(owner):
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(labelled_points(1), batch_size=8)

    module = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss())
    given = {"datamodule": Data()} if owner == "datamodule" else {"train_dataloaders": Data().train_dataloader()}
    name = "Data" if owner == "datamodule" else "RetrievalModule"
    with pytest.raises(ValueError, match=rf"`before_fit` needs a test set, which {name} does not have; define"):
        make_trainer(RetrievalEvaluation(KS, before_fit=True)).fit(module, **given)


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


def test_prefixes_follow_the_form_of_the_loaders():
    one, other = DataLoader(labelled_points(1)), DataLoader(labelled_points(2))
    assert set_prefixes("val", one) == set_prefixes("val", [one]) == ["val/"]
    assert set_prefixes("test", [one, other]) == ["test/0/", "test/1/"]
    assert set_prefixes("val", {"near": one}) == ["val/near/"]
    assert loader_list({"near": one, "far": other}) == loader_list((one, other)) == [one, other]
    assert loader_list(one) == [one]


def test_each_process_knows_the_indices_of_its_own_shard():
    sampler = DistributedSampler(labelled_points(1, size=6), num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(labelled_points(1, size=6), batch_size=2, sampler=sampler)
    assert is_sharded(loader)
    assert list(batch_indices(loader)) == [[1, 3], [5]]
    shuffled = DistributedSampler(labelled_points(1, size=6), num_replicas=2, rank=1, shuffle=True)
    assert batch_indices(DataLoader(labelled_points(1, size=6), sampler=shuffled)) is None
    assert not is_sharded(DataLoader(labelled_points(1)))
