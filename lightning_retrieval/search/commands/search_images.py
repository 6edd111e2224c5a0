"""Finds the images of an index that are nearest to query images or texts."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from lightning_retrieval.checks import check_finite_number, short_repr
from lightning_retrieval.command_line import printable
from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.packed_strings import PackedStrings
from lightning_retrieval.paths import check_path, cure_of_missing
from lightning_retrieval.search.commands.embedding import (
    ImageEmbedder,
    ListedImages,
    UnreadableImage,
    recorded_model,
)
from lightning_retrieval.search.commands.of_backbone import BACKBONE
from lightning_retrieval.search.commands.of_checkpoint import print_guess
from lightning_retrieval.search.commands.shared import PretrainedBackbone
from lightning_retrieval.search.commands.stores import THRESHOLD
from lightning_retrieval.search.image_files import is_named
from lightning_retrieval.search.store.conditions import Request, Value, checked_columns
from lightning_retrieval.search.store.embedding_store import EmbeddingStore

OWNER = "search_images"
DEFAULT_K = 10
LONGEST_SHOWN = 100  # characters of a text of metadata that are shown
NO_VALUE = "-"  # shown for a number or a text that is missing


@dataclass(frozen=True)
class Hit:
    """One image found for a query.

    Args:
        rank: from 1 for the nearest image.
        id: id of the image in the index.
        path: path of the image, relative to the folder of the index's images.
        similarity: the cosine similarity of the image and the query.
        metadata: the values of the image by name of the column; None for a number that is missing.
    """

    rank: int
    id: int
    path: str
    similarity: float
    metadata: Mapping[str, Value] = field(default_factory=dict, hash=False)

    @property
    def distance(self) -> float:
        """The cosine distance: 0 for the same direction, 2 for opposite directions."""
        return max(0.0, 1 - self.similarity)

    def plain(self) -> dict[str, Any]:
        """All that is known of the image, as plain values for JSON."""
        return {**vars(self), "distance": self.distance}

    def shown(self) -> list[tuple[str, str]]:
        """What is shown of the image besides its rank, scores and path: names, each with a printable text."""
        return [(name, _shown_value(value)) for name, value in self.metadata.items()]


def _shown_value(value: Value) -> str:
    """A value of metadata as a printable text of limited length."""
    if value is None or value == "":
        return NO_VALUE
    if isinstance(value, str):
        cut = value[LONGEST_SHOWN:] and "..."
        return printable(value[:LONGEST_SHOWN]) + cut
    return repr(value).removesuffix(".0")


@dataclass(frozen=True)
class QueryResult:
    """A query with its hits, nearest first.

    Args:
        query: path of the image file, or the text.
        hits: the images found whose similarity is at least the threshold.
        threshold: the lowest similarity of a hit; None if there is no threshold.
        nearest: similarity of the nearest image found, which may be below the threshold; None if none was found.
        is_text: whether the query is a text.
    """

    query: str
    hits: list[Hit]
    threshold: float | None = None
    nearest: float | None = None
    is_text: bool = False

    @property
    def nothing_similar(self) -> str:
        """A sentence that says that there are no hits; "" if there are hits."""
        if self.hits:
            return ""
        if self.nearest is None or self.threshold is None:
            return "Nothing was found."
        return f"Nothing similar: the nearest image has similarity {self.nearest:.4f}, below {self.threshold:.4f}."


@owned_by(OWNER)
def search_images(
    index: EmbeddingStore,
    queries: Sequence[str],
    k: int | None = None,
    *,
    texts: Sequence[str] = (),
    where: str | None = None,
    group_by: str | None = None,
    **settings: Any,
) -> tuple[list[QueryResult], list[UnreadableImage]]:
    """Find the images nearest to each query.

    Args:
        index: an index made by `index_images`.
        queries: paths of image files.
        k: number of hits of each query, at most the number of images in the index; if None, 10, or
            all images if the index has fewer than 10.
        texts: texts to search for, after the images, if the network of queries embeds texts.
        where: condition on the columns of the index that all hits must meet, see `RetrievalIndex.search`.
        group_by: column of the index. Of the images with the same value, only the nearest one is a hit.
        **settings: as for `ImageSearcher`.

    Returns:
        The results of the readable queries and of the texts, and the unreadable queries.

    Raises:
        FileNotFoundError: if the checkpoint does not exist.
        ValueError: if the index was not made by `index_images`, or was made with another network, `k` is too large,
            `where`, `group_by` or `show` does not fit the columns of the index, `threshold` is not finite, no query
            can be read, or texts are given and the network of queries does not embed texts.
    """
    if k is None:
        k = max(1, min(DEFAULT_K, len(index)))
    request = index.request(k, where, group_by)  # raises before the model is loaded
    return ImageSearcher(index, **settings).search(queries, request, texts=texts)


class ImageSearcher:
    """An index and its model, loaded once for many searches.

    Args:
        index: an index made by `index_images`.
        threshold: lowest similarity of a hit; if None, the threshold of the index, if it has one. The threshold of the
            index was chosen for its own network, so it does not apply to queries that another network embeds.
        show: names of the columns of the index that the metadata of each hit hold; if None, all.
        checkpoint: file of the model, whose network of candidates must be that of the index, or a pretrained backbone;
            if None, the model that the index was made with. Weights of a backbone are downloaded only if it is given.
        transform: dotted name of the function, if a function prepared the images of the index. The function is
            imported.
        batch_size: number of images embedded at a time.
        num_workers: number of processes that read images.
        device: device that the model runs on; if None, `"cuda"` if there is one, else `"cpu"`.
    """

    @owned_by(OWNER)
    def __init__(
        self,
        index: EmbeddingStore,
        *,
        threshold: float | None = None,
        show: Sequence[str] | None = None,
        checkpoint: Path | PretrainedBackbone | None = None,
        transform: str | None = None,
        batch_size: int = 32,
        num_workers: int = 0,
        device: str | None = None,
    ) -> None:
        _check_index(index)
        self.index = index
        self.threshold = _threshold_of(index, threshold)
        self._columns = checked_columns("show", show, index.column_kinds)
        self._embedder = ImageEmbedder.load(
            recorded_model(index.about, checkpoint, made="index was"),
            transform=transform,
            recorded=index.about["preparation"],
            batch_size=batch_size,
            num_workers=num_workers,
            device=device,
            side="queries",
        )
        if self._embedder.module.steps_of_training > 0:
            print_guess(index.about, made="index")
        self._query_threshold = self.threshold  # for embeddings of the network of queries
        if threshold is None and self._embedder.module.query_embedder is not None:
            self._query_threshold = None

    @property
    def takes_texts(self) -> bool:
        """Whether a query may be a text."""
        return self._embedder.takes_texts

    @owned_by(OWNER)
    def search(
        self, queries: Sequence[str], request: Request, *, texts: Sequence[str] = ()
    ) -> tuple[list[QueryResult], list[UnreadableImage]]:
        """The results of the readable queries and of the texts, and the unreadable queries; see `search_images`."""
        of_images: list[QueryResult] = []
        of_texts: list[QueryResult] = []
        unreadable: list[UnreadableImage] = []
        if not all(text.strip() for text in texts):
            raise InvalidValue("must have a character that is not white space", argument="text", got=list(texts))
        if texts:  # first, so that errors are raised before any image is embedded
            of_texts = self._results(texts, self._embedder.embed_texts(texts), request, is_text=True)
        if queries:
            embedded = self._embedder.embed_all(_listed(queries))
            unreadable = embedded.unreadable
            if len(embedded.positions) == 0 and not texts:
                cure = cure_of_missing(Path(queries[0]))
                if Path(queries[0]).is_dir():
                    cure = f"give the images in it, such as {shlex.quote(str(Path(queries[0])))}/*"
                rule = f"none of the {len(queries)} queries can be read, the first: {unreadable[0]}"
                raise InvalidValue(rule, cure=cure)
            readable = [queries[position] for position in embedded.positions.tolist()]
            of_images = self._results(readable, embedded.embeddings[:], request)
        return [*of_images, *of_texts], unreadable

    def _results(
        self, queries: Sequence[str], rows: Float[Tensor, "query dim"], request: Request, *, is_text: bool = False
    ) -> list[QueryResult]:
        """The results of embedded queries."""
        if not queries:
            return []
        similarities, ids, paths, metadata = self.index.search_with_metadata(rows, request, self._columns)
        results = []
        for query, *found in zip(queries, ids.tolist(), paths, similarities.tolist(), metadata):
            hits = [Hit(rank, *values) for rank, values in enumerate(zip(*found), start=1)]
            hits = [hit for hit in hits if hit.id >= 0]  # there may be fewer than k rows
            results.append(self._result(query, hits, is_text))
        return results

    def _result(self, query: str, found: list[Hit], is_text: bool) -> QueryResult:
        """The result of a query, without the images found below the threshold."""
        nearest = None
        if found:
            nearest = found[0].similarity
        threshold = self.threshold
        if is_text or self._embedder.side == "queries":
            threshold = self._query_threshold
        hits = found
        if threshold is not None:
            hits = [hit for hit in found if hit.similarity >= threshold]
        return QueryResult(query, hits, threshold, nearest, is_text)


def _listed(queries: Sequence[str]) -> ListedImages:
    """The queries as a list of images, with paths relative to the root of the file system.

    The user has named each of these files, so their paths need no check, unlike those in a list of images.
    """
    files = [Path(os.path.abspath(check_path("queries", query))) for query in queries]
    root = Path(files[0].anchor)
    paths = PackedStrings(file.relative_to(root).as_posix() for file in files)
    labels = np.zeros(len(files), np.int64)  # without meaning
    index = ImageIndex.from_arrays({"paths": paths.data, "ends": paths.ends, "labels": labels})
    return ListedImages(root, index, [None] * len(files), names=list(map(str, files)))


@owned_by(OWNER)
def image_folder(given: Path | None, index: EmbeddingStore) -> Path:
    """The folder of an index's images: the given folder, else the folder recorded in the index.

    Raises:
        ValueError: if no folder is given or recorded, for example for a data set without image files; if no command of
            this user has embedded the images of the recorded folder, see `image_files`.
    """
    if given is not None:
        return check_path("images", given, exists=True)
    if "images" not in index.about:
        raise InvalidValue("must be given, because the index does not say where its images are", argument="images")
    recorded = str(index.about["images"])
    if not is_named(Path(recorded)):
        raise InvalidValue(
            f"must be given, because the index names the folder {printable(short_repr(recorded))}, whose images "
            "this user has not embedded here",
            argument="images",
            cure="give the folder if its pictures may be shown",
        )
    return Path(recorded)


def _check_index(index: EmbeddingStore) -> None:
    has_model = not index.about.keys().isdisjoint(("checkpoint", BACKBONE))
    if not has_model or not {"checkpoint_sha256", "preparation"} <= index.about.keys():
        raise InvalidValue("must be an index of images that `lightning-retrieval index` made", argument="index")


def _threshold_of(index: EmbeddingStore, given: float | None) -> float | None:
    """The lowest similarity of a hit: the given number, else the threshold of the index; None for no threshold."""
    if given is not None:
        return check_finite_number("threshold", given)
    recorded: float | None = index.about.get(THRESHOLD, {}).get("value")
    return recorded
