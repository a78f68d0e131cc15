"""`hf-burst check` on models that see and hear: a verdict for each modality, and batches with images."""

import logging
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from hf_burst.check import modalities, run
from hf_burst.check.compare import BatchComparison, compare_batch, compare_modalities, make_batch
from hf_burst.check.run import _load, check_batch, find_target
from hf_burst.check.tiny import tiny_copy
from hf_burst.check.tiny_hearing import FAMILIES as HEARING
from hf_burst.check.tiny_hearing import hearing_batch
from hf_burst.check.tiny_pictures import WITH_VIDEO, Batch, seeing_batch
from hf_burst.check.tiny_seeing import FAMILIES, seeing_class, seeing_model
from hf_burst.cli.check import describe
from hf_burst.errors import BatchError
from hf_burst.hf.models import verdicts
from hf_burst.hf.models.cut_point import family_of, served_modalities
from hf_burst.hf.models.verdicts import Verdict
from hf_burst.hf.parts import towers
from hf_burst.ranks.collectives import all_gather
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]
_TEXT = ["one sequence", "packed", "padded"]
_IMAGES = ["images, one image", "images, images", "images, with and without", "images, packed"]


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


def maker(family: str, kind: Any) -> Callable[[], PreTrainedModel]:
    """Makes the model that is compared on text."""
    return partial(tiny_copy, kind, seeing_model(family).config)


def verdict_on(rank: int, size: int, family: str, kind: Any) -> Verdict:
    return compare_modalities(maker(family, kind), kind)


def without_sums(rank: int, size: int) -> Verdict:
    """As if the features of the images that others encode had no gradient here."""

    def own_part(tensor: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
        gathered = all_gather(tensor.detach(), group)
        return tuple(tensor if place == group.rank else rows for place, rows in enumerate(gathered))

    with mock.patch.object(towers, "all_gather", own_part):
        return verdict_on(rank, size, "Qwen2_5_VL", seeing_class("Qwen2_5_VL"))


def of_a_newer_class(rank: int, size: int) -> Verdict:
    with mock.patch.object(modalities, "seeing_model", side_effect=TypeError("no such argument")):
        return verdict_on(rank, size, "Gemma4", seeing_class("Gemma4"))


def test_images_and_videos_of_a_class_of_a_users_are_compared(ranks: Ranks) -> None:
    for found in ranks(2).run(verdict_on, "Qwen2_5_VL", Derived):
        assert (found.result, found.uncompared) == ("exact", "")
        assert [*found.errors] == [*_TEXT, *_IMAGES, "videos"]
        assert "videos: exact, greatest error" in describe("Derived", found)


@pytest.mark.parametrize("broken", [without_sums, partial(verdict_on, family="Qwen2_5_VL", kind=Mixing)])
def test_what_is_wrong_on_images_alone_is_found_wrong(ranks: Ranks, broken: Any) -> None:
    for found in ranks(2).run(broken):
        assert found.result == "wrong"
        assert max(found.errors[kind] for kind in _TEXT) <= 1e-9
        assert max(found.errors[kind] for kind in _IMAGES) > 1e-3
        assert "images, images: wrong" in describe("Mixing", found)


def test_what_one_process_cannot_compute_is_told_and_warned_of(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for found in ranks(2).run(of_a_newer_class):
        assert found.result == "exact"
        assert found.uncompared == "images (TypeError: no such argument), videos (TypeError: no such argument)"
        assert [*found.errors] == [*_TEXT, "sound, clips", "sound, padded clips"]
        assert "not compared: images" in describe("Gemma4", found)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    verdicts.remember(found)
    model = seeing_class("Gemma4")(seeing_model("Gemma4").config)
    assert verdicts.served_by(model) == "shipped"
    assert "compared with one process on text, and not on images" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def test_every_modality_that_is_served_has_batches() -> None:
    for family in FAMILIES:
        served = served_modalities(seeing_class(family))
        assert "images" in served
        assert ("videos" in served) == (family in WITH_VIDEO)
        assert ("sound" in served) == (family in HEARING)
        assert family_of(seeing_class(family)) == family


def compared_batch(rank: int, size: int, folder: str, batch: Batch) -> BatchComparison:
    return compare_batch(partial(_load, find_target(folder)), batch)


def in_fp32(batch: Batch) -> Batch:
    return {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}


@pytest.mark.parametrize("kind", ["images", "with and without", "video"])
def test_a_batch_with_images_is_compared(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    seeing_model("Qwen2_5_VL").float().save_pretrained(tmp_path)
    batch = in_fp32(seeing_batch("Qwen2_5_VL", kind))
    for found in ranks(2).run(compared_batch, str(tmp_path), batch):
        assert found.equal
        assert found.gradient_norm[0] > 0


def test_one_process_cannot_say_what_packed_images_give(ranks: Ranks, tmp_path: Path) -> None:
    seeing_model("Qwen2_5_VL").float().save_pretrained(tmp_path)
    with pytest.raises(RankError, match="packs documents with images or sound, and one process mixes them"):
        ranks(2).run(compared_batch, str(tmp_path), in_fp32(seeing_batch("Qwen2_5_VL", "packed")))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Gemma3", "Qwen2_5_VL", "Qwen3VL"])
def test_a_tiny_model_takes_the_images_of_a_large_one(family: str, tmp_path: Path) -> None:
    seeing_model(family).config.save_pretrained(tmp_path)
    comparison, weights = check_batch(str(tmp_path), in_fp32(seeing_batch(family)))
    assert comparison.equal
    assert "random weights of a tiny model (the folder holds no weights)" in weights


@pytest.mark.slow
def test_sound_for_a_model_that_only_sees_is_refused(tmp_path: Path) -> None:
    seeing_model("Llava").config.save_pretrained(tmp_path)
    with pytest.raises(BatchError, match="The batch holds input_features"):
        check_batch(str(tmp_path), in_fp32(hearing_batch("Voxtral")))


def test_a_class_that_sees_is_checked_by_the_config_of_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default config of Qwen2.5-VL has sections of positions that fit no small head."""
    made: list[Any] = []
    monkeypatch.setattr(run, "run_on_ranks", lambda _, make, *__, **___: made.append(make()) or Verdict("refused"))
    run.check_model("Qwen2_5_VLForConditionalGeneration")
    with torch.no_grad():
        assert made[0](**make_batch("packed", made[0])).logits.isfinite().all()
