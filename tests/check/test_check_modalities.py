"""`hf-burst check` of models that see and hear: a verdict on text, and batches with images."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from hf_burst.check import run
from hf_burst.check.compare import BatchComparison, compare, compare_batch, make_batch
from hf_burst.check.run import _load, check_batch, find_target
from hf_burst.check.tiny import tiny_copy
from hf_burst.cli.check import describe
from hf_burst.errors import BatchError
from hf_burst.hf import admission
from hf_burst.hf.admission import Verdict, row_of
from hf_burst.hf.parts import towers
from hf_burst.hf.view import ModelView
from hf_burst.ranks.collectives import all_gather
from tests.support.image_verdicts import error_on
from tests.support.ranks import RankError, RankPool
from tests.support.tiny_hearing import FAMILIES as HEARING
from tests.support.tiny_hearing import hearing_batch
from tests.support.tiny_pictures import WITH_VIDEO, Batch, seeing_batch
from tests.support.tiny_seeing import FAMILIES, seeing_class, seeing_model

Ranks = Callable[[int], RankPool]


class Derived(transformers.Qwen2_5_VLForConditionalGeneration):
    """A class of a user's."""


class Mixing(transformers.Qwen2_5_VLForConditionalGeneration):
    """One that mixes the tokens which a rank has, if there are images."""

    @wraps(transformers.Qwen2_5_VLForConditionalGeneration.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def mix(module: Any, args: Any, output: Any) -> Any:
            if kwargs.get("pixel_values") is not None:
                output.last_hidden_state = output.last_hidden_state.cumsum(1)
            return output

        with self.get_decoder().register_forward_hook(mix):
            return super().forward(*args, **kwargs)


def verdict_on(rank: int, size: int, family: str, kind: Any) -> Verdict:
    return compare(partial(tiny_copy, kind, seeing_model(family).config))


def error_without_sums(rank: int, size: int) -> float:
    """As if the features of the images that others encode had no gradient here."""

    def own_part(tensor: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
        gathered = all_gather(tensor.detach(), group)
        return tuple(tensor if place == group.rank else rows for place, rows in enumerate(gathered))

    with mock.patch.object(towers, "all_gather", own_part):
        return error_on("Qwen2_5_VL", "images")


def test_a_class_of_a_users_that_sees_is_compared_on_text(ranks: Ranks) -> None:
    for found in ranks(2).run(verdict_on, "Qwen2_5_VL", Derived):
        assert (found.result, found.uncompared) == ("exact", "images and videos")
        assert [*found.errors] == ["one sequence", "packed", "padded"]
        told = "compare images and videos by a batch of your own: hf-burst check FOLDER --batch FILE."
        assert told in describe("Derived", found)
    assert "by a batch" not in describe("Llama", Verdict("exact", {"packed": 0.0}))


def test_the_table_of_images_would_see_what_is_wrong_on_images(ranks: Ranks) -> None:
    assert min(ranks(3).run(error_without_sums)) > 1e-3  # over two, each encodes the images of its own tokens


@pytest.mark.parametrize("changed", [False, True])
def test_a_class_that_only_a_check_of_text_covers_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changed: bool
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    if changed:  # by a newer Transformers than that of the tables
        monkeypatch.setattr(admission, "TESTED", "5.1.0")
        rows = {name: replace(row, source="another") for name, row in admission.CLASSES.items()}
        monkeypatch.setattr(admission, "CLASSES", rows)
    stock, config = seeing_class("Qwen2_5_VL"), seeing_model("Qwen2_5_VL").config
    for kind, warned in ((stock, changed), (Derived, True)):
        caplog.clear()
        model = kind(config)
        digest = admission.fingerprint(ModelView(model)) or ""
        admission.remember(Verdict("exact", fingerprint=digest, uncompared="images and videos"))
        assert admission.served_by(ModelView(model)) == ("shipped" if kind is stock else f"checked {digest}")
        assert ("with one process on text, and not on images and videos" in caplog.text) == warned


def test_every_modality_that_is_served_has_batches() -> None:
    for family in FAMILIES:
        served = row_of(seeing_class(family)).modalities
        assert "images" in served
        assert ("videos" in served) == (family in WITH_VIDEO)
        assert ("sound" in served) == (family in HEARING)


def compared_batch(rank: int, size: int, folder: str, batch: Batch, kind: Any = None) -> BatchComparison:
    target = find_target(folder)
    return compare_batch(partial(_load, replace(target, model_class=kind or target.model_class)), batch)


def in_fp32(batch: Batch) -> Batch:
    return {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}


@pytest.mark.parametrize("kind", ["images", "with and without", "video"])
def test_a_batch_with_images_is_compared(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    seeing_model("Qwen2_5_VL").float().save_pretrained(tmp_path)
    batch = in_fp32(seeing_batch("Qwen2_5_VL", kind))
    for found in ranks(2).run(compared_batch, str(tmp_path), batch):
        assert found.equal
        assert found.gradient_norm[0] > 0


def test_a_batch_with_images_shows_that_a_class_mixes_tokens(ranks: Ranks, tmp_path: Path) -> None:
    seeing_model("Qwen2_5_VL").float().save_pretrained(tmp_path)
    for found in ranks(2).run(compared_batch, str(tmp_path), in_fp32(seeing_batch("Qwen2_5_VL")), Mixing):
        assert not found.equal
        assert found.error > 1e-3


def test_one_process_cannot_say_what_packed_images_give(ranks: Ranks, tmp_path: Path) -> None:
    seeing_model("Qwen2_5_VL").float().save_pretrained(tmp_path)
    with pytest.raises(RankError, match="packs documents with images or sound, and one process mixes them"):
        ranks(2).run(compared_batch, str(tmp_path), in_fp32(seeing_batch("Qwen2_5_VL", "packed")))


@pytest.mark.slow
@pytest.mark.usefixtures("in_forks")
@pytest.mark.parametrize(
    "family",
    ["Gemma3", pytest.param("Qwen2_5_VL", marks=pytest.mark.full), pytest.param("Qwen3VL", marks=pytest.mark.full)],
)
def test_a_tiny_model_takes_the_images_of_a_large_one(family: str, tmp_path: Path) -> None:
    seeing_model(family).config.save_pretrained(tmp_path)
    comparison, weights = check_batch(str(tmp_path), in_fp32(seeing_batch(family)))
    assert comparison.equal
    assert "random weights of a tiny model (the folder holds no weights)" in weights


@pytest.mark.slow
@pytest.mark.usefixtures("in_forks")
def test_sound_for_a_model_that_only_sees_is_refused(tmp_path: Path) -> None:
    seeing_model("Llava").config.save_pretrained(tmp_path)
    with pytest.raises(BatchError, match="The batch holds input_features"):
        check_batch(str(tmp_path), in_fp32(hearing_batch("Voxtral")))


@pytest.mark.parametrize("family", ["Glm4vMoe", "Qwen2_5_VL", "Qwen3VL"])
def test_the_default_config_of_a_class_that_sees_has_sections_of_positions(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Those that the code of Qwen2.5-VL and GLM-4V has fit no small head."""
    made: list[Any] = []
    monkeypatch.setattr(run, "run_on_ranks", lambda _, make, **__: made.append(make()) or Verdict("refused"))
    run.check_model(f"{family}ForConditionalGeneration")
    with torch.no_grad():
        assert made[0](**make_batch("packed", made[0])).logits.isfinite().all()
