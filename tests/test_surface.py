"""The public names and their signatures are those that `api_surface.json` lists.

After an intended change, add a line to CHANGELOG.md and write the file again:

    python tests/test_surface.py
"""

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Unpack, get_args, get_origin, get_type_hints, is_typeddict

from torch import nn

FILE = Path(__file__).with_name("api_surface.json")
PACKAGES = (
    "lightning_retrieval",
    "lightning_retrieval.losses",
    "lightning_retrieval.metrics",
    "lightning_retrieval.models",
    "lightning_retrieval.detection",
    "lightning_retrieval.callbacks",
    "lightning_retrieval.datamodules",
)


def surface():
    """{package: {name: parameters}} of the library."""
    return {package: names_of(importlib.import_module(package)) for package in PACKAGES}


def public_objects():
    """{name: object} of all packages; a name that two packages give is one object."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            assert found.setdefault(name, thing) is thing, f"two public things are named {name}"
    return found


def names_of(module):
    return {name: parameters(getattr(module, name)) for name in sorted(module.__all__)}


def parameters(thing):
    """Each parameter as `name` or `name=default`, with `*` before the keyword-only ones.

    Those that a `TypedDict` declares in place of `**settings` are shown as `**name`.
    """
    shown: list[str] = []
    if is_typeddict(thing):
        return list(get_type_hints(thing))
    if getattr(thing, "__init__", None) is nn.Module.__init__:  # takes no arguments, though its signature accepts any
        return shown
    for parameter in inspect.signature(thing).parameters.values():
        if get_origin(parameter.annotation) is Unpack:
            shown += [f"**{name}" for name in get_type_hints(get_args(parameter.annotation)[0])]
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={default_text(parameter.default)}"
        shown.append(f"{stars}{parameter.name}{default}")
    return shown


def default_text(default):
    return default.__qualname__ if callable(default) else repr(default)


def test_public_names_and_signatures_are_those_listed():
    assert surface() == json.loads(FILE.read_text()), "if you intended this, run `python tests/test_surface.py`"


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose lightning_retrieval/ would hide the package
    FILE.write_text(json.dumps(surface(), indent=2) + "\n")
    print(f"wrote {FILE}")
