"""`tests/support/versions.py`: what pip is given, and what is written of what the doors gave."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import versions


def test_presets_are_those_of_the_extras() -> None:
    oldest, tested = versions.packages_of("oldest"), versions.packages_of("tested")
    assert oldest[:3] == [".[trl]", "torch==2.11.0", "transformers==5.17.0"]
    assert {"torch==2.13.0", "transformers==5.24.0", "trl==1.16.0"} <= {*tested}
    assert versions.packages_of("newest") == [".[trl]"]


def test_environments_that_did_not_run_stay_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RESULT", "PAGE"):
        monkeypatch.setattr(versions, name, tmp_path / name)
    exact = {"result": "exact", "error": 1e-9, "seconds": 3.2, "said": "", "date": "2026-11-28", "git_commit": "0"}
    fails = exact | {"result": "fails", "error": None, "said": "ValueError: no"}
    made = {"versions": {"torch": "2.11.0"}, "doors": {"train": exact}}
    versions.write("oldest", made, ["versions.py"])
    versions.write("newest", {**made, "doors": {"train": exact, "GRPO": fails}}, ["versions.py"])
    versions.write("oldest", {**made, "doors": {"DPO": fails | {"date": "2026-11-30"}}}, ["versions.py"])
    known = json.loads((tmp_path / "RESULT").read_text())["environments"]
    assert {name: list(each["doors"]) for name, each in known.items()} == {
        "oldest": ["train", "DPO"],
        "newest": ["train", "GRPO"],
    }
    page = (tmp_path / "PAGE").read_text()
    assert "| oldest | 2026-11-30 | 2.11.0 | - | - | - | exact, 3 s | - |" in page
    assert "\nnewest, GRPO: ValueError: no\n" in page


def test_doors_of_other_versions_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RESULT", "PAGE"):
        monkeypatch.setattr(versions, name, tmp_path / name)
    exact = {"result": "exact", "error": 1e-9, "seconds": 3.2, "said": "", "date": "2026-11-28", "git_commit": "0"}
    made = {"versions": {"torch": "2.13.0"}, "doors": {"train": exact}}
    versions.write("newest", made, ["versions.py"])
    versions.write("newest", made | {"versions": {"torch": "2.14.1"}, "doors": {"DPO": exact}}, ["versions.py"])
    assert list(json.loads((tmp_path / "RESULT").read_text())["environments"]["newest"]["doors"]) == ["DPO"]


def test_interpreters_that_say_nothing_or_do_not_end() -> None:
    assert versions.last_words(["false"]) == (False, "no output; exit code 1")
    assert versions.last_words(["true"]) == (False, "no output; exit code 0")
    begun = time.monotonic()
    assert versions.last_words(["bash", "-c", "sleep 60 & sleep 60"], limit=0.5) == (False, "no end within 0.5 s")
    assert time.monotonic() - begun < 30  # the child that holds the pipe has ended, too


def test_an_interpreter_without_packages() -> None:
    with pytest.raises(RuntimeError, match=r"has not all of torch, .*no output; exit code 1"):
        versions.run(Path("/bin/false"), ["train"])


def test_an_environment_that_cannot_be_made_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def install(folder: Path, packages: list[str]) -> Path:
        if packages == [".[trl]"]:
            return Path("python")
        raise subprocess.CalledProcessError(1, "pip")

    ran: list[Path] = []
    monkeypatch.setattr(versions, "install", install)
    monkeypatch.setattr(versions, "run", lambda python, doors: {"doors": {}} if ran.append(python) is None else {})
    monkeypatch.setattr(sys, "argv", ["versions.py", "tested", "newest"])
    assert versions.main() == 1
    assert ran == [Path("python")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["olderst"], "none of oldest"),
        (["--python", "/nowhere"], "no interpreter"),
        (["--python", "/tmp"], "no interpreter"),
        ([], "name oldest"),
    ],
)
def test_wrong_arguments(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["versions.py", *given])
    with pytest.raises(SystemExit):
        versions.main()
    assert said in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.slow
def test_a_door_of_this_environment(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    made = versions.run(Path(sys.executable), ["DPO"])
    assert made["doors"]["DPO"]["result"] == "exact", made["doors"]["DPO"]["said"]
    assert set(made["versions"]) == set(versions.NEEDED)
