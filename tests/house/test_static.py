"""Lint, format and types, as part of the one test command, and sizes; and the two set-up commands of the README."""

import ast
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."]], ids=["lint", "format"]
)
@pytest.mark.slow
def test_static_checks(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_types() -> None:
    kept = [] if (ROOT / ".mypy_cache").exists() else ["--cache-dir", os.devnull]  # to write one takes ten seconds
    done = subprocess.run([sys.executable, "-m", "mypy", *kept], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("part", ["hf_burst", "recipes"])
def test_files_and_functions_are_short(part: str) -> None:
    """Triton kernels and the signature that Transformers prescribes have more parameters."""
    sources = {path: path.read_text() for path in ROOT.glob(f"{part}/**/*.py")}
    assert not [path for path, source in sources.items() if len(source.splitlines()) > 500]
    for function in chain.from_iterable(ast.walk(ast.parse(source)) for source in sources.values()):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            assert function.end_lineno - function.lineno < 90, function.name
            count = len([*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs])
            kernel = any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
            assert count <= 9 or kernel or function.name == "attention_forward", function.name


def test_the_readme_has_exactly_two_setup_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    setup = readme.split("## Two commands")[1].split("\n## ")[0]
    run = re.sub(r"<!-- not run: [^\n]* -->\n```bash\n.*?```", "", setup, flags=re.DOTALL)
    commands = re.findall(r"```bash\n(.*?)```", run, flags=re.DOTALL)
    assert len(commands) == 2
    for command in commands:
        assert len(command.strip().replace("\\\n", " ").splitlines()) == 1, "one command is one line"
        assert "pip install torch==" in command
    assert "recipes/finetune_long_document.py" in commands[0]
    assert commands[1].strip().endswith("pytest")
    assert "<!-- test command -->" in setup
