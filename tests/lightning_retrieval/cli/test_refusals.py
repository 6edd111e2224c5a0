"""Invalid calls of the program and of its commands that train nothing and search nothing."""

from pathlib import Path

import pytest
from PIL import Image

from lightning_retrieval.cli.main import main
from lightning_retrieval.invalid import InvalidType
from tests.lightning_retrieval.search.commands.glyph_commands import run
from tests.refusals import refusal_test


@pytest.fixture
def photos(tmp_path):
    """A folder of two classes in deeper folders, beside an image and an empty folder."""
    for name in ("photos/a/x/1.png", "photos/b/y/1.png", "file"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name, "png")
    (tmp_path / "empty").mkdir()
    return tmp_path / "photos"


def checked(root, *options):
    return ["--data=ImageFolder", f"--root={root}", *options]


def example(*options, existing):
    Path(existing).touch()
    return ["glyphs", *options]


TABLE = {
    "main": [(lambda: main("fit --config a.yaml"), InvalidType, "args")],
    "check": [
        (lambda: ["--root=x"], SystemExit, "--data", ""),
        (lambda: ["--data=Nothing", "--root=x"], SystemExit, "--data", "Nothing"),
        (lambda: checked("gone"), SystemExit, "--root", "gone"),
        (lambda: checked(".", "--num_workers=a"), SystemExit, "num_workers", "a"),
        (lambda: checked(".", "--colour=a"), SystemExit, "--colour", ""),
        (lambda photos: checked(photos.parent / "file"), SystemExit, "--root", "file"),
        (lambda photos: checked(photos.parent / "empty"), SystemExit, "--root", "empty"),
        (lambda photos: checked(photos), SystemExit, "--classes", ""),
        (lambda photos: checked(photos, "--test_fraction=2"), SystemExit, "--test_fraction", "2"),
    ],
    "example": [
        (lambda: ["--output=a.yaml"], SystemExit, "name", ""),
        (lambda: ["birds"], SystemExit, "name", "birds"),
        (lambda: example(existing="glyphs.yaml"), SystemExit, "--output", "glyphs.yaml"),
        (lambda photos: ["glyphs", f"--output={photos}"], SystemExit, "--output", "photos"),
        (lambda: ["glyphs", "--output=no/a.yaml"], SystemExit, "no/a.yaml"),
    ],
    "completion": [(lambda: ["fish"], SystemExit, "shell", "fish")],
    "env": [(lambda: ["x"], SystemExit, "x")],
    "shrink": [
        (lambda: ["no", "small"], SystemExit, "IMAGES", "no"),
        (lambda photos: [photos.parent / "empty", "small"], SystemExit, "IMAGES", "empty"),
        (lambda photos: [photos, photos / "small"], SystemExit, "OUTPUT", "photos"),
        (lambda photos: [photos, "small", "--size=0"], SystemExit, "--size", "0"),
    ],
}
test_invalid_arguments_raise = refusal_test(TABLE)


@pytest.mark.refusal
@pytest.mark.parametrize("typed", ["", "fot", "fit --config=no.yaml", "fit --config=", "test --config=no.yaml"])
def test_a_missing_command_or_config_is_named_in_one_line(typed, capsys):
    code, out, err = run(capsys, *typed.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("lightning-retrieval")
    assert typed.rpartition(" ")[2].removeprefix("--config=") in err
