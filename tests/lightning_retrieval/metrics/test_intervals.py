"""Intervals of means by bootstrap over classes: against a plain loop, known cases, and what they promise."""

import random

import pytest
import torch

from lightning_retrieval import RetrievalMetrics, SharedTags
from lightning_retrieval.metrics.intervals import bootstrap_intervals


def clustered(classes, seed=0):
    """Values of queries of classes of different sizes, and the class of each."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 1 + torch.arange(classes) % 5
    groups = torch.arange(classes).repeat_interleave(sizes)
    means = torch.rand(classes, generator=generator)
    values = (means[groups] + 0.1 * torch.randn(len(groups), generator=generator)).clamp(0, 1).double()
    return values, groups


def test_the_interval_is_that_of_a_loop_over_drawn_classes():
    """A loop draws other classes, so the ends agree up to the noise of 1,000 draws."""
    values, groups = clustered(40)
    of_class = [values[groups == group].tolist() for group in range(40)]
    generator, means = random.Random(1), []
    for _ in range(4000):
        drawn = [value for _ in range(40) for value in generator.choice(of_class)]
        means.append(sum(drawn) / len(drawn))
    means.sort()
    low, high = bootstrap_intervals(values[None], 7 - 3 * groups)[0].tolist()
    assert (low, high) == pytest.approx((means[100], means[-101]), abs=0.015)
    assert low < float(values.mean()) < high


def test_classes_are_drawn_and_not_queries():
    """Values that are equal within a class are no more certain for many queries of a class."""
    few, many = torch.arange(20), torch.arange(20).repeat_interleave(50)
    value = (torch.arange(20) % 2).double()
    of_few, of_many = (bootstrap_intervals(value[groups][None], groups) for groups in (few, many))
    assert torch.equal(of_few, of_many)
    assert float(of_few[0, 1] - of_few[0, 0]) > 0.3


def test_queries_without_a_value_and_their_classes_do_not_count():
    values, groups = clustered(12)
    more = torch.cat([values, torch.full((5,), torch.nan, dtype=torch.float64)])
    of_more = torch.cat([groups, torch.tensor([0, 0, 99, 99, 100])])
    assert torch.equal(bootstrap_intervals(more[None], of_more), bootstrap_intervals(values[None], groups))
    assert bootstrap_intervals(values[None], torch.zeros_like(groups)).isnan().all()


def test_a_metric_of_which_one_class_has_values_has_no_interval_whatever_the_others_have():
    """As the AP at the finest level, if one label has two images and the coarser ones have more."""
    of_one = torch.tensor([0.5, 0.7, torch.nan, torch.nan], dtype=torch.float64)
    of_all = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([3, 3, 5, 7])
    intervals = bootstrap_intervals(torch.stack([of_one, of_all, of_one * torch.nan]), groups)
    assert intervals[[0, 2]].isnan().all()
    assert torch.equal(intervals[1:2], bootstrap_intervals(of_all[None], groups))


@pytest.mark.parametrize(
    "labels", [torch.arange(60) // 4, torch.stack([torch.arange(60) // 2, torch.arange(60) // 6], 1)]
)
def test_each_mean_of_the_metrics_has_an_interval_around_it(labels):
    generator = torch.Generator().manual_seed(0)
    fine = labels.reshape(60, -1)[:, 0]
    embeddings = torch.randn(30, 8, generator=generator)[fine] + 1.2 * torch.randn(60, 8, generator=generator)
    metrics = RetrievalMetrics((1, 5), (5,), extra_metrics=("mINP", "MRR@3"), reverse=True)
    metrics.update(embeddings, labels, roles=1 + torch.arange(60) % 2)
    values, intervals = metrics.compute(), metrics.intervals()
    assert intervals.keys() == {name for name in values if "skipped" not in name}
    for name, (low, high) in intervals.items():
        assert 0 <= low <= float(values[name]) <= high <= 1, name
    assert metrics.intervals() == intervals
    low, high = intervals["mAP"]
    assert high - low > 0.02


def test_without_classes_queries_are_drawn():
    tags = torch.randint(5, (40, 3), generator=torch.Generator().manual_seed(0))
    metrics = RetrievalMetrics((1,), relevance=SharedTags())
    metrics.update(torch.randn(40, 6, generator=torch.Generator().manual_seed(1)), tags)
    low, high = metrics.intervals()["mAP"]
    assert low < float(metrics.compute()["mAP"]) < high
