"""Measures contenders: checks their results, warms them up, and calls them in turns, round after round.

The time of a call is that of its slowest rank.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from recipes.benchmarks.contenders import Attend, Case, Contender, Prepared
from recipes.benchmarks.native import exact_attention
from recipes.benchmarks.ranks import Ranks

Errors = dict[str, float]  # by the names of results
PASSES = ("forward", "backward", "both")
_INPUTS = ("q", "k", "v", "dout")
_CHECK_SEED = 20240314
# An error may be so many times that of the plain kernel. A missing block or gradient is a hundred times larger still.
_TOLERANCE = 8.0
_WARMUP_SHARE = 0.25
_ROW_S = 0.05  # seconds that calls in a row may take


def moment(cuda: bool) -> Any:
    """This moment: of the current GPU's stream, or of the host's clock."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, stop: Any) -> float:
    """Seconds between two moments, when the GPU has come to the second one."""
    if isinstance(stop, float):
        return float(stop - start)
    stop.synchronize()
    return float(start.elapsed_time(stop) / 1e3)


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    warmup: int  # calls of each contender before the first round; slow contenders have fewer, at least one
    rounds: tuple[int, int]  # fewest and most rounds
    seconds: float  # for all of it
    in_a_row: int = 1  # most calls that follow each other without a pause, as the layers of a model do
    warm: frozenset[str] = frozenset()  # names of contenders that have run before, at another length


class Run(NamedTuple):
    """What is timed."""

    forward: Callable[[], torch.Tensor]  # computes the output
    leaves: Sequence[torch.Tensor]  # what the output is derived by
    dout: torch.Tensor  # the gradient of the output
    # makes a context for calls, which is entered before the clock starts
    around: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass
class Measured:
    """The times of one contender in one case, or the reason why there are none."""

    contender: Any
    prepare: Callable[[dist.ProcessGroup | None], Run]
    status: str = "ok"
    reason: str = ""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int | None = None
    outside_bytes: int | None = None
    calls: int = 1  # in a row; the times are those of one call
    run: Run | None = None
    group: dist.ProcessGroup | None = None
    said: list[str] = field(default_factory=list)  # hf_burst's log of its choices

    def fail(self, status: str, reason: str) -> None:
        self.status, self.reason, self.run = status, reason, None


def check(contenders: Sequence[Contender], case: Case, ranks: Ranks) -> list[dict[str, Any]]:
    """Compares out, dq, dk and dv of every contender with attention in fp64, on equal inputs of a small length.

    Returns:
        `list[dict]`: For each contender its status (`"ok"`, `"wrong"`, `"unavailable"` or `"failed"`), the reason and
        hf_burst's log of its choices. Relative errors (Frobenius norm over a rank's part, worst rank) stand beside
        those of the plain kernel.
    """
    inputs = _whole_inputs(case)
    exact = exact_attention(*inputs, case.mask)
    plain, failure = ranks.attempt(lambda: _results(lambda q, k, v: case.native.attend(q, k, v, case.mask), *inputs))
    if plain is None:
        raise RuntimeError(f"The kernel {case.native.name} cannot compute {case}: {failure}")
    kernel, verdicts = relative_errors(plain, exact), []
    allowed = {name: _TOLERANCE * max(error, torch.finfo(case.dtype).eps) for name, error in kernel.items()}
    for contender in contenders:
        own = replace(case, group=ranks.group(contender.family))
        errors_of = partial(_own_errors, inputs=inputs, exact=exact)
        found = verdict(contender, ranks, partial(contender.build, own), errors_of, allowed)
        verdicts.append(found | {"kernel_errors": kernel} if "errors" in found else found)
    return verdicts


def verdict(
    contender: Any, ranks: Ranks, build: Callable[[], Any], errors_of: Callable[[Any], Errors], allowed: Errors
) -> dict[str, Any]:
    """Whether the errors of a contender, as it is built, are allowed on all ranks; or why it has none."""
    found: dict[str, Any] = {"contender": contender.name, "status": "ok", "reason": ""}
    built, failure = ranks.attempt(build)
    if built is None:
        found |= {"status": "unavailable", "reason": failure}
    else:
        with listening() as said:
            errors, failure = ranks.attempt(lambda: errors_of(built), contender.family)
        found |= {"said": said}
        if errors is None:
            found |= {"status": "failed", "reason": failure}
        else:
            found["errors"] = ranks.slowest(errors)
            wrong = {name: error for name, error in found["errors"].items() if not error <= allowed[name]}
            reason = ", ".join(
                f"error of {name} {error:.1e}, allowed {allowed[name]:.1e}" for name, error in wrong.items()
            )
            found |= {"status": "wrong", "reason": reason} if wrong else {}
    if found["status"] != "ok":
        ranks.say(f"  {contender.name} {found['status']}: {found['reason']}")
    return found


def measure(contenders: Sequence[Contender], case: Case, ranks: Ranks, effort: Effort) -> list[Measured]:
    """Times attention by every contender that can run, see [`measure_runs`]."""
    storage = _storage(case)

    def prepare(contender: Contender, group: dist.ProcessGroup | None) -> Run:
        return run_of(contender, replace(case, group=group), storage)

    return measure_runs([Measured(contender, partial(prepare, contender)) for contender in contenders], ranks, effort)


def run_of(contender: Contender, case: Case, storage: dict[str, torch.Tensor] | None = None) -> Run:
    """A contender on random numbers, or on those that all contenders share."""
    storage, prepared = storage or _storage(case), contender.build(case)
    *inputs, dout = (_placed(prepared, storage[name], case, name in ("q", "dout")) for name in _INPUTS)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    return Run(lambda: prepared.attend(*leaves), leaves, dout, prepared.around)


def measure_runs(results: list[Measured], ranks: Ranks, effort: Effort) -> list[Measured]:
    """Times every contender that can run, all of them in each round, in a rotating order.

    A call is a forward pass and its backward pass by autograd. Calls in a row are all forward passes, followed by all
    backward passes. All ranks start together, and the slowest rank counts.
    """
    start = time.perf_counter()
    for measured in results:
        _prepare(measured, ranks)
        if measured.run is not None:
            _first_calls(measured, ranks, measured.contender.name in effort.warm)
    running = [measured for measured in results if measured.run is not None]
    budget = max(effort.seconds, 0.0)
    firsts = [measured.seconds["both"][-1] for measured in running] or [1.0]
    fastest = min(ranks.largest(firsts))
    for measured in running:
        measured.calls = max(1, min(effort.in_a_row, int(_ROW_S / fastest)))
    _warm_up(running, ranks, effort.warmup, budget)
    running = [measured for measured in running if measured.run is not None]
    if not running:
        return results
    pace = [sum(measured.calls * measured.seconds["both"][-1] for measured in running), time.perf_counter() - start]
    once, spent = ranks.largest(pace)
    fewest, most = effort.rounds
    rounds = int(min(max((budget - spent) / once, fewest), most))
    ranks.say(f"  {rounds} rounds of {len(running)} contenders, about {rounds * once:.1f} s")
    for measured in running:
        measured.seconds = {name: [] for name in PASSES}
    for number in range(rounds):
        for measured in _order(running, number):
            if measured.run is not None:
                _call(measured, ranks)
    for measured in running:
        if measured.status == "ok":  # the slowest rank counts, call by call
            measured.seconds = {name: ranks.largest(times) for name, times in measured.seconds.items()}
    return results


def _prepare(measured: Measured, ranks: Ranks) -> None:
    """Prepares a contender for the current group of its family."""
    group = ranks.group(measured.contender.family)
    measured.run, failure = ranks.attempt(partial(measured.prepare, group))
    measured.group = group
    if measured.run is None:
        measured.fail("unavailable", failure or "")
        ranks.say(f"  {measured.contender.name}: not available: {failure}")


def _first_calls(measured: Measured, ranks: Ranks, warm: bool) -> None:
    """Makes the call whose memory counts, and before it a call that compiles if the contender is not warm."""
    measured.seconds = {name: [] for name in PASSES}
    outside = _outside_bytes(ranks)
    with listening() as measured.said:
        if not warm:
            _call(measured, ranks)
        base = 0
        if ranks.cuda:
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        if measured.run is not None:
            _call(measured, ranks)
    if ranks.cuda and measured.run is not None:
        measured.peak_bytes = torch.cuda.max_memory_allocated() - base
        measured.outside_bytes = max((_outside_bytes(ranks) or 0) - (outside or 0), 0)


def _warm_up(running: Sequence[Measured], ranks: Ranks, calls: int, budget: float) -> None:
    for measured in running:
        last = measured.seconds["both"][-1] if measured.seconds["both"] else 0.0
        (slow,) = ranks.largest([last])
        affordable = int(_WARMUP_SHARE * budget / len(running) / max(slow, 1e-9))
        for _ in range(-(-(min(calls, affordable) - len(measured.seconds["both"])) // measured.calls)):
            if measured.run is not None:
                _call(measured, ranks)


def _order(running: Sequence[Measured], number: int) -> list[Measured]:
    """Rotates the contenders, and reverses every second round, so that nobody always follows the same one."""
    first = number % len(running)
    turned = [*running[first:], *running[:first]]
    return turned[::-1] if number % 2 else turned


def _call(measured: Measured, ranks: Ranks) -> None:
    """Times one row of calls, forward and backward. After a failure the contender is not called again on any rank."""
    family = measured.contender.family
    if ranks.group(family) is not measured.group:  # another contender of the family failed, and its messages with it
        _prepare(measured, ranks)
    run = measured.run
    if run is None:
        return
    moments = None
    with ExitStack() as stack:
        _, failure = ranks.attempt(lambda: stack.enter_context(run.around()), family)
        if failure is None:
            ranks.align()
            moments, failure = ranks.attempt(lambda: timed(run, measured.calls, ranks.cuda), family)
    if moments is None:
        measured.fail("failed", failure or "")
        ranks.say(f"  {measured.contender.name}: failed: {failure}")
        return
    begun, turned, ended = moments
    for name, pair in zip(PASSES, ((begun, turned), (turned, ended), (begun, ended)), strict=True):
        measured.seconds[name].append(seconds_between(*pair) / measured.calls)


def timed(run: Run, calls: int, cuda: bool) -> tuple[Any, Any, Any]:
    """The moments at the beginning, between the passes and at the end."""
    begun = moment(cuda)
    outs = [run.forward() for _ in range(calls)]
    turned = moment(cuda)
    while outs:
        torch.autograd.grad(outs.pop(), run.leaves, run.dout)
    return begun, turned, moment(cuda)


def _storage(case: Case) -> dict[str, torch.Tensor]:
    """Random numbers that all contenders share, each in its own form."""
    generator = torch.Generator(case.device).manual_seed(case.rank)

    def numbers(heads: int) -> torch.Tensor:
        share = max(case.tokens * heads, case.length * max(heads // case.ranks, 1))
        return torch.randn(share * case.head_dim, generator=generator, dtype=case.dtype, device=case.device)

    heads = {"q": case.q_heads, "k": case.kv_heads, "v": case.kv_heads, "dout": case.q_heads}
    return {name: numbers(heads[name]) for name in _INPUTS}


def _placed(prepared: Prepared, storage: torch.Tensor, case: Case, queries: bool) -> torch.Tensor:
    """The stored numbers in the form of a contender."""
    heads = case.q_heads if queries else case.kv_heads
    whole = torch.empty(1, case.length, heads, case.head_dim, dtype=case.dtype, device="meta")
    form = prepared.cut(whole)
    return storage.as_strided(form.shape, form.stride())


def _whole_inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and dout of the whole sequence, the same on all ranks."""
    generator = torch.Generator().manual_seed(_CHECK_SEED)
    heads = (case.q_heads, case.kv_heads, case.kv_heads, case.q_heads)
    shapes = [(1, case.length, count, case.head_dim) for count in heads]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(case.device, case.dtype) for shape in shapes)
    return q, k, v, dout


def _results(
    attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> dict[str, torch.Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = attend(*leaves)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))


def _own_errors(prepared: Prepared, inputs: Sequence[torch.Tensor], exact: dict[str, torch.Tensor]) -> Errors:
    with prepared.around():
        results = _results(prepared.attend, *(prepared.cut(tensor) for tensor in inputs))
    expected = {name: prepared.cut(exact[name]) for name in prepared.complete}
    return relative_errors({name: results[name] for name in expected}, expected)


def relative_errors(results: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> Errors:
    """Relative errors in the Frobenius norm."""
    for name, tensor in results.items():
        if tensor.shape != exact[name].shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(exact[name].shape)}")
    return {name: float((results[name].double() - exact[name]).norm() / exact[name].norm()) for name in results}


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collects hf_burst's log of its choices; each of them is logged once."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hf_burst")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _outside_bytes(ranks: Ranks) -> int | None:
    """Bytes of the device that are in use outside of torch's allocator.

    They hold connections, compiled kernels and symmetric buffers.
    """
    if not ranks.cuda:
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
