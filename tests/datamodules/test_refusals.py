"""Invalid arguments of the data modules, their data sets and the loader, and wrong files that they read."""

from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
import torch.distributed as dist
from pyarrow import parquet
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import (
    Glyphs,
    HuggingFaceImages,
    ImageFolder,
    ImageIndex,
    ImageSet,
    ImageTable,
    Pairs,
    PKSampler,
    RetrievalDataLoader,
    TextTable,
)
from lightning_retrieval.datamodules.pairs import PairSet
from lightning_retrieval.invalid import InvalidType, InvalidValue, MissingFile
from tests.datamodules.pictures import as_it_is
from tests.datamodules.trees import write_image, write_text
from tests.datamodules.trees_more import write_folders
from tests.quiet_trainer import quiet_trainer
from tests.refusals import refusal_test


def folder(*names, **settings):
    """A data module of the images in these folders."""
    write_folders(Path("photos"), list(names))
    return ImageFolder("photos", **settings)


def table(text, **settings):
    write_text(Path("images.csv"), text)
    return ImageTable(".", "images.csv", **settings)


def captions(text, **settings):
    write_text(Path("captions.csv"), text)
    return TextTable("captions.csv", **settings)


def write_parquet(**columns):
    parquet.write_table(pyarrow.table(columns), "images.parquet")
    return ImageTable(".", "images.parquet").splits


def rows(labels=("a", "a", "b", "b"), splits=("train",), **settings):
    """A data module of a data set that `datasets` has written, with the same rows in each of these splits."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    columns = {"image": [f"{row}.png" for row in range(len(labels))], "label": list(labels)}
    of_split = datasets.Dataset.from_dict(columns)
    datasets.DatasetDict(dict.fromkeys(splits, of_split)).save_to_disk("set")
    return HuggingFaceImages("set", **{"image_column": "image", **settings})


def pairs(queries="label", candidates="label", splits=("train,train,test,test",) * 2):
    """Two tables of four images with labels or tags, and the splits of these images."""
    sides = []
    for side, column, of_rows in zip(("queries", "candidates"), (queries, candidates), splits, strict=True):
        lines = [f"{value}.png,{value},{split}" for value, split in zip("abcd", of_rows.split(","), strict=True)]
        write_text(Path(side, "table.csv"), "\n".join([f"image,{column},split", *lines]))
        sides.append(ImageTable(side, "table.csv"))
    return Pairs(*sides, classes_per_batch=2)


PATHS_OF_WINDOWS = ["C:\\a", "\\a", "\\\\server\\a", "a\\..\\..\\b", "c:/a"]  # they leave a folder on every system


def index(**arguments):
    return ImageIndex(**{"paths": ["a", "b"], "labels": [0, 1], **arguments})


def tagged(**names):
    return ImageSet(index(tags=[[0], [1]], **names), ".", as_it_is)


def with_path(path):
    return lambda: index(paths=[path, "b"])


def two_sizes():
    write_image(Path("a.png"), size=(6, 4))
    write_image(Path("b.png"), size=(5, 5))
    return ImageSet(ImageIndex(["a.png", "b.png"], [0, 0]), ".", as_it_is)


def sampler():
    return PKSampler([0, 0, 1, 1], classes_per_batch=2, samples_per_class=2)


def loader(dataset=range(4), **settings):
    return RetrievalDataLoader(dataset, sampler(), **settings)


@pytest.fixture
def processes(monkeypatch):
    """Set the number of processes."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    return lambda world: monkeypatch.setattr(dist, "get_world_size", lambda group=None: world)


def fit(data):
    quiet_trainer(max_epochs=1).fit(RetrievalModule(nn.Linear(3, 2), SmoothAPLoss()), data)


PLAIN = "image,label,split\na.jpg,1,train\nb.jpg,2,test\n"
TEXTS = "text,label,split\na red shoe,shoe,train\na sofa,sofa,test\n"

TABLE = {
    "ImageFolder": [
        (lambda: ImageFolder("gone").splits, MissingFile, "root"),
        (lambda: ImageFolder(".").splits, InvalidValue, "root", ""),  # empty
        (lambda: folder(".").splits, InvalidValue, "root", ""),
        (lambda: folder("pets/a", "birds/b").splits, InvalidValue, "root", ""),
        (lambda: folder("a", "b", categories=True).splits, InvalidValue, "root", ""),
        (lambda: folder("a", "b", classes=3).splits, InvalidValue, "root", ""),
        (lambda: folder("train/a", "Training/c", "val/b").splits, InvalidValue, "root"),
        (lambda: folder("valid/a", "dev/c", "test/b").splits, InvalidValue, "root"),
        (lambda: folder("query", "gallery").splits, InvalidValue, "root"),
        (lambda: folder("train/a", "train/b", "test/b").splits, InvalidValue, ""),
        (lambda: folder("a").splits, InvalidValue, "test_fraction"),
        (lambda: folder("a", "b", "c", test_fraction=0.1).splits, InvalidValue, "test_fraction"),
        (lambda: folder("a", "b", "c", val_fraction=0.1).train_set, InvalidValue, "val_fraction"),
        (lambda: folder(test_fraction=1), InvalidValue, "test_fraction"),
        (lambda: folder(classes="deep"), InvalidValue, "classes"),
        (lambda: folder(classes=0), InvalidValue, "classes"),
        (lambda: folder(classes="top", categories=True), InvalidValue, "classes"),
        (lambda: folder(val_fraction=1.0), InvalidValue, "val_fraction"),
        (lambda: folder(on_error="ignore"), InvalidValue, "on_error"),
        (lambda: folder(transform="smooth-ap"), InvalidValue, "transform"),
        (lambda: folder(image_size=0), InvalidValue, "image_size"),
        (lambda: folder(interpolation="cubic"), InvalidValue, "interpolation"),
        (lambda: folder(background="reddish"), InvalidValue, "background"),
        (lambda: folder(std=(1, 1, 0)), InvalidValue, "std"),
        (lambda: folder(classes_per_batch=0), InvalidValue, "classes_per_batch"),
        (lambda: folder(samples_per_class=1), InvalidValue, "samples_per_class"),
        (lambda: folder(eval_batch_size=0), InvalidValue, "eval_batch_size"),
        (lambda: folder(num_workers=-1), InvalidValue, "num_workers"),
        (lambda: folder(seed=-1), InvalidValue, "seed"),
        (lambda: folder(sampler="all"), InvalidValue, "sampler"),
        (lambda: folder("a", "b", sampler=sampler()).train_sampler(), InvalidValue, "sampler"),
    ],
    "ImageTable": [
        (lambda: ImageTable(".", "gone.csv").splits, MissingFile, "root"),
        (lambda: ImageTable("/", ".").splits, InvalidValue, "", "a folder"),
        (lambda: table("").splits, InvalidValue, "", "images.csv"),
        (lambda: table("path,class\na.jpg,1\n").splits, InvalidValue, "", "lacks image"),
        (lambda: table("a.jpg,1\nb.jpg,2\n").splits, InvalidValue, "", "lacks image"),
        (lambda: table("image,label,split\na,1,train\nb,2,valid\nc,3,dev\n").splits, InvalidValue, "split"),
        (lambda: table("image,label,left,top\n").splits, InvalidValue, "", "lacks right, bottom"),
        (lambda: table("image,label,image\n").splits, InvalidValue, "", "image twice"),
        (lambda: table("image,label\n").splits, InvalidValue, "", "images.csv"),
        (lambda: table("image,label\na.jpg,1\n").splits, InvalidValue, "test_fraction"),
        (lambda: table("image,label,split\na.jpg,1,train\n").splits, InvalidValue, "split"),
        (lambda: table(PLAIN.replace("2,test", "1,test")).splits, InvalidValue, "", "'1'"),
        (lambda: table("image,label,role\na.jpg,1,query\nb.jpg,2,query\n").splits, InvalidValue, "role"),
        (lambda: table(PLAIN, columns="other"), InvalidValue, "columns"),
        (lambda: table(PLAIN, columns={"picture": "path"}), InvalidValue, "columns"),
        (lambda: table(PLAIN, columns="image=a,label=a"), InvalidValue, "columns"),
        (lambda: table(PLAIN, columns="image=path").splits, InvalidValue, "columns"),
        (lambda: table(PLAIN, delimiter="ab"), InvalidValue, "delimiter"),
        (lambda: table(PLAIN, delimiter=";").splits, InvalidValue, "", "lacks image"),
        (lambda: table(PLAIN, split_seed=-1), InvalidValue, "split_seed"),
        (lambda: write_parquet(image=[{"bytes": b"", "path": "a.jpg"}], label=[1]), InvalidValue, "image"),
        (lambda: write_parquet(url=["https://a.b/c"]), InvalidValue, "", "lacks image, label"),
        (lambda: write_parquet(image=["a.jpg", "b.jpg"], label=[1, None]), InvalidValue, "", "row 2"),
        (lambda: ImageTable(".", write_text(Path("a.parquet"), "PAR1")).splits, InvalidValue, "", "a.parquet"),
    ],
    "HuggingFaceImages": [
        (lambda: HuggingFaceImages("./gone").splits, MissingFile, "path"),
        (lambda: rows(image_column=None).splits, InvalidValue, "image_column", ""),
        (lambda: rows(image_column="picture").splits, InvalidValue, "image_column"),
        (lambda: rows([1, 1, 2, 2], image_column="label").splits, InvalidValue, "image_column"),
        (lambda: rows(label_column="name").splits, InvalidValue, "label_column"),
        (lambda: rows(["a", "b", None]).splits, InvalidValue, "label_column"),
        (lambda: rows(["a", "b", "  "]).splits, InvalidValue, "label_column"),
        (lambda: rows([0.5, 1.0]).splits, InvalidValue, "label_column"),
        (lambda: rows(label_column=None), InvalidValue, "label_column"),
        (lambda: rows(tag_column="words").splits, InvalidValue, "tag_column"),
        (lambda: rows(tag_column="label").splits, InvalidValue, "tag_column"),
        (lambda: rows(split_names={"train": "tset"}).splits, InvalidValue, "split_names"),
        (lambda: rows(splits=("train", "validation", "dev")).splits, InvalidValue, "split_names", "'dev'"),
        (lambda: rows(splits=("train", "test")).splits, InvalidValue, ""),
        (lambda: rows(split_names={"test": "train"}).train_set, InvalidValue, "", "'train'"),
        (lambda: rows(test_fraction=0), InvalidValue, "test_fraction"),
    ],
    "TextTable": [
        (lambda: TextTable("gone.csv").splits, MissingFile, "table"),
        (lambda: captions("words,label\na sofa,1\n").splits, InvalidValue, "", "lacks text"),
        (lambda: captions(TEXTS + ",sofa,test\n").splits, InvalidValue, "", "line 4"),
        (lambda: captions(TEXTS + "nan,sofa,test\n").splits, InvalidValue, "", "line 4"),
        (lambda: captions(TEXTS + "a rug,,test\n").splits, InvalidValue, "", "line 4"),
        (lambda: captions(TEXTS + "a boot,shoe,test\n").splits, InvalidValue, "", "line 4"),
        (lambda: captions(TEXTS.replace("test", "train")).splits, InvalidValue, "split"),
        (lambda: captions(TEXTS, test_fraction=1), InvalidValue, "test_fraction"),
        (lambda: captions(TEXTS).train_set[0], InvalidValue, "tokenizer"),
        (lambda: fit(captions(TEXTS, classes_per_batch=1)), InvalidValue, "", "Linear"),
    ],
    "Pairs": [
        (lambda: Pairs(*[folder("a", "b")] * 2), InvalidValue, ""),
        (lambda: Pairs(pairs(), folder("a", "b")), InvalidType, "queries"),
        (lambda: Pairs(folder("a", "b"), "photos"), InvalidType, "candidates"),
        (lambda: Pairs(folder("a", "b"), folder("a", "b"), queries_per_class=0), InvalidValue, "queries_per_class"),
        (lambda: pairs(candidates="tags").train_set, InvalidValue, ""),
        (lambda: PairSet(tagged(tag_names=["red", "blue"]), tagged()), InvalidValue, ""),
        (lambda: pairs("tags", "tags").train_dataloader(), InvalidValue, ""),
        (lambda: pairs(splits=("train,train,train,test", "train,train,test,test")).train_set, InvalidValue, "", "'c'"),
        (lambda: pairs(splits=("train,a,b,b", "train,a,c,c")).test_set, InvalidValue, ""),
    ],
    "ImageIndex": [
        (lambda: index(paths=[], labels=[]), InvalidValue, "paths"),
        (lambda: index(paths=["../a", "b"]), InvalidValue, "paths"),
        *((with_path(path), InvalidValue, "paths") for path in PATHS_OF_WINDOWS),
        (lambda: index(paths=["a", "b//c"]), InvalidValue, "paths"),
        (lambda: index(paths="ab"), InvalidType, "paths"),
        (lambda: index(labels=[0]), InvalidValue, "labels"),
        (lambda: index(labels=[0.5, 1.0]), InvalidType, "labels"),
        (lambda: index(paths=["a", "a"]), InvalidValue, "labels"),
        (lambda: index(paths=["a", "a"], boxes=[[0, 0, 2, 2]] * 2), InvalidValue, "labels"),
        (lambda: index(boxes=[[0, 0, 1, 1], [3, 0, 3, 5]]), InvalidValue, "boxes"),
        (lambda: index(roles=[1, 4]), InvalidValue, "roles"),
        (lambda: index(cameras=[1]), InvalidValue, "cameras"),
        (lambda: index(tags=[[1], [-2]]), InvalidValue, "tags"),
        (lambda: index(tags=[1, 2]), InvalidValue, "tags"),
        (lambda: index(labels=[0, 5], names=["x"]), InvalidValue, "names"),
        (lambda: index(tags=[[1], [7]], tag_names=["red", "blue"]), InvalidValue, "tag_names"),
        (lambda: index(levels=[[5, 1], [5, 2]]), InvalidValue, "levels"),
        (lambda: index(instances=[7, 7]), InvalidValue, "instances"),
        (lambda: index(labels=[1, 1], instances=[4, 4], cameras=[5, 6]), InvalidValue, "instances"),
        (lambda: index(labels=[1, 1], instances=[4, 4], roles=[1, 2]), InvalidValue, "instances"),
        (lambda: index()[np.zeros(2, dtype=bool)], InvalidValue, "rows"),
    ],
    "ImageSet": [
        (lambda: ImageSet(index(), ".", as_it_is, on_error="ignore"), InvalidValue, "on_error"),
        (lambda: ImageSet(two_sizes().index, ".", np.asarray)[0], InvalidType, "transform"),
        (lambda: ImageSet.collate([two_sizes()[0], two_sizes()[1]]), InvalidValue, ""),
    ],
    "RetrievalDataLoader": [
        (lambda: loader(range(5)), InvalidValue, "dataset"),
        (lambda: loader(start=2), InvalidValue, "start"),
        (lambda: loader(epoch=-1), InvalidValue, "epoch"),
        (lambda: loader(num_workers=2, in_order=False), InvalidValue, "in_order"),
        (lambda: RetrievalDataLoader(range(4), range(4)), InvalidType, "batch_sampler"),
        (lambda: next(iter(loader([(torch.zeros(3, 8, 8 + size % 2), 0) for size in range(4)]))), InvalidValue, ""),
        (lambda processes: next(iter(processes(5) or loader())), InvalidValue, ""),
        (lambda processes: next(iter(processes(3) or pairs().train_dataloader())), InvalidValue, ""),
    ],
    "Glyphs": [(lambda: Glyphs(clases_per_batch=3), InvalidType, "", "`clases_per_batch`")],
}
test_invalid_arguments_raise = refusal_test(TABLE)
