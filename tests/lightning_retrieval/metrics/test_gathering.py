"""Rows of one image are merged, different images with one id raise; what post-processing gets."""

import pytest
import torch
from torch.nn.functional import normalize

from lightning_retrieval.metrics import RetrievalMetrics, nearest_scores
from tests.lightning_retrieval.blocks import small_blocks
from tests.lightning_retrieval.metrics.helpers import compute, numbers

KS = (1, 2, 4, 8)


def test_repeated_image_is_counted_once():
    x, labels = torch.randn(20, 4), torch.randint(0, 3, (20,))
    expected = compute(x, labels, ids=torch.arange(20))
    again = torch.cat([torch.arange(20), torch.tensor([3, 3, 19, 0])])
    assert compute(x[again], labels[again], ids=again) == expected
    assert compute(x[again], labels[again]) != expected  # without ids they are different images


def test_roles_of_one_image_in_different_rows_are_merged():
    x, labels, ids = torch.randn(20, 4), torch.randint(0, 3, (20,)), torch.arange(20)
    metrics = RetrievalMetrics(ks=KS)
    metrics.update(x, labels, ids, roles=torch.full((20,), 1))
    metrics.update(x, labels, ids, roles=torch.full((20,), 2))
    merged = numbers(metrics.compute())
    assert merged == compute(x, labels, ids=ids)  # no query meets its own copy


def test_images_of_an_instance_are_averaged():
    x, labels = torch.randn(50, 5), torch.arange(50) % 7
    instances = torch.where(torch.arange(50) < 21, labels, 100 + torch.arange(50))  # three images of each, then one
    ids = torch.randperm(50)
    metrics = RetrievalMetrics(ks=(1, 3))
    for part in torch.arange(50).split(13):
        metrics.update(x[part], labels[part], ids[part], instances=instances[part])
    unit = normalize(x)
    means = torch.stack([unit[instances == i].mean(0) for i in instances.unique()])
    of_mean = [int(labels[instances == i][0]) for i in instances.unique()]
    expected = compute(means, torch.tensor(of_mean), ks=(1, 3))
    assert numbers(metrics.compute()) == pytest.approx(expected, abs=1e-12)
    least = [int(ids[instances == i].min()) for i in instances.unique()]
    assert metrics.per_query()["ids"].tolist() == sorted(least)


def two_sets(second, offset=0, roles=(1, 2), dtype=torch.float32):
    """A metric with 40 images of ten classes and a second set of 40, both with ids from 0."""
    generator = torch.Generator().manual_seed(3)
    first, labels = torch.randn(40, 16, generator=generator), torch.arange(40) // 4
    metrics = RetrievalMetrics(ks=(1,), embeddings_on_cpu=True)
    for rows, role, start in ((first, roles[0], 0), (second(first, generator), roles[1], offset)):
        of_role = torch.full((40,), role)
        metrics.update(rows.to(dtype), labels, torch.arange(40) + start, of_role)
    return metrics


def with_noise(rows, generator):
    return rows + torch.randn(rows.shape, generator=generator) / 2


def rounded(rows, generator):
    return 3 * rows.bfloat16().float()


@pytest.mark.refusal
@pytest.mark.parametrize("compute_of", [RetrievalMetrics.compute, RetrievalMetrics.per_query, nearest_scores])
@pytest.mark.parametrize("roles", [(1, 2), (3, 3)])  # one set has the queries, or both have queries and gallery
def test_two_sets_that_share_ids_raise(compute_of, roles):
    with pytest.raises(ValueError, match=r"^RetrievalMetrics: .*40 of 40 ids"):
        compute_of(two_sets(with_noise, roles=roles))
    compute_of(two_sets(with_noise, offset=40, roles=roles))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_of_one_image_may_differ_by_rounding(dtype):
    """Also under a shorter dimension, where the same errors weigh more, and if a row is zero or has no role."""
    metrics = two_sets(rounded, roles=(3, 3), dtype=dtype)
    assert metrics.compute()["mAP"] == two_sets(lambda rows, _: rows, roles=(3, 3), dtype=dtype).compute()["mAP"]
    metrics = RetrievalMetrics(ks=(1,), dims=(1,))
    metrics.update(torch.tensor([[1e-4, 1.0], [0.0, 0.0], [1.0, 1.0]]), torch.zeros(3).long(), torch.arange(3))
    metrics.update(torch.tensor([[-1e-4, 1.0], [0.0, 0.0]]), torch.zeros(2).long(), torch.arange(2))
    for row in torch.eye(2):  # a placeholder of an image that could not be read
        metrics.update(row[None], torch.tensor([0]), torch.tensor([7]), torch.tensor([0]))
    assert metrics.compute()["R@1/1d"].isfinite()


@pytest.mark.refusal
def test_few_wrong_rows_among_repeated_images_are_found():
    """Whatever number of rows is compared at a time."""
    x, labels, ids = torch.randn(100, 8), torch.arange(100) // 5, torch.randperm(100)
    metrics = RetrievalMetrics()
    for copy in range(3):
        rows = x.clone()
        if copy == 2:
            rows[[20, 61]] = x[[61, 20]]
        metrics.update(rows, labels, ids)
    found = ", ".join(map(str, sorted(ids[[20, 61]].tolist())))
    with small_blocks(), pytest.raises(ValueError, match=rf"2 of 100 ids \({found}\)"):
        metrics.compute()


def test_post_processing_comes_before_ranking():
    """The gallery is augmented first. The queries are expanded with it, and know their own index in it."""
    seen = []

    def halve(gallery):
        seen.append(gallery.clone())
        return gallery.flip(0)

    def expand(queries, gallery, own):
        seen.append((queries, gallery, own))
        return queries.roll(1, 1)

    x, labels = normalize(torch.randn(12, 4)), torch.arange(12) % 3
    is_query = torch.arange(12) < 9
    metrics = RetrievalMetrics((1,), query_expansion=expand, database_augmentation=halve)
    metrics.update(x, labels, roles=is_query + 2 * (torch.arange(12) > 2))
    metrics.compute()
    gallery, (queries, augmented, own) = seen
    assert torch.equal(augmented, gallery.flip(0))
    assert len(gallery) == 9
    assert len(queries) == 9
    assert (own >= 0).sum() == 6
    torch.testing.assert_close(queries[own >= 0], gallery[own[own >= 0]])
