"""A name is one name in each Unicode form: macOS writes an accented letter in names of files as two characters."""

from unicodedata import normalize

import pytest

from lightning_retrieval.datamodules import HuggingFaceImages, ImageFolder, ImageTable, TextTable
from tests.datamodules.trees import write_image, write_text

NAMES = sorted(normalize("NFC", name) for name in ("café", "łódź", "ärger", "über"))
BOTH_FORMS = [normalize(form, name) for name in NAMES for form in ("NFC", "NFD")]


def of_folders(root):
    for number, name in enumerate(BOTH_FORMS):
        write_image(root / name / f"{number}.jpg")
    return ImageFolder(root)


def of_images(root):
    lines = [f"{number}.jpg,{name}" for number, name in enumerate(BOTH_FORMS)]
    write_text(root / "a.csv", "\n".join(["image,label", *lines]))
    return ImageTable(root, "a.csv")


def of_texts(root):
    lines = [f"text {number},{name}" for number, name in enumerate(BOTH_FORMS)]
    return TextTable(write_text(root / "a.csv", "\n".join(["text,label", *lines])))


def of_data_set(root):
    datasets = pytest.importorskip("datasets")
    columns = {"image": ["a.jpg"] * 8, "label": BOTH_FORMS, "tags": [[name] for name in BOTH_FORMS]}
    datasets.Dataset.from_dict(columns).save_to_disk(root / "data")
    return HuggingFaceImages(root / "data", image_column="image", tag_column="tags")


@pytest.mark.parametrize("data_of", [of_folders, of_images, of_texts, of_data_set])
def test_a_class_in_two_forms_is_one_class(data_of, tmp_path):
    data = data_of(tmp_path)
    names = [name for part in (data.train_set, data.test_set) for name in part.class_names]
    assert sorted(names) == NAMES
    for part in (data.train_set, data.test_set):
        assert part.labels.tolist() == [0, 0, 1, 1]
        assert data_of is not of_data_set or list(part.tag_names) == NAMES
