"""RetrievalMetrics: the values of each query, skipped queries, memory and progress."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torch.nn.functional import normalize
from tqdm import tqdm

from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.ranking import labels as labelled_lists
from lightning_retrieval.ranking import ranked_lists
from tests.lightning_retrieval.metrics.helpers import LargestTensor, compute

KS = (1, 2, 4, 8)
X, Y = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
B = Y.bool()


def test_skipped_queries_are_counted():
    found = compute(torch.randn(7, 3), torch.tensor([1, 1, 2, 3, 4, 4, 5]))
    assert found["skipped_queries"] == 3.0


@pytest.mark.parametrize(
    ("kwargs", "queries"),
    [
        ({}, 4),
        ({"roles": torch.full((4,), 2)}, 0),
        ({"roles": torch.full((4,), 1)}, 4),
    ],
)
def test_no_query_with_a_positive(kwargs, queries):
    metrics = RetrievalMetrics(ks=(1,))
    metrics.update(torch.randn(4, 3), torch.arange(4), **kwargs)
    match = f"RetrievalMetrics: none of the {queries} queries has a relevant candidate, so the metrics are NaN"
    with pytest.warns(UserWarning, match=match):
        found = metrics.compute()
    assert found.pop("skipped_queries").item() == queries
    assert all(value.isnan() for value in found.values())


def test_no_tensor_is_as_large_as_the_score_matrix(monkeypatch):
    monkeypatch.setattr(labelled_lists, "_MAX_BLOCK_POSITIVES", 1)
    x, labels = torch.randn(1500, 4), torch.arange(1500) % 300
    metrics = RetrievalMetrics()
    metrics.update(x, labels)
    with LargestTensor() as largest:
        metrics.compute()
    assert largest.elements <= 64 * 1536  # 64 queries, the gallery padded to whole multiples of 384


def test_per_query():
    """One row for each query in the order of the ids, whatever order they came in."""
    x, labels = torch.randn(40, 5, dtype=torch.float64), torch.randint(0, 20, (40,))
    labels[3] = 77  # alone
    ids = torch.randperm(40) * 3
    metrics = RetrievalMetrics(ks=(1, 4), map_ks=(2,))
    metrics.update(x[:11], labels[:11], ids[:11], roles=2 + (torch.arange(11) > 1))
    metrics.update(x[11:], labels[11:], ids[11:])
    table = metrics.per_query()
    order = ids[2:].argsort()
    assert table["ids"].tolist() == ids[2:][order].tolist()
    assert table["labels"].tolist() == labels[2:][order].tolist()
    unit = normalize(x)
    scores = (unit @ unit.T).fill_diagonal_(-2)
    for row, query in enumerate((order + 2).tolist()):
        hits = (labels == labels[query])[scores[query].argsort(descending=True)][:-1]
        if not hits.any():
            assert table["AP"][row].isnan()
            continue
        expected = average_precision_score(hits.numpy(), -np.arange(39))
        assert table["AP"][row].item() == pytest.approx(expected, abs=1e-12)
        assert table["first_hit"][row] == hits.nonzero()[0, 0] + 1
    means = metrics.compute()
    assert means["mAP"].item() == table["AP"].nanmean().item()
    assert means["skipped_queries"] == table["AP"].isnan().sum() > 0
    metrics.update(x, labels, ids + 1)
    assert len(metrics.per_query()["AP"]) == 78  # not the table of before


@pytest.mark.parametrize(
    ("classes", "kept", "embeddings_on_cpu"),
    [(30, 4, False), (3, 0, True), (3, 4, False)],  # 3: the positives of a query are in several tiles
)
def test_a_gallery_in_tiles(classes, kept, embeddings_on_cpu, monkeypatch):
    x, labels = torch.randn(900, 6), torch.randint(0, classes, (900,))
    x[::50] = x[0]  # ties of images in different tiles
    whole = compute(x, labels)
    monkeypatch.setattr(ranked_lists, "_CPU_COLUMNS", 384)
    monkeypatch.setattr(ranked_lists, "_COLUMNS_OF_A_POSITIVE", 0)
    monkeypatch.setattr(ranked_lists, "_KEPT_TILES", kept)
    metrics = RetrievalMetrics(ks=KS, embeddings_on_cpu=embeddings_on_cpu)
    metrics.update(x, labels)
    assert {name: value.item() for name, value in metrics.compute().items()} == whole


def test_a_query_with_positives_under_its_own_camera_only_is_skipped():
    labels, cameras = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([4, 4, 4, 5, 5])
    metrics = RetrievalMetrics(ks=(1,))
    metrics.update(torch.randn(5, 3), labels, torch.arange(5), cameras=cameras)
    assert metrics.compute()["skipped_queries"] == 3
    assert metrics.per_query()["AP"].isnan().tolist() == [True, True, False, False, True]


def test_one_camera_for_each_image_changes_nothing():
    x, labels = torch.randn(300, 5), torch.randint(0, 40, (300,))
    assert compute(x, labels, cameras=torch.arange(300)) == compute(x, labels)


def test_number_of_ranked_images():
    metrics = RetrievalMetrics(ks=(1, 3))
    metrics.update(X, Y)
    metrics.compute()
    assert metrics.ranked_images == 3  # the others
    metrics.update(X, Y, roles=torch.where(B, 1, 2))
    metrics.compute()
    assert metrics.ranked_images == 6


def test_progress_bar_of_the_ranking(monkeypatch, capsys):
    class ForATerminal(tqdm):
        def __init__(self, **settings):
            assert settings["disable"] is None
            super().__init__(**{**settings, "disable": False, "delay": 0, "mininterval": 0, "miniters": 1})

    monkeypatch.setattr("lightning_retrieval.metrics.retrieval.tqdm", ForATerminal)
    metrics = RetrievalMetrics()
    metrics.update(torch.randn(600, 4), torch.arange(600) // 3)
    metrics.compute()
    shown = capsys.readouterr().err
    assert [f"| {done}/600 [" in shown for done in (256, 512, 600)] == [True] * 3


def test_metrics_of_the_first_dimensions():
    """The same as of shortened embeddings, whose instances are averaged after they are shortened."""
    x, labels, ids = torch.randn(60, 8, dtype=torch.float64), torch.arange(60) // 5, torch.arange(60) * 3
    given = {"ids": ids, "instances": torch.arange(60) // 2, "cameras": torch.arange(60) // 2 % 3}
    labels = labels // 2 * 2  # whole instances
    metrics = RetrievalMetrics(KS, map_ks=(3,), dims=(2, 5, 8))
    for part in torch.arange(60).split(25):
        metrics.update(x[part], labels[part], **{name: values[part] for name, values in given.items()})
    found = metrics.compute()
    expected = {}
    for dim in (2, 5, 8):
        shortened = RetrievalMetrics(KS, map_ks=(3,))
        shortened.update(x[:, :dim], labels, **given)
        values = shortened.compute()
        skipped = values.pop("skipped_queries")
        expected |= {f"{name}/{dim}d": value for name, value in values.items()}
        if dim == 8:
            expected |= values | {"skipped_queries": skipped}
    assert found.keys() == expected.keys()
    assert found == expected
    assert len({float(found[f"mAP/{dim}d"]) for dim in (2, 5, 8)}) == 3
    per_query = metrics.per_query()["AP"]
    assert per_query[~per_query.isnan()].mean() == found["mAP"]


@pytest.mark.refusal
def test_dims_larger_than_the_embeddings():
    metrics = RetrievalMetrics(KS, dims=(2, 4))
    with pytest.raises(ValueError, match=r"^RetrievalMetrics: `dims` must be at most .* embeddings, 3, got 4; give"):
        metrics.update(X, Y)
    assert len(metrics.embeddings) == 0
