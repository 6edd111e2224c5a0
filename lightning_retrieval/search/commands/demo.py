"""`lightning-retrieval demo`: a Gradio page that searches an index for an image or, if the model takes it, a text."""

import os
import re
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lightning_retrieval.checks import check_integer
from lightning_retrieval.command_line import printable
from lightning_retrieval.invalid import Failed, InvalidValue
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.preparation.decoding import read_image
from lightning_retrieval.preparation.prepare import open_image
from lightning_retrieval.search.commands.search_images import Hit, ImageSearcher, QueryResult, image_folder
from lightning_retrieval.search.html_page import FONTS
from lightning_retrieval.search.image_files import image_file
from lightning_retrieval.search.store.embedding_store import EmbeddingStore

MEGABYTES, MEGAPIXELS = 20, 64  # maximum file size and image size of an upload
KEPT, PAUSE = 600, 30  # seconds: how long a visitor's file is kept; time between two deletions
PROXIES = ("http_proxy", "https_proxy", "all_proxy")  # environment variables, also in upper case
UPLOADS = "GRADIO_TEMP_DIR"  # environment variable: Gradio's folder for uploads and shown images
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
ALL_ADDRESSES = ("0.0.0.0", "[::]")
EXAMPLES = 3  # queries that the empty page offers
DRAWS, DRAWN_FROM = 24, 100  # random directions, and the number of images near each of which one is drawn
LONGEST_TEXT = 1000  # characters of a text that is searched for
INVITATION = "Drop an image, click an example or take a random image: the page shows the {k} nearest."
INVITATION_TO_TYPE = "Type what you look for and press Enter. {invitation}"
NO_TEXT = "There is no text to search for; type some words."
NO_IMAGE = "There is no image to search for; choose an image file."
NOT_UPLOADED = "The image must be an uploaded file, since the demo fetches nothing from an address; upload it first."
UNREADABLE = "cannot be read as an image; choose another file."
NONE_READABLE = "None of the drawn images can be read in the folder of the index; give their folder with `--images`."
SIDE = 320  # approximate number of pixels of the longer side of a shown image
STYLE = Path(__file__).with_name("demo.css")


def run_demo(index: EmbeddingStore, images: Path | None, *, k: int, host: str, port: int, **settings: Any) -> None:
    """Serve the page until Ctrl-C. Visitors' files are deleted after 10 minutes and at the end.

    Args:
        index: an index.
        images: folder of its images; if None, the one that it records.
        k: as for `serve_demo`.
        host: as for `serve_demo`.
        port: as for `serve_demo`.
        **settings: as for `ImageSearcher`.
    """
    check_integer("k", k, least=1)
    check_integer("port", port, least=1, most=65535)
    folder = image_folder(images, index)
    if not folder.is_dir():
        rule = "must be the folder of the index's images"
        raise InvalidValue(rule, argument="images", got=f"{folder}, which is not a folder")
    with suppress(KeyboardInterrupt), _ended_by_signals(), private_uploads(), ExitStack() as stack:
        searcher = ImageSearcher(index, **settings)  # whose weights may be downloaded through a proxy
        stack.enter_context(without_proxies())
        page = serve_demo(searcher, folder, k=min(k, len(index)), host=host, port=port)
        print(f"The page is at {page.local_url}; Ctrl-C ends it.", flush=True)
        try:
            page.block_thread()
        finally:
            page.close(verbose=False)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End the demo on SIGTERM and SIGINT as on Ctrl-C, even in the background, so that uploaded files are deleted."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve_demo(searcher: ImageSearcher, images: Path, *, k: int, host: str, port: int) -> Any:
    """Serve the page from another thread.

    Args:
        searcher: an index and its model.
        images: folder of the index's images.
        k: number of results.
        host: address to serve on.
        port: port to serve on.

    Returns:
        Gradio's `Blocks`; `local_url` is the address, and `block_thread()` waits for Ctrl-C. Gradio refuses files that
            are too large, and deletes those of visitors; other sites are refused by Starlette.

    Raises:
        ModuleNotFoundError: if Gradio is not installed.
        OSError: if the page cannot be served at this address, for example because the port is in use.
    """
    gradio = _import_gradio()
    fonts = {"font": FONTS, "font_mono": ["monospace"]}  # fonts that need no download
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    # Another site can make its name resolve to this machine (DNS rebinding), but its name stays in the header `Host`.
    if ":" in host:
        host = f"[{host.strip('[]')}]"  # an address of IPv6 is in brackets there, as in the address of the page
    names = [host]
    if host in LOOPBACK:
        names = list(LOOPBACK)
    elif host in ALL_ADDRESSES:
        names = ["*"]
    page = make_page(searcher, images, k)
    try:
        page.launch(
            server_name=host,
            server_port=port,
            theme=gradio.themes.Default(**fonts),
            css=STYLE.read_text(encoding="utf-8"),
            show_error=True,
            footer_links=[],
            max_file_size=f"{MEGABYTES}mb",
            app_kwargs={"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=names)]},
            ssr_mode=False,  # server-side rendering would bypass the check of the host
            quiet=True,  # Gradio would recommend an argument that the command does not have
            prevent_thread_lock=True,
        )
    except OSError as error:
        raise Failed(
            f"the page cannot be served on port {port} of {host}, which may be in use",
            cure="give another `port` or `host`",
        ) from error
    return page


@contextmanager
def without_proxies() -> Iterator[None]:
    """Context without the settings of proxies, since the demo connects to its own page only.

    Gradio would ask this page through a proxy, and cannot be imported with a SOCKS proxy unless socksio is installed.
    """
    before = {name: value for name, value in os.environ.items() if name.lower() in PROXIES}
    for name in before:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)


@contextmanager
def private_uploads() -> Iterator[None]:
    """Context with a folder for visitors' files. Only this user can read the folder, and it is deleted on exit."""
    before = os.environ.get(UPLOADS)
    with tempfile.TemporaryDirectory(prefix="demo-", dir=before, ignore_cleanup_errors=True) as folder:
        os.environ[UPLOADS] = folder
        try:
            yield
        finally:
            del os.environ[UPLOADS]
            if before is not None:
                os.environ[UPLOADS] = before


def make_page(searcher: ImageSearcher, images: Path, k: int) -> Any:
    """The page as Gradio's `Blocks`; arguments as for `serve_demo`."""
    gradio = _import_gradio()
    answers = PageAnswers(searcher, images, k)
    examples = random_pictures(searcher.index, images, EXAMPLES)

    # Gradio passes the event to an argument of this type.
    def search_by_picture(
        paths: list[str],
        event: gradio.SelectData,  # type: ignore[name-defined]
    ) -> tuple[Any, ...]:
        return answers.of_path(paths[event.index])

    invitation = INVITATION.format(k=k)
    settings = {"title": "Image search", "analytics_enabled": False, "delete_cache": (PAUSE, KEPT)}
    with _page_of_files(gradio)(**settings) as page:
        # Without the folders above, which are no business of a visitor.
        indexed = f"**{len(searcher.index):,} images** of the folder {_bold(images.name)} are indexed."
        gradio.Markdown(f"# Image search\n{indexed}", elem_id="indexed")
        if searcher.takes_texts:
            invitation = INVITATION_TO_TYPE.format(invitation=invitation)
            words = gradio.Textbox(label="Words", max_length=LONGEST_TEXT, submit_btn=True, elem_id="words")
        with gradio.Row():
            with gradio.Column(scale=2):
                upload = gradio.File(label="Your image", height=140, elem_id="upload")
                another = gradio.Button("Random image", elem_id="random")
            with gradio.Column(scale=3):
                offered, query = _examples_and_query(gradio, examples)
        text = gradio.Markdown(invitation, elem_id="about")
        results = _pictures(gradio, "results", [], columns=5, visible=False)
        paths, example_paths = gradio.State([]), gradio.State([path for _, path in examples])
        shown = [query, text, results, paths, offered]
        # The line of text shows the position in the queue and the time, so that no progress bar covers the images.
        progress = {"show_progress": "minimal", "show_progress_on": text}
        private = {"api_visibility": "private", **progress}
        uploaded = upload.upload(answers.of_upload, upload, shown, **private)
        uploaded.then(None, js="() => null", outputs=upload)  # the area is free for the next image
        # What programs call is an event of a button that nobody sees.
        found = gradio.JSON(label="results", visible=False)
        gradio.Button(visible=False).click(answers.as_fields, upload, found, api_name="search")
        if searcher.takes_texts:
            words.submit(answers.of_text, words, shown, **private)
        another.click(answers.of_random_image, None, shown, **private)
        offered.select(search_by_picture, example_paths, shown, **private)
        clicked = results.select(search_by_picture, paths, shown, **private)
        clicked.then(None, js="() => window.scrollTo({top: 0})")  # scroll to the new query, above the results
    return page


def _examples_and_query(gradio: Any, examples: Sequence[Any]) -> tuple[Any, Any]:
    """The pictures that the empty page offers, and the place of the picture of a query."""
    offered = _pictures(gradio, "examples", examples, columns=EXAMPLES, visible=bool(examples))
    query = gradio.Image(
        show_label=False, interactive=False, height=200, buttons=[], elem_id="query", visible=False, type="pil"
    )
    return offered, query


class PageAnswers:
    """What the page shows for a query: its picture, a line of text, the results, their paths, and no examples.

    Args:
        searcher: as for `serve_demo`.
        images: as for `serve_demo`.
        k: as for `serve_demo`.
    """

    def __init__(self, searcher: ImageSearcher, images: Path, k: int) -> None:
        self.searcher = searcher
        self.images = images
        self._request = searcher.index.request(k)
        self._gradio = _import_gradio()

    def of_upload(self, file: str | None) -> tuple[Any, ...]:
        """The answer for an uploaded file."""
        if file is None:
            return self._only_text(NO_IMAGE)
        return self._of_file(file, Path(file).name)

    def as_fields(self, file: str | None) -> list[dict[str, Any]]:
        """The results for an uploaded file, for programs."""
        if file is None:
            raise self._gradio.Error(NO_IMAGE)
        try:
            uploaded_picture(Path(file))
        except ValueError as error:
            raise self._gradio.Error(f"{Path(file).name} {error}") from error
        results, _ = self.searcher.search([file], self._request)
        return [{"file": hit.path, "score": hit.similarity, "metadata": dict(hit.metadata)} for hit in results[0].hits]

    def of_text(self, text: str | None) -> tuple[Any, ...]:
        """The answer for a text."""
        words = (text or "").strip()
        if not words:
            return self._only_text(NO_TEXT)
        results, _ = self.searcher.search([], self._request, texts=[words])
        return self._answer(_bold(words), results[0], self._gradio.Image(value=None, visible=False))

    def of_path(self, path: str) -> tuple[Any, ...]:
        """The answer for an image of the index."""
        try:
            file = image_file(self.images, path)
        except ValueError:
            return self._only_text(f"{_bold(path)} {UNREADABLE}")
        return self._of_file(str(file), path)

    def of_random_image(self) -> tuple[Any, ...]:
        """The answer for a random image of the index."""
        drawn = random_pictures(self.searcher.index, self.images, 1)
        if not drawn:
            return self._only_text(NONE_READABLE)
        return self.of_path(drawn[0][1])

    def _of_file(self, file: str, name: str) -> tuple[Any, ...]:
        shown = _bold(name)
        try:
            picture = uploaded_picture(Path(file))
        except ValueError as error:
            return self._only_text(f"{shown} {error}")
        results, _ = self.searcher.search([file], self._request)
        return self._answer(shown, results[0], self._gradio.Image(value=picture, visible=True))

    def _answer(self, shown: str, result: QueryResult, query: Any) -> tuple[Any, ...]:
        """The answer for a result, with the picture of the query."""
        hits = result.hits
        text = f"{shown}: {result.nothing_similar}"
        if hits:
            text = f"{shown}: {len(hits)} nearest of {len(self.searcher.index):,} images. Click one to search for it."
        # A new gallery, so that the frame around the previously clicked image disappears.
        gallery = self._gradio.Gallery(value=captioned(hits, self.images), selected_index=None, visible=True)
        return query, text, gallery, [hit.path for hit in hits], self._gradio.Gallery(visible=False)

    def _only_text(self, text: str) -> tuple[Any, ...]:
        skip = self._gradio.skip()
        return skip, text, skip, skip, skip


def random_pictures(index: EmbeddingStore, images: Path, count: int) -> list[tuple[Image.Image, str]]:
    """Up to `count` different random images of an index that can be read: their thumbnails and paths.

    Each is drawn from the `DRAWN_FROM` nearest to a random direction, because listing all ids of a large index is slow.
    """
    generator = np.random.default_rng()
    directions = generator.standard_normal((DRAWS, index.dim), dtype=np.float32)
    request = index.request(min(DRAWN_FROM, len(index)))
    _, _, nearest, _ = index.search_with_metadata(torch.from_numpy(directions), request, [])
    pictures: dict[str, Image.Image] = {}
    for row in nearest:
        found = [path for path in row if path]  # an approximate index may find fewer
        if not found or len(pictures) == count:
            continue
        path = found[generator.integers(len(found))]
        try:
            pictures[path] = uploaded_picture(image_file(images, path))
        except ValueError:
            continue
    return [(picture, path) for path, picture in pictures.items()]


def _bold(name: str) -> str:
    """The name of a file in bold Markdown, with each punctuation mark escaped, such as `<` and `_`."""
    escaped = re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", printable(name))
    return f"**{escaped}**"


def _paths_in(value: Any) -> Iterator[str]:
    """The paths of files in the input of an event, at any depth, as Gradio looks for them."""
    if isinstance(value, dict):
        if "path" in value:
            yield str(value["path"])
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _paths_in(item)


def _page_of_files(gradio: Any) -> Any:
    """The class of a page that searches for uploaded files only: Gradio would fetch one from any web address."""

    class PageOfFiles(gradio.Blocks):  # type: ignore[misc]
        def validate_inputs(self, block_fn: Any, inputs: list[Any]) -> None:
            if not all(map(os.path.isabs, _paths_in(inputs))):
                raise gradio.Error(NOT_UPLOADED)
            super().validate_inputs(block_fn, inputs)

    return PageOfFiles


def _pictures(gradio: Any, name: str, pictures: Sequence[Any], columns: int, visible: bool) -> Any:
    """A gallery of pictures with their captions; a visitor can click each of them."""
    return gradio.Gallery(
        value=pictures,
        show_label=False,
        allow_preview=False,
        columns=columns,
        object_fit="contain",
        height="auto",
        buttons=[],
        interactive=False,
        visible=visible,
        elem_id=name,
        elem_classes="pictures",
        format="jpeg",  # Gradio's WebP encoding takes as long as the search
    )


def uploaded_picture(file: Path) -> Image.Image:
    """The thumbnail of an uploaded image.

    Raises:
        ValueError: if the image has too many pixels (according to its header) or cannot be read.
    """
    try:
        with open_image(file) as header:
            pixels = header.width * header.height
        if pixels <= MEGAPIXELS * 10**6:
            return thumbnail(file)
    except Exception:  # Pillow's readers raise errors of many types for damaged files
        raise ValueError(UNREADABLE) from None
    raise ValueError(f"has too many pixels; choose one of at most {MEGAPIXELS} megapixels.")


def thumbnail(file: Path) -> Image.Image:
    """The image at about `SIDE` pixels. Small images are enlarged with square pixels, so browsers do not blur them."""
    image = read_image(file, least_size=(SIDE, SIDE))
    factor = SIDE // max(image.size)
    if factor > 1:
        return image.resize((factor * image.width, factor * image.height), Image.Resampling.NEAREST)
    image.thumbnail((SIDE, SIDE))
    return image


def captioned(hits: Sequence[Hit], images: Path) -> list[tuple[Image.Image, str]]:
    """The picture of each result, a grey square if it cannot be read, and its score, path and metadata in lines."""
    captioned = []
    for hit in hits:
        text = f"{hit.similarity:.3f}  {printable(hit.path)}"
        try:
            image = thumbnail(image_file(images, hit.path))
        except Exception:  # Pillow's readers raise errors of many types for damaged files
            image = Image.new("RGB", (SIDE, SIDE), "grey")
            text += " (cannot be read)"
        details = [f"{name}: {value}" for name, value in hit.shown()]
        captioned.append((image, "\n".join([text, *details])))
    return captioned


def _import_gradio() -> Any:
    with optional_import("the page needs Gradio; install it with pip install 'lightning-retrieval[demo]'."):
        import gradio
    return gradio
