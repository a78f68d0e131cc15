"""Draws models, batches and settings from a seed, and compares a pass over ranks with one process, in fp64.

    python -m tests.support.drawing --minutes 60 --first 0

Rows are compared with the unpatched model on the same batch, packed documents with the unpatched model on one document
after the other. Documents often begin alike, with the same images or with others of the same size. What hf_burst
refuses has to be refused on every rank, and is counted by its sentence.
"""

import argparse
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

import hf_burst
from hf_burst.check.tiny import Double
from hf_burst.errors import BurstError
from tests.support import models, tiny_pictures
from tests.support.ranks import RankError, RankPool
from tests.support.tiny_pictures import WITH_VIDEO, Batch
from tests.support.tiny_seeing import FAMILIES, seeing_model

TOLERANCE, IN_FP32 = 1e-9, 1e-4  # of gradients; the second where Transformers computes norms and losses in fp32
LAYOUTS = ("rows", "right", "left", "packed", "packed rows")
_LONG = 300  # tokens of a beginning that share_prefixes="auto" shares
_APART = ("GraniteDocling", "Idefics2", "Idefics3", "SmolVLM", "MiniCPMOcr", "MiniCPMV4_6", "MiniCPMV4_7")
SEEING = tuple(family for family in FAMILIES if family not in _APART)  # images of documents lie one after another


@dataclass(frozen=True)
class Document:
    """A text that begins like others of the same `beginning`, with images and videos, and ends by itself."""

    beginning: int
    length: int
    images: tuple[int, ...]
    films: tuple[int, ...]
    shade: int  # added to all pixels
    own: int  # tokens at the end that are its own
    unlabelled: int  # tokens at the beginning without labels


@dataclass(frozen=True)
class Case:
    """What a seed stands for."""

    seed: int
    family: str
    ranks: int
    layout: str
    rows: tuple[tuple[Document, ...], ...]  # one document each, but for packed rows
    positions: str  # "none", "places" or "later"
    adapters: bool
    checkpoints: bool
    tolerance: float
    config: hf_burst.BurstConfig

    @property
    def sees(self) -> bool:
        return self.family in SEEING


def draw(seed: int) -> Case:
    """The case of a seed."""
    die = random.Random(seed)
    sees = die.random() < 0.6
    family = die.choice(SEEING if sees else models.NAMES + models.RECURRENT)
    layout, checkpoints = die.choice(LAYOUTS), die.random() < 0.3
    if family == "llama_dynamic":  # scales positions by the longest text of the batch
        layout = "rows"
    documents = list(_documents(die, family, sees, long=die.random() < 0.2, even=layout == "rows"))
    packed = layout.startswith("packed")
    if layout == "packed rows":  # of one length: the same documents, each row with other ends and images
        rows = [tuple(documents), tuple(replace(own, shade=own.shade + die.randrange(2)) for own in documents)]
    else:
        rows = [tuple(documents)] if packed else [(document,) for document in documents]
    explicit = not packed and not sees and die.random() < 0.4
    memory: Any = die.choice(["auto", "manual"])
    if checkpoints and die.random() < 0.7:
        memory = hf_burst.Memory(
            activation_offloading=die.choice([0.0, 0.5, 1.0]),
            tiled_mlp=die.choice([0, 5, 16]),
            head_groups=die.choice([1, 2]),
            layers_per_checkpoint=die.choice([1, 2]),
            attention_keep=die.choice([0.0, 0.25, 0.5, 0.75, 1.0]),
        )
    config = hf_burst.BurstConfig(
        schedule=die.choice(["auto", "auto", "kv_ring", "burst", "ulysses"]),
        chunking=die.choice(["balanced", "balanced", "zigzag", "contiguous"]),
        memory=memory,
        share_prefixes=die.choice(["auto", True, True, False]),
        gradients="manual",
    )
    return Case(
        seed=seed,
        family=family,
        ranks=die.choice([1, 2, 2, 3]),
        layout=layout,
        rows=tuple(rows),
        positions=die.choice(["places", "later"]) if explicit else "none",
        adapters=die.random() < 0.25,
        checkpoints=checkpoints,
        tolerance=IN_FP32 if checkpoints else TOLERANCE,
        config=config,
    )


def _documents(die: random.Random, family: str, sees: bool, long: bool, even: bool) -> Iterator[Document]:
    """One to four documents of one or two beginnings; `even` ones have one length."""
    shown = (lambda: tuple(sorted(die.sample([0, 1], die.randrange(3))))) if sees else tuple
    beginnings = [(shown(), die.randrange(53, 80) + long * _LONG) for _ in range(die.choice([1, 1, 2]))]
    for _ in range(die.randrange(1, 5)):
        beginning = die.randrange(len(beginnings))
        images, length = beginnings[beginning]
        films = die.random() < 0.1 and family in WITH_VIDEO and not images and family not in tiny_pictures._GLM
        yield Document(
            beginning=beginning,
            length=max(length for _, length in beginnings) if even else length + die.choice([0, 0, 1, 6]),
            images=images,
            films=(0,) if films else (),
            shade=die.choice([0, 0, 1]),
            own=die.randrange(1, 9),
            unlabelled=die.choice([1, 3, 12, 30]),
        )


def document_batch(family: str, document: Document) -> Batch:
    """The batch of a document alone."""
    if family in SEEING:
        batch = tiny_pictures._row(family, document.images, document.films, document.length, document.beginning)
        for name in ("pixel_values", "pixel_values_videos"):
            if name in batch:
                batch[name] = batch[name] + document.shade
    else:
        generator = torch.Generator().manual_seed(document.beginning)
        batch = {"input_ids": torch.randint(1, models.VOCABULARY, (1, document.length), generator=generator)}
        batch["labels"] = batch["input_ids"].clone()
    end = torch.Generator().manual_seed(100 + document.own + 7 * document.length)
    tail = torch.randint(1, tiny_pictures.WORDS, (document.own,), generator=end)
    for name in ("input_ids", "labels"):
        batch[name][0, -document.own :] = tail
    batch["labels"][:, : document.unlabelled] = -100
    return batch


def join(parts: Sequence[Batch], dim: int) -> Batch:
    """Documents one after another (1), or as rows (0); images lie one after another in either case."""
    ids = [part["input_ids"] for part in parts]
    names = dict.fromkeys(name for part in parts for name in part)
    joined: Batch = {}
    for name in names:
        values = [part[name] for part in parts if name in part]
        of_tokens = values[0].shape == ids[0].shape if isinstance(values[0], torch.Tensor) else False
        if isinstance(values[0], list):
            joined[name] = [entry for value in values for entry in value]
        else:
            joined[name] = torch.cat(values, dim if of_tokens else 0)
    return joined


def pad(part: Batch, length: int, side: str) -> Batch:
    """A row of so many tokens, with a mask."""
    missing = length - part["input_ids"].shape[1]
    padded = {**part, "attention_mask": torch.ones_like(part["input_ids"])}
    for name, value in padded.items():
        if isinstance(value, torch.Tensor) and value.shape == part["input_ids"].shape:
            filler = torch.full((1, missing), -100 if name == "labels" else 0)
            padded[name] = torch.cat([value, filler] if side == "right" else [filler, value], 1)
    return padded


def make_model(case: Case) -> Any:
    model = seeing_model(case.family) if case.sees else models.make_model(case.family, torch.float64)
    model.train()
    if case.checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not case.adapters:
        return model
    torch.manual_seed(1)
    linear = [
        name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D) and "head" not in name
    ]
    kind = LoraConfig(r=2, target_modules=linear, init_lora_weights=False)  # "all-linear" takes parts of names
    adapted = get_peft_model(model, kind, autocast_adapter_dtype=False)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data.mul_(0.1)  # so that rounding where layers run again stays small
    adapted.enable_input_require_grads()
    return adapted.to(torch.float64)


def make_batches(case: Case) -> tuple[Batch, list[Batch]]:
    """The batch of a pass, and the batches that one process is given one after another."""
    rows = [[document_batch(case.family, document) for document in row] for row in case.rows]
    if case.layout.startswith("packed"):
        parts = [part for row in rows for part in row]
        return join([join(row, 1) for row in rows], 0), parts
    parts = [row[0] for row in rows]
    if case.layout != "rows" or len({part["input_ids"].shape for part in parts}) > 1:
        longest = max(part["input_ids"].shape[1] for part in parts)
        parts = [pad(part, longest, "left" if case.layout == "left" else "right") for part in parts]
    batch = join(parts, 0)
    if case.positions != "none":
        places = torch.arange(batch["input_ids"].shape[1])
        batch["position_ids"] = (places + (9 if case.positions == "later" else 0)).expand(len(parts), -1)
    return batch, [batch]


def exactly(case: Case) -> AbstractContextManager[Any]:
    """Computes in fp64 what Transformers computes in fp32. No mode is entered where a layer runs again."""
    return nullcontext() if case.checkpoints else Double()


def wanted(case: Case) -> tuple[float, dict[str, torch.Tensor], Batch]:
    """Loss and gradients of one process, and the batch for the ranks, with positions where documents are packed."""
    model = make_model(case)
    batch, parts = make_batches(case)
    packed, seen = case.layout.startswith("packed"), []
    decoder = model.get_base_model().get_decoder() if case.adapters else model.get_decoder()
    hook = decoder.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs.get("position_ids")), with_kwargs=True
    )
    counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    total = 0.0
    with exactly(case):
        for part, count in zip(parts, counts, strict=True):
            share = model(**part).loss * count / sum(counts)
            share.backward()
            total += share.item()
    hook.remove()
    if packed:
        batch["position_ids"] = _positions(case, parts, seen)
        batch["labels"][:, [0]] = -100
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return total, gradients, batch


def _positions(case: Case, parts: Sequence[Batch], seen: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The positions of packed rows, which begin anew in each document; where images have positions on three axes, those
    of the text come first, as Transformers has it for packed rows."""
    by_axes = any(own is not None and own.ndim == 3 for own in seen)
    places = []
    for part, own in zip(parts, seen, strict=True):
        text = torch.arange(part["input_ids"].shape[1])[None]
        if by_axes:
            own = text.expand(3, 1, -1) if own is None or own.ndim < 3 else own[-3:]
            text = torch.cat([text[None], own])
        places.append(text)
    each = len(parts) // len(case.rows)
    rows = [torch.cat(places[first : first + each], -1) for first in range(0, len(places), each)]
    return torch.cat(rows, -2)


def on_ranks(rank: int, size: int, case: Case, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    model = make_model(case)
    hf_burst.patch_model(model, case.config)
    with exactly(case):
        loss = model(**batch).loss
        loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def compare(case: Case, run: Callable[..., list[Any]]) -> str:
    """ "exact", or the sentence by which all ranks refuse the case.

    Raises:
        AssertionError: If it is wrong, or not refused by all ranks.
    """
    try:
        loss, gradients, batch = wanted(case)
    except Exception as problem:
        return f"one process cannot: {type(problem).__name__}: {problem}"
    if loss != loss:  # PaliGemma's padding on the left, whose rows attend to nothing
        return "one process cannot: its loss is not a number"
    try:
        found = run(on_ranks, case, batch)
    except RankError as problem:
        if not all(isinstance(error, BurstError) for error in problem.errors):
            raise
        return str(problem.errors[0])
    except BurstError as problem:
        return str(problem)
    loose, small = (1e-5, 1e-3) if case.checkpoints else (case.tolerance, 1e-4)
    for own, _ in found:
        assert abs(own - loss) <= loose * abs(loss), f"loss {own} for {loss}"
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    assert not {name for _, own in found for name in own} - gradients.keys(), "weights learn that should not"
    for name, gradient in gradients.items():
        mean = sum(own.get(name, torch.zeros(())) for _, own in found) / len(found)
        error = float((mean - gradient).norm()) / max(float(gradient.norm()), small * largest)
        assert error <= case.tolerance, f"the gradient of {name} is {error:.1e} off"
    return "exact"


class Runs:
    """Runs a function on as many ranks as a case has: processes are kept for the next case."""

    def __init__(self) -> None:
        self.pools: dict[int, RankPool] = {}

    def of(self, case: Case) -> Callable[..., list[Any]]:
        if case.ranks == 1:
            return lambda function, *arguments: [function(0, 1, *arguments)]
        pool = self.pools.get(case.ranks)
        if pool is None or not pool.alive:
            pool = self.pools[case.ranks] = RankPool(case.ranks)
        return pool.run

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, nargs="*", help="these alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    last, runs, ends, wrong = time.monotonic() + 60 * options.minutes, Runs(), Counter(), []
    seeds = iter(options.seeds) if options.seeds else iter(range(options.first, 10**9))
    seed = options.first - 1
    for seed in seeds:
        if time.monotonic() > last:
            break
        case = draw(seed)
        try:
            ends[re.sub(r"\d+", "N", compare(case, runs.of(case)))[:160]] += 1
        except Exception as problem:
            wrong.append(seed)
            print(
                f"seed {seed}: {case}\n{traceback.format_exc() if options.seeds else str(problem)[-600:]}", flush=True
            )
    runs.close()
    for sentence, count in ends.most_common():
        print(f"{count:6d}  {sentence}")
    print(f"seeds up to {seed}; wrong: {wrong or 'none'}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
