"""Run the notebooks of the documentation, and store them with their outputs.

    python .ci/run_notebooks.py [docs/notebooks/glyphs.ipynb ...]

Messages about the machine and progress bars are not stored. A cell with the tag `skip-execution`, which installs
something, is not run.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"
METADATA = ("kernelspec", "language_info")


def kept(output: Any) -> bool:
    """Return whether the site shows an output."""
    if output.output_type != "stream":
        return True
    return output.name == "stdout" and "\r" not in output.text


def store(path: Path) -> None:
    """Run a notebook in an empty folder, and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    metadata = {name: notebook.metadata[name] for name in METADATA}
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=None, resources=resources, record_timing=False).execute()
    notebook.metadata = metadata
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(cells):
        cell.execution_count = number
        cell.outputs = [output for output in cell.outputs if kept(output)]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(NOTEBOOKS.glob("*.ipynb")):
        store(Path(name))
