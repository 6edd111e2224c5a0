"""A callback that writes a report of what the model gets wrong at the end of a test."""

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from lightning_retrieval.arguments import Fraction, checked
from lightning_retrieval.backend import pl
from lightning_retrieval.callbacks.base import Callback
from lightning_retrieval.callbacks.csv_logger import run_folder
from lightning_retrieval.callbacks.evaluation import find_evaluation, sets_ranked_by_label
from lightning_retrieval.callbacks.evaluation_sets import EvaluationSet
from lightning_retrieval.callbacks.gallery import load_image
from lightning_retrieval.files import writing
from lightning_retrieval.invalid import owned_by
from lightning_retrieval.models.sides import SIDES
from lightning_retrieval.paths import check_path
from lightning_retrieval.search.image_files import image_file
from lightning_retrieval.search.report.files import write_report
from lightning_retrieval.search.report.findings import NO_CLASS, find_errors
from lightning_retrieval.search.report.images import ReportedImages
from lightning_retrieval.search.report.targets import check_output, check_suffix

OWNER = "RetrievalReport"


class RetrievalReport(Callback):
    """Writes a page and a table of what the model gets wrong, at the end of a test.

    The page is one HTML file that needs no other file: the metrics with their 95 % intervals, the scores of positive
    and of negative pairs with a threshold, the images that are probably mislabelled, the near-duplicates across
    classes, the classes that are confused, the classes and the queries with the lowest AP, and the queries without a
    positive. The table, a CSV file beside the page, has all of these; the page shows the first of each.

    Args:
        output: file of the page, which ends with .html; if None, `report.html` in the folder of the run. If there are
            several test sets, the name of the set is added to the name of the file.
        false_match_rate: fraction of the queries, from 0 to 1, for which the threshold of the page may show an image of
            another class.

    Raises:
        ValueError: if `output` does not end with .html, or the Trainer has no `RetrievalEvaluation`; when the test
            begins, if `output` is not a regular file, or its table would replace another file.
        TypeError: if an argument has the wrong type.
        OSError: if a file cannot be written.

    Example:
        >>> from lightning_retrieval.callbacks import RetrievalEvaluation, RetrievalReport
        >>> callbacks = [RetrievalEvaluation(), RetrievalReport("report.html", false_match_rate=0.01)]

    Cost:
        All scores are computed three times more, block by block, distributed over the processes. The first process
        reads the images that the page shows, and keeps their pictures until the page is written.

    Relations:
        `lightning-retrieval report` writes the same page for a checkpoint and a folder or a table of images, and also
        compares the images of several splits. Test sets with another metric than `RetrievalMetrics`, or with a rule of
        relevance without classes, are skipped, with a warning.
    """

    def __init__(self, output: str | Path | None = None, *, false_match_rate: Fraction = 0.05) -> None:
        self.output: Path | None = None
        if output is not None:
            with owned_by(OWNER):
                self.output = check_suffix(check_path("output", output))
        self.false_match_rate = checked(self, false_match_rate=false_match_rate)
        self._warned: set[str] = set()

    @owned_by(OWNER)
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        find_evaluation(trainer)
        if stage == "test" and self.output is not None and self.output.parent.is_dir():
            check_output(self.output)  # before the images are embedded

    @owned_by(OWNER)
    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        output = self.output or run_folder(trainer) / "report.html"
        for evaluation_set in sets_ranked_by_label(self, trainer, self._warned):
            problem = _why_not_reported(evaluation_set)
            if problem is not None:
                warnings.warn(f"{OWNER}: no report of {evaluation_set.prefix} is written, {problem}.", stacklevel=2)
                continue
            self._report(trainer, pl_module, evaluation_set, output)

    def _report(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, evaluation_set: EvaluationSet, output: Path
    ) -> None:
        """Write the report of a test set; all processes compute it, and the first one writes it."""
        found = find_errors(evaluation_set.metrics, self.false_match_rate)  # type: ignore[arg-type]
        if not trainer.is_global_zero:
            return
        set_name = evaluation_set.prefix.removeprefix("test/").rstrip("/")
        title = type(pl_module).__name__
        if set_name:
            title = f"{title}, {set_name}"
            output = output.with_name(f"{output.stem}-set={set_name.replace('/', '-')}{output.suffix}")
        with writing(output):
            output.parent.mkdir(parents=True, exist_ok=True)
        images = reported_images(pl_module, evaluation_set.dataset)
        about = f"{title}, evaluated on {found.images:,} images."
        missing = write_report(output, found, images, title=title, about=about)
        if missing:
            first = f"{len(missing)} pictures of {output} cannot be shown, the first: {missing[0]}"
            warnings.warn(f"{OWNER}: {first}.", stacklevel=2)


def _why_not_reported(evaluation_set: EvaluationSet) -> str | None:
    """Why a test set has no report; None if it has one."""
    metrics: Any = evaluation_set.metrics
    if metrics.relevance is not None and not metrics.relevance.has_classes:
        return f"because {metrics.relevance} has no classes"
    if metrics.embeddings and not metrics.ids:
        return "because its batches have no ids and come in random order; give the batches ids or set shuffle=False"
    if bool(metrics.per_query()["AP"].isnan().all()):
        return "because no query has a positive"
    return None


def reported_images(pl_module: pl.LightningModule, dataset: Any) -> ReportedImages:
    """The names and pictures of the images of a data set, whose ids index the data set."""
    return ReportedImages(
        name_of=partial(_name_of, dataset),
        class_of=partial(_class_of, getattr(dataset, "class_names", None)),
        picture_of=partial(_picture_of, pl_module, dataset),
    )


def _side_of(dataset: Any, id_: int) -> tuple[Any, int]:
    """The data set of an image of data with two sides, and its index there."""
    if not getattr(dataset, "two_sided", False):
        return dataset, id_
    index, side = divmod(id_, len(SIDES))
    return dataset.sides[SIDES[side]].dataset, index


def _paths_of(dataset: Any) -> Sequence[str] | None:
    """The paths of the images of an `ImageSet`, relative to its root."""
    return getattr(getattr(dataset, "index", None), "paths", None)


def _name_of(dataset: Any, id_: int) -> str:
    of_side, index = _side_of(dataset, id_)
    for names in (_paths_of(of_side), getattr(of_side, "texts", None)):
        if names is not None and 0 <= index < len(names):
            return str(names[index])
    return f"image {id_}"


def _class_of(names: Sequence[str] | None, label: int) -> str:
    if label == NO_CLASS:
        return "no class"
    if names is not None and 0 <= label < len(names):
        return str(names[label])
    return str(label)


def _picture_of(pl_module: pl.LightningModule, dataset: Any, id_: int) -> Image.Image:
    """The image file if the data set has files, else the input of the model."""
    of_side, index = _side_of(dataset, id_)
    paths, root = _paths_of(of_side), getattr(of_side, "root", None)
    if paths is None or root is None or not hasattr(of_side, "read"):
        return load_image(pl_module, dataset, id_)
    image_file(Path(root), paths[index])  # raises if a link leads out of the folder
    image: Image.Image = of_side.read(index)
    return image
