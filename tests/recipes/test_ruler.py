"""RULER's tasks by lm-eval, and its other requests: over ranks they equal one process."""

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate.state import PartialState
from transformers import LlamaForCausalLM

import hf_burst
from tests.recipes.test_evaluation import evaluate, evaluated, evaluation, save_untaught, words
from tests.support.ranks import RankPool, reset_accelerate

pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untaught(tmp_path_factory.mktemp("model"))


def ruler_scores(rank: int, size: int, folder: str, tasks: list[str], lengths: list[int], way: str) -> object:
    """Scores of RULER's tasks, and what lm-eval asked: context, answer, and their score."""
    import ruler
    from transformers import AutoTokenizer

    reset_accelerate()
    PartialState(cpu=True)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    lm = ruler.ShardedLM(hf_burst.patch_model(model), AutoTokenizer.from_pretrained(folder), 4096)
    asked, plain = [], lm._loglikelihood_tokens

    def noted(requests: list, **options: object) -> list:
        scores = plain(requests, **options)
        asked.extend((*request[1:], score) for request, score in zip(requests, scores, strict=True))
        return scores

    lm._loglikelihood_tokens = noted
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}):  # so that every rank returns the scores
        made = ruler.make_tasks(lm.tokenizer, tasks, lengths, 2)
        return ruler.evaluate_ruler(lm, made, lengths, way, False), asked


@pytest.mark.parametrize(
    ("tasks", "lengths"),
    [
        (["niah_single_1"], [512]),
        pytest.param(["niah_multikey_2", "niah_multikey_3", "ruler_fwe"], [512, 768], marks=pytest.mark.full),
        pytest.param(["ruler_vt", "ruler_cwe"], [4096], marks=pytest.mark.full),
    ],
)
def test_answers_to_ruler_are_scored_offline_and_over_ranks(
    ranks: Callable[[int], RankPool], folder: Path, tasks: list[str], lengths: list[int]
) -> None:
    """As one plain model scores them that holds whole texts."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    for scores, asked in ranks(2).run(ruler_scores, str(folder), tasks, lengths, "answer"):
        assert {task: list(by_length) for task, by_length in scores.items()} == dict.fromkeys(tasks, lengths)
        assert len(asked) == 2 * len(tasks) * len(lengths)
        for context, answer, (likelihood, greedy) in asked:
            assert 0 < len(answer) < 80
            assert len(context) + len(answer) <= lengths[-1]
            with torch.no_grad():
                own = model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1].log_softmax(-1)
            expected = own.gather(-1, torch.tensor(answer)[:, None]).sum()
            assert likelihood == pytest.approx(float(expected), rel=1e-6)
            assert greedy == (own.argmax(-1).tolist() == answer)


def test_tasks_that_ruler_has_not() -> None:
    wanted = evaluate.Evaluation(tasks=[], documents=[], ruler=["nonsense"])
    with pytest.raises(SystemExit, match="ruler has 'nonsense'; tasks that need no network: niah_single_1"):
        evaluation.read(mock.Mock(), words(), wanted, mock.Mock())


@pytest.mark.parametrize(
    ("task", "lengths"),
    [
        ("niah_single_1", [512, 768]),
        ("ruler_cwe", [4096]),
        pytest.param("ruler_vt", [4096], marks=pytest.mark.full),
        pytest.param("ruler_fwe", [512, 768], marks=pytest.mark.full),
    ],
)
def test_no_more_texts_are_made_than_are_asked_for(task: str, lengths: list[int]) -> None:
    """lm-eval measures each text that it makes, and a few more to find out how much fits into a length."""
    import ruler

    tokenizer, measured = words(), []
    plain = type(tokenizer).__call__

    def counted(self: object, text: str, **options: object) -> object:
        measured.append(text)
        return plain(self, text, **options)

    with mock.patch.object(type(tokenizer), "__call__", counted):
        (made,) = ruler.make_tasks(tokenizer, [task], lengths, 3).values()
    assert made.dataset["test"]["max_length"] == [length for length in lengths for _ in range(3)]
    assert 3 * len(lengths) < len(measured) < 100 * len(lengths)


def test_texts_are_made_before_the_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    import ruler

    options = ["--model_name_or_path", str(folder), "--output_dir", str(tmp_path), "--tasks", "none"]
    options += ["--documents", "none", "--ruler", "niah_single_1", "--lengths", "512"]
    loads = mock.patch.object(evaluation, "load_model", side_effect=AssertionError)
    makes = mock.patch.object(ruler, "make_tasks", side_effect=KeyboardInterrupt)
    with loads, makes, pytest.raises(KeyboardInterrupt):
        evaluated(0, 1, options)
    reset_accelerate()


def adapted(rank: int, size: int, folder: str) -> list[tuple[float, bool]]:
    """Scores of continuations that fill the model."""
    import ruler
    from transformers import AutoTokenizer

    reset_accelerate()
    PartialState(cpu=True)
    model = hf_burst.patch_model(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)).eval()
    lm = ruler.ShardedLM(model, AutoTokenizer.from_pretrained(folder), 32)
    return lm._loglikelihood_tokens([(("", ""), [3], [*range(4, 36)]), (("", ""), [*range(3, 40)], [5, 6])])


def test_requests_of_lm_eval_at_the_edge(ranks: Callable[[int], RankPool], folder: Path) -> None:
    """A continuation may have as many tokens as the model reads; contexts lose their beginning."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    expected = []
    for tokens, count in ([3, *range(4, 36)], 32), ([*range(9, 40), 5, 6], 2):
        with torch.no_grad():
            own = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
        expected.append(float(own.gather(-1, torch.tensor(tokens[1:])[:, None])[-count:].sum()))
    for size in (1, 2):
        for scores in ranks(size).run(adapted, str(folder)):
            assert [likelihood for likelihood, _ in scores] == pytest.approx(expected, rel=1e-6)


def answers(rank: int, size: int, folder: str) -> tuple[list[str], list[str]]:
    """What lm-eval's own model writes, each rank by itself, and what is written over ranks."""
    import ruler
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    reset_accelerate()
    PartialState(cpu=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    requests = [
        mock.Mock(args=(" ".join(["the value is"] * count), {"until": [], "max_gen_toks": 7})) for count in (2, 9)
    ]
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "1"}):
        expected = HFLM(model, backend="causal", tokenizer=tokenizer, batch_size=2).generate_until(requests, True)
    lm = ruler.ShardedLM(hf_burst.patch_model(model), tokenizer, 128)
    return expected, lm.generate_until(requests, True)


def test_answers_of_lm_eval_are_written_over_ranks(ranks: Callable[[int], RankPool], folder: Path) -> None:
    results = ranks(2).run(answers, str(folder))
    assert all(own == expected for expected, own in results)
    assert all(results[0][1])


@pytest.mark.full
def test_what_ruler_generates_over_ranks(ranks: Callable[[int], RankPool], folder: Path) -> None:
    arguments = str(folder), ["niah_single_1", "niah_multikey_3"], [512, 768], "generation"
    ((expected, _),) = ranks(1).run(ruler_scores, *arguments)
    assert ranks(2).run(ruler_scores, *arguments) == [(expected, [])] * 2
