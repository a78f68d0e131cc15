"""Bad input is noticed on every rank before any of it is sent, said in a sentence, and leaves the ranks in step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hf_burst.attention import AttentionRequest, ContextGroup, SequenceLayout, burst_attention
from hf_burst.errors import (
    BatchError,
    BurstError,
    ConfigError,
    KernelError,
    RankMismatchError,
    ShardingError,
)
from hf_burst.kernels import Scores
from hf_burst.plan import MaskPattern
from hf_burst.plan.sharding import pattern
from hf_burst.ranks.group import ControlGroup

TOKENS = 12
PATIENCE = 30.0


def good_arguments(rank: int, size: int) -> dict[str, Any]:
    """Arguments of [`burst_attention`] that every rank may be given."""
    layout = SequenceLayout.for_batch([(0, 5, TOKENS * size)], size)
    shapes = {"q": (1, TOKENS, 4, 8), "k": (1, TOKENS, 2, 8), "v": (1, TOKENS, 2, 8)}
    generator = torch.Generator().manual_seed(rank)
    tensors = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    group = ContextGroup.from_mesh(None) if size > 1 else ContextGroup()
    return {**tensors, "layout": layout, "request": AttentionRequest(group)}


def change(arguments: dict[str, Any], **changes: Any) -> None:
    """Changes the request."""
    arguments["request"] = replace(arguments["request"], **changes)


def last(rank: int, size: int) -> bool:
    return rank == size - 1


def cut(arguments: dict[str, Any], tokens: int) -> None:
    arguments.update({name: arguments[name][:, :tokens] for name in "qkv"})


def cast(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    arguments.update({name: arguments[name].to(dtype) for name in "qkv"})


def other_length(arguments: dict[str, Any], rank: int, size: int) -> None:
    if last(rank, size):
        arguments["layout"] = SequenceLayout.for_batch([(0, 6 * size)], size)
        cut(arguments, 6)


def other_documents(arguments: dict[str, Any], rank: int, size: int) -> None:
    if last(rank, size):
        arguments["layout"] = SequenceLayout.for_batch([(0, 6, TOKENS * size)], size)


def other_chunking(arguments: dict[str, Any], rank: int, size: int) -> None:
    if last(rank, size):
        arguments["layout"] = SequenceLayout.for_batch([(0, 5, TOKENS * size)], size, "contiguous")


def other_dtype(arguments: dict[str, Any], rank: int, size: int) -> None:
    if last(rank, size):
        cast(arguments, torch.float64)


def other_head_size(arguments: dict[str, Any], rank: int, size: int) -> None:
    if last(rank, size):
        arguments.update({name: arguments[name][..., :4] for name in "qkv"})


def other_window(arguments: dict[str, Any], rank: int, size: int) -> None:
    change(arguments, pattern=MaskPattern(window=rank))


def other_causal(arguments: dict[str, Any], rank: int, size: int) -> None:
    change(arguments, pattern=MaskPattern(last(rank, size)))


def other_scale(arguments: dict[str, Any], rank: int, size: int) -> None:
    change(arguments, scores=Scores(0.5 + rank))


def sinks_on_one_rank(arguments: dict[str, Any], rank: int, size: int) -> None:
    if last(rank, size):
        arguments["sinks"] = torch.zeros(4)


def other_schedule(arguments: dict[str, Any], rank: int, size: int) -> None:
    change(arguments, schedule="burst" if last(rank, size) else "kv_ring")


def other_kernel(arguments: dict[str, Any], rank: int, size: int) -> None:
    change(arguments, kernel="reference" if last(rank, size) else "cpu_flash")


DIFFERENT = {
    other_length: ("layout", "shapes of q, k, v"),
    other_documents: ("layout",),
    other_chunking: ("layout",),
    other_dtype: ("dtype", "torch.float32", "torch.float64"),
    other_head_size: ("shapes of q, k, v",),
    other_window: (
        "mask pattern: rank 0 has MaskPattern(causal=True, window=0",
        "window=1",
    ),
    other_causal: ("mask pattern",),
    other_scale: ("scores", "0.5", "1.5"),
    sinks_on_one_rank: ("sinks", "False", "True"),
    other_schedule: ("schedule", "burst", "kv_ring"),
    other_kernel: ("kernel", "reference", "cpu_flash"),
}


def too_few_tokens(arguments: dict[str, Any], rank: int, size: int) -> None:
    cut(arguments, TOKENS - 1)


def another_batch_size(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments.update({name: arguments[name].repeat(2, 1, 1, 1) for name in "qkv"})


def a_layout_for_more_ranks(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["layout"] = SequenceLayout.for_batch([(0, 5, TOKENS * size)], size + 1)


def no_tokens(arguments: dict[str, Any], rank: int, size: int) -> None:
    cut(arguments, 0)


def no_rows(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments.update({name: arguments[name][:0] for name in "qkv"})


def no_query_heads(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["q"] = arguments["q"][:, :, :0]


def no_key_heads(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments.update({name: arguments[name][:, :, :0] for name in "kv"})


def no_value_dim(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["v"] = arguments["v"][..., :0]


def heads_that_do_not_divide(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["q"] = arguments["q"][:, :, :3]


def three_dimensions(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["q"] = arguments["q"].flatten(2)


def keys_of_another_dtype(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["k"] = arguments["k"].bfloat16()


def keys_of_another_length(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["k"] = arguments["k"][:, 1:]


def keys_of_another_head_size(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["k"] = arguments["k"][..., 1:]


def values_of_other_heads(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["v"] = arguments["v"][:, :, :1]


def a_soft_cap_that_the_kernel_lacks(arguments: dict[str, Any], rank: int, size: int) -> None:
    change(arguments, scores=Scores(1.0, 2.0), kernel="cpu_flash")


def a_negative_soft_cap(arguments: dict[str, Any], rank: int, size: int) -> None:
    change(arguments, scores=Scores(1.0, -1.0))


def an_empty_chunk(arguments: dict[str, Any], rank: int, size: int) -> None:
    change(arguments, pattern=MaskPattern(attention_chunk_size=0))


def sinks_of_other_heads(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["sinks"] = torch.zeros(3)


def a_dtype_that_no_kernel_takes(arguments: dict[str, Any], rank: int, size: int) -> None:
    cast(arguments, torch.int32)


def a_kernel_for_another_device(arguments: dict[str, Any], rank: int, size: int) -> None:
    change(arguments, kernel="torch_flash")


def no_queries_at_all(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["q"] = None


def no_layout_at_all(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["layout"] = ((0, 12),)


def queries_that_are_nowhere(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["q"] = arguments["q"].to("meta")


def documents_in_lists(arguments: dict[str, Any], rank: int, size: int) -> None:
    layout = arguments["layout"]
    arguments["layout"] = SequenceLayout(layout.length, layout.owners, [list(row) for row in layout.documents])


def a_schedule_for_other_heads(arguments: dict[str, Any], rank: int, size: int) -> None:
    change(arguments, schedule=f"ulysses_{4 * size}+kv_ring")


WRONG = {
    no_queries_at_all: (BatchError, ("three tensors and a SequenceLayout", "NoneType")),
    no_layout_at_all: (BatchError, ("three tensors and a SequenceLayout", "tuple")),
    queries_that_are_nowhere: (BatchError, ("one dtype and one device", "on meta")),
    documents_in_lists: (TypeError, ("unhashable",)),
    a_schedule_for_other_heads: (ConfigError, ("cannot be had", "cannot be cut into groups of", "schedule='auto'")),
    too_few_tokens: (ShardingError, ("should hold 1 x 12 tokens", "q has 1 x 11", "hf_burst.shard_batch")),
    another_batch_size: (ShardingError, ("should hold 1 x 12", "q has 2 x 12")),
    a_layout_for_more_ranks: (ShardingError, ("The layout is for", "the group has", "Shard the batch")),
    no_tokens: (BatchError, ("q (1, 0, 4, 8)", "do not belong together")),
    no_rows: (BatchError, ("q (0, 12, 4, 8)",)),
    no_query_heads: (BatchError, ("q (1, 12, 0, 8)",)),
    no_key_heads: (BurstError, ("0",)),
    no_value_dim: (BurstError, ("0",)),
    heads_that_do_not_divide: (KernelError, ("3 query heads", "2 key heads", "whole multiple")),
    three_dimensions: (BatchError, ("(batch, tokens, heads, head size)", "q (1, 12, 32)")),
    keys_of_another_dtype: (BatchError, ("one dtype", "torch.bfloat16 on cpu")),
    keys_of_another_length: (BatchError, ("k (1, 11, 2, 8)", "must agree")),
    keys_of_another_head_size: (BatchError, ("k (1, 12, 2, 7)",)),
    values_of_other_heads: (BatchError, ("v (1, 12, 1, 8)",)),
    a_soft_cap_that_the_kernel_lacks: (KernelError, ("cpu_flash knows no soft-capping", "BurstConfig(kernel")),
    a_negative_soft_cap: (BatchError, ("softcap is -1.0", "a positive number, or 0")),
    an_empty_chunk: (BatchError, ("attention_chunk_size is 0 (allowed: at least 1, or None)",)),
    sinks_of_other_heads: (BatchError, ("sinks are of shape (3,)", "(4,)")),
    a_dtype_that_no_kernel_takes: (KernelError, ("torch.int32", "cpu_flash takes", "reference takes")),
    a_kernel_for_another_device: (KernelError, ("torch_flash runs on cuda, not on cpu",)),
}


def a_negative_window(arguments: dict[str, Any], rank: int, size: int) -> None:
    change(arguments, pattern=MaskPattern(window=-1))


def documents_beyond_the_batch(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["layout"] = SequenceLayout(TOKENS * size, pattern(size, "zigzag"), ((0, TOKENS * size + 1),))


def documents_that_fall(arguments: dict[str, Any], rank: int, size: int) -> None:
    arguments["layout"] = SequenceLayout(TOKENS * size, pattern(size, "zigzag"), ((0, 8, 7, TOKENS * size),))


def chunks_that_end_elsewhere(arguments: dict[str, Any], rank: int, size: int) -> None:
    layout = arguments["layout"]
    arguments["layout"] = replace(layout, boundaries=tuple(2 * bound for bound in layout.sharding.boundaries))


WRONG_MASK = {
    chunks_that_end_elsewhere: (ShardingError, ("or end elsewhere",)),
    a_negative_window: (ConfigError, ("window=-1",)),
    documents_beyond_the_batch: (BatchError, ("Document boundaries", "rise strictly")),
    documents_that_fall: (BatchError, ("Document boundaries (0, 8, 7,",)),
}

Fault = Callable[[dict[str, Any], int, int], None]


def ready(rank: int, size: int) -> int:
    return rank


@pytest.fixture
def ask(ranks):
    """Runs a function on so many ranks, whose start does not count against the patience."""

    def run(size: int, function: Callable, *arguments: Any) -> list:
        assert ranks(size).run(ready) == list(range(size))
        return ranks(size).run(function, *arguments, timeout=PATIENCE)

    return run


def attempt(rank: int, size: int, fault: Fault, culprit: int | None = None) -> tuple[type | None, str, int]:
    """The error of an attention with a fault on every rank, or on `culprit` alone, and how many messages were posted.

    Then the same without the fault, which has to go through.
    """
    arguments = good_arguments(rank, size)
    if culprit in (None, rank):
        fault(arguments, rank, size)
    error, posted = None, []
    post = dist.batch_isend_irecv

    def counting(operations: list) -> list:
        posted.extend(operations)
        return post(operations)

    with mock.patch.object(dist, "batch_isend_irecv", counting):
        try:
            burst_attention(**arguments)
        except Exception as raised:
            error = raised
    assert_good(rank, size)
    return type(error) if error else None, str(error), len(posted)


def assert_good(rank: int, size: int) -> None:
    arguments = good_arguments(rank, size)
    arguments["q"].requires_grad_()
    out, lse = burst_attention(**arguments)
    (out.sum() + lse.sum()).backward()
    assert out.isfinite().all()
    assert arguments["q"].grad.isfinite().all()


def name_of(fault: Fault) -> str:
    return fault.__name__


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fault", DIFFERENT, ids=name_of)
def test_ranks_that_hold_different_inputs_are_told_so(ask, fault, size):
    for kind, message, posted in ask(size, attempt, fault):
        assert kind is RankMismatchError
        assert posted == 0
        assert "about to compute different things" in message
        assert "rank 0 has" in message
        assert f"rank {size - 1} has" in message
        for part in DIFFERENT[fault]:
            assert part in message


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("fault", WRONG | WRONG_MASK, ids=name_of)
def test_wrong_input_raises_on_every_rank(ask, fault, size):
    error, parts = (WRONG | WRONG_MASK)[fault]
    answers = [attempt(0, 1, fault)] if size == 1 else ask(size, attempt, fault)
    for kind, message, posted in answers:
        assert kind is not None
        assert issubclass(kind, error)
        assert posted == 0
        for part in parts:
            assert part in message


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fault", WRONG, ids=name_of)
def test_wrong_input_of_one_rank_raises_on_every_rank(ask, fault, size):
    error, parts = WRONG[fault]
    answers = ask(size, attempt, fault, 1)
    for rank, (kind, message, posted) in enumerate(answers):
        assert posted == 0
        if rank == 1:
            assert kind is not None
            assert issubclass(kind, error)
        else:
            assert kind is RankMismatchError
            assert message.startswith("Rank 1 of the group stopped before any communication: ")
        for part in parts:
            assert part in message


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fault", WRONG_MASK, ids=name_of)
def test_a_wrong_mask_of_one_rank_raises_on_every_rank(ask, fault, size):
    for kind, _, posted in ask(size, attempt, fault, 1):
        assert kind is not None
        assert issubclass(kind, BurstError)
        assert posted == 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_of_unequal_length_are_refused(size):
    with pytest.raises(BatchError):
        SequenceLayout.for_batch([(0, 8), (0, 5)], size).masks(MaskPattern())


def attempt_unchecked(rank: int, size: int) -> bool:
    arguments = good_arguments(rank, size)
    cut(arguments, TOKENS - 1)
    with pytest.raises(ShardingError), mock.patch.object(ControlGroup, "gather", side_effect=AssertionError):
        burst_attention(**arguments, check=False)
    assert_good(rank, size)
    return True


def test_without_a_check_a_rank_still_validates_its_own_input(ask):
    assert ask(2, attempt_unchecked) == [True, True]


def agree(rank: int, size: int, facts: list[dict], errors: list[BurstError | None], tallies: list[int]):
    group = ContextGroup.from_mesh(None) if size > 1 else ContextGroup()
    try:
        return group.agree(facts[rank], errors[rank], torch.device("cpu"), tallies[rank], seed=100 + rank)
    except BurstError as error:
        return type(error), str(error)


@pytest.mark.parametrize("size", [2, 3])
def test_agreeing_sums_the_tallies(ask, size):
    facts = [{"a": 1, "b": [2, None, "c"]}] * size
    tallies = [7, -3, 10**12][:size]
    assert ask(size, agree, facts, [None] * size, tallies) == [(sum(tallies), 100)] * size, "the first rank's seed"


def test_one_process_agrees_with_itself():
    assert agree(0, 1, [{"a": 1}], [None], [5]) == (5, 100)
    assert agree(0, 1, [{"a": 1}], [BatchError("no")], [5]) == (BatchError, "no")


@pytest.mark.parametrize("size", [2, 3])
def test_the_error_of_one_rank_reaches_all_with_its_message(ask, size):
    for culprit in range(size):
        errors = [BatchError("Row 7 is bad.") if rank == culprit else None for rank in range(size)]
        answers = ask(size, agree, [{"a": 1}] * size, errors, [0] * size)
        for rank, (kind, message) in enumerate(answers):
            assert kind is (BatchError if rank == culprit else RankMismatchError)
            assert message.endswith("Row 7 is bad.")
            assert rank == culprit or f"Rank {culprit} of the group" in message


def test_ranks_with_errors_of_their_own_raise_those(ask):
    errors = [BatchError("first"), None, KernelError("third")]
    answers = ask(3, agree, [{"a": rank} for rank in range(3)], errors, [0] * 3)
    assert answers[0] == (BatchError, "first")
    assert answers[2] == (KernelError, "third")
    assert answers[1][0] is RankMismatchError
    assert "first" in answers[1][1]


def test_only_the_facts_that_differ_are_named(ask):
    facts = [{"length": 8, "dtype": "bf16"}, {"length": 9, "dtype": "bf16"}, {"length": 8, "dtype": "bf16"}]
    for kind, message in ask(3, agree, facts, [None] * 3, [1] * 3):
        assert kind is RankMismatchError
        assert "length: rank 0 has 8, rank 1 has 9, rank 2 has 8" in message
        assert "dtype" not in message
        assert "BurstParallelismConfig" in message


def test_a_fact_that_only_one_rank_has_is_named_on_all(ask):
    for kind, message in ask(2, agree, [{"a": 1}, {"a": 1, "b": 2}], [None] * 2, [0] * 2):
        assert kind is RankMismatchError
        assert "b: rank 0 has None, rank 1 has 2" in message


def find_groups(rank: int, size: int) -> list:
    world = ContextGroup.from_mesh(None)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    unnamed = init_device_mesh("cpu", (2, 2))
    by_process_group = ContextGroup.from_mesh(dist.group.WORLD)
    single = ContextGroup.from_mesh(init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "cp")))
    with pytest.raises(ConfigError, match=r"2 dimensions.*'cp'"):
        ContextGroup.from_mesh(unnamed)
    with pytest.raises(ConfigError, match="DeviceMesh or a ProcessGroup, got str"):
        ContextGroup.from_mesh("cp")
    inner = ContextGroup.from_mesh(grid)
    return [world == by_process_group, (world.rank, world.size), (inner.rank, inner.size), single == ContextGroup()]


def test_a_group_is_found_in_a_mesh_or_refused(ask):
    answers = ask(4, find_groups)
    assert answers == [[True, (rank, 4), (rank % 2, 2), True] for rank in range(4)]


def test_without_distributed_the_group_is_this_process():
    assert ContextGroup.from_mesh(None) == ContextGroup(0, 1, "")


def ask_for_symmetric_memory(rank: int, size: int, schedule: str) -> str:
    arguments = good_arguments(rank, size)
    change(arguments, schedule=schedule, transport="symmetric")
    with pytest.raises(ConfigError) as caught:
        burst_attention(**arguments)
    return str(caught.value)


def test_symmetric_memory_is_refused_where_there_is_none(ask):
    for schedule in ("kv_ring", "auto"):
        for message in ask(2, ask_for_symmetric_memory, schedule):
            assert "rank 0: symmetric memory needs a GPU of NVIDIA and Triton, not cpu alone; rank 1" in message
            assert "'p2p'" in message
