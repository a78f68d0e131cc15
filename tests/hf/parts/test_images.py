"""Models that see: loss and all gradients, of towers and projectors too, equal those of one process."""

import os
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_burst
from hf_burst.errors import BatchError, BurstError, LostRankError, UnsupportedModelError
from hf_burst.hf.admission import CLASSES, row_of
from hf_burst.hf.batches import cutting
from hf_burst.hf.batches.cutting import select_rows
from hf_burst.hf.parts import shared_beginnings, tokens, towers
from hf_burst.hf.view import ModelView
from hf_burst.ranks.collectives import all_gather
from tests.support import models
from tests.support.gradients import Result, assert_equal, loss_and_gradients
from tests.support.ranks import RankError, RankPool
from tests.support.tiny_pictures import WITH_VIDEO, Batch, seeing_batch
from tests.support.tiny_seeing import FAMILIES, seeing_class, seeing_model

Ranks = Callable[[int], RankPool]
OFFLOADED = {"tiled_mlp": 4, "activation_offloading": 1.0}
ALWAYS = {"Llava", "Idefics3", "Qwen3VLMoe", "Qwen3_5", "Llama4", "Emu3", "FuyuForCausalLM", "Kimi_K25"}
ALWAYS |= {"Qwen2_5OmniThinker"}  # others with other kinds of batches, below, and in test_image_blocks.py
WATCHED = {"Qwen2_5_VL", "Qwen3VL", "LlavaNextVideo", "Gemma4", "Cosmos3Edge"}


def train(family: str, change: str = "", patched: bool = False, **settings: Any) -> Result:
    """Loss and gradients of a pass, in fp64."""
    model, batch = seeing_model(family), seeing_batch(family, "video" if change == "video" else "images")
    if change == "text":
        batch = models.make_batch("plain") | {"input_ids": batch["input_ids"] % 50, "labels": batch["labels"] % 50}
    if change == "padded":
        batch = padded(batch)
    again = change == "checkpointed"
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if patched:
        models.patch(model, models.config_of(**settings))
    return loss_and_gradients(model, batch, single=again)  # no mode is entered where a layer runs again


def padded(batch: Batch) -> Batch:
    """Two rows: the sequence, and its beginning, padded on the right."""
    short = batch["input_ids"].shape[1] - 6
    rows = {}
    for key in ("input_ids", "labels", "mm_token_type_ids"):
        if key in batch:
            second = batch[key].clone()
            second[:, short:] = -100 if key == "labels" else 0
            rows[key] = torch.cat([batch[key], second])
    mask = torch.ones_like(rows["input_ids"])
    mask[1, short:] = 0
    twice = {key: torch.cat([value, value]) for key, value in batch.items() if key not in rows}
    return {**rows, **twice, "attention_mask": mask}


def on_ranks(rank: int, size: int, family: str, change: str = "", **settings: Any) -> Result:
    return train(family, change, patched=True, **settings)


def checkpointed(rank: int, size: int, family: str, settings: dict[str, Any]) -> Result:
    return train(family, "checkpointed", patched=True, **settings)


@pytest.mark.parametrize("family", [pytest.param(n, marks=[pytest.mark.full] * (n not in ALWAYS)) for n in FAMILIES])
def test_images_are_exact(ranks: Ranks, family: str) -> None:
    wanted = train(family)
    towers = [gradient for name, gradient in wanted[1].items() if "vis" in name or "tower" in name]
    assert family == "Emu3" or any(float(gradient.norm()) > 0 for gradient in towers), "a tower learns"
    size = 2 if row_of(seeing_class(family)).images == "all" else 3  # the table of coverage has two for all
    assert_equal(ranks(size).run(on_ranks, family), wanted)


def test_every_family_that_is_served_is_compared() -> None:
    rows = {name.removesuffix("ForConditionalGeneration"): row for name, row in CLASSES.items()}
    assert sorted(name for name, row in rows.items() if row.images) == sorted(FAMILIES)
    assert sorted(name for name, row in rows.items() if row.videos) == sorted(WITH_VIDEO)


@pytest.mark.parametrize("family", [pytest.param(n, marks=[pytest.mark.full] * (n not in WATCHED)) for n in WITH_VIDEO])
def test_videos_are_exact(ranks: Ranks, family: str) -> None:
    assert_equal(ranks(3).run(on_ranks, family, "video"), train(family, "video"))


@pytest.mark.parametrize(
    ("family", "change"),
    [
        *(("Qwen2_5_VL", "padded"), ("Qwen3VL", "text"), ("LlavaOnevision", "padded")),
        *(pytest.param(n, "text", marks=pytest.mark.full) for n in ("Qwen2_5_VL", "LlavaOnevision")),
        pytest.param("Qwen3VL", "padded", marks=pytest.mark.full),
    ],
)
def test_batches_of_other_kinds_are_exact(ranks: Ranks, family: str, change: str) -> None:
    assert_equal(ranks(2).run(on_ranks, family, change), train(family, change))


@pytest.mark.parametrize("family", ["Qwen3VL", "Mistral3"])
def test_less_memory_changes_nothing(ranks: Ranks, family: str) -> None:
    wanted = train(family, "checkpointed")
    for settings in ({}, OFFLOADED):
        assert_equal(ranks(2).run(checkpointed, family, settings), wanted, 1e-5)  # norms in fp32


def gathered(rank: int, size: int, family: str) -> int:
    with mock.patch.object(towers, "all_gather", side_effect=all_gather) as gathers:
        models.patch(seeing_model(family))(**seeing_batch(family))
    return gathers.call_count


def test_layers_of_a_tower_are_gathered_together(ranks: Ranks) -> None:
    assert ranks(2).run(gathered, "Qwen3VL") == ranks(2).run(gathered, "Qwen2_5_VL")


def test_towers_do_not_say_how_queries_are_scaled() -> None:
    with mock.patch.object(shared_beginnings, "scales_by_place", return_value=False) as asked:
        model = seeing_model("Llava")
        assert not shared_beginnings.by_place(ModelView(model))
    inner = set(model.model.vision_tower.modules())
    assert not any(call.args[0] in inner for call in asked.call_args_list)


def test_one_process_is_exact_too() -> None:
    assert_equal([train("Qwen3VL", patched=True)], train("Qwen3VL"))


def without_rows(inputs: Mapping[str, Any], *others: Any) -> dict[str, Any]:
    """Rows of the first layers, those of other ranks' tokens."""
    part = select_rows(inputs, *others)
    if rows := part.get("deepstack_visual_embeds"):
        part["deepstack_visual_embeds"] = [row.roll(1, 0) for row in rows]
    return part


def whole_first(inputs: Mapping[str, Any], layout: Any, rank: int, *others: Any) -> dict[str, Any]:
    """Embeddings as if they were cut before images were merged: those of images are gone on all ranks but the first."""
    part = cutting.cut_inputs(inputs, layout, rank, *others)
    if rank and "inputs_embeds" in part:
        embeds = part["inputs_embeds"]
        part["inputs_embeds"] = embeds.detach() + 0 * embeds
    return part


def own_part(tensor: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
    """A gather whose gradient is that of this rank alone."""
    gathered = all_gather(tensor.detach(), group)
    return tuple(tensor if rank == group.rank else other for rank, other in enumerate(gathered))


BROKEN = {
    "select_rows": (cutting, without_rows, "Qwen3VL"),
    "cut_inputs": (tokens, whole_first, "Llava"),
    "all_gather": (towers, own_part, "Qwen2_5_VL"),
}


def broken(rank: int, size: int, family: str, name: str) -> Result:
    with mock.patch.object(BROKEN[name][0], name, BROKEN[name][1]):
        return train(family, patched=True)


@pytest.mark.parametrize(("family", "name"), [(broken[2], name) for name, broken in BROKEN.items()])
def test_what_is_cut_wrongly_is_seen(ranks: Ranks, family: str, name: str) -> None:
    with pytest.raises(AssertionError):
        assert_equal(ranks(3).run(broken, family, name), train(family))


def runs_of_towers(rank: int, size: int, family: str, images: bool, **more: Any) -> tuple[list[int], float]:
    """How many rows of pixels this rank's tower is given in a pass, and the norm of its gradients."""
    model, batch = models.patch(seeing_model(family)), seeing_batch(family)
    if not images:
        batch = {"input_ids": batch["input_ids"] % 50, "labels": batch["labels"]}
    tower = next(
        part for name, part in model.model.named_children() if name in ("visual", "vision_tower", "vision_model")
    )
    given: list[int] = []
    tower.register_forward_pre_hook(
        lambda _, args, kwargs: given.append(len((*args, *kwargs.values())[0])), with_kwargs=True
    )
    model(**batch, **more).loss.backward()
    norms = [float(weight.grad.norm()) for weight in tower.parameters() if weight.grad is not None]
    return given, sum(norms)


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        *(("Qwen2_5_VL", ([16], [16], [24])), ("Llava", ([1], [1], [1])), ("DeepseekVLHybrid", ([1], [1], [1]))),
        *(pytest.param(n, ([16], [16], [24]), marks=pytest.mark.full) for n in ("HunYuanVL", "VideoLlama3")),
    ],
)
def test_ranks_share_the_images(ranks: Ranks, family: str, rows: tuple[list[int], ...]) -> None:
    """A second rank, for which there is none, runs the smallest image for nothing."""
    found = ranks(3).run(runs_of_towers, family, True)
    assert [given for given, _ in found] == list(rows)
    assert [norm > 0 for _, norm in found] == [True, False, True]
    assert [given for given, _ in ranks(3).run(runs_of_towers, family, False)] == [[], [], []]


def with_more(rank: int, size: int, family: str) -> list[list[int]]:
    bounds = torch.tensor([0, 31, 53], dtype=torch.int32)
    packed = {**dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds), "max_length_q": 31, "max_length_k": 31}
    return [
        runs_of_towers(rank, size, family, True, **more)[0]
        for more in (packed, {"num_items_in_batch": torch.tensor(49)})
    ]


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL"])
def test_what_wrappers_hand_on_to_towers_changes_no_share(ranks: Ranks, family: str) -> None:
    assert ranks(2).run(with_more, family) == [[[16], [16]], [[24], [24]]]


def too_few(rank: int, size: int) -> None:
    model, batch = models.patch(seeing_model("Qwen3VL")), seeing_batch("Qwen3VL")
    model(**batch | {"pixel_values": batch["pixel_values"][1:]})


def test_grids_count_the_rows_of_pixels(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(too_few)
    sentence = r"grids of images \[\[1, 4, 4\], \[1, 4, 6\]\] count 40 patches, and there are 39"
    assert all(pytest.RaisesExc(BatchError, match=sentence).matches(error) for error in caught.value.errors)


def test_images_are_shared_by_what_they_cost() -> None:
    assert towers.shares_of([3, 9, 4, 5, 1], 2) == [slice(0, 2), slice(2, 5)]
    assert towers.shares_of([7], 3) == [slice(0, 0), slice(0, 1), slice(1, 1)]
    assert towers.shares_of([1] * 5, 2) == [slice(0, 2), slice(2, 5)]
    assert towers.shares_of([0, 0], 2) == [slice(0, 2), slice(2, 2)]
    assert towers.shares_of([1, 0], 3) == [slice(0, 0), slice(0, 1), slice(1, 2)]


def sharded(rank: int, size: int, family: str) -> Result:
    """FSDP2 shards the layers of the language model and of the tower, and the rest."""
    model, batch = seeing_model(family), seeing_batch(family)
    if size > 1:
        models.patch(model)
        inner = model.model
        blocks = inner.visual.blocks if hasattr(inner, "visual") else inner.vision_tower.encoder.layers
        for module in (*inner.language_model.layers, *blocks, model):
            fully_shard(module)
    return loss_and_gradients(model, batch)


@pytest.mark.parametrize("family", ["Qwen3VL", "Llava"])
def test_weights_may_be_sharded(ranks: Ranks, family: str) -> None:
    """A rank has no image, and gathers the tower's weights as the others do."""
    assert_equal(ranks(3).run(sharded, family), sharded(0, 1, family))


def unlike(rank: int, size: int, change: str) -> None:
    """A pass for which one rank has another image, or none."""
    model, batch = models.patch(seeing_model("Qwen3VL")), seeing_batch("Qwen3VL")
    if change == "features":
        encoded = model.model.get_image_features(batch.pop("pixel_values"), batch.pop("image_grid_thw"))
        encoded.pooler_output = [features + rank for features in encoded.pooler_output]
        batch["position_ids"] = torch.arange(53)[None]
        batch["mm_encoder_outputs"] = {"image": encoded}
    if change == "swapped":
        batch["image_grid_thw"] = torch.tensor([[1, 4, 6], [1, 6, 4]] if rank else [[1, 6, 4], [1, 4, 6]])
        batch["pixel_values"] = torch.ones(48, 96, dtype=torch.float64)
    if rank == 1 and change == "other":
        batch["pixel_values"][0, 0] += 1
    if rank == 1 and change == "none":
        batch["input_ids"] %= 50
        del batch["pixel_values"], batch["image_grid_thw"], batch["mm_token_type_ids"]
    model(**batch)


@pytest.mark.parametrize(
    ("change", "sentence"), [("other", "content"), ("none", "images"), ("features", "content"), ("swapped", "content")]
)
def test_all_ranks_need_the_same_images(ranks: Ranks, change: str, sentence: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(unlike, change)
    assert all(isinstance(error, hf_burst.errors.BurstError) for error in caught.value.errors)
    assert all(sentence in str(error) for error in caught.value.errors)


def dropping(rank: int, size: int) -> None:
    model = models.patch(seeing_model("SmolVLM"))
    tower = model.model.vision_model
    tower.encoder.layers[0].self_attn.dropout = 0.1  # as `attention_dropout` of its config sets
    batch = seeing_batch("SmolVLM")
    tower.eval()
    model(**batch)
    tower.train()
    model(**{key: batch[key] % 50 for key in ("input_ids", "labels")})
    model(**batch)


def test_towers_that_drop_at_random_are_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(dropping)
    sentence = r"The tower of SmolVLMModel trains with dropout=0\.1"
    assert all(pytest.RaisesExc(UnsupportedModelError, match=sentence).matches(error) for error in caught.value.errors)


@pytest.mark.parametrize("family", ["Llava", "Qwen2_5_VL", "Qwen3VL"])
def test_a_model_that_saw_images_generates(family: str) -> None:
    model, batch = seeing_model(family).float().eval(), seeing_batch(family)
    del batch["labels"]
    batch["pixel_values"] = batch["pixel_values"].float()
    options = {"max_new_tokens": 4, "do_sample": False}
    wanted = model.generate(**batch, **options)
    assert torch.equal(models.patch(model).generate(**batch, **options), wanted)


def test_videos_of_other_families_are_refused() -> None:
    model, batch = models.patch(seeing_model("Kimi_K25")), seeing_batch("Kimi_K25")
    with pytest.raises(BatchError, match=r"holds pixel_values, image_grid_thw, pixel_values_videos.* text and images"):
        model(**batch, pixel_values_videos=torch.zeros(1, 2, 3, 16, 16))


@pytest.mark.parametrize("argument", ["input_features", "audio_feature_lengths"])
def test_sound_is_refused_by_families_that_see(argument: str) -> None:
    model, batch = models.patch(seeing_model("Cosmos3Omni")), seeing_batch("Cosmos3Omni")
    with pytest.raises(BatchError, match=f"holds .*{argument}.* text, images and videos are"):
        model(**batch, **{argument: torch.ones(1, 8)})


def mixed_groups(rank: int, size: int, other: str) -> None:
    """Two groups of two ranks, over which FSDP2 shards the tower; the second has text alone, or no images."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = seeing_model("Qwen3VL")
    hf_burst.patch_model(model, group=mesh["cp"].get_group())
    for module in (*model.model.visual.blocks, model):
        fully_shard(module, mesh=mesh._flatten("all"))
    batch = seeing_batch("Qwen3VL", "video" if other == "video" else "images")
    if rank >= 2 and other == "text":
        batch = {key: batch[key] % 50 for key in ("input_ids", "labels")}
    if rank >= 2 and other == "video":
        del batch["pixel_values"], batch["image_grid_thw"]
    model(**batch)


@pytest.mark.parametrize("other", ["text", "video"])
def test_groups_with_and_without_images_are_an_error_where_they_share_a_tower(ranks: Ranks, other: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(4).run(mixed_groups, other)
    assert all("Some groups of ranks have images" in str(error) for error in caught.value.errors)


def test_the_attention_of_a_tower_that_was_replaced_stays() -> None:
    model, other = seeing_model("Llava"), seeing_model("Llava")
    model.model.vision_tower = other.model.vision_tower
    other.set_attn_implementation({"vision_config": "eager"})
    models.patch(model)
    assert model.model.vision_tower.config._attn_implementation == "eager"
    model(**seeing_batch("Llava"))
    hf_burst.unpatch_model(model)
    assert model.model.vision_tower.config._attn_implementation == "eager"


def test_attention_of_towers_stays_what_it_was() -> None:
    model = seeing_model("Llava")
    model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    models.patch(model)
    assert model.config.vision_config._attn_implementation == "eager"
    assert model.config.text_config._attn_implementation == "hf_burst"
    hf_burst.unpatch_model(model)
    assert model.config.vision_config._attn_implementation == "eager"
    assert model.config.text_config._attn_implementation == "sdpa"


def without_pixels(rank: int, size: int, family: str, own: int) -> None:
    """A batch of text, with pixels of no image on the ranks from `own` on."""
    batch, seen = seeing_batch(family, "text"), seeing_batch(family, "one image")
    if rank >= own:
        batch |= {key: value[:0] for key, value in seen.items() if key not in batch}
    models.patch(seeing_model(family))(**batch)


@pytest.mark.parametrize("family", ["Qwen3VL", "Mistral3", "Llava"])
def test_pixels_of_no_image_are_refused(ranks: Ranks, family: str) -> None:
    sentence = "holds pixels of no image. Leave them out"
    with pytest.raises(BatchError, match=sentence):
        without_pixels(0, 1, family, 0)
    for own in (0, 1):
        with pytest.raises(RankError, match=sentence) as caught:
            ranks(2).run(without_pixels, family, own)
        assert all(isinstance(error, BurstError) for error in caught.value.errors)


def rank_ends(rank: int, size: int, where: str) -> None:
    """A rank that ends within a tower, or within a layer behind all attention."""
    model = models.patch(seeing_model("Qwen3VL")).eval()
    model(**seeing_batch("Qwen3VL", "text"))
    if rank == 1:
        model.get_submodule(where).register_forward_pre_hook(lambda *given: os._exit(1))
    model(**seeing_batch("Qwen3VL", "images"))


@pytest.mark.parametrize("where", ["model.visual", pytest.param("lm_head", marks=pytest.mark.slow)])
def test_a_rank_that_ends_in_a_tower_or_layer_is_named(where: str) -> None:
    pool = RankPool(2)
    with pytest.raises(RankError) as caught:
        pool.run(rank_ends, where)
    pool.close()
    assert isinstance(caught.value.errors[0], LostRankError)
    assert "Nothing was heard of rank 1" in str(caught.value.errors[0])
