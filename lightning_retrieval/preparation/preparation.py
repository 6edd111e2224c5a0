"""The preparation of images in evaluation, as plain data: resizing, cropping, normalising.

A model returns the same embeddings as in its evaluation only if images are prepared in the same way. So the preparation
is a dataclass of plain values, which can be stored in a checkpoint, a config or an exported model.

The preparations of the papers, by name:

| name | result |
| --- | --- |
| `"plain"` | short side 256, centre crop 224 |
| `"smooth_ap"` | as `"plain"`: Brown et al., ECCV 2020, official code |
| `"roadmap"` | 256 x 256, centre crop 224: Ramzi et al., NeurIPS 2021, official code |
| `"ap_gem"` | the image as it is: Revaud et al., ICCV 2019 |
| `"glyphs"` | 32 x 32, grey, values from 0 to 1: the data module `Glyphs` |

Sizes and pixels equal those of torchvision's `Resize` and `CenterCrop`. With bilinear interpolation and three channels,
the reference is torchvision on tensors, whose values differ by at most 1 of 255 from torchvision on PIL images. In all
other cases, the reference is torchvision on PIL images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from lightning_retrieval.checks import (
    check_choice,
    check_finite_number,
    check_positive,
    short_repr,
)
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned_by
from lightning_retrieval.preparation.pixels import (
    INTERPOLATIONS,
    Interpolation,
    check_colour,
    check_size,
    cropped,
    padded_pixels,
    resize_bilinear,
    to_image,
    to_pixels,
)
from lightning_retrieval.preparation.prepare import (
    BORDER,
    FIT,
    Size,
    centre_box,
    colour,
    fitted_size,
    in_colours,
    pair,
    resize_image,
    resized_size,
    size_before_crop,
)

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DEFAULT_IMAGE_SIZE = 224


@dataclass(frozen=True)
class Preparation:
    """The preparation of an image for a network in evaluation: a function from an image to a normalised tensor.

    Args:
        image_size: height and width of the centre crop, or one number for both, from 1 to 16,384 pixels. None means
            no crop.
        resize: size of the image before the crop: one number for its short side, or height and width, which changes
            its shape. `"fit"` keeps the shape and crops nothing: the whole image is resized to fit into `image_size`,
            and padded. None means 256 / 224 of `image_size` for the short side, as in the papers, if `image_size` is a
            number; exactly `image_size` if it is a pair; and no resizing if `image_size` is None too.
        interpolation: interpolation of resizing: `"nearest"`, `"bilinear"`, `"bicubic"`, `"lanczos"`, `"box"` or
            `"hamming"`.
        mean: one number for each channel, which is subtracted from its values (from 0 to 1). The default is ImageNet's.
        std: one number for each channel, by which the difference is divided. The default is ImageNet's.
        channels: 3 for colour, 1 for grey.
        background: the colour behind transparent pixels: a name such as `"white"`, a hexadecimal number such as
            `"#ff8000"`, or red, green and blue from 0 to 255.
        reduced_scale: whether JPEGs are decoded at a half, a quarter or an eighth of their size, as long as they are
            not smaller than the size that they are resized to. Decoding large photographs is then faster, but the
            pixels change. PIL images that are already decoded are not affected.
        fill: the colour of the padding of `resize="fit"`, given like `background`. `"border"` is the colour of the
            image's border: the median of each channel along its four sides.

    Raises:
        ValueError: if a value is out of its range, the crop is larger than the resized image, `mean` or `std` does
            not have one number for each channel, or `fill` is given without `resize="fit"`.
        TypeError: if an argument has the wrong type, or if a call gets neither a PIL image nor a tensor of uint8.

    Example:
        >>> from PIL import Image
        >>> from lightning_retrieval.preparation.preparation import Preparation
        >>> preparation = Preparation(image_size=64, resize=64)
        >>> image = preparation(Image.new("RGB", (100, 80), "red"))
        >>> image.shape, preparation.undo(image)[:, 0, 0].tolist()
        (torch.Size([3, 64, 64]), [255, 0, 0])
        >>> Preparation(**preparation.as_dict()) == preparation
        True
        >>> whole = Preparation(image_size=4, resize="fit", fill="black")
        >>> whole.undo(whole(Image.new("RGB", (100, 50), "white")))[0].tolist()
        [[0, 0, 0, 0], [255, 255, 255, 255], [255, 255, 255, 255], [0, 0, 0, 0]]

    Relations:
        `Preparation.named` returns the preparations of the papers. `training_transform` returns the random transforms
        for training. Use `dataclasses.replace` to change a setting.
    """

    image_size: int | Sequence[int] | None = DEFAULT_IMAGE_SIZE
    resize: int | Sequence[int] | Literal["fit"] | None = None
    interpolation: Interpolation = "bilinear"
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    channels: int = 3
    background: str | Sequence[int] = "white"
    reduced_scale: bool = False
    fill: str | Sequence[int] = BORDER

    NAMES: ClassVar[tuple[str, ...]] = ("plain", "smooth_ap", "roadmap", "ap_gem", "glyphs")

    @owned_by("Preparation")
    def __post_init__(self) -> None:
        self._set("image_size", check_size("image_size", self.image_size))
        if self.resize != FIT:
            self._set("resize", check_size("resize", self.resize))
        check_choice("interpolation", self.interpolation, INTERPOLATIONS)
        self._set("channels", check_choice("channels", self.channels, (1, 3)))
        check_mean = partial(check_finite_number, least=0, most=1)
        self._set("mean", _check_channels("mean", self.mean, self.channels, check_mean))
        self._set("std", _check_channels("std", self.std, self.channels, check_positive))
        check_colour("background", self.background)
        if not isinstance(self.background, str):
            self._set("background", tuple(self.background))
        self._check_crop()
        self._check_fit()

    @staticmethod
    def named(name: str) -> "Preparation":
        """The preparation of a paper, see the table at the top of this module.

        Args:
            name: `"plain"`, `"smooth_ap"`, `"roadmap"`, `"ap_gem"` or `"glyphs"`.

        Raises:
            ValueError: if the name is unknown.
        """
        name = check_choice("name", name, Preparation.NAMES, owner="Preparation")
        return Preparation(**_SETTINGS[name])

    def __call__(self, image: Image.Image | Tensor) -> Float[Tensor, "channel height width"]:
        """Prepare an image for the network.

        Args:
            image: a PIL image of any mode, or a tensor (3, height, width) of uint8. Both give the same result.

        Raises:
            TypeError: if the image is neither a PIL image nor a tensor of uint8.
            ValueError: if the range of its values is unknown, or the tensor has another shape.
        """
        return self.normalize(self.to_uint8(image))

    @owned_by("Preparation")
    def to_uint8(self, image: Image.Image | Tensor) -> UInt8[Tensor, "channel height width"]:
        """The image after colour conversion, resizing and cropping, but not normalised.

        Args:
            image: as for a call of the object.
        """
        if self.takes_pixels:
            pixels = image if isinstance(image, Tensor) else to_pixels(self._in_colours(image))
            pixels = resize_bilinear(pixels, *self._new_size(pixels.shape[1], pixels.shape[2]))
        else:
            converted = self._in_colours(image)
            new_size = self._new_size(converted.height, converted.width)
            pixels = to_pixels(resize_image(converted, *new_size, self.interpolation))
        if self.crop_size is None:
            return pixels
        if self.resize == FIT:
            return padded_pixels(pixels, self.crop_size, self.fill)
        return cropped(pixels, centre_box(pixels.shape[1], pixels.shape[2], self.crop_size))

    @property
    def takes_pixels(self) -> bool:
        """Whether tensors are faster than PIL images, so that `ImageSet` should decode images to tensors."""
        return self.interpolation == "bilinear" and self.channels == 3

    def normalize(self, images: UInt8[Tensor, "*batch channel height width"]) -> Float[Tensor, "..."]:
        """Convert uint8 images to float32 values from 0 to 1, and normalise them by `mean` and `std`.

        Args:
            images: one image or a batch.
        """
        if images.dtype != torch.uint8:
            raise InvalidType("must be uint8", "Preparation", "images", got=images.dtype)
        mean, std = self._channel_values(images)
        return images.to(torch.float32).mul_(1 / 255).sub_(mean).div_(std)

    def undo(self, images: Float[Tensor, "*batch channel height width"]) -> UInt8[Tensor, "..."]:
        """Convert normalised images back to uint8 with their true colours, for display.

        Args:
            images: one image or a batch.
        """
        mean, std = self._channel_values(images)
        values = images.float() * std + mean
        return values.mul_(255).round_().clamp_(0, 255).to(torch.uint8)

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain data, which checkpoints, JSON and YAML can hold; `fill` only with `resize="fit"`."""
        settings = {}
        for field in fields(self):
            if field.name == "fill" and self.resize != FIT:  # nothing is padded
                continue
            value = getattr(self, field.name)
            settings[field.name] = list(value) if isinstance(value, tuple) else value
        return settings

    def with_size(self, image_size: int | Sequence[int] | None) -> "Preparation":
        """The preparation for another image size, with `resize` scaled in proportion.

        Args:
            image_size: height and width of the result, or one number for both; None neither resizes nor crops.
        """
        if isinstance(self.resize, str):
            return replace(self, image_size=image_size)
        other = replace(self, image_size=image_size, resize=None)
        if self.resize is None or self.crop_size is None or other.crop_size is None:
            return other
        factors = [new / old for new, old in zip(other.crop_size, self.crop_size)]
        if isinstance(self.resize, int):
            return replace(other, resize=round(self.resize * max(factors)))
        height, width = (round(side * factor) for side, factor in zip(self.resize, factors))
        return replace(other, resize=(height, width))

    @property
    def resized_to(self) -> int | Sequence[int] | None:
        """The size that images are resized to: the short side, a pair of height and width, or None for no resizing.

        With `resize="fit"` it is `image_size`, of which a resized image has the height or the width.
        """
        return size_before_crop(self.image_size, self.resize)

    @property
    def least_size(self) -> Size | None:
        """The smallest height and width at which JPEGs may be decoded before resizing; None for the full scale."""
        target = self.resized_to
        if not self.reduced_scale or target is None:
            return None
        return pair(target)

    @property
    def short_side(self) -> int | None:
        """The length to which the short side of an image is resized; None if its shape changes or nothing is."""
        if isinstance(self.resized_to, int):
            return self.resized_to
        return None

    @property
    def gives_one_size(self) -> bool:
        """Whether all prepared images have the same size, so that they can be batched."""
        return self.image_size is not None or isinstance(self.resize, tuple)

    @property
    def crop_size(self) -> Size | None:
        """Height and width of the centre crop; None if images are not cropped."""
        if self.image_size is None:
            return None
        return pair(self.image_size)

    def _new_size(self, height: int, width: int) -> Size:
        """The size to which an image of this size is resized."""
        if self.resize == FIT and self.crop_size is not None:
            return fitted_size(height, width, self.crop_size)
        return resized_size(height, width, self.resized_to)

    def _in_colours(self, given: Any) -> Image.Image:
        """The image in RGB, or in grey for one channel."""
        image = given
        if isinstance(given, Tensor):
            image = to_image(given)
        elif not isinstance(given, Image.Image):
            rule = "must be a PIL image or a tensor of uint8"
            cure = "PIL.Image.fromarray converts an array (height, width, 3) of uint8"
            raise InvalidType(rule, argument="image", got=type(given).__name__, cure=cure)
        return in_colours(image, self.channels, colour(self.background), self.least_size)

    def _channel_values(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """`mean` and `std` in a shape that broadcasts with the images."""
        if images.ndim < 3 or images.shape[-3] != self.channels:
            rule = f"must have shape (..., {self.channels}, height, width)"
            raise InvalidValue(rule, "Preparation", "images", got=tuple(images.shape))
        values = torch.tensor([self.mean, self.std], device=images.device)  # (2, channel)
        mean, std = values[..., None, None]
        return mean, std

    def _check_crop(self) -> None:
        """Raise if the crop can be larger than the resized image."""
        crop, target = self.crop_size, self.resized_to
        if crop is None or target is None:
            return
        height, width = pair(target)
        if crop[0] > height or crop[1] > width:
            rule = f"must be at least `image_size`, {self.image_size}, so that the crop lies in the image"
            raise InvalidValue(rule, "Preparation", "resize", got=self.resize)

    def _check_fit(self) -> None:
        """Raise if `resize="fit"` has no frame, or if there is a colour for padding but no padding."""
        if self.resize == FIT and self.image_size is None:
            rule = 'must be given with resize="fit", which pads images to this size'
            raise InvalidValue(rule, "Preparation", "image_size", got=None)
        if isinstance(self.fill, str) and self.fill == BORDER:
            return
        check_colour("fill", self.fill)
        if not isinstance(self.fill, str):
            self._set("fill", tuple(self.fill))
        if self.resize != FIT:
            rule = 'must be given with resize="fit" only, because no other `resize` pads images'
            raise InvalidValue(rule, "Preparation", "fill", got=short_repr(self.fill), cure='set resize="fit"')

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen


_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smooth_ap": {},
    "roadmap": {"resize": (256, 256)},
    "ap_gem": {"image_size": None},
    "glyphs": {
        "image_size": 32,
        "resize": (32, 32),
        "interpolation": "bicubic",
        "mean": (0.0,),
        "std": (1.0,),
        "channels": 1,
    },
}


def _check_channels(name: str, values: Any, channels: int, check: Callable[..., float]) -> tuple[float, ...]:
    """Check that there is one number for each channel, and each number, and return the numbers as plain data."""
    numbers = tuple(float(check(name, value)) for value in values)
    if len(numbers) != channels:
        rule = f"must hold one number for each channel, {channels}"
        raise InvalidValue(rule, argument=name, got=short_repr(values))
    return numbers
