"""RevisitedMetrics against golden numbers, the official protocol in a plain loop, and what ties and holes must give."""

import json
import math
from pathlib import Path

import pytest
import torch

from lightning_retrieval.metrics import RevisitedMetrics
from tests.lightning_retrieval.blocks import small_blocks
from tests.lightning_retrieval.metrics.helpers import LargestTensor, numbers, quarters

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "revisited.json").read_text())["cases"][0]
SETUPS = ("easy", "medium", "hard")


def metrics_of(lists, first_query, **settings):
    """A metric whose lists are those of the query with this id and of those after it."""
    return RevisitedMetrics(*(dict(enumerate(of_all, first_query)) for of_all in lists), **settings)


def compute(gallery, queries, easy, hard, junk, ks=(1, 5, 10), **settings):
    """The metrics of a gallery with the ids 0, 1, ... and queries with those after it; the lists are of each query."""
    metrics = metrics_of((easy, hard, junk), len(gallery), ks=ks, **settings)
    rows = torch.cat([gallery, queries])
    for part in torch.randperm(len(rows)).split(100):  # whatever the order in which rows come
        metrics.update(rows[part], torch.zeros_like(part), part, torch.where(part >= len(gallery), 1, 2))
    return numbers(metrics.compute())


def official(scores, ok, ignored, ks):
    """The protocol for one query as the official code has it: sort, take junk out, sum trapezoids."""
    ranked = sorted(range(len(scores)), key=lambda image: -scores[image])
    kept = [image for image in ranked if image not in ignored]
    positions = [position for position, image in enumerate(kept) if image in ok]
    values = [0.0]
    for number, position in enumerate(positions):
        before = 1.0 if position == 0 else number / position
        values[0] += (before + (number + 1) / (position + 1)) / 2 / len(ok)
    for k in ks:
        lowered = min(k, max(position + 1 for position in positions))
        values.append(sum(position + 1 <= lowered for position in positions) / lowered)
    return values


def with_ties(scores, ok, ignored, ks):
    """The same where scores may be equal and images missing: every image that scores as high counts."""
    kept = [image for image in range(len(scores)) if image not in ignored]
    found = [image for image in ok if image < len(scores)]
    rank = {p: sum(scores[image] >= scores[p] for image in kept) for p in found}
    among = {p: sum(scores[image] >= scores[p] for image in found) for p in found}
    values = [0.0]
    for p in found:
        before = 1.0 if rank[p] == 1 else (among[p] - 1) / (rank[p] - 1)
        values[0] += (before + among[p] / rank[p]) / 2 / len(ok)
    for k in ks:
        lowered = min([k, max(rank.values(), default=1)])
        values.append(sum(r <= lowered for r in rank.values()) / lowered)
    return values


def by_loops(protocol, scores, easy, hard, junk, ks=(1, 5, 10)):
    results = {}
    for setup in SETUPS:
        found = []
        for s, e, h, j in zip(scores, easy, hard, junk, strict=True):
            ok = {"easy": e, "medium": e + h, "hard": h}[setup]
            if ok:
                found.append(protocol(s, ok, [i for i in e + h + j if i not in ok], ks))
        names = [f"mAP/{setup}", *(f"mP@{k}/{setup}" for k in ks)]
        results |= {name: sum(v[i] for v in found) / len(found) for i, name in enumerate(names)}
        results[f"skipped_queries/{setup}"] = len(scores) - len(found)
    return {"mAP": results["mAP/medium"], **results}


def draw_lists(queries, images, seed=0):
    """Disjoint lists of each query; the first has nothing easy, the second nothing hard, the third no junk."""
    torch.manual_seed(seed)
    lists = [], [], []
    for query in range(queries):
        order = torch.randperm(images).tolist()
        sizes = [[0, 4, 3], [5, 0, 2], [2, 3, 0]][query] if query < 3 else torch.randint(0, 7, (3,)).tolist()
        for of_kind, size in zip(lists, sizes, strict=True):
            of_kind.append([order.pop() for _ in range(size)])
    return lists


def on_sphere(scores):
    """Embeddings whose cosines are these scores up to one factor."""
    queries = len(scores)
    rest = (queries - scores.square().sum(0)).sqrt()
    return torch.cat([scores, rest[None]]).T, torch.eye(queries, queries + 1, dtype=scores.dtype)


def test_golden_numbers():
    inputs, expected = GOLDEN["inputs"], GOLDEN["expected"]
    gallery, queries = on_sphere(torch.tensor(inputs["scores"], dtype=torch.float64))
    found = compute(gallery, queries, inputs["easy"], inputs["hard"], inputs["junk"])
    for setup in SETUPS:
        assert found[f"mAP/{setup}"] == pytest.approx(expected[setup]["map"], abs=1e-14)
        for k, value in expected[setup]["mp_at_k"].items():
            assert found[f"mP@{k}/{setup}"] == pytest.approx(value, abs=1e-14)
        assert found[f"skipped_queries/{setup}"] == expected[setup]["ap"].count(None)
    assert found["mAP"] == found["mAP/medium"]
    assert found["mAP"] != pytest.approx(expected["medium"]["map_finite_sum"], abs=1e-3)


def test_golden_numbers_of_each_query():
    inputs, expected = GOLDEN["inputs"], GOLDEN["expected"]
    gallery, queries = on_sphere(torch.tensor(inputs["scores"], dtype=torch.float64))
    for query in range(len(queries)):
        lists = [[inputs[kind][query]] for kind in ("easy", "hard", "junk")]
        if not all(lists[0] + lists[1]):
            continue
        found = compute(gallery, queries[query : query + 1], *lists)
        for setup in SETUPS:
            assert found[f"mAP/{setup}"] == pytest.approx(expected[setup]["ap"][query], abs=1e-14)
            precision = [found[f"mP@{k}/{setup}"] for k in (1, 5, 10)]
            assert precision == pytest.approx(expected[setup]["p_at_k"][query], abs=1e-14)


@pytest.mark.parametrize(("images", "dtype", "on_cpu"), [(40, torch.float64, False), (900, torch.float32, True)])
def test_official_protocol_in_a_loop(images, dtype, on_cpu):
    gallery, queries = torch.randn(images, 5, dtype=dtype), torch.randn(9, 5, dtype=dtype)
    lists = draw_lists(9, images)
    unit = torch.nn.functional.normalize
    scores = (unit(queries) @ unit(gallery).T).tolist()
    with small_blocks():
        found = compute(gallery, queries, *lists, ks=(1, 3, 100), embeddings_on_cpu=on_cpu)
    expected = by_loops(official, scores, *lists, ks=(1, 3, 100))
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, abs=1e-12)


def test_ties_count_against_the_model():
    gallery, queries = quarters(900), quarters(140)
    lists = draw_lists(140, 900)
    scores = (queries @ gallery.T).tolist()
    with small_blocks():
        found = compute(gallery, queries, *lists)
    assert found == pytest.approx(by_loops(with_ties, scores, *lists), abs=1e-12)


def test_positives_that_the_gallery_lacks_are_never_found():
    gallery, queries = quarters(50), quarters(4)
    lists = draw_lists(4, 60)
    assert any(image >= 50 for of_query in lists[0] + lists[1] for image in of_query)
    metrics = metrics_of(lists, 100)
    metrics.update(gallery, torch.zeros(50).long(), torch.arange(50), torch.full((50,), 2))
    metrics.update(queries, torch.zeros(4).long(), torch.arange(100, 104), torch.full((4,), 1))
    expected = by_loops(with_ties, (queries @ gallery.T).tolist(), *lists)
    assert numbers(metrics.compute()) == pytest.approx(expected, abs=1e-12)


def test_queries_that_are_missing_are_not_evaluated():
    """Their images could not be read, of which the dataset has warned."""
    gallery, queries = torch.randn(30, 4), torch.randn(6, 4)
    lists = draw_lists(6, 30)
    metrics, kept = metrics_of(lists, 30), [0, 2, 3, 5]
    ids = torch.tensor([*range(30), *(30 + query for query in kept)])
    roles = torch.where(ids >= 30, 1, 2)
    metrics.update(torch.cat([gallery, queries[kept]]), torch.zeros_like(ids), ids, roles)
    expected = compute(gallery, queries[kept], *([of_all[q] for q in kept] for of_all in lists))
    assert numbers(metrics.compute()) == expected


def test_a_query_is_not_in_its_own_list():
    """Labels do not matter."""
    rows = quarters(40)
    lists = draw_lists(40, 40)
    for of_kind in lists:
        of_kind[:] = [[image for image in images if image != query] for query, images in enumerate(of_kind)]
    metrics = metrics_of(lists, 0)
    metrics.update(rows, torch.randint(-9, 9, (40,)), torch.arange(40))
    scores = (rows @ rows.T).fill_diagonal_(-9).tolist()
    assert numbers(metrics.compute()) == pytest.approx(by_loops(with_ties, scores, *lists), abs=1e-12)


def test_setups_without_positives_are_nan():
    with pytest.warns(UserWarning, match="RevisitedMetrics: .*easy"):
        found = compute(torch.randn(5, 3), torch.randn(2, 3), [[], []], [[1], []], [[], [2]])
    assert math.isnan(found["mAP/easy"])
    assert math.isnan(found["mP@5/easy"])
    assert (found["skipped_queries/easy"], found["skipped_queries/medium"], found["skipped_queries/hard"]) == (2, 1, 1)
    assert 0 < found["mAP"] == found["mAP/hard"] <= 1


@pytest.mark.parametrize(("images", "queries"), [(0, 2), (5, 0)])
def test_an_empty_gallery_or_no_query_is_nan(images, queries):
    with pytest.warns(UserWarning, match="RevisitedMetrics: .*easy and medium and hard"):
        found = compute(torch.randn(images, 3), torch.randn(queries, 3), *([[9 + i]] * queries for i in range(3)))
    assert math.isnan(found["mAP"])
    assert found["skipped_queries/medium"] == queries


def test_memory_does_not_grow_with_queries_times_images():
    gallery, queries = torch.randn(20_000, 4), torch.randn(60, 4)
    lists = draw_lists(60, 20_000)
    with small_blocks(), LargestTensor() as largest:
        compute(gallery, queries, *lists)
    assert largest.elements <= 20_100 * 4  # the embeddings; a table of all scores has 1,200,000
