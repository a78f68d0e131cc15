"""`hf-burst bench`: measures a training step on the GPUs of a launch, beside its limit and Transformers alone."""

import argparse
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..check.speed import Job, measure
from ..errors import ConfigError
from ..ranks.host import host_id
from .hosts import versions
from .launch import device_here, launched
from .plan import find_class
from .sequence import tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="as for hf-burst plan, such as llama-3.1-8b; weights are random")
    parser.add_argument("--length", required=True, type=tokens, help="tokens of the sequence that all GPUs share")
    parser.add_argument("--layers", type=int, help="fewer layers of the same width (default all)")
    parser.add_argument(
        "--lora", type=int, nargs="?", const=16, default=0, metavar="RANK", help="adapters (default none)"
    )
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="the file (default %(default)s)")
    parser.epilog = "Start it under accelerate launch or torchrun. After ten minutes no further step begins."


def run(arguments: argparse.Namespace) -> int:
    """Measures on all ranks; rank 0 writes the file and prints a row for others. Returns 0."""
    config = find_class(arguments.model, trust_remote_code=False).config
    values = config.to_dict()
    count = values.get("num_hidden_layers", 0)  # none for wrappers
    layers = count if arguments.layers is None else arguments.layers
    place = arguments.out.absolute()
    ConfigError.refuse(
        (arguments.length < 2, f"--length is {arguments.length}; give at least 2 tokens."),
        (arguments.lora < 0, f"--lora is {arguments.lora}; give a rank of at least 1, or leave it out."),
        (not 1 <= layers <= count, f"--layers is {layers}; give 1 to num_hidden_layers of a text model, here {count}."),
        (
            place.is_dir() or not os.access(place if place.exists() else place.parent, os.W_OK),
            f"--out {arguments.out} cannot be written; give a file in a folder that is there and can be written.",
        ),
    )
    fewer: dict[str, Any] = {
        key: kinds[:layers] for key, kinds in values.items() if isinstance(kinds, list) and len(kinds) == count
    }
    if differing := values.get("per_layer_config"):  # by the number of a layer
        fewer["per_layer_config"] = {at: own for at, own in differing.items() if int(at) < layers}
    config = type(config).from_dict({**values, **fewer, "num_hidden_layers": layers})
    (size, rank), device = launched(), device_here()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    job = Job(config, arguments.length, arguments.lora, device, size, time.monotonic() + 600)
    hosts = len(set(job.gather(host_id())))
    results = measure(job)
    if size > 1:
        dist.destroy_process_group()
    if rank == 0:
        ours = results["hf_burst"]
        share = results["limit"].get("seconds", 0.0) / ours["seconds"] or None
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        about = {"date": datetime.now(UTC).date().isoformat(), "model": arguments.model, "layers": layers}
        about |= {"weights": f"LoRA {job.lora}" if job.lora else "all", "length": job.length}
        about |= {"GPUs": size, "hosts": hosts, "hardware": gpu}
        written = json.dumps({**about, "versions": versions(), "share_of_limit": share, **results}, indent=1)
        arguments.out.write_text(written + "\n")
        speed = [each.get("reason") or f"{each['tokens_per_second_per_gpu']:,.0f}" for each in results.values()]
        row = about | {"s a step": f"{ours['seconds']:.3g}", "tokens/s a GPU": speed[0]}
        row |= {"GiB": ours["peak_gib"] and round(ours["peak_gib"], 1)}
        row |= {"of the limit": f"{100 * share:.0f} %" if share else speed[1], "Transformers alone": speed[2]}
        print(*(f"| {' | '.join(map(str, line))} |" for line in (row, ["---"] * len(row), row.values())), sep="\n")
    return 0
