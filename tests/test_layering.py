"""Imports point down: a module imports what stands above it in the list, and only the join imports Transformers."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1] / "hf_burst"
ORDER = [
    *(
        "version",
        "errors",
        "cache",
        "host",
        "host_limits",
        "config",
        "plan",
        "watch",
        "control",
        "mesh",
        "collectives",
        "layout",
        "host_memory",
        "offload",
        "surroundings",
        "adapted_linear",
        "tiled",
        "tokenwise",
        "layer_runs",
        "kernels",
        "ring",
        "calibrate",
    ),
    *("resources", "attention", "recurrent", "loss", "linear_loss", "hf", "check", "cli", "__main__"),
]
WITHIN = {
    "watch": ["stack", "report", "counts", "messenger", "channel", "__init__"],
    "plan": [
        *(
            "mask",
            "sharding",
            "tiles",
            "steps",
            "traffic",
            "segments",
            "verify",
            "machine",
            "recurrence",
            "model",
            "work",
            "balance",
            "cost",
        ),
        *("choose", "cuts", "step", "memory", "fit", "__init__"),
    ],
    "kernels": [
        *("base", "head_size", "library", "pieces", "reference", "cpu_flash", "flash", "torch_flash"),
        *("flash_attn_2", "torch_cudnn", "flash_attn_4", "select", "__init__"),
    ],
    "ring": [
        *("exchange", "fused", "merge", "clock", "symmetric", "loop", "gather", "ulysses", "sharded", "__init__"),
    ],
    "attention": ["request", "choice", "prepare", "operator", "cache", "function", "heads", "__init__"],
    "recurrent": [
        *(
            "received",
            "gather",
            "doubling",
            "once",
            "pieces",
            "exchange",
            "halo",
            "states",
            "two_passes",
            "fla",
            "delta",
            "scan",
        ),
        *("diagonal", "lightning", "__init__"),
    ],
    "check": ["__init__", "tiny", "compare", "ranks", "run"],
    "cli": ["launch", "tokens", "recurrence", "sizing", "check", "hosts", "doctor", "calibrate", "plan", "__init__"],
    "hf": [
        *("__init__", "accelerate", "task", "call", "optimizers", "documents", "cutting", "sharded", "collator"),
        *(
            "peft_methods",
            "sizes",
            "callers",
            "verdicts",
            "attention",
            "recurrent",
            "doors",
            "bypassed",
            "support",
            "hybrid",
            "head",
            "positions",
            "model_size",
            "parts",
            "patch",
            "monitor",
            "resume",
        ),
    ],
    "hf/parts": [
        *(
            "base",
            "request",
            "replicas",
            "adapters",
            "attention",
            "tokens",
            "rope",
            "tiles",
            "memory",
            "checkpointing",
            "recurrence",
            "experts",
            "loss",
            "token_losses",
            "outputs",
            "dropout",
        ),
        "__init__",
    ],
}
ONLY_IN = {
    "transformers": {"hf", "check"},
    "accelerate": {"hf"},
    "torch": set(ORDER) - {"version", "errors", "cache", "config", "plan"},
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
        for depth in range(1, len(parts)):
            assert parts[depth] in WITHIN["/".join(parts[:depth])], path


def test_imports_point_down() -> None:
    for path in modules():
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = list(parts[:-1])
        for level, module in imports(path):
            if level == 0:
                allowed = ONLY_IN.get(module.split(".")[0])
                assert allowed is None or parts[0] in allowed, f"{path} imports {module}"
                continue
            assert level <= len(parts), f"{path} imports {'.' * level}{module}"
            target = [*package[: len(parts) - level], *module.split(".")]
            depth = next(depth for depth, name in enumerate(parts) if target[depth : depth + 1] != [name])
            order = WITHIN["/".join(parts[:depth])] if depth else ORDER
            if target[depth:] and (depth == 0 or target[depth] in order):
                assert order.index(target[depth]) < order.index(parts[depth]), f"{path} imports {'.'.join(target)}"


def test_the_documented_order_is_this_one() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    named = re.findall(r"^  (\w+)(?:\.py|/) ", page, re.MULTILINE)
    assert named == [name for name in ORDER if name != "__main__"]


def test_planning_needs_no_torch() -> None:
    for path in (ROOT / "plan").glob("*.py"):
        assert not any(module.startswith(("torch", "numpy")) for _, module in imports(path)), path
