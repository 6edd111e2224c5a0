"""RetrievalEvaluation logs the RetrievalMetrics of whole sets, in each stage of a Trainer."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import RetrievalMetrics
from lightning_retrieval.callbacks import RetrievalEvaluation
from tests.callbacks.point_runs import KS, PointsModule, expected_metrics, labelled_points, make_trainer


def test_metrics_are_those_of_the_whole_set(capsys):
    module, evaluation = PointsModule(), RetrievalEvaluation(KS)
    (validated,) = make_trainer(evaluation).validate(module, verbose=False)
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
    with pytest.warns(
        UserWarning, match="RetrievalEvaluation: all images of the set of val/mAP have the same label, so"
    ):
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


def test_checkpoints_and_early_stopping_monitor_the_metrics(tmp_path):
    """With a learning rate of 0 the metric does not improve after the first epoch."""
    seen = []

    class See(pl.Callback):
        def on_validation_end(self, trainer, module):
            seen.append(trainer.callback_metrics.get("val/mAP", torch.tensor(0.0)).item())

    best = ModelCheckpoint(tmp_path, monitor="val/mAP", mode="max", filename="{epoch}")
    callbacks = [See(), RetrievalEvaluation(KS), best]
    run = make_trainer(*callbacks, max_epochs=5, enable_checkpointing=True, num_sanity_val_steps=0)
    run.fit(PointsModule())
    assert len(seen) == 5
    assert best.best_model_score.item() == max(seen) > min(seen)
    assert best.best_model_path.endswith(f"epoch={seen.index(max(seen))}.ckpt")
    stop = EarlyStopping(monitor="val/mAP", mode="max", patience=2)
    stopped = make_trainer(RetrievalEvaluation(KS), stop, max_epochs=9)
    stopped.fit(PointsModule(lr=0.0))
    assert stopped.current_epoch == 3


def test_metrics_of_the_first_dimensions_are_logged(capsys):
    module = PointsModule()
    (logged,) = make_trainer(RetrievalEvaluation(KS, dims=(2, 3))).validate(module, verbose=False)
    points, labels = labelled_points(2).tensors
    metrics = RetrievalMetrics(KS, dims=(2, 3))
    with torch.no_grad():
        metrics.update(module.eval()(points), labels)
    assert logged == pytest.approx({f"val/{name}": value.item() for name, value in metrics.compute().items()}, abs=1e-6)
    assert logged["val/mAP/2d"] != logged["val/mAP/3d"]
    assert "val/mAP/2d " in capsys.readouterr().out


@pytest.mark.refusal
def test_dims_larger_than_the_embeddings_raise_in_the_sanity_check():
    with pytest.raises(ValueError, match=r"^RetrievalMetrics: `dims` must be at most the dimension of the embeddings"):
        make_trainer(RetrievalEvaluation(KS, dims=(2, 64)), max_epochs=1).fit(PointsModule())


def test_extra_metrics_are_logged_by_their_names():
    module = PointsModule()
    evaluation = RetrievalEvaluation(KS, map_ks=(2,), map_divisor="R", extra_metrics=("mINP", "NDCG@3", "recall@2"))
    (logged,) = make_trainer(evaluation).validate(module, verbose=False)
    points, labels = labelled_points(2).tensors
    metrics = RetrievalMetrics(KS, (2,), map_divisor="R", extra_metrics=("mINP", "NDCG@3", "recall@2"))
    with torch.no_grad():
        metrics.update(module.eval()(points), labels)
    expected = {f"val/{name}": value.item() for name, value in metrics.compute().items()}
    assert logged == pytest.approx(expected, abs=1e-9)
    assert {"val/mINP", "val/NDCG@3", "val/recall@2"} < set(logged)
    with pytest.raises(ValueError, match=r"`extra_metrics` must be from 'mINP', .* got 'NDCG'"):
        RetrievalEvaluation(extra_metrics=("NDCG",))


def test_several_sets_are_numbered(capsys):
    module = PointsModule(val=(2, 5), test=(3, 6))
    run = make_trainer(RetrievalEvaluation(KS, before_fit=True))
    run.fit(module)
    expected = {**expected_metrics(module, 2, "val/0"), **expected_metrics(module, 5, "val/1")}
    logged = {name: value.item() for name, value in run.callback_metrics.items() if name.startswith("val")}
    assert logged == pytest.approx(expected, abs=1e-6)
    assert set(run.callbacks[0].results["untrained"]) == {name.replace("val", "test") for name in expected}
    (first, second) = make_trainer(RetrievalEvaluation(KS)).test(module, verbose=False)
    tested = {**expected_metrics(module, 3, "test/0"), **expected_metrics(module, 6, "test/1")}
    assert {**first, **second} == pytest.approx(tested, abs=1e-12)
    assert "test/1/mAP" in capsys.readouterr().out


def test_dict_of_sets_is_logged_by_its_names():
    module = PointsModule()
    loaders = {name: DataLoader(labelled_points(seed), batch_size=5) for name, seed in {"near": 2, "far": 5}.items()}
    results = make_trainer(RetrievalEvaluation(KS)).validate(module, loaders, verbose=False)
    expected = {**expected_metrics(module, 2, "val/near"), **expected_metrics(module, 5, "val/far")}
    assert {name: value for result in results for name, value in result.items()} == pytest.approx(expected, abs=1e-12)


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


def test_embeddings_are_freed_when_evaluation_ends():
    held = []

    class Held(pl.Callback):
        def on_validation_epoch_end(self, trainer, module):
            held.append(sum(map(len, evaluation.sets[0].metrics.embeddings)))

    evaluation = RetrievalEvaluation(KS)
    make_trainer(evaluation, Held(), num_sanity_val_steps=0).fit(PointsModule())
    assert held == [23]
    assert evaluation.sets == []
    make_trainer(evaluation).test(PointsModule(), verbose=False)
    assert evaluation.sets == []


@pytest.mark.refusal
@pytest.mark.parametrize("name", ["query_expansion", "database_augmentation"])
def test_post_processing_that_cannot_be_called_raises_in_the_constructor(name):
    with pytest.raises(TypeError, match=rf"^RetrievalEvaluation: `{name}` must be callable, got 'x' \(str\)\.$"):
        RetrievalEvaluation(**{name: "x"})


@pytest.mark.refusal
def test_ks_are_validated_in_the_constructor():
    with pytest.raises(ValueError, match=r"`ks` must be an integer >= 1, got 0\."):
        RetrievalEvaluation(ks=(1, 0))
