"""Whitenings that several processes learn together from unequal numbers of rows: as one process from all rows."""

import pytest
import torch

from lightning_retrieval import PCAWhitening, SupervisedWhitening
from tests.lightning_retrieval.official_cases import rows

SIZES = {2: [13, 47], 3: [0, 49, 11]}  # of 60 rows; with three processes the first has none
X = rows(60, 5) * torch.arange(1.0, 6.0) + 3
LABELS = torch.arange(60) * 7 % 13  # the images of a class are on several processes


MANY, OF_MANY, PARTS = rows(6000, 5), torch.arange(6000) // 4, [0, 5000, 1000]  # of no, two and one blocks of pairs


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


def learned(this, world):
    """What each whitening has learned, in float64 and of rows in float32."""
    found = {}
    for name, whitening in whitenings().items():
        whitening.fit_over_processes(of_process(X, this, world), of_process(LABELS, this, world))
        found[name] = whitening.learned
    single = SupervisedWhitening().fit_over_processes(
        of_process(X.float(), this, world), of_process(torch.stack([LABELS, LABELS // 5], 1), this, world)
    )
    found["float32"] = single.learned
    many = SupervisedWhitening(pairs_per_image=3)
    found["many"] = many.fit_over_processes(MANY.split(PARTS)[this], OF_MANY.split(PARTS)[this]).learned
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


def test_processes_have_different_numbers_of_blocks_of_pairs(processes):
    expected = SupervisedWhitening(pairs_per_image=3).fit(MANY, OF_MANY).learned
    for found in processes:
        for part, expected_part in zip(found["many"], expected):
            torch.testing.assert_close(part, expected_part, rtol=1e-8, atol=1e-8)


def test_one_process_learns_the_same_by_both_functions():
    for name, whitening in whitenings().items():
        together = whitening.fit_over_processes(X, LABELS).learned
        assert all(torch.equal(*parts) for parts in zip(together, whitenings()[name].fit(X, LABELS).learned))


def messages(this, world):
    """What is wrong on one process only, and what the rows of all lack."""
    x, labels = of_process(X, this, world), of_process(LABELS, this, world)
    invalid = x.clone()
    invalid[this:, 0] = torch.nan if this == 1 else 1.0
    found = []
    for whitening, given in (
        (PCAWhitening(), (invalid, labels)),
        (SupervisedWhitening(), (x, labels if this == 0 else None)),
        (SupervisedWhitening(), (x, torch.arange(60).split(SIZES[world])[this])),
        (PCAWhitening(), (x[:1], labels[:1])),
    ):
        with pytest.raises(ValueError, match="Whitening: ") as error:
            whitening.fit_over_processes(*given)
        found.append((str(error.value), error.value.argument))
    return found


def test_all_processes_raise_the_same_error(run_processes):
    """Otherwise the others would wait for the one that has raised."""
    first, second = run_processes(messages, 2)
    assert first == second
    arguments = [argument for _, argument in first]
    assert arguments == ["embeddings", "labels", "labels", "embeddings"]
