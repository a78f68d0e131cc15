"""What a batch tells about itself: its tokens, its padding, and its document boundaries."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ...errors import BatchError
from ..models.task import CAUSAL, Task

TOKEN_KEYS = ("input_ids", "inputs_embeds")
# keys that packing collators add; the layout replaces them
BOUNDARY_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
TYPE_KEYS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")  # 0 for text
_PACKED = "position_ids that start anew at 0"
# argument names of caches; the first is used from Transformers 5.24 on
CACHE_KEYS = ("cache", "past_key_values", "cache_params")


class Text(NamedTuple):
    """Tokens `[start, stop)` of a row."""

    row: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def tokens_of(batch: Mapping[str, Any]) -> torch.Tensor:
    """Returns the `input_ids` of a batch, `(batch, tokens)`, or else its `inputs_embeds`, `(batch, tokens, hidden)`."""
    key = next((key for key in TOKEN_KEYS if batch.get(key) is not None), TOKEN_KEYS[0])
    tensor = batch.get(key)
    if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2 or tensor.numel() == 0:
        raise BatchError(
            f"The batch holds {sorted(batch)}, and {key} is {described(tensor)}; it needs input_ids (or "
            "inputs_embeds), a tensor of shape (batch, tokens), neither of them 0."
        )
    return tensor


def described(value: Any) -> Any:
    """Returns the shape of a tensor, and the kind of anything else."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return "missing" if value is None else type(value).__name__


def cache_of(batch: Mapping[str, Any]) -> Any:
    """Returns the cache in a batch, under any of its names; `None` if there is none."""
    return next((batch[key] for key in CACHE_KEYS if batch.get(key) is not None), None)


def holds_values(name: str, value: Any) -> bool:
    """Returns whether an argument may hold values of tokens, images or sound: tensors rather than settings.
    Transformers' `generate` passes an empty mapping."""
    held = value.ndim if isinstance(value, torch.Tensor) else isinstance(value, Mapping | list | tuple) and value
    return bool(held) and name not in ("logits_to_keep", "num_items_in_batch")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in an argument, which may be a nested container; numbers in containers become tensors."""
    if isinstance(value, torch.Tensor) and value.ndim:
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(torch.tensor([inner]) if isinstance(inner, int | float) else inner)


def batch_shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Returns `(batch, tokens)` of a batch."""
    rows, length = tokens_of(batch).shape[:2]
    return rows, length


def check_shape(name: str, value: Any, shape: tuple[int, ...], advice: str = "") -> None:
    """Raises if a value of a batch is not a tensor of this shape."""
    if described(value) != shape:
        raise BatchError(f"{name} is {described(value)}; for this batch it must be a tensor of shape {shape}{advice}.")


def documents_of(batch: Mapping[str, Any], task: Task = CAUSAL) -> list[tuple[int, ...]]:
    """Returns the document boundaries of each row of a full batch, cumulative from 0 to the number of tokens.

    Explicit boundaries come first: `cu_seq_lens_q`, or else `seq_idx`. Without both, and without an `attention_mask`,
    a document begins where position ids do not increase by one, as in Transformers. Padding is its own document,
    see [`Task.padding_bounds`]. Raises for positions that restart beside a mask, because only some kernels of
    Transformers treat these as packed documents."""
    rows, length = batch_shape(batch)
    real = real_tokens(batch)
    positions = batch.get("position_ids")
    if positions is not None and positions.ndim == 3 and len(positions) in (3, 4):
        # multimodal RoPE: three rows jump at images; a row of text positions may precede them
        positions = positions[0] if len(positions) == 4 else None
    if positions is not None:
        check_shape("position_ids", positions, (1 if positions.shape[:1] == (1,) else rows, length))
        positions = positions.expand(rows, length)
    starts = _explicit_starts(batch, rows, length)
    if starts is None and positions is not None and batch.get("attention_mask") is None:
        starts = _changes(positions[:, 1:] != positions[:, :-1] + 1)
    elif starts is None:
        starts = [set() for _ in range(rows)]
        back = [] if positions is None else _changes(positions[:, 1:] <= positions[:, :-1])
        for row, (places, (start, stop)) in enumerate(zip(back, real or ((0, length),) * rows, strict=False)):
            if inside := [place for place in places if start < place < stop]:
                raise BatchError(
                    f"position_ids of row {row} go back at token {min(inside)} beside an attention_mask. Leave the "
                    "attention_mask out if documents are packed there; otherwise let positions rise."
                )
    for row, (start, stop) in enumerate(real):
        starts[row].update(task.padding_bounds(start, stop))
    return [(0, *sorted(bounds - {0, length}), length) for bounds in starts]


def real_tokens(batch: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Returns the tokens `[start, stop)` of each row that `attention_mask` shows; `()` if it hides none."""
    rows, length = batch_shape(batch)
    mask = batch.get("attention_mask")
    if mask is None:
        return ()
    check_shape("attention_mask", mask, (rows, length), f" and mark padding only. Pack documents by {_PACKED}")
    if bool((mask == 1).all()):
        return ()
    mask = mask.cpu()
    visible = (mask != 0).int()
    starts, stops = visible.argmax(1), length - visible.flip(1).argmax(1)
    places = torch.arange(length, device="cpu")
    wrong = (((places >= starts[:, None]) & (places < stops[:, None])) != mask).any(1)
    if wrong.any():
        raise BatchError(
            f"attention_mask of row {int(wrong.nonzero()[0])} is not served: it must mark tokens by 1, padding by 0 "
            f"at the ends of a row, with a token in each. Pack documents by {_PACKED}."
        )
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def texts_of(batch: Mapping[str, Any]) -> list[Text]:
    """Returns the documents of a batch, without padding."""
    rows, length = batch_shape(batch)
    real = real_tokens(batch) or ((0, length),) * rows
    texts = []
    for row, (bounds, (first, last)) in enumerate(zip(documents_of(batch), real, strict=True)):
        inside = [first, *(bound for bound in bounds if first < bound < last), last]
        texts += [Text(row, start, stop) for start, stop in pairwise(inside)]
    return texts


def _explicit_starts(batch: Mapping[str, Any], rows: int, length: int) -> list[set[int]] | None:
    """Returns where documents begin, from `cu_seq_lens_q` or else `seq_idx`; `None` without both."""
    lengths, numbers = batch.get("cu_seq_lens_q"), batch.get("seq_idx")
    if lengths is not None:
        bounds = torch.as_tensor(lengths).flatten().tolist()
        if rows != 1 or not bounds or bounds[0] != 0 or bounds[-1] != length or bounds != sorted(bounds):
            raise BatchError(
                f"cu_seq_lens_q is {str(bounds)[:80]} for a batch of {rows} x {length} tokens; packed lengths need one "
                f"row, and must rise from 0 to {length}."
            )
        return [set(bounds)]
    if numbers is None:
        return None
    check_shape("seq_idx", numbers, (rows, length), ", with one number a document")
    return _changes(numbers[:, 1:] != numbers[:, :-1])


def _changes(differs: torch.Tensor) -> list[set[int]]:
    """Returns, for each row, the tokens that differ from the previous one; `differs` is `(batch, tokens - 1)`."""
    starts: list[set[int]] = [set() for _ in range(len(differs))]
    for row, token in differs.nonzero().tolist():
        starts[row].add(token + 1)
    return starts
