"""Tokenizers: functions from texts to an integer tensor (rows, tokens), padded with -1, which a `TextEmbedder` takes.

A tokenizer is plain data: a few numbers, or the text of a `tokenizer.json`. A checkpoint holds it, and needs neither a
vocabulary file nor a network.
"""

import json
import unicodedata
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from lightning_retrieval.arguments import checked, integers
from lightning_retrieval.checks import check_integer, check_strings, first_line, short_repr
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.models.backbone_request import BackboneRequest
from lightning_retrieval.models.hugging_face_backbones import not_loaded, source_of
from lightning_retrieval.optional_packages import optional_import

PADDING = -1  # the token that fills shorter rows
MOST_BUCKETS = 1 << 22
MOST_CHARACTERS = 64  # largest length of an n-gram
MOST_TOKENS = 1 << 16
# Classes of transformers that take all of a tokenizer from its file.
GENERAL_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


class Tokenizer(ABC):
    """Base class of the tokenizers.

    Args:
        max_length: maximum number of tokens of a text. Longer texts are cut.

    Raises:
        ValueError: if `max_length` is out of its range.
        TypeError: if `max_length` is not an integer; when called, if the texts are one string.
    """

    def __init__(self, max_length: Annotated[int, integers(1, MOST_TOKENS)]) -> None:
        self.max_length = checked(self, max_length=max_length)

    def __call__(self, texts: Sequence[str]) -> Int64[Tensor, "rows tokens"]:
        """The tokens of each text, at most `max_length`, padded with -1 to the longest row.

        Args:
            texts: any strings, also empty ones.
        """
        check_strings("texts", texts, owner=type(self).__name__)
        return padded([torch.tensor(self.tokens(text)[: self.max_length], dtype=torch.int64) for text in texts])

    @abstractmethod
    def tokens(self, text: str) -> list[int]:
        """The tokens of a text; they may be more than `max_length`."""


def padded(rows: Sequence[Int64[Tensor, " _"]]) -> Int64[Tensor, "rows tokens"]:
    """Rows of tokens as one tensor, padded with -1.

    Args:
        rows: the tokens of each text.
    """
    if not rows:
        return torch.empty(0, 0, dtype=torch.int64)
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=PADDING)


class NgramTokenizer(Tokenizer):
    """Maps each text to its hashed character n-grams, without a vocabulary.

    The text is normalised (NFKC), lower-cased and split at white space. Each word gets a space on both sides, and its
    n-grams are those of scikit-learn's analyzer `char_wb`. An n-gram becomes the CRC-32 of its UTF-8 bytes modulo
    `buckets`, which is the same on all machines.

    Args:
        buckets: number of different tokens, up to 2^22.
        min_n: length of the shortest n-grams, in characters.
        max_n: length of the longest n-grams, up to 64.
        max_length: maximum number of tokens of a text. Longer texts are cut.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if a number is not an integer.

    Example:
        >>> from lightning_retrieval.models import NgramTokenizer
        >>> NgramTokenizer(buckets=1000, min_n=3, max_n=3)(["Red", "red shoes"])
        tensor([[785, 455,  98,  -1,  -1,  -1,  -1,  -1],
                [785, 455,  98, 157, 901, 317, 291, 204]])
    """

    def __init__(
        self,
        *,
        buckets: Annotated[int, integers(1, MOST_BUCKETS)] = 1 << 15,
        min_n: int = 3,
        max_n: Annotated[int, integers(1, MOST_CHARACTERS)] = 5,
        max_length: int = 1024,
    ) -> None:
        super().__init__(max_length)
        self.buckets = checked(self, buckets=buckets)
        self.max_n = checked(self, max_n=max_n)
        self.min_n = check_integer("min_n", min_n, 1, max_n, owner=type(self).__name__)

    def tokens(self, text: str) -> list[int]:
        return [zlib.crc32(ngram.encode("utf-8", "surrogatepass")) % self.buckets for ngram in self._ngrams(text)]

    def _ngrams(self, text: str) -> Iterator[str]:
        for word in unicodedata.normalize("NFKC", text).lower().split():
            marked = f" {word} "
            for n in range(self.min_n, self.max_n + 1):
                for begin in range(max(1, len(marked) - n + 1)):
                    yield marked[begin : begin + n]
                if n >= len(marked):  # longer n-grams would be the same
                    break


class JSONTokenizer(Tokenizer):
    """A fast tokenizer of Hugging Face, rebuilt from the text of its `tokenizer.json` without running any code of it.

    Args:
        text: content of `tokenizer.json`.
        max_length: maximum number of tokens of a text, including special tokens. Longer texts are cut.

    Raises:
        ValueError: if the text is not that of a tokenizer.
        ModuleNotFoundError: if the package tokenizers is not installed, which comes with transformers.
    """

    def __init__(self, text: str, *, max_length: int) -> None:
        super().__init__(max_length)
        with optional_import(
            "tokenizers must be installed for the tokenizer of a Hugging Face model: "
            "pip install 'lightning-retrieval[hf]'.",
            "JSONTokenizer",
        ):
            import tokenizers
        self.text = text
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            self._tokenizer.no_padding()
            cut = self._tokenizer.truncation or {}
            self._tokenizer.enable_truncation(max_length, direction=cut.get("direction", "right"))
        except Exception as error:  # tokenizers raises errors without a type of their own
            rule = f"must be the content of a {TOKENIZER_FILE}"
            raise InvalidValue(rule, "JSONTokenizer", "text", got=f"{short_repr(text)} ({first_line(error)})") from None

    def tokens(self, text: str) -> list[int]:
        without_lone_surrogates = text.encode("utf-8", "replace").decode()
        ids: list[int] = self._tokenizer.encode(without_lone_surrogates).ids
        return ids

    def state(self) -> UInt8[Tensor, " bytes"]:
        """The tokenizer as a tensor, for the state dict of a model. Its numbers are bytes of JSON."""
        content = json.dumps({"tokenizer": self.text, "max_length": self.max_length})
        return torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)

    @classmethod
    def from_state(cls, state: Any) -> "JSONTokenizer":
        """Rebuild the tokenizer that `state` has returned.

        Args:
            state: the tensor.
        """
        content = json.loads(state.cpu().numpy().tobytes())
        return cls(content["tokenizer"], max_length=content["max_length"])


def with_settings(text: str, settings: Mapping[str, Any], *, lower_case: bool) -> str:
    """The content of a `tokenizer.json` with settings that transformers takes from other sources.

    Args:
        text: the content.
        settings: those of `tokenizer_config.json`. `truncation_side` decides which end of longer texts is cut, and
            `do_lower_case` whether a tokenizer of BERT changes the case.
        lower_case: whether the model was trained on texts in lower case, to which all texts are then changed.
    """
    content = json.loads(text)
    changed = dict(content)
    normalizer = content.get("normalizer")
    says_case = "do_lower_case" in settings and settings.get("tokenizer_class") not in GENERAL_CLASSES
    if says_case and isinstance(normalizer, dict) and normalizer.get("type") == "BertNormalizer":
        changed["normalizer"] = {**normalizer, "lowercase": settings["do_lower_case"] is True}
    if lower_case and "Lowercase" not in json.dumps(normalizer):
        steps = [{"type": "Lowercase"}, *filter(None, [normalizer])]
        changed["normalizer"] = {"type": "Sequence", "normalizers": steps}
    side = settings.get("truncation_side")
    if side in ("left", "right"):
        cut = {"max_length": MOST_TOKENS, "strategy": "LongestFirst", "stride": 0}
        changed["truncation"] = {**(content.get("truncation") or cut), "direction": str(side).capitalize()}
    if changed == content:
        return text
    return json.dumps(changed, ensure_ascii=False)


def read_hugging_face_tokenizer(
    request: BackboneRequest, max_length: int, *, lower_case: bool = False
) -> JSONTokenizer:
    """Read the tokenizer of a model of Hugging Face.

    Args:
        request: the name and the weights of the model.
        max_length: maximum number of tokens that the model takes. The tokenizer may have a lower one.
        lower_case: as for `with_settings`.

    Raises:
        ValueError: if there is no `tokenizer.json`, or the file is not one of a tokenizer.
    """
    from transformers.utils.hub import cached_file

    name, source = request.name, source_of(request)
    try:
        file = Path(str(cached_file(name, TOKENIZER_FILE, **source)))
        settings: dict[str, Any] = {}  # without the file, the limit is that of the model
        with suppress(OSError, ValueError):
            settings = json.loads(Path(str(cached_file(name, TOKENIZER_CONFIG, **source))).read_text(encoding="utf-8"))
        text = with_settings(file.read_text(encoding="utf-8"), settings, lower_case=lower_case)
    except (OSError, ValueError) as error:
        raise not_loaded(request, "backbone", f"the {TOKENIZER_FILE} of hf/{name}", error) from None
    of_tokenizer = settings.get("model_max_length")
    if isinstance(of_tokenizer, int) and of_tokenizer > 0:
        max_length = min(max_length, of_tokenizer)
    return JSONTokenizer(text, max_length=max_length)
