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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/reference"
SECTIONS = ("Args", "Returns", "Raises", "Example")
ENTRY = re.compile(r"^([\w, *]+?)(?: \((.+?)\))?: *(.*)$")
COMMANDS = ("doctor", "check", "plan", "layout", "bench")
SETTINGS = (  # of the recipes: a heading, the module, its dataclass
    ("The model", "settings", "ModelSettings"),
    ("The data", "settings", "DataSettings"),
    ("Sharing and merging", "settings", "BurstSettings"),
    ("grpo.py", "grpo", "Rewards"),
    ("extend_context.py", "extend_context", "Extension"),
    ("evaluate.py", "evaluate", "Evaluation"),
)
RECIPES = ("finetune_long_document", "sft", "dpo", "reward", "grpo", "extend_context")  # whose defaults differ
DOORS = (  # of tests/support/versions.py
    ("train", "three steps of `Trainer`: losses and weights"),
    ("packed", "a Llama on packed documents: loss and gradients"),
    ("generate", "tokens behind a prompt, and behind a text that is remembered"),
    ("GRPO, DPO", "three steps of TRL's trainers: losses and weights"),
    ("images", "a Qwen2.5-VL on images: loss and gradients"),
    ("hybrid", "a Qwen3.5: loss and gradients"),
)
GENERATED = "<!-- made by docs/mkdocs/reference.py -->"


def python_page() -> str:
    """The names of `hf_burst`, and those of `hf_burst.attention`."""
    import hf_burst
    import hf_burst.attention

    parts = ["Everything below is imported from `hf_burst`."]
    parts += [entry(name, getattr(hf_burst, name)) for name in ORDER]
    parts.append("## hf_burst.attention\n\nFor layers of your own, and for experts.")
    parts += [entry(name, getattr(hf_burst.attention, name), level=3) for name in hf_burst.attention.__all__]
    return page("Python", *parts)


ORDER = (
    *("patch_model", "unpatch_model", "BurstConfig", "Memory", "BurstParallelismConfig", "BurstCollator"),
    *(
        "shard_batch",
        "token_losses",
        "token_divergences",
        "embeddings",
        "generate",
        "remember",
        "Document",
        "check_model",
        "admit",
        "Experts4bitConfig",
    ),
    *("BurstCallback", "BurstResume", "last_checkpoint"),
)


def entry(name: str, thing: Any, level: int = 2) -> str:
    """A heading, the signature and the docstring of a function or class, with its public methods."""
    text = f"{'#' * level} {name}\n\n```python\n{signature(name, thing)}\n```\n\n{documentation(thing)}"
    for method, function in methods(thing):
        text += f"\n\n**`{name}.{signature(method, function)}`**\n\n{documentation(function)}"
    return text


def methods(thing: Any) -> Iterator[tuple[str, Any]]:
    """The public methods that a class itself documents."""
    for name, value in vars(thing).items() if inspect.isclass(thing) else ():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(function) and not name.startswith("_") and function.__doc__:
            yield name, function


def documentation(thing: Any) -> str:
    return markdown(inspect.getdoc(thing) or "")


def signature(name: str, thing: Any) -> str:
    """The call of a function or class, a line for each parameter if it is long."""
    shown = []
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.name not in ("self", "cls"):
            given = "" if parameter.default is parameter.empty else f"={shown_default(parameter.default)}"
            stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
            shown.append(f"{stars}{parameter.name}{given}")
    one = f"{name}({', '.join(shown)})"
    return one if len(one) < 100 else f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + ")"


def shown_default(value: Any) -> str:
    """A default as it is written in code; of functions and objects, their names."""
    if isinstance(value, str):
        return f'"{value}"'
    if value is None or isinstance(value, bool | int | float | tuple):
        return repr(value)
    return getattr(value, "__name__", f"{type(value).__name__}()")


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


def page(title: str, *parts: str) -> str:
    return "\n\n".join(part.strip() for part in (f"# {title}", GENERATED, *parts)) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def errors_page() -> str:
    """The exceptions, and what each stands for."""
    from hf_burst import errors

    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]
    rows = [(f"`{kind.__name__}`", " ".join((inspect.getdoc(kind) or "").split())) for kind in kinds]
    about = (
        "All errors for what users give are `BurstError`s, which are `ValueError`s. They say what was given, what is "
        "allowed and what to do, on every rank, before the model communicates."
    )
    return page("Errors", about, table(("error", "stands for"), rows))


def command_page() -> str:
    """The help of each command."""
    from hf_burst import cli

    parts = ["`hf-burst` has five commands; `python -m hf_burst.cli` is the same."]
    for command in COMMANDS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit), columns(100):
            cli.main([command, "--help"])
        parts.append(f"## hf-burst {command}\n\n```text\n{printed.getvalue().strip()}\n```")
    return page("Command line", *parts)


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
    """The settings that the recipes have in addition to those of TRL."""
    sys.path.insert(0, str(ROOT / "recipes"))
    parts = [
        "Settings come from YAML files (`--config FILE`, several if you like), then from flags. In addition to these, "
        "the recipes take all settings of TRL's `SFTConfig`, `DPOConfig`, `RewardConfig` or `GRPOConfig`, and of its "
        "`ModelConfig`."
    ]
    changed = {recipe: dict(import_module(recipe).DEFAULTS) for recipe in RECIPES}
    for heading, module, name in SETTINGS:
        kind = getattr(import_module(module), name)
        own = [each for each in fields(kind) if each.name in vars(kind).get("__annotations__", {})]
        rows = []
        for each in own:
            others = [
                f"; {shown_setting(defaults.pop(each.name))} in {recipe}.py"
                for recipe, defaults in changed.items()
                if each.name in defaults and not heading.endswith(".py")
            ]
            meaning = each.metadata["help"].replace("%%", "%")
            rows.append((f"`{each.name}`", default(each) + "".join(others), meaning))
        parts.append(f"## {heading}\n\n{table(('setting', 'default', 'meaning'), rows)}")
    rest = {"all": {**import_module("settings").DEFAULTS, "use_cpu": "ACCELERATE_USE_CPU"}, **changed}
    rows = [
        (f"`{name}`", shown_setting(value), recipe if recipe == "all" else f"{recipe}.py")
        for recipe, defaults in rest.items()
        for name, value in defaults.items()
    ]
    parts.append(f"## Other defaults than TRL's\n\n{table(('setting', 'default', 'recipes'), rows)}")
    return page("Recipe settings", *parts)


def default(each: "Field[Any]") -> str:
    """The default of a setting, as it is written in YAML."""
    value = each.default
    if value is MISSING:
        assert callable(each.default_factory), each.name
        value = each.default_factory()
    return shown_setting(value)


def shown_setting(value: Any) -> str:
    """A value of a setting, as it is written in YAML."""
    shown = str(value).lower() if isinstance(value, bool) else value
    return "none" if value in (None, [], "") else f"`{shown}`"


def versions_page() -> str:
    """What ran under which versions, the ranges of setup.cfg, and the versions that the tests pass with."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras, head = config["options.extras_require"], ("package", "version")
    exact = {name: [line for line in lines_of(extras[name]) if "==" in line] for name in ("test", "oldest")}
    doors = (ROOT / "recipes/results/versions.md").read_text()
    return page(
        "Versions",
        "## What ran\n\nTwo processes were compared with one that is not patched, on CPUs with tiny models. A cell has "
        "the result and the seconds, imports included. `python -m tests.support.versions oldest tested newest --write` "
        "measures them anew, each environment in an installation of its own; `newest` is what pip takes on that day.",
        doors.partition("\n\n")[2].partition("\n\n")[2],
        table(("column", "what runs"), DOORS),
        "[Raw](../../recipes/results/versions.json), with the commit of each cell.",
        f"## What is allowed\n\nPython {config['options']['python_requires']}, and:",
        table(head, map(cells, lines_of(config["options"]["install_requires"]))),
        "## What the tests install\n\nThe extra `test`:",
        table(head, map(cells, exact["test"])),
        "The oldest versions that are supported, extra `oldest`:",
        table(head, map(cells, exact["oldest"])),
    )


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def cells(requirement: str) -> tuple[str, str]:
    """The name and the condition of a requirement."""
    match = re.match(r"([\w.\[\]-]+)\s*([^;]*)", requirement)
    assert match is not None, requirement
    return f"`{match[1]}`", f"`{match[2].strip()}`"


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
