"""What Hugging Face's preprocessor_config.json says of images, as the arguments of `Preparation`."""

from collections.abc import Mapping
from typing import Any

from PIL import Image


def read_preparation(transformers: Any, name: str, source: dict[str, Any]) -> dict[str, Any]:
    """The preparation of a model; empty if it has none.

    Args:
        transformers: the package.
        name: hub id or local folder.
        source: keyword arguments that say where to look for it.
    """
    kind = transformers.image_processing_utils.ImageProcessingMixin
    try:
        settings, _ = kind.get_image_processor_dict(name, **source)
    except (OSError, ValueError):
        return {}
    return as_preparation(settings)


def as_preparation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Preparation` for the settings of an image processor.

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
    if settings.get("do_normalize", True):
        for name in ("mean", "std"):
            if f"image_{name}" in settings:
                arguments[name] = tuple(settings[f"image_{name}"])
    else:
        arguments |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
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
