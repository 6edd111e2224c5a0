"""Rows are divided into requests that are small enough."""

import numpy as np
import torch

from lightning_retrieval.search.milvus_store import id_batches, insertions


def test_requests_hold_all_rows_in_order_and_few_bytes(monkeypatch):
    monkeypatch.setattr("lightning_retrieval.search.rows.BLOCK", 100)
    monkeypatch.setattr("lightning_retrieval.search.milvus_store.BATCH_BYTES", 4 * 8 * 30)
    rows = torch.randn(250, 8)
    ids, paths = np.arange(250) ** 2, [f"{i}.jpg" for i in range(250)]
    requests = list(insertions(rows, ids, paths))
    assert list(map(len, requests)) == [30, 30, 30, 10] * 2 + [30, 20]
    inserted = [row for request in requests for row in request]
    assert [row["id"] for row in inserted] == ids.tolist()
    assert [row["path"] for row in inserted] == paths
    expected = rows / rows.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(np.stack([row["embedding"] for row in inserted]), expected, rtol=1e-6)
    monkeypatch.setattr("lightning_retrieval.search.milvus_store.BATCH_BYTES", 1)
    assert len(list(insertions(rows, ids, paths))) == 250  # at least one row


def test_batches_of_ids(monkeypatch):
    monkeypatch.setattr("lightning_retrieval.search.milvus_store.BATCH_IDS", 2)
    assert list(id_batches(np.arange(5))) == [[0, 1], [2, 3], [4]]
    assert list(id_batches(np.arange(0))) == []
