"""Parts read what others found: in the same step only what a part found that they need, which stands before them."""

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from transformers import LlamaModel

import hf_burst
from hf_burst.hf import patch
from hf_burst.hf.forward_pass import Batch, Checkpoints, ForwardPass
from hf_burst.hf.groups import PATCH
from hf_burst.hf.parts.base import Part
from hf_burst.hf.view import ModelView
from tests.support import models
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
Reading = tuple[str, str, str, str]  # the part that comes later, the one before it, the step of both, and what
STEPS = ("prepare", "begin", "after")


class Watch:
    """Notes which part reads what another one wrote, or writes what another one read, in the same step: attributes of
    passes and of parts, and outputs."""

    def __init__(self) -> None:
        self.now: tuple[str, str] | None = None  # the part and the step under way
        self.written: dict[tuple[int, str], tuple[str, str]] = {}
        self.read_by: dict[tuple[int, str], set[tuple[str, str]]] = {}
        self.readings: set[Reading] = set()
        self.owners: dict[int, Any] = {}  # kept alive, or others would have their ids

    def write(self, owner: Any, name: str) -> None:
        if self.now is not None:
            self.owners[id(owner)] = owner
            self.written[id(owner), name] = self.now
            for reader in self.read_by.get((id(owner), name), ()):  # which must not come later
                self._note(self.now, reader, name)

    def read(self, owner: Any, name: str) -> None:
        if self.now is not None:
            self.owners[id(owner)] = owner
            self.read_by.setdefault((id(owner), name), set()).add(self.now)
            self._note(self.now, self.written.get((id(owner), name)), name)

    def _note(self, later: tuple[str, str], earlier: tuple[str, str] | None, name: str) -> None:
        if earlier is not None and later[0] != earlier[0] and later[1] == earlier[1]:
            self.readings.add((later[0], earlier[0], later[1], name))

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for kind in (ForwardPass, Batch, Checkpoints, Part):
                stack.enter_context(mock.patch.object(kind, "__getattribute__", self._getter(), create=True))
                stack.enter_context(mock.patch.object(kind, "__setattr__", self._setter(), create=True))
            for kind in {type(part) for part in getattr(model, PATCH).parts}:
                for step in STEPS:
                    stack.enter_context(mock.patch.object(kind, step, self._stepping(getattr(kind, step), step)))
            yield

    def _getter(self) -> Any:
        def getter(owner: Any, name: str) -> Any:
            self.read(owner, name)
            return object.__getattribute__(owner, name)

        return getter

    def _setter(self) -> Any:
        def setter(owner: Any, name: str, value: Any) -> None:
            self.write(owner, name)
            object.__setattr__(owner, name, value)

        return setter

    def _stepping(self, method: Callable[..., Any], step: str) -> Callable[..., Any]:
        @wraps(method)
        def stepping(part: Part, run: ForwardPass, *outputs: dict[str, Any]) -> Any:
            self.now = type(part).__name__, step
            try:
                return method(part, run, *(Outputs(own, self) for own in outputs))
            finally:
                self.now = None

        return stepping


class Outputs(UserDict[str, Any]):
    """The outputs of a model, watched."""

    def __init__(self, data: dict[str, Any], watch: Watch) -> None:
        self.data, self.watch = data, watch

    def __getitem__(self, key: str) -> Any:
        self.watch.read(self.data, key)
        return self.data[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.watch.write(self.data, key)
        self.data[key] = value

    def __delitem__(self, key: str) -> None:
        self.watch.write(self.data, key)
        del self.data[key]

    def __contains__(self, key: object) -> bool:
        self.watch.read(self.data, str(key))
        return key in self.data


def readings(rank: int, size: int) -> set[Reading]:
    """Of passes that have all parts do something."""
    watch = Watch()

    def run(model: Any, batch: Any, config: hf_burst.BurstConfig | None = None, call: Any = None) -> None:
        models.patch(model, config or hf_burst.BurstConfig())
        with watch.watching(model):
            (call or (lambda: model(**batch)))()
        hf_burst.unpatch_model(model)

    plain = models.make_batch("plain")
    keeping = hf_burst.BurstConfig(memory=hf_burst.Memory(attention_keep=0.5, tiled_mlp=4))
    llama = models.make_model("llama").train()
    llama.gradient_checkpointing_enable({"use_reentrant": False})
    run(llama, plain, keeping)
    llama.eval()
    run(llama, {"input_ids": plain["input_ids"], "output_hidden_states": True})
    run(llama, None, call=lambda: hf_burst.token_losses(llama, plain))
    run(llama, None, call=lambda: hf_burst.generate(llama, plain["input_ids"], max_new_tokens=2, pad_token_id=0))
    run(models.make_model("granite").train(), plain | {"output_router_logits": True})
    run(models.make_model("llama_dynamic").train(), plain)
    run(models.make_model("bert").train(), plain)
    run(LlamaModel(models.make_model("llama").config), {"input_ids": plain["input_ids"]})
    alike = plain | {name: value[:1].repeat(2, 1) for name, value in plain.items()}
    share = hf_burst.BurstConfig(share_prefixes=True)
    run(models.make_model("llama_dynamic").train(), alike, share)
    llama.eval()
    run(llama, {"input_ids": alike["input_ids"], "output_hidden_states": True}, share)
    run(llama, None, share, call=lambda: hf_burst.token_losses(llama, alike))
    return watch.readings


def test_parts_read_in_the_same_step_only_what_they_need(ranks: Ranks) -> None:
    found = {reading for own in ranks(2).run(readings) for reading in own}
    parts = getattr(models.patch(models.make_model("llama"), hf_burst.BurstConfig()), PATCH).parts
    needs = {(type(part).__name__, need.__name__) for part in parts for need in part.needs}
    trl = {("Loss", "RouterLogits")}  # the output of TRL's fused head alone has no loss of the model's
    assert {(reader, writer) for reader, writer, _, _ in found} == needs - trl, sorted(found)


def test_parts_stand_behind_those_that_they_need() -> None:
    model = models.make_model("llama")
    kinds = [type(part) for part in patch.make_parts(ModelView(model), hf_burst.BurstConfig(), None)]
    for at, kind in enumerate(kinds):
        assert set(kind.needs) <= set(kinds[:at]), kind


def test_the_watch_sees_who_reads() -> None:
    watch, batch = Watch(), Batch({}, ())
    watch.now = "First", "prepare"
    watch.write(batch, "labels")
    watch.now = "Second", "prepare"
    watch.read(batch, "labels")
    watch.now = "Third", "begin"
    watch.read(batch, "labels")
    assert watch.readings == {("Second", "First", "prepare", "labels")}
    assert torch.is_grad_enabled()
