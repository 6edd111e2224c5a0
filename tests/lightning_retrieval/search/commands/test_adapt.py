"""A head that is trained on stored embeddings becomes a checkpoint that every command takes."""

import csv
import json
import re
import signal

import numpy as np
import pytest
import torch

from lightning_retrieval import Embedder, PCAWhitening, RetrievalModule, SmoothAPLoss
from lightning_retrieval.files import file_digest
from lightning_retrieval.preparation.preparation import Preparation
from lightning_retrieval.preparation.serialised import serialise_transform
from lightning_retrieval.search.commands.adapt import adapt_head, lists_of_epoch, named_loss
from lightning_retrieval.search.commands.demo import PageAnswers
from lightning_retrieval.search.commands.embed import embed_images
from lightning_retrieval.search.commands.embedding import load_checkpoint
from lightning_retrieval.search.commands.export import export_model
from lightning_retrieval.search.commands.search_images import ImageSearcher
from lightning_retrieval.search.commands.stores import opened_index
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest, ShardRows
from lightning_retrieval.search.export.onnx_file import can_write_onnx
from lightning_retrieval.search.store.rows import FolderRows
from tests.lightning_retrieval.search.commands.glyph_commands import command, paths_of, run, save_checkpoint

DIM, USEFUL = 24, 6


def folder_of(path, checkpoint, rows, labels, **about):
    """A folder of embeddings, as if this checkpoint had made them."""
    known = {"preparation": {}, "checkpoint": str(checkpoint), "checkpoint_sha256": file_digest(checkpoint), **about}
    what = {"images_sha256": "list", "model_sha256": "model", "file_format": "npy", "about": known}
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
    assert out.startswith(f"{output}: mAP of 12 held-out classes ")
    assert "\nnot shown to be better than the features: " in out
    assert output.is_file()


def test_a_better_estimate_from_few_classes_is_not_called_worse(checkpoint, tmp_path, capsys):
    """The estimate is above zero, and so is the difference of the two values of mAP, but the interval contains zero."""
    folder = folder_of(tmp_path / "e", checkpoint, *points(noise=1.5, classes=12))
    options = ["--max_epochs=10", "--lr=0.01", "--seed=3"]
    code, out, err = run(capsys, "adapt", "--embeddings", folder, "--output", tmp_path / "a.ckpt", *options)
    assert (code, err) == (0, "")
    estimate, low, high = map(float, re.search(r"of a class (\S+), (\S+) to (\S+) with 95 %", out).groups())
    assert low < 0 < estimate < high
    assert estimate == pytest.approx((low + high) / 2, abs=1e-4)
    assert "not shown to be better than the features" in out
    assert "no better" not in out


@pytest.mark.parametrize(("source", "warnings"), [("argument", 0), ("model", 1), ("default", 1)])
def test_a_head_is_for_images_prepared_as_those_of_its_embeddings(checkpoint, tmp_path, capsys, source, warnings):
    """Also if the checkpoint of the embeddings does not say how; a preparation that was a guess is called one."""
    preparation = serialise_transform(Preparation.named("glyphs"))
    about = {"preparation": preparation, "preparation_from": source}
    folder = folder_of(tmp_path / "e", checkpoint, *points(noise=0.5), **about)
    assert load_checkpoint(checkpoint).preparation is None
    code, _, err = run(capsys, "adapt", "--embeddings", folder, "--output", tmp_path / "a.ckpt", "--max_epochs=1")
    assert (code, err.count("make the embeddings again with --transform")) == (0, warnings)
    assert load_checkpoint(tmp_path / "a.ckpt").preparation == preparation


def test_labels_of_a_table_with_other_names_and_another_separator(checkpoint, tmp_path, capsys):
    rows, labels = points(noise=0.5)
    folder = folder_of(tmp_path / "e", checkpoint, rows, None)
    lines = [f"{row}.jpg;{label}" for row, label in enumerate(labels)]
    (tmp_path / "t.csv").write_text("\n".join(["path;kind", *lines]))
    args = ["--embeddings", folder, "--labels", tmp_path / "t.csv", "--output", tmp_path / "a.ckpt", "--max_epochs=1"]
    code, _, err = run(capsys, "adapt", *args)
    assert code == 2
    assert err.startswith("adapt: line 1 of ")
    assert "; give `--delimiter` ';'." in err
    code, out, err = run(capsys, "adapt", *args, "--delimiter=;", "--columns=image=path,label=kind")
    assert code == 0, err
    assert out.startswith(f"{tmp_path / 'a.ckpt'}: mAP of ")


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
    code, out, _ = run(capsys, "adapt", *args)
    assert (code, out.startswith(f"{adapted}: mAP of 2 held-out classes ")) == (0, True)

    embed_images(adapted, images, tmp_path / "new", file_format="npy", device="cpu")
    module = load_checkpoint(adapted)
    with torch.no_grad():
        expected = module.embedder.head(FolderRows(EmbeddingFolder.load(embeddings))[:])
    found = FolderRows(EmbeddingFolder.load(tmp_path / "new"))[:]
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

    pytest.importorskip("gradio")
    with opened_index(place, None) as index:
        answers = PageAnswers(ImageSearcher(index, device="cpu"), images, 3)
        assert answers.of_upload(str(query))[3][0] == paths[5]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ContrastiveLoss", {"neg_margin": 0.5}),
        ("ProxyAnchorLoss", {"num_classes": 12, "embedding_size": DIM}),
        ("FastAPLoss", {}),
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
    module = load_checkpoint(output)
    assert module.embedder.head(torch.from_numpy(rows)).shape == rows.shape


def test_lists_hold_rows_of_whole_classes():
    labels = torch.tensor([7] * 40 + [3] * 5 + list(range(100, 140)) * 2)
    lists = list(lists_of_epoch(labels, 30, torch.Generator().manual_seed(0)))
    rows = torch.cat(lists)
    assert len(rows.unique()) == len(rows) == 90
    assert [len(chosen) for chosen in lists] == [30, 30, 30]
    (everything,) = lists_of_epoch(labels, 16_384, torch.Generator().manual_seed(0))
    assert sorted(labels[everything].unique(return_counts=True)[1].tolist()) == [2] * 40 + [5, 16]
    whole = sum(bool((labels[chosen] == label).sum() == 2) for chosen in lists for label in range(100, 140))
    assert whole > 25


@pytest.mark.refusal
def test_what_cannot_be_adapted_raises(checkpoint, tmp_path, capsys):
    rows, labels = points(noise=1.0, classes=6)
    folder = folder_of(tmp_path / "e", checkpoint, rows, labels)
    output = tmp_path / "a.ckpt"
    two = tmp_path / "two.csv"
    two.write_text("image,label\n0.jpg,a\n0.jpg,b\n")
    some = tmp_path / "some.csv"
    some.write_text("image,label\n0.jpg,a\n1.jpg,\n")
    tags = tmp_path / "tags.csv"
    tags.write_text("image,tags\n0.jpg,a b\n")
    options = {
        f"--labels={tags}": "`--labels` must be a table with the column label",
        "--loss=system": "`--loss` names the class pytorch_metric_learning.losses.system",
        "--loss=os.system": "`--loss` names os.system",
        "--loss=lightning_retrieval.RetrievalIndex": "`--loss` and `--loss_args` must name a loss and its arguments",
        "--loss_args=[1]": "`--loss_args` must be a JSON object",
        '--loss_args={"size": 1}': "`--loss` and `--loss_args` must name a loss and its arguments, got LogRankLoss",
        "--batch_size=16385": "`--batch_size` must be an integer from 4 to 16384, got 16385",
        "--embedding_dim=0": "adapt: `--embedding_dim` must be an integer >= 1, got 0",
        f"--labels={tmp_path / 'gone.csv'}": "`--labels` must be a CSV or Parquet table",
        f"--labels={two}": "`image` must be different in each row",
        f"--labels={some}": "`--labels` must have a label for each image",
        f"--output={tmp_path}": "`--output` must be a file in an existing folder",
        f"--output={checkpoint}": "`--output` must not be the checkpoint that made the embeddings",
        f"--output={some}": f"`--output` must be a new file, got {some}, which exists; give `--overwrite`",
    }
    for option, rule in options.items():
        code, _, err = run(capsys, "adapt", "--embeddings", folder, "--output", output, option)
        assert (code, rule in err, err.count("\n")) == (2, True, 1), err
    infinite = np.where(np.arange(48)[:, None] == 3, np.nan, rows).astype(np.float32)
    folders = {
        folder_of(tmp_path / "nan", checkpoint, infinite, labels): "1 of 48 rows have NaN or inf (3.jpg)",
        folder_of(tmp_path / "few", checkpoint, rows[:24], labels[:24]): "must be of at least 4 classes with several",
        folder_of(tmp_path / "none", checkpoint, rows, None): "in which 48 of 48 have none",
        folder_of(
            tmp_path / "other", checkpoint, rows, labels, checkpoint_sha256="0"
        ): "`--checkpoint` must be the one",
    }
    for other, rule in folders.items():
        code, _, err = run(capsys, "adapt", "--embeddings", other, "--output", output)
        assert (code, rule in err, err.count("\n")) == (2, True, 1), err
    assert not output.exists()


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("classes", "dim", "message"),
    [
        (2, DIM, "ProxyAnchorLoss: `labels` must be from 0 to 1"),
        (6, DIM + 1, f"adapt_head: `loss` must accept embeddings of {DIM} numbers and labels"),
    ],
)
def test_a_loss_for_fewer_classes_or_another_dimension_raises(checkpoint, tmp_path, classes, dim, message):
    folder = folder_of(tmp_path / "e", checkpoint, *points(noise=1.0, classes=6))
    loss = named_loss("ProxyAnchorLoss", json.dumps({"num_classes": classes, "embedding_size": dim}))
    with pytest.raises(ValueError, match=message):
        adapt_head(folder, tmp_path / "a.ckpt", loss=loss)


class Undefined(torch.nn.Module):
    """A loss that is not a number from one of its calls on."""

    def __init__(self, first):
        super().__init__()
        self.calls, self.first = 0, first

    def forward(self, embeddings, labels):
        value = embeddings.sum()
        if self.calls >= self.first:
            value = value * float("nan")
        self.calls += 1
        return value


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("first", "sentence"),
    [(0, "`loss` must be finite at the start, got nan; give other `loss_args`"), (1, "`lr` must .* after 1 steps")],
)
def test_a_learning_rate_is_not_the_cause_of_a_first_value_that_is_not_finite(checkpoint, tmp_path, first, sentence):
    folder = folder_of(tmp_path / "e", checkpoint, *points(noise=1.0, classes=6))
    with pytest.raises(ValueError, match=f"^adapt_head: {sentence}"):
        adapt_head(folder, tmp_path / "a.ckpt", loss=Undefined(first))


@pytest.mark.refusal
def test_a_model_with_whitening_or_scales_cannot_be_adapted(tmp_path):
    rows, labels = points(noise=1.0)
    whitening = PCAWhitening(dim=4).fit(torch.from_numpy(rows))
    for number, settings in enumerate(({"whitening": whitening}, {"eval_scales": (1.0, 0.7)})):
        module = RetrievalModule(Embedder("glyph_net", embedding_dim=DIM), SmoothAPLoss(), **settings)
        made = save_checkpoint(tmp_path / f"{number}.ckpt", module)
        folder = folder_of(tmp_path / str(number), made, rows, labels)
        with pytest.raises(ValueError, match=r"adapt_head: `embeddings` must be of a model without whitening"):
            adapt_head(folder, tmp_path / "a.ckpt", loss=SmoothAPLoss())


def adapt_on_full_disk(rank, world_size, embeddings, output):
    """The message of `adapt_head` when no file may be longer than a limit."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(OSError, match=r"^adapt_head: ") as error:
        adapt_head(embeddings, output, loss=SmoothAPLoss(), max_epochs=1)
    return str(error.value)


@pytest.mark.refusal
def test_a_full_disk_leaves_no_part_of_a_checkpoint(checkpoint, tmp_path, run_alone):
    embeddings = folder_of(tmp_path / "e", checkpoint, *points(1.0))
    message = run_alone(adapt_on_full_disk, embeddings, tmp_path / "head.ckpt")
    assert message.startswith(
        f"adapt_head: the checkpoint {tmp_path / 'head.ckpt'} cannot be written (File too large);"
    )
    assert [path.name for path in tmp_path.iterdir() if path.name != "e"] == []
