"""The images of a report: their names, the names of their classes and splits, and their pictures."""

from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image

from lightning_retrieval.command_line import printable


@dataclass(frozen=True)
class ReportedImages:
    """What a report shows of images. Names are data, and hold any characters.

    Args:
        name_of: maps an id to the path of the image, relative to the folder of the images.
        class_of: maps a label to the name of the class.
        picture_of: reads the image with an id.
        split_of: maps an id to the name of its split, "" if there are no splits.
    """

    name_of: Callable[[int], str]
    class_of: Callable[[int], str]
    picture_of: Callable[[int], Image.Image]
    split_of: Callable[[int], str] = lambda _: ""

    def name(self, id_: int) -> str:
        """The path of an image, with escape sequences for characters that cannot be printed."""
        return printable(self.name_of(id_))

    def label(self, label: int) -> str:
        """The name of a class, in the same form."""
        return printable(self.class_of(label))

    def split(self, id_: int) -> str:
        """The name of the split of an image, in the same form."""
        return printable(self.split_of(id_))
