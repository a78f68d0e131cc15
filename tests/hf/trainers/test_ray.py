"""docs/scripts/ray_train.py, where Ray is installed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import models

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]
ALONE = """
os.environ |= {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
train({"model": "llama", "folder": "outputs/alone"})
"""


def run(script: str, folder: Path) -> None:
    (folder / "script.py").write_text(script)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]


def test_two_workers_train_as_one_process(tmp_path: Path) -> None:
    script = (ROOT / "docs/scripts/ray_train.py").read_text()
    models.make_model("llama").save_pretrained(tmp_path / "llama")
    run(script, tmp_path)
    body, _, _ = script.partition('if __name__ == "__main__":')
    function = body[body.index("def train(") :]
    run(f"import os\n\n{function}{ALONE}", tmp_path)
    found, wanted = (load_file(tmp_path / f"outputs/{name}/model.safetensors") for name in ("ray", "alone"))
    begun = load_file(tmp_path / "llama/model.safetensors")
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5)
    assert any(not torch.equal(begun[name], weight) for name, weight in found.items())
