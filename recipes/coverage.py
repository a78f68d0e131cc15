"""Which models are exact over several ranks: every causal-LM and masked-LM class of Transformers, tiny, patched, beside
one process.

    python recipes/coverage.py                             # all classes, about seven minutes on two cores
    python recipes/coverage.py --classes LlamaForCausalLM  # some of them
    python recipes/coverage.py --write                     # and writes the table, and the list of served classes

A class is compared in fp64 on two ranks of this machine: the loss and all gradients, as a data-parallel wrapper
averages them, of two sequences of odd length, of packed documents (beside the documents one by one, since not every
model keeps them apart) and of sequences padded at either end. The list of served classes is not asked; every other
check of `patch_model` is.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import hf_burst  # noqa: E402
from hf_burst import linear_loss  # noqa: E402
from hf_burst.errors import BurstError  # noqa: E402
from hf_burst.hf import support  # noqa: E402
from hf_burst.hf.support import is_causal  # noqa: E402
from recipes.tiny_models import VOCABULARY, class_names, first_position, is_masked, note, tiny_model  # noqa: E402
from tests.ranks import RankError, RankPool  # noqa: E402

RANKS = 2
CHUNK = 5  # tokens whose logits are in memory at once
LENGTH = 37
DOCUMENTS = (1, 7, 17, 12)
TOLERANCE = 1e-9
KINDS = ("one sequence", "packed", "padded")
RESULTS = ROOT / "recipes" / "results"
SERVED = ROOT / "hf_burst" / "hf" / "served.py"
Row = dict[str, Any]


class Double(TorchFunctionMode):
    """Casts to fp32 inside of a model become casts to fp64: norms, routers and softmaxes hide no error."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


def make_batch(kind: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Two sequences of odd length, two padded at either end, or one row of packed documents."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (1 if kind == "packed" else 2, LENGTH), generator=generator)
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, :6] = 0
        mask[1, -7:] = 0
        batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        if is_causal(model) and model.config._attn_implementation == "eager":  # lets padding on the left see all tokens
            batch["labels"][0, 6] = -100
        return batch
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][:, :5] = -100
    if kind == "packed":
        positions = torch.cat([torch.arange(size) for size in DOCUMENTS])[None]
        batch["position_ids"] = positions + first_position(model)
    return batch


def plain_loss(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of the unpatched model in one process: its own, or document by document."""
    causal = is_causal(model)
    options = {"use_cache": False} if causal else {}
    if "position_ids" not in batch:
        return model(**batch, **options).loss
    pieces = torch.split(batch["input_ids"], DOCUMENTS, dim=1)
    logits, labels = torch.cat([model(input_ids=piece, **options).logits for piece in pieces], dim=1), batch["labels"]
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def compare(rank: int, size: int, name: str) -> Row:
    """The row of a class; runs on every rank."""
    with ExitStack() as settings:
        torch.set_default_dtype(torch.float64)
        settings.callback(torch.set_default_dtype, torch.float32)
        settings.enter_context(Double())
        settings.enter_context(mock.patch.object(support, "check_served"))
        settings.enter_context(mock.patch.object(linear_loss, "_LOGITS", CHUNK * VOCABULARY))
        try:
            model = tiny_model(name)
        except Exception as problem:
            lines = str(problem).split("\n")
            return {"result": "not buildable", "note": f"{type(problem).__name__}: {next(filter(None, lines), '')}"}
        try:
            errors = {kind: worst_error(name, make_batch(kind, model)) for kind in KINDS}
        except BurstError as problem:
            return {"result": "refused", "note": str(problem)}
        exact = all(error <= TOLERANCE for error in errors.values())
        return {"result": "exact" if exact else "wrong", "errors": errors, "note": note(name, model)}


def worst_error(name: str, batch: dict[str, torch.Tensor]) -> float:
    """The greatest error of the loss or of a gradient, each relative to its greatest entry."""
    patched, plain = hf_burst.patch_model(tiny_model(name)), tiny_model(name)
    loss, expected = patched(**batch).loss, plain_loss(plain, batch)
    loss.backward()
    expected.backward()
    errors = [abs(loss - expected) / abs(expected)]
    wanted = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in plain.parameters()]
    # gradients that vanish, as that of a key's bias, are compared with the greatest one
    least = 1e-3 * max(gradient.abs().max() for gradient in wanted)
    for weight, gradient in zip(patched.parameters(), wanted, strict=True):
        found = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(found)
        errors.append((found / dist.get_world_size() - gradient).abs().max() / max(gradient.abs().max(), least))
    worst = torch.stack([error.detach() for error in errors]).max()  # nan if any is
    return float(f"{float(worst):.0e}")


def table(names: list[str]) -> Iterator[tuple[str, Row]]:
    """The rows of some classes, as they are found."""
    pool = RankPool(RANKS)
    try:
        for name in names:
            if not pool.alive:
                pool = RankPool(RANKS)
            try:
                row = pool.run(compare, name, timeout=120.0)[0]
            except (RankError, TimeoutError, RuntimeError) as problem:
                pool.close()
                row = {"result": "wrong", "note": str(problem).strip().split("\n")[-1]}
            yield name, row
    finally:
        pool.close()


def markdown(rows: dict[str, Row]) -> Iterator[str]:
    """How many classes came out how, and their table."""
    counts = Counter(row["result"] for row in rows.values())
    yield ", ".join(f"**{count} {result}**" for result, count in sorted(counts.items())) + f" of {len(rows)} classes."
    yield from ("", f"| class | {' | '.join(KINDS)} | greatest error | note |", "|---" * (len(KINDS) + 3) + "|")
    for name, row in sorted(rows.items(), key=lambda item: (item[1]["result"], item[0])):
        errors = row.get("errors", {})
        cells = ["exact" if errors.get(kind, 1) <= TOLERANCE else row["result"] for kind in KINDS]
        greatest = f"{max(errors.values()):.0e}" if errors else ""
        yield f"| {name} | {' | '.join(cells)} | {greatest} | {row['note'].replace('|', '/')} |"


def write(rows: dict[str, Row]) -> None:
    """The table as json and markdown, and the list of served classes."""
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    text = json.dumps({**versions, "ranks": RANKS, "tolerance": TOLERANCE, "classes": rows}, indent=1)
    (RESULTS / "coverage.json").write_text(text + "\n")
    lines = [
        "# Coverage",
        "",
        f"Every causal-LM and masked-LM class of Transformers {versions['transformers']}, tiny, on {RANKS} ranks "
        f"beside one process (torch {versions['torch']}, fp64). Made by `python recipes/coverage.py --write`, whose "
        "first lines say what is compared; an error is relative to the greatest entry of the loss or gradient.",
    ]
    masked = {name: row for name, row in rows.items() if is_masked(name)}
    causal = {name: row for name, row in rows.items() if name not in masked}
    for title, part in (("Causal language models", causal), ("Masked language models", masked)):
        lines += ["", f"## {title}", "", *markdown(part)]
    (RESULTS / "coverage.md").write_text("\n".join(lines) + "\n")
    exact = sorted(name for name, row in rows.items() if row["result"] == "exact")
    head, _, _ = SERVED.read_text().partition("SERVED")
    SERVED.write_text(
        head + "SERVED = frozenset(\n    {\n" + "".join(f'        "{n}",\n' for n in exact) + "    }\n)\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", default=class_names(), help="by default all")
    parser.add_argument("--write", action="store_true", help="write recipes/results/coverage.* and hf/served.py")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.classes) - set(class_names())):
        parser.error(f"Transformers has no causal-LM or masked-LM class {', '.join(unknown)}")
    if arguments.write and arguments.classes != class_names():
        parser.error("--write needs the rows of all classes; leave --classes out")
    rows: dict[str, Row] = {}
    for name, row in table(arguments.classes):
        rows[name] = row
        errors = ", ".join(f"{kind} {error:.0e}" for kind, error in row.get("errors", {}).items())
        print(f"{name}: {row['result']}; {'; '.join(filter(None, [errors, row['note']]))}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in Counter(row["result"] for row in rows.values()).items()))
    if arguments.write:
        write(rows)
    sys.exit(any(row["result"] == "wrong" for row in rows.values()))


if __name__ == "__main__":
    main()
