"""Parameter groups: rates of head and layers, frozen parameters and backbones, and parameters that nothing trains."""

import functools
import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning, EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.training.optimizers import layer_depths
from tests.lightning_retrieval.models.hugging_face_folders import SMALL
from tests.lightning_retrieval.training.small_training import CHUNKS, SGD, Log, assert_same, batches, fit, net, trainer


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
    with pytest.raises(ValueError, match=r"^RetrievalModule: `embedder` and `loss` must have a parameter to train"):
        module.configure_optimizers()


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


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_layer_decay(chunk_size):
    plain, log = WithBackbone(), Log()
    layers = [plain.backbone[0], plain.backbone[2], plain.backbone[3]]
    groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(layers, (0.125, 0.25, 0.5))]
    groups += [{"params": [plain.scale], "lr": 0.5}, {"params": plain.head.parameters(), "lr": 1.0}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    for images, labels in batches():
        optimizer.zero_grad()
        SmoothAPLoss(tau=0.1)(plain(images), labels).backward()
        optimizer.step()
    settings = {"layer_decay": 0.5, "head_lr_factor": 2, "chunk_size": chunk_size}
    module = RetrievalModule(WithBackbone(), SmoothAPLoss(tau=0.1), optimizer=SGD, **settings)
    fit(module, batches(), callbacks=[log])
    assert log.rates == [[0.125, 0.25, 0.5, 0.5, 1.0]] * 3
    assert_same(module.embedder, plain)


@pytest.mark.refusal
def test_layer_decay_without_a_backbone_raises():
    module = RetrievalModule(net(), SmoothAPLoss(), layer_decay=0.5)
    with pytest.raises(ValueError, match=r"`layer_decay` needs an embedder with a `backbone`, .*got Sequential"):
        module.configure_optimizers()
    with pytest.raises(ValueError, match=r"`layer_decay` must be .*, got 2"):
        RetrievalModule(net(), SmoothAPLoss(), layer_decay=2)


class Partial(RetrievalModule):
    """Its own `configure_optimizers` forgets the parameters of a head that it has added."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.extra_head = nn.Linear(4, 3).double()

    def configure_optimizers(self):
        first, second = self.embedder[0].parameters(), self.embedder[3].parameters()
        return [torch.optim.SGD(first, lr=0.1), torch.optim.SGD(second, lr=0.1)]


@pytest.mark.refusal
def test_a_parameter_in_no_optimizer_raises_before_the_first_step():
    module = Partial(net(), SmoothAPLoss(), chunk_size=3)
    message = r"^Partial: each parameter that .* but `extra_head\.weight`, `extra_head\.bias` are in none; "
    with pytest.raises(ValueError, match=message):
        fit(module, batches())
    assert_same(module.embedder, net())
    module.extra_head.requires_grad_(False)
    assert fit(module, batches()).global_step == 6  # of two optimizers


class Unfreeze(BaseFinetuning):
    """Trains the first layer from the second epoch on, and may forget to give it to the optimizer."""

    def __init__(self, forgets):
        super().__init__()
        self.forgets = forgets

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.embedder[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1 and self.forgets:
            pl_module.embedder[0].requires_grad_(True)
        elif epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.embedder[0], optimizer)


def test_a_layer_that_is_unfrozen_later_must_be_given_to_the_optimizer():
    for forgets in (False, True):
        module = RetrievalModule(net(), SmoothAPLoss(), optimizer=SGD)
        run = functools.partial(fit, module, batches(), max_epochs=2, callbacks=[Unfreeze(forgets)])
        if forgets:
            with pytest.raises(ValueError, match=r"but `embedder\.0\.weight`, `embedder\.0\.bias` are in none; "):
                run()
        else:
            run()
        assert torch.equal(module.embedder[0].weight, net()[0].weight) == forgets


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
    seen = []

    class StepsWithAWarning(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append(len(caught))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(WithUnused(used_in), batches(steps), callbacks=[StepsWithAWarning()])
    messages = [str(warning.message) for warning in caught if "no gradient" in str(warning.message)]
    expected = "WithUnused: `extra_head.weight`, `extra_head.bias` have had no gradient in the first "
    expected += f"{warns} steps, so they do not learn; use these"
    assert [message[: len(expected)] for message in messages] == [expected] * (warns is not None)
    if warns == 10:
        assert seen[8] < seen[9] == seen[-1]


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


def test_depths_of_hugging_face():
    pytest.importorskip("transformers")
    depths = depths_of(Embedder("hf/any", 8, backbone_args={"model_type": "dinov2", **SMALL}))
    assert sorted(depths) == [0, 1, 2]
    assert all(".embeddings." in name for name in depths[0])
    assert all(".0." in name for name in depths[1])
    assert all(".1." in name or name.startswith("model.layernorm") for name in depths[2])
    assert "model.layernorm.weight" in depths[2]


def test_depths_of_torchvision():
    depths = depths_of(Embedder("resnet18", 8))
    first_parts = {depth: {name.split(".")[0] for name in names} for depth, names in depths.items()}
    assert first_parts == {0: {"conv1"}, 1: {"bn1"}, **{layer + 1: {f"layer{layer}"} for layer in (1, 2, 3, 4)}}


@pytest.mark.refusal
def test_invalid_backbone_without_a_list_of_layers():
    with pytest.raises(
        ValueError, match=r"Owner: `layer_decay` must be 1 for a backbone without a list .* got a Conv2d"
    ):
        layer_depths("Owner", nn.Conv2d(3, 4, 3))


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


def test_the_backbone_learns_after_the_first_epochs():
    log = Trained()
    module, _ = train(4, log)
    assert log.changed == [False, False, True, True]
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("averaging", [False, True])
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_resumed_run_is_the_same(epochs, averaging, tmp_path):
    """The checkpoint is that of an epoch's end: after a run, Lightning's averaging has replaced the weights."""
    first, second = [EMAWeightAveraging()] * averaging, [EMAWeightAveraging()] * averaging
    checkpoints = ModelCheckpoint(tmp_path, "{epoch}", every_n_epochs=1, save_top_k=-1)
    whole, _ = train(4, *first, checkpoints)
    log = Trained()
    path = tmp_path / f"epoch={epochs - 1}.ckpt"
    resumed, _ = train(4, log, *second, chunk_size=3, ckpt_path=path)
    assert_same(resumed, whole)
    assert log.changed == [False, False, True, True][epochs:]


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("embedder", "epochs", "message"),
    [
        (nn.Linear(2, 3), 1, r"`freeze_backbone_epochs` needs an embedder with a `backbone`, .*got Linear"),
        (nn.Linear(2, 3), -1, r"`freeze_backbone_epochs` must be an integer >= 0, got -1"),
    ],
)
def test_invalid_settings(embedder, epochs, message):
    with pytest.raises(ValueError, match=message):
        RetrievalModule(embedder, SmoothAPLoss(), freeze_backbone_epochs=epochs)
