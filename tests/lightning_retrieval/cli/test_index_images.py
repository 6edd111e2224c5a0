"""The embeddings in an index are those of the model, with images prepared as the checkpoint records."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torchvision.transforms import v2

from lightning_retrieval import Embedder, PCAWhitening, RetrievalIndex, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli.embedding import ImageEmbedder
from lightning_retrieval.cli.index import index_images
from lightning_retrieval.datamodules import ImageFolder
from lightning_retrieval.models import Preparation
from lightning_retrieval.preparation.described import describe_transform
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from tests.datamodules.trees import write_image
from tests.datamodules.trees_more import write_folders
from tests.lightning_retrieval.cli.glyph_commands import (
    command,
    error_of,
    indexing,
    paths_of,
    save_checkpoint,
)

MEDIUM = v2.Compose([v2.Resize((64, 64)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def test_embeddings_include_whitening_and_scales_of_the_module(glyphs, tmp_path, capsys):
    torch.manual_seed(1)
    whitening = PCAWhitening(dim=6).fit(glyphs[1])
    settings = {"whitening": whitening, "eval_scales": (1.0, 0.5)}
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss(), **settings).eval()
    model = save_checkpoint(tmp_path / "model.ckpt", module)
    folder = glyphs[0] / "images"
    paths = paths_of(folder)
    images = [torch.as_tensor(np.array(Image.open(folder / path).convert("L"))) for path in paths]
    with torch.no_grad():
        expected = module.embed(torch.stack(images)[:, None].float() / 255).double()
    args = ["--images", folder, "--output", tmp_path / "index", "--checkpoint", model]
    code, out, _ = command(capsys, "index", *args)
    assert code == 0
    assert "40 images, 6 dimensions" in out
    code, out, _ = command(capsys, "search", folder / paths[7], "--index", tmp_path / "index", "-k40", "--json")
    unit = expected / expected.norm(dim=1, keepdim=True)
    scores = dict(zip(paths, (unit @ unit[7]).tolist()))
    found = {hit["path"]: hit["similarity"] for hit in json.loads(out)["queries"][0]["results"]}
    assert found == pytest.approx(scores, abs=1e-5)


def test_all_commands_decode_at_the_reduced_scale_of_the_checkpoint(tmp_path, capsys):
    torch.manual_seed(0)
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss()).eval()
    preparation = dataclasses.replace(Preparation.named("glyphs"), reduced_scale=True)
    module.preparation = describe_transform(preparation)
    model = save_checkpoint(tmp_path / "model.ckpt", module)
    paths = [f"{number}.jpg" for number in range(6)]
    images = []
    for number, path in enumerate(paths):
        write_image(tmp_path / "images" / path, size=(170, 130), seed=number)
        with Image.open(tmp_path / "images" / path) as image:
            image.draft("RGB", (42, 32))
            images.append(Preparation.named("glyphs")(image.convert("RGB")))
    expected = torch.nn.functional.normalize(module.embed(torch.stack(images)), dim=1).detach()
    args = ["--images", tmp_path / "images", "--output", tmp_path / "index", "--checkpoint", model]
    code, out, _ = command(capsys, "index", *args)
    assert (code, "reduced_scale=True" in out) == (0, True)
    index = RetrievalIndex.load(tmp_path / "index")
    assert index.about["preparation"] == {"preparation": preparation.as_dict()}
    assert torch.allclose(index.embeddings(torch.arange(6)), expected, atol=1e-5)
    query = tmp_path / "images" / paths[3]
    code, out, _ = command(capsys, "search", query, "--index", tmp_path / "index", "-k6", "--json")
    found = {hit["path"]: hit["similarity"] for hit in json.loads(out)["queries"][0]["results"]}
    assert found == pytest.approx(dict(zip(paths, (expected @ expected[3]).tolist())), abs=1e-5)
    args = ["--images", tmp_path / "images", "--output", tmp_path / "rows", "--checkpoint", model, "--format=npy"]
    code, _, _ = command(capsys, "embed", *args)
    assert code == 0
    rows = EmbeddingFolder.load("test", tmp_path / "rows").read(0).embeddings
    assert torch.allclose(torch.nn.functional.normalize(torch.from_numpy(rows), dim=1), expected, atol=1e-5)


def trained(folder, **settings):
    """A checkpoint that a fit on a folder of images wrote, then gone on with for an epoch more."""
    write_folders(folder / "images", ["a", "b", "c", "d"], images=2)
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    sizes = {"classes_per_batch": 2, "samples_per_class": 2, "test_fraction": 0.5, "train_transform": MEDIUM}
    for epochs in (1, 2):
        data = ImageFolder(folder / "images", **sizes, **settings)
        torch.manual_seed(0)
        module = RetrievalModule(Embedder("squeezenet1_1", embedding_dim=8), SmoothAPLoss())
        trainer = pl.Trainer(
            max_epochs=epochs, limit_val_batches=0, default_root_dir=folder, enable_checkpointing=False, **quiet
        )
        path = folder / "model.ckpt"
        trainer.fit(module, data, ckpt_path=path if epochs == 2 else None, weights_only=True)
        trainer.save_checkpoint(path)
    assert trainer.current_epoch == 2
    return path


def in_one_sentence(printed):
    assert printed.count("\n") == 1
    return printed


@pytest.mark.slow
def test_images_are_prepared_as_the_checkpoint_says(tmp_path, capsys):
    trained(tmp_path, transform="roadmap", image_size=64, background="black")
    code, out, err = command(capsys, *indexing(tmp_path, tmp_path / "index"))
    assert (code, err) == (0, "")
    shown = "Preparation(image_size=64, resize=[73, 73], background=black)"
    assert out.startswith(f"images prepared with {shown}, as the checkpoint says\n")
    about = RetrievalIndex.load(tmp_path / "index").about
    assert Preparation(**about["preparation"]["preparation"]) == Preparation(64, (73, 73), background="black")
    printed = error_of(capsys, *indexing(tmp_path, tmp_path / "other", "--transform=plain"))
    assert in_one_sentence(printed).startswith(
        f"index: `--transform` must be that of the model, which was evaluated with {shown}, got 'plain'; leave it out."
    )


USER_CODE = """
from torchvision.transforms import v2
import torch

def evaluate(image):
    return v2.functional.to_dtype(v2.functional.to_image(image.resize((64, 64))), torch.float32, scale=True)
"""


@pytest.mark.slow
@pytest.mark.refusal
def test_a_function_is_imported_only_if_the_user_names_it(tmp_path, capsys, monkeypatch):
    (tmp_path / "user_code_of_index.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    trained(tmp_path, eval_transform=importlib.import_module("user_code_of_index").evaluate)
    del sys.modules["user_code_of_index"]
    printed = error_of(capsys, *indexing(tmp_path, tmp_path / "index"))
    assert in_one_sentence(printed).startswith(
        "index: `--transform` must be given, because the model was evaluated with user_code_of_index.evaluate, whose "
    )
    printed = error_of(capsys, *indexing(tmp_path, tmp_path / "index", "--transform=os.remove"))
    assert "must be the one that the model was evaluated with, user_code_of_index.evaluate, got 'os.remove'" in printed
    assert "user_code_of_index" not in sys.modules
    assert not (tmp_path / "index").exists()
    option = "--transform=user_code_of_index.evaluate"
    assert command(capsys, *indexing(tmp_path, tmp_path / "index", option))[0] == 0
    query = ["search", f"--index={tmp_path / 'index'}", tmp_path / "images" / "a" / "0.jpg"]
    assert "`--transform` must be given, because the model was evaluated with" in error_of(capsys, *query)
    assert command(capsys, *query, option)[0] == 0


def photo():
    """Colours and shapes without any symmetry."""
    generator = torch.Generator().manual_seed(3)
    return Image.fromarray(torch.randint(0, 255, (5, 8, 3), generator=generator, dtype=torch.uint8).numpy()).resize(
        (300, 260)
    )


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["plain", "roadmap", "ap_gem"])
def test_images_are_upright_and_in_colour_whatever_the_file_format(colour, transform, tmp_path, capsys, monkeypatch):
    def download(*args, **keywords):
        raise AssertionError("the weights are in the checkpoint")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", download)
    path, module = colour
    upright = photo()
    (tmp_path / "images").mkdir()
    upright.save(tmp_path / "images" / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    upright.rotate(90, expand=True).save(tmp_path / "images" / "b.PNG", exif=exif)
    upright.convert("L").crop((0, 0, 280, 250)).save(tmp_path / "images" / "c.png")
    images = ["--images", tmp_path / "images", "--checkpoint", path]
    code, out, err = command(capsys, "index", *images, "--output", tmp_path / "index", "--transform", transform)
    assert (code, err) == (0, "")
    assert "3 images, 16 dimensions, Flat (exact)" in out
    index = RetrievalIndex.load(tmp_path / "index")
    with torch.no_grad():
        expected = [
            module(Preparation.named(transform)(image)[None])
            for image in (upright, upright, upright.convert("L").crop((0, 0, 280, 250)).convert("RGB"))
        ]
    for position, embedding in enumerate(expected):
        similarities, ids = index.search(embedding, 3)
        row = ids[0].tolist().index(position)
        assert similarities[0, row] == pytest.approx(1, abs=1e-5)
    assert index.search(expected[2], 3)[0][0, 2] < 1 - 1e-4  # or the test would show nothing


@pytest.mark.refusal
@pytest.mark.parametrize("bad", ["--factory=Flatt", "--factory=PQ5", "--factory=HNSW8,PQ4", "--parameters=nprobe=3"])
def test_invalid_index_settings_raise_after_the_first_batch(bad, indexed, tmp_path, capsys, monkeypatch):
    real, seen = ImageEmbedder._embed_batch, []

    def counted(self, images):
        seen.append(len(images))
        return real(self, images)

    monkeypatch.setattr(ImageEmbedder, "_embed_batch", counted)
    assert error_of(capsys, *indexing(indexed, tmp_path / "index", bad, "--batch_size=7")).startswith(
        "RetrievalIndex: `--"
    )
    assert seen == [7]


@pytest.mark.refusal
def test_messages_name_arguments_of_the_function(indexed, tmp_path):
    checkpoint, images = indexed / "model.ckpt", indexed / "images"
    with pytest.raises(FileNotFoundError, match=r"^index_images: `images` must be a folder.*, got gone, which is"):
        index_images(checkpoint, Path("gone"), tmp_path / "index")
    with pytest.raises(
        FileNotFoundError, match=r"^index_images: `checkpoint` must be a file.*, got gone, which does not exist\.$"
    ):
        index_images(Path("gone"), images, tmp_path / "index")
    with pytest.raises(
        ValueError,
        match=r"^index_images: `transform` must be one of 'plain', .*or the name of a function.*, got 'none'\.$",
    ):
        index_images(checkpoint, images, tmp_path / "index", transform="none")
    with pytest.raises(ValueError, match=r"^index_images: `device` must be a device.*, got 'meat'"):
        index_images(checkpoint, images, tmp_path / "index", device="meat")
    with pytest.raises(ValueError, match=r"^index_images: `num_workers` must be an integer >= 0, got -1\.$"):
        index_images(checkpoint, images, tmp_path / "index", num_workers=-1)


def test_the_index_records_where_the_preparation_came_from(indexed, tmp_path):
    glyphs = {"preparation": Preparation.named("glyphs").as_dict()}
    sources = set()
    for number, transform in enumerate((None, "glyphs")):
        index, unreadable = index_images(
            indexed / "model.ckpt", indexed / "images" / "1", tmp_path / str(number), transform=transform
        )
        assert unreadable == []
        assert index.about["preparation"] == glyphs
        sources.add(index.about["preparation_from"])
    assert sources in ({"default", "argument"}, {"model", "argument"})
