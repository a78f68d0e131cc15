"""The notebooks run from top to bottom, define nothing, and are committed with their pictures."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
from tests.support.notebooks import IN_A_CLONE, execute, execute_here  # noqa: E402
from tests.support.scripts import in_a_process  # noqa: E402

ROOT = Path(__file__).parents[2]
REAL_WEIGHTS = ("07_real_weights",)
LATER = ("04_longer_context", "05_chats_and_agents", "06_hybrids", "08_picture_book")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.full] * (path.stem in LATER)) for path in NOTEBOOKS],
    indirect=True,
)
def test_runs_from_its_folder(notebook: Path, tmp_path: Path, offline: None) -> None:
    """Shorter, in a folder of its own, so that what a notebook writes does not meet what lies in outputs/. One has a
    kernel, and launches a recipe; cells and scripts of the others run in forks that have imported what they need."""
    if notebook.stem in REAL_WEIGHTS:
        pytest.skip("its weights are downloaded and trained by the full tests, and by tests/recipes/test_pretrained.py")
    if notebook.stem in IN_A_CLONE:
        check_executed(notebook, tmp_path, execute(notebook, tmp_path, shorter=True), steps=60)
    else:
        in_a_process(execute_here, notebook, tmp_path)


@pytest.mark.full
def test_runs_as_a_whole(notebook: Path, tmp_path: Path, offline: None) -> None:
    content = execute(notebook, tmp_path, shorter=False)
    check_executed(notebook, tmp_path, content, steps=300)
    CLAIMS.get(notebook.stem, str)(printed(content))


def check_executed(notebook: Path, folder: Path, content: "nbformat.NotebookNode", steps: int) -> None:
    """Every cell ran without an error, and what was taught to recall has learned it."""
    outputs = [output for cell in content.cells for output in cell.get("outputs", [])]
    assert outputs
    assert all(output.output_type != "error" for output in outputs)
    recalls = list(folder.glob("outputs/*/results.json"))
    assert recalls or "recall_across_shards" not in notebook.read_text()
    for path in recalls:
        results = json.loads(path.read_text())
        assert results["config"]["steps"] == steps
        check_recall(results)


def printed(content: "nbformat.NotebookNode") -> str:
    cells = (cell for cell in content.cells if cell.cell_type == "code")
    return "".join(output.get("text", "") for cell in cells for output in cell.outputs)


def answers_right(text: str) -> None:
    """The model answers after training, and did not before."""
    before, after = (float(re.search(rf"{name}: +([\d.]+)%", text)[1]) for name in ("base", "trained"))
    assert before < 25
    assert after >= 99


def context_is_longer(text: str) -> None:
    """Perplexities up to the trained length, and at the end of the longer one."""
    near, far = {}, {}
    for name, *values in re.findall(r" (\w.*): perplexity +([\d.]+) up to 128, +([\d.]+) at 1,024", text):
        near[name], far[name] = map(float, values)
    assert far["as it was trained"] > 1.6 * near["as it was trained"]
    assert far["YaRN, not trained"] < 1.3 * near["as it was trained"]
    assert far["YaRN, trained"] < 1.1 * near["as it was trained"]


def states_stay_small(text: str) -> None:
    """The loss is that of one process; keys and values grow with the document, and states and halos do not."""
    over_two, alone = map(float, re.search(r"([\d.]+) over two processes, ([\d.]+) in one", text).groups())
    assert over_two == pytest.approx(alone, rel=1e-5)
    sent = re.findall(r"states +([\d.]+), halos +([\d.]+), keys and values +([\d.]+)", text)
    states, halos, others = (list(map(float, column)) for column in zip(*sent, strict=True))
    assert len(set(states)) == len(set(halos)) == 1
    assert [size / others[0] for size in others] == [1, 2, 4, 8]


def weights_are_real(text: str) -> None:
    """The loss is that of one process, and held-out text is more likely after the training."""
    alone, over_two = map(float, re.findall(r"processes: loss ([\d.]+)", text))
    assert over_two == pytest.approx(alone, rel=1e-5)
    before, after = (float(re.search(rf"{name}: perplexity ([\d.]+)", text)[1]) for name in ("before", "after"))
    assert after < before < 30


def pictures_are_read(text: str) -> None:
    """The loss is that of one process, and answers about unseen books are right after the training alone."""
    over_two, alone = map(float, re.search(r"([\d.]+) over two processes, ([\d.]+) in one", text).groups())
    assert over_two == pytest.approx(alone, rel=1e-5)
    before, after = (float(re.search(rf"{name}: +([\d.]+)%", text)[1]) for name in ("base", "trained"))
    assert before < 15
    assert after > 95


def book_is_remembered(text: str) -> None:
    """Answers are right, and those of one process; each process holds half of the keys."""
    right, asked = map(int, re.search(r"(\d+) of (\d+) answers are right", text).groups())
    assert right >= asked - 1
    assert "reads book and question: True" in text
    over_two, alone = map(float, re.search(r"([\d.]+) over two processes, ([\d.]+) in one", text).groups())
    assert over_two == pytest.approx(alone, rel=1e-3, abs=1e-5)
    words, *keys = (
        int(count.replace(",", ""))
        for count in re.search(r"keys: ([\d,]+) and ([\d,]+)\n.*: ([\d,]+);", text).groups()[::-1]
    )
    assert keys == [words // 2 * 2 * 2 * 2 * 16 * 4] * 2, "layers, keys and values, heads, their size, bytes"


def rewards_teach(text: str) -> None:
    """Rewards rise, and held-out answers are right more often."""
    rewards = [float(value) for value in re.findall(r"reward ([\d.]+)", text)]
    assert rewards[-1] > rewards[0] + 0.15
    before, after = (float(re.search(rf"{name}: +([\d.]+)%", text)[1]) for name in ("taught", "rewarded"))
    assert before < 65
    assert after > 85


CLAIMS: dict[str, Callable[[str], object]] = {
    "03_your_documents": answers_right,
    "04_longer_context": context_is_longer,
    "05_chats_and_agents": answers_right,
    "06_hybrids": states_stay_small,
    "07_real_weights": weights_are_real,
    "08_picture_book": pictures_are_read,
    "09_remembered_book": book_is_remembered,
    "10_rewards": rewards_teach,
}


def check_recall(results: dict) -> None:
    runs = results["runs"]
    assert results["ranks"] == 2
    assert results["question"]["rank"] not in results["facts"]["ranks"]
    assert runs["across_shards"]["final_accuracy"] >= 0.99
    assert abs(runs["within_shard"]["final_accuracy"] - results["chance"]) < 0.05


@pytest.mark.parametrize("name", ["recall", "recall_recurrent"])
def test_committed_recall_results(name: str) -> None:
    check_recall(json.loads((ROOT / f"recipes/results/{name}.json").read_text()))


def test_committed_outputs(notebook: Path) -> None:
    """The committed outputs: every cell ran, in order; pictures, and neither warnings nor paths of one machine."""
    content = nbformat.read(notebook, as_version=4)
    cells = [cell for cell in content.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output.get("name") != "stderr" and output.output_type != "error" for output in outputs)
    texts = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs]
    assert not re.search(r"(?<![\w./])/(root|home|Users|tmp|work|usr|opt)/", "\n".join(texts))
    CLAIMS.get(notebook.stem, str)(printed(content))


def test_defines_nothing(notebook: Path) -> None:
    cells = nbformat.read(notebook, as_version=4).cells
    code = (cell.source for cell in cells if cell.cell_type == "code")
    source = "\n".join(text for text in code if not text.startswith("%%writefile"))  # a trainer is given functions
    assert not re.search(r"^\s*(def|class)\s|\blambda\b", source, re.MULTILINE)


def first_cell(notebook: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What the first cell with code says where the notebook is opened in a folder."""
    source = next(cell.source for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *options, "-c", source]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_says_what_it_needs(notebook: Path, tmp_path: Path) -> None:
    """Without the packages, and outside of a clone."""
    bare = first_cell(notebook, tmp_path, "-I", "-S")
    assert bare.returncode == 1
    assert "Not installed: hf_burst," in bare.stderr
    extras = "recipes,gguf" if notebook.stem in REAL_WEIGHTS else "recipes"
    assert f'pip install ".[{extras}]" ipykernel' in bare.stderr
    installed = first_cell(notebook, tmp_path)
    if notebook.stem in IN_A_CLONE:
        assert installed.returncode == 1
        assert "Open it in a clone of hf_burst" in installed.stderr
    else:
        assert installed.returncode == 0, installed.stderr
    assert first_cell(notebook, ROOT / "notebooks").returncode == 0
