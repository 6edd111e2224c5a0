"""The small detector: its shapes, its settings, and that it learns."""

import torch

from lightning_retrieval.detection import TinyFasterRCNN
from lightning_retrieval.detection.tiny import TinyPyramid
from tests.lightning_retrieval.detection.scenes import make_batch


def test_strides_are_4_and_8():
    maps = TinyPyramid(4)(torch.rand(2, 3, 64, 96))
    assert {name: tuple(map_.shape) for name, map_ in maps.items()} == {"0": (2, 32, 16, 24), "1": (2, 32, 8, 12)}


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


def test_settings_reach_torchvision():
    detector = TinyFasterRCNN(7, rois_per_image=9, score_thresh=0.2, detections_per_image=3)
    assert detector.roi_heads.box_predictor.cls_score.out_features == 8
    assert detector.roi_heads.fg_bg_sampler.batch_size_per_image == 9
    assert (detector.roi_heads.score_thresh, detector.roi_heads.detections_per_img) == (0.2, 3)
