"""`recipes/versions.py`: what pip is given, and what is written of what the doors gave."""

import json
import sys
from pathlib import Path

import pytest

from recipes import versions


def test_presets_are_those_of_the_extras() -> None:
    oldest, tested = versions.packages_of("oldest"), versions.packages_of("tested")
    assert oldest[:3] == [".[trl]", "torch==2.11.0", "transformers==5.17.0"]
    assert {"torch==2.13.0", "transformers==5.23.0", "trl==1.16.0"} <= {*tested}
    assert versions.packages_of("newest") == [".[trl]"]


def test_environments_that_did_not_run_stay_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RESULT", "PAGE"):
        monkeypatch.setattr(versions, name, tmp_path / name)
    exact = {"result": "exact", "error": 1e-9, "seconds": 3.2, "said": ""}
    fails = {"result": "fails", "error": None, "seconds": 4.0, "said": "ValueError: no"}
    made = {"date": "2026-11-28", "git_commit": "0" * 40, "versions": {"torch": "2.11.0"}, "doors": {"train": exact}}
    versions.write({"oldest": made}, ["versions.py"])
    versions.write({"newest": {**made, "doors": {"train": exact, "GRPO": fails}}}, ["versions.py"])
    assert set(json.loads((tmp_path / "RESULT").read_text())["environments"]) == {"oldest", "newest"}
    page = (tmp_path / "PAGE").read_text()
    assert "| oldest | 2026-11-28 | 2.11.0 | - | - | - | exact, 3 s | - |" in page
    assert "\nnewest, GRPO: ValueError: no\n" in page


@pytest.mark.slow
def test_a_door_of_this_environment(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    made = versions.run(Path(sys.executable), ["DPO"])
    assert made["doors"]["DPO"]["result"] == "exact", made["doors"]["DPO"]["said"]
    assert set(made["versions"]) == set(versions.NEEDED)
