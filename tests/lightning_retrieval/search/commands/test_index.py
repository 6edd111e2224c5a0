"""`index` of a folder of images and of embeddings: what is in it, when it is replaced, and what is printed."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from lightning_retrieval import Embedder, PCAWhitening, RetrievalIndex, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli.main import main
from lightning_retrieval.models import Preparation
from lightning_retrieval.preparation.serialised import serialise_transform
from lightning_retrieval.search.commands.embedding import ImageEmbedder
from lightning_retrieval.search.commands.index import index_embeddings
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from lightning_retrieval.search.export.onnx_file import can_write_onnx
from lightning_retrieval.search.store import disk_lists, rows
from tests.datamodules.trees import write_image
from tests.lightning_retrieval.search.commands.glyph_commands import (
    command,
    error_of,
    indexing,
    paths_of,
    run,
    save_checkpoint,
)
from tests.quiet_trainer import quiet_trainer


def similarities(capsys, query, index, k):
    """{path: similarity} of a search for one image."""
    _, out, _ = command(capsys, "search", query, "--index", index, f"-k{k}", "--json")
    return {hit["path"]: hit["similarity"] for hit in json.loads(out)["queries"][0]["results"]}


def test_factory_parameters_and_shards_are_those_of_the_index(glyphs, tmp_path, capsys):
    more = ["--factory=IVF2,Flat", "--parameters=nprobe=2", "--shards=2", "--batch_size=7", "--num_workers=1"]
    code, out, err = command(capsys, *indexing(glyphs[0], tmp_path / "index", *more))
    assert (code, err) == (0, "")
    transform, out = out.split("\n", 1)
    assert transform.startswith("images prepared with 'glyphs', ")
    printed, recall = out.split("recall@10 ")
    assert printed == f"{tmp_path / 'index'}: 40 images, 24 dimensions, IVF2,Flat ("
    assert 0.97 < float(recall.removesuffix(" against exact search)\n")) <= 1  # all lists; near ties go either way
    made = RetrievalIndex.load(tmp_path / "index")
    assert (made.shards, made.parameters, len(made)) == (2, "nprobe=2", 40)
    assert made.about["preparation"] == {"preparation": Preparation.named("glyphs").as_dict()}
    assert made.about["channels"] == 1
    assert made.about["preparation_from"] in ("default", "model")


def test_embeddings_include_whitening_and_scales_of_the_module(glyphs, tmp_path, capsys):
    torch.manual_seed(1)
    whitening = PCAWhitening(dim=6).fit(glyphs[1])
    settings = {"whitening": whitening, "eval_scales": (1.0, 0.5)}
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss(), **settings).eval()
    model = save_checkpoint(tmp_path / "model.ckpt", module)
    folder = glyphs[0] / "images"
    paths = paths_of(folder)
    images = [v2.functional.to_image(Image.open(folder / path).convert("L")) for path in paths]
    with torch.no_grad():
        expected = module.embed(torch.stack(images).float() / 255).double()
    args = ["--images", folder, "--output", tmp_path / "index", "--checkpoint", model]
    code, out, _ = command(capsys, "index", *args)
    assert code == 0
    assert "40 images, 6 dimensions" in out
    unit = expected / expected.norm(dim=1, keepdim=True)
    scores = dict(zip(paths, (unit @ unit[7]).tolist()))
    assert similarities(capsys, folder / paths[7], tmp_path / "index", 40) == pytest.approx(scores, abs=1e-5)


def test_all_commands_decode_at_the_reduced_scale_of_the_checkpoint(tmp_path, capsys):
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss()).eval()
    preparation = dataclasses.replace(Preparation.named("glyphs"), reduced_scale=True)
    module.preparation = serialise_transform(preparation)
    model = save_checkpoint(tmp_path / "model.ckpt", module)
    paths = [f"{number}.jpg" for number in range(6)]
    images = []
    for number, path in enumerate(paths):
        write_image(tmp_path / "images" / path, size=(170, 130), seed=number)
        with Image.open(tmp_path / "images" / path) as image:
            image.draft("RGB", (42, 32))
            images.append(Preparation.named("glyphs")(image.convert("RGB")))
    expected = torch.nn.functional.normalize(module.embed(torch.stack(images)), dim=1).detach()
    code, out, _ = command(capsys, *indexing(tmp_path, tmp_path / "index"))
    assert (code, "reduced_scale=True), as the checkpoint says\n" in out) == (0, True)
    printed = error_of(capsys, *indexing(tmp_path, tmp_path / "other", "--transform=glyphs"))
    assert printed.startswith("index: `--transform` must be that of the model")
    index = RetrievalIndex.load(tmp_path / "index")
    assert index.about["preparation"] == {"preparation": preparation.as_dict()}
    assert torch.allclose(index.embeddings(torch.arange(6)), expected, atol=1e-5)
    scores = dict(zip(paths, (expected @ expected[3]).tolist()))
    found = similarities(capsys, tmp_path / "images" / paths[3], tmp_path / "index", 6)
    assert found == pytest.approx(scores, abs=1e-5)
    args = ["--images", tmp_path / "images", "--output", tmp_path / "rows", "--checkpoint", model, "--format=npy"]
    assert command(capsys, "embed", *args)[0] == 0
    rows = EmbeddingFolder.load(tmp_path / "rows").read(0).embeddings
    assert torch.allclose(torch.nn.functional.normalize(torch.from_numpy(rows), dim=1), expected, atol=1e-5)


def test_pictures_that_are_not_decoded_are_counted_by_their_suffix(glyphs, tmp_path, capsys):
    """By all commands that read a folder, at any depth; texts beside images are none."""
    for number in (1, 2):
        write_image(tmp_path / f"images/deep/er/{number}.png", seed=number)
    for name in ("2.heic", "deep/3.HEIC", "deep/er/4.jxl", "notes.txt"):
        (tmp_path / "images" / name).write_text("")
    left_out = ".heic 2, .jxl 1; convert pictures that Pillow does not decode, to PNG or JPEG"
    args = ["--checkpoint", glyphs[0] / "model.ckpt", "--images", tmp_path / "images", "--output"]
    for name in ("index", "embed"):
        code, _, err = command(capsys, name, *args, tmp_path / name)
        assert (code, f"Skipped 3 pictures that are not decoded: {left_out}.\n" in err) == (0, True)
    for number in (1, 2):
        (tmp_path / f"images/deep/er/{number}.png").unlink()
    printed = error_of(capsys, "index", *args, tmp_path / "none")
    assert "which holds no image, but other files: .heic 2, .jxl 1, .txt 1; convert" in printed


def test_images_are_padded_as_in_the_evaluation_of_the_checkpoint(tmp_path, capsys):
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss()).eval()
    preparation = dataclasses.replace(Preparation.named("glyphs"), resize="fit", fill="black")
    module.preparation = serialise_transform(preparation)
    save_checkpoint(tmp_path / "model.ckpt", module)
    images = []
    for number, size in enumerate([(64, 32), (32, 64), (90, 30)]):
        write_image(tmp_path / "images" / f"{number}.png", size=size, seed=number)
        with Image.open(tmp_path / "images" / f"{number}.png") as image:
            framed = ImageOps.pad(image.convert("L"), (32, 32), Image.Resampling.BICUBIC, color=0)
            images.append(torch.from_numpy(np.array(framed))[None].float() / 255)
    expected = torch.nn.functional.normalize(module.embed(torch.stack(images)), dim=1).detach()
    code, out, _ = command(capsys, *indexing(tmp_path, tmp_path / "index"))
    assert (code, "resize=fit" in out, "as the checkpoint says\n" in out) == (0, True, True)
    index = RetrievalIndex.load(tmp_path / "index")
    assert index.about["preparation"] == {"preparation": preparation.as_dict()}
    assert torch.allclose(index.embeddings(torch.arange(3)), expected, atol=1e-5)


def test_a_folder_stands_for_the_best_checkpoint_of_its_newest_run(glyphs, tmp_path, capsys):
    runs = tmp_path / "runs"
    for name in ("version_9/checkpoints/best", "version_10/checkpoints/best", "version_11/checkpoints/last"):
        path = runs / f"{name}.ckpt"
        path.parent.mkdir(parents=True)
        shutil.copy(glyphs[0] / "model.ckpt", path)
    for given, newest in ((runs, "version_10"), (runs / "version_9", "version_9")):
        args = indexing(glyphs[0], tmp_path / newest, f"--checkpoint={given}")
        assert command(capsys, *args)[0] == 0
        assert RetrievalIndex.load(tmp_path / newest).about["checkpoint"] == str(
            runs / newest / "checkpoints/best.ckpt"
        )
    query = ["search", glyphs[0] / "images" / paths_of(glyphs[0] / "images")[0], f"--index={tmp_path / 'version_9'}"]
    assert command(capsys, *query, f"--checkpoint={runs}")[0] == 0


@pytest.mark.refusal
def test_a_function_is_imported_only_if_the_user_names_it(colour, tmp_path, capsys, monkeypatch):
    code = "import torch\n\ndef evaluate(image):\n    return torch.ones(3, 64, 64)\n"
    (tmp_path / "user_code_of_index.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    content = torch.load(colour[0], weights_only=True)
    torch.save({**content, "preparation": {"function": "user_code_of_index.evaluate"}}, tmp_path / "model.ckpt")
    write_image(tmp_path / "images" / "0.jpg")
    must_be_given = "`--transform` must be given, because the model was evaluated with user_code_of_index.evaluate"
    assert must_be_given in error_of(capsys, *indexing(tmp_path, tmp_path / "index"))
    printed = error_of(capsys, *indexing(tmp_path, tmp_path / "index", "--transform=os.remove"))
    assert "must be the one that the model was evaluated with, user_code_of_index.evaluate, got 'os.remove'" in printed
    assert "user_code_of_index" not in sys.modules
    assert not (tmp_path / "index").exists()
    option = "--transform=user_code_of_index.evaluate"
    assert command(capsys, *indexing(tmp_path, tmp_path / "index", option))[0] == 0
    query = ["search", f"--index={tmp_path / 'index'}", tmp_path / "images" / "0.jpg"]
    assert must_be_given in error_of(capsys, *query)
    assert command(capsys, *query, option)[0] == 0


@pytest.mark.parametrize("transform", ["plain", "ap_gem"])
def test_images_are_upright_and_in_colour_whatever_the_file_format(colour, transform, tmp_path, capsys, monkeypatch):
    def download(*args, **keywords):
        raise AssertionError("the weights are in the checkpoint")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", download)
    path, module = colour
    write_image(tmp_path / "upright.png", size=(300, 260), seed=3)
    upright = Image.open(tmp_path / "upright.png").convert("RGB")
    (tmp_path / "images").mkdir()
    upright.save(tmp_path / "images" / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    upright.rotate(90, expand=True).save(tmp_path / "images" / "b.PNG", exif=exif)
    grey = upright.convert("L").crop((0, 0, 280, 250))
    grey.save(tmp_path / "images" / "c.png")
    images = ["--images", tmp_path / "images", "--checkpoint", path]
    code, out, err = command(capsys, "index", *images, "--output", tmp_path / "index", "--transform", transform)
    assert (code, err) == (0, "")
    assert "3 images, 16 dimensions, Flat (exact)" in out
    prepare = Preparation.named(transform)
    with torch.no_grad():
        rows = [module(prepare(image)[None])[0] for image in (upright, upright, grey.convert("RGB"))]
    expected = torch.nn.functional.normalize(torch.stack(rows), dim=1)
    made = RetrievalIndex.load(tmp_path / "index")
    torch.testing.assert_close(made.embeddings(torch.arange(3)), expected, rtol=0, atol=1e-5)
    assert made.about["preparation_from"] == "argument"
    assert expected[2] @ expected[0] < 1 - 1e-4  # or the test would show nothing


@pytest.fixture
def own_copy(indexed, tmp_path):
    """A copy of the images and the model, without an index."""
    shutil.copytree(indexed / "images", tmp_path / "images")
    shutil.copy(indexed / "model.ckpt", tmp_path)
    return tmp_path


def changed_by_hand(folder):
    """Remove two rows of images, and add three of no image of the folder; the ids of the images that are left."""
    changed = RetrievalIndex.load(folder)
    changed.remove(changed.ids[[3, 5]])
    left = changed.ids
    changed.add(torch.eye(3, 24), torch.tensor([1000, 2000, 3000]), ["mine/a.png", "mine/b.png", ""])
    changed.save(folder)
    return left


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_rows_that_were_added_by_hand_are_only_lost_where_that_is_asked_for(indexed, embeddings, tmp_path, capsys):
    """Of an index of embeddings, which is that of the images, so `search` embeds its queries in the same way."""
    args = ["index", f"--embeddings={embeddings}", f"--output={tmp_path / 'index'}"]
    assert run(capsys, *args) == (0, f"{tmp_path / 'index'}: 40 images, 24 dimensions, Flat (exact)\n", "")
    left = changed_by_hand(tmp_path / "index")
    before = files_of(tmp_path / "index")
    code, _, err = run(capsys, *args)
    assert code == 2
    assert err.startswith(
        "index: `--output` must be new, or an index whose rows are all in the new one, but 3 of the 41 rows of "
        f"{tmp_path / 'index'} are not, because their images are not among the new ones; give `--overwrite`"
    )
    assert files_of(tmp_path / "index") == before

    expected = RetrievalIndex.load(indexed / "index")
    assert run(capsys, *args, "--update")[0] == 0
    updated = RetrievalIndex.load(tmp_path / "index")
    assert updated.ids.tolist() == [*left.tolist(), 40, 41]  # after the largest id that is left
    paths = dict(zip(updated.paths(updated.ids), updated.embeddings()))
    assert paths.keys() == set(expected.paths(expected.ids))
    assert updated.about == expected.about
    for path, row in zip(expected.paths(expected.ids), expected.embeddings()):
        torch.testing.assert_close(paths[path], row, rtol=0, atol=1e-6)

    changed_by_hand(tmp_path / "index")
    for more in (["--overwrite"], [], ["--update"]):  # by the last two, nothing is lost
        assert run(capsys, *args, *more)[0] == 0
        assert RetrievalIndex.load(tmp_path / "index").ids.tolist() == list(range(40))


def test_an_update_embeds_only_the_images_that_are_new(own_copy, capsys, monkeypatch):
    args = indexing(own_copy, own_copy / "index", "--factory=IVF2,Flat", "--update")
    assert command(capsys, *args)[0] == 0  # there is none yet
    paths = paths_of(own_copy / "images")
    (own_copy / "images" / paths[7]).rename(own_copy / "images" / "new.png")
    (own_copy / "images" / "bad.png").write_text("no image")
    printed = error_of(capsys, *args[:-1])
    assert f"but 1 of the 40 rows of {own_copy / 'index'} are not, because their images are not" in printed
    content = (own_copy / "images" / paths[9]).read_bytes()
    (own_copy / "images" / "new.png").rename(own_copy / "images" / paths[7])
    (own_copy / "images" / paths[9]).write_bytes(b"damaged")  # rows of images that cannot be read any more are not lost
    assert f"but 1 of the 40 rows of {own_copy / 'index'} are not, because" in error_of(capsys, *args[:-1])
    (own_copy / "images" / paths[7]).rename(own_copy / "images" / "new.png")
    (own_copy / "images" / paths[9]).write_bytes(content)
    real, seen = ImageEmbedder.embed_all, []

    def counted(self, listed, positions):
        seen.extend(listed.index.paths[position] for position in positions)
        return real(self, listed, positions)

    monkeypatch.setattr(ImageEmbedder, "embed_all", counted)
    code, out, err = command(capsys, *args)
    assert (code, sorted(seen)) == (1, ["bad.png", "new.png"])
    assert "40 images, 24 dimensions, IVF2,Flat" in out
    assert err.startswith("index: cannot read the image bad.png (cannot identify image file")
    made = RetrievalIndex.load(own_copy / "index")
    assert set(made.paths(made.ids)) == {*paths, "new.png"} - {paths[7]}


@pytest.mark.posix
def test_images_in_linked_folders_are_indexed_and_special_files_are_named(own_copy, capsys):
    """An update keeps the rows of a folder that a link replaces, and a FIFO is skipped, with or without a table."""
    args = indexing(own_copy, own_copy / "index", "--update")
    assert command(capsys, *args)[0] == 0
    paths = paths_of(own_copy / "images")
    (own_copy / "images" / "1").rename(own_copy / "moved")
    (own_copy / "images" / "1").symlink_to(own_copy / "moved")
    os.mkfifo(own_copy / "images" / "fifo.jpg")
    code, _, err = command(capsys, *args)
    assert code == 0
    assert "Skipped files that are not regular files, but FIFOs, sockets or devices: fifo.jpg." in err
    made = RetrievalIndex.load(own_copy / "index")
    assert sorted(made.paths(made.ids)) == sorted(paths)
    (own_copy / "images" / "table.csv").write_text(f"image\nfifo.jpg\n{paths[3]}\n")
    table, output = own_copy / "images" / "table.csv", own_copy / "embeddings"
    embed = ["embed", f"--checkpoint={own_copy / 'model.ckpt'}", f"--images={table}", f"--output={output}"]
    code, _, err = command(capsys, *embed)
    assert code == 1
    assert err.startswith("embed: cannot read the image fifo.jpg (it is not a regular file, but a FIFO")
    query = own_copy / "images" / "fifo.jpg"
    assert "not a regular file" in error_of(capsys, "search", query, "--index", own_copy / "index")


@pytest.mark.refusal
def test_an_update_loses_no_rows_of_a_linked_folder_that_is_gone_before_the_link_is(own_copy, capsys):
    shutil.move(own_copy / "images" / "2", own_copy / "elsewhere")
    link = own_copy / "images" / "2"
    link.symlink_to(own_copy / "elsewhere")
    args = indexing(own_copy, own_copy / "index", "--update")
    assert command(capsys, *args)[0] == 0
    number = len(RetrievalIndex.load(own_copy / "index"))
    before = files_of(own_copy / "index")
    (own_copy / "elsewhere").rename(own_copy / "unmounted")
    assert error_of(capsys, *args).startswith(f"index: the link {link} leads to {own_copy / 'elsewhere'}, which does")
    assert files_of(own_copy / "index") == before
    link.unlink()
    assert command(capsys, *args)[0] == 0
    assert 0 < len(RetrievalIndex.load(own_copy / "index")) < number


@pytest.mark.refusal
def test_an_index_of_something_else_is_only_replaced_where_that_is_asked_for(indexed, other_model, own_copy, capsys):
    index = own_copy / "index"
    shutil.copytree(indexed / "index", index)
    before = files_of(index)
    model = ["index", f"--checkpoint={other_model}", f"--images={indexed / 'images'}", f"--output={index}"]
    for args, why in (
        (indexing(own_copy, index), f"40 of the 40 rows of {index} are not, because they are of images in {indexed}"),
        (model, "are not, because they are of another model; give `--overwrite`"),
    ):
        assert why in error_of(capsys, *args)
        printed = error_of(capsys, *args, "--update")
        assert printed.startswith("index: `--update` must be given for an index of the same model and images, got ")
    by_hand = RetrievalIndex(24)
    by_hand.add(torch.eye(24))
    by_hand.save(own_copy / "by hand")
    printed = error_of(capsys, *indexing(indexed, own_copy / "by hand"))
    assert "are not, because something else than this command has made them; give `--overwrite`" in printed
    printed = error_of(capsys, *indexing(indexed, index, "--update", "--shards=2"))
    assert "`--shards` must be that of the index with `--update`, 1, or not be given, got 2" in printed
    assert files_of(index) == before

    (index / "manifest.json").write_text("{")
    printed = error_of(capsys, *indexing(indexed, index))
    assert "`--output` must be new, or an index that can be read, got " in printed
    assert command(capsys, *indexing(indexed, index, "--overwrite"))[0] == 0
    assert len(RetrievalIndex.load(index)) == 40
    (index / "manifest.json").unlink()  # what a run leaves that was killed before it had written all
    assert command(capsys, *indexing(indexed, index))[0] == 0


@pytest.mark.refusal
def test_invalid_arguments_are_reported_in_one_sentence(glyphs, colour, indexed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ImageEmbedder, "embed_all", None)  # calling it fails in another way
    index = indexing(indexed, tmp_path / "index")
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.ckpt").write_text("no checkpoint")
    torch.save({"state_dict": {"module.encoder_q.conv1.weight": torch.ones(2)}}, tmp_path / "moco.pth.tar")
    for more, message in (
        ([f"--checkpoint={colour[0]}", "--transform=glyphs"], "takes, 3, got 'glyphs', which gives 1; take 'plain'."),
        (["--checkpoint=gone.ckpt"], "or the folder of its runs, got gone.ckpt, which does not exist"),
        ([f"--checkpoint={tmp_path}"], f"or the folder of its runs, got {tmp_path}, in which neither checkpoints/best"),
        ([f"--checkpoint={tmp_path / 'no.ckpt'}"], "must be the checkpoint of a RetrievalModule"),
        (
            [f"--checkpoint={tmp_path / 'moco.pth.tar'}"],
            "which another program wrote; give its weights with `--backbone` and `--weights`.",
        ),
        (["--images=gone"], "`--images` must be a folder of images, got gone"),
        ([f"--images={tmp_path / 'empty'}"], f"got {tmp_path / 'empty'}, which holds no image"),
        ([f"--output={indexed}"], "must be written to a new folder or over an index"),
        ([f"--output={'n' * 500}"], ": a path must have names of at most 255 bytes, got "),
        (["--batch_size=0"], "`--batch_size` must be an integer >= 1, got 0"),
        (["--factory=PQ5"], "index: `--factory` must be "),
        (["--parameters=nprobe=3"], "index: `--parameters` must be "),
        (["--transform=none"], "`--transform` must be one of 'plain', "),
        (["--transform=plain"], "takes, 1, got 'plain', which gives 3; take 'glyphs'."),
        (["--transform=os.system"], "`--transform` must name a function of yours from a PIL image to a tensor, got"),
        (["--transform=torch.nn.Linear"], "got 'torch.nn.Linear', which is a class"),
        (["--transform=torch.linalg.inv"], "got 'torch.linalg.inv', which raises TypeError for a black image"),
        (["--transform=numpy.shape"], "got 'numpy.shape', which returns tuple"),
        (["--transform=numpy.nothing"], "must name a function that can be imported, got numpy.nothing ("),
    ):
        assert message in error_of(capsys, *index, *more)
    for args, message in (
        (["--images=x"], "are required: --checkpoint; --embeddings replaces"),
        (["--embeddings=x", "--images=x"], "--images must not be given with --embeddings"),
        (
            ["--checkpoint=x", "--images=x", "--devices=2"],
            "--devices must be given with --embeddings; embed the images",
        ),
        (["--embeddings=x", "--update", "--overwrite"], "not allowed with argument --update"),
    ):
        code, out, err = run(capsys, "index", "--output=x", *args)
        assert (code, out, message in err) == (2, "", True)
    assert not (tmp_path / "index").exists()


@pytest.mark.refusal
def test_images_of_which_none_can_be_read_or_too_few(indexed, tmp_path, capsys):
    (tmp_path / "a.png").write_text("no image")
    printed = error_of(capsys, *indexing(indexed, tmp_path / "index", f"--images={tmp_path}"))
    assert printed.startswith("index: none of the 1 images can be read, the first: cannot read")
    printed = error_of(capsys, *indexing(indexed, tmp_path / "index", "--factory=IVF64,Flat"))
    assert "`--factory` 'IVF64,Flat' must be trained" in printed
    assert not (tmp_path / "index").exists()


def test_an_index_that_is_built_on_disk_has_the_same_files(embeddings, tmp_path, capsys):
    """The 15 rows of a file do not suffice for its training."""
    more = ["--factory=IVF20,Flat", "--parameters=nprobe=20", "--shards=2"]
    printed = {}
    for name, on_disk in {"memory": [], "disk": ["--rows_in_memory=65536"]}.items():
        code, out, err = run(capsys, "index", "--embeddings", embeddings, "--output", tmp_path / name, *more, *on_disk)
        assert (code, err) == (0, "")
        printed[name] = out.replace(str(tmp_path / name), "")
    assert printed["disk"] == printed["memory"]
    assert RetrievalIndex.load(tmp_path / "disk").recall > 0.97  # measured on rows of all files
    files = {path.name: path.read_bytes() for path in (tmp_path / "memory").glob("files-*/*")}
    assert len(files) == 5
    assert {path.name: path.read_bytes() for path in (tmp_path / "disk").glob("files-*/*")} == files


def index_by_all(rank, world_size, embeddings, output):
    """What the command prints in each of its processes, in which a block has 9 of the 40 rows."""
    for module in (rows, disk_lists):
        module.BLOCK = 9
    args = ["index", f"--embeddings={embeddings}", f"--output={output}", "--factory=IVF2,Flat"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main([*args, f"--devices={world_size}"])
    return printed.getvalue(), len(RetrievalIndex.load(output))


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [3])
def test_several_processes_write_the_index_of_one(processes, embeddings, tmp_path, run_processes):
    one, _ = index_embeddings(embeddings, tmp_path / "one", factory="IVF2,Flat")
    printed = f"40 images, 24 dimensions, IVF2,Flat (recall@10 {one.recall:.3f} against exact search)\n"
    results = run_processes(index_by_all, processes, embeddings, tmp_path / "all", backend=None)
    assert results == [(f"{tmp_path / 'all'}: {printed}", 40), *[("", 40)] * (processes - 1)]
    of_one, of_all = (
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("files-*/*")} for name in ("one", "all")
    )
    assert of_one == of_all


@pytest.mark.refusal
def test_invalid_settings_and_then_bad_files_are_named_before_an_index_is_made(embeddings, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^index_embeddings: the embeddings must be a folder with _manifest\."):
        index_embeddings(tmp_path, tmp_path / "i")
    folder, bad = tmp_path / "e", tmp_path / "e" / "part-00001.npy"
    shutil.copytree(embeddings, folder)

    def fails(message, owner="index_embeddings", **settings):
        with pytest.raises(ValueError, match=f"^{owner}: .*{message}"):
            index_embeddings(folder, tmp_path / "i", **settings)

    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    on_disk = {"factory": "IVF2,Flat", "rows_in_memory": 65_536}
    fails("`factory` must be IVF with Flat, SQ or PQ, .* got 'Flat'", **{**on_disk, "factory": "Flat"})
    fails("`rows_in_memory` must be an integer >= 65536, got 65535", **{**on_disk, "rows_in_memory": 65_535})
    settings = {**on_disk, "store": f"milvus:{tmp_path / 'i.db'}"}
    fails("`rows_in_memory` must not be given with a store in", **settings)
    fails("`devices` must be an integer >= 1, got 0", devices=0)
    fails("`devices` must be 1 with a store in Milvus, which .*, got 2", devices=2, store=f"milvus:{tmp_path / 'i.db'}")
    fails("`devices` must be 1 with `update`, which reads the index into memory, got 3", devices=3, update=True)
    fails("`factory` must be IVF with .* by several processes, got 'Flat'; ", devices=2)
    fails("that fits inner products of 24 numbers, got 'IVF2,PQ7x4'", "RetrievalIndex", factory="IVF2,PQ7x4")
    fails(r"part-00001.npy is damaged \(.*, which keeps the others")
    shutil.copy(embeddings / "part-00000.npy", bad)
    shutil.copy(embeddings / "part-00000.json", bad.with_suffix(".json"))
    fails("part-00001.npy must hold shard 1 of the embeddings that")
    bad.unlink()
    fails(r" 1 of its 3 shards are missing \(part-00001.npy\)")
    manifest = folder / "_manifest.json"
    text = re.sub(r'"sha256": "\w+",', "", manifest.read_text())  # as earlier releases wrote it
    shutil.copytree(embeddings, folder, dirs_exist_ok=True)
    for wrong in (text.replace('"model_sha256": "', '"model_sha256": "f'), text.replace('"dim": 24', '"dim": 25')):
        manifest.write_text(wrong)
        fails("part-00000.npy must hold shard 0 .*of another model, of other images, or ")
    assert not (tmp_path / "i").exists()


def trained_on_own_data(path, network, channels):
    """A checkpoint of a run whose loader has prepared the images in a way that nothing records."""
    module = RetrievalModule(Embedder(network, 8, image_size=32), SmoothAPLoss())
    data = [(torch.rand(8, channels, 32, 32), torch.arange(8) // 2)]
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, DataLoader(data, batch_size=None))
    trainer.save_checkpoint(path)
    return path


@pytest.mark.parametrize(("network", "channels"), [("squeezenet1_1", 3), ("glyph_net", 1)])
def test_warns_that_the_preparation_of_a_trained_network_is_not_known(network, channels, tmp_path, capsys):
    """Each command that loads the checkpoint says what it takes instead, and what to pass; a given name is no guess."""
    checkpoint = trained_on_own_data(tmp_path / "own.ckpt", network, channels)
    for number in range(4):
        write_image(tmp_path / "images" / f"{number}.png")
    words = f"warning: {checkpoint} does not say how its images were prepared in evaluation"
    images = ["--images", tmp_path / "images", "--device=cpu"]
    name = ["--transform", {3: "plain", 1: "glyphs"}[channels]]
    folder, no_folder = tmp_path / "output", checkpoint / "output"
    commands = [["index", 0, folder, *images], ["embed", 0, folder, *images]]
    if can_write_onnx(torch.__version__):
        commands.append(["export", 2, no_folder])  # a whole export would take seconds after the checkpoint is loaded
    for verb, code, output, *options in commands:
        given = [verb, "--checkpoint", checkpoint, *options, "--output", output]
        outcome, _, err = run(capsys, *given)
        assert outcome == code, err
        assert err.count(words) == 1
        assert "pass --transform" in err
        if verb == "index":
            queries = ["search", tmp_path / "images" / "0.png", "--index", folder, "--device=cpu"]
            outcome, _, err = run(capsys, *queries)
            assert outcome == 0, err
            assert err.count(words) == 1
            assert "make the index again with --transform" in err
        shutil.rmtree(folder, ignore_errors=True)
        outcome, _, err = run(capsys, *given, *name)
        assert outcome == code, err
        assert words not in err
        if verb == "index":
            assert words not in run(capsys, *queries)[2]
        shutil.rmtree(folder, ignore_errors=True)


def test_a_model_may_be_given_with_embeddings_if_it_made_them(glyphs, embeddings, other_model, tmp_path, capsys):
    """The index then records this model, also where the checkpoint was moved."""
    moved = shutil.copy(glyphs[0] / "model.ckpt", tmp_path / "moved.ckpt")
    args = ["index", f"--embeddings={embeddings}", f"--output={tmp_path / 'index'}"]
    error = "index: `--checkpoint` must be the one that the embeddings were made with, because embeddings of different"
    code, out, err = run(capsys, *args, f"--checkpoint={other_model}")
    assert (code, out, err.count("\n"), err.startswith(error)) == (2, "", 1, True)
    assert not (tmp_path / "index").exists()
    assert run(capsys, *args, f"--checkpoint={moved}")[::2] == (0, "")
    assert RetrievalIndex.load(tmp_path / "index").about["checkpoint"] == Path(moved).as_posix()
    code, _, err = run(capsys, *args, "--checkpoint=none.ckpt", "--overwrite")
    assert (code, err.count("\n")) == (2, 1)
