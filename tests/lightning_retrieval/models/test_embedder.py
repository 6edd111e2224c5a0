import ast
import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.models import WeightsEnum

import lightning_retrieval.models
from lightning_retrieval.models import Embedder, GeM, GlobalAvgPool, GlobalMaxPool, GlyphNet

# One model of each family that torchvision lists.
FAMILIES = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "resnet18",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin_t",
    "vgg11_bn",
    "vit_b_32",
]


@pytest.fixture(autouse=True)
def one_thread():
    """Many small operations: on a busy machine, threads that wait for one another make them ten times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Backbone(nn.Module):
    """A user's module that gives what it is told to."""

    def __init__(self, give, channels=3):
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3, stride=4)
        self.norm = nn.BatchNorm2d(6)
        self.give = give

    def forward(self, images):
        return self.give(self.norm(self.conv(images)))


def feature_map(x):
    return x


def vectors(x):
    return x.mean((2, 3))


def tokens(x):
    return x.flatten(2).mT


def as_tuple(x):
    return (x,)


def as_list(x):
    return x[:, 0, 0, 0].tolist()


def pooling_input(model, images):
    """What the model's own pooling or classifier sees in its own forward."""
    seen = []
    name = next(name for name in ("avgpool", "classifier", "fc", "heads") if hasattr(model, name))
    getattr(model, name).register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with torch.no_grad():
        model.eval()(images)
    return seen[0]


def assert_same_features(features, seen):
    if features.ndim > seen.ndim:  # the model pools by a function call
        features = features.mean((2, 3))
    scale = seen.std()  # far below the default tolerance in some models with random weights
    assert scale > 0
    torch.testing.assert_close(features / scale, seen / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_backbone_gives_what_the_model_s_own_pooling_sees(name, monkeypatch):
    build, built = models.get_model, []

    def keep(*args, **kwargs):
        built.append(build(*args, **kwargs))
        return copy.deepcopy(built[0])

    monkeypatch.setattr(models, "get_model", keep)
    embedder = Embedder(name, 8).eval()
    of_the_model = {key for key in built[0].state_dict() if not key.startswith(("fc", "classifier", "head"))}
    assert set(embedder.backbone.state_dict()) == of_the_model
    images = torch.randn(1, 3, 224, 224) if name in ("vit_b_32", "maxvit_t") else torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        features, embeddings = embedder.backbone(images), embedder(images)
    assert_same_features(features, pooling_input(built[0], images))
    assert features.shape[1] == embedder.feature_dim
    assert features.ndim == (2 if name == "vit_b_32" else 4)
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(len(images)))


def test_every_family_that_torchvision_lists_is_tested():
    def families(names):
        return {models.get_model_builder(name).__module__ for name in names}

    assert families(models.list_models(module=models)) == families(FAMILIES)


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "inception_v3"])
def test_pretrained_weights_arrive_in_the_backbone(name, monkeypatch):
    """With weights, Inception and GoogLeNet have auxiliary classifiers and change their input."""
    inception = name != "resnet18"
    settings = {"aux_logits": True, "init_weights": False, "transform_input": True} if inception else {}
    model = models.get_model(name, **settings)
    asked = []

    def get_state_dict(self, *args, **kwargs):
        asked.append(self.name)
        return model.state_dict()

    monkeypatch.setattr(WeightsEnum, "get_state_dict", get_state_dict)
    embedder = Embedder(name, 8, weights="IMAGENET1K_V1").eval()
    assert asked == ["IMAGENET1K_V1"]
    assert embedder.init_args()["weights"] == "IMAGENET1K_V1"
    assert not any("aux" in key.lower() for key in embedder.state_dict())
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        assert_same_features(embedder.backbone(images), pooling_input(model, images))


def test_vit_is_tried_on_the_image_size_it_was_built_for():
    vit = models.VisionTransformer(32, 16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8)
    vit.heads = nn.Identity()
    embedder = Embedder(vit, 4)
    assert embedder.feature_dim == 8
    assert embedder(torch.rand(2, 3, 32, 32)).shape == (2, 4)


@pytest.mark.parametrize(("pooling", "cls"), [("gem", GeM), ("avg", GlobalAvgPool), ("max", GlobalMaxPool)])
def test_forward_is_backbone_pool_head(pooling, cls):
    embedder = Embedder(Backbone(feature_map), 5, pooling, normalize=False, layer_norm=True)
    assert type(embedder.pool) is cls
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
    embedder(torch.randn(2, 3, 32, 32))[:, 0].sum().backward()
    assert all(parameter.grad is not None for parameter in embedder.parameters())


def test_vectors_are_not_pooled_and_leave_no_parameter_unused():
    embedder = Embedder(Backbone(vectors), 5, normalize=False)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(embedder(images), embedder.head(embedder.backbone(images)))
    embedder(images)[:, 0].sum().backward()
    assert all(parameter.grad is not None for parameter in embedder.parameters())


def test_head_holds_what_is_new():
    embedder = Embedder(Backbone(feature_map), 5, layer_norm=True)
    names = {name for name, _ in embedder.named_parameters()}
    assert {name for name in names if name.startswith("head.")} == {
        "head.norm.weight",
        "head.norm.bias",
        "head.linear.weight",
        "head.linear.bias",
    }
    assert {name.split(".")[0] for name in names} == {"backbone", "pool", "head"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_ends_on_the_unit_sphere(dtype):
    embedder = Embedder(Backbone(feature_map), 16, layer_norm=True).eval()
    images = torch.randn(4, 3, 32, 32)
    exact = embedder(images)
    with torch.autocast("cpu", dtype=dtype):
        under_autocast = embedder(images)
    for embeddings in (under_autocast, embedder.to(dtype)(images.to(dtype))):
        assert embeddings.dtype == torch.float32
        torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(4))
        torch.testing.assert_close(embeddings, exact, rtol=0, atol=8 * torch.finfo(dtype).eps)


class Noisy(Backbone):
    def forward(self, images):
        return nn.functional.dropout(super().forward(images), training=True)


def test_trying_the_backbone_leaves_no_trace():
    backbone = Noisy(feature_map, channels=1)
    backbone.conv.eval()  # a part that its owner keeps in eval mode
    before = copy.deepcopy(backbone.state_dict())
    generator = torch.get_rng_state()
    assert Embedder(backbone, 5, feature_dim=6).feature_dim == 6
    after_head_alone = torch.get_rng_state()
    torch.set_rng_state(generator)
    assert Embedder(backbone, 5).feature_dim == 6
    assert torch.get_rng_state().equal(after_head_alone)
    assert (backbone.training, backbone.conv.training, backbone.norm.training) == (True, False, True)
    for key, value in backbone.state_dict().items():
        assert value.device.type == "cpu"
        assert value.equal(before[key])


def test_one_image_is_enough_to_try_a_batch_norm_of_vectors():
    """In training mode it would refuse a single row."""
    assert Embedder(nn.Sequential(Backbone(vectors), nn.BatchNorm1d(6)), 5).feature_dim == 6


def test_trying_the_backbone_restores_the_mode_after_a_failure():
    backbone = Backbone(as_list)
    with pytest.raises(ValueError, match="could not be tried"):
        Embedder(backbone)
    assert backbone.training
    assert backbone.norm.training


def test_feature_dim_skips_the_trial():
    class Counted(Backbone):
        calls = 0

        def forward(self, images):
            Counted.calls += 1
            return super().forward(images)

    embedder = Embedder(Counted(feature_map), 5, feature_dim=6)
    assert Counted.calls == 0
    assert embedder(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_frozen_batch_norm_stays_frozen_and_its_affine_trains():
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


def test_batch_norm_learns_where_not_frozen():
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
    }
    embedder = Embedder(**settings)
    assert embedder.init_args() == settings
    twin = Embedder(**embedder.init_args())
    twin.load_state_dict(embedder.state_dict())
    images = torch.rand(2, 1, 32, 32)
    assert twin.eval()(images).equal(embedder.eval()(images))
    assert Embedder(GlyphNet()).init_args() is None
    for name, value in settings.items():
        if name != "backbone":
            assert getattr(embedder, name) == value
    assert embedder.backbone_name == "glyph_net"


@pytest.mark.parametrize(
    "model",
    [Embedder("glyph_net", 5), Embedder(Backbone(feature_map, channels=1), 5, freeze_batch_norm=True), GlyphNet(4)],
    ids=["name", "module", "glyph_net"],
)
def test_copies_embed_alike(model):
    images = torch.rand(2, 1, 32, 32)
    model.eval()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin(images).equal(model(images))
        assert repr(twin) == repr(model)
        twin.train()
        assert [part.training for part in twin.modules()] == [part.training for part in model.train().modules()]
        model.eval()


def test_repr_shows_settings():
    first = repr(Embedder("glyph_net", 5, freeze_batch_norm=True)).splitlines()[1].strip()
    assert first == (
        "backbone_name='glyph_net', embedding_dim=5, pooling='gem', normalize=True, weights=None, layer_norm=False, "
        "freeze_batch_norm=True"
    )


def test_glyph_net_gives_a_map_of_an_eighth():
    assert GlyphNet()(torch.rand(2, 1, 32, 32)).shape == (2, 256, 4, 4)
    net = GlyphNet(width=8, in_channels=3)
    assert net(torch.rand(2, 3, 64, 48)).shape == (2, 64, 8, 6)
    assert (net.width, net.in_channels) == (8, 3)
    assert Embedder(net).feature_dim == 64


def test_glyph_net_gives_the_same_with_channels_last():
    net, images = GlyphNet(8).eval(), torch.rand(2, 1, 32, 32)
    expected = net(images)
    net = net.to(memory_format=torch.channels_last)
    torch.testing.assert_close(net(images.to(memory_format=torch.channels_last)), expected)


def test_glyph_net_learns_a_handful_of_glyphs():
    torch.manual_seed(0)
    glyphs = torch.rand(4, 1, 32, 32).round().repeat(4, 1, 1, 1)
    labels = torch.arange(4).repeat(4)
    embedder = Embedder(GlyphNet(4), 4, normalize=False)
    optimizer = torch.optim.AdamW(embedder.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        noisy = glyphs + 0.3 * torch.randn(glyphs.shape)
        nn.functional.cross_entropy(embedder(noisy), labels).backward()
        optimizer.step()
    assert (embedder.eval()(glyphs).argmax(1) == labels).all()


@pytest.mark.parametrize(
    "path", sorted(Path(lightning_retrieval.models.__file__).parent.glob("*.py")), ids=lambda p: p.stem
)
def test_neither_torchvision_nor_lightning_is_imported_with_the_file(path):
    at_the_top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in at_the_top]
    assert names
    assert not {name.split(".")[0] for name in names} & {"torchvision", "lightning", "pytorch_lightning"}


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"backbone": "resnet5"},
            ValueError,
            r"Embedder: `backbone` must be .* got 'resnet5'; close names are .*'resnet50'",
        ),
        ({"backbone": "RESNET18"}, ValueError, "got 'RESNET18'; close names are 'resnet18'"),
        ({"backbone": "glyphnet"}, ValueError, "got 'glyphnet'; close names are 'glyph_net'"),
        ({"backbone": "###"}, ValueError, "got '###'; no name is close"),
        ({"backbone": 50}, TypeError, r"`backbone` must be the name of a model or a torch.nn.Module, got 50 \(int\)"),
        (
            {"backbone": "resnet18", "weights": "V2"},
            ValueError,
            "Embedder: `weights` must be one of 'IMAGENET1K_V1', 'DEFAULT', got 'V2'",
        ),
        ({"backbone": "glyph_net", "weights": "V1"}, ValueError, "`weights` must be None .* got 'V1' for 'glyph_net'"),
        ({"backbone": nn.Identity(), "weights": "V1"}, ValueError, r"got 'V1' for a module \(Identity\)"),
        ({"backbone": "glyph_net", "embedding_dim": 0}, ValueError, "`embedding_dim` must be an integer >= 1, got 0"),
        ({"backbone": "glyph_net", "feature_dim": 0}, ValueError, "`feature_dim` must be an integer >= 1, got 0"),
        (
            {"backbone": "glyph_net", "pooling": "mac"},
            ValueError,
            "`pooling` must be one of 'gem', 'avg', 'max', got 'mac'",
        ),
        (
            {"backbone": Backbone(tokens)},
            ValueError,
            r"must give feature maps \(N, C, H, W\) or vectors \(N, C\), got \(1, 3136, 6\) for .* \(1, 3, 224, 224\)",
        ),
        ({"backbone": Backbone(as_tuple)}, TypeError, "`backbone` must give a tensor, got tuple"),
        (
            {"backbone": Backbone(as_list)},
            ValueError,
            r"`backbone` Backbone could not be tried on .* shape \(1, 3, 224, 224\) .*; give `feature_dim`",
        ),
    ],
)
def test_embedder_refuses(settings, error, message):
    with pytest.raises(error, match=message):
        Embedder(**settings)


@pytest.mark.refusal
def test_forward_refuses_features_of_another_length():
    embedder = Embedder(Backbone(feature_map), 5, feature_dim=8)
    with pytest.raises(
        ValueError, match=r"features with 8 channels \(`feature_dim`\), got \(2, 6, 8, 8\) for .*\(2, 3, 32, 32\)"
    ):
        embedder(torch.rand(2, 3, 32, 32))


@pytest.mark.refusal
def test_forward_refuses_one_image_without_a_batch():
    with pytest.raises(ValueError, match=r"got \(4, 30, 30\) for images of shape \(3, 32, 32\)"):
        Embedder(nn.Conv2d(3, 4, 3))(torch.rand(3, 32, 32))


@pytest.mark.refusal
def test_a_model_without_a_known_classifier_is_refused(monkeypatch):
    monkeypatch.setattr(models, "get_model", lambda *args, **kwargs: nn.Sequential(nn.Conv2d(3, 4, 1)))
    with pytest.raises(ValueError, match="whose classifier can be found, got Sequential with the parts 0; build it"):
        Embedder("resnet18")


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"width": 0}, ValueError, "GlyphNet: `width` must be an integer >= 1, got 0"),
        ({"in_channels": 1.0}, TypeError, r"GlyphNet: `in_channels` must be an integer >= 1, got 1\.0 \(float\)"),
    ],
)
def test_glyph_net_refuses(settings, error, message):
    with pytest.raises(error, match=message):
        GlyphNet(**settings)
