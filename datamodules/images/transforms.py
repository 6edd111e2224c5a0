"""The image transforms of the papers, by name.

| name | training | evaluation |
| --- | --- | --- |
| `"plain"` | short side 256, random crop 224, flip | short side 256, centre crop 224 |
| `"smooth_ap"` | random resized crop 224 (area 0.08 to 1), flip | short side 256, centre crop 224 |
| `"roadmap"` | short side 256, random resized crop 224 (area 0.16 to 1), flip | 256 x 256, centre crop 224 |
| `"ap_gem"` | random resized crop 800 (area 0.5 to 1), colour jitter, tilt, flip | the image as it is |

`"smooth_ap"` (Brown et al., ECCV 2020) and `"roadmap"` (Ramzi et al., NeurIPS 2021) are those of the official code.
`"ap_gem"` (Revaud et al., ICCV 2019, section 4.2) has the kinds of transforms and the sizes of the paper; neither the
paper nor its code states the strengths, so these are our choice. All transforms return a tensor that is normalised with
ImageNet's mean and standard deviation.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torchvision.transforms import InterpolationMode, v2

from lightning_retrieval.checks import check_bool, check_choice

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ReferenceName = Literal["plain", "smooth_ap", "roadmap", "ap_gem"]
REFERENCE_NAMES = ("plain", "smooth_ap", "roadmap", "ap_gem")
_BILINEAR = InterpolationMode.BILINEAR


def reference_transform(name: ReferenceName, *, train: bool) -> Callable[[Any], torch.Tensor]:
    """The image transform of a paper: a function from a PIL image to a normalised tensor (3, height, width).

    Args:
        name: `"plain"`, `"smooth_ap"`, `"roadmap"` or `"ap_gem"`.
        train: True for the random transform of training, False for that of evaluation.

    Raises:
        ValueError: if the name is unknown.
        TypeError: if `train` is not a bool.

    Example:
        >>> from PIL import Image
        >>> from lightning_retrieval.datamodules import reference_transform
        >>> reference_transform("roadmap", train=False)(Image.new("RGB", (640, 480))).shape
        torch.Size([3, 224, 224])

    Relations:
        Random numbers are drawn from torch's generator, which `ImageSet` seeds for each training image.
    """
    check_choice("reference_transform", "name", name, REFERENCE_NAMES)
    check_bool("reference_transform", "train", train)
    make_steps = _TRAIN[name] if train else _EVAL[name]
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    transform: Callable[[Any], torch.Tensor] = v2.Compose([*make_steps(), *to_tensor])
    return transform


_TRAIN: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: [v2.Resize(256, _BILINEAR), v2.RandomCrop(224), v2.RandomHorizontalFlip()],
    "smooth_ap": lambda: [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()],
    "roadmap": lambda: [
        v2.Resize(256, _BILINEAR),
        v2.RandomResizedCrop(224, scale=(0.16, 1.0), ratio=(0.75, 1.33)),
        v2.RandomHorizontalFlip(),
    ],
    "ap_gem": lambda: [
        v2.RandomPerspective(0.2),
        v2.RandomResizedCrop(800, scale=(0.5, 1.0)),
        v2.ColorJitter(0.3, 0.3, 0.2, 0.1),
        v2.RandomHorizontalFlip(),
    ],
}
_EVAL: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: [v2.Resize(256, _BILINEAR), v2.CenterCrop(224)],
    "smooth_ap": lambda: [v2.Resize(256, _BILINEAR), v2.CenterCrop(224)],
    "roadmap": lambda: [v2.Resize((256, 256), _BILINEAR), v2.CenterCrop(224)],
    "ap_gem": list,
}
