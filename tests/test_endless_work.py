"""A file takes no time or memory without end: what it asks for is bounded by what it holds.

Each case runs in a process of its own, whose time and memory are limited, so that a file that is obeyed fails the test.
"""

import resource

import pytest
import torch
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.models.adapted import embedder_of_checkpoint
from lightning_retrieval.training.checkpoint_files import restored_network
from lightning_retrieval.training.checkpointed_module import module_of_checkpoint
from tests.lightning_retrieval.cli.glyph_commands import save_checkpoint

pytestmark = [pytest.mark.hostile, pytest.mark.refusal, pytest.mark.slow]

MOST_MEMORY = 12 << 30  # bytes of addresses, of which most are those of libraries
SECONDS = 120


def limited():
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


def embedder(backbone, **arguments):
    return {"class_path": "lightning_retrieval.Embedder", "init_args": {"backbone": backbone, **arguments}}


def described(path, **arguments):
    return {"class_path": path, "init_args": arguments}


VIT = {"model_type": "vit", "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
LAYER = described("torch.nn.TransformerEncoderLayer", d_model=16, nhead=2)
# Descriptions of networks that are far larger than the weights beside them.
NETWORKS = [
    embedder("hf/any", backbone_args={**VIT, "num_hidden_layers": 10**7}),
    embedder("hf/any", backbone_args={**VIT, "num_hidden_layers": 10**6}),
    embedder("hf/any", backbone_args={**VIT, "num_hidden_layers": 1, "hidden_size": 10**7}),
    embedder("hf/any", backbone_args={**VIT, "num_hidden_layers": 9, "intermediate_size": 4 * 10**6}),
    embedder("hf/any", backbone_args={"model_type": "dinov2", "num_hidden_layers": 10**9}),
    embedder("hf/any", backbone_args={"model_type": "resnet", "depths": [10**6] * 4}),
    embedder("timm/vit_tiny_patch16_224", backbone_args={"depth": 10**6}),
    embedder("timm/vit_tiny_patch16_224", backbone_args={"embed_dim": 3 * 10**6}),
    embedder("timm/resnet18", backbone_args={"layers": [10**6] * 4}),
    embedder("timm/swin_tiny_patch4_window7_224", backbone_args={"window_size": 2000}, image_size=4000),
    embedder("glyph_net", backbone_args={"width": 1024}, embedding_dim=2**20),
    described("torch.nn.Linear", in_features=10**9, out_features=10**9),
    described("torch.nn.Linear", in_features=10**5, out_features=10**5),
    described("torch.nn.Linear", in_features=10**30, out_features=1),
    described("torch.nn.TransformerEncoder", encoder_layer=LAYER, num_layers=10**7),
    described("torch.nn.Transformer", num_encoder_layers=10**7),
    described("torch.nn.LSTM", input_size=4, hidden_size=4, num_layers=10**7),
    described("torchvision.models.vit_b_16", image_size=16 * 10**4),
    described("timm.create_model", model_name="vit_tiny_patch16_224", depth=10**7),
]


RULES = (
    ": a file must describe a network of about the size of its weights (2 tensors with 10 numbers), got",
    "must have integers up to 4,194,304 in a file, got",
)


def errors_of_networks(rank, world_size, path, networks):
    """The errors of rebuilding networks from a checkpoint, in each of three ways."""
    limited()
    content, errors = torch.load(path, weights_only=True), []
    for network in networks:
        content["hyper_parameters"]["embedder"] = network
        torch.save(content, path)
        for rebuild in (
            lambda: module_of_checkpoint(RetrievalModule, content),
            lambda: restored_network(content),
            lambda: embedder_of_checkpoint("FrozenEmbedder", path),
        ):
            with pytest.raises((ValueError, TypeError)) as raised:
                rebuild()
            errors.append(str(raised.value))
    return errors


@pytest.mark.parametrize("part", range(2))
def test_a_checkpoint_describes_no_network_that_is_larger_than_its_weights(part, tmp_path, run_alone):
    path = save_checkpoint(tmp_path / "model.ckpt", RetrievalModule(nn.Linear(4, 2), SmoothAPLoss()))
    for error in run_alone(errors_of_networks, path, NETWORKS[part::2], timeout=SECONDS):
        assert (
            ": a file must describe a network of about the size of its weights (2 tensors with 10 numbers)" in error
            or ("must have integers up to 4,194,304 in a file" in error)
        )
