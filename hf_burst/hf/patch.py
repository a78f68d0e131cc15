"""`patch_model` and `unpatch_model`: how a model comes to compute its attention over several ranks, and back.

A patched model takes full batches, the same on every rank of a group, and returns what one process would: a forward
pre-hook cuts the batch, a forward hook puts the outputs together, and the loss function adds up what the ranks found.
To any trainer the ranks of a group look like data-parallel replicas that were given the same batch.
"""

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..config import BurstConfig
from ..errors import BatchError, ConfigError, UnsupportedModelError
from ..layout import SequenceLayout
from ..loss import IGNORE_INDEX
from ..mesh import ContextGroup
from ..op import prepare
from .accelerate import PATCH, resolve_group
from .attention import NAME, CallCarrier, register
from .batch import (
    LAYOUT_KEY,
    ForwardCall,
    batch_shape,
    check_ranges,
    checksum_on_device,
    layout_of_shard,
    longest_position,
    shard_full,
    targets_key,
)
from .checkpointing import SavedAttention
from .dropout import check_shared_dropout, own_masks
from .experts import RouterLogits, balance, check_balance
from .head import LazyHead, LazyLogits, lazy_head, loss_sum
from .outputs import Places, asks_to_keep, batch_loss, gather_outputs, keep_rows
from .positions import LearnedPositions, segment_count
from .rope import LongestPosition
from .support import (
    base_model,
    calls_loss_function,
    check_adapters,
    check_dropout,
    check_model,
    check_noise,
    is_causal,
    layer_patterns,
)

logger = logging.getLogger(__name__)

_CALL = "burst_call"
_TOKENS = ("input_ids", "inputs_embeds")
_ITEMS = "num_items_in_batch (labels of all ranks: Trainer counts them unless average_tokens_across_devices=False)"
AnyModel = TypeVar("AnyModel", bound=nn.Module)


def patch_model(
    model: AnyModel,
    config: BurstConfig | None = None,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
) -> AnyModel:
    """Swaps a model's attention for BurstAttention over the ranks that share a sequence.

    Args:
        model (`PreTrainedModel` or `PeftModel`): A causal or masked language model, changed in place; before it is
            wrapped by a data-parallel wrapper.
        config ([`BurstConfig`], *optional*): The few knobs.
        mesh (`DeviceMesh` or `ProcessGroup`, *optional*): The ranks that share a sequence (the dimension `"cp"` of a
            mesh). By default, at the first forward pass, those of accelerate's state ([`BurstParallelismConfig`]), else
            all ranks; in one process nothing is communicated.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: If the model is not served exactly.
        ConfigError: If it is patched already.

    Example:

    ```python
    >>> model = hf_burst.patch_model(AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B"))
    ```
    """
    base = base_model(model)
    if hasattr(base, PATCH):
        raise ConfigError("The model is patched already. Call hf_burst.unpatch_model(model) before patching it anew.")
    served = check_model(base)
    check_adapters(model)
    check_balance(base)
    causal = is_causal(base)
    if not causal and config is not None and 0 < config.attention_keep < 1:
        raise ConfigError(
            f"BurstConfig.attention_keep is {config.attention_keep}, and the first part of a sequence of "
            f"{type(base).__name__} sees the rest. Take 1.0 (keep all of what attention found) or 0.0 (nothing)."
        )
    register()
    previous = base.config._attn_implementation
    base.set_attn_implementation(NAME)
    if base.config._attn_implementation != NAME:  # Transformers only warns
        raise UnsupportedModelError(
            f"{type(base).__name__} keeps its attention {previous!r}: it does not use Transformers' AttentionInterface."
        )
    given = None if mesh is None else ContextGroup.from_mesh(mesh)
    loss_was_set = "_loss_function" in vars(base)
    patch = _Patch(
        config=config or BurstConfig(),
        served=served,
        given=given,
        attention=previous,
        plain_loss=base.loss_function,
        loss_was_set=loss_was_set,
        causal=causal,
        averages=not calls_loss_function(base),
        longest=LongestPosition(base),
        positions=LearnedPositions.of(base),
        segments=segment_count(base),
        routers=RouterLogits(base),
        carrier=CallCarrier(base),
        saved=SavedAttention((config or BurstConfig()).attention_keep),
    )
    patch.handles = [
        *patch.longest.handles,
        *patch.routers.handles,
        *patch.carrier.handles,
        base.register_forward_pre_hook(patch.before, prepend=True, with_kwargs=True),
        base.register_forward_hook(patch.after, with_kwargs=True),
        base.register_forward_hook(patch.end, always_call=True),
        *own_masks(base),
    ]
    base.loss_function = patch.loss
    setattr(base, PATCH, patch)
    return model


def unpatch_model(model: AnyModel) -> AnyModel:
    """Puts back everything that [`patch_model`] changed.

    Args:
        model (`PreTrainedModel` or `PeftModel`): A patched model, changed in place.

    Returns:
        The same model.

    Raises:
        ConfigError: If the model is not patched.
    """
    base = base_model(model)
    patch: _Patch | None = getattr(base, PATCH, None)
    if patch is None:
        raise ConfigError(
            "The model is not patched, so there is nothing to undo. hf_burst.patch_model(model) patches it."
        )
    for handle in patch.handles:
        handle.remove()
    patch.saved.remove(base)
    for module in base.modules():  # adapters may have made copies
        forward = vars(module).get("forward")
        if isinstance(forward, LazyHead):
            forward.remove()
    base.set_attn_implementation(patch.attention)
    if patch.loss_was_set:
        base.loss_function = patch.plain_loss
    else:
        del base._loss_function
    delattr(base, PATCH)
    return model


@dataclass
class _Patch:
    """What patching one model added to it.

    Args:
        config ([`BurstConfig`]): The knobs.
        served (`str`): By which comparison the model is served.
        given ([`ContextGroup`], *optional*): The ranks that the user named.
        attention (`str`): The attention implementation before.
        plain_loss (`Callable`): The loss function before.
        loss_was_set (`bool`): Whether it was set on this model, instead of following from its class.
        causal (`bool`): Whether the model is a causal language model, or else a masked one.
        averages (`bool`): Whether its class averages the loss of each batch by itself, whatever `num_items_in_batch`.
        longest ([`LongestPosition`]): What the rotary modules that need it are told.
        positions ([`LearnedPositions`]): What learned position embeddings ask.
        segments (`int`, *optional*): Token types that have an embedding of their own.
        carrier ([`CallCarrier`]): How the attention of every layer learns of a sharded pass.
        saved ([`SavedAttention`]): What checkpointed layers remember of their attention.
        routers ([`RouterLogits`]): What the routers of experts scored, for the load-balancing loss.
        handles (`list`): The hooks.
        head ([`LazyHead`], *optional*): The head, which the loss asks for the scores of some tokens at a time.
        explicit (`bool`): Whether the latest batch arrived sharded.
        accumulated (`tuple[float, int]`): The `num_items_in_batch` of the latest batch, and how many labels of it have
            come so far, for classes that average by themselves.
    """

    config: BurstConfig
    served: str
    given: ContextGroup | None
    attention: str
    plain_loss: Any
    loss_was_set: bool
    causal: bool
    averages: bool
    longest: LongestPosition
    positions: LearnedPositions
    segments: int | None
    routers: RouterLogits
    carrier: CallCarrier
    saved: SavedAttention
    handles: list[RemovableHandle] = field(default_factory=list)
    head: LazyHead | None = None
    explicit: bool = False
    accumulated: tuple[float, int] = (0.0, 0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A model saved whole brings its patch along, and the attention must be known where it is loaded."""
        self.__dict__.update(state)
        register()

    @torch.compiler.disable
    def before(self, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pre-hook: checks the batch, agrees with the other ranks, and cuts it."""
        if getattr(module, "_is_replica", False):
            raise ConfigError(
                "The model runs under torch.nn.DataParallel (one process with several GPUs), over which no sequence "
                "can be sharded. Launch one process a GPU: accelerate launch --num_processes N script.py."
            )
        self.end()  # a pass that was interrupted does not come there
        group = resolve_group(self.given)
        error: Exception | None = None
        prepared: dict[str, Any] = {}
        call: ForwardCall | None = None
        facts: dict[str, Any] = {}
        content: torch.Tensor | None = None
        try:
            batch = _arguments(module, args, kwargs)
            if self.causal and _is_generation(module, batch):
                return (), batch
            prepared, call, facts, content = self._prepare(module, batch, group)
        except Exception as problem:  # whatever it is, the other ranks must not wait for this one
            error = problem
        counted = prepared.get(targets_key(self.causal))
        mine = 0 if counted is None or error else int((counted != IGNORE_INDEX).sum())
        tokens = group.agree(facts, error, next(module.parameters()).device, tally=mine, content=content)
        assert call is not None, "agree raises this rank's error"
        prepare(self.config.schedule, self.config.kernel, next(module.parameters()).device, group)
        self.explicit = call.explicit
        items = facts[_ITEMS]
        if items is not None and not items > 0 and (tokens or items):
            raise BatchError(
                f"num_items_in_batch is {items:g}; it is the number of labels that count, over all ranks, and must be "
                "above 0. Leave it out to average this batch by itself."
            )
        if items is not None and self.averages and counted is not None:
            prepared["num_items_in_batch"] = self._items_of_batch(module, mine if call.explicit else tokens, items)
            items = prepared["num_items_in_batch"]
        if counted is not None and tokens == 0 and not items:
            raise BatchError(
                f"All labels of the batch are {IGNORE_INDEX}{' (after the shift by one token)' * self.causal}, so "
                "there is nothing to learn from. Drop such batches, or check how the labels are masked."
            )
        self.carrier.under_way = True
        self.head = lazy_head(module, self.head)
        if self.head is not None:
            self.head.under_way = call.logits == "drop" and not prepared.get("fused_lm_head")
        if not self.causal:
            return (), {**prepared, "labels": None, _CALL: replace(call, tokens=tokens, targets=counted)}
        if group.size > 1 or module.training:  # one process may go on to generate from the cache
            prepared["use_cache"] = False
        return (), {**prepared, _CALL: replace(call, tokens=tokens)}

    def _items_of_batch(self, module: PreTrainedModel, labels: int, given: float) -> int:
        """What `num_items_in_batch` would be for this batch alone: a class that computes its loss itself averages every
        batch by itself, and `Trainer`, which does not know, counts the labels of all accumulated batches.

        Args:
            module (`PreTrainedModel`): The model.
            labels (`int`): Those that this rank counts.
            given (`float`): `num_items_in_batch`.
        """
        total = torch.tensor(labels, device=next(module.parameters()).device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(total)
        if not module.training:
            return int(total)
        before = self.accumulated[1] if self.accumulated[0] == given else 0
        counted = before + int(total)
        self.accumulated = (given, counted if counted < given else 0)
        if counted > given:
            raise BatchError(
                f"num_items_in_batch is {given:g}, and the batches that were accumulated have {counted} labels over "
                "all ranks. Count those of all ranks, as Trainer does unless average_tokens_across_devices=False."
            )
        return int(total)

    def _prepare(
        self, module: PreTrainedModel, batch: dict[str, Any], group: ContextGroup
    ) -> tuple[dict[str, Any], ForwardCall, dict[str, Any], torch.Tensor | None]:
        """This rank's inputs, what the pass knows, the facts that must be equal on all ranks, and a checksum that must
        be so, too."""
        if module.config._attn_implementation != NAME or module.loss_function != self.loss:
            raise ConfigError(
                "The attention implementation or the loss function of the model was changed after it was patched, so "
                "its loss would be wrong. Call hf_burst.unpatch_model(model) first, then change it."
            )
        if getattr(module.forward, "__module__", "").startswith("liger_kernel."):
            raise ConfigError(
                "Liger's fused loss has taken the place of the model's forward, and knows the tokens of one rank only. "
                "hf_burst itself scores some tokens at a time, by Liger's kernel. Switch that part off: "
                "TrainingArguments(use_liger_kernel=True, liger_kernel_config={'fused_linear_cross_entropy': False}); "
                "Liger's other kernels may stay."
            )
        _check_request(module, batch)
        check_adapters(module)
        if group.size > 1:
            check_shared_dropout(module)
            check_noise(module)
        explicit = batch.get("shift_labels") is not None or batch.get(LAYOUT_KEY) is not None
        about = batch.pop(LAYOUT_KEY, None)
        if explicit:
            layout = layout_of_shard({**batch, LAYOUT_KEY: about}, self.config, group, self.causal)
            prepared = {**batch, "labels": batch.get(targets_key(self.causal))}
            fingerprint, content = about.fingerprint if about else None, None
            longest = about.longest if about else layout.length - 1
            if self.positions.padding_idx is not None:
                raise BatchError(
                    f"{type(module).__name__} counts positions from its padding_idx + 1, which was not known when the "
                    "batch was sharded. Give full batches (no BurstCollator)."
                )
            if self.positions.from_mask and any(start for start, _ in layout.real):
                raise BatchError(
                    f"{type(module).__name__} counts positions from the first token after the padding, which was not "
                    "known when the batch was sharded. Pad on the right, or give full batches (no BurstCollator)."
                )
        else:
            positions = self.positions.make(batch)
            patterns = layer_patterns(module.config, self.causal)
            prepared, layout = shard_full(
                *(batch, self.config, group.rank, group.size, positions, patterns, self.causal)
            )
            fingerprint, content = None, checksum_on_device(batch) if group.size > 1 else None
            longest = longest_position(batch) if self.longest.handles else None
        check_ranges(prepared, module.config.get_text_config().vocab_size, self.segments, self.positions.limits)
        checkpointed = self.saved.install(module) if module.training else None
        parts = checkpointed and self.causal and 0 < self.saved.share < 1
        if parts and layout.beginning(1 - self.saved.share) is None:
            raise BatchError(
                f"BurstConfig(attention_keep={self.saved.share}) needs batches of which every rank holds as much of "
                f"each part of the sequence, and this one was cut into {len(layout.owners)} chunks by another "
                "BurstConfig. Give the BurstCollator (or shard_batch) the config of the model."
            )
        kept = rows = None
        if asks_to_keep(batch) and (group.size > 1 or not self.causal):
            kept, rows = keep_rows(batch["logits_to_keep"], layout, group.rank)
            if self.causal:
                prepared["logits_to_keep"], rows = rows, None
        logits = self._logits_fate(module, prepared, layout, kept, group, explicit)
        items = batch.get("num_items_in_batch")
        facts = {
            "batch": f"{layout.batch_size} x {layout.length - layout.padding} tokens",
            "dtype": str(module.dtype),
            "documents": f"{sum(map(len, layout.documents)) - layout.batch_size} (checksum {hash(layout.documents):x})",
            "chunks": f"{len(layout.owners)} (checksum {hash(layout.owners):x})",
            "labels": prepared.get("labels") is not None,
            _ITEMS: None if items is None else float(items),
            "sharded already": explicit,
            "training": module.training,
            "gradients": torch.is_grad_enabled(),
            "activation checkpointing": checkpointed,
            "logits to keep": kept,
            "logits": logits,
            "hidden states": bool(batch.get("output_hidden_states")),
            "router logits": batch.get("output_router_logits"),
            "fused_lm_head": bool(batch.get("fused_lm_head")),
            "BurstConfig": str(self.config),
            "served by": self.served,
            "content (checksum)": fingerprint,
            "longest position": longest,
        }
        self.longest.value = longest if self.longest.handles else None
        fully_masked = layout.fully_masked(group.rank)
        if fully_masked is not None:
            fully_masked = fully_masked.to(prepared["position_ids"].device)
        encoded = layout.encode()
        torch._dynamo.maybe_mark_dynamic(encoded, 0)  # another packing is no reason to compile anew
        call = ForwardCall(
            *(layout, group, self.config, explicit, 0, encoded, prepared["position_ids"], logits, kept, fully_masked),
            causal=self.causal,
            rows=rows,
            saved=self.saved,
        )
        return prepared, call, facts, content

    def _logits_fate(
        self,
        module: PreTrainedModel,
        prepared: Mapping[str, Any],
        layout: SequenceLayout,
        kept: Places | None,
        group: ContextGroup,
        explicit: bool,
    ) -> str:
        """What becomes of the logits: `"keep"` them as they are, `"gather"` them, or `"drop"` them."""
        labels = prepared.get("labels") is not None
        if kept is not None and (labels or explicit):
            raise BatchError(
                "logits_to_keep is for full batches without labels; with labels the loss needs every token. Leave one "
                "of them out."
            )
        if labels and (module.training or (group.size > 1 and prepared.get("fused_lm_head"))):
            return "drop"
        if explicit or group.size == 1:
            return "keep"
        rows = layout.length - layout.padding if kept is None else sum(map(len, kept))
        gib = layout.batch_size * rows * module.config.get_text_config().vocab_size * module.dtype.itemsize / 2**30
        if gib <= self.config.logits_limit_gib:
            return "gather"
        sentence = (
            f"The logits of {layout.batch_size} x {rows} tokens take {gib:.1f} GiB on every rank, above "
            f"BurstConfig.logits_limit_gib={self.config.logits_limit_gib}"
        )
        if not labels:
            raise BatchError(f"{sentence}. Pass logits_to_keep=1 (or as many as you need), or raise the limit.")
        logger.warning("%s, so they are not gathered and outputs.logits is None.", sentence)
        return "drop"

    @torch.compiler.disable
    def after(self, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The forward hook: outputs of the whole batch, in sequence order."""
        call: ForwardCall | None = kwargs.get(_CALL)
        if call is None:
            return output
        items, layers = kwargs.get("num_items_in_batch"), self.routers.take()
        if layers and output.get("aux_loss") is not None:
            output = balance(output, layers, module, call, items)
        return gather_outputs(output, call, items, module)

    @torch.compiler.disable
    def end(self, *_: Any) -> None:
        """The forward hook that is called even if the pass failed."""
        self.carrier.under_way = False
        if self.head is not None:
            self.head.under_way = False

    def loss(self, logits: torch.Tensor | LazyLogits, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The model's `loss_function`: the cross-entropy of the whole batch, see [`batch_loss`]."""
        call: ForwardCall | None = kwargs.pop(_CALL, None)
        if call is None:
            if resolve_group(self.given).size > 1:
                raise UnsupportedModelError(
                    "The forward of the model was called past its hooks, which cut the batch: model.forward(...) "
                    "instead of model(...), as the peft method AdaLoRA does. Call the model itself; AdaLoRA is not "
                    "served."
                )
            plain: torch.Tensor = self.plain_loss(logits, labels, *args, **kwargs)
            return plain
        targets = kwargs["shift_labels"]
        return batch_loss(loss_sum(logits, targets), call, kwargs.get("num_items_in_batch"))


def _arguments(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass by name: as the first class names them that names what it takes (a class of the
    user's may hand on `*args`)."""
    signatures = [inspect.signature(vars(cls)["forward"]) for cls in type(module).__mro__ if "forward" in vars(cls)]
    named = [signature for signature in signatures if set(_TOKENS) & set(signature.parameters)]
    bound = (named or signatures)[0].bind_partial(module, *args, **kwargs)
    found: dict[str, Any] = {}
    for index, (name, value) in enumerate(bound.arguments.items()):
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        elif index:  # the first is the model
            found[name] = value
    return found


def _is_generation(module: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether this is a step of `generate`: every rank holds the whole prompt, and attention is Transformers' own."""
    if module.training or any(batch.get(key) is not None for key in ("labels", "shift_labels", LAYOUT_KEY)):
        return False
    return batch.get("past_key_values") is not None or bool(batch.get("use_cache"))


def _check_request(module: PreTrainedModel, batch: Mapping[str, Any]) -> None:
    """Raises for arguments of a forward pass that are not served over several ranks."""
    check_dropout(module)
    check_balance(module, batch.get("output_router_logits"))
    if batch.get("past_key_values") is not None:
        raise BatchError(
            "past_key_values in training or with labels: a cache cannot be sharded. Leave it out; to generate, switch "
            "the model to evaluation first (model.eval())."
        )
    if batch.get("ignore_index", IGNORE_INDEX) != IGNORE_INDEX:
        raise BatchError(
            f"ignore_index={batch['ignore_index']} is not served by hf_burst. Set the labels that do not count to "
            f"{IGNORE_INDEX}, and leave it out."
        )
    for key in ("output_attentions", "encoder_hidden_states"):
        if batch.get(key) is not None and batch.get(key) is not False:
            raise BatchError(f"{key} is not served by hf_burst: attention weights are never in memory. Leave it out.")
    if batch.get("return_dict", module.config.return_dict) is False:
        raise BatchError("return_dict=False is not served by hf_burst. Set it to True and read the outputs by name.")
    batch_shape(batch)
