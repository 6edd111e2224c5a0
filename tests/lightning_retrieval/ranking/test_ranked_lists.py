"""Ranks of positives against loops: where positives are, and how the candidates that reach them are counted."""

import math

import numpy as np
import pytest
import torch

from lightning_retrieval.distributed import Shard
from lightning_retrieval.ranking import labels as labelled_lists
from lightning_retrieval.ranking import ranks
from lightning_retrieval.ranking.labels import LabelledLists, Role, check_nesting, finest, has_role
from lightning_retrieval.ranking.ranked_lists import positive_ranks
from lightning_retrieval.ranking.rows import Layout, ShardedRows, unsharded

# Largest fraction of scores that are counted one by one; above it, all are sorted.
PATHS = {"counted": 1.0, "sorted": -1.0, "default": ranks._MAX_COUNTED_FRACTION}


def ranked(queries, query_labels, gallery, gallery_labels, own, *, shard=0, num_shards=1, **cameras):
    """The ranks of one shard of the queries, each against the whole gallery."""
    lists = LabelledLists(query_labels, gallery_labels, own, **cameras)
    layout = Layout(len(queries), lists.block_rows, num_shards)
    first = sum(layout.sizes()[:shard])
    local = queries[layout.by_process()[first : first + layout.sizes()[shard]]]
    rows = ShardedRows(local, layout, Shard(shard, num_shards))
    return positive_ranks(rows, unsharded(gallery, lists.block_rows), lists)


def unit_rows(rows, dtype=torch.float32):
    """Rows of six coordinates, four of them +-1/2: unit length, and all scores multiples of 1/4, with many ties."""
    x = torch.zeros(rows, 6, dtype=dtype)
    for row in x:
        row[torch.randperm(6)[:4]] = torch.randint(0, 2, (4,)).to(dtype) - 0.5
    return x


def by_loops(queries, query_labels, gallery, gallery_labels, own):
    """{query: [(rank, rank among positives) of each positive, worst first]}"""
    quadrupled = [[int(4 * sum(a * b for a, b in zip(q, g))) for g in gallery.tolist()] for q in queries.tolist()]
    result = {}
    for query, scores in enumerate(quadrupled):
        listed = [g for g in range(len(gallery)) if g != own[query]]
        positives = [g for g in listed if gallery_labels[g] == query_labels[query]]
        pairs = [
            (sum(scores[g] >= scores[i] for g in listed), sum(scores[g] >= scores[i] for g in positives))
            for i in positives
        ]
        result[query] = sorted(pairs, reverse=True)
    return result


def as_dict(blocks):
    result = {}
    for block in blocks:
        for query, rank, among, level in zip(block.queries, block.rank, block.rank_among_positives, block.level):
            real = level > 0
            assert real.tolist() == sorted(real.tolist(), reverse=True)  # padding comes last
            assert int(query) not in result
            result[int(query)] = list(zip(rank[real].tolist(), among[real].tolist()))
    return result


def problem(queries=70, gallery=90, classes=4, dtype=torch.float32):
    gallery_labels = torch.randint(0, classes, (gallery,)).sort().values
    own = torch.where(torch.rand(queries) < 0.5, torch.randint(0, gallery, (queries,)), -1)
    query_labels = torch.where(own >= 0, gallery_labels[own], torch.randint(0, classes + 1, (queries,)))
    g, q = unit_rows(gallery, dtype), unit_rows(queries, dtype)
    q = torch.where((own >= 0)[:, None], g[own], q)
    return q, query_labels[:, None], g, gallery_labels[:, None], own


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 30])
@pytest.mark.parametrize("path", PATHS)
def test_against_loops(path, classes, dtype, monkeypatch):
    monkeypatch.setattr(ranks, "_MAX_COUNTED_FRACTION", PATHS[path])
    monkeypatch.setattr(
        labelled_lists, "_MAX_BLOCK_POSITIVES", 1
    )  # blocks of 64 queries: one whole block and a part of one
    given = problem(classes=classes, dtype=dtype)
    found = as_dict(ranked(*given))
    q, query_labels, g, gallery_labels, own = given
    assert found == by_loops(q, query_labels[:, 0].tolist(), g, gallery_labels[:, 0].tolist(), own.tolist())
    assert any(not pairs for pairs in found.values())  # queries without a positive were among them


def test_levels():
    """The number of shared levels of each positive; of positives that tie, the one with the most comes first."""
    gallery_labels = torch.tensor([[0, 0], [1, 0], [1, 0], [2, 1], [3, 1]])
    query_labels = torch.tensor([[1, 0], [2, 1], [9, 7]])
    gallery = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    own = torch.tensor([-1, -1, -1])
    (block,) = ranked(queries, query_labels, gallery, gallery_labels, own)
    assert block.level.tolist() == [[2, 2, 1], [2, 1, 0], [0, 0, 0]]
    assert block.rank[0].tolist() == [5, 3, 3]
    assert block.rank_among_positives[0].tolist() == [3, 2, 2]
    assert block.rank[1, :2].tolist() == [5, 2]


@pytest.mark.parametrize("num_shards", [2, 7])
def test_shards_together_are_the_whole(num_shards, monkeypatch):
    monkeypatch.setattr(labelled_lists, "_MAX_BLOCK_POSITIVES", 1)
    given = problem(queries=300)
    shards = [as_dict(ranked(*given, shard=shard, num_shards=num_shards)) for shard in range(num_shards)]
    assert sum(map(len, shards)) == 300
    together = {query: pairs for ranks_of_shard in shards for query, pairs in ranks_of_shard.items()}
    assert together == as_dict(ranked(*given))


@pytest.mark.parametrize(("block_positives", "rows"), [(1 << 22, 256), (128 * 90, 128), (1, 64)])
def test_size_of_the_blocks(block_positives, rows, monkeypatch):
    monkeypatch.setattr(labelled_lists, "_MAX_BLOCK_POSITIVES", block_positives)
    given = problem(queries=300, classes=1)  # up to 90 positives
    blocks = list(ranked(*given))
    assert [len(block.queries) for block in blocks[:-1]] == [rows] * (300 // rows)
    monkeypatch.undo()
    assert as_dict(blocks) == as_dict(ranked(*given))


@pytest.mark.parametrize(
    ("gallery", "dim", "dtype"),
    [(5, 3, torch.float64), (383, 512, torch.float32), (385, 37, torch.float32), (1000, 37, torch.float32)],
)
def test_equal_embeddings_have_equal_scores(gallery, dim, dtype):
    """Wherever they stand: all 1000 columns tie, the last ones too, which a product may reach by another kernel."""
    x = torch.nn.functional.normalize(torch.randn(1, dim, dtype=dtype))
    g = x.expand(gallery, dim).contiguous()
    labels = torch.arange(gallery) * 2 // gallery
    own = torch.arange(gallery)
    positives = (labels == 0).sum().item(), (labels == 1).sum().item()
    for query, pairs in as_dict(ranked(g, labels[:, None], g, labels[:, None], own)).items():
        among = positives[labels[query]] - 1
        assert pairs == [(gallery - 1, among)] * among


def ranks_without_same_camera(given, query_cameras, gallery_cameras):
    """{query: [(rank, number of shared levels) of each positive, worst first]}, one candidate at a time."""
    queries, query_labels, gallery, gallery_labels, own = given
    scores = (4 * queries @ gallery.T).round().tolist()
    result = {}
    for query, row in enumerate(scores):
        listed = []
        for image in range(len(gallery)):
            same_label = bool(query_labels[query, 0] == gallery_labels[image, 0])
            same_camera = bool(query_cameras[query] == gallery_cameras[image])
            if image != own[query] and not (same_label and same_camera):
                listed.append(image)
        pairs = []
        for image in listed:
            shared = int((query_labels[query] == gallery_labels[image]).sum())
            if shared > 0:
                pairs.append((sum(row[other] >= row[image] for other in listed), shared))
        result[query] = sorted(pairs, key=lambda pair: (-pair[0], -pair[1]))
    return result


@pytest.mark.parametrize(("path", "levels"), [("counted", 2), ("sorted", 1)])
def test_the_same_label_under_the_same_camera_is_not_in_the_list(path, levels, monkeypatch):
    monkeypatch.setattr(ranks, "_MAX_COUNTED_FRACTION", PATHS[path])
    monkeypatch.setattr(labelled_lists, "_MAX_BLOCK_POSITIVES", 1)
    queries, query_labels, gallery, gallery_labels, own = problem(classes=12)
    if levels == 2:
        query_labels = torch.cat([query_labels, query_labels // 3], 1)
        gallery_labels = torch.cat([gallery_labels, gallery_labels // 3], 1)
    given = (queries, query_labels, gallery, gallery_labels, own)
    gallery_cameras = torch.randint(0, 3, (len(gallery),)) - 1
    query_cameras = torch.where(own >= 0, gallery_cameras[own], torch.randint(0, 3, (len(queries),)) - 1)
    found = {}
    for block in ranked(*given, query_cameras=query_cameras, gallery_cameras=gallery_cameras):
        for query, rank, level in zip(block.queries.tolist(), block.rank, block.level):
            found[query] = list(zip(rank[level > 0].tolist(), level[level > 0].tolist()))
    assert found == ranks_without_same_camera(given, query_cameras, gallery_cameras)
    everything = ranks_without_same_camera(given, query_cameras, torch.full_like(gallery_cameras, 7))
    assert sum(map(len, found.values())) < sum(map(len, everything.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("width", "spread"), [(1, 1000), (40, 2)])
def test_count_at_least(spread, width, path, dtype, monkeypatch):
    monkeypatch.setattr(ranks, "_MAX_COUNTED_FRACTION", PATHS[path])
    scores = torch.randint(-spread, spread + 1, (7, 300)).to(dtype) / spread
    scores[2] *= 1e-40 if dtype == torch.float32 else 1e-310  # denormal numbers are in order too
    scores[3][scores[3] == 0] = -0.0
    scores[:, 250:] = -math.inf  # not in the list
    positives = scores[:, torch.randperm(250)[:width]].sort(1).values
    positives[3][positives[3] == 0] = 0.0  # ties with -0.0
    real = torch.tensor([0, 1, width, width, max(1, width // 2), width, width])
    positives = positives.masked_fill(torch.arange(width) >= real[:, None], math.inf).sort(1).values
    counts = ranks.count_at_least(scores.clone(), positives)
    for row in range(7):
        expected = [sum(s >= p for s in scores[row].tolist()) for p in positives[row, : real[row]].tolist()]
        assert counts[row, : real[row]].tolist() == expected


LABELS = torch.tensor([1, 1, 1, 4, 6, 6, 9])


def lists_of(query_labels, gallery_labels=LABELS, **cameras):
    nowhere = torch.full((len(query_labels),), -1)
    return LabelledLists(query_labels[:, None], gallery_labels[:, None], nowhere, **cameras)


def test_positives_against_a_loop():
    gallery = torch.stack([torch.tensor([0, 1, 1, 2, 3, 3, 4]), torch.tensor([0, 0, 0, 0, 1, 1, 2])], 1)
    queries = gallery[[1, 4, 6]]
    cameras = torch.tensor([0, 1, 0, 1, 0, 0, 1])
    own = torch.tensor([1, -1, 6])
    lists = LabelledLists(queries, gallery, own, query_cameras=torch.tensor([0, 1, 1]), gallery_cameras=cameras)
    found = lists.positives(torch.arange(3), 4)
    expected = []
    for query, (labels, camera, self_index) in enumerate(zip(queries, [0, 1, 1], own)):
        levels = {}
        for image in range(len(gallery)):
            same_camera = bool(gallery[image, 0] == labels[0]) and cameras[image] == camera
            if gallery[image, 1] == labels[1]:
                is_excluded = same_camera or image == self_index
                levels[image] = (0 if is_excluded else int((gallery[image] == labels).sum()), is_excluded)
        expected.append(levels)
        real = found.column[query] < min(levels) + len(levels)
        columns = found.column[query][real].tolist()
        states = zip(found.level[query][real].tolist(), found.is_excluded[query][real].tolist())
        assert dict(zip(columns, states)) == levels
        assert found.level[query][~real].tolist() == [0] * int((~real).sum())
    assert len(expected[0]) == 4


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


def test_values_that_data_sets_and_users_store():
    assert (int(Role.JUNK), int(Role.QUERY), int(Role.GALLERY), int(Role.BOTH)) == (0, 1, 2, 3)
    assert Role.QUERY | Role.GALLERY == Role.BOTH
    assert np.array([Role.BOTH, Role.JUNK], dtype=np.uint8).tolist() == [3, 0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_has_role(dtype):
    roles = torch.arange(4).to(dtype)
    assert has_role(roles, Role.QUERY).tolist() == [False, True, False, True]
    assert has_role(roles, Role.GALLERY).tolist() == [False, False, True, True]
    assert has_role(roles, Role.BOTH).tolist() == [False, True, True, True]
