"""What `pip install` installs: one package with its data files and its type marker, a licence, a command."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.source_tree import PACKAGES, REPOSITORY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """{name: content} of the files of the wheel, built from a copy, which leaves no files."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    # With the installed setuptools, so that nothing is downloaded.
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir", folder / "built"]
    done = subprocess.run([*command, source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (folder / "built").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def test_wheel_holds_every_file_of_the_three_packages_and_the_licence(wheel):
    """The modules, and the files that are not Python, which setup.cfg names: tables, pages, the type marker."""
    expected = set()
    for package, name in PACKAGES.items():
        folder = name.replace(".", "/")
        files = [path for path in (REPOSITORY / package).rglob("*.*") if "__pycache__" not in path.parts]
        expected.update(f"{folder}/{path.relative_to(REPOSITORY / package).as_posix()}" for path in files)
    assert {Path(name).suffix for name in expected} == {".py", ".typed", ".csv", ".html", ".css", ".yaml"}
    assert {name for name in wheel if ".dist-info/" not in name} == expected
    assert [name for name in wheel if name.endswith("/LICENSE")]
    assert wheel["lightning_retrieval/cli/glyphs.yaml"] == (REPOSITORY / "examples/glyphs.yaml").read_bytes()


def test_wheel_installs_the_command(wheel):
    (file,) = (name for name in wheel if name.endswith("entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(wheel[file].decode())
    assert dict(parser["console_scripts"]) == {"lightning-retrieval": "lightning_retrieval.cli.main:main"}


def test_command_is_installed_and_prints_its_help():
    command = Path(sys.executable).with_name("lightning-retrieval")
    if not command.exists():
        pytest.skip("lightning-retrieval is not installed next to this Python")
    done = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "fit" in done.stdout
