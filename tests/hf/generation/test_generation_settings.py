"""Settings of a generation that differ between two ranks: an error on both, or equal tokens."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, StoppingCriteria, WatermarkingConfig
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

import hf_burst
from hf_burst.errors import BatchError, RankMismatchError
from tests.hf.generation.test_generation import GREEDY, make, prompt_of
from tests.support.models import VOCABULARY, patch
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]
SAMPLED = {"do_sample": True}


def tokenizer_of(shift: int) -> Any:
    """Words of a letter and a number; of other tokenizers other tokens have them."""
    words = {f"{chr(97 + (token + shift) % 26)}{token}": token for token in range(VOCABULARY)}
    words["abcdef"] = VOCABULARY  # in front of which Transformers tries words
    inner = Tokenizer(models.WordLevel(words, unk_token="a0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


class _Broken(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        raise KeyError("of a rank that does not count")


def greedy_with(**settings: Any) -> GenerationConfig:
    return GenerationConfig(**GREEDY, **settings)


# settings of each rank, by its number
DIFFERENT: dict[str, Callable[[int], dict[str, Any]]] = {
    "top_k": lambda rank: {**SAMPLED, "top_k": 0 if rank else 50},
    "top_k that is left out": lambda rank: {**SAMPLED, **({"top_k": 0} if rank else {})},
    "temperature": lambda rank: {**SAMPLED, "temperature": 0.7 + rank},
    "numbers of numpy": lambda rank: {"max_new_tokens": np.int64(5 + 3 * rank)},
    "a penalty of numpy": lambda rank: {"repetition_penalty": np.float32(1 + rank)},
    "arrays": lambda rank: {"eos_token_id": np.arange(5, 9) + 20 * rank},
    "tensors": lambda rank: {"eos_token_id": torch.arange(5, 9) + 20 * rank},
    "a config with tensors": lambda rank: {"generation_config": greedy_with(eos_token_id=torch.arange(5 + rank, 9))},
    "beams": lambda rank: {"num_beams": np.int64(2 + rank)},
    "a config": lambda rank: {"generation_config": greedy_with(repetition_penalty=1.0 + rank)},
    "watermarks": lambda rank: {"watermarking_config": WatermarkingConfig(bias=2.0 + rank)},
    "stopping strings": lambda rank: {"stop_strings": ["b" if rank else "c"], "tokenizer": tokenizer_of(0)},
    "tokenizers": lambda rank: {"stop_strings": ["b", "c", "d", "e", "f"], "tokenizer": tokenizer_of(9 * rank)},
    "a tokenizer on one rank": lambda rank: {"stop_strings": ["b"], **({"tokenizer": tokenizer_of(0)} if rank else {})},
    "time": lambda rank: {"max_time": 0.0} if rank else {},
    "biases": lambda rank: {"sequence_bias": {(3,): 10.0 + rank}},
    "scores": lambda rank: {"return_dict_in_generate": True, "output_scores": bool(rank)},
}
OF_THE_MODEL = {"top_k": (50, 0), "max_new_tokens": (3, 4), "repetition_penalty": (None, 1.5)}
HARMLESS: dict[str, Callable[[int], dict[str, Any]]] = {
    "criteria of another rank": lambda rank: {"stopping_criteria": [_Broken()]} if rank else {},
    "a streamer of another rank": lambda rank: {"streamer": BaseStreamer()} if rank else {},
    "a list and a tuple": lambda rank: {"eos_token_id": (5, 6) if rank else [5, 6]},
    "a list and a tensor": lambda rank: {"eos_token_id": torch.tensor([5, 6]) if rank else [5, 6]},
    "seeds": lambda rank: torch.manual_seed(rank) and SAMPLED,
    "numbers of numpy": lambda rank: {"max_new_tokens": np.int64(9) if rank else 9},
}


def generated(rank: int, size: int, kinds: str, kind: str) -> list[list[int]]:
    settings = {"different": DIFFERENT, "harmless": HARMLESS}[kinds][kind](rank)
    model, given = patch(make("llama")), GREEDY | settings
    given = settings if "generation_config" in settings else given
    found: list[list[int]] = hf_burst.generate(model, prompt_of(19, False)["input_ids"], **given).tolist()
    return found


@pytest.mark.parametrize("kind", DIFFERENT)
def test_settings_that_differ_are_an_error_before_any_token(ranks: Ranks, kind: str) -> None:
    with pytest.raises(RankError, match="same settings on all ranks") as caught:
        ranks(2).run(generated, "different", kind, timeout=30)
    assert all(isinstance(error, RankMismatchError) for error in caught.value.errors)


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_may_differ(ranks: Ranks, kind: str) -> None:
    first, second = ranks(2).run(generated, "harmless", kind, timeout=30)
    assert first == second


def of_the_model(rank: int, size: int, name: str) -> None:
    model = patch(make("llama"))
    setattr(model.generation_config, name, OF_THE_MODEL[name][rank])
    hf_burst.generate(model, prompt_of(19, False)["input_ids"][:1], do_sample=True)


@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_settings_of_the_model_that_differ(ranks: Ranks, name: str) -> None:
    with pytest.raises(RankError, match="generation_config") as caught:
        ranks(2).run(of_the_model, name, timeout=30)
    assert all(isinstance(error, RankMismatchError) for error in caught.value.errors)


def given_twice(rank: int, size: int) -> None:
    prompt = prompt_of(19, False)["input_ids"]
    again = {"input_ids": prompt} if rank else {}
    with pytest.raises(BatchError if rank else RankMismatchError, match="given twice"):
        hf_burst.generate(patch(make("llama")), prompt, **again, **GREEDY)


def test_a_prompt_that_one_rank_gives_twice(ranks: Ranks) -> None:
    ranks(2).run(given_twice, timeout=30)


def test_a_config_without_a_cache_brings_no_warning() -> None:
    model, prompt = patch(make("llama")), prompt_of(19, False)["input_ids"]
    wanted = hf_burst.generate(model, prompt, **GREEDY)
    with mock.patch.object(logging.get_logger("transformers.generation.utils"), "warning_once") as warned:
        for use_cache in (None, False):
            config = greedy_with(use_cache=use_cache)
            assert torch.equal(hf_burst.generate(model, prompt, generation_config=config), wanted)
            assert config.use_cache is use_cache
    warned.assert_not_called()


def stops_before_the_prompt(rank: int, size: int, number: int) -> list[list[int]]:
    """One rank has no room for what Transformers prepares; afterwards all answer."""
    model, prompt = patch(make("llama")), prompt_of(19, False)["input_ids"]
    prepares = model._prepare_cache_for_generation

    def prepare(*args: Any, **kwargs: Any) -> Any:
        if rank == number:
            raise MemoryError("no room")
        return prepares(*args, **kwargs)

    model._prepare_cache_for_generation = prepare
    with pytest.raises(MemoryError if rank == number else RankMismatchError, match="no room"):
        hf_burst.generate(model, prompt, **GREEDY)
    del model._prepare_cache_for_generation
    found: list[list[int]] = hf_burst.generate(model, prompt, **GREEDY).tolist()
    return found


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_stops_before_the_prompt(ranks: Ranks, number: int) -> None:
    first, second = ranks(2).run(stops_before_the_prompt, number, timeout=30)
    assert first == second


def stopped(rank: int, size: int) -> tuple[list[list[int]], list[list[int]], int]:
    """Answers that end where one of their words begins; and how long they are without."""
    model, prompt, tokenizer = make("llama"), prompt_of(19, False)["input_ids"][:1], tokenizer_of(0)
    longest = model.generate(prompt, **GREEDY)[0]
    stop = {"stop_strings": [tokenizer.convert_ids_to_tokens(int(longest[22]))], "tokenizer": tokenizer}
    expected = model.generate(prompt, **GREEDY, **stop).tolist()
    return hf_burst.generate(patch(model), prompt, **GREEDY, **stop).tolist(), expected, len(longest)


def test_stopping_strings(ranks: Ranks) -> None:
    for found, expected, longest in ranks(2).run(stopped):
        assert found == expected
        assert len(found[0]) < longest
