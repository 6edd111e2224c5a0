"""Reads the user's texts, such as captions or names, from a CSV or Parquet table with labels and, optionally, splits.

The texts are tokenized as they are loaded, by the tokenizer of the network that embeds them.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lightning_retrieval.checks import check_callable, check_integer, check_path
from lightning_retrieval.datamodules.base import RetrievalDataModule, RetrievalSettings, Unpack
from lightning_retrieval.datamodules.image_index import (
    check_test_fraction,
    class_numbers,
    digest_of_arrays,
    split_by_class,
)
from lightning_retrieval.datamodules.image_table import find_rows, is_empty, parse_labels, parse_splits, parse_tags
from lightning_retrieval.datamodules.table_file import TableColumns, read_table
from lightning_retrieval.distributed import rank
from lightning_retrieval.models.tokenizers import padded
from lightning_retrieval.packed_strings import PackedStrings
from lightning_retrieval.training.sides import side_of_module

COUNTED, MANY = 1000, 0.05  # number of texts, and the fraction of them, from which cut texts are reported


@dataclass
class TextRows:
    """The texts of one split.

    Args:
        texts: the texts.
        labels: the class of each text, 0, 1, ...
        names: names of the classes; None without the column `label`.
        tags: numbers of the tags of each text, padded with -1, or None.
        tag_names: names of the tags, or None.
    """

    texts: PackedStrings
    labels: NDArray[np.int64]
    names: Sequence[str] | None
    tags: NDArray[np.int64] | None = None
    tag_names: Sequence[str] | None = None

    @property
    def digest(self) -> str:
        """A hash of the texts, labels and tags."""
        arrays: dict[str, NDArray[Any]] = {"texts": self.texts.data, "ends": self.texts.ends, "labels": self.labels}
        if self.tags is not None:
            arrays["tags"] = self.tags
        return digest_of_arrays(arrays)


class CurrentTokenizer:
    """The tokenizer of a `TextTable`, shared by its data sets; the model of a run may replace it."""

    def __init__(self, tokenizer: Any) -> None:
        self.current = tokenizer

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """The tokens of each text, padded with -1."""
        if self.current is None:
            raise ValueError(
                "TextTable: `tokenizer` must be given outside of a run whose model embeds texts, got None; give the "
                "`tokenizer` of a TextEmbedder."
            )
        tokens: Tensor = self.current(texts)
        return tokens


class TextSet(Dataset[dict[str, Any]]):
    """A map-style dataset of dicts with the tokens of a text as `images`, and with `labels`, `ids` and any `tags`.

    Args:
        rows: the texts and their labels.
        tokenizer: a function from a list of texts to tokens (rows, tokens), padded with -1.
    """

    def __init__(self, rows: TextRows, tokenizer: Any) -> None:
        self.rows = rows
        self.tokenizer = tokenizer

    @property
    def labels(self) -> Int[Tensor, " item"]:
        """The class of each text."""
        return torch.from_numpy(self.rows.labels)

    @property
    def tags(self) -> Int[Tensor, "item tag"] | None:
        """The tags of each text, or None."""
        if self.rows.tags is None:
            return None
        return torch.from_numpy(self.rows.tags)

    @property
    def texts(self) -> Sequence[str]:
        """The texts, in the order of the items."""
        return self.rows.texts

    @property
    def class_names(self) -> Sequence[str] | None:
        """The names of the classes 0, 1, ..., or None."""
        return self.rows.names

    @property
    def tag_names(self) -> Sequence[str] | None:
        """The names of the tags 0, 1, ..., or None."""
        return self.rows.tag_names

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of the optional entries that items have."""
        if self.rows.tags is None:
            return ()
        return ("tags",)

    @staticmethod
    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch: tokens are padded with -1 to the longest row."""
        tokens = padded([item["images"] for item in items])
        of_one_length = [{**item, "images": row} for item, row in zip(items, tokens)]
        batch: dict[str, Any] = default_collate(of_one_length)
        return batch

    def __len__(self) -> int:
        return len(self.rows.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        position = range(len(self))[index]
        label = torch.tensor(int(self.rows.labels[position]))
        tokens = self.tokenizer([self.rows.texts[position]])[0]
        item = {"images": tokens, "labels": label, "ids": torch.tensor(position)}
        if self.rows.tags is not None:
            item["tags"] = torch.from_numpy(self.rows.tags)[position]
        return item


class TextTable(RetrievalDataModule):
    """Reads texts that are listed in a table. Required are the columns `text` and `label` (or `tags`).

    Columns may be in any order. Columns with other names than the following are ignored.

    | column | content |
    | --- | --- |
    | `text` | the text |
    | `label` | the class, text or an integer, as in the table of the images |
    | `tags` | tags such as `red; dress`, separated by `;`, for the rule `SharedTags`; may be empty |
    | `split` | `train`, `val`, `test` or the name of another evaluation set |

    Without the column `split`, the classes are split between training and test, so no test class is used for training.
    A text may be in several rows. A batch holds tokens as `images`, (rows, tokens), padded with -1.

    Args:
        table: a CSV file in UTF-8 with a header line, or a Parquet file (.parquet).
        tokenizer: a function from a list of texts to tokens, padded with -1. If None, the `tokenizer` of the network
            that embeds the texts in a run, such as a `TextEmbedder`.
        test_fraction: fraction of the classes, between 0 and 1, that form the test set; ignored if there is a column
            `split`.
        split_seed: determines which classes form the test set.
        settings: keyword arguments of `RetrievalDataModule` (`classes_per_batch`, `samples_per_class`,
            `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`, `persistent_workers`).

    Raises:
        FileNotFoundError: if the table does not exist.
        ModuleNotFoundError: if the table is Parquet and pyarrow is not installed.
        ValueError: if a column is missing, a value is invalid, or a class is in both training and evaluation, with the
            line number; if no tokenizer is given and the network of the run has none.

    Example:
        >>> from pathlib import Path
        >>> from lightning_retrieval.datamodules import TextTable
        >>> from lightning_retrieval.models import NgramTokenizer
        >>> rows = ["text,label,split", "a red shoe,shoe,train", "trainers,shoe,train", "a sofa,sofa,test"]
        >>> _ = Path("captions.csv").write_text("\\n".join(rows))
        >>> data = TextTable("captions.csv", tokenizer=NgramTokenizer())
        >>> data.test_set.class_names[0], data.train_set[1]["images"].shape
        ('sofa', torch.Size([24]))

    Relations:
        `Pairs(queries=TextTable(...), candidates=ImageTable(...))` trains search by text.
    """

    def __init__(
        self,
        table: str | Path,
        *,
        tokenizer: Any = None,
        test_fraction: float = 0.5,
        split_seed: int = 0,
        **settings: Unpack[RetrievalSettings],
    ) -> None:
        super().__init__(**settings)
        self.table = check_path("TextTable", "table", table)
        self.tokenizer = check_callable("TextTable", "tokenizer", tokenizer, may_be_none=True)
        self._current_tokenizer = CurrentTokenizer(tokenizer)
        self.test_fraction = check_test_fraction("TextTable", test_fraction)
        self.split_seed = check_integer("TextTable", "split_seed", split_seed, least=0, most=None)
        self._has_reported = False

    def prepare_data(self) -> None:
        """Read the table, so that errors in it are found before anything else happens."""
        self.splits  # noqa: B018

    def setup(self, stage: str) -> None:
        """Choose the tokenizer of the run."""
        self._follow_module()

    @cached_property
    def splits(self) -> dict[str, TextRows]:
        """The texts of each split."""
        if self.table.is_dir():
            raise ValueError(f"TextTable: `table` must be a CSV or Parquet file, got the folder {self.table}.")
        if not self.table.is_file():
            path = self.table.absolute()
            raise FileNotFoundError(
                f"TextTable: `table` must be a CSV or Parquet file, got {path}, which does not exist."
            )
        table = read_table(self.table, required=("text", "label"), owner="TextTable")
        texts = table.columns["text"]
        table.check(find_rows(texts, is_empty), "`text` must not be empty in any row")
        no_distractors = np.zeros(len(texts), dtype=bool)
        if "label" in table.columns:
            labels = parse_labels(table, no_distractors)
        else:
            labels = np.arange(len(texts))
        splits = parse_splits(table)
        if splits is None:
            splits = self._split_classes(labels)
        _check_no_shared_classes(table, labels, splits)
        tags, tag_names = parse_tags(table, no_distractors)
        found = {}
        for name in dict.fromkeys(["train", *sorted(set(splits.tolist()))]):
            chosen = np.flatnonzero(splits == name)
            numbers, names = class_numbers(labels[chosen])
            rows = TextRows(PackedStrings([texts[row] for row in chosen.tolist()]), numbers, None)
            if "label" in table.columns:
                rows.names = names
            if tags is not None:
                rows.tags, rows.tag_names = tags[chosen], tag_names
            found[name] = rows
        return found

    @cached_property
    def train_set(self) -> TextSet:
        """The training texts."""
        return self._text_set("train")

    @cached_property
    def val_set(self) -> TextSet | dict[str, TextSet]:
        """The split `"val"` if there is one, else the test set."""
        if "val" in self.splits:
            return self._text_set("val")
        return self.test_set

    @cached_property
    def test_set(self) -> TextSet | dict[str, TextSet]:
        """The split `"test"`, or a dict of all evaluation splits by name; the split `"val"` if there is no other."""
        names = [name for name in self.splits if name not in ("train", "val")]
        if len(names) > 1:
            return {name: self._text_set(name) for name in names}
        return self._text_set(names[0] if names else "val")

    def _text_set(self, name: str) -> TextSet:
        return TextSet(self.splits[name], self._current_tokenizer)

    def _split_classes(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Split the classes between training and test."""
        classes = np.unique(labels).tolist()
        test = split_by_class("TextTable", "test_fraction", classes, self.test_fraction, self.split_seed)
        return np.where(np.isin(labels, sorted(test)), "test", "train")

    def _training_images(self) -> dict[str, Any]:
        return {"count": len(self.train_set), "digest": self.train_set.rows.digest}

    def _follow_module(self) -> None:
        """Take the tokenizer of the network that embeds this side of the run, unless one was given."""
        if self.trainer is None or self.tokenizer is not None:
            return
        module = side_of_module(self.trainer.lightning_module, self.side)
        network = getattr(module, "embedder", None)
        tokenizer = getattr(network, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(
                f"TextTable: the network of the {self.side} must have a `tokenizer`, got "
                f"{type(network).__name__}; take a TextEmbedder, or give TextTable a `tokenizer`."
            )
        self._current_tokenizer.current = tokenizer
        self._report_cut_texts()

    def _report_cut_texts(self) -> None:
        """Warn once if the tokenizer cuts many of the first texts."""
        tokenizer = self._current_tokenizer.current
        if self._has_reported or rank() > 0 or not hasattr(tokenizer, "is_cut"):
            return
        self._has_reported = True
        texts = list(self.splits["train"].texts[:COUNTED])
        cut = sum(map(tokenizer.is_cut, texts))
        if cut >= MANY * len(texts):
            warnings.warn(
                f"TextTable: {cut} of the first {len(texts)} training texts have more than {tokenizer.max_length} "
                "tokens and are cut; shorten them, or raise `max_length` of the tokenizer.",
                stacklevel=2,
            )


def _check_no_shared_classes(table: TableColumns, labels: NDArray[Any], splits: NDArray[Any]) -> None:
    """Raise if a class is in training and in evaluation."""
    in_training = splits == "train"
    shared = np.flatnonzero(~in_training & np.isin(labels, labels[in_training])).tolist()
    rule = "a class must be in training or in evaluation, not in both"
    table.check(shared, rule, labels.tolist())
