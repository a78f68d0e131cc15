"""A machine in a few numbers: how fast its kernels, its memory and its links are. `cost.py` and `step.py` predict
seconds from them, `hf_burst.ring.calibrate` measures them. Data sheets stand in for GPUs that nobody measured."""

import json
import math
import re
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ..errors import ConfigError

_WIDE = 192  # elements of a head, above which kernels have other rates
_LONG_TILE = 16384  # rows and columns from which on flash-attn 4 lets cuDNN go backward, which plans every shape
_MOST_ELEMENTS = 2**31  # of a tensor that cuDNN is given, none of which were tried with more
_BLOCK = 128  # keys of its blocks on Hopper


@dataclass(frozen=True)
class KernelRate:
    """How fast the kernel is in calls of one size.

    Args:
        scores (`float`): Size of a call: (query, key) pairs that it computes, summed over query heads and batch.
        forward, backward (`float`): FLOP/s of either pass, of 4·D FLOP a score forward and 10·D backward.
    """

    scores: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Link:
    """A link between ranks. Messages that all ranks send at one time take `latency + bytes / bandwidth` seconds.

    Args:
        latency (`float`): Seconds of the shortest messages.
        bandwidth (`float`): Bytes/s that leave a rank, while as many arrive.
        drag (`float`, defaults to 0.0): Share of the time of a message by which a kernel beside it takes longer.
    """

    latency: float
    bandwidth: float
    drag: float = 0.0

    def seconds(self, size: float) -> float:
        """The time of messages of `size` bytes; 0 for none."""
        return self.latency + size / self.bandwidth if size else 0.0


@dataclass(frozen=True)
class RuleRate:
    """How fast the kernels of recurrent layers are.

    Args:
        forward, backward (`float`): FLOP/s of either pass, of the operations that `RecurrentSize.rule_flops` counts.
            The backward pass has twice as many.
        states, state_gradients (`float`): FLOP/s of a pass, forward and backward, that finds states or transitions and
            no outputs.
        call (`float`): Seconds that a call of either pass adds.
        step (`float`): Seconds that every 64 tokens of the longest piece add, twice as many backward: a state passes
            through them one after another, however few heads a rank has.
    """

    forward: float
    backward: float
    states: float
    state_gradients: float
    call: float
    step: float


# fitted to the gated DeltaNet of Qwen3.6 over 2 H200s, from 32K tokens of each on, where calls take little of the time:
# recipes/benchmarks/results/recurrent_2xH200.json;
# passes that find states: on one H100, see recurrent_1xH100_alone.json
_RULE = RuleRate(forward=104e12, backward=68e12, states=130e12, state_gradients=86e12, call=0.2e-3, step=0.5e-6)


@dataclass(frozen=True)
class Machine:
    """The numbers from which seconds are predicted, beside the plan. Equal on all ranks of a group.

    Args:
        device (`str`): Name of the device.
        kernel (`str`): Name of the kernel that the rates are of.
        rates (`tuple[KernelRate, ...]`): Measured points, of rising size.
        launch (`float`): Seconds that a kernel call adds beside what it computes.
        memory_bandwidth (`float`): Bytes/s of the device's memory, read and written.
        memory (`int`): Bytes of a device.
        products (`float`): FLOP/s of large products of matrices.
        p2p ([`Link`]): Messages inside a host (NCCL, gloo).
        between_hosts ([`Link`]): Messages between hosts.
        symmetric ([`Link`], *optional*): Copy engines that read a peer's memory, inside a host.
        ranks_per_host (`int`, defaults to 1): Ranks of the group on one host, neighbours of each other.
        block (`int`, defaults to 0): Rows and columns of the blocks that the kernel computes whole, also where a
            document ends inside; 0 for a kernel that computes no other pairs than those of documents.
        document_blocks (`int`, defaults to 0): Blocks whose time a call takes longer for every document.
        gathered_rate (`float`, defaults to 1.0): Share of the rates that tiles of gathered keys reach.
        strided_bandwidth (`float`, defaults to 1.0): Share of the bandwidth of `symmetric` that copies of heads reach.
        wide_forward, wide_backward (`float`, defaults to 1.0): Share of the rates that heads of more than 192 elements
            reach.
        wide_from_out (`float`, *optional*): `wide_backward` of tiles that are [`cut_for_cudnn`] and have their output;
            the same by default. Soft-capped scores and deterministic kernels stay with `wide_backward`, which is left
            out of account.
        waiting (`float`, defaults to 1.0): Share of the time lost by uneven ring steps that remains, since ranks may
            run ahead of each other.
        slice_blocks (`int`, defaults to 0): Least work of a slice of the heads, in blocks of 128 query rows over all
            heads of a rank; 0 for no limit.
        rule ([`RuleRate`]): Kernels of recurrent layers; by default those of an H200.
        host_memory (`int`, defaults to 0): Bytes of the host's memory that page-locked copies of a device may take.
        host_bandwidth (`float`, defaults to 1.0): Bytes/s between a device and page-locked memory of its host, in
            either direction while the other one is used, too.
        peak (`float`, defaults to 0.0): FLOP/s of the data sheet (bf16, not sparse), of which model FLOPs utilisation
            is a share; 0 if unknown.
        source (`str`, defaults to `"built in"`): Where the numbers come from.
    """

    device: str
    kernel: str
    rates: tuple[KernelRate, ...]
    launch: float
    memory_bandwidth: float
    memory: int
    products: float
    p2p: Link
    between_hosts: Link
    symmetric: Link | None = None
    ranks_per_host: int = 1
    block: int = 0
    document_blocks: int = 0
    gathered_rate: float = 1.0
    strided_bandwidth: float = 1.0
    wide_forward: float = 1.0
    wide_backward: float = 1.0
    wide_from_out: float | None = None
    waiting: float = 1.0
    slice_blocks: int = 0
    rule: RuleRate = _RULE
    host_memory: int = 0
    host_bandwidth: float = 1.0
    peak: float = 0.0
    source: str = "built in"

    def __post_init__(self) -> None:
        links = [link for link in (self.p2p, self.between_hosts, self.symmetric) if link is not None]
        above = [
            self.memory_bandwidth,
            self.memory,
            self.products,
            self.ranks_per_host,
            self.gathered_rate,
            self.strided_bandwidth,
            self.wide_forward,
            self.wide_backward,
            self.wide_backward if self.wide_from_out is None else self.wide_from_out,
            self.host_bandwidth,
        ]
        above += [link.bandwidth for link in links]
        above += [number for rate in self.rates for number in (rate.scores, rate.forward, rate.backward)]
        above += [self.rule.forward, self.rule.backward, self.rule.states, self.rule.state_gradients]
        least = [self.launch, self.block, self.document_blocks, self.waiting, self.slice_blocks, self.peak]
        least += [self.host_memory]
        least += [self.rule.call, self.rule.step]
        least += [number for link in links for number in (link.latency, link.drag)]
        sizes = [rate.scores for rate in self.rates]
        numbers = all(map(math.isfinite, above + least)) and min(above) > 0 and min(least) >= 0
        if not numbers or not sizes or sizes != sorted(set(sizes)):
            raise ConfigError(
                "A machine has rates of rising sizes, bandwidths and memory above 0 and times of at least 0, got "
                f"{self}. Measure it anew: hf-burst calibrate."
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once, as every attention looks up its schedule by it."""
        return hash((self.device, self.kernel, self.rates, self.between_hosts, self.ranks_per_host))

    def has_wide_from_out(self, head_dim: int) -> bool:
        """Whether cuDNN goes backward for heads of this size where it can."""
        return head_dim > _WIDE and self.wide_from_out is not None

    def kernel_seconds(
        self, scores: float, flops: float, backward: bool, head_dim: int = 128, from_out: bool = False
    ) -> float:
        """How long the kernel computes in one call of this size (see [`KernelRate`]) and so many FLOP. `from_out` says
        that a backward pass is cuDNN's, if the machine has it."""
        if head_dim > _WIDE:
            share = self.wide_backward if backward else self.wide_forward
            flops /= self.wide_from_out if backward and from_out and self.wide_from_out else share
        rates = [(rate.scores, rate.backward if backward else rate.forward) for rate in self.rates]
        for (low, slow), (high, fast) in pairwise(rates):
            if scores < high:
                share = max(0.0, math.log(scores / low) / math.log(high / low))
                return flops / (slow + (fast - slow) * share)
        return flops / rates[-1][1]

    def to_json(self) -> str:
        """The machine as text; [`Machine.from_json`] reads it."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Machine":
        """Reads what [`Machine.to_json`] wrote, and raises a [`ConfigError`] for anything else."""
        try:
            values = json.loads(text)
            values["rates"] = tuple(KernelRate(**rate) for rate in values["rates"])
            for name in ("p2p", "between_hosts", "symmetric"):
                values[name] = None if name == "symmetric" and values[name] is None else Link(**values[name])
            values["host_bandwidth"], values["host_memory"]  # of a profile that was written without them
            if "rule" in values:
                values["rule"] = RuleRate(**values["rule"])
            return cls(**values)
        except (ValueError, TypeError, KeyError) as problem:
            raise ConfigError(f"This is no machine: {problem}. Write one by hf-burst calibrate.") from problem


class DataSheet(NamedTuple):
    """What a vendor says of a GPU."""

    device: str
    memory: float  # GiB, as torch reports them: less than what the vendor says
    bandwidth: float  # of the memory, bytes/s
    peak: float  # FLOP/s in bf16, summed in fp32, not sparse
    link: float  # bytes/s to the other GPUs of a host, each way
    host: float = 64e9  # bytes/s to the host, each way
    reads_peers: bool = True  # whether a GPU reads the memory of others
    kernel: str = "flash_attn_4"
    wide_backward: float = 0.5  # share of flash-attn 4's rate, for heads of 256: an H100's, unless measured
    source: str = "NVIDIA's data sheet; memory about what torch reports"


_SEEN = "NVIDIA's data sheet; memory by torch.cuda.mem_get_info on one"
# PCIe is counted as x16 of its generation; where GPUs have nothing else, hosts copy for them. NVLink bridges, which
# join two or four of a host's cards, are not counted.
DATA_SHEETS = {
    "b200": DataSheet("NVIDIA B200", 178, 8.0e12, 2250e12, 900e9),
    "h200": DataSheet("NVIDIA H200", 139.8, 4.8e12, 989e12, 450e9, wide_backward=0.6, source=_SEEN),
    "h200-nvl": DataSheet("NVIDIA H200 NVL", 139.8, 4.8e12, 835e12, 64e9, reads_peers=False),
    "h100": DataSheet("NVIDIA H100 SXM", 79.2, 3.35e12, 989e12, 450e9, source=_SEEN),
    "h100-nvl": DataSheet("NVIDIA H100 NVL", 93.1, 3.9e12, 835e12, 64e9, reads_peers=False),
    "h100-pcie": DataSheet("NVIDIA H100 PCIe", 79.2, 2.0e12, 756e12, 64e9, reads_peers=False),
    "a100": DataSheet("NVIDIA A100 SXM 80GB", 79.3, 2.04e12, 312e12, 300e9, 32e9, kernel="flash_attn_2"),
    "a100-40gb": DataSheet("NVIDIA A100 SXM 40GB", 39.4, 1.555e12, 312e12, 300e9, 32e9, kernel="flash_attn_2"),
    "l40s": DataSheet("NVIDIA L40S", 44.4, 0.864e12, 362e12, 32e9, 32e9, False, "flash_attn_2"),
    "rtx5090": DataSheet("NVIDIA GeForce RTX 5090", 31.4, 1.79e12, 209e12, 64e9, 64e9, False, "flash_attn_2"),
    "rtx4090": DataSheet("NVIDIA GeForce RTX 4090", 23.5, 1.01e12, 165e12, 32e9, 32e9, False, "flash_attn_2"),
}
_HOST_MEMORY = 2**37  # bytes for each GPU, where nobody said how much the host has
# words in the names of these GPUs that tell none of them from another
_PLAIN = {"nvidia", "geforce", "gpu", "sxm", "sxm4", "sxm5", "sxm6", "80gb", "hbm3", "hbm3e"}


def cut_for_cudnn(height: int, width: int, causal: bool, elements: int) -> bool:
    """Whether flash-attn 4 lets cuDNN go backward for a tile of heads of 256, without documents and windows: a causal
    square, or a whole tile of whole blocks; long, and with no more elements in its largest tensor than were tried."""
    whole = height == width if causal else width % _BLOCK == 0
    return whole and min(height, width) >= _LONG_TILE and elements < _MOST_ELEMENTS


def data_sheet(device: str) -> DataSheet | None:
    """The data sheet of a device, by the name that torch or a user calls it; `None` for variants without one."""
    words = "".join(word for word in re.findall("[a-z0-9]+", device.lower()) if word not in _PLAIN)
    return next((sheet for key, sheet in DATA_SHEETS.items() if key.replace("-", "") == words), None)


def h200(kernel: str = "flash_attn_4") -> Machine:
    """An H200 in a host with NVLink, as measured there (bf16, heads of 128, 32 query heads).

    Kernel rates are those of FlashAttention-4 on square tiles of 4,096, 8,192 and 32,768 tokens and on a causal one of
    32,768; the smallest is extrapolated. Other kernels run at the share of it that they reach at 32,768 tokens. So do
    heads of 256 (24 query and 4 key heads), backward by flash-attn 4 alone or with cuDNN. Other shares of theirs than
    that by flash-attn 4 alone are an H100's.
    Products of matrices are those of an 8B Llama (recipes/benchmarks/training_limits.py, 657e12 to 680e12). A bandwidth
    of 400 Gb/s a GPU between hosts is assumed, and 128 GiB of host memory for a GPU. Copies to and from the host
    reached 54 GB/s each way on two GPUs at once. A call with 10,000 documents of 100 tokens takes as long as 5 more
    blocks a document. Uneven steps took 1.40 times as long where [`lag`] is 0.72, and fewer than 2,048 blocks a slice
    gained nothing (4 GPUs).
    """
    share = {"torch_cudnn": 550 / 624, "torch_flash": 327 / 624, "flash_attn_2": 327 / 624}.get(kernel, 1.0)
    own = DATA_SHEETS["h200"].wide_backward
    wide = {"flash_attn_4": (1.15, own), "torch_cudnn": (1.06, 0.7)}.get(kernel, (0.85, 0.85))
    small = [(3.4e7, 202e12, 265e12), (5.4e8, 593e12, 555e12), (2.1e9, 692e12, 589e12)]
    large = [(1.7e10, 667e12, 608e12), (3.4e10, 659e12, 617e12)]
    return Machine(
        device="NVIDIA H200",
        kernel=kernel,
        rates=tuple(KernelRate(scores, share * fwd, share * bwd) for scores, fwd, bwd in small + large),
        launch=6e-6,
        memory_bandwidth=4.0e12,
        memory=int(DATA_SHEETS["h200"].memory * 2**30),
        products=670e12,
        p2p=Link(latency=0.12e-3, bandwidth=360e9, drag=0.5),
        between_hosts=Link(latency=0.15e-3, bandwidth=45e9, drag=0.5),
        symmetric=Link(latency=0.040e-3, bandwidth=375e9, drag=0.2),
        ranks_per_host=8,
        block=128,
        document_blocks=5,
        gathered_rate=0.93,
        strided_bandwidth=0.8,
        wide_forward=wide[0],
        wide_backward=wide[1],
        wide_from_out=0.62 if kernel == "flash_attn_4" else None,
        waiting=0.55,
        slice_blocks=2048,
        host_memory=_HOST_MEMORY,
        host_bandwidth=54e9,
        peak=DATA_SHEETS["h200"].peak,
        source="built in: measured on H200s",
    )


def by_data_sheet(sheet: DataSheet, kernel: str | None = None) -> Machine:
    """A GPU as its data sheet has it: one that nobody measured reaches the shares that an H200 reached of its own."""
    own, newer = DATA_SHEETS["h200"], sheet.kernel == "flash_attn_4"  # in which older kernels leave something unused
    measured = h200(kernel if newer and kernel else "flash_attn_4")
    if sheet is own:
        return measured
    computing, sending = sheet.peak / own.peak, sheet.link / own.link
    heads = h200(kernel or sheet.kernel)
    p2p, symmetric = (
        replace(link, bandwidth=sending * link.bandwidth) for link in (measured.p2p, measured.symmetric or measured.p2p)
    )
    return replace(
        measured,
        device=sheet.device,
        kernel=kernel or sheet.kernel,
        rates=tuple(KernelRate(at.scores, computing * at.forward, computing * at.backward) for at in measured.rates),
        rule=replace(
            measured.rule,
            **{
                name: computing * getattr(measured.rule, name)
                for name in ("forward", "backward", "states", "state_gradients")
            },
        ),
        wide_forward=heads.wide_forward,
        wide_backward=sheet.wide_backward if heads.kernel == "flash_attn_4" else heads.wide_backward,
        wide_from_out=heads.wide_from_out,
        memory_bandwidth=sheet.bandwidth / own.bandwidth * measured.memory_bandwidth,
        memory=int(sheet.memory * 2**30),
        products=computing * measured.products,
        p2p=p2p,
        symmetric=symmetric if sheet.reads_peers else None,
        host_bandwidth=sheet.host / own.host * measured.host_bandwidth,
        peak=sheet.peak,
        source="built in: the data sheet, at the shares that H200s reached of theirs",
    )


def cpu(kernel: str = "cpu_flash") -> Machine:
    """Processes of one core each that talk by gloo, as measured on a CI machine (fp32, heads of 64)."""
    return Machine(
        device="CPU",
        kernel=kernel,
        rates=(KernelRate(8e3, 9e9, 12e9), KernelRate(1.3e5, 25e9, 25e9), KernelRate(2.1e6, 26e9, 24e9)),
        launch=4e-6,
        memory_bandwidth=13e9,
        memory=8 * 10**9,
        products=60e9,
        p2p=Link(latency=0.3e-3, bandwidth=1e9, drag=0.5),
        between_hosts=Link(latency=0.5e-3, bandwidth=0.5e9, drag=0.5),
        ranks_per_host=64,
        gathered_rate=0.93,
        waiting=0.55,
        host_bandwidth=5e9,
        # torch's own functions
        rule=RuleRate(forward=2e9, backward=2e9, states=2e9, state_gradients=2e9, call=5e-3, step=0.3e-3),
    )


def named(name: str) -> Machine:
    """The machine that a user names: a GPU of [`DATA_SHEETS`], on hosts of 8."""
    sheet = data_sheet(name)
    if sheet is None:
        near = "".join(f" Did you mean {match}?" for match in get_close_matches(name.lower(), DATA_SHEETS, n=1))
        raise ConfigError(f"No machine is called {name!r}.{near} Known are {', '.join(DATA_SHEETS)}.")
    return by_data_sheet(sheet)


def built_in(device: str, kernel: str, memory: int, ranks_per_host: int) -> Machine:
    """The machine of a device (`"CPU"` for processors) that was not measured; arguments as in [`Machine`]."""
    sheet = data_sheet(device)
    known = cpu(kernel) if device == "CPU" else by_data_sheet(sheet, kernel) if sheet else h200(kernel)
    if sheet is None and device != "CPU":
        source = f"built in: those of an {known.device} without symmetric memory, as this device has none"
        known = replace(known, symmetric=None, peak=0.0, source=source)
    return replace(known, device=device, memory=memory, ranks_per_host=ranks_per_host)
