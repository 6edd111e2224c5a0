"""The embedder: its parts, half precision, frozen batch norm, copies and invalid arguments."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_retrieval.models import Embedder, GeM, GlobalAvgPool, GlobalMaxPool, GlyphNet, Preparation
from tests.lightning_retrieval.models.user_backbones import Backbone, as_tuple, feature_map, tokens, vectors


@pytest.mark.parametrize(("pooling", "cls"), [("gem", GeM), ("avg", GlobalAvgPool), ("max", GlobalMaxPool)])
def test_forward_applies_backbone_pool_and_head(pooling, cls):
    embedder = Embedder(Backbone(feature_map), 5, pooling=pooling, normalize=False, layer_norm=True)
    assert type(embedder.pool) is cls
    assert [name for name, _ in embedder.head.named_children()] == ["norm", "linear"]
    images = torch.randn(3, 3, 32, 32)
    features = embedder.backbone(images)
    pooled = cls()(features)
    pooled = (pooled - pooled.mean(1, keepdim=True)) / (pooled.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
    expected = pooled @ embedder.head.linear.weight.T + embedder.head.linear.bias
    torch.testing.assert_close(embedder(images), expected)
    embedder.normalize = True
    torch.testing.assert_close(embedder(images), expected / expected.norm(dim=1, keepdim=True))


def test_default_pooling_is_gem_with_a_learned_p():
    embedder = Embedder(Backbone(feature_map), 5)
    assert (embedder.pooling, embedder.pool.learnable, embedder.pool.p.item()) == ("gem", True, 3.0)


def test_vectors_are_not_pooled_and_no_parameter_is_unused():
    embedder = Embedder(Backbone(vectors), 5, normalize=False)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(embedder(images), embedder.head(embedder.backbone(images)))
    embedder(images)[:, 0].sum().backward()
    assert all(parameter.grad is not None for parameter in embedder.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_unit_rows(dtype):
    embedder = Embedder(Backbone(feature_map), 16, layer_norm=True).eval()
    images = torch.randn(4, 3, 32, 32)
    exact = embedder(images)
    with torch.autocast("cpu", dtype=dtype):
        under_autocast = embedder(images)
    for embeddings in (under_autocast, embedder.to(dtype)(images.to(dtype))):
        assert embeddings.dtype == torch.float32
        torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(4))
        torch.testing.assert_close(embeddings, exact, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_with_feature_dim_the_backbone_is_not_run():
    class Counted(Backbone):
        calls = 0

        def forward(self, images):
            Counted.calls += 1
            return super().forward(images)

    embedder = Embedder(Counted(feature_map), 5, feature_dim=6)
    assert Counted.calls == 0
    assert embedder(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_frozen_batch_norm_stays_frozen_and_its_affine_parameters_train():
    embedder = Embedder("glyph_net", 5, freeze_batch_norm=True)
    parent = nn.Sequential(embedder)
    images = torch.rand(4, 1, 32, 32)
    buffers = {name: value.clone() for name, value in embedder.named_buffers()}
    assert buffers
    for train in (lambda: None, embedder.train, parent.train, lambda: parent.eval().train(True)):
        train()
        assert embedder.training
        assert embedder.backbone.training
        embedder(images).sum().backward()
        for name, value in embedder.named_buffers():
            assert value.equal(buffers[name]), name
    assert all(parameter.grad is not None for parameter in embedder.backbone.parameters())
    parent.eval()
    assert not any(module.training for module in parent.modules())


def test_batch_norm_updates_its_statistics_if_not_frozen():
    embedder = Embedder("glyph_net", 5)
    before = {name: value.clone() for name, value in embedder.named_buffers()}
    embedder(torch.rand(4, 1, 32, 32))
    assert not any(value.equal(before[name]) for name, value in embedder.named_buffers())


def test_init_args_describe_the_embedder():
    settings = {
        "backbone": "glyph_net",
        "embedding_dim": 7,
        "pooling": "avg",
        "normalize": False,
        "weights": None,
        "layer_norm": True,
        "freeze_batch_norm": True,
        "preparation": Preparation(64, channels=1, mean=(0.5,), std=(0.25,)).as_dict(),
        "backbone_args": {"width": 4},
        "lora": None,
        "gradient_checkpointing": False,
    }
    embedder = Embedder(**settings)
    assert embedder.init_args() == settings
    twin = Embedder(**embedder.init_args())
    twin.load_state_dict(embedder.state_dict())
    images = torch.rand(2, 1, 32, 32)
    assert twin.eval()(images).equal(embedder.eval()(images))
    assert Embedder(GlyphNet()).init_args() is None
    assert embedder.preparation == Preparation(**settings["preparation"])
    assert embedder.backbone_name == "glyph_net"


def test_copies_of_a_user_s_backbone_are_equal():
    model = Embedder(Backbone(feature_map, channels=1), 5, freeze_batch_norm=True)
    images = torch.rand(2, 1, 32, 32)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin(images).equal(model(images))
        twin.eval().train()
        assert [part.training for part in twin.modules()] == [part.training for part in model.modules()]


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"backbone": "resnet18", "weights": "V2"}, ValueError, "`weights` .*'IMAGENET1K_V1', 'DEFAULT', got 'V2'"),
        ({"backbone": "glyph_net", "weights": "V1"}, ValueError, "`weights` must be None .* got 'V1' for 'glyph_net'"),
        ({"backbone": nn.Identity(), "weights": "V1"}, ValueError, r"got 'V1' for a module \(Identity\)"),
        ({"backbone": Backbone(tokens)}, ValueError, r"must return .*, got \(1, 3136, 6\) for .* \(1, 3, 224, 224\)"),
        ({"backbone": Backbone(as_tuple)}, TypeError, "`backbone` must return a tensor, got tuple"),
    ],
)
def test_invalid_settings(settings, error, message):
    with pytest.raises(error, match=f"^Embedder: .*{message}"):
        Embedder(**settings)


@pytest.mark.refusal
def test_invalid_shapes():
    squeezenet, shape_rule = Embedder("squeezenet1_1", 4), r"`images` must have the shape \(batch, 3, height, width\)"
    wrong = [
        (squeezenet, (2, 1, 64, 64), rf"{shape_rule} for squeezenet1_1, got \(2, 1, 64, 64\)"),  # grey images
        (squeezenet, (2, 64, 64, 3), rf"{shape_rule} for squeezenet1_1, got \(2, 64, 64, 3\)"),  # channels last
        (Embedder(nn.Conv2d(3, 4, 3)), (3, 32, 32), r"got \(4, 30, 30\) for images of shape \(3, 32, 32\)"),
        (Embedder(Backbone(feature_map), feature_dim=8), (2, 3, 32, 32), r"8 channels .*, got \(2, 6, 8, 8\) for"),
    ]
    for embedder, shape, message in wrong:
        with pytest.raises(ValueError, match=rf"^Embedder: .*{message}"):
            embedder(torch.rand(shape))
