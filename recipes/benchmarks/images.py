"""LoRA steps of models that see, on a sequence half of which are images or a video.

    accelerate launch --multi_gpu --num_processes 2 --mixed_precision bf16 recipes/benchmarks/images.py \\
        --model qwen3.5-9b --images 32 --length 65536 --out outputs/images.json
    accelerate launch --num_processes 1 --mixed_precision bf16 recipes/benchmarks/images.py --model qwen3.5-9b \\
        --images 16 --length 32768 --out outputs/images.json
    ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes 2 recipes/benchmarks/images.py \\
        --model tiny-qwen --images 2 --length 64 --check-length 32

`Trainer` trains a model with random weights in bf16, whose language model has adapters, every layer checkpointed. A
step counts from its batch on. Its limit is the language model's products, attention and recurrent functions, as in
training.py, and the tower run on this rank's share of the images. Before, the gradients of the adapters of a model with
few layers are compared: on all ranks in bf16, and on one in bf16, with those on one in fp32. Each run adds a row to the
file `--out`. With `--profile`, one more step runs under torch's profiler; what is written is that of step_profile.py.
"""

import argparse
import gc
import json
import os
import statistics
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForImageTextToText, Trainer, TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

import hf_burst
from hf_burst.sizing import shapes
from recipes.benchmarks.fits import Measure, chosen_of, training_arguments
from recipes.benchmarks.harness import begin, file_to_write, options_of, rows_in, write
from recipes.benchmarks.ranks import Ranks
from recipes.benchmarks.step_profile import profiled, profiler_of
from recipes.benchmarks.training_job import LORA, SHAPES, random_model, rope
from recipes.benchmarks.training_limits import limits, parts_of_limits, seconds_of

Batch = dict[str, torch.Tensor]
# adapters of rank 16 on all linear layers of the language model, and of no tower
TARGETS = r".*language_model.*\.(" + "|".join(LORA) + ")"
_SMALL_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_SIGLIP = {"model_type": "siglip_vision_model", "patch_size": 14}
_MROPE = {**rope(1e7, 0.25)["rope_parameters"], "mrope_section": [11, 11, 10], "mrope_interleaved": True}
_IDS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3.5-9b": {
        "model_type": "qwen3_5",
        "text_config": {**shapes.SHAPES["qwen3.5-9b"], "rope_parameters": _MROPE},
        "vision_config": {"out_hidden_size": 4096},
        **_IDS,
    },
    "gemma-3-12b": {
        "model_type": "gemma3",
        "text_config": shapes.SHAPES["gemma-3-12b"],
        "vision_config": {
            **{**_SIGLIP, "image_size": 896, "num_hidden_layers": 27, "num_attention_heads": 16},
            **{"hidden_size": 1152, "intermediate_size": 4304},
        },
        "mm_tokens_per_image": 256,
        "image_token_index": 3,
    },
    "tiny-qwen": {
        "model_type": "qwen3_5",
        "text_config": {
            **SHAPES["tiny-hybrid"],
            "rope_parameters": {**_MROPE, "rope_theta": 1e4, "mrope_section": [1, 1, 0]},
        },
        "vision_config": _SMALL_TOWER,
        **_IDS,
    },
    "tiny-gemma": {
        "model_type": "gemma3",
        "text_config": {**SHAPES["tiny"], "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 16},
        "vision_config": {
            **{**_SIGLIP, "image_size": 56, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"hidden_size": 32, "intermediate_size": 48},
        },
        "mm_tokens_per_image": 4,
        "image_token_index": 3,
    },
}


def make_model(name: str, length: int, device: torch.device, layers: int | None = None) -> Any:
    """A model that sees, with the same random weights on every rank, in bf16 on GPUs."""
    text = {**MODELS[name]["text_config"], "max_position_embeddings": max(length, 4096), "use_cache": False}
    if layers is not None:
        text["num_hidden_layers"] = layers
    config = AutoConfig.for_model(**{**MODELS[name], "text_config": text})
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return random_model(AutoModelForImageTextToText, config, dtype, device)


def with_adapters(model: Any) -> Any:
    """Adapters that change what the model computes, so that all of them have a gradient."""
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=16, target_modules=TARGETS, init_lora_weights=False))


def make_batch(config: Any, length: int, images: int, frames: int) -> Batch:
    """Text with images, or a video's frames, at even distances; half of the tokens are theirs."""
    each = length // 2 // (images or frames // 2)
    ids = torch.randint(8, config.text_config.vocab_size, (1, length), generator=torch.Generator().manual_seed(length))
    kinds = torch.zeros_like(ids)
    pixels, token = visual(config, each, images, frames)
    if config.model_type == "gemma3":
        each, token = config.mm_tokens_per_image, config.image_token_index
    stride = length // (images or frames // 2)
    for place in range(stride // 4, length, stride):
        if config.model_type != "gemma3":
            ids[0, place - 1] = config.vision_start_token_id
        ids[0, place : place + each] = token
        kinds[0, place : place + each] = 2 if frames else 1
    name = "token_type_ids" if config.model_type == "gemma3" else "mm_token_type_ids"
    return {"input_ids": ids, "labels": ids.clone(), name: kinds, **pixels}


def visual(config: Any, each: int, images: int, frames: int) -> tuple[Batch, int]:
    """Noise in place of images or of one video, of so many tokens an image or pair of frames; and their token."""
    tower, generator = config.vision_config, torch.Generator().manual_seed(1)
    if config.model_type == "gemma3":
        return {"pixel_values": torch.randn(images, 3, tower.image_size, tower.image_size, generator=generator)}, 0
    merge = tower.spatial_merge_size
    side = int(each**0.5) * merge
    if (side // merge) ** 2 != each:
        raise SystemExit(f"{each} tokens an image, half of the sequence, are no square. Give other numbers.")
    grids = torch.tensor([[1, side, side]] * images if images else [[frames // 2, side, side]])
    patch = 3 * tower.temporal_patch_size * tower.patch_size**2
    pixels = torch.randn(int(grids.prod(1).sum()), patch, generator=generator)
    if images:
        return {"pixel_values": pixels, "image_grid_thw": grids}, config.image_token_id
    return {"pixel_values_videos": pixels, "video_grid_thw": grids}, config.video_token_id


def gradients(model: Any, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """Gradients of all adapters, in one row."""
    cuda = batch["input_ids"].is_cuda
    with torch.autocast("cuda", dtype, enabled=cuda and dtype != torch.float32):
        loss = model(**batch).loss
    loss.backward()
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    row = torch.cat([weight.grad.float().flatten() for weight in learned] + [loss.detach().float()[None]])
    for weight in learned:
        weight.grad = None
    return row


def errors(arguments: argparse.Namespace, ranks: Ranks) -> dict[str, float]:
    """Relative errors of the adapters' gradients, and of the loss, in bf16: of all ranks, and of one process."""
    length, device = arguments.check_length, ranks.device
    images = arguments.images * length // arguments.length
    frames = arguments.frames * length // arguments.length
    model = with_adapters(make_model(arguments.model, length, device, arguments.check_layers))
    batch = make_batch(model.config, length, images, frames)
    batch = {name: value.to(device) for name, value in batch.items()}
    one = gradients(model, batch, torch.bfloat16)
    hf_burst.patch_model(model, hf_burst.BurstConfig(gradients="manual"))
    shared = gradients(model, batch, torch.bfloat16)
    if ranks.size > 1:
        dist.all_reduce(shared[:-1])
        shared[:-1] /= ranks.size
    hf_burst.unpatch_model(model)
    exact = gradients(model.float(), batch, torch.float32)

    def error(row: torch.Tensor) -> tuple[float, float]:
        difference = row[:-1] - exact[:-1]
        return float(difference.norm() / exact[:-1].norm()), float((row[-1] - exact[-1]).abs() / exact[-1].abs())

    found = dict(zip(("gradients", "loss"), error(shared), strict=True))
    found |= dict(zip(("gradients of one process", "loss of one process"), error(one), strict=True))
    return found | {"tokens": length, "layers": arguments.check_layers}


class Profile(TrainerCallback):
    """Profiles the step behind so many, on the first rank."""

    def __init__(self, steps: int, ranks: Ranks) -> None:
        self.steps, self.first, self.profiler = steps, ranks.rank == 0, profiler_of(ranks)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.first and state.global_step == self.steps:
            self.profiler.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.first and state.global_step == self.steps + 1:
            self.profiler.stop()


def train(arguments: argparse.Namespace, args: Any, ranks: Ranks) -> tuple[Any, Batch, dict[str, Any]]:
    """Trains some steps; returns the model, the batch and what was measured."""
    base = make_model(arguments.model, arguments.length, args.device)
    model: Any = get_peft_model(base, LoraConfig(r=16, target_modules=TARGETS))
    hf_burst.patch_model(model, hf_burst.BurstConfig.from_dict(arguments.settings))
    batch = make_batch(model.config, arguments.length, arguments.images, arguments.frames)
    measure = Measure(ranks)
    profiling = Profile(arguments.steps, ranks) if arguments.profile is not None else None
    callbacks = [measure] if profiling is None else [measure, profiling]
    args.max_steps += len(callbacks) - 1
    rows: Any = [batch] * args.max_steps
    trainer = Trainer(model, args, train_dataset=rows, data_collator=itemgetter(0), callbacks=callbacks)
    try:
        trainer.train()
    finally:
        measure.watcher.end()
    found: dict[str, Any] = {"chosen": chosen_of(trainer.accelerator.unwrap_model(trainer.model))}
    if profiling is not None:
        last = measure.steps.pop()["seconds"]
        found["profile"] = profiled(profiling.profiler, last) if profiling.first else None
    found["steps"] = measure.on_all_ranks()
    return model.get_base_model(), batch, found


def tower_seconds(model: Any, batch: Batch, ranks: Ranks) -> float:
    """Seconds of the tower, frozen, on this rank's share of the images or frames."""
    video = "pixel_values_videos" in batch
    name, grid = ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
    pixels, inputs = batch[name], dict[str, torch.Tensor]()
    if grid in batch:
        whole = batch[grid]
        inputs[grid] = whole // torch.tensor([ranks.size, 1, 1]) if video else whole[: len(whole) // ranks.size]
        rows = int(inputs[grid].prod(1).sum())
    else:
        rows = len(pixels) // ranks.size
    inputs[name] = pixels[:rows].to(model.dtype)
    inputs = {key: value.to(ranks.device) for key, value in inputs.items()}
    encode = model.get_video_features if video else model.get_image_features
    with torch.no_grad():
        return seconds_of(lambda: encode(**inputs), ranks)


def read_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = options_of(__doc__, timeout_s=None)
    parser.add_argument("--model", required=True, choices=MODELS)
    parser.add_argument("--length", type=int, default=65536, help="tokens, half of them visual (default %(default)s)")
    parser.add_argument("--images", type=int, default=0, help="images in the sequence")
    parser.add_argument("--frames", type=int, default=0, help="or frames of one video")
    parser.add_argument("--steps", type=int, default=5, help="of which the first two do not count")
    parser.add_argument("--check-length", type=int, default=8192, help="tokens of the comparison; 0 for none")
    parser.add_argument("--check-layers", type=int, default=4, help="layers of the comparison (default %(default)s)")
    parser.add_argument("--settings", type=json.loads, default={}, help="of BurstConfig, as JSON")
    parser.add_argument("--folder", default="outputs/images", help="of the trainer")
    parser.add_argument("--profile", type=file_to_write, help="a JSON file for the profile of one more step")
    arguments = parser.parse_args()
    if bool(arguments.images) == bool(arguments.frames):
        parser.error("give --images or --frames")
    return arguments


def main() -> None:
    """Compares, trains, and writes a row."""
    arguments = read_arguments()
    gpus = int(os.environ.get("WORLD_SIZE", "1"))
    args = training_arguments(arguments, gpus)
    args.liger_kernel_config = {"layer_norm": False, "fused_linear_cross_entropy": False, "cross_entropy": False}
    ranks, row = begin(arguments, "model", "length", "images", "frames", "settings", device=args.device.type)
    if arguments.check_length:
        row["errors"] = errors(arguments, ranks)
        ranks.say(json.dumps(row["errors"]))
        gc.collect()
    before = rows_in(arguments.out)
    model, batch, measured = train(arguments, args, ranks)
    steps = measured["steps"]
    median = statistics.median(step["seconds"] for step in steps[2:] or steps)
    row |= {"chosen": measured["chosen"], "steps": steps, "median_s": median}
    if arguments.profile is not None:
        write(arguments.profile, row | {"profile": measured["profile"]}, ranks)
    write(arguments.out, [*before, row], ranks)  # the limits take minutes where kernels are tuned for them
    hf_burst.unpatch_model(model)
    gc.collect()
    if ranks.cuda:
        torch.cuda.empty_cache()
    decoder = model.model.language_model
    parts = parts_of_limits(decoder, ranks, arguments.length, lora=True)
    tower = tower_seconds(model, batch, ranks)
    bounds = {name: seconds + tower for name, seconds in limits(parts).items()}
    row |= {"parts_of_limits": parts, "tower_s": tower, "limits": bounds}
    row["share_of_limit"] = bounds["attention saved"] / median
    ranks.say(
        f"{median:.3f} s a step, {row['share_of_limit']:.1%} of {bounds['attention saved']:.3f} s, tower {tower:.3f} s"
    )
    write(arguments.out, [*before, row], ranks)


if __name__ == "__main__":
    main()
