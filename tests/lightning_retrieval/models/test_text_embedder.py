"""`TextEmbedder` against transformers' own output, its tokenizers against scikit-learn and transformers."""

import copy
import json
import zlib

import pytest
import tokenizers
import torch

from lightning_retrieval.models import NgramTokenizer, TextEmbedder
from lightning_retrieval.models.pretrained import without_pretrained_weights
from lightning_retrieval.plain_data import describe, rebuild
from tests.lightning_retrieval.models.hugging_face_folders import TEXT_MODELS, write_text_folder

TEXTS = ["red shoes", "A SOFA of green velvet, which is long", "naïve", "shoes", ""]


def features_of_transformers(kind, model, tokenizer, texts):
    """What transformers computes for these texts, each by itself; SigLIP was trained on texts of the full length."""
    rows = []
    for text in texts:
        ids = tokenizer(text, truncation=True)["input_ids"]
        if kind.startswith("siglip"):
            ids = ids + [0] * (12 - len(ids))
        output = getattr(model, "text_model", model)(input_ids=torch.tensor([ids]))
        if kind in ("bert", "roberta"):
            rows.append(output.last_hidden_state[0].mean(0))
        else:
            rows.append(output.pooler_output[0])
    return torch.stack(rows)


@pytest.mark.parametrize("kind", TEXT_MODELS)
def test_a_text_model_gives_what_transformers_gives(kind, tmp_path):
    model, tokenizer = write_text_folder(tmp_path, kind)
    embedder = TextEmbedder(f"hf/{tmp_path}", 8, weights="DEFAULT").eval()
    tokens = embedder.tokenizer(TEXTS)
    for row, text in zip(tokens, TEXTS):
        assert row[row >= 0].tolist() == tokenizer(text, truncation=True)["input_ids"]
    with torch.no_grad():
        features = embedder.backbone(tokens)
        torch.testing.assert_close(features, features_of_transformers(kind, model, tokenizer, TEXTS))
        expected = torch.nn.functional.normalize(embedder.head(features))
        torch.testing.assert_close(embedder(tokens), expected)


@pytest.mark.parametrize("kind", ["bert", "clip"])
def test_parameters_are_float32_unless_the_user_asks_for_another_type(kind, tmp_path):
    model, _ = write_text_folder(tmp_path, kind)
    model.bfloat16().save_pretrained(tmp_path)
    for arguments, dtype in (({}, torch.float32), ({"dtype": "bfloat16"}, torch.bfloat16)):
        for weights in ("DEFAULT", None):
            embedder = TextEmbedder(f"hf/{tmp_path}", 8, weights=weights, backbone_args=arguments)
            assert {value.dtype for value in embedder.backbone.parameters()} == {dtype}
            assert embedder(embedder.tokenizer(TEXTS)).dtype == torch.float32


def change_json(path, **entries):
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_cut_at_the_end_that_the_tokenizer_names(side, tmp_path):
    import transformers

    write_text_folder(tmp_path, "bert")
    change_json(tmp_path / "tokenizer_config.json", truncation_side=side)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for length in (None, 5):
        embedder = TextEmbedder(f"hf/{tmp_path}", 8, max_length=length)
        other = TextEmbedder(f"hf/{tmp_path}", 8)
        other.set_extra_state(embedder.get_extra_state())
        text = "red shoes of green velvet, a long sofa"
        wanted = tokenizer(text, truncation=True, max_length=length)["input_ids"]
        for found in (embedder, other):
            assert found.tokenizer([text]).tolist() == [wanted]


@pytest.mark.parametrize(
    ("kind", "of_config", "of_file"),
    [
        ("BertTokenizer", True, False),
        ("BertTokenizer", False, True),
        ("PreTrainedTokenizerFast", True, False),
        ("PreTrainedTokenizerFast", False, True),
    ],
)
def test_a_tokenizer_of_bert_changes_the_case_as_transformers_does(kind, of_config, of_file, tmp_path):
    import transformers

    write_text_folder(tmp_path, "bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "RED", "é", "e"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=of_file)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    change_json(tmp_path / "tokenizer_config.json", tokenizer_class=kind, do_lower_case=of_config)
    wanted = transformers.AutoTokenizer.from_pretrained(tmp_path)("RED é")["input_ids"]
    assert TextEmbedder(f"hf/{tmp_path}", 8).tokenizer(["RED é"]).tolist() == [wanted]


def test_texts_of_siglip_are_in_lower_case_whatever_its_tokenizer_does(tmp_path):
    write_text_folder(tmp_path, "siglip")
    file = tmp_path / "tokenizer.json"
    embedder = TextEmbedder(f"hf/{tmp_path}", 8)
    wanted = embedder.tokenizer(["red shoes"])
    for normalizer in (None, {"type": "NFC"}):
        change_json(file, normalizer=normalizer)
        assert torch.equal(TextEmbedder(f"hf/{tmp_path}", 8).tokenizer(["RED Shoes"]), wanted)


@pytest.mark.parametrize("kind", [*TEXT_MODELS, "ngram_net"])
def test_an_embedding_depends_neither_on_padding_nor_on_the_batch(kind, tmp_path):
    name = kind
    if kind in TEXT_MODELS:
        write_text_folder(tmp_path, kind)
        name = f"hf/{tmp_path}"
    embedder = TextEmbedder(name, 8).eval()
    together = embedder(embedder.tokenizer(TEXTS))
    alone = torch.cat([embedder(embedder.tokenizer([text])) for text in TEXTS])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)
    no_tokens = embedder(torch.full((2, 3), -1))
    assert torch.isfinite(no_tokens).all()
    assert torch.isfinite(embedder(torch.full((2, 0), -1))).all()


@pytest.mark.parametrize("kind", ["bert", "ngram_net"])
def test_a_text_embedder_is_rebuilt_from_plain_data_and_its_state(kind, tmp_path, monkeypatch):
    settings = {"backbone_args": {"buckets": 50, "min_n": 2}}
    name = kind
    if kind in TEXT_MODELS:
        write_text_folder(tmp_path / "model", kind)
        name, settings = f"hf/{tmp_path / 'model'}", {"max_length": 5}
    embedder = TextEmbedder(name, 8, **settings).eval()
    expected = embedder(embedder.tokenizer(TEXTS))
    described = json.loads(json.dumps(describe(embedder)))
    torch.save(embedder.state_dict(), tmp_path / "state.pt")
    if kind in TEXT_MODELS:
        (tmp_path / "model").rename(tmp_path / "gone")
    with without_pretrained_weights():
        rebuilt = rebuild("query_embedder", described, torch.nn.Module).eval()
    rebuilt.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(rebuilt(rebuilt.tokenizer(TEXTS)), expected)
    assert describe(rebuilt) == described
    assert copy.deepcopy(rebuilt).tokenizer(TEXTS).shape[1] == rebuilt.tokenizer(TEXTS).shape[1]


def test_ngrams_are_those_of_scikit_learn(monkeypatch):
    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")  # scikit-learn sets it
    from sklearn.feature_extraction.text import CountVectorizer

    ngrams = CountVectorizer(analyzer="char_wb", ngram_range=(2, 4)).build_analyzer()
    tokenizer = NgramTokenizer(buckets=1000, min_n=2, max_n=4)
    for text in ["red shoes", "a b  cd", "Ünïcode 鞋子", "I", ""]:
        assert tokenizer.tokens(text) == [zlib.crc32(ngram.encode()) % 1000 for ngram in ngrams(text.lower().strip())]
    assert tokenizer.tokens("ＲＥＤ\tshoes\n") == tokenizer.tokens("red shoes")
    assert tokenizer(["red shoes", ""])[1].eq(-1).all()


def test_ngrams_are_cut_at_the_maximum_length():
    tokenizer = TextEmbedder("ngram_net", 8, max_length=4).tokenizer
    assert tokenizer(["red shoes of a green sofa", "a"]).shape[1] == 4


@pytest.mark.parametrize(("kind", "length"), [("bert", 12), ("roberta", 9), ("clip", 12), ("siglip", 12)])
def test_texts_are_cut_at_the_length_of_the_model(kind, length, tmp_path):
    """A model of the kind of RoBERTa counts positions from the token of padding on, which is 3 here."""
    write_text_folder(tmp_path, kind)
    (tmp_path / "tokenizer_config.json").unlink()
    embedder = TextEmbedder(f"hf/{tmp_path}", 8)
    tokens = embedder.tokenizer(["red " * 30])
    assert tokens.shape[1] == length
    assert torch.isfinite(embedder(tokens)).all()
