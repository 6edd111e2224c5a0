"""The commands with a checkpoint of two networks: texts or images search an index of the network of candidates."""

import html
import json
import shutil

import pytest
import torch
from PIL import Image

from lightning_retrieval import RetrievalModule, SmoothAPLoss, TwoNetworks
from lightning_retrieval.models import Embedder, FrozenEmbedder, Preparation, TextEmbedder
from lightning_retrieval.search.store.index import RetrievalIndex
from tests.lightning_retrieval.models.hugging_face_folders import write_text_folder
from tests.lightning_retrieval.search.commands.glyph_commands import (
    SMALL,
    TEXTS,
    command,
    embeddings_in,
    error_of,
    run,
    save_checkpoint,
)


@pytest.fixture
def folder(two_sides):
    return two_sides


@pytest.fixture
def index(two_sides):
    """The index of the images by the old network."""
    return two_sides / "index"


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
    assert add_images([], "other.ckpt", "--update")[0] == 2


def test_the_threshold_of_an_index_applies_to_its_own_network_only(folder, index, capsys, tmp_path):
    loaded = RetrievalIndex.load(index)
    loaded.about["threshold"] = {"value": 2.0, "false_match_rate": 0.0, "miss_rate": 0.0, "images": 6}
    loaded.save(tmp_path / "index")
    index = tmp_path / "index"
    image = str(folder / "images" / "0.png")
    given = [f"--index={index}", f"--checkpoint={folder / 'texts.ckpt'}", "--text=red", image, "-k=6"]
    counts = {query: len(hits) for query, hits in found(capsys, *given).items()}
    assert counts == {image: 0, "red": 6}
    assert [len(hits) for hits in found(capsys, *given, "--threshold=2").values()] == [0, 0]
    of_images = [f"--index={index}", f"--checkpoint={folder / 'images.ckpt'}", image, "-k=6"]
    assert len(found(capsys, *of_images)[image]) == 6


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
    code, out, err = command(capsys, "search", *given, "--text", text, f"--html={page}")
    assert (code, text in out, err) == (0, True, "")
    assert html.escape(text) in page.read_text()
    assert text not in page.read_text()


def embedded_queries(folder, tmp_path, capsys, name, source):
    """The paths or texts and the embeddings that `embed --side queries` writes."""
    output = tmp_path / name
    given = [f"--checkpoint={folder / name}.ckpt", f"--images={source}", f"--output={output}", "--side=queries"]
    code, _, err = command(capsys, "embed", *given, "--shard_size=4")
    assert (code, err) == (0, "")
    return embeddings_in(output)


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
    again = [f"--images={folder / 'images'}", f"--output={tmp_path / 'images'}", "--shard_size=4"]
    candidates = command(capsys, "embed", f"--checkpoint={folder / 'images.ckpt'}", *again)
    assert candidates[0] == 2  # embeddings of another side are not continued
    module = RetrievalModule.load_from_checkpoint(folder / "images.ckpt").eval()
    images = [module.query_embedder.preparation(Image.open(folder / "images" / path)) for path in paths]
    with torch.inference_mode():
        torch.testing.assert_close(rows, module.embed_queries(torch.stack(images)))


def of_queries(settings):
    return settings["sides"]["init_args"]["query_embedder"]


HOSTILE = {
    "a function": lambda settings: of_queries(settings).update(class_path="os.system", init_args={}),
    "a file": lambda settings: settings["embedder"].update(init_args={"checkpoint": "old.ckpt"}),
    "an address": lambda settings: of_queries(settings)["init_args"].update(backbone="hf/https://evil/x"),
}


@pytest.mark.hostile
@pytest.mark.parametrize("name", HOSTILE)
def test_a_checkpoint_names_no_function_file_or_address(name, folder, index, tmp_path, capsys, monkeypatch):
    saved = torch.load(folder / "texts.ckpt", weights_only=True)
    HOSTILE[name](saved["hyper_parameters"])
    monkeypatch.chdir(folder)  # where there is a file old.ckpt
    torch.save(saved, tmp_path / "hostile.ckpt")
    error = error_of(capsys, "search", f"--index={index}", f"--checkpoint={tmp_path / 'hostile.ckpt'}", "--text=x")
    assert "`--checkpoint`" in error


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
