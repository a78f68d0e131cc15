"""A recurrent layer over ranks beside other packages and the limit without messages, interleaved in one run.

The layer is the gated DeltaNet of Qwen3.6-27B, with its projections and without. flash-linear-attention and
causal-conv1d compute, where they are installed. On 2 GPUs, and on two CPU processes to see that it works:

    torchrun --nproc-per-node 2 recipes/benchmarks/recurrent.py --out outputs/recurrent_2xH200.json
    torchrun --nproc-per-node 2 recipes/benchmarks/recurrent.py --device cpu --tokens 192 --check-tokens 128 \\
        --hidden 64 --key-heads 2 --value-heads 4 --head-dim 16 --dtype float32

The limit is the same layer on as many tokens of a rank, which it computes alone. Results are compared first, with fp32
on one device: an error above twice that of one device in the dtype of the benchmark is wrong. Then every contender is
called once a round, or some times in a row. The slowest rank counts, and medians are over the rounds.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from hf_burst import BurstConfig
from hf_burst.attention import ContextGroup, SequenceLayout
from hf_burst.config import Chunking
from hf_burst.hf.context import LaidTokens, LayerContext, ShardedPass, entered
from hf_burst.hf.models.recurrent import COUNTERPARTS, in_place_of_innermost
from hf_burst.plan.recurrence import Way
from hf_burst.recurrent import ReplayBuffer
from recipes.benchmarks.harness import at_least, begin, options_of, write
from recipes.benchmarks.measure import Effort, Measured, Run, measure_runs, relative_errors, verdict
from recipes.benchmarks.provenance import interquartile_range
from recipes.benchmarks.ranks import Ranks
from recipes.benchmarks.training_limits import rule_call

RULE, CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
TOLERANCE = 2.0  # times the error of one device
EXACT = 1e-5  # relative error of fp32, with which results are compared
Functions = dict[str, Callable[..., Any]]


@dataclass(frozen=True)
class Case:
    """A layer and its tokens, as one rank sees them."""

    length: int  # tokens of the whole sequence
    rank: int
    ranks: int  # that share the sequence
    device: torch.device  # where they lie
    dtype: torch.dtype  # of the layer and its inputs
    group: dist.ProcessGroup | None = None  # the contender's own process group; `None` for one process

    def layout(self, chunking: Chunking) -> SequenceLayout:
        return SequenceLayout.for_batch([(0, self.length)], self.ranks, chunking)


@dataclass
class Contender:
    """A way to compute the layer over ranks."""

    name: str  # what the result calls it; contenders do not share process groups
    functions: Callable[[Case], Functions]  # the functions that the layer calls in place of its own, for a case
    chunking: Chunking = "contiguous"  # how tokens lie over the ranks
    whole: bool = True  # whether results are those of the whole sequence
    failure: str = ""

    @property
    def family(self) -> str:
        return self.name


def own(way: Way, case: Case, chunking: Chunking, columns: bool = False) -> Functions:
    """Those of hf_burst. With `columns` states pass as where flash-linear-attention is not installed."""
    group = ContextGroup.from_mesh(case.group) if case.group is not None else ContextGroup(case.rank, case.ranks)
    layout = case.layout(chunking)
    call = ShardedPass(layout, layout.segments, group, BurstConfig(), LaidTokens(torch.empty(0)), way=way)
    context = LayerContext(call, ReplayBuffer())
    stock = {name: getattr(modeling_qwen3_5, name) for name in (RULE, CONVOLUTION)}
    if columns:
        stock[RULE] = lambda *tensors, function=stock[RULE], **options: function(*tensors, **options)
    return {name: partial(_run_in, context, COUNTERPARTS[name](stock[name])) for name in stock}


def _run_in(context: LayerContext, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with entered(context):
        return function(*args, **kwargs)


def cp_context(case: Case, chunking: Chunking) -> Functions:
    """Those of flash-linear-attention, with its context parallelism."""
    from fla.modules.convolution import causal_conv1d
    from fla.ops.cp import build_cp_context
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    bounds = torch.tensor([0, case.length], device=case.device)
    context = partial(build_cp_context, bounds, group=case.group, layout=chunking)
    for_rule, for_convolution = context(), context(conv1d_kernel_size=4)

    def convolve(x: Any, weight: Any, bias: Any = None, activation: Any = None, **_: Any) -> Any:
        rows = x.transpose(1, 2)
        return causal_conv1d(rows, weight, bias, activation=activation, cp_context=for_convolution)[0].transpose(1, 2)

    def rule(*tensors: Any, **options: Any) -> Any:
        kept = {name: options[name] for name in ("g", "beta", "use_qk_l2norm_in_kernel")}
        return chunk_gated_delta_rule(*tensors, **kept, cp_context=for_rule)

    return {RULE: rule, CONVOLUTION: convolve}


def ringmaster(case: Case) -> Functions:
    """Those of axolotl-ringmaster, which rebinds the functions of a layer."""
    from ringmaster.recurrent import wire_gated_delta

    mixer = modeling_qwen3_5.Qwen3_5GatedDeltaNet(_config(64, 2, 2, 16), 0)
    wire_gated_delta([mixer], case.group)
    function = mixer.forward.__func__
    while function.__globals__.get(RULE) is getattr(modeling_qwen3_5, RULE, None):  # until the copy it has made
        function = function.__wrapped__
    return {name: function.__globals__[name] for name in (RULE, CONVOLUTION)}


def contenders() -> list[Contender]:
    """All of them."""
    ways: tuple[Way, ...] = ("heads", "states")
    layouts: tuple[Chunking, ...] = ("contiguous", "zigzag")
    stock = {name: getattr(modeling_qwen3_5, name) for name in (RULE, CONVOLUTION)}
    limit = Contender("limit", lambda case: stock, whole=False)
    return [
        limit,
        *(Contender(f"hf_burst {way} {cut}", partial(own, way, chunking=cut), cut) for way in ways for cut in layouts),
        Contender("hf_burst columns zigzag", partial(own, "states", chunking="zigzag", columns=True), "zigzag"),
        *(Contender(f"fla cp_context {cut}", partial(cp_context, chunking=cut), cut) for cut in layouts),
        Contender("ringmaster", ringmaster),
    ]


def _config(hidden: int, key_heads: int, value_heads: int, head_dim: int) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        hidden_size=hidden,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
        num_hidden_layers=1,
    )


def make_mixer(arguments: argparse.Namespace, case: Case) -> Any:
    """The layer, equal on all ranks. Its states last: those of random weights would be forgotten within a shard."""
    torch.manual_seed(0)
    shape = (arguments.hidden, arguments.key_heads, arguments.value_heads, arguments.head_dim)
    mixer = modeling_qwen3_5.Qwen3_5GatedDeltaNet(_config(*shape), 0)
    torch.nn.init.uniform_(mixer.A_log, -9.0, -3.0)
    return mixer.to(case.device, case.dtype)


def with_functions(mixer: Any, functions: Functions) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a layer that calls other functions."""

    def rebind(inner: FunctionType) -> FunctionType:
        names = {**inner.__globals__, **functions}
        copy = FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__)
        copy.__kwdefaults__ = inner.__kwdefaults__
        return copy

    return MethodType(in_place_of_innermost(type(mixer).forward, rebind), mixer)


def whole_inputs(arguments: argparse.Namespace, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole sequence and the gradient of its output, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(1, case.length, arguments.hidden, generator=generator) for _ in range(2))
    return x.to(case.device, case.dtype), dout.to(case.device, case.dtype)


def check(arguments: argparse.Namespace, ranks: Ranks, every: Sequence[Contender]) -> Iterator[dict[str, Any]]:
    """Compares outputs and all gradients with fp32 on one device, relative in the Frobenius norm, and yields a verdict
    each."""
    case = _case(arguments, ranks, arguments.check_tokens, None)
    x, dout = whole_inputs(arguments, case)
    exact_mixer = make_mixer(arguments, case).float()
    fallbacks = {name: getattr(modeling_qwen3_5, name).__wrapped__ for name in (RULE, CONVOLUTION)}
    for name, function in fallbacks.items():
        fallbacks[name] = getattr(function, "__wrapped__", function)
    exact = _derivatives(exact_mixer, with_functions(exact_mixer, fallbacks), x.float(), dout.float())
    mixer = make_mixer(arguments, case)
    alone = relative_errors(_derivatives(mixer, mixer.forward, x, dout), exact)
    allowed = {name: TOLERANCE * max(error, EXACT) for name, error in alone.items()}
    yield {"contender": "one device", "errors": alone}

    def errors_of(functions: Functions, chunking: Chunking) -> dict[str, float]:
        layout, mixer = case.layout(chunking), make_mixer(arguments, case)
        own_x, own_dout = (layout.shard(tensor, ranks.rank).contiguous() for tensor in (x, dout))
        results = _derivatives(mixer, with_functions(mixer, functions), own_x, own_dout)
        for name, tensor in results.items():
            parts = _gathered(tensor, ranks)
            results[name] = layout.unshard(parts) if name in ("out", "dx") else torch.stack(parts).float().sum(0)
        return relative_errors(results, exact)

    for contender in every:
        if contender.whole:
            build = partial(contender.functions, replace(case, group=ranks.group(contender.name)))
            found = verdict(contender, ranks, build, partial(errors_of, chunking=contender.chunking), allowed)
            contender.failure = found["reason"]
            told = {name: found[name] for name in ("contender", "errors") if name in found}
            yield told | {"failure": contender.failure}


def _derivatives(mixer: Any, forward: Callable[..., torch.Tensor], x: torch.Tensor, dout: torch.Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    names, parameters = zip(*mixer.named_parameters(), strict=True)
    out = forward(leaf)
    gradients = torch.autograd.grad(out, [leaf, *parameters], dout)
    return {"out": out.detach(), **dict(zip(("dx", *names), gradients, strict=True))}


def _gathered(tensor: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
    return [shard.to(tensor.device) for shard in ranks.gather(tensor.cpu())]


def _case(arguments: argparse.Namespace, ranks: Ranks, tokens: int, group: dist.ProcessGroup | None) -> Case:
    dtype = getattr(torch, arguments.dtype)
    return Case(tokens * ranks.size, ranks.rank, ranks.size, ranks.device, dtype, group)


def mixer_run(arguments: argparse.Namespace, case: Case, contender: Contender) -> Run:
    """A call of the whole layer."""
    mixer, tokens = make_mixer(arguments, case), case.length // case.ranks
    forward = with_functions(mixer, contender.functions(case))
    x = torch.randn(1, tokens, arguments.hidden, device=case.device, dtype=case.dtype).requires_grad_()
    return Run(lambda: forward(x), [x, *mixer.parameters()], torch.randn_like(x))


def rule_run(arguments: argparse.Namespace, case: Case, contender: Contender) -> Run:
    """A call of the bare rule."""
    rule, keys = contender.functions(case)[RULE], (arguments.key_heads, arguments.head_dim)
    values = (arguments.value_heads, arguments.head_dim)
    run, leaves = rule_call(rule, keys, values, case.length // case.ranks, case.dtype, case.device)
    return Run(run, leaves, torch.randn_like(leaves[2]))


PARTS = {"mixer": mixer_run, "rule": rule_run}


def measure(
    arguments: argparse.Namespace, ranks: Ranks, every: Sequence[Contender], part: str, tokens: int
) -> list[dict[str, Any]]:
    """Times all contenders of a part of the layer, in turns."""

    def prepare(contender: Contender, group: dist.ProcessGroup | None) -> Run:
        return PARTS[part](arguments, _case(arguments, ranks, tokens, group), contender)

    effort = Effort(0, (arguments.rounds, arguments.rounds), 0.0, in_a_row=4)
    results = measure_runs([Measured(contender, partial(prepare, contender)) for contender in every], ranks, effort)
    for measured in results:
        measured.contender.failure = measured.reason
    return _rows([measured for measured in results if measured.status == "ok"], ranks, part, tokens)


def _rows(finished: Sequence[Measured], ranks: Ranks, part: str, tokens: int) -> list[dict[str, Any]]:
    peaks = ranks.largest([measured.peak_bytes or 0 for measured in finished])
    rows = []
    for measured, peak in zip(finished, peaks, strict=True):
        row: dict[str, Any] = {"part": part, "tokens_per_rank": tokens, "contender": measured.contender.name}
        for name, seconds in measured.seconds.items():
            row[f"{name}_ms"] = 1e3 * statistics.median(seconds)
            row[f"{name}_iqr_ms"] = 1e3 * interquartile_range(seconds)
        rows.append(row | {"peak_gib": peak / 2**30})
    limit = next(row["both_ms"] for row in rows if row["contender"] == "limit")
    for row in rows:
        row["share_of_limit"] = limit / row["both_ms"]
        ranks.say(
            f"  {part} {tokens} {row['contender']}: {row['forward_ms']:.2f} + {row['backward_ms']:.2f} ms, "
            f"{row['share_of_limit']:.0%} of the limit, {row['peak_gib']:.1f} GiB"
        )
    return rows


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--tokens", type=at_least(1), nargs="+", default=[8192, 32768, 131072], help="of a rank")
    parser.add_argument("--hidden", type=at_least(1), default=5120)
    parser.add_argument("--key-heads", type=at_least(1), default=16)
    parser.add_argument("--value-heads", type=at_least(1), default=48)
    parser.add_argument("--head-dim", type=at_least(1), default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--check-tokens", type=at_least(1), default=1024, help="of a rank, where results are compared")
    parser.add_argument("--rounds", type=at_least(1), default=10)
    parser.add_argument("--contenders", nargs="+", help="beginnings of names; all by default")
    arguments = parser.parse_args()
    ranks, result = begin(arguments)
    wanted = tuple(arguments.contenders or ("",))
    every = [contender for contender in contenders() if contender.name.startswith(("limit", *wanted))]
    result["checks"], result["results"] = [], []

    def tell() -> None:
        result["failures"] = {contender.name: contender.failure for contender in every if contender.failure}
        write(arguments.out, result, ranks)

    for checked in check(arguments, ranks, every):
        result["checks"].append(checked)
        tell()
    for tokens in arguments.tokens:
        for part in PARTS:
            running = [contender for contender in every if not contender.failure]
            result["results"] += measure(arguments, ranks, running, part, tokens)
            tell()
    ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
