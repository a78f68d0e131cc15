"""Answers to questions about a remembered document equal those of one process that reads document and question."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.helpers import rescale_adapter_scale
from torch.distributed.fsdp import fully_shard

import hf_burst
from hf_burst.errors import BatchError, ConfigError, RankMismatchError, UnsupportedModelError
from tests.hf.generation.test_generation import GREEDY, WAYS, _Noted, make
from tests.support import models
from tests.support.ranks import RankError, RankPool
from tests.support.tiny_hearing import FAMILIES as HEARING
from tests.support.tiny_hearing import hearing_batch, hearing_model
from tests.support.tiny_pictures import seeing_batch
from tests.support.tiny_seeing import seeing_model

Ranks = Callable[[int], RankPool]
QUESTION = 11  # tokens of the longest


def document_of(length: int) -> torch.Tensor:
    return torch.randint(1, models.VOCABULARY, (1, length), generator=torch.Generator().manual_seed(5))


def questions() -> dict[str, torch.Tensor]:
    """Three questions of 11, 7 and 2 tokens."""
    ids = torch.randint(1, models.VOCABULARY, (3, QUESTION), generator=torch.Generator().manual_seed(6))
    mask = torch.ones_like(ids)
    mask[1, :4], mask[2, :9] = 0, 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def together(document: torch.Tensor) -> dict[str, torch.Tensor]:
    """Document and question in each row, padded on the left, written apart from the package."""
    asked, rows = questions(), []
    for ids, mask in zip(asked["input_ids"], asked["attention_mask"], strict=True):
        padding = [0] * int((mask == 0).sum())
        rows.append([*padding, *document[0].tolist(), *ids[len(padding) :].tolist()])
    padding = (asked["attention_mask"] == 0).sum(1, keepdim=True)
    whole = torch.tensor(rows)
    return {"input_ids": whole, "attention_mask": (torch.arange(whole.shape[1]) >= padding).long()}


def ask(model: Any, document: hf_burst.Document, way: str) -> torch.Tensor:
    torch.manual_seed(5)
    found: torch.Tensor = hf_burst.generate(model, **questions(), document=document, **GREEDY | WAYS[way])
    return found


def answers(rank: int, size: int, name: str, length: int, ways: tuple[str, ...], folder: str, saves: bool) -> int:
    """Compares answers to a document that it reads and saves, or to one that it loads; returns its bytes."""
    document, wanted = document_of(length), []
    model = make(name)
    for way in ways:
        torch.manual_seed(5)
        wanted.append(model.generate(**together(document), **GREEDY | WAYS[way])[:, length:])
    with torch.no_grad():
        whole = together(document)
        positions = (whole["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = model(**whole, position_ids=positions).logits[:, -QUESTION - 1 : -1]
    hf_burst.patch_model(model)
    if saves:
        read = hf_burst.remember(model, document)
        read.save(folder)
    else:
        read = hf_burst.Document.load(model, folder)
    assert len(read) == length
    for way, expected in zip(ways, wanted, strict=True):
        found = ask(model, read, way)
        assert torch.equal(found[:, QUESTION:], expected[:, QUESTION:]), way
        given = questions()["input_ids"].repeat_interleave(len(found) // 3, 0)
        assert torch.equal(found[:, :QUESTION], given), "each row begins with its question, padding included"
    batch = questions()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    losses = hf_burst.token_losses(model, {**batch, "labels": labels}, document=read)
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    off = 1e-6 if name.startswith("Deepseek") else 1e-9  # its router computes in fp32, whose rounding is the machine's
    torch.testing.assert_close(losses, expected, rtol=off, atol=off)
    return read.nbytes


ALWAYS = {(2, 64)}  # ranks and lengths


@pytest.mark.parametrize(
    ("size", "other", "length"),
    [
        pytest.param(size, other, length, marks=() if (size, length) in ALWAYS else pytest.mark.full)
        for size, other in ((1, 2), (2, 3), (4, 1))
        for length in (1, 7, 64, 257)
    ],
)
def test_answers_are_those_of_one_process(ranks: Ranks, tmp_path: Path, size: int, other: int, length: int) -> None:
    """By the document that was read, and by the one that was saved, on another number of ranks."""
    ways = ("greedy", "sampled", "beams", "penalised")
    held = [
        run(ranks, size, "llama", length, ways, tmp_path, True),
        run(ranks, other, "llama", length, ways, tmp_path, False),
    ]
    assert {sum(parts) for parts in held} == {2 * 2 * length * 2 * 8 * 8}  # layers, keys and values, heads, their size
    if length == 64:
        assert len({*held[0]}) == 1, "each rank holds its share"


# not Llama 4, whose queries Transformers scales by positions that count the padding of other rows
@pytest.mark.parametrize(
    "name",
    [
        *("mistral", "GptOssForCausalLM", "DeepseekV3ForCausalLM"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen2", "gpt2")),
    ],
)
def test_kinds_of_layers_remember(ranks: Ranks, tmp_path: Path, name: str) -> None:
    for saves in (True, False):
        run(ranks, 3 if saves else 2, name, 41, ("greedy",), tmp_path, saves)


def run(ranks: Ranks, size: int, name: str, length: int, ways: tuple[str, ...], folder: Path, saves: bool) -> list[int]:
    arguments = (name, length, ways, str(folder), saves)
    return [answers(0, 1, *arguments)] if size == 1 else ranks(size).run(answers, *arguments)


# whose `generate` gives them no positions, so that they count the padding before a question
COUNT_BY_THEMSELVES = ("Exaone4_5_", "VibeVoiceAsr")


def after_another_call(rank: int, size: int, family: str) -> None:
    """Answers do not follow from what a model keeps of an earlier call, and leave it as it was."""
    hears = family in HEARING
    make_model, batch = (hearing_model, hearing_batch(family)) if hears else (seeing_model, seeing_batch(family))
    model, options = make_model(family).eval(), {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    model.generation_config.eos_token_id = None
    document, asked = document_of(33) % 50 + 1, questions()
    asked["input_ids"] = (asked["input_ids"] % 50 + 1) * asked["attention_mask"]
    rows = [ids[mask > 0] for ids, mask in zip(*asked.values(), strict=True)]
    alone = [model.generate(torch.cat([document[0], row])[None], **options) for row in rows]  # without padding
    hf_burst.patch_model(model)
    read = hf_burst.remember(model, document)
    with torch.no_grad():
        model(**batch)
    inner = model.model
    if hasattr(inner, "rope_deltas"):
        inner.rope_deltas = torch.full((1, 1), -3)
    for count in (3, 2):
        found = hf_burst.generate(
            model, **{key: value[:count] for key, value in asked.items()}, document=read, **options
        )
        assert not hasattr(inner, "rope_deltas") or inner.rope_deltas.tolist() == [[-3]]
        for number in range(count):
            assert found.sequences[number, QUESTION:].tolist() == alone[number].sequences[0, -9:].tolist()
            own = torch.stack([logits[number] for logits in found.logits])
            wanted = torch.cat(alone[number].logits)
            torch.testing.assert_close(own, wanted, rtol=0, atol=3e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    "family",
    [
        *("Qwen2_5_VL", "Qwen3VL", "Ernie4_5_VLMoe", *COUNT_BY_THEMSELVES),
        *(pytest.param(n, marks=pytest.mark.full) for n in ("Qwen2VL", "Qwen3VLMoe", "Glm4v", "Gemma3n")),
    ],
)
def test_answers_of_models_that_saw_images_or_heard(family: str) -> None:
    after_another_call(0, 1, family)


@pytest.mark.parametrize("family", ["Qwen3VL", "Exaone4_5_"])
def test_answers_over_ranks_of_models_that_saw_images(ranks: Ranks, family: str) -> None:
    ranks(2).run(after_another_call, family)


def streamed(rank: int, size: int) -> list[int]:
    """What a streamer is given: the question and its answer, without the document."""
    model, streamer = models.patch(make("llama")), _Noted()
    read = hf_burst.remember(model, document_of(9))
    question = questions()["input_ids"][:1]
    found = hf_burst.generate(model, question, document=read, streamer=streamer, **GREEDY)
    assert streamer.ended == (rank == 0)
    assert streamer.tokens == (found.flatten().tolist() if rank == 0 else [])
    return streamer.tokens


def test_streamers_are_given_the_question(ranks: Ranks) -> None:
    assert ranks(2).run(streamed)[0] == streamed(0, 1)


def document_stays(rank: int, size: int) -> None:
    """Answers leave a document as it was, and it serves any number of them."""
    model = models.patch(make("llama"))
    read = hf_burst.remember(model, document_of(33))
    before = [(keys.keys.clone(), keys.values.clone()) for keys in read.layers if keys is not None]
    first = ask(model, read, "greedy")
    ask(model, read, "beams")
    assert torch.equal(ask(model, read, "greedy"), first)
    for keys, (own, values) in zip(read.layers, before, strict=True):
        assert keys is not None
        assert torch.equal(keys.keys, own)
        assert torch.equal(keys.values, values)


def test_answers_leave_the_document_as_it_was(ranks: Ranks) -> None:
    ranks(2).run(document_stays)


def test_a_document_keeps_its_tokens() -> None:
    model, buffer = models.patch(make("llama")), document_of(33)
    read, options = hf_burst.remember(model, buffer), {"repetition_penalty": 3.0, **GREEDY}
    first = hf_burst.generate(model, **questions(), document=read, **options)
    buffer.fill_(7)
    assert torch.equal(hf_burst.generate(model, **questions(), document=read, **options), first)


def test_weights_that_changed() -> None:
    model = hf_burst.patch_model(get_peft_model(make("llama"), LoraConfig(target_modules="all-linear")).eval())
    read = hf_burst.remember(model, document_of(9))
    ask(model, read, "greedy")
    with model.disable_adapter(), pytest.raises(ConfigError, match="weights of the model have changed"):
        ask(model, read, "greedy")
    with torch.no_grad():
        next(weight for weight in model.parameters() if weight.requires_grad).add_(1e-3)
    with pytest.raises(ConfigError, match="remember anew"):
        ask(model, read, "greedy")


def adapters_of_one_rank(rank: int, size: int, kind: str) -> None:
    """Ranks that share weights (FSDP2) gather all of them, whichever are idle or lie whole on one of them."""
    settings = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = hf_burst.patch_model(get_peft_model(make("llama"), settings).eval())
    model.add_adapter("other", settings)  # idle everywhere
    inner = fully_shard(model.base_model.model)
    read = hf_burst.remember(model, document_of(9))
    if kind == "idle" or rank:
        inner.reshard()
    if kind == "idle" and rank:
        model.disable_adapter_layers()
    for use in (lambda: ask(model, read, "greedy"), lambda: hf_burst.remember(model, document_of(9))):
        with nullcontext() if kind == "whole" else pytest.raises((ConfigError, RankMismatchError), match="weights"):
            use()


@pytest.mark.parametrize("kind", ["idle", "whole"])
def test_weights_of_one_rank_under_fsdp2(ranks: Ranks, kind: str) -> None:
    ranks(2).run(adapters_of_one_rank, kind, timeout=60.0)


@pytest.mark.parametrize("first", ["none", "lora"])
def test_an_adapter_that_is_added_and_stays_idle(first: str) -> None:
    settings = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    plain = make("llama").eval()
    model = hf_burst.patch_model(plain if first == "none" else get_peft_model(plain, settings).eval())
    read = hf_burst.remember(model, document_of(9))
    wanted = ask(model, read, "greedy")
    if first == "none":
        model = get_peft_model(model, settings, adapter_name="other").eval()
    else:
        model.add_adapter("other", settings)
    switched = model.disable_adapter() if first == "none" else nullcontext()
    with switched:
        assert torch.equal(ask(model, read, "greedy"), wanted)
    model.set_adapter("other")
    with pytest.raises(ConfigError, match="weights of the model have changed"):
        ask(model.eval(), read, "greedy")


def test_an_adapter_that_learns_beside_a_document_read_without_it() -> None:
    model = hf_burst.patch_model(get_peft_model(make("llama"), LoraConfig(target_modules="all-linear")).eval())
    weight = next(weight for weight in model.parameters() if weight.requires_grad)
    with model.disable_adapter(), torch.no_grad():
        read = hf_burst.remember(model, document_of(9))
        weight.add_(1e-3)
        ask(model, read, "greedy")
    with pytest.raises(ConfigError, match="weights of the model have changed"):
        ask(model, read, "greedy")


def test_what_keys_follow_from_besides_weights() -> None:
    """Rotary frequencies, biases of routers, the scale of an adapter, and autocast."""
    for name, buffer in (("llama", "inv_freq"), ("DeepseekV3ForCausalLM", "e_score_correction_bias")):
        model = models.patch(make(name))
        read = hf_burst.remember(model, document_of(9))
        next(value for key, value in model.named_buffers() if key.endswith(buffer)).add_(0.5)
        with pytest.raises(ConfigError, match="have changed"):
            ask(model, read, "greedy")
    model = hf_burst.patch_model(get_peft_model(make("llama"), LoraConfig(target_modules="all-linear")).eval())
    read = hf_burst.remember(model, document_of(9))
    with rescale_adapter_scale(model, 0.5), pytest.raises(ConfigError, match="have changed"):
        ask(model, read, "greedy")
    ask(model, read, "greedy")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="have changed"):
        ask(model, read, "greedy")


CHANGES: dict[str, tuple[str, str, Any]] = {  # models, entries of their configs, and other values
    "window": ("mistral", "sliding_window", 5),
    "layers": ("qwen2", "layer_types", ["sliding_attention", "sliding_attention"]),
    "rope": ("llama_yarn", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
    "norms": ("llama", "rms_norm_eps", 1e-3),
    "scores": ("Gemma2ForCausalLM", "final_logit_softcapping", 3.0),
    "of a wrapper": ("Gemma4ForConditionalGeneration", "text_config.sliding_window", 5),
}


def set_entry(config: Any, name: str, value: Any) -> None:
    path, _, last = name.rpartition(".")
    setattr(getattr(config, path) if path else config, last, value)


@pytest.mark.parametrize("kind", CHANGES)
def test_configs_that_changed(tmp_path: Path, kind: str) -> None:
    """Entries that were set after the document was read, and those of a model that was loaded with others."""
    name, entry, value = CHANGES[kind]
    model = models.patch(make(name))
    read = hf_burst.remember(model, document_of(9))
    read.save(tmp_path)
    set_entry(model.config, entry, value)
    for use in (lambda: ask(model, read, "greedy"), lambda: hf_burst.Document.load(model, tmp_path)):
        with pytest.raises(ConfigError, match=f"config.{entry}.* when the model read the document"):
            use()
    again = make(name)
    set_entry(again.config, entry, value)
    other = models.patch(type(again)(again.config).to(again.dtype).eval())
    other.load_state_dict(model.state_dict())
    for use in (lambda: ask(other, read, "greedy"), lambda: hf_burst.Document.load(other, tmp_path)):
        with pytest.raises(ConfigError, match=f"config.{entry}.* when the model read the document"):
            use()


def test_entries_that_states_do_not_follow_from(tmp_path: Path) -> None:
    model = models.patch(make("llama"))
    read = hf_burst.remember(model, document_of(9))
    read.save(tmp_path)
    model.config.update({"pad_token_id": 3, "eos_token_id": 4, "use_cache": False, "attention_dropout": 0.1})
    model.config.name_or_path, model.config.id2label = "elsewhere", {0: "good"}
    expected = ask(model, read, "greedy")
    assert torch.equal(ask(model, hf_burst.Document.load(model, tmp_path), "greedy"), expected)


def config_of_one_rank(rank: int, size: int, folder: str) -> None:
    model = models.patch(make("mistral"))
    read = hf_burst.remember(model, document_of(9))
    read.save(folder)
    model.config.sliding_window -= rank
    error = ConfigError if rank else RankMismatchError
    for use in (
        lambda: ask(model, read, "greedy"),
        lambda: hf_burst.Document.load(model, folder),
        lambda: hf_burst.token_losses(model, {**questions(), "labels": questions()["input_ids"]}, document=read),
    ):
        with pytest.raises(error, match=r"config\.sliding_window is 8, and was 9"):
            use()
    with pytest.raises(RankMismatchError, match=r"config\.sliding_window: rank 0 has 9, rank 1 has 8"):
        hf_burst.remember(model, document_of(9))


def test_a_config_that_changed_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(config_of_one_rank, str(tmp_path))


def torn(folder: Path, kind: str) -> None:
    """A saved document of which something is missing."""
    if kind == "cut":
        part = folder / "rank-00000-of-00001.safetensors"
        part.write_bytes(part.read_bytes()[:-100])
    elif kind == "gone":
        (folder / "rank-00000-of-00001.safetensors").unlink()
    elif kind == "document":
        (folder / "document.safetensors").unlink()
    else:
        (folder / "memory.json").write_text('{"model": ')


@pytest.mark.parametrize("kind", ["cut", "gone", "document", "about"])
def test_torn_files(tmp_path: Path, kind: str) -> None:
    model = models.patch(make("llama"))
    hf_burst.remember(model, document_of(9)).save(tmp_path)
    torn(tmp_path, kind)
    with pytest.raises(ConfigError, match="holds no whole document"):
        hf_burst.Document.load(model, tmp_path)


def interrupted_on_one_rank(rank: int, size: int, folder: str) -> None:
    read = hf_burst.remember(models.patch(make("llama")), document_of(9))
    fails = mock.patch("hf_burst.hf.generation.document.save_file", side_effect=KeyboardInterrupt if rank else None)
    with fails, pytest.raises(KeyboardInterrupt if rank else RankMismatchError, match="" if rank else "Keyboard"):
        read.save(folder)


def test_a_rank_that_is_interrupted_while_it_saves(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(interrupted_on_one_rank, str(tmp_path), timeout=60.0)


def wrong_on_one_rank(rank: int, size: int, folder: str) -> None:
    """Weights that ranks share are not gathered before all ranks have agreed."""
    model = models.patch(make("llama"))
    fully_shard(model)
    error = ConfigError if rank else RankMismatchError
    with pytest.raises(BatchError if rank else RankMismatchError, match="neither of them 0"):
        hf_burst.remember(model, document_of(9)[:, : 0 if rank else 9])
    read = hf_burst.remember(model, document_of(9))
    read.save(folder)
    with pytest.raises(error, match="holds no document"):
        hf_burst.Document.load(model, f"{folder}/none" if rank else folder)
    model.train(mode=bool(rank))
    with pytest.raises(error, match=r"model.eval"):
        ask(model, read, "greedy")
    with pytest.raises(error, match=r"model.eval"):
        hf_burst.token_losses(model, {**questions(), "labels": questions()["input_ids"]}, document=read)
    model.eval()
    ask(model, read, "greedy")


def test_sharded_weights_and_one_rank_that_is_wrong(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(wrong_on_one_rank, str(tmp_path))


def test_what_documents_refuse(tmp_path: Path) -> None:
    model = models.patch(make("llama"))
    with pytest.raises(BatchError, match="neither of them 0"):
        hf_burst.remember(model, torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(BatchError, match="2 documents were given"):
        hf_burst.remember(model, torch.ones(2, 5, dtype=torch.int64))
    with pytest.raises(UnsupportedModelError, match="depend on the longest"):
        hf_burst.remember(models.patch(make("llama_dynamic")), document_of(9))
    with pytest.raises(UnsupportedModelError, match="layers with a state"):
        hf_burst.remember(models.patch(make("qwen3_5")), document_of(9))
    with pytest.raises(UnsupportedModelError, match=r"counts positions from padding_idx \+ 1"):
        hf_burst.remember(models.patch(make("RobertaForCausalLM")), document_of(9))
    read = hf_burst.remember(model, document_of(9))
    with pytest.raises(ConfigError, match="A LlamaForCausalLM has read"):
        ask(models.patch(make("mistral")), read, "greedy")
    with pytest.raises(BatchError, match="neither of them 0"):
        hf_burst.generate(model, torch.zeros(2, 0, dtype=torch.int64), document=read)
    with pytest.raises(BatchError, match="nothing besides, not token_type_ids"):
        hf_burst.generate(model, document_of(9), document=read, token_type_ids=document_of(9), **GREEDY)
    with pytest.raises(BatchError, match="this model takes 0 to 60"):
        hf_burst.generate(model, document_of(9) + 1000, document=read, **GREEDY)
    with pytest.raises(BatchError, match=r"shape .batch, tokens."):
        hf_burst.generate(model, torch.ones(2, 3, 2, dtype=torch.int64), document=read, **GREEDY)
    right = {key: value.flip(1) for key, value in questions().items()}
    with pytest.raises(BatchError, match="padding_side"):
        hf_burst.generate(model, **right, document=read)
    with pytest.raises(ConfigError, match="holds no document"):
        hf_burst.Document.load(model, tmp_path)


def other_documents(rank: int, size: int) -> None:
    model = models.patch(make("llama"))
    hf_burst.remember(model, document_of(9 + rank))


def other_questions(rank: int, size: int) -> None:
    model = models.patch(make("llama"))
    read = [hf_burst.remember(model, document_of(length)) for length in (9, 10)]
    ask(model, read[rank], "greedy")


@pytest.mark.parametrize("function", [other_documents, other_questions])
def test_documents_that_differ_between_ranks(ranks: Ranks, function: Callable[..., None]) -> None:
    with pytest.raises(RankError, match="document") as caught:
        ranks(2).run(function)
    assert all(isinstance(error, RankMismatchError) for error in caught.value.errors)
