"""A name is one name in each Unicode form: macOS writes an accented letter in names of files as two characters."""

import unicodedata

import pytest

from lightning_retrieval.datamodules import HuggingFaceImages, ImageFolder, ImageTable, Pairs, TextTable
from lightning_retrieval.models import NgramTokenizer
from tests.datamodules.trees import write_image

NAMES = ["café", "łódź", "ärger", "über"]


def in_form(form, number):
    return unicodedata.normalize(form, NAMES[number])


def both_forms(number):
    return in_form("NFC", number), in_form("NFD", number)


def read_folders(root):
    for number in range(4):
        for form, name in enumerate(both_forms(number)):
            write_image(root / name / f"{form}.jpg")
    return ImageFolder(root)


def write_table(root, name, column):
    lines = [f"{column},label"]
    for number in range(4):
        for form, label in enumerate(both_forms(number)):
            write_image(root / f"{number}{form}.jpg")
            lines.append(f"{number}{form}.jpg,{label}")
    (root / name).write_text("\n".join(lines), encoding="utf-8")
    return root / name


def read_images(root):
    return ImageTable(root, write_table(root, "a.csv", "image"))


def read_texts(root):
    return TextTable(write_table(root, "a.csv", "text"), tokenizer=NgramTokenizer())


def read_data_set(root):
    datasets = pytest.importorskip("datasets")
    labels, tags = [], []
    for number in range(4):
        labels += both_forms(number)
        tags += [[form] for form in both_forms(number)]
    columns = {"image": ["a.jpg"] * 8, "label": labels, "tags": tags}
    datasets.Dataset.from_dict(columns).save_to_disk(root / "data")
    return HuggingFaceImages(root / "data", image_column="image", tag_column="tags")


@pytest.mark.parametrize("read", [read_folders, read_images, read_texts, read_data_set])
def test_a_class_in_two_forms_is_one_class(read, tmp_path):
    data = read(tmp_path)
    names = []
    for split in data.splits.values():
        of_split = getattr(split, "class_names", None) or split.names
        assert len(split.labels) == 2 * len(of_split)
        names += of_split
        if getattr(split, "tags", None) is not None:
            assert list(split.tag_names) == sorted(in_form("NFC", number) for number in range(4))
    assert sorted(names) == sorted(in_form("NFC", number) for number in range(4))


def test_captions_in_one_form_are_matched_with_folders_in_another(tmp_path):
    lines = ["text,label,split"]
    for number in range(4):
        split = "train" if number < 2 else "test"
        write_image(tmp_path / "photos" / split / in_form("NFD", number) / "a.jpg")
        lines.append(f"some words,{in_form('NFC', number)},{split}")
    (tmp_path / "captions.csv").write_text("\n".join(lines), encoding="utf-8")
    texts = TextTable(tmp_path / "captions.csv", tokenizer=NgramTokenizer())
    pairs = Pairs(texts, ImageFolder(tmp_path / "photos"))
    assert sorted(pairs.train_set.labels.tolist()) == [0, 0, 1, 1]
    assert sorted(pairs.test_set.labels.tolist()) == [0, 0, 1, 1]
