"""Imports point down: a room imports what stands above it in the list, no module imports itself by a detour, and only
the join imports Transformers."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2] / "hf_burst"
ORDER = [
    *("version", "errors", "config", "numerics", "plan", "kernels", "layers", "ranks", "ring", "attention"),
    *("recurrent", "sizing", "hf", "check", "cli"),
]
HF_ORDER = [
    "view",
    "admission",
    "overrides",
    "callers",
    "answer",
    "sharded_cache",
    "context",
    "attention",
    "groups",
    "models",
    "batches",
    "spread",
    "forward_pass",
    "parts",
    "patch",
    "generation",
    "trainers",
]
ONLY_IN = {
    "transformers": {"hf", "check"},
    "accelerate": {"hf"},
    "torch": set(ORDER) - {"version", "errors", "config", "plan", "sizing"},
}


def name_of(path: Path) -> str:
    """The dotted name of a module below the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"}


def imports(name: str) -> set[str]:
    """What a module imports: modules of the package below it, or the names of others, outside of `if TYPE_CHECKING`
    and of functions."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {f"/{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(f"/{node.module}")
        elif isinstance(node, ast.ImportFrom):
            target = [*package[: len(package) + 1 - node.level], *(node.module or "").split(".")]
            base = ".".join(filter(None, target))
            found |= {
                inner if (inner := f"{base}.{alias.name}".strip(".")) in MODULES else base for alias in node.names
            }
    return found


def test_rooms_import_what_stands_above_them() -> None:
    for name in MODULES:
        room = name.split(".")[0]
        assert room in ORDER, name
        for target in imports(name):
            if target.startswith("/"):
                allowed = ONLY_IN.get(target[1:].split(".")[0])
                assert allowed is None or room in allowed, f"{name} imports {target[1:]}"
                continue
            other = target.split(".")[0]
            assert other == room or ORDER.index(other) < ORDER.index(room), f"{name} imports {target}"


def test_rooms_of_hf_import_what_stands_above_them() -> None:
    for name in MODULES:
        if not name.startswith("hf."):
            continue
        room = name.split(".")[1]
        assert room in HF_ORDER, name
        for target in imports(name):
            if target.startswith("hf."):
                other = target.split(".")[1]
                assert other == room or HF_ORDER.index(other) < HF_ORDER.index(room), f"{name} imports {target}"


def test_runs_import_no_forecast() -> None:
    """What a step takes is predicted for `hf-burst plan`, and measured where a model is trained."""
    users = {name for name in MODULES if any(target.split(".")[0] == "sizing" for target in imports(name))}
    assert {name for name in users if not name.startswith("sizing")} == {"cli.plan", "hf.models.model_size"}


def test_no_module_imports_itself_by_a_detour() -> None:
    graph = {name: {target for target in imports(name) if not target.startswith("/")} for name in MODULES}
    order = list(TopologicalSorter(graph).static_order())
    assert len(order) >= len(MODULES)


def test_no_two_recipes_import_each_other() -> None:
    """Nor by a detour, within functions, or for types alone."""
    graph: dict[str, set[str]] = {}
    for path in (ROOT.parent / "recipes").glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        graph[path.stem] = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        graph[path.stem] |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {"settings", "models"} <= graph["training"]
    TopologicalSorter(graph).prepare()  # raises an error that names the circle


def test_the_documented_order_is_this_one() -> None:
    page = (ROOT.parent / "docs/explanation/architecture.md").read_text()
    named = re.findall(r"^  (\w+)(?:\.py|/) ", page, re.MULTILINE)
    assert named == ORDER


def test_planning_needs_no_torch() -> None:
    for name in MODULES:
        if name.startswith(("plan", "sizing")):
            assert not any(target.startswith(("/torch", "/numpy")) for target in imports(name)), name
