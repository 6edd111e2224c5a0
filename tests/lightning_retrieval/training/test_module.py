"""RetrievalModule in one process: the steps of plain PyTorch, runs that continue as they would have, errors."""

import copy
import functools
import inspect
import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from pytorch_metric_learning.losses import ContrastiveLoss, ProxyAnchorLoss, TripletMarginLoss
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import (
    CalibrationLoss,
    Embedder,
    HAPLoss,
    RetrievalModule,
    ROADMAPLoss,
    SmoothAPLoss,
    SupAPLoss,
    WeightedSum,
)
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import RetrievalDataModule
from lightning_retrieval.losses import BlackboxMAPLoss
from lightning_retrieval.losses.third_party import original_loss
from lightning_retrieval.training.trainer_checks import check_processes

SGD = functools.partial(torch.optim.SGD, lr=0.5)
ROWS = 10
CHUNKS = [None, 3, 7]  # of ten rows: one chunk, 3 + 3 + 3 + 1, 7 + 3


def net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4)).double()


def batches(steps: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(ROWS, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (ROWS,), generator=generator),
        )
        for _ in range(steps)
    ]


def trainer(**kwargs) -> pl.Trainer:
    return pl.Trainer(
        **{"max_epochs": 1, "accelerator": "cpu", "enable_checkpointing": False, "logger": False, **kwargs},
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(module, data, validation=None, **kwargs) -> pl.Trainer:
    run = trainer(**kwargs)
    loaders = [DataLoader(x, batch_size=None) if isinstance(x, list) else x for x in (data, validation)]
    run.fit(module, *loaders)
    return run


def assert_same(module: nn.Module, expected: nn.Module) -> None:
    """Parameters equal but for rounding in float64, and none at all compared would be an error."""
    assert len(list(expected.parameters())) > 0
    for (name, value), (_, other) in zip(module.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


class Log(pl.Callback):
    """Keeps the loss and the learning rates of each step."""

    def __init__(self):
        self.losses, self.rates = [], []

    def on_train_batch_start(self, trainer, *_):
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_batch_end(self, trainer, *_):
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


# --- a step


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_steps_are_those_of_plain_pytorch(chunk_size, dropout):
    """Adam's also; with dropout, the random state of a step is the function of (seed, step, rank) written out here."""
    plain, loss, seed = net(dropout), SmoothAPLoss(tau=0.1), 3
    optimizer, values = torch.optim.AdamW(plain.parameters(), lr=0.01), []
    for step, (images, labels) in enumerate(batches()):
        optimizer.zero_grad()
        torch.manual_seed((seed * 1_000_003 + step) * 65_537)
        value = loss(torch.cat([plain(chunk) for chunk in images.split(chunk_size or ROWS)]), labels)
        value.backward()
        optimizer.step()
        values.append(value.item())

    adam, log = functools.partial(torch.optim.AdamW, lr=0.01), Log()
    module = RetrievalModule(net(dropout), SmoothAPLoss(tau=0.1), chunk_size=chunk_size, optimizer=adam, seed=seed)
    torch.manual_seed(99)  # the state outside counts for nothing
    run = fit(module, batches(), callbacks=[log])
    assert_same(module.embedder, plain)
    assert log.losses == pytest.approx(values, abs=1e-6)  # logged in float32
    assert run.global_step == 3  # one for each batch, whatever the number of chunks


def test_the_seed_is_that_of_seed_everything(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "41")
    assert RetrievalModule(net(), SmoothAPLoss()).seed == 41
    assert RetrievalModule(net(), SmoothAPLoss(), seed=2).seed == 2
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert RetrievalModule(net(), SmoothAPLoss()).seed == 0


@pytest.mark.parametrize("form", ["pair", "list", "ids", "dict", "dict with ids"])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_forms_of_a_batch(form, chunk_size):
    """And the ids reach the loss: rows 0 and 1 are the same image, which is no positive of itself."""
    images, labels = batches(1)[0]
    labels[:4] = torch.tensor([0, 0, 0, 1])
    ids = torch.tensor([50, 50, *range(2, ROWS)])
    batch = {
        "pair": (images, labels),
        "list": [images, labels],
        "ids": (images, labels, ids),
        "dict": {"images": images, "labels": labels},
        "dict with ids": {"images": images, "labels": labels, "ids": ids},
    }[form]
    after = {}
    for given in (None, ids):
        after[given is None] = plain = net()
        SmoothAPLoss(tau=0.1)(plain(images), labels, ids=given).backward()
        torch.optim.SGD(plain.parameters(), lr=0.5).step()
    module = RetrievalModule(net(), SmoothAPLoss(tau=0.1), chunk_size=chunk_size, optimizer=SGD)
    fit(module, [batch])
    assert_same(module.embedder, after["ids" not in form])
    assert not torch.allclose(after[True][0].weight, after[False][0].weight)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("batch", "came"),
    [
        ((1, 2, 3, 4), "4 items"),
        ((1,), "1 items"),
        ({"images": 1, "target": 2}, r"a dict with the keys \['images', 'target'\]"),
        (torch.zeros(2), "Tensor"),
    ],
)
def test_other_batches_raise(batch, came):
    with pytest.raises(TypeError, match=rf"^RetrievalModule: a batch must be .*, got {came}; override unpack_batch"):
        RetrievalModule(net(), SmoothAPLoss()).unpack_batch(batch)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped(algorithm):
    plain = net()
    for images, labels in batches():
        plain.zero_grad()
        SmoothAPLoss(tau=0.1)(plain(images), labels).backward()
        if algorithm == "norm":
            assert nn.utils.clip_grad_norm_(plain.parameters(), 0.01) > 0.02
        else:
            nn.utils.clip_grad_value_(plain.parameters(), 0.01)
        torch.optim.SGD(plain.parameters(), lr=0.5).step()
    module = RetrievalModule(
        net(),
        SmoothAPLoss(tau=0.1),
        chunk_size=3,
        optimizer=SGD,
        gradient_clip_val=0.01,
        gradient_clip_algorithm=algorithm,
    )
    fit(module, batches())
    assert_same(module.embedder, plain)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", pytest.param("16-mixed", marks=pytest.mark.gpu)])
def test_clipping_sees_unscaled_gradients(precision, chunk_size):
    """Plain SGD with rate 1 moves the weights by the clipped gradient, so by just the largest norm."""
    on_gpu = precision == "16-mixed"  # float16 autocast with a loss scale needs one
    module = RetrievalModule(
        net().float(),
        SmoothAPLoss(tau=0.1),
        chunk_size=chunk_size,
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        gradient_clip_val=0.01,
    )
    moved = []

    class Moves(pl.Callback):
        def on_train_batch_start(self, *_):
            self.before = [p.detach().clone() for p in module.parameters()]

        def on_train_batch_end(self, *_):
            moves = [(p.detach() - b).flatten() for p, b in zip(module.parameters(), self.before)]
            moved.append(torch.cat(moves).norm().item())

    data = [(images.float(), labels) for images, labels in batches(8)]
    fit(module, data, precision=precision, accelerator="gpu" if on_gpu else "cpu", callbacks=[Moves()])
    stepped = [m for m in moved if m > 0]  # a loss scale that is too large at first skips a step
    assert len(stepped) == 8 if precision != "16-mixed" else len(stepped) > 0
    assert stepped == pytest.approx([0.01] * len(stepped), rel=1e-4)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"gradient_clip_val": 0.5},
            r"Trainer\(gradient_clip_val=0\.5\) does not work .* RetrievalModule\(\.\.\., gradient_clip_val=0\.5\)",
        ),
        ({"accumulate_grad_batches": 4}, r"Trainer\(accumulate_grad_batches=4\) would split .* chunk_size"),
        ({"overfit_batches": 2}, r"Trainer\(overfit_batches=2\) replaces the sampler.* limit_train_batches"),
    ],
)
def test_trainer_flags_that_break_the_lists_raise(flags, sentence):
    with pytest.raises(ValueError, match=rf"^RetrievalModule: {sentence}"):
        fit(RetrievalModule(net(), SmoothAPLoss()), batches(), **flags)


def test_a_static_graph_raises():
    module = RetrievalModule(net(), SmoothAPLoss())
    module.trainer = trainer(strategy=DDPStrategy(static_graph=True))
    with pytest.raises(
        ValueError, match=r"^RetrievalModule: DDPStrategy\(static_graph=True\) expects one backward pass"
    ):
        module.configure_callbacks()


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"chunk_size": 0}, ValueError, r"`chunk_size` must be an integer >= 1, got 0\."),
        ({"chunk_size": 2.0}, TypeError, r"`chunk_size` must be an integer >= 1, got 2\.0"),
        ({"gather": None}, TypeError, r"`gather` must be True or False, got None\."),
        ({"loss": BlackboxMAPLoss()}, TypeError, r"BlackboxMAPLoss takes scores of images for classes, not embeddings"),
        ({"chunk_size": "all"}, TypeError, r"`chunk_size` must be an integer >= 1 or 'auto', got 'all'"),
        ({"lr_scheduler_interval": "batch"}, ValueError, r"must be one of 'epoch', 'step', got 'batch'\."),
        ({"lr_scheduler_frequency": 0}, ValueError, r"`lr_scheduler_frequency` must be an integer >= 1, got 0\."),
        ({"gradient_clip_val": 0.0}, ValueError, r"`gradient_clip_val` must be a finite number > 0, got 0\.0\."),
        ({"gradient_clip_algorithm": "max"}, ValueError, r"must be one of 'norm', 'value', got 'max'\."),
        ({"head_lr_factor": -1.0}, ValueError, r"`head_lr_factor` must be a finite number > 0, got -1\.0\."),
        ({"embedder": 3}, TypeError, r"`embedder` must be a torch\..*\.Module, got int\."),
        ({"loss": abs}, TypeError, r"`loss` must be a torch\..*\.Module, got builtin_function_or_method\."),
        ({"optimizer": 0.1}, TypeError, r"`optimizer` must be callable, such as .*, got 0\.1\."),
    ],
)
def test_settings_are_checked(settings, error, sentence):
    with pytest.raises(error, match=rf"^RetrievalModule: .*{sentence}"):
        RetrievalModule(**{"embedder": net(), "loss": SmoothAPLoss(), **settings})


# --- optimizers and schedulers


class OwnOptimizers(RetrievalModule):
    """Configures the same as the constructor's arguments would, by hand."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = {
            "scheduler": ExponentialLR(optimizer, 0.5),
            "interval": self.lr_scheduler_interval,
            "frequency": self.lr_scheduler_frequency,
        }
        return [optimizer], [scheduler]


@pytest.mark.parametrize("limit", [5, 3])
@pytest.mark.parametrize("frequency", [1, 2])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("own", [False, True], ids=["arguments", "overridden"])
def test_schedulers_are_stepped_as_in_a_plain_loop(own, interval, frequency, limit):
    plain, rates = net(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    scheduler = ExponentialLR(optimizer, 0.5)
    for epoch in range(4):
        for number, (images, labels) in enumerate(batches(5)[:limit]):
            rates.append([optimizer.param_groups[0]["lr"]])
            optimizer.zero_grad()
            SmoothAPLoss(tau=0.1)(plain(images), labels).backward()
            optimizer.step()
            if interval == "step" and (number + 1) % frequency == 0:
                scheduler.step()
        if interval == "epoch" and (epoch + 1) % frequency == 0:
            scheduler.step()

    kind, log = OwnOptimizers if own else RetrievalModule, Log()
    module = kind(
        net(),
        SmoothAPLoss(tau=0.1),
        optimizer=SGD,
        lr_scheduler=None if own else functools.partial(ExponentialLR, gamma=0.5),
        lr_scheduler_interval=interval,
        lr_scheduler_frequency=frequency,
    )
    fit(module, batches(5), max_epochs=4, limit_train_batches=limit, callbacks=[log])
    assert log.rates == rates
    assert_same(module.embedder, plain)


class PlateauByHand(RetrievalModule):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer, "max", 0.5, 0, threshold=9.0)}


@pytest.mark.parametrize("own", [False, True], ids=["arguments", "overridden"])
@pytest.mark.parametrize(
    ("monitor", "validated", "frequency", "rates"),
    [
        ("val/mAP", True, 1, [0.5, 0.5, 0.25, 0.125]),
        ("val/R@1", True, 1, [0.5, 0.5, 0.25, 0.125]),
        ("train/loss", False, 1, [0.5, 0.5, 0.25, 0.125]),
    ],
)
def test_plateau_looks_at_its_monitor(own, monitor, validated, frequency, rates):
    """Nothing is ten times better than the first value, so each later epoch halves the rate."""
    halve = functools.partial(ReduceLROnPlateau, mode="max", factor=0.5, patience=0, threshold=9.0)
    module = (PlateauByHand if own else RetrievalModule)(
        net(), SmoothAPLoss(tau=0.1), optimizer=SGD, lr_scheduler=halve, lr_scheduler_monitor=monitor
    )
    log, seen = Log(), []

    class Seen(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append((float(trainer.callback_metrics[monitor]), module.lr_schedulers().best))

    validation = batches(2) if validated else None
    fit(module, batches(2), validation, max_epochs=4, callbacks=[log, RetrievalEvaluation(ks=(1,)), Seen()])
    assert log.rates[::2] == [[rate] for rate in rates]
    if validated:
        assert seen[0][1] == pytest.approx(seen[0][0], abs=1e-12)


@pytest.mark.refusal
def test_a_missing_monitor_raises():
    module = RetrievalModule(net(), SmoothAPLoss(), lr_scheduler=ReduceLROnPlateau, lr_scheduler_monitor="val/map")
    with pytest.raises(ValueError, match=r"`lr_scheduler_monitor`, got 'val/map', which was not logged; .*'val/mAP'"):
        fit(module, batches(1), batches(1), callbacks=[RetrievalEvaluation((1,))])


class WithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = net()[:3], net()[3]

    def forward(self, x):
        return self.head(self.body(x))


def test_head_lr_factor():
    plain, log = WithHead(), Log()
    groups = [{"params": plain.body.parameters()}, {"params": plain.head.parameters(), "lr": 5.0}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    for images, labels in batches():
        optimizer.zero_grad()
        SmoothAPLoss(tau=0.1)(plain(images), labels).backward()
        optimizer.step()
    module = RetrievalModule(WithHead(), SmoothAPLoss(tau=0.1), chunk_size=3, optimizer=SGD, head_lr_factor=10)
    fit(module, batches(), callbacks=[log])
    assert log.rates == [[0.5, 5.0]] * 3
    assert_same(module.embedder, plain)


@pytest.mark.refusal
def test_head_lr_factor_without_a_head_raises():
    module = RetrievalModule(net(), SmoothAPLoss(), head_lr_factor=10.0)
    with pytest.raises(ValueError, match=r"`head_lr_factor` is 10\.0, but the embedder has no `head`"):
        module.configure_optimizers()


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_frozen_parameters_stay_and_the_others_learn(chunk_size):
    plain, module = net(), RetrievalModule(net(), SmoothAPLoss(tau=0.1), chunk_size=chunk_size, optimizer=SGD)
    plain[0].requires_grad_(False)
    module.embedder[0].requires_grad_(False)
    optimizer = torch.optim.SGD(plain[3].parameters(), lr=0.5)
    for images, labels in batches():
        optimizer.zero_grad()
        SmoothAPLoss(tau=0.1)(plain(images), labels).backward()
        optimizer.step()
    fit(module, batches())
    assert_same(module.embedder, plain)
    assert torch.equal(module.embedder[0].weight, net()[0].weight)


@pytest.mark.refusal
def test_nothing_to_train_raises():
    module = RetrievalModule(net().requires_grad_(False), SmoothAPLoss())
    with pytest.raises(ValueError, match=r"`embedder` and `loss` have no parameter with a gradient\."):
        module.configure_optimizers()


# --- losses


class LearnedTau(SmoothAPLoss):
    def __init__(self):
        super().__init__()
        del self.tau
        self.tau = nn.Parameter(torch.tensor(0.2, dtype=torch.float64))


def proxies() -> ProxyAnchorLoss:
    torch.manual_seed(8)
    return ProxyAnchorLoss(num_classes=3, embedding_size=4).double()


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("make", [ContrastiveLoss, TripletMarginLoss, proxies, LearnedTau])
def test_other_losses_and_losses_that_learn(make, chunk_size):
    plain, loss = net(), make()
    optimizer = torch.optim.SGD([*plain.parameters(), *loss.parameters()], lr=0.01)
    for images, labels in batches():
        optimizer.zero_grad()
        loss(plain(images), labels).backward()
        optimizer.step()
    module = RetrievalModule(
        net(), make(), chunk_size=chunk_size, optimizer=functools.partial(torch.optim.SGD, lr=0.01)
    )
    fit(module, batches())
    assert_same(module.embedder, plain)
    if list(loss.parameters()):
        assert_same(original_loss(module.loss), loss)
        assert not torch.equal(next(module.loss.parameters()), next(make().parameters()))


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_a_loss_learns_where_the_embedder_is_frozen(chunk_size):
    module = RetrievalModule(net().requires_grad_(False), proxies(), chunk_size=chunk_size, optimizer=SGD)
    fit(module, batches())
    assert not torch.equal(module.loss.loss.proxies, proxies().proxies)


@pytest.mark.refusal
@pytest.mark.parametrize("ids", [False, True])
def test_nan_embeddings_stop_training_before_the_weights_change(ids):
    first, second = batches(2)
    second[0][[2, 5]] = torch.nan
    data = [(*batch, torch.arange(100, 100 + ROWS)) if ids else batch for batch in (first, second)]
    module = RetrievalModule(net(), SmoothAPLoss(tau=0.1), chunk_size=3, optimizer=SGD)
    which = r"ids \[102, 105\]" if ids else r"rows \[2, 5\]"
    sentence = rf"^RetrievalModule: .* NaN or inf in 2 of 10 rows at step 1 \(seen on rank 0\), the first for {which};"
    with pytest.raises(ValueError, match=sentence):
        fit(module, data)
    plain = RetrievalModule(net(), SmoothAPLoss(tau=0.1), chunk_size=3, optimizer=SGD)
    fit(plain, [first])
    assert_same(module, plain)


class Gives(nn.Module):
    """A loss that answers with something else."""

    def __init__(self, shape=(), value=1.0):
        super().__init__()
        self.shape, self.value = shape, value

    def forward(self, embeddings, labels):
        return (embeddings.sum() * 0 + self.value).expand(self.shape)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (Gives(value=float("nan")), r"the loss is nan at step 0\."),
        (Gives(shape=(2,)), r"`loss` must return a scalar, got tensor\(\[1\., 1\.\].*set its reduction"),
        (SmoothAPLoss(reduction="none"), r"`loss` must return a scalar, got tensor\("),
    ],
)
def test_losses_that_are_not_a_finite_scalar_raise(loss, sentence):
    module = RetrievalModule(net(), loss, optimizer=SGD)
    with pytest.raises(ValueError, match=rf"^RetrievalModule: {sentence}"):
        fit(module, batches())
    assert_same(module.embedder, net())


@pytest.mark.refusal
def test_labels_of_another_length_raise():
    images, labels = batches(1)[0]
    with pytest.raises(ValueError, match=r"one label for each image, got 9 labels for 10 images\."):
        fit(RetrievalModule(net(), SmoothAPLoss()), [(images, labels[:9])])


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_batch_norm_in_chunks_warns_once_and_names_the_cure(chunk_size):
    def warnings_of(evaluated=False, size=chunk_size):
        class Own(RetrievalModule):
            def __init__(self, *args, **settings):
                super().__init__(*args, **settings)
                self.norm = nn.BatchNorm1d(4).double()
                self.train()

            def train(self, mode=True):
                super().train(mode)
                self.norm.train(mode and not evaluated)
                return self

            def forward(self, images):
                return self.norm(self.embedder(images))

        data = [(images[:9], labels[:9]) for images, labels in batches()]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(Own(net(), SmoothAPLoss(), chunk_size=size), data)
        return [str(w.message) for w in caught if "BatchNorm" in str(w.message)]

    expected = "Own: BatchNorm sees 3 images at a time, not the batch of 9, so"
    assert [message[: len(expected)] for message in warnings_of()] == ([] if chunk_size is None else [expected])
    assert all("freeze_batch_norm=True of Embedder" in message for message in warnings_of())
    assert warnings_of(evaluated=True) == warnings_of(size=9) == []


# --- checkpoints


class Points(torch.utils.data.Dataset):
    """Twenty-six vectors of seven classes."""

    labels = torch.arange(26) // 4

    def __init__(self):
        self.images = torch.randn(26, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def __len__(self):
        return 26

    def __getitem__(self, index):
        return {"images": self.images[index], "labels": self.labels[index], "ids": torch.tensor(int(index))}


class PointData(RetrievalDataModule):
    train_set = val_set = test_set = Points()


@pytest.mark.parametrize("chunk_size", [None, 3, "auto"])
def test_chunks_and_sync_batch_norm_do_not_go_together(chunk_size, monkeypatch):
    """The layer works on GPUs only, so the module is asked without a run, as if on two processes."""
    module = RetrievalModule(nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4)), SmoothAPLoss(), chunk_size=chunk_size)
    check_processes(module)
    monkeypatch.setattr("lightning_retrieval.training.trainer_checks.world_size", lambda: 2)
    if chunk_size is None:
        check_processes(module)
    else:
        with pytest.raises(ValueError, match=r"^RetrievalModule: SyncBatchNorm waits for all processes at each chunk"):
            check_processes(module)


class Random(nn.Module):
    """A loss that draws numbers."""

    def forward(self, embeddings, labels):
        return (embeddings * torch.rand_like(embeddings)).sum()


def test_a_loss_draws_the_same_numbers_whatever_the_rank(monkeypatch):
    found = []
    for rank in (0, 5):
        monkeypatch.setattr("lightning_retrieval.training.module.rank", lambda rank=rank: rank)
        module = RetrievalModule(net(), Random(), optimizer=SGD)
        fit(module, batches())
        found.append(module)
    assert_same(found[0], found[1])


def test_a_subclass_may_leave_hooks_out():
    class Own(RetrievalModule):
        def on_fit_start(self):
            pass

    fit(Own(net(), SmoothAPLoss()), batches())


class Small(nn.Module):
    """A network on a device whose memory holds so many images and no more; it counts what it was asked to embed."""

    def __init__(self, holds: int) -> None:
        super().__init__()
        self.net, self.holds, self.asked = net(0.3), holds, []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.asked.append(len(images))
        if len(images) > self.holds:
            raise torch.OutOfMemoryError(f"{len(images)} images")
        return self.net(images)


def test_auto_takes_the_largest_chunk_that_fits():
    """Of 10 rows: 10, 5 and 3 are tried; a longer batch makes it look again, a shorter one does not."""
    data = batches(2)
    longer = [torch.cat(pair) for pair in zip(*batches(2))]
    auto, fixed = (
        RetrievalModule(Small(4), SmoothAPLoss(tau=0.1), chunk_size=size, optimizer=SGD, seed=3) for size in ("auto", 3)
    )
    fit(auto, [*data, longer, data[0]])
    fit(fixed, [*data, longer, data[0]])
    assert (auto._chunk_size_search.chunk_size, auto._chunk_size_search.rows) == (3, 20)
    tried = [rows for rows in auto.embedder.asked if rows > 4]
    assert tried == [10, 5, 20, 10, 5]
    assert_same(auto, fixed)


def test_auto_raises_if_not_one_image_fits():
    with pytest.raises(torch.OutOfMemoryError, match=r"not even one input of shape \(6,\) fits the memory of cpu"):
        fit(RetrievalModule(Small(0), SmoothAPLoss(), chunk_size="auto"), batches())


def test_the_report_at_the_start_has_p_and_k_and_the_length(caplog):
    images, _ = batches(1)[0]
    data = [(images, torch.tensor([7, 7, 7, 1, 1, 1, 5, 5, 5, 5]))] * 2
    with caplog.at_level("INFO"):
        run = fit(RetrievalModule(net(), SmoothAPLoss()), data)
    reports = [record.getMessage() for record in caplog.records if "RetrievalModule" in record.getMessage()]
    assert reports == ["RetrievalModule: batches of P = 3 classes with K = 3 to 4 images, lists of 9 images."]
    assert run.global_step == 2


def resumable() -> RetrievalModule:
    """Dropout, Adam's moments and a schedule of each step: everything that a resumed run could lose."""
    return RetrievalModule(
        net(dropout=0.3),
        SmoothAPLoss(tau=0.1),
        chunk_size=4,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.02),
        lr_scheduler=functools.partial(OneCycleLR, max_lr=0.02, total_steps=12),
        lr_scheduler_interval="step",
    )


def test_a_run_resumed_between_or_in_epochs_continues_as_it_would_have(tmp_path):
    """Four epochs of three batches; a checkpoint after each step."""
    save, log = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1), Log()
    whole, data = resumable(), {"classes_per_batch": 3, "samples_per_class": 3, "seed": 1}
    kwargs = {"max_epochs": 4, "limit_val_batches": 0}
    trainer(callbacks=[save, log], enable_checkpointing=True, **kwargs).fit(whole, datamodule=PointData(**data))
    assert len(log.rates) == len({rate for (rate,) in log.rates}) == 12
    for step in (6, 4, 11):  # after two epochs, after one batch of the second, before the last batch
        part, rest = resumable(), Log()
        path = tmp_path / f"step={step}.ckpt"
        run = trainer(callbacks=[rest], **kwargs)
        run.fit(part, datamodule=PointData(**data), ckpt_path=path, weights_only=True)
        assert (rest.rates, run.global_step) == (log.rates[step:], 12)
        assert rest.losses == log.losses[step:]
        assert_same(part, whole)


def test_a_run_in_double_precision_is_resumed_bit_by_bit(tmp_path):
    """Lightning restores the weights before it has made the module double."""
    whole, second = (RetrievalModule(net(0.2).float(), SmoothAPLoss(tau=0.1), optimizer=SGD) for _ in range(2))
    settings = {"precision": "64-true", "limit_val_batches": 0}
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2)
    points = {"classes_per_batch": 3, "samples_per_class": 3, "seed": 1}
    trainer(**settings, callbacks=[save], enable_checkpointing=True).fit(whole, datamodule=PointData(**points))
    trainer(**settings).fit(second, datamodule=PointData(**points), ckpt_path=tmp_path / "step=2.ckpt")
    assert next(second.parameters()).dtype == torch.float64
    assert_same(second, whole)
    for found, expected in zip(second.parameters(), whole.parameters()):
        assert torch.equal(found, expected)


def test_an_epoch_schedule_survives_a_resume(tmp_path):
    def make():
        halve = functools.partial(ExponentialLR, gamma=0.5)
        return RetrievalModule(net(), SmoothAPLoss(tau=0.1), optimizer=SGD, lr_scheduler=halve)

    whole, part, log, rest = make(), make(), Log(), Log()
    fit(whole, batches(), max_epochs=4, callbacks=[log])
    fit(make(), batches(), max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    loader = DataLoader(batches(), batch_size=None)
    trainer(max_epochs=4, callbacks=[rest]).fit(part, loader, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert rest.rates == log.rates[6:] == [[0.125]] * 3 + [[0.0625]] * 3
    assert_same(part, whole)


def small_module(**kwargs) -> RetrievalModule:
    return RetrievalModule(
        Embedder("glyph_net", 8, pooling="avg"),
        SmoothAPLoss(tau=0.05, class_balanced=True),
        optimizer=functools.partial(torch.optim.SGD, lr=0.25, momentum=0.5),
        lr_scheduler=functools.partial(ExponentialLR, gamma=0.5),
        gradient_clip_val=2.0,
        **kwargs,
    )


def saved(module, path):
    data = [(torch.rand(8, 1, 32, 32), torch.arange(8) // 2)]
    fit(module, data).save_checkpoint(path)
    assert torch.load(path, weights_only=True)["global_step"] == 1
    return path


def test_a_checkpoint_rebuilds_the_module(tmp_path):
    module = small_module(seed=12)
    path = saved(module, tmp_path / "m.ckpt")
    again = RetrievalModule.load_from_checkpoint(path, weights_only=True)
    assert again.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in module.state_dict().items())
    assert repr(again.embedder) == repr(module.embedder)
    assert repr(again.loss) == repr(module.loss)
    assert (again.optimizer.func, again.optimizer.keywords) == (torch.optim.SGD, {"lr": 0.25, "momentum": 0.5})
    assert (again.lr_scheduler.func, again.lr_scheduler.keywords) == (ExponentialLR, {"gamma": 0.5})
    assert (again.gradient_clip_val, again.seed) == (2.0, 12)
    assert dict(again.hparams) == dict(module.hparams)


class Tagged(RetrievalModule):
    """A subclass of one's own: another argument, another form of batch, another forward."""

    def __init__(self, embedder: nn.Module, loss: nn.Module, factor: float = 1.0, **kwargs):
        super().__init__(embedder, loss, **kwargs)
        self.factor = factor

    def forward(self, images):
        return self.factor * self.embedder(images)

    def unpack_batch(self, batch):
        return batch["x"], batch["y"], None


def test_a_short_subclass_with_an_argument_of_its_own(tmp_path):
    assert len(inspect.getsource(Tagged).splitlines()) < 40
    module = Tagged(Embedder("glyph_net", 8), SmoothAPLoss(), factor=3.0, chunk_size=None, seed=4)
    fit(module, [{"x": torch.rand(8, 1, 32, 32), "y": torch.arange(8) // 2}]).save_checkpoint(tmp_path / "t.ckpt")
    again = Tagged.load_from_checkpoint(tmp_path / "t.ckpt", weights_only=True)
    assert (again.factor, again.seed) == (3.0, 4)
    images = torch.rand(3, 1, 32, 32)
    assert torch.equal(again.eval()(images), module.eval()(images))


@pytest.mark.parametrize(
    ("name", "given", "path"),
    [
        ("embedder", net(), r"torch\.nn\.Sequential"),
        ("loss", Gives(shape=()), r".*Gives"),
        ("optimizer", lambda groups: torch.optim.SGD(groups, lr=0.5), r"builtins\.function"),
    ],
)
@pytest.mark.refusal
def test_what_cannot_be_described_has_to_be_passed_again(tmp_path, name, given, path):
    arguments = {"embedder": Embedder("glyph_net", 8), "loss": SmoothAPLoss(), "optimizer": SGD}
    if name == "loss":
        given.helper = nn.Linear(1, 1)
        given.shape = given.helper  # no plain value
    module = RetrievalModule(**{**arguments, name: copy.deepcopy(given)})
    run = trainer()
    run.strategy.connect(module)
    run.save_checkpoint(tmp_path / "m.ckpt")
    with pytest.raises(
        ValueError, match=rf"`{name}` was a {path} whose .* load_from_checkpoint\(path, {name}=\.\.\.\)"
    ):
        RetrievalModule.load_from_checkpoint(tmp_path / "m.ckpt", weights_only=True)
    again = RetrievalModule.load_from_checkpoint(tmp_path / "m.ckpt", weights_only=True, **{name: given})
    assert_same(again, module)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("class_path", "error", "sentence"),
    [
        ("torch.nn.Nothing", ValueError, r"`embedder` names the class torch\.nn\.Nothing, which cannot be imported"),
        ("os.system", TypeError, r"`embedder` names os\.system, which is not a class of the kind needed here"),
        ("torch.optim.SGD", TypeError, r"`embedder` names torch\.optim\.SGD, which is not a class of the kind"),
    ],
)
def test_a_description_can_name_only_what_is_needed(class_path, error, sentence):
    with pytest.raises(error, match=rf"^RetrievalModule: {sentence}"):
        RetrievalModule({"class_path": class_path, "init_args": {}}, SmoothAPLoss())


def test_predict_returns_embeddings():
    module, ((images, labels), _) = RetrievalModule(net(), SmoothAPLoss()), batches(2)
    run = trainer()
    (batch,) = run.predict(module, DataLoader(TensorDataset(images, labels, torch.arange(ROWS)), batch_size=ROWS))
    expected = net()(images).detach()
    assert {name: value.tolist() for name, value in batch.items()} == {
        "embeddings": expected.tolist(),
        "labels": labels.tolist(),
        "ids": list(range(ROWS)),
    }
    (batch,) = run.predict(module, DataLoader(images, batch_size=ROWS))
    assert torch.equal(batch["embeddings"], expected)


# --- sums of losses, labels with levels


def test_each_term_of_a_sum_is_logged_and_the_ids_reach_it():
    terms = {"ap": (1.0, SmoothAPLoss(tau=0.1)), "calibration": (0.5, CalibrationLoss())}
    module, (images, labels), ids = RetrievalModule(net(), WeightedSum(terms), optimizer=SGD), batches(1)[0], [0] * ROWS
    expected = {name: loss(module(images), labels).item() for name, (_, loss) in terms.items()}
    run = fit(module, [(images, labels)])
    logged = {name: float(run.callback_metrics[f"train/loss/{name}"]) for name in terms}
    assert logged == pytest.approx(expected)
    assert float(run.callback_metrics["train/loss"]) == pytest.approx(expected["ap"] + 0.5 * expected["calibration"])
    with pytest.warns(UserWarning, match="no row of the batch has a positive"):  # all rows are one image
        run = fit(RetrievalModule(net(), WeightedSum(terms), optimizer=SGD), [(images, labels, torch.tensor(ids))])
    assert float(run.callback_metrics["train/loss"]) == 0


def test_labels_with_levels_train_and_their_finest_is_evaluated():
    fine = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    images, labels = batches(1)[0][0], torch.stack([fine, fine // 2], 1)
    run = fit(
        RetrievalModule(net(), HAPLoss(), optimizer=SGD),
        [(images, labels)],
        [(images, labels)],
        callbacks=[RetrievalEvaluation(ks=(1,))],
    )
    assert 0 < float(run.callback_metrics["train/loss"]) < 1
    assert float(run.callback_metrics["val/skipped_queries"]) == 0
    contrastive = fit(RetrievalModule(net(), ContrastiveLoss(), optimizer=SGD), [(images, labels)])
    assert float(contrastive.callback_metrics["train/loss"]) == pytest.approx(
        ContrastiveLoss()(net()(images), fine).item()
    )


def test_a_checkpoint_rebuilds_a_loss_made_of_losses(tmp_path):
    module = RetrievalModule(Embedder("glyph_net", 8), ROADMAPLoss(0.3, SupAPLoss(tau=0.2)))
    path = saved(module, tmp_path / "roadmap.ckpt")
    rebuilt = RetrievalModule.load_from_checkpoint(path, weights_only=True)
    assert repr(rebuilt.loss) == repr(module.loss)
    assert rebuilt.loss.sup_ap.tau == 0.2
    weighted = RetrievalModule(Embedder("glyph_net", 8), WeightedSum({"ap": (0.7, SmoothAPLoss(tau=0.3))}))
    rebuilt = RetrievalModule.load_from_checkpoint(saved(weighted, tmp_path / "sum.ckpt"), weights_only=True)
    assert repr(rebuilt.loss) == repr(weighted.loss)


class Saves(RetrievalModule):
    """Calls Lightning's save_hyperparameters by itself, with an argument that is not plain."""

    def __init__(self, embedder: nn.Module, loss: nn.Module, extra: object = None) -> None:
        super().__init__(embedder, loss)
        self.save_hyperparameters(ignore=["embedder", "loss"])


def test_a_subclass_that_saves_its_hyperparameters_itself_writes_plain_checkpoints(tmp_path):
    path = saved(Saves(Embedder("glyph_net", 8), SmoothAPLoss(), extra=torch.ones(2)), tmp_path / "m.ckpt")
    assert torch.load(path, weights_only=True)["hyper_parameters"]["extra"]["class_path"] == "torch.Tensor"
