"""IJB-C: faces in photographs and videos, for evaluation, told apart by whose they are."""

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pytorch_lightning.utilities import rank_zero_info

from lightning_retrieval.checks import check_integer
from lightning_retrieval.datamodules.files.find import find_file
from lightning_retrieval.datamodules.files.lists import check_not_empty, check_unique, read_csv_columns, read_rows
from lightning_retrieval.datamodules.images.image_index import ImageIndex, class_numbers
from lightning_retrieval.datamodules.images.image_module import ImageDataModule

LISTS = ("ijbc_1N_gallery_G1.csv", "ijbc_1N_gallery_G2.csv", "ijbc_1N_probe_mixed.csv")
MEDIA = "meta/ijbc_face_tid_mid.txt"  # of the re-pack: image, template and media id of each crop
BOX = ("FACE_X", "FACE_Y", "FACE_WIDTH", "FACE_HEIGHT")
_Box = tuple[int, int, int, int]


class _Face(NamedTuple):
    subject: int
    path: str  # from the root
    medium: str  # the photograph or video


class IJBC(ImageDataModule):
    """IJB-C: faces of about 3,500 people in photographs and video frames. There is no training split.

    Each face is ranked for against all others. What counts as one is an instance: a photograph, or all frames in which
    a video shows a person, whose embeddings are averaged. IJB-C tells them by the `SIGHTING_ID`, the re-pack by the
    media id. Templates bundle photographs and videos for other protocols and share many: a frame of several templates
    is one image, and a video of which several have frames is one instance, so that no query finds itself again.

    `root` is one of two:

    - NIST's release: `images/`, and in `protocols/` or `protocols/archive/` the lists `ijbc_1N_gallery_G1.csv`,
      `ijbc_1N_gallery_G2.csv` and `ijbc_1N_probe_mixed.csv`. The images are cropped to the faces' boxes.
    - InsightFace's re-pack: `loose_crop/` and `meta/ijbc_face_tid_mid.txt`, with the same three lists in `meta/`, since
      it does not say by itself whose the faces are. A frame of several templates lies there as several crops, which
      all go into the average.

    Rows without a subject or a box are left out, with one warning that counts them.

    Args:
        root: the folder of the release or the re-pack.
        least_instances: people with fewer instances are left out, with a message that counts them; >= 1.
        settings: those of `ImageDataModule`, such as `transform` and `cache_dir`, and of `RetrievalDataModule`.

    Raises:
        FileNotFoundError: if the lists or the images are not there, saying where they may be.
        ValueError: if a list lacks a column or has lines with missing fields, a subject's id is no integer, a box holds
            no numbers or no pixel, a template is of two subjects, nobody has enough instances, or it is trained on.

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
        Train on `VGGFace2` and give this one to `trainer.validate` or `trainer.test`.

    Source:
        Maze et al., "IARPA Janus Benchmark - C: face dataset and protocol", ICB 2018. For ranking, with
        `least_instances=5`: Brown et al., "Smooth-AP", ECCV 2020, whose list of images is not published.
    """

    def __init__(self, root: str | Path, least_instances: int = 5, **settings: Any) -> None:
        super().__init__(root, **settings)
        self.least_instances = check_integer("IJBC", "least_instances", least_instances, least=1)

    def sources(self) -> list[Path]:
        """The three lists and, of the re-pack, that of the crops."""
        if find_file("IJBC", self.root, MEDIA, "protocols").name == "protocols":
            return [find_file("IJBC", self.root, f"protocols/{name}", f"protocols/archive/{name}") for name in LISTS]
        return [*(find_file("IJBC", self.root, f"meta/{name}") for name in LISTS), self.root / MEDIA]

    def read(self) -> Mapping[str, ImageIndex]:
        """The faces of the lists, each once, in their order."""
        lists, of_crops = self.sources()[:3], self.sources()[3:]
        find_file("IJBC", self.root, "loose_crop" if of_crops else "images")
        boxes: dict[_Face, _Box] = {}
        if of_crops:
            faces, rows_left_out = _crops(lists, *of_crops)
        else:
            boxes, rows_left_out, differing = _boxes(lists)
            faces = list(boxes)
            if differing:
                warnings.warn(
                    f"IJBC: {differing:,} rows give a face another box than a row before; the first one is taken.",
                    stacklevel=2,
                )
        if rows_left_out:
            warnings.warn(
                f"IJBC: left out {rows_left_out:,} rows of faces without a subject{'' if of_crops else ' or a box'}.",
                stacklevel=2,
            )
        check_not_empty("IJBC", (of_crops or lists)[0], "test", faces)
        kept = self._with_enough_instances(faces)
        labels, names = class_numbers([face.subject for face in kept])
        instances: dict[tuple[int, str], int] = {}
        index = ImageIndex(
            [face.path for face in kept],
            labels,
            boxes=[boxes[face] for face in kept] if boxes else None,
            instances=[instances.setdefault((face.subject, face.medium), len(instances)) for face in kept],
            names=names,
        )
        return {"test": index}

    def _with_enough_instances(self, faces: Sequence[_Face]) -> list[_Face]:
        instances = Counter(subject for subject, _ in {(face.subject, face.medium) for face in faces})
        few = sum(count < self.least_instances for count in instances.values())
        if few == len(instances):
            raise ValueError(
                f"IJBC: `least_instances` must leave at least one subject, got {self.least_instances}, where the most "
                f"instances of a subject are {max(instances.values())}."
            )
        if few:
            rank_zero_info(
                f"IJBC: left out {few:,} of {len(instances):,} subjects, which have fewer than {self.least_instances} "
                "instances."
            )
        return [face for face in faces if instances[face.subject] >= self.least_instances]


def _boxes(lists: Sequence[Path]) -> tuple[dict[_Face, _Box], int, int]:
    """The box of each face of the release, how many rows have no subject or box, and how many another box."""
    boxes: dict[_Face, _Box] = {}
    left_out = differing = 0
    for path in lists:
        for (subject, name, sighting, *box), line in read_csv_columns(
            "IJBC", path, ("SUBJECT_ID", "FILENAME", "SIGHTING_ID", *BOX)
        ):
            owner, corners = _subject(subject, path, line), _corners(box, path, line)
            if owner is None or corners is None:
                left_out += 1
                continue
            if not name or not sighting:
                raise ValueError(
                    f"IJBC: `{'SIGHTING_ID' if name else 'FILENAME'}` must not be empty in line {line} of {path}."
                )
            differing += boxes.setdefault(_Face(owner, f"images/{name}", sighting), corners) != corners
    return boxes, left_out, differing


def _crops(lists: Sequence[Path], of_crops: Path) -> tuple[list[_Face], int]:
    """The faces of the re-pack, and how many have no subject, by their templates."""
    owners: dict[str, int] = {}
    for path in lists:
        for (template, subject), line in read_csv_columns("IJBC", path, ("TEMPLATE_ID", "SUBJECT_ID")):
            owner = _subject(subject, path, line)
            if owner is not None and owners.setdefault(template, owner) != owner:
                raise ValueError(
                    f"IJBC: each template must be of one subject, got {template} of {owners[template]} and {owner} in "
                    f"line {line} of {path}."
                )
    rows = list(read_rows("IJBC", of_crops, 3))
    check_unique("IJBC", of_crops, "image", [image for image, _, _ in rows])
    faces = [
        _Face(owners[template], f"loose_crop/{image}", medium) for image, template, medium in rows if template in owners
    ]
    return faces, len(rows) - len(faces)


def _subject(text: str, path: Path, line: int) -> int | None:
    """The subject's id; None where there is none."""
    if text.lower() in ("", "nan"):
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"IJBC: `SUBJECT_ID` must be an integer, or empty, got {text!r} in line {line} of {path}."
        ) from None


def _corners(box: Sequence[str], path: Path, line: int) -> _Box | None:
    """Left, top, right and bottom of the whole pixels that hold the face; None where its box is not known."""
    if any(text.lower() in ("", "nan") for text in box):
        return None
    try:
        x, y, width, height = map(float, box)
        corners = math.floor(x), math.floor(y), math.ceil(x + width), math.ceil(y + height)
    except (ValueError, OverflowError):
        corners = (0, 0, 0, 0)
    if not (corners[0] < corners[2] and corners[1] < corners[3] and all(abs(side) < 2**31 for side in corners)):
        raise ValueError(
            f"IJBC: {', '.join(BOX)} must be numbers, the latter two above 0, or empty, got {','.join(box)!r} in line "
            f"{line} of {path}."
        )
    return corners
