"""`lightning-retrieval demo`: arguments. The page, which needs torch and Gradio, is imported after parsing."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_retrieval.cli.embedding_options import add_embedding_options
from lightning_retrieval.cli.messages import command_line_message


def demo(args: Sequence[str]) -> int:
    """Serve a page on which an index is searched by uploading an image, or by clicking a result, until Ctrl-C.

    Args:
        args: `--index INDEX` and further settings of the search and of the server.

    Returns:
        The exit code: 0 after Ctrl-C, 2 if the page could not be served.
    """
    options = _parser().parse_args(args)
    try:
        _serve(options)
    except (OSError, ValueError, ImportError) as error:
        text = str(error).replace("search_images: ", "demo: ")
        print(command_line_message("demo", type(error)(text), vars(options)), file=sys.stderr)
        return 2
    return 0


def _serve(options: argparse.Namespace) -> None:
    from lightning_retrieval.cli.demo_page import serve_demo
    from lightning_retrieval.cli.search_images import ImageSearcher
    from lightning_retrieval.search.index import RetrievalIndex
    from lightning_retrieval.training.class_paths import import_named_module

    for module in options.import_module:
        import_named_module("demo", "--import_module", module)
    index = RetrievalIndex.load(options.index, mapped=True)
    searcher = ImageSearcher(
        index,
        checkpoint=options.checkpoint,
        transform=options.transform,
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        device=options.device,
    )
    images = options.images or Path(index.about["images"])
    if not images.is_dir():
        raise ValueError(
            f"demo: `--images` must be the folder of the index's images, got {images}, which is no folder."
        )
    serve_demo(searcher, images, k=min(options.k, len(index)), host=options.host, port=options.port)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-retrieval demo", description="Search an index in the browser, by upload or by clicking a result."
    )
    parser.add_argument("--index", type=Path, required=True, metavar="INDEX", help="folder that `index` wrote")
    parser.add_argument("-k", type=_positive, default=20, help="number of results, default 20")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on, default 127.0.0.1: this machine only")
    parser.add_argument("--port", type=int, default=7860, help="port to serve on, default 7860")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="C", help="checkpoint that the index was made with, if it was moved"
    )
    parser.add_argument("--images", type=Path, metavar="DIR", help="folder of the index's images, if it was moved")
    parser.add_argument(
        "--transform", metavar="NAME", help="function that prepared the images of the index, if one did; it is imported"
    )
    add_embedding_options(parser)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text}")
    return number
