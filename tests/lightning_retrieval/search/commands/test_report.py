"""`report`: what its page and its table show of images on disk, in a browser too, planted errors, and bad input."""

import csv
import errno
import html
import os
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
from lightning_retrieval.search.commands.embedding import ImageEmbedder, list_images
from tests.browser import Browser
from tests.lightning_retrieval.search.commands.glyph_commands import command, error_of
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
    from lightning_retrieval.search.commands.report import report_images

    output = hostile.parent / "report.html"
    report_images(glyphs[0] / "model.ckpt", hostile, output, batch_size=BATCH_SIZE, device="cpu")
    return output


@pytest.mark.hostile
def test_the_page_loads_nothing_runs_nothing_and_escapes_names(reported):
    source = reported.read_text(encoding="utf-8")
    found = Page(source)
    assert all(re.match(r"data:image/(png|jpeg);base64,|#s\d$", target) for target in found.loads)
    assert not re.findall(r"url\(|@import|https?:", source)
    assert "script" not in found.tags
    assert {"img", "svg", "table"} <= set(found.tags)
    assert re.search(r"default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri", source)
    assert f"{SCRIPT}/0{SCRIPT}.png" in found.alts
    assert SCRIPT in found.text
    assert html.escape(SCRIPT) in source
    for heading in ("mAP", "95 % interval", "Confused classes", "Near-duplicates", "Worst queries", "No positive"):
        assert heading in found.text


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
    assert alone["reason"] == "there is no other image of its label"
    # All texts are in quotes, because some programs divide fields at semicolons.
    for line in table.read_text().splitlines():
        assert re.fullmatch(r'("([^"]|"")*"|-?[\d.e-]+)(,("([^"]|"")*"|-?[\d.e-]+))*', line)


def test_paths_are_relative_and_metrics_are_those_of_the_library(reported, hostile, glyphs):
    embedder = ImageEmbedder.load(
        glyphs[0] / "model.ckpt", transform=None, batch_size=BATCH_SIZE, num_workers=0, device="cpu"
    )
    listed = list_images(hostile)
    labels = [Path(path).parent.as_posix() for path in listed.paths]
    metrics = RetrievalMetrics((1,))
    numbers = torch.tensor([sorted(set(labels)).index(label) for label in labels])
    metrics.update(embedder.embed_all(listed).embeddings[:], numbers)
    rows = rows_of(reported.with_suffix(".csv"))
    values = {row["finding"]: float(row["value"]) for row in rows if row["low"]}
    expected = metrics.compute()
    assert values["mAP"] == pytest.approx(float(expected["mAP"]), abs=1e-6)
    assert values["R@1"] == pytest.approx(float(expected["R@1"]), abs=1e-6)
    images = {row["image"].removeprefix("'") for row in rows if row["finding"] in ("query", "no positive")}
    assert images == set(listed.paths)
    (copy,) = [row for row in rows if row["finding"] == "duplicate" and float(row["value"]) > 0.9999]
    assert {copy["image"], copy["other_image"]} == {f"'{FORMULA}/copy.png", f"{SCRIPT}/0{SCRIPT}.png"}


@pytest.mark.parametrize("width", [1300, 400])
def test_the_page_in_a_browser(reported, tmp_path, width):
    """It fits into the window, and all pictures are shown."""
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(reported.as_uri(), width=width)
        browser.wait_for("document.readyState === 'complete'")
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        assert browser.evaluate("[...document.images].filter((image) => !image.naturalWidth).length") == 0
        outside = f"[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > {width})"
        assert browser.evaluate(f"{outside}.length") == 0
        assert browser.evaluate("document.querySelectorAll('section').length") == 8
        least = browser.evaluate("Math.min(...[...document.images].map((i) => i.getBoundingClientRect().width))")
        assert least >= 60
        browser.picture(tmp_path / "page.png")
    finally:
        browser.close()
    with Image.open(tmp_path / "page.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 50


def test_a_split_named_test_is_evaluated_and_the_other_one_compared(glyphs, tmp_path, capsys):
    for number, images in enumerate(glyphs_of(4, 6)):
        for position, pixels in enumerate(images):
            split = "test" if number < 2 else "train"
            write(tmp_path / "images" / split / f"class{number}" / f"{position}.png", pixels)
    write(tmp_path / "images" / "train" / "class0" / "again.png", glyphs_of(1, 6)[0][2])
    code, out, err = command(
        capsys, *reporting(glyphs[0] / "model.ckpt", tmp_path / "images", tmp_path / "a.html", "--false_match_rate=0.2")
    )
    assert code == 0, err
    assert "a.html: the page; " in out
    printed = re.findall(r"^(\S+) +\d\.\d{4} \(", out, re.MULTILINE)
    assert printed[:2] == ["mAP", "R@1"]
    assert "mAP@R" not in printed
    rows = rows_of(tmp_path / "a.csv")
    assert sum(row["finding"] == "query" for row in rows) == 12
    assert {row["label"] for row in rows if row["finding"] == "class"} == {"class0", "class1"}
    assert any(row["finding"] == "threshold of false-match rate 0.2" for row in rows)
    copies = [row for row in rows if row["finding"] == "duplicate" and float(row["value"]) > 0.9999]
    pairs = {frozenset((row["image"], row["other_image"])) for row in copies}
    assert frozenset(("test/class0/2.png", "train/class0/again.png")) in pairs
    (of_pair,) = [row for row in copies if "train/class0/again.png" in (row["image"], row["other_image"])]
    assert {of_pair["split"], of_pair["other_split"]} == {"test", "train"}


@pytest.mark.refusal
def test_a_folder_val_beside_train_is_no_class(glyphs, tmp_path, capsys):
    """Each class would be two, one in each folder."""
    for split in ("train", "val"):
        for number, images in enumerate(glyphs_of(2, 2)):
            write(tmp_path / "images" / split / f"class{number}" / "0.png", images[0])
    args = reporting(glyphs[0] / "model.ckpt", tmp_path / "images", tmp_path / "a.html")
    code, _, err = command(capsys, *args)
    assert (code, f"or pass --images {tmp_path / 'images' / 'train'}." in err) == (2, True)
    for number, images in enumerate(glyphs_of(2, 2)):  # beside a test set, val is a split
        for position, pixels in enumerate(images):
            write(tmp_path / "images" / "test" / f"other{number}" / f"{position}.png", pixels)
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
    assert "12 images in the gallery" in (tmp_path / "b.html").read_text(encoding="utf-8")


def test_a_table_with_other_names_and_another_separator(glyphs, tmp_path, capsys):
    """The error about such a table names the command and the options that read it, which do."""
    lines = ["path;kind"]
    for number, images in enumerate(glyphs_of(2, 6)):
        for position, pixels in enumerate(images):
            write(tmp_path / f"{number}-{position}.png", pixels)
            lines.append(f"{number}-{position}.png;kind {number}")
    table = tmp_path / "list.csv"
    table.write_text("\n".join(lines))
    args = reporting(glyphs[0] / "model.ckpt", table, tmp_path / "a.html")
    error = error_of(capsys, *args)
    assert error.startswith(f"report: line 1 of {table} must name the columns image and label")
    assert "; give `--delimiter` ';'." in error
    args.append("--delimiter=;")
    assert "; name columns that have other names with `--columns`, such as" in error_of(capsys, *args)
    code, _, err = command(capsys, *args, "--columns=image=path,label=kind")
    assert code == 0, err
    assert {row["label"] for row in rows_of(tmp_path / "a.csv") if row["finding"] == "class"} == {"kind 0", "kind 1"}


def test_unreadable_images_are_named_and_left_out(glyphs, hostile, tmp_path, capsys):
    images = tmp_path / "images"
    for number, pictures in enumerate(glyphs_of(3, 6)):
        for position, pixels in enumerate(pictures):
            write(images / str(number) / f"{position}.png", pixels)
    (images / "0" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    code, out, err = command(capsys, *reporting(glyphs[0] / "model.ckpt", images, tmp_path / "a.html"))
    assert code == 1
    assert "report: cannot read the image 0/broken.png (" in err
    assert "a.csv: the table" in out
    assert sum(row["finding"] == "query" for row in rows_of(tmp_path / "a.csv")) == 18


@pytest.mark.posix
@pytest.mark.hostile
def test_a_link_out_of_the_folder_is_not_shown(glyphs, tmp_path, capsys):
    images = tmp_path / "images"
    for number, pictures in enumerate(glyphs_of(2, 6)):
        for position, pixels in enumerate(pictures):
            write(images / str(number) / f"{position}.png", pixels)
    write(tmp_path / "private.png", glyphs_of(3, 6)[2][0])
    (images / "0" / "link.png").symlink_to(tmp_path / "private.png")
    code, _, err = command(capsys, *reporting(glyphs[0] / "model.ckpt", images, tmp_path / "a.html"))
    assert code == 0
    assert err.endswith("report: 1 pictures cannot be shown, the first: 0/link.png (it is outside of the folder).\n")
    assert "not readable now" in (tmp_path / "a.html").read_text(encoding="utf-8")


@pytest.mark.refusal
@pytest.mark.hostile
def test_invalid_arguments_are_reported_in_one_sentence(glyphs, hostile, tmp_path, capsys):
    (tmp_path / "table.csv").write_text("image\na.png\n")
    (tmp_path / "empty.csv").write_text("image,label\na.png,\n")
    (tmp_path / "photos.csv").write_text("image,label\na.png,1\n")
    for name in ("a/1.png", "b/1.png", "one/c/1.png", "one/c/2.png", "flat/1.png", "flat/c/1.png"):
        write(tmp_path / name, np.zeros((8, 8), np.uint8))
    model = glyphs[0] / "model.ckpt"
    for images, output, more, message in (
        (hostile, "report.txt", [], "report: `--output` must end with .html; the table is written beside it"),
        (hostile, "gone/a.html", [], "report: `--output` must be a file in an existing folder"),
        (
            hostile,
            "photos.html",
            [],
            f"another name, because the table of the report would replace a file, got {tmp_path}",
        ),
        (hostile, "a.html", ["--false_match_rate=2"], "report: `--false_match_rate` must be from 0 to 1, got 2"),
        (tmp_path / "none", "a.html", [], "report: `--images` must be a folder of images"),
        (tmp_path / "table.csv", "a.html", [], "label"),
        (tmp_path / "empty.csv", "a.html", [], "`label` must not be empty in any row"),
        (tmp_path / "one", "a.html", [], "report: `--images` must be of several classes, in class folders"),
        (tmp_path / "flat", "a.html", [], "must have each image in the folder of its class"),
    ):
        error = error_of(capsys, *reporting(model, images, tmp_path / output, *more))
        assert message in error
        assert not (tmp_path / "a.html").exists()
    assert (tmp_path / "photos.csv").read_text() == "image,label\na.png,1\n"
    message = error_of(capsys, *reporting(tmp_path / "no.ckpt", hostile, tmp_path / "a.html"))
    assert message.startswith("report: `--checkpoint`")


def test_only_an_earlier_page_and_its_table_are_replaced(glyphs, hostile, tmp_path, capsys):
    args = reporting(glyphs[0] / "model.ckpt", hostile, tmp_path / "a.html")
    (tmp_path / "a.html").touch()  # an empty file, as a program makes to reserve a name
    assert command(capsys, *args)[0] == 0
    first, table = (tmp_path / "a.html").read_bytes(), (tmp_path / "a.csv").read_bytes()
    columns_before = ("finding", "value", "low", "high", "count", "image", "label", "split", "other_image")
    (tmp_path / "a.csv").write_text(",".join(map('"{}"'.format, columns_before)) + "\n")  # without the newest columns
    assert command(capsys, *args)[0] == 0  # its own page and table
    assert ((tmp_path / "a.html").read_bytes(), (tmp_path / "a.csv").read_bytes()) == (first, table)
    for content in ("<!DOCTYPE html><title>Report: mine</title>", "notes"):
        (tmp_path / "a.html").write_text(content)
        message = error_of(capsys, *args)
        rule = "report: `--output` must be a new file, or a page that `report` wrote"
        assert message == f"{rule}, got {tmp_path / 'a.html'}, which is another file; give another path.\n"
        assert (tmp_path / "a.html").read_text() == content


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        ("image,tags", ["1.png,a", "2.png,b"], "report: `--images` must be a table with the column label"),
        (
            "image,label,split",
            ["1.png,a,Test", "2.png,a,Test", "3.png,b,Train"],
            "`split` must be train, val or test in",
        ),
        ("image,label", ["1.png,1", "2.png,1", "3.png,1.0", "4.png,2"], "`label` must not be one number in two forms"),
        ("image,label", ["1.png,a", "2.png,a", "3.png,nan"], "`label` must not be the text of a missing value"),
        ("image,label", ["1.png,a", "2.png,b"], "must have a query with another image of its class"),
        ("image,label,role", [f"{i}.png,{i // 2},query" for i in range(4)], "must have a query with another image"),
        ("image,label,role", [f"{i}.png,{i // 2},gallery" for i in range(4)], "must have a query with another image"),
        (
            "image,label,camera",
            [f"{i}.png,{i // 2},{i // 2}" for i in range(4)],
            "without those of its class and camera",
        ),
    ],
)
def test_a_table_of_which_nothing_can_be_reported_is_refused(glyphs, tmp_path, capsys, columns, rows, message):
    """Before an image is read: there is none."""
    table = tmp_path / "list.csv"
    table.write_text("\n".join([columns, *rows]) + "\n")
    assert message in error_of(capsys, *reporting(glyphs[0] / "model.ckpt", table, tmp_path / "a.html"))


@pytest.mark.refusal
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
    assert "must have a query with another image of its class" in error_of(capsys, *args)
    assert not (tmp_path / "a.html").exists()


def test_files_that_cannot_be_written_leave_the_old_ones(glyphs, hostile, tmp_path, capsys, monkeypatch):
    def full_disk(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    args = reporting(glyphs[0] / "model.ckpt", hostile, tmp_path / "a.html")
    assert command(capsys, *args)[0] == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"a.html", "a.csv"}
    monkeypatch.setattr(os, "replace", full_disk)
    code, _, err = command(capsys, *args)
    assert code == 2
    assert "cannot be written (No space left on device)" in err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


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
    print(len(found), len(wrong.intersection(found)), len(all_wrong.intersection(found)), len(pairs))
