"""The backbone is frozen in the first epochs, also of a run that is resumed, and trained afterwards."""

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from tests.lightning_retrieval.training.small_training import SGD, assert_same, batches, net, trainer


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
