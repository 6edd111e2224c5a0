"""Unit rows, and rows that are sharded over processes: who holds which."""

import math

import pytest
import torch

from lightning_retrieval.distributed import Shard
from lightning_retrieval.ranking.rows import Layout, ShardedRows, normalize, unsharded


def test_rows_are_divided_by_their_length():
    rows = [[3.0, 4.0], [-5.0, 12.0], [0.25, 0.0]]
    expected = [[value / math.hypot(*row) for value in row] for row in rows]
    torch.testing.assert_close(normalize(torch.tensor(rows)), torch.tensor(expected))


@pytest.mark.parametrize(
    ("given", "result"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_half_precision_is_widened(given, result):
    x = torch.randn(8, 5).to(given)
    unit = normalize(x)
    assert unit.dtype == result
    # As exact as the wide type: the half-precision rows were not normalised in half precision.
    lengths = unit.double().norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=4 * torch.finfo(result).eps, atol=0.0)


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e30, 1e38])
def test_squares_that_overflow_or_vanish(scale):
    x = torch.tensor([[1.0, -2.0, 2.0]])
    torch.testing.assert_close(normalize(x * scale), torch.tensor([[1.0, -2.0, 2.0]]) / 3)


def test_zero_row_stays_zero_with_a_finite_gradient():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    unit = normalize(x)
    unit.sum().backward()
    assert unit[0].tolist() == [0.0, 0.0]
    assert torch.isfinite(x.grad).all()
    assert normalize(x[:0]).shape == (0, 2)


def test_gradient_is_that_of_the_formula():
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(normalize, x)
    assert torch.autograd.gradgradcheck(normalize, x)
    weights = torch.randn(4, 6, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((normalize(x) * weights).sum(), x)
    # (w - (w.u) u) / |x|, nothing along the row itself
    length, unit = x.detach().norm(dim=1, keepdim=True), x.detach() / x.detach().norm(dim=1, keepdim=True)
    torch.testing.assert_close(gradient, (weights - (weights * unit).sum(1, keepdim=True) * unit) / length)


def test_rows_can_be_normalised_in_functional_transforms_and_changed_afterwards():
    x, weights = torch.randn(2, 4, 6, dtype=torch.float64)

    def weighted(rows):
        return (normalize(rows) * weights).sum()

    expected = torch.autograd.functional.jacobian(weighted, x)
    torch.testing.assert_close(torch.func.grad(weighted)(x), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(weighted))(x[None])[0], expected)

    rows = x.requires_grad_()
    normalize(rows).mul_(2).mul(weights).sum().backward()
    torch.testing.assert_close(rows.grad, 2 * expected)


ROWS = torch.arange(46.0).view(23, 2)


def holder(position, unit, processes):
    """The process of a row: blocks are distributed one by one."""
    process = 0
    for row in range(position + 1):
        if row > 0 and row % unit == 0:
            process = (process + 1) % processes
    return process


@pytest.mark.parametrize(("unit", "processes"), [(1, 3), (4, 1), (4, 5), (30, 2)])
def test_layout_against_a_loop(unit, processes):
    layout = Layout(23, unit, processes)
    for begin, end in ((0, 23), (3, 17), (5, 5), (22, 23)):
        held = [[row for row in range(begin, end) if holder(row, unit, processes) == p] for p in range(processes)]
        assert layout.sizes(begin, end) == [len(rows) for rows in held]
        assert layout.by_process(begin, end).tolist() == [row for rows in held for row in rows]
    assert layout.sizes() == layout.sizes(0, 23)


def shard_of(rows, unit, index, count):
    layout = Layout(len(rows), unit, count)
    mine = [row for row in range(len(rows)) if holder(row, unit, count) == index]
    return ShardedRows(rows[mine], layout, Shard(index, count, device=torch.device("cpu")))


@pytest.mark.parametrize(("unit", "rows", "processes"), [(4, 4, 1), (4, 3, 2), (4, 9, 5), (30, 7, 3), (1, 1, 3)])
def test_parts_of_the_blocks(unit, rows, processes):
    shards = [shard_of(ROWS, unit, index, processes) for index in range(processes)]
    found = [list(shard.split_blocks(rows)) for shard in shards]
    for shard, parts in zip(shards, found):
        assert shard.most_split_blocks(rows) == max(map(len, found))
        assert torch.equal(torch.cat([ROWS[:0], *(shard.local[local] for local, _ in parts)]), shard.local)
        for local, positions in parts:
            assert torch.equal(shard.local[local], ROWS[positions])
            assert 0 < positions.stop - positions.start <= rows
            assert positions.start // unit == (positions.stop - 1) // unit  # no part is of two blocks


def test_the_holder_of_a_row():
    layout = Layout(23, 4, 3)
    process, local = layout.holder(torch.arange(23))
    assert process.tolist() == [holder(row, 4, 3) for row in range(23)]
    for row in range(23):
        assert shard_of(ROWS, 4, int(process[row]), 3).local[local[row]].tolist() == ROWS[row].tolist()


def test_rows_of_one_process_are_not_copied():
    rows = unsharded(ROWS, 4)
    assert rows.all() is ROWS
    assert rows.range(3, 9).data_ptr() == ROWS[3].data_ptr()
    assert not rows.is_sharded
    assert torch.equal(rows.select(torch.tensor([5, 2])), ROWS[[5, 2]])
    assert torch.equal(rows.fetch(torch.tensor([[5], [2]])), ROWS[torch.tensor([[5], [2]])])
    assert torch.equal(rows.with_rows(ROWS + 1).all(), ROWS + 1)
