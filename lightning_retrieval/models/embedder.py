"""The embedder: backbone, pooling, optional layer norm, linear embedding, L2 normalisation.

The order is that of Radenovic et al. (TPAMI 2019, section 3): GeM pooling of the last feature map, a linear map (there
a learned whitening), the unit sphere.
"""

import difflib
from collections import OrderedDict
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_retrieval.checks import check_choice, check_integer
from lightning_retrieval.models.glyph_net import GlyphNet
from lightning_retrieval.models.pooling import GeM, GlobalAvgPool, GlobalMaxPool
from lightning_retrieval.ranking.similarity import normalize as unit

Pooling = Literal["gem", "avg", "max"]
Self = TypeVar("Self", bound="Embedder")

POOLINGS: dict[str, type[nn.Module]] = {"gem": GeM, "avg": GlobalAvgPool, "max": GlobalMaxPool}


class Embedder(nn.Module):
    """Images to embeddings: `backbone`, then `pool`, then `head` (optional layer norm and a linear layer).

    Args:
        backbone: the name of a torchvision classification model (`"resnet50"`, `"vit_b_16"`, ...), whose classifier is
            taken off; `"glyph_net"`, for `GlyphNet()`; or a module from images to feature maps (N, C, H, W) or vectors
            (N, C).
        embedding_dim: length of an embedding, >= 1.
        pooling: of feature maps: `"gem"` (`GeM`, p = 3, learned), `"avg"` or `"max"`. Vectors are not pooled.
        normalize: put the embeddings on the unit sphere, in float32 or better, also under autocast.
        weights: torchvision's name of pretrained weights, such as `"IMAGENET1K_V2"` or `"DEFAULT"`; none by default.
            Only with the name of a torchvision model; downloaded to torch.hub's folder the first time.
        layer_norm: a layer norm on the pooled features, before the linear layer.
        freeze_batch_norm: keep every batch norm of the backbone in eval mode, whatever `train()` says: the running
            statistics are used and never updated. The affine parameters (weight and bias) stay trainable.
        feature_dim: length C of the backbone's features, >= 1; found out where not given. For a module that cannot be
            tried on meta tensors. Where such a module gives vectors, choose `"avg"` or `"max"`, so that no
            parameter of the pooling is left without a use.

    Raises:
        ValueError: if the backbone, the weights or the pooling is unknown, a length is below 1, weights are given
            with a backbone that has none, or the features have another shape than (N, C, H, W) or (N, C).
        TypeError: if the backbone is neither a name nor a module, or does not give a tensor.

    Example:
        >>> import torch
        >>> from lightning_retrieval.models import Embedder
        >>> embedder = Embedder("resnet18", embedding_dim=128, freeze_batch_norm=True)
        >>> embeddings = embedder(torch.rand(2, 3, 64, 64))
        >>> embeddings.shape, embeddings.norm(dim=1).allclose(torch.ones(2))
        (torch.Size([2, 128]), True)
        >>> groups = [{"params": embedder.head.parameters(), "lr": 1e-3}, {"params": embedder.pool.parameters()},
        ...           {"params": embedder.backbone.parameters()}]
        >>> optimizer = torch.optim.AdamW(groups, lr=1e-4)

    Cost:
        The backbone's. The feature length is found with meta tensors: no arithmetic, no copy of the weights, and
        neither the random state nor any buffer changes.

    Relations:
        Every classification model that torchvision lists is taken, none of its families refused. The convolutional
        ones, Swin and MaxViT give the feature map that their own average pooling sees. What lies behind that pooling
        is taken off with the classifier: ConvNeXt's and MaxViT's last layer norm (`layer_norm=True` puts a new one
        there), the hidden layers of AlexNet, VGG and MobileNetV3. ViT gives its class token, so it is not pooled; ViT
        and MaxViT take only images of the size they were built for (224, some ViT weights 384 or 518). Inception's and
        GoogLeNet's auxiliary classifiers are taken off as well. For another size, or models of other libraries, give
        the module. A module with channels last (N, H, W, C) cannot be told from feature maps: permute it first.
    """

    def __init__(
        self,
        backbone: str | nn.Module,
        embedding_dim: int = 512,
        pooling: Pooling = "gem",
        normalize: bool = True,
        *,
        weights: str | None = None,
        layer_norm: bool = False,
        freeze_batch_norm: bool = False,
        feature_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.embedding_dim = check_integer("Embedder", "embedding_dim", embedding_dim, 1)
        self.pooling: Pooling = check_choice("Embedder", "pooling", pooling, tuple(POOLINGS))
        self.normalize = normalize
        self.weights = weights
        self.layer_norm = layer_norm
        self.freeze_batch_norm = freeze_batch_norm
        if feature_dim is not None:
            check_integer("Embedder", "feature_dim", feature_dim, 1)
        self.backbone_name = backbone if isinstance(backbone, str) else None
        self.backbone = _build(backbone, weights)
        pooled = True
        if feature_dim is None:
            shape = _feature_shape(self.backbone)
            feature_dim, pooled = shape[1], len(shape) == 4
        self.feature_dim = feature_dim
        self.pool = POOLINGS[pooling]() if pooled else nn.Identity()
        self.head = nn.Sequential()
        if layer_norm:
            self.head.add_module("norm", nn.LayerNorm(feature_dim))
        self.head.add_module("linear", nn.Linear(feature_dim, embedding_dim))
        self._freeze()

    def forward(self, images: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch dim"]:
        """Embed a batch.

        Args:
            images: what the backbone takes: (N, 3, H, W) for torchvision's models, (N, 1, 32, 32) for `"glyph_net"`.

        Raises:
            ValueError: if the backbone's features have another shape than (N, C, H, W) or (N, C), or not
                `feature_dim` channels.
            TypeError: if the backbone does not give a tensor.
        """
        features = self.backbone(images)
        _check_features(features, tuple(images.shape))
        if features.shape[1] != self.feature_dim:
            raise ValueError(
                f"Embedder: `backbone` must give features with {self.feature_dim} channels (`feature_dim`), got "
                f"{tuple(features.shape)} for images of shape {tuple(images.shape)}."
            )
        if features.ndim == 4:
            features = self.pool(features)
        embeddings: Tensor = self.head(features)
        return unit(embeddings) if self.normalize else embeddings

    def train(self: Self, mode: bool = True) -> Self:
        """Set the training mode, leaving a frozen batch norm in eval mode."""
        super().train(mode)
        self._freeze()
        return self

    def init_args(self) -> dict[str, Any] | None:
        """The constructor's arguments as plain values, or None where the backbone was given as a module.

        `Embedder(**embedder.init_args())` has the same shape. To load a state dict into it afterwards, pass
        `weights=None` over it: there is then nothing to download.
        """
        if self.backbone_name is None:
            return None
        return {
            "backbone": self.backbone_name,
            "embedding_dim": self.embedding_dim,
            "pooling": self.pooling,
            "normalize": self.normalize,
            "weights": self.weights,
            "layer_norm": self.layer_norm,
            "freeze_batch_norm": self.freeze_batch_norm,
        }

    def extra_repr(self) -> str:
        return (
            f"backbone_name={self.backbone_name!r}, embedding_dim={self.embedding_dim}, pooling={self.pooling!r}, "
            f"normalize={self.normalize}, weights={self.weights!r}, layer_norm={self.layer_norm}, "
            f"freeze_batch_norm={self.freeze_batch_norm}"
        )

    def _freeze(self) -> None:
        if self.freeze_batch_norm:
            for module in self.backbone.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()


def _build(backbone: str | nn.Module, weights: str | None) -> nn.Module:
    """The backbone itself: a module as it came, a name without its classifier."""
    if not isinstance(backbone, (str, nn.Module)):
        raise TypeError(
            f"Embedder: `backbone` must be the name of a model or a torch.nn.Module, got {backbone!r} "
            f"({type(backbone).__name__})."
        )
    if weights is not None and (isinstance(backbone, nn.Module) or backbone == "glyph_net"):
        what = repr(backbone) if isinstance(backbone, str) else f"a module ({type(backbone).__name__})"
        raise ValueError(
            f"Embedder: `weights` must be None where `backbone` is not the name of a torchvision model, got "
            f"{weights!r} for {what}."
        )
    if isinstance(backbone, nn.Module):
        return backbone
    if backbone == "glyph_net":
        return GlyphNet()

    from torchvision import models

    names = models.list_models(module=models)
    if backbone not in names:
        close = difflib.get_close_matches(backbone.lower(), [*names, "glyph_net"], n=3, cutoff=0.5)
        raise ValueError(
            "Embedder: `backbone` must be the name of a torchvision classification model, 'glyph_net' or a module, got "
            f"{backbone!r}; " + (f"close names are {', '.join(map(repr, close))}." if close else "no name is close.")
        )
    if weights is not None:
        check_choice("Embedder", "weights", weights, tuple(models.get_model_weights(backbone).__members__))
    # With weights, torchvision itself chooses these two (and refuses them as arguments).
    inception = backbone in ("googlenet", "inception_v3") and weights is None
    settings = {"aux_logits": False, "init_weights": True} if inception else {}
    return _without_classifier(models.get_model(backbone, weights=weights, **settings))


def _without_classifier(model: nn.Module) -> nn.Module:
    """A torchvision model up to its last feature map, or, for ViT, up to its class token.

    torchvision registers the parts of a model in the order in which its forward calls them, so everything before the
    pooling or, where that is a function call, before the classifier is the trunk, under the names it has in the state
    dict. What a forward does besides calling its parts is added here; the tests hold each family against its forward.
    """
    from torchvision.models import DenseNet, VisionTransformer

    is_vit = isinstance(model, VisionTransformer)
    if is_vit:
        model.heads = nn.Identity()
        return model
    trunk: OrderedDict[str, nn.Module] = OrderedDict()
    if getattr(model, "transform_input", False):
        trunk["transform_input"] = _InceptionInput()
    for name, part in model.named_children():
        if name in ("avgpool", "classifier", "fc"):
            break
        if name not in ("aux1", "aux2", "AuxLogits"):
            trunk[name] = nn.Sequential(*part) if isinstance(part, nn.ModuleList) else part
    else:
        raise ValueError(
            f"Embedder: `backbone` must be a model whose classifier can be found, got {type(model).__name__} with the "
            f"parts {', '.join(trunk)}; build it, take its classifier off and give the module."
        )
    if isinstance(model, DenseNet):
        trunk["relu"] = nn.ReLU(inplace=True)
    return nn.Sequential(trunk)


class _InceptionInput(nn.Module):
    """From ImageNet's mean and deviation to the 0.5 and 0.5 that Inception's and GoogLeNet's weights expect."""

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[..., None, None]
        self.register_buffer("scale", std / 0.5, persistent=False)
        self.register_buffer("shift", (mean - 0.5) / 0.5, persistent=False)

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch 3 height width"]:
        return images * self.scale + self.shift


def _feature_shape(backbone: nn.Module) -> tuple[int, ...]:
    """The shape of the features of one image, found in eval mode on meta tensors, which hold no numbers."""
    size = getattr(backbone, "image_size", None)  # ViT takes no other
    size = size if isinstance(size, int) else 224
    channels = next((part.in_channels for part in backbone.modules() if isinstance(part, nn.Conv2d)), 3)
    state = {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}
    dtype = next((value.dtype for value in state.values() if value.is_floating_point()), torch.get_default_dtype())
    images = torch.empty(1, channels, size, size, dtype=dtype, device="meta")
    modes = [(module, module.training) for module in backbone.modules()]
    backbone.eval()
    try:
        with torch.no_grad():
            features = functional_call(backbone, {name: value.to("meta") for name, value in state.items()}, (images,))
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"Embedder: `backbone` {type(backbone).__name__} could not be tried on a meta tensor of shape "
            f"{tuple(images.shape)} ({type(error).__name__}: {reason}); give `feature_dim`, the length of its features."
        ) from None
    finally:
        for module, mode in modes:
            module.training = mode
    _check_features(features, tuple(images.shape))
    return tuple(features.shape)


def _check_features(features: Any, images: tuple[int, ...]) -> None:
    """Refuse anything but feature maps or vectors."""
    if not isinstance(features, Tensor):
        raise TypeError(f"Embedder: `backbone` must give a tensor, got {type(features).__name__}.")
    if features.ndim not in (2, 4):
        raise ValueError(
            "Embedder: `backbone` must give feature maps (N, C, H, W) or vectors (N, C), got "
            f"{tuple(features.shape)} for images of shape {images}."
        )
