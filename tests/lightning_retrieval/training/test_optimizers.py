"""Parameter groups: rates of head and layers, frozen parameters and backbones, and parameters that nothing trains."""

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint
from pytorch_metric_learning.losses import ContrastiveLoss
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.losses import After, Before, WeightedSum
from lightning_retrieval.training.optimizers import layer_depths
from tests.lightning_retrieval.training.small_training import (
    CHUNKS,
    SGD,
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


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_frozen_parameters_stay_and_the_others_learn(chunk_size):
    plain, module = net(), module_with(net(), chunk_size=chunk_size)
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


def test_head_lr_factor():
    plain, log = WithBackbone(), Log()
    rest = [*plain.backbone.parameters(), plain.scale]
    groups = [{"params": rest}, {"params": plain.head.parameters(), "lr": 5.0}]
    train_plainly(plain, torch.optim.SGD(groups, lr=0.5), batches())
    module = module_with(WithBackbone(), chunk_size=3, head_lr_factor=10)
    fit(module, batches(), callbacks=[log])
    assert log.rates == [[0.5, 5.0]] * 3
    assert_same(module.embedder, plain)


def test_layer_decay():
    plain, log = WithBackbone(), Log()
    layers = [plain.backbone[0], plain.backbone[2], plain.backbone[3]]
    groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(layers, (0.125, 0.25, 0.5))]
    groups += [{"params": [plain.scale], "lr": 0.5}, {"params": plain.head.parameters(), "lr": 1.0}]
    train_plainly(plain, torch.optim.SGD(groups, lr=0.5), batches())
    module = module_with(WithBackbone(), layer_decay=0.5, head_lr_factor=2, chunk_size=3)
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
    log, settings = Log(), {"layer_decay": 0.5, "head_lr_factor": 2, "query_lr_factor": 10.0}
    module = module_with(WithBackbone(), query_embedder=make(), **settings)
    fit(module, two_sided(), callbacks=[log])
    assert log.rates == [[0.125, 0.25, 0.5, 0.5, 1.0, *rates]] * 3
    (optimizer,) = module.trainer.optimizers
    of_queries = [parameter for group in optimizer.param_groups[5:] for parameter in group["params"]]
    assert set(of_queries) == set(module.query_embedder.parameters())


def two_sided():
    """Batches whose queries and candidates are the same images."""
    return [{"queries": batch, "candidates": batch} for batch in batches()]


@pytest.mark.parametrize("epochs", [1, 2])
def test_backbones_of_both_networks_are_frozen_at_first(epochs):
    module = module_with(WithBackbone(), query_embedder=WithBackbone(), freeze_backbone_epochs=1)
    fit(module, two_sided(), max_epochs=epochs)
    for network in (module.query_embedder, module.embedder):
        assert torch.equal(network.backbone[0].weight, WithBackbone().backbone[0].weight) == (epochs == 1)
        assert not torch.equal(network.head.weight, WithBackbone().head.weight)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("embedder", "settings", "sentence"),
    [
        (net(), {"head_lr_factor": 10.0}, r"`head_lr_factor` is 10\.0, but the embedder has no `head`"),
        (net().requires_grad_(False), {}, "`embedder` and `loss` must have a parameter to train"),
        (net(), {"layer_decay": 0.5}, "`layer_decay` needs an embedder with a `backbone`, .*got Sequential"),
        (net(), {"layer_decay": 2}, "`layer_decay` must be .*, got 2"),
        (net(), {"freeze_backbone_epochs": 1}, "`freeze_backbone_epochs` needs .* `backbone`, .*got Sequential"),
    ],
)
def test_settings_that_do_not_fit_the_embedder_raise(embedder, settings, sentence):
    with pytest.raises(ValueError, match=f"^RetrievalModule: {sentence}"):
        module_with(embedder, **settings).configure_optimizers()


class Partial(RetrievalModule):
    """Its own `configure_optimizers` forgets the parameters of a head that was added."""

    def configure_optimizers(self):
        first, second = self.embedder[0].parameters(), self.embedder[3].parameters()
        return [torch.optim.SGD(first, lr=0.1), torch.optim.SGD(second, lr=0.1)]


@pytest.mark.refusal
def test_a_parameter_in_no_optimizer_raises_before_the_first_step():
    module = Partial(net(), SmoothAPLoss(), chunk_size=3)
    module.extra_head = nn.Linear(4, 3).double()
    message = r"^Partial: each parameter that .* but `extra_head\.weight`, `extra_head\.bias` are in none; "
    with pytest.raises(ValueError, match=message):
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
    with pytest.raises(ValueError, match=r"but `embedder\.0\.weight`, `embedder\.0\.bias` are in none; "):
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
    expected = "WithUnused: `extra_head.weight`, `extra_head.bias` have had no gradient in the first "
    expected += f"{warns} steps, so they do not learn; use these"
    assert [message[: len(expected)] for message in messages] == [expected] * (warns is not None)


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


def depths_of(embedder):
    """{layer: first part of the names of its parameters that has a meaning}."""
    found = {}
    for name, depth in layer_depths("Owner", embedder.backbone).items():
        found.setdefault(depth, []).append(name)
    return found


def test_depths_of_timm_are_its_own():
    optim = pytest.importorskip("timm.optim")
    embedder = Embedder("timm/vit_tiny_patch16_224", 8, backbone_args=VIT)
    groups = optim.param_groups_layer_decay(embedder.backbone.model, weight_decay=0.0, layer_decay=0.5)
    expected = {}
    for group in groups:
        expected.update({id(parameter): group["lr_scale"] for parameter in group["params"]})
    depths = layer_depths("Owner", embedder.backbone)
    parameters = dict(embedder.backbone.named_parameters())
    assert set(depths) == set(parameters)
    assert set(expected.values()) == {1.0, 0.5, 0.25}
    for name, parameter in parameters.items():
        assert expected[id(parameter)] == 0.5 ** (2 - depths[name]), name


def test_depths_of_torchvision():
    depths = depths_of(Embedder("resnet18", 8))
    first_parts = {depth: {name.split(".")[0] for name in names} for depth, names in depths.items()}
    assert first_parts == {0: {"conv1"}, 1: {"bn1"}, **{layer + 1: {f"layer{layer}"} for layer in (1, 2, 3, 4)}}


def test_depths_of_a_list_of_layers():
    """What comes after the last layer belongs to it, and a list of one layer is no list of layers."""
    stem, first, second, norm = (nn.Linear(2, 2, bias=False) for _ in range(4))
    blocks = nn.Sequential(nn.Sequential(first, second))
    depths = layer_depths("Owner", nn.ModuleDict({"stem": stem, "blocks": blocks, "norm": norm}))
    assert depths == {"stem.weight": 0, "blocks.0.0.weight": 1, "blocks.0.1.weight": 2, "norm.weight": 2}
    with pytest.raises(ValueError, match=r"^Owner: `layer_decay` must be 1 .* got a Sequential"):
        layer_depths("Owner", nn.Sequential(nn.Linear(2, 2)))


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
    module = RetrievalModule(
        embedder, SmoothAPLoss(tau=0.1), chunk_size=chunk_size, optimizer=SGD, freeze_backbone_epochs=freeze, seed=0
    )
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    run = trainer(max_epochs=epochs, callbacks=list(callbacks), enable_checkpointing=saves)
    run.fit(module, DataLoader(batches(), batch_size=None), weights_only=True, **settings)
    return module, run


@pytest.mark.parametrize(("epochs", "averaging"), [(1, False), (2, True), (3, False)])
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
