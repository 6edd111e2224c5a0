"""Pairs: classes matched by name, batches of two sides, their shards and seeds, preparation and evaluation."""

import csv
import shutil
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from sklearn.metrics import average_precision_score
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalModule, SharedTags, SmoothAPLoss, TwoNetworks
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import ImageIndex, ImageSet, ImageTable, Pairs, PairSampler
from lightning_retrieval.datamodules.pairs import PairSet
from lightning_retrieval.models import Preparation, TextEmbedder
from lightning_retrieval.preparation.serialised import serialise_transform
from tests.datamodules.pictures import TINY
from tests.datamodules.trees import write_image
from tests.point_set import Points
from tests.quiet_trainer import quiet_trainer

# The classes of the two sides differ and come in another order, so that each side numbers the shared ones otherwise.
SKETCHES = {"train": ("ant", "bee", "cat", "fox"), "test": ("dog", "eel", "owl")}
PHOTOS = {"train": ("bee", "cat", "ape", "ant"), "test": ("eel", "cow", "dog")}
SIZES = {"sketches": 12, "photos": 16}
SIDES = ("queries", "candidates")

pytestmark = pytest.mark.filterwarnings("ignore:PairSampler. skipped")


def write_side(folder, classes, images, rows=("image", "label", "split"), more=lambda number: ()):
    """Write images of each class, whose paths begin with the class, and the table of them."""
    folder.mkdir(parents=True)
    with (folder / "table.csv").open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(rows)
        number = 0
        for split, names in classes.items():
            for name in names:
                for image in range(images):
                    write_image(folder / f"{name}/{image}.png", size=(20, 20), seed=number + 100 * len(folder.name))
                    table.writerow([f"{name}/{image}.png", name, split, *more(number)])
                    number += 1
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sides")
    write_side(folder / "sketches", SKETCHES, 2)
    write_side(folder / "photos", PHOTOS, 3)
    return folder


def of_side(root, name, **settings):
    return ImageTable(root / name, "table.csv", **{"image_size": SIZES[name], **settings})


def pairs_of(root, sketches=(), photos=(), kind=Pairs, **settings):
    sides = of_side(root, "sketches", **dict(sketches)), of_side(root, "photos", **dict(photos))
    return kind(*sides, **{"classes_per_batch": 2, "samples_per_class": 2, "seed": 3, **settings})


@pytest.fixture
def make(root):
    def create(sketches=(), photos=(), **settings):
        return pairs_of(root, sketches, photos, **settings)

    return create


def whole_batch(pairs):
    """All items of a set of both sides in one batch."""
    return pairs.collate([pairs[index] for index in range(len(pairs))])


def classes_of(paths):
    return [path.partition("/")[0] for path in paths]


# --- labels


@pytest.mark.parametrize("split", ["train_set", "test_set"])
def test_labels_are_equal_where_the_classes_have_the_same_name(make, split):
    data = make()
    batch = whole_batch(getattr(data, split))
    names, labels = [], []
    for side in SIDES:
        names += classes_of(getattr(data.modules[side], split).index.paths)
        labels += batch[side]["labels"].tolist()
    assert labels == getattr(data, split).labels.tolist()
    for name, label in zip(names, labels, strict=True):
        assert [other == label for other in labels] == [other == name for other in names]


def test_training_batches_hold_the_same_classes_on_both_sides(make):
    data = make(queries_per_class=3)
    with pytest.warns(UserWarning, match="PairSampler: skipped 2 of 5 classes in training"):
        batches = list(data.train_dataloader())
    assert len(batches) == 3  # nine photos in shared classes, four in a batch
    for batch in batches:
        names = {}
        for side, size, count in (("queries", 12, 3), ("candidates", 16, 2)):
            part, paths = batch[side], data.modules[side].train_set.index.paths
            assert part["images"].shape[1:] == (3, size, size)
            names[side] = classes_of(paths[image] for image in part["ids"].tolist())[::count]
            assert part["labels"].tolist()[::count] == part["labels"].unique_consecutive().tolist()
        assert names["queries"] == names["candidates"]


def indexed(labels, root=Path(), **settings):
    """A data set of some photos with these labels."""
    paths = [f"{name}/{image}.png" for name in PHOTOS["train"] for image in range(3)]
    return ImageSet(ImageIndex(paths[: len(labels)], labels, **settings), root / "photos", TINY)


def test_numbers_are_used_as_they_are_if_no_side_has_names(root):
    assert PairSet(Points(0, 8), Points(1, 4)).labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    levels = {"levels": [[0, 5], [1, 5]]}
    by_number = whole_batch(PairSet(indexed([0, 1], root, **levels), indexed([0, 1], root, **levels)))
    assert by_number["candidates"]["labels"].tolist() == [[0, 5], [1, 5]]


def test_distractors_are_relevant_to_nothing_on_the_other_side():
    queries = indexed([0, -1], names=["cat"])
    candidates = indexed([-1, 0], names=["cat"])
    of_cat, no_class, other_without, other_cat = PairSet(queries, candidates).labels.tolist()
    assert of_cat == other_cat
    assert len({of_cat, no_class, other_without}) == 3


def test_tags_are_matched_by_name_and_have_one_number_of_columns(root):
    queries = indexed([0, 0], root, names=["cat"], tags=[[0, -1], [1, 0]], tag_names=["red", "wool"])
    candidates = indexed([0], root, names=["cat"], tags=[[2, 0, 1]], tag_names=["wool", "blue", "red"])
    batch = whole_batch(PairSet(queries, candidates))
    (red, wool), (of_candidate,) = batch["queries"]["tags"].tolist(), batch["candidates"]["tags"].tolist()
    assert red[1:] == [-1, -1]
    assert wool[1:] == [red[0], -1]
    assert of_candidate[:2] == [red[0], wool[0]]
    assert of_candidate[2] not in (*red, *wool)


def test_cameras_count_only_on_both_sides_and_each_item_is_an_instance_if_the_other_side_has_instances(root):
    videos = indexed([0, 0], root, names=["cat"], instances=[5, 5], cameras=[1, 1])
    batch = whole_batch(PairSet(indexed([0, 0], root, names=["cat"]), videos))
    assert [batch[side]["instances"].tolist() for side in SIDES] == [[0, 1], [5, 5]]
    assert "cameras" not in batch["candidates"]
    both = whole_batch(PairSet(videos, indexed([0], root, names=["cat"], cameras=[7])))
    assert [both[side]["cameras"].tolist() for side in SIDES] == [[1, 1], [7]]


# --- evaluation


class Sides(RetrievalModule):
    """A network for the images of each side."""

    def __init__(self, directions="queries", relevance=None):
        torch.manual_seed(0)
        embedder, query_embedder = (nn.Sequential(nn.Flatten(), nn.Linear(3 * size**2, 8)) for size in (16, 12))
        settings = {"sides": TwoNetworks(query_embedder, directions=directions), "relevance": relevance}
        super().__init__(embedder, SmoothAPLoss(tau=0.1), **settings)


def mean_ap(queries, gallery, relevant):
    scores = normalize(queries.double()) @ normalize(gallery.double()).T
    values = [average_precision_score(r, s) for r, s in zip(relevant, scores) if r.any()]
    return sum(values) / len(values)


def rows_of_sides(data, module, unreadable=()):
    """Embeddings and labels of the readable images of each side, each image embedded by itself."""
    rows = {}
    for side, embed in (("queries", module.embed_queries), ("candidates", module.embed)):
        dataset = data.modules[side].test_set
        labels = data.test_set.labels[: len(dataset)] if side == "queries" else data.test_set.labels[-len(dataset) :]
        readable = [i for i, path in enumerate(dataset.index.paths) if (side, path) not in unreadable]
        with torch.no_grad():
            embedded = [embed(dataset[i]["images"][None]) for i in readable]
        rows[side] = torch.cat(embedded), labels[readable]
    return rows


def expected_metrics(data, module, unreadable=()):
    """mAP of both directions."""
    (queries, of_queries), (candidates, of_candidates) = rows_of_sides(data, module, unreadable).values()
    relevant = of_queries[:, None] == of_candidates
    found = {"val/mAP": mean_ap(queries, candidates, relevant)}
    return {**found, "val/reverse/mAP": mean_ap(candidates, queries, relevant.T)}


def validate(module, data, **settings):
    trainer = quiet_trainer(callbacks=[RetrievalEvaluation(ks=(1,))], **settings)
    (results,) = trainer.validate(module, datamodule=data, verbose=False)
    return results


@pytest.mark.parametrize("workers", [0, 2])
def test_both_directions_are_evaluated(make, workers):
    module = Sides()
    # A batch of four holds queries only, queries and candidates, or candidates only.
    found = validate(module, make(eval_batch_size=4, num_workers=workers))
    for name, value in expected_metrics(make(), module.eval()).items():
        assert found[name] == pytest.approx(value, abs=1e-6)
    assert found["val/mAP"] != found["val/reverse/mAP"]
    assert (found["val/skipped_queries"], found["val/reverse/skipped_queries"]) == (2, 3)  # owls, and cows


def test_an_unreadable_image_is_neither_query_nor_candidate(root, make, tmp_path):
    for name, path in (("sketches", "eel/0.png"), ("photos", "dog/1.png")):
        shutil.copytree(root / name, tmp_path / name)
        (tmp_path / name / path).write_bytes(b"no image")
    sides = [of_side(tmp_path, name, on_error="skip") for name in ("sketches", "photos")]
    module = Sides()
    with pytest.warns(UserWarning, match="cannot be read"):
        found = validate(module, Pairs(*sides, classes_per_batch=2, eval_batch_size=1))
    unreadable = (("queries", "eel/0.png"), ("candidates", "dog/1.png"))
    for name, value in expected_metrics(make(), module.eval(), unreadable).items():
        assert found[name] == pytest.approx(value, abs=1e-6)


def test_tags_of_both_sides_are_compared(tmp_path):
    """The images have other numbers of tags on the two sides, and each side numbers its tags by itself."""
    tags = {"sketches": ["red", "wool", "red;old", "new"], "photos": ["old;red;big", "wool", "new;wool", "big"]}
    for name, of_rows in tags.items():
        classes = {"test": ("ant", "bee"), "train": ("cat",)}
        write_side(tmp_path / name, classes, 2, ["image", "label", "split", "tags"], lambda i, t=of_rows: [t[i % 4]])
    module = Sides(relevance=SharedTags()).eval()
    data = pairs_of(tmp_path, classes_per_batch=1)
    found = validate(module, data)
    (queries, _), (candidates, _) = rows_of_sides(data, module.eval()).values()
    of_rows = [[set(row.split(";")) for row in tags[name]] for name in ("sketches", "photos")]
    relevant = torch.tensor([[bool(query & image) for image in of_rows[1]] for query in of_rows[0]])
    assert found["val/mAP"] == pytest.approx(mean_ap(queries, candidates, relevant), abs=1e-6)


def fitted(root, folder, **settings):
    """A run of three epochs, whose checkpoint is that of the best mAP of the other direction."""
    saving = ModelCheckpoint(folder, "best", monitor="val/reverse/mAP", mode="max")
    evaluation = RetrievalEvaluation(ks=(1,), before_fit=True)
    own = {"max_epochs": 3, "logger": CSVLogger(folder), "enable_checkpointing": True, "log_every_n_steps": 1}
    trainer = quiet_trainer(callbacks=[evaluation, saving], **own, **settings)
    module = Sides(directions="both")
    trainer.fit(module, pairs_of(root))
    return evaluation.results, evaluation.best, saving.best_model_score.item(), module


def run_of_rank(rank, world, root, folder):
    """An evaluation, and a fit, in several processes."""
    several = {"devices": world, "strategy": "ddp"}
    found = validate(Sides(), pairs_of(root, eval_batch_size=2), **several)
    return found, *fitted(root, folder, **several)[:2]


def test_a_fit_monitors_either_direction_and_is_the_same_on_two_processes(root, make, tmp_path, run_processes):
    results, best, score, module = fitted(root, tmp_path / "alone")
    assert score == pytest.approx(best["val/reverse/mAP"])
    for name, value in expected_metrics(make(), module.eval()).items():
        assert results["val"][name] == pytest.approx(value, abs=1e-6)
    assert results["untrained"]["test/reverse/mAP"] != results["val"]["val/reverse/mAP"]
    assert results["untrained"].keys() == {name.replace("val/", "test/") for name in results["val"]}
    assert {"best/val/mAP", "best/val/reverse/mAP"} == {f"best/{name}" for name in best if name.endswith("/mAP")}
    kept = torch.load(tmp_path / "alone" / "best.ckpt", weights_only=True)
    assert kept["query_preparation"]["preparation"]["image_size"] == 12
    assert kept["preparation"]["preparation"]["image_size"] == 16
    evaluated = validate(Sides(), make())
    for of_rank in run_processes(run_of_rank, 2, root, tmp_path / "two", backend=None):
        assert of_rank[0] == pytest.approx(evaluated, abs=1e-12)
        assert of_rank[1]["val"] == pytest.approx(results["val"], abs=1e-5)
        assert of_rank[2] == pytest.approx(best, abs=1e-5)


def test_several_sets_are_paired_by_name_or_with_the_single_set_of_the_other_side(tmp_path, root):
    named = {"train": SKETCHES["train"], "easy": ("dog", "eel"), "hard": ("owl", "yak")}
    for folder in ("sketches", "photos"):
        write_side(tmp_path / folder, named, 2)
    quiet = quiet_trainer(callbacks=[RetrievalEvaluation(ks=(1,))])
    results = {}
    for found in quiet.test(Sides(), datamodule=pairs_of(tmp_path), verbose=False):
        results |= found
    assert {"test/easy/mAP", "test/easy/reverse/mAP", "test/hard/reverse/mAP"} <= results.keys()
    against_one = Pairs(of_side(tmp_path, "sketches"), of_side(root, "photos"), classes_per_batch=2).test_set
    assert {name: len(pairs) for name, pairs in against_one.items()} == {"easy": 4 + 9, "hard": 4 + 9}


def test_loaders_of_two_sides_need_no_pairs(make):
    """Batches of tuples, with both sides or one of them; without ids, rows are known by their number."""
    module, whole = Sides().eval(), whole_batch(make().test_set)
    (images, labels), (candidates, of_candidates) = [(whole[side]["images"], whole[side]["labels"]) for side in SIDES]
    mixed = {"queries": (images[:4], labels[:4]), "candidates": (candidates[:1], of_candidates[:1])}
    batches = [mixed, {"queries": (images[4:], labels[4:])}, {"candidates": (candidates[1:], of_candidates[1:])}]
    trainer = quiet_trainer(callbacks=[RetrievalEvaluation(ks=(1,))])
    (found,) = trainer.validate(module, DataLoader(batches, batch_size=None), verbose=False)
    assert found["val/mAP"] == pytest.approx(expected_metrics(make(), module)["val/mAP"], abs=1e-6)
    assert "val/reverse/mAP" not in found  # the data set does not say that it has two sides
    predicted = trainer.predict(module, DataLoader(batches, batch_size=None))
    assert [batch["roles"].tolist() for batch in predicted] == [[1] * 4 + [2], [1] * 2, [2] * 8]


# --- training batches


class Recorder(pl.LightningModule):
    """Records the ids and the images of each batch, as the network would get them."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches = []

    def training_step(self, batch, batch_idx):
        record = {}
        for side, part in batch.items():
            record[side] = list(zip(part["ids"].tolist(), part["images"].double().sum((1, 2, 3)).tolist()))
        self.batches.append(record)
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def recorded(root, checkpoint=None, *, workers=0, **settings):
    """The batches of two epochs, which are augmented at random."""
    at_random = {"transform": "smooth_ap"}
    data = pairs_of(root, at_random, at_random, classes_per_batch=3, samples_per_class=1, num_workers=workers)
    module = Recorder()
    trainer = quiet_trainer(**{"max_epochs": 2, "limit_val_batches": 0, **settings})
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    return module.batches


def saved_after_step(step, folder):
    """Settings of a Trainer that writes a.ckpt after this step."""
    writer = ModelCheckpoint(folder, "a", every_n_train_steps=step)
    return {"callbacks": [writer], "enable_checkpointing": True}


def batches_of_rank(rank, world, root):
    return recorded(root, devices=world, strategy="ddp")


def test_batches_depend_neither_on_workers_nor_on_processes_nor_on_a_restart(root, tmp_path, run_processes):
    alone = recorded(root)
    assert len(alone) == 2 * 3
    assert len({record["candidates"][0] for record in alone}) > 3  # other images, otherwise augmented
    assert recorded(root, workers=2) == alone
    first, second = run_processes(batches_of_rank, 2, root, backend=None)
    for one, other, expected in zip(first, second, alone, strict=True):
        for side, rows in expected.items():
            assert one[side] + other[side] == rows
            assert (len(one[side]), len(other[side])) == (2, 1)
    recorded(root, **saved_after_step(4, tmp_path))
    assert recorded(root, tmp_path / "a.ckpt") == alone[4:]


def test_a_run_continues_only_with_the_images_of_both_sides(root, tmp_path):
    for name in ("sketches", "photos"):
        shutil.copytree(root / name, tmp_path / name)
    recorded(tmp_path, **saved_after_step(4, tmp_path))
    table = tmp_path / "sketches" / "table.csv"
    table.write_text(table.read_text().replace("ant/0.png,ant", "ant/0.png,bee"))
    with pytest.raises(ValueError, match=r"^Pairs: .* training images"):
        recorded(tmp_path, tmp_path / "a.ckpt")


class WrongLabels(Pairs):
    """Draws batches by labels that are not those of the images of one side."""

    wrong = "queries"

    def train_sampler(self):
        labels = dict(
            zip(SIDES, self.train_set.labels.split([len(self.queries.train_set), len(self.candidates.train_set)]))
        )
        labels[self.wrong] = labels[self.wrong].roll(1)
        return PairSampler(*labels.values(), classes_per_batch=2, queries_per_class=2, samples_per_class=2)


@pytest.mark.refusal
@pytest.mark.parametrize("side", SIDES)
def test_labels_of_a_side_that_are_not_those_of_the_sampler_raise_before_the_first_step(root, side, monkeypatch):
    monkeypatch.setattr(WrongLabels, "wrong", side)
    trainer = quiet_trainer(max_steps=1, limit_val_batches=0)
    with pytest.raises(ValueError, match=r"^RetrievalDataLoader: `batch_sampler` "):
        trainer.fit(Sides(), datamodule=pairs_of(root, kind=WrongLabels))
    assert trainer.global_step == 0


# --- preparation


def test_each_side_is_prepared_for_its_own_network_and_both_preparations_are_recorded(make):
    module, data = Sides(), make({"mean": (0.1,) * 3}, {"mean": (0.9,) * 3})
    networks = {"queries": module.query_embedder, "candidates": module.embedder}
    seen = {}
    for side, network in networks.items():
        network.register_forward_pre_hook(lambda _, inputs, side=side: seen.update({side: inputs[0]}))
    module.embedder.preparation = Preparation(99, interpolation="nearest")
    module.query_embedder.preparation = Preparation(77, background="black")
    validate(module, data)
    for side in SIDES:
        dataset = data.modules[side].test_set
        expected = torch.stack([dataset[i]["images"] for i in range(len(dataset))])
        assert torch.allclose(seen[side], expected, atol=1e-6)  # normalised on the device
    assert (data.queries.preparation.background, data.candidates.preparation.background) == ("black", "white")
    assert (data.queries.preparation.image_size, data.candidates.preparation.image_size) == (12, 16)


class Shared(RetrievalModule):
    """One network for both sides."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 4)), SmoothAPLoss())


class Doubling(Shared):
    def forward_queries(self, inputs):
        return 2 * self(inputs)


def test_queries_of_a_shared_network_may_be_prepared_and_embedded_in_their_own_way():
    module, images = Shared().eval(), torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    of_queries, of_candidates = Preparation(8, mean=(0.3,) * 3), Preparation(8, mean=(0.6,) * 3)
    module.preparation = serialise_transform(of_candidates)
    assert torch.equal(module.embed_queries(images), module.embed(images))
    module.query_preparation = serialise_transform(of_queries)
    assert torch.equal(module.embed_queries(images), module(of_queries.normalize(images)))
    assert torch.equal(module.embed(images), module(of_candidates.normalize(images)))
    doubling = Doubling().eval()
    assert torch.equal(doubling.embed_queries(images.float()), 2 * doubling.embed(images.float()))


def test_images_of_both_sides_are_embedded_at_all_scales_and_tokens_at_one():
    settings = {"eval_scales": (1.0, 0.5), "sides": TwoNetworks(TextEmbedder("ngram_net", 4))}
    module = RetrievalModule(Shared().embedder, SmoothAPLoss(), **settings).eval()
    tokens = module.query_embedder.tokenizer(["red shoes", "a sofa"])
    assert torch.equal(module.embed_queries(tokens), module.query_embedder(tokens))
    with_images = RetrievalModule(Doubling().embedder, SmoothAPLoss(), eval_scales=(1.0, 0.5)).eval()
    with_images.query_embedder = Shared().embedder
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(with_images.embed_queries(images), with_images.embed(images))
    assert not torch.allclose(with_images.embed(images), with_images(images))


def test_images_are_prepared_as_the_module_was_evaluated(root):
    recorded_at, other = Preparation(12, mean=(0.3,) * 3), Preparation(16, mean=(0.6,) * 3)
    module = Sides()
    module.query_preparation, module.preparation = map(serialise_transform, (recorded_at, other))
    data = Pairs(ImageTable(root / "sketches", "table.csv"), ImageTable(root / "photos", "table.csv"))
    validate(module, data)
    assert (data.queries.preparation, data.candidates.preparation) == (recorded_at, other)


# --- other


def test_arguments_of_a_side_that_have_no_effect_are_named(make):
    with pytest.warns(UserWarning, match="^Pairs: `num_workers`, `sampler` of the data module of `queries` "):
        make({"num_workers": 2, "sampler": "all_classes"})


def test_the_check_counts_both_sides(make):
    assert {name: counts[0] for name, counts in make().check().splits.items()} == {
        "queries/train": (8, 4),
        "queries/test": (6, 3),
        "candidates/train": (12, 4),
        "candidates/test": (9, 3),
    }
