"""The recall@k surrogate: its function; its numbers are tested in test_every_loss.py and test_golden.py."""

from lightning_retrieval.losses.recall_at_k import recall_at_k
from tests.lightning_retrieval.losses.oracles import RECALL, assert_function_is_the_loss, random_lists


def test_function_is_the_loss():
    assert_function_is_the_loss("recall_at_k", recall_at_k, *random_lists(7, 11, "recall_at_k"), **RECALL)
