"""An index of forty glyphs and checkpoints of two models, made once for the tests of all commands."""

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss, TwoNetworks
from lightning_retrieval.cli.main import main
from lightning_retrieval.datamodules.glyphs.drawing import load_glyph_images
from lightning_retrieval.models import FrozenEmbedder, TextEmbedder
from lightning_retrieval.search.commands.embed import embed_images
from tests.lightning_retrieval.search.commands.glyph_commands import (
    SMALL,
    STRANGE_NAME,
    TEXTS,
    indexing,
    save_checkpoint,
)


def glyph_name(position):
    """Paths at several depths, with suffixes in lower and upper case."""
    if position == 0:
        return STRANGE_NAME
    suffix = "PNG" if position % 2 else "bmp"
    return f"{position // 10}/deeper/{position:02d}.{suffix}"


@pytest.fixture(scope="session")
def glyphs(tmp_path_factory):
    """A folder with a model for glyphs and images of forty of them, and the embeddings that the model gives them."""
    folder = tmp_path_factory.mktemp("glyphs")
    torch.manual_seed(0)
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss()).eval()
    save_checkpoint(folder / "model.ckpt", module)
    drawn = torch.as_tensor(np.asarray(load_glyph_images().images[:4000:100]))
    with torch.no_grad():
        embeddings = module(drawn[:, None].float() / 255)
    for position, glyph in enumerate(drawn):
        path = folder / "images" / glyph_name(position)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(glyph.numpy()).save(path, None if path.suffix == ".bmp" else "png")
    (folder / "images" / "notes.txt").write_text("no image")
    (folder / "images" / ".hidden.png").write_text("no image")
    return folder, embeddings


@pytest.fixture(scope="session")
def indexed(glyphs):
    """The same folder, with an index of the images."""
    main(indexing(glyphs[0], glyphs[0] / "index"))
    return glyphs[0]


@pytest.fixture(scope="session")
def embeddings(glyphs, tmp_path_factory):
    """The embeddings of the same images in three files of a folder."""
    path = tmp_path_factory.mktemp("embeddings") / "e"
    embed_images(glyphs[0] / "model.ckpt", glyphs[0] / "images", path, shard_size=15, device="cpu")
    return path


@pytest.fixture(scope="session")
def other_model(tmp_path_factory):
    """A checkpoint of another model for glyphs."""
    torch.manual_seed(1)
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss()).eval()
    return save_checkpoint(tmp_path_factory.mktemp("other") / "model.ckpt", module)


@pytest.fixture(scope="session")
def colour(tmp_path_factory):
    """A checkpoint for colour images, which asks for pretrained weights as after a real training."""
    folder = tmp_path_factory.mktemp("colour")
    torch.manual_seed(0)
    embedder = Embedder("squeezenet1_1", embedding_dim=16)
    embedder.weights = "IMAGENET1K_V1"
    module = RetrievalModule(embedder, SmoothAPLoss()).eval()
    return save_checkpoint(folder / "model.ckpt", module), module


@pytest.fixture(scope="session")
def two_sides(tmp_path_factory):
    """Images, the checkpoint that indexed them, and checkpoints of queries for its network."""
    folder = tmp_path_factory.mktemp("two_sides")
    (folder / "images").mkdir()
    pictures = np.random.default_rng(0).integers(0, 256, (6, 32, 32), dtype=np.uint8)
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(folder / "images" / f"{number}.png")
    torch.manual_seed(0)
    save_checkpoint(folder / "old.ckpt", RetrievalModule(Embedder(**SMALL), SmoothAPLoss()))
    save_checkpoint(folder / "other.ckpt", RetrievalModule(Embedder(**SMALL), SmoothAPLoss()))
    for name, network in (("texts", TextEmbedder(**TEXTS)), ("images", Embedder("glyph_net", 16))):
        frozen = FrozenEmbedder(checkpoint=str(folder / "old.ckpt"))
        save_checkpoint(folder / f"{name}.ckpt", RetrievalModule(frozen, SmoothAPLoss(), sides=TwoNetworks(network)))
    indexing_old = [f"--checkpoint={folder / 'old.ckpt'}", f"--images={folder / 'images'}"]
    main(["index", *indexing_old, f"--output={folder / 'index'}", "--device=cpu"])
    return folder
