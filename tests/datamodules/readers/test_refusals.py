"""Invalid settings of the published data sets, folders without their files, and lists with a wrong line."""

import re

import pytest

from lightning_retrieval.datamodules import (
    CUB200,
    IJBC,
    INaturalist,
    InShop,
    LandmarksClean,
    RevisitedOxford,
    StanfordOnlineProducts,
    VehicleID,
    VGGFace2,
)
from lightning_retrieval.invalid import InvalidValue, MissingFile
from tests.datamodules.small_ijbc import write_ijbc, write_ijbc_repack
from tests.datamodules.small_revisited import (
    GND,
    IMAGES,
    QUERIES,
    ground_truth,
    write_distractors,
    write_pickle,
    write_revisited,
)
from tests.datamodules.trees import (
    replace,
    write_cub,
    write_in_shop,
    write_online_products,
    write_text,
    write_vehicle_id,
)
from tests.datamodules.trees_more import write_inaturalist, write_landmarks, write_vgg_face2
from tests.refusals import refusal_test


def write_revisited_with_distractors(root):
    write_revisited(root)
    write_distractors(root / "revisitop1m")


DATA_SETS = {  # how a data set is written and how it is read
    "StanfordOnlineProducts": (write_online_products, StanfordOnlineProducts),
    "InShop": (write_in_shop, lambda root: InShop(root, boxes=True)),
    "CUB200": (write_cub, lambda root: CUB200(root, boxes=True)),
    "VehicleID": (write_vehicle_id, VehicleID),
    "VehicleID, all images": (write_vehicle_id, lambda root: VehicleID(root, select_by_vid=True)),
    "VGGFace2": (write_vgg_face2, VGGFace2),
    "VGGFace2, boxes": (write_vgg_face2, lambda root: VGGFace2(root, boxes=True)),
    "INaturalist": (write_inaturalist, lambda root: INaturalist(root, levels=["species", "genus"])),
    "LandmarksClean": (write_landmarks, LandmarksClean),
    "IJBC": (write_ijbc, lambda root: IJBC(root, least_instances=1)),
    "IJBC, re-pack": (write_ijbc_repack, lambda root: IJBC(root, least_instances=1)),
    "RevisitedOxford": (
        write_revisited_with_distractors,
        lambda root: RevisitedOxford(root, distractors=root / "revisitop1m"),
    ),
}
TRAIN, TEST = "Ebay_train.txt", "Ebay_test.txt"
PARTITION, INSHOP_BOXES = "Eval/list_eval_partition.txt", "Eval/list_bbox_inshop.txt"
BIRDS, BIRD_CLASSES, BIRD_BOXES = "images.txt", "image_class_labels.txt", "bounding_boxes.txt"
VEHICLES, SMALL = "train_test_split/train_list.txt", "train_test_split/test_list_800.txt"
ALL_VEHICLES = "attribute/img2vid.txt"
FACES, TEST_FACES, LOOSE = "meta/train_list.txt", "meta/test_list.txt", "bb_landmark/loose_bb_train.csv"
PLANTS, ANIMALS = (f"Inat_dataset_splits/Inaturalist_{split}_set1.txt" for split in ("train", "test"))
LANDMARKS = "annotations/annotation_clean_train.txt"
GALLERY, PROBES = "protocols/ijbc_1N_gallery_G1.csv", "meta/ijbc_1N_probe_mixed.csv"
CROPS, DISTRACTORS = "meta/ijbc_face_tid_mid.txt", "revisitop1m/revisitop1m.txt"


def written(name, root):
    write, read = DATA_SETS[name]
    write(root)
    return read(root)


def without(name, missing):
    """A call that reads a data set one of whose files or folders is missing."""

    def read(tmp_path):
        data = written(name, tmp_path)
        (tmp_path / missing).rename(tmp_path / "away")
        data.prepare_data()

    return read


def two_ground_truths(tmp_path):
    folder = write_revisited(tmp_path, pickled="gnd_a.pkl")
    write_pickle(folder / "gnd_b.pkl", ground_truth())
    RevisitedOxford(folder).prepare_data()


def two_groups_of_one_category(tmp_path):
    data = written("INaturalist", tmp_path)
    replace(tmp_path / ANIMALS, "Aves/7", "Aves/10")
    data.prepare_data()


def no_genus_of_category_9(tmp_path):
    data = written("INaturalist", tmp_path)
    replace(tmp_path / "train2018.json", '"id": 9,', '"id": 999,')
    data.prepare_data()


def one_image_of_each_vehicle(tmp_path):
    write_vehicle_id(tmp_path)
    write_text(tmp_path / SMALL, "0000029 30\n0000036 31\n")
    VehicleID(tmp_path, protocol="reid").prepare_data()


def folders_without_images(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
    VGGFace2(tmp_path).prepare_data()


def too_few_instances(tmp_path):
    write_ijbc(tmp_path)
    IJBC(tmp_path, least_instances=7).prepare_data()


TABLE = {
    "StanfordOnlineProducts": [
        (lambda: StanfordOnlineProducts("nowhere").prepare_data(), MissingFile, "root"),
        (without("StanfordOnlineProducts", "toaster_final"), MissingFile, "root"),
    ],
    "InShop": [(lambda: InShop(".", boxes=True, high_res=True), InvalidValue, "", "high_res")],
    "CUB200": [
        (without("CUB200", "images"), MissingFile, "root"),
        (without("CUB200", BIRD_BOXES), MissingFile, "root"),
    ],
    "VehicleID": [
        (without("VehicleID, all images", ALL_VEHICLES), MissingFile, "root"),
        (lambda: VehicleID(".", sizes="tiny"), InvalidValue, "sizes"),
        (lambda: VehicleID(".", sizes=[]), InvalidValue, "sizes"),
        (lambda: VehicleID(".", protocol="mine"), InvalidValue, "protocol"),
        (one_image_of_each_vehicle, InvalidValue, ""),
    ],
    "VGGFace2": [
        (without("VGGFace2, boxes", "bb_landmark/loose_bb_test.csv"), MissingFile, "root"),
        (folders_without_images, InvalidValue, "root"),
    ],
    "INaturalist": [
        (without("INaturalist", PLANTS), MissingFile, "root"),
        (without("INaturalist", "train2018.json"), MissingFile, "root"),
        (lambda: INaturalist(".", levels=["genus", "species"]), InvalidValue, "levels"),
        (lambda: INaturalist(".", levels=["genus"]), InvalidValue, "levels"),
        (two_groups_of_one_category, InvalidValue, "levels"),
        (no_genus_of_category_9, InvalidValue, "levels"),
    ],
    "LandmarksClean": [(without("LandmarksClean", "images"), MissingFile, "root")],
    "IJBC": [
        (without("IJBC", "images"), MissingFile, "root"),
        (without("IJBC, re-pack", "loose_crop"), MissingFile, "root"),
        (too_few_instances, InvalidValue, "least_instances"),
    ],
    "RevisitedOxford": [
        (without("RevisitedOxford", "roxford5k/jpg"), MissingFile, "root"),
        (without("RevisitedOxford", DISTRACTORS), MissingFile, "distractors"),
        (two_ground_truths, InvalidValue, "root"),
        (lambda: RevisitedOxford(".", image_size=0), InvalidValue, "image_size"),
    ],
}
test_invalid_arguments_raise = refusal_test(TABLE)

OUTSIDE = [  # an image outside the folder: data set, list, number of the line, new line
    ("StanfordOnlineProducts", TRAIN, 3, "2 8 12 ../a.JPG"),
    ("InShop", PARTITION, 4, "img/../a/b/1.jpg id_00000001 gallery"),
    ("CUB200", BIRDS, 2, "2 ../a.jpg"),
    ("VehicleID", VEHICLES, 2, "../a 9"),
    ("VehicleID, all images", ALL_VEHICLES, 3, "../a 11"),
    ("VGGFace2", FACES, 2, "../a.jpg"),
    ("INaturalist", PLANTS, 2, "train_val2018/../10/a.jpg"),
    ("LandmarksClean", LANDMARKS, 2, "../a.jpg 3 17 0.5"),
    ("IJBC", GALLERY, 3, f"1,5,../a.jpg,101,2,3,20,25{',' * 26}"),
    ("IJBC, re-pack", CROPS, 3, "../a.jpg 1 102"),
    ("RevisitedOxford", DISTRACTORS, 2, "../a.jpg"),
    ("RevisitedOxford", DISTRACTORS, 2, "/a.jpg"),
]
# A wrong line: data set, list, number of the line, new line, and the lines that the error names, by list.
WRONG = [
    ("StanfordOnlineProducts", TEST, 3, "14 8 12 b.JPG", {TRAIN: [2], TEST: [3]}),  # a class of both splits
    ("StanfordOnlineProducts", TRAIN, 4, "3 8 12 toaster_final/11108_0.JPG", {TRAIN: [2, 4]}),  # an image twice
    ("StanfordOnlineProducts", TRAIN, 4, "3 path 12 b.JPG", {TRAIN: [4]}),
    ("InShop", PARTITION, 4, "img/MEN/Denim/1.jpg id_00000001 probe", {PARTITION: [4]}),
    (
        "InShop",
        PARTITION,
        6,
        "img/WOMEN/Dresses/id_00000002/01_1_front.jpg id_00000001 train",
        {PARTITION: [3, 6]},
    ),  # of both splits
    ("InShop", PARTITION, 3, "a.jpg id_00000001 query", {PARTITION: [3]}),  # in no folder
    ("InShop", INSHOP_BOXES, 23, "img/MEN/Denim/id_00000001/01_1_front.jpg 1 2 1 2 1 30", {INSHOP_BOXES: [23]}),
    ("InShop", INSHOP_BOXES, 23, "img/other.jpg 1 2 1 2 3 30", {INSHOP_BOXES: []}),  # an image without a box
    ("CUB200", BIRDS, 3, "2 001.a/a.jpg", {BIRDS: [2, 3]}),
    ("CUB200", BIRD_CLASSES, 3, "99 1", {BIRD_CLASSES: []}),  # of no image
    ("CUB200", BIRD_CLASSES, 3, "20 201", {BIRD_CLASSES: [3]}),
    ("CUB200", BIRD_BOXES, 3, "20 4.5 inf 20.25 30.0", {BIRD_BOXES: [3]}),
    ("VehicleID", SMALL, 2, "a 9", {VEHICLES: [1], SMALL: [2]}),  # a vehicle of both splits
    ("VehicleID", SMALL, 2, "0000001 30", {SMALL: [2]}),  # an image of both splits
    ("VehicleID, all images", VEHICLES, 2, "0000008 77", {ALL_VEHICLES: []}),  # a vehicle without images
    ("VGGFace2", TEST_FACES, 2, "n000002/a.jpg", {FACES: [1], TEST_FACES: [2]}),
    ("VGGFace2", FACES, 2, "0002_01.jpg", {FACES: [2]}),  # of no person
    ("VGGFace2, boxes", LOOSE, 3, '"n000002/0001_01",1,2,3,30', {LOOSE: [2, 3]}),  # a second, other box
    ("VGGFace2, boxes", LOOSE, 3, '"n000002/0002_01",1,2,0,30', {LOOSE: [3]}),  # an empty box
    ("VGGFace2, boxes", LOOSE, 3, '"n000002/9",1,2,3,30', {LOOSE: []}),  # an image without a box
    ("INaturalist", ANIMALS, 2, "train_val2018/Plantae/10/a.jpg", {PLANTS: [1], ANIMALS: [2]}),
    ("INaturalist", PLANTS, 1, "train_val2018/Plantae/oak/a.jpg", {PLANTS: [1]}),
    ("IJBC", GALLERY, 2, f"1,S5,img/10.jpg,101,2,3,20,25{',' * 26}", {GALLERY: [2]}),
    ("IJBC", GALLERY, 2, f"1,5,img/10.jpg,,2,3,20,25{',' * 26}", {GALLERY: [2]}),  # no sighting
    ("IJBC", GALLERY, 2, "1,5,img/10.jpg", {GALLERY: [2]}),
    ("IJBC", GALLERY, 2, '1,5,"img/10.jpg,101,2,3,20,25', {GALLERY: [2]}),
    ("IJBC, re-pack", PROBES, 3, f"1,12,a.jpg,101,2,3,20,25{',' * 26}", {PROBES: [3]}),  # a template of two people
    ("RevisitedOxford", DISTRACTORS, 2, "0/03bc.jpg", {DISTRACTORS: [1, 2]}),
]
CASES = [*WRONG, *((name, path, line, text, {path: [line]}) for name, path, line, text in OUTSIDE)]


def error_of(data):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        data.prepare_data()
    assert str(raised.value).startswith(f"{type(data).__name__}: ")
    return str(raised.value)


@pytest.mark.refusal
@pytest.mark.parametrize(("name", "path", "line", "text", "named"), CASES)
def test_an_error_names_the_list_and_the_line(tmp_path, name, path, line, text, named):
    """An image outside the folder is not read, a class is in one split, an image has one class and one box."""
    data = written(name, tmp_path)
    lines = (tmp_path / path).read_text(encoding="utf-8").splitlines()
    lines[line - 1] = text
    write_text(tmp_path / path, "\n".join(lines) + "\n")
    message = error_of(data)
    for list_name, numbers in named.items():
        assert str(tmp_path / list_name) in message
        for number in numbers:
            assert re.search(rf"(lines?|and) {number}\b", message), message


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("name", "path", "pattern"),
    [
        ("StanfordOnlineProducts", TEST, r"\n.*"),
        ("VehicleID", SMALL, ".*"),
        ("InShop", PARTITION, "[^\n]*query"),
        ("InShop", PARTITION, "[^\n]*gallery"),
    ],
)
def test_an_empty_split_raises(tmp_path, name, path, pattern):
    data = written(name, tmp_path)
    flags = re.DOTALL if name != "InShop" else 0
    text = re.sub(pattern, "", (tmp_path / path).read_text(), flags=flags)
    lines = [line for line in text.splitlines() if line]
    if name == "InShop":
        lines[0] = str(len(lines) - 2)
    write_text(tmp_path / path, "\n".join(lines) + "\n")
    message = error_of(data)
    assert "got none" in message
    assert path in message


def of_second_query(**changes):
    return {"gnd": [GND[0], {**GND[1], **changes}, GND[2]]}


GROUND_TRUTHS = {  # what is changed, and what the error names
    "image outside": ({"imlist": ["a", "../b", "c"]}, "'../b'"),
    "image twice": ({"imlist": ["a", "b", "a"]}, "'a'"),
    "image that is a query": ({"imlist": ["a", "b"], "qimlist": ["c", "d", "b"]}, "'b'"),
    "fewer entries": ({"gnd": GND[:2]}, "got 2"),
    "old protocol": ({"gnd": [{"bbx": [0, 0, 1, 1], "ok": [1], "junk": []}, *GND[1:]]}, "`ok`"),
    "three corners": (of_second_query(bbx=[1, 2, 3]), QUERIES[1]),
    "empty box": (of_second_query(bbx=[9, 2, 9, 30]), QUERIES[1]),
    "position beyond the images": (of_second_query(hard=[8]), QUERIES[1]),
    "negative position": (of_second_query(junk=[-1]), QUERIES[1]),
    "image in two lists": (of_second_query(easy=[2]), IMAGES[2]),
}


@pytest.mark.refusal
@pytest.mark.parametrize("case", GROUND_TRUTHS)
def test_an_error_names_the_entry_of_the_ground_truth(tmp_path, case):
    changes, named = GROUND_TRUTHS[case]
    folder = write_revisited(tmp_path)
    path = write_pickle(folder / "gnd_roxford5k.pkl", ground_truth(**changes))
    message = error_of(RevisitedOxford(folder))
    assert str(path) in message
    assert named in message
