"""The context of a layer: who knows of it, first and again, and that nothing is left behind."""

import weakref
from collections import UserDict
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_burst.attention import AttentionCache
from hf_burst.errors import ConfigError
from hf_burst.hf.context import CheckpointedRun, LayerContext, current, entered
from tests.support import models
from tests.support.tiny_models import tiny_model

OUTER = LayerContext(tile=3)


def ignore(problem: BaseException | None) -> None:
    """Nobody is told."""


def test_what_was_before_comes_back() -> None:
    with entered(OUTER):
        with suppress(KeyboardInterrupt), entered(None):
            assert current() is None
            raise KeyboardInterrupt
        assert current() is OUTER
    assert current() is None


def test_threads_start_without_one() -> None:
    found: list[Any] = []
    with entered(OUTER):
        thread = Thread(target=lambda: found.append(current()))
        thread.start()
        thread.join()
    assert found == [None]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_runs_again_in_its_first_context(reentrant: bool) -> None:
    seen: list[LayerContext | None] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append(current())
        return x.sin().cos()

    cache = AttentionCache(1.0)
    with entered(OUTER):
        run = CheckpointedRun(layer, cache, ignore)
        x = torch.ones(3, requires_grad=True)
        out = checkpoint(run, x, use_reentrant=reentrant)
        assert cache.position is None
    with torch.no_grad():
        run.for_output(x)
    assert (cache.position, cache.for_output) == (0, True)
    out.sum().backward()
    assert (cache.position, cache.for_output) == (0, False)
    assert current() is None
    first, *others = seen
    assert first is not None
    assert (first.tile, first.cache) == (3, cache)
    assert len(others) == 2
    assert all(context is first for context in others)


@pytest.mark.parametrize(("bound", "reentrant"), [(False, False), (True, False), (True, True)])
def test_what_a_layer_writes_when_it_runs_again_goes_with_that_run(bound: bool, reentrant: bool) -> None:
    """As layers of Gemma 4 write keys that others share: graphs of runs would live until the last backward pass."""
    shared, written = UserDict({"first": (torch.ones(3),)}), []

    def layer(x: torch.Tensor, shared: UserDict) -> torch.Tensor:
        (before,) = shared["first"]
        shared["last"] = (x.sin(),)
        written.append(weakref.ref(shared["last"][0]))
        return (before * shared["last"][0]).cos()

    run = CheckpointedRun(partial(layer, shared=shared) if bound else layer, None, ignore)
    x = torch.ones(3, requires_grad=True)
    named = {} if bound else {"shared": shared}
    out = checkpoint(run, x, use_reentrant=reentrant, **named)
    kept = shared["last"]
    with torch.no_grad():
        run.for_output(x, **named)
    out.sum().backward()
    assert shared["last"] is kept
    assert len(written) == 3
    assert [reference() is None for reference in written] == [False, True, True]


def test_an_error_is_told_and_leaves_nothing() -> None:
    told: list[Any] = []

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CheckpointedRun(fail, None, told.append)()
    assert [type(problem) for problem in told] == [KeyboardInterrupt]
    assert current() is None


def test_a_checkpoint_of_others_that_tells_attention_nothing_is_an_error() -> None:
    """Nemotron hands keyword arguments to no attention. Its layers would run again as if the batch was one document."""
    model = models.patch(tiny_model("NemotronForCausalLM").train())
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    loss = model(**models.make_batch("packed")).loss
    with pytest.raises(ConfigError, match="NemotronAttention runs again in the backward pass, by a checkpoint that"):
        loss.backward()
