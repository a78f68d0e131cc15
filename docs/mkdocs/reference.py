"""Writes the pages of docs/reference/ that follow from the code: docstrings, the command line, settings, versions.

    python docs/mkdocs/reference.py            # into docs/reference/
    python docs/mkdocs/reference.py --out DIR

A test compares them with those that lie there.
"""

import argparse
import configparser
import contextlib
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/reference"
SECTIONS = ("Args", "Returns", "Raises", "Example")
ENTRY = re.compile(r"^([\w, *]+?)(?: \((.+?)\))?: *(.*)$")
COMMANDS = ("doctor", "check", "plan", "layout")
SETTINGS = (  # of the recipes: a heading, the module, its dataclass
    ("The model", "settings", "ModelSettings"),
    ("The data", "settings", "DataSettings"),
    ("Sharing and merging", "settings", "BurstSettings"),
    ("extend_context.py", "extend_context", "Extension"),
    ("evaluate.py", "evaluate", "Evaluation"),
)
GENERATED = "<!-- made by docs/mkdocs/reference.py -->\n"


def python_page() -> str:
    """The names of `hf_burst`, and those of `hf_burst.attention`."""
    import hf_burst
    import hf_burst.attention

    parts = ["# Python\n", GENERATED, "Everything below is imported from `hf_burst`."]
    parts += [entry(name, getattr(hf_burst, name)) for name in ORDER]
    parts.append("## hf_burst.attention\n\nFor layers of your own, and for experts.")
    parts += [entry(name, getattr(hf_burst.attention, name), level=3) for name in hf_burst.attention.__all__]
    return "\n\n".join(part.strip() for part in parts) + "\n"


ORDER = (
    *("patch_model", "unpatch_model", "BurstConfig", "Memory", "BurstParallelismConfig", "BurstCollator"),
    *("shard_batch", "token_losses", "check_model", "BurstCallback", "BurstResume", "last_checkpoint"),
)


def entry(name: str, thing: Any, level: int = 2) -> str:
    """A heading, the signature and the docstring of a function or class, with its public methods."""
    heading = "#" * level
    text = f"{heading} {name}\n\n```python\n{signature(name, thing)}\n```\n\n{markdown(inspect.getdoc(thing) or '')}"
    if inspect.isclass(thing):
        for method, function in vars(thing).items():
            own = function.__func__ if isinstance(function, classmethod | staticmethod) else function
            if inspect.isfunction(own) and not method.startswith("_") and own.__doc__ and not own.__doc__.startswith("#"):
                text += f"\n\n**`{name}.{signature(method, own)}`**\n\n{markdown(inspect.getdoc(own) or '')}"
    return text


def signature(name: str, thing: Any) -> str:
    """The call of a function or class, a line for each parameter if it is long."""
    parameters = [each for each in inspect.signature(thing).parameters.values() if each.name not in ("self", "cls")]
    shown = [f"{each.name}={each.default!r}" if each.default is not each.empty else str(each).split(":")[0] for each in parameters]
    one = f"{name}({', '.join(shown)})"
    return one if len(one) < 100 else f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + ")"


def markdown(doc: str) -> str:
    """A docstring in the Hugging Face form as Markdown: sections become headings in bold, arguments a list."""
    out: list[str] = []
    section = ""
    lines = [*doc.splitlines(), ""]
    for line in lines:
        title = line.rstrip(":")
        if line.endswith(":") and title in SECTIONS and not line.startswith(" "):
            section = title
            out += ["", f"**{title}**", ""]
        elif section in ("Args", "Raises") and line.startswith("    "):
            out.append(item(line[4:]))
        elif section == "Returns" and line.startswith("    "):
            out.append(line[4:])
        else:
            out.append(line.removeprefix("    ") if section == "Example" and line.startswith("    ") else line)
            section = section if not line.strip() or section == "Example" else ""
    text = "\n".join(out)
    text = re.sub(r"\[(`\w+`)\](?!\()(?:\[\w+\])?", r"\1", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def item(line: str) -> str:
    """A line of a section of arguments: a name begins an item, and what is indented further belongs to it."""
    if line.startswith("    "):
        return "  " + line[4:]
    match = ENTRY.match(line)
    if match is None:
        return "  " + line
    kind = f" ({match[2]})" if match[2] else ""
    return f"- **{match[1]}**{kind}: {match[3]}".rstrip()


def errors_page() -> str:
    """The exceptions, and what each stands for."""
    from hf_burst import errors

    parts = ["# Errors\n", GENERATED]
    parts.append(
        "All errors for what users give are `BurstError`s, which are `ValueError`s. They say what was given, what is allowed "
        "and what to do, on every rank, before the model communicates."
    )
    rows = [
        f"| `{name}` | {' '.join((inspect.getdoc(kind) or '').split())} |"
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, Exception)
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n\n| error | stands for |\n|---|---|\n" + "\n".join(rows) + "\n"


def command_page() -> str:
    """The help of each command."""
    from hf_burst import cli

    parts = ["# Command line\n", GENERATED, "`hf-burst` has four commands; `python -m hf_burst.cli` is the same."]
    for command in COMMANDS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit), columns(100):
            cli.main([command, "--help"])
        parts.append(f"## hf-burst {command}\n\n```text\n{printed.getvalue().strip()}\n```")
    return "\n\n".join(part.strip() for part in parts) + "\n"


@contextlib.contextmanager
def columns(count: int) -> Iterator[None]:
    """Has argparse wrap its lines at a width that does not depend on the terminal."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def recipes_page() -> str:
    """The settings that the recipes have besides those of TRL."""
    sys.path.insert(0, str(ROOT / "recipes"))
    parts = [
        "# Recipe settings\n",
        GENERATED,
        "Settings come from YAML files (`--config FILE`, several if you like), then from flags. Besides these, the recipes "
        "take all settings of TRL's `SFTConfig` or `DPOConfig` and of its `ModelConfig`, of which `--help` lists the "
        "defaults that are different here.",
    ]
    for heading, module, name in SETTINGS:
        kind = getattr(import_module(module), name)
        assert is_dataclass(kind), name
        own = [each for each in fields(kind) if each.name in vars(kind).get("__annotations__", {})]
        rows = [f"| `{each.name}` | {default(each)} | {str(each.metadata.get('help', '')).replace('%%', '%')} |" for each in own]
        parts.append(f"## {heading}\n\n| setting | default | meaning |\n|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def default(each: "Field[Any]") -> str:
    """The default of a setting, as it is written in YAML."""
    value = each.default if each.default is not MISSING else each.default_factory() if callable(each.default_factory) else None
    return "–" if value in (None, [], "") else f"`{value}`"


def versions_page() -> str:
    """The ranges of setup.cfg, and the versions that the tests pass with."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    needed = lines_of(config["options"]["install_requires"])
    parts = ["# Versions\n", GENERATED]
    parts.append(f"Python {config['options']['python_requires']}, and:")
    parts.append("| package | range |\n|---|---|\n" + "\n".join(f"| {row(each)} |" for each in needed))
    parts.append("The tests pass with these, which the extra `test` installs:")
    parts.append("| package | version |\n|---|---|\n" + "\n".join(f"| {row(each)} |" for each in lines_of(extras["test"]) if "==" in each))
    parts.append("The oldest ones, extra `oldest`:")
    parts.append("| package | version |\n|---|---|\n" + "\n".join(f"| {row(each)} |" for each in lines_of(extras["oldest"]) if "==" in each))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def row(requirement: str) -> str:
    """A requirement as two cells."""
    name, condition = re.match(r"([\w.\[\]-]+)\s*(.*)", requirement).groups()  # type: ignore[union-attr]
    return f"`{name}` | `{condition.partition(';')[0].strip()}`"


MAKERS: dict[str, Callable[[], str]] = {
    "python.md": python_page,
    "errors.md": errors_page,
    "command-line.md": command_page,
    "recipes.md": recipes_page,
    "versions.md": versions_page,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PAGES)
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    for name, make in MAKERS.items():
        (out / name).write_text(make())


if __name__ == "__main__":
    main()
