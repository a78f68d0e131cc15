"""What the house does in one place."""

import ast
import re
from dataclasses import fields
from pathlib import Path

from hf_burst.hf import context, forward_pass
from hf_burst.hf.admission import CLASSES, LAYERS, PEFT_METHODS, TRAINERS

PACKAGE = Path(__file__).parents[2] / "hf_burst"
HF = PACKAGE / "hf"
WALKS = {"modules", "named_modules", "children", "named_children"}
FUNCTIONS = {"__torch_function__", "__torch_dispatch__"}


FRAMES = {"_getframe", "_current_frames", "currentframe", "f_back", "f_locals"}
STAGES = ("Call", "Batch", "ForwardPass", "ShardedPass", "LaidTokens", "LayerContext")


def walks(path: Path) -> list[int]:
    """The lines of a file that walk over the modules of a model."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in WALKS]


def test_one_file_walks_over_modules() -> None:
    found = {str(path.relative_to(HF)): lines for path in sorted(HF.rglob("*.py")) if (lines := walks(path))}
    assert set(found) == {"view.py"}, found


def test_one_file_walks_over_frames_in_three_places() -> None:
    named = {
        path: names
        for path in HF.parent.rglob("*.py")
        if (names := FRAMES & {node.attr for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "attr")})
    }
    assert {str(path.relative_to(HF)) for path in named} == {"callers.py"}, named
    tree = ast.parse((HF / "callers.py").read_text())
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    assert [getattr(function, "id", "") for function in calls].count("walk_stack") == 3


def test_the_stages_of_a_pass_are_frozen_and_small() -> None:
    for kind in (getattr(forward_pass, name, None) or getattr(context, name) for name in STAGES):
        assert kind.__dataclass_params__.frozen, kind
        assert len(fields(kind)) <= 8, kind


ADMITTED = {*CLASSES, *LAYERS, *PEFT_METHODS, *(place.rpartition(".")[2] for place in TRAINERS)}
CLASS = re.compile("[A-Z][A-Za-z0-9_]+(For[A-Z][A-Za-z]+|[a-z]Attention|Trainer)")
KINDS = {"CrossAttention"}  # a part of names


def test_one_module_says_who_is_served() -> None:
    """No other one names classes of models, layers or trainers, or methods of peft, nor reads the table."""
    for path in HF.rglob("*.py"):
        if path.name == "admission.py":
            continue
        constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        texts = {text for text in constants if isinstance(text, str)}
        named = {text for text in texts if text in ADMITTED or CLASS.fullmatch(text) or "admission.toml" in text}
        named -= KINDS
        assert not named, (str(path), named)


def answers(path: Path) -> list[str]:
    """The classes of a file that take part in functions of torch: no modes, and none that refuse all of them."""
    found = []
    for owner in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
        methods = [each for each in owner.body if isinstance(each, ast.FunctionDef) and each.name in FUNCTIONS]
        refuses = all(isinstance(method.body[-1], ast.Raise) and len(method.body) == 1 for method in methods)
        mode = any(ast.unparse(base).endswith("Mode") for base in owner.bases)
        found += [owner.name] if methods and not refuses and not mode else []
    return found


def test_one_value_stands_for_tensors_over_ranks() -> None:
    assert [name for path in sorted(PACKAGE.rglob("*.py")) for name in answers(path)] == ["Spread"]


def test_behind_the_cut_one_file_knows_of_joined_texts() -> None:
    readers = set()
    for path in sorted(HF.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        if any(isinstance(node, ast.Attribute) and node.attr in ("joined", "restored") for node in nodes):
            readers.add(str(path.relative_to(HF)))
    before = {"forward_pass.py", "parts/shared_beginnings.py", "parts/tokens.py", "parts/rope.py"}
    assert readers - before == {"batches/joining.py", "spread/where.py"}
