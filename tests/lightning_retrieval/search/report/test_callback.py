"""`RetrievalReport`: what it writes at the end of a test, on two processes too, and which sets it skips."""

import csv
import html
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import RetrievalModule, SharedTags, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation, RetrievalReport
from lightning_retrieval.datamodules import ImageFolder
from lightning_retrieval.invalid import InvalidValue
from tests.callbacks.point_runs import PointsModule, labelled_points, make_trainer
from tests.refusals import refusal_test

STRANGE = "<b>&'=1+1"


def write_images(folder):
    """Three classes for a test and two for training, of noise around a colour; the strange name is that of a class."""
    random = np.random.default_rng(0)
    for split, names in (("train", ["a", "b"]), ("test", ["red", STRANGE, "blue"])):
        for number, name in enumerate(names):
            for position in range(5):
                pixels = random.integers(0, 90, (24, 24, 3), dtype=np.uint8)
                pixels[:, :, number] += 100
                path = folder / split / name / f"{position}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    return folder


class Means(nn.Module):
    """Embeds an image by the mean of each channel, which differ little between classes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.4, 0.2]))

    def forward(self, images):
        return images.mean((2, 3)) * self.scale + 0.1


def test_of(folder, *callbacks, **settings):
    """Run a test on the images of a folder."""
    torch.manual_seed(0)
    data = ImageFolder(folder, image_size=16, resize=16, classes_per_batch=2, samples_per_class=2, eval_batch_size=4)
    module = RetrievalModule(Means(), SmoothAPLoss())
    trainer = make_trainer(RetrievalEvaluation((1,)), *callbacks, **settings)
    trainer.test(module, data, verbose=False)
    return trainer


test_of.__test__ = False


def rows_of(table):
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_test_writes_the_page_and_the_table(tmp_path):
    write_images(tmp_path / "images")
    trainer = test_of(tmp_path / "images", RetrievalReport(false_match_rate=0.1), default_root_dir=tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    rows = rows_of(tmp_path / "run" / "report.csv")
    assert "<img" in page
    assert STRANGE not in page
    assert html.escape(STRANGE) in page
    values = {row["finding"]: row["value"] for row in rows}
    assert float(values["mAP"]) == pytest.approx(float(trainer.callback_metrics["test/mAP"]), abs=1e-6)
    queries = [row for row in rows if row["finding"] == "query"]
    assert len(queries) == 15
    assert all(row["image"] == f"test/{row['label']}/{row['image'][-5:]}" for row in queries)
    assert {row["label"] for row in queries} == {"red", STRANGE, "blue"}
    assert "threshold of false-match rate 0.1" in values


def test_data_without_files_has_numbers_as_names(tmp_path):
    """Vectors have no pictures, which is a warning, and several sets have a page each."""
    module = PointsModule(test=(2, 3))
    trainer = make_trainer(RetrievalEvaluation((1,)), RetrievalReport(tmp_path / "new" / "a.html"))
    with pytest.warns(UserWarning, match=r"^RetrievalReport: .*a-set=\d\.html"):
        trainer.test(module, verbose=False)
    names = {f"a-set={number}.{suffix}" for number in range(2) for suffix in ("csv", "html")}
    assert {path.name for path in (tmp_path / "new").iterdir()} == names
    rows = rows_of(tmp_path / "new" / "a-set=0.csv")
    queries = [row for row in rows if row["finding"] == "query"]
    assert all(re.fullmatch(r"image \d+", row["image"]) for row in queries)
    assert all(int(row["image"].split()[1]) // 4 == int(row["label"]) for row in queries)


def run_on_each(rank, world_size, folder):
    settings = {"devices": world_size, "strategy": "ddp"} if world_size > 1 else {}
    test_of(folder / "images", RetrievalReport(folder / str(world_size) / "report.html"), **settings)


def test_two_processes_write_what_one_writes(tmp_path, run_processes):
    write_images(tmp_path / "images")
    run_on_each(0, 1, tmp_path)
    run_processes(run_on_each, 2, tmp_path, backend=None)
    for name in ("report.html", "report.csv"):
        assert (tmp_path / "2" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()


@pytest.mark.filterwarnings("ignore:RetrievalMetrics. none of the 4 queries:UserWarning")
@pytest.mark.filterwarnings("ignore:Your `test_dataloader`'s sampler has shuffling enabled:UserWarning")
def test_sets_of_which_there_is_no_report_are_skipped_with_a_warning(tmp_path):
    tags = []
    for number in range(12):
        entries = {"images": torch.randn(6), "labels": torch.tensor(0), "ids": torch.tensor(number)}
        tags.append({**entries, "tags": torch.tensor([number // 3, 9])})
    alone = TensorDataset(torch.randn(4, 6), torch.arange(4))
    module_with_tags = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss(), relevance=SharedTags())
    shuffled = DataLoader(labelled_points(3), batch_size=5, shuffle=True)
    for module, loader, reason in (
        (module_with_tags, DataLoader(tags, batch_size=5), "SharedTags.* has no classes"),
        (PointsModule(), DataLoader(alone, batch_size=2), "no query has a positive"),
        (PointsModule(), shuffled, "its batches have no ids"),
    ):
        trainer = make_trainer(RetrievalEvaluation((1,)), RetrievalReport(), default_root_dir=tmp_path)
        with pytest.warns(UserWarning, match=rf"^RetrievalReport: .*{reason}"):
            trainer.test(module, loader, verbose=False)
    assert not list(tmp_path.rglob("report*"))


def test_a_file_of_the_user_is_not_replaced(tmp_path):
    (tmp_path / "photos.csv").write_text("image,label\n")
    trainer = make_trainer(RetrievalEvaluation((1,)), RetrievalReport(tmp_path / "photos.html"))
    with pytest.raises(ValueError, match=r"^RetrievalReport: `output`"):
        trainer.test(PointsModule(), verbose=False)
    assert (tmp_path / "photos.csv").read_text() == "image,label\n"


TABLE = {
    "RetrievalReport": [
        (lambda: RetrievalReport("a.txt"), InvalidValue, "output"),
        (lambda: RetrievalReport(false_match_rate=1.5), InvalidValue, "false_match_rate"),
    ]
}
test_invalid_arguments_raise = refusal_test(TABLE)
