"""Writes small copies of IJB-C in its two directory structures."""

import csv
from pathlib import Path
from typing import Any, NamedTuple

from tests.datamodules.trees import mode_of, write_image, write_text

HEADER = [
    *("TEMPLATE_ID", "SUBJECT_ID", "FILENAME", "SIGHTING_ID", "FACE_X", "FACE_Y", "FACE_WIDTH", "FACE_HEIGHT"),
    *("FRAME_NUM", "FACIAL_HAIR", "AGE", "INDOOR_OUTDOOR", "SKINTONE", "GENDER", "YAW", "ROLL"),
    *(f"OCC{number}" for number in range(1, 19)),
]


class Row(NamedTuple):
    """A line of a list."""

    template: int
    subject: int
    file: str
    sighting: int
    box: tuple[float, ...] = (2.5, 3.0, 20.25, 25.0)


# Subject 5 has five instances: photographs 10, 13 and 14, a video of four frames of which two templates have one in
# common, and one of two frames. Subject 12 has six, subject 100 three. Photograph 13 shows two of them.
ROWS = {
    "gallery_G1": [
        Row(1, 5, "img/10.jpg", 101),
        Row(1, 5, "frames/20.png", 102, (0.0, 0.0, 30.0, 30.0)),
        Row(1, 5, "frames/21.png", 102, (-4.0, -2.5, 30.0, 30.0)),
    ],
    "gallery_G2": [
        Row(2, 12, "img/11.jpg", 103),
        Row(2, 12, "img/ü 12.jpg", 104),
        Row(9, 100, "img/15.jpg", 109),
        Row(9, 100, "frames/30.png", 110),
    ],
    "probe_mixed": [
        Row(3, 5, "img/10.jpg", 101),
        Row(3, 5, "frames/21.png", 102, (-4.0, -2.5, 30.0, 30.0)),
        Row(3, 5, "frames/22.png", 102),
        Row(3, 5, "frames/23.png", 102),
        Row(3, 5, "img/13.JPG", 105, (1.0, 1.0, 12.0, 12.0)),
        Row(4, 12, "img/13.JPG", 108, (20.0, 9.0, 15.5, 20.0)),
        Row(4, 12, "img/16.jpg", 111),
        Row(4, 12, "img/17.jpg", 112),
        Row(4, 12, "frames/24.png", 113),
        Row(4, 12, "frames/25.png", 113),
        Row(5, 5, "img/14.jpg", 106),
        Row(5, 5, "frames/26.png", 107),
        Row(5, 5, "frames/27.png", 107),
        Row(10, 100, "frames/31.png", 110),
        Row(10, 100, "img/18.jpg", 114),
    ],
}
EVERY = [row for rows in ROWS.values() for row in rows]


def write_lists(folder: Path) -> None:
    """The three lists, with all columns of the official ones, many of them empty."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in ROWS.items():
        with (folder / f"ijbc_1N_{name}.csv").open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(HEADER)
            for row in rows:
                known: list[Any] = [*row[:4], *row.box, 17 if row.file.startswith("frames/") else ""]
                writer.writerow([*known, *[""] * (len(HEADER) - len(known))])


def write_ijbc(root: Path, folder: str = "protocols") -> list[Row]:
    """NIST's release; each face of its lists once, in their order."""
    write_lists(root / folder)
    for number, file in enumerate(dict.fromkeys(row.file for row in EVERY)):
        write_image(root / "images" / file, mode_of(number) if file.endswith("jpg") else "RGB", seed=number)
    return list({(row.subject, row.file): row for row in EVERY}.values())


def write_ijbc_repack(root: Path) -> list[tuple[str, Row]]:
    """InsightFace's re-pack, with a crop for each row of the lists; path and row of each."""
    write_lists(root / "meta")
    crops = [(f"{number}.jpg", row) for number, row in enumerate(EVERY, 1)]
    for number, (name, _) in enumerate(crops):
        write_image(root / "loose_crop" / name, mode_of(number), (30, 30), seed=number)
    lines = [f"{name} {row.template} {row.sighting}\n" for name, row in crops]
    write_text(root / "meta/ijbc_face_tid_mid.txt", "".join(lines))
    return [(f"loose_crop/{name}", row) for name, row in crops]
