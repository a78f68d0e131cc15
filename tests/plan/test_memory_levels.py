"""The level that a step takes, by what earlier ones took of a device that is simulated."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_burst.config import Memory
from hf_burst.errors import OUT_OF_MEMORY
from hf_burst.plan import MaskPattern
from hf_burst.plan.layer_sizes import LayerSizes, StepEstimate
from hf_burst.plan.memory_levels import GAPS, MeasuredLevels, Size, levels_for

GIB = 2**30
# of an 8B Llama in bf16 under adapters
SIZES = LayerSizes(
    layers=32,
    hidden=4096,
    inner=14336,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    value_dim=128,
    patterns=((MaskPattern(), 32),),
)
LLAMA = StepEstimate(SIZES, 2, checkpointing=True, exchanges=False)


def levels_of(tokens: int, estimate: StepEstimate = LLAMA, fixed: Collection[str] = ()) -> tuple[Memory, ...]:
    """The settings of every level, with 128 GiB of host memory."""
    return levels_for(estimate, Memory(), tokens, 128 * GIB, fixed)


class Gpu:
    """A GPU on which steps take so many times what is estimated, and some bytes whatever their size. Of what comes and
    goes a share is lost in gaps. The optimizer has its states from the second step on."""

    def __init__(
        self, total: float, wrong: float = 1.0, always: float = 0.0, gaps: float = GAPS[False][0], **how: float
    ):
        self.total, self.wrong, self.always, self.gaps = total, wrong, always, gaps
        self.held, self.states, self.gradients = how.get("held", 0.0), how.get("states", 0.0), how.get("gradients", 0.0)
        self.rule = MeasuredLevels(LLAMA, self.gradients, sharded=0.0)
        self.short = 0

    def takes(self, memory: Memory, size: Size) -> float:
        activations = self.wrong * size.tokens * LLAMA.bytes_of_token(memory) + 20 * size.seen
        return self.always + max(activations, self.gradients + activations / 2)

    def levels(self, size: Size) -> tuple[Memory, ...]:
        return levels_of(size.tokens)

    def step(self, tokens: int, seen: float = 0.0) -> int:
        """The level of a step; one that runs out is not taken again."""
        size, free = Size(tokens, seen), self.total - self.held
        level, _ = self.rule.choose(self.levels(size), size, free)
        memory = self.levels(size)[level]
        taken = self.takes(memory, size)
        if taken * (1 + self.gaps) > free:
            self.short += 1
            self.rule.ran_out(memory, size, free)
        else:
            self.rule.measured(memory, size, taken)
            self.held, self.states = self.held + self.states, 0.0
        return level

    def fits(self, tokens: int) -> list[bool]:
        """Of each level, whether a step has room beside the states."""
        size, free = Size(tokens), self.total - self.held - self.states
        return [(1 + GAPS[False][0]) * self.takes(memory, size) <= free for memory in self.levels(size)]


def test_a_first_step_takes_half_of_what_is_free() -> None:
    plain = 32768 * LLAMA.bytes_of_token(Memory())
    assert Gpu(2.01 * plain).step(32768) == 0
    assert Gpu(1.99 * plain).step(32768) == 1
    assert Gpu(2.01 * plain, held=plain / 10).step(32768) == 1
    least = Gpu(plain / 100)
    levels = least.levels(Size(32768))
    assert LLAMA.bytes_of_token(levels[least.step(32768)]) == min(map(LLAMA.bytes_of_token, levels))
    first, second = (least.levels(Size(tokens))[1] for tokens in (32768, 32767))
    assert (first, second) == (Memory(activation_offloading=1.0), Memory(tiled_mlp=4096))


def test_ffpa_takes_less_for_the_widest_heads() -> None:
    tiles = Memory(tiled_mlp=4096)
    wide, narrow = (replace(LLAMA, sizes=replace(SIZES, head_dim=size, value_dim=size)) for size in (512, 128))
    assert replace(wide, ffpa=True).working(tiles) < 0.7 * wide.working(tiles)
    assert replace(narrow, ffpa=True).working(tiles) == narrow.working(tiles)


def test_the_advice_names_the_tiles_of_the_rule() -> None:
    tiles = {levels_of(tokens)[-1].tiled_mlp: tokens for tokens in (65535, 65536)}
    assert tiles == {4096: 65535, 16384: 65536}
    assert "Memory(tiled_mlp=16384, " in OUT_OF_MEMORY
    assert ", with tiled_mlp=4096 below 65,536 tokens a GPU;" in OUT_OF_MEMORY


def test_the_second_step_takes_what_fits_by_the_first() -> None:
    gpu = Gpu(40 * GIB)
    assert [gpu.step(65536) for _ in range(4)] == [1, 1, 1, 1]
    gpu = Gpu(20 * GIB)
    assert gpu.step(65536) > 1, "frugal"
    assert gpu.step(65536) == gpu.step(65536) == 1, "as it fits"
    gpu = Gpu(60 * GIB, held=10 * GIB, states=20 * GIB)
    assert [gpu.step(32768) for _ in range(3)] == [0, 0, 0]
    gpu = Gpu(48 * GIB, held=10 * GIB, states=12 * GIB)
    assert gpu.step(32768) > 0
    assert gpu.short == 0


@settings(deadline=None, max_examples=200)
@given(
    st.integers(20, 160).map(lambda gib: gib * GIB),
    st.floats(0.5, 1.65),
    st.floats(0, 3 * GIB),
    st.lists(st.integers(1024, 2**19), min_size=1, max_size=6),
    st.floats(0, 10 * GIB),
)
def test_steps_of_any_lengths_run(
    total: float, wrong: float, always: float, lengths: list[int], gradients: float
) -> None:
    """Where the most frugal settings fit with some room, no step runs out, however lengths grow; and where the settings
    of the first level take a sixth of the room, they are taken."""
    gpu = Gpu(total, wrong, always, gradients=gradients, states=2 * gradients)
    assume(all(gpu.fits(int(1.25 * tokens))[-1] for tokens in lengths))
    for tokens in lengths:
        gpu.step(tokens)
    assert gpu.short == 0
    last = [gpu.step(lengths[-1]) for _ in range(4)]
    assert gpu.short == 0
    assert last[2] == last[3]
    gpu.total = 6 * gpu.takes(Memory(), Size(lengths[-1])) + gpu.held
    assert gpu.step(lengths[-1]) == 0


def test_a_batch_that_grows_in_the_middle_of_an_epoch() -> None:
    gpu = Gpu(60 * GIB, wrong=1.5)
    found = [gpu.step(tokens) for tokens in (8192, 16384, 32768, 262144, 16384)]
    assert found[:2] == [0, 0]
    assert found[3] > 0
    assert found[4] == 0
    assert gpu.short == 0


def test_a_step_that_ran_out_is_followed_by_a_more_frugal_one() -> None:
    gpu = Gpu(60 * GIB, wrong=3.5)
    assert gpu.step(32768) == 0
    assert gpu.short == 1
    level = gpu.step(32768)
    assert level > 0
    assert gpu.short == 1
    assert gpu.step(16384) == 0, "which is shorter"
    assert gpu.step(40000) >= level
    hopeless = Gpu(2 * GIB)
    found = [hopeless.step(262144) for _ in range(12)]
    assert found == [found[0]] * 12


def test_images_count() -> None:
    gpu = Gpu(60 * GIB)
    assert gpu.step(32768) == 0
    assert gpu.step(32768, seen=0.75 * GIB) > 0, "nothing is known of towers"
    small = Gpu(60 * GIB)
    assert [small.step(32768, seen=0.02 * GIB) for _ in range(2)] == [0, 0]
    assert small.step(32768, seen=0.5 * GIB) > 0, "25 times as many"
    assert small.step(32768) == 0
    assert gpu.short == small.short == 0


def test_gradients_that_are_added_to() -> None:
    """A batch that is accumulated finds gradients, and what it takes is known by itself."""
    rule, levels, size = MeasuredLevels(LLAMA, 10.0 * GIB, sharded=10.0 * GIB), levels_of(32768), Size(32768)
    free = 2.1 * size.tokens * LLAMA.bytes_of_token(Memory()) + 10 * GIB
    assert rule.choose(levels, size, free)[0] == 0
    rule.measured(levels[0], size, 30.0 * GIB)
    assert rule.choose(levels, size, 39.0 * GIB)[0] == 0
    added = size._replace(added=True)
    assert rule.choose(levels, added, 37.0 * GIB)[0] > 0
    rule.measured(levels[0], added, 20.0 * GIB)
    assert rule.choose(levels, added, 28.0 * GIB)[0] == 0
    assert rule.choose(levels, size, 28.0 * GIB)[0] > 0
    on_host = MeasuredLevels(LLAMA, 0.0, sharded=10.0 * GIB)
    on_host.measured(levels[0], size, 30.0 * GIB)
    assert [on_host.choose(levels, size, free * GIB)[0] == 0 for free in (38.0, 39.0)] == [False, True], "gaps of each"


def test_the_margin_is_smaller_with_expandable_segments() -> None:
    rule, levels, size = MeasuredLevels(LLAMA, 0.0, sharded=0.0), levels_of(32768), Size(32768)
    rule.measured(levels[0], size, 20.0 * GIB)
    assert [rule.choose(levels, size, 22.5 * GIB, expandable)[0] > 0 for expandable in (False, True)] == [True, False]


def test_a_bound_counts_where_nothing_else_is_known() -> None:
    """The most that was taken so far may have been taken by something else."""
    rule, levels, size = MeasuredLevels(LLAMA, 0.0, sharded=0.0), levels_of(32768), Size(32768)
    rule.measured(levels[0], size, 50.0, exact=False)
    rule.measured(levels[1], size, 90.0, exact=False)
    rule.measured(levels[0], Size(1), 90.0, exact=False)
    assert {taken.memory: taken.bytes for taken in rule.known.values()} == {levels[0]: 50.0}
    rule.measured(levels[0], size, 40.0)
    rule.measured(levels[0], Size(65536), 60.0)
    assert rule.known[levels[0], False] == (levels[0], Size(65536), 60.0)


def test_a_pass_without_gradients_has_tiles() -> None:
    rule, levels = MeasuredLevels(LLAMA, 0.0, sharded=0.0), levels_of(262144)
    plain = 262144 * LLAMA.working(Memory())
    assert rule.choose_forward(levels, Size(262144), 2.01 * plain) == 0
    assert levels[rule.choose_forward(levels, Size(262144), 1.99 * plain)].tiled_mlp == 16384
    assert rule.choose_forward(levels, Size(262144), 0.0) == len(levels) - 1


@pytest.mark.parametrize("changes", [{"checkpointing": False}, {"causal": False}, {"kv_heads": 0}, {"exchanges": True}])
def test_levels_take_less_and_less(changes: dict[str, Any]) -> None:
    sizes = {"causal": {"patterns": ((MaskPattern(causal=False), 32),)}, "kv_heads": {"kv_heads": 0, "q_heads": 0}}
    own = next((sizes[name] for name in changes if name in sizes), None)
    estimate = replace(LLAMA, sizes=replace(SIZES, **own)) if own else replace(LLAMA, **changes)
    for tokens in (32768, 524288):
        levels = levels_of(tokens, estimate)
        assert len(levels) == len(levels_of(77, estimate)), "as many for any length"
        assert estimate.bytes_of_token(levels[-1]) < 0.9 * estimate.bytes_of_token(levels[0])
    fixed = levels_of(524288, estimate, {"activation_offloading", "attention_keep"})
    assert {(memory.activation_offloading, memory.attention_keep) for memory in fixed} == {(0.0, 1.0)}
