"""Gives the site the files of the repository that its pages link to: the README is its first page, the others lie under
`repository/` with their names."""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = "repository"
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")


def place_of(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"


def origin_of(place: str) -> str:
    """Which file of the repository is at a place of the site."""
    if place == "index.md":
        return "README.md"
    return place.removeprefix(f"{OUTSIDE}/") if place.startswith(OUTSIDE) else f"docs/{place}"


def targets_of(path: str) -> set[str]:
    """The files of the repository that a page links to."""
    found = {normpath(join(dirname(path), link)) for _, link in LINK.findall((ROOT / path).read_text())}
    return {target for target in found if (ROOT / target).is_file()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the README, and what can be reached from it and from the pages."""
    known = {origin_of(file.src_uri) for file in files}
    todo = ["README.md", *(path for path in known if path.endswith(".md"))]
    seen = set(known)
    while todo:
        path = todo.pop()
        if path not in known:
            files.append(File.generated(config, place_of(path), abs_src_path=str(ROOT / path)))
        reached = targets_of(path) - seen if path.endswith(".md") else set()
        seen |= reached
        todo += sorted(reached)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between places of the site."""
    here = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        target = place_of(normpath(join(dirname(origin_of(here)), match[2])))
        return match[1] + relpath(target, dirname(here) or ".")

    return LINK.sub(moved, markdown)
