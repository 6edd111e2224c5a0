"""Metrics under a rule of relevance: against loops, against labels with cameras or roles, and what is refused."""

import pytest
import torch

from lightning_retrieval import GalleryOnly, OtherCamera, Relevance, SharedTags
from lightning_retrieval.callbacks.ap_monitor import decomposability_gap
from lightning_retrieval.metrics import RetrievalMetrics, RevisitedMetrics, curves
from tests.lightning_retrieval.blocks import small_blocks
from tests.lightning_retrieval.metrics.helpers import LargestTensor, nearest_of, numbers, quarters
from tests.lightning_retrieval.relevance_rules import RULES, NearInTime, masks_by_pairs, random_columns

IMAGES = 110
SETTINGS = {"ks": (1, 3), "map_ks": (5,), "extra_metrics": ("mINP", "precision@4", "recall@4", "NDCG@4")}


class EqualLabels(Relevance):
    """A user's rule that says what metrics without a rule do, except that no image is relevant to itself."""

    reads = ("numbers",)

    def masks(self, queries, references):
        is_equal = queries[:, None] == references
        return is_equal[..., 0] & ~is_equal[..., 1], None


class FirstTag(SharedTags):
    """A user's rule, derived from the library's: the first tags must be equal."""

    def masks(self, queries, references):
        return queries[:, None, 0] == references[:, 0], None


def ap_by_loops(x, relevant, candidate):
    """{query: AP} of the queries with a positive; coordinates are multiples of 1/2, so all scores are exact."""
    found = {}
    for query, row in enumerate(x.tolist()):
        scores, positives = [], []
        for image, other in enumerate(x.tolist()):
            if not candidate[query][image]:
                continue
            scores.append(sum(a * b for a, b in zip(row, other)))
            if relevant[query][image]:
                positives.append(scores[-1])
        terms = [sum(p >= s for p in positives) / sum(other >= s for other in scores) for s in positives]
        if terms:
            found[query] = sum(terms) / len(terms)
    return found


@pytest.mark.parametrize("with_roles", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_against_loops(name, with_roles):
    """The AP of each query, also in small blocks, and which of the nearest images are right."""
    rule, columns, x = RULES[name].rule, random_columns(name, IMAGES), quarters(IMAGES)
    roles = torch.full((IMAGES,), 3)
    if with_roles:
        roles = torch.randint(0, 4, (IMAGES,))
    metrics = RetrievalMetrics(relevance=rule, **SETTINGS)
    for part in torch.arange(IMAGES).split(40):
        metrics.update(x[part], columns[part], part, roles[part])
    table = metrics.per_query()
    with small_blocks(kept_tiles=0):
        metrics.update(x[:0], columns[:0], torch.arange(0), roles[:0])  # computes all anew
        torch.testing.assert_close(metrics.per_query()["AP"], table["AP"], rtol=0, atol=1e-12, equal_nan=True)
    relevant, candidate = masks_by_pairs(name, columns, columns)
    candidate &= (roles & 1 > 0)[:, None] & (roles & 2 > 0) & ~torch.eye(IMAGES, dtype=torch.bool)
    expected = ap_by_loops(x, relevant.tolist(), candidate.tolist())
    found = {int(query): ap.item() for query, ap in zip(table["ids"], table["AP"]) if not ap.isnan()}
    assert found == pytest.approx(expected, abs=1e-12)
    assert metrics.compute()["skipped_queries"] == (roles & 1).sum() - len(expected)
    assert ("labels" in table) == rule.has_classes
    for query, hits in nearest_of(metrics, table["ids"], IMAGES).items():
        listed = candidate[query].nonzero()[:, 0].tolist()
        assert hits == {image: relevant[query, image].item() for image in listed}


def results(metrics):
    """Everything that is computed of an evaluation set."""
    of_queries = {f"of each query: {name}": values for name, values in metrics.per_query().items()}
    drawn = {"precision": curves.mean_precision(metrics), "pairs": curves.pair_counts(metrics, 40)}
    return {**metrics.compute(), **of_queries, **drawn}


@pytest.mark.parametrize("rule", [EqualLabels(), OtherCamera(), SharedTags(), FirstTag()])
def test_a_rule_gives_what_labels_and_cameras_give(rule):
    """All metrics, the values of each query, and the curves."""
    dims = (3, 6)
    x, labels, cameras = quarters(IMAGES), torch.randint(0, 30, (IMAGES,)), torch.randint(0, 3, (IMAGES,))
    by_label, by_rule = RetrievalMetrics(**SETTINGS, dims=dims), RetrievalMetrics(**SETTINGS, dims=dims, relevance=rule)
    given = {"ids": torch.randperm(IMAGES), "roles": torch.randint(1, 4, (IMAGES,))}
    tags = labels[:, None].repeat(1, 2)  # a tag that occurs twice
    if isinstance(rule, FirstTag):
        tags[:, 1] = 3
    entries = {"cameras": cameras, "tags": tags, "numbers": torch.arange(IMAGES)}
    by_rule.update(x, rule.columns(labels, entries), **given)
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
    expected, found = numbers(by_label.compute()), numbers(by_rule.compute())
    assert found.pop("skipped_queries") - expected.pop("skipped_queries") == (roles & 1 == 0).sum()
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("rule", "columns"), [(SharedTags(), 4), (NearInTime(), 2)])
def test_no_tensor_is_as_large_as_the_score_matrix(rule, columns):
    """Also if each image is relevant to each query, by four tags."""
    metrics = RetrievalMetrics(relevance=rule)
    metrics.update(torch.randn(300, 4), torch.arange(columns).expand(300, columns))
    with small_blocks(), LargestTensor() as largest:
        metrics.compute()
    assert largest.elements <= 64 * 384  # 64 queries, the gallery padded to whole multiples of 384


def test_no_relevant_candidate():
    metrics = RetrievalMetrics((1,), relevance=SharedTags(at_least=2))
    metrics.update(torch.randn(4, 3), torch.tensor([[1, 2], [1, 3], [1, 1], [-1, -1]]))
    with pytest.warns(UserWarning, match="RetrievalMetrics"):
        assert metrics.compute()["mAP"].isnan()


def test_revisited_metrics_have_their_own_lists():
    """Columns of a rule are no levels, which must nest."""
    x, roles, labels = torch.randn(6, 3), torch.tensor([1, 2, 2, 2, 2, 2]), torch.zeros(6).long()
    tags = torch.tensor([[3, 4], [3, 5], [4, 3], [1, 1], [2, 2], [3, 3]])
    values = []
    for relevance, given in ((None, labels), (SharedTags(), tags)):
        metrics = RevisitedMetrics({0: [1]}, {0: [2]}, {0: []}, ks=(1,), relevance=relevance)
        metrics.update(x, given, torch.arange(6), roles)
        values.append(metrics.compute()["mAP"])
    assert values[0] == values[1]
