"""Intervals of means by bootstrap over classes: against a plain loop, known cases, and what they promise."""

import random

import pytest
import torch

from lightning_retrieval import RetrievalMetrics, SharedTags


def metrics_of(labels, noise=1.2, **settings):
    """The metrics of noisy images of the labels, of which every image is a query."""
    generator = torch.Generator().manual_seed(0)
    fine = labels.reshape(len(labels), -1)[:, 0]
    centres = torch.randn(int(fine.max()) + 1, 8, generator=generator)
    metrics = RetrievalMetrics((1, 5), **settings)
    metrics.update(centres[fine] + noise * torch.randn(len(fine), 8, generator=generator), labels)
    return metrics


def test_the_interval_is_that_of_a_loop_over_drawn_classes():
    """A loop draws other classes, so the ends agree up to the noise of 1,000 draws. Some queries have no positive."""
    sizes = 1 + torch.arange(40) % 5
    labels = torch.arange(40).repeat_interleave(sizes)
    metrics = metrics_of(labels)
    values = metrics.per_query()["AP"]
    of_class = [values[labels == label].tolist() for label in range(40) if sizes[label] > 1]
    generator, means = random.Random(1), []
    for _ in range(4000):
        drawn = [value for _ in of_class for value in generator.choice(of_class)]
        means.append(sum(drawn) / len(drawn))
    means.sort()
    low, high = metrics.intervals()["mAP"]
    assert (low, high) == pytest.approx((means[100], means[-101]), abs=0.015)
    assert low < float(metrics.compute()["mAP"]) < high


def test_classes_are_drawn_and_not_queries():
    """Values that are equal within a class are no more certain for many queries of a class."""
    lengths = []
    for images in (4, 40):  # of 20 classes, of which every second one is one and the same image
        labels = torch.arange(20).repeat_interleave(images)
        x = torch.eye(20)[torch.where(labels % 2 == 0, 0, labels)]
        metrics = RetrievalMetrics((1,))
        metrics.update(x, labels)
        low, high = metrics.intervals()["R@1"]
        lengths.append(high - low)
    assert lengths[0] == lengths[1] > 0.3


def test_a_metric_of_which_one_class_has_values_has_no_interval_whatever_the_others_have():
    """One finest label has two images, and the coarser ones have more."""
    labels = torch.stack([torch.tensor([0, 0, *range(1, 19)]), torch.arange(20) // 4], 1)
    intervals = metrics_of(labels).intervals()
    assert all(end != end for end in intervals["mAP"])
    low, high = intervals["mAP/level1"]
    assert low < high


@pytest.mark.parametrize(
    "labels", [torch.arange(60) // 4, torch.stack([torch.arange(60) // 2, torch.arange(60) // 6], 1)]
)
def test_each_mean_of_the_metrics_has_an_interval_around_it(labels):
    metrics = metrics_of(labels, map_ks=(5,), extra_metrics=("mINP", "MRR@3"), reverse=True)
    values, intervals = metrics.compute(), metrics.intervals()
    assert intervals.keys() == {name for name in values if "skipped" not in name}
    for name, (low, high) in intervals.items():
        assert 0 <= low <= float(values[name]) <= high, name
    assert metrics.intervals() == intervals
    low, high = intervals["mAP"]
    assert high - low > 0.02


def test_without_classes_queries_are_drawn():
    tags = torch.randint(5, (40, 3), generator=torch.Generator().manual_seed(0))
    metrics = RetrievalMetrics((1,), relevance=SharedTags())
    metrics.update(torch.randn(40, 6, generator=torch.Generator().manual_seed(1)), tags)
    low, high = metrics.intervals()["mAP"]
    assert low < float(metrics.compute()["mAP"]) < high
