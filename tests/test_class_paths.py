"""Configs name each class by its shortest public path, the one that jsonargparse writes into saved configs."""

import importlib
import re
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = REPOSITORY / "examples"
CONFIGS = sorted(
    path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.yaml") if path.stem not in ("sweep", "papers")
)
TEXTS = sorted([*EXAMPLES.rglob("*.yaml"), *(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "README.md"])


def class_paths(config, position=""):
    """{position in the config: class path} of all objects that a config describes."""
    found = {}
    if isinstance(config, dict):
        if "class_path" in config:
            found[position] = config["class_path"]
        for name, value in config.items():
            found |= class_paths(value, f"{position}.{name}")
    elif isinstance(config, list):
        for index, value in enumerate(config):
            found |= class_paths(value, f"{position}.{index}")
    return found


def shortest_path(path):
    """The path through the outermost package that has the class as an attribute."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    parts = found.__module__.split(".")
    for length in range(1, len(parts) + 1):
        outer = ".".join(parts[:length])
        if getattr(importlib.import_module(outer), name, None) is found:
            return f"{outer}.{name}"
    raise AssertionError(f"{path} is defined in {found.__module__}, but is not an attribute of it")


@pytest.mark.parametrize("config", CONFIGS)
def test_config_has_the_class_paths_that_jsonargparse_writes(config):
    """The shortest ones; that jsonargparse writes these is shown in tests/lightning_retrieval/plain_data."""
    named = class_paths(yaml.safe_load((EXAMPLES / config).read_text()))
    assert len(named) >= 5
    assert named == {position: shortest_path(path) for position, path in named.items()}


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.relative_to(REPOSITORY).as_posix())
def test_class_paths_in_text_and_comments_are_the_shortest(file):
    text = re.sub(r"^:::.*$", "", file.read_text(), flags=re.MULTILINE)  # names of API pages, which follow the modules
    named = set(re.findall(r"(?<![\w.])lightning_retrieval(?:\.\w+)*\.[A-Z]\w*", text))
    assert {path: shortest_path(path) for path in named} == {path: path for path in named}


def test_shortest_path():
    assert shortest_path("lightning_retrieval.losses.SmoothAPLoss") == "lightning_retrieval.SmoothAPLoss"
    assert shortest_path("torch.optim.adamw.AdamW") == "torch.optim.AdamW"
    path = "lightning_retrieval.datamodules.readers.cub.CUB200"
    assert shortest_path(path) == "lightning_retrieval.datamodules.CUB200"
