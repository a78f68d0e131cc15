"""Imports point down: a module imports what stands above it in the list, and only the join imports Transformers."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "hf_burst"
ORDER = [
    *("errors", "cache", "config", "plan", "mesh", "layout", "kernels", "ring", "calibrate", "op", "loss"),
    *("linear_loss", "hf", "check", "cli", "__main__"),
]
WITHIN = {
    "plan": [
        *("mask", "sharding", "tiles", "steps", "traffic", "verify", "machine", "work", "balance", "cost", "choose"),
        "__init__",
    ],
    "kernels": [
        *("base", "head_size", "library", "pieces", "reference", "cpu_flash", "flash", "torch_flash"),
        *("flash_attn_2", "flash_attn_3", "flash_attn_4", "torch_cudnn", "select", "__init__"),
    ],
    "ring": [
        *("fused", "merge", "exchange", "symmetric", "loop", "gather", "ulysses", "sharded", "replay"),
        "__init__",
    ],
    "check": ["__init__", "tiny", "compare", "ranks", "run"],
    "cli": [
        *("launch", "bench_ranks", "bench_contenders", "bench_rounds", "bench_report", "bench", "check", "doctor"),
        "plan",
        "__init__",
    ],
    "hf": [
        *("__init__", "accelerate", "checkpointing", "batch", "dropout", "served", "verdicts", "support"),
        *("attention", "collator", "head", "experts", "outputs", "positions", "rope", "patch"),
    ],
}
ONLY_IN = {
    "transformers": {"hf", "check"},
    "accelerate": {"hf"},
    "torch": set(ORDER) - {"errors", "cache", "config", "plan"},
}


def imports(path: Path) -> list[tuple[int, str]]:
    """`(level, module)` of every import outside of `if TYPE_CHECKING`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is None:
            found += [(node.level, name.name) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module))
        elif isinstance(node, ast.Import):
            found += [(0, name.name) for name in node.names]
    return found


def modules() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def test_every_module_has_its_place() -> None:
    for path in modules():
        parts = path.relative_to(ROOT).with_suffix("").parts
        assert parts[0] in ORDER, path
        assert len(parts) == 1 or parts[1] in WITHIN[parts[0]], path


def test_imports_point_down() -> None:
    for path in modules():
        parts = path.relative_to(ROOT).with_suffix("").parts
        layer = parts[0]
        for level, module in imports(path):
            if level == 0:
                allowed = ONLY_IN.get(module.split(".")[0])
                assert allowed is None or layer in allowed, f"{path} imports {module}"
                continue
            package = [layer] if len(parts) == 2 else []
            target = [*package[: len(package) + 1 - level], *module.split(".")] if level <= len(package) + 1 else []
            assert target, f"{path} imports {'.' * level}{module}"
            if target[0] != layer:
                assert ORDER.index(target[0]) < ORDER.index(layer), f"{path} imports {'.'.join(target)}"
            elif len(target) > 1 and target[1] in WITHIN[layer]:
                order = WITHIN[layer]
                assert order.index(target[1]) < order.index(parts[1]), f"{path} imports {'.'.join(target)}"


def test_planning_needs_no_torch() -> None:
    for path in (ROOT / "plan").glob("*.py"):
        assert not any(module.startswith(("torch", "numpy")) for _, module in imports(path)), path
