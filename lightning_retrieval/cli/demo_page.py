"""The page of `lightning-retrieval demo`, made with Gradio: upload, results with scores, search by a result."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from lightning_retrieval.cli.messages import printable
from lightning_retrieval.cli.search_images import Hit, ImageSearcher
from lightning_retrieval.datamodules.images.image_file import read_image
from lightning_retrieval.optional_packages import optional_import

SIDE = 320  # pixels of the longer side of a shown image, about
CSS = """
.gradio-container {width: 100%; max-width: 72rem !important; margin: 0 auto}
#results .grid-wrap {max-height: none}
#results .grid-container {grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)) !important;
    grid-auto-rows: auto}
#results .thumbnail-item {aspect-ratio: auto; height: auto; overflow: visible; display: flex; flex-direction: column}
#results .thumbnail-item img {aspect-ratio: 1; width: 100%; height: auto; object-fit: contain}
#results .caption-label {position: static; max-width: none; width: 100%; white-space: normal; overflow: visible;
    overflow-wrap: anywhere; text-overflow: clip; background: none; box-shadow: none; border: none; text-align: left}
"""


def serve_demo(searcher: ImageSearcher, images: Path, *, k: int, host: str, port: int) -> Any:
    """Serve the page by another thread.

    Args:
        searcher: an index and its model.
        images: folder of the index's images.
        k: number of results.
        host: address to serve on.
        port: port to serve on.

    Returns:
        Gradio's `Blocks`; `local_url` is the address, and `block_thread()` waits for Ctrl-C.

    Raises:
        ModuleNotFoundError: if Gradio is not installed.
        OSError: if the page cannot be served there, because the port is in use for example.
    """
    gradio = _import_gradio()
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["monospace"]}  # none that a browser has to download
    page = make_page(searcher, images, k)
    try:
        page.launch(
            server_name=host,
            server_port=port,
            theme=gradio.themes.Default(**fonts),
            css=CSS,
            show_error=True,
            footer_links=[],
            quiet=True,  # Gradio would recommend an argument of its own, which the command does not have
            prevent_thread_lock=True,
        )
    except OSError as error:
        raise OSError(
            f"demo: the page cannot be served on port {port} of {host}, which may be in use; give another `--port` or "
            "`--host`."
        ) from error
    return page


def make_page(searcher: ImageSearcher, images: Path, k: int) -> Any:
    """The page as Gradio's `Blocks`; arguments as for `serve_demo`."""
    gradio = _import_gradio()

    def found(file: str, shown: str) -> tuple[Any, ...]:
        """What the page shows for a query: the picture, a line of text, the results and their files."""
        try:
            query = thumbnail(Path(file))
        except Exception:  # Pillow's readers raise errors of many kinds for damaged files
            sentence = f"**{shown}** cannot be read as an image; choose another file."
            return gradio.skip(), sentence, gradio.skip(), gradio.skip()
        results, _ = searcher.search([file], k)
        hits = results[0].hits
        text = f"**{shown}**: {len(hits)} nearest of {len(searcher.index):,} images. Click one to search for it."
        # A new gallery, so that the frame around the image that was clicked before disappears.
        gallery = gradio.Gallery(value=captioned(hits, images), selected_index=None)
        return query, text, gallery, [hit.path for hit in hits]

    def search_by_upload(file: str) -> tuple[Any, ...]:
        return found(file, printable(Path(file).name))

    # Gradio passes the event to an argument of this type.
    def search_by_result(
        paths: list[str],
        event: gradio.SelectData,  # type: ignore[name-defined]
    ) -> tuple[Any, ...]:
        path = paths[event.index]
        return found(str(images / path), printable(path))

    with gradio.Blocks(title="Image search", analytics_enabled=False) as page:
        gradio.Markdown("# Image search")
        upload = gradio.UploadButton("Search for an image", variant="primary", elem_id="upload")
        query = gradio.Image(
            show_label=False, interactive=False, height=200, buttons=[], elem_id="query", visible=True, type="pil"
        )
        text = gradio.Markdown(
            f"Choose an image file to see the nearest of {len(searcher.index):,} images.", elem_id="about"
        )
        gallery = _empty_gallery(gradio)
        paths = gradio.State([])
        shown = [query, text, gallery, paths]
        # Without the progress that covers what is shown, and stays there.
        upload.upload(search_by_upload, upload, shown, api_name="search", show_progress="hidden")
        clicked = gallery.select(search_by_result, paths, shown, api_visibility="private", show_progress="hidden")
        clicked.then(None, js="() => window.scrollTo({top: 0})")  # to the new query, which is above the results
    return page


def _empty_gallery(gradio: Any) -> Any:
    """The images that are found, five in a row, each of which can be clicked."""
    return gradio.Gallery(
        show_label=False,
        allow_preview=False,
        columns=5,
        object_fit="contain",
        height="auto",
        buttons=[],
        interactive=False,
        elem_id="results",
    )


def thumbnail(file: Path) -> Image.Image:
    """The image at about `SIDE` pixels. Each pixel of a small image becomes a square, which a browser does not blur."""
    image = read_image(file)
    factor = SIDE // max(image.size)
    if factor > 1:
        return image.resize((factor * image.width, factor * image.height), Image.Resampling.NEAREST)
    image.thumbnail((SIDE, SIDE))
    return image


def captioned(hits: Sequence[Hit], images: Path) -> list[tuple[Image.Image, str]]:
    """The results with score and path; a grey square for an image that cannot be read any more."""
    captioned = []
    for hit in hits:
        text = f"{hit.similarity:.3f}  {printable(hit.path)}"
        try:
            image = thumbnail(images / hit.path)
        except Exception:  # Pillow's readers raise errors of many kinds for damaged files
            image = Image.new("RGB", (SIDE, SIDE), "grey")
            text += " (cannot be read)"
        captioned.append((image, text))
    return captioned


def _import_gradio() -> Any:
    with optional_import("demo: the page needs Gradio; install it with pip install 'lightning-retrieval[demo]'."):
        import gradio
    return gradio
