"""The rule for schedules. It follows from the heads, the ranks of a host and the documents of a batch.

On one host, neighbouring ranks exchange heads (Ulysses) as far as the heads allow, and K and V travel round a ring of
the rest. Over several hosts, what counts are the bytes that cross between them. docs/results/attention.md has the cases
in which the rule was compared with what was measured.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from ..config import RingKind, Schedule
from .mask import Mask
from .ring import Rotating
from .sharding import Sharding
from .traffic import Pass, Shapes, row_bytes

_GPU_SLICE_BLOCKS = 2048  # least work of a slice of the heads on a GPU; fewer gained nothing on H200s
_MAX_SLICES = 4
_BLOCK_ROWS = 128
# on one host: share of the other ranks' keys up to which a ring is faster; measured at 0.03 and 0.47
_LOCAL_SHARE = 0.1
_FEWER = 5 / 6  # heads are exchanged between hosts if this share of a ring's bytes crosses, or less


@dataclass(frozen=True)
class Choice:
    """A schedule, and why it was chosen, as a part of a sentence."""

    schedule: Schedule
    reason: str


@lru_cache(maxsize=256)
def choose_schedule(masks: tuple[Mask, ...], sharding: Sharding, shapes: Shapes, ranks_per_host: int) -> Choice:
    """The schedule of an attention layer, the same on all ranks.

    - A ring where documents mostly stay on their ranks, and over two ranks of one host, which hide their only exchange
      behind their own block.
    - Else neighbouring ranks exchange heads (Ulysses), with a ring of the rest around them: those of one host as far
      as the heads allow, and those of several hosts if fewer bytes then cross between hosts.
    - The ring is `"burst"` with as many key heads as query heads: its backward pass sends three tensors instead of
      four (BurstAttention, arXiv 2403.09347). Otherwise K and V travel.

    Args:
        masks (`tuple[Mask, ...]`): One mask for every row of the batch.
        sharding ([`Sharding`]): Which rank holds which tokens.
        shapes ([`Shapes`]): Heads of the layer.
        ranks_per_host (`int`): Neighbouring ranks on one host. They divide the ranks, or exceed them.
    """
    ranks, q_heads, kv_heads = sharding.ranks, shapes.q_heads, shapes.kv_heads
    if ranks == 1:
        return Choice(Schedule(), "one rank exchanges nothing")
    per_host = min(ranks, ranks_per_host)
    ring: RingKind = "burst" if q_heads == kv_heads else "kv_ring"
    ulysses = _ulysses_degree(ring, shapes, ranks, per_host)
    share = fetched_share(masks, sharding)
    needed = f"a rank needs {share:.0%} of the others' keys"
    if _is_local(share, ranks, per_host, ulysses):
        return Choice(Schedule(ring), f"documents mostly stay on their ranks: {needed}")
    if ranks == per_host == 2:
        return Choice(Schedule(ring), f"two ranks hide their only exchange behind their own block; {needed}")
    heads = f"the {q_heads} query and {kv_heads} key heads"
    if ulysses > per_host:
        reason = f"{ulysses} ranks divide {heads}, which sends less between hosts than a ring; {needed}"
    elif ulysses > 1:
        reason = f"{ulysses} ranks of one host divide {heads}; {needed}"
    elif per_host > 1:
        reason = f"no number of ranks of one host divides {heads}"
    else:
        reason = f"a ring sends less between hosts than an exchange of {heads}"
    return Choice(Schedule("kv_ring" if ulysses == ranks else ring, ulysses), reason)


def name_of(schedule: Schedule, ranks: int) -> str:
    """The name of a schedule; Ulysses of all ranks has no ring around it."""
    return "ulysses" if schedule.ulysses == ranks > 1 else str(schedule)


def rotating_of(schedule: Schedule, direction: Pass) -> Rotating:
    """What travels round the ring of a schedule."""
    return "q" if schedule.ring == "burst" and direction == "backward" else "kv"


def ring_bytes(schedule: Schedule, shapes: Shapes) -> int:
    """Bytes of a token that travel in each step of the ring of a schedule, in both passes: the block, and the gradients
    that return, in the dtype in which they are summed."""
    total = 0
    for direction in get_args(Pass):
        total += sum(map(sum, row_bytes(direction, rotating_of(schedule, direction), shapes, single_tile=False)))
    return total


def head_slices(schedule: Schedule, heads: tuple[int, int], tokens: int, on_gpus: bool, head_groups: int = 1) -> int:
    """The slices of a rank's key heads. One travels while another is computed: at most 4, and 1 for rings; or more if
    `head_groups` asks for them.

    Args:
        schedule ([`Schedule`]): The schedule.
        heads (`tuple[int, int]`): Query and key heads of all ranks.
        tokens (`int`): Tokens of one rank.
        on_gpus (`bool`): Whether a slice needs enough work to fill a GPU.
        head_groups (`int`, defaults to 1): As in [`Memory`].
    """
    q_heads, kv_heads = heads
    own = kv_heads // schedule.ulysses
    least = next(count for count in range(min(head_groups, own), own + 1) if own % count == 0)
    if schedule.ulysses == 1:
        return least
    blocks = q_heads * tokens // _BLOCK_ROWS  # of the heads of a rank and the tokens of all that exchange them
    most = min(_MAX_SLICES, blocks // _GPU_SLICE_BLOCKS) if on_gpus else _MAX_SLICES
    return max(least, *(count for count in range(1, max(1, most) + 1) if own % count == 0))


def fetched_share(masks: tuple[Mask, ...], sharding: Sharding) -> float:
    """The share of the other ranks' keys that the queries of a rank see, on average over the ranks."""
    fetched = 0
    for rank in range(sharding.ranks):
        runs = sharding.runs(rank)
        # the later a query, the later its keys: those of a run are one interval, and its own tokens lie in it
        seen = [(mask.keys(run.start)[0], mask.keys(run.stop - 1)[1]) for mask in masks for run in runs]
        for mask in masks:
            seen += [reach.keys for reach in mask.reaches if any(run.within(reach.queries) for run in runs)]
        end = 0
        for start, stop in sorted(seen):
            fetched += max(0, stop - max(start, end))
            end = max(end, stop)
    return fetched / sharding.length / (sharding.ranks - 1) - 1 / (sharding.ranks - 1)


def _is_local(share: float, ranks: int, per_host: int, ulysses: int) -> bool:
    """Whether documents mostly stay on their ranks. Over several hosts a ring competes with a shorter one of ranks that
    exchange heads: a rank must need the keys of half as many others as that one has ranks, or fewer."""
    if ranks == per_host:
        return share <= _LOCAL_SHARE
    return ulysses > 1 and share * (ranks - 1) <= ranks / ulysses / 2


def _ulysses_degree(ring: RingKind, shapes: Shapes, ranks: int, per_host: int) -> int:
    """How many neighbouring ranks exchange heads: of one host as many as the heads allow, of several hosts if they then
    send at least a sixth fewer bytes between hosts."""
    inside = math.gcd(per_host, shapes.q_heads, shapes.kv_heads)
    dividing = math.gcd(ranks, shapes.q_heads, shapes.kv_heads)
    round_ring = ring_bytes(Schedule(ring), shapes)
    exchanged = 2 * (shapes.q_heads + shapes.kv_heads) * (shapes.head_dim + shapes.value_dim) * shapes.itemsize

    def crossing_bytes(ulysses: int) -> float:
        """Bytes that leave a host for each of its tokens in both passes over one whole document."""
        around = round_ring * (ranks // max(ulysses, per_host) - 1)
        return around if ulysses <= per_host else around + exchanged * (1 - per_host / ulysses)

    wider = [ulysses for ulysses in range(2 * per_host, dividing + 1, per_host) if dividing % ulysses == 0]
    least = min(wider, key=crossing_bytes, default=inside)
    return least if crossing_bytes(least) <= _FEWER * crossing_bytes(inside) else inside
