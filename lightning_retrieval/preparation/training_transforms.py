"""The papers' random transforms of images in training, by name.

| name | with images of 224 pixels |
| --- | --- |
| `"plain"` | short side 256, random crop 224, flip |
| `"smooth_ap"` | random resized crop 224 (area 0.08 to 1), flip |
| `"roadmap"` | short side 256, random resized crop 224 (area 0.16 to 1), flip |
| `"ap_gem"` | rotation, random resized crop (area 0.5 to 1; of 800 pixels if no size is set), colour jitter, flip |

The transforms of `"smooth_ap"` (Brown et al., ECCV 2020) and `"roadmap"` (Ramzi et al., NeurIPS 2021) are those of the
papers' official code; ROADMAP's code resizes only Stanford Online Products before the crop. `"ap_gem"` has the kinds of
transforms that the paper names as examples (Revaud et al., ICCV 2019, section 4.2: colour jitter, scaling, rotation and
cropping) and its size of 800 pixels; scaling and cropping are one transform here. Neither the paper nor its code states
the strengths, and neither mentions a flip: the strengths and the flip are choices of this library. In evaluation, the
`Preparation` of the same name is used.

With `Preparation(resize="fit")`, images are fitted and padded before the random transforms: by `"plain"` to the size of
evaluation, so that nothing is cropped, and by the others to 256 / 224 of it.

If evaluation takes tensors of uint8, so do all transforms but `"ap_gem"`, because torchvision's colour jitter differs
for tensors. With `Preparation(reduced_scale=True)`, JPEGs are decoded at a reduced scale, but never so small that the
first resizing transform would enlarge them.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

from lightning_retrieval.checks import check_choice
from lightning_retrieval.preparation.pixels import MOST_PIXELS, Pixels, to_image, to_pixels
from lightning_retrieval.preparation.preparation import DEFAULT_IMAGE_SIZE, Preparation
from lightning_retrieval.preparation.prepare import FIT, Size

PaperName = Literal["plain", "smooth_ap", "roadmap", "ap_gem"]

PAPER_NAMES = ("plain", "smooth_ap", "roadmap", "ap_gem")
AP_GEM_SIZE = 800  # pixels
AP_GEM_DEGREES = 10  # the largest rotation to either side


class TrainingTransform:
    """Random transforms of an image, followed by its normalisation.

    Args:
        transforms: transforms of torchvision, in order; some may be random.
        preparation: the preparation in evaluation.
        takes_pixels: whether the transforms are for tensors of uint8 instead of PIL images.
    """

    def __init__(self, transforms: Sequence[nn.Module], preparation: Preparation, *, takes_pixels: bool) -> None:
        self.transforms = list(transforms)
        self.preparation = preparation
        self.takes_pixels = takes_pixels

    def __call__(self, image: Image.Image | Tensor) -> Float[Tensor, "channel height width"]:
        return self.preparation.normalize(self.to_uint8(image))

    def to_uint8(self, image: Image.Image | Tensor) -> Pixels:
        """The transformed image, not normalised.

        Args:
            image: a PIL image in RGB, or a tensor (3, height, width) of uint8.
        """
        changed: Any = image
        if self.takes_pixels and isinstance(image, Image.Image):
            changed = to_pixels(image)
        elif not self.takes_pixels and isinstance(image, Tensor):
            changed = to_image(image)
        for transform in self.transforms:
            changed = transform(changed)
        if isinstance(changed, Tensor):
            return changed
        return to_pixels(changed)

    @property
    def least_size(self) -> Size | None:
        """The smallest height and width of decoded JPEGs that the first resizing does not enlarge.

        None means the full scale: evaluation decodes at the full scale, or no transform resizes.
        """
        if not self.preparation.reduced_scale:
            return None
        for transform in self.transforms:
            if isinstance(transform, _Fit):
                return transform.preparation.least_size
            if isinstance(transform, v2.Resize):
                height, width = (*transform.size, *transform.size)[:2]
                return height, width
            if isinstance(transform, v2.RandomResizedCrop):
                return _least_size_of_crop(transform)
        return None

    @property
    def short_side(self) -> int | None:
        """The length to which the short side of an image is resized first; None if it is not."""
        for transform in self.transforms:
            if isinstance(transform, v2.Resize) and len(transform.size) == 1:
                return int(transform.size[0])
        return None

    @property
    def background(self) -> str | Sequence[int]:
        """The colour behind transparent pixels, as in evaluation."""
        return self.preparation.background

    def __repr__(self) -> str:
        return f"TrainingTransform({self.transforms}, {self.preparation})"


class _Fit(nn.Module):
    """Resizing and padding by a preparation, for random transforms of its result, which has the type of the image.

    Args:
        preparation: a preparation with `resize="fit"`.
    """

    def __init__(self, preparation: Preparation) -> None:
        super().__init__()
        self.preparation = preparation

    def forward(self, image: Image.Image | Tensor) -> Any:
        """The padded image.

        Args:
            image: a PIL image, or a tensor of uint8.
        """
        pixels = self.preparation.to_uint8(image)
        if isinstance(image, Tensor):
            return pixels
        return functional.to_pil_image(pixels)

    def extra_repr(self) -> str:
        """The size and the colour of the padding."""
        return f"{self.preparation.image_size}, fill={self.preparation.fill!r}"


def _least_size_of_crop(crop: v2.RandomResizedCrop) -> Size:
    """Height and width of the smallest square image in which every random crop is at least as large as the output."""
    smallest_area, narrowest, widest = crop.scale[0], crop.ratio[0], crop.ratio[1]
    height, width = crop.size
    of_height = height * math.sqrt(widest / smallest_area)
    of_width = width / math.sqrt(narrowest * smallest_area)
    side = math.ceil(max(of_height, of_width))
    return side, side


def training_transform(name: PaperName, preparation: Preparation | None = None) -> TrainingTransform:
    """The random training transform of a paper: a function from an RGB image to a normalised tensor.

    Args:
        name: `"plain"`, `"smooth_ap"`, `"roadmap"` or `"ap_gem"`.
        preparation: the preparation in evaluation. Training uses the same size, interpolation, channels, mean, standard
            deviation, background and scale of decoding. None means `Preparation.named(name)`.

    Raises:
        ValueError: if the name is unknown.

    Example:
        >>> from PIL import Image
        >>> from lightning_retrieval.datamodules import training_transform
        >>> from lightning_retrieval.preparation.preparation import Preparation
        >>> training_transform("roadmap", Preparation(image_size=64))(Image.new("RGB", (640, 480))).shape
        torch.Size([3, 64, 64])

    Relations:
        `Preparation` is the transform in evaluation. Random numbers are drawn from torch's generator, which `ImageSet`
        seeds for each training image.
    """
    check_choice("name", name, PAPER_NAMES, owner="training_transform")
    if preparation is None:
        preparation = Preparation.named(name)
    steps = _first_steps(name, preparation) + _random_steps(name, preparation)
    if preparation.channels == 1:
        steps.insert(0, v2.Grayscale())
    return TrainingTransform(steps, preparation, takes_pixels=preparation.takes_pixels and name != "ap_gem")


def _first_steps(name: PaperName, preparation: Preparation) -> list[nn.Module]:
    """The transforms of a paper that are not random and come first: none, resizing, or fitting and padding."""
    if preparation.resize == FIT and name == "plain":
        return [_Fit(preparation)]
    if preparation.resize == FIT:
        height, width = (min(MOST_PIXELS, round(side * 256 / 224)) for side in _size(preparation))
        return [_Fit(preparation.with_size((height, width)))]
    mode = InterpolationMode(preparation.interpolation)
    if name == "plain":
        return [_resize(preparation, mode)]
    if name == "roadmap":
        return [_resize(preparation, mode, short_side=True)]
    return []


def _random_steps(name: PaperName, preparation: Preparation) -> list[nn.Module]:
    """The random transforms of a paper, in order."""
    size, mode = _size(preparation), InterpolationMode(preparation.interpolation)
    flip = v2.RandomHorizontalFlip()
    if name == "plain":
        return [v2.RandomCrop(size), flip]
    if name == "smooth_ap":
        return [v2.RandomResizedCrop(size, interpolation=mode), flip]
    if name == "roadmap":
        crop = v2.RandomResizedCrop(size, scale=(0.16, 1.0), ratio=(0.75, 1.33), interpolation=mode)
        return [crop, flip]
    return [
        v2.RandomRotation(AP_GEM_DEGREES, InterpolationMode.BILINEAR),
        v2.RandomResizedCrop(_size(preparation, AP_GEM_SIZE), scale=(0.5, 1.0), interpolation=mode),
        v2.ColorJitter(0.3, 0.3, 0.2, 0.1),
        flip,
    ]


def _size(preparation: Preparation, default: int = DEFAULT_IMAGE_SIZE) -> Size:
    """Height and width of the training images; both are `default` if the preparation does not crop."""
    return preparation.crop_size or (default, default)


def _resize(preparation: Preparation, mode: InterpolationMode, *, short_side: bool = False) -> nn.Module:
    """Resizing as in evaluation; a short side becomes at least as long as the training images.

    If evaluation does not resize, the short side is resized to 256 / 224 of the training images.

    Args:
        preparation: the preparation in evaluation.
        mode: the interpolation.
        short_side: whether only the short side is resized, even if evaluation resizes to a height and width.
    """
    target = preparation.resized_to
    if target is None:
        target = round(max(_size(preparation)) * 256 / 224)
    if short_side and not isinstance(target, int):
        target = min(target)
    if isinstance(target, int):
        target = max(target, *_size(preparation))
    resize: nn.Module = v2.Resize(target, mode)
    return resize
