"""Write small trees of images in folders, tables and lists, and train on what a data module reads from them."""

import json
from functools import partial
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn
from torchvision.transforms import v2

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from tests.datamodules.trees import write_image, write_text
from tests.quiet_trainer import quiet_trainer

SMALL = v2.Compose([v2.Resize((16, 16)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
# Settings for fast tests on a small tree.
QUICK = {
    "train_transform": SMALL,
    "eval_transform": SMALL,
    "classes_per_batch": 2,
    "samples_per_class": 2,
    "eval_batch_size": 4,
    "seed": 0,
}
TAXONOMY = {  # category id: species, genus, family, order, class, phylum, kingdom
    10: ("Prunella vulgaris", "Prunella", "Lamiaceae", "Lamiales", "Magnoliopsida", "Tracheophyta", "Plantae"),
    9: ("Prunella modularis", "Prunella", "Prunellidae", "Passeriformes", "Aves", "Chordata", "Animalia"),
    100: ("Prunella collaris", "Prunella", "Prunellidae", "Passeriformes", "Aves", "Chordata", "Animalia"),
    7: ("Sturnus vulgaris", "Sturnus", "Sturnidae", "Passeriformes", "Aves", "Chordata", "Animalia"),
    8: ("Apis mellifera", "Apis", "Apidae", "Hymenoptera", "Insecta", "Arthropoda", "Animalia"),
}
GROUPS = {10: "Plantae", 9: "Aves", 100: "Aves", 7: "Aves", 8: "Insecta"}


def write_images(root: Path, paths: list[str]) -> None:
    """Write a different image to each path, the second one grey."""
    for seed, path in enumerate(paths):
        write_image(root / path, "L" if seed == 1 else "RGB", seed=seed)


def write_folders(root: Path, names: list[str], images: int = 3, suffix: str = ".jpg") -> list[str]:
    """Write folders of these names with images 0, 1, ... in each; return the paths in order."""
    paths = [f"{name}/{i}{suffix}" for name in names for i in range(images)]
    write_images(root, paths)
    return paths


def write_inaturalist(root: Path, lists: str = "Inat_dataset_splits", images: bool = True) -> dict[str, list[str]]:
    """Write the official directories, Smooth-AP's lists and the taxonomy in train2018.json; return the paths."""
    splits = {"train": (10, 9, 100), "test": (7, 8)}
    paths = {
        split: [f"train_val2018/{GROUPS[c]}/{c}/{c:02}f{i}a.jpg" for c in classes for i in range(3)]
        for split, classes in splits.items()
    }
    for split, of_split in paths.items():
        write_text(root / lists / f"Inaturalist_{split}_set1.txt", "".join(f"{path}\n" for path in of_split))
    levels = ("name", "genus", "family", "order", "class", "phylum", "kingdom")
    categories = [
        {"id": c, "supercategory": GROUPS[c], **dict(zip(levels, names, strict=True))} for c, names in TAXONOMY.items()
    ]
    write_text(root / "train2018.json", json.dumps({"images": [], "annotations": [], "categories": categories}))
    if images:
        write_images(root, paths["train"] + paths["test"])
    return paths


def write_vgg_face2(root: Path, prefixed: bool = False, folder: str = "meta") -> dict[str, list[str]]:
    """Write the official directories, lists and loose boxes; return the paths of each split below the root."""
    found = {}
    for split, people in {"train": ("n000002", "n000010", "n000007"), "test": ("n000001", "n000009")}.items():
        stems = [f"{person}/{i:04}_01" for person in people for i in range(1, 4)]
        found[split] = [f"{split}/{stem}.jpg" for stem in stems]
        write_images(root, found[split])
        lines = found[split] if prefixed else [f"{stem}.jpg" for stem in stems]
        write_text(root / folder / f"{split}_list.txt", "".join(f"{line}\n" for line in lines))
        rows = [f'"{stem}",{-3 - i},{i},{20 + i},30\n' for i, stem in enumerate(stems)]
        write_text(root / "bb_landmark" / f"loose_bb_{split}.csv", "NAME_ID,X,Y,W,H\n" + "".join(rows))
    return found


def write_landmarks(
    root: Path, images: str = "images", folder: str = "annotations"
) -> dict[str, list[tuple[str, int]]]:
    """Write the published lists of URLs, and images named after the URLs; return (path, landmark) of each split."""
    splits = {
        "train": [(f"{landmark}_{i}-b%20c.JPG", landmark) for landmark in (3, 20, 100) for i in range(3)],
        "val": [(f"v{landmark}_{i}.jpg", landmark) for landmark in (100, 3) for i in range(2)],
    }
    for split, rows in splits.items():
        lines = [
            f"http://farm{i}.example.com/{i}/{name} {landmark} 17 0.5\n" for i, (name, landmark) in enumerate(rows)
        ]
        write_text(root / folder / f"annotation_clean_{split}.txt", "".join(lines))
        write_images(root / images, [name for name, _ in rows])
    return {split: [(f"{images}/{name}", landmark) for name, landmark in rows] for split, rows in splits.items()}


def begin_with_byte_order_mark(path: Path) -> None:
    """Add a byte order mark to a text file, as some editors do."""
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def fit_and_validate(data: pl.LightningDataModule, validate: bool = True) -> dict[str, float]:
    """Train for two steps and, if wanted, validate once more; return the logged metrics."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(48, 8))
    module = RetrievalModule(network, SmoothAPLoss(tau=0.1), optimizer=partial(torch.optim.SGD, lr=0.1))
    trainer = quiet_trainer(max_steps=2, num_sanity_val_steps=0, callbacks=[RetrievalEvaluation((1,))])
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 2
    if validate:
        trainer.validate(module, datamodule=data, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
