"""What a report finds, against plain loops, and where wrong labels and duplicates were planted."""

import csv
import io

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_retrieval import RetrievalMetrics
from lightning_retrieval.metrics.thresholds import NearestScores
from lightning_retrieval.search.report.findings import (
    confused_classes,
    find_errors,
    find_neighbours,
    largest_distance,
    near_duplicates,
    probably_mislabelled,
)
from lightning_retrieval.search.report.images import ReportedImages
from lightning_retrieval.search.report.table import report_table
from tests.lightning_retrieval.relevance_rules import NearInTime


def clusters(classes=8, of_class=9, noise=0.6, seed=0):
    """Embeddings around the centre of their class, in random order, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(of_class)[torch.randperm(classes * of_class, generator=generator)]
    centres = torch.randn(classes, 16, generator=generator)
    return centres[labels] + noise * torch.randn(len(labels), 16, generator=generator), labels


def metrics_of(embeddings, labels, **columns):
    metrics = RetrievalMetrics((1,))
    metrics.update(embeddings, labels, torch.arange(len(labels)) * 3, **columns)
    return metrics


def list_of(scores, row, candidates):
    """Positions in the list of a query, by a plain sort."""
    return sorted(candidates, key=lambda other: -float(scores[row, other]))


@pytest.mark.parametrize("case", ["plain", "roles", "cameras"])
def test_neighbours_are_those_of_a_sort(case):
    embeddings, labels = clusters()
    count, roles, cameras = len(labels), None, None
    if case == "roles":
        roles = 1 + torch.arange(count) % 3  # query, gallery, both
    if case == "cameras":
        cameras = torch.arange(count) % 2
    found, _ = find_neighbours(metrics_of(embeddings, labels, roles=roles, cameras=cameras), k=7)
    unit = torch.nn.functional.normalize(embeddings.double())
    scores = unit @ unit.T
    queries = [row for row in range(count) if roles is None or int(roles[row]) & 1]
    assert found.ids.tolist() == [3 * row for row in queries]
    for place, row in enumerate(queries):
        candidates = [other for other in range(count) if other != row and (roles is None or int(roles[other]) & 2)]
        if cameras is not None:
            same = [other for other in candidates if (labels[other], cameras[other]) == (labels[row], cameras[row])]
            candidates = [other for other in candidates if other not in same]
        expected = list_of(scores, row, candidates)
        assert found.near[place].tolist() == [3 * other for other in expected[:7]]
        assert found.near_labels[place].tolist() == labels[expected[:7]].tolist()
        assert found.scores[place].tolist() == pytest.approx(scores[row, expected[:7]].tolist(), abs=1e-5)
        assert int(found.others[place]) == sum(int(labels[other] == labels[row]) for other in candidates)
        assert found.near_sizes[place].tolist() == [
            sum(int(labels[other] == labels[near]) for other in range(count))
            if roles is None
            else sum(int(labels[other] == labels[near]) and int(roles[other]) & 2 != 0 for other in range(count))
            for near in expected[:7]
        ]


def test_confused_pairs_are_counted_as_a_loop_counts_them():
    embeddings, labels = clusters(noise=1.2)
    found, _ = find_neighbours(metrics_of(embeddings, labels))
    counts = {}
    for row in range(len(labels)):
        own = int(found.labels[row])
        for place in range(min(10, int(found.others[row]))):
            other = int(found.near_labels[row, place])
            if other != own:
                pair = (min(own, other), max(own, other))
                counts[pair] = counts.get(pair, 0) + 1
    pairs = confused_classes(found)
    assert {(pair.first, pair.second): pair.count for pair in pairs} == counts
    assert [pair.count for pair in pairs] == sorted(counts.values(), reverse=True)
    for pair in pairs:
        assert pair.share == pytest.approx(pair.count / (2 * 9 * 8))
        assert 1 <= len(pair.examples) <= 3
        for query, near in pair.examples:
            assert {int(labels[query // 3]), int(labels[near // 3])} == {pair.first, pair.second}


def test_a_wrong_label_is_found_and_a_single_image_of_a_class_does_not_decide():
    embeddings, labels = clusters(noise=0.2)
    labels[5] = (labels[5] + 1) % 8
    true = (labels[5] - 1) % 8
    labels = torch.cat([labels, torch.tensor([50])])  # alone in its class, near an image of class 0
    position = int((labels == 0).nonzero()[0])
    embeddings = torch.cat([embeddings, embeddings[position : position + 1]])
    suspects = probably_mislabelled(find_neighbours(metrics_of(embeddings, labels))[0])
    found = {suspect.id // 3: suspect for suspect in suspects}
    assert set(found) == {5, 72}
    assert found[5].other == int(true)
    assert found[5].own_share == 0
    assert found[72].other == 0
    assert all(int(labels[near // 3]) == found[5].other for near in found[5].near)


def test_an_image_whose_class_is_not_in_its_list_is_not_confused():
    """All images of class 0 have one camera, so the list of each has no image of its class that should be near."""
    embeddings, labels = clusters(noise=0.2)
    embeddings[labels == 1] = embeddings[labels == 0]  # one class to the model
    cameras = torch.where(labels == 0, 0, torch.arange(len(labels)))
    pairs = confused_classes(find_neighbours(metrics_of(embeddings, labels, cameras=cameras))[0])
    (of_both,) = [pair for pair in pairs if (pair.first, pair.second) == (0, 1)]
    assert 0 < of_both.count <= 9 * 8  # only queries of class 1 count, each with at most 8 images
    assert of_both.share == of_both.count / (9 * 8)
    assert {int(labels[query // 3]) for query, _ in of_both.examples} == {1}


def test_duplicates_are_pairs_across_classes_or_splits():
    embeddings, labels = clusters(noise=0.8)
    copies = torch.tensor([3, 11])
    embeddings = torch.cat([embeddings, embeddings[copies]])
    labels = torch.cat([labels, torch.tensor([(labels[3] + 1) % 8, labels[11]])])  # one in another class
    splits = torch.zeros(3 * len(labels), dtype=torch.int64)
    splits[3 * 73] = 1  # the other copy is in another split
    found, _ = find_neighbours(metrics_of(embeddings, labels))
    for given, pairs in ((None, {(9, 216)}), (splits, {(9, 216), (33, 219)})):
        duplicates = near_duplicates(found, 0.001, given)
        assert {(pair.first, pair.second) for pair in duplicates} == pairs
        assert all(pair.score == pytest.approx(1, abs=1e-5) for pair in duplicates)


def test_how_near_duplicates_are_follows_the_distances_of_the_classes():
    """So a model whose similarities are all high does not name every pair."""
    usual = NearestScores(torch.tensor([0.3, 0.5, 0.8]), torch.tensor([0.9]))
    narrow = NearestScores(torch.tensor([0.993, 0.995, 0.998]), torch.tensor([0.999]))
    assert largest_distance(usual) == pytest.approx(0.05)
    assert largest_distance(narrow) == pytest.approx(0.0005)


def test_everything_of_a_set_agrees_with_the_metrics():
    embeddings, labels = clusters(noise=1.2)
    labels[labels == 7] = torch.arange(100, 109)  # without a positive
    metrics = metrics_of(embeddings, labels)
    found = find_errors(metrics, 0.1)
    ap = metrics.per_query()["AP"]
    assert found.means["mAP"][0] == pytest.approx(float(metrics.compute()["mAP"]))
    assert sorted(found.without_positive) == [3 * row for row in range(72) if labels[row] >= 100]
    assert [result.ap for result in found.classes] == sorted(result.ap for result in found.classes)
    for result in found.classes:
        of_class = ap[metrics.per_query()["labels"] == result.label]
        assert result.ap == pytest.approx(float(of_class.mean()))
        assert len(result.queries) == 9
        assert np.all(np.diff([float(ap[id_ // 3]) for id_ in result.queries]) >= 0)
    worst = [float(ap[row]) for row in found.worst_queries.tolist()]
    assert worst == sorted(worst)
    assert len(worst) == 63
    assert found.counts.sum(1).tolist() == [7 * 9 * 8, 72 * 71 - 7 * 9 * 8]
    assert float(found.nearest.false_match_rates(found.threshold)) <= 0.1


# Sets in which a query has no positive although another image has its label: the rule, the columns of images of label 5
# (the query, two others) and of label 6 (two), their roles and cameras.
ALTHOUGH_THERE_IS_ANOTHER = {
    "cameras": (None, [5, 5, 5, 6, 6], None, [1, 1, 1, 1, 2]),
    "roles": (None, [5, 5, 5, 6, 6], [1, 1, 1, 3, 3], None),
    "levels": (None, [[5, 9], [4, 9], [3, 9], [6, 8], [6, 8]], None, None),
    "a rule": (NearInTime(), [[5, 0], [5, 10], [5, 20], [6, 0], [6, 1]], None, None),
}


@pytest.mark.parametrize("case", ALTHOUGH_THERE_IS_ANOTHER)
def test_the_table_says_why_a_query_has_no_positive(case):
    rule, columns, roles, cameras = ALTHOUGH_THERE_IS_ANOTHER[case]
    metrics = RetrievalMetrics((1,), relevance=rule)
    given = {"roles": roles, "cameras": cameras}
    optional = {name: torch.tensor(values) for name, values in given.items() if values is not None}
    metrics.update(torch.randn(5, 4), torch.tensor(columns), torch.arange(5), **optional)
    found = find_errors(metrics, 0.1)
    images = ReportedImages("{}.png".format, str, lambda _: Image.new("RGB", (4, 4)))
    rows = list(csv.DictReader(io.StringIO(report_table(found, images).decode())))
    reasons = {row["image"]: row["reason"] for row in rows if row["finding"] == "no positive"}
    assert list(reasons) == ["0.png", "1.png", "2.png"]
    assert all(reasons.values())
