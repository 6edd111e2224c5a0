"""The notebooks run from top to bottom in a new kernel, and are small enough to be read as text."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
SHORT = {"PL_TRAINER_LIMIT_TRAIN_BATCHES": "2", "PL_TRAINER_LIMIT_TEST_BATCHES": "2"}
EPOCHS = {"glyphs": ("max_epochs=3", "max_epochs=1"), "own-images": ("EPOCHS = 20", "EPOCHS = 1")}


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook):
    """What all cells print."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "".join(output["text"] for output in outputs if output.output_type == "stream" and output.name == "stdout")


@pytest.mark.slow
@each_notebook
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    """Cells that install have the tag `skip-execution`, which nbclient knows."""
    for name, value in {**SHORT, "PYTHONWARNINGS": "ignore"}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    full, short = EPOCHS[path.stem]
    found = [cell for cell in code_cells(notebook) if full in cell.source]
    assert len(found) == 1
    found[0].source = found[0].source.replace(full, short)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    lines = [line.split() for line in printed(notebook).splitlines()]
    assert ["backbone", "untrained", "trained"] in [line[:3] for line in lines]
    assert len([line for line in lines if line[:1] == ["test/mAP"]]) == 1
    pictures = [
        output for cell in code_cells(notebook) for output in cell.outputs if "image/png" in output.get("data", {})
    ]
    assert pictures
    assert list(tmp_path.glob("*.ckpt"))
    assert list(tmp_path.glob("*.index"))


@each_notebook
def test_a_notebook_is_stored_with_small_outputs(path):
    """The site shows the outputs that are stored; messages about the machine and progress bars are none of them."""
    assert path.stat().st_size < 120_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(len(cells)))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert all(output.get("name") != "stderr" and output.output_type != "error" for output in outputs)
    assert "\r" not in printed(notebook)
    assert "kernelspec" in notebook.metadata
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


def test_glyphs_need_ten_cells():
    assert len(code_cells(nbformat.read(NOTEBOOKS / "glyphs.ipynb", as_version=4))) == 10


@each_notebook
def test_links_of_a_notebook_have_a_target(path):
    notebook = nbformat.read(path, as_version=4)
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    targets = [target for text in texts for target in re.findall(r"\]\(([^)\s#]+)", text)]
    assert targets
    assert all((path.parent / target).exists() for target in targets)
