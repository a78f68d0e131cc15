"""Documents of RFC packages: cleaned, and held out only if they share little with the others."""

import gzip
import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))  # where the recipes find their modules
import rfcs

PAGE = """RFC 9999                      A Protocol                  May 2025


   The first    line
     and the second.




Smith, et al.                Standards Track                   [Page 3]
\f
RFC 9999                      A Protocol                  May 2025


   The third.
"""


def words(seed: int, count: int = 400) -> str:
    """Text that nothing else shares."""
    draw = random.Random(seed)
    return " ".join(f"{draw.getrandbits(40):x}" for _ in range(count))


def write(folder: Path, number: int, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rfc{number:04}.txt.gz").write_bytes(gzip.compress(text.encode()))


def test_feet_and_heads_of_pages_are_left_out() -> None:
    cleaned = rfcs.clean(PAGE)
    assert "[Page" not in cleaned
    assert "\f" not in cleaned
    assert "The first    line\n  and the second.\n\nThe third.\n" in cleaned


def test_a_revision_is_never_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 revises 1, 4 has a licence that all have, and 3 is short."""
    licence, first = words(0, 30), words(1)
    texts = {1: first, 2: first + words(2, 50), 3: words(3, 40), 4: words(4)}
    for number, text in texts.items():
        write(tmp_path / "packages/a" / str(number), number, f"{text} {licence}")
    write(tmp_path / "packages/links", 1, "another copy")
    found = rfcs.read(tmp_path / "packages", 100)
    assert found[1].startswith(first), "the first file of a number counts"
    assert rfcs.choose(found, 9, 3000, 0.2) == [4]
    assert rfcs.choose(found, 9, 3000, 1.0) == [4, 2, 1], "if they may share all"
    argv = ["rfcs.py", str(tmp_path / "packages"), str(tmp_path / "out"), "--shortest", "100"]
    monkeypatch.setattr("sys.argv", [*argv, "--held-out-shortest", "3000", "--most-shared", "0.2"])
    rfcs.main()
    names = {
        part: [json.loads(line)["name"] for line in (tmp_path / f"out/{part}.jsonl").read_text().splitlines()]
        for part in ("train", "held_out")
    }
    assert names == {"train": ["rfc1", "rfc2", "rfc3"], "held_out": ["rfc4"]}


def test_a_folder_without_rfcs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rfcs.py", str(tmp_path), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="holds no RFC of 150,000 characters"):
        rfcs.main()
