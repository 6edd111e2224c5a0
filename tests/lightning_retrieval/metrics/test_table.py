"""The table of metrics: its entries have different names, and queries without a positive have no value."""

import math

import pytest
import torch

from lightning_retrieval.metrics.retrieval import extra_metric, metrics_table
from lightning_retrieval.ranking.labels import LabelledLists
from lightning_retrieval.ranking.ranked_lists import positive_ranks
from lightning_retrieval.ranking.rows import unsharded


def table(levels):
    extra = [extra_metric("Test", name) for name in ("mINP", "NDCG@3", "MRR@3")]
    return metrics_table((1, 5), (3,), "min(k, R)", extra, alpha=1.0, levels=levels)


def test_names_of_the_means():
    flat = ["mAP", "mAP@R", "R-Precision", "MRR", "NDCG", "mAP@3", "mINP", "NDCG@3", "MRR@3", "R@1", "R@5"]
    assert [metric.mean for metric in table(1) if metric.mean] == flat
    assert [metric.mean for metric in table(2) if metric.level is None] == ["H-AP", "ASI", "NDCG-levels"]
    assert [metric.mean for metric in table(3) if metric.level] == ["mAP/level1", "mAP/level2"]


@pytest.mark.parametrize("levels", [1, 3])
def test_names_are_unique(levels):
    names = [metric.per_query for metric in table(levels)]
    assert len(set(names)) == len(names)


def test_values_of_queries_with_and_without_a_positive():
    """The first query has a positive at the finest level, the second only at the coarse one, the third none."""
    gallery = torch.eye(3)
    gallery_labels = torch.tensor([[0, 0], [1, 0], [9, 4]])
    query_labels = torch.tensor([[0, 0], [2, 0], [5, 7]])
    lists = LabelledLists(query_labels, gallery_labels, torch.full((3,), -1))
    (ranks,) = positive_ranks(unsharded(torch.eye(3), 256), unsharded(gallery, 256), lists)
    for metric in table(2):
        values = metric.values(ranks).tolist()
        assert not math.isnan(values[0]), metric
        assert math.isnan(values[1]) == (metric.level == 0), metric
        assert math.isnan(values[2]), metric


@pytest.mark.refusal
@pytest.mark.parametrize("name", ["mINP@3", "mINP@", "NDCG", "recall@0", "precision@1.5", "NDCG@007", "R@1", ""])
def test_unknown_names_raise(name):
    with pytest.raises(
        ValueError, match=rf"^Test: `extra_metrics` must be from 'mINP', .* such as 'NDCG@10', got '{name}'"
    ):
        extra_metric("Test", name)
