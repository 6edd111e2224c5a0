import pytest
import torch

from lightning_retrieval.ranking.labels import check_nesting, finest


def test_finest_level():
    labels = torch.tensor([[3, 1], [4, 1]])
    assert finest(labels).tolist() == [3, 4]
    assert finest(labels[:, 0]).tolist() == [3, 4]


@pytest.mark.parametrize("labels", [[[5], [5]], [[0, 0], [1, 0], [1, 0]], [[0, 7, 1], [0, 7, 1], [1, 8, 1], [2, 9, 3]]])
def test_nested_labels_are_accepted(labels):
    check_nesting("I", torch.tensor(labels))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("labels", "match"),
    [
        ([[0, 0], [0, 1], [1, 1]], r"of level 0 within one of level 1, got label 0 within \[0, 1\]"),
        ([[0, 4, 7], [1, 4, 8]], r"of level 1 within one of level 2, got label 4 within \[7, 8\]"),
    ],
)
def test_labels_that_do_not_nest(labels, match):
    with pytest.raises(ValueError, match=f"I: label levels must nest, .* {match}"):
        check_nesting("I", torch.tensor(labels))
