"""RankedRoIHeads in torchvision's detectors, the small detector, the one over timm's backbones, and their targets."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

from lightning_retrieval.detection import DetectionAPLoss, PyramidFasterRCNN, RankedRoIHeads, TinyFasterRCNN
from lightning_retrieval.detection.tiny import TinyPyramid
from lightning_retrieval.models.pretrained import without_pretrained_weights
from tests.lightning_retrieval.detection.scenes import NOTHING, make_batch

TINY_HEADS = {
    "rpn_anchor_generator": AnchorGenerator(((14, 20), (28, 40)), ((1.0,),) * 2),
    "box_roi_pool": MultiScaleRoIAlign(["0", "1"], 5, sampling_ratio=1),
    "mask_roi_pool": MultiScaleRoIAlign(["0", "1"], 5, sampling_ratio=1),
}


class Recorder(nn.Module):
    """The sum of the foreground logits, and what it was called with."""

    def forward(self, class_logits, labels):
        self.calls = (class_logits.detach(), labels)
        return class_logits[:, 1:].sum()


def tiny(loss=None):
    torch.manual_seed(0)
    detector = TinyFasterRCNN(2, image_size=64)
    if loss is not None:
        detector.roi_heads = RankedRoIHeads(detector.roi_heads, loss)
    return detector


def losses_of(detector, batch):
    torch.manual_seed(1)  # of the choice of regions
    return detector(*batch)


def test_only_the_loss_of_the_classifier_is_replaced():
    batch, recorder = make_batch(range(4)), Recorder()
    plain, ranked = losses_of(tiny(), batch), losses_of(tiny(recorder), batch)
    assert plain.keys() == ranked.keys()
    for name in plain.keys() - {"loss_classifier"}:
        assert torch.equal(plain[name], ranked[name]), name
    logits, labels = recorder.calls
    assert torch.equal(ranked["loss_classifier"], logits[:, 1:].sum())
    # The cross entropy of what the loss has received is what torchvision computes.
    assert torch.equal(nn.functional.cross_entropy(logits, labels), plain["loss_classifier"])
    assert labels.unique().tolist() == [0, 1, 2]


def test_detections_are_those_of_the_plain_detector():
    images, _ = make_batch(range(3))
    plain, ranked = tiny().eval()(images), tiny(DetectionAPLoss()).eval()(images)
    assert sum(len(found["scores"]) for found in plain) > 0
    for one, other in zip(plain, ranked):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_detector_of_torchvision_with_masks():
    detector = MaskRCNN(TinyPyramid(4), 3, min_size=64, max_size=64, **TINY_HEADS)
    detector.roi_heads = RankedRoIHeads(detector.roi_heads, DetectionAPLoss())
    images, targets = make_batch(range(2))
    for target in targets:
        target["masks"] = torch.ones(len(target["boxes"]), 64, 64, dtype=torch.uint8)
    losses = detector(images, targets)
    assert "loss_mask" in losses
    sum(losses.values()).backward()
    assert detector.roi_heads.box_predictor.cls_score.weight.grad.count_nonzero() > 0


def test_a_checkpoint_of_the_plain_detector_loads_strictly():
    plain, ranked = tiny(), tiny(DetectionAPLoss())
    nn.init.constant_(plain.roi_heads.box_predictor.cls_score.bias, 3.0)
    ranked.load_state_dict(plain.state_dict(), strict=True)
    assert ranked.roi_heads.box_predictor.cls_score.bias.tolist() == [3.0] * 3
    RankedRoIHeads(plain.roi_heads, DetectionAPLoss()).load_state_dict(plain.roi_heads.state_dict(), strict=True)


def test_copies_after_a_training_step():
    detector = tiny(DetectionAPLoss())
    batch = make_batch(range(3))
    sum(detector(*batch).values()).backward()
    for other in (copy.deepcopy(detector), pickle.loads(pickle.dumps(detector))):
        assert other.roi_heads.loss is not detector.roi_heads.loss
        losses = losses_of(other, batch)
        assert torch.equal(losses["loss_classifier"], losses_of(copy.deepcopy(detector), batch)["loss_classifier"])


def test_images_without_objects():
    detector = tiny(DetectionAPLoss())
    images, targets = make_batch(range(3))
    for number_without in (3, 1):  # without objects in the memory, the loss of three such images is 0
        some = [NOTHING] * number_without + targets[number_without:]
        losses = detector(images, some)
        sum(losses.values()).backward()
        assert (losses["loss_classifier"] == 0) == (number_without == 3)
    assert all(torch.isfinite(p.grad).all() for p in detector.parameters() if p.grad is not None)


def test_it_learns():
    torch.manual_seed(0)
    detector = TinyFasterRCNN(2, width=4, image_size=64, rois_per_image=8)
    optimizer = torch.optim.AdamW(detector.parameters(), 3e-3)
    totals = []
    for step in range(16):
        loss = sum(detector(*make_batch(range(4 * (step % 2), 4 * (step % 2) + 4))).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals.append(loss.item())
    assert sum(totals[-4:]) < 0.8 * sum(totals[:4])


pytest.importorskip("timm")


@pytest.fixture(scope="module")
def pyramid_detector():
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


def test_maps_of_the_pyramid(pyramid_detector):
    maps = pyramid_detector.backbone(torch.rand(1, 3, 64, 128))
    sizes = {name: tuple(map_.shape[1:]) for name, map_ in maps.items()}
    strides = {"0": 4, "1": 8, "2": 16, "3": 32, "pool": 64}
    assert sizes == {name: (16, 64 // stride, 128 // stride) for name, stride in strides.items()}


def test_what_is_frozen(pyramid_detector):
    body = pyramid_detector.backbone.body
    pyramid_detector.train()
    norms = [layer for layer in body.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(norms) > 4
    before = norms[-1].running_mean.clone()
    pyramid_detector.roi_heads = RankedRoIHeads(pyramid_detector.roi_heads, DetectionAPLoss())
    sum(pyramid_detector(*make_batch(range(2))).values()).backward()
    assert torch.equal(norms[-1].running_mean, before)
    assert all(parameter.grad is None for norm in norms for parameter in norm.parameters())
    convolutions = {name: layer for name, layer in body.named_modules() if isinstance(layer, nn.Conv2d)}
    frozen = {name for name, layer in convolutions.items() if layer.weight.grad is None}
    assert frozen == {name for name in convolutions if name.startswith(("conv1", "layer1"))}


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
