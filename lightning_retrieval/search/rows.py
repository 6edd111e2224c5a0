"""Rows of embeddings on their way into an index: checked, normalised and sampled, block by block.

Embeddings may be a tensor over a file, or the rows of a folder, that are larger than memory, so no function here copies
more than a block of rows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.checks import check_float, check_mapping, check_strings, check_tensor
from lightning_retrieval.ranking.similarity import normalize
from lightning_retrieval.search.folder_rows import FolderRows

BLOCK = 1 << 16  # rows that are normalised and passed to faiss at a time
OWNER = "RetrievalIndex"  # prefix of its error messages
SHOWN = 5  # invalid rows that an error message names

Rows = Float[Tensor, "rows dim"] | FolderRows


def normalized_blocks(embeddings: Rows) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """The L2-normalised rows, block by block, each block with the position of its first row."""
    for begin in range(0, len(embeddings), BLOCK):
        yield begin, normalized_rows(embeddings[begin : begin + BLOCK])


def normalized_rows(embeddings: Float[Tensor, "rows dim"]) -> NDArray[np.float32]:
    """The L2-normalised rows as an array for faiss."""
    rows: NDArray[np.float32] = normalize(embeddings.detach().cpu()).float().contiguous().numpy()
    return rows


def sample_rows(rows: int, most: int) -> Int[Tensor, " sampled"]:
    """Sorted positions of at most `most` rows; a sample is drawn with a fixed seed."""
    if rows <= most:
        return torch.arange(rows)
    sampled = np.random.default_rng(0).choice(rows, most, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(sampled))


def check_rows(owner: str, name: str, embeddings: Any, dim: int) -> None:
    """Raise unless `embeddings` is a floating-point tensor of shape (rows, dim), or `FolderRows` of this shape."""
    if not isinstance(embeddings, FolderRows):
        check_tensor(owner, name, embeddings)
    if len(embeddings.shape) != 2 or embeddings.shape[1] != dim:
        raise ValueError(
            f"{owner}: `{name}` must have shape (rows, {dim}), as the index has, got {tuple(embeddings.shape)}."
        )
    if not isinstance(embeddings, FolderRows):
        check_float(owner, name, embeddings)


def check_finite_rows(
    owner: str, name: str, embeddings: Rows, ids: NDArray[np.int64], paths: Sequence[str] | None = None
) -> None:
    """Raise if a row holds NaN or infinity; the message names the first such rows by their ids and paths."""
    invalid: list[int] = []
    for begin in range(0, len(embeddings), BLOCK):
        finite = torch.isfinite(embeddings[begin : begin + BLOCK]).all(1)
        positions = (~finite).nonzero()[:, 0] + begin
        invalid += positions.tolist()
    if not invalid:
        return
    shown = []
    for row in invalid[:SHOWN]:
        text = f"id {ids[row]}"
        if paths is not None:
            text += f" {paths[row]!r}"
        shown.append(text)
    if len(invalid) > SHOWN:
        shown.append("...")
    raise ValueError(
        f"{owner}: `{name}` must be finite, got NaN or inf in {len(invalid)} of {len(embeddings)} rows: "
        f"{', '.join(shown)}."
    )


def plain_values(owner: str, about: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values that are saved with an index; raise unless JSON can hold them."""
    if about is None:
        return {}
    check_mapping(owner, "about", about)
    try:
        json.dumps(dict(about))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{owner}: `about` must hold plain values only, since it is saved as JSON ({error}).") from None
    return dict(about)


def check_paths(owner: str, paths: Sequence[str], rows: int) -> None:
    """Raise unless there is one string for each row."""
    check_strings(owner, "paths", paths)
    if len(paths) != rows:
        raise ValueError(f"{owner}: `paths` must have one entry for each of {rows} rows, got {len(paths)}.")


def check_results(owner: str, k: int, rows: int) -> None:
    """Raise if more results of a query are asked for than the index has rows."""
    if k > rows:
        raise ValueError(
            f"{owner}: `k` must be at most the number of rows in the index, {rows}, got {k}; ask for fewer."
        )


def join_parameters(first: str, second: str) -> str:
    """Search parameters followed by others, either of which may be empty."""
    return ",".join(filter(None, (first, second)))
