"""The parts of recipes/benchmarks/several_gpus.sh are commands that their scripts take."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.benchmarks import attention, training
from recipes.benchmarks.peers import peers

SCRIPT = Path(__file__).parents[2] / "recipes/benchmarks/several_gpus.sh"
PARTS = re.findall(r"^    (\w+)\) ", SCRIPT.read_text(), re.MULTILINE)
# stands for torchrun: writes down what it was given
LAUNCH = "import json, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(json.dumps(sys.argv[2:]))"


def command_of(part: str, folder: Path, gpus: int) -> list[str]:
    """What torchrun is given for a part."""
    (folder / "launch.py").write_text(LAUNCH)
    launch = f"{sys.executable} {folder}/launch.py {folder}/command"
    environment = {"PATH": "/usr/bin:/bin", "GPUS": str(gpus), "OUT": str(folder), "COMMIT": "c", "LAUNCH": launch}
    subprocess.run(["bash", str(SCRIPT), part], check=True, env=environment)
    command: list[str] = json.loads((folder / "command").read_text())
    return command


@pytest.mark.parametrize("gpus", [4, 8])
@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_a_command_that_its_script_takes(part, gpus, tmp_path, monkeypatch):
    command = command_of(part, tmp_path, gpus)
    if command[0] == "--no-python":  # bash -c '...' NAME
        assert "host$((LOCAL_RANK / A_HOST))" in command[3]
        command = command[5:]
    script, *arguments = command
    assert (SCRIPT.parents[2] / script).is_file()
    monkeypatch.setattr(sys, "argv", command)
    for name, value in {"WORLD_SIZE": gpus, "RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    if script.endswith("/training.py"):
        taken = training.read_arguments()
        assert taken.contenders
        assert taken.timeout * len(taken.lengths) <= 600
    elif script.endswith("/attention.py"):
        taken = attention.options().parse_args(arguments)
        attention._validate(taken)
        names = [contender.name for contender in attention._requested(taken, peers())]
        assert "hf_burst auto" in names
        assert len(taken.kv_heads) * taken.seconds <= 560
    else:
        assert script.endswith("/recurrent.py")
        taken = argparse.Namespace(out=Path(arguments[arguments.index("--out") + 1]))
    assert taken.out.parent == tmp_path


def test_there_are_parts_and_no_others(tmp_path):
    assert {"attention", "steps_32k", "reach_1m", "recurrent", "hybrid", "nodes", "long", "long_32"} <= set(PARTS)
    result = subprocess.run(["bash", str(SCRIPT), "nothing"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "unknown part nothing" in result.stderr
