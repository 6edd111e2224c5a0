"""A hook of mkdocs: it copies the three packages to where they are installed, since mkdocstrings finds modules by path.

In the copies, the docstring section `Example:` becomes `Examples:`, the only title under which mkdocstrings shows code
as code.
"""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

REPOSITORY = Path(__file__).parents[1]
# Each folder of source code, and where it is installed.
PACKAGES = {
    "lightning_retrieval": "lightning_retrieval",
    "callbacks": "lightning_retrieval/callbacks",
    "datamodules": "lightning_retrieval/datamodules",
}
_folder: tempfile.TemporaryDirectory[str]


@event_priority(100)  # before mkdocstrings reads its own settings
def on_config(config: Any) -> Any:
    global _folder
    _folder = tempfile.TemporaryDirectory()
    installed = Path(_folder.name)
    for source, target in PACKAGES.items():
        shutil.copytree(REPOSITORY / source, installed / target, ignore=shutil.ignore_patterns("__pycache__"))
    for file in installed.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(re.sub(r"^( +)Example:$", r"\1Examples:", text, flags=re.MULTILINE), encoding="utf-8")
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_folder.name]
    return config


def on_shutdown() -> None:
    _folder.cleanup()
