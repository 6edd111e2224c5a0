"""RankedRoIHeads in torchvision's detectors: which losses change, checkpoints, copies, awkward batches."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.ops import MultiScaleRoIAlign

from lightning_retrieval.detection import DetectionAPLoss, RankedRoIHeads, TinyFasterRCNN
from lightning_retrieval.detection.tiny import TinyPyramid
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


def test_the_old_heads_stay_as_they_are():
    detector = tiny()
    old = detector.roi_heads
    detector.roi_heads = RankedRoIHeads(old, Recorder())
    assert not hasattr(old, "loss")
    assert detector.roi_heads.box_predictor is old.box_predictor
    again = RankedRoIHeads(detector.roi_heads, DetectionAPLoss())  # the loss can be exchanged
    assert isinstance(again.loss, DetectionAPLoss)


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
    incomplete = plain.state_dict()
    del incomplete["roi_heads.box_predictor.cls_score.bias"]
    with pytest.raises(RuntimeError, match=r"cls_score\.bias"):
        ranked.load_state_dict(incomplete, strict=True)


def test_the_memory_is_in_the_state_of_the_detector():
    detector, other = tiny(DetectionAPLoss()), tiny(DetectionAPLoss())
    detector(*make_batch(range(3)))
    file = io.BytesIO()
    torch.save(detector.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert len(other.roi_heads.loss.map_loss.memory) == 1


def test_copies_after_a_training_step():
    detector = tiny(DetectionAPLoss())
    batch = make_batch(range(3))
    sum(detector(*batch).values()).backward()
    for other in (copy.deepcopy(detector), pickle.loads(pickle.dumps(detector))):
        assert other.roi_heads.loss is not detector.roi_heads.loss
        losses = losses_of(other, batch)
        assert torch.equal(losses["loss_classifier"], losses_of(copy.deepcopy(detector), batch)["loss_classifier"])
    assert not detector.roi_heads.box_predictor._forward_hooks


def test_images_without_objects():
    detector = tiny(DetectionAPLoss())
    images, targets = make_batch(range(3))
    for number_without in (3, 1):  # without objects in the memory, the loss of three such images is 0
        some = [NOTHING] * number_without + targets[number_without:]
        losses = detector(images, some)
        sum(losses.values()).backward()
        assert (losses["loss_classifier"] == 0) == (number_without == 3)
    assert all(torch.isfinite(p.grad).all() for p in detector.parameters() if p.grad is not None)


@pytest.mark.refusal
@pytest.mark.parametrize("label", [0, 3])
def test_labels_that_are_no_classes(label):
    detector = tiny(DetectionAPLoss())
    with pytest.raises(ValueError, match=rf"^RankedRoIHeads: `labels` must be from 1 to 2, got {label}; 0 is the back"):
        detector(*make_batch([0], labels=torch.tensor([label])))
    detector(*make_batch([0]))  # nothing is left behind


@pytest.mark.refusal
def test_what_are_no_roi_heads():
    retina = RetinaNet(TinyPyramid(4), 3)
    with pytest.raises(TypeError, match=r"got RetinaNet, which classifies anchors directly; take a detector of two st"):
        RankedRoIHeads(retina, DetectionAPLoss())
    with pytest.raises(TypeError, match=r"got TinyFasterRCNN; give its attribute `roi_heads`\.$"):
        RankedRoIHeads(tiny(), DetectionAPLoss())
    with pytest.raises(TypeError, match=r"^RankedRoIHeads: `loss` must be a module such as DetectionAPLoss, got 3"):
        RankedRoIHeads(tiny().roi_heads, 3)
