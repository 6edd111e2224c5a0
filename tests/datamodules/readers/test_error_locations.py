"""Invalid, empty and missing lists of every reader: errors name the data set, the list and the line."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from lightning_retrieval.datamodules import (
    CUB200,
    IJBC,
    ImageTable,
    INaturalist,
    InShop,
    LandmarksClean,
    RevisitedOxford,
    StanfordOnlineProducts,
    VehicleID,
    VGGFace2,
)
from lightning_retrieval.invalid import Invalid
from tests.datamodules.small_ijbc import write_ijbc, write_ijbc_repack
from tests.datamodules.small_revisited import GND, ground_truth, write_distractors, write_pickle, write_revisited
from tests.datamodules.trees import (
    replace,
    write_cub,
    write_in_shop,
    write_online_products,
    write_text,
    write_vehicle_id,
)
from tests.datamodules.trees_more import write_inaturalist, write_landmarks, write_vgg_face2


class Tree(NamedTuple):
    """How the tree of a data set is written and read."""

    write: object
    read: object


def write_revisited_with_distractors(root):
    write_revisited(root)
    write_distractors(root / "revisitop1m")


def write_table(root):
    """A table of two classes for training and two for the test, two images each, with boxes."""
    rows = ["image,label,split,box"]
    for image in range(8):
        split = "train" if image < 4 else "test"
        rows.append(f"{image}.jpg,{image // 2},{split},1 2 {20 + image} 30")
    write_text(root / "table.csv", "\n".join(rows) + "\n")


TREES = {
    "StanfordOnlineProducts": Tree(write_online_products, StanfordOnlineProducts),
    "InShop": Tree(write_in_shop, lambda root: InShop(root, boxes=True)),
    "CUB200": Tree(write_cub, lambda root: CUB200(root, boxes=True)),
    "VehicleID": Tree(write_vehicle_id, VehicleID),
    "VehicleID, all images": Tree(write_vehicle_id, lambda root: VehicleID(root, select_by_vid=True)),
    "VGGFace2": Tree(write_vgg_face2, VGGFace2),
    "VGGFace2, boxes": Tree(write_vgg_face2, lambda root: VGGFace2(root, boxes=True)),
    "INaturalist": Tree(write_inaturalist, INaturalist),
    "INaturalist, levels": Tree(write_inaturalist, lambda root: INaturalist(root, levels=["species", "genus"])),
    "LandmarksClean": Tree(write_landmarks, LandmarksClean),
    "IJBC": Tree(write_ijbc, lambda root: IJBC(root, least_instances=1)),
    "IJBC, re-pack": Tree(write_ijbc_repack, lambda root: IJBC(root, least_instances=1)),
    "RevisitedOxford": Tree(
        write_revisited_with_distractors, lambda root: RevisitedOxford(root, distractors=root / "revisitop1m")
    ),
    "ImageTable": Tree(write_table, lambda root: ImageTable(root, "table.csv")),
}
TRAIN, TEST = "Ebay_train.txt", "Ebay_test.txt"
CLOTHES = "img/MEN/Denim/id_00000001/01_1_front.jpg"
PARTITION, INSHOP_BOXES = "Eval/list_eval_partition.txt", "Eval/list_bbox_inshop.txt"
VEHICLES, SMALL, ALL = (
    "train_test_split/train_list.txt",
    "train_test_split/test_list_800.txt",
    "attribute/img2vid.txt",
)
FACES, TEST_FACES, LOOSE = "meta/train_list.txt", "meta/test_list.txt", "bb_landmark/loose_bb_train.csv"
PLANTS, ANIMALS = (f"Inat_dataset_splits/Inaturalist_{split}_set1.txt" for split in ("train", "test"))
LANDMARKS = "annotations/annotation_clean_train.txt"
GALLERY, PROBES = "protocols/ijbc_1N_gallery_G1.csv", "meta/ijbc_1N_probe_mixed.csv"
CROPS = "meta/ijbc_face_tid_mid.txt"
DISTRACTORS = "revisitop1m/revisitop1m.txt"
# For each case: the tree, the list that is changed, the number of its line, the new line, and the lines that the error
# must name, by list. Paths that are joined to a folder are absolute as they stand in the list.
CASES = {
    "products ..": ("StanfordOnlineProducts", TRAIN, 3, "2 8 12 ../a.JPG", {TRAIN: [3]}),
    "products class in both": ("StanfordOnlineProducts", TEST, 3, "14 8 12 b.JPG", {TRAIN: [2], TEST: [3]}),
    "products id in both": ("StanfordOnlineProducts", TEST, 4, "1 11319 2 b.JPG", {TRAIN: [2], TEST: [4]}),
    "products id twice": ("StanfordOnlineProducts", TRAIN, 4, "1 8 12 b.JPG", {TRAIN: [2, 4]}),
    "products path twice": ("StanfordOnlineProducts", TRAIN, 4, "3 8 12 toaster_final/11108_0.JPG", {TRAIN: [2, 4]}),
    # A wrong number whose text occurs in an earlier line too, in the header.
    "products wrong class": ("StanfordOnlineProducts", TRAIN, 4, "3 path 12 b.JPG", {TRAIN: [4]}),
    "clothes wrong corner": ("InShop", INSHOP_BOXES, 23, f"{CLOTHES} 1 2 x_1 002 003 030", {INSHOP_BOXES: [23]}),
    "clothes ..": ("InShop", PARTITION, 4, "img/../a/b/1.jpg id_00000001 gallery", {PARTITION: [4]}),
    "clothes class in both": (
        *("InShop", PARTITION, 6, "img/WOMEN/Dresses/id_00000002/01_1_front.jpg id_00000001 train"),
        {PARTITION: [3, 6]},
    ),
    "clothes twice": ("InShop", PARTITION, 4, f"{CLOTHES} id_00000001 gallery", {PARTITION: [3, 4]}),
    "clothes empty box": ("InShop", INSHOP_BOXES, 23, f"{CLOTHES} 1 2 001 002 001 030", {INSHOP_BOXES: [23]}),
    "birds ..": ("CUB200", "images.txt", 2, "2 ../a.jpg", {"images.txt": [2]}),
    "birds id twice": ("CUB200", "images.txt", 3, "2 001.a/a.jpg", {"images.txt": [2, 3]}),
    "birds empty box": ("CUB200", "bounding_boxes.txt", 4, "19 3.0 2.0 0.0 30.0", {"bounding_boxes.txt": [4]}),
    "vehicles ..": ("VehicleID", VEHICLES, 2, "../a 9", {VEHICLES: [2]}),
    "vehicles class in both": ("VehicleID", SMALL, 2, "a 9", {VEHICLES: [1], SMALL: [2]}),
    "vehicles image of two": ("VehicleID", SMALL, 2, "0000001 30", {SMALL: [2]}),
    "vehicles twice": ("VehicleID", VEHICLES, 2, "0000001 9", {VEHICLES: [1, 2]}),
    "vehicles two models": ("VehicleID", "attribute/model_attr.txt", 2, "9 7", {"attribute/model_attr.txt": [1, 2]}),
    "vehicles, all images ..": ("VehicleID, all images", ALL, 3, "../a 11", {ALL: [3]}),
    "faces ..": ("VGGFace2", FACES, 2, "../a.jpg", {FACES: [2]}),
    "faces absolute, without a folder": ("VGGFace2", FACES, 2, "/a.jpg", {FACES: [2]}),
    "faces class in both": ("VGGFace2", TEST_FACES, 2, "n000002/a.jpg", {FACES: [1], TEST_FACES: [2]}),
    "faces twice": ("VGGFace2", FACES, 2, "n000002/0001_01.jpg", {FACES: [1, 2]}),
    "faces empty box": ("VGGFace2, boxes", LOOSE, 3, '"n000002/0002_01",1,2,0,30', {LOOSE: [3]}),
    "faces two boxes": ("VGGFace2, boxes", LOOSE, 3, '"n000002/0001_01",1,2,3,30', {LOOSE: [2, 3]}),
    "plants ..": ("INaturalist", PLANTS, 2, "train_val2018/../10/a.jpg", {PLANTS: [2]}),
    "plants class in both": ("INaturalist", ANIMALS, 2, "train_val2018/Plantae/10/a.jpg", {PLANTS: [1], ANIMALS: [2]}),
    "plants groups": ("INaturalist, levels", ANIMALS, 2, "train_val2018/Aves/10/a.jpg", {PLANTS: [1], ANIMALS: [2]}),
    "landmarks ..": ("LandmarksClean", LANDMARKS, 2, "../a.jpg 3 17 0.5", {LANDMARKS: [2]}),
    "people ..": ("IJBC", GALLERY, 3, "1,5,../a.jpg,101,2,3,20,25", {GALLERY: [3]}),
    "people empty box": ("IJBC", GALLERY, 3, "1,5,img/10.jpg,101,2,3,20,0", {GALLERY: [3]}),
    "crops ..": ("IJBC, re-pack", CROPS, 3, "../a.jpg 1 102", {CROPS: [3]}),
    "crops twice": ("IJBC, re-pack", CROPS, 3, "1.jpg 1 102", {CROPS: [1, 3]}),
    "crops template of two": ("IJBC, re-pack", PROBES, 3, "1,12,a.jpg,101,2,3,20,25", {PROBES: [3]}),
    "distractors ..": ("RevisitedOxford", DISTRACTORS, 2, "../a.jpg", {DISTRACTORS: [2]}),
    "distractors absolute": ("RevisitedOxford", DISTRACTORS, 2, "/a.jpg", {DISTRACTORS: [2]}),
    "distractors twice": ("RevisitedOxford", DISTRACTORS, 2, "0/03bc.jpg", {DISTRACTORS: [1, 2]}),
    "table ..": ("ImageTable", "table.csv", 3, "../1.jpg,0,train,1 2 3 4", {"table.csv": [3]}),
    "table twice": ("ImageTable", "table.csv", 3, "0.jpg,0,train,1 2 20 30", {"table.csv": [2, 3]}),
    "table class in both": ("ImageTable", "table.csv", 7, "5.jpg,0,test,1 2 3 4", {"table.csv": [2, 7]}),
    "table empty box": ("ImageTable", "table.csv", 3, "1.jpg,0,train,1 2 1 4", {"table.csv": [3]}),
}


def error_of(tree, root):
    with pytest.raises(ValueError, match=f"^{tree.partition(',')[0]}: ") as raised:
        TREES[tree].read(root).splits  # noqa: B018
    return str(raised.value)


@pytest.mark.parametrize("tree", TREES)
def test_the_trees_are_valid(tmp_path, tree):
    TREES[tree].write(tmp_path)
    data = TREES[tree].read(tmp_path)
    assert all(index.lines is None for index in data.splits.values())  # would be copied to each worker


@pytest.mark.parametrize("case", CASES)
def test_an_error_names_the_data_set_the_list_and_the_line(tmp_path, case):
    tree, name, number, line, expected = CASES[case]
    TREES[tree].write(tmp_path)
    path = tmp_path / name
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[number - 1] = line
    write_text(path, "\n".join(lines) + "\n")
    message = error_of(tree, tmp_path)
    for list_name, numbers in expected.items():
        assert str(tmp_path / list_name) in message
        for expected_number in numbers:
            assert re.search(rf"(lines?|and) {expected_number}\b", message), message


@pytest.mark.parametrize("case", ["products class in both", "clothes class in both", "table class in both"])
def test_an_error_about_two_lines_joins_them_by_and(tmp_path, case):
    tree, name, number, line, _ = CASES[case]
    TREES[tree].write(tmp_path)
    lines = (tmp_path / name).read_text(encoding="utf-8").splitlines()
    lines[number - 1] = line
    write_text(tmp_path / name, "\n".join(lines) + "\n")
    assert re.search(r"in line \d+ of \S+ and in line \d+ of \S+$", error_of(tree, tmp_path).rstrip("."))


# For each case: the tree, the list that is changed, the text that is replaced, its replacement, and the error.
G1, G2, MIXED = (f"protocols/ijbc_1N_{name}.csv" for name in ("gallery_G1", "gallery_G2", "probe_mixed"))
BIRD_CLASSES, BIRD_BOXES = "image_class_labels.txt", "bounding_boxes.txt"
MODELS = "attribute/model_attr.txt"
INVALID = {
    "products header": ("StanfordOnlineProducts", TRAIN, "image_id class_id", "image_id", "line 1 of .*train.txt must"),
    "products two categories": ("StanfordOnlineProducts", TRAIN, "2 8 12 ", "2 8 7 ", "got 8 with 12 and with 7 in"),
    "clothes count": ("InShop", PARTITION, "21\n", "22\n", "as its first line says, 22, got 21"),
    "clothes count of text": ("InShop", PARTITION, "21\n", "many\n", "line 1 of .* the number of images, got 'many'"),
    "clothes header": ("InShop", PARTITION, "item_id", "item", "line 2 of .* must be the header"),
    "clothes status": ("InShop", PARTITION, "query", "probe", "got 'probe' in line 3 of .*partition.txt"),
    "clothes folder": ("InShop", PARTITION, CLOTHES, CLOTHES[4:], "got 'MEN/Denim/.*' in line 3"),
    "clothes no folders": ("InShop", PARTITION, CLOTHES, "img/1.jpg", "got 'img/1.jpg' in line 3"),
    "clothes box twice": ("InShop", INSHOP_BOXES, "01_4_full", "01_2_side", "`image_name` must be different .*bbox"),
    "clothes corner": ("InShop", INSHOP_BOXES, " 030\n", " 4294967296\n", "`y_2` .*, got '4294967296' in line 3"),
    "clothes no box": ("InShop", INSHOP_BOXES, CLOTHES, "img/other.jpg", f"none for 1 images, such as {CLOTHES}"),
    "birds class without image": ("CUB200", BIRD_CLASSES, "20 200", "99 1\n20 200", "got 1 in .*such as 99"),
    "birds class zero": ("CUB200", BIRD_CLASSES, "20 200", "20 0", "got '0' for image 20"),
    "birds class beyond": ("CUB200", BIRD_CLASSES, "20 200", "20 201", "got '201' for image 20 in line 3 of .*labels"),
    "birds class of another digit": ("CUB200", BIRD_CLASSES, "20 200", "20 ²", "got '²' for image 20"),
    "birds image without class": ("CUB200", BIRD_CLASSES, "20 200\n", "", "not in .*labels.txt, such as 20"),
    "birds image without box": ("CUB200", BIRD_BOXES, "20 4.5 2.0 20.25 30.0\n", "", "got 1 in .*such as 20"),
    "birds infinite box": ("CUB200", BIRD_BOXES, "20 4.5 2.0", "20 4.5 inf", "got '4.5 inf 20.25 30.0' in line 3 of"),
    "birds box of text": ("CUB200", BIRD_BOXES, "20 4.5", "20 left", "got 'left 2.0 20.25 30.0' in line 3 of"),
    "vehicles number": ("VehicleID", VEHICLES, "0000008 10", "0000008 x", "`vehicle id` .*, got 'x'"),
    "vehicles without images": (
        "VehicleID, all images",
        VEHICLES,
        "0000008 10",
        "0000008 77",
        "1 vehicles, such as 77",
    ),
    "vehicles model": ("VehicleID", MODELS, "9 101", "9 Audi", "`model id` must be integers .*, got 'Audi'"),
    "faces without a person": ("VGGFace2", FACES, "n000002/0002_01", "0002_01", r"got '0002_01\.jpg' \(line 2\)"),
    "faces of another split": ("VGGFace2", FACES, "n000002/0002", "test/n000002/0002", r"got 'test/n.*' \(line 2\)"),
    "faces header": ("VGGFace2, boxes", LOOSE, "NAME_ID", "NAME", "line 1 of .*train.csv .*, got 'NAME,X,Y,W,H'"),
    "faces box of three": ("VGGFace2, boxes", LOOSE, "-3,0,20,30", "-3,0,20", r"got .*,-3,0,20' \(line 2\)"),
    "faces box of many digits": ("VGGFace2, boxes", LOOSE, ",1,21,30", ",1,21,2147483647", r"got .*3647' \(line 3\)"),
    "faces no box": (
        "VGGFace2, boxes",
        LOOSE,
        "n000002/0002_01",
        "n000002/9",
        "1 images, such as train/n000002/0002_01",
    ),
    "plants no number": ("INaturalist", PLANTS, "Plantae/10/", "Plantae/oak/", r"got 'train_.*/oak/.*' \(line 1\)"),
    "plants no folder": ("INaturalist", PLANTS, "train_val2018/Plantae/10", "Plantae", r"got 'Plantae/.*' \(line 1\)"),
    "plants many digits": ("INaturalist", PLANTS, "/10/", f"/{'9' * 5000}/", r"Plantae/9{178}' \(line 1\)"),
    "people fields": ("IJBC", G2, ",20.25", "\n20.25", r"G2.csv must have 8 fields, got 1 with .* \(line 2\)"),
    "people header": ("IJBC", G1, "SUBJECT_ID", "SUBJECT", "G1.csv must .*, which lacks SUBJECT_ID"),
    "people subject": ("IJBC", G1, "1,5,", "1,S5,", "got 'S5' in line 2 of"),
    "people file": ("IJBC", MIXED, "img/14.jpg", "", "`FILENAME` must not be empty in line 12 of .*probe_mixed.csv"),
    "people sighting": ("IJBC", MIXED, ",106,", ",,", "`SIGHTING_ID` must not be empty in line 12 of .*probe_mixed"),
    "people box of text": ("IJBC", G1, "2.5,3.0", "2.5,x", "got '2.5,x,20.25,25.0' in line 2"),
    "people box beyond any image": ("IJBC", G1, "2.5,3.0", "2.5,3e12", "got '2.5,3e12,20.25,25.0' in line 2 of .*G1"),
    "people stray quote": ("IJBC", G1, "img/10.jpg", '"img/10.jpg', "G1.csv must be a CSV file, .* begins in line 2"),
    "faces stray quotes": ("VGGFace2, boxes", LOOSE, "n000002/", '"n000002/', "must be a CSV file, got .* in line "),
    "people no CSV": ("IJBC", G1, "img/10.jpg", "img/\r10.jpg", "G1.csv must be a CSV file, got .* in line 2"),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_list_raises(tmp_path, case):
    tree, name, old, new, expected = INVALID[case]
    TREES[tree].write(tmp_path)
    replace(tmp_path / name, old, new)
    assert re.search(expected, error_of(tree, tmp_path))


# For each case: the tree, the lists that are emptied, and the number of lines of their headers.
EMPTY = {
    "products": ("StanfordOnlineProducts", [TEST], 1),
    "birds": ("CUB200", [BIRD_CLASSES, BIRD_BOXES, "images.txt"], 0),
    "vehicles": ("VehicleID", [VEHICLES], 0),
    "vehicles of a test set": ("VehicleID", [SMALL], 0),
    "faces": ("VGGFace2", [TEST_FACES], 0),
    "plants": ("INaturalist", [PLANTS], 0),
    "people": ("IJBC", [G1, G2, MIXED], 1),
    "distractors": ("RevisitedOxford", [DISTRACTORS], 0),
}


@pytest.mark.parametrize("case", EMPTY)
def test_an_empty_split_raises(tmp_path, case):
    tree, names, header = EMPTY[case]
    TREES[tree].write(tmp_path)
    for name in names:
        lines = (tmp_path / name).read_text(encoding="utf-8").splitlines()
        write_text(tmp_path / name, "\n".join([*lines[:header], ""]))
    message = error_of(tree, tmp_path)
    assert "at least one image, got none" in message
    assert any(name in message for name in names)


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        ("StanfordOnlineProducts", "toaster_final"),
        ("CUB200", "images"),
        ("CUB200", BIRD_BOXES),
        ("VehicleID", "image"),
        ("VehicleID, all images", ALL),
        ("VGGFace2", TEST_FACES),
        ("VGGFace2, boxes", "bb_landmark/loose_bb_test.csv"),
        ("INaturalist", PLANTS),
        ("INaturalist, levels", "train2018.json"),
        ("LandmarksClean", LANDMARKS),
        ("LandmarksClean", "images"),
        ("IJBC", "images"),
        ("IJBC, re-pack", "loose_crop"),
        ("RevisitedOxford", "revisitop1m/revisitop1m.txt"),
    ],
)
def test_a_missing_list_or_folder_raises(tmp_path, tree, name):
    root = tmp_path / "data"
    TREES[tree].write(root)
    (root / name).rename(root / "away")
    with pytest.raises(FileNotFoundError, match=f"must contain .*{Path(name).name}.*got {root}"):
        TREES[tree].read(root).splits  # noqa: B018


def test_blank_lines_are_counted(tmp_path):
    write_online_products(tmp_path)
    path = tmp_path / TRAIN
    text = path.read_text(encoding="utf-8").replace("2 8 12 ", "\n\n2 8 12 ../")
    write_text(path, text)
    assert f"line 5 of {path}" in error_of("StanfordOnlineProducts", tmp_path)


GROUND_TRUTHS = {
    "..": ({"imlist": ["a", "../b", "c"]}, "`imlist` .* '../b' at position 1"),
    "absolute": ({"qimlist": ["/a", "b", "c"]}, "`qimlist` .* '/a' at position 0"),
    "twice": ({"imlist": ["a", "b", "a"]}, "`imlist` .* 'a' twice, at positions 0 and 2"),
    "empty box": (
        {"gnd": [GND[0], GND[1] | {"bbx": [9, 2, 9, 30]}, GND[2]]},
        r"got \[9, 2, 9, 30\] for roxford5k/jpg/radcliffe_camera_000519.jpg, query 1 in",
    ),
    "in both lists": (
        {"imlist": ["a", "b"], "qimlist": ["c", "d", "b"]},
        "'b' at position 1, .* position 2 of `qimlist`",
    ),
}


@pytest.mark.parametrize("case", GROUND_TRUTHS)
def test_an_error_names_the_position_in_a_pickle(tmp_path, case):
    changes, match = GROUND_TRUTHS[case]
    folder = write_revisited(tmp_path)
    path = write_pickle(folder / "gnd_roxford5k.pkl", ground_truth(**changes))
    with pytest.raises(ValueError, match=match) as raised:
        RevisitedOxford(tmp_path).splits  # noqa: B018
    assert str(raised.value).startswith("RevisitedOxford: ")
    assert str(path) in str(raised.value)


def test_an_error_names_the_entries_of_a_category(tmp_path):
    write_inaturalist(tmp_path)
    path = tmp_path / "train2018.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["categories"].append({**content["categories"][1], "genus": "another"})
    write_text(path, json.dumps(content))
    message = error_of("INaturalist, levels", tmp_path)
    assert f"one entry in {path}, got the id 9 in the entries 1 and 5 of its categories" in message


@pytest.mark.refusal
@pytest.mark.parametrize("method", ["sources", "read"])
@pytest.mark.parametrize("name", TREES)
def test_a_data_set_names_itself_in_each_method(tmp_path, name, method):
    """`splits` calls both methods, and so may the user. The folder is empty."""
    data = TREES[name].read(tmp_path)
    with pytest.raises(Invalid) as raised:
        getattr(data, method)()
    assert raised.value.owner == type(data).__name__
