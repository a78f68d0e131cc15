"""Cuts the tokens of a batch over the ranks, or takes a batch that is cut already; checks learned positions."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...config import Memory
from ...errors import BatchError
from ...layers.loss import IGNORE_INDEX
from ...plan import Segments
from ...ranks.layout import SequenceLayout, check_prefixes
from ..attention import masks_with_blocks
from ..batches.cutting import bound_arguments, cut_inputs, cut_targets, layout_of
from ..batches.documents import tokens_of
from ..batches.joining import Joined
from ..batches.modalities import SAME_MODALITIES, check_modalities, values_besides_text
from ..batches.sharded import LAYOUT_KEY, checksum, is_sharded, layout_of_shard, sum_of_bits
from ..context import PASS_KEY, LaidTokens, ShardedPass, change_pass
from ..forward_pass import LOSS, Batch, Call
from ..models.cut_point import cut_path, modalities_of
from ..models.support import layer_patterns
from ..models.task import task_named
from ..spread.where import Where
from ..view import ModelView, children_of
from .base import Args, Handles, Kwargs, Part
from .dropout import DropoutStreams
from .recurrence import NO_FORKS, forks, sizes_to_cut, way_of
from .shared_beginnings import SharedBeginnings, by_place, row_of_texts

CONTENT = "content (checksum)"
_SAME_SHARING = "Give every rank the same batch, and BurstConfig(share_prefixes=...) the same value."
_TABLES = ("wpe", "pos")  # in names of position tables


@dataclass(frozen=True)
class LearnedPositions:
    """What a model's learned position embeddings require of position ids; rotary positions require nothing."""

    tables: tuple[nn.Module, ...] = ()  # the embeddings, or modules that hold one as a tensor
    from_mask: bool = False  # whether positions count from the first token that attention_mask shows, as in OPT
    padding_idx: int | None = None  # the token that is not counted; positions begin one above it, as in RoBERTa

    @classmethod
    def of(cls, view: ModelView) -> "LearnedPositions":
        """Finds the position embeddings of a model by their names."""
        tokens = view.root.get_input_embeddings()
        tables: list[nn.Module] = []
        from_mask, padding_idx = False, None
        owners: list[Any] = view.modules
        for owner in owners:
            if isinstance(getattr(owner, "pos_encoding", None), Tensor):  # CTRL
                tables.append(owner)
            if numbers_tokens(owner):
                padding_idx = owner.padding_idx
            for name, module in children_of(owner).items():
                if isinstance(module, nn.Embedding) and module is not tokens and any(part in name for part in _TABLES):
                    tables.append(module)
                    from_mask |= "cumsum" in inspect.unwrap(type(owner).forward).__code__.co_names
        return cls(tuple(tables), from_mask, padding_idx)

    @property
    def limits(self) -> tuple[int, int] | None:
        """The position ids `[first, end)` that now have an embedding; `None` without learned positions."""
        spans = [_span(table) for table in self.tables]
        return (max(first for first, _ in spans), min(end for _, end in spans)) if spans else None

    def make(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Returns the position ids that the model makes for a full batch without any; `None` if they count from 0."""
        real, ids = batch.get("attention_mask"), batch.get("input_ids")
        if self.padding_idx is not None:
            real = torch.ones_like(batch["inputs_embeds"][..., 0]) if ids is None else ids != self.padding_idx
        elif not self.from_mask or real is None:
            return None
        real = real.long()
        return real.cumsum(dim=1) * real + (-1 if self.padding_idx is None else self.padding_idx)


def _span(table: Any) -> tuple[int, int]:
    """Returns the position ids of a table. A table that was enlarged in place may still state its old size, and a
    sharded one may hold fewer rows here."""
    if not isinstance(table, nn.Embedding):  # CTRL
        return 0, len(table.pos_encoding)
    offset = int(getattr(table, "offset", 0))
    rows = table.weight.shape[0] if table.weight.ndim == 2 else 0
    return -offset, max(table.num_embeddings, rows) - offset


def numbers_tokens(module: nn.Module) -> bool:
    """Returns whether a module counts positions from `padding_idx + 1`, skipping tokens that are `padding_idx`."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "create_position_ids_from_input_ids" in code.co_names


def segment_count(view: ModelView) -> int | None:
    """Returns the number of token types with embeddings in a table of their own; `None` without such a table."""
    tables = [getattr(module, "token_type_embeddings", None) for module in view.modules]
    return min((table.num_embeddings for table in tables if isinstance(table, nn.Embedding)), default=None)


class Tokens(Part):
    """Makes the [`Batch`] of a call: joins texts that begin alike, and lays all tokens over the ranks. Targets are cut
    outside the model, token inputs at its cut point."""

    def __init__(self, view: ModelView, streams: DropoutStreams) -> None:
        self.streams = streams
        self.cut_path = view.find(cut_path)
        # PaliGemma: type 0 is a prefix, whose tokens see each other
        self.text_type = int(getattr(view.root.config.get_text_config(), "use_bidirectional_attention", None) is True)
        self.beginnings = SharedBeginnings()

    def look(self, view: ModelView) -> Handles:
        inner = view.root.get_submodule(self.cut_path)
        reader = view.part(inner)  # tables of towers are for images
        self.learned, self.segments = LearnedPositions.of(reader), segment_count(reader)
        if not self.cut_path:
            return ()
        return [inner.register_forward_pre_hook(self._cut_inside, prepend=True, with_kwargs=True)]

    def cut(self, call: Call) -> Batch:
        """Returns what this rank computes of a call's batch, and adds facts that describe the batch."""
        if is_sharded(call.given):
            batch = self._take_shard(call)
        else:
            batch = self._cut(call, self.beginnings.join(call, self.learned.make))
        vocabulary = call.model.config.get_text_config().vocab_size
        labels = {"labels": None} if call.task.reads else {}  # these are of another kind
        check_ranges({**batch.inputs, **labels}, vocabulary, self.segments, self.learned.limits)
        layout = batch.layout
        documents = layout.documents
        call.agreement.advice["shared beginnings"] = _SAME_SHARING
        call.agreement.facts |= {
            "batch": f"{layout.batch_size} x {layout.length - layout.padding} tokens",
            "documents": f"{sum(map(len, documents)) - layout.batch_size} (checksum {hash(documents):x})",
            "shared beginnings": f"{sum(map(bool, layout.parents))} (checksum {hash(layout.parents):x})",
            "chunks": f"{len(layout.owners)} (checksum {hash(layout.owners + layout.boundaries):x})",
            "labels": batch.inputs.get("labels") is not None,
            "sharded already": batch.sharded,
            "recurrent layers by": batch.way,
        }
        if call.asked == LOSS:
            return batch
        inputs = {name: value for name, value in batch.inputs.items() if name not in ("labels", "shift_labels")}
        return replace(batch, inputs=inputs)

    def for_layers(self, call: Call, batch: Batch, memory: Memory) -> ShardedPass:
        """Returns what layers know of a pass, with the memory settings that were chosen for it."""
        layout = batch.layout
        return ShardedPass(
            layout,
            Segments(layout.sharding, layout.documents, layout.parents),
            call.group,
            replace(call.config, memory=memory),
            LaidTokens.of(layout, call.group.rank, tokens_of(batch.inputs).device, call.view.find(by_place)),
            call.task.causal,
            batch.way,
        )

    def _take_shard(self, call: Call) -> Batch:
        """Returns the batch of a call that arrived sharded."""
        name = type(call.model).__name__
        if self.cut_path and (modalities_of(call.model.config) or call.asked.pooling is None):
            raise BatchError(f"{name} reads whole sequences before they are cut. Give full batches (no BurstCollator).")
        made_for = task_named(call.task.causal)  # models without a head have no shards of their own
        layout, about = layout_of_shard(call.given, call.group, made_for), call.given[LAYOUT_KEY]
        padded = about.padded and call.view.find(by_place)
        from_mask = about.padded and self.learned.from_mask
        BatchError.refuse(
            (
                layout.parents and (padded or not forks(call.view)),
                f"The texts of the batch were joined, and {name} cannot share their beginnings: queries are scaled by "
                f"places that count padding, or {NO_FORKS}. Leave share_prefixes=True out of the config of "
                "BurstCollator.",
            ),
            (
                from_mask or self.learned.padding_idx is not None,
                f"{name} counts positions from its padding, which was not known when the batch was sharded. Give full "
                "batches (no BurstCollator).",
            ),
        )
        call.agreement.add(CONTENT, about.fingerprint)
        targets = call.given.get(call.task.targets)
        inputs = {key: value for key, value in call.given.items() if key != LAYOUT_KEY} | {"labels": targets}
        lies = Where(layout, call.group, share=self.streams.share)
        return Batch(call.given, lies, True, inputs, way_of(call, layout), targets)

    def _cut(self, call: Call, joined: Joined | None) -> Batch:
        """Cuts a full batch: its targets here, its token inputs here or at the cut point."""
        given = call.given if joined is None else row_of_texts(joined, call)
        row, parents = (given, ()) if joined is None else (joined.batch, (joined.parents,))
        patterns, rank = layer_patterns(call.model.config, call.task), call.group.rank
        layout = layout_of(row, call.config, call.group.size, call.task, patterns, sizes_to_cut(call), parents)
        self._check_images(call, given, layout)
        labelled = row if "labels" in given else {}
        inputs = {**given, **cut_targets(labelled, layout, rank, call.task)}
        self._add_content(call)
        if not self.cut_path:
            inputs = cut_inputs(inputs, layout, rank, self.learned.make(given))
        targets = inputs.get(call.task.targets)
        lies = Where(layout, call.group, joined, self.streams.share)
        return Batch(given, lies, False, inputs, way_of(call, layout), targets)

    def _check_images(self, call: Call, given: Mapping[str, Any], layout: SequenceLayout) -> None:
        """Raises for images and sound that are not served, and for prefixes that a cut would divide."""
        wraps = self.cut_path and modalities_of(call.model.config)
        if not wraps and given.get("pixel_values") is None:  # Chameleon has its images inside
            return
        held = check_modalities(given, type(call.model), self.text_type)
        types = given.get("token_type_ids")
        if self.text_type and types is not None:
            check_prefixes(types, layout, call.model.config.get_text_config())
        call.agreement.add("images and sound", held, SAME_MODALITIES)

    def _add_content(self, call: Call) -> None:
        """Adds a checksum of the batch to the facts: of all texts, because a joined row does not show them."""
        if call.group.size == 1:
            return
        given, content = call.given, checksum(call.given)
        kinds = given.get("mm_token_type_ids")
        others = [*values_besides_text(given), *([] if kinds is None else [kinds])]
        for values in others if self.cut_path or call.task.reads else ():
            content = content * 3 + sum_of_bits(values).to(content.device)
        call.agreement.add(CONTENT, content)

    @torch.compiler.disable
    def _cut_inside(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Forward pre-hook of a cut point inside the model."""
        if self.run is None:
            return None
        whole, batch = bound_arguments(module, args, kwargs), self.run.batch
        if batch.sharded:
            return (), {**whole, PASS_KEY: self.run.sharded_pass}
        joined = batch.lies.joined
        row = whole if joined is None else joined.inputs(whole)
        inputs = cut_inputs(row, batch.layout, self.run.group.rank, self.learned.make(batch.given))
        masks = masks_with_blocks(whole.get("attention_mask"), batch.layout)
        sharded_pass = replace(self.run.sharded_pass, masks=masks)
        change_pass(sharded_pass)
        return (), {**inputs, PASS_KEY: sharded_pass}


def check_ranges(
    inputs: Mapping[str, Any], vocabulary: int, segments: int | None, positions: tuple[int, int] | None
) -> None:
    """Raises for token ids, labels, token types (by default limited by the vocabulary) and learned positions that the
    model lacks. An index error on one rank would leave the others waiting."""
    limits = dict.fromkeys(("input_ids", "labels", "shift_labels"), (0, vocabulary))
    limits["token_type_ids"] = (0, segments or vocabulary)
    if positions is not None:
        limits["position_ids"] = positions
    for key, (first, end) in limits.items():
        value = inputs.get(key)
        if not isinstance(value, Tensor):
            continue
        wrong = (value < first) | (value >= end)
        if "labels" in key:
            wrong &= value != IGNORE_INDEX
        if wrong.any():
            raise BatchError(
                f"{key} holds {value[wrong][0].item()}; this model takes {first} to {end - 1}. Does the tokenizer "
                "belong to the model, and is the sequence no longer than its learned positions?"
            )
