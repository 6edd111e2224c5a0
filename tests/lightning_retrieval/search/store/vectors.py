"""Random vectors, their exact ranking by NumPy, indexes of them, and the memory that they take."""

import functools
import pickle
import re
import threading
from pathlib import Path

import numpy as np
import torch

from lightning_retrieval import RetrievalIndex

ROWS, DIM = 600, 16


def vectors(rows=ROWS, dim=DIM, seed=0):
    """Vectors that are not normalised, because the index does that."""
    return 3 * torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


def exact(gallery, queries, k):
    """Similarities and positions of the k nearest, in float64, by NumPy alone."""
    a, b = (x.double().numpy() for x in (queries, gallery))
    scores = (a / np.linalg.norm(a, axis=1)[:, None]) @ (b / np.linalg.norm(b, axis=1)[:, None]).T
    positions = np.argsort(-scores, axis=1)[:, :k]
    return np.take_along_axis(scores, positions, 1), positions


def built(factory="Flat", rows=ROWS, **settings):
    """An index of these vectors with descending ids and non-ASCII paths; each is trained only once."""
    return pickle.loads(_pickled(factory, rows, **settings))


@functools.cache
def _pickled(factory, rows, **settings):
    index = RetrievalIndex(DIM, factory, **settings)
    index.add(vectors(rows), ids=1000 - torch.arange(rows), paths=[f"é/{i}.jpg" for i in range(rows)])
    return pickle.dumps(index)


def memory(field):
    """A size that Linux reports of this process, in bytes; `RssAnon` is memory that no file backs."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def search_while_edited(index, edits):
    """Search in three threads while this one removes rows and adds them again; the errors and wrong rows they meet.

    The index is of `vectors()`, with the row numbers as ids, in the paths and in the column `row`.
    """
    wrong, searches, is_over = [], [], threading.Event()

    def search(seed):
        queries = vectors(8, seed=seed)
        while not is_over.is_set():
            try:
                _, ids, paths, metadata = index.search_with_metadata(queries, index.request(20))
                expected = [["" if row < 0 else f"{row}.jpg" for row in rows] for rows in ids.tolist()]
                expected_rows = [[{} if row < 0 else {"row": row} for row in rows] for rows in ids.tolist()]
                if (paths, metadata) != (expected, expected_rows):
                    wrong.append((paths, metadata))
            except Exception as error:
                wrong.append(error)
            searches.append(seed)

    threads = [threading.Thread(target=search, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    try:
        for edit in range(edits):
            rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(edit))[:200]
            index.remove(rows)
            index.add(vectors()[rows], rows, [f"{row}.jpg" for row in rows.tolist()], columns={"row": rows})
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert len(searches) >= edits / 10, "the searches must run between the edits"
    return wrong
