"""What is cut, and where: documents by the best that is known of them, token inputs as data, models cut inside."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

import hf_burst
from hf_burst.attention import SequenceLayout
from hf_burst.errors import BatchError
from hf_burst.hf import patch
from hf_burst.hf.batches.cutting import cut_inputs
from hf_burst.hf.batches.documents import documents_of
from hf_burst.hf.forward_pass import Batch, Call, ForwardPass
from hf_burst.hf.models.cut_point import cut_path
from hf_burst.hf.models.task import CAUSAL, MASKED
from hf_burst.hf.parts.base import Part
from hf_burst.hf.spread.value import Spread
from hf_burst.hf.view import ModelView
from tests.hf.test_patch import cut_at, group_mean, part_of
from tests.support import models
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]
IDS = torch.ones(1, 8, dtype=torch.long)
JUMPS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
NUMBERS = torch.tensor([[4, 4, 7, 7, 7, 7, 1, 1]], dtype=torch.int32)
LENGTHS = torch.tensor([0, 5, 8], dtype=torch.int32)
PADDING = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0]])


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, (0, 8)),
        ({"position_ids": JUMPS}, (0, 3, 8)),
        ({"position_ids": JUMPS, "seq_idx": NUMBERS}, (0, 2, 6, 8)),
        ({"position_ids": JUMPS, "seq_idx": NUMBERS, "cu_seq_lens_q": LENGTHS}, (0, 5, 8)),
        ({"position_ids": JUMPS, "cu_seq_lens_q": LENGTHS}, (0, 5, 8)),
        ({"seq_idx": NUMBERS, "attention_mask": PADDING}, (0, 1, 2, 6, 8)),
        ({"position_ids": JUMPS, "seq_idx": torch.zeros_like(NUMBERS)}, (0, 8)),
        ({"position_ids": JUMPS, "seq_idx": NUMBERS, "attention_mask": torch.ones_like(IDS)}, (0, 2, 6, 8)),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_explicit_boundaries_win_over_jumps_of_positions(keys: dict[str, torch.Tensor], wanted: tuple[int, ...]):
    assert documents_of({"input_ids": IDS, **keys}) == [wanted]


def test_each_row_has_documents_of_its_own():
    batch = {"input_ids": IDS.expand(2, -1), "seq_idx": torch.cat([NUMBERS, NUMBERS.flip(1)])}
    assert documents_of(batch) == [(0, 2, 6, 8), (0, 2, 6, 8)]
    padded = {"input_ids": IDS, "attention_mask": PADDING}
    assert documents_of(padded, CAUSAL) == [(0, 1, 8)]
    assert documents_of(padded, MASKED) == [(0, 1, 7, 8)]


@pytest.mark.parametrize("numbers", [NUMBERS[:, 1:], NUMBERS[0], [0, 0]])
def test_numbers_of_documents_that_do_not_fit_are_refused(numbers: Any):
    with pytest.raises(BatchError, match=r"seq_idx is .* a tensor of shape \(1, 8\)"):
        documents_of({"input_ids": IDS, "seq_idx": numbers})


def disagree(rank: int, size: int) -> None:
    """Documents end elsewhere than positions start anew: boundaries decide, and positions stay positions."""
    model = models.make_model("llama", torch.float64).train()
    batch = models.make_batch("plain")
    ids, labels, length = batch["input_ids"][:1], batch["labels"][:1], 37
    positions = torch.cat([torch.arange(30), torch.arange(7)])[None]
    pieces = [
        model(input_ids=ids[:, part], position_ids=positions[:, part], attention_mask=torch.ones_like(ids[:, part]))
        for part in (slice(0, 11), slice(11, length))
    ]
    logits = torch.cat([piece.logits for piece in pieces], dim=1)
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), models.shifted(labels).flatten()).detach()
    numbers = (torch.arange(length) >= 11).int()[None]
    models.patch(model)
    packed = {"input_ids": ids, "labels": labels, "position_ids": positions}
    for boundaries in ({"seq_idx": numbers}, {"cu_seq_lens_q": torch.tensor([0, 11, length])}):
        for given in (packed | boundaries, hf_burst.shard_batch(packed | boundaries)):
            torch.testing.assert_close(model(**given).loss.detach(), wanted, rtol=1e-10, atol=1e-10)
    assert (model(**packed).loss - wanted).abs() > 1e-4, "jumps alone are other documents"


def test_positions_stay_positions_where_boundaries_are_known(ranks: Ranks) -> None:
    ranks(2).run(disagree)


@pytest.mark.parametrize("rows", [3, 4])
def test_position_ids_of_several_rows_are_cut_along_their_tokens(rows: int):
    layout = SequenceLayout.for_batch([(0, 13)] * 2, 3)
    positions = torch.arange(rows * 2 * 13).reshape(rows, 2, 13)
    inputs = {"inputs_embeds": torch.randn(2, 13, 5), "position_ids": positions}
    parts = [cut_inputs(inputs, layout, rank) for rank in range(3)]
    for name, dim in (("inputs_embeds", 1), ("position_ids", 2)):
        shards = [part[name].transpose(1, dim) for part in parts]
        torch.testing.assert_close(layout.unshard(shards).transpose(1, dim), inputs[name])
    one_row = cut_inputs({**inputs, "position_ids": positions[0, :1]}, layout, 0)["position_ids"]
    assert torch.equal(one_row[0], one_row[1])


def test_a_cut_point_is_found_by_the_class_or_its_base():
    class Own(type(models.make_model("llama"))):
        pass

    model = Own(models.make_model("llama").config)
    assert cut_path(ModelView(model)) == ""
    with cut_at("model"):
        assert cut_path(ModelView(model)) == "model"
        model = models.make_model("gpt2")
        assert cut_path(ModelView(model)) == ""


def patch_inside(model: PreTrainedModel) -> PreTrainedModel:
    with cut_at("model"):
        return models.patch(model)


def note_shapes(module: torch.nn.Module) -> tuple[RemovableHandle, list[torch.Size]]:
    """The shapes of the tokens that a module is handed."""
    seen: list[torch.Size] = []

    def note(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["input_ids"].shape)

    return module.register_forward_pre_hook(note, prepend=True, with_kwargs=True), seen


def cut_inside(rank: int, size: int, kinds: tuple[str, ...]) -> None:
    """At the inner model and at the outside, beside one process."""
    for kind in kinds:
        batch = models.make_batch(kind)
        model = models.make_model("llama", torch.float64).train()
        loss = models.plain_loss(model, batch)
        loss.backward()
        wanted = [parameter.grad.clone() for parameter in model.parameters()]
        logits = models.plain_logits(model, batch).detach()
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        patch_inside(model)
        handle, seen = note_shapes(model.model)
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable()
            model.zero_grad()
            outputs = model(**batch)
            outputs.loss.backward()
            assert isinstance(outputs.logits, Spread)
            torch.testing.assert_close(outputs.loss, loss.detach(), rtol=1e-10, atol=1e-10)
            for found, gradient in zip(group_mean(model), wanted, strict=True):
                torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-10)
        assert seen == [batch["input_ids"].shape] * 2, "what is outside of the cut point has whole sequences"
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        with torch.no_grad():
            evaluated = model.eval()(**inputs, output_hidden_states=True)
        torch.testing.assert_close(evaluated.logits[real], logits[real], rtol=1e-10, atol=1e-10)
        assert evaluated.hidden_states[1].shape[:2] == batch["input_ids"].shape
        handle.remove()
        hf_burst.unpatch_model(model)
        assert not model.model._forward_pre_hooks


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_a_model_is_cut_at_the_model_inside(ranks: Ranks, size: int) -> None:
    kinds = ("plain", "packed", "right", "left")
    if size == 1:
        cut_inside(0, 1, kinds)
    else:
        ranks(size).run(cut_inside, kinds)


def embed_outside(rank: int, size: int) -> None:
    """Embeddings of whole sequences, as of images, are cut behind what made them, whose gradient is the whole one."""
    batch = models.make_batch("left")
    model = models.make_model("llama", torch.float64).train()
    models.plain_loss(model, batch).backward()
    wanted = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    patch_inside(model)
    embeddings = model.get_input_embeddings()(batch.pop("input_ids"))
    model(inputs_embeds=embeddings, **batch).loss.backward()
    found = group_mean(torch.nn.ParameterList([model.get_input_embeddings().weight]))[0]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_gradients_reach_what_is_outside_of_the_cut_point(ranks: Ranks) -> None:
    ranks(2).run(embed_outside)


def shard_for_a_cut_inside(rank: int, size: int) -> None:
    patch_inside(models.make_model("llama").train())(**hf_burst.shard_batch(models.make_batch("plain")))


def test_shards_are_refused_where_a_model_is_cut_inside(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(shard_for_a_cut_inside)
    assert all("reads whole sequences before they are cut" in str(error) for error in caught.value.errors)


def test_generation_passes_a_cut_point_untouched() -> None:
    model, prompt = models.make_model("llama").eval(), models.make_batch("plain")["input_ids"][:, :9]
    wanted = model.generate(prompt, max_new_tokens=3, do_sample=False)
    assert torch.equal(patch_inside(model).generate(prompt, max_new_tokens=3, do_sample=False), wanted)


class Recorder(Part):
    """Notes the steps of its life."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def install(self, model: PreTrainedModel) -> tuple[()]:
        self.steps.append("install")
        return ()

    def admit(self, call: Call) -> None:
        self.steps.append("admit")
        call.agreement.add("colour", "red" if call.given.get("colour") is None else "blue")

    def check(self, call: Call, batch: Batch) -> None:
        self.steps.append("check")
        assert batch.inputs["input_ids"].numel() < call.given["input_ids"].numel()

    def begin(self, run: ForwardPass) -> None:
        self.steps.append("begin")

    def arguments(self, run: ForwardPass) -> dict[str, Any]:
        return {"colour": None}

    def after(self, run: ForwardPass, outputs: dict[str, Any]) -> None:
        self.steps.append("after")
        outputs["loss"] = outputs["loss"] * 2

    def end(self) -> None:
        self.steps.append("end")

    def remove(self, model: PreTrainedModel) -> None:
        self.steps.append("remove")


def add_a_part(rank: int, size: int) -> None:
    batch, model = models.make_batch("plain"), models.make_model("llama").train()
    wanted = models.plain_loss(model, batch)
    parts = patch._Patch.make_parts
    with mock.patch.object(patch._Patch, "make_parts", lambda *arguments: (*parts(*arguments), Recorder())):
        models.patch(model)
    recorder = part_of(model, Recorder)
    torch.testing.assert_close(model(**batch).loss, 2 * wanted)
    assert recorder.steps == ["install", "end", "admit", "check", "begin", "after", "end"]
    recorder.steps.clear()
    with mock.patch.object(type(model.model), "forward", side_effect=EOFError), pytest.raises(EOFError):
        model(**batch)
    assert recorder.steps == ["end", "admit", "check", "begin", "end"]
    recorder.steps.clear()
    with pytest.raises(hf_burst.errors.RankMismatchError, match="colour: rank 0 has red, rank 1 has blue"):
        model(**batch, colour=rank or None)
    assert recorder.steps == ["end", "admit", "check", "end"], "no rank begins a pass on which they do not agree"
    hf_burst.unpatch_model(model)
    assert recorder.steps[-1] == "remove"


def test_a_new_capability_is_a_new_part(ranks: Ranks) -> None:
    ranks(2).run(add_a_part)
