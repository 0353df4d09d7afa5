"""Hook of MkDocs: pages link to files of the repository outside of docs/; the site gets copies of these files.

Python files and the like are copied as they are, Markdown files become pages below `repository/`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
#: Folder of the copies within the site.
COPIES = "repository"
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=(?:#[^)\s]*)?\))")
_BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the files that pages link to, and those that Markdown files among them link to."""
    docs = Path(config.docs_dir).relative_to(ROOT).as_posix()
    wanted = [(f"{docs}/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    copied: set[str] = set()
    while wanted:
        source, text = wanted.pop()
        for path in _outside(source, text, docs):
            if path in copied or not (ROOT / path).is_file():
                continue
            copied.add(path)
            uri = f"{COPIES}/{path}"
            if path.endswith(".md"):
                content = (ROOT / path).read_text(encoding="utf-8")
                files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
                wanted.append((path, content))
            else:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links out of docs/ at the copies, and links of copies into docs/ at the pages."""
    docs = Path(config.docs_dir).relative_to(ROOT).as_posix()
    uri = page.file.src_uri
    source = uri.removeprefix(f"{COPIES}/") if uri.startswith(f"{COPIES}/") else f"{docs}/{uri}"

    def moved(found: re.Match[str]) -> str:
        path = _path(source, found[1])
        target = path.removeprefix(f"{docs}/") if path.startswith(f"{docs}/") else f"{COPIES}/{path}"
        known = files.get_file_from_path(target) is not None
        return posixpath.relpath(target, posixpath.dirname(uri) or ".") if known else found[1]

    return _outside_blocks(markdown, lambda text: _LINK.sub(moved, text))


def _path(source: str, link: str) -> str:
    """Path in the repository of what a file links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), unquote(link)))


def _outside(source: str, text: str, docs: str) -> Iterator[str]:
    """Paths outside of docs/ that a text links to."""
    for link in _LINK.findall(_BLOCK.sub("", text)):
        path = _path(source, link)
        if not path.startswith(f"{docs}/") and not path.startswith(".."):
            yield path


def _outside_blocks(text: str, change: object) -> str:
    """The text, changed outside of its blocks of code."""
    assert callable(change)
    parts, end = [], 0
    for block in _BLOCK.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])
