"""The preparation of a model: that of its evaluation, or that for its weights with the user's changes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from lightning_retrieval.preparation.pixels import check_size
from lightning_retrieval.preparation.preparation import Preparation
from lightning_retrieval.preparation.prepare import FIT


@dataclass(frozen=True)
class ModuleSide:
    """What data and commands may ask of one side of a module, see `models.sides.side_of_module`.

    Args:
        embedder: the network of this side; None if the module has no attribute `embedder`.
        recorded: the transform of this side's evaluation, as plain data; None if it is not recorded.
    """

    embedder: Any = None
    recorded: dict[str, Any] | None = None

    @property
    def wanted(self) -> Preparation | None:
        """The preparation that the network asks for; None if it does not say one."""
        wanted = getattr(self.embedder, "preparation", None)
        if isinstance(wanted, Preparation):
            return wanted
        return None

    @property
    def preparation(self) -> Preparation | None:
        """The preparation of the evaluation; if it is not recorded, the preparation that the network asks for.

        It is None if there is none, or if the transform of the evaluation is a function.
        """
        if self.recorded is None:
            return self.wanted
        if "preparation" in self.recorded:
            return Preparation(**self.recorded["preparation"])
        return None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of a network that embeds texts, else None."""
        return getattr(self.embedder, "tokenizer", None)


def preparation_of_processor(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Preparation` for the settings of an image processor of Hugging Face.

    Args:
        settings: the content of preprocessor_config.json.
    """
    resized = _pixels(settings.get("size"))
    size = resized
    if settings.get("do_center_crop") or "crop_pct" in settings:
        size = _pixels(settings.get("crop_size", size))
    arguments: dict[str, Any] = {}
    if size is not None:
        arguments["image_size"] = size
    if settings.get("do_resize", True) and resized is not None:
        arguments["resize"] = resized
    if "resample" in settings:
        arguments["interpolation"] = Image.Resampling(settings["resample"]).name.lower()
    if not settings.get("do_normalize", True):
        return {**arguments, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    for name in ("mean", "std"):
        if f"image_{name}" in settings:
            arguments[name] = tuple(settings[f"image_{name}"])
    return arguments


def _pixels(size: Any) -> int | tuple[int, int] | None:
    """A size of transformers: one number for the short side, or height and width."""
    if not isinstance(size, Mapping):
        return size  # type: ignore[no-any-return]
    if "shortest_edge" in size:
        return int(size["shortest_edge"])
    if "height" in size:
        return int(size["height"]), int(size["width"])
    return None


def wanted_settings(preparation: Any, image_size: Any = None) -> dict[str, Any]:
    """The settings of a preparation that the arguments of an embedder set.

    Args:
        preparation: a `Preparation`, the settings to change, or None.
        image_size: the size that replaces `image_size` of `preparation`, or None.

    Raises:
        TypeError: if `preparation` has a setting that does not exist.
        ValueError: if a value is out of its range.
    """
    if isinstance(preparation, Preparation):
        preparation = preparation.as_dict()
    settings: dict[str, Any] = dict(preparation or {})
    if "image_size" in settings:
        settings["image_size"] = check_size("image_size", settings["image_size"])
    image_size = check_size("image_size", image_size)
    if image_size is not None:
        if image_size != settings.get("image_size", image_size):
            settings = without_size(settings)
        settings["image_size"] = image_size
    Preparation(**settings)  # raises for an invalid value
    return settings


def without_size(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a preparation without the sizes that are in proportion to its image size; `"fit"` fits any size.

    Args:
        settings: arguments of `Preparation`.
    """
    return {name: value for name, value in settings.items() if name != "resize" or value == FIT}


def merged_preparation(of_weights: Mapping[str, Any], wanted: Mapping[str, Any]) -> Preparation:
    """The preparation for the weights of a backbone, with some settings replaced.

    If the image size is replaced and `resize` is not, `resize` is scaled in proportion.

    Args:
        of_weights: arguments of `Preparation` for the weights.
        wanted: arguments of `Preparation` that replace those in `of_weights`.
    """
    settings = {**of_weights, **wanted}
    if "image_size" in wanted and "resize" not in wanted:
        settings["resize"] = _scaled_resize(of_weights, wanted["image_size"])
    return Preparation(**settings)


def _scaled_resize(of_weights: Mapping[str, Any], image_size: Any) -> Any:
    """The size to which images are resized before the crop, scaled to another image size."""
    before, resize = of_weights.get("image_size"), of_weights.get("resize")
    if not isinstance(before, int) or not isinstance(image_size, int):
        return None
    if isinstance(resize, int):
        return max(image_size, round(image_size * resize / before))
    if isinstance(resize, (list, tuple)):
        return tuple(max(image_size, round(image_size * length / before)) for length in resize)
    return None
