"""Valid calls of the data modules with boxes. Those of a subclass stand for an abstract base class."""

from lightning_retrieval.datamodules import (
    BoxIndex,
    BoxSet,
    CocoDetection,
    GlyphScenes,
    PascalVOC,
    RandomBatchSampler,
)
from tests.awkward_values.calls import Call

OBJECTS = [([[1.0, 2.0, 3.0, 4.0]], [1], [False])]
SETTINGS = {"batch_size": 2, "eval_batch_size": 2, "num_workers": 0, "seed": 0, "pin_memory": False}


def index():
    return BoxIndex(["a.jpg"], OBJECTS, class_names=["cat"])


def scenes():
    return {
        "num_classes": 3, "image_size": 64, "max_objects": 2, "frequency_exponent": 0.9, "max_rotation": 5.0,
        "clutter": 2, "train_size": 4, "eval_size": 2, "scene_seed": 1, **SETTINGS,
    }  # fmt: skip


def first_image(data):
    return data.test_set[0][0]


GLYPH_SCENES = Call("GlyphScenes", GlyphScenes, scenes, use=first_image)
PASCAL_VOC = Call("PascalVOC", PascalVOC, lambda: {"root": ".", "train_sets": ["VOC2007"], **SETTINGS})
CALLS = {
    "BoxIndex": [
        Call("BoxIndex", BoxIndex, lambda: {"paths": ["a.jpg"], "objects": OBJECTS, "class_names": ["cat"]}, use=len),
    ],
    "BoxSet": [Call("BoxSet", BoxSet, lambda: {"index": index(), "root": ".", "train": True}, use=len)],
    "CocoDetection": [
        Call(
            "CocoDetection",
            CocoDetection,
            lambda: {"root": ".", "train": "train.json", "test": "test.json", "val": "val.json", **SETTINGS},
            use=lambda data: True,
        )
    ],
    "BoxDataModule": [PASCAL_VOC],
    "DetectionDataModule": [GLYPH_SCENES],
    "GlyphScenes": [GLYPH_SCENES],
    "PascalVOC": [PASCAL_VOC],
    "RandomBatchSampler": [
        Call("RandomBatchSampler", RandomBatchSampler, lambda: {"num_images": 7, "batch_size": 3, "seed": 1}, use=list)
    ],
}
