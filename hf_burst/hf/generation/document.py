"""`remember`: reads a document once and keeps its keys and values on the ranks, for any number of questions."""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...attention.shared_keys import Keys
from ...errors import BatchError, ConfigError, UnsupportedModelError
from ...ranks.group import ContextGroup
from ..batches.documents import batch_shape, real_tokens
from ..batches.sharded import sum_of_bits
from ..models.adapters import adapted_modules, adapters_at_work, idle_weights
from ..models.recurrent import recurrent_modules
from ..parts.rope import follows_length
from ..parts.tokens import numbers_tokens
from ..sharded_cache import ShardedCache
from ..view import ModelView, device_of
from .settings import cache_key, check, outermost, patched

_ABOUT, _DOCUMENT = "memory.json", "document.safetensors"
_HELD = ("keys", "values", "positions")
_REMEMBER_ANEW = "Call hf_burst.remember anew."
_SAME_DOCUMENT = "Give remember the same document on all ranks."
# config entries that do not affect hidden states in evaluation; dropout rates are skipped, too
_UNREAD = {
    *("_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "initializer_range"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("id2label", "label2id", "problem_type", "bos_token_id", "eos_token_id", "router_aux_loss_coef"),
}


@dataclass(frozen=True, eq=False)
class Document:
    """A document that a model has read, with its keys and values on the ranks of a group. Made by [`remember`].

    Each use compares the values of all weights, since torch does not count all writes (`.data`, fused optimizers).

    Args:
        input_ids (`torch.LongTensor` of shape `(1, tokens)`): The document, on every rank.
        logits (`torch.Tensor` of shape `(1, 1, vocabulary)`): The logits of the token after it, on every rank.
        layers (`tuple`): This rank's keys and values of each layer; `None` for a layer without its own keys.
        group ([`ContextGroup`]): The ranks.
        about (`dict`): The model's class, its config, and a checksum of the weights that read the document.
    """

    input_ids: Tensor
    logits: Tensor
    layers: tuple[Keys | None, ...]
    group: ContextGroup
    about: Mapping[str, Any]

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return self.input_ids.shape[1]

    @property
    def nbytes(self) -> int:
        """The bytes of the keys and values that this rank holds."""
        return sum(held.keys.nbytes + held.values.nbytes for held in self.layers if held is not None)

    @property
    def number(self) -> int:
        """The checksum of the document."""
        return int(sum_of_bits(self.input_ids))

    def cache(self) -> ShardedCache:
        """Returns a cache that begins with the document and leaves the document unchanged."""
        return ShardedCache.of_document(self.group, len(self), self.layers)

    def check(self, model: PreTrainedModel, group: ContextGroup) -> None:
        """Raises for another model, changed weights or config, or other ranks. All ranks must call it together, because
        sharded weights are gathered one by one.

        Raises:
            ConfigError: Names the difference.
            RankMismatchError: If another rank finds a difference.
        """
        with group.agreeing(device_of(model), "a comparison of weights with a document"):
            for difference in self._differences(about(model), group):
                raise ConfigError(f"{difference} {_REMEMBER_ANEW}")

    def _differences(self, now: Mapping[str, Any], group: ContextGroup) -> Iterator[str]:
        """Yields what differs from the model and the ranks that read the document."""
        before = self.about
        if before["model"] != now["model"]:
            yield f"A {before['model']} has read the document, and the model is a {now['model']}."
        for name in sorted(before.keys() & now.keys()):  # releases of Transformers add entries
            if name.startswith("config.") and before[name] != now[name]:
                yield (
                    f"{name} is {now[name]}, and was {before[name]} when the model read the document: its keys would "
                    "be others. Set it back, or:"
                )
        if before["weights"] != now["weights"]:
            yield (
                "The weights of the model have changed since it read the document (a step of the optimizer, an adapter "
                "that was switched or scaled, other rotary positions, autocast): its keys would be others."
            )
        if self.group.members != group.members:
            yield (
                f"The document lies on the ranks {self.group.members or (0,)}, the model on {group.members or (0,)}. "
                "Save it, and load it on these ranks, or:"
            )

    def save(self, folder: str | Path) -> None:
        """Writes the document to a folder that all ranks reach. All ranks of the group call it.

        Args:
            folder (`str` or `Path`): The folder, created if missing.
        """
        folder = Path(folder)
        rank = self.group.rank
        device = self.input_ids.device
        with self.group.agreeing(device, "saving a document"):
            held = {
                f"{number}.{name}": getattr(keys, name).clone()  # layers share positions
                for number, keys in enumerate(self.layers)
                if keys is not None
                for name in _HELD
            }
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _ABOUT).unlink(missing_ok=True)  # written again when all files are complete
            save_file(held, folder / _file(rank, self.group.size))
            if rank == 0:
                save_file({"input_ids": self.input_ids, "logits": self.logits}, folder / _DOCUMENT)
        with self.group.agreeing(device, "saving a document"):
            if rank == 0:
                (folder / _ABOUT).write_text(json.dumps({**self.about, "ranks": self.group.size}))

    @classmethod
    def load(cls, model: nn.Module, folder: str | Path) -> "Document":
        """Reads a document that [`save`] wrote, also with another number of ranks. All ranks of the group call it.

        Args:
            model (`nn.Module`): The patched model that read the document, with the same weights and config.
            folder (`str` or `Path`): The folder of the document.

        Raises:
            ConfigError: If the document is incomplete, or was written with another model, config or weights.
        """
        base, group = patched(model)
        device = device_of(base)
        with group.agreeing(device, "loading a document") as found:
            found.facts["folder"] = str(folder)
            document = cls._read(group, Path(folder), device)
        document.check(base, group)
        return document

    @classmethod
    def _read(cls, group: ContextGroup, folder: Path, device: torch.device) -> "Document":
        if not (folder / _ABOUT).is_file():
            raise ConfigError(f"{folder} holds no document: {_ABOUT} is not there. Document.save writes it.")
        try:
            known = json.loads((folder / _ABOUT).read_text())
            known["config.model_type"]  # is missing in files of another form
            ranks, where = known.pop("ranks"), {"framework": "pt", "device": str(device)}
            parts = [safe_open(folder / _file(rank, ranks), **where) for rank in range(ranks)]
            layers: list[Keys | None] = [None] * known["layers"]
            for number in range(known["layers"]):
                if f"{number}.keys" in parts[0].keys():  # noqa: SIM118 (safetensors, not a dict)
                    dealt: Any = {name: _dealt(parts, f"{number}.{name}", group) for name in _HELD}
                    layers[number] = Keys(**dealt, before=True)
            with safe_open(folder / _DOCUMENT, **where) as document:
                return cls(document.get_tensor("input_ids"), document.get_tensor("logits"), tuple(layers), group, known)
        except (OSError, KeyError, ValueError, SafetensorError) as problem:
            raise ConfigError(f"{folder} holds no whole document ({problem}). {_REMEMBER_ANEW}") from problem


@torch.no_grad()
def remember(model: nn.Module, input_ids: Tensor) -> Document:
    """Has a model read a document once, for any number of questions: `generate(..., document=document)`.

    Every rank of the group calls it with the same document. The model reads it as a [`generate`] prompt. Keys and
    values stay on the ranks that computed them.

    Args:
        model (`nn.Module`): As in [`generate`].
        input_ids (`torch.LongTensor` of shape `(1, tokens)`): The document.

    Returns:
        [`Document`]

    Raises:
        BatchError: If the document is empty, or there are several.
        UnsupportedModelError: As [`generate`], and for recurrent layers or positions that depend on the longest
            position or on the padding token.

    Example:

    ```python
    >>> document = hf_burst.remember(model, book)
    >>> answers = hf_burst.generate(model, questions, attention_mask=mask, document=document, max_new_tokens=64)
    ```
    """
    base, group = patched(model)
    device = device_of(base)
    with group.agreeing(device, "remember") as found:
        check(base, {"input_ids": input_ids, "use_cache": True})
        if batch_shape({"input_ids": input_ids})[0] != 1:
            raise BatchError(f"{len(input_ids)} documents were given. Remember each by itself.")
        _check_positions(ModelView(base))
        found.add("document (checksum)", sum_of_bits(input_ids), _SAME_DOCUMENT)
    known = about(base)  # gathers sharded weights, so all ranks must arrive here
    group.agree(known, None, device, doing="remember")
    cache = ShardedCache(group)
    input_ids = input_ids.to(device, copy=True)
    inputs: dict[str, Any] = {"input_ids": input_ids, cache_key(base): cache}
    logits = outermost(model)(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1:]
    layers = tuple(layer.document for layer in cache.layers)
    return Document(input_ids, logits.clone(), layers, group, {**known, "layers": len(layers)})


def _check_positions(view: ModelView) -> None:
    """Raises if a model would read a question after a document otherwise than in one prompt with it."""
    name = type(view.root).__name__
    why = ""
    if recurrent_modules(view):
        why = f"{name} has layers with a state, which questions of different lengths would not begin alike"
    elif any(map(follows_length, view.modules)):
        why = (
            f"Rotary positions of this {name} depend on the longest one, so keys of a document would be others beside "
            "a question"
        )
    elif any(map(numbers_tokens, view.modules)):
        why = (
            f"{name} counts positions from padding_idx + 1 where it reads a document, and generate counts a question "
            "behind it from 0"
        )
    if why:
        raise UnsupportedModelError(f"{why}. Generate with document and question as one prompt.")


def with_document(document: Document, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the batch of a single process, with document and question in each row, padded on the left, and its mask.

    Raises:
        BatchError: If questions are empty or not padded on the left.
    """
    if input_ids.ndim != 2:
        raise BatchError(f"The questions are {tuple(input_ids.shape)}; they must be of shape (batch, tokens).")
    batch = {"input_ids": input_ids, "attention_mask": attention_mask}
    if any(stop < input_ids.shape[1] for _, stop in real_tokens(batch)):
        raise BatchError("Questions are padded on the right. Pad on the left: tokenizer.padding_side = 'left'.")
    whole = torch.cat([document.input_ids.to(input_ids).expand(len(input_ids), -1), input_ids], 1)
    hidden = input_ids.new_zeros(len(input_ids)) if attention_mask is None else (attention_mask == 0).sum(1)
    padding = hidden[:, None].to(input_ids)
    place = torch.arange(whole.shape[1], device=input_ids.device)
    source = torch.where(place < padding + len(document), place - padding, place)  # questions keep their columns
    return whole.gather(1, torch.where(place < padding, place + len(document), source)), (place >= padding).long()


def _entries(values: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yields the entries of a config and its sub-configs that may change hidden states."""
    for key, value in values.items():
        name = str(key)
        if name in _UNREAD or name.endswith("pad_token_id"):
            continue
        if isinstance(value, Mapping):
            yield from _entries(value, f"{path}{name}.")
        elif "drop" not in name:
            yield f"{path}{name}", json.loads(json.dumps(value, default=str))


def about(model: PreTrainedModel) -> dict[str, Any]:
    """Returns a model's class, its config, and a checksum of all else that determines its keys: weights, buffers,
    adapters at work and the autocast dtype. All ranks that share weights call it."""
    view = ModelView(model)
    for unit in view.units_of_fsdp2:  # a pass may have left weights gathered on some ranks only
        unit.reshard()
    device = device_of(model)
    precision = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    adapters = [(path, work) for path, module in view.find(adapted_modules) if (work := adapters_at_work(module))]
    total = sum_of_bits(_weights(view, device)) + zlib.crc32(str((adapters, precision)).encode())
    return {
        "model": type(model).__name__.removeprefix("FSDP"),
        "weights": int(total),
        **dict(_entries(model.config.to_dict(), "config.")),
    }


def _weights(view: ModelView, device: torch.device) -> Iterator[Tensor]:
    """Yields the weights of a model that work, its buffers (rotary frequencies and routers' biases are some), and the
    scales of bitsandbytes, which are neither."""
    idle = {id(weight) for _, module in view.find(adapted_modules) for weight in idle_weights(module)}
    holders = (each for module in view.modules for each in (module, *module._parameters.values()) if each is not None)
    scales = dict.fromkeys(scale for holder in holders for scale in _scales(holder))
    for weight in (*view.root.parameters(), *view.root.buffers(), *scales):
        whole = weight.to(device).full_tensor() if isinstance(weight, DTensor) else weight  # type: ignore[attr-defined]
        if id(weight) not in idle:  # gathered anyway, because it may work on another rank
            yield whole


def _scales(holder: Any) -> Iterator[Tensor]:
    """Yields the scales that a module, a weight, or a state of bitsandbytes has as attributes."""
    own = vars(holder)
    for name in sorted(own.keys() & {"absmax", "code", "offset", "CB", "SCB", "quant_state", "state", "state2"}):
        if isinstance(value := own[name], Tensor):
            yield value
        elif type(value).__module__.startswith("bitsandbytes"):
            yield from _scales(value)


def _file(rank: int, ranks: int) -> str:
    return f"rank-{rank:05}-of-{ranks:05}.safetensors"


def _dealt(parts: list[Any], name: str, group: ContextGroup) -> Tensor:
    """Returns this rank's share of a tensor that several files hold: an equal part along the tokens."""
    slices = [part.get_slice(name) for part in parts]
    dim = max(1, len(slices[0].get_shape()) - 2)  # keys and values, or positions
    sizes = [piece.get_shape()[dim] for piece in slices]
    first, last = (sum(sizes) * rank // group.size for rank in (group.rank, group.rank + 1))
    pieces, start = [], 0
    for piece, size in zip(slices, sizes, strict=True):
        own = slice(*(min(max(edge - start, 0), size) for edge in (first, last)))
        pieces.append(piece[:, :, own] if dim == 2 else piece[:, own])
        start += size
    return torch.cat(pieces, dim)
