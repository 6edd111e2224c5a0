"""Backbones of torchvision: the trunk of each family, pretrained weights, image sizes."""

import PIL.Image
import pytest
import torch
from torchvision import models
from torchvision.models import WeightsEnum

from lightning_retrieval.models import Embedder, Preparation
from lightning_retrieval.models.pretrained import without_pretrained_weights

# One model of each family that torchvision lists.
FAMILIES = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "resnet18",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin_t",
    "vgg11_bn",
    "vit_b_32",
]
SIZE = 96
BUILD = models.get_model


def of_features_only(name):
    """A model whose large classifier has shapes, but no numbers."""
    with torch.device("meta"):
        model = BUILD(name)
    model.features.to_empty(device="cpu")
    for part in model.features.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return model


def small_convnext():
    block = models.convnext.CNBlockConfig
    return models.ConvNeXt([block(8, 16, 1), block(16, None, 1)])


# Models of the same classes as those of these names, which take less time.
SMALL = {
    "alexnet": lambda: of_features_only("alexnet"),
    "convnext_tiny": small_convnext,
    "googlenet": lambda: BUILD("googlenet", aux_logits=False, init_weights=False),
    "inception_v3": lambda: BUILD("inception_v3", aux_logits=False, init_weights=False),
    "maxvit_t": lambda: models.MaxVit((224, 224), 8, 7, [8, 16], [1, 1], 4, 0.0),
    "swin_t": lambda: models.SwinTransformer([4, 4], 12, [1, 1], [1, 2], [3, 3]),
    "vgg11_bn": lambda: of_features_only("vgg11_bn"),
    "vit_b_32": lambda: models.VisionTransformer(SIZE, 32, num_layers=2, num_heads=2, hidden_dim=12, mlp_dim=24),
}


class PoolingIsReachedError(Exception):
    """Ends the forward of a model."""


def pooling_input(model, images):
    """The input of the model's own pooling or classifier in its own forward."""
    inputs = []

    def keep(module, args):
        inputs.append(args[0].clone())
        raise PoolingIsReachedError

    name = next(name for name in ("avgpool", "classifier", "fc", "heads") if hasattr(model, name))
    getattr(model, name).register_forward_pre_hook(keep)
    with torch.no_grad(), pytest.raises(PoolingIsReachedError):
        model.eval()(images)
    return inputs[0]


def assert_same_features(features, expected):
    if features.ndim > expected.ndim:  # the model pools by a function call
        features = features.mean((2, 3))
    scale = expected.std()  # far below the default tolerance in some models with random weights
    assert scale > 0
    torch.testing.assert_close(features / scale, expected / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_backbone_returns_the_input_of_the_model_s_own_pooling(name, monkeypatch):
    built = []

    def build(name, **settings):
        model = SMALL[name]() if name in SMALL else BUILD(name, **settings)
        built.append(model)
        return model

    monkeypatch.setattr(models, "get_model", build)
    embedder = Embedder(name, 8).eval()
    size = 224 if name == "maxvit_t" else SIZE
    images = torch.randn(1, 3, size, size)
    with torch.no_grad():
        features, embeddings = embedder.backbone(images), embedder(images)
    assert_same_features(features, pooling_input(built[0], images))
    assert features.shape[1] == embedder.feature_dim
    assert features.ndim == (2 if name == "vit_b_32" else 4)
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(1))


def test_pretrained_weights_are_loaded_and_not_downloaded_while_a_checkpoint_is_loaded(monkeypatch):
    """With weights, GoogLeNet has auxiliary classifiers, and transforms images, which no weight of it says."""
    model = models.get_model("googlenet", aux_logits=True, init_weights=False, transform_input=True)
    requested = []

    def get_state_dict(self, *args, **kwargs):
        requested.append(self.name)
        return model.state_dict()

    monkeypatch.setattr(WeightsEnum, "get_state_dict", get_state_dict)
    embedder = Embedder("googlenet", 8, weights="IMAGENET1K_V1").eval()
    assert requested == ["IMAGENET1K_V1"]
    assert embedder.init_args()["weights"] == "IMAGENET1K_V1"
    assert not any("aux" in key.lower() for key in embedder.state_dict())
    images = torch.rand(1, 3, SIZE, SIZE)
    monkeypatch.setattr(WeightsEnum, "get_state_dict", None)
    with without_pretrained_weights():
        twin = Embedder(**embedder.init_args()).eval()
    twin.load_state_dict(embedder.state_dict())
    assert twin(images).equal(embedder(images))
    with torch.no_grad():
        assert_same_features(embedder.backbone(images), pooling_input(model, images))


def test_preparation_is_that_of_the_weights(monkeypatch):
    model = models.get_model("mobilenet_v2")
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *args, **kwargs: model.state_dict())
    of_weights = models.MobileNet_V2_Weights.IMAGENET1K_V2.transforms()
    embedder = Embedder("mobilenet_v2", 8, weights="IMAGENET1K_V2")
    image = PIL.Image.effect_mandelbrot((300, 280), (-2, -1.5, 1, 1.5), 40).convert("RGB")
    assert embedder.preparation == Preparation(image_size=224, resize=232)
    one_grey_level = 1.01 / 255 / torch.tensor(of_weights.std)[:, None, None]
    assert ((embedder.preparation(image) - of_weights(image)).abs() <= one_grey_level).all()  # of Pillow's resizing
