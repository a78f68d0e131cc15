"""Which models are exact over several ranks: classes of Transformers, tiny, patched, beside one process.

    python -m tests.support.coverage                             # every causal-LM and masked-LM class
    python -m tests.support.coverage --classes LlamaForCausalLM  # some of them
    python -m tests.support.coverage --write                     # and writes the table, and the list of served classes
    python -m tests.support.coverage --classes LlamaForCausalLM --write  # some of their rows; the others stay
    python -m tests.support.coverage --wrappers --write          # the same for models of images and sound, on text
    python -m tests.support.coverage --heads --write             # for classes that judge sequences or tokens
    python -m tests.support.coverage --images --write            # for classes that see, on images and videos

A class is compared as by `hf-burst check`, which says what is compared (`hf_burst/check/compare.py`), on a config that
switches on what the class can do (`tiny_models.py`). On images and videos the model is the tiny one of the family
(`tiny_seeing.py`), and the loss and all gradients, of towers too, are compared on each kind of batch of
`tiny_pictures.py`; of a class that refuses images the table has the sentence, and the error on text.

A table, and the list, is of the oldest Transformers of its rows, those of `KEPT` apart; rows of another one say so.
"""

import argparse
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from hf_burst.check.compare import KINDS, TOLERANCE, compare
from hf_burst.check.ranks import RANKS, run_on_ranks
from hf_burst.hf.admission import Verdict, source_hash
from tests.support import tiny_pictures
from tests.support.image_verdicts import compare_images
from tests.support.tiny_models import class_names, is_masked, judging_names, tiny_model, tiny_wrapper, wrapper_names

ROOT = Path(__file__).parents[2]
BATCH = 12  # classes that share the start of two processes
# classes whose own code raises in a Transformers, and why: their rows stay those of an older one
KEPT = {"Llama4ForConditionalGeneration": ("5.24", "its forward raises: its outputs have no image_outputs")}
RESULTS = ROOT / "recipes" / "results"
ADMISSION = ROOT / "hf_burst" / "hf" / "admission.toml"


@dataclass(frozen=True)
class Table:
    """A table of results, and how its classes are made tiny."""

    name: str  # of its files in recipes/results
    classes: tuple[str, ...]
    compare: Callable[[str], Verdict]  # one of them; runs on every rank
    about: str  # which classes these are
    command: str
    kinds: tuple[str, ...] = KINDS  # of batches


def compare_text(make: Callable[[str], PreTrainedModel], name: str) -> Verdict:
    """Runs on every rank."""
    return compare(partial(make, name))


LANGUAGE = Table(
    "coverage",
    tuple(class_names()),
    partial(compare_text, tiny_model),
    "Every causal-LM and masked-LM class",
    "python -m tests.support.coverage",
)
WRAPPERS = Table(
    "coverage_text_of_multimodal",
    tuple(wrapper_names()),
    partial(compare_text, tiny_wrapper),
    "Text through every class for images or sound",
    "python -m tests.support.coverage --wrappers",
)
HEADS = Table(
    "coverage_heads",
    tuple(judging_names()),
    partial(compare_text, tiny_model),
    "Every class for sequence and token classification and question answering",
    "python -m tests.support.coverage --heads",
)
IMAGES = Table(
    "coverage_images",
    (*sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}), "Phi4MultimodalForCausalLM"),
    compare_images,
    "Images through every image-text-to-text class and Phi-4 Multimodal",
    "python -m tests.support.coverage --images",
    tiny_pictures.KINDS,
)


def compare_all(table: Table, names: list[str]) -> list[tuple[str, Verdict]]:
    """The verdicts on some classes; of those that end or hang their ranks, one by one."""
    try:
        verdicts = run_on_ranks(compare_classes, table.compare, names, limit=300.0 + 30.0 * len(names))
    except (ValueError, RuntimeError) as problem:
        if len(names) == 1:
            return [(names[0], Verdict("wrong", note=str(problem)))]
        middle = len(names) // 2
        return compare_all(table, names[:middle]) + compare_all(table, names[middle:])
    return list(zip(names, verdicts, strict=True))


def compare_classes(compare_one: Callable[[str], Verdict], names: list[str]) -> list[Verdict]:
    """Runs on every rank."""
    return [_verdict(compare_one, name) for name in names]


def _verdict(compare_one: Callable[[str], Verdict], name: str) -> Verdict:
    """The verdict on a class; one that raises alike on all ranks does not end those on the others."""
    try:
        return compare_one(name)
    except Exception as problem:
        return Verdict("wrong", note=f"{type(problem).__name__}: {str(problem).strip().splitlines()[0]}")


def markdown(rows: dict[str, Verdict], kinds: Sequence[str] = KINDS) -> Iterator[str]:
    """How many classes came out how, and their table."""
    counts = Counter(row.result for row in rows.values())
    yield ", ".join(f"**{count} {result}**" for result, count in sorted(counts.items())) + f" of {len(rows)} classes."
    yield from ("", f"| class | {' | '.join(kinds)} | greatest error | note |", "|---" * (len(kinds) + 3) + "|")
    for name, row in sorted(rows.items(), key=lambda item: (item[1].result, item[0])):
        errors = row.errors
        cells = [_cell(row, kind) for kind in kinds]
        greatest = f"{max(errors.values()):.0e}" if errors else ""
        yield f"| {name} | {' | '.join(cells)} | {greatest} | {row.note.replace('|', '/')} |"


def _cell(row: Verdict, kind: str) -> str:
    """The result on a kind of batch; "-" if the class has no such input."""
    if kind in row.errors:
        return "exact" if row.errors[kind] <= TOLERANCE else "wrong"
    return row.result if row.result != "exact" else "refused" if row.note else "-"


def written(table: Table) -> dict[str, tuple[Verdict, str]]:
    """The rows of the table as it lies there, each with the Transformers that made it."""
    known = json.loads((RESULTS / f"{table.name}.json").read_text())
    return {
        name: (
            Verdict(row["result"], row.get("errors", {}), row["note"]),
            row.get("transformers", known["transformers"]),
        )
        for name, row in known["classes"].items()
    }


def write(table: Table, new: dict[str, Verdict]) -> None:
    """The table as json and markdown: rows that are new, and as they were those of the other classes."""
    here = Version(transformers.__version__)
    made = {name: row for name, row in written(table).items() if name in table.classes or Version(row[1]) > here}
    stay = {name for name, (_, version) in made.items() if Version(version) > here or _is_kept(name, here)}
    made |= {name: (row, transformers.__version__) for name, row in new.items() if name not in stay}
    made = {name: made[name] for name in {**dict.fromkeys(table.classes), **made} if name in made}
    for name in KEPT.keys() & made.keys():
        row, version = made[name]
        made[name] = replace(row, note=f"of {version}; in {KEPT[name][0]} {KEPT[name][1]}"), version
    oldest = _oldest(made)
    besides = Counter(version for _, version in made.values() if version != oldest)
    versions = {"transformers": oldest, "torch": torch.__version__.partition("+")[0]}
    rows = {name: row for name, (row, _) in made.items()}
    classes = {
        name: {
            "result": row.result,
            **({"errors": row.errors} if row.errors else {}),
            "note": row.note,
            **({} if version == oldest else {"transformers": version}),
        }
        for name, (row, version) in made.items()
    }
    text = json.dumps({**versions, "ranks": RANKS, "tolerance": TOLERANCE, "classes": classes}, indent=1)
    (RESULTS / f"{table.name}.json").write_text(text + "\n")
    told = "".join(f", {count} of them of {version}" for version, count in sorted(besides.items()))
    lines = [
        "# Coverage",
        "",
        f"{table.about} of Transformers {oldest}{told}, tiny, on {RANKS} ranks "
        f"beside one process (torch {versions['torch']}, fp64). Made by `{table.command} --write`, whose "
        "first lines say what is compared; an error is relative to the greatest entry of the loss or gradient.",
    ]
    masked = {name: row for name, row in rows.items() if table is LANGUAGE and is_masked(name)}
    others = {name: row for name, row in rows.items() if name not in masked}
    titles = {LANGUAGE.name: "Causal language models", HEADS.name: "Classes without a language-model head"}
    first = titles.get(table.name, "Models for images or sound")
    for title, part in ((first, others), ("Masked language models", masked)):
        lines += ["", f"## {title}", "", *markdown(part, table.kinds)] if part else []
    (RESULTS / f"{table.name}.md").write_text("\n".join(lines) + "\n")


def _is_kept(name: str, version: Version) -> bool:
    return name in KEPT and Version(KEPT[name][0]).release == version.release[:2]


def _oldest(made: dict[str, tuple[Verdict, str]]) -> str:
    """Of the Transformers that made the rows, those of `KEPT` apart."""
    return min((version for name, (_, version) in made.items() if name not in KEPT), key=Version)


def write_served() -> None:
    """The rows of the classes that a table found exact, with the source of the Transformers that did. What else the
    table of admission knows of them stays."""
    made = written(LANGUAGE) | written(WRAPPERS) | written(HEADS)
    text = ADMISSION.read_text()
    known, rows = tomllib.loads(text)["classes"], []
    for name, (row, version) in sorted(made.items()):
        if row.result == "exact":
            facts = dict(known.get(name, {}))
            if version == transformers.__version__:
                facts["source"] = source_hash(getattr(transformers, name).__module__)
            rows.append(f"{name} = {{ {', '.join(f'{key} = {json.dumps(fact)}' for key, fact in facts.items())} }}")
    head = re.sub(
        '^transformers = ".*?"', f'transformers = "{_oldest(made)}"', text.partition("[classes]")[0], flags=re.M
    )
    ADMISSION.write_text("\n".join([f"{head}[classes]", *rows]) + "\n")


def main() -> None:
    """Compares the classes of the table that the command chooses, and writes it if asked. Ends the process, by an error
    if a class is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    for option, table, classes in (
        ("--wrappers", WRAPPERS, "the classes for images or sound, on text"),
        ("--heads", HEADS, "the classes that judge sequences or tokens"),
        ("--images", IMAGES, "the classes that see, on images and videos"),
    ):
        which.add_argument(option, action="store_const", dest="table", const=table, default=LANGUAGE, help=classes)
    parser.add_argument("--classes", nargs="+", help="by default all")
    parser.add_argument("--write", action="store_true", help="write recipes/results/coverage*.* and admission.toml")
    arguments = parser.parse_args()
    chosen: Table = arguments.table
    names = arguments.classes or list(chosen.classes)
    if unknown := sorted(set(names) - set(chosen.classes)):
        parser.error(f"Transformers has no class {', '.join(unknown)} for this table: {chosen.about}")
    rows: dict[str, Verdict] = {}
    parts = [names[start : start + BATCH] for start in range(0, len(names), BATCH)]
    for name, row in chain.from_iterable(compare_all(chosen, part) for part in parts):
        rows[name] = row
        errors = ", ".join(f"{kind} {error:.0e}" for kind, error in row.errors.items())
        print(f"{name}: {row.result}; {'; '.join(filter(None, [errors, row.note]))}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in Counter(row.result for row in rows.values()).items()))
    if arguments.write:
        write(chosen, rows)
        write_served()
    sys.exit(any(row.result == "wrong" for row in rows.values()))


if __name__ == "__main__":
    main()
