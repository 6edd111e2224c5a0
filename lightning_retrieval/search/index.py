"""An index of embeddings to search in, over faiss: exact, or approximate by a factory string.

Embeddings are put on the unit sphere, so that faiss' inner product is the cosine similarity that losses and metrics
rank by. Johnson, Douze, Jegou, "Billion-scale similarity search with GPUs" (IEEE Transactions on Big Data, 2021) is
faiss' paper; its factory strings are explained at https://github.com/facebookresearch/faiss/wiki/The-index-factory.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.checks import check_integer, check_integers, check_tensor
from lightning_retrieval.ranking.similarity import normalize
from lightning_retrieval.search.packed_strings import PackedStrings
from lightning_retrieval.search.storage import read_folder, write_folder

BLOCK = 1 << 16  # rows that are normalised and handed to faiss at a time
RECALL_AT, RECALL_QUERIES = 10, 256
_PER_CENTROID = 256  # rows that faiss' k-means looks at for each centroid; it leaves out what is beyond
WHO = "RetrievalIndex"


class RetrievalIndex:
    """Embeddings with ids and, where there are any, paths: add, search, remove, save and load.

    Args:
        dim: D, the length of an embedding, >= 1.
        factory: faiss' factory string: `"Flat"` is exact; `"IVF1024,Flat"`, `"IVF1024,PQ16"`, `"HNSW32"` and so on are
            not, and are faster or smaller. Ids are kept with all of them, without `IDMap`.
        parameters: of the search, in faiss' words: `"nprobe=16"` for IVF (of itself it looks into one list),
            `"efSearch=64"` for HNSW.
        shards: parts that the rows are dealt out to, >= 1, each a file and a faiss index of its own, searched side by
            side (faiss' `IndexShards`).
        about: plain values that are saved with the index, such as the checkpoint that the embeddings are of.

    Raises:
        ValueError: if a number is below 1, or faiss does not know the factory string, has no inner products for it, or
            does not know a parameter.
        TypeError: if a number is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval import RetrievalIndex
        >>> index = RetrievalIndex(dim=4)
        >>> index.add(torch.eye(4), ids=torch.tensor([5, 6, 7, 8]), paths=["a.jpg", "b.jpg", "c.jpg", "d.jpg"])
        >>> similarities, ids = index.search(torch.tensor([[0.0, 3.0, 0.0, 4.0]]), k=2)
        >>> similarities, ids, index.paths(ids[0])
        (tensor([[0.8000, 0.6000]]), tensor([[8, 6]]), ['d.jpg', 'b.jpg'])
        >>> index.save("birds.index")
        >>> len(RetrievalIndex.load("birds.index", mapped=True))
        4

    Cost:
        `docs/scaling.md` has the bytes of a vector and the time of a search by factory string.

    Relations:
        `lightning-retrieval index` and `search` do this with the images of a folder. Metrics need no index:
        `RetrievalMetrics` ranks exactly. `faiss_indexes` are faiss' own, for what is not offered here.
    """

    def __init__(
        self,
        dim: int,
        factory: str = "Flat",
        *,
        parameters: str = "",
        shards: int = 1,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.dim = check_integer(WHO, "dim", dim, least=1)
        self.factory = factory
        self.parameters = parameters
        self.shards = check_integer(WHO, "shards", shards, least=1)
        self.about = dict(about or {})
        self.recall: float | None = None
        """Recall@10 against exact search, see `add`; None for an exact index."""
        self.mapped = False
        """Whether the vectors lie in files that are mapped into memory, so that nothing can be changed."""
        self.faiss_indexes = [self._new() for _ in range(shards)]
        self._ids: NDArray[np.int64] = np.zeros(0, np.int64)  # sorted
        self._paths = PackedStrings([])  # in the order of the ids

    def __len__(self) -> int:
        """How many rows the index holds."""
        return len(self._ids)

    @property
    def ids(self) -> Int[Tensor, " rows"]:
        """The ids of all rows, sorted."""
        return torch.from_numpy(np.array(self._ids))

    def add(
        self,
        embeddings: Float[Tensor, "rows dim"],
        ids: Int[Tensor, " rows"] | None = None,
        paths: Sequence[str] | None = None,
    ) -> None:
        """Add rows.

        The first rows train an index that has to be trained, so let them be many and of all kinds; and on 256 of them
        `recall` is measured: the share of the 10 nearest others, by exact search, that the index finds among its own
        10. More rows than fit into memory can come at once as a tensor over a file, see `torch.from_file`.

        Args:
            embeddings: floating point, on any device, of any length.
            ids: one integer >= 0 for each row, which none in the index has; where None, those after the largest.
            paths: one string for each row, or None.

        Raises:
            ValueError: if shapes do not fit, an embedding is not finite, an id is negative or there already, there are
                too few rows to train with, faiss refuses rows, or the index is memory-mapped.
            TypeError: if embeddings are not floating point, or ids not integers.
        """
        self._refuse_mapped("add to")
        self._check_embeddings("embeddings", embeddings)
        rows = len(embeddings)
        new = self._new_ids(ids, rows)
        if paths is not None and len(paths) != rows:
            raise ValueError(f"{WHO}: `paths` must have one entry for each of {rows} rows, got {len(paths)}.")
        self._check_finite(embeddings, new, paths)
        first = len(self) == 0 and rows > 0
        if not self.faiss_indexes[0].is_trained:
            self._train(embeddings)
        try:
            for begin, block in _blocks(embeddings):
                emptiest = sorted(self.faiss_indexes, key=lambda index: index.ntotal)
                for index, part in zip(emptiest, np.array_split(np.arange(len(block)), self.shards)):
                    index.add_with_ids(block[part], new[begin + part])
        except RuntimeError as error:
            if first:
                self.faiss_indexes = [self._new() for _ in range(self.shards)]
            raise ValueError(
                f"{WHO}: {rows} rows cannot be added to an index of {self.factory!r} that holds {len(self)} "
                f"({_reason(error)}); take another factory, such as Flat or HNSW32."
            ) from None
        every = np.concatenate([self._ids, new])
        order = np.argsort(every, kind="stable")
        self._paths = self._paths.concatenate(PackedStrings([""] * rows if paths is None else paths))[order]
        self._ids = every[order]
        if first and self.factory != "Flat":
            self.recall = self._measured_recall(embeddings, new)

    def search(
        self, queries: Float[Tensor, "query dim"], k: int
    ) -> tuple[Float[Tensor, "query k"], Int[Tensor, "query k"]]:
        """The k nearest rows of each query, nearest first.

        Args:
            queries: embeddings, floating point, on any device, of any length.
            k: from 1 to the number of rows.

        Returns:
            The cosine similarities, as exact as the index is, and the ids. Where an approximate index finds fewer than
            k rows, -inf and -1 stand for the rest.

        Raises:
            ValueError: if shapes do not fit, a query is not finite, or `k` is out of its range.
            TypeError: if queries are not floating point, or `k` is not an integer.
        """
        self._check_embeddings("queries", queries)
        self._check_finite(queries, np.arange(len(queries)), None)
        check_integer(WHO, "k", k, least=1)
        if k > len(self):
            raise ValueError(
                f"{WHO}: `k` must be at most the number of rows in the index, {len(self)}, got {k}; ask for fewer."
            )
        if self.shards == 1:
            searched = self.faiss_indexes[0]
        else:
            searched = _faiss().IndexShards(self.dim, True, False)  # threads; ids as they are
            for index in self.faiss_indexes:
                searched.add_shard(index)
        found = [searched.search(block, k) for _, block in _blocks(queries)]
        similarities = np.concatenate([np.zeros((0, k), np.float32), *(values for values, _ in found)])
        ids = np.concatenate([np.zeros((0, k), np.int64), *(rows for _, rows in found)])
        similarities[ids < 0] = -np.inf
        return torch.from_numpy(similarities), torch.from_numpy(ids)

    def set_parameters(self, parameters: str) -> None:
        """Search with other parameters from now on, also where the index is memory-mapped.

        Args:
            parameters: in faiss' words, as for the constructor; those not named stay. So does `recall`, which was
                measured with those of before.

        Raises:
            ValueError: if faiss does not know a parameter.
        """
        self._set(self._new(), parameters)  # refused before anything is changed
        for index in self.faiss_indexes:
            self._set(index, parameters)
        self.parameters = ",".join(filter(None, [self.parameters, parameters]))

    def remove(self, ids: Int[Tensor, " rows"]) -> None:
        """Take rows out, ids and paths with them.

        Args:
            ids: of the rows; one that comes twice counts once.

        Raises:
            ValueError: if an id is not in the index, the index is memory-mapped, or faiss cannot take rows out of this
                kind of index, such as HNSW.
            TypeError: if they are not integers.
        """
        self._refuse_mapped("remove from")
        check_integers(WHO, "ids", ids, len(ids), "ids")
        gone = np.unique(ids.cpu().numpy().astype(np.int64))
        rows = self._rows(gone)
        faiss = _faiss()
        try:
            for index in self.faiss_indexes:
                index.remove_ids(faiss.IDSelectorBatch(gone))
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            raise ValueError(
                f"{WHO}: rows cannot be removed from an index of {self.factory!r}, which faiss does not offer; build "
                "it again without them, or take Flat or IVF."
            ) from None
        keep = np.delete(np.arange(len(self)), rows)
        self._ids, self._paths = self._ids[keep], self._paths[keep]

    def paths(self, ids: Int[Tensor, " rows"]) -> list[str]:
        """The paths of rows, by their ids; "" where none was given.

        Args:
            ids: in any order.

        Raises:
            ValueError: if an id is not in the index.
        """
        check_integers(WHO, "ids", ids, len(ids), "ids")
        return [self._paths[row] for row in self._rows(ids.cpu().numpy()).tolist()]

    def save(self, folder: str | Path) -> None:
        """Write the index into a folder, new or holding an index, which stays whole until the new one is.

        Args:
            folder: vectors, ids, paths and a manifest with the version of the format and all checksums lie there.

        Raises:
            ValueError: if the folder holds anything else, another process writes to it, or the index is memory-mapped.
        """
        self._refuse_mapped("save")
        faiss = _faiss()
        arrays = {"ids.npy": self._ids, "paths.npy": self._paths.data, "path-ends.npy": self._paths.ends}
        writers = {name: lambda path, array=array: np.save(path, array) for name, array in arrays.items()}
        writers |= {
            f"vectors-{number}.faiss": lambda path, index=index: faiss.write_index(index, os.fspath(path))
            for number, index in enumerate(self.faiss_indexes)
        }
        settings = ("dim", "factory", "parameters", "shards", "about", "recall")
        write_folder(WHO, Path(folder), writers, {name: getattr(self, name) for name in settings})

    @classmethod
    def load(cls, folder: str | Path, mapped: bool = False, verify: bool = True) -> "RetrievalIndex":
        """Read an index that was saved.

        Args:
            folder: what `save` was given.
            mapped: leave vectors, ids and paths in the files, mapped into memory, for what is larger than that; such an
                index is searched and not changed.
            verify: compare the checksums, for which all files are read once; False compares their lengths alone.

        Raises:
            FileNotFoundError: if it is not there.
            ValueError: if it is damaged or its format is of another version.
        """
        files, settings = read_folder(WHO, Path(folder), verify)
        recall = settings.pop("recall")
        index = cls(**settings)
        faiss = _faiss()
        try:
            index.faiss_indexes = [
                faiss.read_index(os.fspath(files[f"vectors-{number}.faiss"]), faiss.IO_FLAG_MMAP_IFC if mapped else 0)
                for number in range(index.shards)
            ]
        except RuntimeError as error:
            raise ValueError(f"{WHO}: faiss cannot read {folder} ({_reason(error)}); build the index again.") from None
        arrays = {
            name: np.load(files[f"{name}.npy"], "r" if mapped else None) for name in ("ids", "paths", "path-ends")
        }
        index._ids, index._paths = arrays["ids"], PackedStrings.from_arrays(arrays["paths"], arrays["path-ends"])
        index.recall, index.mapped = recall, mapped
        return index

    def __repr__(self) -> str:
        recall = "" if self.recall is None else f", recall={self.recall:.3f}"
        return (
            f"RetrievalIndex(dim={self.dim}, factory={self.factory!r}, parameters={self.parameters!r}, "
            f"shards={self.shards}, rows={len(self)}{recall})"
        )

    def _new(self) -> Any:
        """An empty faiss index that keeps ids."""
        faiss = _faiss()
        try:
            if "IDMap" in self.factory:
                raise RuntimeError("ids are kept anyway, so leave IDMap out")
            index = faiss.index_factory(self.dim, self.factory, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise ValueError(
                f"{WHO}: `factory` must be one of faiss' factory strings, such as 'Flat' or 'IVF1024,PQ16', that fits "
                f"inner products of {self.dim} numbers, got {self.factory!r} ({_reason(error)})."
            ) from None
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:  # faiss takes what was asked for and leaves it out
            raise ValueError(
                f"{WHO}: `factory` must be one that faiss has inner products for, got {self.factory!r}, which gives "
                "Euclidean distances; take another, such as 'HNSW32' or 'IVF1024,PQ16'."
            )
        inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
        if not isinstance(inner, faiss.IndexIVF):  # which keeps ids of its own
            index = faiss.IndexIDMap(index)
        self._set(index, self.parameters)
        return index

    def _set(self, index: Any, parameters: str) -> None:
        try:
            if parameters:
                _faiss().ParameterSpace().set_index_parameters(index, parameters)
        except RuntimeError as error:
            raise ValueError(
                f"{WHO}: `parameters` must be those that faiss has for {self.factory!r}, such as 'nprobe=16' for IVF "
                f"or 'efSearch=64' for HNSW, got {parameters!r} ({_reason(error)})."
            ) from None

    def _train(self, embeddings: Tensor) -> None:
        """Train on a sample of rows, as many as faiss looks at, and give all shards what was learned."""
        faiss = _faiss()
        index = self.faiss_indexes[0]
        try:
            lists = faiss.extract_index_ivf(index).nlist
        except RuntimeError:
            lists = 0
        sample = _sample(len(embeddings), _PER_CENTROID * max(lists, 256))
        try:
            index.train(_unit(embeddings[sample]))
        except RuntimeError as error:
            raise ValueError(
                f"{WHO}: `factory` {self.factory!r} must be trained, for which {len(embeddings)} rows are not enough "
                f"({_reason(error)}); add more at first, or take Flat or fewer lists."
            ) from None
        self.faiss_indexes = [index, *(faiss.clone_index(index) for _ in range(self.shards - 1))]

    def _measured_recall(self, embeddings: Tensor, ids: NDArray[np.int64]) -> float | None:
        """The share of the nearest rows, found exactly block by block, that the index finds as well."""
        k = min(RECALL_AT, len(embeddings) - 1)
        if k == 0:
            return None
        chosen = _sample(len(embeddings), RECALL_QUERIES)
        queries, own = torch.from_numpy(_unit(embeddings[chosen])), torch.from_numpy(ids)[chosen]
        best = torch.full((len(queries), k), -torch.inf)
        nearest = torch.full((len(queries), k), -1)
        for begin, block in _blocks(embeddings):
            there = torch.from_numpy(ids[begin : begin + len(block)]).expand(len(queries), -1)
            scores = (queries @ torch.from_numpy(block).T).masked_fill(there == own[:, None], -torch.inf)
            best, order = torch.cat([best, scores], 1).topk(k)
            nearest = torch.cat([nearest, there], 1).gather(1, order)
        found = self.search(queries, k + 1)[1]
        hits = 0
        for row, expected, itself in zip(found.tolist(), nearest.tolist(), own.tolist()):
            hits += len(set([other for other in row if other != itself][:k]) & set(expected))
        return hits / nearest.numel()

    def _check_embeddings(self, name: str, embeddings: Any) -> None:
        check_tensor(WHO, name, embeddings)
        if embeddings.ndim != 2 or embeddings.shape[1] != self.dim:
            raise ValueError(
                f"{WHO}: `{name}` must have shape (rows, {self.dim}), that of the index, got {tuple(embeddings.shape)}."
            )
        if not embeddings.is_floating_point():
            raise TypeError(f"{WHO}: `{name}` must be floating point, got {embeddings.dtype}.")

    def _check_finite(self, embeddings: Tensor, ids: NDArray[np.int64], paths: Sequence[str] | None) -> None:
        """Refuse NaN and infinities, naming the first ids that have one; block by block, as rows may lie in a file."""
        bad = [
            begin + row
            for begin, part in zip(range(0, len(embeddings), BLOCK), embeddings.split(BLOCK))
            for row in (~torch.isfinite(part).all(1)).nonzero()[:, 0].tolist()
        ]
        if bad:
            shown = [f"id {ids[row]}" + ("" if paths is None else f" {paths[row]!r}") for row in bad[:5]]
            raise ValueError(
                f"{WHO}: embeddings must be finite, got NaN or inf in {len(bad)} of {len(embeddings)} rows: "
                f"{', '.join(shown)}{', ...' if len(bad) > 5 else ''}."
            )

    def _new_ids(self, ids: Tensor | None, rows: int) -> NDArray[np.int64]:
        """The ids of rows to come, which none may have yet."""
        if ids is None:
            largest, most = int(self._ids[-1]) if len(self) else -1, np.iinfo(np.int64).max
            if rows > most - largest:
                raise ValueError(
                    f"{WHO}: `ids` must be given, as there are no {rows} integers of 64 bits after the largest id, "
                    f"{largest}."
                )
            return largest + np.arange(1, rows + 1)
        check_integers(WHO, "ids", ids, rows, "embeddings")
        new = ids.cpu().numpy().astype(np.int64)
        if rows and new.min() < 0:
            raise ValueError(f"{WHO}: `ids` must be >= 0, got {new.min()}.")
        found, counts = np.unique(new, return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"{WHO}: `ids` must differ, got {found[counts > 1][0]} for several rows.")
        there = np.isin(found, self._ids)
        if there.any():
            raise ValueError(
                f"{WHO}: `ids` must be new, got {there.sum()} that are in the index, such as {found[there][0]}; remove "
                "those first."
            )
        return new

    def _rows(self, ids: NDArray[np.int64]) -> NDArray[np.intp]:
        """Where these ids stand among the sorted ones."""
        rows = np.searchsorted(self._ids, ids)
        there = rows < len(self)
        there[there] = self._ids[rows[there]] == ids[there]
        if not there.all():
            raise ValueError(f"{WHO}: `ids` must be in the index, got {ids[~there][0]}, which is not.")
        return rows

    def _refuse_mapped(self, what: str) -> None:
        if self.mapped:
            raise ValueError(
                f"{WHO}: cannot {what} an index whose files are mapped into memory; load it with mapped=False."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Pickled and copied with faiss' own bytes of each part."""
        faiss = _faiss()
        return {**vars(self), "faiss_indexes": [faiss.serialize_index(index) for index in self.faiss_indexes]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        faiss = _faiss()
        vars(self).update(state, faiss_indexes=[faiss.deserialize_index(part) for part in state["faiss_indexes"]])


def _faiss() -> Any:
    """faiss, on as many threads as torch."""
    try:
        import faiss
    except ImportError as error:
        raise ImportError(f"{WHO}: needs faiss, which is not there ({error}); pip install faiss-cpu.") from None
    faiss.omp_set_num_threads(torch.get_num_threads())
    return faiss


def _blocks(embeddings: Tensor) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """The rows on the unit sphere, block by block, each with the place of its first row."""
    for begin in range(0, len(embeddings), BLOCK):
        yield begin, _unit(embeddings[begin : begin + BLOCK])


def _unit(embeddings: Tensor) -> NDArray[np.float32]:
    unit: NDArray[np.float32] = normalize(embeddings.detach().cpu()).float().contiguous().numpy()
    return unit


def _sample(rows: int, most: int) -> Tensor:
    """Places of rows, in order: all, or as many drawn, the same ones every time."""
    if rows <= most:
        return torch.arange(rows)
    return torch.from_numpy(np.sort(np.random.default_rng(0).choice(rows, most, replace=False, shuffle=False)))


def _reason(error: RuntimeError) -> str:
    """What faiss says, without the place in its sources."""
    return str(error).split(": ", 1)[-1].rsplit("failed: ", 1)[-1].strip()
