"""Whitening: the official code's numbers, scikit-learn, a loop over the pairs, and its state in checkpoints."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import nn

from lightning_retrieval import PCAWhitening, SupervisedWhitening
from tests.lightning_retrieval.device_without_float64 import DEVICE, DeviceWithoutFloat64
from tests.lightning_retrieval.official_cases import OFFICIAL, official_cases, rows, tensor


def test_nan_passes_through_so_that_a_metric_can_name_the_ids():
    whitening = PCAWhitening(dim=2)
    whitening.fit(rows(20, 4))
    x = rows(5, 4, seed=1)
    x[3, 1], x[4, 0] = torch.nan, torch.inf
    whitened = whitening(x)
    assert whitened.isnan().all(1).tolist() == [False, False, False, True, True]


@official_cases("pca_whitening")
def test_whitening_equals_the_official_code(case):
    whitening = PCAWhitening(case["params"]["dims"], case["params"]["power"])
    whitening.fit(tensor(case["inputs"]["fit_embeddings"]))
    whitened, expected = whitening(tensor(case["inputs"]["embeddings"])), case["expected"]
    torch.testing.assert_close(whitened @ whitened.T, tensor(expected["gram"]), **OFFICIAL)
    torch.testing.assert_close(whitened.abs(), tensor(expected["whitened"]).abs(), **OFFICIAL)  # up to signs
    dim = case["params"]["dims"]
    torch.testing.assert_close(whitening.learned.mean, tensor(expected["mean"]), **OFFICIAL)
    torch.testing.assert_close(whitening.learned.variances, tensor(expected["explained_variance"])[:dim], **OFFICIAL)
    components = tensor(expected["components"])[:dim]
    torch.testing.assert_close(whitening.learned.components.abs(), components.abs(), **OFFICIAL)


@pytest.mark.parametrize("power", [0, 0.25, 1.0])
def test_whitening_equals_scikit_learn(power):
    """Of more rows than are added up at once."""
    learned_from = rows(20_000, 6) * torch.arange(1.0, 7.0) + 3
    others = rows(9, 6, seed=1)
    pca = PCA(n_components=4, svd_solver="full").fit(learned_from.numpy())
    expected = pca.transform(others.numpy()) / pca.explained_variance_**power
    expected = torch.from_numpy(expected / np.linalg.norm(expected, axis=1, keepdims=True))
    whitened = PCAWhitening(dim=4, power=power).fit(learned_from)(others)
    torch.testing.assert_close(whitened @ whitened.T, expected @ expected.T)


def test_the_largest_entry_of_each_direction_is_positive():
    components = PCAWhitening().fit(rows(30, 6)).learned.components
    assert (components.gather(1, components.abs().argmax(1, keepdim=True)) > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whitening_computes_in_float32_under_autocast(dtype):
    learned_from, others = rows(60, 4).to(dtype), rows(8, 4, seed=1).to(dtype)
    exact = PCAWhitening().fit(learned_from.double())(others.double()).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whitened = PCAWhitening().fit(learned_from)(others)
    assert whitened.dtype == torch.float32
    torch.testing.assert_close(whitened, exact, rtol=0, atol=1e-5)


def test_whitening_fitted_in_inference_mode_is_differentiable():
    with torch.inference_mode():
        whitening = PCAWhitening().fit(rows(20, 3))
    assert not any(part.is_inference() for part in whitening.learned)
    embeddings = rows(4, 3, seed=1).requires_grad_()
    whitening(embeddings).sum().backward()
    assert embeddings.grad.abs().sum() > 0


@pytest.mark.parametrize("dim", [None, 3, 2])
def test_a_checkpoint_is_loaded_and_truncated_to_fewer_directions(tmp_path, dim):
    learned_from, others = rows(20, 5), rows(4, 5, seed=1)
    fitted = nn.Sequential(PCAWhitening(dim=3, power=0.3).fit(learned_from))
    torch.save(fitted.state_dict(), tmp_path / "whitening.pt")
    other = nn.Sequential(PCAWhitening(dim, power=0.3))
    other.load_state_dict(torch.load(tmp_path / "whitening.pt", weights_only=True), strict=True)
    assert torch.equal(other(others), PCAWhitening(dim or 3, power=0.3).fit(learned_from)(others))


def test_a_checkpoint_without_whitening_leaves_it_unlearned():
    model = nn.Sequential(nn.Linear(2, 2), PCAWhitening())
    model.load_state_dict(nn.Sequential(nn.Linear(2, 2)).state_dict(), strict=True)
    assert model[1].learned is None


def test_half_precision_of_the_module_does_not_round_the_whitening():
    whitening = PCAWhitening().fit(rows(20, 5))
    before = whitening.learned
    assert all(torch.equal(a, b) for a, b in zip(whitening.half().learned, before))


def test_ddp_broadcasts_nothing_of_the_whitening():
    assert not list(PCAWhitening().fit(rows(20, 5)).buffers())


@pytest.mark.gpu
def test_whitening_runs_on_the_device_of_the_embeddings():
    learned_from, others = rows(40, 6), rows(4, 6, seed=1)
    whitening = PCAWhitening().fit(learned_from)
    on_device = whitening(others.to("cuda"))
    assert on_device.is_cuda
    torch.testing.assert_close(on_device.cpu(), whitening(others))
    gallery = rows(30, 6, seed=2)
    fitted = PCAWhitening(dim=4).fit(gallery.to("cuda"))
    torch.testing.assert_close(fitted(others).cpu(), PCAWhitening(dim=4).fit(gallery)(others))


FLAT = rows(50, 3) @ rows(3, 6, seed=1)  # varies in three of six directions, and in the others by rounding


def test_directions_without_variance_are_left_out_or_not_scaled():
    assert PCAWhitening(dim=3).fit(FLAT)(FLAT).shape == (50, 3)
    assert PCAWhitening(power=0).fit(FLAT)(FLAT).isfinite().all()


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


@pytest.mark.parametrize("dim", [None, 2])
@pytest.mark.parametrize("pairs_per_image", [1, 3, 9])
def test_supervised_whitening_equals_loops_over_the_pairs(pairs_per_image, dim):
    x, others = rows(15, 4) * torch.arange(1.0, 5.0) + 2, rows(6, 4, seed=1)
    m, P = learned_whitening(x.numpy(), sorted(pairs_by_loops(LABELS.tolist(), pairs_per_image)))
    expected = (others.numpy() - m) @ P[:dim].T
    expected = torch.from_numpy(expected / np.linalg.norm(expected, axis=1, keepdims=True))
    whitening = SupervisedWhitening(dim, pairs_per_image=pairs_per_image).fit(x, LABELS)
    torch.testing.assert_close(whitening(others).abs(), expected.abs(), rtol=1e-9, atol=1e-9)  # up to signs
    torch.testing.assert_close(whitening(others) @ whitening(others).T, expected @ expected.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whitening.learned.mean, torch.from_numpy(m))


def test_supervised_whitening_of_more_pairs_than_are_added_up_at_once():
    x = rows(4000, 3) * torch.arange(1.0, 4.0)
    pairs = [(row, row // 4 * 4 + (row + step) % 4) for row in range(4000) for step in (1, 2, 3)]
    m, P = learned_whitening(x.numpy(), pairs)
    expected = (x.numpy() - m) @ P.T
    expected = torch.from_numpy(expected / np.linalg.norm(expected, axis=1, keepdims=True))
    found = SupervisedWhitening(pairs_per_image=3).fit(x, torch.arange(4000) // 4)(x)
    torch.testing.assert_close(found.abs(), expected.abs(), rtol=1e-8, atol=1e-8)


def test_supervised_whitening_on_a_device_without_float64():
    x, labels = rows(15, 3).float(), LABELS
    expected = SupervisedWhitening(dim=2).fit(x, labels)(x)
    with DeviceWithoutFloat64():
        found = SupervisedWhitening(dim=2).fit(x.to(DEVICE), labels.to(DEVICE))(x.to(DEVICE)).cpu()
    torch.testing.assert_close(found, expected)
