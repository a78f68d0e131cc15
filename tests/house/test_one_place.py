"""What the house does in one place."""

import ast
from pathlib import Path

HF = Path(__file__).parents[2] / "hf_burst" / "hf"
WALKS = {"modules", "named_modules", "children", "named_children"}


def walks(path: Path) -> list[int]:
    """The lines of a file that walk over the modules of a model."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in WALKS]


def test_one_file_walks_over_modules() -> None:
    found = {str(path.relative_to(HF)): lines for path in sorted(HF.rglob("*.py")) if (lines := walks(path))}
    assert set(found) == {"view.py"}, found
