"""Rows of one image are merged; several real processes have bit-equal metrics and the same errors on every rank; rows
stay in their batches, and the memory of an evaluation."""

import ctypes
from pathlib import Path

import pytest
import torch

from lightning_retrieval.distributed import Shard
from lightning_retrieval.metrics import RetrievalMetrics, gathering
from lightning_retrieval.metrics.gathering import UnitRows, unit_rows
from lightning_retrieval.ranking.rows import normalize
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


ROWS_IN_MEMORY, DIM = 12_000, 512
M_MMAP_THRESHOLD = -3  # of mallopt


def status(field):
    """A size that Linux reports of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def evaluate(rows):
    metrics = RetrievalMetrics()
    for begin in range(0, rows, 500):
        ids = torch.arange(begin, begin + 500)
        metrics.update(torch.randn(500, DIM), ids % (rows // 5), ids)
    return metrics.compute()


def added_memory(rank, world_size):
    """Peak of `update` and `compute`, as a multiple of the embeddings' bytes.

    A first evaluation loads what the first use loads; large tensors are returned to the system as soon as they are
    freed.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    evaluate(1500)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak to the memory in use
    before = status("VmRSS")
    evaluate(ROWS_IN_MEMORY)
    return (status("VmHWM") - before) / (ROWS_IN_MEMORY * DIM * 4)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak memory from the /proc of Linux")
def test_an_evaluation_keeps_two_and_a_half_times_the_rows(run_alone):
    """Once in the batches of `update`, once as they are ranked, and the rest for scores and results."""
    assert 2 < run_alone(added_memory) < 2.5


@pytest.mark.parametrize(
    ("sizes", "dtype", "numbers"),
    [([50], torch.float16, 16), ([7, 1, 0, 30, 12], torch.float32, 16), ([1] * 50, torch.float64, 1 << 18)],
)
def test_chosen_rows_are_those_of_all_batches_together(sizes, dtype, numbers, monkeypatch):
    monkeypatch.setattr(gathering, "_BLOCK_NUMBERS", numbers)
    batches = torch.randn(50, 4, dtype=dtype).split(sizes)
    chosen = torch.randint(0, 50, (40,))  # some of them several times
    is_kept = torch.arange(40) % 3 > 0
    rows = unit_rows(batches).select(chosen).select(is_kept)
    assert torch.equal(rows.tensor(), normalize(torch.cat(batches))[chosen][is_kept])


def test_no_rows():
    rows = unit_rows([torch.zeros(0, 3)])
    assert rows.tensor().shape == (0, 3)
    assert unit_rows([torch.randn(4, 3)]).select(torch.zeros(4, dtype=torch.bool)).tensor().shape == (0, 3)


def distributed_in_each_process(this, world):
    """Processes have unequal numbers of rows, the last one none; some rows are chosen twice, some are not."""
    generator = torch.Generator().manual_seed(5)
    every = torch.randn(60, 8, generator=generator)
    chosen = torch.randint(0, 60, (50,), generator=generator)
    counts = [37, 23] + [0] * (world - 2)
    own = every[sum(counts[:this]) : sum(counts[: this + 1])]
    gathering._BLOCK_NUMBERS = 64  # parts of eight rows
    shard = Shard(this, world, device=torch.device("cpu"))
    rows = UnitRows(list(own.split(5)) or [own], torch.arange(60), counts, shard).select(chosen)
    sizes = [0, 45, 5]
    return {
        "mine": rows.distribute(sizes),
        "expected": normalize(every)[chosen].split(sizes)[this],
        "all": rows.tensor(),
        "all expected": normalize(every)[chosen],
        "sharded": rows.sharded(4).all(),
    }


def test_rows_are_sent_to_the_processes_that_need_them(run_processes):
    for found in run_processes(distributed_in_each_process, 3):
        assert torch.equal(found["mine"], found["expected"])
        assert torch.equal(found["all"], found["all expected"])
        assert torch.equal(found["sharded"], found["all expected"])


def test_post_processing_comes_before_ranking():
    """The gallery is augmented first. The queries are expanded with it, and know their own index in it."""
    seen = []

    def halve(gallery):
        seen.append(gallery.clone())
        return gallery.flip(0)

    def expand(queries, gallery, own):
        seen.append((queries, gallery, own))
        return queries.roll(1, 1)

    x, labels = normalize(torch.randn(12, 4)), torch.arange(12) % 3
    is_query = torch.arange(12) < 9
    metrics = RetrievalMetrics((1,), query_expansion=expand, database_augmentation=halve)
    metrics.update(x, labels, roles=is_query + 2 * (torch.arange(12) > 2))
    found = {name: value.item() for name, value in metrics.compute().items()}
    gallery, (queries, augmented, own) = seen
    assert torch.equal(augmented, gallery.flip(0))
    assert len(gallery) == 9
    assert len(queries) == 9
    assert (own >= 0).sum() == 6
    torch.testing.assert_close(queries[own >= 0], gallery[own[own >= 0]])
    order = torch.arange(12)[3:][labels[3:].argsort(stable=True)]
    expected = RetrievalMetrics((1,))
    expected.update(gallery.flip(0), labels[order], order + 100, roles=torch.full((9,), 2))
    asked = torch.arange(9)[labels[:9].argsort(stable=True)]
    expected.update(queries.roll(1, 1), labels[asked], asked, roles=torch.full((9,), 1))
    if (own < 0).all():  # else a query would find itself
        assert found == {name: value.item() for name, value in expected.compute().items()}


@pytest.mark.refusal
@pytest.mark.parametrize("name", ["query_expansion", "database_augmentation"])
@pytest.mark.parametrize(
    ("result", "error", "sentence"),
    [
        (None, TypeError, "must be a tensor, got NoneType"),
        (torch.ones(4, 3), ValueError, r"must have the shape, dtype and device of the rows, \(4, 2\), .* got \(4, 3\)"),
        (torch.ones(4, 2).double(), ValueError, "must have the shape, dtype and device of the rows, .* torch.float64"),
    ],
)
def test_a_result_of_post_processing_that_does_not_fit_raises(name, result, error, sentence):
    metrics = RetrievalMetrics((1,), **{name: lambda *rows: result})
    metrics.update(torch.randn(4, 2), torch.tensor([0, 0, 1, 1]))
    with pytest.raises(error, match=rf"^RetrievalMetrics: `{name}'s result` {sentence}"):
        metrics.compute()
