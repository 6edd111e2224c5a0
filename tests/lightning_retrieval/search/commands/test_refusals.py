"""Invalid calls of the commands, and of the functions that they call."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_retrieval import Embedder, PCAWhitening, RetrievalIndex, RetrievalModule, SmoothAPLoss, TwoNetworks
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.models import TextEmbedder
from lightning_retrieval.search.commands.adapt import adapt_head
from lightning_retrieval.search.commands.embed import embed_images
from lightning_retrieval.search.commands.search_images import search_images
from lightning_retrieval.search.export.onnx_file import can_write_onnx
from tests.lightning_retrieval.search.commands.glyph_commands import SMALL, STRANGE_NAME, TEXTS, save_checkpoint
from tests.lightning_retrieval.search.commands.test_adapt import DIM, folder_of, points
from tests.refusals import refusal_test


@pytest.fixture
def given(tmp_path):
    """Write a file of this name with a text; its path."""

    def write(name, text=""):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def torch_with_onnx():
    if not can_write_onnx(torch.__version__):
        pytest.skip("torch writes ONNX from 2.8 on")


@pytest.fixture
def colour_and_glyphs(colour, glyphs):
    """A model for colour images, and images of glyphs."""
    return ["--output=new", "--checkpoint", colour[0], "--images", glyphs[0] / "images"]


@pytest.fixture
def captions(tmp_path):
    """A checkpoint whose candidates are texts."""
    module = RetrievalModule(TextEmbedder(**TEXTS), SmoothAPLoss(), sides=TwoNetworks(Embedder(**SMALL)))
    return save_checkpoint(tmp_path / "captions.ckpt", module)


@pytest.fixture
def points_folder(glyphs, tmp_path):
    """Write a folder of embeddings of six classes, as if the model for glyphs had made them."""

    def write(rows=48, labels=True, factor=1.0, checkpoint=glyphs[0] / "model.ckpt", **about):
        embeddings, names = points(noise=1.0, classes=6)
        names = names[:rows] if labels else None
        return folder_of(tmp_path / "points", checkpoint, factor * embeddings[:rows], names, **about)

    return write


@pytest.fixture
def adapting_to(points_folder):
    """The arguments of `adapt` for such a folder."""

    def args(output, **settings):
        return [f"--embeddings={points_folder(**settings)}", f"--output={output}"]

    return args


@pytest.fixture
def not_finite():
    return {"factor": np.where(np.arange(48)[:, None] == 3, np.nan, 1.0).astype(np.float32)}


@pytest.fixture
def whitened(tmp_path):
    """A checkpoint with whitening."""
    whitening = PCAWhitening(dim=4).fit(torch.from_numpy(points(noise=1.0)[0]))
    module = RetrievalModule(Embedder("glyph_net", DIM), SmoothAPLoss(), whitening=whitening)
    return {"checkpoint": save_checkpoint(tmp_path / "whitened.ckpt", module)}


@pytest.fixture
def one_class(given):
    return ["--images", given("class/1.png").parent.parent]


@pytest.fixture
def images_as_texts(two_sides):
    """Images for a network of queries that embeds texts."""
    return [
        "--output=new",
        f"--checkpoint={two_sides / 'texts.ckpt'}",
        f"--images={two_sides / 'images'}",
        "--side=queries",
    ]


@pytest.fixture
def query_rows(two_sides, tmp_path):
    """Embeddings of queries."""
    embed_images(two_sides / "images.ckpt", two_sides / "images", tmp_path / "q", side="queries", device="cpu")
    return tmp_path / "q"


@pytest.fixture
def not_unicode(glyphs, tmp_path):
    """A folder of images one of which has a name that is not valid Unicode."""
    (tmp_path / "images").mkdir()
    for name in ("a.png", "\udcff.png"):
        (tmp_path / "images" / name).write_bytes((glyphs[0] / "images" / STRANGE_NAME).read_bytes())
    return tmp_path / "images"


class Undefined(torch.nn.Module):
    """A loss that is not a number from one of its calls on."""

    def __init__(self, first):
        super().__init__()
        self.calls, self.first = 0, first

    def forward(self, embeddings, labels):
        self.calls += 1
        return embeddings.sum() * (float("nan") if self.calls > self.first else 1.0)


def of_images(folder, *more):
    """Arguments that index or embed the images of a folder with its checkpoint."""
    return ["--output=new", "--device=cpu", "--checkpoint", folder / "model.ckpt", "--images", folder / "images", *more]


def indexing(*more):
    """Arguments for the glyphs, as `index`, `embed` and `report` take them."""
    return lambda glyphs: of_images(glyphs[0], *more)


def of_backbone(*more):
    return lambda glyphs: ["--output=new", "--images", glyphs[0] / "images", *more]


def of_embeddings(*more):
    return lambda embeddings: ["--embeddings", embeddings, "--output=new", *more]


def validating(*more):
    """The same with a threshold that is chosen on embeddings without labels."""
    return lambda embeddings: ["--embeddings", embeddings, "--output=new", "--validation", embeddings, *more]


def searching(*more):
    return lambda indexed: [f"--index={indexed / 'index'}", indexed / "images" / STRANGE_NAME, "--device=cpu", *more]


def searching_texts(name, *more):
    """A search with another checkpoint of the index of two networks."""
    return lambda two_sides: [f"--index={two_sides / 'index'}", f"--checkpoint={two_sides / name}", *more]


def adapting(*more):
    return lambda points_folder: ["--embeddings", points_folder(), "--output=a.ckpt", *more]


def adapting_with(option, text):
    """The same with an option that is a file with a text."""
    return lambda points_folder, given: [*adapting()(points_folder), f"--{option}", given("t.csv", text)]


def exporting(*more):
    """Arguments that export the model for glyphs, in which {} is its folder."""
    args = ["--checkpoint={}/model.ckpt", "--output=new", *more]
    return lambda glyphs, torch_with_onnx: [arg.format(glyphs[0]) for arg in args]


def report_of(table):
    """A report of a table with these lines."""
    return lambda glyphs, given: of_images(glyphs[0], "--output=a.html", f"--images={given('t.csv', table)}")


def metadata_of(table, *more):
    """An index with a table of metadata with these lines."""
    return lambda glyphs, given: of_images(glyphs[0], f"--metadata={given('t.csv', table)}", *more)


GLYPH = "0/deeper/01.PNG"
OTHER_DIM = '{"num_classes": 6, "embedding_size": 25}'
MILVUS = "--store=milvus:a.db"


def indexing_with(option, name, text):
    """The same with an option that is a file with a text."""
    return lambda glyphs, given: of_images(glyphs[0], f"--{option}", given(name, text))


def in_milvus(*more):
    def call(glyphs):
        pytest.importorskip("milvus_lite")
        return of_images(glyphs[0], "--output=glyphs", MILVUS, *more)

    return call


def search_with(**settings):
    return lambda indexed: search_images(RetrievalIndex.load(indexed / "index"), ["a.png"], device="cpu", **settings)


def adapt_with(loss, **settings):
    return lambda points_folder: adapt_head(points_folder(), Path("a.ckpt"), loss=loss, **settings)


TABLE = {
    "search": [
        (lambda: ["--index=x"], SystemExit, "--text", ""),
        (searching("-k41"), SystemExit, "-k", "41"),
        (searching("-k0"), SystemExit, "-k", "0"),
        (lambda: ["--index=none", "a.png"], SystemExit, "index", "none"),
        (searching("--html=gone/a.html"), SystemExit, "--html", "gone"),
        (searching("--images=gone", "--html=a.html"), SystemExit, "--images", "gone"),
        (searching("--transform=plain"), SystemExit, "--transform", "plain"),
        (searching("--parameters=nope=1"), SystemExit, "--parameters", "nope=1"),
        (searching("--where=price < '3'"), SystemExit, "--where", "price < '3'"),
        (searching("--group_by=colour"), SystemExit, "--group_by", "colour"),
        (searching("--show=colour"), SystemExit, "--show", "colour"),
        (searching("--text=red shoes"), SystemExit, "--text", ""),
        (lambda indexed: [f"--index={indexed / 'index'}", "gone.png", "--device=cpu"], SystemExit, "gone.png", ""),
        (searching_texts("other.ckpt", "--text=red"), SystemExit, "--checkpoint", ""),
        (searching_texts("texts.ckpt", "--text= "), SystemExit, "--text", "' '"),
        (lambda: ["--index=a", "--store=milvus:gone.db", "a.png"], SystemExit, "--store", "gone.db"),
    ],
    "demo": [
        (lambda indexed: ["--index", indexed / "index", "-k=0"], SystemExit, "-k", "0"),
        (lambda indexed: ["--index", indexed / "index", "--port=65536"], SystemExit, "--port", "65536"),
        (lambda indexed: ["--index", indexed / "index", "--images=gone"], SystemExit, "--images", "gone"),
    ],
    "index": [
        (lambda: ["--output=new", "--images=."], SystemExit, "--checkpoint", ""),
        (lambda: ["--output=new", "--images=.", "--checkpoint=.", "--image_size=64"], SystemExit, "--image_size", ""),
        (lambda: ["--output=new", "--embeddings=.", "--images=."], SystemExit, "--images", ""),
        (of_embeddings("--update", "--overwrite"), SystemExit, "--overwrite", ""),
        (lambda: ["--output=new", "--images=.", "--backbone=resnet18"], SystemExit, "--weights", ""),
        (lambda: ["--output=new", "--images=.", "--weights=DEFAULT"], SystemExit, "--backbone", ""),
        (indexing("--checkpoint=gone.ckpt"), SystemExit, "--checkpoint", "gone.ckpt"),
        (indexing_with("checkpoint", "no.ckpt", "x"), SystemExit, "--checkpoint", ""),
        (lambda glyphs, captions: of_images(glyphs[0], "--checkpoint", captions), SystemExit, "the model", ""),
        (indexing("--images=gone"), SystemExit, "--images", "gone"),
        (lambda glyphs, tmp_path: of_images(glyphs[0], f"--images={tmp_path}"), SystemExit, "--images", ""),
        (lambda glyphs, given: of_images(glyphs[0], f"--images={given('a.png').parent}"), SystemExit, "image", "a.png"),
        (lambda glyphs: of_images(glyphs[0], f"--output={glyphs[0]}"), SystemExit, "index", ""),
        (indexing("--batch_size=0"), SystemExit, "--batch_size", "0"),
        (indexing("--factory=PQ5"), SystemExit, "--factory", "PQ5"),
        (indexing("--factory=IVF64,Flat"), SystemExit, "--factory", "IVF64,Flat"),
        (indexing("--parameters=nprobe=3"), SystemExit, "--parameters", "nprobe=3"),
        (indexing("--transform=none"), SystemExit, "--transform", "none"),
        (indexing("--transform=plain"), SystemExit, "--transform", "plain"),
        (indexing("--transform=torch.nn.Linear"), SystemExit, "--transform", "torch.nn.Linear"),
        (indexing("--transform=numpy.nothing"), SystemExit, "--transform", "numpy.nothing"),
        (lambda colour_and_glyphs: [*colour_and_glyphs, "--transform=glyphs"], SystemExit, "--transform", "glyphs"),
        (lambda tmp_path: ["--embeddings", tmp_path, "--output=new"], SystemExit, "embeddings", ""),
        (lambda query_rows: ["--embeddings", query_rows, "--output=new"], SystemExit, "--embeddings", ""),
        (of_embeddings("--shards=0"), SystemExit, "--shards", "0"),
        (indexing("--missing=keep"), SystemExit, "--missing", "keep"),
        (indexing(f"--metadata={'a' * 300}"), SystemExit, "--metadata", "too long"),
        (indexing("--metadata=gone.csv"), SystemExit, "--metadata", "gone.csv"),
        (metadata_of("image,a\nx.png,1\nx.png,2\n"), SystemExit, "image", "x.png"),
        (metadata_of("image,a\nx.png,1\n"), SystemExit, "--metadata", "40 of 40"),
        (metadata_of("image,a\n0\\deeper\\01.PNG,1\n"), SystemExit, "--metadata", "\\"),
        (metadata_of(f"image,a\nimages/{GLYPH},1\n"), SystemExit, "--metadata", "leave out images"),
        (metadata_of("image,a\nx.png,1\n", "--missing=keep"), SystemExit, "--metadata", "40 of 40"),
        (metadata_of("image,a,a\nx.png,1,2\n"), SystemExit, "a", ""),
        (metadata_of(f"image,größe\n{GLYPH},1\n", "--missing=keep"), SystemExit, "--metadata", "größe"),
        (metadata_of("image,a\nx.png,1\n", "--columns=image="), SystemExit, "--columns", "image="),
        (metadata_of(f"image,a\n{GLYPH},1\n", "--missing=keep", MILVUS, "--output=g"), SystemExit, "--metadata", ""),
        (of_embeddings("--false_match_rate=0.1"), SystemExit, "--validation", ""),
        (validating("--false_match_rate=2"), SystemExit, "--false_match_rate", "2"),
        (validating("--false_match_rate=0"), SystemExit, "--validation", ""),
        (indexing("--store=photos.db"), SystemExit, "--store", "photos.db"),
        (in_milvus("--shards=2"), SystemExit, "--shards", "2"),
        (in_milvus("--factory=IVF4,Flat"), SystemExit, "--factory", "IVF4,Flat"),
        (in_milvus("--parameters=ef"), SystemExit, "--parameters", "ef"),
        (lambda glyphs, not_unicode: in_milvus(f"--images={not_unicode}")(glyphs), SystemExit, "paths", "udcff"),
        (of_backbone("--backbone=a", "--weights=b", "--image_size=0"), SystemExit, "--image_size", "0"),
        (of_backbone("--backbone=a", "--weights=b", "--preparation={"), SystemExit, "--preparation", ""),
        (of_backbone("--backbone=squeezenet11", "--weights=DEFAULT"), SystemExit, "--backbone", "squeezenet11"),
        (of_backbone("--backbone=squeezenet1_1", "--weights=gone.pth"), SystemExit, "--weights", "gone.pth"),
        (of_backbone("--backbone=squeezenet1_1", "--weights=IMAGENET"), SystemExit, "--weights", "IMAGENET"),
        (of_backbone("--backbone=glyph_net", "--weights=DEFAULT"), SystemExit, "--weights", "DEFAULT"),
    ],
    "embed": [
        (of_backbone("--backbone=a", "--weights=b", "--checkpoint=."), SystemExit, "--checkpoint", ""),
        (indexing("--device=none"), SystemExit, "--device", "none"),
        (indexing("--device=meta"), SystemExit, "--device", "meta"),
        (indexing("--device=cpu:0", "--devices=2"), SystemExit, "--device", "cpu:0"),
        (indexing("--precision=8"), SystemExit, "--precision", "8"),
        (indexing("--shard_size=0"), SystemExit, "--shard_size", "0"),
        (indexing("--root=."), SystemExit, "--root", "."),
        (lambda images_as_texts: images_as_texts, SystemExit, "--images", ""),
    ],
    "export": [
        (lambda: ["--output=new"], SystemExit, "--checkpoint", ""),
        (exporting("--int8"), SystemExit, "--images", ""),
        (exporting("--images=."), SystemExit, "--int8", ""),
        (exporting("--int8", "--images={}/images/1"), SystemExit, "--images", ""),
        (exporting("--output={}/model.ckpt"), SystemExit, "--output", ""),
        (
            lambda colour, torch_with_onnx: ["--output=new", f"--checkpoint={colour[0]}", "--transform=ap_gem"],
            SystemExit,
            "one size",
            "",
        ),
        (
            lambda two_sides, torch_with_onnx: ["--checkpoint", two_sides / "texts.ckpt", "--output=new"],
            SystemExit,
            "--checkpoint",
            "",
        ),
    ],
    "report": [
        (lambda: ["--output=a.html", "--images=."], SystemExit, "--checkpoint", ""),
        (indexing("--output=report.txt"), SystemExit, "--output", "report.txt"),
        (indexing("--output=gone/a.html"), SystemExit, "--output", "gone"),
        (indexing("--output=a.html", "--false_match_rate=2"), SystemExit, "--false_match_rate", "2"),
        (indexing("--output=a.html", "--images=none"), SystemExit, "--images", "none"),
        (lambda glyphs, one_class: of_images(glyphs[0], "--output=a.html", *one_class), SystemExit, "--images", ""),
        (report_of("image\na.png\n"), SystemExit, "label", ""),
        (report_of("image,label\na.png,\n"), SystemExit, "label", ""),
        (
            report_of("image,label,split\n1.png,a,Test\n2.png,a,testing\n3.png,b,Train\n"),
            SystemExit,
            "split",
            "testing",
        ),
        (report_of("image,label\n1.png,1\n2.png,1\n3.png,1.0\n4.png,2\n"), SystemExit, "label", "1.0"),
        (report_of("image,label\n1.png,a\n2.png,b\n"), SystemExit, "--images", ""),
        (report_of("image,label,camera\n1.png,a,1\n2.png,a,1\n3.png,b,2\n4.png,b,2\n"), SystemExit, "camera", ""),
    ],
    "adapt": [
        (adapting("--labels=gone.csv"), SystemExit, "--labels", "gone.csv"),
        (adapting_with("labels", "image,label\n0.jpg,a\n1.jpg,\n"), SystemExit, "--labels", ""),
        (adapting_with("labels", "image,label\n0.jpg,a\n0.jpg,b\n"), SystemExit, "image", "0.jpg"),
        (adapting_with("output", "a file of the user"), SystemExit, "--output", ""),
        (adapting("--loss=system"), SystemExit, "--loss", "system"),
        (adapting("--loss=os.system"), SystemExit, "--loss", "os.system"),
        (adapting("--loss=lightning_retrieval.RetrievalIndex"), SystemExit, "--loss", "RetrievalIndex"),
        (adapting("--loss_args=[1]"), SystemExit, "--loss_args", "[1]"),
        (adapting('--loss_args={"size": 1}'), SystemExit, "--loss", "size"),
        (adapting("--loss=ProxyAnchorLoss", f"--loss_args={OTHER_DIM}"), SystemExit, "--loss", "24 numbers"),
        (adapting("--compare"), SystemExit, "--output", "a.ckpt"),
        (adapting("--losses=log rank"), SystemExit, "--compare", ""),
        (adapting("--batch_size=16385"), SystemExit, "--batch_size", "16385"),
        (adapting("--embedding_dim=0"), SystemExit, "--embedding_dim", "0"),
        (lambda glyphs, adapting_to: adapting_to(glyphs[0] / "model.ckpt"), SystemExit, "--output", ""),
        (lambda adapting_to: adapting_to("a.ckpt", rows=24), SystemExit, "classes", ""),
        (lambda adapting_to: adapting_to("a.ckpt", labels=False), SystemExit, "--embeddings", "48 of 48"),
        (lambda adapting_to: adapting_to("a.ckpt", checkpoint_sha256="0"), SystemExit, "--checkpoint", ""),
        (
            lambda adapting_to, two_sides: adapting_to("a.ckpt", checkpoint=two_sides / "texts.ckpt"),
            SystemExit,
            "--checkpoint",
            "texts.ckpt",
        ),
        (lambda adapting_to, not_finite: adapting_to("a.ckpt", **not_finite), SystemExit, "NaN", "3.jpg"),
        (lambda adapting_to, whitened: adapting_to("a.ckpt", **whitened), SystemExit, "--embeddings", ""),
    ],
    "adapt_head": [
        (adapt_with(Undefined(first=0)), InvalidValue, "loss"),
        (adapt_with(Undefined(first=1)), InvalidValue, "loss"),
    ],
    "search_images": [
        (search_with(show="price"), InvalidType, "show"),
    ],
    "RetrievalIndex": [(search_with(k=2.5), InvalidType, "k")],
}

test_invalid_arguments_raise = refusal_test(TABLE)
