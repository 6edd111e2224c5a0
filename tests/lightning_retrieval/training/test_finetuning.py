"""A layer that was frozen and unfrozen is trained on in a run that is resumed, its batch norm too."""

import pytest
import torch
from pytorch_lightning.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from tests.lightning_retrieval.training.small_training import SGD, batches, trainer


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.embedder[0], train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.embedder[0], optimizer, lr=0.125)


def train(epochs, **settings):
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    module = RetrievalModule(nn.Sequential(first, nn.Linear(8, 4)).double(), SmoothAPLoss(tau=0.1), optimizer=SGD)
    run = trainer(max_epochs=epochs, callbacks=[Unfreeze()])
    run.fit(module, DataLoader(batches(), batch_size=None), weights_only=True, **settings)
    return module, run


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_resumed_run_goes_on_with_the_layers_that_were_trained(epochs, tmp_path):
    whole, _ = train(3)
    _, part = train(epochs)
    part.save_checkpoint(tmp_path / "part.ckpt")
    resumed, _ = train(3, ckpt_path=tmp_path / "part.ckpt")
    assert resumed.embedder[0][1].track_running_stats
    for (name, value), (_, expected) in zip(resumed.state_dict().items(), whole.state_dict().items(), strict=True):
        if torch.is_tensor(value):
            torch.testing.assert_close(
                value, expected, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_a_module_outside_of_a_run_is_left_as_it_is(tmp_path):
    _, run = train(2)
    run.save_checkpoint(tmp_path / "part.ckpt")
    embedder = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), nn.Linear(8, 4)).double()
    embedder.requires_grad_(False)
    loaded = RetrievalModule.load_from_checkpoint(tmp_path / "part.ckpt", embedder=embedder, weights_only=True)
    assert not any(parameter.requires_grad for parameter in loaded.embedder.parameters())
