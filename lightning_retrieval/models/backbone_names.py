"""Names of backbones, and the error for one that is unknown."""

import difflib
from collections.abc import Sequence

GLYPH_NET = "glyph_net"


def torchvision_names() -> list[str]:
    """The names of torchvision's classification models."""
    from torchvision import models

    names: list[str] = models.list_models(module=models)
    return names


def timm_names() -> list[str]:
    """The names of timm's models, without the tags of their weights; empty if timm is not installed."""
    try:
        import timm
    except ModuleNotFoundError:
        return []
    names: list[str] = timm.list_models()
    return names


def unknown_name(owner: str, name: str) -> ValueError:
    """The error for an unknown name, with the names of torchvision and timm that are close to it.

    Args:
        owner: prefix of error messages.
        name: the argument `backbone`.
    """
    close = close_names(name, [*torchvision_names(), GLYPH_NET])
    close += [f"timm/{other}" for other in close_names(name.removeprefix("timm/"), timm_names())]
    hint = "no name is close"
    if close:
        hint = "close names are " + ", ".join(map(repr, close))
    return ValueError(
        f"{owner}: `backbone` must be the name of a torchvision classification model, 'timm/' and the name of a timm "
        "model, 'hf/' and a Hugging Face hub id or a local folder (hf/facebook/dinov2-small), 'glyph_net' or a module, "
        f"got {name!r}; {hint}."
    )


def close_names(name: str, names: Sequence[str]) -> list[str]:
    """At most three names that are similar to an unknown one.

    Args:
        name: that is unknown.
        names: that are known.
    """
    return difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
