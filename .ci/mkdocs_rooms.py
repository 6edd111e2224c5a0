"""For mkdocs: the three rooms laid out as they are installed, since mkdocstrings finds modules by path.

Their docstrings say `Example:`, as there is one; mkdocstrings shows code as code under `Examples:` only.
"""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

REPOSITORY = Path(__file__).parents[1]
_folder: tempfile.TemporaryDirectory[str]


@event_priority(100)  # before mkdocstrings reads its own settings
def on_config(config: Any) -> Any:
    global _folder
    _folder = tempfile.TemporaryDirectory()
    package = Path(_folder.name, "lightning_retrieval")
    for source, target in {
        "lightning_retrieval": package,
        "callbacks": package / "callbacks",
        "datamodules": package / "datamodules",
    }.items():
        shutil.copytree(REPOSITORY / source, target, ignore=shutil.ignore_patterns("__pycache__"))
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(re.sub(r"^( +)Example:$", r"\1Examples:", text, flags=re.MULTILINE), encoding="utf-8")
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_folder.name]
    return config


def on_shutdown() -> None:
    _folder.cleanup()
