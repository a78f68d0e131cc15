"""The table of `coverage.py` is of all classes, the list of served classes follows from it, and a part of it, another
one every day, still holds. `COVERAGE_SEED=738000` chooses a day's part, `COVERAGE_CLASSES="A B"` classes by name.
"""

import datetime
import json
import os
import random
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import transformers

from hf_burst.check.compare import KINDS, TOLERANCE, compare
from hf_burst.hf import attention
from hf_burst.hf.admission import CLASSES, TESTED, Verdict, source_hash
from tests.support import coverage
from tests.support.image_verdicts import compare_images
from tests.support.ranks import RankPool
from tests.support.tiny_models import class_names, is_masked, tiny_model, tiny_wrapper, wrapper_names
from tests.support.tiny_pictures import WITH_VIDEO
from tests.support.tiny_seeing import FAMILIES

RESULTS = Path(__file__).parents[2] / "recipes" / "results"
TABLE = json.loads((RESULTS / "coverage.json").read_text())
ROWS = TABLE["classes"]
WRAPPERS = json.loads((RESULTS / "coverage_text_of_multimodal.json").read_text())["classes"]
SAME_VERSION = transformers.__version__ == TABLE["transformers"]  # as that of most rows; newer ones say so
EXACT = sorted(name for name, row in ROWS.items() if row["result"] == "exact")
MASKED = [name for name in EXACT if hasattr(transformers, name) and is_masked(name)]  # no newer class is
IMAGES = json.loads((RESULTS / "coverage_images.json").read_text())["classes"]
SEEING = sorted(name for name, row in IMAGES.items() if row["result"] == "exact")
HEADS = json.loads((RESULTS / "coverage_heads.json").read_text())["classes"]
JUDGING = sorted(name for name, row in HEADS.items() if row["result"] == "exact")
EXACT_WRAPPERS = sorted(name for name, row in WRAPPERS.items() if row["result"] == "exact")


def chosen() -> list[Any]:
    """The classes of this run: one that is exact, one that is refused; and more of the slow tests."""
    if "COVERAGE_CLASSES" in os.environ:
        return os.environ["COVERAGE_CLASSES"].split()
    draw = random.Random(int(os.environ.get("COVERAGE_SEED", datetime.date.today().toordinal())))
    refused = draw.sample(sorted(name for name, row in ROWS.items() if row["result"] == "refused"), 2)
    exact = draw.sample(EXACT, 3)
    later = [pytest.param(name, marks=pytest.mark.slow) for name in (*exact[1:], refused[1])]
    return [exact[0], refused[0], *later]


@pytest.mark.parametrize("name", chosen())
def test_rows_of_the_table_hold(ranks: Callable[[int], RankPool], name: str) -> None:
    if name not in class_names():
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    check_rows(ranks, compare_class, name, ROWS[name])


def check_rows(ranks: Callable[[int], RankPool], compare_one: Any, name: str, expected: dict[str, Any]) -> None:
    """Compares a class; what another Transformers made of it must not be the same, but not wrong."""
    for found in ranks(TABLE["ranks"]).run(compare_one, name):
        assert found.result != "wrong", found
        if expected.get("transformers", TABLE["transformers"]) == transformers.__version__:
            assert (found.result, found.note) == (expected["result"], expected["note"])


def chosen_wrappers() -> list[str]:
    """Two classes that are exact on text, one that is refused."""
    draw = random.Random(int(os.environ.get("COVERAGE_SEED", datetime.date.today().toordinal())))
    refused = sorted(name for name, row in WRAPPERS.items() if row["result"] == "refused")
    return draw.sample(EXACT_WRAPPERS, 2) + draw.sample(refused, 1)


@pytest.mark.parametrize("name", chosen_wrappers())
@pytest.mark.slow
def test_rows_of_the_table_of_wrappers_hold(ranks: Callable[[int], RankPool], name: str) -> None:
    if not SAME_VERSION or not hasattr(transformers, name):
        pytest.skip("their configs differ between versions of Transformers")
    check_rows(ranks, compare_wrapper, name, WRAPPERS[name])


def compare_wrapper(rank: int, size: int, name: str) -> Verdict:
    return compare(partial(tiny_wrapper, name))


def chosen_to_judge() -> list[Any]:
    """A class that judges and is exact, and as slow tests another one and one that is refused."""
    draw = random.Random(int(os.environ.get("COVERAGE_SEED", datetime.date.today().toordinal())))
    refused = sorted(name for name, row in HEADS.items() if row["result"] == "refused")
    first, *others = draw.sample(JUDGING, 2) + draw.sample(refused, 1)
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.mark.parametrize("name", chosen_to_judge())
def test_rows_of_the_table_of_heads_hold(ranks: Callable[[int], RankPool], name: str) -> None:
    if not SAME_VERSION or not hasattr(transformers, name):
        pytest.skip("their configs differ between versions of Transformers")
    check_rows(ranks, compare_class, name, HEADS[name])


def chosen_to_see() -> list[Any]:
    """A class that is exact on images, and as slow tests another one and one that is refused."""
    draw = random.Random(int(os.environ.get("COVERAGE_SEED", datetime.date.today().toordinal())))
    first, *others = draw.sample(SEEING, 2) + draw.sample(sorted({*IMAGES} - {*SEEING}), 1)
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.mark.parametrize("name", chosen_to_see())
def test_rows_of_the_table_of_images_hold(ranks: Callable[[int], RankPool], name: str) -> None:
    if not SAME_VERSION or not hasattr(transformers, name):
        pytest.skip("their configs differ between versions of Transformers")
    check_rows(ranks, compare_seeing, name, IMAGES[name])


def compare_seeing(rank: int, size: int, name: str) -> Verdict:
    return compare_images(name)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("Gemma2ForCausalLM", "softcap"),
        pytest.param("GptOssForCausalLM", "s_aux", marks=pytest.mark.full),
        pytest.param("Llama4ForCausalLM", "attention_mask", marks=pytest.mark.full),
    ],
)
def test_the_comparison_sees_what_attention_forgets(ranks: Callable[[int], RankPool], name: str, argument: str) -> None:
    for found in ranks(TABLE["ranks"]).run(compare_without, name, argument):
        assert found.result == "wrong"
        assert min(found.errors.values()) > 1e-3, "far from the tolerance"


def compare_class(rank: int, size: int, name: str) -> Verdict:
    return compare(partial(tiny_model, name))


def compare_without(rank: int, size: int, name: str, argument: str) -> Verdict:
    whole = attention.attention_forward

    def forgetful(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        return whole(module, query, key, value, **{"attention_mask": attention_mask, **options, argument: None})

    with mock.patch.object(attention, "attention_forward", forgetful):
        attention.register()
        verdict = compare(partial(tiny_model, name))
    attention.register()
    return verdict


def test_a_class_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["coverage.py", "--classes", "Nonsense"])
    with pytest.raises(SystemExit) as end:
        coverage.main()
    assert end.value.code == 2
    assert "no class Nonsense for this table: Every causal-LM and masked-LM class" in capsys.readouterr().err


def own(rows: dict[str, Any]) -> list[str]:
    """The classes that the installed Transformers has."""
    return sorted(name for name in rows if hasattr(transformers, name))


def test_the_table_is_of_every_class() -> None:
    if SAME_VERSION:
        assert own(ROWS) == class_names()
        assert own(WRAPPERS) == wrapper_names()
        assert own(IMAGES) == sorted(coverage.IMAGES.classes)
        assert own(HEADS) == sorted(coverage.HEADS.classes)
    else:
        assert set(EXACT) & set(class_names())


def test_no_class_is_wrong_and_a_hundred_are_exact() -> None:
    assert {row["result"] for row in ROWS.values()} == {"exact", "refused", "not buildable"}
    assert len(EXACT) - len(MASKED) >= 100
    assert len(MASKED) >= 22
    for name in EXACT:
        assert set(ROWS[name]["errors"]) == set(KINDS)
        assert max(ROWS[name]["errors"].values()) <= TABLE["tolerance"] == TOLERANCE


def test_over_seventy_wrappers_are_exact_and_the_others_say_why() -> None:
    assert len(EXACT_WRAPPERS) >= 70
    for name, row in WRAPPERS.items():
        assert row["result"] in ("exact", "refused", "not buildable")
        if row["result"] == "exact":
            assert set(row["errors"]) == set(KINDS)
            assert max(row["errors"].values()) <= TOLERANCE
        else:
            assert row["note"], name


def test_no_head_is_wrong_and_pages_tell_how_many_are_exact() -> None:
    for name, row in HEADS.items():
        assert row["result"] in ("exact", "refused", "not buildable")
        assert row["note"] or max(row["errors"].values()) <= TOLERANCE, name
    root = Path(__file__).parents[2]
    assert len(JUDGING) >= 90
    assert f"[{len(JUDGING)} classifiers]" in (root / "README.md").read_text()
    assert f"[{len(JUDGING)} classes are exact]" in (root / "docs/reference/served.md").read_text()


def test_images_are_exact_where_they_are_served_and_the_others_say_why() -> None:
    assert sorted(name.removesuffix("ForConditionalGeneration") for name in SEEING) == sorted(FAMILIES)
    for name, row in IMAGES.items():
        assert row["result"] in ("exact", "refused")
        assert max(row.get("errors", {}).values(), default=0) <= TOLERANCE
        if row["result"] == "exact":
            assert {*coverage.IMAGES.kinds} - {*row["errors"]} <= {"video"}
        else:
            assert row["note"], name


def test_what_is_served_is_what_is_exact() -> None:
    served = sorted({*EXACT, *EXACT_WRAPPERS, *JUDGING})
    assert sorted(CLASSES) == served
    assert TABLE["transformers"] == TESTED
    made = {**ROWS, **WRAPPERS, **HEADS}
    for name in served:
        if made[name].get("transformers", TESTED) == transformers.__version__:
            assert source_hash(getattr(transformers, name).__module__) == CLASSES[name].source


def test_rows_that_a_newer_transformers_makes_join_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each row, and the hash of each class that is served, is of the Transformers that made it."""
    for table in (coverage.LANGUAGE, coverage.WRAPPERS, coverage.HEADS):
        text = (RESULTS / f"{table.name}.json").read_text()
        (tmp_path / f"{table.name}.json").write_text(text)
    (tmp_path / "admission.toml").write_text(coverage.ADMISSION.read_text())
    monkeypatch.setattr(coverage, "RESULTS", tmp_path)
    monkeypatch.setattr(coverage, "ADMISSION", tmp_path / "admission.toml")
    monkeypatch.setattr(coverage.transformers, "__version__", "5.99.0")
    monkeypatch.setattr(coverage, "source_hash", lambda module: "anew")
    kept = coverage.written(coverage.LANGUAGE)
    coverage.write(coverage.LANGUAGE, {"LlamaForCausalLM": Verdict("exact", {"packed": 1e-15}, "again")})
    coverage.write_served()
    wanted = {**kept, "LlamaForCausalLM": (Verdict("exact", {"packed": 1e-15}, "again"), "5.99.0")}
    assert coverage.written(coverage.LANGUAGE) == {name: wanted[name] for name in coverage.LANGUAGE.classes}
    assert f"of Transformers {TESTED}, " in (tmp_path / "coverage.md").read_text()
    assert ", 1 of them of 5.99.0" in (tmp_path / "coverage.md").read_text()
    before, after = coverage.ADMISSION.read_text(), tomllib.loads((tmp_path / "admission.toml").read_text())
    known = tomllib.loads(before)
    gone = {*wanted} - {*coverage.LANGUAGE.classes}  # which a newer Transformers than the installed one has
    there = {name: row for name, row in known["classes"].items() if name not in gone}
    assert after == {**known, "classes": {**there, "LlamaForCausalLM": {"source": "anew"}}}


def test_rows_of_another_transformers_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of a newer one, and those of classes whose own code raises in this one, which do not make a table old."""
    kept, other = "Llama4ForConditionalGeneration", "LlavaForConditionalGeneration"
    (tmp_path / "coverage_images.json").write_text((RESULTS / "coverage_images.json").read_text())
    monkeypatch.setattr(coverage, "RESULTS", tmp_path)
    table = coverage.IMAGES
    before = coverage.written(table)
    for version in ("5.1.0", f"{coverage.KEPT[kept][0]}.0"):
        monkeypatch.setattr(coverage.transformers, "__version__", version)
        coverage.write(table, dict.fromkeys([kept, *([other] if version == "5.1.0" else [])], Verdict("wrong")))
        assert coverage.written(table) == before
    assert json.loads((tmp_path / "coverage_images.json").read_text())["transformers"] == TESTED


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_pages_tell_how_many_classes_are_exact(page: str) -> None:
    text = " ".join((Path(__file__).parents[2] / page).read_text().split())
    assert f"{len(EXACT) - len(MASKED)} causal and {len(MASKED)} masked language model classes" in text


def test_the_page_of_limits_tells_how_many_are_exact() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs/reference/served.md").read_text().split())
    assert f"has {len(EXACT)} exact classes" in page


def test_the_page_of_wrappers_tells_how_many_are_exact() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs/how-to/multimodal.md").read_text().split())
    assert f"{len(EXACT_WRAPPERS)} of {len(WRAPPERS)} classes" in page
    served = (Path(__file__).parents[2] / "docs/reference/served.md").read_text()
    assert f"text through {len(EXACT_WRAPPERS)}" in served
    assert f"[{len(SEEING)} classes]" in page
    assert f"{len(WITH_VIDEO)} of them" in page
