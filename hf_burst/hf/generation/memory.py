"""`remember`: a document read once, whose keys and values stay on the ranks, for any number of questions."""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
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
from ..batches.sharded import checksum, sum_of_octets
from ..models.recurrent import recurrent_modules
from ..parts.rope import follows_length
from ..parts.tokens import numbers_tokens
from ..sharded_cache import ShardedCache
from ..view import ModelView, device_of
from .request import adapted_modules, adapters_at_work, cache_key, check, idle_weights, patched

_ABOUT, _DOCUMENT = "memory.json", "document.safetensors"
_REMEMBER_ANEW = "Call hf_burst.remember anew."
# entries of configs which no hidden state follows from, in evaluation, beside rates of dropout
_UNREAD = {
    *("_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "initializer_range"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("id2label", "label2id", "problem_type", "bos_token_id", "eos_token_id", "router_aux_loss_coef"),
}


@dataclass(frozen=True, eq=False)
class RememberedDocument:
    """A document that a model has read. Its keys and values lie on the ranks of a group; [`remember`] makes it.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, tokens)`): The document, on every rank.
        logits (`torch.Tensor` of shape `(1, 1, vocabulary)`): The scores of the token behind it, on every rank.
        layers (`tuple`): What this rank holds of each layer; `None` for one without keys of its own.
        group ([`ContextGroup`]): The ranks.
        about (`dict`): The class of the model, its config, and a checksum of the weights that it was read with.
    """

    input_ids: Tensor
    logits: Tensor
    layers: tuple[Keys | None, ...]
    group: ContextGroup
    about: Mapping[str, Any]

    def __len__(self) -> int:
        """Its tokens."""
        return self.input_ids.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that this rank holds."""
        held = [part for keys in self.layers if keys is not None for part in (keys.keys, keys.values)]
        return sum(part.nbytes for part in held)

    @property
    def number(self) -> int:
        """A checksum of the document."""
        return int(checksum({"input_ids": self.input_ids}) or 0)

    def cache(self) -> ShardedCache:
        """A cache that begins with the document, and leaves it as it is."""
        return ShardedCache.of_document(self.group, len(self), self.layers)

    def check(self, model: PreTrainedModel, group: ContextGroup) -> None:
        """Raises for another model, for weights or a config that have changed, and for other ranks. All ranks call it,
        after they have agreed to: sharded weights are gathered one by one.

        Raises:
            ConfigError: With what differs.
            RankMismatchError: If it differs on another rank.
        """
        error = None
        try:
            self._compare(about(model), group)
        except Exception as problem:  # whatever it is, the other ranks must not wait for this one
            error = problem
        group.agree({}, error, device_of(model), doing="a comparison of weights with a memory")

    def _compare(self, now: Mapping[str, Any], group: ContextGroup) -> None:
        if self.about["model"] != now["model"]:
            raise ConfigError(
                f"The memory is of a {self.about['model']}, and the model is a {now['model']}. {_REMEMBER_ANEW}"
            )
        before, config = self.about.get("config"), now["config"]
        if before is None:
            raise ConfigError(f"The memory was saved by an older hf_burst, without a config. {_REMEMBER_ANEW}")
        for name in sorted(before.keys() & config.keys()):  # releases of Transformers add entries
            if before[name] != config[name]:
                raise ConfigError(
                    f"config.{name} is {config[name]}, and was {before[name]} when the model read the "
                    f"document: its keys would be others. Set it back, or call hf_burst.remember anew."
                )
        if self.about["weights"] != now["weights"]:
            raise ConfigError(
                "The weights of the model have changed since it read the document (a step of the optimizer, an adapter "
                f"that was switched or scaled, other rotary positions, autocast): its keys would be others. "
                f"{_REMEMBER_ANEW}"
            )
        if self.group.members != group.members:
            raise ConfigError(
                f"The memory lies on the ranks {self.group.members or (0,)}, and the model on {group.members or (0,)}. "
                f"Save it, and load it on these ranks. {_REMEMBER_ANEW}"
            )

    def save(self, folder: str | Path) -> None:
        """Writes the memory to a folder, which all ranks reach. All ranks of the group call it.

        Args:
            folder (`str` or `Path`): Where; it is made.
        """
        folder, rank = Path(folder), self.group.rank
        error: BaseException | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _ABOUT).unlink(missing_ok=True)  # until all of it is there
            held = {
                f"{number}.{name}": getattr(keys, name).clone()  # layers share positions
                for number, keys in enumerate(self.layers)
                if keys is not None
                for name in ("keys", "values", "positions")
            }
            save_file(held, folder / _file(rank, self.group.size))
            if rank == 0:
                save_file({"input_ids": self.input_ids, "logits": self.logits}, folder / _DOCUMENT)
        except BaseException as problem:  # whatever it is, the other ranks must not wait for this one
            error = problem
        self.group.agree({}, error, self.input_ids.device, doing="saving a memory")
        try:
            if rank == 0:
                (folder / _ABOUT).write_text(json.dumps({**self.about, "ranks": self.group.size}))
        except BaseException as problem:  # of a disk that is full
            error = problem
        self.group.agree({}, error, self.input_ids.device, doing="saving a memory")

    @classmethod
    def load(cls, model: nn.Module, folder: str | Path) -> "RememberedDocument":
        """Reads a memory that [`save`] wrote, over any number of ranks. All ranks of the group call it.

        Args:
            model (`nn.Module`): The patched model that read the document, with the same weights and config.
            folder (`str` or `Path`): Where it lies.

        Raises:
            ConfigError: If the folder holds no whole memory, or that of another model, config or weights.
        """
        base, group = patched(model)
        memory, error = None, None
        try:
            memory = cls._read(base, group, Path(folder))
        except BaseException as problem:  # whatever it is, the other ranks must not wait for this one
            error = problem
        group.agree({"folder": str(folder)}, error, device_of(base), doing="loading a memory")
        assert memory is not None, "there was no error"
        memory.check(base, group)
        return memory

    @classmethod
    def _read(cls, model: PreTrainedModel, group: ContextGroup, folder: Path) -> "RememberedDocument":
        if not (folder / _ABOUT).is_file():
            raise ConfigError(f"{folder} holds no memory: {_ABOUT} is not there. RememberedDocument.save writes it.")
        try:
            return cls._read_files(model, group, folder)
        except (OSError, KeyError, ValueError, SafetensorError) as problem:
            raise ConfigError(f"{folder} holds no whole memory ({problem}). {_REMEMBER_ANEW}") from problem

    @classmethod
    def _read_files(cls, model: PreTrainedModel, group: ContextGroup, folder: Path) -> "RememberedDocument":
        known = json.loads((folder / _ABOUT).read_text())
        ranks, device = known.pop("ranks"), str(device_of(model))
        parts = [safe_open(folder / _file(rank, ranks), framework="pt", device=device) for rank in range(ranks)]
        layers = list[Keys | None]()
        for number in range(known["layers"]):
            names = [f"{number}.{name}" for name in ("keys", "values", "positions")]
            there = names[0] in parts[0].keys()  # noqa: SIM118 (of safetensors, no dict)
            dealt = [_dealt(parts, name, group) for name in names] if there else []
            layers.append(Keys(dealt[0], dealt[1], dealt[2], before=True) if there else None)
        with safe_open(folder / _DOCUMENT, framework="pt", device=device) as document:
            return cls(document.get_tensor("input_ids"), document.get_tensor("logits"), tuple(layers), group, known)


@torch.no_grad()
def remember(model: nn.Module, input_ids: Tensor) -> RememberedDocument:
    """Has a model read a document once, for any number of questions: `generate(..., memory=memory)`.

    Every rank of the group calls it with the same document. It is read as a prompt of [`generate`], and its keys and
    values stay on the ranks that computed them.

    Args:
        model (`nn.Module`): As in [`generate`].
        input_ids (`torch.LongTensor` of shape `(1, tokens)`): The document.

    Returns:
        [`RememberedDocument`]

    Raises:
        BatchError: If the document is empty, or more than one.
        UnsupportedModelError: As [`generate`], and if layers have a state, or positions depend on the longest one or on
            the token that pads.

    Example:

    ```python
    >>> memory = hf_burst.remember(model, book)
    >>> answers = hf_burst.generate(model, input_ids=questions, attention_mask=mask, memory=memory, max_new_tokens=64)
    ```
    """
    base, group = patched(model)
    error: Exception | None = None
    checksums: dict[str, Tensor] = {}
    try:
        check(base, {"input_ids": input_ids, "use_cache": True})
        if batch_shape({"input_ids": input_ids})[0] != 1:
            raise BatchError(f"A memory is of one document, not {len(input_ids)}. Remember each by itself.")
        view = ModelView(base)
        if recurrent_modules(view):
            raise UnsupportedModelError(
                f"{type(base).__name__} has layers with a state, which questions of different lengths would not begin "
                "alike. Generate with document and question as one prompt."
            )
        if any(map(follows_length, view.modules)):
            raise UnsupportedModelError(
                f"Rotary positions of this {type(base).__name__} depend on the longest one, so keys of a document "
                "would be others beside a question. Generate with document and question as one prompt."
            )
        if any(map(numbers_tokens, view.modules)):
            raise UnsupportedModelError(
                f"{type(base).__name__} counts positions from padding_idx + 1 where it reads a document, and generate "
                "counts a question behind it from 0. Generate with document and question as one prompt."
            )
        checksums = {"document (checksum)": checksum({"input_ids": input_ids}) or torch.zeros((), dtype=torch.int64)}
    except Exception as problem:  # whatever it is, the other ranks must not wait for this one
        error = problem
    advice = dict.fromkeys(("document (checksum)",), "Give remember the same document on all ranks.")
    group.agree({}, error, device_of(base), 0, checksums, advice, "remember")
    known = about(base)  # sharded weights are gathered, so all ranks must have come here
    config = {f"config.{name}": value for name, value in known["config"].items()}
    group.agree({**known, **config, "config": None}, None, device_of(base), doing="remember")
    cache, input_ids = ShardedCache(group), input_ids.to(device_of(base))
    logits = base(input_ids=input_ids, **{cache_key(base): cache}, use_cache=True, logits_to_keep=1).logits[:, -1:]
    layers = tuple(layer.document for layer in cache.layers)
    return RememberedDocument(input_ids, logits.clone(), layers, group, {**known, "layers": len(layers)})


def with_document(
    memory: RememberedDocument, input_ids: Tensor, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The batch of one process: document and question in each row, padded on the left; and its mask.

    Args:
        memory ([`RememberedDocument`]): The document.
        input_ids (`torch.LongTensor` of shape `(batch, tokens)`): The questions.
        attention_mask (`torch.Tensor` of shape `(batch, tokens)`, *optional*): Their padding.

    Raises:
        BatchError: If questions are empty or not padded on the left.
    """
    if input_ids.ndim != 2:
        raise BatchError(f"The questions are {tuple(input_ids.shape)}; they must be of shape (batch, tokens).")
    batch = {"input_ids": input_ids, "attention_mask": attention_mask}
    if any(stop < input_ids.shape[1] for _, stop in real_tokens(batch)):
        raise BatchError("Questions are padded on the right. Pad on the left: tokenizer.padding_side = 'left'.")
    whole = torch.cat([memory.input_ids.to(input_ids).expand(len(input_ids), -1), input_ids], 1)
    hidden = input_ids.new_zeros(len(input_ids)) if attention_mask is None else (attention_mask == 0).sum(1)
    padding, place = hidden[:, None].to(input_ids), torch.arange(whole.shape[1], device=input_ids.device)
    source = torch.where(place < padding + len(memory), place - padding, place)  # questions stay in their places
    return whole.gather(1, torch.where(place < padding, place + len(memory), source)), (place >= padding).long()


def _entries(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of a config that hidden states may follow from, those of configs inside of it too."""
    for name, value in values.items():
        if isinstance(value, Mapping) and name not in _UNREAD:
            yield from _entries({str(key): inner for key, inner in value.items()}, f"{path}{name}.")
        elif name not in _UNREAD and "drop" not in name:
            yield f"{path}{name}", json.loads(json.dumps(value, default=str))


def about(model: PreTrainedModel) -> dict[str, Any]:
    """The class of a model, its config, and a checksum of what else its keys follow from: weights, buffers, adapters
    that are at work and the precision of autocast. All ranks that share weights call it."""
    view = ModelView(model)
    for unit in view.units_of_fsdp2:  # a pass may have left weights whole, and not on all ranks
        unit.reshard()
    device = device_of(model)
    precision = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    adapted = adapted_modules(view)
    adapters = [(path, work) for path, module in adapted if (work := adapters_at_work(module))]
    idle = {weight for _, module in adapted for weight in idle_weights(module)}
    total = torch.tensor(zlib.crc32(str((adapters, precision)).encode()), device=device)
    for weight in chain(model.parameters(), model.buffers()):  # rotary frequencies and routers' biases are buffers
        there: Any = weight.to(device) if isinstance(weight, DTensor) else weight
        whole = there.full_tensor() if isinstance(there, DTensor) else there
        if id(weight) in idle:  # gathered all the same, as it may be at work on another rank
            continue
        whole = torch.view_as_real(whole) if whole.is_complex() else whole
        total = total * 31 + sum_of_octets(whole).to(total.device)
    entries = _entries(model.config.to_dict())
    config = {name: value for name, value in entries if not name.endswith("pad_token_id")}
    return {"model": type(model).__name__.removeprefix("FSDP"), "weights": int(total), "config": config}


def _file(rank: int, ranks: int) -> str:
    return f"rank-{rank:05}-of-{ranks:05}.safetensors"


def _dealt(parts: list[Any], name: str, group: ContextGroup) -> Tensor:
    """This rank's share of a tensor that lies in several files, along its tokens: as many on each rank."""
    slices = [part.get_slice(name) for part in parts]
    sizes = [part.get_shape()[-2 if len(part.get_shape()) == 4 else -1] for part in slices]
    first, last = (sum(sizes) * rank // group.size for rank in (group.rank, group.rank + 1))
    pieces, start = [], 0
    for part, size in zip(slices, sizes, strict=True):
        own = slice(max(0, first - start), max(0, min(size, last - start)))
        if own.start < own.stop:
            pieces.append(part[:, :, own] if len(part.get_shape()) == 4 else part[:, own])
        start += size
    whole = slices[0]
    empty = whole[:, :, :0] if len(whole.get_shape()) == 4 else whole[:, :0]
    return torch.cat(pieces, -2 if empty.ndim == 4 else -1) if pieces else empty
