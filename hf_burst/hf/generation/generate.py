"""`generate`: the tokens of `model.generate`, for prompts that are sharded over ranks."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MaxTimeCriteria, PreTrainedModel, StoppingCriteriaList

from ...errors import BatchError, ConfigError
from ...ranks.group import ContextGroup
from ..batches.sharded import checksum
from ..groups import PATCH
from ..parts.tokens import check_ranges
from ..sharded_cache import ShardedCache
from ..view import ModelView, device_of
from .document import Document, with_document
from .each_token import EachToken, OwnStreamer
from .settings import (
    OF_OTHER_CACHES,
    cache_key,
    check,
    copies_of,
    patched,
    prompt_tensors,
    setting,
    settings_of,
    with_settings,
    without_rope_deltas,
)
from .step_graphs import stepping

_OF_USERS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")  # users' code
_QUESTIONS = ("input_ids", "attention_mask")
_SAME_PROMPTS = "Give generate the same prompt and the same settings on all ranks of a group."


@torch.no_grad()
def generate(
    model: nn.Module,
    inputs: Tensor | None = None,
    *,
    document: Document | None = None,
    cuda_graphs: bool = True,
    **kwargs: Any,
) -> Any:
    """Generates as `model.generate`, which stays unchanged, for a prompt sharded over the ranks of a group.

    Every rank of the group calls it with the same arguments and gets the same result, the tokens of a single process.
    The prompt is read by the schedules of training. Its keys and values stay on the ranks that computed them. Every
    rank computes new tokens, and their keys are distributed. Beams and return sequences share their prompt's keys.

    Weights that FSDP2 shards are gathered once, and stay gathered on every rank until the end.

    Sampling uses the first rank's random numbers. Streamers and `stopping_criteria` run on the first rank only, logits
    processors on every rank. An error of any of them ends the call on all ranks.

    Args:
        model (`nn.Module`): A causal language model that [`patch_model`] patched, or the result of
            `accelerator.prepare`, in evaluation mode (`model.eval()`).
        inputs (`torch.LongTensor` of shape `(batch, tokens)`, *optional*): The prompts, as `input_ids`. Pad them on the
            left, with an `attention_mask`. If a document is given, they are questions about it.
        document ([`Document`], *optional*): A document before every prompt, read once for all. Lengths (`max_length`)
            and logits processors count it; the result begins with the question.
        cuda_graphs (`bool`, defaults to `True`): Whether to record a one-token step as CUDA graphs on a GPU and to
            replay them for later tokens. Scores are equal up to rounding. Steps that cannot be recorded run normally,
            and the log (`INFO`) says why: weights sharded over ranks (FSDP2) or on several GPUs, autocast,
            `torch.compile`, hooks, or a model that waits for the GPU. Replayed steps run none of the model's Python
            code. A `GenerationConfig` may also set it.
        kwargs: Arguments of `model.generate`.

    Returns:
        The result of `model.generate`.

    Raises:
        ConfigError: If the model is not patched or in training mode, or an argument is not supported.
        UnsupportedModelError: If the model has Mamba1 layers or takes no cache, or if DeepSpeed ZeRO-3 shards its
            weights.
        BatchError: If the prompt is empty, or holds more than text.
        RankMismatchError: If the ranks were given different prompts or settings.

    Example:

    ```python
    >>> answer = hf_burst.generate(model, input_ids=prompt, max_new_tokens=64, do_sample=False)
    ```
    """
    base, group = patched(model)
    patch = getattr(base, PATCH)
    together = patch.together and patch.together()
    if together is not None:
        if document is not None:
            raise ConfigError("A rollout runs on the first rank of a group, where no document can be remembered.")
        return together(inputs, **kwargs, **({} if cuda_graphs else {"cuda_graphs": False}))
    device = device_of(base)
    questions = _agree(base, group, inputs, kwargs, document, cuda_graphs)
    if document is not None:
        document.check(base, group)
    convolutions = getattr(base.config.get_text_config(decoder=True), "number_of_conv_states", 1)
    cache = document.cache() if document else ShardedCache(group, copies_of(base, kwargs), convolutions)
    own = kwargs | questions
    if setting(base, kwargs, "use_cache") is False:  # a config says so
        own = with_settings(own, use_cache=True)
    own |= {name: None for name in OF_OTHER_CACHES if setting(base, kwargs, name)}
    own |= {"synced_gpus": False} if ModelView(base).units_of_fsdp2 else {}  # weights are gathered once, before tokens
    streamer = own.pop("streamer", None)
    criteria = list(own.get("stopping_criteria") or ())
    limit = setting(base, kwargs, "max_time")
    if limit is not None:  # the ranks' clocks differ, so the first rank's counts, as for other criteria
        if MaxTimeCriteria not in map(type, criteria):
            criteria.append(MaxTimeCriteria(limit))
        own = with_settings(own, max_time=None) | {"max_time": None}  # neither the config nor the argument sets it
    each = EachToken(criteria, group, device, cache)
    own["stopping_criteria"] = StoppingCriteriaList([each, *each.in_place])
    if streamer is not None and group.rank == 0:
        own["streamer"] = OwnStreamer(streamer, each, None if document is None else kwargs["input_ids"])
    passes = patch.passes
    graphs = cuda_graphs and setting(base, kwargs, "cuda_graphs") is not False  # trainers give a config
    changing = any(kwargs.get(name) for name in _OF_USERS)
    steps = stepping(base, cache, changing) if graphs else nullcontext()
    with same_random_numbers(group, device), gathered_once(model), steps, without_rope_deltas(base):
        try:
            found = base.generate(**own | {cache_key(base): cache})  # type: ignore[operator]
        except BaseException as problem:  # including KeyboardInterrupt
            each.end_others(problem, patch.passes > passes)
            raise
    each.end()
    return found if document is None else _without(document, kwargs["input_ids"], found)


def _agree(
    model: PreTrainedModel,
    group: ContextGroup,
    inputs: Tensor | None,
    kwargs: dict[str, Any],
    document: Document | None,
    cuda_graphs: bool,
) -> dict[str, Tensor]:
    """Checks this rank's arguments, with `inputs` among them, and compares them with other ranks. Returns questions
    with their document, and their mask; nothing without a document."""
    with group.agreeing(device_of(model), "generate") as found:
        if inputs is not None and kwargs.get("input_ids") is not None:
            raise BatchError("The prompt was given twice, as inputs and as input_ids. Leave one of them out.")
        kwargs |= {} if inputs is None else {"input_ids": inputs}
        check(model, kwargs)
        asked_for = settings_of({**kwargs, "cuda_graphs": cuda_graphs}) if group.size > 1 else {}
        found.add("generate", asked_for, _SAME_PROMPTS)
        found.add("generation_config", **settings_of({"value": model.generation_config}), advice=_SAME_PROMPTS)
        found.add("prompt (checksum)", checksum(kwargs), _SAME_PROMPTS)
        found.add("document", None if document is None else document.number, _SAME_PROMPTS)
        if document is None:
            return {}
        others = [name for name in prompt_tensors(kwargs) if name not in _QUESTIONS]
        if kwargs.get("input_ids") is None or others:
            given = ", ".join(others) or "no input_ids"
            raise BatchError(
                f"Questions to a document are input_ids, an attention_mask and nothing besides, not {given}."
            )
        check_ranges({"input_ids": kwargs["input_ids"]}, model.config.get_text_config().vocab_size, None, None)
        whole = with_document(document, kwargs["input_ids"], kwargs.get("attention_mask"))
        return dict(zip(_QUESTIONS, whole, strict=True))


def _without(document: Document, questions: Tensor, found: Any) -> Any:
    """Removes the document from the result of `model.generate`: a row's padding, then its question, remain in front."""
    if not isinstance(found, Tensor):
        found.sequences = _without(document, questions, found.sequences)
        return found
    given = questions.to(found).repeat_interleave(len(found) // len(questions), 0)
    return torch.cat([given, found[:, len(document) + given.shape[1] :]], 1)


@contextmanager
def same_random_numbers(group: ContextGroup, device: torch.device) -> Iterator[None]:
    """Uses the first rank's random state on all ranks. Ranks with another state restore it afterwards."""
    if group.size == 1:
        yield
        return
    on_gpu = device.type == "cuda"
    own = torch.cuda.get_rng_state(device) if on_gpu else torch.get_rng_state()
    draw = partial(torch.cuda.set_rng_state, device=device) if on_gpu else torch.set_rng_state
    states = group.gather(own.numpy().tobytes(), device, "generate")
    first = torch.frombuffer(bytearray(states[0]), dtype=torch.uint8)
    if len(set(states)) > 1:
        draw(first)
    try:
        yield
    finally:
        if not own.equal(first):
            draw(own)


@contextmanager
def gathered_once(model: nn.Module) -> Iterator[None]:
    """Has FSDP2 gather all weights, those around the model that generates, too, and keep them until the end. Ranks
    that share weights but no prompt may then generate different numbers of tokens."""
    modules = ModelView(model).units_of_fsdp2
    states: list[Any] = [module._get_fsdp_state() for module in modules]  # torch has no public accessor
    before = [(state, state._auto_reshard_after_forward) for state in states]
    groups = [(state, group, group.post_forward_mesh_info) for state in states for group in _groups(state)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        for state, module in zip(states, modules, strict=True):
            state._lazy_init()  # the outermost first
            module.unshard()
        yield
    finally:
        for state, auto in before:
            state._auto_reshard_after_forward = auto
        for state, group, info in groups:
            group.post_forward_mesh_info = None if state._auto_reshard_after_forward and state._is_root else info
        for module in modules:
            module.reshard()


def _groups(state: Any) -> list[Any]:
    """Returns the parameter groups that a module gathers together; torch 2.11 has one per module."""
    several = getattr(state, "_fsdp_param_groups", None)
    return list(several) if several is not None else [state._fsdp_param_group] * (state._fsdp_param_group is not None)
