"""Gives the site the files of the repository that its pages link to: the README is its first page, notebooks are
pages with the outputs that were committed, and the others lie under `repository/` with their names."""

import json
import re
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
NOTEBOOKS = "notebooks/"
OUTSIDE = "repository"
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")


def place_of(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path == "README.md":
        return "index.md"
    if path.startswith(NOTEBOOKS):
        return path.replace(".ipynb", ".md")
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"


def origin_of(place: str) -> str:
    """Which file of the repository is at a place of the site."""
    if place == "index.md":
        return "README.md"
    if place.startswith(NOTEBOOKS):
        return place.replace(".md", ".ipynb")
    return place.removeprefix(f"{OUTSIDE}/") if place.startswith(OUTSIDE) else f"docs/{place}"


def text_of(path: str) -> str:
    """The Markdown of a file of the repository, none if it is not a page."""
    if path.endswith(".ipynb"):
        return page_of(path)[0]
    return (ROOT / path).read_text() if path.endswith(".md") else ""


def targets_of(path: str) -> set[str]:
    """The files of the repository that a page links to."""
    found = {normpath(join(dirname(path), link)) for _, link in LINK.findall(text_of(path))}
    return {target for target in found if (ROOT / target).is_file()}


def page_of(notebook: str) -> tuple[str, list[bytes]]:
    """A notebook as Markdown, and the pictures that it shows: NAME_1.png, NAME_2.png and so on, beside the page."""
    parts: list[str] = []
    pictures: list[bytes] = []
    for cell in json.loads((ROOT / notebook).read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                pictures.append(b64decode(output["data"]["image/png"]))
                parts.append(f"![What the cell drew]({Path(notebook).stem}_{len(pictures)}.png)")
    parts.append(f"*Made from `{notebook}`, with what its cells printed and drew when they were run last.*")
    return "\n\n".join(parts), pictures


def files_of(path: str, config: MkDocsConfig) -> Iterator[File]:
    """What the site has of a file that lies outside of docs/."""
    place = place_of(path)
    if not path.endswith(".ipynb"):
        yield File.generated(config, place, abs_src_path=str(ROOT / path))
        return
    text, pictures = page_of(path)
    yield File.generated(config, place, content=text)
    for number, picture in enumerate(pictures, start=1):
        yield File.generated(config, place.replace(".md", f"_{number}.png"), content=picture)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the README, and what can be reached from it and from the pages."""
    known = {origin_of(file.src_uri) for file in files}
    todo = ["README.md", *(path for path in known if path.endswith(".md"))]
    seen = set(known)
    while todo:
        path = todo.pop()
        if path not in known:
            for file in files_of(path, config):
                files.append(file)
        reached = targets_of(path) - seen
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
