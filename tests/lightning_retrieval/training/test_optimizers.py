"""Parameter groups: rates of head and layers, frozen parameters and backbones, and parameters that nothing trains."""

import functools

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision
from pytorch_metric_learning.losses import ProxyAnchorLoss
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss, TwoNetworks, Updates
from lightning_retrieval.losses import WeightedSum
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
CYCLIC = functools.partial(schedulers.CyclicLR, base_lr=0.0, max_lr=0.1, step_size_up=3, cycle_momentum=False)
ONE_CYCLE_OF_GROUPS = functools.partial(ONE_CYCLE, max_lr=[0.2 * rate for rate in RATES])
CYCLIC_OF_GROUPS = functools.partial(CYCLIC, max_lr=[0.2 * rate for rate in RATES])


class OneRate(schedulers.LRScheduler):
    """Sets a rate of its own, whatever that of the group is."""

    def get_lr(self):
        return [0.1 / (1 + self.last_epoch) for _ in self.base_lrs]


def sequence(*parts, milestones=(3,)):
    return lambda optimizer: schedulers.SequentialLR(optimizer, [part(optimizer) for part in parts], list(milestones))


LINEAR = functools.partial(schedulers.LinearLR, start_factor=0.1, total_iters=3)


def with_scheduler(scheduler, number=float, **factors):
    """What `configure_optimizers` returns for an optimizer whose rate is such a number."""
    optimizer = functools.partial(torch.optim.Adam, lr=number(0.5), foreach=False)
    module = RetrievalModule(WithBackbone(), SmoothAPLoss(), optimizer=optimizer, lr_scheduler=scheduler, **factors)
    return module.configure_optimizers()


@pytest.mark.refusal  # by the type checker
@pytest.mark.parametrize(
    ("scheduler", "number"),
    [
        (ONE_CYCLE_OF_GROUPS, float),
        (ONE_CYCLE_OF_GROUPS, torch.tensor),
        (CYCLIC_OF_GROUPS, float),
        (functools.partial(SWALR, swa_lr=[0.1 * rate for rate in RATES], anneal_epochs=4), float),
        (sequence(LINEAR, ONE_CYCLE_OF_GROUPS), float),
        (lambda x: schedulers.ChainedScheduler([ONE_CYCLE_OF_GROUPS(x), schedulers.ExponentialLR(x, 0.9)]), float),
        (functools.partial(schedulers.ReduceLROnPlateau, patience=0), float),
        (functools.partial(schedulers.LambdaLR, lr_lambda=lambda step: step / STEPS), torch.tensor),
    ],
)
def test_schedulers_keep_the_factors_of_the_groups(scheduler, number):
    """At each step, the rates of the groups are one number multiplied by the factors of the groups."""
    settings = with_scheduler(scheduler, number, **FACTORS)
    optimizer, built = settings["optimizer"], settings["lr_scheduler"]["scheduler"]
    seen = []
    for _ in range(STEPS - 1):
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        seen.append(rates[0])
        assert rates == pytest.approx([rates[0] * rate / RATES[0] for rate in RATES])
        optimizer.step()
        built.step(1.0) if isinstance(built, schedulers.ReduceLROnPlateau) else built.step()
    assert len(set(seen)) > 1


@pytest.mark.refusal  # by the type checker
@pytest.mark.parametrize(
    "scheduler",
    [
        OneRate,
        ONE_CYCLE,
        CYCLIC,
        functools.partial(SWALR, swa_lr=0.05),
        sequence(LINEAR, ONE_CYCLE),
        sequence(LINEAR, CYCLIC),
        lambda x: schedulers.ChainedScheduler([ONE_CYCLE(x), schedulers.ExponentialLR(x, 0.9)]),
    ],
)
def test_a_scheduler_that_removes_the_factors_of_the_groups_is_refused(scheduler):
    for number in (float, torch.tensor):
        with_scheduler(scheduler, number)  # without factors, it may
        with pytest.raises(ValueError, match=r"must keep the factors .* a list with a rate for each group"):
            with_scheduler(scheduler, number, **FACTORS)


def test_rates_that_an_optimizer_gives_to_its_groups_are_kept():
    def with_rates(groups):
        return torch.optim.SGD([{**group, "lr": 0.1 * number} for number, group in enumerate(groups, start=1)])

    module = RetrievalModule(WithBackbone(), SmoothAPLoss(), optimizer=with_rates, lr_scheduler=LINEAR, **FACTORS)
    rates = [group["lr"] for group in module.configure_optimizers()["optimizer"].param_groups]
    assert rates == pytest.approx([0.01 * number * 2 * rate for number, rate in enumerate(RATES, start=1)])


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


FUSED = functools.partial(torch.optim.AdamW, lr=0.1, fused=True)
OPTIMIZERS = {
    "default": (None, torch.optim.AdamW, True),
    "class": (torch.optim.AdamW, torch.optim.AdamW, None),
    "settings": (FUSED, functools.partial(torch.optim.AdamW, lr=0.1), True),
    "function": (lambda groups: torch.optim.SGD(groups, lr=0.1), functools.partial(torch.optim.SGD, lr=0.1), None),
}


@pytest.mark.parametrize(("optimizer", "plain_optimizer", "fused"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_default_optimizer_is_fused_and_that_of_a_user_is_the_users(optimizer, plain_optimizer, fused):
    module, plain = RetrievalModule(net(), SmoothAPLoss(tau=0.1), optimizer=optimizer), net()
    assert module.configure_optimizers().defaults["fused"] is fused
    train_plainly(plain, plain_optimizer(plain.parameters()), batches())
    fit(module, batches())
    for one, other in zip(module.embedder.parameters(), plain.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_of_a_fused_optimizer_are_clipped(precision):
    """With a rate of 1, the weights change by the clipped gradient."""
    sgd, updates = functools.partial(torch.optim.SGD, lr=1.0, fused=True), Updates(gradient_clip_val=1e-3)
    module = RetrievalModule(net().float(), SmoothAPLoss(tau=0.1), optimizer=sgd, updates=updates)
    before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    fit(module, [(images.float(), labels) for images, labels in batches(1)], precision=precision)
    change = nn.utils.parameters_to_vector(module.parameters()) - before
    assert change.norm().item() == pytest.approx(1e-3, rel=1e-3)


def sliced():
    """A network whose weight is a part of a larger one, between whose rows other values lie in memory."""
    network = nn.Linear(6, 4)
    network.weight = nn.Parameter(torch.randn(4, 12)[:, :6])
    return network


@pytest.mark.parametrize("make", [lambda: nn.Embedding(9, 4, sparse=True), lambda: net().half(), sliced])
def test_sparse_gradients_parameters_of_16_bits_and_slices_have_no_fused_update(make):
    module = RetrievalModule(make(), SmoothAPLoss(tau=0.1))
    assert not module.configure_optimizers().defaults["fused"]


def test_the_default_optimizer_is_not_fused_if_losses_are_scaled():
    """Lightning would not unscale its gradients before they are clipped."""
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    module = RetrievalModule(net().float(), SmoothAPLoss(tau=0.1), updates=Updates(gradient_clip_val=1.0))
    run = fit(module, [(images.float(), labels) for images, labels in batches()], plugins=scaled)
    assert not run.optimizers[0].defaults["fused"]


class OwnOptimizer(RetrievalModule):
    """Its own `configure_optimizers` makes the optimizer."""

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def of_convolutions(kind=RetrievalModule, optimizer=FUSED):
    """A module whose weight has its channels last in memory."""
    torch.manual_seed(0)
    embedder = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()).to(memory_format=torch.channels_last)
    return kind(embedder, SmoothAPLoss(tau=0.1), optimizer=optimizer)


def run_on(module, epochs, **settings):
    torch.manual_seed(1)
    points = torch.utils.data.TensorDataset(torch.randn(24, 2, 5, 5), torch.arange(24) // 2)
    run = trainer(max_epochs=epochs)
    run.fit(module, DataLoader(points, 8), **settings)
    return run


def change_states(path, change):
    """Replace the tensors in the states of the optimizer of a checkpoint by `change(name, tensor)`."""
    content = torch.load(path, weights_only=True)
    for state in content["optimizer_states"][0]["state"].values():
        state.update({name: change(name, value) for name, value in state.items()})
    torch.save(content, path)


@pytest.mark.parametrize("kind", [RetrievalModule, OwnOptimizer])
@pytest.mark.parametrize("was_fused", [True, False])
@pytest.mark.parametrize("is_fused", [True, False])
def test_a_resumed_run_has_its_own_update_whatever_that_of_the_file_was(kind, was_fused, is_fused, tmp_path):
    """Also if the file has states in another order of memory, which a fused update would read as in the same one."""

    def made(is_fused):
        return of_convolutions(kind, functools.partial(torch.optim.AdamW, lr=0.1, fused=is_fused))

    whole, resumed = made(False), made(is_fused)
    run_on(whole, 2)
    run_on(made(was_fused), 1).save_checkpoint(tmp_path / "half.ckpt")
    change_states(tmp_path / "half.ckpt", lambda name, value: value.contiguous())
    run = run_on(resumed, 2, ckpt_path=tmp_path / "half.ckpt")
    assert run.optimizers[0].param_groups[0]["fused"] == is_fused
    torch.testing.assert_close(resumed.embedder[0].weight, whole.embedder[0].weight, rtol=1e-4, atol=1e-6)


@pytest.mark.refusal
@pytest.mark.parametrize("kind", [RetrievalModule, OwnOptimizer])
@pytest.mark.parametrize("shape", [(1, 2, 3, 3), (1,)])
def test_a_state_of_another_shape_is_refused(kind, shape, tmp_path):
    """A fused update would write beyond its memory."""
    run_on(of_convolutions(kind), 1).save_checkpoint(tmp_path / "half.ckpt")
    change_states(tmp_path / "half.ckpt", lambda name, value: torch.ones(shape) if name == "exp_avg" else value)
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: .*'exp_avg'"):
        run_on(of_convolutions(kind), 2, ckpt_path=tmp_path / "half.ckpt")


def test_a_state_of_another_shape_is_loaded_if_the_optimizer_has_such_states(tmp_path):
    """Adafactor keeps a number for each row and column."""
    adafactor = functools.partial(torch.optim.Adafactor, lr=0.1)
    whole, resumed = (RetrievalModule(net().float(), SmoothAPLoss(), optimizer=adafactor) for _ in range(2))
    data = [(images.float(), labels) for images, labels in batches()]
    fit(whole, data, max_epochs=2)
    half = RetrievalModule(net().float(), SmoothAPLoss(), optimizer=adafactor)
    fit(half, data).save_checkpoint(tmp_path / "half.ckpt")
    trainer(max_epochs=2).fit(resumed, DataLoader(data, batch_size=None), ckpt_path=tmp_path / "half.ckpt")
    assert_same(resumed.embedder, whole.embedder)
