"""Tables of texts: what is read, and which tokenizer is used."""

import csv

import pytest
import torch

from lightning_retrieval import RetrievalEvaluation, RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import TextTable
from lightning_retrieval.models import NgramTokenizer, TextEmbedder
from tests.quiet_trainer import quiet_trainer

ROWS = [
    ("a red shoe", "shoe", "train", "red; shoe"),
    ("trainers", "shoe", "train", "shoe"),
    ("ein Sofa, grün", "sofa", "train", ""),
    ("a couch", "sofa", "train", "green"),
    ("lamp", "lamp", "test", "red"),
    ("lamp", "lamp", "test", "red"),
    ("a rug", "rug", "test", ""),
    ("carpet", "rug", "test", ""),
]
SMALL = {"classes_per_batch": 2, "samples_per_class": 2}


def write_texts(folder, *rows, header=("text", "label", "split", "tags"), delimiter=","):
    with open(folder / "captions.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return folder / "captions.csv"


def test_a_table_is_read_into_splits(tmp_path):
    tokenizer = NgramTokenizer()
    data = TextTable(write_texts(tmp_path, *ROWS), tokenizer=tokenizer)
    train, test = data.train_set, data.test_set
    assert train.labels.tolist() == [0, 0, 1, 1]
    assert list(train.class_names) == ["shoe", "sofa"]
    assert list(test.class_names) == ["lamp", "rug"]
    assert list(train.tag_names) == ["green", "red", "shoe"]
    assert train.tags.tolist() == [[1, 2], [2, -1], [-1, -1], [0, -1]]
    item = train[2]
    assert item["images"].tolist() == tokenizer.tokens("ein Sofa, grün")
    assert (int(item["labels"]), int(item["ids"])) == (1, 2)
    batch = train.collate([train[0], train[1]])
    assert torch.equal(batch["images"], tokenizer(["a red shoe", "trainers"]))
    assert batch["ids"].tolist() == [0, 1]
    assert list(data.val_set.texts) == list(test.texts) == [row[0] for row in ROWS[4:]]


def test_a_table_with_other_names_and_another_separator(tmp_path):
    rows = [("a red, shoe", 1, "train"), ("a sofa", 2, "test")]
    table = write_texts(tmp_path, *rows, header=("caption", "kind", "split"), delimiter=";")
    data = TextTable(table, columns={"text": "caption", "label": "kind"}, delimiter=";")
    assert [data.splits[name].texts[0] for name in ("train", "test")] == ["a red, shoe", "a sofa"]


def test_without_splits_classes_are_split(tmp_path):
    rows = [(f"text {row}", row % 4) for row in range(8)]
    data = TextTable(write_texts(tmp_path, *rows, header=("text", "label")), tokenizer=NgramTokenizer())
    assert set(data.train_set.class_names).isdisjoint(data.test_set.class_names)
    assert len(data.train_set) == len(data.test_set) == 4


class WordsOfUser(torch.nn.Module):
    """A network of texts that is no TextEmbedder."""

    def __init__(self):
        super().__init__()
        self.tokenizer = NgramTokenizer(buckets=500)
        self.vectors = torch.nn.EmbeddingBag(501, 8, padding_idx=0)

    def forward(self, tokens):
        return self.vectors(tokens + 1)


@pytest.mark.parametrize("of_user", [False, True])
def test_texts_follow_the_tokenizer_of_the_network_of_a_run(tmp_path, of_user):
    """A network of the user needs only a tokenizer."""
    embedder = WordsOfUser() if of_user else TextEmbedder("ngram_net", 8, backbone_args={"buckets": 500, "dim": 8})
    before = [parameter.detach().clone() for parameter in embedder.parameters()]
    data = TextTable(write_texts(tmp_path, *ROWS), **SMALL)
    trainer = quiet_trainer(max_epochs=2, callbacks=[RetrievalEvaluation(ks=(1,))])
    trainer.fit(RetrievalModule(embedder, SmoothAPLoss()), data)
    assert data.train_set[1]["images"].tolist() == embedder.tokenizer.tokens("trainers")
    assert not all(map(torch.equal, before, embedder.parameters()))


def test_check_notes_texts_of_several_classes(tmp_path):
    rows = [("red shoe", "a"), ("red shoe", "b"), ("blue", "a"), ("blue", "a")]
    rows = [(*row, "train") for row in rows]
    report = TextTable(write_texts(tmp_path, *rows, ("x", "c", "test"), header=("text", "label", "split"))).check()
    (note,) = report.notes
    assert "'red shoe'" in note
    assert report.ok
