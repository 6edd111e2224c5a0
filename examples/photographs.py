"""Makes a data set for instance retrieval from 38 photographs of four Debian packages.

python examples/photographs.py photographs
python examples/study/run.py --photographs photographs --experiments pairs_photographs

It downloads 168 MB with `apt-get download`, so it runs on Debian 12 and on systems with its packages. A class is a tile
of a photograph, and its eight images show parts of the tile: turned, enlarged, with other brightness, contrast and
colours, some blurred or grey, compressed as JPEG. They are written as SPLIT/PHOTOGRAPH/TILE/VIEW.jpg. No photograph is
in two of the splits train, val and test, so a network is tested on scenes that it has not seen.

The photographs belong to their authors, who are named in usr/share/doc/PACKAGE/copyright of each package. Those of
lomiri-wallpapers-16.04 and -20.04 have the licences CC-BY-4.0, CC-BY-SA-4.0, CC-BY-SA-3.0 and CC0-1.0; those of
mate-backgrounds and plasma-workspace-wallpapers have GPL-2+.
"""

import hashlib
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from emoji import new_folder
from PIL import Image, ImageEnhance, ImageFilter, ImageStat
from tqdm import tqdm

LONG_SIDE = 1_800  # of a photograph in pixels, which larger ones are reduced to
TILE = 220  # width and height of a tile
LEAST_DEVIATION = 12  # standard deviation of the grey values of a tile; a plain sky has less
MOST_TILES = 20  # of a photograph
VIEWS = 8  # images of each tile
SIZE = 96  # width and height of an image
SPLITS = {"test": 0.45, "val": 0.1}  # fractions of the photographs; the others are for training


@dataclass(frozen=True)
class Package:
    """A Debian package, and the files in it that are photographs; the other pictures in it are drawn."""

    version: str
    sha256: str
    path: str  # of a photograph with the name {}
    names: Sequence[str]


PACKAGES = {
    "lomiri-wallpapers-16.04": Package(
        "20.04.0-2",
        "a99ff6a3bfe451e4cc0682ecb3cc82e71740626d59e4845ae34a0a0e45421eab",
        "usr/share/backgrounds/{}.jpg",
        (
            "Bridge_by_Sander_Klootwijk",
            "Dragonfly_by_Bolly",
            "Picture_0B_by_freespace",
            "Picture_1A_by_freespace",
            "Wine_by_Jakkub_Mede",
            "aitzgorri_by_Aitzol_Berasategi",
            "analogpattern_by_Peter_Nerlich",
            "free_by_Peter_Nerlich",
            "friends_by_Aitzol_Berasategi",
            "greentock_by_Peter_Nerlich",
            "life_by_Aitzol_Berasategi",
            "picosdeeuropa_by_Aitzol_Berasategi",
            "seeding_by_Clements_Engelhardt",
            "sunset_by_Aitzol_Berasategi",
        ),
    ),
    "lomiri-wallpapers-20.04": Package(
        "20.04.0-2",
        "d44e89b8473aafe64a5b678f014862dc31335aaaf18665c544d985d854f1a709",
        "usr/share/backgrounds/{}.jpg",
        ("Kleiber_by_Lukas_Baubkus",),
    ),
    "mate-backgrounds": Package(
        "1.26.0-1",
        "7bf4c2209f34b4f61ba6d24c8b58c28b361e82e4b943aae6d42c030169af9e04",
        "usr/share/backgrounds/mate/nature/{}.jpg",
        (
            "Aqua",
            "Blinds",
            "Dune",
            "FreshFlower",
            "Garden",
            "GreenMeadow",
            "LadyBird",
            "RainDrops",
            "Storm",
            "TwoWings",
            "Wood",
            "YellowFlower",
        ),
    ),
    "plasma-workspace-wallpapers": Package(
        "4:5.27.5-2",
        "32cd18b71c8c938a18b3b351f217c02ac590e323caa3cf322fbb875ce8892f8b",
        "usr/share/wallpapers/{}/contents/images/2560x1600.jpg",
        (
            "BytheWater",
            "ColdRipple",
            "ColorfulCups",
            "DarkestHour",
            "EveningGlow",
            "FallenLeaf",
            "Grey",
            "Kite",
            "OneStandsOut",
            "Path",
            "summer_1am",
        ),
    ),
}


def download(name: str, package: Package, folder: Path) -> Path:
    """Download a package into a folder, and return its file."""
    subprocess.run(["apt-get", "download", f"{name}={package.version}"], cwd=folder, check=True, stdout=sys.stderr)
    return next(folder.glob(f"{name}_*.deb"))


def unpack(name: str, package: Package, folder: Path) -> dict[str, Path]:
    """Download and unpack a package, and return the file of each photograph.

    Raises:
        ValueError: if the package is not the one that this script knows.
    """
    file = download(name, package, folder)
    if hashlib.sha256(file.read_bytes()).hexdigest() != package.sha256:
        raise ValueError(f"{file.name} must be the package that this script knows, got another")
    subprocess.run(["dpkg", "-x", file, folder / name], check=True)
    return {photograph: folder / name / package.path.format(photograph) for photograph in package.names}


def tiles_of(photograph: Image.Image, random: np.random.Generator) -> list[Image.Image]:
    """Return tiles of a photograph that do not overlap, without those that show almost nothing."""
    reduced = photograph.convert("RGB")
    reduced.thumbnail((LONG_SIDE, LONG_SIDE), Image.Resampling.LANCZOS)
    tops = range(0, reduced.height - TILE + 1, TILE)
    lefts = range(0, reduced.width - TILE + 1, TILE)
    tiles = []
    for top, left in itertools.product(tops, lefts):
        tile = reduced.crop((left, top, left + TILE, top + TILE))
        if ImageStat.Stat(tile.convert("L")).stddev[0] > LEAST_DEVIATION:
            tiles.append(tile)
    chosen = sorted(random.permutation(len(tiles))[:MOST_TILES])
    return [tiles[number] for number in chosen]


def view_of(tile: Image.Image, random: np.random.Generator) -> Image.Image:
    """Return a changed part of a tile. The part lies inside the tile, however it is turned."""
    angle = random.uniform(-20, 20)
    side = TILE * random.uniform(0.50, 0.68)
    turned = np.radians(abs(angle))
    reach = side * (np.cos(turned) + np.sin(turned)) / 2  # of the part from its centre, along the sides of the tile
    x, y = random.uniform(reach, TILE - reach, 2)
    view = tile.rotate(angle, Image.Resampling.BICUBIC, center=(x, y))
    box = (x - side / 2, y - side / 2, x + side / 2, y + side / 2)
    view = view.resize((SIZE, SIZE), Image.Resampling.BICUBIC, box)
    view = ImageEnhance.Brightness(view).enhance(random.uniform(0.65, 1.35))
    view = ImageEnhance.Contrast(view).enhance(random.uniform(0.65, 1.35))
    view = ImageEnhance.Color(view).enhance(random.uniform(0.5, 1.5))
    if random.random() < 0.4:
        view = view.filter(ImageFilter.GaussianBlur(random.uniform(0.5, 1.5)))
    if random.random() < 0.2:
        view = view.convert("L").convert("RGB")
    return view


def split_of_each(photographs: Sequence[str], seed: int) -> dict[str, str]:
    """Return the split of each photograph."""
    shuffled = np.random.default_rng(seed).permutation(sorted(photographs)).tolist()
    splits = dict.fromkeys(shuffled, "train")
    for split, fraction in SPLITS.items():
        for _ in range(round(fraction * len(photographs))):
            splits[shuffled.pop()] = split
    return splits


def write_views(photographs: Mapping[str, Path], folder: Path, seed: int = 0) -> int:
    """Write the images of all tiles, and return the number of tiles.

    Args:
        photographs: the file of each photograph by its name.
        folder: folder to write to.
        seed: of the splits, the tiles and the changes.
    """
    count = 0
    splits = split_of_each(list(photographs), seed)
    for number, name in enumerate(tqdm(sorted(photographs), desc="Photographs")):
        random = np.random.default_rng([seed, number])
        with Image.open(photographs[name]) as photograph:
            tiles = tiles_of(photograph, random)
        for position, tile in enumerate(tiles):
            of_tile = folder / splits[name] / name / f"{position:02}"
            of_tile.mkdir(parents=True)
            for view in range(VIEWS):
                quality = int(random.integers(20, 91))
                view_of(tile, random).save(of_tile / f"{view}.jpg", quality=quality)
        count += len(tiles)
    return count


def main() -> None:
    photographs: dict[str, Path] = {}
    with new_folder(__doc__, "create it") as (parser, folder, unfinished), tempfile.TemporaryDirectory() as packages:
        for name, package in PACKAGES.items():
            try:
                photographs |= unpack(name, package, Path(packages))
            except (OSError, ValueError, subprocess.CalledProcessError) as error:
                parser.error(f"{name} cannot be downloaded ({error}); try again on Debian 12, with a network.")
        tiles = write_views(photographs, unfinished)
    print(f"{tiles * VIEWS:,} images of {tiles:,} tiles in {folder}")


if __name__ == "__main__":
    main()
