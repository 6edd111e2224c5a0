"""What `pip install` installs: one package with its data file and its type marker, a licence, a command."""

import configparser
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
SOURCES = (
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "lightning_retrieval",
    "callbacks",
    "datamodules",
)


def build(source, out, *kinds):
    """Build with the installed setuptools, so that nothing is downloaded."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir", out, *kinds]
    done = subprocess.run([*command, source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel of the checkout, the sdist, and the wheel of the sdist; built from a copy, which leaves no files."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    build(source, folder / "wheel", "--wheel")
    shutil.rmtree(source / "build", ignore_errors=True)
    build(source, folder / "sdist")
    (wheel,) = (folder / "wheel").glob("*.whl")
    (sdist,) = (folder / "sdist").glob("*.tar.gz")
    (wheel_of_sdist,) = (folder / "sdist").glob("*.whl")
    return wheel, sdist, wheel_of_sdist


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def test_wheel_holds_one_top_level_package(built):
    tops = {name.split("/")[0] for name in contents(built[0])}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lightning_retrieval"}
    assert len(tops) == 2


def test_wheel_holds_every_module_of_the_three_packages(built):
    packages = {
        "lightning_retrieval": "lightning_retrieval",
        "callbacks": "lightning_retrieval/callbacks",
        "datamodules": "lightning_retrieval/datamodules",
    }
    expected = {
        f"{installed}/{path.relative_to(REPOSITORY / package).as_posix()}"
        for package, installed in packages.items()
        for path in (REPOSITORY / package).rglob("*.py")
    }
    assert len(expected) > 10
    assert {name for name in contents(built[0]) if name.endswith(".py")} == expected


@pytest.mark.parametrize(
    "name", ["lightning_retrieval/py.typed", "lightning_retrieval/datamodules/glyphs/glyph_classes.csv"]
)
def test_wheel_holds_the_files_that_are_not_python(built, name):
    assert name in contents(built[0])


def test_wheel_holds_the_licence(built):
    (licence,) = (name for name in contents(built[0]) if name.endswith("LICENSE"))
    assert contents(built[0])[licence] == (REPOSITORY / "LICENSE").read_bytes()


def test_wheel_installs_the_command(built):
    (file,) = (name for name in contents(built[0]) if name.endswith("entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(contents(built[0])[file].decode())
    assert dict(parser["console_scripts"]) == {"lightning-retrieval": "lightning_retrieval.cli.main:main"}


def test_wheel_of_the_sdist_holds_the_same_files(built):
    wheel, sdist, wheel_of_sdist = built
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/LICENSE") for name in archive.getnames())
    assert contents(wheel_of_sdist).keys() == contents(wheel).keys()


def test_command_is_installed_and_prints_its_help():
    command = Path(sys.executable).with_name("lightning-retrieval")
    if not command.exists():
        pytest.skip("lightning-retrieval is not installed next to this Python")
    done = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "fit" in done.stdout
    assert "Average Precision" in done.stdout
