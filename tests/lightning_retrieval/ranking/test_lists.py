"""Lists against loops, whichever way they are found: masks, parts of masks, counts, and the entries of blocks."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_retrieval import GalleryOnly, OtherCamera, Relevance, RetrievalMetrics, SharedTags
from lightning_retrieval.ranking import entries
from lightning_retrieval.ranking.lists import GivenLists, Lists
from lightning_retrieval.ranking.rows import Rows
from tests.lightning_retrieval.relevance_rules import NearInTime, gallery_only, near_in_time, shared_tags


@dataclass
class Case:
    """A rule, what it reads, and the level of relevance and the candidacy of a pair of columns."""

    rule: Relevance | None
    columns: int
    pair: object
    values: tuple[int, int] = (0, 3)
    levels: int = 1


def same_labels(query, reference):
    return sum(a == b for a, b in zip(query, reference)), True


def other_camera(query, reference):
    is_candidate = query[0] != reference[0] or query[-1] != reference[-1]
    return is_candidate * sum(a == b for a, b in zip(query[:-1], reference[:-1])), is_candidate


CASES = {
    "labels": Case(None, 1, same_labels, (-2, 2)),
    "levels": Case(None, 3, same_labels, (0, 11), levels=3),
    "cameras": Case(OtherCamera(), 2, other_camera),
    "cameras and levels": Case(OtherCamera(), 3, other_camera, (0, 5), levels=2),
    "tags": Case(SharedTags(), 2, shared_tags(1), (-1, 4)),
    "two tags": Case(SharedTags(2), 2, shared_tags(2), (-1, 3)),
    "gallery only": Case(GalleryOnly(), 2, gallery_only, (0, 3)),
    "of one's own": Case(NearInTime(), 2, near_in_time, (0, 5)),
}


def columns_of(case, data, rows):
    """Random columns; labels of coarser levels follow from the finest label, so that they nest."""
    row = st.lists(st.integers(*case.values), min_size=case.columns, max_size=case.columns)
    drawn = data.draw(st.lists(row, min_size=rows, max_size=rows))
    for columns in drawn:
        for level in range(1, case.levels):
            columns[level] = columns[level - 1] // 2
    return torch.tensor(drawn, dtype=torch.int64).view(rows, case.columns)


def by_loops(case, queries, references, is_self):
    """{query: {reference: level}} of relevant candidates, and {query: candidates}, pair by pair."""
    levels, candidates = {}, {}
    for q, query in enumerate(queries.tolist()):
        pairs = {r: case.pair(query, reference) for r, reference in enumerate(references.tolist())}
        candidates[q] = [r for r, (_, listed) in pairs.items() if listed and not is_self(q, r)]
        levels[q] = {r: int(pairs[r][0]) for r in candidates[q] if pairs[r][0]}
    return levels, candidates


def of_masks(relevant, candidate):
    levels, candidates = {}, {}
    for q, (of_query, listed) in enumerate(zip(relevant.tolist(), candidate.tolist())):
        levels[q] = {r: int(level) for r, level in enumerate(of_query) if level}
        candidates[q] = [r for r, is_listed in enumerate(listed) if is_listed]
    return levels, candidates


def of_entries(found, queries):
    """{query: {reference: level}} of the positives, and {query: images excluded from its list}, from the blocks."""
    levels, excluded = {}, {}
    blocks = torch.arange(queries).split(found.block_rows)
    for block, extent in zip(blocks, found.extents(), strict=True):
        listed = found.of_block(block, extent.width)
        columns, positives = listed.columns(), listed.positives()
        assert columns.shape[1] == listed.width <= max(1, found.most)
        for row, q in enumerate(block.tolist()):
            level = dict(zip(columns[row].tolist(), positives.level[row].tolist()))
            levels[q] = {r: int(shared) for r, shared in level.items() if shared}
            excluded[q] = sorted(columns[row][positives.is_excluded[row]].tolist())
            assert all(extent.begin <= r < extent.end for r in levels[q])
            assert listed.excludes_several or len(excluded[q]) <= 1
    return levels, excluded


def sort_by_label(case, columns):
    """In the order that entries need: by the coarsest label."""
    return columns[columns[:, case.levels - 1].argsort(stable=True)]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_entries_and_masks_of_an_evaluation_are_those_of_loops(name, data):
    """Queries that are in the gallery, and others; masks of a few queries and images, too."""
    case = CASES[name]
    gallery = sort_by_label(case, columns_of(case, data, data.draw(st.integers(1, 12))))
    positions = st.integers(-1, len(gallery) - 1)
    own = torch.tensor(data.draw(st.lists(positions, min_size=1, max_size=9)))
    queries = torch.where(own[:, None] >= 0, gallery[own], columns_of(case, data, len(own)))
    found = Lists(Rows(queries), Rows(gallery), case.rule, self_index=own)
    every = torch.arange(len(queries))
    levels, candidates = by_loops(case, queries, gallery, lambda q, r: own[q] == r)
    masks = found.masks(every)
    assert of_masks(*masks) == (levels, candidates)
    assert found.levels == case.levels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "_BLOCK_ROWS", (4,))
        patch.setattr(entries, "_MAX_PAIRS", 20)
        positives, excluded = of_entries(entries.entries_of(found), len(queries))
    assert positives == levels
    for q, images in excluded.items():
        assert {*images} == set(range(len(gallery))) - {*candidates[q]}
    rows, images = every[::2], torch.arange(len(gallery)).flip(0)[:3]
    for of_some, of_all in zip(found.masks(rows, images), masks):
        assert torch.equal(of_some, of_all[rows][:, images])


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_masks_and_counts_of_a_batch_are_those_of_loops(name, data):
    """Labels and ids repeat, and references have some that no query has."""
    case, has_ids = CASES[name], data.draw(st.booleans())
    include_self, self_is_positive = data.draw(st.sampled_from([(False, True), (True, True), (True, False)]))
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 9), min_size=18, max_size=18)))
    rows, others = data.draw(st.integers(1, 9)), data.draw(st.none() | st.integers(1, 9))
    queries = Rows(columns_of(case, data, rows), ids[:rows] if has_ids else None)
    references = queries
    if others is not None:
        references = Rows(columns_of(case, data, others), ids[-others:] if has_ids else None)

    def is_self(q, r):
        if queries is references and q == r:
            return True
        return has_ids and bool(queries.ids[q] == references.ids[r])

    found, every = Lists(queries, references, case.rule), torch.arange(rows)
    levels, candidates = by_loops(
        case, queries.labels, references.labels, lambda q, r: not include_self and is_self(q, r)
    )
    if not self_is_positive:
        levels = {q: {r: level for r, level in of_query.items() if not is_self(q, r)} for q, of_query in levels.items()}
    given_settings = {"include_self": include_self, "self_is_positive": self_is_positive}
    assert of_masks(*found.masks(every, **given_settings)) == (levels, candidates)
    assert found.can_be_sorted == (case.rule is None)
    if found.can_be_sorted:
        assert found.sorted_counts(**given_settings).tolist() == [len(levels[q]) for q in range(rows)]
    finest = {q: {r: 1 for r, level in of_query.items() if level == case.levels} for q, of_query in levels.items()}
    assert of_masks(*found.finest.masks(every, **given_settings)) == (finest, candidates)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_given_lists_are_their_masks(data):
    bits = st.lists(st.booleans(), min_size=12, max_size=12)
    relevant, candidate = (torch.tensor(data.draw(bits)).view(3, 4) for _ in range(2))
    rows = torch.tensor([2, 0])
    for of_lists in (None, candidate):
        expected = candidate if of_lists is not None else torch.ones(3, 4, dtype=torch.bool)
        found = GivenLists(relevant, of_lists)
        assert torch.equal(found.masks(rows)[0], (relevant & expected)[rows])
        assert torch.equal(found.masks(rows)[1], expected[rows])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_lists_of_metrics_leave_out_roles_and_join_instances(data):
    """Each instance is one image; junk and images of another role are in no list."""
    instances = torch.arange(12) // 2
    of_instance = st.lists(st.integers(0, 3), min_size=6, max_size=6)
    labels, roles = (torch.tensor(data.draw(of_instance))[instances] for _ in range(2))
    metrics = RetrievalMetrics((1,))
    metrics.update(torch.randn(12, 3), labels, torch.arange(12), roles, instances)
    ranked = metrics.ranking_input(metrics.gather()[0])
    queries, gallery = ranked.query_ids.tolist(), ranked.gallery_ids.tolist()
    assert sorted(queries) == [i for i in range(0, 12, 2) if roles[i] & 1]
    assert sorted(gallery) == [i for i in range(0, 12, 2) if roles[i] & 2]
    if queries and gallery:
        relevant, candidate = ranked.lists.masks(torch.arange(len(queries)))
        for row, q in enumerate(queries):
            assert [g for g, listed in zip(gallery, candidate[row]) if listed] == [g for g in gallery if g != q]
            right = [g for g, is_right in zip(gallery, relevant[row]) if is_right]
            assert right == [g for g in gallery if g != q and labels[g] == labels[q]]


@pytest.mark.refusal
def test_entries_need_the_index_of_each_query():
    rows = Rows(torch.tensor([3, 3]))
    with pytest.raises(ValueError, match=r"^Entries: `lists` must have a `self_index`, got None\."):
        entries.entries_of(Lists(rows, rows))
