"""Hooks of mkdocs.yml: pages of the repository's root on the site, and links that lead out of docs/.

On GitHub every relative link works as it is written. On the site a link to a page leads to that page, and a link to
anything else of the repository, a source file say, becomes its text: the site holds pages, not sources.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")} | {"README.md": "index.md"}
SOURCES = {target: name for name, target in ROOT_PAGES.items()}
FENCE = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for name, target in ROOT_PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return rewritten(markdown, page.file.src_uri)


def rewritten(markdown: str, here: str) -> str:
    """A page with its links as the site has them. here: the page on the site."""
    source = SOURCES.get(here, f"docs/{here}")

    def link(match: re.Match[str]) -> str:
        text, path, anchor = match[1], match[2], match[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / target).exists():
            return match[0]  # mkdocs says that it leads nowhere
        on_site = ROOT_PAGES.get(target) or (target[len("docs/") :] if target.startswith("docs/") else None)
        if on_site is None:
            return text
        return f"[{text}]({posixpath.relpath(on_site, posixpath.dirname(here) or '.')}{anchor})"

    return "".join(part if FENCE.fullmatch(part) else LINK.sub(link, part) for part in FENCE.split(markdown))
