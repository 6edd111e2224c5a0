"""A head that is trained on stored embeddings becomes a checkpoint that every command takes."""

import csv
import json

import numpy as np
import pytest
import torch

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.files import file_digest
from lightning_retrieval.preparation.preparation import Preparation
from lightning_retrieval.preparation.serialised import serialise_transform
from lightning_retrieval.search.commands.adapt import adapt_head
from lightning_retrieval.search.commands.embed import embed_images
from lightning_retrieval.search.commands.export import export_model
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest, ShardRows
from lightning_retrieval.search.export.onnx_file import can_write_onnx
from tests.lightning_retrieval.search.commands.glyph_commands import command, embeddings_in, paths_of, run

DIM, USEFUL = 24, 6


def folder_of(path, checkpoint, rows, labels, **about):
    """A folder of embeddings, as if this checkpoint had made them."""
    known = {"preparation": {}, "checkpoint": str(checkpoint), "checkpoint_sha256": file_digest(checkpoint), **about}
    what = {"images_sha256": "list", "model_sha256": "model", "about": known}
    what["preparation"] = known["preparation"]
    folder = EmbeddingFolder.create(
        path, EmbeddingManifest(images=len(rows), dim=rows.shape[1], shard_size=100, **what)
    )
    names = [None] * len(rows)
    if labels is not None:
        names = list(map(str, labels))
    for shard in range(len(folder)):
        ids = list(folder.positions(shard))
        here = slice(ids[0], ids[-1] + 1)
        folder.write(shard, ShardRows(np.array(ids), rows[here], [f"{number}.jpg" for number in ids], names[here]))
    return path


def points(noise, classes=60, per_class=8):
    """Embeddings whose first dimensions depend on the class, and whose other dimensions are noise."""
    generator = np.random.default_rng(0)
    labels = np.repeat(np.arange(classes), per_class)
    rows = noise * generator.normal(size=(len(labels), DIM))
    centres = generator.normal(size=(classes, USEFUL))
    rows[:, :USEFUL] = centres[labels] + 0.2 * generator.normal(size=(len(labels), USEFUL))
    return rows.astype(np.float32), labels


@pytest.fixture
def checkpoint(glyphs):
    return glyphs[0] / "model.ckpt"


@pytest.mark.parametrize("hidden_dim", [None, 16])
def test_a_head_learns_which_dimensions_count(checkpoint, tmp_path, hidden_dim):
    folder = folder_of(tmp_path / "e", checkpoint, *points(noise=2.0))
    settings = {"embedding_dim": 8, "hidden_dim": hidden_dim, "batch_size": 128, "lr": 0.01, "max_epochs": 30}
    found = adapt_head(folder, tmp_path / "a.ckpt", loss=SmoothAPLoss(), **settings)
    assert found.after > found.before + 0.2
    assert 0 < found.interval[0] < found.after - found.before < found.interval[1]
    assert found.classes == 12


def test_features_that_cannot_be_improved_are_reported(checkpoint, tmp_path, capsys):
    folder = folder_of(tmp_path / "e", checkpoint, *points(noise=0.0))
    output = tmp_path / "a.ckpt"
    output.write_text("a file to replace")
    code, out, err = run(capsys, "adapt", "--embeddings", folder, "--output", output, "--max_epochs=3", "--overwrite")
    assert (code, err) == (0, "")
    assert "not shown to be better" in out
    assert RetrievalModule.load_from_checkpoint(output).embedder.embedding_dim == DIM


@pytest.mark.parametrize(("source", "warnings"), [("argument", 0), ("default", 1)])
def test_a_head_is_for_images_prepared_as_those_of_its_embeddings(checkpoint, tmp_path, capsys, source, warnings):
    """Also if the checkpoint of the embeddings does not say how; a preparation that was a guess is called one."""
    preparation = serialise_transform(Preparation.named("glyphs"))
    about = {"preparation": preparation, "preparation_from": source}
    folder = folder_of(tmp_path / "e", checkpoint, *points(noise=0.5), **about)
    assert RetrievalModule.load_from_checkpoint(checkpoint).preparation is None
    code, _, err = run(capsys, "adapt", "--embeddings", folder, "--output", tmp_path / "a.ckpt", "--max_epochs=1")
    assert (code, err.count("make the embeddings again with --transform")) == (0, warnings)
    assert RetrievalModule.load_from_checkpoint(tmp_path / "a.ckpt").preparation == preparation


def test_labels_of_a_table_with_other_names_and_another_separator(checkpoint, tmp_path, capsys):
    rows, labels = points(noise=0.5)
    folder = folder_of(tmp_path / "e", checkpoint, rows, None)
    lines = [f"{row}.jpg;{label}" for row, label in enumerate(labels)]
    (tmp_path / "t.csv").write_text("\n".join(["path;kind", *lines]))
    args = ["--embeddings", folder, "--labels", tmp_path / "t.csv", "--output", tmp_path / "a.ckpt", "--max_epochs=1"]
    code, _, err = run(capsys, "adapt", *args, "--delimiter=;", "--columns=image=path,label=kind")
    assert code == 0, err
    assert RetrievalModule.load_from_checkpoint(tmp_path / "a.ckpt").embedder.embedding_dim == DIM


@pytest.mark.slow
def test_every_command_takes_the_checkpoint(glyphs, embeddings, tmp_path, capsys):
    images = glyphs[0] / "images"
    paths = paths_of(images)
    labels = tmp_path / "labels.csv"
    with labels.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "label"])
        writer.writerows((path, number // 4) for number, path in enumerate(paths))
    adapted = tmp_path / "adapted.ckpt"
    options = ["--embedding_dim=10", "--hidden_dim=16", "--max_epochs=2", "--batch_size=16", "--lr=0.01"]
    args = ["--embeddings", embeddings, "--labels", labels, "--output", adapted, *options]
    assert run(capsys, "adapt", *args)[0] == 0

    embed_images(adapted, images, tmp_path / "new", device="cpu")
    module = RetrievalModule.load_from_checkpoint(adapted)
    with torch.no_grad():
        expected = module.embedder.head(embeddings_in(embeddings)[1])
    _, found = embeddings_in(tmp_path / "new")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found.shape == (40, 10)
    assert not any(parameter.requires_grad for parameter in module.embedder.embedder.parameters())
    assert not module.train().embedder.embedder.training

    place = tmp_path / "index"
    code, _, err = command(capsys, "index", "--checkpoint", adapted, "--images", images, "--output", place)
    assert (code, err) == (0, "")
    query = images / paths[5]
    code, out, _ = command(capsys, "search", "--index", place, query, "--json", "-k=1")
    assert code == 0
    assert json.loads(out)["queries"][0]["results"][0]["path"] == paths[5]

    if can_write_onnx(torch.__version__):
        pytest.importorskip("onnxruntime")
        made = export_model(adapted, tmp_path / "exported")
        assert made.about["dim"] == 10
        assert max(made.differences.values()) < 1e-5


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ProxyAnchorLoss", {"num_classes": 12, "embedding_size": DIM}),
        ("lightning_retrieval.SupAPLoss", {"tau": 0.02}),
    ],
)
def test_losses_of_both_libraries(checkpoint, tmp_path, capsys, name, arguments):
    pytest.importorskip("pytorch_metric_learning")
    rows, labels = points(noise=1.0, classes=12)
    folder = folder_of(tmp_path / "e", checkpoint, rows, labels)
    output = tmp_path / "a.ckpt"
    options = ["--loss", name, "--loss_args", json.dumps(arguments), "--max_epochs=2", "--batch_size=32"]
    code, _, err = run(capsys, "adapt", "--embeddings", folder, "--output", output, *options)
    assert (code, err) == (0, "")
    module = RetrievalModule.load_from_checkpoint(output)
    assert module.embedder.head(torch.from_numpy(rows)).shape == rows.shape
