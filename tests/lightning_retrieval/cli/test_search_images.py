"""The checkpoint of a search has to be the one of the index."""

import shutil

import pytest

from lightning_retrieval import Embedder, RetrievalIndex, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli.search_images import search_images
from tests.lightning_retrieval.cli.glyph_commands import command, indexing, paths_of, save_checkpoint


@pytest.mark.refusal
def test_search_needs_the_checkpoint_of_the_index(glyphs, colour, indexed, tmp_path, capsys):
    shutil.copytree(indexed, tmp_path, dirs_exist_ok=True)
    query = indexed / "images" / paths_of(indexed / "images")[3]
    command(capsys, *indexing(tmp_path, tmp_path / "index", "--overwrite"))
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


@pytest.mark.refusal
def test_messages_name_arguments_of_the_function(indexed):
    index = RetrievalIndex.load(indexed / "index")
    with pytest.raises(ValueError, match=r"^search_images: `index` must be .* that `index_images` made\.$"):
        search_images(RetrievalIndex(4), ["a.png"])
    with pytest.raises(ValueError, match=r"^search_images: `k` must be at most the number .*, 40, got 41;"):
        search_images(index, ["a.png"], k=41)
    with pytest.raises(TypeError, match=r"^search_images: `k` must be an integer >= 1, got 2\.5 \(float\)\.$"):
        search_images(index, ["a.png"], k=2.5)
    with pytest.raises(ValueError, match=r"^search_images: none of the 1 queries can be read, the first: cannot read"):
        search_images(index, ["gone.png"])


def test_results_have_the_query_itself_first(indexed):
    query = str(indexed / "images" / "1" / "deeper" / "12.bmp")
    (result,), unreadable = search_images(RetrievalIndex.load(indexed / "index"), [query], k=3)
    assert unreadable == []
    assert result.query == query
    assert [hit.rank for hit in result.hits] == [1, 2, 3]
    assert (result.hits[0].path, result.hits[0].distance) == ("1/deeper/12.bmp", pytest.approx(0, abs=1e-6))
