"""Memory of towers as tensors take it, beside the plan's."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

import hf_burst
from hf_burst.cli import main
from hf_burst.hf.models.model_size import model_size
from hf_burst.hf.parts.memory import MemoryRule
from hf_burst.sizing.memory import memory_of_step
from hf_burst.sizing.model import ModelSize, Training
from hf_burst.sizing.towers import kept_by_towers, tower_products
from tests.hf.test_patch import part_of
from tests.sizing.test_peak_memory import ON_CPU, bytes_of_step
from tests.support import models
from tests.support.ranks import RankPool
from tests.support.small_gpu import room_for, small_gpu
from tests.support.tiny_pictures import Batch, seeing_batch
from tests.support.tiny_seeing import IMAGE, seeing_model

Ranks = Callable[[int], RankPool]
IMAGES, SIDE, LENGTH = 4, 16, 512  # images of so many patches a side
_TEXT = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
_DEPTH, _WIDE, _INNER = 6, 128, 512


def made(name: str) -> tuple[PreTrainedModel, Batch, int]:
    """A model with a large tower, a batch of four images for it, and the tokens of an image."""
    patches = SIDE**2
    if name == "qwen":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
        tower = {"depth": _DEPTH, "hidden_size": _WIDE, "intermediate_size": _INNER, "num_heads": 4, "patch_size": 4}
        tower |= {"out_hidden_size": 64, "fullatt_block_indexes": [*range(_DEPTH)], "window_size": 32}
        kind = transformers.Qwen2_5_VLForConditionalGeneration
        config = kind.config_class(
            text_config={**_TEXT, "rope_parameters": rope}, vision_config=tower, image_token_id=60
        )
        tokens = patches // 4
        inputs = {"pixel_values": torch.randn(IMAGES * patches, 96, dtype=torch.bfloat16)}
        inputs |= {"image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * IMAGES)}
    else:
        tower = {"model_type": "siglip_vision_model", "hidden_size": _WIDE, "intermediate_size": _INNER}
        tower |= {"num_hidden_layers": _DEPTH, "num_attention_heads": 4, "image_size": 4 * SIDE, "patch_size": 4}
        kind = transformers.LlavaForConditionalGeneration
        config = kind.config_class(
            text_config={"model_type": "llama", **_TEXT},
            vision_config={**tower, "vision_use_head": False},
            **{"image_token_index": 60, "vision_feature_select_strategy": "full", "image_seq_length": patches},
            vision_feature_layer=-1,
        )
        tokens = patches
        inputs = {"pixel_values": torch.randn(IMAGES, 3, 4 * SIDE, 4 * SIDE, dtype=torch.bfloat16)}
    torch.manual_seed(0)
    model = kind(config).bfloat16().train()
    ids = torch.randint(1, 50, (1, LENGTH + IMAGES * tokens))
    for image in range(IMAGES):
        ids[0, 9 + image * (tokens + 3) :][:tokens] = 60
    batch = {"input_ids": ids, "labels": ids.clone(), **inputs}
    if name == "qwen":
        batch["mm_token_type_ids"] = (ids == 60).long()
    return model, batch, tokens


def measured(name: str, frozen: bool, checkpointing: bool) -> tuple[int, int]:
    """Bytes kept behind the forward pass, and the most, beside the weights."""
    model, batch, _ = made(name)
    if frozen:
        model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)
        model.get_output_embeddings().requires_grad_(True)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()  # as trainers do with adapters
    return bytes_of_step(model, batch, {})


def of_rank(rank: int, size: int, name: str) -> int:
    """Bytes that a tower keeps behind the forward pass, on a rank."""
    return measured(name, False, False)[0] - measured(name, True, False)[0]


def planned(name: str, frozen: bool, checkpointing: bool, ranks: int = 1) -> tuple[ModelSize, Training]:
    model, batch, tokens = made(name)
    how: dict[str, Any] = {"sharded": "ddp", "fused": False, "checkpointing": checkpointing, "frozen_towers": frozen}
    training = Training(batch["input_ids"].shape[1], ranks, ranks, images=IMAGES, image_tokens=tokens, **how)
    return model_size(type(model), model.config), training


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        *(("qwen", False), ("llava", True)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("qwen", True), ("llava", False))),
    ],
)
def test_what_towers_take_is_as_planned(name: str, checkpointing: bool) -> None:
    frozen, trained = (measured(name, own, checkpointing) for own in (True, False))
    size, training = planned(name, False, checkpointing)
    kept = kept_by_towers(size, training)
    # beside checkpoints, projectors weigh more, of which each family has its own
    assert kept == pytest.approx(trained[0] - frozen[0], rel=0.3 if checkpointing else 0.1)
    assert size.tower is not None
    assert kept > 2 * size.tower.layers * size.tower.hidden * IMAGES * SIDE**2
    for peak, own in ((frozen[1], True), (trained[1], False)):
        moments = memory_of_step(*planned(name, own, checkpointing), ON_CPU)
        most = max(moments, key=lambda moment: moment.total)
        assert 0.9 * peak < most.total - most.held < 1.6 * peak, most


@pytest.mark.parametrize("name", [pytest.param("qwen", marks=pytest.mark.full), "llava"])
def test_ranks_keep_what_they_encode(ranks: Ranks, name: str) -> None:
    for kept in ranks(2).run(of_rank, name):
        assert kept == pytest.approx(kept_by_towers(*planned(name, False, False, 2)), rel=0.1)
    assert 2 * kept_by_towers(*planned(name, False, False, 2)) == kept_by_towers(*planned(name, False, False))
    assert kept_by_towers(*planned(name, False, False, 3)) == kept_by_towers(*planned(name, False, False, 2))


def of_image(family: str) -> tuple[float, float]:
    """How many patches become a token: by the rule, and as the first layer of the tower is called."""
    model, seen = seeing_model(family), list[int]()
    size = model_size(type(model), model.config).tower
    assert size is not None
    lists = [module for path, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    layers = max((each for each in lists if _width(each[0]) == size.hidden and len(each) == size.layers), key=len)
    layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(next(v for v in (*args, *kwargs.values()) if v is not None).numel()),
        with_kwargs=True,
    )
    batch = seeing_batch(family)
    with torch.no_grad():
        model(**batch)
    return size.patches, sum(seen) / size.hidden / int((batch["input_ids"] == IMAGE).sum())


def _width(layer: torch.nn.Module) -> int:
    return min((module.in_features for module in layer.modules() if isinstance(module, torch.nn.Linear)), default=0)


@pytest.mark.parametrize(
    "family", ["AyaVision", "Gemma3", "Gemma4", "Glm4v", "Idefics3", "Kimi_K25", "LightOnOcr", "Qwen2_5_VL", "Qwen3_5"]
)
def test_patches_that_become_a_token(family: str) -> None:
    rule, found = of_image(family)
    assert rule == found


def test_towers_by_hand() -> None:
    size, training = planned("qwen", False, True, 2)
    tower, patches = size.tower, 2 * SIDE**2
    assert tower is not None
    assert (tower.layers, tower.hidden, tower.inner, tower.patches) == (_DEPTH, _WIDE, _INNER, 4)
    assert kept_by_towers(size, training) == 2 * patches * (_DEPTH + 4) * _WIDE
    assert tower_products(size, training) == 2 * 4 * patches * tower.weights
    assert training.trained(size) == size.weights
    adapted = replace(training, lora=8)
    assert kept_by_towers(size, adapted) == 0
    assert tower_products(size, adapted) == 2 * patches * tower.weights
    assert adapted.trained(size) == 8 * size.adapted
    assert replace(training, images=0, image_tokens=0).trained(size) == size.weights - size.unused


_SEES = ["plan", "--model", "Qwen3_5ForConditionalGeneration", "--length", "64k", "--gpus", "2", "--machine", "h100"]


def test_the_plan_counts_images(capsys: pytest.CaptureFixture[str]) -> None:
    def gib() -> float:
        lines = capsys.readouterr().out.splitlines()
        return float(next(line.split()[6] for line in lines if line.strip().startswith("2 x 1")))

    assert main([*_SEES, "--sharded", "fsdp2"]) == 0
    text = gib()
    assert main([*_SEES, "--images", "32", "--image-tokens", "1024"]) == 0
    printed = capsys.readouterr().out
    assert "32 images of 1,024 tokens among them, towers learn" in printed
    assert re.search(r"activations [\d.]+, towers [\d.]+", printed)
    with_images = next(line for line in printed.splitlines() if line.strip().startswith("2 x 1"))
    assert float(with_images.split()[6]) > text + 4
    assert main([*_SEES, "--images", "32", "--image-tokens", "1024", "--frozen-towers"]) == 0
    assert "towers do not learn" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--images", "3"], "images is 3 and image_tokens 0"),
        (["--image-tokens", "3"], "images is 0 and image_tokens 3"),
        (["--images", "-1", "--image-tokens", "4"], "images is -1"),
        (["--images", "65", "--image-tokens", "1024"], "more than the 65536 tokens of the sequence"),
        (
            ["--model", "llama-3-8b", "--images", "1", "--image-tokens", "4"],
            "of llama-3-8b no tower is known. Built-in shapes have none: give the folder",
        ),
        (["--model", "Ovis2ForConditionalGeneration", "--images", "1", "--image-tokens", "4"], "no tower is known"),
    ],
)
def test_images_that_cannot_be(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SEES, *words]) == 2
    assert said in capsys.readouterr().err


def with_images(sides: list[int], length: int = 384) -> Batch:
    """A batch of as many tokens, some of which stand for images of so many patches a side."""
    ids, start = torch.randint(1, 50, (1, length), generator=torch.Generator().manual_seed(1)), 3
    for side in sides:
        ids[0, start : start + side**2 // 4] = 60
        start += side**2 // 4 + 2
    batch = {"input_ids": ids, "labels": ids.clone(), "mm_token_type_ids": (ids == 60).long()}
    if not sides:
        return batch
    pixels = torch.randn(sum(side**2 for side in sides), 96, generator=torch.Generator().manual_seed(2))
    return batch | {
        "pixel_values": pixels.bfloat16(),
        "image_grid_thw": torch.tensor([[1, side, side] for side in sides]),
    }


def sizes_of(rank: int, size: int, batches: list[list[int]]) -> list[float]:
    """What the rule of memory="auto" counts of the images of each batch."""
    model, found = models.patch(made("qwen")[0]), []
    with small_gpu(2**40):
        for sides in batches:
            model(**with_images(sides)).loss.backward()
            found.append(part_of(model, MemoryRule).latest.size.seen)
    return found


SMALL, MANY, LARGE = [8, 8], [16, 16, 16, 8, 8], [32]  # two of 64 patches; three of 256 and two of 64; one of 1024


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_images_count_for_the_rank_that_encodes_the_most(ranks: Ranks, size: int) -> None:
    batches, row = [SMALL, MANY, [], LARGE], 96 * 2
    found = [sizes_of(0, 1, batches)] if size == 1 else ranks(size).run(sizes_of, batches)
    shares = [128, 896, 0, 1024] if size == 1 else [64, 512, 0, 1024]  # consecutive images
    assert found == [[share * row for share in shares]] * size


def groups_with_images(rank: int, size: int, room: float) -> list[hf_burst.Memory]:
    """The settings of two groups of ranks that share weights, of which one has more images."""
    model, _, _ = made("qwen")
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "cp"))
    models.patch(model, hf_burst.BurstConfig(memory="auto"), mesh)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in (*model.get_decoder().layers, model):
        fully_shard(layer, mesh=mesh._flatten("shards"))
    found = []
    with small_gpu(room):
        for sides in (SMALL, MANY if rank < size // 2 else SMALL, SMALL):
            model(**with_images(sides)).loss.backward()
            found.append(part_of(model, MemoryRule).latest.settings)
            model.zero_grad()
    return found


def test_groups_with_other_images_take_the_same_level(ranks: Ranks) -> None:
    room = room_for(0, made("qwen")[0], 384, ranks=2, groups=2) + 2 * 32 * 128 * 96 * 2
    first, *others = ranks(4).run(groups_with_images, room)
    assert all(own == first for own in others)
    assert first[0] == first[2] == hf_burst.Memory()
    assert first[1] != hf_burst.Memory()
