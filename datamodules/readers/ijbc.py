"""IJB-C: faces in photographs and videos, for evaluation; the classes are people."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from lightning_retrieval.arguments import PositiveInt, checked
from lightning_retrieval.backend import rank_zero_info
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex, class_numbers
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table_file import ListFile, enclosing_pixels, find_file
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidValue, owned

LISTS = ("ijbc_1N_gallery_G1.csv", "ijbc_1N_gallery_G2.csv", "ijbc_1N_probe_mixed.csv")
CROPS = "meta/ijbc_face_tid_mid.txt"  # list in the re-pack, with file name, template and media id of each crop
BOX_COLUMNS = ("FACE_X", "FACE_Y", "FACE_WIDTH", "FACE_HEIGHT")
_Box = tuple[int, int, int, int]  # left, top, right, bottom


class _Face(NamedTuple):
    subject: int
    path: str  # below the root
    medium: str  # id of the photograph or video


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
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`,
            `image_size`, `resize`, `mean`, `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`,
            `load_truncated`, `val_fraction`, `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`,
            `samples_per_class`, `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`,
            `persistent_workers`).

    Raises:
        FileNotFoundError: if a list or the folder of images is missing; the message suggests where it may be.
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
    def sources(self) -> list[Path]:
        """The three lists and, in the re-pack, the list of the crops."""
        if self._is_repack():
            return [*(file.path for file in self._lists()), self.root / CROPS]
        return [file.path for file in self._lists()]

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The faces in the lists, each once, in order of appearance."""
        lists = self._lists()
        boxes: dict[_Face, _Box] | None = None
        if self._is_repack():
            find_file(self.root, "loose_crop")
            first_list = ListFile(self.root / CROPS)
            faces = _read_crops(lists, first_list)
        else:
            find_file(self.root, "images")
            first_list = lists[0]
            boxes = _read_boxes(lists)
            faces = list(boxes)
        first_list.check_not_empty("test", faces)
        return {"test": _make_index(self._with_enough_instances(faces), boxes)}

    def _is_repack(self) -> bool:
        return find_file(self.root, CROPS, "protocols").name != "protocols"

    def _lists(self) -> list[ListFile]:
        folders = ["protocols", "protocols/archive"]
        if self._is_repack():
            folders = ["meta"]
        found = []
        for name in LISTS:
            path = find_file(self.root, *(f"{folder}/{name}" for folder in folders))
            found.append(ListFile(path))
        return found

    def _with_enough_instances(self, faces: Sequence[_Face]) -> list[_Face]:
        """The faces of the subjects with `least_instances` or more."""
        subjects, _, media = zip(*faces)
        subjects_of_instances, _ = zip(*set(zip(subjects, media)))
        count_of = Counter(subjects_of_instances)
        kept = [face for face in faces if count_of[face.subject] >= self.least_instances]
        if not kept:
            got = f"{self.least_instances}, but no subject has more than {max(count_of.values())} instances"
            raise InvalidValue("must leave at least one subject", "IJBC", "least_instances", got=got)
        skipped = sum(count < self.least_instances for count in count_of.values())
        if skipped:
            rank_zero_info(
                f"IJBC: skipped {skipped:,} of {len(count_of):,} subjects, which have fewer than "
                f"{self.least_instances} instances."
            )
        return kept


def _make_index(faces: Sequence[_Face], boxes: Mapping[_Face, _Box] | None) -> ImageIndex:
    """The index of these faces. An instance is a subject in a medium; instances are numbered by first appearance."""
    subjects, paths, _ = zip(*faces)
    labels, names = class_numbers(subjects)
    numbers: dict[tuple[int, str], int] = {}
    instances = []
    boxes_of_faces = []
    for face in faces:
        instance = (face.subject, face.medium)
        instances.append(numbers.setdefault(instance, len(numbers)))
        if boxes is not None:
            boxes_of_faces.append(boxes[face])
    return ImageIndex(paths, labels, boxes=boxes_of_faces or None, instances=instances, names=names)


def _read_boxes(lists: Sequence[ListFile]) -> dict[_Face, _Box]:
    """The box of each face of the release; a face with several rows keeps the first box."""
    boxes: dict[_Face, _Box] = {}
    skipped = 0
    differing = 0
    for file in lists:
        rows = file.csv_columns(("SUBJECT_ID", "FILENAME", "SIGHTING_ID", *BOX_COLUMNS))
        for (subject_text, name, sighting, *box_texts), line in rows:
            subject = _parse_subject(subject_text, file, line)
            box = _parse_box(box_texts, file, line)
            if subject is None or box is None:
                skipped += 1
                continue
            _check_not_blank("FILENAME", name, file, line)
            if leaves_root(name):
                raise file.error(
                    f"`FILENAME` must lie inside the root, got {f'images/{name}'!r} in line {line} of {file.path}"
                )
            _check_not_blank("SIGHTING_ID", sighting, file, line)
            first_box = boxes.setdefault(_Face(subject, f"images/{name}", sighting), box)
            differing += box != first_box
    if differing:
        warnings.warn(
            f"IJBC: {differing:,} rows have a different box than an earlier row of the same face; the first box is "
            "used.",
            stacklevel=3,
        )
    if skipped:
        warnings.warn(f"IJBC: skipped {skipped:,} rows of faces without a subject or a box.", stacklevel=3)
    return boxes


def _read_crops(lists: Sequence[ListFile], crops: ListFile) -> list[_Face]:
    """The faces in the re-pack; the subject of a face is the subject of its template."""
    subject_of = _read_subjects(lists)
    images, templates, media = crops.columns(3)
    crops.check_unique("image", images)
    faces = []
    skipped = 0
    for position, (image, template, medium) in enumerate(zip(images, templates, media)):
        if leaves_root(image):
            raise crops.error(f"the images must lie inside the root, got {f'loose_crop/{image}'!r}", position)
        if template not in subject_of:
            skipped += 1
            continue
        faces.append(_Face(subject_of[template], f"loose_crop/{image}", medium))
    if skipped:
        warnings.warn(f"IJBC: skipped {skipped:,} rows of faces without a subject.", stacklevel=3)
    return faces


def _read_subjects(lists: Sequence[ListFile]) -> dict[str, int]:
    """The subject of each template."""
    subject_of: dict[str, int] = {}
    for file in lists:
        for (template, text), line in file.csv_columns(("TEMPLATE_ID", "SUBJECT_ID")):
            subject = _parse_subject(text, file, line)
            if subject is not None and subject_of.setdefault(template, subject) != subject:
                raise file.error(
                    f"each template must have one subject, got {template} with {subject_of[template]} and {subject} in "
                    f"line {line} of {file.path}"
                )
    return subject_of


def _is_blank(text: str) -> bool:
    return text.lower() in ("", "nan")


def _check_not_blank(column: str, text: str, file: ListFile, line: int) -> None:
    if not text:
        raise file.error(f"`{column}` must not be empty in line {line} of {file.path}")


def _parse_subject(text: str, file: ListFile, line: int) -> int | None:
    """The subject's id; None if the field is blank."""
    if _is_blank(text):
        return None
    try:
        return int(text)
    except ValueError:
        raise file.error(
            f"`SUBJECT_ID` must be an integer, or empty, got {text!r} in line {line} of {file.path}"
        ) from None


def _parse_box(texts: Sequence[str], file: ListFile, line: int) -> _Box | None:
    """Left, top, right and bottom in pixels; None if one of the fields is blank."""
    if any(map(_is_blank, texts)):
        return None
    box = enclosing_pixels(texts)
    if box is None or box[0] >= box[2] or box[1] >= box[3]:
        raise file.error(
            f"{', '.join(BOX_COLUMNS)} must be numbers, the latter two above 0, or empty, got {','.join(texts)!r} in "
            f"line {line} of {file.path}"
        )
    return box
