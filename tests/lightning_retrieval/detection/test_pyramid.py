"""Faster R-CNN over timm's backbones: its maps, what is frozen, its settings, what it raises."""

import sys

import pytest
import torch
from torch import nn

from lightning_retrieval.detection import DetectionAPLoss, PyramidFasterRCNN, RankedRoIHeads
from lightning_retrieval.models.pretrained import without_pretrained_weights
from tests.lightning_retrieval.detection.scenes import make_batch

pytest.importorskip("timm")


@pytest.fixture(scope="module")
def detector():
    torch.manual_seed(0)
    return PyramidFasterRCNN(
        2,
        "resnet10t",
        pretrained=False,
        min_size=64,
        max_size=80,
        pyramid_channels=16,
        head_features=8,
        rois_per_image=9,
    )


def test_maps_of_the_pyramid(detector):
    maps = detector.backbone(torch.rand(1, 3, 64, 128))
    sizes = {name: tuple(map_.shape[1:]) for name, map_ in maps.items()}
    strides = {"0": 4, "1": 8, "2": 16, "3": 32, "pool": 64}
    assert sizes == {name: (16, 64 // stride, 128 // stride) for name, stride in strides.items()}


def test_what_is_frozen(detector):
    body = detector.backbone.body
    detector.train()
    norms = [layer for layer in body.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(norms) > 4
    before = norms[-1].running_mean.clone()
    detector.roi_heads = RankedRoIHeads(detector.roi_heads, DetectionAPLoss())
    sum(detector(*make_batch(range(2))).values()).backward()
    assert torch.equal(norms[-1].running_mean, before)
    assert all(parameter.grad is None for norm in norms for parameter in norm.parameters())
    convolutions = {name: layer for name, layer in body.named_modules() if isinstance(layer, nn.Conv2d)}
    frozen = {name for name, layer in convolutions.items() if layer.weight.grad is None}
    assert frozen == {name for name in convolutions if name.startswith(("conv1", "layer1"))}


def test_settings_reach_torchvision(detector):
    assert detector.roi_heads.box_predictor.cls_score.out_features == 3
    assert detector.roi_heads.fg_bg_sampler.batch_size_per_image == 9
    assert (detector.transform.min_size, detector.transform.max_size) == ((64,), 80)


def test_a_checkpoint_is_loaded_without_the_weights_of_timm(monkeypatch):
    import timm

    asked, create_model = [], timm.create_model

    def recorded(name, *, pretrained, **arguments):
        asked.append(pretrained)
        return create_model(name, pretrained=False, **arguments)

    monkeypatch.setattr(timm, "create_model", recorded)
    PyramidFasterRCNN(2, "test_resnet")
    with without_pretrained_weights():  # as `load_from_checkpoint` does
        PyramidFasterRCNN(2, "test_resnet")
    assert asked == [True, False]


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (
            ValueError,
            "`backbone_name` must be a name that timm can build .* got 'resnet9'",
            {"backbone_name": "resnet9"},
        ),
        (
            ValueError,
            r"`backbone_name` must be .* got 'hf-hub:a/b' \(no model of timm\)",
            {"backbone_name": "hf-hub:a/b"},
        ),
        (
            ValueError,
            "`backbone_name` must have maps of stride 4, 8, 16 and 32, got strides",
            {"backbone_name": "dla46_c"},
        ),
    ],
)
def test_invalid_settings(error, match, arguments):
    with pytest.raises(error, match=f"^PyramidFasterRCNN: {match}"):
        PyramidFasterRCNN(**{"num_classes": 2, "pretrained": False, **arguments})


@pytest.mark.refusal
def test_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"^PyramidFasterRCNN: .* pip install \"lightning-retrieval\[timm\]\"\.$"):
        PyramidFasterRCNN(2)
