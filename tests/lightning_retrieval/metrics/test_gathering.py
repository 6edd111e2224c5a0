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
    return x, labels, is_query


def shards(world):
    """Unequal; the last of three is empty; each of the first two has an image that the other has too."""
    cut = 111
    first, second = torch.arange(cut), torch.arange(cut, ROWS)
    parts = [torch.cat([first, second[:3]]), torch.cat([second, first[:1], second[-1:]])]
    return parts + [torch.arange(0)] * (world - 2)


def metrics_of_the_whole_set():
    x, labels, is_query = whole_set()
    metrics = RetrievalMetrics(ks=(1, 5), sync_on_compute=False)
    metrics.update(x, labels, torch.arange(ROWS), is_query)
    return metrics.compute()


def metrics_of_the_shards(this, world):
    """The metrics, and the number of rows that this process has before and after them."""
    x, labels, is_query = whole_set()
    own = shards(world)[this]
    metrics = RetrievalMetrics(ks=(1, 5))
    for batch in own.split(50):
        metrics.update(x[batch], labels[batch], batch, is_query[batch])
    return metrics.compute(), len(own), sum(map(len, metrics.embeddings))


def levels_and_instances():
    """Labels of two levels, and instances of two images each, of which one is on another rank."""
    _, labels, _ = whole_set()
    instances = torch.arange(ROWS) // 2 * 2
    return torch.stack([labels, labels // 4], 1)[instances], instances


def table_of_the_whole_set():
    """Levels, instances, the values of each query and embeddings on the CPU, all at once."""
    labels, instances = levels_and_instances()
    metrics = RetrievalMetrics((1, 5), (3,), dims=(2, 8), sync_on_compute=False, embeddings_on_cpu=True)
    metrics.update(whole_set()[0], labels, torch.arange(ROWS), instances=instances)
    return {**metrics.compute(), **metrics.per_query()}


def table_of_the_shards(this, world):
    x, (labels, instances) = whole_set()[0], levels_and_instances()
    metrics = RetrievalMetrics((1, 5), (3,), dims=(2, 8))
    for batch in shards(world)[this].split(50):
        metrics.update(x[batch], labels[batch], batch, instances=instances[batch])
    return {**metrics.compute(), **metrics.per_query()}


def cameras():
    """The camera of each instance; images of one instance have one camera."""
    return torch.arange(ROWS) // 2 % 5 - 2


def cameras_of_the_whole_set():
    labels, instances = levels_and_instances()
    metrics = RetrievalMetrics((1, 5), (3,), sync_on_compute=False)
    metrics.update(whole_set()[0], labels, torch.arange(ROWS), instances=instances, cameras=cameras())
    return {**metrics.compute(), **metrics.per_query()}


def cameras_of_the_shards(this, world):
    x, (labels, instances) = whole_set()[0], levels_and_instances()
    metrics = RetrievalMetrics((1, 5), (3,), embeddings_on_cpu=True)
    for batch in shards(world)[this].split(50):
        metrics.update(x[batch], labels[batch], batch, instances=instances[batch], cameras=cameras()[batch])
    return {**metrics.compute(), **metrics.per_query()}


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
        "table": table_of_the_shards(this, world),
        "cameras": cameras_of_the_shards(this, world),
        "messages": messages,
        "afterwards": afterwards,
    }


@pytest.fixture(scope="module", params=[2, 3], ids=["two processes", "three processes"])
def ranks(request, run_processes):
    """The results of each process, in rank order."""
    return run_processes(in_each_process, request.param)


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


def test_metrics_of_levels_and_instances_are_bit_equal_too(ranks):
    expected = table_of_the_whole_set()
    for result in ranks:
        assert_bit_equal(result["table"], expected)
    assert len(expected["ids"]) == (ROWS + 1) // 2
    assert 0 < expected["H-AP"].mean() < 1


def test_metrics_with_cameras_are_bit_equal_too(ranks):
    expected = cameras_of_the_whole_set()
    for result in ranks:
        assert_bit_equal(result["cameras"], expected)
    assert expected["skipped_queries"] > table_of_the_whole_set()["skipped_queries"]


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


def table_of_a_padded_set(this, world):
    """A set that cannot be divided evenly, padded with its first images; the last rank has no row."""
    x, labels, is_query = whole_set()
    with_rows = world - 1
    padded = torch.cat([torch.arange(ROWS - 1), torch.arange((1 - ROWS) % with_rows)])
    own = padded[:0]
    if this < with_rows:
        own = padded[this::with_rows]
    metrics = RetrievalMetrics(ks=(1, 5))
    for batch in own.split(50):
        metrics.update(x[batch], labels[batch], batch, is_query[batch])
    return {**metrics.compute(), **metrics.per_query()}


def test_metrics_of_four_processes_are_bit_equal_to_one(run_processes):
    x, labels, is_query = (rows[: ROWS - 1] for rows in whole_set())
    metrics = RetrievalMetrics(ks=(1, 5))
    metrics.update(x, labels, torch.arange(ROWS - 1), is_query)
    expected = {**metrics.compute(), **metrics.per_query()}
    for found in run_processes(table_of_a_padded_set, 4):
        assert_bit_equal(found, expected)


def test_repeated_image_is_counted_once():
    x, labels = torch.randn(20, 4), torch.randint(0, 3, (20,))
    expected = compute(x, labels, ids=torch.arange(20))
    again = torch.cat([torch.arange(20), torch.tensor([3, 3, 19, 0])])
    assert compute(x[again], labels[again], ids=again) == expected
    assert compute(x[again], labels[again]) != expected  # without ids they are different images


def test_roles_of_one_image_in_different_rows_are_merged():
    x, labels, ids = torch.randn(20, 4), torch.randint(0, 3, (20,)), torch.arange(20)
    both, none = torch.ones(20, dtype=torch.bool), torch.zeros(20, dtype=torch.bool)
    metrics = RetrievalMetrics(ks=KS)
    metrics.update(x, labels, ids, is_query=both, is_gallery=none)
    metrics.update(x, labels, ids, is_query=none, is_gallery=both)
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
def test_one_instance_with_two_labels():
    metrics = RetrievalMetrics()
    metrics.update(X, Y, torch.arange(4), instances=torch.tensor([1, 2, 2, 3]))
    with pytest.raises(ValueError, match="`instances` must have one label each, got instance 2 with two different"):
        metrics.compute()


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"ids": [5, 6, 7, 5]}, "`ids` must have one camera each, got id 5 with two different cameras"),
        ({"instances": [1, 1, 2, 2]}, "`instances` must have one camera each, got instance 1 with two different"),
    ],
)
def test_one_image_with_two_cameras(given, sentence):
    metrics = RetrievalMetrics()
    given = {"ids": [0, 1, 2, 3], **given}
    tensors = {name: torch.tensor(values) for name, values in given.items()}
    metrics.update(X, torch.zeros(4).long(), **tensors, cameras=torch.tensor([0, 1, 2, 3]))
    with pytest.raises(ValueError, match=f"^RetrievalMetrics: {sentence}"):
        metrics.compute()


@pytest.mark.refusal
def test_one_id_with_two_labels():
    metrics = RetrievalMetrics()
    metrics.update(X, Y, torch.tensor([5, 6, 7, 6]))
    with pytest.raises(
        ValueError, match="RetrievalMetrics: `ids` must have one label each, got id 6 with two different"
    ):
        metrics.compute()


@pytest.mark.refusal
def test_levels_that_do_not_nest():
    metrics = RetrievalMetrics()
    metrics.update(torch.randn(3, 2), torch.tensor([[0, 0], [0, 1], [1, 1]]))
    with pytest.raises(ValueError, match=r"label levels must nest, .* got label 0 within \[0, 1\]"):
        metrics.compute()
