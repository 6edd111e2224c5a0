"""What several processes share, in several real ones: unequal shares, and the same numbers as one process."""

import pytest
import torch
from torch import nn

from lightning_retrieval.distributed import (
    gather_rows,
    rank,
    sum_gradients,
    sum_over_ranks,
    world_size,
)
from lightning_retrieval.losses import SmoothAPLoss
from lightning_retrieval.losses.ranked_batch import QueryRange
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.training.global_batch import gather_batch
from lightning_retrieval.training.traffic import step_traffic

ROWS = 420  # more than one block of queries
SHARES = {2: [3, 37], 3: [3, 36, 1]}


def everything():
    """The same in each process."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 8, generator=generator)
    x[200:230] = x[0]  # ties
    labels = torch.randint(-3, 60, (ROWS,), generator=generator)
    labels[7] = 1000  # a query without a positive
    is_query = torch.rand(ROWS, generator=generator) < 0.8
    is_query[7] = True
    return x, labels, is_query


def embedder():
    generator = torch.Generator().manual_seed(2)
    net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return net


def loss_of_all(net, x, labels):
    return SmoothAPLoss(tau=0.2)(net(x), labels)


def message(function, *args):
    try:
        function(*args)
    except (ValueError, TypeError) as error:
        return str(error)
    return "not refused"


def shares(world):
    """Unequal, the last rank's empty where there are three; the first two ranks have an image that the other has."""
    cut = 111
    first, second = torch.arange(cut), torch.arange(cut, ROWS)
    parts = [torch.cat([first, second[:3]]), torch.cat([second, first[:1], second[-1:]])]
    return parts + [torch.arange(0)] * (world - 2)


def at_work(this, world):
    """All that is tested in several processes, in one start of them."""
    results = {"rank": rank(), "world_size": world_size()}

    # Metrics: this rank's share, against the whole in the same process.
    x, labels, is_query = everything()
    alone = RetrievalMetrics(ks=(1, 5), sync_on_compute=False)
    alone.update(x, labels, torch.arange(ROWS), is_query)
    results["alone"] = alone.compute()
    mine = shares(world)[this]
    metrics = RetrievalMetrics(ks=(1, 5))
    for batch in mine.split(50):
        metrics.update(x[batch], labels[batch], batch, is_query[batch])
    results["together"] = metrics.compute()
    results["kept"] = sum(map(len, metrics.embeddings)), len(mine)
    metrics.reset()

    # Levels, instances, the table of the queries, embeddings in the main memory: all of them at once.
    deep = torch.stack([labels, labels // 4], 1)
    instances = torch.arange(ROWS) // 2 * 2  # pairs, of which one image is on another rank
    deep = deep[instances]
    several = [RetrievalMetrics((1, 5), (3,), sync_on_compute=s, embeddings_on_cpu=not s) for s in (False, True)]
    several[0].update(x, deep, torch.arange(ROWS), instances=instances)
    for batch in mine.split(50):
        several[1].update(x[batch], deep[batch], batch, instances=instances[batch])
    results["levels alone"], results["levels together"] = [{**m.compute(), **m.per_query()} for m in several]

    # Metrics refuse alike on every rank, and can be used again afterwards.
    few = torch.arange(4)
    refusals = {}
    metrics.update(x[few], few % 2)
    refusals["without ids"] = message(metrics.compute)
    metrics.reset()
    if this == 0:
        metrics.update(x[few], few % 2, few)
    else:
        metrics.update(x[few, :5], few % 2, few)
    refusals["dimension"] = message(metrics.compute)
    metrics.reset()
    metrics.update(x[few] if this == 0 else x[few].double(), few % 2, few)
    refusals["dtype"] = message(metrics.compute)
    metrics.reset()
    metrics.update(x[few], few % 2 + this, few)
    refusals["two labels"] = message(metrics.compute)
    metrics.reset()
    broken = x[few].clone()
    broken[2, 0] = torch.nan if this == 1 else 0.0
    metrics.update(broken, few % 2, few)
    refusals["one rank's"] = message(metrics.compute)
    metrics.reset()
    results["refusals"] = refusals
    metrics.update(x[few + 4 * this], labels[few], few + 4 * this)
    results["after"] = metrics.compute()

    # Rows: unequal numbers, other types, more dimensions, none at all.
    rows = torch.full((3 * this + 1, 2), float(this))
    results["gathered"] = gather_rows(rows)
    results["gathered integers"] = gather_rows(torch.arange(this * 2) + 2**62, [2 * r for r in range(world)])
    results["gathered bool"] = gather_rows(torch.ones(2 - this % 2, 1, 3, dtype=torch.bool))
    results["gathered none"] = gather_rows(torch.zeros(0, 5))

    # The gradient of one loss over all rows, each rank with its share of the rows, and of the queries or of the loss.
    x, labels = x.double()[:40], labels[:40] % 5
    mine = torch.arange(40).split(SHARES[world])[this]
    levels = torch.stack([labels, labels // 3], 1)
    for own_queries in (True, False):
        net = embedder()
        batch = gather_batch("I", net(x[mine]), levels[mine], mine, gather=True, own_queries=own_queries)
        results["batch"] = batch.labels, batch.ids, batch.counts
        begin = sum(batch.counts[:this])
        queries = QueryRange(begin, begin + len(mine), sum_over_ranks) if own_queries else None
        share = SmoothAPLoss(tau=0.2)(batch.embeddings, batch.labels[:, 0], queries=queries)
        share = share if own_queries else share / world
        share.backward()
        own = [p.grad.clone() for p in net.parameters()]
        value = sum_gradients(net.parameters(), share.detach()[None])
        results["gradients", own_queries] = own, [p.grad for p in net.parameters()], value

    # Batches that do not fit together are refused alike on every rank.
    few, four = torch.ones(2, 3 + (this == 1)), torch.ones(2 + this, 3)
    known = torch.zeros(2, dtype=torch.int64)
    kept = {"gather": True, "own_queries": True}
    results["unlike"] = [
        message(lambda: gather_batch("I", few, known, known, **kept)),
        message(lambda: gather_batch("I", four[:2], known, known if this else None, **kept)),
        message(lambda: gather_batch("I", four, known.new_zeros(2 + this), None, gather=False, own_queries=True)),
    ]
    floats, column = known.double() if this else known, known[:, None] if this else known
    results["no integers"] = [
        message(lambda: gather_batch("I", four[:2], floats, known, **kept)),
        message(lambda: gather_batch("I", four[:2], known, column, **kept)),
    ]
    batch = gather_batch("I", four[:2], known, None, gather=False, own_queries=True)
    results["apart"] = batch.embeddings is not None and (len(batch.embeddings), batch.counts)

    # Parameters with a gradient on some ranks only, on none, of two types, frozen.
    one, nowhere, half, frozen = (nn.Parameter(torch.ones(2)) for _ in range(4))
    half.data = half.data.bfloat16()
    frozen.requires_grad_(False)
    if this == 0:
        one.grad = torch.tensor([3.0, -1.0])
    half.grad = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    values = sum_gradients([one, nowhere, half, frozen], torch.tensor([1.0, this], dtype=torch.float64))
    results["some"] = one.grad, nowhere.grad, half.grad, frozen.grad, values
    return results


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def ranks(request, run_processes):
    return run_processes(at_work, request.param)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n].nan_to_num(-1.0), b[n].nan_to_num(-1.0)) for n in a)


def test_rank_and_number(ranks):
    assert [result["rank"] for result in ranks] == list(range(len(ranks)))
    assert {result["world_size"] for result in ranks} == {len(ranks)}


def test_metrics_are_bit_equal_to_one_process(ranks):
    for result in ranks:
        assert same(result["together"], result["alone"])
        assert same(result["together"], ranks[0]["together"])
    assert 0 < ranks[0]["alone"]["mAP"] < 1
    assert ranks[0]["alone"]["skipped_queries"] > 0


def test_metrics_of_levels_and_instances_are_bit_equal_too(ranks):
    for result in ranks:
        assert same(result["levels together"], result["levels alone"])
    assert len(ranks[0]["levels alone"]["ids"]) == (ROWS + 1) // 2
    assert 0 < ranks[0]["levels alone"]["H-AP"].mean() < 1


def evaluated(this, world):
    """A set that does not divide, padded with its first images, and one rank without any."""
    x, labels, is_query = everything()
    sharing = world - 1
    padded = torch.cat([torch.arange(ROWS - 1), torch.arange((1 - ROWS) % sharing)])
    mine = padded[this::sharing] if this < sharing else padded[:0]
    metrics = RetrievalMetrics(ks=(1, 5))
    for batch in mine.split(50):
        metrics.update(x[batch], labels[batch], batch, is_query[batch])
    return {**metrics.compute(), **metrics.per_query()}


def test_metrics_of_four_processes_are_bit_equal_to_one(run_processes):
    x, labels, is_query = (rows[: ROWS - 1] for rows in everything())
    metrics = RetrievalMetrics(ks=(1, 5))
    metrics.update(x, labels, torch.arange(ROWS - 1), is_query)
    alone = {**metrics.compute(), **metrics.per_query()}
    for found in run_processes(evaluated, 4):
        assert same(found, alone)


def test_metrics_keep_this_ranks_rows_after_compute(ranks):
    for result in ranks:
        rows_kept, rows_given = result["kept"]
        assert rows_kept == rows_given


def test_metrics_refuse_alike_on_every_rank(ranks):
    world = len(ranks)
    expected = {
        "without ids": f"RetrievalMetrics: `ids` must be given if there are several processes, got none on {world}",
        "dimension": "RetrievalMetrics: rows must have the same format on all processes, got [RowFormat(dim=5, "
        "dtype='torch.float32', label_shape=(), has_ids=True, has_instances=False), RowFormat(dim=8, ",
        "dtype": "RetrievalMetrics: rows must have the same format on all processes, got [RowFormat(dim=8, "
        "dtype='torch.float32', label_shape=(), has_ids=True, has_instances=False), RowFormat(dim=8, "
        "dtype='torch.float64', label_shape=(), has_ids=True, has_instances=False)]",
        "one rank's": "RetrievalMetrics: `embeddings` must hold finite numbers only, got NaN or inf in 1 of 4 rows "
        "(ids 2), on rank 1.",
        "two labels": "RetrievalMetrics: `ids` must have one label each, got id 0 with two different labels",
    }
    for result in ranks:
        for case, start in expected.items():
            assert result["refusals"][case].startswith(start)


def test_metrics_go_on_after_a_refusal(ranks):
    world = len(ranks)
    x, labels, _ = everything()
    alone = RetrievalMetrics(ks=(1, 5))
    alone.update(x[: 4 * world], labels[:4].repeat(world), torch.arange(4 * world))
    expected = alone.compute()
    for result in ranks:
        torch.testing.assert_close(result["after"], expected)


def test_rows_come_in_rank_order(ranks):
    world = len(ranks)
    for result in ranks:
        assert torch.equal(result["gathered"], torch.cat([torch.full((3 * r + 1, 2), float(r)) for r in range(world)]))
        integers = torch.cat([torch.arange(2 * r) for r in range(world)]) + 2**62
        assert torch.equal(result["gathered integers"], integers)
        assert result["gathered bool"].shape == (sum(2 - r % 2 for r in range(world)), 1, 3)
        assert result["gathered bool"].all()
        assert result["gathered none"].shape == (0, 5)


def test_a_batch_has_all_labels_and_ids_in_rank_order(ranks):
    labels = everything()[1][:40] % 5
    for result in ranks:
        levels, ids, counts = result["batch"]
        assert torch.equal(levels, torch.stack([labels, labels // 3], 1))
        assert torch.equal(ids, torch.arange(40))
        assert counts == SHARES[len(ranks)]


@pytest.mark.parametrize("own_queries", [True, False])
def test_summed_gradients_are_those_of_one_process(ranks, own_queries):
    x, labels, _ = everything()
    net = embedder()
    loss = loss_of_all(net, x.double()[:40], labels[:40] % 5)
    loss.backward()
    expected = [p.grad for p in net.parameters()]
    for result in ranks:
        own, gradients, value = result["gradients", own_queries]
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-13)
        assert value.item() == pytest.approx(loss.item(), abs=1e-13)
        assert same(dict(enumerate(gradients)), dict(enumerate(ranks[0]["gradients", own_queries][1])))
        assert not torch.allclose(own[0], expected[0])  # no rank had all of it alone


def test_batches_that_do_not_fit_together_are_refused_on_every_rank(ranks):
    world = len(ranks)
    others = [(3, 0, 1)] * (world - 2)
    for result in ranks:
        dimension, ids, rows = result["unlike"]
        assert dimension == (
            "I: the processes' batches may differ only in their number of rows, got (dimension, label levels, has ids) "
            f"{[(3, 0, 1), (4, 0, 1), *others]} in rank order."
        )
        assert f"got (dimension, label levels, has ids) {[(3, 0, 0), (3, 0, 1), *others]}" in ids
        assert rows == (
            "I: with gather=False the loss is the mean of the processes' losses, which needs batches of one size, got "
            f"{list(range(2, 2 + world))} rows in rank order; leave gather at True, or drop the uneven batch."
        )
        assert result["apart"] == (2, [2] * world)
        for sentence in result["no integers"]:
            assert sentence.startswith("I: labels must be integers of shape (rows,) or (rows, levels) and ids integers")
            assert sentence.endswith(f"on rank {result['rank']}.")


def test_gradients_that_only_some_ranks_have(ranks):
    for result in ranks:
        one, nowhere, half, frozen, values = result["some"]
        assert values.tolist() == [len(ranks), sum(range(len(ranks)))]
        assert values.dtype == torch.float64
        assert one.tolist() == [3.0, -1.0]
        assert nowhere is None
        assert half.dtype == torch.bfloat16
        assert half.tolist() == [1.0 * len(ranks), 2.0 * len(ranks)]
        assert frozen is None


def test_one_process_without_a_group():
    assert (rank(), world_size()) == (0, 1)
    rows, known = torch.randn(3, 2, requires_grad=True), torch.arange(3)
    embeddings, labels, ids, counts = gather_batch("I", rows, known, None, gather=True, own_queries=True)
    assert embeddings is rows
    assert labels is known
    assert (ids, counts) == (None, [3])
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    values = torch.ones(2)
    assert sum_gradients([parameter], values) is values
    assert parameter.grad.tolist() == [1.0, 1.0]


def test_traffic_by_hand():
    """Four processes with 8 rows each of 5 numbers, 100 parameters, single precision; each sends to three others."""
    gathered = 3 * 8 * (5 * 4 + 16)  # its own rows, labels and ids
    exchanged = 3 * 8 * 5 * 4  # the gradients of the others' rows
    reduced = 2 * 3 * 100 / 4 * 4  # a ring: a quarter of the sum at a time, first added up, then handed round
    assert step_traffic(32, 5, 100, 4) == {"gather": gathered, "exchange": exchanged, "all-reduce": reduced}
    assert step_traffic(32, 5, 100, 4, own_queries=False)["exchange"] == 0
    assert list(step_traffic(32, 5, 100, 4, gather=False).values()) == [0, 0, reduced]
    assert sum(step_traffic(32, 5, 100, 1).values()) == 0


def on_gpus(this, world):
    """A gathered batch and the gradients that come back, each process on a GPU of its own."""
    device = torch.device("cuda", this)
    torch.cuda.set_device(device)
    mine = torch.arange(10).split([3, 7])[this]
    rows = everything()[0][mine].to(device).requires_grad_()
    found = {}
    for own_queries in (True, False):
        batch = gather_batch("I", rows, mine.to(device) % 3, mine.to(device), gather=True, own_queries=own_queries)
        found[own_queries] = torch.autograd.grad((batch.embeddings * (this + 1)).sum(), rows)[0].cpu()
    return found, batch.embeddings.detach().cpu(), batch.labels.cpu(), batch.ids.cpu()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rows_and_gradients_travel_between_gpus(run_processes):
    for this, (gradients, rows, labels, ids) in enumerate(run_processes(on_gpus, 2, backend="nccl")):
        assert torch.equal(rows, everything()[0][:10])
        assert torch.equal(labels, torch.arange(10) % 3)
        assert torch.equal(ids, torch.arange(10))
        assert (gradients[True] == 3).all()  # of both processes' shares
        assert (gradients[False] == 2 * (this + 1)).all()  # its own, which is a half of the loss
