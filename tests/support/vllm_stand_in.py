"""vLLM as TRL calls it: a client of a server, and an engine beside the trainer. Answers follow from the prompt, its
place among its copies, and the weights that were sent last."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.support import models

ASKED: list[int] = []  # how many answers each call of `generate` was asked for
SENT: list[int] = []  # how many weights came with each update


def answer(prompt: list[int], place: int, weights: float, longest: int) -> tuple[list[int], list[float]]:
    generator = random.Random(str((prompt, place, f"{weights:.5f}")))
    ids = [generator.randrange(2, models.VOCABULARY) for _ in range(generator.randrange(2, longest))]
    ids = [*ids, 1] if generator.random() < 0.6 else ids
    return ids, [-generator.random() for _ in ids]


class Client:
    """`VLLMClient`."""

    def __init__(self, **_: Any) -> None:
        self.weights = 0.0

    def init_communicator(self, device: Any) -> None: ...

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list[Any], parameters: Iterator[tuple[str, torch.Tensor]]) -> None:
        values = [value.double().sum().item() for _, value in parameters]
        assert len(values) == len(metadata)
        SENT.append(len(values))
        self.weights = sum(values)

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **_: Any) -> dict[str, Any]:
        ASKED.append(len(prompts) * n)
        answers = [answer(prompt, place, self.weights, max_tokens) for prompt in prompts for place in range(n)]
        return {
            "prompt_ids": prompts,
            "completion_ids": [ids for ids, _ in answers],
            "logprobs": [[[value] for value in values] for _, values in answers],
        }


class Engine:
    """`LLM`."""

    def __init__(self, **_: Any) -> None:
        self.weights: dict[str, float] = {}
        inner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load))
        worker = SimpleNamespace(model_runner=inner)
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def load(self, parameters: list[tuple[str, torch.Tensor]]) -> None:
        self.weights |= {name: value.double().sum().item() for name, value in parameters}

    def reset_prefix_cache(self) -> None:
        SENT.append(len(self.weights))

    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        ASKED.append(len(prompts))
        found = []
        for place, prompt in enumerate(prompts):
            ids, values = answer(
                prompt["prompt_token_ids"], place, sum(self.weights.values()), sampling_params.max_tokens
            )
            logprobs = [
                {token: SimpleNamespace(rank=1, logprob=value)} for token, value in zip(ids, values, strict=True)
            ]
            output = SimpleNamespace(token_ids=ids, logprobs=logprobs)
            found.append(SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[output]))
        return found


@contextmanager
def installed() -> Iterator[None]:
    """While TRL believes that vLLM is there."""
    ASKED.clear()
    SENT.clear()
    with mock.patch.multiple(
        "trl.generation.vllm_generation",
        create=True,
        is_vllm_available=lambda: True,
        VLLMClient=Client,
        LLM=Engine,
        SamplingParams=SimpleNamespace,
    ):
        yield
