"""IJB-C: faces in photographs and videos, for evaluation; the classes are people."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.arguments import PositiveInt, checked
from lightning_retrieval.backend import rank_zero_info
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table import Table, enclosing_pixels, number_splits, read_csv_list, read_list
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.paths import find_file

LISTS = ("ijbc_1N_gallery_G1.csv", "ijbc_1N_gallery_G2.csv", "ijbc_1N_probe_mixed.csv")
CROPS = "meta/ijbc_face_tid_mid.txt"  # list in the re-pack, with file name, template and media id of each crop
BOX_COLUMNS = ("FACE_X", "FACE_Y", "FACE_WIDTH", "FACE_HEIGHT")


class IJBC(ImageDataModule):
    """IJB-C: faces of about 3,500 people in photographs and video frames. There is no training split.

    Each face is a query, and all other faces are its gallery. A face here is an instance: a person in one photograph,
    or a person in all frames of a video. The embeddings of these frames are averaged. Instances are identified by the
    `SIGHTING_ID` in NIST's release and by the media id in the re-pack. Templates group photographs and videos for other
    protocols, and may overlap. A frame in several templates counts as one image, and a video with frames in several
    templates as one instance; otherwise queries would retrieve themselves.

    `root` is one of the following:

    - NIST's release: `images/`, and in `protocols/` or `protocols/archive/` the lists `ijbc_1N_gallery_G1.csv`,
      `ijbc_1N_gallery_G2.csv` and `ijbc_1N_probe_mixed.csv`. The images are cropped to the boxes of the faces.
    - InsightFace's re-pack: `loose_crop/` and `meta/ijbc_face_tid_mid.txt`. Add the same three lists to `meta/`, since
      the re-pack does not contain the subjects. If a frame is in several templates, the re-pack has several crops of
      the frame; the embeddings of all crops are averaged.

    Rows without a subject or a box are skipped, with one warning that gives their number.

    Args:
        root: the folder of the release or the re-pack.
        least_instances: minimum number of instances of a person, >= 1. People with fewer instances are skipped, and a
            message gives the number of these people.
        settings: those of `ImageDataModule`, such as `image_size` and `classes_per_batch`.

    Raises:
        FileNotFoundError: if a list or the folder of images is missing.
        ValueError: if a list lacks a column or a line lacks a field; if a subject's id is not an integer, a box is not
            numbers or has no pixels, or a template has two subjects; if no person has enough instances; if the data
            module is used for training.

    Example:
        >>> from pathlib import Path
        >>> Path("IJB-C/images").mkdir(parents=True)
        >>> Path("IJB-C/protocols").mkdir()
        >>> header = "TEMPLATE_ID,SUBJECT_ID,FILENAME,SIGHTING_ID,FACE_X,FACE_Y,FACE_WIDTH,FACE_HEIGHT"
        >>> rows = ["1,7,img/1.jpg,3,0,0,9,9", "1,7,frames/2.png,4,0,0,9,9", "1,7,frames/3.png,4,0,0,9,9"]
        >>> for name in ("gallery_G1", "gallery_G2", "probe_mixed"):
        ...     _ = Path(f"IJB-C/protocols/ijbc_1N_{name}.csv").write_text("\\n".join([header, *rows]))
        >>> data = IJBC("IJB-C", least_instances=2)
        >>> list(data.splits["test"].paths), data.splits["test"].instances
        (['images/img/1.jpg', 'images/frames/2.png', 'images/frames/3.png'], array([0, 1, 1]))

    Relations:
        Train on `VGGFace2` and pass this data module to `trainer.validate` or `trainer.test`.

    Source:
        Maze et al., "IARPA Janus Benchmark - C: face dataset and protocol", ICB 2018. Ranking with `least_instances=5`:
        Brown et al., "Smooth-AP", ECCV 2020, section 5.1; their list of images is not published. Their Table 1 has the
        counts with which `check` compares.
    """

    published_counts = MappingProxyType({"test": [(148_824, 3_531)]})

    def __init__(
        self, root: str | Path, *, least_instances: PositiveInt = 5, **settings: Unpack[ImageSettings]
    ) -> None:
        super().__init__(root, **settings)
        self.least_instances = checked(self, least_instances=least_instances)

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The faces in the lists, each once, in order of appearance."""
        if find_file(self.root, CROPS, "protocols").name == "protocols":
            find_file(self.root, "images")
            faces = _of_release(self._lists("protocols", "protocols/archive"))
        else:
            find_file(self.root, "loose_crop")
            faces = _of_crops(read_list(self.root / CROPS, "image template medium"), self._lists("meta"))
        if len(faces) == 0:
            raise InvalidValue("the split 'test' must have at least one image", got=f"none in {self.root}")
        faces = faces.with_columns(instance=list(zip(faces["label"], faces["medium"])))
        faces = faces.chosen(self._rows_with_enough_instances(faces))
        numbers: dict[Any, int] = {}  # of instances, a subject in a medium, in the order of appearance
        instances = [numbers.setdefault(instance, len(numbers)) for instance in faces["instance"]]
        return number_splits({"test": faces.with_columns(instance=instances)})

    def _lists(self, *folders: str) -> list[Path]:
        return [find_file(self.root, *(f"{folder}/{name}" for folder in folders)) for name in LISTS]

    def _rows_with_enough_instances(self, faces: Table) -> NDArray[np.intp]:
        """The rows of the subjects with `least_instances` or more."""
        count_of = Counter(subject for subject, _ in set(faces["instance"]))
        kept = np.flatnonzero([count_of[subject] >= self.least_instances for subject in faces["label"]])
        if not len(kept):
            got = f"{self.least_instances}, but no subject has more than {max(count_of.values())} instances"
            raise InvalidValue("must leave at least one subject", "IJBC", "least_instances", got=got)
        skipped = sum(count < self.least_instances for count in count_of.values())
        if skipped:
            rank_zero_info(
                f"IJBC: skipped {skipped:,} of {len(count_of):,} subjects, which have fewer than "
                f"{self.least_instances} instances."
            )
        return kept


def _of_release(files: Sequence[Path]) -> Table:
    """The faces of the release; a face with several rows keeps the first box."""
    boxes: dict[tuple[int, str, str], Any] = {}
    skipped = differing = 0
    for file in files:
        table = read_csv_list(file, ("SUBJECT_ID", "FILENAME", "SIGHTING_ID", *BOX_COLUMNS))
        table.check("FILENAME", leaves_root, "lie inside the root")
        sides = zip(*(table[side] for side in BOX_COLUMNS))
        table = table.with_columns(box=list(sides))
        rows = zip(
            table.parsed("SUBJECT_ID", _subject), table["FILENAME"], table["SIGHTING_ID"], table.parsed("box", _box)
        )
        for row, (subject, name, sighting, box) in enumerate(rows):
            if subject is None or box is None:
                skipped += 1
                continue
            if not name or not sighting:
                raise table.error([row], "`FILENAME` and `SIGHTING_ID` must not be empty")
            differing += boxes.setdefault((subject, f"images/{name}", sighting), box) != box
    if differing:
        warnings.warn(
            f"IJBC: {differing:,} rows have a different box than an earlier row of the same face; the first box is "
            "used.",
            stacklevel=3,
        )
    _warn_of_skipped(skipped, "a subject or a box")
    columns: dict[str, Any] = dict(zip(("label", "path", "medium"), zip(*boxes)))
    return Table({**columns, "box": list(boxes.values())})


def _of_crops(crops: Table, files: Sequence[Path]) -> Table:
    """The faces in the re-pack; the subject of a face is the subject of its template."""
    crops.check_unique("image")
    crops.check("image", leaves_root, "lie inside the root")
    subject_of: dict[str, int] = {}
    for file in files:
        table = read_csv_list(file, ("TEMPLATE_ID", "SUBJECT_ID"))
        subjects = table.parsed("SUBJECT_ID", _subject)
        for row, (template, subject) in enumerate(zip(table["TEMPLATE_ID"], subjects)):
            if subject is not None and subject_of.setdefault(template, subject) != subject:
                got = f"{template} with {subject_of[template]} and {subject}"
                raise table.error([row], "each template must have one subject", got)
    known = np.flatnonzero([template in subject_of for template in crops["template"]])
    _warn_of_skipped(len(crops) - len(known), "a subject")
    faces = crops.chosen(known)
    return faces.with_columns(
        path=[f"loose_crop/{image}" for image in faces["image"]],
        label=[subject_of[template] for template in faces["template"]],
    )


def _warn_of_skipped(count: int, without: str) -> None:
    if count:
        warnings.warn(f"IJBC: skipped {count:,} rows of faces without {without}.", stacklevel=4)


def _is_blank(text: str) -> bool:
    return text.lower() in ("", "nan")


def _subject(text: str) -> int | None:
    """The subject's id; None if the field is blank."""
    return None if _is_blank(text) else int(text)


def _box(texts: Sequence[str]) -> tuple[int, int, int, int] | None:
    """Left, top, right and bottom in pixels; None if one of the fields is blank."""
    return None if any(map(_is_blank, texts)) else enclosing_pixels(texts)
