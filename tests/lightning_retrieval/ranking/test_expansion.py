"""Query expansion and database augmentation: the official code's numbers, plain loops, and the nearest rows."""

import math

import pytest
import torch

from lightning_retrieval import DatabaseAugmentation, QueryExpansion
from tests.lightning_retrieval.blocks import small_blocks
from tests.lightning_retrieval.metrics.helpers import quarters
from tests.lightning_retrieval.official_cases import OFFICIAL, official_cases, rows, tensor


@official_cases("alpha_qe")
def test_query_expansion_equals_the_official_code(case):
    queries, gallery = tensor(case["inputs"]["query_embeddings"]), tensor(case["inputs"]["gallery_embeddings"])
    expected = tensor(case["expected"]["expanded"])
    torch.testing.assert_close(QueryExpansion(**case["params"])(queries, gallery), expected, **OFFICIAL)


@official_cases("alpha_dba")
def test_database_augmentation_equals_the_official_code(case):
    gallery, expected = tensor(case["inputs"]["embeddings"]), tensor(case["expected"]["expanded"])
    torch.testing.assert_close(DatabaseAugmentation(**case["params"])(gallery), expected, **OFFICIAL)


def expanded_by_loops(queries, gallery, alpha, k, self_index):
    """With lists and floats; a negative similarity has the weight 0 if its power does not exist."""

    def unit(row):
        norm = math.sqrt(sum(x * x for x in row))
        return [x / norm for x in row]

    gallery = [unit(row) for row in gallery.tolist()]
    expanded = []
    for query, itself in zip([unit(row) for row in queries.tolist()], self_index):
        scored = [(sum(a * b for a, b in zip(query, row)), j) for j, row in enumerate(gallery) if j != itself]
        scored.sort(key=lambda each: (-each[0], each[1]))  # of equal ones, the first
        total = list(query)
        for score, j in scored[:k]:
            power = score**alpha
            weight = 0.0 if isinstance(power, complex) else power
            total = [t + weight * x for t, x in zip(total, gallery[j])]
        expanded.append(unit(total))
    return tensor(expanded)


@pytest.mark.parametrize(("alpha", "k"), [(0, 4), (0.5, 30), (1, 1), (2.0, 4)])  # 30: more than the gallery has
def test_query_expansion_against_loops(alpha, k):
    queries, gallery = 3 * rows(7, 3), 2 * rows(11, 3, seed=1)
    self_index = [-1, 3, 0, -1, 10, 3, -1]
    expand = QueryExpansion(alpha, k)
    gallery[3], gallery[0], gallery[10] = queries[1], queries[2], queries[4]
    expanded = expand(queries, gallery, torch.tensor(self_index))
    torch.testing.assert_close(expanded, expanded_by_loops(queries, gallery, alpha, k, self_index))
    with_themselves = expand(queries, gallery)
    torch.testing.assert_close(with_themselves, expanded_by_loops(queries, gallery, alpha, k, [-1] * 7))
    assert not torch.allclose(expanded, with_themselves)
    with small_blocks(numbers=40):
        torch.testing.assert_close(expand(queries, gallery, torch.tensor(self_index)), expanded)


@pytest.mark.parametrize(
    ("queries", "gallery", "k"), [(70, 900, 1), (70, 900, 20), (70, 900, 500), (3, 2, 2), (0, 5, 5)]
)
def test_ties_against_loops_in_several_tiles(queries, gallery, k):
    """Nearly all similarities are equal to others; 500 are more than a tile has."""
    q, g = quarters(queries), quarters(gallery)
    self_index = torch.where(torch.rand(queries) < 0.5, torch.randint(0, gallery, (queries,)), -1)
    with small_blocks():
        found = QueryExpansion(alpha=1.0, k=k)(q, g, self_index)
    expected = expanded_by_loops(q, g, 1.0, k, self_index.tolist())
    torch.testing.assert_close(found, expected.float().view(found.shape))


def test_a_similarity_of_zero_has_weight_zero_unless_alpha_is_zero():
    queries, gallery = tensor([[1.0, 0.0]]), tensor([[0.0, 1.0]])
    assert QueryExpansion(alpha=0.5, k=1)(queries, gallery).tolist() == [[1.0, 0.0]]
    torch.testing.assert_close(QueryExpansion(alpha=0, k=1)(queries, gallery), tensor([[0.5**0.5, 0.5**0.5]]))


def test_a_query_does_not_depend_on_the_queries_beside_it():
    queries, gallery = rows(300, 24, dtype=torch.float32), rows(2000, 24, seed=1, dtype=torch.float32)
    expanded = QueryExpansion()(queries, gallery)
    assert torch.equal(QueryExpansion()(queries[250:], gallery), expanded[250:])
    assert torch.equal(QueryExpansion()(queries[7:8], gallery), expanded[7:8])


def test_of_rows_with_equal_similarity_the_first_are_the_neighbours():
    """All 200 rows have the similarity 1/2 with the query."""
    others = torch.eye(201)[1:] * 0.75**0.5
    gallery = torch.cat([torch.full((200, 1), 0.5), others[:, 1:]], 1)
    query = torch.eye(201)[:1]
    for k in (2, 20, 150):
        expanded = QueryExpansion(alpha=1.0, k=k)(query, gallery)
        assert expanded[0].nonzero()[:, 0].tolist() == list(range(k + 1))
    augmented = DatabaseAugmentation(alpha=0, k=1)(torch.eye(150))  # similarities of 0, also with itself
    assert augmented[5].nonzero()[:, 0].tolist() == [0, 5]
    assert augmented[0].nonzero()[:, 0].tolist() == [0]


@pytest.mark.parametrize(("alpha", "k"), [(0.0, 2), (1.5, 2), (2.0, 9)])  # a few rows, or all of them
def test_the_gradient_is_that_of_finite_differences(alpha, k):
    queries, gallery = torch.randn(3, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    self_index = torch.tensor([-1, 4, 0])
    expand = QueryExpansion(alpha=alpha, k=k)
    augment = DatabaseAugmentation(alpha=alpha, k=k)
    expected = expand(queries, gallery, self_index), augment(gallery)
    queries.requires_grad_(), gallery.requires_grad_()
    assert torch.equal(expand(queries, gallery, self_index), expected[0])  # the same values with a gradient
    assert torch.equal(augment(gallery), expected[1])
    assert torch.autograd.gradcheck(lambda q, g: expand(q, g, self_index), (queries, gallery))
    assert torch.autograd.gradcheck(lambda q: expand(q, gallery.detach()), queries)
    assert torch.autograd.gradcheck(augment, gallery)


def test_the_gradient_of_a_similarity_of_zero_is_finite():
    rows = torch.eye(3, requires_grad=True)
    QueryExpansion(alpha=0.5, k=3)(rows, rows).sum().backward()
    assert torch.isfinite(rows.grad).all()


def test_half_precision_is_converted_to_float32():
    queries, gallery = rows(3, 4, dtype=torch.bfloat16), rows(9, 4, seed=1, dtype=torch.bfloat16)
    expanded = QueryExpansion()(queries, gallery)
    assert expanded.dtype == torch.float32
    torch.testing.assert_close(expanded, QueryExpansion()(queries.float(), gallery.float()))


@pytest.mark.gpu
def test_on_a_device():
    queries, gallery, self_index = rows(5, 6), rows(30, 6, seed=2), torch.tensor([-1, 2, 3, -1, 0])
    expand = QueryExpansion(alpha=3.0, k=4)
    on_device = expand(queries.to("cuda"), gallery.to("cuda"), self_index.to("cuda"))
    torch.testing.assert_close(on_device.cpu(), expand(queries, gallery, self_index))
    augment = DatabaseAugmentation()
    torch.testing.assert_close(augment(gallery.to("cuda")).cpu(), augment(gallery))
