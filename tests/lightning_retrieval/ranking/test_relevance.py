"""The rules of relevance by themselves: what they read of a batch, and their masks, pair by pair."""

import pytest
import torch

from lightning_retrieval import GalleryOnly, OtherCamera, Relevance, RetrievalMetrics, SharedTags, SmoothAPLoss
from lightning_retrieval.ranking import relevance
from tests.lightning_retrieval.relevance_rules import RULES, masks_by_pairs, random_columns


@pytest.mark.parametrize("name", RULES)
def test_masks_are_those_of_each_pair(name):
    """In blocks of any number of queries, and also where nothing is left to compare."""
    queries, references = random_columns(name, 23), random_columns(name, 31)
    relevant, candidate = masks_by_pairs(name, queries, references)
    assert 0 < relevant.sum() < candidate.sum()
    for rows in (1, 5, 23):
        found = [RULES[name].rule.lists(block, references) for block in queries.split(rows)]
        assert torch.equal(torch.cat([block for block, _ in found]), relevant)
        assert torch.equal(torch.cat([block for _, block in found]), candidate)
    for some, others in ((queries[:0], references), (queries, references[:0])):
        assert [mask.shape for mask in RULES[name].rule.lists(some, others)] == 2 * [(len(some), len(others))]


@pytest.mark.parametrize("at_least", [1, 3])
def test_many_tags_against_sets(at_least, monkeypatch):
    """50 tags of 400 for an image, some twice; their numbers are too large for an index; in parts of 3 queries."""
    numbers = torch.randint(2**62, (400,))
    tags = numbers[torch.randint(400, (40, 50))]
    tags[torch.rand(40, 50) < torch.rand(40, 1) * 1.2] = -1
    tags[:, 7] = tags[:, 3]
    sets = [set(row) - {-1} for row in tags.tolist()]
    expected = torch.tensor([[len(a & b) >= at_least for b in sets] for a in sets])
    assert 0.1 < expected.float().mean() < 0.9
    assert torch.equal(SharedTags(at_least).masks(tags, tags)[0], expected)
    assert not SharedTags(2**63 - 1).masks(tags, tags)[0].any()
    monkeypatch.setattr(relevance, "_TABLE_ELEMENTS", 3 * 50 * 40)
    assert torch.equal(SharedTags(at_least).masks(tags, tags)[0], expected)


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


@pytest.mark.refusal
def test_a_batch_without_what_a_rule_reads():
    labels, cameras = torch.tensor([4, 9]), torch.tensor([7, 8])
    for error, words, rule, of_images, batch in (
        (
            TypeError,
            r"OtherCamera: `batch` must be a dict with the entry 'cameras', got tuple;",
            OtherCamera(),
            labels,
            (),
        ),
        (ValueError, r"OtherCamera: .* the entry 'cameras', got 'labels';", OtherCamera(), labels, {"labels": labels}),
        (ValueError, r"SharedTags: .* the entry 'tags', got none;", SharedTags(), labels, {}),
        (TypeError, r"GalleryOnly: `roles` must be a tensor, got list", GalleryOnly(), labels, {"roles": [1, 2]}),
        (
            TypeError,
            r"SharedTags: `tags` must be integers, got torch.float32",
            SharedTags(),
            labels,
            {"tags": labels / 2},
        ),
        (
            ValueError,
            r"OtherCamera: `cameras` .* \(2,\), .* got \(3,\)",
            OtherCamera(),
            labels,
            {"cameras": labels.new(3)},
        ),
        (
            ValueError,
            r"OtherCamera: `cameras` must have shape \(2,\), .* got \(2, 2\)",
            OtherCamera(),
            labels,
            {"cameras": torch.tensor([[7, 8], [7, 9]])},
        ),
        (ValueError, r"GalleryOnly: `roles` .* got \(2, 1\)", GalleryOnly(), labels, {"roles": cameras[:, None]}),
        (TypeError, r"OtherCamera: `labels` must be integers, got", OtherCamera(), labels / 2, {"cameras": cameras}),
    ):
        with pytest.raises(error, match=f"^{words}"):
            rule.columns(of_images, batch)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("rule", "width", "wanted"), [(OtherCamera(), 3, "2"), (GalleryOnly(), 3, "2"), (OtherCamera(), 1, "2")]
)
def test_columns_of_another_rule_raise(rule, width, wanted):
    columns = torch.ones(4, width, dtype=torch.int64)
    sentence = (
        rf"`labels` must be the columns that {rule.name} reads, of shape \(rows, {wanted}\) .* got \(4, {width}\)"
    )
    with pytest.raises(ValueError, match=f"^SmoothAPLoss: {sentence}"):
        SmoothAPLoss()(torch.eye(4), columns, relevance=rule)
    metrics = RetrievalMetrics(relevance=rule)
    with pytest.raises(ValueError, match=f"^RetrievalMetrics: {sentence}"):
        metrics.update(torch.eye(4), columns)


@pytest.mark.refusal
def test_rules_of_a_wrong_form():
    class Returns(Relevance):
        def __init__(self, masks):
            self.found = masks

        def masks(self, queries, references):
            return self.found

    mask = torch.ones(2, 3, dtype=torch.bool)
    rule = r"Returns: `masks` must return two bool tensors of shape \(2, 3\), of which the second may be None, got"
    for error, words, masks in (
        (TypeError, rf"{rule} tensor\(", mask),
        (TypeError, rf"{rule} tensor\(", (mask.float(), None)),
        (TypeError, rf"{rule} None", (None, mask)),
        (ValueError, rf"{rule} the shape \(3, 2\)", (mask, mask.T)),
    ):
        with pytest.raises(error, match=f"^{words}"):
            Returns(masks).lists(torch.zeros(2, 1).long(), torch.zeros(3, 1).long())
    for settings in ({"reads": "cameras"}, {"has_classes": False}):
        with pytest.raises(TypeError, match=r"^Wrong: `reads` must be a tuple of the names of entries.* got"):
            type("Wrong", (Relevance,), settings)
