"""Writes small trees of images in the official directory structures of the data sets."""

import functools
import io
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image


def write_image(
    path: Path, mode: Literal["RGB", "L", "CMYK"] = "RGB", size: tuple[int, int] = (48, 40), seed: int = 0
) -> Path:
    """An image of smooth noise as JPEG (.jpg, .JPG) or PNG, by suffix, with the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded_image(mode, size, seed, path.suffix.lower()))
    return path


@functools.cache
def encoded_image(mode: Literal["RGB", "L", "CMYK"], size: tuple[int, int], seed: int, suffix: str) -> bytes:
    """The content of such a file; most tests write the same ones."""
    bands = {"RGB": 3, "L": 1, "CMYK": 4}[mode]
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, bands), dtype=np.uint8)
    layers = [Image.fromarray(coarse[:, :, band]).resize(size) for band in range(bands)]
    image = layers[0] if bands == 1 else Image.merge(mode, layers)
    stream = io.BytesIO()
    image.save(stream, Image.registered_extensions()[suffix])
    return stream.getvalue()


def truncate(path: Path, keep: float = 0.5) -> Path:
    """Cut off the end of a file, so that it begins as an image but cannot be decoded."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    return path


def write_text(path: Path, text: str) -> Path:
    """Write a text in UTF-8, and create the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def replace(path: Path, old: str, new: str) -> None:
    """Replace the first occurrence of `old` in a text file."""
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{old!r} is not in {path}"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def mode_of(image: int) -> Literal["RGB", "L", "CMYK"]:
    """The first image of a tree is grey, the second one CMYK."""
    return "L" if image == 0 else "CMYK" if image == 1 else "RGB"


def write_online_products(root: Path, lists: str = "", images: str = ""):
    """Stanford Online Products: four classes for training and three for the test, three images of each.

    Returns {split: (path below the root, class, category, size) of each image}.
    """
    found: dict[str, list[tuple[str, int, int, tuple[int, int]]]] = {"train": [], "test": []}
    lines = {split: ["image_id class_id super_class_id path"] for split in found}
    classes = (8, 9, 10, 11, 11319, 11320, 11321)  # as text, 10 and 11 would come before 8
    for image in range(3 * len(classes)):
        number = classes[image // 3]
        category, folder = (2, "cabinet_final") if number % 2 else (12, "toaster_final")
        name = f"{folder}/1110{number}_{'ü' if image == 2 else image % 3}.JPG"
        size = (40 + image, 36)
        write_image(root / images / name, mode_of(image), size, seed=number)
        split = "train" if number < 11319 else "test"
        found[split].append((images + name, number, category, size))
        lines[split].append(f"{image + 1} {number} {category} {name}")
    for split in found:
        write_text(root / lists / f"Ebay_{split}.txt", "\n".join(lines[split]) + "\n\n")
    return found


def write_in_shop(root: Path, lists: str = "Eval/", images: str = ""):
    """In-Shop Clothes Retrieval: four items for training; three for the test, one query and two of the gallery each.

    Returns (name as in the list, item, status, box) of each image.
    """
    found: list[tuple[str, str, str, tuple[int, int, int, int]]] = []
    items = {2: "train", 7: "train", 9: "train", 10: "train", 1: "test", 3: "test", 5: "test"}
    for item, split in sorted(items.items()):
        folder = f"{'MEN/Denim' if item in (1, 7) else 'WOMEN/Dresses'}/id_{item:08d}"
        for side, view in enumerate(("1_front", "2_side", "4_full")):
            name = f"img/{folder}/01_{view}.jpg"
            mode = mode_of(len(found))
            write_image(root / images / name, mode, (32, 32), seed=item)
            write_image(root / images / name.replace("img/", "img_highres/", 1), mode, (64, 80), seed=item)
            status = "train" if split == "train" else "gallery" if side else "query"
            found.append((name, f"id_{item:08d}", status, (1 + side, 2, 20 + item, 30)))
    partition = [f"{name:<70}{item:<16}{status}" for name, item, status, _ in found]
    boxes = [f"{name:<70}1 2  {' '.join(f'{value:03d}' for value in box)}" for name, _, _, box in found]
    names = "image_name item_id evaluation_status"
    write_text(root / lists / "list_eval_partition.txt", "\n".join([str(len(found)), names, *partition]) + "\n\n")
    names = "image_name clothes_type pose_type x_1 y_1 x_2 y_2"
    boxes.reverse()  # joined by name
    write_text(root / lists / "list_bbox_inshop.txt", "\n".join([str(len(found)), names, *boxes]) + "\n\n")
    return found


def write_cub(root: Path) -> list[tuple[int, str, int, tuple[float, float, float, float]]]:
    """CUB-200-2011: seven species, three images of each, and a hidden file as macOS creates it.

    Returns (id, path below `images`, species, box as x, y, width, height) of each image.
    """
    found: list[tuple[int, str, int, tuple[float, float, float, float]]] = []
    species = {1: "Black_footed_Albatross", 2: "Laysan_Albatross", 20: "Yellow_breasted_Chat", 100: "Brown_Pelican"}
    species |= {101: "White_Pelican", 102: "Western_Wood_Pewee", 200: "Common_Yellowthroat"}
    for number, bird in species.items():
        for each in range(3):
            image = len(found)
            name = f"{number:03d}.{bird}/{bird}_{'ñ' if image == 2 else each}_{image}.jpg"
            write_image(root / "images" / name, mode_of(image), (60, 50), seed=number)
            found.append((image + 1, name, number, (3.5 + each, 2.0, 20.25, 30.0)))
    hidden = (len(found) + 1, "001.Black_footed_Albatross/._Black_footed_Albatross.jpg", 1, (0.0, 0.0, 1.0, 1.0))
    rows = [*found, hidden]
    write_text(root / "images.txt", "".join(f"{image} {name}\n" for image, name, _, _ in rows) + "\n")
    labels = [f"{image} {number}\n" for image, _, number, _ in rows]
    write_text(root / "image_class_labels.txt", "".join(reversed(labels)))  # joined by id
    boxes = [f"{image} {' '.join(map(str, box))}\n" for image, _, _, box in rows]
    write_text(root / "bounding_boxes.txt", "".join(reversed(boxes)))
    write_text(root / "train_test_split.txt", "".join(f"{image} {image % 2}\n" for image, *_ in rows))
    write_text(root / "classes.txt", "".join(f"{number} {number:03d}.{bird}\n" for number, bird in species.items()))
    return found


def write_vehicle_id(root: Path, images: str = "image") -> dict[str, list[tuple[str, int]]]:
    """PKU VehicleID: four vehicles for training; two, three and four for the test sets, each within the next.

    Of each vehicle three images are listed; a fourth stands in `img2vid.txt` only. Vehicles 9, 20 and 31 have a model.
    Returns {list: (number, vehicle) of each listed image}.
    """
    vehicles = (9, 10, 11, 20, 30, 31, 32, 5)
    of_lists = {"train": vehicles[:4], "small": vehicles[4:6], "medium": vehicles[4:7], "large": vehicles[4:]}
    every = [(f"{1 + 7 * image:07d}", vehicles[image % 8]) for image in range(4 * len(vehicles))]
    for image, (name, vehicle) in enumerate(every):
        write_image(root / images / f"{name}.jpg", mode_of(image), (40, 40), seed=vehicle)
    found = {
        split: [(name, vehicle) for name, vehicle in every[: 3 * len(vehicles)] if vehicle in chosen]
        for split, chosen in of_lists.items()
    }
    files = {"train": "train_list", "small": "test_list_800", "medium": "test_list_1600", "large": "test_list_2400"}
    for split, rows in found.items():
        text = "".join(f"{name} {vehicle}\n" for name, vehicle in rows) + "\n"
        write_text(root / "train_test_split" / f"{files[split]}.txt", text)
    write_text(root / "attribute/img2vid.txt", "".join(f"{name}  {vehicle}\n" for name, vehicle in every))
    write_text(root / "attribute/model_attr.txt", "9 101\n20 7\n31 101\n31 101\n")
    write_text(root / "attribute/color_attr.txt", "9 1\n")
    return found
