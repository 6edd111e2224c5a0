"""Valid calls of the data modules, data sets and samplers. Their files are written into the working directory."""

import functools
from pathlib import Path
from unittest.mock import patch

import pytest
import pytorch_lightning as pl
from PIL import Image

from lightning_retrieval.datamodules import (
    CUB200,
    IJBC,
    CocoDetection,
    GlobalBatchSampler,
    Glyphs,
    GlyphScenes,
    HuggingFaceImages,
    ImageFolder,
    ImageIndex,
    ImageSet,
    ImageTable,
    INaturalist,
    InShop,
    LandmarksClean,
    Pairs,
    PascalVOC,
    PKSampler,
    RevisitedOxford,
    RevisitedParis,
    StanfordOnlineProducts,
    TextTable,
    VehicleID,
    VGGFace2,
    item_generator,
    resume_position,
    training_transform,
)
from lightning_retrieval.models import NgramTokenizer, Preparation
from tests.awkward_values.calls import Call, constructor
from tests.datamodules.small_ijbc import write_ijbc
from tests.datamodules.small_revisited import write_revisited
from tests.datamodules.trees import (
    write_cub,
    write_image,
    write_in_shop,
    write_online_products,
    write_text,
    write_vehicle_id,
)
from tests.datamodules.trees_more import (
    QUICK,
    SMALL,
    write_folders,
    write_inaturalist,
    write_landmarks,
    write_vgg_face2,
)

LABELS = (0, 0, 1, 1, 2, 2, 2)
SIDES = ("queries", "candidates")
OF_BOXES = {"batch_size": 2, "eval_batch_size": 2, "num_workers": 0, "seed": 0, "pin_memory": False}


@functools.cache
def trainer():
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def folder(name, write):
    """Write a tree once into a folder of the working directory."""
    if not Path(name).exists():
        write(Path(name))
    return name


def first_batch(data):
    batch = next(iter(data.train_dataloader()))
    return [batch["images"], batch["labels"]]


def first_test_image(data):
    data.train_set  # noqa: B018
    return first_evaluation_image(data)


def first_evaluation_image(data):
    dataset = data.test_set
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()))
    return dataset[0]["images"]


def write_paris(root):
    return write_revisited(root, "rparis6k", pickled="gnd_rparis6k.pkl")


def revisited(cls, write):
    own = {"distractors": None, "crop_queries": True, "image_size": 64, "transform": "plain", "eval_batch_size": 4}
    transforms = {name: QUICK[name] for name in ("train_transform", "eval_transform")}

    def arguments():
        return {"root": folder(cls.__name__, write), **own}

    return Call(
        cls.__name__, functools.partial(cls, **transforms), arguments, signature=cls, use=first_evaluation_image
    )


def with_epoch(**arguments):
    sampler = PKSampler(LABELS, classes_per_batch=2, samples_per_class=2)
    sampler.set_epoch(**arguments)
    return list(sampler)


def reader(cls, write, use=first_test_image, **own):
    """A call of a data module that reads a published data set: its root and its own arguments."""

    def arguments():
        return {"root": folder(cls.__name__, write), **own}

    return Call(cls.__name__, functools.partial(cls, **QUICK), arguments, signature=cls, use=use)


def write_list(_):
    for number in range(8):
        write_image(Path(f"listed/{number}.png"), seed=number)
    rows = [f"{number}.png,{number // 2},{'train' if number < 4 else 'test'}" for number in range(8)]
    write_text(Path("listed/table.csv"), "\n".join(["image,label,split", *rows]))


def write_captions(path):
    rows = [f"text {number},{number // 2},{'train' if number < 4 else 'test'}" for number in range(8)]
    write_text(path, "\n".join(["text,label,split", *rows]))


def folder_settings():
    names = [f"class {number}" for number in range(6)]
    return {
        "root": folder("images", lambda root: write_folders(root, names)),
        "test_fraction": 0.5,
        "classes": "top",
        "transform": "plain",
        "train_transform": SMALL,
        "eval_transform": SMALL,
        "image_size": 16,
        "resize": "fit",
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "interpolation": "bicubic",
        "background": "black",
        "reduced_scale": True,
        "fill": "white",
        "on_error": "raise",
        "load_truncated": False,
        "val_fraction": 0.0,
        "cache_dir": "cache",
        "classes_per_batch": 1,
        "samples_per_class": 2,
        "eval_batch_size": 4,
        "num_workers": 0,
        "seed": 0,
        "sampler": "pk",
        "pin_memory": None,
        "persistent_workers": None,
    }


def index_columns():
    return {
        "paths": ["a.png", "b.png"],
        "labels": [0, 1],
        "categories": [0, 0],
        "levels": [[0, 0], [1, 0]],
        "boxes": [[0, 0, 9, 9], [0, 0, 9, 9]],
        "roles": [1, 2],
        "instances": [0, 1],
        "cameras": [1, 2],
        "tags": [[0, 1], [1, -1]],
        "names": ["x", "y"],
        "tag_names": ["red", "blue"],
        "lines": None,
    }


def write_one_image(root):
    write_image(root / "a.png")


def write_rows(root):
    """A data set of Hugging Face with six images of three classes."""
    datasets = pytest.importorskip("datasets")
    features = {"image": datasets.Image(), "label": datasets.Value("string")}
    features = datasets.Features({**features, "words": datasets.Sequence(datasets.Value("string"))})
    pictures = [Image.new("RGB", (9, 7), (30 * i, 0, 0)) for i in range(6)]
    words = [["red"], [], ["red", "old"]] * 2
    rows = {"image": pictures, "label": ["cat", "cat", "dog", "dog", "owl", "owl"], "words": words}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(root)


def first_row_without_a_network(data):
    """Other names than that of the folder are not looked for on the hub, which takes long."""
    with patch.object(pytest.importorskip("datasets").config, "HF_HUB_OFFLINE", True):
        return first_test_image(data)


def scenes():
    return {
        "num_classes": 3, "image_size": 64, "max_objects": 2, "train_size": 4, "eval_size": 2, **OF_BOXES,
    }  # fmt: skip


def three_files():
    return {"root": ".", "train": "train.json", "test": "test.json", "val": "val.json", **OF_BOXES}


def two_sides():
    of_batches = {"queries_per_class": 1, "classes_per_batch": 2, "samples_per_class": 2, "eval_batch_size": 4}
    of_loaders = {"num_workers": 0, "seed": 0, "pin_memory": None, "persistent_workers": None}
    names = [f"class {number}" for number in range(4)]
    sides = {name: ImageFolder(folder(name, lambda root: write_folders(root, names)), **QUICK) for name in SIDES}
    return {**sides, **of_batches, **of_loaders}


def first_pair(data):
    batch = next(iter(data.train_dataloader()))
    return [batch["queries"]["images"], batch["candidates"]["labels"]]


TABLE_FORMAT = {"columns": {"label": "label"}, "delimiter": ","}
GLYPH_SCENES = Call("GlyphScenes", GlyphScenes, scenes, use=lambda data: data.test_set[0][0])
PASCAL_VOC = Call("PascalVOC", PascalVOC, lambda: {"root": ".", "train_sets": ["VOC2007"], **OF_BOXES})
IMAGE_FOLDER = Call(
    "ImageFolder",
    ImageFolder,
    folder_settings,
    use=first_batch,
    raises={"train_transform": ("a lambda", "a class")},
)
CALLS = {
    "PKSampler": [constructor("PKSampler", use=list)],
    "GlobalBatchSampler": [Call("PKSampler", with_epoch, lambda: {"epoch": 3}, signature=GlobalBatchSampler.set_epoch)],
    "AllClassesSampler": [constructor("AllClassesSampler", use=list)],
    "CategorySampler": [constructor("CategorySampler", use=list)],
    "TagSampler": [constructor("TagSampler", use=list)],
    "PairSampler": [constructor("PairSampler", use=list)],
    "Pairs": [Call("Pairs", Pairs, two_sides, use=first_pair)],
    "RetrievalDataLoader": [constructor("RetrievalDataLoader", use=list)],
    "item_generator": [Call("item_generator", item_generator, lambda: {"index": 3}, use=lambda _: 0)],
    "resume_position": [Call("resume_position", resume_position, lambda: {"trainer": trainer()})],
    "training_transform": [
        Call("training_transform", training_transform, lambda: {"name": "plain", "preparation": Preparation()})
    ],
    "DataReport": [constructor("DataReport", use=str)],
    "GlyphDataset": [constructor("GlyphDataset")],
    "Glyphs": [Call("Glyphs", Glyphs, lambda: {"seed": 0, "fonts": ["cmr10"], "cache_dir": None})],
    "ImageIndex": [Call("ImageIndex", ImageIndex, index_columns)],
    "ImageSet": [
        Call(
            "ImageSet",
            ImageSet,
            lambda: {
                "index": ImageIndex(["a.png"], [0]),
                "root": folder("pictures", write_one_image),
                "transform": SMALL,
            },
            use=lambda images: images[0]["images"],
            raises={"transform": ("a class",)},
        )
    ],
    "ImageFolder": [IMAGE_FOLDER],
    "ImageDataModule": [IMAGE_FOLDER],
    "RetrievalDataModule": [IMAGE_FOLDER],
    "TextTable": [
        Call(
            "TextTable",
            TextTable,
            lambda: {
                "table": folder("captions.csv", write_captions),
                "tokenizer": NgramTokenizer(),
                "test_fraction": 0.5,
                **TABLE_FORMAT,
                "seed": 0,
                "sampler": "pk",
                "pin_memory": None,
                "persistent_workers": None,
            },
            use=lambda data: data.test_set[0]["images"],
            raises={
                "tokenizer": ("a lambda", "a class"),
                "table": ("a file",),  # which the error names, and its line
            },
        )
    ],
    "ImageTable": [
        Call(
            "ImageTable",
            functools.partial(ImageTable, **QUICK),
            lambda: {"root": folder("listed", write_list), "table": "table.csv", "test_fraction": 0.5, **TABLE_FORMAT},
            signature=ImageTable,
            use=first_test_image,
            raises={"table": ("a file",)},  # which the error names, and its line
        )
    ],
    "HuggingFaceImages": [
        Call(
            "HuggingFaceImages",
            functools.partial(HuggingFaceImages, **QUICK),
            lambda: {
                "path": folder("rows", write_rows),
                "config": None,
                "revision": None,
                "image_column": "image",
                "category_column": "label",
                "tag_column": "words",
                "split_names": {"train": "train"},
                "test_fraction": 0.5,
            },
            signature=HuggingFaceImages,
            use=first_row_without_a_network,
        )
    ],
    "CUB200": [reader(CUB200, write_cub, boxes=True)],
    "IJBC": [reader(IJBC, write_ijbc, use=first_evaluation_image, least_instances=2)],
    "INaturalist": [reader(INaturalist, write_inaturalist, levels=("species", "genus"))],
    "InShop": [reader(InShop, write_in_shop, boxes=True, high_res=False)],
    "LandmarksClean": [reader(LandmarksClean, write_landmarks, images="images")],
    "RevisitedOxford": [revisited(RevisitedOxford, write_revisited)],
    "RevisitedParis": [revisited(RevisitedParis, write_paris)],
    "StanfordOnlineProducts": [reader(StanfordOnlineProducts, write_online_products)],
    "VGGFace2": [reader(VGGFace2, write_vgg_face2, boxes=True)],
    "VehicleID": [reader(VehicleID, write_vehicle_id, sizes=("small", "large"), protocol="reid", select_by_vid=False)],
    "BoxIndex": [constructor("BoxIndex", use=len)],
    "BoxSet": [constructor("BoxSet", use=len)],
    "CocoDetection": [Call("CocoDetection", CocoDetection, three_files, use=lambda data: True)],
    "BoxDataModule": [PASCAL_VOC],
    "DetectionDataModule": [GLYPH_SCENES],
    "GlyphScenes": [GLYPH_SCENES],
    "PascalVOC": [PASCAL_VOC],
    "RandomBatchSampler": [constructor("RandomBatchSampler", use=list)],
}
