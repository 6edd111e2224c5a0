"""`report`: what its page and its table show of images on disk, and planted errors."""

import csv
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from lightning_retrieval import Embedder, LogRankLoss, RetrievalMetrics, RetrievalModule
from lightning_retrieval.datamodules.glyphs.drawing import load_glyph_images
from lightning_retrieval.datamodules.glyphs.glyphs import Glyphs
from lightning_retrieval.search.commands.embed import embed_images
from lightning_retrieval.search.commands.report import report_images
from tests.browser import Browser
from tests.lightning_retrieval.search.commands.glyph_commands import command, embeddings_in, error_of
from tests.lightning_retrieval.search.commands.test_search import Page
from tests.quiet_trainer import quiet_trainer

SCRIPT, FORMULA = "<script>alert('&\"')<\\script>", "=cmd()"
# Equal batches round alike; otherwise rounding decides whether an image or its copy comes first.
BATCH_SIZE = 8


def glyphs_of(classes, of_class):
    """Images of glyphs, in lists of the same class."""
    drawn = load_glyph_images()
    labels, images = np.asarray(drawn.labels), np.asarray(drawn.images)
    unique, counts = np.unique(labels, return_counts=True)
    chosen = np.random.default_rng(0).permutation(unique[counts >= of_class])[:classes]
    return [images[np.flatnonzero(labels == label)[:of_class]] for label in chosen]


def write(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_classes(folder, classes, of_class):
    """A folder for each class, with images 0.png, 1.png, ..."""
    for number, images in enumerate(glyphs_of(classes, of_class)):
        for position, pixels in enumerate(images):
            write(folder / str(number) / f"{position}.png", pixels)


def rows_of(table):
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def reporting(checkpoint, images, output, *more):
    return ["report", f"--checkpoint={checkpoint}", f"--images={images}", f"--output={output}", *more]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Class folders with names that a page must not run and a program for spreadsheets must not compute."""
    folder = tmp_path_factory.mktemp("hostile") / "images"
    names = [SCRIPT, FORMULA, "@SUM(1)", "-1+1", "plain"]
    for name, images in zip(names, glyphs_of(5, 6)):
        for number, pixels in enumerate(images):
            write(folder / name / f"{number}{name}.png", pixels)
    write(folder / "+alone" / "a.png", glyphs_of(6, 6)[5][0])
    write(folder / FORMULA / "copy.png", glyphs_of(5, 6)[0][0])  # of the class SCRIPT
    return folder


@pytest.fixture(scope="module")
def reported(hostile, glyphs):
    """The page of these images, beside which the table is."""
    output = hostile.parent / "report.html"
    report_images(glyphs[0] / "model.ckpt", hostile, output, batch_size=BATCH_SIZE, device="cpu")
    return output


@pytest.mark.hostile
def test_the_page_loads_nothing_runs_nothing_and_escapes_names(reported):
    source = reported.read_text(encoding="utf-8")
    found = Page(source)
    assert all(re.match(r"data:image/(png|jpeg);base64,|#", target) for target in found.loads)
    assert not re.findall(r"url\(|@import|https?:", source)
    assert "script" not in found.tags
    assert "img" in found.tags
    assert "default-src 'none'" in source
    assert f"{SCRIPT}/0{SCRIPT}.png" in found.alts
    assert SCRIPT in found.text


@pytest.mark.hostile
def test_no_text_of_the_table_is_a_formula(reported):
    table = reported.with_suffix(".csv")
    rows = rows_of(table)
    kinds = {row["finding"] for row in rows}
    assert {"mAP", "R@1", "class", "query", "duplicate", "confused", "no positive"} <= kinds
    texts = [value for row in rows for name, value in row.items() if "image" in name or "label" in name]
    assert not [text for text in texts if text[:1] in "=+-@" and text]
    assert {"'=cmd()", "'-1+1", "'@SUM(1)", "plain", SCRIPT} <= set(texts)
    (alone,) = [row for row in rows if row["finding"] == "no positive"]
    assert (alone["image"], alone["label"]) == ("'+alone/a.png", "'+alone")


def test_paths_are_relative_and_metrics_are_those_of_the_library(reported, hostile, glyphs, tmp_path):
    settings = {"batch_size": BATCH_SIZE, "device": "cpu"}
    embed_images(glyphs[0] / "model.ckpt", hostile, tmp_path / "e", **settings)
    paths, embeddings = embeddings_in(tmp_path / "e")
    labels = [Path(path).parent.as_posix() for path in paths]
    metrics = RetrievalMetrics((1,))
    numbers = torch.tensor([sorted(set(labels)).index(label) for label in labels])
    metrics.update(embeddings, numbers)
    rows = rows_of(reported.with_suffix(".csv"))
    values = {row["finding"]: float(row["value"]) for row in rows if row["low"]}
    expected = metrics.compute()
    assert values["mAP"] == pytest.approx(float(expected["mAP"]), abs=1e-6)
    assert values["R@1"] == pytest.approx(float(expected["R@1"]), abs=1e-6)
    images = {row["image"].removeprefix("'") for row in rows if row["finding"] in ("query", "no positive")}
    assert images == set(paths)
    unit = torch.nn.functional.normalize(embeddings, dim=1)
    nearest = dict(zip(paths, (unit @ unit.T).fill_diagonal_(-1).argmax(1).tolist()))
    for row in rows:
        if row["finding"] == "query":
            other = paths[nearest[row["image"].removeprefix("'")]]
            assert row["other_image"].removeprefix("'") == other
    (copy,) = [row for row in rows if row["finding"] == "duplicate" and float(row["value"]) > 0.9999]
    assert {copy["image"], copy["other_image"]} == {f"'{FORMULA}/copy.png", f"{SCRIPT}/0{SCRIPT}.png"}


def test_the_page_in_a_browser(reported, tmp_path):
    """It fits into the window of a phone, and all pictures are shown."""
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(reported.as_uri(), width=400)
        browser.wait_for("document.readyState === 'complete'")
        assert browser.evaluate("document.documentElement.scrollWidth") == 400
        assert browser.evaluate("[...document.images].filter((image) => !image.naturalWidth).length") == 0
        least = browser.evaluate("Math.min(...[...document.images].map((i) => i.getBoundingClientRect().width))")
        assert least >= 60
    finally:
        browser.close()


def test_a_split_named_test_is_evaluated_and_the_other_one_compared(glyphs, tmp_path, capsys):
    for number, images in enumerate(glyphs_of(4, 6)):
        for position, pixels in enumerate(images):
            split = "test" if number < 2 else "train"
            write(tmp_path / "images" / split / f"class{number}" / f"{position}.png", pixels)
    write(tmp_path / "images" / "train" / "class0" / "again.png", glyphs_of(1, 6)[0][2])
    args = reporting(glyphs[0] / "model.ckpt", tmp_path / "images", tmp_path / "a.html", "--false_match_rate=0.2")
    assert command(capsys, *args)[0] == 0
    rows = rows_of(tmp_path / "a.csv")
    assert sum(row["finding"] == "query" for row in rows) == 12
    assert {row["label"] for row in rows if row["finding"] == "class"} == {"class0", "class1"}
    assert any(row["finding"] == "threshold of false-match rate 0.2" for row in rows)
    copies = [row for row in rows if row["finding"] == "duplicate" and float(row["value"]) > 0.9999]
    pairs = {frozenset((row["image"], row["other_image"])) for row in copies}
    assert frozenset(("test/class0/2.png", "train/class0/again.png")) in pairs
    (of_pair,) = [row for row in copies if "train/class0/again.png" in (row["image"], row["other_image"])]
    assert {of_pair["split"], of_pair["other_split"]} == {"test", "train"}


def test_a_folder_val_beside_train_is_no_class(glyphs, tmp_path, capsys):
    """Each class would be two, one in each folder."""
    for split in ("train", "val"):
        write_classes(tmp_path / "images" / split, 2, 1)
    args = reporting(glyphs[0] / "model.ckpt", tmp_path / "images", tmp_path / "a.html")
    assert command(capsys, *args)[0] == 2
    write_classes(tmp_path / "images" / "test", 2, 2)  # beside a test set, val is a split
    assert command(capsys, *args)[0] == 0


def test_a_table_says_labels_roles_splits_and_boxes(glyphs, tmp_path, capsys):
    lines = ["image,label,split,role,box"]
    for number, images in enumerate(glyphs_of(3, 6)):
        for position, pixels in enumerate(images):
            write(tmp_path / "images" / f"{number}-{position}.png", np.pad(pixels, 8))
            role = "query" if position < 2 else "gallery"
            lines.append(f"{number}-{position}.png,name {number},test,{role},8 8 40 40")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    args = reporting(glyphs[0] / "model.ckpt", tmp_path / "list.csv", tmp_path / "b.html")
    code, _, err = command(capsys, *args, f"--root={tmp_path / 'images'}")
    assert code == 0, err
    rows = rows_of(tmp_path / "b.csv")
    assert sorted(row["image"] for row in rows if row["finding"] == "query") == [
        f"{number}-{position}.png" for number in range(3) for position in range(2)
    ]
    assert {row["label"] for row in rows if row["finding"] == "class"} == {"name 0", "name 1", "name 2"}


def test_unreadable_images_are_named_and_left_out(glyphs, tmp_path, capsys):
    images = tmp_path / "images"
    write_classes(images, 3, 6)
    (images / "0" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    code, _, err = command(capsys, *reporting(glyphs[0] / "model.ckpt", images, tmp_path / "a.html"))
    assert code == 1
    assert "0/broken.png" in err
    assert sum(row["finding"] == "query" for row in rows_of(tmp_path / "a.csv")) == 18


@pytest.mark.posix
@pytest.mark.hostile
def test_a_link_out_of_the_folder_is_not_shown(glyphs, tmp_path, capsys):
    images = tmp_path / "images"
    write_classes(images, 2, 6)
    write(tmp_path / "private.png", glyphs_of(3, 6)[2][0])
    (images / "0" / "link.png").symlink_to(tmp_path / "private.png")
    code, _, err = command(capsys, *reporting(glyphs[0] / "model.ckpt", images, tmp_path / "a.html"))
    assert (code, "0/link.png" in err) == (0, True)
    found = Page((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert not [alt for alt in found.alts if "link.png" in alt]
    assert [alt for alt in found.alts if "0/1.png" in alt]


def test_only_an_earlier_page_and_its_table_are_replaced(glyphs, hostile, tmp_path, capsys):
    args = reporting(glyphs[0] / "model.ckpt", hostile, tmp_path / "a.html")
    (tmp_path / "a.html").touch()  # an empty file, as a program makes to reserve a name
    assert command(capsys, *args)[0] == 0
    files = (tmp_path / "a.html", tmp_path / "a.csv")
    first = [file.read_bytes() for file in files]
    assert command(capsys, *args)[0] == 0  # its own page and table
    assert [file.read_bytes() for file in files] == first
    for file, content in zip(files, (b"<!DOCTYPE html><title>Report: mine</title>", b"image,label\na.png,1\n")):
        file.write_bytes(content)
        assert "`--output`" in error_of(capsys, *args)
        assert file.read_bytes() == content
        file.unlink()


def test_a_report_needs_a_positive_among_the_images_that_can_be_read(glyphs, tmp_path, capsys):
    """Otherwise there is a report; a query that is in the gallery too is not its own positive."""
    lines = ["image,label,role,camera"]
    for number, images in enumerate(glyphs_of(2, 6)):
        write(tmp_path / f"{number}.png", images[0])
        write(tmp_path / f"{number}-other.png", images[1])
        lines += [f"{number}.png,{number},both,0", f"{number}-other.png,{number},gallery,1"]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    args = reporting(glyphs[0] / "model.ckpt", tmp_path / "list.csv", tmp_path / "a.html")
    assert command(capsys, *args)[0] == 0
    for number in range(2):
        (tmp_path / f"{number}-other.png").write_bytes(b"")
    (tmp_path / "a.html").unlink()
    error_of(capsys, *args)
    assert not (tmp_path / "a.html").exists()


WRONG = 20


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A small model, and glyphs of 60 classes: 20 are in a wrong folder, and 20 are also in another folder."""
    folder = tmp_path_factory.mktemp("planted")
    pl.seed_everything(0)
    settings = {"optimizer": partial(torch.optim.AdamW, lr=0.006)}
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=64), LogRankLoss(), **settings)
    trainer = quiet_trainer(max_epochs=2, limit_val_batches=0)
    trainer.fit(module, Glyphs(classes_per_batch=96, samples_per_class=4))
    trainer.save_checkpoint(folder / "model.ckpt", weights_only=True)
    classes = glyphs_of(60, 12)
    places = [(label, position) for label in range(60) for position in range(12)]
    random = np.random.default_rng(0)
    chosen = random.permutation(len(places))[: 2 * WRONG].tolist()
    wrong, copies = set(), set()
    for number, (label, position) in enumerate(places):
        other = (label + 1 + int(random.integers(58))) % 60
        path = f"{label}/{label}-{position}.png"
        if number in chosen[:WRONG]:
            path = f"{other}/{label}-{position}.png"
            wrong.add(path)
        if number in chosen[WRONG:]:
            copies.add((path, f"{other}/copy-{label}-{position}.png"))
            write(folder / "images" / f"{other}/copy-{label}-{position}.png", classes[label][position])
        write(folder / "images" / path, classes[label][position])
    return folder, wrong, copies


@pytest.mark.slow
def test_planted_labels_and_duplicates_are_found(planted, capsys):
    """A copy in another folder has a wrong label, too."""
    folder, wrong, copies = planted
    assert command(capsys, *reporting(folder / "model.ckpt", folder / "images", folder / "a.html"))[0] == 0
    rows = rows_of(folder / "a.csv")
    suspects = [row for row in rows if row["finding"] == "mislabelled"]
    all_wrong = wrong | {copy for _, copy in copies}
    found = [row["image"] for row in suspects]
    assert len(wrong.intersection(found)) >= 0.85 * WRONG
    assert len(all_wrong.intersection(found)) >= 0.75 * len(found)
    right = [
        row["image"].split("/")[1].removeprefix("copy-").split("-")[0] == row["other_label"]
        for row in suspects
        if row["image"] in all_wrong
    ]
    assert sum(right) >= 0.9 * len(right)
    pairs = [frozenset((row["image"], row["other_image"])) for row in rows if row["finding"] == "duplicate"]
    planted_pairs = set(map(frozenset, copies))
    assert len(planted_pairs.intersection(pairs)) >= 0.95 * WRONG
    assert len(planted_pairs.intersection(pairs)) >= 0.5 * len(pairs)
    assert len(planted_pairs.intersection(pairs[:WRONG])) >= 0.85 * WRONG
