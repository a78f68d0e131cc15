"""The losses of some training steps over all ranks beside those of one process that holds the whole sequence.

    torchrun --nproc-per-node 4 recipes/benchmarks/losses.py --shape llama-1b --length 8192 --out outputs/losses.json \\
        --picture outputs/losses.png
    torchrun --nproc-per-node 2 recipes/benchmarks/losses.py --device cpu --shape tiny --length 257

The same random weights are trained three times on the same sequences of Python's documentation, with bytes as tokens.
AdamW trains them; layers are checkpointed and gradients clipped.

1. One process trains exactly: in fp32 on GPUs, in fp64 on CPUs.
2. One process trains as usual: with bf16 autocast over fp32 weights on GPUs, in fp32 on CPUs.
3. All ranks train as usual, patched and sharded by FSDP2.

The first two run beside each other on two ranks. The distance between them is the effect of rounding on a loss.
"""

import argparse
import json
import os
import pydoc_data.topics
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

import hf_burst
from recipes.benchmarks.provenance import environment
from recipes.benchmarks.ranks import Ranks
from recipes.benchmarks.training import at_least
from recipes.benchmarks.training_job import SHAPES, checkpoint_layers, make_model

CLIP = 1.0


def sequences(length: int, steps: int) -> torch.Tensor:
    """`torch.LongTensor` of shape `(steps, length)`."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    if len(text) < length * steps:
        raise SystemExit(f"{steps} steps of {length} tokens need as many bytes of text; there are {len(text)}.")
    return torch.tensor(list(text[: length * steps])).view(steps, length)


def make_checkpointed(arguments: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The same weights on every rank and for every dtype."""
    model = make_model(arguments.shape, arguments.length, torch.float32, device).to(dtype)
    checkpoint_layers(model)
    return model


def train(model: PreTrainedModel, texts: torch.Tensor, rate: float, context: AbstractContextManager) -> dict[str, Any]:
    """Losses and gradient norms of a step on each text."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses, norms = [], []
    for text in texts.to(model.device):
        with context:
            loss = model(input_ids=text[None], labels=text[None]).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
    return {"losses": losses, "gradient_norms": norms}


def measure(arguments: argparse.Namespace, texts: torch.Tensor, ranks: Ranks) -> dict[str, Any]:
    """Trains in every way: losses and gradient norms by name."""
    exact, kept = (torch.float32, torch.float32) if ranks.cuda else (torch.float64, torch.float32)
    autocast = partial(torch.autocast, "cuda", torch.bfloat16) if ranks.cuda else nullcontext
    names = ("fp32", "bf16") if ranks.cuda else ("fp64", "fp32")
    alone = [(f"one process, {names[0]}", exact, nullcontext), (f"one process, {names[1]}", kept, autocast)]
    mine: dict[str, Any] = {}
    for index, (name, dtype, context) in enumerate(alone):
        if ranks.rank == index % ranks.size:
            model = make_checkpointed(arguments, dtype, ranks.device)
            mine[name] = train(model, texts, arguments.learning_rate, context())
            del model
    curves: dict[str, Any] = {}
    for of_rank in ranks.gather(mine):
        curves |= of_rank
    ranks.say("one process is done")
    model = make_checkpointed(arguments, kept, ranks.device)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    hf_burst.patch_model(model, hf_burst.BurstConfig(), mesh)
    curves[f"{ranks.size} processes, {names[1]}"] = train(model, texts, arguments.learning_rate, autocast())
    return curves


def differences(curves: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The largest distance of each curve from the exact one: of losses, and of gradient norms relative to them."""
    (_, exact), *approximate = curves.items()
    distances = {}
    for name, curve in approximate:
        losses = zip(curve["losses"], exact["losses"], strict=True)
        norms = zip(curve["gradient_norms"], exact["gradient_norms"], strict=True)
        distances[name] = {
            "loss": max(abs(loss - exact_loss) for loss, exact_loss in losses),
            "gradient_norm": max(abs(norm - exact_norm) / exact_norm for norm, exact_norm in norms),
        }
    return distances


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws the curves, and below them their distances from the exact one."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    (first, exact), *approximate = result["curves"].items()
    above.plot(range(1, len(exact["losses"]) + 1), exact["losses"], color="#999999", linewidth=5, label=first)
    for (name, curve), color, style in zip(approximate, ("#1f4e79", "#c8102e"), ("-", "--"), strict=True):
        steps = range(1, len(curve["losses"]) + 1)
        above.plot(steps, curve["losses"], color=color, linestyle=style, label=name)
        apart = [loss - exact_loss for loss, exact_loss in zip(curve["losses"], exact["losses"], strict=True)]
        below.plot(steps, apart, color=color, linestyle=style, marker="o", markersize=3)
    hardware = result["hardware"]
    above.set_title(
        f"{result['shape']}, {result['length']} tokens, {hardware['ranks']} x {hardware['device']}", fontsize=9
    )
    above.set_ylabel("loss of the step")
    above.legend(frameon=False, fontsize=8)
    below.axhline(0, color="#999999", linewidth=1)
    below.set_ylabel(f"minus that of\n{first}", fontsize=8)
    below.set_xlabel("optimizer step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--length", type=at_least(2), default=8192, help="tokens of a sequence")
    parser.add_argument("--steps", type=at_least(1), default=20, help="optimizer steps, each on a sequence of its own")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that ranks wait for each other")
    parser.add_argument("--commit", help="the commit to write down, if this is no git checkout")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    parser.add_argument("--picture", type=Path, help="where a picture of it goes")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it as so many processes: torchrun --nproc-per-node 2 recipes/benchmarks/losses.py ...")
    for path in filter(None, (arguments.out, arguments.picture)):
        if path.is_dir():
            parser.error(f"{path} is a folder; give a file")
    texts = sequences(arguments.length, arguments.steps)
    ranks = Ranks(arguments.device, arguments.timeout)
    torch.backends.cuda.matmul.allow_tf32 = False
    result = environment(ranks, [Path(sys.argv[0]).name, *sys.argv[1:]], arguments.commit)
    result |= {"shape": arguments.shape, "length": arguments.length, "learning_rate": arguments.learning_rate}
    result["curves"] = measure(arguments, texts, ranks)
    result["largest_differences"] = differences(result["curves"])
    if ranks.rank == 0:
        for path in filter(None, (arguments.out, arguments.picture)):
            path.parent.mkdir(parents=True, exist_ok=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        if arguments.picture is not None:
            draw(result, arguments.picture)
    ranks.say(json.dumps({name: curve["losses"] for name, curve in result["curves"].items()}))
    ranks.say(json.dumps(result["largest_differences"]))
    ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
