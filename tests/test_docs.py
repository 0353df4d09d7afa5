"""The pages of documentation: links resolve, command lines parse, generated pages are those of the code."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
import typer
import yaml

from autoshard.cli import command_tree
from scripts import drawings
from scripts.reference_pages import FOLDER, pages
from studies.__main__ import PROGRAM, STUDIES, study_points

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("deploy/*.md"), *ROOT.glob("docs/**/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
#: Pages that no other has to link to.
ROOTS = {"README.md", "CHANGELOG.md"}
#: Command lines that stand for those of a reader's own package.
EXAMPLES_OF_NAMES = {"autoshard hello", "autoshard train x", "python -m studies NAME", "python -m studies hello"}
#: Names of files to be made, and an environment's id.
EXAMPLES_OF_PATHS = {"autoshard/Sharding-v0", "docs/figures/NAME.json", "studies/kernels/hello.py"}
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


#: Programs whose command lines are parsed.
_PROGRAMS = f"(?:autoshard|{PROGRAM})"
tree, written = cache(command_tree), cache(pages)
study_tree = cache(lambda: command_tree(study_points()))


@cache
def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    found, counts = set(), {}
    for title in re.findall(r"^#{1,6} (.*)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        count = counts[slug] = counts.get(slug, -1) + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def links(page):
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
    return [link for link in found if not re.match(r"\w+:", link)]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_resolve(page):
    for link in links(page):
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_is_linked():
    found = {(page.parent / unquote(link).partition("#")[0]).resolve() for page in PAGES for link in links(page)}
    assert [name for page, name in zip(PAGES, NAMES, strict=True) if page not in found and name not in ROOTS] == []


def command_lines(page):
    """Command lines of blocks of code, which are complete, and of inline code, which may lack arguments."""
    text = page.read_text(encoding="utf-8")
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        if language not in ("", "sh", "console"):
            continue
        for line in map(str.strip, block.replace("\\\n", " ").splitlines()):
            found = re.match(rf"(?:\$ |.*(?={PROGRAM}))?({_PROGRAMS} .*)", line)
            if found:
                yield found[1], True
    for line in re.findall(rf"`(?:[^`]*(?={PROGRAM}))?({_PROGRAMS} [^`]*)`", _FENCE.sub("", text)):
        yield line.replace("\n", " "), False


def parse(line, is_complete):
    """Parses a command line without running it; of an incomplete one, looks at the command and the options."""
    words = shlex.split(re.split(r" #| > | \|", line)[0])
    is_study = line.startswith(PROGRAM)
    command, words = (study_tree(), words[3:]) if is_study else (tree(), words[1:])
    while words and hasattr(command, "commands") and words != ["--help"]:
        command = command.commands[words.pop(0)]
    if is_complete:
        try:
            command.make_context("autoshard", words)
        except typer.BadParameter as error:
            if "does not exist" not in str(error):  # files and folders are those of whoever types the line
                raise
    elif not hasattr(command, "commands"):
        known = {text for option in command.params for text in (*option.opts, *option.secondary_opts)}
        assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_command_lines_parse(page):
    for line, is_complete in command_lines(page):
        if line not in EXAMPLES_OF_NAMES:
            try:
                parse(line, is_complete)
            except (AssertionError, KeyError, typer.TyperException) as error:
                pytest.fail(f"{line}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_studies_exist(page):
    names = re.findall(rf"{PROGRAM} ([a-z][\w-]*)", page.read_text(encoding="utf-8"))
    assert set(names) <= {*STUDIES, "hello"}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_paths_exist(page):
    folders = "autoshard|bench|costmodel|deploy|docs|env|examples|policies|requirements|scripts|server|studies|tests"
    paths = re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text(encoding="utf-8"))
    assert [path for path in paths if path not in EXAMPLES_OF_PATHS and not (ROOT / path).exists()] == []


class _SiteLoader(yaml.SafeLoader):
    """Reads mkdocs.yml, which names a Python function."""


_SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda _loader, suffix, _node: suffix)


def nav_pages(entry):
    """Pages of a part of the site's navigation."""
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [page for one in inner for page in nav_pages(one)]


def test_every_page_is_in_the_sites_navigation():
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _SiteLoader)
    listed = nav_pages(site["nav"])
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


@pytest.mark.slow
def test_the_site_is_built_without_the_network(tmp_path):
    """All links and anchors hold, docstrings are in, and pages ask no other host for anything."""
    pytest.importorskip("mkdocs")
    build = "import socket; socket.getaddrinfo = None; from mkdocs.__main__ import cli; cli()"
    command = [sys.executable, "-W", "ignore", "-c", build, "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert built.returncode == 0, built.stderr
    assert 'id="autoshard.planning.make_plan"' in (tmp_path / "reference/api.html").read_text(encoding="utf-8")
    assert (tmp_path / "repository/examples/tables.json").exists()
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"<(?:script|img|iframe)[^>]*src=.?https?://", text) == [], page
        assert re.findall(r"<link[^>]*rel=.?(?:stylesheet|preconnect)[^>]*href=.?https?://", text) == [], page


def test_the_public_names_are_there():
    text = (FOLDER / "python.md").read_text(encoding="utf-8")
    for module, names in re.findall(r"^\| `([\w.]+)` \| (.*?) \|", text, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


@pytest.mark.parametrize("name", list(written()))
def test_generated_pages_are_up_to_date(name):
    assert (FOLDER / name).read_text(encoding="utf-8") == written()[name], "run `make docs`"


@pytest.mark.parametrize("name", list(drawings.drawings()))
def test_pictures_are_up_to_date(name):
    assert (drawings.FOLDER / name).read_text(encoding="utf-8") == drawings.drawings()[name], "run `make docs`"


def test_cards_that_ship_have_no_other_fields_than_the_page():
    text = (FOLDER / "model-cards.md").read_text(encoding="utf-8")
    for file in (ROOT / "costmodel" / "shipped").rglob("card.json"):
        for field in json.loads(file.read_text(encoding="utf-8")):
            assert f"`{field}`" in text, field
