"""Writes small copies of Revisited Oxford and Paris and of their distractors."""

import pickle

from tests.datamodules.trees import write_image, write_text

IMAGES = [f"all_souls_{i:06}" for i in range(7)] + ["château_000001"]
QUERIES = ["all_souls_000013", "radcliffe_camera_000519", "tour_eiffel_000003"]
DISTRACTORS = ["0/03bc.jpg", "0/a b.png", "ff/c_é.jpg"]
GND = [
    {"bbx": [10.4, 5.6, 40.5, 30.0], "easy": [0, 3], "hard": [5], "junk": [1]},
    {"bbx": (0, 0, 48, 40), "easy": [], "hard": [2, 7], "junk": []},
    {"bbx": [1, 2, 11, 32], "easy": [4, 6], "hard": [], "junk": [0, 1, 2]},
]


def ground_truth(**changes):
    return {"imlist": list(IMAGES), "qimlist": list(QUERIES), "gnd": [dict(entry) for entry in GND], **changes}


def write_pickle(path, value, protocol=4):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def write_revisited(root, name="roxford5k", images="jpg", pickled="gnd_roxford5k.pkl"):
    """Write the folder of a city; the first image is grey, the second is CMYK."""
    write_pickle(root / name / pickled, ground_truth())
    for seed, image in enumerate([*IMAGES, *QUERIES]):
        mode = {0: "L", 1: "CMYK"}.get(seed, "RGB")
        write_image(root / name / images / f"{image}.jpg", mode, (48 + 2 * (seed % 4), 40), seed)
    return root / name


def write_distractors(root):
    write_text(root / "revisitop1m.txt", "".join(f"{name}\r\n" for name in DISTRACTORS) + "\n")
    for seed, name in enumerate(DISTRACTORS):
        write_image(root / "jpg" / name, size=(30, 60), seed=100 + seed)
    return root
