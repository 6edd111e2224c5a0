"""The embeddings in the files are those of the model; after a kill, only the shards that are missing are embedded."""

import csv

import pytest
import torch
from PIL import Image

from lightning_retrieval.cli.embed_images import embed_images
from lightning_retrieval.cli.embedding import ImageEmbedder
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from tests.lightning_retrieval.cli.glyph_commands import command, error_of, paths_of

FORMATS = pytest.mark.parametrize("file_format", ["parquet", "npy"])


def embedded(glyphs, output, **settings):
    settings = {"file_format": "npy", "shard_size": 16, "device": "cpu", **settings}
    return embed_images(glyphs[0] / "model.ckpt", glyphs[0] / "images", output, **settings)


def all_rows(path):
    folder = EmbeddingFolder.load("me", path)
    return [folder.read(shard) for shard in range(len(folder))]


@FORMATS
def test_embeddings_are_those_of_the_model(glyphs, tmp_path, file_format):
    if file_format == "parquet":
        pytest.importorskip("pyarrow")
    done = embedded(glyphs, tmp_path / "e", file_format=file_format, batch_size=7)
    assert (done.written, len(done.folder), done.unreadable) == (3, 3, [])
    shards = all_rows(tmp_path / "e")
    paths = [path for shard in shards for path in shard.paths]
    expected = dict(zip(paths_of(glyphs[0] / "images"), glyphs[1]))
    assert paths == sorted(expected)
    found = torch.cat([torch.from_numpy(shard.embeddings) for shard in shards])
    torch.testing.assert_close(found, torch.stack([expected[path] for path in paths]), rtol=0, atol=1e-6)
    assert [len(shard.ids) for shard in shards] == [16, 16, 8]
    assert [id_ for shard in shards for id_ in shard.ids.tolist()] == list(range(40))
    assert {label for shard in shards for label in shard.labels} == {None}


def test_a_run_that_was_killed_continues(glyphs, tmp_path, monkeypatch):
    whole = embedded(glyphs, tmp_path / "whole")
    real, seen = ImageEmbedder._embed_batch, []

    def counted(self, images):
        seen.append(len(images))
        if len(seen) == 7:  # one image for the length of an embedding, four batches of the first shard, two more
            raise KeyboardInterrupt
        return real(self, images)

    monkeypatch.setattr(ImageEmbedder, "_embed_batch", counted)
    with pytest.raises(KeyboardInterrupt):
        embedded(glyphs, tmp_path / "e", batch_size=4)
    assert EmbeddingFolder("me", tmp_path / "e", whole.folder.manifest).missing() == [1, 2]
    del seen[:]
    seen += [0] * 7
    done = embedded(glyphs, tmp_path / "e", batch_size=4)
    assert done.written == 2
    assert seen[7:] == [1, 4, 4, 4, 4, 4, 4]
    for found, expected in zip(all_rows(tmp_path / "e"), all_rows(tmp_path / "whole")):
        assert found.paths == expected.paths
        assert torch.allclose(torch.from_numpy(found.embeddings), torch.from_numpy(expected.embeddings), atol=1e-6)


def test_tables_give_labels_and_boxes(glyphs, tmp_path):
    paths = paths_of(glyphs[0] / "images")[:3]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        rows = [[paths[0], "α", ""], [paths[1], "", "0 0 10 32"], [paths[2], "β", ""]]
        csv.writer(file).writerows([["image", "label", "box"], *rows])
    settings = {"root": glyphs[0] / "images", "file_format": "npy"}
    embed_images(glyphs[0] / "model.ckpt", tmp_path / "t.csv", tmp_path / "e", **settings)
    (rows,) = all_rows(tmp_path / "e")
    assert (rows.paths, rows.labels) == (paths, ["α", None, "β"])
    found = torch.from_numpy(rows.embeddings)
    assert torch.allclose(found[[0, 2]], glyphs[1][[0, 2]], atol=1e-6)
    assert not torch.allclose(found[1], glyphs[1][1], atol=1e-3)  # of a part of the image


def test_unreadable_images_are_reported_also_by_the_run_that_continues(glyphs, tmp_path, capsys):
    (tmp_path / "images").mkdir()
    Image.new("L", (32, 32)).save(tmp_path / "images" / "a.png")
    (tmp_path / "images" / "b\n.png").write_text("no image")
    args = [f"--checkpoint={glyphs[0] / 'model.ckpt'}", f"--images={tmp_path / 'images'}", "--format=npy"]
    for found in ("", ", 1 of which were there"):
        code, out, err = command(capsys, "embed", *args, f"--output={tmp_path / 'e'}")
        assert (code, out) == (1, f"{tmp_path / 'e'}: 1 embeddings of 24 dimensions in 1 npy file{found}\n")
        assert err.startswith(r"embed: cannot read the image b\n.png (cannot identify image file")
    (rows,) = all_rows(tmp_path / "e")
    assert (rows.ids.tolist(), rows.paths) == ([0], ["a.png"])


@pytest.mark.refusal
def test_mistakes_are_reported_in_one_sentence(glyphs, colour, tmp_path, capsys):
    embedded(glyphs, tmp_path / "e")
    model, images = ["--checkpoint", glyphs[0] / "model.ckpt"], ["--images", glyphs[0] / "images"]
    to = ["--output", tmp_path / "e", "--format=npy", "--shard_size=16"]
    assert "which holds embeddings of another model; give another path." in error_of(
        capsys, "embed", "--checkpoint", colour[0], *images, *to
    )
    assert "of another list of images (40 then, 10 now)" in error_of(
        capsys, "embed", *model, "--images", glyphs[0] / "images" / "1", *to
    )
    assert "with shard_size=16, not 17" in error_of(capsys, "embed", *model, *images, *to, "--shard_size=17")
    other = ["--output", tmp_path / "other"]
    printed = error_of(capsys, "embed", *model, *images, "--output", glyphs[0])
    assert printed.startswith("embed: `--output` must be a new folder, or one with embeddings to continue, got ")
    assert "`--root` must be given for a table only" in error_of(capsys, "embed", *model, *images, *other, "--root=x")
    (tmp_path / "t.csv").write_text("picture\na.png\n")
    assert "must name the columns image" in error_of(capsys, "embed", *model, "--images", tmp_path / "t.csv", *other)
    assert "`--shard_size` must be an integer >= 1, got 0" in error_of(
        capsys, "embed", *model, *images, *other, "--shard_size=0"
    )
    assert not (tmp_path / "other").exists()
