"""Tables of texts: what is read, what is refused, and which tokenizer is used."""

import csv
import re

import pytest
import pytorch_lightning as pl
import torch

from lightning_retrieval import RetrievalEvaluation, RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import Pairs, TextTable
from lightning_retrieval.models import NgramTokenizer, TextEmbedder
from tests.quiet_trainer import QUIET

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


def write_texts(folder, *rows, header=("text", "label", "split", "tags")):
    with open(folder / "captions.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
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
    assert data.val_set.texts is test.texts


def test_a_table_with_other_names_and_another_separator(tmp_path):
    (tmp_path / "t.csv").write_text("caption;kind;split\na red, shoe;1;train\na sofa;2;test\n")
    data = TextTable(tmp_path / "t.csv", columns={"text": "caption", "label": "kind"}, delimiter=";")
    assert [data.splits[name].texts[0] for name in ("train", "test")] == ["a red, shoe", "a sofa"]
    (tmp_path / "t.csv").write_text("text,label\nnan,1\na sofa,2\n")
    with pytest.raises(ValueError, match=r"^TextTable: `text` must not be the text of a missing value, got 'nan', at"):
        TextTable(tmp_path / "t.csv").prepare_data()


def test_without_splits_classes_are_split(tmp_path):
    rows = [(f"text {row}", row % 4) for row in range(8)]
    data = TextTable(write_texts(tmp_path, *rows, header=("text", "label")), tokenizer=NgramTokenizer())
    assert set(data.train_set.class_names).isdisjoint(data.test_set.class_names)
    assert len(data.train_set) == len(data.test_set) == 4


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        (
            ROWS,
            ("words", "label", "split", "tags"),
            "line 1 of .* must name the columns text and label .* lacks text",
        ),
        ([*ROWS, ("", "lamp", "test", "")], None, "`text` must not be empty in any row, at line 10 of"),
        ([*ROWS, ("x", "", "test", "")], None, "`label` must not be empty in any row, at line 10 of"),
        ([*ROWS, ("x", "shoe", "test", "")], None, "a class must be in training or .* got 'shoe', at line 10 of"),
        (ROWS[:4], None, "`split` must have rows of train and of val, test or others, got 'train'"),
    ],
)
def test_an_invalid_table_is_one_sentence(rows, header, message, tmp_path):
    path = write_texts(tmp_path, *rows, header=header or ("text", "label", "split", "tags"))
    with pytest.raises(ValueError, match=f"^TextTable: {message}"):
        TextTable(path, tokenizer=NgramTokenizer()).prepare_data()


def test_a_class_in_training_on_one_side_and_in_evaluation_on_the_other_raises(tmp_path):
    sides = []
    for name, split in (("queries", "train"), ("candidates", "test")):
        (tmp_path / name).mkdir()
        table = write_texts(tmp_path / name, *ROWS, ("a chair", "chair", split, ""))
        sides.append(TextTable(table, tokenizer=NgramTokenizer()))
    with pytest.raises(ValueError, match=r"^Pairs: a class must be in training on both .* such as 'chair'; give both"):
        Pairs(*sides, classes_per_batch=2).setup("fit")


def test_a_missing_table_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sentence = f"TextTable: `table` must be a CSV or Parquet file, got {tmp_path}/captions.csv, which does not exist."
    for table in ("captions.csv", tmp_path / "captions.csv"):
        with pytest.raises(FileNotFoundError, match=f"^{re.escape(sentence)}$"):
            TextTable(table).prepare_data()


def test_texts_follow_the_tokenizer_of_the_network_of_a_run(tmp_path):
    pl.seed_everything(0)
    embedder = TextEmbedder("ngram_net", 8, backbone_args={"buckets": 500, "dim": 8})
    module = RetrievalModule(embedder, SmoothAPLoss())
    data = TextTable(write_texts(tmp_path, *ROWS), classes_per_batch=2, samples_per_class=2)
    with pytest.raises(ValueError, match=r"^TextTable: `tokenizer` must be given outside of a run"):
        data.train_set[0]
    pl.Trainer(max_epochs=2, callbacks=[RetrievalEvaluation(ks=(1,))], **QUIET).fit(module, data)
    assert data.train_set[1]["images"].tolist() == embedder.tokenizer.tokens("trainers")


class WordsOfUser(torch.nn.Module):
    """A network of texts that is no TextEmbedder."""

    def __init__(self):
        super().__init__()
        self.tokenizer = NgramTokenizer(buckets=500)
        self.vectors = torch.nn.EmbeddingBag(501, 8, padding_idx=0)

    def forward(self, tokens):
        return self.vectors(tokens + 1)


def test_a_network_of_the_user_needs_only_a_tokenizer(tmp_path):
    network = WordsOfUser()
    before = network.vectors.weight.clone()
    data = TextTable(write_texts(tmp_path, *ROWS), classes_per_batch=2, samples_per_class=2)
    pl.Trainer(max_epochs=1, callbacks=[RetrievalEvaluation(ks=(1,))], **QUIET).fit(
        RetrievalModule(network, SmoothAPLoss()), data
    )
    assert torch.equal(data.train_set[1]["images"], network.tokenizer(["trainers"])[0])
    assert not torch.equal(network.vectors.weight, before)


def test_a_network_without_a_tokenizer_is_one_sentence(tmp_path):
    module = RetrievalModule(torch.nn.Linear(3, 2), SmoothAPLoss())
    data = TextTable(write_texts(tmp_path, *ROWS), classes_per_batch=2, samples_per_class=2)
    with pytest.raises(ValueError, match=r"^TextTable: the network of .* must have a `tokenizer`, got Linear"):
        pl.Trainer(max_epochs=1, **QUIET).fit(module, data)


def test_check_notes_texts_of_several_classes(tmp_path):
    rows = ["text,label,split", "red shoe,a,train", "red shoe,b,train", "blue,a,train", "blue,a,train", "x,c,test"]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    report = TextTable(tmp_path / "a.csv").check()
    assert report.notes == ["texts of train with several labels: 1, such as 'red shoe'"]
    assert report.ok
