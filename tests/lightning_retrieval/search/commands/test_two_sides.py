"""The commands with a checkpoint of two networks: texts or images search an index of the network of candidates."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_retrieval import RetrievalModule, SmoothAPLoss, TwoNetworks
from lightning_retrieval.models import Embedder, FrozenEmbedder, PCAWhitening, Preparation, TextEmbedder
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from lightning_retrieval.search.export.onnx_file import can_write_onnx
from lightning_retrieval.search.store.index import RetrievalIndex
from lightning_retrieval.search.store.rows import FolderRows
from tests.lightning_retrieval.models.hugging_face_folders import write_text_folder
from tests.lightning_retrieval.search.commands.glyph_commands import command, error_of, run, save_checkpoint

TEXTS = {"backbone": "ngram_net", "embedding_dim": 16, "backbone_args": {"buckets": 500, "dim": 8}}
SMALL = {"backbone": "glyph_net", "embedding_dim": 16, "backbone_args": {"width": 8}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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
    return folder


@pytest.fixture
def index(folder, tmp_path, capsys):
    """An index of the images by the old network."""
    assert indexed(folder, tmp_path / "index", capsys, "old")[0] == 0
    return tmp_path / "index"


def indexed(folder, output, capsys, name, *more):
    checkpoint, images = f"--checkpoint={folder / name}.ckpt", f"--images={folder / 'images'}"
    return command(capsys, "index", checkpoint, images, f"--output={output}", *more)


def found(capsys, *arguments):
    """The results of a search by query, as (path, similarity)."""
    code, out, err = command(capsys, "search", *arguments, "--json")
    assert code == 0, err
    queries = json.loads(out)["queries"]
    return {query["query"]: [(hit["path"], hit["similarity"]) for hit in query["results"]] for query in queries}


def expected(folder, embeddings):
    """The images nearest to embeddings of queries, by a loop over the images and the old network."""
    old = RetrievalModule.load_from_checkpoint(folder / "old.ckpt").eval()
    rows = []
    for number in range(6):
        image = old.embedder.preparation(Image.open(folder / "images" / f"{number}.png"))
        with torch.inference_mode():
            similarity = float(old.embed(image[None])[0] @ embeddings)
        rows.append((f"{number}.png", pytest.approx(similarity, abs=1e-3)))
    return sorted(rows, key=lambda row: -row[1].expected)


def test_texts_search_the_index_of_the_old_checkpoint(folder, index, capsys):
    given = [f"--index={index}", f"--checkpoint={folder / 'texts.ckpt'}", "-k=6"]
    results = found(capsys, *given, "--text", "red shoes", "--text", "sofa", str(folder / "images" / "0.png"))
    module = RetrievalModule.load_from_checkpoint(folder / "texts.ckpt").eval()
    assert list(results) == [str(folder / "images" / "0.png"), "red shoes", "sofa"]
    for text in ("red shoes", "sofa"):
        with torch.inference_mode():
            row = module.embed_queries(module.query_embedder.tokenizer([text]))[0]
        assert results[text] == expected(folder, row)
    assert results[str(folder / "images" / "0.png")][0] == ("0.png", pytest.approx(1, abs=1e-4))


def test_a_checkpoint_with_a_model_of_hugging_face_needs_no_files_besides(folder, index, tmp_path, capsys):
    write_text_folder(tmp_path / "model", "bert")
    network = TextEmbedder(f"hf/{tmp_path / 'model'}", 16, weights="DEFAULT").eval()
    with torch.inference_mode():
        row = network(network.tokenizer(["red shoes"]))[0]
    frozen = FrozenEmbedder(checkpoint=str(folder / "old.ckpt"))
    checkpoint = tmp_path / "hf.ckpt"
    save_checkpoint(checkpoint, RetrievalModule(frozen, SmoothAPLoss(), sides=TwoNetworks(network)))
    shutil.rmtree(tmp_path / "model")
    capsys.readouterr()  # the progress of transformers
    given = [f"--index={index}", f"--checkpoint={checkpoint}", "-k=6", "--text=red shoes"]
    assert found(capsys, *given)["red shoes"] == expected(folder, row)


def test_image_queries_are_embedded_by_the_network_of_queries(folder, index, capsys):
    query = str(folder / "images" / "3.png")
    results = found(capsys, f"--index={index}", f"--checkpoint={folder / 'images.ckpt'}", query, "-k=6")
    module = RetrievalModule.load_from_checkpoint(folder / "images.ckpt").eval()
    image = module.query_embedder.preparation(Image.open(query))
    with torch.inference_mode():
        row = module.embed_queries(image[None])[0]
    assert results[query] == expected(folder, row)


def test_a_checkpoint_of_another_network_is_refused(folder, index, capsys):
    error = error_of(capsys, "search", f"--index={index}", f"--checkpoint={folder / 'other.ckpt'}", "--text=x")
    assert error.startswith("search: `--checkpoint` must be the one that the index was made with, because embeddings")


def test_an_index_from_before_networks_were_recorded_is_compared_with_its_checkpoint(folder, index, capsys):
    manifest = index / "manifest.json"
    text = manifest.read_text()
    loaded = RetrievalIndex.load(index)
    del loaded.about["network_sha256"]
    loaded.save(index)
    assert "network_sha256" not in manifest.read_text() != text
    given = [f"--index={index}", "--text=x", "-k=6"]
    assert len(found(capsys, *given, f"--checkpoint={folder / 'texts.ckpt'}")["x"]) == 6
    assert "must be the one" in error_of(capsys, "search", *given, f"--checkpoint={folder / 'other.ckpt'}")


def test_the_index_is_updated_with_the_new_checkpoint(folder, capsys, tmp_path):
    (tmp_path / "images").mkdir()

    def add_images(numbers, name, *more):
        for number in numbers:
            shutil.copy(folder / "images" / f"{number}.png", tmp_path / "images")
        given = [f"--checkpoint={folder / name}", f"--images={tmp_path / 'images'}", f"--output={tmp_path / 'index'}"]
        return command(capsys, "index", *given, *more)

    assert add_images(range(4), "old.ckpt")[0] == 0
    assert add_images(range(4, 6), "texts.ckpt", "--update")[0] == 0
    query = str(folder / "images" / "5.png")
    results = found(capsys, f"--index={tmp_path / 'index'}", f"--checkpoint={folder / 'old.ckpt'}", query, "-k=6")
    assert results[query][0] == ("5.png", pytest.approx(1, abs=1e-4))
    code, _, error = add_images([], "other.ckpt", "--update")
    assert code == 2
    assert "they are of another model" in error


def test_text_for_a_checkpoint_without_texts_is_one_sentence(folder, index, capsys):
    error = error_of(capsys, "search", f"--index={index}", "--text=red shoes")
    assert error.startswith(
        "search: `--text` must be given for a checkpoint whose network of queries embeds texts, got"
    )
    code, _, err = command(capsys, "search", f"--index={index}")
    assert code == 2
    assert "an image or --text must be given" in err


def test_a_checkpoint_whose_candidates_are_texts_indexes_no_images(folder, capsys, tmp_path):
    module = RetrievalModule(TextEmbedder(**TEXTS), SmoothAPLoss(), sides=TwoNetworks(Embedder(**SMALL)))
    save_checkpoint(tmp_path / "captions.ckpt", module)
    arguments = [f"--checkpoint={tmp_path / 'captions.ckpt'}", f"--images={folder / 'images'}"]
    for name in ("index", "embed"):
        error = error_of(capsys, name, *arguments, f"--output={tmp_path / name}")
        assert f"{name}: `--checkpoint` must be one whose network of candidates embeds images, got" in error


def test_the_threshold_of_an_index_applies_to_its_own_network_only(folder, index, capsys):
    loaded = RetrievalIndex.load(index)
    loaded.about["threshold"] = {"value": 2.0, "false_match_rate": 0.0, "miss_rate": 0.0, "images": 6}
    loaded.save(index)
    image = str(folder / "images" / "0.png")
    given = [f"--index={index}", f"--checkpoint={folder / 'texts.ckpt'}", "--text=red", image, "-k=6"]
    counts = {query: len(hits) for query, hits in found(capsys, *given).items()}
    assert counts == {image: 0, "red": 6}
    assert [len(hits) for hits in found(capsys, *given, "--threshold=2").values()] == [0, 0]
    of_images = [f"--index={index}", f"--checkpoint={folder / 'images.ckpt'}", image, "-k=6"]
    assert len(found(capsys, *of_images)[image]) == 6


def test_a_text_must_not_be_empty(folder, index, capsys):
    error = error_of(capsys, "search", f"--index={index}", f"--checkpoint={folder / 'texts.ckpt'}", "--text= ")
    assert error.startswith("search: `--text` must have a character that is not white space, got [' '].")


def test_a_frozen_embedder_of_a_new_checkpoint_is_that_of_the_old_one(folder, index, capsys, tmp_path):
    frozen = FrozenEmbedder(checkpoint=str(folder / "texts.ckpt"))
    assert isinstance(frozen.embedder, Embedder)
    newer = RetrievalModule(frozen, SmoothAPLoss(), sides=TwoNetworks(TextEmbedder(**TEXTS)))
    save_checkpoint(tmp_path / "newer.ckpt", newer)
    given = [f"--index={index}", f"--checkpoint={tmp_path / 'newer.ckpt'}", "-k=6"]
    assert len(found(capsys, *given, "--text=x")["x"]) == 6


def test_the_page_shows_a_text_safely(folder, index, capsys, tmp_path):
    page = tmp_path / "page.html"
    text = "<b>red</b> & 'shoes'"
    given = [f"--index={index}", f"--checkpoint={folder / 'texts.ckpt'}"]
    code, out, err = command(capsys, "search", *given, "--text", text, f"--html={page}", "--threshold=2")
    assert (code, err) == (0, "")
    assert out.startswith(f"{text}\nNothing similar")
    source = page.read_text()
    assert '<span class="picture words">&lt;b&gt;red&lt;/b&gt; &amp; &#x27;shoes&#x27;</span>' in source
    assert text not in source


def embedded_queries(folder, tmp_path, capsys, name, source):
    """The paths, labels and embeddings that `embed --side queries` writes."""
    output = tmp_path / name
    given = [f"--checkpoint={folder / name}.ckpt", f"--images={source}", f"--output={output}", "--side=queries"]
    code, _, err = command(capsys, "embed", *given, "--format=npy", "--shard_size=4")
    assert (code, err) == (0, "")
    rows = FolderRows(EmbeddingFolder.load(output))
    return list(rows.paths), rows[torch.arange(len(rows))]


def test_texts_and_images_are_embedded_as_queries(folder, tmp_path, capsys):
    texts = [f"text {number}" for number in range(6)]
    (tmp_path / "texts.csv").write_text("\n".join(["text", *texts]))
    paths, rows = embedded_queries(folder, tmp_path, capsys, "texts", tmp_path / "texts.csv")
    module = RetrievalModule.load_from_checkpoint(folder / "texts.ckpt").eval()
    with torch.inference_mode():
        expected = [module.embed_queries(module.query_embedder.tokenizer([text]))[0] for text in texts]
    assert paths == texts
    torch.testing.assert_close(rows, torch.stack(expected))
    paths, rows = embedded_queries(folder, tmp_path, capsys, "images", folder / "images")
    again = [
        f"--checkpoint={folder / 'images.ckpt'}",
        f"--images={folder / 'images'}",
        f"--output={tmp_path / 'images'}",
    ]
    assert "another list of images" in error_of(capsys, "embed", *again, "--format=npy", "--shard_size=4")
    module = RetrievalModule.load_from_checkpoint(folder / "images.ckpt").eval()
    images = [module.query_embedder.preparation(Image.open(folder / "images" / path)) for path in paths]
    with torch.inference_mode():
        torch.testing.assert_close(rows, module.embed_queries(torch.stack(images)))


def test_embeddings_of_queries_are_not_indexed(folder, tmp_path, capsys):
    embedded_queries(folder, tmp_path, capsys, "images", folder / "images")
    _, _, error = run(capsys, "index", f"--embeddings={tmp_path / 'images'}", f"--output={tmp_path / 'index'}")
    assert error.startswith("index: `--embeddings` must be of candidates, got")
    checkpoint, images = f"--checkpoint={folder / 'texts.ckpt'}", f"--images={folder / 'images'}"
    error = error_of(capsys, "embed", checkpoint, images, f"--output={tmp_path / 'new'}", "--side=queries")
    assert error.startswith("embed: `--images` must be a table with the column text for queries that are texts, got")


def of_queries(settings):
    return settings["sides"]["init_args"]["query_embedder"]


HOSTILE = {
    "a function": lambda settings, state: of_queries(settings).update(class_path="os.system", init_args={}),
    "no module": lambda settings, state: of_queries(settings).update(class_path="torch.optim.SGD"),
    "a file": lambda settings, state: settings["embedder"].update(init_args={"checkpoint": "old.ckpt"}),
    "many buckets": lambda settings, state: of_queries(settings)["init_args"]["backbone_args"].update(buckets=1e9),
    "an address": lambda settings, state: of_queries(settings)["init_args"].update(backbone="hf/https://evil/x"),
    "no sides": lambda settings, state: settings["sides"].update(class_path="torch.nn.Identity"),
    "a tokenizer": lambda settings, state: state.update({"query_embedder._extra_state": torch.ones(3)}),
    "no tensor": lambda settings, state: state.update({"query_embedder._extra_state": {"tokenizer": "x"}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_one_sentence(name, folder, index, tmp_path, capsys, monkeypatch):
    saved = torch.load(folder / "texts.ckpt", weights_only=True)
    HOSTILE[name](saved["hyper_parameters"], saved["state_dict"])
    monkeypatch.chdir(folder)  # where there is a file old.ckpt
    torch.save(saved, tmp_path / "hostile.ckpt")
    error = error_of(capsys, "search", f"--index={index}", f"--checkpoint={tmp_path / 'hostile.ckpt'}", "--text=x")
    assert error.startswith("search: `--checkpoint` must be the checkpoint of a RetrievalModule that can be rebuilt")


@pytest.mark.skipif(not can_write_onnx(torch.__version__), reason="torch writes ONNX from 2.8 on")
def test_export_refuses_two_networks(folder, capsys, tmp_path):
    _, _, error = run(capsys, "export", f"--checkpoint={folder / 'texts.ckpt'}", f"--output={tmp_path / 'exported'}")
    assert error.startswith("export: `--checkpoint` must be of a model with one network, got")


def test_adapt_refuses_two_networks(folder, capsys, tmp_path):
    checkpoint = f"--checkpoint={folder / 'texts.ckpt'}"
    embeddings = tmp_path / "embeddings"
    assert command(capsys, "embed", checkpoint, f"--images={folder / 'images'}", f"--output={embeddings}")[0] == 0
    _, _, error = run(capsys, "adapt", f"--embeddings={embeddings}", f"--output={tmp_path / 'head.ckpt'}")
    assert error.startswith("adapt: `--checkpoint` must be of a model with one network, got")


def scaled():
    return RetrievalModule(Embedder(**SMALL), SmoothAPLoss(), eval_scales=[1.0, 0.5])


def whitened():
    return RetrievalModule(Embedder(**SMALL), SmoothAPLoss(), whitening=PCAWhitening())


def of_a_function():
    module = RetrievalModule(Embedder(**SMALL), SmoothAPLoss())
    module.preparation = {"function": "mine.prepare"}
    return module


def not_described():
    return RetrievalModule(Embedder(torch.nn.Conv2d(1, 3, 3)), SmoothAPLoss())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            scaled,
            r"`checkpoint` must be one whose embeddings are those of its `embedder`, .* has the scales \[1.0, 0.5\]",
        ),
        (whitened, "`checkpoint` must be one whose embeddings are those of its `embedder`, .* has a whitening"),
        (of_a_function, "`checkpoint` must be one that was evaluated with a Preparation, .*mine.prepare"),
        (not_described, "`checkpoint` must be one of a RetrievalModule whose `embedder` can be rebuilt"),
    ],
)
def test_a_checkpoint_that_cannot_be_frozen_is_one_sentence(make, message, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "old.ckpt", make())
    with pytest.raises(ValueError, match=f"^FrozenEmbedder: {message}"):
        FrozenEmbedder(checkpoint=str(checkpoint))


def test_a_damaged_or_missing_checkpoint_cannot_be_frozen(folder, tmp_path):
    content = (folder / "old.ckpt").read_bytes()
    (tmp_path / "old.ckpt").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"^FrozenEmbedder: `checkpoint` must be one .* which is damaged: "):
        FrozenEmbedder(checkpoint=str(tmp_path / "old.ckpt"))
    with pytest.raises(FileNotFoundError, match=r"^FrozenEmbedder: `checkpoint` must be one that training wrote"):
        FrozenEmbedder(checkpoint=str(tmp_path / "gone.ckpt"))
    with pytest.raises(ValueError, match=r"^FrozenEmbedder: one of `embedder` .* must be given, got neither"):
        FrozenEmbedder()


def test_a_frozen_embedder_prepares_images_as_its_checkpoint_was_evaluated(tmp_path):
    module = RetrievalModule(Embedder(**SMALL), SmoothAPLoss())
    module.preparation = {"preparation": Preparation.named("glyphs").with_size(48).as_dict()}
    frozen = FrozenEmbedder(checkpoint=str(save_checkpoint(tmp_path / "old.ckpt", module)))
    assert frozen.preparation == Preparation.named("glyphs").with_size(48)
    assert not frozen.train().embedder.training
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


CONFIG = """
seed_everything: 0
trainer:
  max_epochs: 2
  accelerator: cpu
  devices: 1
  logger: false
  enable_progress_bar: false
  callbacks:
    - class_path: lightning_retrieval.callbacks.RetrievalEvaluation
      init_args: {{ks: [1]}}
    - class_path: pytorch_lightning.callbacks.ModelCheckpoint
      init_args: {{dirpath: {out}, filename: best, monitor: val/mAP, mode: max, enable_version_counter: false}}
model:
  class_path: lightning_retrieval.RetrievalModule
  init_args:
    embedder:
      class_path: lightning_retrieval.models.FrozenEmbedder
      init_args: {{checkpoint: {folder}/old.ckpt}}
    sides:
      class_path: lightning_retrieval.TwoNetworks
      init_args:
        query_embedder:
          class_path: lightning_retrieval.models.TextEmbedder
          init_args: {{backbone: ngram_net, embedding_dim: 16, backbone_args: {{buckets: 500, dim: 8}}}}
        directions: both
    loss: lightning_retrieval.SmoothAPLoss
data:
  class_path: lightning_retrieval.datamodules.Pairs
  init_args:
    queries:
      class_path: lightning_retrieval.datamodules.TextTable
      init_args: {{table: {out}/captions.csv}}
    candidates:
      class_path: lightning_retrieval.datamodules.ImageTable
      init_args: {{root: {folder}/images, table: {out}/images.csv}}
    classes_per_batch: 2
    queries_per_class: 1
    samples_per_class: 1
"""


def test_texts_are_trained_for_an_old_index_from_a_config(folder, index, tmp_path, capsys, monkeypatch):
    """The new checkpoint needs neither the old one nor the tables."""
    monkeypatch.chdir(tmp_path)  # Lightning writes config.yaml
    splits = ["train", "train", "train", "test", "test", "test"]
    images = [f"{number}.png,c{number},{split}" for number, split in enumerate(splits)]
    (tmp_path / "images.csv").write_text("\n".join(["image,label,split", *images]))
    captions = [f"number {number},c{number},{split}" for number, split in enumerate(splits)]
    (tmp_path / "captions.csv").write_text("\n".join(["text,label,split", *captions]))
    old = tmp_path / "moved"
    old.mkdir()
    shutil.copy(folder / "old.ckpt", old)
    shutil.copytree(folder / "images", old / "images")
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=old, out=tmp_path))
    monkeypatch.chdir(tmp_path)  # where the run writes its config
    code, out, err = run(capsys, "fit", "--config", tmp_path / "run.yaml")
    assert code == 0, err
    assert "reverse/mAP" in out
    before = torch.load(old / "old.ckpt", weights_only=True)["state_dict"]
    shutil.rmtree(old)
    saved = torch.load(tmp_path / "best.ckpt", weights_only=True)
    for name, value in before.items():
        assert torch.equal(saved["state_dict"][f"embedder.{name}"], value)
    assert "old.ckpt" not in str(saved["hyper_parameters"])
    given = [f"--index={index}", f"--checkpoint={tmp_path / 'best.ckpt'}", "-k=6"]
    assert len(found(capsys, *given, "--text=number 3")["number 3"]) == 6
