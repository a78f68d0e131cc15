"""Counts the sizes of the package: `python -m tests.house.sizes`.

lines       of each room
nodes       of syntax trees, without docstrings, contexts and operators: code that is packed has as many
tuples      the share of assignments to several names at once
refusing    lines of `if` whose body raises, and of functions `check_*` and `refuse_*`
raises      `raise` statements
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hf_burst"
_UNCOUNTED = ast.expr_context | ast.operator | ast.boolop | ast.unaryop | ast.cmpop
_WITH_DOCSTRING = ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Sizes:
    """The sizes of the whole package, and the lines of each room."""

    lines: dict[str, int]
    nodes: int
    tuples: float
    refusing: int
    raises: int


def room_of(path: Path) -> str:
    """The room of a file: the first folder, or the first two."""
    folders = path.relative_to(PACKAGE).parts[:-1]
    return "/".join(folders[: 1 + (folders[:1] == ("hf",))]) or "."


def counted(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree that are counted."""
    docstrings: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= {node.body[0], node.body[0].value}  # type: ignore[attr-defined]
    return (node for node in ast.walk(tree) if node not in docstrings and not isinstance(node, _UNCOUNTED))


def refusing(tree: ast.AST) -> set[int]:
    """The lines that refuse something."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        raises = isinstance(node, ast.If) and any(isinstance(inner, ast.Raise) for inner in node.body)
        named = isinstance(node, ast.FunctionDef) and node.name.strip("_").startswith(("check", "refuse"))
        if raises:
            lines |= set(range(node.lineno, node.body[-1].end_lineno + 1))  # type: ignore[attr-defined]
        if named:
            lines |= set(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]
    return lines


def measure() -> Sizes:
    """The sizes of the package as it is."""
    lines: dict[str, int] = {}
    nodes: list[ast.AST] = []
    refused = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        lines[room_of(path)] = lines.get(room_of(path), 0) + len(source.splitlines())
        nodes += counted(tree := ast.parse(source))
        refused += len(refusing(tree))
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    tuples = sum(isinstance(node.targets[0], ast.Tuple) for node in assigned) / len(assigned)
    raises = sum(isinstance(node, ast.Raise) for node in nodes)
    return Sizes(lines, len(nodes), tuples, refused, raises)


if __name__ == "__main__":
    sizes = measure()
    for room, count in sizes.lines.items():
        print(f"{count:6,} {room}")
    print(f"{sum(sizes.lines.values()):6,} lines, {sizes.nodes:,} nodes, {sizes.tuples:.1%} tuple assignments")
    print(f"{sizes.refusing:6,} lines refuse, by {sizes.raises} raises")
