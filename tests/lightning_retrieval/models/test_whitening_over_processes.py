"""Whitenings that several processes learn together from unequal numbers of rows: as one process from all rows."""

import pytest
import torch

from lightning_retrieval import PCAWhitening, SupervisedWhitening
from lightning_retrieval.models import supervised_whitening
from tests.lightning_retrieval.metrics.helpers import LargestTensor
from tests.lightning_retrieval.official_cases import rows

SIZES = {2: [13, 47], 3: [0, 49, 11]}  # of 60 rows; with three processes the first has none
X = rows(60, 5) * torch.arange(1.0, 6.0) + 3
LABELS = torch.arange(60) * 7 % 13  # the images of a class are on several processes


class OwnWhitening(PCAWhitening):
    """A user's whitening with a `fit` of its own."""

    def fit(self, embeddings, labels=None):
        return super().fit(embeddings[labels > 2])


def whitenings():
    return {
        "pca": PCAWhitening(dim=3),
        "pairs": SupervisedWhitening(dim=4, pairs_per_image=3),
        "of a user": OwnWhitening(dim=3),
    }


def of_process(values, this, world):
    return values.split(SIZES[world])[this]


def largest_tensor():
    """Elements of the largest tensor, with 300 rows on each process."""
    x, labels = torch.randn(300, 40), torch.arange(300) // 5
    with LargestTensor() as largest:
        PCAWhitening().fit_over_processes(x, labels)
        SupervisedWhitening().fit_over_processes(x, labels)
    return largest.elements


def learned(this, world):
    """What each whitening has learned, in float64 and of rows in float32, and its largest tensor."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervised_whitening, "_FIT_PAIRS", 7)
        for name, whitening in whitenings().items():
            whitening.fit_over_processes(of_process(X, this, world), of_process(LABELS, this, world))
            found[name] = whitening.learned
        single = SupervisedWhitening().fit_over_processes(
            of_process(X.float(), this, world), of_process(torch.stack([LABELS, LABELS // 5], 1), this, world)
        )
        found["float32"] = single.learned
        patch.setattr(supervised_whitening, "_FIT_PAIRS", 20)
        found["largest"] = largest_tensor()
    return found


@pytest.fixture(scope="module")
def processes(run_processes):
    return run_processes(learned, 3)


@pytest.mark.parametrize("name", ["pca", "pairs", "of a user"])
def test_processes_learn_what_one_process_learns_from_all_rows(name, processes):
    expected = whitenings()[name].fit(X, LABELS).learned
    for found in processes:
        for part, expected_part, first in zip(found[name], expected, processes[0][name]):
            torch.testing.assert_close(part, expected_part, rtol=1e-9, atol=1e-9)
            assert torch.equal(part, first)


def test_rows_in_float32_and_labels_of_several_levels(processes):
    expected = SupervisedWhitening().fit(X.float(), LABELS).learned
    for found in processes:
        for part, expected_part in zip(found["float32"], expected):
            assert part.dtype == torch.float32
            torch.testing.assert_close(part, expected_part, rtol=1e-6, atol=1e-6)


def test_one_process_learns_the_same_by_both_functions():
    for name, whitening in whitenings().items():
        together = whitening.fit_over_processes(X, LABELS).learned
        assert all(torch.equal(*parts) for parts in zip(together, whitenings()[name].fit(X, LABELS).learned))


def test_no_process_has_the_rows_of_all(processes):
    assert max(found["largest"] for found in processes) <= 300 * 40  # its local rows, in float64


def messages(this, world):
    """What is wrong on one process only, what the rows of all lack, and rows that are not of one kind."""
    x, labels = of_process(X, this, world), of_process(LABELS, this, world)
    invalid, few = x.clone(), slice(0, 1)
    invalid[this:, 0] = torch.nan if this == 1 else 1.0
    of_first, of_second = (x, labels), [(torch.cat([x, x[:, :1]], 1), labels), (x.float(), labels)]
    of_second += [(x, torch.stack([labels, labels], 1)), (x, labels.int()), (x, None)]
    wider, single, levels, narrow, without = of_second if this == 1 else [of_first] * 5
    found = []
    for whitening, given in (
        (PCAWhitening(), (invalid, labels)),
        (SupervisedWhitening(), (x, labels if this == 0 else None)),
        (SupervisedWhitening(), (x, torch.arange(60).split(SIZES[world])[this])),
        (PCAWhitening(), (x[few], labels[few])),
        (SupervisedWhitening(dim=9), (x, labels)),
        (PCAWhitening(), wider),
        (OwnWhitening(), wider),
        (SupervisedWhitening(), single),
        (SupervisedWhitening(), levels),
        (SupervisedWhitening(), narrow),
        (OwnWhitening(), without),
    ):
        with pytest.raises(ValueError, match="Whitening: ") as error:
            whitening.fit_over_processes(*given)
        found.append(str(error.value))
    PCAWhitening().fit_over_processes(*levels)  # which does not need labels
    return found


@pytest.fixture(scope="module")
def errors(run_processes):
    """The messages of invalid rows, and of rows of several kinds, which are the same on both processes."""
    first, second = run_processes(messages, 2)
    assert first == second
    return first


@pytest.mark.refusal
def test_all_processes_raise_the_same_error(errors):
    for message, expected in zip(
        errors[:5],
        (
            "PCAWhitening: `embeddings` must hold finite numbers only",
            "SupervisedWhitening: `labels` must be given",
            "SupervisedWhitening: `labels` must hold a label with several rows, got no pair",
            "PCAWhitening: `embeddings` must have at least 6 rows to learn 5 directions from, got 2",
            "SupervisedWhitening: `dim` must be at most that of the embeddings, 5, got 9",
        ),
        strict=True,
    ):
        assert message.startswith(expected)


@pytest.mark.refusal
def test_rows_that_are_not_of_one_kind_are_invalid_on_all_processes(errors):
    rule = "must have the same shape, apart from the number of rows, and dtype on all processes, got"
    assert errors[5:] == [
        f"{name}Whitening: `{argument}` {rule} {kind} on process 0 and {other_kind} on process 1."
        for name, argument, kind, other_kind in (
            ("PCA", "embeddings", "(rows, 5) of torch.float64", "(rows, 6) of torch.float64"),
            ("Own", "embeddings", "(rows, 5) of torch.float64", "(rows, 6) of torch.float64"),
            ("Supervised", "embeddings", "(rows, 5) of torch.float64", "(rows, 5) of torch.float32"),
            ("Supervised", "labels", "(rows) of torch.int64", "(rows, 2) of torch.int64"),
            ("Supervised", "labels", "(rows) of torch.int64", "(rows) of torch.int32"),
            ("Own", "labels", "(rows) of torch.int64", "None"),
        )
    ]
