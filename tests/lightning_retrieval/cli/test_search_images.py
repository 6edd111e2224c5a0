"""The checkpoint of a search has to be the one of the index."""

import shutil

import pytest

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from tests.datamodules.trees_more import QUIET
from tests.lightning_retrieval.cli.glyph_commands import command, indexing, paths_of, save_checkpoint

pytestmark = [pytest.mark.filterwarnings(ignored) for ignored in QUIET]


@pytest.mark.refusal
def test_search_needs_the_checkpoint_of_the_index(glyphs, colour, indexed, tmp_path, capsys):
    shutil.copytree(indexed, tmp_path, dirs_exist_ok=True)
    query = indexed / "images" / paths_of(indexed / "images")[3]
    command(capsys, *indexing(tmp_path, tmp_path / "index"))
    moved = (tmp_path / "model.ckpt").rename(tmp_path / "moved.ckpt")
    args = ["search", query, "--index", tmp_path / "index", "-k1"]
    code, out, err = command(capsys, *args)
    assert (code, out) == (2, "")
    assert err == (
        "search: `--checkpoint` must be given, because the checkpoint that the index was made with is no longer at "
        f"{tmp_path / 'model.ckpt'}.\n"
    )
    assert command(capsys, *args, "--checkpoint", moved)[0] == 0
    other = save_checkpoint(
        tmp_path / "other.ckpt", RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss())
    )
    code, _, err = command(capsys, *args, "--checkpoint", other)
    assert code == 2
    assert "search: `--checkpoint` must be the one that the index was made with" in err
    assert f"got {other}, which is another" in err
