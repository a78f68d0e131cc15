"""Questions to a folder of texts: answers over ranks are those of one process, and so are their scores."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

import hf_burst
from tests.support import models, trainers
from tests.support.ranks import RankPool, reset_accelerate

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))  # where the recipes find their modules
import ask

TEXTS = {"first": " ".join(f"w{number}" for number in range(3, 40)), "second": "w9 w8 w7 w41 w11"}
QUESTIONS = ["w5 w6", "w12", "w20 w21 w22 w23"]


def tokenizer() -> PreTrainedTokenizerBase:
    made: PreTrainedTokenizerBase = trainers.tokenizer()
    made.padding_side = "left"
    return made


def asked(rank: int, size: int) -> list[Any]:
    reset_accelerate()
    model = hf_burst.patch_model(models.make_model("llama", torch.float64).eval())
    return ask.ask(model, tokenizer(), TEXTS, QUESTIONS, 6)


@pytest.mark.parametrize("size", [1, 2])
def test_answers_are_the_likeliest(ranks: Callable[[int], RankPool], size: int) -> None:
    model, words = models.make_model("llama", torch.float64).eval(), tokenizer()
    for found in ranks(size).run(asked):
        assert [answer.question for answer in found] == QUESTIONS
        for answer in found:
            scores = {}
            for name, text in TEXTS.items():
                question = words(ask.TEMPLATE.format(question=answer.question), add_special_tokens=False).input_ids
                prompt = torch.tensor([words(text).input_ids + question])
                options = {"attention_mask": torch.ones_like(prompt), "eos_token_id": words.eos_token_id}
                whole = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, **options)
                written = whole[:, prompt.shape[1] :]
                with torch.no_grad():
                    logits = model(whole).logits[:, prompt.shape[1] - 1 : -1].log_softmax(-1)
                scores[name] = float(logits.gather(2, written[..., None]).mean())
                if name == answer.document:
                    assert answer.answer == words.decode(written[0], skip_special_tokens=True).strip()
            assert answer.log_likelihood == pytest.approx(max(scores.values()), rel=1e-9)
            assert scores[answer.document] == max(scores.values())


def test_files_that_are_no_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Größe", encoding="utf-8")
    assert ask.texts_of(tmp_path) == {"a.txt": "Größe"}
    (tmp_path / "b.txt").write_text(" \n")
    with pytest.raises(SystemExit, match=r"b.txt is empty"):
        ask.texts_of(tmp_path)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SystemExit, match=r"b.txt is not UTF-8"):
        ask.texts_of(tmp_path)


def test_tokenizers_without_an_end() -> None:
    words = tokenizer()
    words.eos_token = None
    model = hf_burst.patch_model(models.make_model("llama", torch.float64).eval())
    model.generation_config.eos_token_id = None
    assert len(ask.ask(model, words, TEXTS, QUESTIONS, 6)) == len(QUESTIONS)
