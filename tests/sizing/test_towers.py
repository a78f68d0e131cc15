"""Memory of towers as tensors take it, beside the plan's."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from hf_burst.check.tiny_pictures import Batch, seeing_batch
from hf_burst.check.tiny_seeing import IMAGE, seeing_model
from hf_burst.cli import main
from hf_burst.hf.models.model_size import model_size
from hf_burst.sizing.memory import memory_of_step
from hf_burst.sizing.model import ModelSize, Training
from hf_burst.sizing.towers import kept_by_towers, tower_products
from tests.sizing.test_peak_memory import ON_CPU, bytes_of_step
from tests.support.ranks import RankPool

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


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", ["qwen", "llava"])
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


@pytest.mark.parametrize("name", ["qwen", "llava"])
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
        (["--model", "llama-3-8b", "--images", "1", "--image-tokens", "4"], "of llama-3-8b no tower is known"),
        (["--model", "Ovis2ForConditionalGeneration", "--images", "1", "--image-tokens", "4"], "no tower is known"),
    ],
)
def test_images_that_cannot_be(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SEES, *words]) == 2
    assert said in capsys.readouterr().err
