"""Backbones of timm: what they return is what timm computes, for each pooling and image size."""

import pytest
import torch

from lightning_retrieval.models import Embedder
from lightning_retrieval.models.pretrained import without_pretrained_weights

timm = pytest.importorskip("timm")
VIT = {"depth": 2, "embed_dim": 48, "num_heads": 2}
SMALL = {
    "vit_tiny_patch16_224": VIT,
    "vit_small_patch14_reg4_dinov2": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
    "vit_base_patch16_siglip_224": VIT,
    "swin_tiny_patch4_window7_224": {"depths": (1, 1), "embed_dim": 24, "num_heads": (1, 2)},
    "resnet18": {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)},
    "mobilenetv3_small_050": {},
}


def small(name, **settings):
    torch.manual_seed(0)
    return Embedder(f"timm/{name}", 8, image_size=112, backbone_args=SMALL[name], **settings).eval()


def reference(name, embedder):
    """The model of timm with its own pooling, built in the plainest way and given the same weights."""
    sizes = {} if name in ("resnet18", "mobilenetv3_small_050") else {"img_size": 112}
    model = timm.create_model(name, num_classes=0, **sizes, **SMALL[name]).eval()
    model.load_state_dict(embedder.backbone.model.state_dict())
    return model


@pytest.mark.parametrize("name", SMALL)
def test_own_pooling_is_what_timm_returns(name):
    embedder = small(name, pooling="own")
    images = torch.randn(1, 3, 112, 112)
    with torch.no_grad():
        torch.testing.assert_close(embedder.pooled_features(images), reference(name, embedder)(images))


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("vit_tiny_patch16_224", 1), ("vit_small_patch14_reg4_dinov2", 5), ("deit_tiny_distilled_patch16_224", 2)],
)
def test_class_token_and_patch_tokens(name, prefix):
    images = torch.randn(1, 3, 112, 112)
    average = small(name, pooling="avg")
    with torch.no_grad():
        tokens = reference(name, average).forward_features(images)
        torch.testing.assert_close(average.pooled_features(images), tokens[:, prefix:].mean(1))
        class_token = small(name, pooling="class_token")
        torch.testing.assert_close(class_token.pooled_features(images), tokens[:, 0])
        gem = small(name, pooling="gem").pooled_features(images)
        torch.testing.assert_close(gem, tokens[:, prefix:].clamp(min=1e-6).pow(3).mean(1).pow(1 / 3))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "mobilenetv3_small_050"])
def test_the_pooling_follows_from_the_backbone_and_no_parameter_is_unused(name):
    """With images of another size than that for which the backbone was built."""
    embedder = small(name).train()
    has_maps = name.startswith(("resnet", "mobilenet", "swin"))
    assert embedder.pooling == ("gem" if has_maps else "own")
    embedder(torch.randn(2, 3, 112, 224))[:, 0].sum().backward()
    assert all(parameter.grad is not None for parameter in embedder.parameters())


def test_swin_with_channels_last_is_pooled_over_its_positions():
    embedder = small("swin_tiny_patch4_window7_224", pooling="avg")
    images = torch.randn(1, 3, 112, 112)
    features = reference("swin_tiny_patch4_window7_224", embedder).forward_features(images)
    assert features.shape == (1, 14, 14, 48)
    torch.testing.assert_close(embedder.pooled_features(images), features.mean((1, 2)))


def test_preparation_is_that_of_timm_s_data_config():
    preparation = Embedder("timm/vit_tiny_patch16_224", 8, backbone_args=VIT).preparation
    found = (preparation.image_size, preparation.resize, preparation.interpolation, preparation.mean)
    assert found == (224, 248, "bicubic", (0.5, 0.5, 0.5))
    assert small("vit_tiny_patch16_224").preparation.resize == 124


def test_weights_of_a_local_file_are_resampled_to_the_image_size(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", **VIT).eval()
    torch.save(model.state_dict(), tmp_path / "vit.pth")
    weights = str(tmp_path / "vit.pth")
    embedder = Embedder("timm/vit_tiny_patch16_224", 8, weights=weights, backbone_args=VIT).eval()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(embedder.pooled_features(images), model.forward_features(images)[:, 0])
    other = Embedder("timm/vit_tiny_patch16_224", 8, weights=weights, image_size=96, backbone_args=VIT)
    assert other.backbone.model.pos_embed.shape == (1, 37, 48)
    assert other.backbone.model.blocks[1].mlp.fc1.weight.equal(model.blocks[1].mlp.fc1.weight)
    assert other.init_args()["weights"] is None


def test_the_classifier_of_a_file_and_averaged_weights(tmp_path):
    """Files of timm's trainings have both; its evaluation uses the averaged ones."""
    last, averaged = (timm.create_model("resnet18", num_classes=3, **SMALL["resnet18"]).state_dict() for _ in range(2))
    torch.save({"state_dict": last, "state_dict_ema": averaged}, tmp_path / "last.pth.tar")
    loaded = small("resnet18", weights=str(tmp_path / "last.pth.tar")).backbone.model.state_dict()
    assert all(value.equal(averaged[name]) for name, value in loaded.items())


def test_where_weights_came_from_is_not_kept(tmp_path):
    """A file with these arguments would not be loaded again."""
    state = timm.create_model("resnet18", num_classes=0, **SMALL["resnet18"]).state_dict()
    torch.save(state, tmp_path / "w.pth")
    arguments = {"in_chans": 3, **SMALL["resnet18"]}
    embedder = Embedder("timm/resnet18", 8, backbone_args={"checkpoint_path": str(tmp_path / "w.pth"), **arguments})
    assert embedder.backbone.model.conv1.weight.equal(state["conv1.weight"])
    assert embedder.init_args()["backbone_args"] == arguments


def test_weights_are_not_loaded_while_a_checkpoint_is():
    with without_pretrained_weights():
        embedder = Embedder("timm/vit_tiny_patch16_224", 8, weights="DEFAULT", backbone_args=VIT)
        Embedder("timm/vit_tiny_patch16_224", 8, backbone_args={**VIT, "pretrained": True})
    assert embedder.weights == "DEFAULT"
