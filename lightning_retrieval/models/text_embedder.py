"""The embedder of texts: a tokenizer, a backbone for tokens, a linear layer and L2 normalisation.

The input of the network is a tensor of tokens (rows, tokens), padded with -1, so that batches of texts are split into
chunks, sent to devices and gathered like batches of images. The tokenizer is part of the checkpoint.
"""

import os
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from lightning_retrieval.arguments import PositiveInt, checked
from lightning_retrieval.checks import check_integer, short_repr
from lightning_retrieval.first_checks import is_local_file
from lightning_retrieval.invalid import InvalidValue, reported_as
from lightning_retrieval.models.backbone_request import BackboneRequest
from lightning_retrieval.models.embedder import Dim
from lightning_retrieval.models.hugging_face_backbones import build_text_model, hub_of
from lightning_retrieval.models.pretrained import are_skipped
from lightning_retrieval.models.tokenizers import PADDING, JSONTokenizer, NgramTokenizer, read_hugging_face_tokenizer
from lightning_retrieval.ranking.rows import normalize as l2_normalize

NGRAM_NET = "ngram_net"
HUGGING_FACE = "hf/"
NGRAM_SETTINGS = ("buckets", "min_n", "max_n")  # arguments of "ngram_net" that are those of the tokenizer
# Text models that were trained without a mask, on texts in lower case that are padded to the full length. They pool the
# last token.
PADDED_MODELS = ("siglip_text_model", "siglip2_text_model")
DEFAULT_LENGTH = 512  # maximum number of tokens of a model that does not name one


class NgramNet(nn.Module):
    """A hidden layer on the mean of the vectors of a text's n-grams, small enough to be trained from scratch on a CPU.

    Args:
        buckets: number of different tokens.
        dim: dimension of the vectors and of the hidden layer.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if a number is not an integer.
    """

    def __init__(self, buckets: PositiveInt = 1 << 15, dim: Dim = 128) -> None:
        super().__init__()
        self.dim = checked(self, dim=dim)
        self.buckets = checked(self, buckets=buckets)
        self.vectors = nn.EmbeddingBag(buckets + 1, dim, mode="mean", padding_idx=0)
        self.hidden = nn.Linear(dim, dim)

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        return self.buckets

    def forward(self, tokens: Int64[Tensor, "batch token"]) -> Float[Tensor, "batch dim"]:
        mean = self.vectors(tokens + 1)  # the vector of padding is the first
        return nn.functional.gelu(self.hidden(mean))


class HuggingFaceTextBackbone(nn.Module):
    """A text model of transformers as a function from tokens to vectors.

    A vector is what the model pools itself (CLIP, SigLIP), else the mean of the last hidden states of its tokens.

    Args:
        model: an encoder of texts.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        config = model.config
        self.pads_to: int | None = None
        if config.model_type in PADDED_MODELS:
            self.pads_to = config.max_position_embeddings
        self.padding_id = config.pad_token_id or 0
        self.dim: int = getattr(config, "projection_size", None) or config.hidden_size

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        vectors: nn.Embedding = self.model.get_input_embeddings()
        return vectors.num_embeddings

    @property
    def max_length(self) -> int:
        """Maximum number of tokens that the model takes."""
        length: int = getattr(self.model.config, "max_position_embeddings", DEFAULT_LENGTH)
        embeddings = getattr(self.model, "embeddings", None)
        reserved = getattr(embeddings, "padding_idx", None)  # RoBERTa counts positions from after this one
        if isinstance(reserved, int):
            return length - reserved - 1
        return length

    def forward(self, tokens: Int64[Tensor, "batch token"]) -> Float[Tensor, "batch dim"]:
        if self.pads_to is not None:
            tokens = nn.functional.pad(tokens, (0, self.pads_to - tokens.shape[1]), value=PADDING)
        is_token = tokens >= 0
        ids = tokens.where(is_token, torch.full_like(tokens, self.padding_id))
        if self.pads_to is not None:
            pooled: Tensor = self.model(input_ids=ids).pooler_output
            return pooled
        is_token[:, 0] = True  # an empty text has one token of padding, since attention needs a token
        output = self.model(input_ids=ids, attention_mask=is_token.long())
        if getattr(output, "pooler_output", None) is not None:
            return output.pooler_output  # type: ignore[no-any-return]
        weights = is_token.to(output.last_hidden_state.dtype)[:, :, None]  # (batch, token, 1)
        mean: Tensor = (output.last_hidden_state * weights).sum(1) / weights.sum(1)
        return mean


class TextEmbedder(nn.Module):
    """Maps tokens of texts to embeddings with a `backbone` and a linear `head`; `tokenizer` maps texts to tokens.

    Args:
        backbone: `"ngram_net"`, a small network on hashed character n-grams, which needs no download; or `"hf/"`
            followed by a Hugging Face hub id or a local folder (`"hf/google/siglip-base-patch16-224"`), of whose model
            only the text part is used.
        embedding_dim: dimension of the embeddings, from 1 to 2^20.
        normalize: whether embeddings are L2-normalised, in float32 or better, also under autocast.
        weights: pretrained weights of a model of Hugging Face, as for `Embedder`: None for random weights,
            `"DEFAULT"`, a revision of the hub, or the path of a local file.
        max_length: maximum number of tokens of a text. Longer texts are cut. If None, the maximum of the tokenizer and
            of the model; a number must not exceed these.
        backbone_args: further arguments that build the network, as plain values: `buckets`, `min_n`, `max_n` and `dim`
            for `"ngram_net"`, or entries of the config of Hugging Face. As for `Embedder`, parameters are float32
            unless `dtype` is given.

    Raises:
        ValueError: if the backbone or the weights are unknown, a number is out of its range, or an argument does not
            belong to the backbone.
        TypeError: if the backbone is not a name, or a number is not an integer.
        ModuleNotFoundError: if transformers is not installed and the backbone needs it.

    Example:
        >>> from lightning_retrieval.models import TextEmbedder
        >>> embedder = TextEmbedder("ngram_net", embedding_dim=64)
        >>> tokens = embedder.tokenizer(["red shoes", "a sofa", ""])
        >>> tuple(tokens.shape), tuple(embedder(tokens).shape)
        ((3, 18), (3, 64))

    Relations:
        `TwoNetworks` gives it to a `RetrievalModule` whose queries are texts. `TextTable` reads the texts and uses
        `tokenizer`. The state dict holds a tokenizer of Hugging Face as bytes, so that a checkpoint needs no files
        besides. Any other module that embeds texts needs an attribute `tokenizer`, a function from texts to tokens
        padded with -1.
    """

    backbone: NgramNet | HuggingFaceTextBackbone
    tokenizer: Any  # the function from texts to tokens; None until the state dict is loaded, if a file described it

    def __init__(
        self,
        backbone: str,
        embedding_dim: Dim = 512,
        *,
        normalize: bool = True,
        weights: str | None = None,
        max_length: PositiveInt | None = None,
        backbone_args: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.embedding_dim = checked(self, embedding_dim=embedding_dim)
        self.normalize = normalize
        self.weights = weights
        self.max_length = checked(self, max_length=max_length)
        self.backbone_name = backbone
        self.backbone_args: dict[str, Any] = {}
        if backbone_args is not None:
            self.backbone_args = dict(backbone_args)
        self._build()
        self.head = nn.Linear(self.backbone.dim, embedding_dim)

    def forward(self, tokens: Int64[Tensor, "batch token"]) -> Float[Tensor, "batch dim"]:
        """Embed a batch of texts.

        Args:
            tokens: what `tokenizer` returns. A row of -1 is an empty text.

        """
        if tokens.shape[1] == 0:  # all texts are empty
            tokens = nn.functional.pad(tokens, (0, 1), value=PADDING)
        features: Tensor = self.backbone(tokens)
        embeddings: Tensor = self.head(features.to(self.head.weight.dtype))  # `backbone_args` may have a `dtype`
        if self.normalize:
            return l2_normalize(embeddings)
        return embeddings

    def init_args(self) -> dict[str, Any]:
        """The constructor's arguments as plain values.

        The path of a local file of weights is omitted. The tokenizer of a model of Hugging Face is in the state dict.
        """
        weights = self.weights
        if is_local_file(weights):
            weights = None
        return {
            "backbone": self.backbone_name,
            "embedding_dim": self.embedding_dim,
            "normalize": self.normalize,
            "weights": weights,
            "max_length": self.max_length,
            "backbone_args": self.backbone_args,
        }

    def get_extra_state(self) -> Tensor:
        """The tokenizer as bytes; empty if the constructor's arguments describe it."""
        if isinstance(self.tokenizer, JSONTokenizer):
            return self.tokenizer.state()
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Rebuild the tokenizer.

        Args:
            state: what `get_extra_state` has returned.
        """
        if self.backbone_name.startswith(HUGGING_FACE):
            self.tokenizer = JSONTokenizer.from_state(state)

    def extra_repr(self) -> str:
        return (
            f"backbone_name={self.backbone_name!r}, embedding_dim={self.embedding_dim}, normalize={self.normalize}, "
            f"weights={self.weights!r}, max_length={self.max_length}"
        )

    def _build(self) -> None:
        """Build the backbone and its tokenizer."""
        name = self.backbone_name
        self.tokenizer = None
        with reported_as("TextEmbedder"):
            if name == NGRAM_NET:
                self._build_ngram_net()
            elif name.startswith(HUGGING_FACE):
                self._build_hugging_face(name.removeprefix(HUGGING_FACE))
            else:
                rule = "must be 'ngram_net', or 'hf/' and a Hugging Face hub id or a local folder"
                raise InvalidValue(rule, argument="backbone", got=repr(name))

    def _build_ngram_net(self) -> None:
        if self.weights is not None:
            raise InvalidValue("must be None for 'ngram_net'", "TextEmbedder", "weights", got=short_repr(self.weights))
        of_tokenizer = {name: value for name, value in self.backbone_args.items() if name in NGRAM_SETTINGS}
        of_net = {name: value for name, value in self.backbone_args.items() if name not in ("min_n", "max_n")}
        if self.max_length is not None:
            of_tokenizer["max_length"] = self.max_length
        self.tokenizer = NgramTokenizer(**of_tokenizer)
        self.backbone = NgramNet(**of_net)

    def _build_hugging_face(self, name: str) -> None:
        request = BackboneRequest(os.path.expanduser(name), self.weights, None, None, self.backbone_args)
        model, self.backbone_args = build_text_model(request)
        self.backbone = HuggingFaceTextBackbone(model)
        if are_skipped():
            return
        lower_case = self.backbone.pads_to is not None
        with hub_of(request):
            self.tokenizer = read_hugging_face_tokenizer(request, self.backbone.max_length, lower_case=lower_case)
        if self.max_length is not None:
            most = self.tokenizer.max_length
            check_integer("max_length", self.max_length, 1, most, owner="TextEmbedder")
            self.tokenizer = JSONTokenizer(self.tokenizer.text, max_length=self.max_length)
