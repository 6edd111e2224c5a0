"""HuggingFaceImages: what it reads from the disk, what it does not decode, and training on it."""

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_retrieval.datamodules import CategorySampler, HuggingFaceImages, ImageFolder
from tests.datamodules.pictures import TINY, as_it_is

datasets = pytest.importorskip("datasets")
refusal = pytest.mark.refusal
NAMES = ["yak", "cat", "owl", "dog"]
PLAIN = {"train_transform": TINY, "eval_transform": TINY}


def encoded(number, mode="RGB", **settings):
    """A PNG whose red is the number."""
    stream = io.BytesIO()
    Image.new("RGB", (9, 7), (number, 0, 0)).convert(mode).save(stream, "PNG", **settings)
    return {"bytes": stream.getvalue(), "path": None}


def rows(labels, first=0, **columns):
    """A data set with one image for each label, numbered from `first`."""
    kind = datasets.ClassLabel(names=NAMES) if isinstance(labels[0], int) else datasets.Value("string")
    features = {"image": datasets.Image(), "label": kind}
    features |= {name: datasets.Value("int64") for name in columns}
    data = {"image": [encoded(first + i) for i in range(len(labels))], "label": labels, **columns}
    return datasets.Dataset.from_dict(data, features=datasets.Features(features))


def train_and_test():
    return datasets.DatasetDict(train=rows([1, 1, 0, 0]), validation=rows([3, 3, 2, 2], first=50))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Tables of Parquet are converted once, in a cache that no other test has."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def save_to_disk(folder):
    train_and_test().save_to_disk(folder)


def save_as_parquet(folder):
    (folder / "data").mkdir(parents=True)
    for name, split in train_and_test().items():
        split.to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")


@pytest.mark.parametrize("save", [save_to_disk, save_as_parquet])
def test_splits_of_a_folder(save, tmp_path):
    save(tmp_path / "set")
    data = HuggingFaceImages(tmp_path / "set", **PLAIN)
    assert list(data.splits) == ["train", "val"]
    train, val = data.splits["train"], data.splits["val"]
    assert (train.labels.tolist(), list(train.names)) == ([0, 0, 1, 1], ["cat", "yak"])
    assert (val.labels.tolist(), list(val.names)) == ([0, 0, 1, 1], ["dog", "owl"])
    reds = [round(float(data.val_set[i]["images"][0].mean()) * 255) for i in range(4)]
    assert reds == [50, 51, 52, 53]
    assert [int(item["ids"]) for item in map(data.val_set.__getitem__, range(4))] == [0, 1, 2, 3]


def test_a_file_of_parquet_is_split_by_class(tmp_path):
    rows([*"aabbccdd"]).to_parquet(tmp_path / "all.parquet")
    data = HuggingFaceImages(tmp_path / "all.parquet", test_fraction=0.25, split_seed=1, **PLAIN)
    assert [len(index) for index in data.splits.values()] == [6, 2]
    (name,) = data.splits["test"].names
    first = 2 * "abcd".index(name)
    reds = {round(float(data.test_set[i]["images"][0].mean()) * 255) for i in range(2)}
    assert reds == {first, first + 1}


def test_classes_are_split_over_all_splits_if_asked(tmp_path):
    datasets.DatasetDict(train=rows([0, 1, 2, 3]), test=rows([0, 1, 2, 3])).save_to_disk(tmp_path / "set")
    data = HuggingFaceImages(tmp_path / "set", test_fraction=0.5)
    assert sorted(path.split("/")[0] for path in data.splits["train"].paths) == ["test", "test", "train", "train"]
    assert not set(data.splits["train"].names) & set(data.splits["test"].names)
    with pytest.raises(ValueError, match=r"^HuggingFaceImages: classes must .* got 4 in .*, such as 'cat'"):
        HuggingFaceImages(tmp_path / "set").splits  # noqa: B018


def test_named_splits_and_columns(tmp_path):
    first, second = rows([*"aabb"], kind=[7, 7, 9, 9]), rows([*"ccdd"], kind=[1, 1, 1, 1])
    renamed = [split.rename_columns({"image": "picture", "label": "product"}) for split in (first, second)]
    datasets.DatasetDict(part=renamed[0], rest=renamed[1], other=renamed[0]).save_to_disk(tmp_path / "set")
    data = HuggingFaceImages(
        tmp_path / "set",
        image_column="picture",
        label_column="product",
        category_column="kind",
        split_names={"train": "part", "test": "rest"},
        sampler="category",
        classes_per_batch=2,
        samples_per_class=2,
    )
    assert list(data.splits) == ["train", "test"]
    assert data.splits["train"].categories.tolist() == [0, 0, 1, 1]
    assert isinstance(data.train_sampler(), CategorySampler)


TAGS = [["red", "old"], [], ["old", None, "old"], None]


@pytest.mark.parametrize("kind", ["text", "names"])
def test_tags_are_numbered_for_all_splits_together(tmp_path, kind):
    element, tags = datasets.Value("string"), TAGS
    if kind == "names":
        element, tags = datasets.ClassLabel(names=["red", "old"]), [[0, 1], [], [1, None, 1], None]
    features = datasets.Features({"image": datasets.Image(), "words": datasets.Sequence(element)})
    table = datasets.Dataset.from_dict({"image": [encoded(i) for i in range(4)], "words": tags}, features=features)
    datasets.DatasetDict(train=table.select([1, 2]), test=table.select([3, 0])).save_to_disk(tmp_path / "set")
    data = HuggingFaceImages(tmp_path / "set", label_column=None, tag_column="words", **PLAIN)
    assert data.splits["train"].tags.tolist() == [[-1, -1], [0, -1]]
    assert data.splits["test"].tags.tolist() == [[-1, -1], [1, 0]]
    assert list(data.splits["test"].tag_names) == ["old", "red"]
    assert data.train_set[1]["tags"].tolist() == [0, -1]
    assert data.splits["train"].names is None
    one = HuggingFaceImages(
        tmp_path / "set", label_column=None, tag_column="words", split_names={"train": "test"}, **PLAIN
    )
    assert [len(index) for index in one.splits.values()] == [1, 1]  # half of the rows


@refusal
def test_a_column_that_holds_no_tags(tmp_path):
    rows([*"aabb"]).save_to_disk(tmp_path / "set")
    with pytest.raises(ValueError, match=r"^HuggingFaceImages: `tag_column` must hold lists .*, got 'label' of type "):
        HuggingFaceImages(tmp_path / "set", tag_column="label").splits  # noqa: B018
    with pytest.raises(ValueError, match=r"`tag_column` must be one of 'image', 'label', got 'words'\."):
        HuggingFaceImages(tmp_path / "set", tag_column="words").splits  # noqa: B018
    with pytest.raises(ValueError, match=r"^HuggingFaceImages: `label_column` must be given if .*, got None for both"):
        HuggingFaceImages(tmp_path / "set", label_column=None)


@refusal
@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_text_is_neither_a_class_nor_a_tag(tmp_path, empty):
    rows(["a", "a", "b", empty]).save_to_disk(tmp_path / "set")
    sentence = rf"^HuggingFaceImages: `label_column` must not be empty in any row, got '{empty}' in row 3 of train,"
    with pytest.raises(ValueError, match=sentence):
        HuggingFaceImages(tmp_path / "set").splits  # noqa: B018
    words = rows([*"aabb"]).add_column("words", [["x", empty], [empty], ["x"], []])
    words.save_to_disk(tmp_path / "words")
    data = HuggingFaceImages(tmp_path / "words", tag_column="words", test_fraction=0.5)
    for index in data.splits.values():
        assert list(index.tag_names) == ["x"]


def test_a_split_for_evaluation_alone_is_used_as_it_is(tmp_path):
    save_to_disk(tmp_path / "set")
    data = HuggingFaceImages(tmp_path / "set", split_names={"test": "validation"})
    assert {use: list(index.names) for use, index in data.splits.items()} == {"test": ["dog", "owl"]}


@refusal
def test_two_splits_for_validation(tmp_path):
    splits = {"train": rows([0, 1]), "validation": rows([2]), "dev": rows([3])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    with pytest.raises(ValueError, match=r"^HuggingFaceImages: `split_names` must .* 'validation' and 'dev' have"):
        HuggingFaceImages(tmp_path / "set").splits  # noqa: B018


def test_rows_that_were_selected_or_moved(tmp_path):
    """The labels of the table in memory would be those of all rows, in their old order."""
    rows([0, 1, 2, 3, 0, 1]).filter(lambda label: label != 2, input_columns="label").select([3, 0, 4, 1]).save_to_disk(
        tmp_path / "set"
    )
    data = HuggingFaceImages(tmp_path / "set", test_fraction=0.34, **PLAIN)
    found = {}
    for split in (data.train_set, data.test_set):
        for item, path in zip(map(split.__getitem__, range(len(split))), split.index.paths):
            found[path] = (round(float(item["images"][0].mean()) * 255), split.index.names[int(item["labels"])])
    expected = [(4, "yak"), (0, "yak"), (5, "cat"), (1, "cat")]
    assert found == {f"train/{row}": value for row, value in enumerate(expected)}


def test_images_are_decoded_as_those_in_files(tmp_path):
    """Transparency, orientation, 16 bits and a palette; as files, as bytes, and as paths in a column of text."""
    modes = {"rgba": "RGBA", "grey": "L", "palette": "P", "rgb": "RGB"}
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "files/a").mkdir(parents=True)
    (tmp_path / "files/b").mkdir()
    for name, mode in modes.items():
        image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (5, 7, 4), np.uint8), "RGBA").convert(mode)
        image.save(tmp_path / f"files/a/{name}.png", exif=exif)
    deep = np.arange(35, dtype=np.uint16).reshape(5, 7) * 1800
    Image.fromarray(deep).save(tmp_path / "files/b/deep.png")
    files = ImageFolder(tmp_path / "files", train_transform=as_it_is, eval_transform=as_it_is)
    paths = sorted(str(path) for path in (tmp_path / "files").glob("*/*.png"))
    labels = [path.split("/")[-2] for path in paths]
    in_bytes = [{"bytes": Path(path).read_bytes(), "path": None} for path in paths]
    kinds = {"bytes": (datasets.Image(), in_bytes), "paths": (datasets.Value("string"), paths)}
    expected = {}
    for split in (files.train_set, files.test_set):
        expected |= {path: split[i]["images"] for i, path in enumerate(split.index.paths)}
    for name, (feature, images) in kinds.items():
        features = datasets.Features({"image": feature, "label": datasets.Value("string")})
        datasets.Dataset.from_dict({"image": images, "label": labels}, features=features).save_to_disk(tmp_path / name)
        data = HuggingFaceImages(
            tmp_path / name, image_column="image", train_transform=as_it_is, eval_transform=as_it_is
        )
        for split in (data.train_set, data.test_set):
            for i, path in enumerate(split.index.paths):
                file = paths[int(path.split("/")[1])]
                assert torch.equal(split[i]["images"], expected["/".join(file.split("/")[-2:])]), (name, file)


def test_reading_the_labels_decodes_no_image(tmp_path, monkeypatch):
    save_to_disk(tmp_path / "set")
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *_, **__: pytest.fail("an image was decoded"))
    assert len(HuggingFaceImages(tmp_path / "set", **PLAIN).train_set[0]["images"]) == 3


def test_a_worker_gets_the_path_of_the_table_and_not_its_content(tmp_path):
    big = datasets.Dataset.from_dict({"image": [encoded(1)] * 3000, "label": ["a", "b"] * 1500})
    big.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "set")
    data = HuggingFaceImages(tmp_path / "set", **PLAIN)
    assert len(pickle.dumps(data.train_set.tables)) < 20_000
    again = pickle.loads(pickle.dumps(data.train_set))
    assert torch.equal(again[7]["images"], data.train_set[7]["images"])


def test_check_reports_missing_images_and_images_with_two_labels(tmp_path):
    damaged = {"bytes": b"not an image", "path": None}
    pictures = [encoded(7), encoded(7), None, encoded(8), encoded(8), damaged]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    broken = datasets.Dataset.from_dict({"image": pictures, "label": [*"aabbcc"]}, features=features)
    datasets.DatasetDict(train=broken, test=rows([*"de"])).save_to_disk(tmp_path / "set")
    report = HuggingFaceImages(tmp_path / "set", **PLAIN).check()
    assert report.splits["train"][0] == (6, 3)
    assert report.missing_files == ["train/2"]
    assert report.unreadable_files == ["train/5 (cannot identify image file)"]
    assert report.problems == ["train/3 and train/4 are the same image with different labels"]
    data = HuggingFaceImages(tmp_path / "set", **PLAIN)
    with pytest.raises(ValueError, match=r"cannot read the image .*train/2 \(the row has no image\)"):
        data.train_set[2]


@refusal
@pytest.mark.parametrize(
    ("match", "settings"),
    [
        (r"`image_column` must hold images, encoded or as paths, got 'label' of type ", {"image_column": "label"}),
        (r"`label_column` must be a column with an integer or text in each row, got \{", {"label_column": "image"}),
        (r"`split_names` must be from 'train', 'validation', got 'tset'\.", {"split_names": {"train": "tset"}}),
        (r"`split_names` must name at least one split, got none\.", {"split_names": {}}),
    ],
)
def test_bad_settings(match, settings, tmp_path):
    save_to_disk(tmp_path / "set")
    with pytest.raises(ValueError, match=f"^HuggingFaceImages: {match}"):
        HuggingFaceImages(tmp_path / "set", **settings).splits  # noqa: B018


@refusal
@pytest.mark.parametrize("labels", [[0, 1, -1, 2], ["a", "b", None, "c"]])
def test_rows_without_a_label(labels, tmp_path):
    rows(labels).save_to_disk(tmp_path / "set")
    with pytest.raises(ValueError, match=r"got (-1|None) in row 2 of train, column 'label'\.$"):
        HuggingFaceImages(tmp_path / "set").splits  # noqa: B018


@refusal
def test_a_column_of_text_is_not_taken_for_images(tmp_path):
    datasets.Dataset.from_dict({"path": ["a.png"], "label": ["a"]}).save_to_disk(tmp_path / "set")
    with pytest.raises(ValueError, match=r"`image_column` must name .*, as 0 of the columns 'path', 'label' have"):
        HuggingFaceImages(tmp_path / "set").splits  # noqa: B018


@refusal
def test_a_hub_that_cannot_be_reached(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'owner/birds' on the Hub (LocalEntryNotFoundError)\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(FileNotFoundError, match=r"got owner/birds \(Couldn't reach 'owner/birds' on the Hub"):
        HuggingFaceImages("owner/birds").splits  # noqa: B018
    for path in (tmp_path / "nothing", "./nothing", "nothing.parquet"):  # are not looked for there
        with pytest.raises(FileNotFoundError, match="`path` must be an existing folder or file, got"):
            HuggingFaceImages(path).splits  # noqa: B018


@refusal
def test_datasets_is_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"install it with pip install 'lightning-retrieval\[datasets\]'\."):
        HuggingFaceImages("owner/birds").splits  # noqa: B018
