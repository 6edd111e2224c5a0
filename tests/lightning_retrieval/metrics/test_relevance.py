"""Metrics under a rule of relevance: against loops, against labels with cameras or roles, and what is refused."""

import pytest
import torch

from lightning_retrieval import GalleryOnly, OtherCamera, Relevance, SharedTags
from lightning_retrieval.callbacks.ap_monitor import decomposability_gap
from lightning_retrieval.callbacks.gallery import nearest_images
from lightning_retrieval.metrics import RandomGalleryMetrics, RetrievalMetrics, RevisitedMetrics, curves
from lightning_retrieval.ranking import labels as labelled_lists
from lightning_retrieval.ranking import ranked_lists, rule_lists
from tests.lightning_retrieval.metrics.helpers import LargestTensor, LaterImages, quarters

IMAGES = 150
SETTINGS = {"ks": (1, 3), "map_ks": (5,), "extra_metrics": ("mINP", "precision@4", "recall@4", "NDCG@4")}


class EqualLabels(Relevance):
    """A user's rule that says what metrics without a rule do."""

    def masks(self, queries, references):
        return queries[:, None, 0] == references[:, 0], None


class SubclassOfSharedTags(SharedTags):
    """A user's rule that is computed from its masks, not from lists of images with each tag."""


def tags():
    """Up to four of twelve tags, of which some are repeated; some images have none, and tags are any integers."""
    drawn = torch.randint(0, 12, (IMAGES, 4)) ** 2 * 10**15
    drawn[torch.rand(IMAGES, 4) < 0.4] = -1
    drawn[:5] = -1
    return drawn


def times():
    return torch.stack([torch.randint(0, 6, (IMAGES,)), torch.randint(0, 100, (IMAGES,))], 1)


def shares(at_least):
    """Relevant and candidate by sets."""
    return lambda query, image: (len((set(query) & set(image)) - {-1}) >= at_least, True)


def is_soon_after(query, image):
    passed = image[1] - query[1]
    return query[0] == image[0] and 0 < passed <= 30, passed > 0


CASES = {
    "a shared tag": (SharedTags(), tags, shares(1)),
    "two shared tags": (SharedTags(at_least=2), tags, shares(2)),
    "a subclass": (SubclassOfSharedTags(at_least=2), tags, shares(2)),
    "a user's rule": (LaterImages(), times, is_soon_after),
}


def ap_by_loops(x, columns, roles, rule):
    """{query: AP} of the queries with a positive; x are multiples of 1/2, so all scores are exact."""
    rows, of_rows = x.tolist(), columns.tolist()
    found = {}
    for query in range(len(x)):
        scores, positives = [], []
        for image in range(len(x)):
            relevant, candidate = rule(of_rows[query], of_rows[image])
            if not (roles[image] & 2 and image != query and candidate):
                continue
            scores.append(sum(a * b for a, b in zip(rows[query], rows[image])))
            if relevant:
                positives.append(scores[-1])
        terms = [sum(p >= s for p in positives) / sum(other >= s for other in scores) for s in positives]
        if roles[query] & 1 and terms:
            found[query] = sum(terms) / len(terms)
    return found


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("with_roles", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_against_loops(case, with_roles, small, monkeypatch):
    if small:
        monkeypatch.setattr(labelled_lists, "_MAX_BLOCK_POSITIVES", 1)  # blocks of 64 queries
        monkeypatch.setattr(rule_lists, "_MAX_PAIRS", 10 * IMAGES)
        monkeypatch.setattr(ranked_lists, "_KEPT_TILES", 0)
    rule, columns, by_sets = CASES[case]
    x, columns, roles = quarters(IMAGES), columns(), torch.full((IMAGES,), 3)
    if with_roles:
        roles = torch.randint(0, 4, (IMAGES,))
    metrics = RetrievalMetrics(relevance=rule, **SETTINGS)
    for part in torch.arange(IMAGES).split(40):
        metrics.update(x[part], columns[part], part, roles[part])
    table = metrics.per_query()
    expected = ap_by_loops(x, columns, roles.tolist(), by_sets)
    found = {int(query): ap.item() for query, ap in zip(table["ids"], table["AP"]) if not ap.isnan()}
    assert found == pytest.approx(expected, abs=1e-12)
    assert metrics.compute()["skipped_queries"] == sum(roles & 1) - len(expected) > 0
    assert ("labels" in table) == rule.has_classes


def results(metrics):
    """Everything that is computed or drawn of an evaluation set."""
    lists = metrics.query_gallery(metrics.gather()[0])
    nearest = nearest_images(metrics, lists, lists.query_ids.sort().values[:20], 8)
    of_queries = metrics.per_query()
    found = {**metrics.compute(), **{f"of each query: {name}": values for name, values in of_queries.items()}}
    return found | {
        "precision": curves.mean_precision(metrics),
        "pairs": curves.pair_counts(metrics, 40),
        "right or wrong": torch.tensor([[hit.relevant for hit in hits] for _, hits in nearest]).int(),
    }


@pytest.mark.parametrize("dims", [(), (3, 6)])
@pytest.mark.parametrize("rule", [EqualLabels(), OtherCamera(), SharedTags()])
def test_a_rule_gives_what_labels_and_cameras_give(rule, dims):
    """All metrics, the values of each query, and what callbacks draw."""
    x, labels, cameras = quarters(IMAGES), torch.randint(0, 30, (IMAGES,)), torch.randint(0, 3, (IMAGES,))
    by_label, by_rule = RetrievalMetrics(**SETTINGS, dims=dims), RetrievalMetrics(**SETTINGS, dims=dims, relevance=rule)
    given = {"ids": torch.randperm(IMAGES), "roles": torch.randint(1, 4, (IMAGES,))}
    columns = rule.columns(labels, {"cameras": cameras, "tags": labels[:, None].repeat(1, 2)})
    by_rule.update(x, columns, **given)
    if isinstance(rule, OtherCamera):
        given["cameras"] = cameras
    by_label.update(x, labels, **given)
    expected, found = results(by_label), results(by_rule)
    if not rule.has_classes:
        del expected["of each query: labels"]
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, atol=1e-12, rtol=0, equal_nan=True, msg=name)
    if rule.has_classes:
        assert decomposability_gap(by_rule, 5, 3) == decomposability_gap(by_label, 5, 3)


def test_roles_that_a_rule_reads_give_what_roles_give():
    x, labels, roles = quarters(IMAGES), torch.randint(0, 30, (IMAGES,)), torch.randint(0, 4, (IMAGES,))
    by_label, by_rule = RetrievalMetrics(**SETTINGS), RetrievalMetrics(**SETTINGS, relevance=GalleryOnly())
    by_label.update(x, labels, roles=roles)
    by_rule.update(x, GalleryOnly().columns(labels, {"roles": roles}))
    expected, found = by_label.compute(), by_rule.compute()
    assert found.pop("skipped_queries") - expected.pop("skipped_queries") == (roles & 1 == 0).sum()
    assert found == expected


@pytest.mark.parametrize("rule", [SharedTags(), LaterImages()])
def test_no_tensor_is_as_large_as_the_score_matrix(rule, monkeypatch):
    monkeypatch.setattr(labelled_lists, "_MAX_BLOCK_POSITIVES", 1)
    monkeypatch.setattr(rule_lists, "_MAX_PAIRS", 64 * 1500)
    metrics = RetrievalMetrics(relevance=rule)
    metrics.update(torch.randn(1500, 4), torch.randint(0, 300, (1500, 2)))
    with LargestTensor() as largest:
        metrics.compute()
    assert largest.elements <= 64 * 1536  # 64 queries, the gallery padded to whole multiples of 384


def test_no_relevant_candidate():
    metrics = RetrievalMetrics((1,), relevance=SharedTags(at_least=2))
    metrics.update(torch.randn(4, 3), torch.tensor([[1, 2], [1, 3], [1, 1], [-1, -1]]))
    with pytest.warns(UserWarning, match=r"none of the 4 queries has a relevant candidate.*SharedTags\(at_least=2\)"):
        assert metrics.compute()["mAP"].isnan()


def test_revisited_metrics_have_their_own_lists():
    """Columns of a rule are no levels, which must nest."""
    x, roles = torch.randn(6, 3), torch.tensor([1, 2, 2, 2, 2, 2])
    values = []
    for relevance in (None, SharedTags()):
        metrics = RevisitedMetrics({0: [1]}, {0: [2]}, {0: []}, ks=(1,), relevance=relevance)
        columns = torch.tensor([[3, 4], [3, 5], [4, 3], [1, 1], [2, 2], [3, 3]])
        metrics.update(x, torch.zeros(6).long() if relevance is None else columns, torch.arange(6), roles)
        values.append(metrics.compute()["mAP"])
    assert values[0] == values[1]


@pytest.mark.refusal
def test_invalid_arguments():
    with pytest.raises(TypeError, match=r"^RetrievalMetrics: `relevance` must be .*Relevance, got str"):
        RetrievalMetrics(relevance="tags")
    with pytest.raises(ValueError, match=r"^RandomGalleryMetrics: `relevance` must .* got SharedTags\(at_least=1\); "):
        RandomGalleryMetrics(relevance=SharedTags())
    metrics = RetrievalMetrics(relevance=LaterImages())
    with pytest.raises(ValueError, match=r"^RetrievalMetrics: `labels` must .*LaterImages reads.* got \(4,\); "):
        metrics.update(torch.randn(4, 3), torch.arange(4))
    with pytest.raises(ValueError, match=r"^RetrievalMetrics: `cameras` must be None .* got \(4,\).*; LaterImages "):
        metrics.update(torch.randn(4, 3), torch.zeros(4, 2).long(), cameras=torch.arange(4))
