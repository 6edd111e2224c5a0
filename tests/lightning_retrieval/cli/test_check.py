"""`lightning-retrieval check`: counts next to the published ones, its exit codes and its error messages."""

import itertools

import pytest
from PIL import Image

from lightning_retrieval.cli.check import DATA_MODULES, data_modules
from tests.lightning_retrieval.cli.example_config import IGNORED
from tests.lightning_retrieval.cli.glyph_commands import run

pytestmark = pytest.mark.filterwarnings(*IGNORED)


def checked(capsys, *args):
    """The exit code of `lightning-retrieval check`, what it printed and what it complained of."""
    return run(capsys, "check", *args)


def test_counts_and_missing_files(tmp_path, capsys):
    for label, number in itertools.product("abcd", range(2)):
        (tmp_path / label).mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (ord(label), number, 0)).save(tmp_path / label / f"{number}.png")
    code, out, err = checked(capsys, "--data", "ImageFolder", "--root", tmp_path, "--test_fraction", 0.25)
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()[1:3]] == [["train", "6", "3"], ["test", "2", "1"]]
    assert out.splitlines()[3:] == ["note: all images have 8 x 8 pixels"]

    (tmp_path / "table.csv").write_text("image,label,split\na/0.png,a,train\nb/0.png,b,test\ngone.png,b,test\n")
    table = tmp_path / "table.csv"
    code, out, err = checked(capsys, "--data=ImageTable", "--root", tmp_path, "--table", table)
    assert (code, err) == (1, "")
    assert "missing: gone.png" in out.splitlines()

    table.unlink()
    for number in range(12):
        (tmp_path / "a" / f"text {number}.jpg").write_text("not an image")
    (tmp_path / "d" / "copy.bmp").write_bytes((tmp_path / "c" / "0.png").read_bytes())
    code, out, err = checked(capsys, "--data", "ImageFolder", "--root", tmp_path)
    assert (code, err.count("\n")) == (1, 0)
    found = [line for line in out.splitlines() if line.startswith(("unreadable", "...", "problem"))]
    assert found[0] == "unreadable: a/text 0.jpg (cannot identify image file)"
    assert found[10] == "... and 2 more are unreadable"
    assert found[11:] == ["problem: d/copy.bmp and c/0.png are the same image, in training and in evaluation"]


def test_error_suggests_the_folder_of_the_data_set(tmp_path, capsys):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "Ebay_train.txt").write_text("")
    code, out, err = checked(capsys, "--data", "StanfordOnlineProducts", "--root", tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("StanfordOnlineProducts: `root` must contain Ebay_train.txt")
    assert err.rstrip().endswith(f"pass root={tmp_path}/set.")


def test_glyphs_need_no_root(capsys):
    code, out, err = checked(capsys, "--data", "Glyphs")
    assert err == ""
    rows = [line.split() for line in out.splitlines()[:4]]
    assert rows[0] == ["split", "images", "classes", "published:", "images", "classes"]
    assert [row[0] for row in rows[1:]] == ["train", "val", "test"]
    assert (code == 0) == all(row[1:3] == row[3:] for row in rows[1:])  # as with the fonts of the table


def test_data_modules_are_known_by_name(capsys):
    code, _, err = checked(capsys, "--data", "Nothing", "--root", "x")
    assert code == 2
    assert "there is no data module 'Nothing'" in err
    assert "VehicleID" in err
    assert "DataModule" not in err  # not the classes that are made to be subclassed
    code, out, _ = checked(capsys, "--data", "InShop", "--help")
    assert code == 0
    assert "--high_res" in out


def test_help_names_the_data_modules_that_exist(capsys):
    assert list(DATA_MODULES) == sorted(data_modules())
    code, out, _ = checked(capsys, "--help")
    assert code == 0
    for name in DATA_MODULES:
        assert name in out
