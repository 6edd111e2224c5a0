"""What the pages of this package share: embedded pictures, their style, and checks of the file that is written."""

import base64
import io
import os
from collections.abc import Callable
from html import escape
from pathlib import Path

from PIL import Image

from lightning_retrieval.files import reason
from lightning_retrieval.invalid import InvalidValue

STYLE = Path(__file__).with_name("page.css")
GENERATOR = '<meta name="generator" content="lightning-retrieval {}">'  # in the templates of pages
START = 1000  # bytes of a page in which that is
LONGEST_SIDE = 320  # pixels of a picture in a page
SHARP_SIDE = 96  # pictures up to this size are enlarged without blurring
FONTS = (  # a browser uses the first installed font that has a character, so names of classes may be in any script
    *("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans"),
    *("Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic"),
    *("Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Nirmala UI", "Noto Sans Thai", "Leelawadee UI"),
    *("Noto Color Emoji", "Apple Color Emoji", "Segoe UI Emoji", "sans-serif"),
)


def shared_style() -> str:
    """The style of all pages, for the element `style`."""
    return STYLE.read_text(encoding="utf-8").replace("FONTS", ", ".join(FONTS))


def embedded_picture(
    read: Callable[[], Image.Image], description: str, longest_side: int = LONGEST_SIDE
) -> tuple[str, str]:
    """The HTML of an image as a data URI, and why the image cannot be read, "" if it can.

    Args:
        read: reads the image.
        description: the alternative text.
        longest_side: number of pixels of the longer side of the picture, if the image is larger.
    """
    try:
        image = read()
    except Exception as error:  # Pillow's readers raise errors of many types for damaged files
        label = f'<span class="picture gone" role="img" aria-label="{escape(description)}">not readable now</span>'
        return label, reason(error)
    stream = io.BytesIO()
    if max(image.size) <= SHARP_SIDE:
        kind, style = "png", " sharp"
        image.save(stream, kind)
    else:
        kind, style = "jpeg", ""
        image.thumbnail((longest_side, longest_side))
        image.save(stream, kind, quality=85)
    data = base64.b64encode(stream.getvalue()).decode()
    source = f"data:image/{kind};base64,{data}"
    return f'<span class="picture{style}"><img src="{source}" alt="{escape(description)}"></span>', ""


def page_target(argument: str, page: Path) -> Path:
    """The file to write to, with symbolic links resolved; raises unless it is a regular or a new file in a folder.

    Args:
        argument: name of the argument, for error messages.
        page: the path that the user gave.
    """
    target = Path(os.path.realpath(page))
    is_regular = target.is_file() or not os.path.lexists(target)
    if not (is_regular and target.parent.is_dir()):
        raise InvalidValue("must be a regular file in an existing folder", argument=argument, got=page)
    return target


def check_page_target(argument: str, page: Path, command: str, mark: str = GENERATOR) -> None:
    """Raise unless a file can be written, and replaces nothing but an earlier one of this command.

    Args:
        argument: name of the argument, for error messages.
        page: the path that the user gave.
        command: the command, which the template of its page names as the generator.
        mark: text near the start of each file that the command writes there.
    """
    target = page_target(argument, page)
    if not target.is_file():
        return
    with target.open("rb") as file:
        start = file.read(START)
    if start and mark.format(command).encode() not in start:
        rule = f"must be a new file, or one that `{command}` wrote"
        raise InvalidValue(rule, argument=argument, got=f"{page}, which is another file", cure="give another path")
