"""`lightning-retrieval index`: what it prints, its exit codes and its error messages."""

import shutil

import pytest

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.models import Preparation
from tests.lightning_retrieval.cli.glyph_commands import (
    command,
    error_of,
    indexing,
    paths_of,
)


def test_factory_parameters_and_shards_are_those_of_the_index(glyphs, tmp_path, capsys):
    more = ["--factory=IVF2,Flat", "--parameters=nprobe=2", "--shards=2", "--batch_size=7", "--num_workers=1"]
    code, out, err = command(capsys, *indexing(glyphs[0], tmp_path / "index", *more))
    assert (code, err) == (0, "")
    transform, out = out.split("\n", 1)
    assert transform.startswith("images prepared with 'glyphs', ")
    printed, recall = out.split("recall@10 ")
    assert printed == f"{tmp_path / 'index'}: 40 images, 24 dimensions, IVF2,Flat ("
    assert 0.97 < float(recall.removesuffix(" against exact search)\n")) <= 1  # all lists; near ties go either way
    index = RetrievalIndex.load(tmp_path / "index")
    assert (index.shards, index.parameters, len(index)) == (2, "nprobe=2", 40)
    assert index.about["preparation"] == {"preparation": Preparation.named("glyphs").as_dict()}
    assert index.about["channels"] == 1


def test_unreadable_images_are_named_and_the_others_indexed(glyphs, tmp_path, capsys):
    shutil.copytree(glyphs[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "images" / "a\nb.jpg").write_bytes(b"no image")
    whole = (tmp_path / "images" / paths_of(tmp_path / "images")[8]).read_bytes()
    (tmp_path / "images" / "cut.png").write_bytes(whole[: len(whole) // 2])
    code, out, err = command(capsys, *indexing(tmp_path, tmp_path / "index2"))
    assert code == 1
    assert "40 images" in out
    first, second = err.splitlines()
    assert first.startswith(r"index: cannot read the image a\nb.jpg (cannot identify image file")
    assert second.startswith("index: cannot read the image cut.png (")
    assert first.endswith("; skipped.")


@pytest.mark.refusal
def test_invalid_arguments_are_reported_in_one_sentence(glyphs, colour, indexed, tmp_path, capsys):
    to = ["--output", tmp_path / "index"]
    images = ["--images", indexed / "images"]
    model = ["--checkpoint", indexed / "model.ckpt"]
    printed = error_of(capsys, "index", *images, *to, *model, "--transform=plain")
    assert "`--transform` must give images with the number of channels that the model of " in printed
    assert "takes, 1, got 'plain', which gives 3; take 'glyphs'." in printed
    printed = error_of(capsys, "index", *images, *to, "--checkpoint", colour[0], "--transform=glyphs")
    assert "takes, 3, got 'glyphs', which gives 1; take 'plain'." in printed
    printed = error_of(capsys, "index", *images, *to, "--checkpoint=gone.ckpt")
    assert printed.endswith("must be a file that training wrote, got gone.ckpt, which does not exist.\n")
    printed = error_of(capsys, "index", *images, *to, "--checkpoint", tmp_path)
    assert printed.endswith(f"must be a file that training wrote, got {tmp_path}, which is a folder.\n")
    (tmp_path / "no.ckpt").write_text("no checkpoint")
    printed = error_of(capsys, "index", *images, *to, "--checkpoint", tmp_path / "no.ckpt")
    assert "must be the checkpoint of a RetrievalModule that can be rebuilt from it" in printed
    assert "`--images` must be a folder of images, got gone" in error_of(capsys, "index", "--images=gone", *to, *model)
    (tmp_path / "empty").mkdir()
    assert "which holds no image" in error_of(capsys, "index", "--images", tmp_path / "empty", *to, *model)
    (tmp_path / "empty" / "a.png").write_text("no image")
    printed = error_of(capsys, "index", "--images", tmp_path / "empty", *to, *model)
    assert printed.startswith("index: none of the 1 images in")
    printed = error_of(capsys, "index", *images, "--output", tmp_path / "empty", *model)
    assert "must be written to a new folder or over an index" in printed
    assert "`--factory` must be one of faiss'" in error_of(capsys, "index", *images, *to, *model, "--factory=Flatt")
    assert "`--factory` 'IVF64,Flat' must be trained" in error_of(
        capsys, *indexing(indexed, to[1], "--factory=IVF64,Flat")
    )
    assert "`--batch_size` must be an integer >= 1, got 0" in error_of(
        capsys, *indexing(indexed, to[1], "--batch_size=0")
    )
    assert not (tmp_path / "index").exists()


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "subprocess.Popen",
            "must name a function of yours from a PIL image to a tensor, got 'subprocess.Popen', which",
        ),
        ("os.system", "must name a function of yours from a PIL image to a tensor, got 'os.system', which is part of"),
        (
            "torch.nn.Linear",
            "must name a function from a PIL image to a tensor, got 'torch.nn.Linear', which is a class",
        ),
        ("torch.linalg.inv", "got 'torch.linalg.inv', which raises TypeError for a black image of 224 x 224 pixels ("),
        ("numpy.shape", "got 'numpy.shape', which returns tuple; end it with v2.ToImage() and"),
        ("numpy.nothing", "must name a function that can be imported, got numpy.nothing ("),
    ],
)
def test_invalid_function_in_place_of_a_transform(indexed, tmp_path, capsys, name, message):
    printed = error_of(capsys, *indexing(indexed, tmp_path / "index", f"--transform={name}"))
    assert printed.startswith("index: `--transform` ")
    assert message in printed
    assert not (tmp_path / "index").exists()
