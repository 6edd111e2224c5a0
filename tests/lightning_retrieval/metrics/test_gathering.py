"""Rows of one image are merged; several real processes have bit-equal metrics and the same errors on every rank."""

import pytest
import torch
from torch.nn.functional import normalize

from lightning_retrieval.metrics import RetrievalMetrics
from tests.lightning_retrieval.metrics.helpers import compute

ROWS = 420  # more than one block of queries
FEW = torch.arange(4)
KS = (1, 2, 4, 8)
X, Y = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])


def whole_set():
    """Embeddings, labels and which rows are queries, the same in each process."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 8, generator=generator)
    x[200:230] = x[0]  # ties
    labels = torch.randint(-3, 60, (ROWS,), generator=generator)
    labels[7] = 1000  # a query without a positive
    is_query = torch.rand(ROWS, generator=generator) < 0.8
    is_query[7] = True
    return x, labels, 2 + is_query


def shards(world):
    """Unequal; the last of three is empty; each of the first two has an image that the other has too."""
    cut = 111
    first, second = torch.arange(cut), torch.arange(cut, ROWS)
    parts = [torch.cat([first, second[:3]]), torch.cat([second, first[:1], second[-1:]])]
    return parts + [torch.arange(0)] * (world - 2)


def metrics_of_the_whole_set():
    x, labels, roles = whole_set()
    metrics = RetrievalMetrics(ks=(1, 5), sync_on_compute=False)
    metrics.update(x, labels, torch.arange(ROWS), roles)
    return metrics.compute()


def metrics_of_the_shards(this, world):
    """The metrics, and the number of rows that this process has before and after them."""
    x, labels, roles = whole_set()
    own = shards(world)[this]
    metrics = RetrievalMetrics(ks=(1, 5))
    for batch in own.split(50):
        metrics.update(x[batch], labels[batch], batch, roles[batch])
    return metrics.compute(), len(own), sum(map(len, metrics.embeddings))


def message_of(metrics, embeddings, labels, ids=None):
    """The error message of `compute` after an update."""
    metrics.update(embeddings, labels, ids)
    with pytest.raises((ValueError, TypeError)) as error:
        metrics.compute()
    metrics.reset()
    return str(error.value)


def messages_and_metrics_afterwards(this):
    """Errors of rows that differ between the processes, and the metrics of valid rows after all of them."""
    x, labels, _ = whole_set()
    metrics, rows, is_first = RetrievalMetrics(ks=(1, 5)), x[FEW], this == 0
    with_nan_on_rank_1 = rows.clone()
    with_nan_on_rank_1[2, 0] = torch.nan if this == 1 else 0.0
    messages = {
        "no ids": message_of(metrics, rows, FEW % 2),
        "dimension": message_of(metrics, rows if is_first else rows[:, :5], FEW % 2, FEW),
        "dtype": message_of(metrics, rows if is_first else rows.double(), FEW % 2, FEW),
        "two labels": message_of(metrics, rows, FEW % 2 + this, FEW),
        "not finite": message_of(metrics, with_nan_on_rank_1, FEW % 2, FEW),
    }
    own = FEW + 4 * this
    metrics.update(x[own], labels[FEW], own)
    return messages, metrics.compute()


def in_each_process(this, world):
    messages, afterwards = messages_and_metrics_afterwards(this)
    return {
        "metrics": metrics_of_the_shards(this, world),
        "messages": messages,
        "afterwards": afterwards,
    }


@pytest.fixture(scope="module")
def ranks(run_processes):
    """The results of each of three processes, in rank order."""
    return run_processes(in_each_process, 3)


def assert_bit_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].nan_to_num(-1.0), value.nan_to_num(-1.0)), name


def test_metrics_are_bit_equal_to_one_process(ranks):
    expected = metrics_of_the_whole_set()
    for result in ranks:
        assert_bit_equal(result["metrics"][0], expected)
    assert 0 < expected["mAP"] < 1
    assert expected["skipped_queries"] > 0


def test_metrics_keep_the_rows_of_their_rank_after_compute(ranks):
    for result in ranks:
        _, rows_given, rows_kept = result["metrics"]
        assert rows_kept == rows_given


def test_metrics_raise_the_same_error_on_every_rank(ranks):
    world = len(ranks)
    expected = {
        "no ids": f"RetrievalMetrics: `ids` must be given if there are several processes, got none on {world}",
        "dimension": "RetrievalMetrics: rows must have the same format on all processes, got [RowFormat(dim=5, "
        "dtype='torch.float32', label_shape=(), has_ids=True, has_instances=False, has_cameras=False), "
        "RowFormat(dim=8, ",
        "dtype": "RetrievalMetrics: rows must have the same format on all processes, got [RowFormat(dim=8, "
        "dtype='torch.float32', label_shape=(), has_ids=True, has_instances=False, has_cameras=False), "
        "RowFormat(dim=8, "
        "dtype='torch.float64', label_shape=(), has_ids=True, has_instances=False, has_cameras=False)]",
        "not finite": "RetrievalMetrics: `embeddings` must hold finite numbers only, got NaN or inf in 1 of 4 rows "
        "(ids 2), on rank 1.",
        "two labels": "RetrievalMetrics: `ids` must have one label each, got id 0 with two different labels",
    }
    for result in ranks:
        for case, start in expected.items():
            assert result["messages"][case].startswith(start)


def test_metrics_can_be_used_after_an_error(ranks):
    world = len(ranks)
    x, labels, _ = whole_set()
    alone = RetrievalMetrics(ks=(1, 5))
    alone.update(x[: 4 * world], labels[:4].repeat(world), torch.arange(4 * world))
    expected = alone.compute()
    for result in ranks:
        torch.testing.assert_close(result["afterwards"], expected)


def test_repeated_image_is_counted_once():
    x, labels = torch.randn(20, 4), torch.randint(0, 3, (20,))
    expected = compute(x, labels, ids=torch.arange(20))
    again = torch.cat([torch.arange(20), torch.tensor([3, 3, 19, 0])])
    assert compute(x[again], labels[again], ids=again) == expected
    assert compute(x[again], labels[again]) != expected  # without ids they are different images


def test_roles_of_one_image_in_different_rows_are_merged():
    x, labels, ids = torch.randn(20, 4), torch.randint(0, 3, (20,)), torch.arange(20)
    metrics = RetrievalMetrics(ks=KS)
    metrics.update(x, labels, ids, roles=torch.full((20,), 1))
    metrics.update(x, labels, ids, roles=torch.full((20,), 2))
    merged = {name: value.item() for name, value in metrics.compute().items()}
    assert merged == compute(x, labels, ids=ids)  # no query meets its own copy


def test_images_of_an_instance_are_averaged():
    x, labels = torch.randn(50, 5), torch.arange(50) % 7
    instances = torch.where(torch.arange(50) < 21, labels, 100 + torch.arange(50))  # three images of each, then one
    ids = torch.randperm(50)
    metrics = RetrievalMetrics(ks=(1, 3))
    for part in torch.arange(50).split(13):
        metrics.update(x[part], labels[part], ids[part], instances=instances[part])
    unit = normalize(x)
    means = torch.stack([unit[instances == i].mean(0) for i in instances.unique()])
    of_mean = [int(labels[instances == i][0]) for i in instances.unique()]
    expected = compute(means, torch.tensor(of_mean), ks=(1, 3))
    assert {name: value.item() for name, value in metrics.compute().items()} == pytest.approx(expected, abs=1e-12)
    least = [int(ids[instances == i].min()) for i in instances.unique()]
    assert metrics.per_query()["ids"].tolist() == sorted(least)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("labels", "given", "sentence"),
    [
        (Y, {"ids": [5, 6, 7, 6]}, "`ids` must have one label each, got id 6 with two different labels"),
        (Y, {"instances": [1, 2, 2, 3]}, "`instances` must have one label each, got instance 2 with two different"),
        (Y * 0, {"ids": [5, 6, 7, 5], "cameras": [0, 1, 2, 3]}, "`ids` must have one camera each, got id 5 with two"),
        (Y * 0, {"instances": [1, 1, 2, 2], "cameras": [0, 1, 2, 3]}, "`instances` must have one camera each, got"),
        (torch.tensor([[0, 0], [0, 1], [1, 1], [1, 1]]), {}, r"label levels must nest, .* label 0 within \[0, 1\]"),
    ],
)
def test_rows_that_contradict_each_other(labels, given, sentence):
    metrics = RetrievalMetrics()
    metrics.update(X, labels, **{name: torch.tensor(values) for name, values in given.items()})
    with pytest.raises(ValueError, match=f"^RetrievalMetrics: {sentence}"):
        metrics.compute()
