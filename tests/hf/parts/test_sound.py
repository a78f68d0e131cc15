"""Models that hear: loss and all gradients, of towers and projectors too, equal those of one process."""

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_burst
from hf_burst.errors import BatchError, UnsupportedModelError
from hf_burst.hf.admission import CLASSES
from hf_burst.hf.parts import towers
from hf_burst.ranks.collectives import all_gather
from tests.support import models, tiny_hearing, trainers
from tests.support.gradients import Result, assert_equal, loss_and_gradients
from tests.support.ranks import RankError, RankPool
from tests.support.trainers import Case, make_trainer

Ranks = Callable[[int], RankPool]
ALWAYS = ("Gemma4", "NemotronH_Omni_Reasoning_V3", "Qwen2_5OmniThinker", "VibeVoiceAsr", "Voxtral")
HEARING = [pytest.param(n, marks=[pytest.mark.full] * (n not in ALWAYS)) for n in tiny_hearing.FAMILIES]
SHARED = {name.removesuffix("ForConditionalGeneration"): row.sound for name, row in CLASSES.items() if row.sound}
_TOWER = re.compile("audio_tower|model.multi_modal_projector")  # the second learns where the first does not


def text_of(batch: Mapping[str, torch.Tensor]) -> tiny_hearing.Batch:
    """The same tokens without sound."""
    return {key: batch[key] % 50 for key in ("input_ids", "labels")}


def train(family: str, change: str = "", patched: bool = False, **settings: Any) -> Result:
    """Loss and gradients of a pass, in fp64."""
    model, batch = tiny_hearing.hearing_model(family), tiny_hearing.hearing_batch(family)
    if change == "text":
        batch = text_of(batch)
    if change == "padded":
        batch = tiny_hearing.padded(batch)
    again = change == "checkpointed"
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if patched:
        models.patch(model, models.config_of(**settings))
    return loss_and_gradients(model, batch, single=again)  # no mode is entered where a layer runs again


def on_ranks(rank: int, size: int, family: str, change: str = "") -> Result:
    return train(family, change, patched=True)


@pytest.mark.parametrize("family", HEARING)
def test_sound_is_exact(ranks: Ranks, family: str) -> None:
    wanted = train(family)
    assert any(_TOWER.search(name) and float(gradient.norm()) > 0 for name, gradient in wanted[1].items()), (
        "a tower learns"
    )
    assert_equal(ranks(3).run(on_ranks, family), wanted)


def test_every_family_that_is_served_is_compared() -> None:
    assert sorted(SHARED) == sorted(tiny_hearing.NAMES)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        pytest.param(family, change, marks=[pytest.mark.full] * (change != always))
        for family, always in (("Gemma3n", "text"), ("Qwen2_5OmniThinker", "padded"), ("Voxtral", "padded"))
        for change in ("text", "padded")
    ],
)
def test_batches_of_other_kinds_are_exact(ranks: Ranks, family: str, change: str) -> None:
    assert_equal(ranks(2).run(on_ranks, family, change), train(family, change))


def test_checkpoints_change_nothing(ranks: Ranks) -> None:
    wanted = train("Voxtral", "checkpointed")
    assert_equal(ranks(2).run(on_ranks, "Voxtral", "checkpointed"), wanted, 1e-5)  # norms in fp32


def own_part(tensor: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
    """A gather whose gradient is that of this rank alone."""
    gathered = all_gather(tensor.detach(), group)
    return tuple(tensor if rank == group.rank else other for rank, other in enumerate(gathered))


def broken(rank: int, size: int, family: str) -> Result:
    with mock.patch.object(towers, "all_gather", own_part):
        return train(family, patched=True)


def test_gradients_that_are_not_summed_are_seen(ranks: Ranks) -> None:
    with pytest.raises(AssertionError):
        assert_equal(ranks(2).run(broken, "Voxtral"), train("Voxtral"))


def runs_of_towers(rank: int, size: int, family: str, sound: bool = True) -> tuple[list[int], bool]:
    """How many values of sound this rank's tower is given in a pass, and whether it learns."""
    model, batch = models.patch(tiny_hearing.hearing_model(family)), tiny_hearing.hearing_batch(family)
    given: list[int] = []
    tower = next(module for name, module in model.base_model.named_children() if name.startswith(("audio", "acoustic")))
    tower.register_forward_pre_hook(
        lambda _, args, kwargs: given.append((*args, *kwargs.values())[0].numel()), with_kwargs=True
    )
    loss_and_gradients(model, batch if sound else text_of(batch))
    return given, any(weight.grad is not None and bool(weight.grad.any()) for weight in tower.parameters())


def test_ranks_share_the_clips(ranks: Ranks) -> None:
    """A second rank, for which there is none, runs one for nothing."""
    found = ranks(3).run(runs_of_towers, "Voxtral")
    assert found == [([192], True), ([192], False), ([192], True)]
    assert ranks(3).run(runs_of_towers, "Voxtral", False) == [([], False)] * 3


@pytest.mark.parametrize("family", HEARING)
def test_ranks_share_clips_that_are_encoded_apart(ranks: Ranks, family: str) -> None:
    whole, found = sum(runs_of_towers(0, 1, family)[0]), ranks(2).run(runs_of_towers, family)
    shared = SHARED[family] == "clips"
    assert sum(sum(given) for given, _ in found) == (whole if shared else 2 * whole)


def sharded(rank: int, size: int, change: str) -> Result:
    """FSDP2 shards the layers of the language model and of the tower, and the rest."""
    model, batch = tiny_hearing.hearing_model("Voxtral"), tiny_hearing.hearing_batch("Voxtral")
    if size > 1:
        models.patch(model)
        for module in (*model.model.language_model.layers, *model.model.audio_tower.layers, model):
            fully_shard(module)
    return loss_and_gradients(model, text_of(batch) if change == "text" else batch)


@pytest.mark.parametrize("change", ["", "text"])
def test_weights_may_be_sharded(ranks: Ranks, change: str) -> None:
    """A rank has no clip, and gathers the tower's weights as the others do; without sound none does."""
    assert_equal(ranks(3).run(sharded, change), sharded(0, 1, change))


def unlike(rank: int, size: int, change: str) -> None:
    """A pass for which one rank has other sound, or none."""
    model, batch = models.patch(tiny_hearing.hearing_model("Voxtral")), tiny_hearing.hearing_batch("Voxtral")
    if rank == 1 and change == "other":
        batch["input_features"][1, 0, 0] += 1
    if change == "swapped":
        batch["input_features"] = batch["input_features"].roll(rank, 0)
    model(**text_of(batch) if rank == 1 and change == "none" else batch)


@pytest.mark.parametrize(("change", "sentence"), [("other", "content"), ("swapped", "content"), ("none", "sound")])
def test_all_ranks_need_the_same_sound(ranks: Ranks, change: str, sentence: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(unlike, change)
    assert all(isinstance(error, hf_burst.errors.BurstError) for error in caught.value.errors)
    assert all(sentence in str(error) for error in caught.value.errors)


def mixed_groups(rank: int, size: int) -> None:
    """Two groups of two ranks, over which FSDP2 shards the tower; the second has text alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model, batch = tiny_hearing.hearing_model("Voxtral"), tiny_hearing.hearing_batch("Voxtral")
    hf_burst.patch_model(model, group=mesh["cp"].get_group())
    for module in (*model.model.audio_tower.layers, model):
        fully_shard(module, mesh=mesh._flatten("all"))
    model(**text_of(batch) if rank >= 2 else batch)


def test_groups_with_and_without_sound_are_an_error_where_they_share_a_tower(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(4).run(mixed_groups)
    assert all("images, videos or sound in this step" in str(error) for error in caught.value.errors)


def dropping(rank: int, size: int, family: str) -> None:
    model, batch = models.patch(tiny_hearing.hearing_model(family)), tiny_hearing.hearing_batch(family)
    model.model.audio_tower.layers[0].dropout = 0.1
    model(**batch)


def test_towers_that_drop_at_random_are_refused_where_every_rank_runs_them(ranks: Ranks) -> None:
    ranks(2).run(dropping, "Voxtral")
    with pytest.raises(RankError) as caught:
        ranks(2).run(dropping, "MusicFlamingo")
    sentence = r"The tower of MusicFlamingoModel trains with dropout=0\.1"
    assert all(pytest.RaisesExc(UnsupportedModelError, match=sentence).matches(error) for error in caught.value.errors)


def noisy(rank: int, size: int, sample: bool) -> None:
    model, batch = models.patch(tiny_hearing.hearing_model("VibeVoiceAsr")), tiny_hearing.hearing_batch("VibeVoiceAsr")
    model.config.acoustic_tokenizer_encoder_config.vae_std = 0.6
    model(**batch, **({} if sample else {"sample": False}))


def test_noise_has_to_be_switched_off(ranks: Ranks) -> None:
    noisy(0, 1, True)
    if "sample" in inspect.signature(transformers.VibeVoiceAsrForConditionalGeneration.forward).parameters:
        ranks(2).run(noisy, False)
    with pytest.raises(RankError) as caught:
        ranks(2).run(noisy, True)
    sentence = "VibeVoiceAsrForConditionalGeneration adds noise to sound.*acoustic_tokenizer_encoder_config.vae_std"
    assert all(pytest.RaisesExc(BatchError, match=sentence).matches(error) for error in caught.value.errors)


def test_images_of_models_that_hear_are_refused() -> None:
    model = models.patch(tiny_hearing.hearing_model("Voxtral"))
    batch = {**tiny_hearing.hearing_batch("Voxtral"), "pixel_values": torch.zeros(16, 96)}
    with pytest.raises(BatchError, match=r"holds input_features, pixel_values\. Of Voxtral\w+ text and sound are"):
        model(**batch)


def test_a_model_that_heard_generates() -> None:
    model, batch = tiny_hearing.hearing_model("Voxtral").float().eval(), tiny_hearing.hearing_batch("Voxtral")
    del batch["labels"]
    batch["input_features"] = batch["input_features"].float()
    options = {"max_new_tokens": 4, "do_sample": False}
    wanted = model.generate(**batch, **options)
    assert torch.equal(models.patch(model).generate(**batch, **options), wanted)


def one_row(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: value.float() if value.is_floating_point() else value for name, value in rows[0].items()}


def train_by_trainer(rank: int, size: int, folder: str, case: Case) -> dict[str, Any]:
    """Trainer on sequences of other lengths, with two clips each; the tower learns."""
    model = tiny_hearing.hearing_model(case.model).to(torch.float32)
    if case.burst:
        hf_burst.patch_model(model)
    data = [tiny_hearing.hearing_batch(case.model, length) for length in (53, 41, 47, 59, 43, 37)]
    trainer = make_trainer(case, folder, data=data, model=model, per_device_train_batch_size=1)
    trainer.data_collator = one_row
    return trainers.finish(trainer)


def test_sound_trains_as_in_one_process(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("Trainer", model="Voxtral")
    wanted = train_by_trainer(0, 1, str(tmp_path / "alone"), case.alone)
    for run in ranks(2).run(train_by_trainer, str(tmp_path / "ranks"), case):
        trainers.compare(run, wanted)
