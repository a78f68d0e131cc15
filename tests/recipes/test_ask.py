"""Questions to a folder of texts: answers over ranks are those of one process, and so are their scores."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

import hf_burst
from tests.support import models, trainers
from tests.support.ranks import RankPool, reset_accelerate

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))  # where the recipes find their modules
import ask
from models import load_adapter

TEXTS = {"first": " ".join(f"w{number}" for number in range(3, 40)), "second": "w9 w8 w7 w41 w11"}
TURNS = (  # of a user, and the beginning of the next one
    "{% for each in messages %}w50 {{ each.content }} w51{% endfor %}{% if add_generation_prompt %} w52{% endif %}"
)
QUESTIONS = ["w5 w6", "w12", "w20 w21 w22 w23"]


def tokenizer() -> PreTrainedTokenizerBase:
    made: PreTrainedTokenizerBase = trainers.tokenizer()
    made.padding_side, made.chat_template = "left", TURNS
    made.backend_tokenizer.post_processor = TemplateProcessing(single="w53 $A", special_tokens=[("w53", 53)])
    return made


def asked(rank: int, size: int, chat: bool) -> list[Any]:
    reset_accelerate()
    model = hf_burst.patch_model(models.make_model("llama", torch.float64).eval())
    told: list[str] = []

    def answers_from(*given: Any) -> Any:
        told.append("is read")
        return answer(*given)

    answer = ask.answers_from
    with mock.patch.object(ask, "answers_from", answers_from):
        found = ask.ask(model, tokenizer(), TEXTS, QUESTIONS, 6, chat, told.append)
    assert told == ["text 1 of 2: first, 38 tokens", "is read", "text 2 of 2: second, 6 tokens", "is read"]
    return found


def prompt_of(words: PreTrainedTokenizerBase, text: str, question: str, chat: bool) -> torch.Tensor:
    if not chat:
        asked = words(ask.TEMPLATE.format(question=question), add_special_tokens=False).input_ids
        return torch.tensor([words(text).input_ids + asked])
    message = [{"role": "user", "content": f"{text}\n\n{question}"}]
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return words.apply_chat_template(message, **options)["input_ids"]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_answers_are_the_likeliest(ranks: Callable[[int], RankPool], size: int, chat: bool) -> None:
    model, words = models.make_model("llama", torch.float64).eval(), tokenizer()
    for found in ranks(size).run(asked, chat):
        assert [answer.question for answer in found] == QUESTIONS
        for answer in found:
            scores = {}
            for name, text in TEXTS.items():
                prompt = prompt_of(words, text, answer.question, chat)
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
    assert ask.texts_of(tmp_path) == ask.texts_of(tmp_path / "a.txt") == {"a.txt": "Größe"}
    (tmp_path / "a.txt").write_text("Größe", encoding="utf-8-sig")  # as Windows writes it
    assert ask.texts_of(tmp_path) == {"a.txt": "Größe"}
    with pytest.raises(SystemExit, match=r"documents '.*/none' cannot be used: .*No such file"):
        ask.texts_of(tmp_path / "none")
    with pytest.raises(SystemExit, match=r"q.txt cannot be used: .*No such file"):
        ask.main(["model", str(tmp_path), "--questions", str(tmp_path / "q.txt")])
    (tmp_path / "b.txt").write_text(" \n")
    with pytest.raises(SystemExit, match=r"b.txt is empty"):
        ask.texts_of(tmp_path)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "fox.png").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SystemExit, match=r"fox.png is an image, and only texts are asked here"):
        ask.texts_of(tmp_path / "fox.png")
    with pytest.raises(SystemExit, match=r"b.txt is not UTF-8"):
        ask.texts_of(tmp_path)


def test_texts_lie_below_a_folder_and_other_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.txt", "deeper/a.MD", "rows.csv", "deeper/picture.png", ".git/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert ask.texts_of(tmp_path) == {name: name for name in ("a.txt", "deeper/a.MD")}
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith(f"documents {tmp_path}: of 4 files 2 end in .txt, ")
    assert told.endswith(". The others are left out: deeper/picture.png, rows.csv")
    assert ask.texts_of(tmp_path / "rows.csv") == {"rows.csv": "rows.csv"}, "a file that is named is read"
    monkeypatch.setenv("RANK", "1")
    ask.texts_of(tmp_path)
    assert not capsys.readouterr().out


def test_tokenizers_without_an_end() -> None:
    words = tokenizer()
    words.eos_token = None
    model = hf_burst.patch_model(models.make_model("llama", torch.float64).eval())
    model.generation_config.eos_token_id = None
    assert len(ask.ask(model, words, TEXTS, QUESTIONS, 6, False, print)) == len(QUESTIONS)


def test_answers_end_where_a_turn_ends() -> None:
    """By the generation config of the model, where the tokenizer has another end, as Gemma's."""
    model = models.make_model("llama", torch.float64).eval()
    model.generation_config.eos_token_id = [7, 9]
    assert ask.ends_of(model, tokenizer()) == [1, 7, 9]


def test_an_adapter_answers_with_the_rope_that_it_was_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config lies beside it. Positions are counted with question and answer."""
    reset_accelerate()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    base, folder = models.make_model("llama"), tmp_path / "adapter"
    base.config.max_position_embeddings = 40
    base.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(base, LoraConfig(target_modules="all-linear", init_lora_weights=False)).save_pretrained(folder)
    config = AutoConfig.from_pretrained(tmp_path / "base")
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 500.0}
    config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    for name, text in {"text.txt": TEXTS["first"], "questions.txt": QUESTIONS[0]}.items():
        (tmp_path / name).write_text(text)
    files = [str(folder), str(tmp_path / "text.txt"), "--questions", str(tmp_path / "questions.txt")]
    ask.main([*files, "--tokens", "3"])
    said = capsys.readouterr()
    told, warned = said.out.splitlines()[-1], said.err
    assert "with question and answer more than the model's 40 positions: it may answer badly" in warned
    trained = hf_burst.patch_model(load_adapter(folder).eval())
    expected = ask.ask(trained, tokenizer(), {"text.txt": TEXTS["first"]}, QUESTIONS[:1], 3, True, print)[0]
    assert json.loads(told)["log_likelihood"] == pytest.approx(expected.log_likelihood, rel=1e-4)
    assert json.loads(told)["answer"] == expected.answer
    reset_accelerate()


@pytest.mark.parametrize("given", [[], ["--no-chat"]])
def test_the_chat_template_can_be_left_out(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reset_accelerate()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    models.make_model("llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    for name, text in {"text.txt": TEXTS["first"], "questions.txt": QUESTIONS[0]}.items():
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in ("model", "text.txt")]
    ask.main([*files, "--questions", str(tmp_path / "questions.txt"), "--tokens", "3", *given])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    model = hf_burst.patch_model(models.make_model("llama").eval())
    one = {"text.txt": TEXTS["first"]}
    expected = ask.ask(model, tokenizer(), one, QUESTIONS[:1], 3, not given, print)[0]
    assert told["answer"] == expected.answer
    assert told["log_likelihood"] == pytest.approx(expected.log_likelihood, rel=1e-4)
    reset_accelerate()
