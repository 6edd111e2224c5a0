"""The rules of relevance by themselves: their masks, and what they read of a batch."""

import pytest
import torch

from lightning_retrieval import OtherCamera, RetrievalMetrics, SharedTags, SmoothAPLoss
from tests.lightning_retrieval.blocks import small_blocks


@pytest.mark.parametrize("at_least", [1, 3])
def test_many_tags_against_sets(at_least):
    """50 tags of 400 for an image, some twice; their numbers are too large for an index; in parts of 3 queries."""
    numbers = torch.randint(2**62, (400,))
    tags = numbers[torch.randint(400, (40, 50))]
    tags[torch.rand(40, 50) < torch.rand(40, 1) * 1.2] = -1
    tags[:, 7] = tags[:, 3]
    sets = [set(row) - {-1} for row in tags.tolist()]
    expected = torch.tensor([[len(a & b) >= at_least for b in sets] for a in sets])
    assert 0.1 < expected.float().mean() < 0.9
    assert torch.equal(SharedTags(at_least).masks(tags, tags)[0], expected)
    with small_blocks():
        assert torch.equal(SharedTags(at_least).masks(tags, tags)[0], expected)
    assert not SharedTags(2**63 - 1).masks(tags, tags)[0].any()


@pytest.mark.parametrize("at_least", [1, 2])
def test_multi_hot_labels_are_tags(at_least):
    hot = torch.rand(40, 7, generator=torch.Generator().manual_seed(0)) < 0.3
    hot[3] = False  # an image without a tag is relevant to none
    rule, embeddings = SharedTags(at_least), torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    sets = [set(row.nonzero()[:, 0].tolist()) for row in hot]
    wanted = torch.tensor([[len(one & other) >= at_least for other in sets] for one in sets])
    tags = torch.full((40, 7), -1)
    for row, of_image in enumerate(sets):
        tags[row, : len(of_image)] = torch.tensor(sorted(of_image))
    ap = {}
    for name, columns in (
        ("tags", tags),
        ("integers", hot.int()),
        ("entry", rule.columns(torch.zeros(40).long(), {"tags": hot.long()})),
        ("bool entry", rule.columns(torch.zeros(40).long(), {"tags": hot})),
    ):
        assert torch.equal(rule.masks(columns[:9], columns)[0], wanted[:9])
        metrics = RetrievalMetrics(relevance=rule)
        metrics.update(embeddings, columns)
        ap[name] = (SmoothAPLoss()(embeddings, columns, relevance=rule).item(), metrics.compute()["mAP"].item())
    assert len(set(ap.values())) == 1
    assert 0 < ap["tags"][1] < 1


def test_columns_hold_the_finest_label_and_the_entries():
    labels = torch.tensor([[4, 1], [9, 1]], dtype=torch.int32)
    batch = {"cameras": torch.tensor([7, 8]), "tags": torch.tensor([[3, -1], [5, 6]]), "images": torch.rand(2, 3)}
    assert OtherCamera().columns(labels, batch).tolist() == [[4, 7], [9, 8]]
    assert SharedTags().columns(labels, batch).tolist() == [[3, -1], [5, 6]]
    assert SharedTags().columns(labels, {"tags": torch.tensor([3, 5])}).tolist() == [[3], [5]]
