"""Numbering classes."""

from lightning_retrieval.datamodules.image_index import class_numbers


def test_classes_are_numbered_in_the_order_of_their_ids():
    labels, names = class_numbers([30, 7, 30, -2])
    assert labels.tolist() == [2, 1, 2, 0]
    assert names == ["-2", "7", "30"]
    assert class_numbers(["b", "a", "b"])[0].tolist() == [1, 0, 1]
