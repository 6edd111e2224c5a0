"""Invalid labels and numbers of the samplers, and of the glyph images."""

import numpy as np
import torch

from lightning_retrieval.datamodules import (
    AllClassesSampler,
    CategorySampler,
    Glyphs,
    PairSampler,
    PKSampler,
    RandomBatchSampler,
    TagSampler,
)
from lightning_retrieval.invalid import InvalidType, InvalidValue
from tests.refusals import refusal_test

LABELS = [0, 0, 0, 1, 1, 2, 2]
CATEGORIES = [5, 5, 5, 6, 6, 6, 6]
TAGS = [[0, 1], [0, -1], [1, -1]]


def pk(labels=LABELS, P=2, K=2, **settings):
    return PKSampler(labels, classes_per_batch=P, samples_per_class=K, **settings)


def of_categories(categories=CATEGORIES, P=2, C=2):
    sizes = {"classes_per_batch": P, "samples_per_class": 2, "categories_per_batch": C}
    return CategorySampler(LABELS, categories, **sizes)


def of_tags(tags=TAGS, P=1, K=2):
    return TagSampler(tags, tags_per_batch=P, samples_per_tag=K)


def pairs(queries=(0, 1, 1), candidates=(1, 1, 0), P=2, Q=1, K=1):
    return PairSampler(queries, candidates, classes_per_batch=P, queries_per_class=Q, samples_per_class=K)


TABLE = {
    "PKSampler": [
        (lambda: pk(torch.zeros(2, 3, dtype=torch.int64)), InvalidValue, "labels"),
        (lambda: pk([[1], [1, 2]]), InvalidValue, "labels"),
        (lambda: pk(torch.ones(4)), InvalidType, "labels"),
        (lambda: pk([1, 2, 3]), InvalidValue, "labels"),  # each class has one image
        (lambda: pk(P=4), InvalidValue, "classes_per_batch"),
        (lambda: pk(P=0), InvalidValue, "classes_per_batch"),
        (lambda: pk(K=1), InvalidValue, "samples_per_class"),
        (lambda: pk(seed=-1), InvalidValue, "seed"),
        (lambda: pk().set_epoch(-1), InvalidValue, "epoch"),
    ],
    "AllClassesSampler": [
        (lambda: AllClassesSampler(LABELS, batch_size=2), InvalidValue, "batch_size"),  # of three classes
        (lambda: AllClassesSampler(LABELS, batch_size=8), InvalidValue, "batch_size"),  # of seven images
    ],
    "CategorySampler": [
        (lambda: of_categories(P=3), InvalidValue, "classes_per_batch"),
        (lambda: of_categories(P=3, C=3), InvalidValue, "categories_per_batch"),
        (lambda: of_categories([5, 6]), InvalidValue, "categories"),
        (lambda: of_categories([5, 6, *CATEGORIES[2:]]), InvalidValue, "categories"),  # two of a class
        (lambda: of_categories(None), InvalidType, "categories"),
    ],
    "TagSampler": [
        (lambda: of_tags(None), InvalidType, "tags"),
        (lambda: of_tags([1, 1, 2]), InvalidValue, "tags"),
        (lambda: of_tags([[0.5], [0.5]]), InvalidType, "tags"),
        (lambda: of_tags([[0], [-2]]), InvalidValue, "tags"),
        (lambda: of_tags([[0], [1], [-1]]), InvalidValue, "tags"),  # no tag of two images
        (lambda: of_tags(P=3), InvalidValue, "tags_per_batch"),
        (lambda: of_tags(K=4), InvalidValue, "tags_per_batch"),  # of three images
    ],
    "PairSampler": [
        (lambda: pairs([1], [2]), InvalidValue, ""),  # no class of both sides
        (lambda: pairs(P=3), InvalidValue, "classes_per_batch"),
        (lambda: pairs(Q=0), InvalidValue, "queries_per_class"),
        (lambda: pairs(K=0), InvalidValue, "samples_per_class"),
        (lambda: pairs([]), InvalidValue, "query_labels"),
        (lambda: pairs(candidates=np.zeros((2, 2), int)), InvalidValue, "candidate_labels"),
    ],
    "RandomBatchSampler": [(lambda: RandomBatchSampler(3, batch_size=4), InvalidValue, "batch_size")],
    "Glyphs": [
        (lambda: Glyphs(fonts=["cmr10", "Comic"]).val_set, InvalidValue, "fonts"),
        (lambda: Glyphs(fonts=[]), InvalidValue, "fonts"),
        (lambda: Glyphs(channels=2), InvalidValue, "channels"),
    ],
}
test_invalid_arguments_raise = refusal_test(TABLE)
