"""ImageDataModule: splits, training and validation, and the check of the files."""

from types import MappingProxyType

import pytest

from lightning_retrieval.datamodules import ImageDataModule, ImageIndex
from tests.datamodules.pictures import picture
from tests.datamodules.trees_more import QUICK, fit_and_validate


class Pictures(ImageDataModule):
    """Classes 0 to 5 in training, 6 to 8 in evaluation, four images each."""

    published_counts = MappingProxyType({"train": [(24, 6)], "test": [(13, 3), (13, 4)]})

    def __init__(self, root, parts=("train", "test"), **settings):
        super().__init__(root, **{**QUICK, **settings})
        self.parts = parts

    def read(self):
        classes = {"train": range(6), "val": range(20, 22), "test": range(6, 9), "hard": range(9, 12)}
        return {part: self.of(classes[part]) for part in self.parts}

    def of(self, classes):
        paths = [f"{label}/{number}.png" for label in classes for number in range(4)]
        labels = [classes.index(int(path.split("/")[0])) for path in paths]
        return ImageIndex(paths, labels, names=list(map(str, classes)))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    for label in [*range(12), 20, 21]:
        for number in range(4):
            picture(root / f"{label}/{number}.png", size=(10 + label, 12))
    return root


def test_several_sets_are_logged_by_name(tree):
    found = fit_and_validate(Pictures(tree, parts=("train", "test", "hard")))
    assert {"val/test/mAP", "val/hard/mAP", "val/hard/R@1"} <= set(found)
    alone = fit_and_validate(Pictures(tree, parts=("train", "hard")))
    assert alone["val/hard/mAP"] == found["val/hard/mAP"]


def test_the_set_on_which_checkpoints_are_chosen(tree):
    assert list(Pictures(tree).val_set.index.paths) == list(Pictures(tree).test_set.index.paths)
    assert len(Pictures(tree, parts=("train", "val", "test")).val_set) == 8
    only_val = Pictures(tree, parts=("train", "val"))
    assert list(only_val.test_set.index.paths) == list(only_val.val_set.index.paths)
    held = Pictures(tree, val_fraction=0.34, seed=1)
    assert (len(held.train_set), len(held.val_set), len(held.test_set)) == (16, 8, 12)
    assert not set(held.train_set.index.paths) & set(held.val_set.index.paths)
    assert held.val_set.transform is held.eval_transform
    assert list(Pictures(tree, val_fraction=0.34, seed=1).val_set.index.paths) == list(held.val_set.index.paths)


@pytest.mark.refusal
def test_a_class_or_an_image_in_training_and_in_evaluation_raises(tree):
    class Mixed(Pictures):
        def read(self):
            return {"train": self.of(range(4)), "test": self.of(range(3, 6))}

    with pytest.raises(ValueError, match=r"^Mixed: classes .* '3'"):
        Mixed(tree).prepare_data()
    Mixed.shared_classes = True
    with pytest.raises(ValueError, match=r"^Mixed: images .* 3/0\.png"):
        Mixed(tree).prepare_data()

    class Shared(Mixed):
        def read(self):
            index = self.of(range(4))
            return {"train": index[::2], "test": index[1::2]}

    Shared(tree).prepare_data()


def test_check_compares_the_published_counts_and_looks_for_files(tree):
    report = Pictures(tree, parts=("train", "test", "hard")).check()
    assert not report.ok  # 12 test images, not 13
    published = Pictures.published_counts
    assert report.splits == {
        "train": ((24, 6), published["train"]),
        "test": ((12, 3), published["test"]),
        "hard": ((12, 3), ()),
    }
    assert Pictures(tree, parts=("train",)).check().ok

    class Gone(Pictures):
        def of(self, classes):
            return ImageIndex(["0/0.png", "0/0.png", "gone/é.png"], [0, 0, 1])

    report = Gone(tree, parts=("train",)).check()
    assert report.missing_files == ["gone/é.png"]
    assert len(report.problems) == 1  # a path is listed twice
