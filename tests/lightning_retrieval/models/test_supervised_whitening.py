"""Supervised whitening: a loop over the pairs in NumPy, special cases, and its state in checkpoints."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from lightning_retrieval import SupervisedWhitening
from lightning_retrieval.models import supervised_whitening
from lightning_retrieval.models.supervised_whitening import matching_pairs
from tests.lightning_retrieval.device_without_float64 import DEVICE, DeviceWithoutFloat64
from tests.lightning_retrieval.official_cases import rows

LABELS = torch.tensor([3, -1, 3, 8, -1, 3, 0, 3, -1, 0, 8, 8, 0, 3, -1])  # five, four, three and three images


def pairs_by_loops(labels, pairs_per_image):
    """Each image with the next ones of its class, in a circle."""
    pairs = set()
    for row, label in enumerate(labels):
        same = [other for other in range(len(labels)) if labels[other] == label]
        for step in range(1, pairs_per_image + 1):
            partner = same[(same.index(row) + step) % len(same)]
            if step < len(same):
                pairs.add((row, partner))
    return pairs


def learned_whitening(x, pairs):
    """m and P by the formulas, one pair at a time, in float64."""
    m = np.zeros(x.shape[1])
    S = np.zeros((x.shape[1], x.shape[1]))
    for query, partner in pairs:
        m += x[query] / len(pairs)
        S += np.outer(x[query] - x[partner], x[query] - x[partner]) / len(pairs)
    P = np.linalg.inv(np.linalg.cholesky(S))
    D = np.zeros_like(S)
    for row in x:
        projected = P @ (row - m)
        D += np.outer(projected, projected)
    eigenvalues, eigenvectors = np.linalg.eig(D)
    order = eigenvalues.argsort()[::-1]
    return m, eigenvectors[:, order].T @ P


@pytest.mark.parametrize("pairs_per_image", [1, 2, 3, 4, 9])
def test_pairs(pairs_per_image):
    pairs = [tuple(pair) for pair in matching_pairs(LABELS, pairs_per_image).tolist()]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == pairs_by_loops(LABELS.tolist(), pairs_per_image)
    assert max(sum(first == row for first, _ in pairs) for row in range(15)) == min(pairs_per_image, 4)


@pytest.mark.parametrize("dim", [None, 2])
@pytest.mark.parametrize("pairs_per_image", [1, 3])
def test_whitening_equals_loops_over_the_pairs(monkeypatch, pairs_per_image, dim):
    monkeypatch.setattr(supervised_whitening, "_FIT_PAIRS", 7)
    x, others = rows(15, 4) * torch.arange(1.0, 5.0) + 2, rows(6, 4, seed=1)
    m, P = learned_whitening(x.numpy(), sorted(pairs_by_loops(LABELS.tolist(), pairs_per_image)))
    expected = (others.numpy() - m) @ P[:dim].T
    expected = torch.from_numpy(expected / np.linalg.norm(expected, axis=1, keepdims=True))
    whitening = SupervisedWhitening(dim, pairs_per_image=pairs_per_image).fit(x, LABELS)
    torch.testing.assert_close(whitening(others).abs(), expected.abs(), rtol=1e-9, atol=1e-9)  # up to signs
    torch.testing.assert_close(whitening(others) @ whitening(others).T, expected @ expected.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whitening.learned.mean, torch.from_numpy(m))


def test_whitened_differences_have_unit_covariance_and_variances_descend():
    x, labels = rows(200, 5) @ rows(5, 5, seed=1), torch.arange(200) // 4
    whitening = SupervisedWhitening(pairs_per_image=3).fit(x, labels)
    mean, components, variances = whitening.learned
    projected = (x - mean) @ components.T
    pairs = matching_pairs(labels, 3)
    differences = projected[pairs[:, 0]] - projected[pairs[:, 1]]
    torch.testing.assert_close(differences.T @ differences / len(pairs), torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(projected.T @ projected / 199, variances.diag(), rtol=1e-7, atol=1e-7)
    assert (variances.diff() < 0).all()
    torch.testing.assert_close(whitening(x), normalize(projected))
    assert (components.gather(1, components.abs().argmax(1, keepdim=True)) > 0).all()


def test_labels_of_several_levels_match_by_the_finest():
    x = rows(15, 3)
    levels = torch.stack([LABELS, LABELS.clamp(min=3)], 1)
    found, expected = SupervisedWhitening().fit(x, levels), SupervisedWhitening().fit(x, LABELS)
    assert all(torch.equal(a, b) for a, b in zip(found.learned, expected.learned))


def test_on_a_device_without_float64():
    x, labels = rows(15, 3).float(), LABELS
    expected = SupervisedWhitening(dim=2).fit(x, labels)(x)
    with DeviceWithoutFloat64():
        found = SupervisedWhitening(dim=2).fit(x.to(DEVICE), labels.to(DEVICE))(x.to(DEVICE)).cpu()
    torch.testing.assert_close(found, expected)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "embeddings", "labels", "message"),
    [
        ({"dim": 5}, rows(15, 4), LABELS, "`dim` must be at most that of the embeddings, 4, got 5"),
        ({}, rows(15, 4), None, "`labels` must be given, because they define the pairs, got None"),
        ({}, rows(15, 4), torch.arange(15), "`labels` must hold a label with several rows, got no pair"),
        ({}, rows(15, 4), LABELS[:3], r"`labels` must have shape \(15,\), .* got \(3,\)"),
        ({}, rows(15, 3) @ rows(3, 6, seed=1), LABELS, "in each of 6 directions, got .* in only 3; give"),
    ],
)
def test_invalid_input_for_fit(settings, embeddings, labels, message):
    with pytest.raises(ValueError, match=f"^SupervisedWhitening: .*{message}"):
        SupervisedWhitening(**settings).fit(embeddings, labels)
