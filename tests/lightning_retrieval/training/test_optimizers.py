"""Parameter groups: rates of head and layers, frozen parameters and backbones, and parameters that nothing trains."""

import functools

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint
from pytorch_metric_learning.losses import ContrastiveLoss, ProxyAnchorLoss
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss, TwoNetworks, Updates
from lightning_retrieval.losses import After, Before, WeightedSum
from tests.lightning_retrieval.training.small_training import (
    SGD,
    LearnedTau,
    Log,
    Unfreeze,
    assert_same,
    batches,
    fit,
    net,
    train_plainly,
    trainer,
    warnings_with,
)


def module_with(embedder, **settings):
    return RetrievalModule(embedder, SmoothAPLoss(tau=0.1), optimizer=SGD, **settings)


def test_frozen_parameters_stay_and_the_others_learn():
    plain, module = net(), module_with(net(), chunk_size=3)
    for embedder in (plain, module.embedder):
        embedder[0].requires_grad_(False)
    train_plainly(plain, torch.optim.SGD(plain[3].parameters(), lr=0.5), batches())
    fit(module, batches())
    assert_same(module.embedder, plain)
    assert torch.equal(module.embedder[0].weight, net()[0].weight)


class WithBackbone(nn.Module):
    """An embedder whose backbone has three layers with parameters, and whose pooling has one too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 5)).double()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.head = nn.Linear(5, 4).double()

    def forward(self, x):
        return self.head(self.scale * self.backbone(x))


def test_layer_decay():
    plain, log = WithBackbone(), Log()
    layers = [plain.backbone[0], plain.backbone[2], plain.backbone[3]]
    groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(layers, (0.125, 0.25, 0.5))]
    groups += [{"params": [plain.scale], "lr": 0.5}, {"params": plain.head.parameters(), "lr": 1.0}]
    train_plainly(plain, torch.optim.SGD(groups, lr=0.5), batches())
    module = module_with(WithBackbone(), chunk_size=3, **FACTORS)
    fit(module, batches(), callbacks=[log])
    assert log.rates == [[0.125, 0.25, 0.5, 0.5, 1.0]] * 3
    assert_same(module.embedder, plain)


@pytest.mark.parametrize(
    ("make", "rates"),
    [(WithBackbone, [1.25, 2.5, 5.0, 5.0, 10.0]), (net, [5.0])],
    ids=["with a backbone and a head", "without"],
)
def test_rates_of_two_networks(make, rates):
    """`query_lr_factor` multiplies the rates of the queries, whose head and layers have their factors if they exist."""
    log = Log()
    module = module_with(WithBackbone(), sides=TwoNetworks(make(), query_lr_factor=10.0), **FACTORS)
    fit(module, two_sided(), callbacks=[log])
    assert log.rates == [[0.125, 0.25, 0.5, 0.5, 1.0, *rates]] * 3
    (optimizer,) = module.trainer.optimizers
    of_queries = [parameter for group in optimizer.param_groups[5:] for parameter in group["params"]]
    assert set(of_queries) == set(module.query_embedder.parameters())


def learned_terms():
    """A sum of a loss with proxies and a loss with a temperature."""
    torch.manual_seed(4)
    return WeightedSum({"proxies": (1.0, ProxyAnchorLoss(3, 4).double()), "ap": (0.5, LearnedTau())})


@pytest.mark.refusal  # by the type checker
def test_loss_lr_factor():
    """All parameters of all terms have the rate of the loss, in the last group of the optimizer."""
    plain, loss, log = WithBackbone(), learned_terms(), Log()
    groups = [{"params": [*plain.backbone.parameters(), plain.scale]}]
    groups += [{"params": plain.head.parameters(), "lr": 5.0}, {"params": loss.parameters(), "lr": 2.0}]
    train_plainly(plain, torch.optim.SGD(groups, lr=0.5), batches(), loss)
    updates = Updates(loss_lr_factor=4, head_lr_factor=10)
    module = RetrievalModule(WithBackbone(), learned_terms(), optimizer=SGD, chunk_size=3, updates=updates)
    fit(module, batches(), callbacks=[log])
    assert log.rates == [[0.5, 5.0, 2.0]] * 3
    assert_same(module.embedder, plain)
    assert_same(module.loss, loss)


@pytest.mark.refusal  # by the type checker
def test_a_run_is_continued_with_its_parameter_groups_only(tmp_path):
    """Without the factor, the states would not belong to the parameters."""

    def module(factor):
        updates = Updates(loss_lr_factor=factor)
        return RetrievalModule(WithBackbone(), learned_terms(), optimizer=SGD, updates=updates)

    fit(module(4), batches()).save_checkpoint(tmp_path / "half.ckpt")
    with pytest.raises(ValueError, match="loss_lr_factor"):
        trainer(max_epochs=2).fit(module(1), DataLoader(batches(), batch_size=None), ckpt_path=tmp_path / "half.ckpt")


def test_a_parameter_that_the_loss_shares_with_the_network_has_the_rate_of_the_network():
    class Shares(LearnedTau):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

    network = WithBackbone()
    module = RetrievalModule(network, Shares(network.scale), optimizer=SGD, updates=Updates(loss_lr_factor=4))
    groups = module.configure_optimizers().param_groups
    assert set(groups[-1]["params"]) == {module.loss.tau}
    assert module.embedder.scale in set(groups[0]["params"])


@pytest.mark.refusal  # by the type checker
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_the_loss_is_clipped_and_decays_as_the_network(algorithm):
    plain, loss = WithBackbone(), learned_terms()
    every = [*plain.parameters(), *loss.parameters()]
    optimizer = torch.optim.SGD(every, lr=0.5, weight_decay=0.1)

    def clip(*_):
        if algorithm == "norm":
            nn.utils.clip_grad_norm_(every, 0.01)
        else:
            nn.utils.clip_grad_value_(every, 0.01)

    optimizer.register_step_pre_hook(clip)
    train_plainly(plain, optimizer, batches(), loss)
    updates = Updates(gradient_clip_val=0.01, gradient_clip_algorithm=algorithm)
    decaying = functools.partial(torch.optim.SGD, lr=0.5, weight_decay=0.1)
    module = RetrievalModule(WithBackbone(), learned_terms(), optimizer=decaying, updates=updates, chunk_size=3)
    fit(module, batches())
    assert_same(module.embedder, plain)
    assert_same(module.loss, loss)


STEPS = 8  # of the schedulers below
RATES = [0.125, 0.25, 0.5, 0.5, 1.0]  # of WithBackbone with the factors below and the rate 0.5
FACTORS = {"updates": Updates(layer_decay=0.5, head_lr_factor=2)}
ONE_CYCLE = functools.partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=STEPS, cycle_momentum=False)
CYCLIC = functools.partial(
    schedulers.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3, mode="triangular2", cycle_momentum=False
)


class AbsoluteWarmUp(schedulers.LRScheduler):
    """All groups begin at one rate, and then reach their own."""

    def get_lr(self):
        part = min(self.last_epoch / 4, 1)
        return [0.01 + part * (rate - 0.01) for rate in self.base_lrs]


class OneRate(schedulers.LRScheduler):
    """Sets a rate of its own, whatever that of the group is."""

    def get_lr(self):
        return [0.1 / (1 + self.last_epoch) for _ in self.base_lrs]


def sequence(*parts, milestones=(3,)):
    return lambda optimizer: schedulers.SequentialLR(optimizer, [part(optimizer) for part in parts], list(milestones))


LINEAR = functools.partial(schedulers.LinearLR, start_factor=0.1, total_iters=3)


@pytest.mark.refusal  # by the type checker
@pytest.mark.parametrize(
    ("scheduler", "number"),
    [
        (ONE_CYCLE, float),
        (ONE_CYCLE, torch.tensor),
        (lambda optimizer: ONE_CYCLE(optimizer, max_lr=[0.2 * rate for rate in RATES]), float),
        (CYCLIC, float),
        (functools.partial(SWALR, swa_lr=0.05, anneal_epochs=4), float),
        (sequence(LINEAR, ONE_CYCLE), float),
        (lambda x: schedulers.ChainedScheduler([ONE_CYCLE(x), schedulers.ExponentialLR(x, 0.9)]), float),
        (functools.partial(schedulers.ReduceLROnPlateau, patience=0, min_lr=0.2), float),
        (functools.partial(schedulers.LambdaLR, lr_lambda=lambda step: step / STEPS), float),
    ],
)
def test_schedulers_keep_the_factors_of_the_groups(scheduler, number):
    """At each step, the rates of the groups are one number multiplied by the factors of the groups."""
    optimizer = functools.partial(torch.optim.Adam, lr=number(0.5), foreach=False)
    module = RetrievalModule(WithBackbone(), SmoothAPLoss(), optimizer=optimizer, lr_scheduler=scheduler, **FACTORS)
    settings = module.configure_optimizers()
    optimizer, built = settings["optimizer"], settings["lr_scheduler"]["scheduler"]
    seen = []
    for _ in range(STEPS - 1):
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        seen.append(rates[0])
        assert rates == pytest.approx([rates[0] * rate / RATES[0] for rate in RATES])
        optimizer.step()
        built.step(1.0) if isinstance(built, schedulers.ReduceLROnPlateau) else built.step()
    assert len(set(seen)) > 1


def test_cyclic_rates_of_a_resumed_run_are_those_of_one_run(tmp_path):
    """The rates that the scheduler had multiplied are not multiplied again."""

    def module():
        return module_with(WithBackbone(), lr_scheduler=ONE_CYCLE, lr_scheduler_interval="step", **FACTORS)

    whole, first, second = Log(), Log(), Log()
    fit(module(), batches(), callbacks=[whole], max_epochs=2)
    fit(module(), batches(), callbacks=[first]).save_checkpoint(tmp_path / "half.ckpt")
    resumed = trainer(callbacks=[second], max_epochs=2)
    resumed.fit(module(), DataLoader(batches(), batch_size=None), ckpt_path=tmp_path / "half.ckpt")
    assert first.rates + second.rates == whole.rates
    assert whole.rates[0] == pytest.approx([0.001, 0.002, 0.004, 0.004, 0.008])  # begins at max_lr / 25


def test_a_scheduler_that_depends_on_the_rates_of_the_groups_may_begin_at_one_rate():
    for scheduler, factors, rate in ((AbsoluteWarmUp, FACTORS, 0.01), (OneRate, {}, 0.1)):  # {}: no factors to keep
        settings = module_with(WithBackbone(), lr_scheduler=scheduler, **factors).configure_optimizers()
        assert {group["lr"] for group in settings["optimizer"].param_groups} == {rate}


@pytest.mark.parametrize(("eta_min", "count"), [(0.2, 1), (0.1, 0)])
def test_warns_of_a_rate_that_would_rise_to_the_smallest_rate(eta_min, count):
    scheduler = functools.partial(schedulers.CosineAnnealingLR, T_max=STEPS, eta_min=eta_min)
    module = module_with(WithBackbone(), lr_scheduler=scheduler, **FACTORS)
    assert (
        len(warnings_with("smallest learning rate of the parameter groups, 0.125,", module.configure_optimizers))
        == count
    )


def split(groups):
    """Groups with and without weight decay, as many training scripts make them."""
    found = []
    for group in groups:
        found.append({"params": [value for value in group["params"] if value.ndim > 1], "weight_decay": 0.1})
        found.append({"params": [value for value in group["params"] if value.ndim < 2], "weight_decay": 0.0})
    return torch.optim.SGD([group for group in found if group["params"]], lr=0.5)


def test_an_optimizer_that_splits_groups_keeps_the_rate_of_each_parameter():
    module = RetrievalModule(WithBackbone(), SmoothAPLoss(), optimizer=split, **FACTORS)
    rates = {}
    for group in module.configure_optimizers().param_groups:
        rates.update({id(parameter): group["lr"] for parameter in group["params"]})
    network = module.embedder
    assert [rates[id(layer.bias)] for layer in (*network.backbone[::2], network.head)] == [0.125, 0.25, 1.0]
    assert [rates[id(layer.weight)] for layer in (*network.backbone[::2], network.head)] == [0.125, 0.25, 1.0]


def two_sided():
    """Batches whose queries and candidates are the same images."""
    return [{"queries": batch, "candidates": batch} for batch in batches()]


@pytest.mark.parametrize("epochs", [1, 2])
def test_backbones_of_both_networks_are_frozen_at_first(epochs):
    updates = Updates(freeze_backbone_epochs=1)
    module = module_with(WithBackbone(), sides=TwoNetworks(WithBackbone()), updates=updates)
    fit(module, two_sided(), max_epochs=epochs)
    for network in (module.query_embedder, module.embedder):
        assert torch.equal(network.backbone[0].weight, WithBackbone().backbone[0].weight) == (epochs == 1)
        assert not torch.equal(network.head.weight, WithBackbone().head.weight)


class Partial(RetrievalModule):
    """Its own `configure_optimizers` forgets the parameters of a head that was added."""

    def configure_optimizers(self):
        first, second = self.embedder[0].parameters(), self.embedder[3].parameters()
        return [torch.optim.SGD(first, lr=0.1), torch.optim.SGD(second, lr=0.1)]


class OwnScheduler(RetrievalModule):
    """Its own `configure_optimizers` adds a scheduler to the optimizer of the module."""

    def __init__(self, scheduler, **settings):
        super().__init__(WithBackbone(), SmoothAPLoss(tau=0.1), optimizer=SGD, **settings)
        self.make = scheduler

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": self.make(optimizer)}


class OneGroup(OwnScheduler):
    """Its own `configure_optimizers` gives all parameters to one group."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize(
    ("kind", "scheduler", "count"),
    [
        (OwnScheduler, ONE_CYCLE, 1),
        (OneGroup, ONE_CYCLE, 1),
        (OwnScheduler, functools.partial(schedulers.LambdaLR, lr_lambda=lambda step: step / STEPS), 0),
    ],
)
def test_warns_of_optimizers_of_a_subclass_that_undo_the_factors(kind, scheduler, count):
    words = "learning rates of the parameter groups must differ"
    assert len(warnings_with(words, fit, kind(scheduler, **FACTORS), batches())) == count
    assert warnings_with("must differ by", fit, kind(scheduler), batches()) == []


@pytest.mark.refusal
def test_a_parameter_in_no_optimizer_raises_before_the_first_step():
    module = Partial(net(), SmoothAPLoss(), chunk_size=3)
    module.extra_head = nn.Linear(4, 3).double()
    with pytest.raises(ValueError, match=r"`extra_head\.weight`, `extra_head\.bias` are in none"):
        fit(module, batches())
    assert_same(module.embedder, net())
    module.extra_head.requires_grad_(False)
    assert fit(module, batches()).global_step == 6  # of two optimizers


class Forgets(Unfreeze):
    """Does not give the first layer to the optimizer."""

    def finetune_function(self, pl_module, epoch, optimizer):
        pl_module.embedder[0].requires_grad_(epoch == 1)


@pytest.mark.refusal
def test_a_layer_that_is_unfrozen_later_must_be_given_to_the_optimizer():
    with pytest.raises(ValueError, match=r"`embedder\.0\.weight`, `embedder\.0\.bias` are in none"):
        fit(module_with(net()), batches(), max_epochs=2, callbacks=[Forgets()])


class WithUnused(RetrievalModule):
    """A head that is used in the steps of these numbers, and in no others."""

    def __init__(self, used_in):
        super().__init__(net(), SmoothAPLoss(), optimizer=SGD)
        self.extra_head = nn.Linear(4, 4).double()
        self.mask_token = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.used_in = used_in

    def forward(self, images):
        embeddings = super().forward(images)
        if self.global_step in self.used_in:
            return embeddings + self.extra_head(embeddings)
        return embeddings


@pytest.mark.parametrize(("steps", "used_in", "warns"), [(12, (), 10), (12, (9,), None), (12, (10,), 10), (3, (), 3)])
def test_parameters_without_a_gradient_in_the_first_steps_are_named_in_one_warning(steps, used_in, warns):
    messages = warnings_with("no gradient", fit, WithUnused(used_in), batches(steps))
    assert len(messages) == (warns is not None)
    for message in messages:
        assert "`extra_head.weight`, `extra_head.bias`" in message
        assert f"first {warns} steps" in message


class LearnedScale(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.2))

    def forward(self, embeddings, labels):
        return (self.scale * embeddings - 1).square().mean()


def test_a_term_that_begins_later_has_no_gradient_yet_and_nobody_warns():
    terms = {"pairs": (Before(0.9), ContrastiveLoss()), "ap": (After(0.9), LearnedScale())}
    module = RetrievalModule(net(), WeightedSum(terms), optimizer=SGD)
    before = [value.clone() for value in module.loss.parameters()]
    assert not warnings_with("no gradient", fit, module, batches(11))
    assert len(before) == 1
    assert not torch.equal(before[0], next(module.loss.parameters()))


VIT = {"depth": 2, "embed_dim": 24, "num_heads": 2}


def factors_of(embedder):
    """The factor that a layer decay of 0.5 gives to each parameter of the backbone, by name."""
    module = module_with(embedder, updates=Updates(layer_decay=0.5))
    rates = {}
    for group in module.configure_optimizers().param_groups:
        rates |= dict.fromkeys(group["params"], group["lr"] / 0.5)
    return {name: rates[parameter] for name, parameter in embedder.backbone.named_parameters()}


def test_layers_of_timm_are_its_own():
    optim = pytest.importorskip("timm.optim")
    embedder = Embedder("timm/vit_tiny_patch16_224", 8, backbone_args=VIT)
    expected = {}
    for group in optim.param_groups_layer_decay(embedder.backbone.model, weight_decay=0.0, layer_decay=0.5):
        expected |= dict.fromkeys(group["params"], group["lr_scale"])
    assert set(expected.values()) == {1.0, 0.5, 0.25}
    for name, factor in factors_of(embedder).items():
        assert factor == expected[embedder.backbone.get_parameter(name)], name


def test_layers_of_torchvision():
    found = {}
    for name, factor in factors_of(Embedder("resnet18", 8)).items():
        found.setdefault(factor, set()).add(name.split(".")[0])
    layers = {0.5 ** (4 - number): {f"layer{number}"} for number in (1, 2, 3, 4)}
    assert found == {0.5**5: {"conv1"}, 0.5**4: {"bn1"}, **layers}


def test_layers_of_a_list():
    """What comes after the last layer belongs to it."""
    stem, first, second, norm = (nn.Linear(2, 2, bias=False) for _ in range(4))
    blocks = nn.Sequential(nn.Sequential(first, second))  # a list of one layer is no list of layers
    embedder = nn.ModuleDict({"backbone": nn.ModuleDict({"stem": stem, "blocks": blocks, "norm": norm})})
    factors = {"stem.weight": 0.25, "blocks.0.0.weight": 0.5, "blocks.0.1.weight": 1.0, "norm.weight": 1.0}
    assert factors_of(embedder) == factors


class Trained(pl.Callback):
    """Whether the backbone has changed in each epoch."""

    def __init__(self):
        self.changed = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.before = pl_module.embedder.backbone[0].weight.detach().clone()

    def on_train_epoch_end(self, trainer, pl_module):
        self.changed.append(not self.before.equal(pl_module.embedder.backbone[0].weight))


def train(epochs, *callbacks, freeze=2, chunk_size=None, **settings):
    torch.manual_seed(3)
    embedder = Embedder(net(), 3, feature_dim=4, pooling="avg").double()
    updates = Updates(freeze_backbone_epochs=freeze)
    module = module_with(embedder, chunk_size=chunk_size, updates=updates, seed=0)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    run = trainer(max_epochs=epochs, callbacks=list(callbacks), enable_checkpointing=saves)
    run.fit(module, DataLoader(batches(), batch_size=None), weights_only=True, **settings)
    return module, run


@pytest.mark.parametrize(("epochs", "averaging"), [(1, False), (2, True)])
def test_the_backbone_learns_after_the_first_epochs_also_in_a_resumed_run(epochs, averaging, tmp_path):
    """The checkpoint is that of an epoch's end: after a run, Lightning's averaging has replaced the weights."""
    first, second = [EMAWeightAveraging()] * averaging, [EMAWeightAveraging()] * averaging
    checkpoints = ModelCheckpoint(tmp_path, "{epoch}", every_n_epochs=1, save_top_k=-1)
    whole_log, log = Trained(), Trained()
    whole, _ = train(4, whole_log, *first, checkpoints)
    assert whole_log.changed == [False, False, True, True]
    assert all(parameter.requires_grad for parameter in whole.parameters())
    path = tmp_path / f"epoch={epochs - 1}.ckpt"
    resumed, _ = train(4, log, *second, chunk_size=3, ckpt_path=path)
    assert_same(resumed, whole)
    assert log.changed == [False, False, True, True][epochs:]


SGD_OF_TENTH = functools.partial(torch.optim.SGD, lr=0.1)
OPTIMIZERS = {
    "default": ({}, torch.optim.AdamW, True),
    "own setting": ({"optimizer": functools.partial(torch.optim.AdamW, fused=False)}, torch.optim.AdamW, False),
    "function": ({"optimizer": lambda groups: torch.optim.SGD(groups, lr=0.1)}, SGD_OF_TENTH, None),
}


@pytest.mark.parametrize(("settings", "plain_optimizer", "fused"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_default_optimizer_is_fused_and_that_of_a_user_is_the_users(settings, plain_optimizer, fused):
    module, plain = RetrievalModule(net(), SmoothAPLoss(tau=0.1), **settings), net()
    assert module.configure_optimizers().defaults.get("fused") is fused
    train_plainly(plain, plain_optimizer(plain.parameters()), batches())
    fit(module, batches())
    for one, other in zip(module.embedder.parameters(), plain.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_file_leaves_open_whether_updates_are_fused(is_fused, tmp_path):
    """So a run goes on with other devices."""

    def module(is_fused):
        settings = {} if is_fused else {"optimizer": lambda groups: torch.optim.AdamW(groups)}
        return RetrievalModule(net(), SmoothAPLoss(), **settings)

    fit(module(not is_fused), batches()).save_checkpoint(tmp_path / "half.ckpt")
    run = trainer(max_epochs=2)
    run.fit(module(is_fused), DataLoader(batches(), batch_size=None), ckpt_path=tmp_path / "half.ckpt")
    assert bool(run.optimizers[0].param_groups[0]["fused"]) == is_fused


@pytest.mark.parametrize("make", [lambda: nn.Embedding(9, 4, sparse=True), lambda: net().half()])
def test_sparse_gradients_and_parameters_of_16_bits_have_no_fused_update(make):
    module = RetrievalModule(make(), SmoothAPLoss(tau=0.1))
    assert not module.configure_optimizers().defaults["fused"]


def test_a_fused_update_does_not_depend_on_the_order_of_memory_in_a_checkpoint(tmp_path):
    """torch would read a state in another order than that of its parameter as if it had the same one."""

    def run(epochs, **settings):
        torch.manual_seed(0)
        embedder = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()).to(memory_format=torch.channels_last)
        optimizer = functools.partial(torch.optim.AdamW, lr=0.1, fused=True)
        module = RetrievalModule(embedder, SmoothAPLoss(tau=0.1), optimizer=optimizer)
        points = torch.utils.data.TensorDataset(torch.randn(24, 2, 5, 5), torch.arange(24) // 2)
        run = trainer(max_epochs=epochs)
        run.fit(module, DataLoader(points, 8), **settings)
        return embedder[0].weight, run

    whole, _ = run(2)
    _, half = run(1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    content = torch.load(tmp_path / "half.ckpt", weights_only=True)
    for state in content["optimizer_states"][0]["state"].values():
        state.update({name: value.contiguous() for name, value in state.items()})
    torch.save(content, tmp_path / "half.ckpt")
    resumed, _ = run(2, ckpt_path=tmp_path / "half.ckpt")
    torch.testing.assert_close(resumed, whole, rtol=1e-4, atol=1e-6)
