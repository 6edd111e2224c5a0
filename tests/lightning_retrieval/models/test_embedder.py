"""The embedder: backbones by name and of users, the shape of their features, pooling, copies, invalid arguments.

GeM is compared with loops, its limits and gradients; the average and the maximum with torch.
"""

import copy
import math
import pickle

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.nn.functional import normalize
from torchvision import models

from lightning_retrieval import multi_scale
from lightning_retrieval.models import Embedder, GeM, GlobalAvgPool, GlobalMaxPool, GlyphNet, Preparation, gem
from lightning_retrieval.models.multi_scale import SCALE_POOLING


class Backbone(nn.Module):
    """A user's module; `output` makes what it returns of a feature map."""

    def __init__(self, output, channels=3):
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3, stride=4)
        self.norm = nn.BatchNorm2d(6)
        self.output = output

    def forward(self, images):
        return self.output(self.norm(self.conv(images)))


def feature_map(x):
    return x


def vectors(x):
    return x.mean((2, 3))


def as_list(x):
    return x[:, 0, 0, 0].tolist()


@pytest.mark.parametrize(("pooling", "cls"), [("gem", GeM), ("avg", GlobalAvgPool), ("max", GlobalMaxPool)])
def test_forward_applies_backbone_pool_and_head(pooling, cls):
    embedder = Embedder(Backbone(feature_map), 5, pooling=pooling, normalize=False, layer_norm=True)
    images = torch.randn(3, 3, 32, 32)
    features = embedder.backbone(images)
    pooled = cls()(features)
    pooled = (pooled - pooled.mean(1, keepdim=True)) / (pooled.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
    expected = pooled @ embedder.head.linear.weight.T + embedder.head.linear.bias
    torch.testing.assert_close(embedder(images), expected)
    embedder.normalize = True
    torch.testing.assert_close(embedder(images), expected / expected.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("layer_norm", [False, True])
def test_without_a_dimension_embeddings_are_the_pooled_features(layer_norm):
    torch.manual_seed(0)
    embedder = Embedder("glyph_net", None, layer_norm=layer_norm).eval()
    images = torch.rand(3, 1, 32, 32)
    features = embedder.pooled_features(images)
    expected = nn.functional.layer_norm(features, (256,)) if layer_norm else features
    assert features.shape == (3, 256)
    assert torch.allclose(embedder(images), normalize(expected), atol=1e-6)
    again = Embedder(**embedder.init_args()).eval()
    again.load_state_dict(embedder.state_dict())
    assert torch.equal(again(images), embedder(images))


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


@pytest.mark.filterwarnings("ignore:Embedder. freeze_batch_norm")
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


def statistics_of_resnet18(tmp_path):
    """A file of weights whose batch norms have seen images."""
    network = models.resnet18().train()
    network(torch.rand(4, 3, 32, 32))
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    return network


def test_batch_norm_with_the_statistics_of_a_new_network_warns_if_it_is_frozen(tmp_path):
    trained = statistics_of_resnet18(tmp_path)
    for new in ("resnet18", "glyph_net", models.resnet18(), GlyphNet()):
        with pytest.warns(UserWarning, match=r"Embedder: freeze_batch_norm.* `weights`"):
            embedder = Embedder(new, 8, freeze_batch_norm=True)
        assert embedder.freeze_batch_norm
        Embedder(new, 8)
    embedder = Embedder("resnet18", 8, freeze_batch_norm=True, weights=str(tmp_path / "weights.pth"))
    Embedder(trained, 8, feature_dim=1000, freeze_batch_norm=True)
    Embedder(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), 8, freeze_batch_norm=True)
    with torch.device("meta"):
        Embedder("resnet18", 8, freeze_batch_norm=True)
    embedder.save_pretrained(tmp_path / "saved")
    assert Embedder.from_pretrained(tmp_path / "saved").freeze_batch_norm


def test_batch_norm_updates_its_statistics_if_not_frozen():
    embedder = Embedder("glyph_net", 5)
    before = {name: value.clone() for name, value in embedder.named_buffers()}
    embedder(torch.rand(4, 1, 32, 32))
    assert not any(value.equal(before[name]) for name, value in embedder.named_buffers())


@pytest.mark.filterwarnings("ignore:Embedder. freeze_batch_norm")
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
        "channels_last": False,
    }
    embedder = Embedder(**settings)
    assert embedder.init_args() == settings
    assert Embedder(GlyphNet()).init_args() is None  # a module has no description
    assert embedder.preparation == Preparation(**settings["preparation"])
    assert embedder.backbone_name == "glyph_net"


def formats_of(embedder):
    """Whether each weight of a convolution has its channels last; others are in both formats."""
    weights = [part.weight for part in embedder.backbone.modules() if isinstance(part, torch.nn.Conv2d)]
    return {weight.is_contiguous(memory_format=torch.channels_last) for weight in weights if min(weight.shape[1:]) > 1}


def test_convolutions_have_their_channels_last_and_files_do_not_depend_on_it(tmp_path):
    images = torch.rand(4, 3, 32, 32)
    fast, plain = Embedder("resnet18", 8).eval(), Embedder("resnet18", 8, channels_last=False).eval()
    assert formats_of(fast) == {True}
    plain.load_state_dict(fast.state_dict())
    assert formats_of(plain) == {False}
    torch.testing.assert_close(plain(images), fast(images))
    for name, embedder in (("plain", plain), ("fast", fast)):
        embedder.save_pretrained(tmp_path / name)
        loaded = Embedder.from_pretrained(tmp_path / name)
        assert formats_of(loaded) == formats_of(embedder)
        assert loaded(images).equal(embedder(images))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "fast")]
    assert weights[0][-1000:] == weights[1][-1000:]


@pytest.mark.filterwarnings("ignore:Embedder. freeze_batch_norm")
def test_copies_of_a_user_s_backbone_are_equal():
    model = Embedder(Backbone(feature_map, channels=1), 5, freeze_batch_norm=True)
    images = torch.rand(2, 1, 32, 32)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin(images).equal(model(images))
        twin.eval().train()
        assert [part.training for part in twin.modules()] == [part.training for part in model.modules()]


def test_features_of_a_vit_are_found_with_its_image_size():
    vit = models.VisionTransformer(32, 16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8)
    vit.heads = nn.Identity()
    embedder = Embedder(vit, 4)
    assert embedder.feature_dim == 8
    assert embedder(torch.rand(2, 3, 32, 32)).shape == (2, 4)


class Noisy(Backbone):
    def forward(self, images):
        return nn.functional.dropout(super().forward(images), training=True)


def test_finding_the_feature_shape_changes_nothing():
    backbone = Noisy(feature_map, channels=1)
    backbone.conv.eval()  # a part that its user keeps in eval mode
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


def test_features_are_found_with_one_image_for_a_batch_norm_of_vectors():
    """In training mode, it raises on a single row."""
    assert Embedder(nn.Sequential(Backbone(vectors), nn.BatchNorm1d(6)), 5).feature_dim == 6


def test_a_backbone_that_cannot_be_run_keeps_its_mode():
    backbone = Backbone(as_list)
    with pytest.raises(ValueError, match=r"^Embedder: `backbone`"):
        Embedder(backbone)
    assert backbone.training
    assert backbone.norm.training
    assert Embedder(backbone, feature_dim=6).feature_dim == 6  # for which it is not run


def gem_by_loops(features, p, eps):
    """Equation 3, one activation at a time, in Python floats."""
    out = []
    for image in features.tolist():
        out.append([])
        for channel in image:
            values = [max(x, eps) for row in channel for x in row]
            out[-1].append((sum(x**p for x in values) / len(values)) ** (1 / p))
    return torch.tensor(out, dtype=torch.float64)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 2**31),
    p=st.floats(0.5, 8.0),
    eps=st.sampled_from([1e-6, 1e-2]),
    size=st.tuples(*[st.integers(1, 4)] * 4),
)
def test_gem_against_loops(seed, p, eps, size):
    features = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(gem(features, p, eps), gem_by_loops(features, p, eps))


def test_gem_module_equals_the_function():
    features = torch.randn(3, 5, 4, 4)
    torch.testing.assert_close(GeM(2.5, eps=0.5)(features), gem(features, 2.5, 0.5))


def test_gem_by_hand():
    features = torch.tensor([1.0, 2.0, 3.0, -4.0]).reshape(1, 1, 2, 2)
    assert gem(features, 3.0).item() == pytest.approx((36 / 4) ** (1 / 3))


def test_gem_limits():
    features = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(gem(features, 1.0), features.clamp(min=1e-6).mean((2, 3)))
    torch.testing.assert_close(gem(features, 1e6), features.amax((2, 3)), rtol=1e-4, atol=0)


def test_gem_gradients():
    features = torch.rand(2, 3, 2, 2, dtype=torch.float64) + 0.1
    p = torch.tensor([2.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gem, (features.requires_grad_(), p))
    assert torch.autograd.gradgradcheck(lambda x: gem(x, 3.0), features)


@pytest.mark.parametrize("scale", [0.0, 1e-5, 1e20])
def test_gem_neither_overflows_nor_vanishes(scale):
    """x^p is outside the range of float32 here; a channel of zeros has finite gradients too."""
    pool = GeM(p=30.0)
    features = (scale * torch.rand(1, 2, 3, 3)).requires_grad_()
    pooled = pool(features)
    log = features.detach().double().clamp(min=1e-6).flatten(2).log()
    expected = ((torch.logsumexp(30.0 * log, 2) - math.log(9)) / 30.0).exp().float()
    torch.testing.assert_close(pooled, expected)
    pooled.sum().backward()
    assert features.grad.isfinite().all()
    assert pool.p.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gem_in_half_precision_computes_in_float32(dtype):
    torch.manual_seed(0)  # with other seeds, float32 may round one of the many means differently
    features = (200 * torch.rand(2, 32, 7, 7)).to(dtype)  # 200^3 is beyond float16
    exact = gem(features.double(), 3.0)
    with torch.autocast("cpu", dtype=dtype):
        under_autocast = GeM()(features)
    for pooled in (under_autocast, GeM()(features), GeM().to(dtype)(features)):
        assert pooled.dtype == dtype
        assert pooled.equal(exact.to(dtype))


def test_gem_p_is_a_parameter_only_if_learnable():
    assert [name for name, _ in GeM().named_parameters()] == ["p"]
    assert list(GeM(learnable=False).parameters()) == []
    fixed = GeM(p=5.0, learnable=False)
    fixed.load_state_dict(GeM(p=2.0).state_dict())  # the same keys
    assert fixed.p.item() == 2.0


def test_average_and_maximum_equal_torch():
    features = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(GlobalAvgPool()(features), nn.AdaptiveAvgPool2d(1)(features).flatten(1))
    assert GlobalMaxPool()(features).equal(nn.AdaptiveMaxPool2d(1)(features).flatten(1))


def test_glyph_net_and_its_preparation():
    embedder = Embedder("glyph_net", 8, backbone_args={"width": 4, "in_channels": 3})
    assert embedder.backbone.width == 4
    assert embedder(torch.rand(2, 3, 32, 32)).shape == (2, 8)
    assert (embedder.preparation.channels, embedder.image_size) == (3, 32)
    assert Embedder("glyph_net", 8).preparation == Preparation.named("glyphs")


def test_the_size_of_a_module_is_that_of_its_preparation():
    module = nn.Conv2d(3, 4, 3)
    assert Embedder(module).preparation == Preparation()
    module.image_size = 48
    assert Embedder(module).preparation.image_size == 48


def test_feature_map_has_an_eighth_of_the_size():
    assert GlyphNet()(torch.rand(2, 1, 32, 32)).shape == (2, 256, 4, 4)
    assert GlyphNet(width=8, in_channels=3)(torch.rand(2, 3, 64, 48)).shape == (2, 64, 8, 6)


class RecordsSizes:
    """Embeds an image by its mean and its central pixel, and records the sizes of the images."""

    def __init__(self):
        self.seen = []

    def __call__(self, images):
        self.seen.append(tuple(images.shape[2:]))
        middle = images[:, :, images.shape[2] // 2, images.shape[3] // 2]
        return torch.cat([images.mean((2, 3)), middle], 1)


def test_embedding_is_the_mean_of_unit_rows_over_scales():
    images, embed = torch.rand(3, 2, 9, 14), RecordsSizes()
    found = multi_scale(embed, images, scales=(1, 0.5, 1.5))
    assert embed.seen == [(9, 14), (4, 7), (14, 21)]
    sizes = [(9, 14), (4, 7), (14, 21)]
    resized = [nn.functional.interpolate(images, size=s, mode="bilinear", antialias=True) for s in sizes]
    expected = sum(normalize(embed(x)) for x in resized) / 3
    torch.testing.assert_close(found, normalize(expected))


def test_power_mean_keeps_signs():
    embed = lambda images: torch.stack([images.shape[2] * torch.ones(2), -torch.ones(2)], 1)  # noqa: E731
    found = multi_scale(embed, torch.rand(2, 1, 4, 4), scales=[0.5, 1], p=3.0)
    parts = [(2 / 5**0.5, -1 / 5**0.5), (4 / 17**0.5, -1 / 17**0.5)]
    mean = [math.copysign((sum(abs(x) ** 3 for x in column) / 2) ** (1 / 3), column[0]) for column in zip(*parts)]
    torch.testing.assert_close(found[0], normalize(torch.tensor([mean]))[0])


def sympow(x, p, eps=1e-6):
    """`sympow` of dirtorch's pool(), for one number."""
    return math.copysign(max(abs(x), eps) ** p, x) if x else 0.0


def pool_scales_by_loops(rows):
    """dirtorch's `--pooling gem` for the unit rows of all scales, then the normalisation."""
    mean_of_cubes = [sum(sympow(x, 3) for x in column) / len(rows) for column in zip(*rows)]
    pooled = [sympow(x, 1 / 3) for x in mean_of_cubes]
    return [x / math.hypot(*pooled) for x in pooled]


def embeds_rows(rows):
    """A network whose embeddings of the images at each scale are given."""
    given = iter(torch.tensor(rows, dtype=torch.float64))
    return lambda images: next(given)[None]


def test_gem_over_scales_against_loops():
    """Entries with one sign and with both, below and above the floor, and zero."""
    rows = torch.randn(3, 64, dtype=torch.float64)
    rows[:, 3], rows[:, 4] = torch.tensor([1e-9, 1e-8, -1e-7], dtype=torch.float64), 0.0
    rows = rows / rows.norm(dim=1, keepdim=True)
    expected = pool_scales_by_loops(rows.tolist())
    found = multi_scale(embeds_rows(rows.tolist()), torch.rand(1, 1, 4, 4), (0.5, 1, 2), **SCALE_POOLING["gem"])
    torch.testing.assert_close(found[0], torch.tensor(expected, dtype=torch.float64))
    assert found[0, 4] == 0


def test_one_scale_is_not_pooled():
    row = [0.6, 0.8, 1e-4]
    found = multi_scale(embeds_rows([row]), torch.rand(1, 1, 4, 4), (0.5,), p=3.0, eps=1e-6)
    torch.testing.assert_close(found[0], normalize(torch.tensor(row, dtype=torch.float64), dim=0))


def test_resizing_equals_pil():
    pixels = (255 * torch.rand(20, 30, generator=torch.Generator().manual_seed(0))).to(torch.uint8)
    by_pil = torch.from_numpy(np.array(Image.fromarray(pixels.numpy()).resize((15, 10), Image.Resampling.BILINEAR)))
    seen = []
    multi_scale(lambda x: (seen.append(x), x.flatten(1))[1], pixels[None, None].float(), scales=[0.5])
    assert (seen[0][0, 0] - by_pil).abs().max() <= 1  # PIL rounds twice


def test_a_resized_image_has_at_least_one_pixel():
    embed = RecordsSizes()
    multi_scale(embed, torch.rand(1, 1, 4, 40), scales=[0.1])
    assert embed.seen == [(1, 4)]
