"""What the house does in one place."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hf_burst"
HF = PACKAGE / "hf"
WALKS = {"modules", "named_modules", "children", "named_children"}
FUNCTIONS = {"__torch_function__", "__torch_dispatch__"}


def walks(path: Path) -> list[int]:
    """The lines of a file that walk over the modules of a model."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in WALKS]


def test_one_file_walks_over_modules() -> None:
    found = {str(path.relative_to(HF)): lines for path in sorted(HF.rglob("*.py")) if (lines := walks(path))}
    assert set(found) == {"view.py"}, found


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
