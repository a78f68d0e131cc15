"""`hf-burst plan`: predicts the time and memory of a training step, and the best division of the GPUs."""

import argparse
from collections.abc import Collection
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, get_args

from ..config import Memory
from ..errors import ConfigError, ShardingError
from ..plan import Mask, name_of
from ..plan.memory_levels import HOST_ROOM, SETTINGS, named
from ..sizing.fit import Fit, fit, longest
from ..sizing.gpus import DATA_SHEETS, Capacity, DataSheet, capacity_of, gpu_named
from ..sizing.memory import LOADING
from ..sizing.model import NF4, SCALES, ModelSize, Sharded, Training, Weights, rounded
from ..sizing.prompts import cached_bytes, longest_prompt, memory_of_prompt
from ..sizing.seconds import StepSeconds, estimate_seconds, step_flops
from ..sizing.shapes import NAMES, dense_model
from ..sizing.spread import Spread, spread_of
from .launch import launched
from .sequence import add_sequence, named_sequence, tokens

_OF_TRAINING = {field.name for field in fields(Training)}  # options have the names of its fields
_TIE = 0.01  # relative difference in speed below the accuracy of predictions
_PRECISION = {
    "bf16": "assumed: trained weights in bf16; accelerate's mixed_precision=bf16 keeps them in fp32 (--weights fp32)",
    "fp32": "assumed: trained weights in fp32, as accelerate's mixed_precision=bf16 keeps them (else --weights bf16)",
    "4bit": "assumed: adapters in fp32, as peft makes them; TRL's trainers hold them in bf16, which takes less",
}
_OF_ADAPTERS = {
    "bf16": "assumed: adapters in bf16; peft makes them in fp32 (--weights fp32)",
    "fp32": "assumed: adapters in fp32, as peft makes them (else --weights bf16)",
}
_LEGEND = (
    "burst_size GPUs share a sequence; each group has one of its own: groups that share less wait less for each other.",
    "With gradient_accumulation_steps=N a step takes N times these seconds. More than 4 GPUs: predicted, not measured.",
    "MFU: share of the GPU's peak. GiB: the most of a step. schedule: how the GPUs of a group exchange attention.",
    "settings: of hf_burst.Memory. Of speeds that differ by less than 1 %, the one of less memory is named.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--model",
        help="a name on the hub, a folder or config.json of a model, a class of Transformers, or without a network one "
        f"of {', '.join(NAMES)}",
    )
    add_sequence(parser)
    parser.add_argument(
        "--endings",
        type=tokens,
        nargs="+",
        default=[],
        metavar="TOKENS",
        help="lengths of texts that each continue the one of --length, such as the two answers of a pair",
    )
    parser.add_argument(
        "--reference",
        action="store_true",
        help="a model that does not learn reads all of it, too, as for DPO: with adapters the one without them",
    )
    parser.add_argument("--gpus", type=int, help="(default those of this host, or 8, also with --machine)")
    parser.add_argument("--machine", help=f"{', '.join(DATA_SHEETS)} (default the GPUs of this host, or h200)")
    parser.add_argument("--gpus-per-host", type=int, help="(default those of this host, or 8)")
    parser.add_argument(
        "--host-memory", type=float, help="GiB of host memory for each GPU (default this host's, or 128)"
    )
    adapters = parser.add_mutually_exclusive_group()
    rank: dict[str, Any] = {"type": int, "nargs": "?", "const": 16, "metavar": "RANK"}
    adapters.add_argument("--lora", **rank, help="adapters (rank 16 by default, peft's own is 8)")
    adapters.add_argument("--qlora", **rank, help="adapters on frozen weights of 4 bits")
    parser.add_argument("--weights", choices=("bf16", "fp32"), help="those that train (default bf16; of adapters fp32)")
    parser.add_argument(
        "--quantize-experts",
        dest="quantized_experts",
        action="store_true",
        help="experts are in 4 bits, too (hf_burst.Experts4bitConfig)",
    )
    parser.add_argument("--sharded", choices=get_args(Sharded), help="(default fsdp2; ddp with --qlora alone)")
    parser.add_argument(
        "--offload-weights",
        dest="offloaded_weights",
        action="store_true",
        help="FSDP2 keeps weights, gradients and optimizer on the host (fsdp_offload_params), also on one GPU",
    )
    chosen = "as in hf_burst.Memory; the others then have their defaults (by default the rule of memory='auto' chooses)"
    for name, default in vars(Memory()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), help=chosen)
    parser.add_argument("--images", type=int, default=0, help="images among the tokens of a sequence")
    parser.add_argument("--image-tokens", type=int, default=0, help="tokens that each of them takes")
    parser.add_argument("--frozen-towers", action="store_true", help="images are encoded by weights that do not learn")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false", help="keep all activations")
    parser.add_argument(
        "--expandable-segments",
        action="store_true",
        help="torch's allocator has PYTORCH_ALLOC_CONF=expandable_segments:True, as recipes set it",
    )
    parser.add_argument(
        "--plain-kernels",
        dest="fused",
        action="store_false",
        help="norms, rotary positions, SwiGLU and the loss without Liger",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def run(arguments: argparse.Namespace) -> int:
    """Prints the prediction on rank 0 of a launch; returns 0 if the training fits, else 1. Raises for impossible
    requests, which exit with 2."""
    if launched()[1]:
        return 0
    if not arguments.model:
        raise ConfigError("hf-burst plan needs --model. Which rank computes what is shown by hf-burst layout.")
    length, documents = named_sequence(arguments)
    if length is None:
        raise ConfigError("--model needs --length, the tokens of a sequence, or --documents.")
    mask = _mask(length, documents, arguments.endings)
    sheet, capacity, gpus = find_gpus(arguments)
    model, config = find_model(arguments.model, arguments.trust_remote_code)
    if arguments.images and model.tower is None:
        raise ConfigError(
            f"--images is {arguments.images}, and of {model.name} no tower is known. Built-in shapes have none: give "
            "the folder or config.json of the model. For a model that is not served with images, leave --images out."
        )
    if arguments.quantized_experts and not model.fused:
        raise ConfigError(f"{model.name} has no experts in tensors of three dimensions. Leave out --quantize-experts.")
    training = _training(arguments, mask, gpus)
    asked = any(getattr(arguments, name) is not None for name in SETTINGS)
    fixed = SETTINGS if asked else ()  # any setting of the user's fixes them all
    rows = divisions(model, training, sheet, capacity, fixed)
    fitting = [row for row in rows if row.fit.fits]
    fastest = max((row.tokens_per_second for row in fitting), default=0.0)
    alike = [row for row in fitting if row.tokens_per_second > (1 - _TIE) * fastest]
    best = min(alike, key=lambda row: row.fit.memory.total, default=None)
    lines = [
        *_assumptions(model, training, sheet, capacity),
        *_positions(config, mask),
        "",
        *_table(rows, best, sheet),
        *_LEGEND,
        "",
        *_details(best or rows[0], capacity),
    ]
    most = longest(model, rows[0].fit.training, capacity, fixed)
    if best is None:
        takes = [row.fit.memory for row in rows]
        loading = all(memory.moment == LOADING and memory.total > capacity.gpu_memory for memory in takes)
        less = ["GPUs of more memory" if loading else "more --gpus", *(["fewer tokens"] if most else [])]
        quantized = training.weights == "4bit"
        helping = {
            "--lora": not training.lora,
            "--qlora": not quantized,
            "--quantize-experts": quantized and model.fused and not training.quantized_experts,
            "--sharded fsdp2": training.gpus > 1 and training.shards == 1,
            "--offload-weights": training.sharded == "fsdp2" and not training.offloaded_weights and not loading,
        }
        less += [option for option, helps in helping.items() if helps]
        limits = f"{capacity.gpu_memory / 2**30:.1f} GiB and {HOST_ROOM:.0%} of the host's"
        lines.append(f"None fits into {limits} {capacity.host_memory / 2**30:.0f}. Give {' or '.join(less)}.")
    if len(mask.documents) == 2:
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or most
        beyond = f"; the model has {positions:,} positions, and more need rope_scaling" if most > positions else ""
        fits = f"Longest sequence that fits: {most:,} tokens, on all GPUs{beyond}."
        lines.append(fits if most else "No sequence fits on all GPUs together, however short.")
        if model.causal:
            lines += _prompts(model, rows[0].fit.training, capacity)
    print("\n".join(lines))
    return 0 if best else 1


def _mask(length: int, documents: tuple[int, ...], endings: list[int]) -> Mask:
    """Returns the requested sequence, with the texts that continue it; raises for impossible combinations."""
    if not endings:
        return Mask(length, documents=documents)
    if documents:
        raise ConfigError("--endings continue one text. Give its tokens by --length, and no --documents.")
    bounds = tuple(accumulate([length, *endings], initial=0))
    return Mask(bounds[-1], documents=bounds, parents=(-1, *[0] * len(endings)))


def _training(arguments: argparse.Namespace, mask: Mask, gpus: int) -> Training:
    option, rank = ("--lora", arguments.lora) if arguments.qlora is None else ("--qlora", arguments.qlora)
    if rank is not None and rank < 1:
        raise ConfigError(f"{option} is {rank}; give the rank of the adapters, at least 1.")
    if arguments.qlora is not None and arguments.weights == "bf16":
        raise ConfigError("--qlora has adapters in fp32. Leave out --weights bf16.")
    if arguments.images * arguments.image_tokens > mask.length:
        raise ConfigError(
            f"{arguments.images} images of {arguments.image_tokens} tokens are more than the {mask.length} tokens of "
            "the sequence, which has them among its own. Give a length that has room for them and the text."
        )
    if not arguments.checkpointing and (arguments.activation_offloading or (arguments.layers_per_checkpoint or 1) > 1):
        raise ConfigError(
            "--activation-offloading and --layers-per-checkpoint are for layers that checkpoint. Leave out "
            "--no-checkpointing."
        )
    weights: Weights = "4bit" if arguments.qlora else arguments.weights or ("fp32" if rank else "bf16")
    given = {name: value for name, value in vars(arguments).items() if name in _OF_TRAINING and value is not None}
    own: dict[str, Any] = {
        "length": mask.length,
        "gpus": gpus,
        "burst_size": gpus,
        "documents": mask.documents,
        "parents": mask.parents,
        "sharded": arguments.sharded or ("ddp" if arguments.qlora and not arguments.offloaded_weights else "fsdp2"),
        "weights": weights,
        "lora": rank or 0,
    }
    return Training(**given | own)


def find_model(name: str, trust_remote_code: bool) -> tuple[ModelSize, Any]:
    """Returns a model's sizes and config. Names of known shapes need no network, and most of them no torch."""
    if (known := dense_model(name)) is not None:
        return known
    from ..hf.models.model_size import model_size  # takes seconds to import

    target = find_class(name, trust_remote_code)
    size = model_size(target.model_class, target.config, name)
    if name == target.model_class.__name__:
        size = replace(size, name=f"{name} (default config of the class)")
    return size, target.config


def find_class(name: str, trust_remote_code: bool) -> Any:
    """Returns the class and config of a model. Names of known shapes need no network."""
    from ..check.run import find_target
    from ..hf.models.model_size import shape_named

    try:
        return find_target(shape_named(name) or name, trust_remote_code)
    except ConfigError as problem:
        raise ConfigError(f"{problem} Shapes that need no hub: {', '.join(NAMES)}.") from problem


def _positions(config: Any, mask: Mask) -> list[str]:
    from ..hf.models.positions import beyond_positions

    longest = mask.longest_text
    warning = beyond_positions(
        config,
        longest,
        what=f"WARNING: a text has {longest:,} tokens",
        setting="rope_scaling in a recipe, or rope_parameters in the config",
    )
    return [warning] if warning else []


def find_gpus(arguments: argparse.Namespace) -> tuple[DataSheet, Capacity, int]:
    """Returns the data sheet, capacity and number of the GPUs: the named ones, those of this host, or else H200s."""
    here = 0
    if not arguments.machine:
        import torch  # takes seconds

        here = torch.cuda.device_count()
    gpus = (here or 8) if arguments.gpus is None else arguments.gpus
    per_host = (here or 8) if arguments.gpus_per_host is None else arguments.gpus_per_host
    if min(gpus, per_host) < 1 or (gpus > per_host and gpus % per_host):
        raise ConfigError(f"--gpus is {gpus} and --gpus-per-host {per_host}; give at least 1, and one that divides.")
    sheet = gpu_named(torch.cuda.get_device_name(0) if here else arguments.machine or "h200")
    capacity = capacity_of(sheet, ranks_per_host=per_host)
    if here:
        capacity = capacity_here(per_host)
    if arguments.host_memory is not None:
        if not 0 <= arguments.host_memory < 2**30:
            raise ConfigError(f"--host-memory is {arguments.host_memory}; give the GiB of a host for each of its GPUs.")
        capacity = replace(capacity, host_memory=int(arguments.host_memory * 2**30))
    return sheet, capacity, gpus


def capacity_here(ranks_per_host: int) -> Capacity:
    """Returns what a step may take of the first GPU of this host."""
    import torch  # takes seconds

    from ..kernels.ffpa import FfpaKernel
    from ..layers.host_limits import gpus_of_host, host_memory

    device = torch.device("cuda", 0)
    share = host_memory()[0] // max(ranks_per_host, gpus_of_host(device))
    memory = torch.cuda.mem_get_info(device)[1] * torch.cuda.get_per_process_memory_fraction(device)
    return Capacity(int(memory), share, ranks_per_host, ffpa=FfpaKernel().unavailable(512, 512) is None)


class Division(NamedTuple):
    """A division of the GPUs into groups, with the settings that the rule chooses and its predicted seconds."""

    fit: Fit
    seconds: StepSeconds
    flops: float  # per GPU
    spread: Spread

    @property
    def tokens_per_second(self) -> float:
        """The tokens per second of one GPU."""
        return self.fit.training.tokens / self.seconds.total


def divisions(
    model: ModelSize, training: Training, sheet: DataSheet, capacity: Capacity, fixed: Collection[str]
) -> list[Division]:
    """Returns all divisions of the GPUs into groups that share a sequence, the largest groups first, with their cost
    and the settings that the rule chooses, except `fixed` ones."""
    rows = []
    for size in range(training.gpus, 0, -1):
        if training.gpus % size == 0:
            try:
                chosen = fit(model, replace(training, burst_size=size), capacity, fixed)
                how = chosen.training
                per_host = capacity.ranks_per_host
                own = sheet._replace(widest="ffpa") if capacity.ffpa else sheet
                seconds = estimate_seconds(model, how, own, per_host)
                rows.append(Division(chosen, seconds, step_flops(model, how), spread_of(model, how, per_host)))
            except ShardingError:  # too short for this number of ranks
                continue
    if not rows:
        raise ConfigError(f"--length {training.length} is too short for any of {training.gpus} GPUs.")
    return rows


def _assumptions(model: ModelSize, training: Training, sheet: DataSheet, capacity: Capacity) -> list[str]:
    what = f"all {training.weights}"
    if training.lora:
        base = "4bit" if training.weights == "4bit" else "bf16"
        what = f"{'bf16' if training.weights == 'bf16' else 'fp32'} adapters of rank {training.lora} on {base}"
    spread = training.sharded if training.gathers else "ddp"
    again = "layers checkpointed" if training.checkpointing else "nothing checkpointed"
    lines = [str(model)]
    if model.experts:
        lines.append(_experts(model, training))
    if training.images:
        towers = "towers learn" if training.learns_to_see else "towers do not learn"
        lines.append(f"{training.images} images of {training.image_tokens:,} tokens among them, {towers}")
    lines.append(f"{training.gpus} x {sheet.device}, {capacity.gpu_memory / 2**30:.1f} GiB; {sheet.rates}")
    lines.append(f"{training.length:,} tokens a sequence, {what} weights, AdamW, {spread}, {again}")
    if training.parents:
        endings = ", ".join(f"{stop - start:,}" for start, stop in pairwise(training.documents[1:]))
        once = f"continue the first {training.documents[1]:,} of them, which are computed once (share_prefixes=True)"
        lines.append(f"texts of {endings} tokens {once}")
    if training.reference:
        lines.append("a reference reads all of them, too, which does not count for MFU")
    if training.weights == "4bit" and training.gathers:
        lines.append("assumed: bnb_4bit_quant_storage is a dtype of floats, else FSDP2 leaves weights of 4 bits whole")
    if training.fused and not model.liger:
        lines.append("Liger 0.8.5 has no kernels for this model: torch computes its norms, rotary positions and MLPs")
    if training.offloaded_weights:
        lines.append(
            "weights, gradients and optimizer lie on the host; seconds of their copies and of AdamW there: not counted"
        )
    return [*lines, (_PRECISION | _OF_ADAPTERS if training.lora else _PRECISION)[training.weights]]


def _experts(model: ModelSize, training: Training) -> str:
    number = 2 if training.lora else training.number
    quantizes = training.weights == "4bit"
    plain = 0 if training.quantized_experts else model.fused if quantizes else model.experts
    dtype = "4bit" if not plain else "bf16" if number == 2 else "fp32"
    why = ": bitsandbytes makes 4 bits of linear layers alone (--quantize-experts)" if quantizes and plain else ""
    scales = 0.0 if training.offloaded_weights else SCALES * (model.experts - plain)  # whole on every GPU
    each = (number * plain + (NF4 - SCALES) * (model.experts - plain)) / training.shards + scales
    where = "of the host for each GPU" if training.offloaded_weights else "a GPU"
    return f"experts: {rounded(model.experts)} weights in {dtype}, {each / 2**30:.1f} GiB {where}{why}"


def _table(rows: list[Division], best: Division | None, sheet: DataSheet) -> list[str]:
    cells = [
        ["burst_size x groups", "seconds a step", "tokens/s a GPU", "MFU", "GiB a GPU", "schedule", "settings", ""]
    ]
    for row in rows:
        how = row.fit.training
        at_a_time = how.gpus // how.burst_size
        more = f", {at_a_time} sequences a step" if at_a_time > 1 else ""
        verdict = f"most tokens/s that fit, within 1 %{more}" if row is best else "" if row.fit.fits else "does not fit"
        cells.append(
            [
                f"{how.burst_size} x {at_a_time}",
                f"{row.seconds.total:.2f}",
                f"{row.tokens_per_second:,.0f}",
                f"{row.flops / row.seconds.total / sheet.peak:.0%}",
                f"{row.fit.memory.total / 2**30:.1f}",
                _schedule(row),
                named(how, "as it is"),
                verdict,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([*map(str.rjust, line[:-2], widths), *line[-2:]]).rstrip() for line in cells]


def _schedule(row: Division) -> str:
    ranks = row.fit.training.burst_size
    if ranks == 1:
        return "-"
    attention = name_of(row.spread.schedule, ranks) if row.seconds.attention else None
    return ", ".join(filter(None, [attention, row.spread.recurrence]))


def _details(row: Division, capacity: Capacity) -> list[str]:
    memory = row.fit.memory
    host = capacity.host_memory / 2**30
    offloaded = f"; {memory.host / 2**30:.2f} of the {host:.0f} of its host" if memory.host else ""
    return [
        f"burst_size {row.fit.training.burst_size}, seconds: {_listed(vars(row.seconds), 1.0)}",
        f"GiB, the most in {memory.moment}: {_listed(memory.items, 2**30)}{offloaded}",
    ]


def _prompts(model: ModelSize, training: Training, capacity: Capacity) -> list[str]:
    """Returns lines about the longest prompt that all GPUs can remember or generate from, and its memory."""
    most = longest_prompt(model, training, capacity)
    memory = memory_of_prompt(model, replace(training, length=max(most, training.burst_size)), capacity)
    each = sum(count * cached_bytes(kind) for _, kind, count in model.attentions) / 2**10
    fits = (
        f"Longest prompt (hf_burst.remember, generate): {most:,} tokens, on all GPUs, of {each:,.0f} KiB of keys each."
    )
    return [
        fits if most else "No prompt fits (hf_burst.remember, generate), however short.",
        f"GiB, without an optimizer: {_listed(memory.items, 2**30)}",
    ]


def _listed(values: dict[str, float], unit: float) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {value / unit:.2f}" for name, value in values.items() if value >= 0.005 * unit
    )
