"""The random image transforms of training of the papers, by name.

| name | with images of 224 pixels |
| --- | --- |
| `"plain"` | short side 256, random crop 224, flip |
| `"smooth_ap"` | random resized crop 224 (area 0.08 to 1), flip |
| `"roadmap"` | short side 256, random resized crop 224 (area 0.16 to 1), flip |
| `"ap_gem"` | random resized crop (area 0.5 to 1; of 800 pixels if no size is set), colour jitter, tilt, flip |

`"smooth_ap"` (Brown et al., ECCV 2020) and `"roadmap"` (Ramzi et al., NeurIPS 2021) are those of the official code.
`"ap_gem"` (Revaud et al., ICCV 2019, section 4.2) has the kinds of transforms and the sizes of the paper; neither the
paper nor its code states the strengths, so these are our choice. What evaluation does is a `Preparation` of the same
name.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torchvision.transforms import InterpolationMode, v2

from lightning_retrieval.checks import check_choice, check_instance
from lightning_retrieval.models import Preparation

PaperName = Literal["plain", "smooth_ap", "roadmap", "ap_gem"]
PAPER_NAMES = ("plain", "smooth_ap", "roadmap", "ap_gem")
AP_GEM_SIZE = 800  # pixels
DEFAULT_SIZE = 224  # pixels, where the preparation does not crop


def training_transform(name: PaperName, preparation: Preparation | None = None) -> Callable[[Any], torch.Tensor]:
    """The random transform of training of a paper: a function from a PIL image to a normalised tensor.

    Args:
        name: `"plain"`, `"smooth_ap"`, `"roadmap"` or `"ap_gem"`.
        preparation: what evaluation does; training has its size, interpolation, channels, mean and standard deviation.
            If None, `Preparation.named(name)`.

    Raises:
        ValueError: if the name is unknown.
        TypeError: if `preparation` is no `Preparation`.

    Example:
        >>> from PIL import Image
        >>> from lightning_retrieval.datamodules import training_transform
        >>> from lightning_retrieval.models import Preparation
        >>> training_transform("roadmap", Preparation(image_size=64))(Image.new("RGB", (640, 480))).shape
        torch.Size([3, 64, 64])

    Relations:
        `Preparation` is what evaluation does. Random numbers are drawn from torch's generator, which `ImageSet` seeds
        for each training image.
    """
    check_choice("training_transform", "name", name, PAPER_NAMES)
    if preparation is None:
        preparation = Preparation.named(name)
    check_instance("training_transform", "preparation", preparation, Preparation)
    steps = _AUGMENTATION[name](preparation)
    if preparation.channels == 1:
        steps.insert(0, v2.Grayscale())
    transform: Callable[[Any], torch.Tensor] = v2.Compose([*steps, v2.PILToTensor(), preparation.normalize])
    return transform


def _plain(preparation: Preparation) -> list[nn.Module]:
    return [_resize(preparation), v2.RandomCrop(_size(preparation)), v2.RandomHorizontalFlip()]


def _smooth_ap(preparation: Preparation) -> list[nn.Module]:
    return [v2.RandomResizedCrop(_size(preparation), interpolation=_mode(preparation)), v2.RandomHorizontalFlip()]


def _roadmap(preparation: Preparation) -> list[nn.Module]:
    crop = v2.RandomResizedCrop(
        _size(preparation), scale=(0.16, 1.0), ratio=(0.75, 1.33), interpolation=_mode(preparation)
    )
    return [_resize(preparation, short_side=True), crop, v2.RandomHorizontalFlip()]


def _ap_gem(preparation: Preparation) -> list[nn.Module]:
    size = _size(preparation, AP_GEM_SIZE)
    return [
        v2.RandomPerspective(0.2),
        v2.RandomResizedCrop(size, scale=(0.5, 1.0), interpolation=_mode(preparation)),
        v2.ColorJitter(0.3, 0.3, 0.2, 0.1),
        v2.RandomHorizontalFlip(),
    ]


_AUGMENTATION: dict[str, Callable[[Preparation], list[nn.Module]]] = {
    "plain": _plain,
    "smooth_ap": _smooth_ap,
    "roadmap": _roadmap,
    "ap_gem": _ap_gem,
}


def _mode(preparation: Preparation) -> InterpolationMode:
    return InterpolationMode(preparation.interpolation)


def _size(preparation: Preparation, default: int = DEFAULT_SIZE) -> tuple[int, int]:
    """Height and width of the training images."""
    size = preparation.crop_size
    if size is None:
        return default, default
    return size


def _resize(preparation: Preparation, *, short_side: bool = False) -> nn.Module:
    """Resizing as in evaluation, or always of the short side; enough for the crop if evaluation does not resize."""
    target = preparation.resized_to
    if target is None:
        target = round(max(_size(preparation)) * 256 / 224)
    if short_side and not isinstance(target, int):
        target = min(target)
    if isinstance(target, int):
        target = max(target, *_size(preparation))
    resize: nn.Module = v2.Resize(target, _mode(preparation))
    return resize
