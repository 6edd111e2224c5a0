"""Queries and gallery are post-processed before they are ranked."""

import pytest
import torch
from torch.nn.functional import normalize

from lightning_retrieval.metrics import RetrievalMetrics


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
