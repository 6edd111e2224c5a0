"""`lightning-retrieval report`: write a page and a table of what a model gets wrong on labelled images."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor

from lightning_retrieval.checks import check_finite_number
from lightning_retrieval.command_line import printable
from lightning_retrieval.datamodules.image_index import (
    DISTRACTOR,
    ImageIndex,
    check_no_roles,
    class_folders,
    class_numbers,
)
from lightning_retrieval.datamodules.table import number_splits
from lightning_retrieval.datamodules.table_file import read_table
from lightning_retrieval.datamodules.table_format import ColumnNames, TableFormat
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.paths import check_path
from lightning_retrieval.preparation.decoding import read_image
from lightning_retrieval.ranking.labels import Role
from lightning_retrieval.search.commands.embedding import (
    EmbeddedImages,
    ImageEmbedder,
    ListedImages,
    UnreadableImage,
    list_images,
    shown_model,
)
from lightning_retrieval.search.commands.of_checkpoint import shown_choice
from lightning_retrieval.search.commands.shared import PretrainedBackbone
from lightning_retrieval.search.image_files import image_file
from lightning_retrieval.search.report.files import write_report
from lightning_retrieval.search.report.findings import Findings, find_errors
from lightning_retrieval.search.report.images import ReportedImages
from lightning_retrieval.search.report.targets import check_output, table_of

OWNER = "report_images"
KS = (1, 5, 10)
EVALUATED = ("test", "val")  # splits: the metrics are those of the first of them that there is


@dataclass(frozen=True)
class LabelledImages:
    """Images with their classes and, if there are several, their splits.

    Args:
        listed: the images. The labels of its index are the numbers of the classes.
        names: names of the classes.
        splits: split of each image, or None.
    """

    listed: ListedImages
    names: Sequence[str]
    splits: Sequence[str] | None

    @property
    def index(self) -> ImageIndex:
        """Paths, labels and other annotations."""
        return self.listed.index

    @property
    def evaluated_split(self) -> str | None:
        """The split of the metrics; None if they are those of all images."""
        return next((split for split in EVALUATED if split in (self.splits or ())), None)

    def split_numbers(self) -> Int[Tensor, " image"] | None:
        """The number of the split of each image; None unless some images are evaluated and others are not."""
        if self.splits is None or self.evaluated_split is None or len(set(self.splits)) == 1:
            return None
        return torch.from_numpy(class_numbers(self.splits)[0])

    def is_evaluated(self, positions: Int[Tensor, " row"]) -> Tensor:
        """Whether the metrics are computed from each of these images."""
        if self.split_numbers() is None or self.splits is None:
            return torch.ones(len(positions), dtype=torch.bool)
        return torch.from_numpy(np.array(self.splits) == self.evaluated_split)[positions]

    def class_of(self, label: int) -> str:
        """The name of a class."""
        if label == DISTRACTOR:
            return "no class"
        return self.names[label]

    def split_of(self, position: int) -> str:
        """The split of an image, "" if there are no splits."""
        if self.splits is None:
            return ""
        return self.splits[position]

    def picture_of(self, position: int) -> Image.Image:
        """Read an image, and crop it to its box."""
        box = None
        if self.index.boxes is not None:
            box = self.index.boxes[position]
        return read_image(image_file(self.listed.root, self.index.paths[position]), box)

    def as_reported(self) -> ReportedImages:
        """The names and pictures of the images, whose ids are their positions."""
        return ReportedImages(self.index.paths.__getitem__, self.class_of, self.picture_of, self.split_of)


def print_findings(found: Findings, output: Path, missing: Sequence[str]) -> None:
    """Print what was found and where it is.

    Args:
        found: the findings.
        output: file of the page.
        missing: the pictures that cannot be shown, with the reasons.
    """
    for name, (mean, low, high) in found.means.items():
        if name == "mAP" or name.startswith("R@"):
            print(f"{name:<6}{mean:.4f} ({low:.4f} to {high:.4f})")
    print(
        f"probably mislabelled: {len(found.suspects):,}, near-duplicates: {len(found.duplicates):,}, pairs of confused "
        f"classes: {len(found.confused):,}, queries without a positive: {len(found.without_positive):,}"
    )
    print(f"{output}: the page; {table_of(output)}: the table of all findings")
    if missing:
        print(f"report: {len(missing)} pictures cannot be shown, the first: {missing[0]}.", file=sys.stderr)


@owned_by(OWNER)
def report_images(
    checkpoint: Path | PretrainedBackbone,
    images: Path,
    output: Path,
    *,
    root: Path | None = None,
    columns: ColumnNames = None,
    delimiter: str = ",",
    false_match_rate: float = 0.05,
    transform: str | None = None,
    batch_size: int = 32,
    num_workers: int = 0,
    device: str | None = None,
) -> tuple[Findings, list[UnreadableImage], list[str]]:
    """Embed labelled images, and write a page and a table of what the model gets wrong.

    Each image is a query that ranks the others, unless a table has roles. If there is a split `test`, the metrics are
    those of its images; wrong labels and near-duplicates are searched in the images of all splits.

    The arguments are the options of the command, see `functions.report`, but for one:

    Args:
        checkpoint: as for `index_images`.

    Returns:
        The findings, the images that could not be read, and the pictures that cannot be shown, with the reasons.

    Raises:
        FileNotFoundError: if the checkpoint or the images do not exist.
        ValueError: if images have no classes, the files cannot be written or would replace other files, the checkpoint
            has two networks, or an argument is invalid.
        OSError: if a file cannot be written.

    Cost:
        Memory for the embeddings of all images, twice, for one block of scores, and for the pictures of the page. The
        time is that of four products of all embeddings with each other.
    """
    check_finite_number("false_match_rate", false_match_rate, least=0, most=1)
    images, output = check_path("images", images, exists=True), check_path("output", output)
    check_output(output)
    labelled = label_images(images, root, TableFormat.checked(columns, delimiter))
    embedder = ImageEmbedder.load(
        checkpoint, transform=transform, batch_size=batch_size, num_workers=num_workers, device=device
    )
    if embedder.module.query_embedder is not None:
        rule = "must be a checkpoint with one network for queries and gallery"
        cure = "test it with the callback RetrievalReport"
        raise InvalidValue(rule, argument="checkpoint", got=f"{checkpoint}, which has two", cure=cure)
    embedded = embedder.embed_all(labelled.listed)
    if len(embedded.positions) == 0:
        first = embedded.unreadable[0]
        raise InvalidValue(f"none of the {len(labelled.index)} images can be read, the first: {first}")
    check_lists(labelled, embedded.positions)
    found = find_in(labelled, embedded, false_match_rate)
    about = (
        f"{len(embedded.positions):,} images of {printable(str(images))}, embedded by "
        f"{printable(shown_model(embedder.about))}; images are prepared with {shown_choice(embedder.about)}."
    )
    missing = write_report(output, found, labelled.as_reported(), title=printable(images.name), about=about)
    return found, embedded.unreadable, missing


def find_in(labelled: LabelledImages, embedded: EmbeddedImages, false_match_rate: float) -> Findings:
    """What the model gets wrong in labelled images, given their embeddings.

    Args:
        labelled: the images.
        embedded: embeddings of the readable images.
        false_match_rate: as for `report_images`.
    """
    positions = embedded.positions
    of_all_splits = None
    splits = labelled.split_numbers()
    if splits is not None:
        of_all_splits = _metrics(labelled, embedded, torch.ones(len(positions), dtype=torch.bool))
    evaluated = _metrics(labelled, embedded, labelled.is_evaluated(positions))
    return find_errors(evaluated, false_match_rate, of_all_splits=of_all_splits, splits=splits)


def _metrics(labelled: LabelledImages, embedded: EmbeddedImages, chosen: Tensor) -> RetrievalMetrics:
    """A metric that holds the embeddings of the chosen rows."""
    index, positions = labelled.index, embedded.positions[chosen]
    embeddings = torch.as_tensor(embedded.embeddings[:])
    if not bool(chosen.all()):
        embeddings = embeddings[chosen]
    optional = {}
    for name, column in (("roles", index.roles), ("cameras", index.cameras)):
        if column is not None:
            optional[name] = torch.from_numpy(column)[positions]
    metrics = RetrievalMetrics([k for k in KS if k < len(positions)] or KS[:1])
    metrics.update(embeddings, torch.from_numpy(index.labels)[positions], positions, **optional)
    return metrics


def label_images(images: Path, root: Path | None, table_format: TableFormat) -> LabelledImages:
    """List the images of class folders or of a table, with their labels.

    Raises:
        FileNotFoundError: if the path does not exist.
        ValueError: if there is no image, the table cannot be read, a label is missing, there are fewer than two
            classes, or no query has another image of its class in its list.
    """
    if images.is_file():
        labelled = _of_table(images, root, table_format)
    else:
        labelled = _of_folder(list_images(images, root, table_format))
    check_lists(labelled, torch.arange(len(labelled.index)))
    return labelled


def check_lists(labelled: LabelledImages, positions: Int[Tensor, " row"]) -> None:
    """Raise unless these images are of several classes, and a query has another image of its class in its list.

    A query's list lacks the image itself, or, if cameras are known, all images of its class and camera.
    """
    index, rows = labelled.index, positions[labelled.is_evaluated(positions)].numpy()
    excluded, roles = rows, np.full(len(rows), int(Role.BOTH))
    if index.cameras is not None:
        excluded = index.cameras[rows]
    if index.roles is not None:
        roles = index.roles[rows]
    images = list(zip(index.labels[rows].tolist(), excluded.tolist()))
    in_gallery = list(compress(images, roles & Role.GALLERY))
    of_label, of_image = Counter(label for label, _ in in_gallery), Counter(in_gallery)
    queries = compress(images, roles & Role.QUERY)
    if len({label for label, _ in images} - {DISTRACTOR}) < 2:
        rule = "must be of several classes, in class folders or in a table with the column label"
        raise InvalidValue(rule, argument="images", got=labelled.listed.root)
    if not any(of_label[image[0]] > of_image[image] for image in queries):
        rule = "must have a query with another image of its class"
        where = "in its list, which has the images of the gallery"
        if index.cameras is not None:
            where += ", without those of its class and camera"
        raise InvalidValue(f"{rule} {where}", argument="images", got=f"none among {len(rows):,} images")


def _of_folder(listed: ListedImages) -> LabelledImages:
    """The images of a folder. The class of an image is the folder that it is in, below that of its split."""
    tops = {path.partition("/")[0] for path in listed.paths if "/" in path}
    check_no_roles(listed.root, tops, "images")
    folders, splits = class_folders(listed.paths)
    labels, names = class_numbers(folders)
    outside = np.flatnonzero(np.array(names)[labels] == ".")
    if len(outside):
        rule = "must have each image in the folder of its class"
        shown = printable(listed.paths[outside[0]])
        got = f"{listed.root}, where {len(outside):,} images are in none, such as {shown}"
        raise InvalidValue(rule, argument="images", got=got)
    return LabelledImages(ListedImages(listed.root, ImageIndex(listed.paths, labels), listed.labels), names, splits)


def _of_table(path: Path, root: Path | None, table_format: TableFormat) -> LabelledImages:
    """The images of a table."""
    from lightning_retrieval.datamodules import image_table  # needs Lightning

    root = root or path.parent
    table = read_table(path, required=("image", "label"), table_format=table_format)
    if "label" not in table:
        rule = "must be a table with the column label"
        raise InvalidValue(rule, argument="images", got=f"{path} with tags", cure="add labels")
    table = image_table.with_roles(image_table.with_paths(table, root))
    labels = image_table.labels_of(table)
    splits = image_table.splits_of(table) if "split" in table else None
    table = table.with_columns(label=labels, box=image_table.boxes_of(table))
    image_table.check_unique_images(table)
    if "camera" in table:
        table = table.with_columns(camera=image_table.ids_of(table, "camera"))
    index = number_splits({"images": table})["images"]
    index.lines = None
    shown = ["" if label is None else str(label) for label in labels]
    listed = ListedImages(root, index, shown)
    return LabelledImages(listed, list(index.names or ()), splits)
