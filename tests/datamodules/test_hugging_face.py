"""HuggingFaceImages: what it reads from the disk, what it does not decode, and how it splits."""

import http.server
import io
import json
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from lightning_retrieval import SharedTags
from lightning_retrieval.datamodules import CategorySampler, HuggingFaceImages, ImageFolder
from tests.datamodules.pictures import TINY, as_it_is

datasets = pytest.importorskip("datasets")
NAMES = ["yak", "cat", "owl", "dog"]
PLAIN = {"train_transform": TINY, "eval_transform": TINY}


def encoded(number):
    """A PNG whose red is the number."""
    stream = io.BytesIO()
    Image.new("RGB", (9, 7), (number, 0, 0)).save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": None}


def rows(labels, first=0, **columns):
    """A data set with one image for each label, numbered from `first`."""
    kind = datasets.ClassLabel(names=NAMES) if isinstance(labels[0], int) else datasets.Value("string")
    features = {"image": datasets.Image(), "label": kind}
    features |= {name: datasets.Value("int64") for name in columns}
    data = {"image": [encoded(first + i) for i in range(len(labels))], "label": labels, **columns}
    return datasets.Dataset.from_dict(data, features=datasets.Features(features))


def reds(images):
    """The numbers of the images of a set."""
    return [round(float(images[i]["images"][0].mean()) * 255) for i in range(len(images))]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Tables of Parquet are converted once, in a cache that no other test has."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.mark.parametrize("kind", ["save_to_disk", "parquet"])
def test_splits_of_a_folder(kind, tmp_path):
    splits = datasets.DatasetDict(train=rows([1, 1, 0, 0]), validation=rows([3, 3, 2, 2], first=50))
    if kind == "save_to_disk":
        splits.save_to_disk(tmp_path / "set")
    else:
        (tmp_path / "set/data").mkdir(parents=True)
        for name, split in splits.items():
            split.to_parquet(tmp_path / f"set/data/{name}-00000-of-00001.parquet")
    data = HuggingFaceImages(tmp_path / "set", **PLAIN)
    assert list(data.splits) == ["train", "val"]
    train, val = data.splits["train"], data.splits["val"]
    assert (train.labels.tolist(), list(train.names)) == ([0, 0, 1, 1], ["cat", "yak"])
    assert (val.labels.tolist(), list(val.names)) == ([0, 0, 1, 1], ["dog", "owl"])
    assert reds(data.val_set) == [50, 51, 52, 53]
    assert [int(data.val_set[i]["ids"]) for i in range(4)] == [0, 1, 2, 3]
    alone = HuggingFaceImages(tmp_path / "set", split_names={"test": "validation"})  # for evaluation: not split
    assert {use: list(index.names) for use, index in alone.splits.items()} == {"test": ["dog", "owl"]}


def test_a_file_of_parquet_is_split_by_class(tmp_path):
    rows([*"aabbccdd"]).to_parquet(tmp_path / "all.parquet")
    data = HuggingFaceImages(tmp_path / "all.parquet", test_fraction=0.25, split_seed=1, **PLAIN)
    assert [len(index) for index in data.splits.values()] == [6, 2]
    (name,) = data.splits["test"].names
    first = 2 * "abcd".index(name)
    assert reds(data.test_set) == [first, first + 1]


def test_classes_are_split_over_all_splits_if_asked(tmp_path):
    datasets.DatasetDict(train=rows([0, 1, 2, 3]), test=rows([0, 1, 2, 3])).save_to_disk(tmp_path / "set")
    data = HuggingFaceImages(tmp_path / "set", test_fraction=0.5)
    assert sorted(path.split("/")[0] for path in data.splits["train"].paths) == ["test", "test", "train", "train"]
    assert not set(data.splits["train"].names) & set(data.splits["test"].names)


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


TAGS = [["red", "old"], [], ["old", None, "old", " "], None]


@pytest.mark.parametrize("kind", ["text", "names"])
def test_tags_are_numbered_for_all_splits_together(tmp_path, kind):
    element, tags = datasets.Value("string"), TAGS
    if kind == "names":
        element, tags = datasets.ClassLabel(names=["red", "old"]), [[0, 1], [], [1, None, 1], None]
    features = datasets.Features({"image": datasets.Image(), "words": datasets.Sequence(element)})
    table = datasets.Dataset.from_dict({"image": [encoded(i) for i in range(4)], "words": tags}, features=features)
    datasets.DatasetDict(train=table.select([1, 2]), test=table.select([3, 0])).save_to_disk(tmp_path / "set")
    settings = {"label_column": None, "tag_column": "words", **PLAIN}
    data = HuggingFaceImages(tmp_path / "set", **settings)
    assert data.splits["train"].tags.tolist() == [[-1, -1], [0, -1]]
    assert data.splits["test"].tags.tolist() == [[-1, -1], [1, 0]]
    assert list(data.splits["test"].tag_names) == ["old", "red"]
    assert data.train_set[1]["tags"].tolist() == [0, -1]
    assert data.splits["train"].names is None
    one = HuggingFaceImages(tmp_path / "set", split_names={"train": "test"}, **settings)
    assert [len(index) for index in one.splits.values()] == [1, 1]  # half of the rows


def test_multi_hot_lists_are_tags(tmp_path):
    """Images are relevant to each other if they share a tag, not if both lack or both have any."""
    hot = [[1, 0, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0]]
    features = datasets.Features({"image": datasets.Image(), "kinds": datasets.Sequence(datasets.Value("int8"))})
    table = datasets.Dataset.from_dict({"image": [encoded(i) for i in range(6)], "kinds": hot}, features=features)
    table.save_to_disk(tmp_path / "set")
    settings = {"label_column": None, "tag_column": "kinds", "test_fraction": 0.5, **PLAIN}
    for images in HuggingFaceImages(tmp_path / "set", **settings).splits.values():
        relevant, _ = SharedTags().masks(*[torch.from_numpy(images.tags)] * 2)
        of_images = [hot[int(path.split("/")[1])] for path in images.paths]
        wanted = [[any(x and y for x, y in zip(a, b)) for a in of_images] for b in of_images]
        assert relevant.tolist() == wanted


def test_rows_that_were_selected_or_moved(tmp_path):
    """The labels of the table in memory would be those of all rows, in their old order."""
    table = rows([0, 1, 2, 3, 0, 1]).filter(lambda label: label != 2, input_columns="label").select([3, 0, 4, 1])
    table.save_to_disk(tmp_path / "set")
    data = HuggingFaceImages(tmp_path / "set", test_fraction=0.34, **PLAIN)
    found = {}
    for split in (data.train_set, data.test_set):
        names = [split.index.names[label] for label in split.labels.tolist()]
        found |= dict(zip(split.index.paths, zip(reds(split), names)))
    expected = [(4, "yak"), (0, "yak"), (5, "cat"), (1, "cat")]
    assert found == {f"train/{row}": value for row, value in enumerate(expected)}


def test_images_are_decoded_as_those_in_files(tmp_path):
    """Transparency, orientation, 16 bits and a palette; as bytes, and as paths in a column of text."""
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "files/a").mkdir(parents=True)
    (tmp_path / "files/b").mkdir()
    for name, mode in {"rgba": "RGBA", "grey": "L", "palette": "P", "rgb": "RGB"}.items():
        image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (5, 7, 4), np.uint8), "RGBA").convert(mode)
        image.save(tmp_path / f"files/a/{name}.png", exif=exif)
    Image.fromarray(np.arange(35, dtype=np.uint16).reshape(5, 7) * 1800).save(tmp_path / "files/b/deep.png")
    unchanged = {"train_transform": as_it_is, "eval_transform": as_it_is}
    files = ImageFolder(tmp_path / "files", **unchanged)
    paths = sorted(str(path) for path in (tmp_path / "files").glob("*/*.png"))
    labels = [path.split("/")[-2] for path in paths]
    in_bytes = [{"bytes": Path(path).read_bytes(), "path": None} for path in paths]
    kinds = {"bytes": (datasets.Image(), in_bytes), "paths": (datasets.Value("string"), paths)}
    expected = {}
    for split in (files.train_set, files.test_set):
        expected |= {path: split[i]["images"] for i, path in enumerate(split.index.paths)}
    for name, (feature, images) in kinds.items():
        features = datasets.Features({"image": feature, "label": datasets.Value("string")})
        datasets.Dataset.from_dict({"image": images, "label": labels}, features=features).to_parquet(
            tmp_path / f"{name}.parquet"
        )
        data = HuggingFaceImages(tmp_path / f"{name}.parquet", image_column="image", **unchanged)
        for split in (data.train_set, data.test_set):
            for i, path in enumerate(split.index.paths):
                file = paths[int(path.split("/")[1])]
                assert torch.equal(split[i]["images"], expected["/".join(file.split("/")[-2:])]), (name, file)


def test_paths_in_a_file_of_parquet_are_relative_to_its_folder(tmp_path, monkeypatch):
    """An image of the same name in the working directory is another one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name, red in {"a.png": 1, "b.png": 2, "data/a.png": 3}.items():
        (tmp_path / name).write_bytes(encoded(red)["bytes"])
    table = datasets.Dataset.from_dict(
        {"image": ["a.png", "b.png", "../b.png", str(tmp_path / "b.png")], "label": [*"wxyz"]}
    )
    table.to_parquet("data/t.parquet")
    data = HuggingFaceImages("data/t.parquet", image_column="image", split_names={"test": "train"}, **PLAIN)
    assert round(float(data.test_set[0]["images"][0].mean()) * 255) == 3
    for position, kind in ((1, FileNotFoundError), (2, ValueError), (3, ValueError)):
        with pytest.raises(kind, match=r"b\.png"):
            data.test_set[position]


@pytest.fixture
def requests():
    """The requests that a server on this machine has had; the first is its address."""

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    found = [f"http://127.0.0.1:{server.server_port}"]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_readme_of_a_folder_says_which_files_are_of_which_split(tmp_path):
    """As in a clone of a data set on the hub with two configurations."""
    configs = []
    for number, name in enumerate(("en", "fr")):
        (tmp_path / name).mkdir()
        files = []
        for part, split in enumerate(("train", "test")):
            first = 20 * number + 10 * part
            rows([*"abcd"[2 * part :][:2]], first=first).to_parquet(tmp_path / name / f"{part}.parquet")
            files.append(f"  - split: {split}\n    path: {name}/{part}.parquet")
        configs.append(f"- config_name: {name}\n  data_files:\n" + "\n".join(files))
    (tmp_path / "README.md").write_text("---\nconfigs:\n" + "\n".join(configs) + "\n---\n")
    data = HuggingFaceImages(tmp_path, config="fr", **PLAIN)
    assert (reds(data.train_set), reds(data.test_set)) == ([20, 21], [30, 31])
    for config in (None, "de"):
        with pytest.raises(ValueError, match="en, fr"):
            _ = HuggingFaceImages(tmp_path, config=config).splits


@pytest.mark.parametrize("kind", ["parquet", "save_to_disk"])
def test_a_data_set_of_a_stranger_connects_to_nothing_and_reads_nothing_outside(kind, tmp_path, requests):
    """Neither a second column of images, nor the settings of a README.md, nor the names of files lead elsewhere."""
    plain = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    table = rows([*"aabb"]).add_column("other", [{"bytes": None, "path": f"{requests[0]}/a.png"}] * 4)
    table = table.cast_column("other", plain)
    rows([*"ccdd"], first=50).to_parquet(tmp_path / "elsewhere.parquet")
    rows([*"ccdd"], first=50).save_to_disk(tmp_path / "elsewhere")
    folder = tmp_path / "set"
    as_images = datasets.Features({**table.features, "other": datasets.Image()})
    if kind == "save_to_disk":  # of a column of this type, `datasets` would ask the server how large the images are
        table.save_to_disk(folder)
        about = json.loads((folder / "dataset_info.json").read_text())
        about["features"] = as_images.to_dict()
        (folder / "dataset_info.json").write_text(json.dumps(about))
    else:
        (folder / "data").mkdir(parents=True)
        parquet.write_table(table.data.table.cast(as_images.arrow_schema), folder / "data/train-0.parquet")
    for path in (f"{requests[0]}/a.parquet", "../elsewhere.parquet"):
        files = f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {path}\n---\n"
        (folder / "README.md").write_text(files)
        del requests[1:]
        data = HuggingFaceImages(folder, image_column="image", split_names={"test": "train"}, **PLAIN)
        if kind == "parquet":
            with pytest.raises(ValueError, match=r"README"):
                _ = data.splits
        else:
            assert reds(data.test_set) == [0, 1, 2, 3]
        assert len(requests) == 1
    (folder / "README.md").unlink()
    assert reds(HuggingFaceImages(folder, image_column="image", split_names={"test": "train"}, **PLAIN).test_set)
    assert len(requests) == 1
    if kind == "save_to_disk":
        state = (folder / "state.json").read_text()
        (folder / "state.json").write_text(state.replace('"data-', '"../elsewhere/data-'))
        with pytest.raises(ValueError, match="elsewhere"):
            _ = HuggingFaceImages(folder, image_column="image").splits


def test_reading_the_labels_decodes_no_image_and_a_worker_gets_no_table(tmp_path):
    """Half of the images are none, and what is sent to a worker is much smaller than the table."""
    images = [encoded(1), {"bytes": b"no image", "path": None}] * 1500
    big = datasets.Dataset.from_dict({"image": images, "label": ["a", "b"] * 1500})
    big.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "set")
    data = HuggingFaceImages(tmp_path / "set", **PLAIN)
    readable = data.train_set if data.splits["train"].names[0] == "a" else data.test_set
    assert len(pickle.dumps(readable)) < 100_000
    assert torch.equal(pickle.loads(pickle.dumps(readable))[7]["images"], readable[7]["images"])


def test_check_reports_missing_images_and_images_with_two_labels(tmp_path):
    damaged = {"bytes": b"not an image", "path": None}
    pictures = [encoded(7), encoded(7), None, encoded(8), encoded(8), damaged]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    broken = datasets.Dataset.from_dict({"image": pictures, "label": [*"aabbcc"]}, features=features)
    datasets.DatasetDict(train=broken, test=rows([*"de"])).save_to_disk(tmp_path / "set")
    data = HuggingFaceImages(tmp_path / "set", **PLAIN)
    report = data.check()
    assert report.splits["train"][0] == (6, 3)
    assert report.missing_files == ["train/2"]
    assert report.unreadable_files == ["train/5 (cannot identify image file)"]  # as Pillow says
    assert report.problems == ["train/3 and train/4 are the same image with different labels"]
    with pytest.raises(ValueError, match="train/2"):
        data.train_set[2]


@pytest.mark.refusal
def test_a_path_on_this_machine_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'owner/birds' on the Hub (LocalEntryNotFoundError)\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for path in ("owner/birds", tmp_path / "nothing", "./nothing", "nothing.parquet"):
        with pytest.raises(FileNotFoundError, match=r"^HuggingFaceImages: `path` ") as raised:
            _ = HuggingFaceImages(path).splits
        assert ("reach" in str(raised.value)) == (path == "owner/birds")


@pytest.mark.parametrize("number", [-2, -1, 4])
@pytest.mark.parametrize("column", ["label", "tags"])
def test_a_number_without_a_name_is_no_class(column, number, tmp_path):
    """`cast_column` lets any numbers pass, and the last names are not those of numbers below 0."""
    values = {"label": [0, 0, 1, 1], "tags": [[0], [1], [2], [3]]}
    values[column][3] = number if column == "label" else [number]
    table = rows([*"aabb"]).remove_columns("label").add_column("label", values["label"])
    table = table.add_column("tags", values["tags"])
    kind = datasets.ClassLabel(names=NAMES)
    table = table.cast_column("label", kind).cast_column("tags", datasets.Sequence(kind))
    table.save_to_disk(tmp_path / "set")
    with pytest.raises(ValueError, match=str(number)):
        HuggingFaceImages(tmp_path / "set", tag_column="tags").splits  # noqa: B018
