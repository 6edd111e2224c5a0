"""The command `example`: writes the config of the main example, for users without a clone of the repository."""

import os
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Literal

from lightning_retrieval.files import new_file, writing
from lightning_retrieval.invalid import InvalidValue


def example(name: Literal["glyphs"], /, *, output: Path | None = None) -> int:
    """Write the config of an example, which `fit` runs, and print the command that runs it.

    glyphs trains on characters that are drawn from fonts, so that nothing is downloaded.

    Args:
        name: name of the example.
        output: file to write, which must not exist; by default NAME.yaml.

    Example:
        lightning-retrieval example glyphs --output first.yaml
    """
    path = output or Path(f"{name}.yaml")
    if os.path.lexists(path):
        got = f"{path}, which exists"
        raise InvalidValue("must be a new file", argument="output", got=got, cure="give another name")
    content = files("lightning_retrieval.cli").joinpath(f"{name}.yaml").read_bytes()  # as in `examples/`
    with writing(path), new_file(path) as file:
        file.write(content)
    shown = str(path)
    if shown.startswith("-"):  # which would be read as an option
        shown = f"./{shown}"
    print(f"Run it with: lightning-retrieval fit --config {shlex.quote(shown)}")
    return 0
