"""RetrievalEvaluation: what it logs is RetrievalMetrics of the whole set, wherever a Trainer evaluates."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import RetrievalMetrics, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.callbacks.evaluation_set import EvaluationSet

QUIET = [
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    "ignore:The '(train|val|test)_dataloader' does not have many workers:UserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be:UserWarning",
    "ignore:GPU available but not used:UserWarning",
    "ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning",
]
pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]

KS = (1, 5)


def points(seed: int, size: int = 23) -> TensorDataset:
    """Vectors that lean to their class, so that no metric is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) // 4
    centres = torch.randn(9, 6, generator=generator)
    return TensorDataset(centres[labels] + 1.5 * torch.randn(size, 6, generator=generator), labels)


class Net(RetrievalModule):
    """A module with data of its own: batches of 5, so that the last one is smaller."""

    def __init__(self, seed=0, lr=0.1, val=(2,), test=(3,)):
        torch.manual_seed(seed)
        embedder = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        super().__init__(embedder, SmoothAPLoss(tau=0.1), optimizer=lambda groups: torch.optim.SGD(groups, lr=lr))
        self.sets = {"val": val, "test": test}

    def train_dataloader(self):
        return DataLoader(points(1), batch_size=8)

    def val_dataloader(self):
        loaders = [DataLoader(points(seed), batch_size=5) for seed in self.sets["val"]]
        return loaders[0] if len(loaders) == 1 else loaders

    def test_dataloader(self):
        loaders = [DataLoader(points(seed), batch_size=5) for seed in self.sets["test"]]
        return loaders[0] if len(loaders) == 1 else loaders


def trainer(*callbacks, **kwargs) -> pl.Trainer:
    defaults = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "log_every_n_steps": 1}
    return pl.Trainer(
        **{**defaults, **kwargs},
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def by_hand(module: RetrievalModule, seed: int, prefix: str) -> dict[str, float]:
    images, labels = points(seed).tensors
    metrics = RetrievalMetrics(KS)
    with torch.no_grad():
        metrics.update(module.eval()(images), labels)
    return {f"{prefix}/{name}": value.item() for name, value in metrics.compute().items()}


def test_what_is_logged_is_computed_over_the_whole_set(capsys):
    module, evaluation = Net(), RetrievalEvaluation(KS)
    (validated,) = trainer(evaluation).validate(module, verbose=False)
    (tested,) = trainer(evaluation).test(module, verbose=False)
    expected = by_hand(module, 2, "val"), by_hand(module, 3, "test")
    assert (validated, tested) == tuple(pytest.approx(values, abs=1e-12) for values in expected)
    assert 0.1 < validated["val/mAP"] < 0.9
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    assert ["val/mAP", f"{validated['val/mAP']:.4f}"] in lines
    assert ["test/skipped_queries", "0"] in lines


def test_a_fit_logs_each_epoch_and_skips_the_sanity_check(capsys):
    """Its two batches would be a gallery too small: nothing is computed, whatever the callback is asked before."""
    module, seen, computed = Net(), [], []

    class Compare(pl.Callback):
        def on_sanity_check_end(self, trainer, module):
            assert not any(name.startswith("val") for name in trainer.callback_metrics)

        def on_validation_end(self, trainer, module):
            if not trainer.sanity_checking:
                seen.append({name: value.item() for name, value in trainer.callback_metrics.items() if "val" in name})

        def on_train_epoch_end(self, trainer, module):
            computed.append(by_hand(module, 2, "val"))
            module.train()

    fitted = trainer(RetrievalEvaluation(KS), Compare(), max_epochs=3)
    fitted.fit(module)
    assert len(seen) == 3
    assert seen == [pytest.approx(values, abs=1e-6) for values in computed]  # Lightning logs in float32
    assert len({values["val/mAP"] for values in seen}) == 3
    assert capsys.readouterr().out.count("val/mAP ") == 1  # the table, once, at the end


def test_checkpoints_and_early_stopping_follow_it(tmp_path):
    """With a rate of zero nothing gets better after the first epoch."""
    seen = []

    class See(pl.Callback):
        def on_validation_end(self, trainer, module):
            seen.append(trainer.callback_metrics.get("val/mAP", torch.tensor(0.0)).item())

    best = ModelCheckpoint(tmp_path, monitor="val/mAP", mode="max", filename="{epoch}")
    callbacks = [See(), RetrievalEvaluation(KS), best]
    run = trainer(*callbacks, max_epochs=5, enable_checkpointing=True, num_sanity_val_steps=0)
    run.fit(Net())
    assert len(seen) == 5
    assert best.best_model_score.item() == max(seen) > min(seen)
    assert best.best_model_path.endswith(f"epoch={seen.index(max(seen))}.ckpt")
    stop = EarlyStopping(monitor="val/mAP", mode="max", patience=2)
    stopped = trainer(RetrievalEvaluation(KS), stop, max_epochs=9)
    stopped.fit(Net(lr=0.0))
    assert stopped.current_epoch == 3


def test_several_sets_are_numbered(capsys):
    module = Net(val=(2, 5), test=(3, 6))
    run = trainer(RetrievalEvaluation(KS, before_fit=True))
    run.fit(module)
    expected = {**by_hand(module, 2, "val/0"), **by_hand(module, 5, "val/1")}
    logged = {name: value.item() for name, value in run.callback_metrics.items() if name.startswith("val")}
    assert logged == pytest.approx(expected, abs=1e-6)
    assert set(run.callbacks[0].results["untrained"]) == {name.replace("val", "test") for name in expected}
    (first, second) = trainer(RetrievalEvaluation(KS)).test(module, verbose=False)
    tested = {**by_hand(module, 3, "test/0"), **by_hand(module, 6, "test/1")}
    assert {**first, **second} == pytest.approx(tested, abs=1e-12)
    assert "test/1/mAP" in capsys.readouterr().out


def test_a_dict_of_sets_is_logged_by_its_names():
    module = Net()
    loaders = {name: DataLoader(points(seed), batch_size=5) for name, seed in {"near": 2, "far": 5}.items()}
    results = trainer(RetrievalEvaluation(KS)).validate(module, loaders, verbose=False)
    expected = {**by_hand(module, 2, "val/near"), **by_hand(module, 5, "val/far")}
    assert {name: value for result in results for name, value in result.items()} == pytest.approx(expected, abs=1e-12)


@pytest.mark.filterwarnings(r"ignore:Found 1 module\(s\) in eval mode at the start of training:UserWarning")
def test_before_fit_is_logged_at_step_0_and_stands_beside_the_trained(tmp_path, capsys):
    module, evaluation = Net(), RetrievalEvaluation(KS, before_fit=True)
    untrained, modes = by_hand(Net(), 3, "test"), []
    module.embedder[2].eval()  # as frozen layers are

    class Modes(pl.Callback):
        """After the untrained evaluation, for callbacks are asked in order."""

        def on_train_start(self, trainer, module):
            modes.append([(name, part.training) for name, part in module.named_modules()])

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            assert all(p.grad is None for p in module.parameters()) or batch_idx > 0 or trainer.current_epoch > 0

    logger = CSVLogger(tmp_path, version=0)
    run = trainer(evaluation, Modes(), logger=logger, max_epochs=2)
    run.fit(module)
    assert {name for name, training in modes[0] if not training} == {"embedder.2"}
    assert evaluation.results["untrained"] == pytest.approx(untrained, abs=1e-12)
    header, first = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()[:2]
    row = dict(zip(header.split(","), first.split(","), strict=True))
    assert row["step"] == "0"
    assert {name: float(row[name]) for name in untrained} == pytest.approx(untrained, abs=1e-6)
    assert row["train/loss"] == ""

    capsys.readouterr()
    run.test(module, verbose=False)
    trained = by_hand(module, 3, "test")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.strip()] == [
        ["untrained", "trained"],
        *(
            [name, *(f"{table[name]:.{0 if 'skipped' in name else 4}f}" for table in (untrained, trained))]
            for name in untrained
        ),
    ]
    assert untrained["test/mAP"] != pytest.approx(trained["test/mAP"], abs=1e-4)


def test_before_fit_is_skipped_where_a_run_is_resumed(tmp_path):
    trainer().fit(module := Net())
    half = trainer(RetrievalEvaluation(KS))
    half.fit(module)
    half.save_checkpoint(tmp_path / "half.ckpt")
    evaluation = RetrievalEvaluation(KS, before_fit=True)
    trainer(evaluation, max_epochs=2).fit(Net(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert set(evaluation.results) == {"val"}


@pytest.mark.parametrize(("limit", "batches"), [(2, 2), (0.5, 2), (1.0, 5), (9, 5)])
def test_before_fit_sees_what_the_test_will_see(monkeypatch, limit, batches):
    given, real = [], RetrievalMetrics.update

    def update(self, embeddings, labels, ids=None, **kwargs):
        given.append(ids.tolist())
        real(self, embeddings, labels, ids, **kwargs)

    monkeypatch.setattr(RetrievalMetrics, "update", update)
    run = trainer(RetrievalEvaluation(KS, before_fit=True), limit_test_batches=limit, limit_val_batches=0)
    run.fit(Net())
    before = len(given)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RetrievalEvaluation: test metrics cover 2 of 5 batches")
        run.test(run.lightning_module, verbose=False)
    assert given[:before] == given[before:]
    assert len(given) == 2 * batches


@pytest.mark.refusal
@pytest.mark.parametrize("owner", ["module", "datamodule"])
def test_before_fit_without_a_test_set_is_refused(owner):
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(points(1), batch_size=8)

    module = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss())
    given = {"datamodule": Data()} if owner == "datamodule" else {"train_dataloaders": Data().train_dataloader()}
    name = "Data" if owner == "datamodule" else "RetrievalModule"
    with pytest.raises(ValueError, match=rf"`before_fit` needs a test set, which {name} does not have; define"):
        trainer(RetrievalEvaluation(KS, before_fit=True)).fit(module, **given)


@pytest.mark.parametrize("stage", ["val", "test"])
def test_a_limited_set_warns_once(stage):
    run = trainer(RetrievalEvaluation(KS), **{f"limit_{stage}_batches": 2})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (run.validate if stage == "val" else run.test)(Net(), verbose=False)
    said = [str(w.message) for w in caught if "RetrievalEvaluation" in str(w.message)]
    assert [message.split(":")[1] for message in said] == [
        f" {stage} metrics cover 2 of 5 batches (limit_{stage}_batches)"
    ]


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("answer", "came"),
    [
        (None, "NoneType"),
        (torch.zeros(()), "Tensor"),
        ({"loss": torch.zeros(())}, r"the keys \['loss'\]"),
    ],
)
def test_steps_that_return_something_else_are_refused(answer, came):
    class Other(Net):
        def validation_step(self, batch, batch_idx):
            return answer

    with pytest.raises(
        TypeError, match=rf"^RetrievalEvaluation: Other's validation .* ids, got {came}; the steps of Retr"
    ):
        trainer(RetrievalEvaluation(KS)).validate(Other(), verbose=False)


def test_embeddings_are_freed_when_evaluation_ends():
    held = []

    class Held(pl.Callback):
        def on_validation_epoch_end(self, trainer, module):
            held.append(sum(map(len, evaluation.sets[0].metrics.embeddings)))

    evaluation = RetrievalEvaluation(KS)
    trainer(evaluation, Held(), num_sanity_val_steps=0).fit(Net())
    assert held == [23]
    assert evaluation.sets == []
    trainer(evaluation).test(Net(), verbose=False)
    assert evaluation.sets == []


@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled:UserWarning")
@pytest.mark.parametrize("shuffle", [False, True])
def test_ids_are_the_positions_where_the_batches_have_none(monkeypatch, shuffle):
    """Known for loaders that go in order; where they shuffle, ids would be a guess."""
    given, real = [], RetrievalMetrics.update

    def update(self, embeddings, labels, ids=None, **kwargs):
        given.append(ids if ids is None else ids.tolist())
        real(self, embeddings, labels, ids, **kwargs)

    monkeypatch.setattr(RetrievalMetrics, "update", update)
    loader = DataLoader(points(2), batch_size=5, shuffle=shuffle)
    trainer(RetrievalEvaluation(KS)).validate(Net(), loader, verbose=False)
    assert given == [None if shuffle else list(range(23))[i : i + 5] for i in range(0, 23, 5)]
    given.clear()
    batches = [torch.randperm(23).tolist()[:5] for _ in range(4)]  # nobody knows what it would give the next time
    trainer(RetrievalEvaluation(KS)).validate(Net(), DataLoader(points(2), batch_sampler=batches), verbose=False)
    assert given == [None] * 4


@pytest.mark.refusal
def test_roles_that_are_no_integers():
    evaluation_set = EvaluationSet("test/", DataLoader(points(3)), RetrievalMetrics(KS))
    match = (
        r"RetrievalEvaluation: the `roles` that Net's steps return must be a tensor of integers .*, got torch.float32"
    )
    with pytest.raises(TypeError, match=match):
        evaluation_set.add("Net", {"embeddings": torch.ones(2, 3), "labels": torch.ones(2), "roles": torch.ones(2)})


@pytest.mark.refusal
def test_ks_are_checked_at_once():
    with pytest.raises(ValueError, match=r"`ks` must be an integer >= 1, got 0\."):
        RetrievalEvaluation(ks=(1, 0))
