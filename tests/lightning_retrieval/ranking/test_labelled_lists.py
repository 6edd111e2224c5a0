"""Where the positives of blocks of queries are, and which images are not in a list, against loops."""

import pytest
import torch

from lightning_retrieval.ranking import labels as labelled_lists
from lightning_retrieval.ranking.labels import LabelledLists

LABELS = torch.tensor([1, 1, 1, 4, 6, 6, 9])


def lists_of(query_labels, gallery_labels=LABELS, **cameras):
    nowhere = torch.full((len(query_labels),), -1)
    return LabelledLists(query_labels[:, None], gallery_labels[:, None], nowhere, **cameras)


def test_extents_of_blocks():
    """Blocks of 64 queries: of the labels 6 and 1, and one query whose label the gallery does not have."""
    labels = torch.tensor([6] * 40 + [1] * 24 + [5])
    lists = lists_of(labels)
    lists.__dict__["block_rows"] = 64
    assert lists.extents() == [(0, 6, 3), (4, 4, 1)]


@pytest.mark.parametrize(("positives", "rows"), [(1 << 22, 256), (3 * 128, 128), (1, 64)])
def test_rows_of_a_block(positives, rows, monkeypatch):
    monkeypatch.setattr(labelled_lists, "_MAX_BLOCK_POSITIVES", positives)
    lists = lists_of(LABELS)
    assert lists.most_positives == 3
    assert lists.block_rows == rows


def test_no_queries():
    lists = lists_of(LABELS[:0])
    assert lists.most_positives == 0
    assert lists.block_rows == 256


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
