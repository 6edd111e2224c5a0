"""`lightning-retrieval index` and `search`: from a checkpoint and a folder of images to a page in a browser."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torchvision.transforms import v2

from lightning_retrieval import Embedder, PCAWhitening, RetrievalIndex, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli import images as search_module
from lightning_retrieval.cli.main import main
from lightning_retrieval.datamodules import ImageFolder, reference_transform
from lightning_retrieval.datamodules.glyphs.glyph_images import load_glyph_images
from tests.datamodules.trees_more import QUIET, write_folders

pytestmark = [pytest.mark.filterwarnings(ignored) for ignored in QUIET]
MEDIUM = v2.Compose([v2.Resize((64, 64)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
ODD = "<script>alert('&\"')<\\script>.png"  # a name that a page must not run


def checkpoint(path, module):
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path, weights_only=True)
    return path


def command(capsys, *args):
    """The exit code of the command, what it printed and what it complained of."""
    with pytest.raises(SystemExit) as end:
        main([*map(str, args), "--device=cpu"])
    return end.value.code, *capsys.readouterr()


@pytest.fixture(scope="module")
def glyphs(tmp_path_factory):
    """A checkpoint for glyphs, a folder with forty of them, and what the model itself makes of these."""
    folder = tmp_path_factory.mktemp("glyphs")
    torch.manual_seed(0)
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss()).eval()
    checkpoint(folder / "model.ckpt", module)
    drawn = torch.as_tensor(np.asarray(load_glyph_images().images[:4000:100]))
    with torch.no_grad():
        embeddings = module(drawn[:, None].float() / 255)
    for place, glyph in enumerate(drawn):
        name = f"{place // 10}/deeper/{place:02d}.{'PNG' if place % 2 else 'bmp'}" if place else ODD
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(glyph.numpy()).save(folder / "images" / name, "png" if not place else None)
    (folder / "images" / "notes.txt").write_text("no image")
    (folder / "images" / ".hidden.png").write_text("no image")
    return folder, embeddings


@pytest.fixture(scope="module")
def indexed(glyphs):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(indexing(glyphs[0], glyphs[0] / "index"))
    return glyphs[0]


def indexing(folder, output, *more):
    return [
        "index",
        f"--checkpoint={folder / 'model.ckpt'}",
        f"--images={folder / 'images'}",
        f"--output={output}",
        *more,
    ]


def paths_of(folder):
    """The paths in the order of the glyphs."""
    found = {path.name: path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return [found.pop(ODD), *(found[name] for name in sorted(found) if re.match(r"\d\d\.", name))]


def test_search_ranks_as_the_model_does(glyphs, indexed, capsys):
    _, embeddings = glyphs
    paths = paths_of(indexed / "images")
    queries = [indexed / "images" / paths[place] for place in (7, 0)]
    code, out, err = command(capsys, "search", "--index", indexed / "index", *queries, "-k", 40, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["unread"] == []
    unit = embeddings.double() / embeddings.double().norm(dim=1, keepdim=True)
    for place, query, answer in zip((7, 0), queries, found["queries"]):
        scores = dict(zip(paths, (unit @ unit[place]).tolist()))
        assert answer["query"] == str(query)
        results = answer["results"]
        assert sorted(hit["path"] for hit in results) == sorted(paths)
        assert [hit["rank"] for hit in results] == list(range(1, 41))
        for hit in results:
            assert hit["similarity"] == pytest.approx(scores[hit["path"]], abs=1e-5)
            assert hit["distance"] == pytest.approx(1 - scores[hit["path"]], abs=1e-5)
        assert sorted(results, key=lambda hit: -hit["similarity"]) == results
        assert results[0]["path"] == paths[place]


def test_whitening_and_scales_of_the_module_are_applied(glyphs, tmp_path, capsys):
    torch.manual_seed(1)
    whitening = PCAWhitening(dim=6).fit(glyphs[1])
    settings = {"whitening": whitening, "eval_scales": (1.0, 0.5)}
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss(), **settings).eval()
    model = checkpoint(tmp_path / "model.ckpt", module)
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


def test_the_table(indexed, capsys, monkeypatch):
    monkeypatch.chdir(indexed / "images")
    query = paths_of(Path())[3]
    code, out, err = command(capsys, "search", "--index=../index", query, "-k2")
    assert (code, err) == (0, "")
    title, heads, first, second = out.splitlines()
    assert (title, heads.split()) == (query, ["rank", "similarity", "distance", "path"])
    assert first.split() == ["1", "1.0000", "0.0000", query]
    assert second.split()[0] == "2"


def test_factory_parameters_and_shards(glyphs, tmp_path, capsys):
    more = ["--factory=IVF2,Flat", "--parameters=nprobe=2", "--shards=2", "--batch_size=7", "--num_workers=1"]
    code, out, err = command(capsys, *indexing(glyphs[0], tmp_path / "index", *more))
    assert (code, err) == (0, "")
    transform, out = out.split("\n", 1)
    assert transform == "images prepared by the transform 'glyphs', by default: the checkpoint names none"
    said, recall = out.split("recall@10 ")
    assert said == f"{tmp_path / 'index'}: 40 images, 24 dimensions, IVF2,Flat ("
    assert 0.97 < float(recall.removesuffix(" against exact search)\n")) <= 1  # all lists; near ties go either way
    index = RetrievalIndex.load(tmp_path / "index")
    assert (index.shards, index.parameters, len(index)) == (2, "nprobe=2", 40)
    assert {name: index.about[name] for name in ("transform", "channels")} == {"transform": "glyphs", "channels": 1}


def test_unreadable_images_are_named_and_the_others_indexed(glyphs, indexed, tmp_path, capsys):
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
    assert first.endswith("; left out.")

    good = indexed / "images" / paths_of(indexed / "images")[3]
    missing, args = tmp_path / "gone.png", ["--index", indexed / "index", "-k1", "--json"]
    code, out, err = command(capsys, "search", good, missing, *args)
    assert code == 1
    assert err == f"search: cannot read the image {missing} (No such file or directory); left out.\n"
    assert [answer["query"] for answer in json.loads(out)["queries"]] == [str(good)]
    assert json.loads(out)["unread"] == [{"path": str(missing), "reason": "No such file or directory"}]
    code, out, err = command(capsys, "search", missing, *args)
    assert (code, out) == (2, "")
    assert err.startswith(f"search: none of the 1 queries can be read, the first: cannot read the image {missing} (")


@pytest.fixture(scope="module")
def colour(tmp_path_factory):
    """A checkpoint for colour images, which names pretrained weights as its training would have."""
    folder = tmp_path_factory.mktemp("colour")
    torch.manual_seed(0)
    embedder = Embedder("squeezenet1_1", embedding_dim=16)
    embedder.weights = "IMAGENET1K_V1"
    module = RetrievalModule(embedder, SmoothAPLoss()).eval()
    return checkpoint(folder / "model.ckpt", module), module


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


def test_images_are_prepared_as_the_checkpoint_says(tmp_path, capsys):
    trained(tmp_path, transform="roadmap")
    code, out, err = command(capsys, *indexing(tmp_path, tmp_path / "index"))
    assert (code, err) == (0, "")
    assert out.startswith("images prepared by the transform 'roadmap', as the checkpoint says\n")
    assert RetrievalIndex.load(tmp_path / "index").about["transform"] == "roadmap"
    code, out, err = command(capsys, *indexing(tmp_path, tmp_path / "index", "--transform=plain"))
    assert (code, err) == (0, "")
    assert out.startswith("images prepared by the transform 'plain'\n")


@pytest.mark.refusal
def test_a_transform_of_ones_own_has_to_be_named(tmp_path, capsys):
    trained(tmp_path, eval_transform=MEDIUM)
    said = refused(capsys, *indexing(tmp_path, tmp_path / "index"))
    assert said.startswith("index: `--transform` must be given, as the model of ")
    assert "evaluated with a transform of its own" in said
    assert not (tmp_path / "index").exists()
    assert command(capsys, *indexing(tmp_path, tmp_path / "index", "--transform=plain"))[0] == 0


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"Anybodys.Data": {"transform": "ap_gem"}}, "ap_gem"),
        ({"hyper_parameters": {"transform": "plain"}, "state_dict": {"transform": torch.zeros(1)}}, None),
        ({"ImageFolder": {"transform": "own"}, "callbacks": {}}, "own"),
    ],
)
def test_where_a_checkpoint_names_the_transform(state, name):
    assert search_module._prepared(state) == name


def photo():
    """Colours and shapes without any symmetry."""
    generator = torch.Generator().manual_seed(3)
    return Image.fromarray(torch.randint(0, 255, (5, 8, 3), generator=generator, dtype=torch.uint8).numpy()).resize(
        (300, 260)
    )


@pytest.mark.parametrize("transform", ["plain", "roadmap", "ap_gem"])
def test_images_are_upright_and_in_colour_whatever_their_files_hold(colour, transform, tmp_path, capsys, monkeypatch):
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
            module(reference_transform(transform, train=False)(image)[None])
            for image in (upright, upright, upright.convert("L").crop((0, 0, 280, 250)).convert("RGB"))
        ]
    for place, embedding in enumerate(expected):
        similarities, ids = index.search(embedding, 3)
        row = ids[0].tolist().index(place)
        assert similarities[0, row] == pytest.approx(1, abs=1e-5)
    assert index.search(expected[2], 3)[0][0, 2] < 1 - 1e-4  # or the test would show nothing


@pytest.mark.refusal
def test_the_checkpoint_has_to_be_that_of_the_index(glyphs, colour, indexed, tmp_path, capsys):
    shutil.copytree(indexed, tmp_path, dirs_exist_ok=True)
    query = indexed / "images" / paths_of(indexed / "images")[3]
    command(capsys, *indexing(tmp_path, tmp_path / "index"))
    moved = (tmp_path / "model.ckpt").rename(tmp_path / "moved.ckpt")
    args = ["search", query, "--index", tmp_path / "index", "-k1"]
    code, out, err = command(capsys, *args)
    assert (code, out) == (2, "")
    assert err == (
        f"search: the checkpoint that the index was made with is no longer at {tmp_path / 'model.ckpt'}; say where it "
        "is with `--checkpoint`.\n"
    )
    assert command(capsys, *args, "--checkpoint", moved)[0] == 0
    other = checkpoint(
        tmp_path / "other.ckpt", RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss())
    )
    code, _, err = command(capsys, *args, "--checkpoint", other)
    assert code == 2
    assert f"{other} is not the checkpoint that the index was made with" in err


def refused(capsys, *args):
    code, out, err = command(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


@pytest.mark.refusal
def test_what_does_not_fit_is_refused_in_one_sentence(glyphs, colour, indexed, tmp_path, capsys):
    query = indexed / "images" / paths_of(indexed / "images")[3]
    at = ["--index", indexed / "index"]
    said = "search: `-k` must be at most the 40 images of the index, got 41; ask for fewer.\n"
    assert refused(capsys, "search", query, *at, "-k41") == said
    assert "`-k` must be an integer >= 1, got 0" in refused(capsys, "search", query, *at, "-k0")
    assert "must be a folder with manifest.json in it" in refused(capsys, "search", query, "--index", tmp_path)
    RetrievalIndex(4).save(tmp_path / "other")
    said = "search: `--index` must be one that `lightning-retrieval index` made, of images.\n"
    assert refused(capsys, "search", query, "--index", tmp_path / "other") == said

    to = ["--output", tmp_path / "index"]
    images = ["--images", indexed / "images"]
    model = ["--checkpoint", indexed / "model.ckpt"]
    said = refused(capsys, "index", *images, *to, *model, "--transform=plain")
    assert "`--transform` must give images of 1 channels" in said
    assert "got 'plain', which gives 3; 'glyphs' gives them" in said
    said = refused(capsys, "index", *images, *to, "--checkpoint", colour[0], "--transform=glyphs")
    assert "got 'glyphs', which gives 1; 'plain' gives them" in said
    assert "must be a file that training wrote" in refused(capsys, "index", *images, *to, "--checkpoint=gone.ckpt")
    (tmp_path / "no.ckpt").write_text("no checkpoint")
    said = refused(capsys, "index", *images, *to, "--checkpoint", tmp_path / "no.ckpt")
    assert "must be the checkpoint of a RetrievalModule that can be rebuilt from it" in said
    assert "`--images` must be a folder of images, got gone" in refused(capsys, "index", "--images=gone", *to, *model)
    (tmp_path / "empty").mkdir()
    assert "in which there is none" in refused(capsys, "index", "--images", tmp_path / "empty", *to, *model)
    (tmp_path / "empty" / "a.png").write_text("no image")
    said = refused(capsys, "index", "--images", tmp_path / "empty", *to, *model)
    assert said.startswith("index: none of the 1 images in")
    said = refused(capsys, "index", *images, "--output", tmp_path / "empty", *model)
    assert "must be written to a new folder or over an index" in said
    assert "`factory` must be one of faiss'" in refused(capsys, "index", *images, *to, *model, "--factory=Flatt")
    assert "`factory` 'IVF64,Flat' must be trained" in refused(
        capsys, *indexing(indexed, to[1], "--factory=IVF64,Flat")
    )
    assert "`--batch_size` must be an integer >= 1, got 0" in refused(
        capsys, *indexing(indexed, to[1], "--batch_size=0")
    )
    assert not (tmp_path / "index").exists()


@pytest.mark.refusal
@pytest.mark.parametrize("bad", ["--factory=Flatt", "--factory=PQ5", "--factory=HNSW8,PQ4", "--parameters=nprobe=3"])
def test_what_the_index_cannot_be_is_refused_after_the_first_images(bad, indexed, tmp_path, capsys, monkeypatch):
    real, seen = search_module._Model._embed_batch, []

    def counted(self, images):
        seen.append(len(images))
        return real(self, images)

    monkeypatch.setattr(search_module._Model, "_embed_batch", counted)
    assert refused(capsys, *indexing(indexed, tmp_path / "index", bad, "--batch_size=7")).startswith(
        "RetrievalIndex: `"
    )
    assert seen == [7]


@pytest.mark.refusal
def test_where_the_page_goes_is_looked_at_first(indexed, tmp_path, capsys):
    query = indexed / "images" / ODD
    for page in (tmp_path / "gone" / "page.html", tmp_path):
        said = refused(capsys, "search", query, "--index", tmp_path / "none", "--html", page)
        assert said == f"search: `--html` must be a file in a folder that is there, got {page}.\n"
    said = refused(capsys, "search", query, "--index", tmp_path / "none", "--images", tmp_path / "gone")
    assert "`--images` must be the folder of the index's images, got " in said


def test_ten_results_or_all_there_are(indexed, tmp_path, capsys):
    query = indexed / "images" / ODD
    _, out, _ = command(capsys, "search", query, "--index", indexed / "index", "--json")
    assert len(json.loads(out)["queries"][0]["results"]) == 10
    (tmp_path / "images").mkdir()
    for path in paths_of(indexed / "images")[:5]:
        shutil.copy(indexed / "images" / path, tmp_path / "images")
    shutil.copy(indexed / "model.ckpt", tmp_path)
    command(capsys, *indexing(tmp_path, tmp_path / "index"))
    page = tmp_path / "page.html"
    code, out, err = command(capsys, "search", query, "--index", tmp_path / "index", "--json", "--html", page)
    assert (code, err) == (0, "")
    assert len(json.loads(out)["queries"][0]["results"]) == 5
    assert "5 nearest of 5 images" in page.read_text(encoding="utf-8")


def test_parameters_of_the_search(indexed, tmp_path, capsys):
    command(capsys, *indexing(indexed, tmp_path / "index", "--factory=IVF10,Flat"))
    args = ["search", indexed / "images" / ODD, "--index", tmp_path / "index", "-k40", "--json"]
    counts = []
    for more in ([], ["--parameters=nprobe=10"]):
        _, out, _ = command(capsys, *args, *more)
        counts.append(len(json.loads(out)["queries"][0]["results"]))
    assert counts[0] < counts[1] == 40
    assert "got 'nope=1'" in refused(capsys, *args, "--parameters=nope=1")


@pytest.mark.refusal
def test_a_model_that_gives_nan_is_refused_with_the_image(glyphs, tmp_path, capsys):
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss())
    torch.nn.init.constant_(module.embedder.head.linear.weight, float("nan"))
    model = checkpoint(tmp_path / "nan.ckpt", module)
    args = ["--images", glyphs[0] / "images" / "1", "--output", tmp_path / "index", "--checkpoint", model]
    said = refused(capsys, "index", *args)
    assert said.startswith("index: embeddings must be finite, but the model gives NaN or inf for deeper/10.bmp;")


class Page(HTMLParser):
    """What a page loads, its pictures' alternative texts, and its text."""

    def __init__(self, source):
        super().__init__()
        self.loads, self.alts, self.text, self.tags = [], [], "", []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.loads += [attributes[name] for name in ("src", "href", "srcset", "data") if name in attributes]
        if tag == "img":
            self.alts.append(attributes["alt"])

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page(indexed):
    """The page of two queries, one of them with the odd name."""
    paths = paths_of(indexed / "images")
    queries = [str(indexed / "images" / paths[place]) for place in (0, 12)]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["search", "--index", str(indexed / "index"), *queries, "-k7", "--html", str(indexed / "results.html")])
    return indexed / "results.html"


def test_the_page_is_whole_in_itself(page, indexed):
    assert not list(indexed.glob("*.part"))
    source = page.read_text(encoding="utf-8")
    found = Page(source)
    assert found.loads
    assert all(re.match(r"data:image/(png|jpeg);base64,|#q[12]$", target) for target in found.loads)
    assert not re.findall(r"url\(|@import|https?:|fetch\(|XMLHttp", source)
    assert found.tags.count("script") == 1
    assert found.tags.count("img") == len(found.alts) == 2 * 8
    odd = str(indexed / "images" / ODD)
    assert found.alts[0] == f"Query: {odd}"
    assert found.alts[1] == f"Result 1: {ODD}"
    assert odd in found.text
    assert len(re.findall(r"distance[\s\d.]+similarity", found.text)) == 2 * 7


def test_the_page_says_where_a_picture_is_gone(indexed, tmp_path, capsys):
    shutil.copytree(indexed, tmp_path, dirs_exist_ok=True)
    command(capsys, *indexing(tmp_path, tmp_path / "index"))
    shutil.rmtree(tmp_path / "images" / "2")
    query = tmp_path / "images" / paths_of(tmp_path / "images")[3]
    args = ["search", query, "--index", tmp_path / "index", "-k40", "--html", tmp_path / "page.html"]
    code, _, err = command(capsys, *args)
    assert code == 0
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert source.count("not readable now") == 10
    assert err.startswith(f"search: 10 of 40 results cannot be read in {tmp_path / 'images'}, the first: 2/deeper/2")
    assert err.endswith("; say where the images lie now with `--images`.\n")
    assert err.count("\n") == 1
    assert command(capsys, *args, "--images", indexed / "images")[::2] == (0, "")
    assert "not readable now" not in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.fixture
def browser(page, tmp_path):
    """Call Chromium on the page, with a script of the test's own behind it; the document that it makes of it."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        assert os.environ.get("CI") != "true", "CI has to look at the page: install chromium"
        pytest.skip("there is no Chromium to look at the page with")

    def run(script, *more):
        source = page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>")
        (tmp_path / "page.html").write_text(source, encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,900"]
        flags += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}", *more]
        done = subprocess.run(
            [program, *flags, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


KEYS = """
const trace = [];
function press(...keys) {
  for (const key of keys) {
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    const at = document.activeElement.closest(".card");
    trace.push(dialog.open ? document.getElementById("compared").textContent.split(":")[0]
      : at ? at.dataset.query + "." + at.dataset.rank : "-");
  }
}
press("ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "ArrowUp", "End", "ArrowRight", "Home", "a");
document.activeElement.click();
press("ArrowRight", "End", "ArrowRight");
trace.push(document.querySelectorAll("#left img, #right img").length);
dialog.addEventListener("close", () => {
  trace.push(document.activeElement.dataset.query + "." + document.activeElement.dataset.rank);
  document.documentElement.dataset.trace = trace.join("|");
});
dialog.querySelector("button").click();
"""


def test_the_page_is_walked_through_by_keys(browser):
    document = browser(KEYS, "--dump-dom", "--virtual-time-budget=2000")
    html = re.search(r"<html[^>]*>", document)[0]
    assert 'data-ready="14"' in html
    trace = re.search(r'data-trace="([^"]*)"', html)[1].split("|")
    # Arrow right enters; a line of the window holds three cards; the dialog follows the arrows; closing it comes back.
    on_cards = ["-", "1.1", "1.2", "1.1", "1.4", "1.1", "1.7", "2.1", "2.1", "2.1"]
    assert trace == [*on_cards, "Query 2, rank 2", "Query 2, rank 7", "Query 2, rank 7", "2", "2.7"]


def test_cards_line_up_beside_a_long_path_and_show_a_tall_picture(browser):
    script = """const all = [...document.querySelectorAll("#q1 .card")];
    all[1].querySelector(".path").textContent = "long/".repeat(80) + "a.png";
    const own = (card) => { const box = card.getBoundingClientRect(), inner = card.children;
      return [...inner].slice(0, 4).map((part) => Math.round(part.getBoundingClientRect().top - box.top)).join(","); };
    const lines = all.map((card) => card.querySelector(".path"))
      .map((path) => path.getBoundingClientRect().height / parseFloat(getComputedStyle(path).lineHeight));
    document.documentElement.dataset.tops = [...new Set(all.map(own))].length;
    const tall = all[0].querySelector("img");
    tall.src = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' width='20' height='60'/>";
    addEventListener("load", () => {
      const over = tall.getBoundingClientRect().height - tall.parentNode.clientHeight;
      document.documentElement.dataset.overflow = over > 1;
    });
    document.documentElement.dataset.lines = lines[1].toFixed(1);"""
    html = re.search(r"<html[^>]*>", browser(script, "--dump-dom", "--virtual-time-budget=2000"))[0]
    assert 'data-tops="1"' in html
    assert 'data-lines="4.0"' in html
    assert 'data-overflow="false"' in html  # a tall picture is shown whole


def test_the_page_shows_its_pictures(browser, tmp_path):
    script = """document.documentElement.dataset.shown =
      [...document.images].filter((image) => image.complete && image.naturalWidth > 0).length;"""
    document = browser(f"addEventListener('load', () => {{ {script} }});", "--dump-dom", "--virtual-time-budget=2000")
    assert 'data-shown="16"' in document
    browser("", f"--screenshot={tmp_path / 'page.png'}")
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.size == (1000, 900)
        colours = picture.convert("RGB").getcolors(1 << 24)
    assert len(colours) > 100  # text and pictures, not one empty sheet
