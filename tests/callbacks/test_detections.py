"""The picture of detections: its file, and that nothing stays of a run."""

import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from lightning_retrieval.callbacks import DetectionPicture, detections
from lightning_retrieval.datamodules import GlyphScenes
from lightning_retrieval.detection import DetectionModule, TinyFasterRCNN


def test_it_draws_images_boxes_and_classes(tmp_path):
    picture = DetectionPicture(images=5, detections=2)
    before = dict(vars(picture))
    drawn = []
    draw = picture._draw
    picture._draw = lambda names, values: drawn.append((names, values, list(picture._shown))) or draw(names, values)
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "logger": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[picture], default_root_dir=tmp_path, **quiet)
    data = GlyphScenes(num_classes=3, eval_size=7, eval_batch_size=3)
    trainer.test(DetectionModule(TinyFasterRCNN(3, detections_per_image=2)), datamodule=data, verbose=False)
    ((names, values, shown),) = drawn
    assert names == ["A", "E", "R"]
    assert values.keys() == {"A", "E", "R"}
    assert len(shown) == 5
    assert all(torch.equal(shown[i][0], data.test_set[i][0]) for i in range(5))
    with Image.open(tmp_path / "detections.png") as image:
        assert image.size == (968, 726)  # 8.8 by 6.6 inches: two rows of images and the bars
    del picture._draw
    assert {name: vars(picture)[name] for name in before} == before


def test_the_detections_of_the_highest_scores_are_drawn(monkeypatch):
    picture, texts = DetectionPicture(detections=2), []
    monkeypatch.setattr(detections, "_draw_box", lambda axes, box, color, style, text: texts.append(text))
    boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0]] * 3)
    found = {"boxes": boxes, "labels": torch.tensor([1, 2, 1]), "scores": torch.tensor([0.1, 0.03, 0.2])}
    picture._shown = [(torch.zeros(3, 8, 8), {"boxes": boxes[:1]}, found)]
    picture._draw(["A", "B"], {"A": 0.5})
    assert texts == ["", "A 0.20", "A 0.10"]  # the object has no text


@pytest.mark.refusal
@pytest.mark.parametrize("name", ["images", "detections"])
def test_numbers_below_1_raise(name):
    with pytest.raises(ValueError, match=rf"^DetectionPicture: `{name}` must be an integer >= 1, got 0\."):
        DetectionPicture(**{name: 0})
