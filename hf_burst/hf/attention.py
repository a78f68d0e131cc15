"""The attention and mask functions that Transformers knows by the name `"hf_burst"`."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..attention import AttentionRequest, attend
from ..errors import UnsupportedModelError
from ..kernels import Scores
from ..plan import MaskPattern
from ..ranks.layout import Blocks, SequenceLayout, blocks_of, check_window
from .context import ShardedPass, current, current_call, refuse_blind_run

NAME = "hf_burst"
ARRIVED = "burst_arrived"  # attribute of an attention module: whether a sharded pass has called it
_REFUSED = ("sinks", "position_bias", "indices")  # arguments that change the result
# functions of transformers.masking_utils that a mask may be made of
_SLIDING, _CHUNKED, _CAUSAL = "sliding_window_overlay", "chunked_overlay", "causal_mask_function"
_BOTH_WAYS, _SLIDING_BOTH_WAYS = "bidirectional_mask_function", "sliding_window_bidirectional_overlay"
_REFERENCE = "create_reference_sliding_window_causal_mask"  # plain causal while nothing was generated yet
_BLOCKS = "blockwise_overlay"  # also shows a token all of its block, such as an image
_DOCUMENTS = ("packed_sequence_mask_function", "remap_positions_for_packed_sequence")
_KNOWN = {
    True: frozenset({_CAUSAL, _SLIDING, _CHUNKED, _REFERENCE, "and_masks", *_DOCUMENTS}),
    False: frozenset({_BOTH_WAYS, _SLIDING_BOTH_WAYS, "and_masks", *_DOCUMENTS}),
}


class _NotBuiltError(UnsupportedModelError, AttributeError):
    """Also an AttributeError, so that `hasattr` returns False."""


class LazyMask:
    """A mask that is not built: sharded attention reads how far a query sees, and only plain attention builds it.

    Not a dataclass: FSDP2 looks for tensors in the fields of dataclasses, and the arguments hold the model's config.
    """

    def __init__(self, arguments: dict[str, Any], sharded: bool) -> None:
        self.arguments, self.sharded = arguments, sharded  # of an `AttentionMaskInterface`; made in a sharded pass
        self.parts = frozenset(map(_part_of, _functions(arguments["mask_function"])))  # functions of masking_utils
        self._laid: tuple[SequenceLayout, SequenceLayout] | None = None

    def __getattr__(self, name: str) -> Any:
        raise _NotBuiltError(
            f"The model reads the attribute {name!r} of its attention mask, which is never built over several "
            "ranks: it masks by itself. Such models are not served."
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedModelError(
            f"{getattr(function, '__name__', function)} was given an attention mask that is never built over several "
            "ranks: the model masks by itself, or was unpatched before a backward pass that runs layers again."
        )

    def __getitem__(self, index: Any) -> "LazyMask | torch.Tensor":
        """Returns the mask itself for all queries, or some rows, which Gemma 4 reads where layers share keys."""
        parts = index if isinstance(index, tuple) else (index,)
        if all(part in (slice(None), slice(0, None)) for part in parts):
            return self
        return self.whole[index] if isinstance(index, tuple) or not self.sharded else getattr(self, f"[{index}]")

    @property
    def pattern(self) -> MaskPattern:
        """How far queries see, apart from documents, which the layout knows. Raises for masks that are not served."""
        causal = _CAUSAL in self.parts
        either = {"or_masks", _BLOCKS} if self.parts & {_REFERENCE, _BLOCKS} else set()
        if not self.parts - either <= _KNOWN[causal] or not self.parts & {_CAUSAL, _BOTH_WAYS}:
            raise UnsupportedModelError(
                f"The model has a mask of {', '.join(sorted(self.parts))}. Only causal masks (with windows, chunks or "
                "packed documents) and those of encoders (with windows) are exact over ranks."
            )
        size: Any = self.arguments.get("local_size")
        if _SLIDING in self.parts and _REFERENCE not in self.parts:
            return MaskPattern(True, (size or self._held(_SLIDING, "sliding_window")) - 1)
        window, chunk = _SLIDING_BOTH_WAYS in self.parts, _CHUNKED in self.parts
        return MaskPattern(causal, size if window else None, size if chunk else None)

    def laid(self, layout: SequenceLayout) -> SequenceLayout:
        """Returns `layout` with the blocks of this mask, whose tokens see each other. All layers share the result."""
        if self._laid is None or self._laid[0] is not layout:
            self._laid = layout, replace(layout, blocks=self._blocks(layout))
        return self._laid[1]

    def _blocks(self, layout: SequenceLayout) -> Blocks:
        """Returns the blocks `[start, stop)` of each row, cut at documents."""
        numbers, window = self._held(_BLOCKS, "block_sequence_ids"), self.pattern.window
        blocks = blocks_of(numbers, layout)
        if window is not None:
            mask_function = self.arguments["mask_function"]

            def sees(row: int, start: int, stop: int) -> bool:
                return bool(mask_function(*torch.tensor([row, 0, stop - 1, start], device=numbers.device)))

            check_window(blocks, window, sees)
        return blocks

    def _held(self, part: str, name: str) -> Any:
        """Returns the variable `name` that the mask function `part` closes over."""
        return next(
            inspect.getclosurevars(function).nonlocals[name]
            for function in _functions(self.arguments["mask_function"])
            if _part_of(function) == part
        )

    @cached_property
    def built(self) -> Tensor | None:
        """The boolean mask of shape `(batch, 1, q_length, kv_length)`, `None` for plain attention."""
        return sdpa_mask(**self.arguments)

    @cached_property
    def whole(self) -> Tensor:
        """The boolean mask, built also for plain attention."""
        arguments = self.arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask = sdpa_mask(**arguments)
        assert mask is not None, "skipping is not allowed"
        return mask

    @cached_property
    def added(self) -> Tensor:
        """The mask that eager attention adds to the scores."""
        return _additive(self.whole, self.arguments["dtype"])


Mask = LazyMask | Tensor | None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    burst_pass: ShardedPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes attention as Transformers' `AttentionInterface` has it: `(batch, heads, n, head_dim)` of this rank's
    tokens to `(batch, n, heads, value_dim)`, with `None` for the weights. `is_causal` and `sliding_window` count only
    without a mask; `s_aux` are attention sinks.

    If the layer's context has neither a sharded pass nor a sharded cache (a step of `model.generate`, a submodule
    called directly), every rank holds the whole sequence, and Transformers' own attention runs. The keyword
    `burst_pass` carries the pass into compiled graphs, which cannot read the context, and into checkpoints that are
    not ours.
    """
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    if refused:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(refused)} to its attention, which hf_burst does not serve. "
            "Unpatch the model (hf_burst.unpatch_model) and use another attention implementation."
        )
    cache: Any = None
    cached: Any = None
    if not torch.compiler.is_compiling() or (burst_pass is None and isinstance(attention_mask, LazyMask)):
        context = current()
        if context is not None:
            burst_pass, cache, cached = context.sharded_pass, context.cache, context.cached
        elif burst_pass is None and getattr(attention_mask, "sharded", attention_mask is None):
            refuse_blind_run(module)  # tensors come from other calls
    if burst_pass is not None:
        setattr(module, ARRIVED, True)  # read by the part `Arrivals`
        if burst_pass.group.size == 1 and query.shape[2] != key.shape[2]:
            burst_pass = None  # rows from LazyMask.__getitem__ against the whole sequence
    if burst_pass is None and cached is None:
        kwargs |= {"scaling": scaling, "is_causal": is_causal, "sliding_window": sliding_window}
        return _attend_whole(module, (query, key, value), attention_mask, softcap, s_aux, **kwargs)
    if burst_pass is not None and kwargs.get("dropout"):
        raise UnsupportedModelError(
            f"{type(module).__name__} drops attention weights (p={kwargs['dropout']}); that is not served in training. "
            "Set the dropout of its attention to 0 in the config before the model is made."
        )
    expected = burst_pass is None or burst_pass.causal
    pattern = _pattern(module, attention_mask, is_causal, sliding_window, expected)
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap or 0.0)
    if burst_pass is None:
        return cached.attend(module, (query, key, value), pattern, scores, s_aux), None
    if scales_by_place(module):
        query = _at_temperature(module, query, burst_pass.laid.places)
    dtype = value.dtype  # under peft or autocast, norms may leave q and k in fp32
    q, k, v = query.to(dtype).transpose(1, 2), key.to(dtype).transpose(1, 2), value.transpose(1, 2)
    config, layout, group = burst_pass.config, burst_pass.layout, burst_pass.group
    settings = config.kernel, config.schedule, config.transport, config.memory_settings.head_groups
    request = AttentionRequest(group, pattern, scores, *settings)
    encoded = burst_pass.laid.encoded
    if isinstance(attention_mask, LazyMask) and _BLOCKS in attention_mask.parts:
        if torch.compiler.is_compiling():
            raise UnsupportedModelError("Tokens of an image that see each other are not compiled: no torch.compile.")
        layout = attention_mask.laid(layout)
        encoded = layout.encode()
    if cached is not None:
        cached.free(module, key, value, pattern)
    out = attend(q, k, v, s_aux, layout, encoded, request, cache)
    masked = burst_pass.laid.fully_masked
    if masked is not None:
        out = out.masked_fill(masked[..., None, None], 0)
    return out, None


@torch.compiler.disable  # graphs cannot read closures; masks are made before the layers
def attention_mask(**arguments: Any) -> Mask:
    """Returns the mask for Transformers' `AttentionMaskInterface`, which is built when it is needed.

    In a sharded pass the layout knows the padding. Generation may have padding, or more keys than queries, so it gets
    its mask at once.
    """
    context, padding = current_call(), arguments.get("attention_mask")
    sharded = context is not None and (context.sharded_pass is not None or context.cached is not None)
    mask = LazyMask(arguments, sharded)
    if context is not None and context.sharded_pass is not None:
        return next((whole for whole in context.sharded_pass.masks if whole.pattern == mask.pattern), mask)
    if context is not None and context.cached is not None:  # new tokens: their cache knows the padding
        context.cached.answer.hand_back(arguments.values())
        return mask
    square = arguments["q_length"] == arguments["kv_length"]
    return mask if square and (padding is None or bool(padding.all())) else mask.built


def masks_with_blocks(given: Any, layout: SequenceLayout) -> tuple[LazyMask, ...]:
    """Returns the masks, one or several by name, that a wrapper passes to its language model, if blocks of tokens see
    each other in some of them; else none, and the language model makes its own.

    Raises:
        UnsupportedModelError: If a mask is of another kind, which would be lost, or its blocks are not served. Raised
            before any layer runs.
    """
    masks = tuple(given.values()) if isinstance(given, dict) else (given,)
    built = next((mask for mask in masks if isinstance(mask, Tensor) and mask.ndim > 2), None)
    if built is not None:
        _refuse_tensor("The language model", built)
    known = tuple(mask for mask in masks if isinstance(mask, LazyMask))
    for mask in known:
        mask.pattern  # noqa: B018 (raises for one that is not served)
    found = [mask.laid(layout).blocks for mask in known if _BLOCKS in mask.parts]
    return known if any(map(any, found)) else ()


def register() -> None:
    """Registers both functions with Transformers; repeating it changes nothing."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def _pattern(
    module: nn.Module, mask: Mask, is_causal: bool | None, sliding_window: int | None, expected: bool
) -> MaskPattern:
    """Returns how far a layer's queries see. Raises if mask and module disagree, or causality is not as `expected`."""
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if isinstance(mask, LazyMask):
        pattern = mask.pattern
        prefixes = getattr(getattr(module, "config", None), "use_bidirectional_attention", None) is True
        if causal not in (None, pattern.causal) and not prefixes:  # of PaliGemma, known to the mask alone
            raise UnsupportedModelError(
                f"{type(module).__name__}.is_causal is {causal}, and the mask of its model is "
                f"{'causal' if pattern.causal else 'not causal'}. Set is_causal={pattern.causal} on the module, or "
                "have the config ask for the other mask."
            )
    elif mask is None:
        pattern = MaskPattern(causal is not False, None if sliding_window is None else sliding_window - 1)
    else:
        _refuse_tensor(type(module).__name__, mask)
    if pattern.causal != expected:
        kinds = {True: "causal", False: "that of an encoder"}
        raise UnsupportedModelError(
            f"The attention of {type(module).__name__} is {kinds[pattern.causal]}, and that of its model should be "
            f"{kinds[expected]}. Both in one model are not served."
        )
    return pattern


def _refuse_tensor(who: str, mask: Tensor) -> NoReturn:
    raise UnsupportedModelError(
        f"{who} is given a mask of shape {tuple(mask.shape)}, which over ranks would be lost, or hold one shard alone. "
        "Masks must come from Transformers' masking_utils, and attention_mask mark padding alone."
    )


def scales_by_place(module: Any) -> bool:
    """Returns whether an attention scales its queries by their place in the row, whatever their position ids are."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not module.use_rope


def _at_temperature(module: Any, query: Tensor, places: Tensor | None) -> Tensor:
    """Returns Llama 4's queries, scaled by their true places (arXiv 2501.19399): `Llama4TextAttention` has scaled them
    as if the tokens of the shard were the first of the sequence."""
    assert places is not None, "a layer asks for them"

    def temperature(place: Tensor) -> Tensor:
        return torch.log1p(torch.floor((place.float() + 1) / module.floor_scale)) * module.attn_scale + 1

    local = torch.arange(query.shape[2], device=query.device)
    ratio = (temperature(places) / temperature(local))[:, None, :, None]
    return (query * ratio).to(query.dtype)


def _functions(function: Callable[..., Any]) -> Iterator[Any]:
    """Yields a mask function and those that it is composed of."""
    yield function
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for inner in held if isinstance(held, tuple) else (held,):
            yield from _functions(inner) if inspect.isfunction(inner) else ()


def _part_of(function: Callable[..., Any]) -> str:
    """Returns the name of the function in `transformers.masking_utils` that made a mask function."""
    return function.__qualname__.partition(".")[0]


def _attend_whole(
    module: nn.Module, states: Sequence[Tensor], mask: Mask, softcap: float | None, s_aux: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Runs Transformers' sdpa on query, key and value, or the eager attention of the model's own file for soft-capping
    and sinks, which sdpa lacks."""
    query, key, value = states
    if softcap is None and s_aux is None:
        built = mask.built if isinstance(mask, LazyMask) else mask
        return sdpa_attention_forward(module, query, key, value, built, **options)
    added = mask.added if isinstance(mask, LazyMask) else None if mask is None else _additive(mask, query.dtype)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    out, weights = eager(module, query, key, value, added, softcap=softcap, s_aux=s_aux, **options)
    return out, weights


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
