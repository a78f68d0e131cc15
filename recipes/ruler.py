"""RULER's generated tasks (arXiv 2404.06654) by lm-eval, on a model whose sequences are shared by several processes.

lm-eval makes the texts and says what is right. Answers are scored or generated over all processes, at any length.
Install it by `pip install "lm_eval[ruler]"`.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable
from functools import wraps
from inspect import isfunction, signature
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.utils import set_seed
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from lm_eval.tasks import TaskManager
from lm_eval.tasks.ruler import cwe_utils, vt_utils
from scoring import score_answers
from transformers import PreTrainedTokenizerBase

import hf_burst

# made of word lists and numbers; the other tasks of RULER download essays or questions
OFFLINE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")
FOLDER = str(Path(cwe_utils.__file__).parent)  # where lm-eval's tasks of RULER are; to read all tasks takes long
SEED = 0
Scores = dict[str, dict[int, float]]


class ShardedLM(HFLM):
    """A patched model in evaluation mode, as lm-eval calls models, for sequences of at most `max_length` tokens. All
    processes make the same requests, in the same order; those of RULER have a context and an answer."""

    def __init__(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        super().__init__(model, backend="causal", tokenizer=tokenizer, max_length=max_length)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding would write it; over all processes.

        As in lm-eval's own models, contexts that are too long lose their beginning: the model reads `max_length` tokens
        at most, which leave out the last token of the continuation.
        """
        scores = []
        for _, context, continuation in requests:
            tokens = [*context, *continuation][-(self.max_length + 1) :]
            scores.append(tuple(score_answers(self.model, [tokens], [len(continuation)])[0]))
        return scores

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        """Greedy tokens behind padded contexts, until one of the words of `stop`."""
        return hf_burst.generate(
            self.model,
            input_ids=context,
            attention_mask=options["attention_mask"],
            max_length=max_length,
            do_sample=False,
            stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0]),
            pad_token_id=self.tokenizer.pad_token_id,
        )


def answer_of(document: dict[str, Any]) -> str:
    """The answer of a text, as the example in its prompt writes answers."""
    outputs, prefix = document["outputs"], document["gen_prefix"]
    if "10 words" in prefix:
        return "".join(f" {number}. {word}" for number, word in enumerate(outputs, 1))
    return " " + (" " if "variables" in prefix else ", ").join(outputs)


def by_answer(document: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, float]:
    """Whether greedy decoding would write the answer; its key is the length of the text, as of RULER's own score."""
    return {str(document["max_length"]): float(results[0][1])}


def check(tokenizer: PreTrainedTokenizerBase, tasks: list[str], lengths: list[int]) -> None:
    """Raises for tasks that RULER has not, and for lengths to which lm-eval would fit the texts of a task forever."""
    known = TaskManager(include_path=FOLDER, include_defaults=False).all_tasks
    if unknown := sorted(set(tasks) - set(known)):
        raise SystemExit(f"ruler has {unknown[0]!r}; tasks that need no network: {', '.join(OFFLINE)}.")

    def tokens(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    if "ruler_vt" in tasks:  # its prompt has an example of at most 500 tokens
        example, shortest = (tokens(vt_utils.generate_input_output(noise, 1, 4)[0]) + 30 for noise in (5, 10))
        if example > 500:
            raise SystemExit(
                f"ruler_vt has an example that takes {example} tokens of this tokenizer, and may take 500."
            )
        if 500 + shortest > lengths[0]:
            raise SystemExit(f"ruler_vt takes {500 + shortest} tokens at least; lengths begins with {lengths[0]}.")
    for length in lengths if "ruler_cwe" in tasks else ():
        shortest = tokens(cwe_utils.generate_input_output(20, length)[1]) + 120
        if shortest > length:
            raise SystemExit(f"ruler_cwe takes {shortest} tokens at least at the length {length}; give greater ones.")


def at_most(samples: int, make: Callable[..., Any]) -> Callable[..., Any]:
    """A function of lm-eval that makes `num_samples` texts, which makes no more than `samples`."""

    @wraps(make)
    def made(*arguments: Any, num_samples: int = samples, **options: Any) -> Any:
        return make(*arguments, num_samples=min(num_samples, samples), **options)

    return made


def fewer_texts(samples: int) -> contextlib.AbstractContextManager[Any]:
    """Makes lm-eval's tasks with `samples` texts a length, while it is entered. Each module that makes texts names the
    500 itself, and is executed anew when a task is built: only then do its functions exist."""
    plain = ConfigurableTask.download

    def download(task: ConfigurableTask, *arguments: Any, **options: Any) -> None:
        names = task.config.custom_dataset.__globals__
        makers = {
            name: at_most(samples, value)
            for name, value in names.items()
            if isfunction(value) and "num_samples" in signature(value).parameters
        }
        with mock.patch.dict(names, makers):
            plain(task, *arguments, **options)

    return mock.patch.object(ConfigurableTask, "download", download)


def make_tasks(
    tokenizer: PreTrainedTokenizerBase, tasks: list[str], lengths: list[int], samples: int
) -> dict[str, Any]:
    """RULER's tasks with the texts that lm-eval makes, by their names: so many of each task and length, at most 500.
    The room for the answer is a part of a length. All processes make the same texts."""
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere:
        tokenizer.save_pretrained(folder)
        set_seed(SEED)
        with contextlib.redirect_stdout(nowhere):  # lm-eval prints how it fits texts to lengths
            metadata = {"tokenizer": folder, "max_seq_lengths": lengths}
            manager = TaskManager(include_path=FOLDER, include_defaults=False, metadata=metadata)
            with fewer_texts(samples):
                return manager.load(tasks)["tasks"]


def evaluate_ruler(lm: ShardedLM, tasks: dict[str, Any], lengths: list[int], by: str, chat: bool) -> Scores:
    """Scores of the tasks that [`make_tasks`] made. All processes call this.

    `by` is `"answer"`, whether greedy decoding would write the answer; or `"generation"`, RULER's own score, the share
    of the answers in a text that is generated.

    Returns:
        `dict`: For each task the scores by length, on the first process of a machine; empty on the others.
    """
    for task in tasks.values() if by == "answer" else ():
        task.OUTPUT_TYPE = "loglikelihood"
        for key, value in {"doc_to_target": answer_of, "process_results": by_answer}.items():
            task.set_config(key, value)
    results = simple_evaluate(
        lm,
        tasks=list(tasks.values()),
        task_manager=TaskManager(include_path=FOLDER, include_defaults=False),
        apply_chat_template=chat,
        bootstrap_iters=0,
        log_samples=False,
    )
    if results is None:
        return {}
    return {task: {length: results["results"][task][f"{length},none"] for length in lengths} for task in tasks}
