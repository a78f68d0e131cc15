"""`generate`: the tokens of `model.generate`, for prompts that lie over ranks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, MaxTimeCriteria, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ...errors import BatchError, ConfigError, UnsupportedModelError
from ...ranks.group import ContextGroup
from ..batches.documents import batch_shape
from ..batches.sharded import checksum
from ..groups import PATCH, resolve_group
from ..lazy_head import is_partitioned
from ..models.recurrent import recurrent_modules
from ..sharded_cache import ShardedCache

_SAME_PROMPTS = "Give generate the same prompt and the same settings on all ranks of a group."
_TEXT = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")
# arguments of `model.generate`, and what to do without them
_REFUSED = {
    "past_key_values": "The cache over ranks is made here.",
    "cache_implementation": "The cache over ranks is made here.",
    "prefill_chunk_size": "The prompt is cut over the ranks instead.",
    "assistant_model": "Ranks would have to hold its whole prompt; prompt_lookup_num_tokens needs no second model.",
    "output_attentions": "Attention weights are never in memory.",
    "negative_prompt_ids": "Two prompts at once are not served.",
    "custom_generate": "Decoding by a function of another kind is not served.",
    "synced_gpus": "Ranks of a group stop together anyway.",
}


@torch.no_grad()
def generate(model: nn.Module, inputs: Tensor | None = None, **kwargs: Any) -> Any:
    """As `model.generate`, for a prompt that lies over all ranks of the group. `model.generate` itself stays as it is.

    Every rank of the group calls it with the same arguments, and gets the same result: the tokens of one process. The
    prompt is read by the schedules of training. Its keys and values stay on the ranks that computed them; new tokens
    are computed on every rank, and dealt out. Beams and return sequences share the keys of their prompt.

    Sampling takes the random numbers of the first rank. Streamers and `stopping_criteria` are those of the first rank,
    too; logits processors run on every rank.

    Args:
        model (`nn.Module`): A causal language model that [`patch_model`] patched, or what `accelerator.prepare` made of
            it, in evaluation (`model.eval()`).
        inputs (`torch.LongTensor` of shape `(batch, tokens)`, *optional*): The prompts, as `input_ids`. Pad them on the
            left, with an `attention_mask`.
        kwargs: Those of `model.generate`.

    Returns:
        What `model.generate` returns.

    Raises:
        ConfigError: If the model is not patched, is in training, or an argument is not served.
        UnsupportedModelError: If layers carry a state from token to token, or DeepSpeed shards the weights.
        BatchError: If the prompt is empty, or holds more than text.
        RankMismatchError: If the ranks were given different prompts or settings.

    Example:

    ```python
    >>> answer = hf_burst.generate(model, input_ids=prompt, max_new_tokens=64, do_sample=False)
    ```
    """
    base, group = patched(model)
    error: Exception | None = None
    facts: dict[str, Any] = {}
    checksums: dict[str, Tensor] = {}
    try:
        if inputs is not None:
            if kwargs.get("input_ids") is not None:
                raise BatchError("The prompt was given twice, as inputs and as input_ids. Leave one of them out.")
            kwargs["input_ids"] = inputs
        check(base, kwargs)
        facts = {"generate": settings_of(kwargs), "generation_config": str(base.generation_config)}
        content = checksum(kwargs)
        checksums = {} if content is None else {"prompt (checksum)": content}
    except Exception as problem:  # whatever it is, the other ranks must not wait for this one
        error = problem
    advice = dict.fromkeys(("generate", "generation_config", "prompt (checksum)"), _SAME_PROMPTS)
    group.agree(facts, error, base.device, 0, checksums, advice, "generate")
    cache = ShardedCache(group, copies_of(base, kwargs))
    with same_random_numbers(group, base.device):
        return base.generate(past_key_values=cache, **on_ranks(base, group, kwargs))


def patched(model: nn.Module) -> tuple[PreTrainedModel, ContextGroup]:
    """The patched model inside of a model, and the ranks that share its sequences.

    Raises:
        ConfigError: If there is none.
    """
    found: Any = next((module for module in model.modules() if PATCH in vars(module)), None)
    if found is None:
        raise ConfigError("This takes a patched model. Call hf_burst.patch_model(model) first.")
    return found, resolve_group(getattr(found, PATCH).group)


def check(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Raises for a model and arguments that are not served."""
    if not getattr(model, PATCH).task.generates:
        raise UnsupportedModelError(f"{type(model).__name__} predicts masked tokens and generates none.")
    if model.training:
        raise ConfigError("The model is in training, where dropout would change its answers. Call model.eval() first.")
    stateful = sorted({type(module).__name__ for module in recurrent_modules(model)})
    if stateful:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers with a state ({', '.join(stateful)}), which generation over ranks does "
            "not pass on. model.generate holds the whole prompt on each rank."
        )
    if is_partitioned(model):
        raise UnsupportedModelError(
            "DeepSpeed ZeRO-3 shards the weights, which it would gather for every token. Take FSDP2, or a smaller stage."
        )
    for name, why in _REFUSED.items():
        if kwargs.get(name):
            raise ConfigError(f"generate over ranks was given {name}={_short(kwargs[name])}. {why} Leave it out.")
    if asked(model, kwargs, "use_cache") is False:
        raise ConfigError("generate over ranks was given use_cache=False. It needs its cache: leave that out.")
    others = [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _TEXT]
    if others:
        raise BatchError(f"generate over ranks takes text, and was given {', '.join(others)}. Use model.generate.")
    batch_shape(kwargs)


def asked(model: PreTrainedModel, kwargs: Mapping[str, Any], name: str) -> Any:
    """A setting of generation: the argument, or that of the config that was given, or that of the model."""
    configs = kwargs.get("generation_config"), model.generation_config
    values = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def copies_of(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> int:
    """How many rows `generate` makes of each prompt."""
    return max(int(asked(model, kwargs, name) or 1) for name in ("num_beams", "num_return_sequences"))


def settings_of(kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Settings that must be equal on all ranks, apart from tensors, and from what only the first rank has."""
    own = ("streamer", "stopping_criteria")
    settings = {name: value for name, value in kwargs.items() if not isinstance(value, Tensor) and name not in own}
    return {name: _short(value) for name, value in settings.items()}


def _short(value: Any) -> str:
    """A value as ranks compare it: plain ones and configs by content, other objects by their class."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_short, value))}]"
    plain = value is None or isinstance(value, str | int | float | bool | dict | GenerationConfig)
    return str(value) if plain else type(value).__name__


def on_ranks(model: PreTrainedModel, group: ContextGroup, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `model.generate` on this rank, where what only the first rank may know is asked of it."""
    own = dict(kwargs)
    if group.size == 1:
        return own
    if group.rank:
        own["streamer"] = None
    limit = asked(model, kwargs, "max_time")
    criteria = list(own.get("stopping_criteria") or ())
    if limit is not None:  # of a clock that ranks do not share
        criteria.append(MaxTimeCriteria(limit))
        own["max_time"] = None
        if own.get("generation_config") is not None:
            own["generation_config"] = GenerationConfig(**{**own["generation_config"].to_dict(), "max_time": None})
    if group.gather(bool(criteria), model.device, "generate")[0]:
        own["stopping_criteria"] = StoppingCriteriaList([_OfFirstRank(criteria, group)])
    return own


class _OfFirstRank(StoppingCriteria):
    """What criteria of the first rank say, on all ranks."""

    def __init__(self, criteria: list[StoppingCriteria], group: ContextGroup) -> None:
        self.criteria, self.group = StoppingCriteriaList(criteria), group
        ends: Any = next((each for each in criteria if hasattr(each, "eos_token_id")), None)
        if ends is not None:  # after which generate pads a row
            self.eos_token_id = ends.eos_token_id

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        done = input_ids.new_zeros(len(input_ids), dtype=torch.uint8)
        if self.group.rank == 0:
            done.copy_(self.criteria(input_ids, scores, **kwargs))
        with self.group.messages():
            torch.distributed.broadcast(done, self.group.members[0], group=self.group.process_group)
        return done.bool()


@contextmanager
def same_random_numbers(group: ContextGroup, device: torch.device) -> Iterator[None]:
    """Draws the random numbers of the first rank on all ranks. Those that had others go on with their own afterwards.
    """
    if group.size == 1:
        yield
        return
    own = _random_state(device)
    states = group.gather(own, device, "generate")
    if states.count(own) < len(states):
        _set_random_state(states[0], device)
    try:
        yield
    finally:
        if own != states[0]:
            _set_random_state(own, device)


def _random_state(device: torch.device) -> bytes:
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return state.numpy().tobytes()


def _set_random_state(state: bytes, device: torch.device) -> None:
    tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensor, device)
    else:
        torch.set_rng_state(tensor)
