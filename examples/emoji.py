"""Downloads emoji of four makers as a data set of small colour images.

python examples/emoji.py emoji
python examples/own_images.py emoji --categories --size 64 --weights none

The images come from the four packages emoji-datasource-* of the npm registry: 340 MB are downloaded, and 15,000 images
of 64 x 64 pixels are written as CATEGORY/EMOJI/MAKER.png. Each of the 3,786 emoji is a class, which has one image of
each maker that draws it; the ten categories are those of Unicode. The images belong to their makers (Apple, Google,
Twitter, Facebook), whose terms are named in the packages.
"""

import argparse
import hashlib
import io
import json
import shutil
import tarfile
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

VERSION = "16.0.0"
MAKERS = {  # the SHA-512 of each package, as the registry gives it
    "apple": "dVYjsK0FnCry9F+PBtnivhG2K0xdwlmqYaSgiUtztUdAGPYiHYhZcVKvNBqC791g2qyEcFNTBO6utg4eQ3uLTw==",
    "google": "ZRexfzs7MVoLnmzZmNsO4TKhnAJp5D++Vm6PpUpH/jEQQlemp3l88CjZ+DoZ2faM9R4QxZkOPJCoT8DlPhfQ3A==",
    "twitter": "7F+uCuHH+7Qnrc15P5tnbvKkg9E6tlzi4MnT2uW1RlN4pLYTza6cP/dstIfSDMtpjFLWuZewWg8jBbuL2eyELQ==",
    "facebook": "b9ZxJdB7nMWGckH1vyCjPSosaa6MJYuojPPFiQ0LmDIZS8vlG454XKcmTFKrXIMAA72O4MRJMYFhvWI8pjyciQ==",
}


def address(maker: str) -> str:
    """Return the address of the package of a maker."""
    name = f"emoji-datasource-{maker}"
    return f"https://registry.npmjs.org/{name}/-/{name}-{VERSION}.tgz"


def download(maker: str) -> bytes:
    """Return the package of a maker."""
    content = bytearray()
    with urllib.request.urlopen(address(maker), timeout=60) as response:
        size = int(response.headers.get("Content-Length", 0))
        with tqdm(total=size, desc=maker, unit="B", unit_scale=True) as bar:
            while part := response.read(1 << 20):
                content += part
                bar.update(len(part))
    return bytes(content)


def categories_of(emoji: list[dict[str, Any]]) -> dict[str, str]:
    """Return the category of each file name, from emoji.json of a package."""
    categories = {}
    for entry in emoji:
        for variation in (entry, *entry.get("skin_variations", {}).values()):
            categories[variation["image"]] = entry["category"]
    return categories


def unpack(maker: str, package: bytes, folder: Path) -> int:
    """Write the images of a maker, and return their number."""
    prefix = f"package/img/{maker}/64/"
    count = 0
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        categories = categories_of(json.load(archive.extractfile("package/emoji.json")))
        for member in archive:
            name = member.name.removeprefix(prefix)
            if name == member.name or name not in categories:
                continue
            file = folder / categories[name] / Path(name).stem / f"{maker}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(archive.extractfile(member).read())
            count += 1
    return count


@contextmanager
def new_folder(description: str | None, again: str) -> Iterator[tuple[argparse.ArgumentParser, Path, Path]]:
    """Context of a script that creates the folder of its argument: its parser, the folder, and where to write.

    Args:
        description: what the script does.
        again: what the script does again if the folder is deleted, for an error message.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to create")
    folder = parser.parse_args().folder
    if folder.exists():
        parser.error(f"folder must not exist yet, got {folder}; delete it to {again} again.")

    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of an earlier call that was interrupted
    yield parser, folder, unfinished
    unfinished.rename(folder)


def main() -> None:
    images = 0
    with new_folder(__doc__, "download") as (parser, folder, unfinished):
        for maker, digest in MAKERS.items():
            try:
                package = download(maker)
            except OSError as error:
                parser.error(f"{address(maker)} cannot be downloaded ({error}); try again with a network.")
            if b64encode(hashlib.sha512(package).digest()).decode() != digest:
                parser.error(f"{address(maker)} must be the file that this script knows, got another; try again.")
            images += unpack(maker, package, unfinished)
    print(f"{images:,} images in {folder}")


if __name__ == "__main__":
    main()
