"""Reads the user's texts, such as captions or names, from a CSV or Parquet table with labels and, optionally, splits.

The texts are tokenized as they are loaded, by the tokenizer of the network that embeds them.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.utils.data import default_collate

from lightning_retrieval.checks import check_integer, short_repr
from lightning_retrieval.datamodules.base import RetrievalDataModule, RetrievalSettings, Unpack
from lightning_retrieval.datamodules.image_check import DataReport
from lightning_retrieval.datamodules.image_index import ImageIndex, check_test_fraction, digest_of_arrays
from lightning_retrieval.datamodules.image_module import check_no_shared_classes
from lightning_retrieval.datamodules.image_table import (
    by_split,
    is_empty,
    is_written_missing,
    labels_of,
    tags_of,
)
from lightning_retrieval.datamodules.indexed_set import IndexedSet
from lightning_retrieval.datamodules.table import number_splits
from lightning_retrieval.datamodules.table_file import read_table
from lightning_retrieval.datamodules.table_format import ColumnNames, TableFormat
from lightning_retrieval.invalid import InvalidValue, owned, owned_by
from lightning_retrieval.models.sides import side_of_module
from lightning_retrieval.models.tokenizers import padded
from lightning_retrieval.packed_strings import PackedStrings
from lightning_retrieval.paths import check_path


@dataclass(frozen=True)
class TextSet(IndexedSet):
    """A map-style dataset of dicts with the tokens of a text as `images`, and with `labels`, `ids` and any `tags`.

    Args:
        index: the texts, their labels and any tags.
        tokenizer: a function from a list of texts to tokens (rows, tokens), padded with -1; None if items are not read.
    """

    index: ImageIndex
    tokenizer: Any = None

    @property
    def texts(self) -> PackedStrings:
        """The texts."""
        return self.index.texts or PackedStrings([])

    @staticmethod
    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch: tokens are padded with -1 to the longest row."""
        tokens = padded([item["images"] for item in items])
        of_one_length = [{**item, "images": row} for item, row in zip(items, tokens)]
        batch: dict[str, Any] = default_collate(of_one_length)
        return batch

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.tokenizer is None:
            rule = "must be given outside of a run whose model embeds texts"
            got = "None"
            raise InvalidValue(rule, "TextTable", "tokenizer", got=got, cure="give the `tokenizer` of a TextEmbedder")
        position = range(len(self))[index]
        tokens = self.tokenizer([self.texts[position]])[0]
        return {"images": tokens} | self.annotations(position)


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
        columns: the names of the table's columns, if they differ, by the names above: `{"text": "caption"}`, or
            `"text=caption"`.
        delimiter: the character that separates the fields of a CSV file, such as `";"`; `"tab"` is a tab.
        settings: keyword arguments of `RetrievalDataModule` (`classes_per_batch`, `samples_per_class`,
            `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`, `persistent_workers`).

    Raises:
        FileNotFoundError: if the table does not exist.
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
        ('sofa', torch.Size([21]))

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
        columns: ColumnNames = None,
        delimiter: str = ",",
        **settings: Unpack[RetrievalSettings],
    ) -> None:
        super().__init__(**settings)
        with owned_by("TextTable"):
            self.table = check_path("table", table)
            self.tokenizer = tokenizer
            self.test_fraction = check_test_fraction(test_fraction)
            self.split_seed = check_integer("split_seed", split_seed, least=0)
            self._format = TableFormat.checked(columns, delimiter)
        self.columns, self.delimiter = columns, delimiter

    def prepare_data(self) -> None:
        """Read the table, so that errors in it are found before anything else happens."""
        self.splits  # noqa: B018

    @cached_property
    @owned
    def splits(self) -> dict[str, TextSet]:
        """The texts of each split."""
        file = check_path("table", self.table, exists=True)
        table = read_table(file, required=("text", "label"), table_format=self._format)
        table.check("text", is_empty, "not be empty in any row")
        table.check("text", is_written_missing, "not be the text of a missing value")
        columns = {name: table.get(name) for name in ("text", "label", "tags", "split")}
        is_labelled = "label" in table
        table = replace(table, columns={}).with_columns(**columns, path=list(map(str, range(len(table)))))
        labels = labels_of(table) if is_labelled else list(range(len(table)))
        splits = by_split(table.with_columns(label=labels, tags=tags_of(table)), self.test_fraction, self.split_seed)
        found = number_splits(splits, name_of_class=str if is_labelled else None)
        check_no_shared_classes(found)
        for index in found.values():
            index.lines = None  # only errors need the lines, which would be sent to each worker
        return {name: TextSet(index, self.tokenizer) for name, index in found.items()}

    @property
    def train_set(self) -> TextSet:
        """The training texts."""
        return self._set_of_loader(self.splits["train"])

    @property
    def val_set(self) -> TextSet | dict[str, TextSet]:
        """The split `"val"` if there is one, else the test set."""
        if "val" in self.splits:
            return self._set_of_loader(self.splits["val"])
        return self.test_set

    @property
    def test_set(self) -> TextSet | dict[str, TextSet]:
        """The split `"test"`, or a dict of all evaluation splits by name; the split `"val"` if there is no other."""
        names = [name for name in self.splits if name not in ("train", "val")]
        if not names:
            return self.val_set
        if len(names) == 1:
            return self._set_of_loader(self.splits[names[0]])
        return {name: self._set_of_loader(self.splits[name]) for name in names}

    def check(self) -> DataReport:
        """Count the texts, and note texts of several classes: each would be a negative of itself."""
        report = super().check()
        for name, split in self.splits.items():
            ambiguous = _texts_of_several_classes(split)
            if ambiguous and split.tags is None:
                shown = f"{len(ambiguous):,}, such as {short_repr(ambiguous[0])}"
                report.notes.append(f"texts of {name} with several labels: {shown}")
        return report

    def _training_images(self) -> dict[str, Any]:
        texts = self.train_set.texts
        digest = digest_of_arrays({"texts": texts.data, "ends": texts.ends})
        return {**super()._training_images(), "texts": digest}

    def _set_of_loader(self, dataset: TextSet) -> TextSet:
        """In a run, give the set the tokenizer of the network that embeds it, unless one was given."""
        if self.trainer is None or self.tokenizer is not None:
            return dataset
        side = side_of_module(self.trainer.lightning_module, self.side)
        if side.tokenizer is None:
            rule = f"the network of the {self.side} must have a `tokenizer`"
            cure = "take a TextEmbedder, or give TextTable a `tokenizer`"
            raise InvalidValue(rule, "TextTable", got=type(side.embedder).__name__, cure=cure)
        return replace(dataset, tokenizer=side.tokenizer)


def _texts_of_several_classes(split: TextSet) -> list[str]:
    """The texts of a split that occur with different labels."""
    label_of_text: dict[str, int] = {}
    ambiguous: dict[str, None] = {}
    for text, label in zip(split.texts, split.labels.tolist()):
        if label_of_text.setdefault(text, label) != label:
            ambiguous[text] = None
    return list(ambiguous)
