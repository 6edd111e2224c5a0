"""`lightning-retrieval embed`: what it prints, and its exit code after Ctrl-C."""

import sys

import pytest

from lightning_retrieval.cli import embed as embed_images
from tests.lightning_retrieval.cli.glyph_commands import command


def arguments(folder, output):
    return ["embed", f"--checkpoint={folder / 'model.ckpt'}", f"--images={folder / 'images'}", f"--output={output}"]


def test_the_summary_counts_embeddings_and_files(glyphs, tmp_path, capsys):
    pytest.importorskip("pyarrow")
    args = [*arguments(glyphs[0], tmp_path / "e"), "--shard_size=30"]
    code, out, err = command(capsys, *args)
    assert (code, out, err) == (0, f"{tmp_path / 'e'}: 40 embeddings of 24 dimensions in 2 parquet files\n", "")
    (tmp_path / "e" / "part-00001.parquet").unlink()
    code, out, err = command(capsys, *args)
    assert (code, err) == (0, "")
    assert out.endswith(" in 2 parquet files, 1 of which were there\n")


def test_ctrl_c_says_how_to_continue(glyphs, tmp_path, capsys, monkeypatch):
    def interrupt(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(embed_images, "embed_images", interrupt)
    code, out, err = command(capsys, *arguments(glyphs[0], tmp_path / "e"))
    assert (code, out, err) == (130, "", f"embed: interrupted; the same command continues in {tmp_path / 'e'}.\n")


def test_a_missing_extra_is_named(glyphs, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    code, out, err = command(capsys, *arguments(glyphs[0], tmp_path / "e"))
    assert (code, out) == (2, "")
    assert err.startswith(
        "embed: pyarrow must be installed for Parquet files: pip install 'lightning-retrieval[parquet]'"
    )
