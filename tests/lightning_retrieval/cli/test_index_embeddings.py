"""An index of a folder of embeddings is that of the images themselves."""

import re
import shutil

import pytest
import torch

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.cli.embed import embed_images
from lightning_retrieval.cli.index import index
from lightning_retrieval.cli.index import index_embeddings
from tests.lightning_retrieval.cli.glyph_commands import command


@pytest.fixture(scope="module")
def embeddings(glyphs, tmp_path_factory):
    path = tmp_path_factory.mktemp("embeddings") / "e"
    settings = {"file_format": "npy", "shard_size": 15, "device": "cpu"}
    embed_images(glyphs[0] / "model.ckpt", glyphs[0] / "images", path, **settings)
    return path


def run(capsys, *args):
    code = index([str(arg) for arg in args])
    return code, *capsys.readouterr()


def test_the_index_is_that_of_the_images(indexed, embeddings, tmp_path, capsys):
    code, out, err = run(capsys, "--embeddings", embeddings, "--output", tmp_path / "index")
    assert (code, out, err) == (0, f"{tmp_path / 'index'}: 40 images, 24 dimensions, Flat (exact)\n", "")
    made, expected = RetrievalIndex.load(tmp_path / "index"), RetrievalIndex.load(indexed / "index")
    assert torch.equal(made.ids, expected.ids)
    assert made.paths(made.ids) == expected.paths(made.ids)
    torch.testing.assert_close(made.embeddings(), expected.embeddings(), rtol=0, atol=1e-6)
    assert made.about == expected.about  # so `search` embeds its queries in the same way
    code, out, _ = command(
        capsys, "search", "--index", tmp_path / "index", indexed / "images" / made.paths(made.ids)[3]
    )
    assert code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index"]  # no temporary file


def test_an_index_is_trained_on_rows_of_all_files(embeddings, tmp_path):
    made, unreadable = index_embeddings(
        embeddings, tmp_path / "i", factory="IVF2,Flat", parameters="nprobe=2", shards=2
    )
    assert (len(made), made.shards, unreadable) == (40, 2, [])
    assert made.recall > 0.97  # measured on rows of all files; near ties go either way


def test_all_files_train_the_index(embeddings, tmp_path):
    made, _ = index_embeddings(embeddings, tmp_path / "i", factory="IVF20,Flat")  # the 15 rows of a file do not suffice
    assert len(made) == 40


def test_an_index_that_is_built_on_disk_has_the_same_files(embeddings, tmp_path, capsys):
    more = ["--factory=IVF2,Flat", "--parameters=nprobe=2", "--shards=2"]
    printed = {}
    for name, on_disk in {"memory": [], "disk": ["--rows_in_memory=65536"]}.items():
        code, out, err = run(capsys, "--embeddings", embeddings, "--output", tmp_path / name, *more, *on_disk)
        assert (code, err) == (0, "")
        printed[name] = out.replace(str(tmp_path / name), "")
    assert printed["disk"] == printed["memory"]
    files = {path.name: path.read_bytes() for path in (tmp_path / "memory").glob("files-*/*")}
    assert len(files) == 5
    assert {path.name: path.read_bytes() for path in (tmp_path / "disk").glob("files-*/*")} == files


@pytest.mark.refusal
def test_what_cannot_be_built_on_disk_is_refused(embeddings, tmp_path, capsys):
    on_disk = ["--embeddings", embeddings, "--output", tmp_path / "i", "--rows_in_memory"]
    code, out, err = run(capsys, *on_disk, "100000")
    assert (code, out) == (2, "")
    assert "`--factory` must be IVF with Flat, SQ or PQ, such as 'IVF1024,PQ16', for an index that is built on" in err
    assert "got 'Flat'; choose one of these" in err
    code, out, err = run(capsys, *on_disk, "65535", "--factory=IVF2,Flat")
    assert (code, out) == (2, "")
    assert "`--rows_in_memory` must be an integer >= 65536, got 65535" in err
    code, out, err = run(capsys, *on_disk, "65536", "--store", f"milvus:{tmp_path / 'i.db'}")
    assert (code, out) == (2, "")
    assert "`--rows_in_memory` must not be given with a store in Milvus, which keeps rows by itself, got 65536" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.refusal
def test_settings_are_refused_before_a_file_is_read(embeddings, tmp_path):
    shutil.copytree(embeddings, tmp_path / "e")
    (tmp_path / "e" / "part-00000.npy").write_bytes(b"damaged")
    for settings, message in (
        ({"factory": "Flat", "rows_in_memory": 65_536}, "`factory` must be IVF with Flat, SQ or PQ, such as"),
        ({"factory": "IVF2,PQ7x4"}, "that fits inner products of 24 numbers, got 'IVF2,PQ7x4'"),
        ({}, "part-00000.npy is damaged"),  # only then
    ):
        with pytest.raises(ValueError, match=message):
            index_embeddings(tmp_path / "e", tmp_path / "i", **settings)


@pytest.mark.refusal
def test_mistakes_are_reported_in_one_sentence(embeddings, glyphs, tmp_path, capsys):
    code, out, err = run(capsys, "--embeddings", tmp_path, "--output", tmp_path / "i")
    assert (code, out) == (2, "")
    assert err.startswith("index: the embeddings must be a folder with _manifest.json in it, got ")
    assert err.endswith("; `lightning-retrieval embed` writes one.\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        run(capsys, "--embeddings", embeddings, "--output", tmp_path / "i", "--images", tmp_path)
    assert "--images must not be given with --embeddings, because no image is embedded" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"):
        run(capsys, "--output", tmp_path / "i", "--images", tmp_path)
    assert "are required: --checkpoint, or --embeddings instead" in capsys.readouterr().err
    assert not (tmp_path / "i").exists()


@pytest.mark.refusal
def test_a_bad_file_is_named_before_an_index_is_made(embeddings, tmp_path):
    shutil.copytree(embeddings, tmp_path / "e")
    bad = tmp_path / "e" / "part-00001.npy"
    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"^index_embeddings: .*part-00001.npy is damaged \(.*, which keeps the others"
    ):
        index_embeddings(tmp_path / "e", tmp_path / "i")
    shutil.copy(embeddings / "part-00000.npy", bad)
    shutil.copy(embeddings / "part-00000.json", bad.with_suffix(".json"))
    with pytest.raises(
        ValueError, match=r"^index_embeddings: .*part-00001.npy must hold shard 1 of the embeddings that"
    ):
        index_embeddings(tmp_path / "e", tmp_path / "i")
    bad.unlink()
    with pytest.raises(
        ValueError, match=r"^index_embeddings: .* 1 of its 3 shards are missing \(part-00001.npy\); run "
    ):
        index_embeddings(tmp_path / "e", tmp_path / "i")
    assert not (tmp_path / "i").exists()


@pytest.mark.refusal
def test_a_file_of_another_model_is_refused(embeddings, tmp_path):
    shutil.copytree(embeddings, tmp_path / "e")
    manifest = tmp_path / "e" / "_manifest.json"
    text = re.sub(r'"sha256": "\w+",', "", manifest.read_text())  # as earlier releases wrote it
    manifest.write_text(text.replace('"model_sha256": "', '"model_sha256": "f'))
    with pytest.raises(ValueError, match=r"part-00000.npy must hold shard 0 .* of another model, of other images, or "):
        index_embeddings(tmp_path / "e", tmp_path / "i")
    manifest.write_text(text.replace('"dim": 24', '"dim": 25'))
    with pytest.raises(
        ValueError, match=r"part-00000.npy must hold shard 0 .*; delete it, and run the command that wr"
    ):
        index_embeddings(tmp_path / "e", tmp_path / "i")
