"""Precision at each recall and counts of pairs, against loops; plots of results."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from sklearn.metrics import precision_recall_curve

from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.metrics.curves import mean_precision, pair_counts
from tests.lightning_retrieval.blocks import small_blocks
from tests.lightning_retrieval.metrics.helpers import IDS, filled, lists, points


@pytest.mark.parametrize("kind", ["all", "queries apart"])
def test_mean_precision_is_that_of_scikit_learn_interpolated(kind):
    expected, left_out = [], 0
    for scores, relevant in lists(kind):
        if not relevant.any():
            left_out += 1
            continue
        precision, recall, _ = precision_recall_curve(relevant, scores)
        precision, recall = precision[:-1], recall[:-1]  # without scikit-learn's own point of recall 0
        expected.append([precision[recall >= level / 100 - 1e-12].max() for level in range(101)])
    assert left_out > 0
    found = mean_precision(filled(kind)).numpy()
    assert found == pytest.approx(np.mean(expected, axis=0), abs=1e-9)
    assert 0.2 < found[50] < found[0] < 1


def test_mean_precision_of_one_list_by_hand():
    """Right, wrong, right: precision 1 up to a recall of 1/2, then 2/3."""
    metrics = RetrievalMetrics((1,))
    angle = torch.tensor([0.0, 0.1, 0.2, 0.3])
    is_query = torch.tensor([True, False, False, False])
    metrics.update(
        torch.stack([angle.cos(), angle.sin()], 1), torch.tensor([1, 1, 2, 1]), None, torch.where(is_query, 1, 2)
    )
    assert mean_precision(metrics, steps=4).tolist() == pytest.approx([1, 1, 1, 2 / 3, 2 / 3])


def test_mean_precision_is_nan_without_any_positive():
    metrics = RetrievalMetrics((1,))
    metrics.update(torch.eye(3), torch.arange(3))
    assert mean_precision(metrics).isnan().all()


def test_mean_precision_with_classes_in_another_order_than_their_groups():
    """The finest labels are not in ascending order within the order of the coarse ones."""
    rows, labels = points()
    plain, with_levels = RetrievalMetrics((1,)), RetrievalMetrics((1,))
    plain.update(rows, labels, IDS)
    with_levels.update(rows, torch.stack([labels, labels % 3], 1), IDS)
    assert torch.equal(mean_precision(with_levels), mean_precision(plain))


def test_pairs_of_one_label_and_camera_are_not_counted():
    """Nor are they in the lists of the precision."""
    rows, labels = points()
    cameras = torch.arange(len(labels)) % 4
    metrics = RetrievalMetrics((1,))
    metrics.update(rows, labels, IDS, cameras=cameras)
    same_label = labels[:, None] == labels
    listed = ~(same_label & (cameras[:, None] == cameras)).fill_diagonal_(True)
    expected = [int((listed & same_label).sum()), int((listed & ~same_label).sum())]
    assert pair_counts(metrics, 20).sum(1).tolist() == expected
    unit = torch.nn.functional.normalize(rows, dim=1).numpy()
    aps = []
    for query in range(len(labels)):
        relevant, scores = same_label[query][listed[query]].numpy(), (unit @ unit[query])[listed[query].numpy()]
        if relevant.any():
            precision, recall, _ = precision_recall_curve(relevant, scores.round(12))
            aps.append([precision[:-1][recall[:-1] >= level / 4 - 1e-12].max() for level in range(5)])
    assert mean_precision(metrics, 4).numpy() == pytest.approx(np.mean(aps, axis=0), abs=1e-9)


@pytest.mark.parametrize("kind", ["all", "queries apart"])
def test_every_pair_is_counted_once(kind):
    bins = 20
    with small_blocks():
        counts = pair_counts(filled(kind), bins)
    expected = np.zeros((2, bins), dtype=int)
    near_an_edge = 0
    for scores, relevant in lists(kind):
        bin_index = np.clip(np.floor((scores + 1) * bins / 2), 0, bins - 1).astype(int)
        near_an_edge += int((np.abs((scores + 1) * bins / 2 - np.round((scores + 1) * bins / 2)) < 1e-5).sum())
        for positive in (True, False):
            expected[0 if positive else 1] += np.bincount(bin_index[relevant == positive], minlength=bins)
    assert counts.sum(1).tolist() == expected.sum(1).tolist()
    assert np.abs(counts.numpy() - expected).sum() <= 2 * near_an_edge


def drawn(axes):
    """The values of each line by its name."""
    return {line.get_label(): line.get_ydata().tolist() for line in axes.get_lines()}


def test_points_of_one_result_and_lines_of_several():
    metrics = RetrievalMetrics(ks=(1, 3))
    metrics.update(torch.randn(40, 4), torch.arange(40) % 8)
    first = metrics.compute()
    shown = {name: value.item() for name, value in first.items() if name != "skipped_queries"}
    figure, axes = metrics.plot()
    plt.close(figure)
    assert drawn(axes) == {name: pytest.approx([value]) for name, value in shown.items()}

    own = Figure().subplots()
    _, axes = metrics.plot([first, {name: value / 2 for name, value in first.items()}], own)
    assert axes is own
    assert drawn(axes) == {name: pytest.approx([value, value / 2]) for name, value in shown.items()}
