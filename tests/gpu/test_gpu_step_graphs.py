"""On GPUs: steps of one token as CUDA graphs give the tokens and scores of the same steps without them."""

from typing import Any
from unittest import mock

import pytest
import torch

import hf_burst
from hf_burst.hf.generation import step_graphs
from hf_burst.hf.generation.step_graphs import Recording
from tests.gpu.test_gpu import Ranks, gpus  # noqa: F401
from tests.support import models
from tests.support.ranks import gpu_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOKENS = 150  # layers make more room after 64 of a rank
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}


def make(name: str, rank: int) -> Any:
    model = models.make_model(name).to(gpu_of(rank), torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return hf_burst.patch_model(model)


def compare(rank: int, size: int, name: str) -> tuple[list[int], int]:
    """How often recordings were played each way, and the bytes that the calls left behind."""
    model, counts, played = make(name, rank), [], 0
    ids = models.make_batch("plain", 509)["input_ids"].to(model.device)
    mask = torch.ones_like(ids)
    mask[1, :100] = 0
    options = {"max_new_tokens": TOKENS, "pad_token_id": 0, "return_dict_in_generate": True}
    options |= {"output_logits": True, "output_scores": True}
    hf_burst.generate(model, ids, max_new_tokens=8, pad_token_id=0)  # cuBLAS keeps memory for the stream of recordings
    play = Recording.play

    def count(recording: Recording, *arguments: Any) -> Any:
        nonlocal played
        played += 1
        return play(recording, *arguments)

    left = 0
    for way in WAYS.values():
        found = []
        for graphs in (False, True):
            torch.manual_seed(5)
            before = torch.cuda.memory_allocated()
            with mock.patch.object(Recording, "play", count):
                answer = hf_burst.generate(
                    model, ids, attention_mask=mask, cuda_graphs=graphs, **{"do_sample": False} | options | way
                )
            scores = answer.get("sequences_scores")  # of beams
            found.append((answer.sequences.cpu(), [part.float().cpu() for part in answer.logits], scores))
            del answer
            left = max(left, torch.cuda.memory_allocated() - before)
        (plain, expected, likely), (tokens, logits, as_likely) = found
        counts.append(played)
        played = 0
        # the new keys' attention is computed by products instead of a kernel, so that bits may differ, and tokens then
        if likely is not None:  # logits are those of beams in an order that may be another
            torch.testing.assert_close(as_likely, likely, rtol=0.02, atol=0)
            continue
        same = int((plain == tokens).all(0).cumprod(0).sum()) - ids.shape[1]
        for one, other in zip(expected[:same], logits[:same], strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0.03 * float(one.abs().max()))
        assert same > TOKENS // 4
    return counts, left


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_5", "lfm2"])
def test_tokens_are_those_without_graphs(gpus: Ranks, size: int, name: str) -> None:  # noqa: F811
    if size > torch.cuda.device_count():
        pytest.skip(f"needs {size} GPUs")
    for counts, left in gpus(size).run(compare, name):
        assert min(counts) > TOKENS * 3 // 4, "also in the first call of a process"
        assert left < 2**20, "graphs and their memory go with the call"


def fail(rank: int, size: int) -> tuple[bool, int]:
    """A model that waits for the GPU while it is recorded, but not before. Afterwards memory is freed as ever."""
    model = make("llama", rank)
    mlp = model.model.layers[1].mlp
    plain, ids = mlp.forward, models.make_batch("plain", 509)["input_ids"].to(model.device)

    def wait(hidden: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            hidden.sum().item()
        return plain(hidden)

    mlp.forward = wait
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = hf_burst.generate(model, ids, **options)
    with mock.patch.object(step_graphs.logger, "info") as said:
        found = hf_burst.generate(model, ids, cuda_graphs=True, **options)
    assert "Error" in said.call_args.args[1], "not before it was recorded"
    del mlp.forward
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    room = torch.empty(2**28, device=model.device)
    del room
    torch.cuda.empty_cache()
    again = hf_burst.generate(model, ids, cuda_graphs=True, **options)
    same = torch.equal(found, expected) and torch.equal(again[:, : ids.shape[1] + 5], expected[:, : ids.shape[1] + 5])
    return same, torch.cuda.memory_reserved() - before


@pytest.mark.parametrize("size", [1, 2])
def test_a_recording_that_fails_leaves_nothing_behind(gpus: Ranks, size: int) -> None:  # noqa: F811
    if size > torch.cuda.device_count():
        pytest.skip(f"needs {size} GPUs")
    for same, more in gpus(size).run(fail):
        assert same
        assert more < 2**27
