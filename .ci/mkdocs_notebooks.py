"""A hook of mkdocs: it changes links from notebooks to pages, `../start.md`, into links on the site.

mkdocs itself does this in pages that are written in Markdown only.
"""

import posixpath
import re
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

LINK = re.compile(r'href="(?![a-z]+:)([^"#]+\.md)(#[^"]*)?"')


def on_page_content(html: str, page: Page, config: Any, files: Any) -> str:
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def on_site(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), found[1]))
        file = files.get_file_from_path(target)
        if file is None:
            raise PluginError(f"{page.file.src_uri}: the link {found[1]} leads to no page.")
        return f'href="{file.url_relative_to(page.file)}{found[2] or ""}"'

    return LINK.sub(on_site, html)
