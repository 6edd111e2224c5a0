"""Queries and gallery are post-processed before they are ranked."""

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
    metrics.update(x, labels, is_query=is_query, is_gallery=torch.arange(12) > 2)
    found = {name: value.item() for name, value in metrics.compute().items()}
    gallery, (queries, augmented, own) = seen
    assert torch.equal(augmented, gallery.flip(0))
    assert len(gallery) == 9
    assert len(queries) == 9
    assert (own >= 0).sum() == 6
    torch.testing.assert_close(queries[own >= 0], gallery[own[own >= 0]])
    order = torch.arange(12)[3:][labels[3:].argsort(stable=True)]
    expected = RetrievalMetrics((1,))
    expected.update(gallery.flip(0), labels[order], order + 100, is_query=torch.zeros(9, dtype=torch.bool))
    asked = torch.arange(9)[labels[:9].argsort(stable=True)]
    expected.update(queries.roll(1, 1), labels[asked], asked, is_gallery=torch.zeros(9, dtype=torch.bool))
    if (own < 0).all():  # else a query would find itself
        assert found == {name: value.item() for name, value in expected.compute().items()}
