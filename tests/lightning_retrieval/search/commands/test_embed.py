"""`embed` writes the embeddings of a checkpoint, of which no code is run; after a kill, it embeds what is missing."""

import csv
import io
import os
import shutil
import signal

import pytest
import torch
from PIL import Image
from torch import nn

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.search.commands.embed import embed_images
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from tests.lightning_retrieval.search.commands.glyph_commands import (
    command,
    embeddings_in,
    error_of,
    indexing,
    paths_of,
    run,
    save_checkpoint,
)
from tests.processes import start_processes


def embedded(glyphs, output, **settings):
    settings = {"shard_size": 16, "device": "cpu", **settings}
    return embed_images(glyphs[0] / "model.ckpt", glyphs[0] / "images", output, **settings)


def all_rows(path):
    folder = EmbeddingFolder.load(path)
    return [folder.read(shard) for shard in range(len(folder))]


def test_embeddings_are_those_of_the_model(glyphs, tmp_path):
    done = embedded(glyphs, tmp_path / "e", batch_size=7)
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


def test_images_that_have_changed_are_embedded_again(glyphs, tmp_path, capsys):
    """Under the same names, of a complete shard and of a missing one; shards without such images are kept."""
    shutil.copytree(glyphs[0] / "images", tmp_path / "images")
    args = [f"--checkpoint={glyphs[0] / 'model.ckpt'}", f"--images={tmp_path / 'images'}", "--shard_size=16"]
    args += [f"--output={tmp_path / 'e'}"]
    assert command(capsys, "embed", *args)[0] == 0
    (tmp_path / "e" / "part-00002.parquet").unlink()
    paths = sorted(paths_of(tmp_path / "images"))
    kept = (tmp_path / "e" / "part-00001.parquet").stat().st_mtime_ns
    for path in (paths[3], paths[35]):
        image = Image.open(tmp_path / "images" / path).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image.save(tmp_path / "images" / path)
    assert command(capsys, "embed", *args)[::2] == (0, "")
    assert (tmp_path / "e" / "part-00001.parquet").stat().st_mtime_ns == kept
    embed_images(glyphs[0] / "model.ckpt", tmp_path / "images", tmp_path / "whole", device="cpu")
    expected, found = embeddings_in(tmp_path / "whole")[1], embeddings_in(tmp_path / "e")[1]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_damaged_file_is_not_continued(glyphs, tmp_path):
    embedded(glyphs, tmp_path / "e")
    (tmp_path / "e" / "part-00002.parquet").unlink()
    (tmp_path / "e" / "part-00001.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"part-00001\.parquet is damaged"):
        embedded(glyphs, tmp_path / "e")
    assert not (tmp_path / "e" / "part-00002.parquet").exists()


def embed_until_killed(rank, world_size, folder, output, dying):
    """Embed in all processes; the dying one is killed where its second file is to appear under its name."""
    replace, replaced = os.replace, []

    def replace_until_killed(source, target):
        replaced.append(target)
        if rank == dying and sum(str(name).endswith(".parquet") for name in replaced) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = replace_until_killed
    embedded((folder,), output, shard_size=4, devices=world_size)


@pytest.mark.slow  # four processes that load a checkpoint
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_kill_costs_the_shards_in_work(glyphs, tmp_path, world_size):
    whole = embedded(glyphs, tmp_path / "whole", shard_size=4)
    (tmp_path / "processes").mkdir()
    dying = world_size - 1
    arguments = (glyphs[0], tmp_path / "e", dying)
    started = start_processes(embed_until_killed, world_size, *arguments, folder=tmp_path / "processes")
    try:
        codes = [one.wait(240) for one in started]
    finally:
        for one in started:
            one.end()
    assert codes[dying] == -signal.SIGKILL, started[dying].output()
    missing = EmbeddingFolder(tmp_path / "e", whole.folder.manifest).missing()
    if world_size == 1:
        assert missing == list(range(1, 10))
    else:  # the other one has written all of its files
        assert missing == [3, 5, 7, 9]
    done = embedded(glyphs, tmp_path / "e", shard_size=4)
    assert done.written == len(missing)
    for number in range(10):
        name = f"part-{number:05d}.parquet"
        assert (tmp_path / "e" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "e").glob(".*.tmp"))


def test_a_file_name_that_is_not_unicode(glyphs, tmp_path, capsys):
    """An index keeps its bytes; a Parquet file cannot."""
    name = os.fsdecode(b"caf\xe9.png")
    (tmp_path / "images").mkdir()
    shutil.copy(glyphs[0] / "images" / paths_of(glyphs[0] / "images")[3], tmp_path / "images" / name)
    args = [f"--checkpoint={glyphs[0] / 'model.ckpt'}", f"--images={tmp_path / 'images'}"]
    assert "'caf\\udce9.png'" in error_of(capsys, "embed", *args, f"--output={tmp_path / 'parquet'}")
    assert not (tmp_path / "parquet").exists()
    index = tmp_path / "index"
    assert command(capsys, "index", *args, f"--output={index}")[0] == 0
    query, page = os.path.join(tmp_path, "images", name), tmp_path / "page.html"
    assert command(capsys, "search", query, "--index", index, "--html", page)[0] == 0
    assert page.read_text(encoding="utf-8").count("<img") == 2


def test_tables_give_labels_and_boxes(glyphs, tmp_path):
    paths = paths_of(glyphs[0] / "images")[:3]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        rows = [[paths[0], "α", ""], [paths[1], "", "0 0 10 32"], [paths[2], "β", ""]]
        csv.writer(file).writerows([["image", "label", "box"], *rows])
    settings = {"root": glyphs[0] / "images"}
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
    args = [f"--checkpoint={glyphs[0] / 'model.ckpt'}", f"--images={tmp_path / 'images'}"]
    for _ in range(2):
        code, _, err = command(capsys, "embed", *args, f"--output={tmp_path / 'e'}")
        assert (code, r"b\n.png" in err) == (1, True)
    (rows,) = all_rows(tmp_path / "e")
    assert (rows.ids.tolist(), rows.paths) == ([0], ["a.png"])


def test_mixed_precision_and_half_of_the_space(glyphs, tmp_path):
    embedded(glyphs, tmp_path / "e", precision="bf16-mixed", dtype="float16")
    paths, found = embeddings_in(tmp_path / "e")
    exact = dict(zip(paths_of(glyphs[0] / "images"), glyphs[1]))
    expected = torch.stack([exact[path] for path in paths])
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.02)
    assert (found - expected).abs().max() > 1e-3  # the error of bfloat16; that of float16 is 1e-4
    manifest = EmbeddingFolder.load(tmp_path / "e").manifest
    assert (manifest.precision, manifest.dtype) == ("bf16-mixed", "float16")


def test_a_folder_of_something_else_is_not_continued(glyphs, colour, tmp_path, capsys):
    """With another model, with other images or with files of another size; nor is a folder of the user written to."""
    embedded(glyphs, tmp_path / "e")
    before = {path.name: path.read_bytes() for path in (tmp_path / "e").iterdir()}
    model, images = ["--checkpoint", glyphs[0] / "model.ckpt"], ["--images", glyphs[0] / "images"]
    to = ["--output", tmp_path / "e", "--shard_size=16"]
    for args in (
        ["--checkpoint", colour[0], *images, *to],
        [*model, "--images", glyphs[0] / "images" / "1", *to],
        [*model, *images, *to, "--shard_size=17"],
        [*model, *images, "--output", glyphs[0]],
    ):
        error_of(capsys, "embed", *args)
    assert {path.name: path.read_bytes() for path in (tmp_path / "e").iterdir()} == before


def test_ctrl_c_says_how_to_continue(glyphs, tmp_path, capsys, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(nn.Linear, "forward", interrupt)
    code, out, err = command(capsys, "embed", *indexing(glyphs[0], tmp_path / "e")[1:])
    assert (code, out, str(tmp_path / "e") in err) == (130, "", True)


def test_embeddings_that_are_not_finite_are_not_indexed(glyphs, tmp_path, capsys):
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss())
    torch.nn.init.constant_(module.embedder.head.linear.weight, float("nan"))
    model = save_checkpoint(tmp_path / "nan.ckpt", module)
    args = ["--images", glyphs[0] / "images" / "1", "--output", tmp_path / "index", "--checkpoint", model]
    assert "deeper/10.bmp" in error_of(capsys, "index", *args)
    assert not (tmp_path / "index").exists()


NET = {"class_path": "planted_module.Net", "init_args": {"in_features": 4, "out_features": 2}}
LOSS = {"class_path": "lightning_retrieval.SmoothAPLoss", "init_args": {"tau": 0.1}}
COMMAND_LINE = {
    "_instantiator": "pytorch_lightning.cli.instantiate_module",
    "_class_path": "lightning_retrieval.RetrievalModule",
    "embedder": {"class_path": "torch.nn.Linear", "init_args": {"in_features": 4, "out_features": 2}},
    "loss": LOSS,
}
STRANGE = {
    "described": {"embedder": NET, "loss": LOSS},
    "command_line": {**COMMAND_LINE, "embedder": NET},
    "instantiator": {**COMMAND_LINE, "_instantiator": "planted_module.Net"},
}


def write_strange_checkpoint(path, hyperparameters):
    """A checkpoint of a linear layer with other hyperparameters."""
    save_checkpoint(path, RetrievalModule(nn.Linear(4, 2), SmoothAPLoss()))
    torch.save({**torch.load(path, weights_only=True), "hyper_parameters": hyperparameters}, path)
    return path


@pytest.mark.hostile
@pytest.mark.parametrize("name", STRANGE)
def test_a_checkpoint_imports_no_module_of_its_own(glyphs, planted, tmp_path, capsys, name):
    path = write_strange_checkpoint(tmp_path / "model.ckpt", STRANGE[name])
    with pytest.raises(ValueError, match="planted_module"):
        RetrievalModule.load_from_checkpoint(io.BytesIO(path.read_bytes()))
    args = [f"--checkpoint={path}", f"--images={glyphs[0] / 'images'}", f"--output={tmp_path / 'index'}"]
    assert "planted_module" in error_of(capsys, "index", *args)
    assert not planted[1].exists()


def test_command_imports_the_modules_that_the_user_names(planted, tmp_path, capsys):
    path = write_strange_checkpoint(tmp_path / "model.ckpt", STRANGE["command_line"])
    (tmp_path / "none").mkdir()
    arguments = ["index", f"--checkpoint={path}", f"--images={tmp_path / 'none'}", f"--output={tmp_path / 'index'}"]
    for option in ([], [f"--import_module={planted[0]}"]):
        assert run(capsys, *arguments, *option)[0] == 2
        assert planted[1].exists() == bool(option)
