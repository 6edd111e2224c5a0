"""`embed` writes the embeddings of a checkpoint, of which no code is run; after a kill, it embeds what is missing."""

import csv
import io
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import v2

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli.main import main
from lightning_retrieval.models import Preparation
from lightning_retrieval.preparation.training_transforms import TrainingTransform
from lightning_retrieval.search.commands import embed as embed_module
from lightning_retrieval.search.commands.embed import embed_images
from lightning_retrieval.search.commands.embedding import ImageEmbedder, images_in_folder, load_checkpoint
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from tests.datamodules.trees import write_image
from tests.lightning_retrieval.search.commands.glyph_commands import (
    command,
    error_of,
    indexing,
    paths_of,
    run,
    save_checkpoint,
)
from tests.processes import start_processes


def embedded(glyphs, output, **settings):
    settings = {"file_format": "npy", "shard_size": 16, "device": "cpu", **settings}
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
    args += ["--format=npy", f"--output={tmp_path / 'e'}"]
    assert command(capsys, "embed", *args)[0] == 0
    (tmp_path / "e" / "part-00002.npy").unlink()
    paths = sorted(paths_of(tmp_path / "images"))
    kept = (tmp_path / "e" / "part-00001.npy").stat().st_mtime_ns
    for path in (paths[3], paths[35]):
        image = Image.open(tmp_path / "images" / path).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image.save(tmp_path / "images" / path)
    code, out, err = command(capsys, "embed", *args)
    assert (code, err) == (0, "")
    printed = "40 embeddings of 24 dimensions in 3 npy files, 1 of which were there"
    assert out == f"{tmp_path / 'e'}: {printed}; made again, because images in them have changed: 1\n"
    assert (tmp_path / "e" / "part-00001.npy").stat().st_mtime_ns == kept
    embed_images(glyphs[0] / "model.ckpt", tmp_path / "images", tmp_path / "whole", file_format="npy", device="cpu")
    (expected,) = all_rows(tmp_path / "whole")
    found = np.concatenate([rows.embeddings for rows in all_rows(tmp_path / "e")])
    np.testing.assert_allclose(found, expected.embeddings, atol=1e-6)
    assert "3 of which were there\n" in command(capsys, "embed", *args)[1]


@pytest.mark.refusal
def test_a_damaged_file_is_named_before_an_image_is_embedded(glyphs, tmp_path, monkeypatch):
    embedded(glyphs, tmp_path / "e")
    (tmp_path / "e" / "part-00002.npy").unlink()
    (tmp_path / "e" / "part-00001.npy").write_bytes(b"")
    monkeypatch.setattr(EmbeddingFolder, "write", None)  # calling it fails in another way
    with pytest.raises(ValueError, match=r"^embed_images: .*part-00001\.npy is damaged \(it is empty\); delete it"):
        embedded(glyphs, tmp_path / "e")


def embed_until_killed(rank, world_size, folder, output, dying):
    """Embed in all processes; the dying one is killed where its second file is to appear under its name."""
    replace, replaced = os.replace, []

    def replace_until_killed(source, target):
        replaced.append(target)
        if rank == dying and sum(str(name).endswith(".npy") for name in replaced) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = replace_until_killed
    embedded((folder,), output, shard_size=4, devices=world_size)


@pytest.mark.slow  # four processes that load a checkpoint
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_kill_costs_the_shards_in_work(glyphs, tmp_path, world_size, monkeypatch):
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
    else:  # the other one has written all of its files, and says what has happened
        assert missing == [3, 5, 7, 9]
        assert "Unreachable: embed_images: all files of this process are written, but" in started[0].output()
    embed, images = Embedder.forward, []

    def counted(self, batch):
        images.append(len(batch))
        return embed(self, batch)

    monkeypatch.setattr(Embedder, "forward", counted)
    done = embedded(glyphs, tmp_path / "e", shard_size=4)
    assert done.written == len(missing)
    assert sum(images) == 1 + 4 * len(missing)  # one image for the dimension
    for number in range(10):
        name = f"part-{number:05d}.npy"
        assert (tmp_path / "e" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "e").glob(".*.tmp"))


@pytest.mark.refusal
def test_a_file_name_that_is_not_unicode_is_named_before_an_image_is_embedded(glyphs, tmp_path, capsys, monkeypatch):
    """Files of NumPy and an index keep its bytes; a Parquet file cannot."""
    name = os.fsdecode(b"caf\xe9.png")
    (tmp_path / "images").mkdir()
    shutil.copy(glyphs[0] / "images" / paths_of(glyphs[0] / "images")[3], tmp_path / "images" / name)
    args = ["embed", f"--checkpoint={glyphs[0] / 'model.ckpt'}", f"--images={tmp_path / 'images'}"]
    with monkeypatch.context() as patch:
        patch.setattr(ImageEmbedder, "embed", lambda *_: pytest.fail("an image is embedded"))
        error = error_of(capsys, *args, f"--output={tmp_path / 'parquet'}")
    rule = "embed: the paths and labels of images must be valid Unicode in Parquet files, got"
    assert error == f"{rule} 'caf\\udce9.png'; rename the file or folder, or choose the format npy.\n"
    assert not (tmp_path / "parquet").exists()
    assert command(capsys, *args, f"--output={tmp_path / 'npy'}", "--format=npy")[0] == 0
    index = tmp_path / "index"
    assert run(capsys, "index", f"--embeddings={tmp_path / 'npy'}", f"--output={index}")[0] == 0
    query, page = os.path.join(tmp_path, "images", name), tmp_path / "page.html"
    assert command(capsys, "search", query, "--index", index, "--html", page)[0] == 0
    assert page.read_text(encoding="utf-8").count("<img") == 2


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


@pytest.mark.refusal
def test_a_table_whose_images_lie_elsewhere_is_answered_by_the_option_that_finds_them(glyphs, tmp_path, capsys):
    (tmp_path / "train_images").symlink_to(glyphs[0] / "images")
    (tmp_path / "train.csv").write_text("\n".join(["Image", *paths_of(glyphs[0] / "images")]))
    args = ["--checkpoint", glyphs[0] / "model.ckpt", "--images", tmp_path / "train.csv", "--columns=image=Image"]
    args += ["--output", tmp_path / "out"]
    code, _, err = command(capsys, "embed", *args)
    assert (code, "of whose" in err, (tmp_path / "out").exists()) == (2, True, False)
    option, _, folder = err.strip().removesuffix(".").rpartition("; pass ")[2].partition(" ")
    assert (option, folder) == ("--root", f"{tmp_path}/train_images")
    code, _, err = command(capsys, "embed", *args, option, folder)
    assert (code, err) == (0, "")


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


def test_mixed_precision_and_half_of_the_space(glyphs, tmp_path):
    embedded(glyphs, tmp_path / "e", precision="bf16-mixed", dtype="float16")
    found = np.concatenate([rows.embeddings for rows in all_rows(tmp_path / "e")])
    exact = dict(zip(paths_of(glyphs[0] / "images"), glyphs[1]))
    expected = torch.stack([exact[path] for rows in all_rows(tmp_path / "e") for path in rows.paths]).numpy()
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, atol=0.02)
    assert np.abs(found - expected).max() > 1e-3  # the error of bfloat16; that of float16 is 1e-4
    manifest = EmbeddingFolder.load(tmp_path / "e").manifest
    assert (manifest.precision, manifest.dtype) == ("bf16-mixed", "float16")


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "none"}, "`device` must be a device that torch can use here, got 'none'"),
        ({"device": "meta"}, "`device` must be of one of the types cpu, cuda, mps, got 'meta'"),
        ({"device": "cpu:0", "devices": 2}, "`device` must be without a number for several devices, got 'cpu:0'"),
        ({"precision": "8"}, "`precision` must be one of .* got '8'"),
        ({"shard_size": 0}, "`shard_size` must be an integer >= 1, got 0"),
        ({"root": "x"}, "`root` must be given for a table only, got x"),
    ],
)
def test_invalid_arguments(glyphs, tmp_path, settings, message):
    with pytest.raises(ValueError, match=f"^embed_images: {message}"):
        embedded(glyphs, tmp_path / "e", **settings)
    assert not (tmp_path / "e").exists()


@pytest.mark.refusal
def test_a_folder_of_something_else_is_not_continued(glyphs, colour, tmp_path, capsys):
    embedded(glyphs, tmp_path / "e")
    model, images = ["--checkpoint", glyphs[0] / "model.ckpt"], ["--images", glyphs[0] / "images"]
    to = ["--output", tmp_path / "e", "--format=npy", "--shard_size=16"]
    for args, message in (
        (["--checkpoint", colour[0], *images, *to], "which holds embeddings of another model"),
        ([*model, "--images", glyphs[0] / "images" / "1", *to], "of another list of images (40 then, 10 now)"),
        ([*model, *images, *to, "--shard_size=17"], "with --shard_size 16, not 17"),
        ([*model, *images, "--output", glyphs[0]], "embed: `--output` must be a new folder, or one with embeddings"),
    ):
        assert message in error_of(capsys, "embed", *args)


def test_ctrl_c_says_how_to_continue(glyphs, tmp_path, capsys, monkeypatch):
    def interrupt(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(embed_module, "embed_images", interrupt)
    code, out, err = command(capsys, "embed", *indexing(glyphs[0], tmp_path / "e")[1:])
    assert (code, out, err) == (130, "", f"embed: interrupted; the same command continues in {tmp_path / 'e'}.\n")


@pytest.mark.refusal
def test_problems_of_an_embedding_are_reported(glyphs, tmp_path, capsys, monkeypatch):
    """NaN, and a batch that does not fit into memory."""
    embedding = ["embed", *indexing(glyphs[0], tmp_path / "e")[1:]]
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss())
    torch.nn.init.constant_(module.embedder.head.linear.weight, float("nan"))
    model = save_checkpoint(tmp_path / "nan.ckpt", module)
    args = ["--images", glyphs[0] / "images" / "1", "--output", tmp_path / "index", "--checkpoint", model]
    printed = error_of(capsys, "index", *args)
    assert printed.startswith("index: embeddings must be finite, but the model gives NaN or inf for deeper/10.bmp;")

    def embed(self, images):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Embedder, "forward", embed)
    printed = error_of(capsys, *embedding, "--format=npy")
    assert "`--batch_size` must be small enough for the memory of the device, got" in printed

    def fail(self, images):
        raise RuntimeError("a fault in my forward")

    monkeypatch.setattr(Embedder, "forward", fail)
    printed = error_of(capsys, *embedding, "--format=npy")
    assert "raises RuntimeError (a fault in my forward)" in printed
    assert "`--transform` must" not in printed  # it is not known to be the cause


other = Preparation(32, 32, channels=1, mean=(0.3,), std=(0.2,))
resize = TrainingTransform([v2.Resize((32, 32)), v2.Grayscale()], other, takes_pixels=False)


def test_an_object_of_the_user_that_gives_uint8_is_called_as_a_function(glyphs, tmp_path):
    write_image(tmp_path / "a.png", size=(50, 40))
    settings = {"transform": f"{__name__}.resize", "batch_size": 1, "num_workers": 0, "device": "cpu"}
    embedder = ImageEmbedder.load(glyphs[0] / "model.ckpt", **settings)
    (batch,) = embedder.embed(images_in_folder(tmp_path))
    with torch.no_grad(), Image.open(tmp_path / "a.png") as image:
        wanted = embedder.module.embed(embedder.transform(image.convert("RGB"))[None])
    assert torch.equal(batch.embeddings, wanted)
    assert embedder.dim() == 24


NET = {"class_path": "planted_module.Net", "init_args": {"in_features": 4, "out_features": 2}}
LINEAR = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 4, "out_features": 2}}
LOSS = {"class_path": "lightning_retrieval.SmoothAPLoss", "init_args": {"tau": 0.1}}
WEIGHTED = {"class_path": "lightning_retrieval.WeightedSum", "init_args": {"losses": {"ap": [1.0, NET]}}}
COMMAND_LINE = {
    "_instantiator": "pytorch_lightning.cli.instantiate_module",
    "_class_path": "lightning_retrieval.RetrievalModule",
    "embedder": LINEAR,
    "loss": LOSS,
}
STRANGE = {
    "described": {"embedder": NET, "loss": LOSS},
    "nested": {"embedder": LINEAR, "loss": WEIGHTED},
    "command_line": {**COMMAND_LINE, "embedder": NET},
    "yaml": {**COMMAND_LINE, "optimizer": "{class_path: planted_module.Net}"},
    "callable": {**COMMAND_LINE, "optimizer": "planted_module.Net"},
    "instantiator": {**COMMAND_LINE, "_instantiator": "planted_module.Net"},
}


def write_strange_checkpoint(path, hyperparameters):
    """A checkpoint of a linear layer with other hyperparameters."""
    save_checkpoint(path, RetrievalModule(nn.Linear(4, 2), SmoothAPLoss()))
    torch.save({**torch.load(path, weights_only=True), "hyper_parameters": hyperparameters}, path)
    return path


@pytest.mark.refusal
@pytest.mark.parametrize("name", STRANGE)
def test_checkpoint_imports_no_module_of_its_own(planted, tmp_path, name):
    path = write_strange_checkpoint(tmp_path / "model.ckpt", STRANGE[name])
    with pytest.raises(ValueError, match=r"^RetrievalModule: .*planted_module"):
        RetrievalModule.load_from_checkpoint(io.BytesIO(path.read_bytes()))
    with pytest.raises(ValueError, match=r"^`checkpoint` must be .* \(RetrievalModule: .*planted_module"):
        load_checkpoint(path)
    assert not planted[1].exists()


@pytest.mark.parametrize("name", ["described", "command_line"])
def test_an_object_or_a_module_that_the_user_has_imported_replaces_a_strange_class(planted, tmp_path, name):
    path = write_strange_checkpoint(tmp_path / "model.ckpt", STRANGE[name])
    module = RetrievalModule.load_from_checkpoint(path, embedder=nn.Linear(4, 2), loss=SmoothAPLoss(), strict=True)
    assert type(module.embedder) is nn.Linear
    assert not planted[1].exists()
    net = __import__(planted[0]).Net
    assert type(RetrievalModule.load_from_checkpoint(path).embedder) is net
    assert type(load_checkpoint(path).embedder) is net


def test_command_imports_the_modules_that_the_user_names(planted, tmp_path, capsys):
    path = write_strange_checkpoint(tmp_path / "model.ckpt", STRANGE["command_line"])
    (tmp_path / "none").mkdir()
    arguments = ["index", f"--checkpoint={path}", f"--images={tmp_path / 'none'}", f"--output={tmp_path / 'index'}"]
    for option in ([], [f"--import_module={planted[0]}"]):
        with pytest.raises(SystemExit, match=r"^2$"):
            main([*arguments, *option])
        assert planted[1].exists() == bool(option)
