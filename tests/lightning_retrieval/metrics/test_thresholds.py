"""Rates of false matches and misses: against a loop in plain Python, and by hand."""

import math

import pytest
import torch

from lightning_retrieval.metrics import RetrievalMetrics, nearest_scores
from lightning_retrieval.metrics.thresholds import NearestScores
from tests.lightning_retrieval.blocks import small_blocks
from tests.lightning_retrieval.metrics.helpers import IDS, filled, lists, points

THRESHOLDS = [-1.0, -0.3, 0.0, 0.5, 0.7, 0.9, 0.97, 0.99, 0.999, 1.0]


def loop(kind):
    """For each query, in plain Python, the highest score of a negative and of a positive, None without one."""
    negatives, positives = [], []
    for scores, relevant in lists(kind):
        for found, wanted in ((negatives, False), (positives, True)):
            of_kind = [score for score, is_relevant in zip(scores.tolist(), relevant.tolist()) if is_relevant == wanted]
            if of_kind:
                found.append(max(of_kind))
    return negatives, positives


@pytest.mark.parametrize("kind", ["all", "queries apart"])
def test_rates_are_those_of_a_loop(kind):
    scores = nearest_scores(filled(kind))
    negatives, positives = loop(kind)
    assert sorted(scores.negatives.tolist()) == pytest.approx(sorted(negatives), abs=1e-9)
    assert sorted(scores.positives.tolist()) == pytest.approx(sorted(positives), abs=1e-9)
    assert len(positives) < len(negatives)  # a query without a positive counts in the false-match rate only
    shifted = [threshold + 3e-7 for threshold in THRESHOLDS]  # no score of the loop is so near to one
    false, missed = scores.false_match_rates(torch.tensor(shifted)), scores.miss_rates(torch.tensor(shifted))
    for threshold, false_rate, miss_rate in zip(torch.tensor(shifted).tolist(), false.tolist(), missed.tolist()):
        assert false_rate == sum(score >= threshold for score in negatives) / len(negatives)
        assert miss_rate == sum(score < threshold for score in positives) / len(positives)
        assert scores.miss_rates(threshold) == miss_rate
    assert 0 < false[5] < 1
    assert 0 < missed[7] < 1


@pytest.mark.parametrize("wanted", [0.0, 0.001, 0.29, 0.1, 0.5, 1 / 3, 0.996, 1.0])
def test_the_threshold_is_the_lowest_with_the_wanted_rate(wanted):
    scores = nearest_scores(filled("all"))
    threshold = scores.threshold(wanted)
    assert scores.false_match_rates(threshold) <= wanted
    below = [score for score in [*scores.negatives.tolist(), *scores.positives.tolist()] if score < threshold]
    if wanted == 1 or not below:
        assert threshold == -1
    else:
        assert scores.false_match_rates(max(below)) > wanted


def test_counts_that_rounding_would_change():
    for count in (7, 29, 100):
        scores = NearestScores(torch.arange(count).double() / count, torch.tensor([0.5]).double())
        for allowed in range(count):
            assert scores.false_match_rates(scores.threshold(allowed / count)) == allowed / count


def test_ties_and_neighbouring_numbers_count_against_the_model():
    tied = NearestScores(torch.tensor([0.5, 0.5, 0.5, 0.1]).double(), torch.tensor([0.5]).double())
    assert tied.false_match_rates(0.5) == 0.75
    threshold = tied.threshold(0.5)
    assert (tied.false_match_rates(threshold), tied.miss_rates(threshold)) == (0, 1)
    next_number = torch.tensor([math.nextafter(0.5, 1)], dtype=torch.float64)
    neighbours = NearestScores(torch.tensor([0.5]).double(), next_number)
    assert neighbours.threshold(0) == math.nextafter(0.5, 1)


def test_images_of_the_own_camera_are_not_matches():
    rows, labels = points()
    cameras = torch.arange(len(labels)) % 4
    metrics = RetrievalMetrics((1,))
    metrics.update(rows, labels, IDS, cameras=cameras)
    unit = torch.nn.functional.normalize(rows, dim=1)
    expected = []
    for query in range(len(labels)):
        others = (labels == labels[query]) & (cameras != cameras[query])
        if others.any():
            expected.append(float((unit[others] @ unit[query]).max()))
    assert sorted(nearest_scores(metrics).positives.tolist()) == pytest.approx(sorted(expected), abs=1e-9)


def test_a_gallery_is_scored_in_parts():
    whole = nearest_scores(filled("all"))
    with small_blocks():
        parts = nearest_scores(filled("all"))
    torch.testing.assert_close(parts.negatives, whole.negatives)
    torch.testing.assert_close(parts.positives, whole.positives)


def test_a_set_without_a_pair_has_no_rates():
    metrics = RetrievalMetrics((1,))
    metrics.update(torch.eye(3), torch.zeros(3, dtype=torch.int64))
    scores = nearest_scores(metrics)
    assert math.isnan(scores.false_match_rates(0.5))
    assert scores.miss_rates(0.5) == 1
