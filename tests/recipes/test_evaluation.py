"""The recipes that evaluate: over ranks, recall, perplexity by position and RULER's tasks equal one process."""

import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from PIL import Image
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_burst
from tests.support import conversations, models
from tests.support.ranks import RankError, RankPool, reset_accelerate

pytest.importorskip("trl")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))  # where the recipes find their modules
import evaluate  # noqa: E402
import evaluation  # noqa: E402
import extend_context  # noqa: E402
import needles  # noqa: E402
import scoring  # noqa: E402


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of the words that the tasks and some of Python's documentation have; every digit is a token."""
    split = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)])

    def pieces(text: str) -> list[str]:
        return [word for word, _ in split.pre_tokenize_str(text)]

    haystack = needles.read_haystack(["python_topics"])
    own = [needles.INTRO, needles.FACT, *needles.KEYS, "0123456789 Question: What is the secret number? Answer: ,"]
    common = [word for word, _ in Counter(pieces(haystack)).most_common(300)]
    known = dict.fromkeys(["<unk>", "<eos>", *pieces(" ".join(own)), *common])
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


def small(vocabulary: int) -> LlamaForCausalLM:
    """A Llama that can learn to recall, of 96 positions."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"vocab_size": vocabulary, "max_position_embeddings": 96, "initializer_range": 0.07}
    return LlamaForCausalLM(LlamaConfig(**config, **sizes, **heads))


def save_untaught(folder: Path) -> Path:
    """A model that was taught nothing, and its tokenizer."""
    tokenizer = words()
    tokenizer.save_pretrained(folder)
    small(len(tokenizer)).double().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untaught(tmp_path_factory.mktemp("model"))


def answers(rank: int, size: int) -> list[scoring.Score]:
    rows = torch.randint(models.VOCABULARY, (3, 41), generator=torch.Generator().manual_seed(1))
    model = hf_burst.patch_model(models.make_model("llama", torch.float64)).eval()
    with torch.no_grad():  # one answer that greedy decoding writes
        for place in range(37, 41):
            rows[2, place] = model(input_ids=rows[2:, :place], logits_to_keep=1).logits[0, -1].argmax()
    return rows, scoring.score_answers(model, rows.tolist(), [1, 7, 4])


@pytest.mark.parametrize("size", [*(pytest.param(size, marks=pytest.mark.full) for size in (1, 2)), 3])
def test_answers_over_ranks_equal_one_process(ranks: Callable[[int], RankPool], size: int) -> None:
    for rows, scores in ranks(size).run(answers):
        model = models.make_model("llama", torch.float64).eval()
        with torch.no_grad():
            likelihoods = model(rows).logits[:, :-1].log_softmax(-1)
        for row, own, score, count in zip(rows, likelihoods, scores, [1, 7, 4], strict=True):
            values = own.gather(-1, row[1:, None])[-count:, 0]
            assert score.log_likelihood == pytest.approx(float(values.sum()), rel=1e-10)
            assert score.greedy == bool((own[-count:].argmax(-1) == row[-count:]).all())
        assert [score.greedy for score in scores] == [False, False, True]


def position_losses(rank: int, size: int, windows: list[list[int]]) -> scoring.PositionLosses:
    model = hf_burst.patch_model(models.make_model("llama", torch.float64)).eval()
    groups: Any = SimpleNamespace(own=lambda items: [(item, True) for item in items], add=lambda sums: sums)
    return scoring.losses_by_position(model, len(windows[0]), windows, groups)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_losses_by_position_equal_one_process(ranks: Callable[[int], RankPool], size: int) -> None:
    windows = torch.randint(models.VOCABULARY, (3, 101), generator=torch.Generator().manual_seed(1))
    model = models.make_model("llama", torch.float64).eval()
    with torch.no_grad():
        logits = model(windows).logits[:, :-1].transpose(1, 2)
    losses = torch.nn.functional.cross_entropy(logits, windows[:, 1:], reduction="none").mean(0)
    for curve in ranks(size).run(position_losses, windows.tolist()):
        assert curve.edges == [1, 16, 23, 32, 45, 64, 101]
        assert sum(curve.tokens) == 300
        for loss, count, first, end in zip(curve.losses, curve.tokens, curve.edges, curve.edges[1:], strict=False):
            assert count == 3 * (end - first)
            assert loss == pytest.approx(float(losses[first - 1 : end - 1].mean()), rel=1e-10)
        assert curve.mean(1, 101) == pytest.approx(float(losses.mean()), rel=1e-10)
        assert curve.mean(32, 64) == pytest.approx(float(losses[31:63].mean()), rel=1e-10)


@pytest.mark.parametrize(("old", "new"), [(256, 257), (256, 300), (4096, 4800), (3000, 4096), (256, 1024)])
def test_every_position_is_within_the_old_length_or_beyond_it(old: int, new: int) -> None:
    edges = scoring.position_edges(new, [old])
    assert (edges[0], edges[-1], edges == sorted(set(edges))) == (1, new, True)
    sizes = [end - first for first, end in itertools.pairwise(edges)]
    curve = scoring.PositionLosses(edges, [float(first < old) for first in edges[:-1]], sizes)
    assert (curve.mean(1, old), curve.mean(old, new)) == (1, 0)
    assert curve.mean(1, new) == pytest.approx((old - 1) / (new - 1))


@pytest.mark.parametrize("task", needles.TASKS)
def test_samples_hold_what_is_asked(task: str) -> None:
    maker = needles.Needles(words(), needles.read_haystack(["python_topics"]))
    for depth in (0.0, 0.5, 1.0):
        sample = maker.sample(task, 700, depth, 3)
        assert sample == maker.sample(task, 700, depth, 3) != maker.sample(task, 700, depth, 4)
        assert len(sample.input_ids) == 700
        facts = maker._encode(maker._prompt(task, random.Random(f"{task} 700 {depth} 3")).asked)
        starts = [next(at for at in range(700) if sample.input_ids[at:][: len(fact)] == fact) for fact in facts]
        asked = [maker.tokenizer.decode(fact) for fact in facts]
        assert len(asked) == (maker.facts if task in ("multivalue", "variables") else 1)
        answer = maker.tokenizer.decode(sample.input_ids[-sample.answer :]).split(" , ")
        assert len(answer) == len(asked)
        if task != "variables":  # whose names are unknown words here
            assert all(value in fact for value, fact in zip(answer, asked, strict=True))
            assert sample.answer == len(asked) * maker.digits + len(asked) - 1  # and commas
        assert abs(starts[0] - depth * (700 - sum(map(len, facts)))) < 150


def test_a_text_that_is_too_short_says_so() -> None:
    maker = needles.Needles(words(), "Some text.")
    with pytest.raises(SystemExit, match="length 30 is too short for the task 'single'; give at least") as end:
        maker.sample("single", 30, 0.5, 0)
    least = int(str(end.value).split()[-1].rstrip("."))
    assert len(maker.sample("single", least, 0.5, 0).input_ids) == least


def test_a_text_without_tokens_says_so() -> None:
    with pytest.raises(SystemExit, match="makes no tokens of the haystack"):
        needles.Needles(words(), " \n \n").sample("single", 300, 0.5, 0)


def test_a_chat_template_frames_the_text() -> None:
    tokenizer = words()
    tokenizer.chat_template = "<eos>{{ messages[0]['content'] }}<eos>{% if add_generation_prompt %}Answer: {% endif %}"
    sample = needles.Needles(tokenizer, "Some text.", chat=True).sample("single", 100, 0.5, 0)
    assert sample.input_ids[0] == tokenizer.eos_token_id
    assert sample.input_ids.count(tokenizer.eos_token_id) == 2
    assert tokenizer.decode(sample.input_ids).split("<eos>")[2].startswith(" Answer : The secret number of the")


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


def evaluated(rank: int, size: int, arguments: list[str], fsdp: bool = False) -> None:
    """Evaluates; under FSDP2, of which accelerate knows nothing on CPUs, as if the processes had GPUs."""
    reset_accelerate()
    with mock.patch.dict(os.environ, FSDP2 if fsdp else {}):
        PartialState(cpu=True)
        if fsdp:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        groups = evaluate.evaluate(arguments)
        assert (groups.accelerator.distributed_type == DistributedType.FSDP) == fsdp


OPTIONS = ["--tasks", "single", "variables", "--lengths", "128", "192", "--depths", "2", "--samples", "2"]
OPTIONS += ["--digits", "2", "--windows", "2"]


@pytest.mark.slow
def test_the_recipe_under_fsdp2_equals_one_process(
    ranks: Callable[[int], RankPool], folder: Path, tmp_path: Path
) -> None:
    arguments = ["--model_name_or_path", str(folder), *OPTIONS, "--output_dir"]
    ranks(1).run(evaluated, [*arguments, str(tmp_path / "one")])
    ranks(2).run(evaluated, [*arguments, str(tmp_path / "all")], True)
    expected, results = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "all"))
    for ours, plain in zip(results["recall"], expected["recall"], strict=True):
        assert ours == {**plain, "log_likelihood": pytest.approx(plain["log_likelihood"], rel=1e-6)}
    assert results["perplexity"]["losses"] == pytest.approx(expected["perplexity"]["losses"], rel=1e-6)


@pytest.mark.slow
def test_groups_with_different_numbers_of_texts_under_fsdp2(
    ranks: Callable[[int], RankPool], folder: Path, tmp_path: Path
) -> None:
    """Each gathers the other's weights, so both make as many passes: 3 texts for recall, and 3 windows, in 2 groups."""
    arguments = ["--model_name_or_path", str(folder), "--tasks", "single", "--lengths", "128", "--depths", "1"]
    arguments += ["--samples", "3", "--digits", "2", "--windows", "3", "--output_dir"]
    ranks(1).run(evaluated, [*arguments, str(tmp_path / "one")])
    ranks(2).run(evaluated, [*arguments, str(tmp_path / "all"), "--burst_size", "1"], True, timeout=60)
    expected, results = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "all"))
    assert [cell["samples"] for cell in results["recall"]] == [3]
    likelihood = pytest.approx(expected["recall"][0]["log_likelihood"], rel=1e-6)
    assert results["recall"][0]["log_likelihood"] == likelihood
    assert results["perplexity"]["tokens"] == expected["perplexity"]["tokens"]
    assert results["perplexity"]["losses"] == pytest.approx(expected["perplexity"]["losses"], rel=1e-6)


@pytest.mark.slow
def test_an_adapter_is_evaluated_with_its_base(ranks: Callable[[int], RankPool], folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapter = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64), adapter)
    for name in ("adapter", "merged"):
        words().save_pretrained(tmp_path / name)
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    base, ours, merged = (
        [cell["log_likelihood"] for cell in results_of(ranks, 1, source, tmp_path / str(number), *OPTIONS)["recall"]]
        for number, source in enumerate((folder, tmp_path / "adapter", tmp_path / "merged"))
    )
    assert ours == pytest.approx(merged, rel=1e-6)
    assert ours != pytest.approx(base, rel=1e-2)


def results_of(ranks: Callable[[int], RankPool], size: int, folder: Path, out: Path, *options: str) -> dict:
    common = ["--model_name_or_path", str(folder), "--output_dir", str(out), *options]
    ranks(size).run(evaluated, common)
    return json.loads((out / "results.json").read_text())


@pytest.mark.parametrize(("size", "burst"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_the_recipe_over_ranks_equals_one_process(
    ranks: Callable[[int], RankPool], folder: Path, tmp_path: Path, size: int, burst: int
) -> None:
    """All recall tasks and the perplexity; two groups share the texts out. Untaught, the model guesses."""
    options = ["--tasks", *needles.TASKS, "--lengths", "128", "192", "--depths", "3", "--samples", "3"]
    options += ["--digits", "2", "--batch_size", "2", "--windows", "3"]
    expected = results_of(ranks, 1, folder, tmp_path / "one", *options)
    results = results_of(ranks, size, folder, tmp_path / "all", *options, "--burst_size", str(burst))
    for ours, plain in zip(results["recall"], expected["recall"], strict=True):
        assert ours == {**plain, "log_likelihood": pytest.approx(plain["log_likelihood"], rel=1e-6)}
        assert ours["right"] == 0
        assert ours["samples"] == 3
    assert [cell["depth"] for cell in results["recall"][:3]] == [0, 0.5, 1]
    assert results["perplexity"]["losses"] == pytest.approx(expected["perplexity"]["losses"], rel=1e-6)
    assert results["perplexity"]["tokens"] == expected["perplexity"]["tokens"]
    for name in ("recall.png", "perplexity.png"):
        assert (tmp_path / "all" / name).read_bytes().startswith(b"\x89PNG")


def test_answers_of_chats_are_scored_as_sft_labels_them(
    ranks: Callable[[int], RankPool], folder: Path, tmp_path: Path
) -> None:
    """The loss of one plain model on the labels that `sft.py` makes, over ranks and groups."""
    import chats
    from models import byte_tokenizer  # of the recipes

    path = conversations.chats(tmp_path / "chats.jsonl", conversations.facts(9), count=5, turns=2)
    conversations.write(tmp_path / "long.jsonl", [conversations.chat(conversations.facts(90), random.Random(0), 90)])
    path.write_text(path.read_text() + (tmp_path / "long.jsonl").read_text())
    (tmp_path / "model").mkdir()
    tokenizer, model = byte_tokenizer(), small(260).double()
    tokenizer.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    total, count, render = 0.0, 0, chats.ChatTokenizer(tokenizer)
    for line in path.read_text().splitlines()[:-1]:
        ids, labels = (torch.tensor([value]) for value in render(json.loads(line)["messages"]).values())
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum"))
        count += int((labels != -100).sum())
    options = ["--tasks", "none", "--documents", str(path), "--lengths", "512"]
    for size, more in ((1, []), (2, []), (2, ["--burst_size", "1"])):
        answers = results_of(ranks, size, tmp_path / "model", tmp_path / "out", *options, *more)["answers"]
        assert (answers["tokens"], answers["rows"]) == (count, 5)
        assert answers["loss"] == pytest.approx(total / count, rel=1e-6)
    everything = results_of(ranks, 1, tmp_path / "model", tmp_path / "out", *options, "--assistant_only_loss", "false")
    assert everything["answers"]["tokens"] > 2 * count


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tasks", "nonsense"], "tasks has 'nonsense'; give some of single, multikey"),
        (["--lengths", "0"], r"lengths is \[0\]; give whole numbers"),
        (["--samples", "0"], "samples is 0; give a whole number, at least 1"),
        (["--facts", "145"], "facts is 145; give at most 144"),
        (["--merge_to", "full"], "merge_to is for training"),
        (["--haystack", "missing.txt"], "haystack has 'missing.txt', which does not exist"),
        (["--lengths", "20"], "length 20 is too short"),
        (["--tasks", "none", "--lengths", "900000"], "No document has 900,000 tokens"),
        (["--documents", "{rows}"], r"documents \[.*\] cannot be used: its columns are \['words'\]; it needs messages"),
        (["--documents", "{missing}"], r"missing.jsonl:1: its image /.*/nowhere.png is no file"),
        (["--documents", "{images}"], "The rows have images, and '.*' has no processor for them"),
        (["--output_dir", "/proc"], "output_dir '/proc' cannot be used"),
        (["--chat", "true"], "the tokenizer has no chat template"),
        (["--lenghts", "20"], "No setting is called lenghts; did you mean lengths"),
    ],
)
def test_settings_of_an_evaluation_that_are_wrong(
    ranks: Callable[[int], RankPool], folder: Path, tmp_path: Path, options: list[str], told: str
) -> None:
    """All but what a library says of them is found before the weights are loaded."""
    (tmp_path / "rows.jsonl").write_text('{"words": "none"}\n')
    chat = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "4"}]
    rows = {name: [{"messages": chat, "images": [f"{name}.png"]}] for name in ("here", "nowhere")}
    Image.new("RGB", (1, 1)).save(tmp_path / "here.png")
    names = {"images": conversations.write(tmp_path / "images.jsonl", rows["here"])}
    names |= {"missing": conversations.write(tmp_path / "missing.jsonl", rows["nowhere"])}
    options = [option.format(rows=tmp_path / "rows.jsonl", **names) for option in options]
    loads = mock.patch.object(evaluation, "load_model", side_effect=AssertionError)
    with loads, pytest.raises(SystemExit, match=told):
        evaluated(0, 1, ["--model_name_or_path", str(folder), "--output_dir", str(tmp_path), *options])
    reset_accelerate()


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"words": "none"}, "its columns are"),
        ({"text": "Short."}, "No document has 128 tokens"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "rows.jsonl:1: no token is the assistant's"),
    ],
)
def test_documents_that_are_wrong_end_every_process(
    ranks: Callable[[int], RankPool], folder: Path, tmp_path: Path, row: dict, told: str
) -> None:
    path = conversations.write(tmp_path / "rows.jsonl", [row])
    template = ["--chat_template_path", str(ROOT / "recipes/configs/chatml.jinja")]
    options = ["--model_name_or_path", str(folder), "--tasks", "none", "--documents", str(path), "--lengths", "128"]
    with pytest.raises(RankError) as ends:
        ranks(2).run(evaluated, [*options, *template, "--output_dir", str(tmp_path / "out")])
    assert [isinstance(error, SystemExit) and told in str(error) for error in ends.value.errors] == [True, True]


def test_fewer_pieces_than_were_asked_for_are_counted() -> None:
    accelerator, wanted = mock.MagicMock(), evaluate.Evaluation(lengths=[30000], windows=99)
    windows, _ = evaluation.read_documents(evaluation.ModelSettings(), words(), wanted, accelerator)
    said = f"{len(windows)} pieces of 30,000 tokens, of 1 of 1 documents; windows asks for 99."
    assert said in accelerator.print.call_args.args[0]


def test_pieces_are_of_all_documents_in_turn(tmp_path: Path) -> None:
    """Those that hold nothing, or too little, are left out."""
    texts = [None, "0" * 40, "1" * 9, "", "2" * 25, "3" * 16]
    path = conversations.write(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    tokenizer, told = words(), {}
    for most in (2, 4, 99):
        accelerator = mock.MagicMock()
        wanted = evaluate.Evaluation(documents=[str(path)], lengths=[10], windows=most)
        windows, _ = evaluation.read_documents(evaluation.ModelSettings(), tokenizer, wanted, accelerator)
        assert {len(window) for window in windows} == {10}
        told[most] = accelerator.print.call_args.args[0].partition(": ")[2]
        found = "".join(tokenizer.decode(window[-1]) for window in windows)
        assert found == "0230200"[:most]  # pieces of 9, behind the first token
    assert told == {
        2: "2 pieces of 10 tokens, of 2 of 6 documents.",
        4: "4 pieces of 10 tokens, of 3 of 6 documents.",
        99: "7 pieces of 10 tokens, of 3 of 6 documents; windows asks for 99.",
    }


def test_lists_may_have_one_value_without_brackets(tmp_path: Path) -> None:
    from command_line import parse

    (tmp_path / "one.yaml").write_text("lengths: 4096\ntasks: single\ndocuments: none\nruler: ruler_vt\n")
    (wanted,) = parse(["--config", str(tmp_path / "one.yaml")], (evaluate.Evaluation,), {})
    assert (wanted.lengths, wanted.tasks, wanted.documents, wanted.ruler) == ([4096], ["single"], [], ["ruler_vt"])
    (tmp_path / "number.yaml").write_text("documents: [[3]]\n")
    with pytest.raises(SystemExit, match=r"documents is \[\[3\]\]; give text, or several in a list"):
        parse(["--config", str(tmp_path / "number.yaml")], (evaluate.Evaluation,), {})


def test_without_pictures_none_are_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from models import byte_tokenizer  # of the recipes

    byte_tokenizer().save_pretrained(tmp_path / "model")
    small(260).double().save_pretrained(tmp_path / "model")
    path = conversations.chats(tmp_path / "chats.jsonl", conversations.facts(9), count=2, turns=2)
    arguments = ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / "out")]
    evaluated(0, 1, [*arguments, "--tasks", "none", "--documents", str(path), "--lengths", "512"])
    assert f"results.json is in {tmp_path / 'out'}" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("*.png"))


def test_datasets_recognises_what_chooses_rows() -> None:
    from datasets.fingerprint import Hasher

    few, more = (partial(evaluation.is_answered, longest=longest) for longest in (3, 4))
    assert Hasher.hash(few) != Hasher.hash(more)
    rows = [[-100, 1, 2], [-100, 1, 2, 3], [1, -100, -100]]
    assert [few(row) for row in rows] == [True, False, False]


def test_each_part_is_written_when_it_is_done(folder: Path, tmp_path: Path) -> None:
    arguments = ["--model_name_or_path", str(folder), *OPTIONS, "--output_dir", str(tmp_path)]
    fails = mock.patch.object(evaluation, "losses_by_position", side_effect=KeyboardInterrupt)
    with fails, pytest.raises(KeyboardInterrupt):
        evaluated(0, 1, arguments)
    reset_accelerate()
    assert len(json.loads((tmp_path / "results.json").read_text())["recall"]) == 8
    told = evaluation.of_another(tmp_path, "another")
    assert f"holds the evaluation of {folder}, which that of another would replace" in str(told)
    assert evaluation.of_another(tmp_path, str(folder)) is None
    assert evaluation.of_another(tmp_path / "none", "another") is None
    with (
        mock.patch.object(evaluation, "of_another", return_value=told),
        pytest.raises(SystemExit, match="would replace"),
    ):
        evaluated(0, 1, arguments)
    reset_accelerate()


@pytest.mark.parametrize(
    "options", [["--rope_scaling", "{rope_type: yarn, factor: 2.0}"], ["--model_revision", "v2"], ["--load_in_8bit"]]
)
def test_settings_of_an_adapter_that_are_not_passed_on(tmp_path: Path, options: list[str]) -> None:
    from command_line import parse
    from settings import BurstSettings, ModelSettings

    (tmp_path / "adapter_config.json").write_text("{}")
    options = ["--model_name_or_path", str(tmp_path), "--use_peft", *options]
    model, burst = parse(options, (ModelSettings, BurstSettings), {})
    with pytest.raises(SystemExit, match=f"{options[3].lstrip('-')} is set, but .* is an adapter"):
        evaluation.load_model(model, burst, 300, 0)


def test_ruler_says_what_to_install(folder: Path, tmp_path: Path) -> None:
    arguments = ["--model_name_or_path", str(folder), "--output_dir", str(tmp_path), "--ruler", "niah_single_1"]
    with mock.patch.object(evaluate, "find_spec", return_value=None), pytest.raises(SystemExit, match="pip install"):
        evaluate.evaluate(arguments)


def taught(maker: needles.Needles) -> LlamaForCausalLM:
    """A model that learned to recall one digit in texts of 64 to 96 tokens. It takes half a minute."""
    model, draw = small(len(maker.tokenizer)), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(700):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 30) * max(0.05, 1 - step / 700)
        length = draw.choice((64, 80, 96))
        rows = [maker.sample("single", length, draw.random(), 10**6 + 32 * step + row).input_ids for row in range(32)]
        ids = torch.tensor(rows)
        labels = torch.full_like(ids, -100)
        labels[:, -1] = ids[:, -1]
        model(ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.full
def test_a_model_that_was_taught_recalls_within_its_length(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    maker = needles.Needles(words(), needles.read_haystack(["python_topics"]), digits=1)
    maker.tokenizer.save_pretrained(tmp_path / "taught")
    taught(maker).save_pretrained(tmp_path / "taught")
    options = ["--tasks", "single", "--lengths", "64", "96", "768", "--samples", "40", "--batch_size", "20"]
    options += ["--digits", "1", "--documents", "none"]
    cells = results_of(ranks, 2, tmp_path / "taught", tmp_path / "out", *options)["recall"]
    assert len(cells) == 15
    within, beyond = ([cell["right"] for cell in cells if (cell["length"] <= 96) == known] for known in (True, False))
    assert sum(within) / 10 > 0.99
    assert sum(beyond) / 5 < 0.9, "what is far beyond its positions it does not know"


CONFIGS = sorted(path.name for kind in ("evaluate", "extend") for path in ROOT.glob(f"recipes/configs/{kind}_*.yaml"))


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_hold_settings_that_exist(name: str, tmp_path: Path) -> None:
    from command_line import parse
    from settings import BurstSettings, DataSettings, ModelSettings
    from trl import SFTConfig

    kinds = (ModelSettings, BurstSettings)
    more = (evaluate.Evaluation,) if "evaluate" in name else (DataSettings, SFTConfig, extend_context.Extension)
    arguments = ["--config", str(ROOT / "recipes/configs" / name), "--output_dir", str(tmp_path)]
    if "extend" in name:
        arguments += ["--bf16", "false", "--use_cpu", "true", "--dataset", "python_topics"]
        arguments += ["--eval_dataset", "python_topics"] if "smollm2" in name else []
    assert len(parse(arguments, (*kinds, *more), {})) == len(kinds) + len(more)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "evaluate" in name])
def test_documents_of_configs_are_as_long_as_the_texts(name: str) -> None:
    from command_line import parse
    from settings import BurstSettings, ModelSettings

    arguments = ["--config", str(ROOT / "recipes/configs" / name)]
    *_, wanted = parse(arguments, (ModelSettings, BurstSettings, evaluate.Evaluation), {})
    if wanted.documents:
        text = needles.read_haystack(wanted.documents)
        assert wanted.lengths[-1] <= len(text) // 8, "a token of a hub model has fewer than 8 characters of this text"
        assert wanted.windows * wanted.lengths[-1] <= len(text) // 4.5, "as many pieces as there are"


LAUNCH = ["-m", "accelerate.commands.launch", "--config_file", "recipes/configs/accelerate_2_processes.yaml"]


@pytest.mark.full
@pytest.mark.slow
def test_a_context_is_extended_by_two_processes(tmp_path: Path) -> None:
    """As they are launched, with few steps: what is saved loads without hf_burst, and has the new positions."""
    from transformers import AutoModelForCausalLM

    launch = [sys.executable, *LAUNCH, "--main_process_port", "0"]
    few = ["--max_steps", "2", "--per_device_train_batch_size", "1", "--eval_share", "0.01"]
    learn = ["recipes/finetune_long_document.py", "--config", "recipes/configs/text_short_cpu.yaml"]
    extend = ["recipes/extend_context.py", "--config", "recipes/configs/extend_cpu.yaml", "--windows", "2"]
    extend += ["--eval_strategy", "steps", "--eval_steps", "9", "--model_name_or_path", str(tmp_path / "short")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for command, folder in (learn, tmp_path / "short"), (extend, tmp_path):
        command = [*launch, *command, *few, "--output_dir", str(folder)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    results = json.loads((tmp_path / "extension.json").read_text())
    assert (results["old length"], results["new length"], results["processes"]) == (256, 1024, 2)
    assert set(results["curves"]) == {extend_context.BEFORE, extend_context.STRETCHED, extend_context.TRAINED}
    assert (tmp_path / "extension.png").read_bytes().startswith(b"\x89PNG")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.max_position_embeddings == 1024
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert model.config.rope_parameters["factor"] == 4.0
    assert model.config.rope_parameters["original_max_position_embeddings"] == 256


def test_curves_are_computed_in_the_precision_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in fp32 would otherwise take a kernel that holds all scores."""
    seen = []
    monkeypatch.setattr(scoring, "losses_by_position", lambda *_: seen.append(torch.get_autocast_dtype("cpu")))
    monkeypatch.setattr(scoring, "Groups", lambda _: None)
    accelerator = SimpleNamespace(autocast=lambda: torch.autocast("cpu", torch.float16))
    args = SimpleNamespace(device="cpu", max_length=8)
    trainer: Any = SimpleNamespace(args=args, accelerator=accelerator)
    extend_context.measure(trainer, [], 4, torch.nn.Linear(1, 1))
    assert seen == [torch.float16]


def test_smollm2_uses_its_longer_context() -> None:
    """The committed result of real weights: before, nothing beyond 8K; after, perplexity falls up to 64K, and facts are
    found; two GPUs and one have the same losses up to bf16's rounding."""
    result = json.loads((ROOT / "recipes/results/extension_smollm2.json").read_text())
    perplexity = result["extension"]["perplexity"]
    assert perplexity["before"]["beyond"] > 1000
    trained = result["extension"]["curves"][extend_context.TRAINED]
    assert trained["losses"][-1] < trained["losses"][-6] < trained["losses"][-8] + 0.2
    found = {
        label: fmean(cell["right"] for cell in own["recall"] if cell["length"] == 65536)
        for label, own in result["evaluation"].items()
    }
    assert found["before"] == 0
    assert found[extend_context.STRETCHED] < 0.25 < 0.5 < found[extend_context.TRAINED]
    two, one = (result["steps"][label]["loss"] for label in ("2 GPUs", "1 GPU"))
    assert len(two) == len(one) == 300
    assert fmean(abs(a - b) for a, b in zip(two, one, strict=True)) < 0.002


def test_smollm2_finds_a_needle_at_every_length() -> None:
    result = json.loads((ROOT / "recipes/results/ruler_smollm2.json").read_text())
    needles = {label: one["scores"]["niah_single_1"] for label, one in result["models"].items()}
    assert list(needles["before"].values()) == [1, 1, 0, 0, 0]
    assert all(0.4 <= share <= 0.8 for share in needles[extend_context.STRETCHED].values())
    assert list(needles[extend_context.TRAINED].values()) == [1, 1, 1, 1, 1]
    parts = {
        "niah_single_1": 1,
        "niah_multikey_2": 1,
        "niah_multikey_3": 1,
        "ruler_vt": 5,
        "ruler_cwe": 10,
        "ruler_fwe": 3,
    }
    for one in result["models"].values():
        for task, scores in one["scores"].items():
            found = [share * one["texts"] * parts[task] for share in scores.values()]
            assert found == pytest.approx([round(count) for count in found])


def test_the_committed_extension_shows_the_effect() -> None:
    """Beyond the old length the perplexity rises before, and is as low as within it after."""
    results = json.loads((ROOT / "recipes/results/extension.json").read_text())
    within, beyond = f"within {results['old length']:,} tokens", "beyond"
    before, after = (results["perplexity"][label] for label in (extend_context.BEFORE, extend_context.TRAINED))
    assert before[beyond] > 2 * before[within]
    assert after[beyond] < 1.1 * before[within]
    assert after[within] < 1.1 * before[within]
