"""The command `shrink`: which images become smaller, what they keep, and what it does to files that are there."""

import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image, ImageCms

from lightning_retrieval.cli.main import main
from lightning_retrieval.datamodules import ImageFolder
from lightning_retrieval.preparation.shrink import shrink_images
from tests.datamodules.pictures import write_pictures_of_all_kinds
from tests.datamodules.trees import write_image


def run(capsys, *args):
    """The exit code of the command, standard output and standard error."""
    code = 0
    try:
        main(["shrink", *map(str, args)])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def files_below(folder):
    """{path: content} of the files in a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_copies_are_smaller_upright_and_in_their_folders(tmp_path, capsys):
    photos = tmp_path / "photos"
    for name, size in {"a/wide.jpg": (400, 300), "a/b/high.PNG": (90, 700), "small.jpg": (50, 64)}.items():
        write_image(photos / name, size=size)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.effect_noise((300, 200), 60).save(photos / "phone.jpg", exif=exif)
    (photos / "notes.txt").write_text("not copied")
    before = files_below(photos)
    code, out, err = run(capsys, photos, tmp_path / "small", "--size", 64)
    assert (code, err) == (0, "")
    assert {"3", "1"} <= set(out.split())  # images with fewer pixels, and copies
    sizes = {}
    for path in ("a/wide.jpg", "a/b/high.PNG", "small.jpg", "phone.jpg"):
        with Image.open(tmp_path / "small" / path) as image, Image.open(photos / path) as original:
            assert image.format == original.format
            assert image.getexif().get(0x0112) is None
            sizes[path] = image.size
    assert sizes == {"a/wide.jpg": (85, 64), "a/b/high.PNG": (64, 498), "small.jpg": (50, 64), "phone.jpg": (64, 96)}
    assert (tmp_path / "small/small.jpg").read_bytes() == before["small.jpg"]
    assert files_below(photos) == before
    assert not (tmp_path / "small/notes.txt").exists()


def test_pixels_are_those_of_the_resized_image(tmp_path):
    write_image(tmp_path / "photos/1.png", size=(300, 200))
    write_image(tmp_path / "photos/2.jpg", size=(1200, 800))
    shrink_images(tmp_path / "photos", tmp_path / "small", 100)
    for name, largest in (("1.png", 0), ("2.jpg", 4)):
        with Image.open(tmp_path / "photos" / name) as image:
            wanted = np.asarray(image.convert("RGB").resize((150, 100), Image.Resampling.LANCZOS)).astype(int)
        with Image.open(tmp_path / "small" / name) as image:
            assert np.abs(np.asarray(image.convert("RGB")) - wanted).mean() <= largest


@pytest.mark.parametrize(("name", "order"), [("a.png", "<"), ("a.tif", "<"), ("a.tif", ">")])
def test_values_of_16_bits_are_averaged(tmp_path, name, order):
    """In files of both orders of bytes."""
    (tmp_path / "photos").mkdir()
    ramp = np.add.outer(np.arange(40) * 900, np.arange(60) * 400)
    Image.fromarray(ramp.astype(f"{order}u2")).save(tmp_path / "photos" / name)
    shrink_images(tmp_path / "photos", tmp_path / "small", 20)
    with Image.open(tmp_path / "small" / name) as image:
        found = np.asarray(image).astype(int)
    means = ramp.reshape(20, 2, 30, 2).mean((1, 3))
    assert np.abs(found - means)[2:-2, 2:-2].max() < 100  # the filter is no mean at the edges


@pytest.mark.parametrize(
    ("orientation", "suffix"),
    [*((orientation, "jpg") for orientation in range(1, 9)), (6, "png"), (5, "tif"), (8, "webp")],
)
def test_turned_images_keep_their_shape_in_each_format(tmp_path, orientation, suffix):
    """Pillow turns TIFF files itself; a picture whose left half is bright when it is upright stays so."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = Image.new("L", (200, 300))
    upright.paste(255, (0, 0, 100, 300))
    (tmp_path / "photos").mkdir()
    photo = tmp_path / "photos" / f"1.{suffix}"
    turned = {3: 3, 6: 8, 8: 6}.get(orientation, orientation)  # the others are their own inverse
    method = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}.get(turned)
    stored = upright if method is None else upright.transpose(Image.Transpose(method))
    stored.convert("RGB").save(photo, exif=exif)
    counts, _ = shrink_images(tmp_path / "photos", tmp_path / "small", 50)
    assert counts["resized"] == 1
    with Image.open(tmp_path / "small" / photo.name) as image:
        pixels = np.asarray(image.convert("L"))
    assert pixels.shape == (75, 50)
    assert pixels[:, :20].min() > 200
    assert pixels[:, 30:].max() < 50


def test_colours_are_kept_in_all_kinds_of_pictures(tmp_path):
    """Profiles too; each copy can be read as its image can."""
    photos = tmp_path / "photos"
    photos.mkdir()
    write_pictures_of_all_kinds(photos)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for suffix in ("jpg", "png", "webp", "tif"):
        Image.new("RGB", (90, 60), (250, 120, 10)).save(photos / f"profile.{suffix}", icc_profile=profile)
    counts, skipped = shrink_images(photos, tmp_path / "small", 5)
    assert skipped == {}
    assert counts.total() == len(files_below(photos))
    small = files_below(tmp_path / "small")
    for path in files_below(photos):
        assert path in small
        with Image.open(photos / path) as original, Image.open(tmp_path / "small" / path) as image:
            assert bool(original.info.get("icc_profile")) == bool(image.info.get("icc_profile")), path
            before, after = (
                np.asarray(picture.convert("RGBA").resize((1, 1), Image.Resampling.BOX)).astype(int)
                for picture in (original, image)
            )
            if original.mode not in ("I", "F", "I;16", "I;16B"):  # Pillow clips them when it converts them
                assert np.abs(before - after).max() < 24, path


def test_a_call_that_was_stopped_is_continued_and_no_file_is_replaced(tmp_path, capsys):
    for number in range(5):
        write_image(tmp_path / f"photos/{number}.jpg", size=(200, 100), seed=number)
    (tmp_path / "small").mkdir()
    assert run(capsys, tmp_path / "photos", tmp_path / "small", "--size=50", "--workers=1")[0] == 0
    whole = files_below(tmp_path / "small")
    for name in ("1.jpg", "3.jpg"):
        (tmp_path / "small" / name).unlink()
    (tmp_path / "small/2.jpg").write_text("edited by hand")
    os.symlink("elsewhere.jpg", tmp_path / "small/1.jpg")
    code, _, _ = run(capsys, tmp_path / "photos", tmp_path / "small", "--size=50")
    assert code == 0
    assert (tmp_path / "small/2.jpg").read_text() == "edited by hand"
    assert not (tmp_path / "small/elsewhere.jpg").exists()
    assert (tmp_path / "small/3.jpg").read_bytes() == whole["3.jpg"]
    assert not list((tmp_path / "small").glob(".*.tmp"))


@pytest.mark.hostile
def test_nothing_is_copied_through_a_link_that_leads_out(tmp_path, capsys):
    """Out of the folder of the images, or out of that of the copies; links inside are followed."""
    photos, small, other = tmp_path / "photos", tmp_path / "small", tmp_path / "other"
    for path in (photos / "in/1.png", photos / "in/2.png", other / "private.png"):
        write_image(path, size=(200, 100))
    (photos / "in/linked.png").symlink_to("1.png")
    (photos / "file.png").symlink_to(other / "private.png")
    (photos / "folder").symlink_to(other)
    assert run(capsys, photos, small, "--size=50")[0] == 1
    assert sorted(files_below(small)) == [".shrunk-50", "in/1.png", "in/2.png", "in/linked.png"]
    shutil.rmtree(small / "in")
    (small / "in").symlink_to(other)
    code, _, err = run(capsys, photos, small, "--size=50")
    assert code == 1
    assert "in/1.png" in err
    assert list(files_below(other)) == ["private.png"]


@pytest.mark.parametrize("suffix", ["gif", "tif"])
def test_only_the_first_frame_of_an_animation_is_kept(tmp_path, capsys, suffix):
    photos = tmp_path / "photos"
    frames = [Image.new("RGB", (90, 80), colour) for colour in ("red", "green", "blue")]
    photos.mkdir()
    frames[0].save(photos / f"1.{suffix}", save_all=True, append_images=frames[1:])
    small = [frame.resize((9, 8)) for frame in frames]
    small[0].save(photos / f"small.{suffix}", save_all=True, append_images=small[1:])
    assert run(capsys, photos, tmp_path / "small", "--size", 40)[0] == 0
    with Image.open(tmp_path / "small" / f"1.{suffix}") as copy:
        assert not getattr(copy, "is_animated", False)
        assert np.abs(np.asarray(copy.convert("RGB"))[5, 5] - np.array([255, 0, 0])).max() < 9
    with Image.open(tmp_path / "small" / f"small.{suffix}") as copy:
        assert copy.n_frames == 3


@pytest.mark.posix
@pytest.mark.slow
def test_ctrl_c_is_one_line_that_says_how_to_continue(tmp_path):
    write_image(tmp_path / "photos/0.png", size=(2000, 2000))
    for number in range(1, 20):
        shutil.copy(tmp_path / "photos/0.png", tmp_path / f"photos/{number}.png")
    small = tmp_path / "small"
    command = [sys.executable, "-m", "lightning_retrieval.cli", "shrink", str(tmp_path / "photos"), str(small)]
    process = subprocess.Popen(
        [*command, "--workers=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell lets programs in the background ignore Ctrl-C, and they pass this on to their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while process.poll() is None and not list(small.glob("*.png")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1].startswith("shrink: interrupted")
    assert "Traceback" not in err
    assert 0 < len(list(small.glob("*.png"))) < 20


def test_images_that_cannot_be_read_are_named_and_the_others_written(tmp_path, capsys):
    for number in range(3):
        write_image(tmp_path / f"photos/{number}.png", size=(200, 100))
    content = (tmp_path / "photos/0.png").read_bytes()
    (tmp_path / "photos/0.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "photos/text.jpg").write_text("no image")
    code, _, err = run(capsys, tmp_path / "photos", tmp_path / "small", "--size=50")
    assert code == 1
    for line, name in zip(err.splitlines(), ("0.png", "text.jpg"), strict=True):
        assert name in line
    assert sorted(name for name in files_below(tmp_path / "small") if not name.startswith(".")) == ["1.png", "2.png"]


def test_a_data_module_reads_the_copies_as_the_photographs(tmp_path):
    for label in "abcd":
        for number in range(2):
            write_image(tmp_path / f"photos/{label}/{number}.jpg", size=(90, 60), seed=number)
    shrink_images(tmp_path / "photos", tmp_path / "small", 40)
    splits = [ImageFolder(tmp_path / name).splits for name in ("photos", "small")]
    assert [list(index.paths) for index in splits[0].values()] == [list(index.paths) for index in splits[1].values()]
