"""The notebooks run from top to bottom, define nothing, and are committed with their pictures."""

import json
import re
import shutil
from pathlib import Path

import pytest

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RECALL = '"outputs/quickstart"),'  # where the quickstart's training is launched
SHORTER = '"outputs/quickstart", "--length", "32", "--steps", "200"),'  # which shows the same


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


def test_runs_from_its_folder(notebook: Path, tmp_path: Path) -> None:
    """In a copy of the repository, so that what a notebook writes does not meet what lies in outputs/."""
    for folder in ("hf_burst", "notebooks", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    content = nbformat.read(notebook, as_version=4)
    for cell in content.cells:
        cell.source = cell.source.replace(RECALL, SHORTER)
    place = {"metadata": {"path": str(tmp_path / "notebooks")}}
    nbclient.NotebookClient(content, timeout=600, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in content.cells for output in cell.get("outputs", [])]
    assert outputs
    assert all(output.output_type != "error" for output in outputs)
    recalls = list(tmp_path.glob("outputs/*/results.json"))
    assert recalls or "recall_across_shards" not in notebook.read_text()
    for path in recalls:
        results = json.loads(path.read_text())
        assert results["config"]["steps"] == 200
        check_recall(results)


def check_recall(results: dict) -> None:
    runs = results["runs"]
    assert results["ranks"] == 2
    assert results["question"]["rank"] not in results["facts"]["ranks"]
    assert runs["across_shards"]["final_accuracy"] >= 0.99
    assert abs(runs["within_shard"]["final_accuracy"] - results["chance"]) < 0.05


def test_committed_recall_results() -> None:
    check_recall(json.loads((ROOT / "recipes/results/recall.json").read_text()))


def test_committed_outputs(notebook: Path) -> None:
    """The committed outputs: every cell ran, in order; pictures, and neither warnings nor paths of one machine."""
    cells = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output.get("name") != "stderr" and output.output_type != "error" for output in outputs)
    texts = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs]
    assert not re.search(r"(?<![\w./])/(root|home|Users|tmp|work|usr|opt)/", "\n".join(texts))


def test_defines_nothing(notebook: Path) -> None:
    cells = nbformat.read(notebook, as_version=4).cells
    source = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert not re.search(r"^\s*(def|class)\s|\blambda\b", source, re.MULTILINE)
