"""`lightning-retrieval demo`: arguments. The page, which needs torch and Gradio, is imported after parsing."""

import argparse
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_retrieval.cli.embedding_options import (
    EXPECTED_ERRORS,
    add_embedding_options,
    add_index_options,
    import_modules,
    report_error,
)

HOST_HELP = (
    "address to serve on, which is also the only name under which the page answers, default 127.0.0.1: this machine "
    "only; 0.0.0.0 serves the page to the network, under any name"
)


def demo(args: Sequence[str]) -> int:
    """Serve a page on which an index is searched by uploading an image, or by clicking a result, until Ctrl-C.

    Files of visitors are deleted after some minutes, and at the end.

    Args:
        args: `--index INDEX` and further settings of the search and of the server.

    Returns:
        The exit code: 0 after Ctrl-C, 2 if the page could not be served.
    """
    options = _parser().parse_args(args)
    try:
        with _ended_by_signals():
            _serve(options)
    except KeyboardInterrupt:
        return 0
    except EXPECTED_ERRORS as error:
        return report_error("demo", error, vars(options))
    return 0


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, so that the files of visitors are deleted, and both also in the background."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(options: argparse.Namespace) -> None:
    from lightning_retrieval.cli.demo_page import delete_files_from_time_to_time, private_uploads, serve_demo
    from lightning_retrieval.cli.search_images import ImageSearcher, image_folder
    from lightning_retrieval.cli.stores import opened_index

    import_modules("demo", options.import_module)
    with private_uploads() as uploads, opened_index("demo", options.index, options.store) as index:
        images = image_folder(options.images, index)
        if not images.is_dir():
            raise ValueError(
                f"demo: `--images` must be the folder of the index's images, got {images}, which is no folder."
            )
        searcher = ImageSearcher(
            index,
            checkpoint=options.checkpoint,
            transform=options.transform,
            batch_size=options.batch_size,
            num_workers=options.num_workers,
            device=options.device,
        )
        page = serve_demo(searcher, images, k=min(options.k, len(index)), host=options.host, port=options.port)
        print(f"The page is at {page.local_url}; Ctrl-C ends it.", flush=True)
        try:
            delete_files_from_time_to_time(uploads)
        finally:
            page.close(verbose=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-retrieval demo", description="Search an index in the browser, by upload or by clicking a result."
    )
    add_index_options(parser, images_help="folder of the index's images, if it was moved")
    parser.add_argument("-k", type=_positive, default=20, help="number of results, default 20")
    parser.add_argument("--host", default="127.0.0.1", help=HOST_HELP)
    parser.add_argument("--port", type=_port, default=7860, help="port to serve on, default 7860")
    add_embedding_options(parser)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to 65535, got {text}")
    return int(text)
