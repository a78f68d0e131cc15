"""GRPO and RLOO: groups of ranks learn what as many single processes learn, which are not patched."""

import asyncio
import os
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, gather
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, LlamaForSequenceClassification, Trainer
from transformers.generation.streamers import BaseStreamer

import hf_burst
from hf_burst.errors import BatchError, ConfigError, RankMismatchError
from hf_burst.hf.groups import PATCH
from hf_burst.hf.trainers import accelerate as hf_accelerate
from hf_burst.hf.trainers import first_rank, generating
from hf_burst.hf.trainers.first_rank import FirstRank
from hf_burst.hf.trainers.generating import Groups, GroupTraining
from hf_burst.ranks.group import ContextGroup
from tests.support import models, pictures, trainers, vllm_stand_in
from tests.support.ranks import RankError, RankPool, reset_accelerate
from tests.support.tiny_seeing import seeing_model

pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
from trl import GRPOTrainer  # noqa: E402

Ranks = Callable[[int], RankPool]
G = 2  # completions of a prompt
# of a clock, and what Trainer counts by processes
OWN = ("time", "runtime", "per_second")


GENERATE = mock.patch("hf_burst.hf.trainers.first_rank.generate", wraps=hf_burst.generate)
ALONE = {"vllm_tensor_parallel_size": 1, "fsdp": None, "fsdp_config": None}  # what a single process has instead
CREATE = Trainer.create_accelerator_and_postprocess


def test_tensors_of_another_gpu_are_told() -> None:
    with mock.patch("torch.serialization.location_tag", return_value="cuda:1"):
        written = FirstRank(ContextGroup(), torch.device("cpu"))._packed("", ({"rewards": torch.arange(3.0)},), {})
    _, (told,), _ = first_rank._unpacked(written, torch.device("cpu"))
    assert torch.equal(told["rewards"], torch.arange(3.0)), "on this rank's device"


@dataclass(frozen=True)
class Run:
    """A training of `groups` groups of `burst` ranks; `burst=0`: of single processes that are not patched."""

    trainer: str = "GRPOTrainer"
    burst: int = 2
    groups: int = 1
    rollouts: bool = True
    lora: bool = False
    reference: bool = False
    streamed: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.groups * max(self.burst, 1)


def is_first(burst: int) -> bool:
    """Whether this rank is the first one of its group."""
    return not burst or not dist.is_initialized() or dist.get_rank() % burst == 0


def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that follow from the prompt, its place, the step and random numbers: they differ by rank."""
    ids = trainer.processing_class(prompts)["input_ids"]
    longest = trainer.max_completion_length
    found: dict[str, Any] = {"prompt_ids": ids, "completion_ids": [], "logprobs": [], "tag": []}
    for place, prompt in enumerate(ids):
        generator = random.Random(str((prompt, place, trainer.state.global_step)))
        words = [generator.randrange(2, models.VOCABULARY) for _ in range(generator.randrange(1, longest))]
        words[0] = 2 + int(torch.randint(models.VOCABULARY - 2, ()))
        words[-1] = random.randrange(2, models.VOCABULARY)
        ended = generator.random() < 0.7
        found["completion_ids"].append([*words, 1] if ended else (words * longest)[:longest])
        found["logprobs"].append([-1.0] * len(found["completion_ids"][-1]))
        found["tag"].append(place)
    return found


def reward_length(completions: list[Any], **_: Any) -> list[float]:
    texts = [each if isinstance(each, str) else " ".join(turn["content"] for turn in each) for each in completions]
    return [float(len(text.split())) for text in texts]


def make_trainer(run: Run, folder: str) -> Any:
    import trl

    reset_accelerate()
    options = dict(run.options)
    more = options.pop("given", dict)()
    model = (more.pop("model") if "model" in more else models.make_model("llama")).double()
    if run.reference:
        model.config._name_or_path = str(Path(folder).parent / "reference")  # from which TRL makes its reference
    config = options.pop("config", None)
    if run.burst:
        hf_burst.patch_model(model, config)
    calls: list[int] = []

    def reward_luck(completions: list[str], log_metric: Any, log_extra: Any, **rest: Any) -> list[float | None]:
        calls.append(len(completions))
        luck = [random.random() for _ in completions]
        log_metric("luck", sum(luck))
        log_extra("drawn", luck)
        return [None if number > 0.9 else number for number in luck]

    prompts: list[Any] = [row["prompt"] for row in trainers.preferences(12)]
    if "tools" in more:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    data = datasets.Dataset.from_list(more.pop("rows", [{"prompt": prompt} for prompt in prompts]))
    config = getattr(trl, run.trainer.replace("Trainer", "Config"))
    settings = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "max_steps": 3,
        "beta": 0.0,
        "num_generations": G,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_completion_length": 9,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "log_completions": True,
        "num_completions_to_print": 0,
        "seed": 7,
        "parallelism_config": hf_burst.BurstParallelismConfig(burst_size=run.burst) if run.burst else None,
    }
    given: dict[str, Any] = {"rollout_func": roll_out} if run.rollouts else {}
    if run.lora:
        given["peft_config"] = trainers.lora_config()
    given |= more
    trainer = getattr(trl, run.trainer)(
        model,
        args=config(**{**settings, **options}),
        reward_funcs=[reward_length, reward_luck, *given.pop("reward_funcs", [])],
        train_dataset=data.to_iterable_dataset() if run.streamed else data,
        eval_dataset=data.select(range(5)),
        **{"processing_class": trainers.tokenizer(), **given},
    )
    trainer.calls = calls
    return trainer


def as_gpus(trainer: Trainer) -> None:
    """accelerate ignores FSDP on CPUs, so it is told that they are GPUs."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    CREATE(trainer)


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def table_of(trainer: Any) -> dict[str, list[Any]]:
    """The completions as they are logged, without addresses of images."""
    logs = trainer._logs
    texts = {name: [re.sub(r" at 0x\w+", "", str(each)) for each in logs[name]] for name in ("prompt", "completion")}
    numbers = {"advantages": logs["advantages"], **logs["rewards"], **logs["extra"]}
    return {**texts, **{name: list(column) for name, column in numbers.items()}}


def learn(rank: int, size: int, folder: str, run: Run) -> dict[str, Any]:
    random.seed(100 + (rank if not run.burst else rank // run.burst if is_first(run.burst) else 99 + rank))
    Environment.resets = 0
    known: Any = ("supports_tool_calling", "is_chat_template_prefix_preserving")
    stand_ins = {"parse_response": parse, **dict.fromkeys(known, lambda _: True)}
    with (
        mock.patch.object(Trainer, CREATE.__name__, as_gpus if run.options.get("fsdp") else CREATE),
        mock.patch.dict(os.environ),
        mock.patch.multiple("trl.trainer.grpo_trainer", **stand_ins),
        vllm_stand_in.installed(),
        GENERATE as over_ranks,
    ):
        trainer = make_trainer(run, folder)
        trainer.train()
    if run.burst and trainer.ref_model is not None:
        assert PATCH in vars(trainer.accelerator.unwrap_model(trainer.ref_model)), "it would hold whole sequences"
    state = trainer.model.state_dict()
    asked = over_ranks.call_args.kwargs if over_ranks.called else {}
    assert any(isinstance(value, DTensor) for value in state.values()) == bool(run.options.get("fsdp"))
    return {
        "resets": Environment.resets,
        "generated": over_ranks.call_count,
        "copies": getattr(asked.get("generation_config"), "num_return_sequences", None),
        "asked": list(vllm_stand_in.ASKED),
        "sent": list(vllm_stand_in.SENT),
        "log": [
            {name: value for name, value in entry.items() if not name.endswith(OWN)}
            for entry in trainer.state.log_history
        ],
        "weights": {name: whole(value) for name, value in state.items()},
        "table": table_of(trainer),
        "tokens": trainer.state.num_input_tokens_seen,
        "calls": trainer.calls,
    }


def compare(ranks: Ranks, folder: Path, run: Run, learn: Callable[..., Any] = learn, *more: Any) -> None:
    """On every rank what one process a group has that is not patched."""
    if run.reference:  # saved here, since ranks that save into one folder at the same time delete each other's files
        models.make_model("llama", seed=3).double().save_pretrained(folder / "reference")
    found = ranks(run.ranks).run(learn, str(folder / "found"), run, *more)
    alone = replace(
        run, burst=0, options={**run.options, **{name: ALONE[name] for name in ALONE.keys() & run.options.keys()}}
    )
    if run.groups == 1:
        wanted = [learn(0, 1, str(folder / "wanted"), alone, *more)]
    else:
        wanted = ranks(run.groups).run(learn, str(folder / "wanted"), alone, *more)
    for rank, mine in enumerate(found):
        one = wanted[rank // run.burst]
        assert [entry.keys() for entry in mine["log"]] == [entry.keys() for entry in one["log"]]
        for entry, expected in zip(mine["log"], one["log"], strict=True):
            assert entry == pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True), rank
        assert mine["tokens"] == one["tokens"]
        given = run.options.get("given")
        alone = (
            (run.rollouts and given not in (rollouts_by_model, rollouts_by_threads))
            or run.options.get("use_vllm")
            or given is seeing
        )
        assert bool(mine["generated"]) == (not alone)
        if not alone and given is None:
            assert mine["copies"] == G, "a prompt is read once for its completions"
        assert mine["resets"] == (one["resets"] if rank % run.burst == 0 else 0)
        assert mine["calls"] == (one["calls"] if rank % run.burst == 0 else [])
        assert mine["table"].keys() == one["table"].keys()
        for name, column in one["table"].items():
            assert mine["table"][name] == (
                column if name in ("prompt", "completion") else pytest.approx(column, rel=1e-6, abs=1e-6, nan_ok=True)
            ), name
        for name, value in one["weights"].items():
            torch.testing.assert_close(mine["weights"][name], value, rtol=0, atol=1e-7)
        if run.options.get("use_vllm"):
            compare_engines(mine, one, rank, run)


def compare_engines(mine: dict[str, Any], one: dict[str, Any], rank: int, run: Run) -> None:
    """A server was asked once; an engine beside the trainer on the first rank, or on all over which it lies."""
    if run.options["vllm_mode"] == "server":
        assert (mine["asked"], mine["sent"]) == ((one["asked"], one["sent"]) if rank == 0 else ([], []))
        return
    asks = rank % run.burst == 0 or run.options.get("vllm_tensor_parallel_size")
    assert mine["asked"] == (one["asked"] if asks else [0] * len(one["asked"]))
    assert mine["sent"] == one["sent"]


@pytest.mark.parametrize("size", [2])
def test_grpo(ranks: Ranks, tmp_path: Path, size: int) -> None:
    compare(ranks, tmp_path, Run(burst=size, options={"gradient_accumulation_steps": 2}))


SHARED = hf_burst.BurstConfig(share_prefixes=True)
SLOW = (
    "streamed",
    "2 x 2, adapters",
    "fsdp2, reference",
    "rloo, reference",
    "server, rloo",
    "server, fsdp2",
    "colocated",
    "rollouts by threads",
)
SLOW += ("tools", "images, rloo", "reward model", "2 x 2, generated", "rloo, 3 ranks")
FULL = (
    "rloo, 2 x 2",
    "truncated, shared",
    "rloo, truncated",
    "2 x 2",
    "3 ranks, iterations",
    "what waits, and what fails",
    "server beside rollouts, fsdp2",
)


def quick(runs: dict[str, Run]) -> list[Any]:
    """The names of runs, of which some are left out by default."""
    later = [[pytest.mark.slow] * (name in SLOW) + [pytest.mark.full] * (name in FULL) for name in runs]
    return [pytest.param(name, marks=marks) for name, marks in zip(runs, later, strict=True)]


FSDP2 = {"fsdp": "full_shard", "fsdp_config": {"version": 2, "reshard_after_forward": True}}
TRUNCATED = {  # of micro-batches of one answer, those that are truncated have no label that counts
    "mask_truncated_completions": True,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
}
RUNS = {
    "truncated": Run(options=TRUNCATED),
    "truncated, shared": Run(groups=2, lora=True, options={**TRUNCATED, "config": SHARED, "beta": 0.3}),
    "rloo, truncated": Run("RLOOTrainer", burst=3, rollouts=False, options=TRUNCATED),
    "3 ranks, iterations": Run(burst=3, options={"num_iterations": 2, "steps_per_generation": 2, "num_generations": 4}),
    "2 x 2": Run(
        groups=2,
        options={
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_iterations": 2,
            "scale_rewards": "batch",
            "mask_truncated_completions": True,
            "eval_strategy": "steps",
            "eval_steps": 2,
        },
    ),
    "2 x 2, generated": Run(groups=2, rollouts=False, options={"loss_type": "cispo", "epsilon_high": 2.0}),
    "streamed": Run(streamed=True, groups=2, options={"top_entropy_quantile": 0.5, "use_adaptive_entropy": True}),
    "2 x 2, adapters": Run(groups=2, lora=True, options={"beta": 0.3, "importance_sampling_level": "sequence"}),
    "3 ranks, reference, an epoch": Run(
        burst=3, reference=True, options={"beta": 0.3, "max_steps": -1, "num_train_epochs": 1}
    ),
    "fsdp2, reference": Run(groups=2, rollouts=False, reference=True, options={"beta": 0.3, **FSDP2}),
    "shared beginnings": Run(
        options={"config": SHARED, "gradient_checkpointing": True, "delta": 1.5, "beta": 0.1}, lora=True
    ),
    "rloo, reference": Run("RLOOTrainer", rollouts=False, reference=True, options={"beta": 0.3}),
    "rloo, 3 ranks": Run(
        "RLOOTrainer",
        burst=3,
        rollouts=False,
        lora=True,
        options={"beta": 0.3, "num_iterations": 2, "mask_truncated_completions": True},
    ),
    "rloo, 2 x 2": Run(
        "RLOOTrainer",
        groups=2,
        rollouts=False,
        lora=True,
        options={
            "beta": 0.3,
            "normalize_advantages": True,
            "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
        },
    ),
}


@pytest.mark.parametrize("name", quick(RUNS))
def test_runs(ranks: Ranks, tmp_path: Path, name: str) -> None:
    compare(ranks, tmp_path, RUNS[name])


def roll_out_by_model(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout of two turns, each of which the model samples: by its own method, and by the one over ranks."""
    batch = trainer.processing_class(prompts, padding=True, padding_side="left", return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    options = {"do_sample": True, "max_new_tokens": 3, "min_new_tokens": 3}
    patched = isinstance(trainer.args.parallelism_config, hf_burst.BurstParallelismConfig)
    trainer.model.eval()
    with torch.no_grad():
        ids = trainer.model.generate(ids, attention_mask=mask, **options)
        mask = torch.nn.functional.pad(mask, (0, 3), value=1)
        rest = {"input_ids": ids, "attention_mask": mask, **options}
        ids = hf_burst.generate(trainer.model, cuda_graphs=False, **rest) if patched else trainer.model.generate(**rest)
    trainer.model.train()
    completions = ids[:, -6:].tolist()
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": completions,
        "logprobs": [[-1.0] * 6 for _ in completions],
        "env_mask": [[1, 1, 1, 0, 1, 1] for _ in completions],
    }


def rollouts_by_model() -> dict[str, Any]:
    return {"rollout_func": roll_out_by_model}


def roll_out_by_threads(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout whose threads ask the model at the same time, with a config that is given without its name."""
    ids = trainer.processing_class(prompts)["input_ids"]
    config = GenerationConfig(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)

    def answer(prompt: list[int]) -> list[int]:
        found: torch.Tensor = trainer.model.generate(torch.tensor([prompt]), config)
        return found[0, len(prompt) :].tolist()

    def answer_late(prompt: list[int]) -> list[int]:  # while another thread's call is under way
        assert under_way.wait(60)
        return answer(prompt)

    under_way, generate, calls = threading.Event(), first_rank.generate, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        under_way.set()
        time.sleep(0.2)
        return generate(*args, **kwargs)

    if PATCH not in vars(trainer.model):  # a single process
        under_way.set()
    with ThreadPoolExecutor(2) as threads, mock.patch.object(first_rank, "generate", noted):
        answers = [threads.submit(answer_late if place % 2 else answer, prompt) for place, prompt in enumerate(ids)]
        completions = [each.result() for each in answers]
    assert PATCH not in vars(trainer.model) or len(calls) == len(ids), "each by all ranks"
    trainer.accelerator.wait_for_everyone()
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[-1.0] * 4 for _ in ids]}


def rollouts_by_threads() -> dict[str, Any]:
    return {"rollout_func": roll_out_by_threads}


def reward_model() -> dict[str, Any]:
    """A judge that all ranks call: it is not patched, and its scores are those of one process."""
    torch.manual_seed(11)
    config = models.make_model("llama").config
    config.num_labels, config.pad_token_id = 1, 0
    judge = LlamaForSequenceClassification(config)
    config._name_or_path = "judge"
    return {"reward_funcs": [judge], "reward_processing_classes": [None, None, trainers.tokenizer()]}


def seeing() -> dict[str, Any]:
    """Chats about images, of a model with a tower that learns."""
    rows = [{name: row[name] for name in ("images", "prompt")} for row in pictures.pairs_with_images()]
    processor = pictures.llava_processor()
    return {"model": seeing_model("Llava"), "processing_class": processor, "rows": rows}


def uncached() -> dict[str, Any]:
    """A model whose checkpoint says that it was trained without a cache."""
    model: Any = models.make_model("llama")
    model.config.use_cache = model.generation_config.use_cache = False
    return {"model": model}


class Environment:
    """A world that is random, and counts how often it is reset."""

    resets = 0

    def reset(self, **row: Any) -> str:
        Environment.resets += 1
        self.secret = random.randrange(2, models.VOCABULARY)
        self.asked = 0
        return f" w{random.randrange(2, models.VOCABULARY)}"

    def ask(self, word: int) -> str:
        """Asks the world.

        Args:
            word: A word.
        """
        self.asked += 1
        return f"w{self.secret}"

    def get_reward(self) -> float:
        return float(self.asked + self.secret / 100)


def flip(times: int) -> str:
    """Flips a coin.

    Args:
        times: How often.
    """
    return " ".join(f"w{random.randrange(2, 9)}" for _ in range(times))


def parse(tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
    """Completions that begin with certain words call tools."""
    message: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids)}
    name, argument = ("ask", "word") if ids[0] % 3 == 0 else ("flip", "times")
    if ids[0] % 3 < 2:
        message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": {argument: 2}}}]
    return message


def tools() -> dict[str, Any]:
    tokenizer = trainers.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    tokenizer.response_template = {}
    return {"processing_class": tokenizer, "tools": [flip], "environment_factory": Environment}


class Moody(Environment):
    def ask(self, word: int) -> str:
        """Asks the world.

        Args:
            word: A word.
        """
        if self.secret % 2:
            raise FloatingPointError(f"not now, {random.randrange(9)} times")
        return super().ask(word)


def waiting() -> dict[str, Any]:
    """Tools and rewards that wait, of which the first that is called ends last; and a tool that may fail."""

    async def reward_late(completions: list[Any], log_metric: Any, **_: Any) -> list[float]:
        await asyncio.sleep(0.2)
        log_metric(name="late", value=random.random())
        return reward_length(completions)

    async def reward_soon(completions: list[Any], log_metric: Any, **_: Any) -> list[float]:
        log_metric("soon", 1.0)
        return [float(len(completions))] * len(completions)

    async def flip_late(times: int) -> str:
        await asyncio.sleep(0.01)
        return flip(times)

    flip_late.__name__, flip_late.__doc__ = flip.__name__, flip.__doc__
    given = {"tools": [flip_late], "environment_factory": Moody, "reward_funcs": [reward_late, reward_soon]}
    return tools() | given


MORE = {
    "rollouts by the model": Run(groups=2, options={"given": rollouts_by_model, "num_iterations": 2}),
    "rollouts by threads": Run(groups=2, options={"given": rollouts_by_threads, "max_steps": 1}),
    "reward model": Run(options={"given": reward_model}),
    "what waits, and what fails": Run(rollouts=False, options={"given": waiting, "max_completion_length": 16}),
    "images": Run(rollouts=False, options={"given": seeing, "config": SHARED, "top_k": 20}),
    "a checkpoint without a cache": Run(rollouts=False, options={"given": uncached, "max_steps": 1}),
    "images, rloo": Run("RLOOTrainer", groups=2, rollouts=False, options={"given": seeing, "beta": 0.0}),
    "tools": Run(groups=2, rollouts=False, options={"given": tools, "max_completion_length": 16, "min_p": 0.001}),
}


@pytest.mark.parametrize("name", quick(MORE))
def test_what_is_called(ranks: Ranks, tmp_path: Path, name: str) -> None:
    compare(ranks, tmp_path, MORE[name])


SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "nowhere"}
COLOCATED = {"use_vllm": True, "vllm_mode": "colocate"}
VLLM = {
    "server": Run(groups=2, rollouts=False, options=SERVER),
    "server, rloo": Run("RLOOTrainer", groups=2, rollouts=False, lora=True, options=SERVER),
    "server beside rollouts, fsdp2": Run(options=SERVER | FSDP2),
    "server, fsdp2": Run(rollouts=False, options=SERVER | FSDP2),
    "colocated": Run(rollouts=False, options=COLOCATED),
    "colocated over the group": Run(groups=2, rollouts=False, options=COLOCATED | {"vllm_tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("name", quick(VLLM))
def test_vllm(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """By a stand-in that is called as vLLM. It answers once for a group, and gets all weights."""
    compare(ranks, tmp_path, VLLM[name])


def reward_fails(completions: list[Any], **_: Any) -> list[float]:
    raise FloatingPointError("no reward today")


def reward_fails_in_one_group(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
    if dist.get_rank() == 2 and trainer_state.global_step == 1:
        raise FloatingPointError("no reward today")
    return [0.0] * len(completions)


def roll_out_strangely(prompts: list[str], trainer: Any) -> dict[str, Any]:
    return roll_out(prompts, trainer) | {"tag": [lambda: 1 for _ in prompts]}


def roll_out_alone(prompts: list[str], trainer: Any) -> dict[str, Any]:
    ids = torch.tensor([[5, 6, 7]])
    trainer.model(input_ids=ids, labels=ids)
    return roll_out(prompts, trainer)


def failing_reward() -> dict[str, Any]:
    return {"reward_funcs": [reward_fails]}


def reward_that_fails_in_one_group() -> dict[str, Any]:
    return {"reward_funcs": [reward_fails_in_one_group]}


def roll_out_in_one_group(prompts: list[str], trainer: Any) -> dict[str, Any]:
    if dist.get_rank() == 0:
        raise FloatingPointError("no rollout today")
    return roll_out(prompts, trainer)


def rollouts_that_fail_in_one_group() -> dict[str, Any]:
    return {"rollout_func": roll_out_in_one_group}


def strange_rollouts() -> dict[str, Any]:
    return {"rollout_func": roll_out_strangely}


def roll_out_in_vain(prompts: list[str], trainer: Any) -> dict[str, Any]:
    trainer.model.generate(torch.tensor([[5, 6, 7]]), past_key_values=[1])
    return roll_out(prompts, trainer)


def vain_rollouts() -> dict[str, Any]:
    return {"rollout_func": roll_out_in_vain}


def lonely_rollouts() -> dict[str, Any]:
    return {"rollout_func": roll_out_alone}


def roll_out_all_the_same(prompts: list[str], trainer: Any) -> dict[str, Any]:
    with suppress(ConfigError):
        roll_out_in_vain(prompts, trainer)
    return roll_out(prompts, trainer)


def stubborn_rollouts() -> dict[str, Any]:
    return {"rollout_func": roll_out_all_the_same}


class Unmakable:
    """What is written, and fails to be read."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def roll_out_the_unmakable(prompts: list[str], trainer: Any) -> dict[str, Any]:
    return roll_out(prompts, trainer) | {"tag": [Unmakable() for _ in prompts]}


def unmakable_rollouts() -> dict[str, Any]:
    return {"rollout_func": roll_out_the_unmakable}


class Unruly(Environment):
    def reset(self, **row: Any) -> str:
        raise FloatingPointError("no world today")


def unruly_tools() -> dict[str, Any]:
    return tools() | {"environment_factory": Unruly}


BATCHED = {"use_transformers_continuous_batching": True}
WRONG: dict[str, tuple[Run, type[Exception], str]] = {
    "half a group": (Run(options={"per_device_train_batch_size": 3}), ConfigError, "is 3 rows, and a prompt has 2"),
    "half a group in evaluation": (
        Run(options={"per_device_eval_batch_size": 3, "eval_strategy": "steps", "eval_steps": 1}),
        ConfigError,
        "per_device_eval_batch_size is 3 rows",
    ),
    "continuous batching": (Run(rollouts=False, options=BATCHED), ConfigError, "paged attention"),
    "an engine over groups": (
        Run(rollouts=False, options=COLOCATED | {"vllm_tensor_parallel_size": 4}),
        ConfigError,
        "vllm_tensor_parallel_size=4 beside burst_size=2",
    ),
    "rollouts by an engine over ranks": (
        Run(options=COLOCATED | {"vllm_tensor_parallel_size": 2}),
        ConfigError,
        "vllm_tensor_parallel_size=2 beside burst_size=2",
    ),
    "a reward that fails": (Run(options={"given": failing_reward}), RankMismatchError, "no reward today"),
    "what cannot be told": (
        Run(options={"given": strange_rollouts}),
        RankMismatchError,
        "cannot be told to the others",
    ),
    "what is not generated": (Run(options={"given": vain_rollouts}), RankMismatchError, "past_key_values"),
    "what cannot be made anew": (Run(options={"given": unmakable_rollouts}), RankMismatchError, "not a number"),
    "an environment that fails": (
        Run(rollouts=False, options={"given": unruly_tools}),
        RankMismatchError,
        "no world today",
    ),
    "a pass of one rank": (
        Run(options={"given": lonely_rollouts}),
        RankMismatchError,
        "the others would not take part",
    ),
}


@pytest.mark.parametrize(
    ("given", "first", "words"),
    [(reward_that_fails_in_one_group, 2, "no reward today"), (rollouts_that_fail_in_one_group, 0, "no rollout today")],
)
def test_errors_of_one_group_are_those_of_all(
    ranks: Ranks, tmp_path: Path, given: Callable[..., Any], first: int, words: str
) -> None:
    with pytest.raises(RankError) as caught:
        ranks(4).run(learn, str(tmp_path), Run(groups=2, options={"given": given}))
    for rank, error in enumerate(caught.value.errors):
        assert isinstance(error, FloatingPointError if rank == first else RankMismatchError), (rank, error)
        assert words in str(error)
        assert rank // 2 == first // 2 or f"Rank {first} of the group stopped" in str(error)


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_those_of_all_ranks(ranks: Ranks, tmp_path: Path, name: str) -> None:
    run, kind, words = WRONG[name]
    with pytest.raises(RankError) as caught:
        ranks(run.ranks).run(learn, str(tmp_path), run)
    own = caught.value.errors[0]
    assert words in str(own), own
    for error in caught.value.errors[1:]:
        assert isinstance(error, kind), error
        assert words in str(error), error


def test_a_rollout_goes_on_behind_an_error_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    run = Run(options={"given": stubborn_rollouts})
    first, second = ranks(2).run(learn, str(tmp_path), run)
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    assert len(first["log"]) == len(second["log"]) == 4


def interrupt(prompts: list[str], trainer: Any) -> dict[str, Any]:
    raise KeyboardInterrupt


def leave(completions: list[Any], **_: Any) -> list[float]:
    raise SystemExit(3)


class Interrupting(Environment):
    def reset(self, **row: Any) -> str:
        raise KeyboardInterrupt


class InterruptingStreamer(BaseStreamer):
    """Interrupts within a call that all ranks make. Others make theirs that waits for nothing."""

    def put(self, value: torch.Tensor) -> None:
        if dist.get_rank() == 0:
            raise KeyboardInterrupt

    def end(self) -> None: ...


def roll_out_interrupted(prompts: list[str], trainer: Any) -> dict[str, Any]:
    trainer.model.generate(torch.tensor([[5, 6, 7]]), streamer=InterruptingStreamer(), max_new_tokens=4)
    return roll_out(prompts, trainer)


INTERRUPTS: dict[str, tuple[dict[str, Any], str]] = {
    "a rollout": ({"rollout_func": interrupt}, "KeyboardInterrupt()"),
    "a reward": ({"rollout_func": roll_out, "reward_funcs": [leave]}, "SystemExit(3)"),
    "an environment": ({"environment_factory": Interrupting}, "KeyboardInterrupt()"),
    "a call of all ranks": ({"rollout_func": roll_out_interrupted}, "KeyboardInterrupt()"),
}


def learn_interrupted(rank: int, size: int, folder: str, name: str) -> tuple[str, str]:
    """What this rank raises, and then does all the same: the ranks can still agree."""
    given = dict(INTERRUPTS[name][0])
    run = Run(rollouts=False, options={"given": lambda: (tools() if "environment_factory" in given else {}) | given})
    try:
        learn(rank, size, folder, run)
    except (KeyboardInterrupt, SystemExit, RankMismatchError) as problem:
        ContextGroup.from_mesh(None).agree({}, None, torch.device("cpu"))
        return type(problem).__name__, str(problem)
    return "", ""


@pytest.mark.parametrize("name", INTERRUPTS)
def test_the_first_rank_is_interrupted(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """The others do not wait for it until the time limit."""
    what = INTERRUPTS[name][1]
    first, second = ranks(2).run(learn_interrupted, str(tmp_path), name, timeout=60.0)
    assert first[0] == what.partition("(")[0]
    assert second[0] == "RankMismatchError"
    assert f"Rank 0 of the group stopped before any communication: {what}" in second[1]


def take_results(rank: int, size: int) -> list[Any]:
    """What ranks have of functions of the first rank, of which some fail; `own` runs one alone within another."""
    group = FirstRank(ContextGroup.from_mesh(None), torch.device("cpu"))
    group.calls["fail"] = lambda: 1 / 0

    def goes_on() -> int:
        with suppress(ZeroDivisionError):
            group.together("fail")
        return group.result(lambda: rank + 7, "own")

    met: list[Any] = []
    for run in (lambda: rank + 1, lambda: int("x"), lambda: lambda: 1, goes_on):
        try:
            met.append(group.result(run, "a step"))
        except Exception as problem:
            met.append(type(problem).__name__)
    assert not group.leads
    return met


def test_results_and_errors_are_those_of_the_first_rank(ranks: Ranks) -> None:
    first, second = ranks(2).run(take_results)
    assert first == [1, "ValueError", "BatchError", 7]
    assert second == [1, "RankMismatchError", "RankMismatchError", 7]


def gather_no_rows(rank: int, size: int) -> torch.Size:
    reset_accelerate()
    return first_rank.gather_first_ranks(Accelerator(cpu=True), 2, torch.zeros(0, 3)).shape


def test_no_rows_are_gathered(ranks: Ranks) -> None:
    assert ranks(2).run(gather_no_rows) == [(0, 3)] * 2


def generate_alone(rank: int, size: int) -> tuple[list[list[int]], bool]:
    """An answer with a cache, which is not served over ranks."""
    model = hf_burst.patch_model(models.make_model("llama"))
    group = FirstRank(ContextGroup.from_mesh(None), torch.device("cpu"))
    settings = {"max_new_tokens": 3, "do_sample": True, "return_dict_in_generate": True}
    torch.manual_seed(rank)
    refuses = mock.patch.object(first_rank, "check", mock.Mock(side_effect=BatchError("not served")))
    with refuses, group.answering(model):
        found = model.generate(torch.arange(2, 8)[None], **settings)
    return found.sequences.tolist(), found.past_key_values is not None


def test_answers_of_all_ranks_alone_are_those_of_the_first(ranks: Ranks) -> None:
    (tokens, cached), (same, also) = ranks(2).run(generate_alone)
    assert tokens == same
    assert cached
    assert also


def test_a_model_that_is_not_patched_any_more() -> None:
    with (
        pytest.raises(ConfigError, match="takes a patched model"),
        FirstRank(ContextGroup(), torch.device("cpu")).answering(torch.nn.Linear(1, 1)),
    ):
        pass


@pytest.mark.parametrize("role", ["generates", "distills"])
def test_deepspeed_is_refused(role: str) -> None:
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED)
    with (
        mock.patch.object(hf_accelerate, "trainer_role", return_value=role),
        pytest.raises(ConfigError, match="under DeepSpeed: it was not compared with one process"),
    ):
        hf_accelerate._Shared(accelerator, 2)


def test_trainers_of_another_trl_are_refused() -> None:
    other: Any = SimpleNamespace(_prepare_inputs=dict, compute_loss=dict)
    with pytest.raises(ConfigError, match="has no _generate: its steps are not those of TRL"):
        GroupTraining(other, SimpleNamespace(), 2)


class OtherLoss(GRPOTrainer):
    """A class of the user's, with a loss of its own."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        totals = gather(torch.tensor([1.0 + self.accelerator.process_index]))
        return super()._compute_loss(model, inputs) * totals.mean()


def learn_otherwise(rank: int, size: int, folder: str, run: Run) -> dict[str, Any]:
    with mock.patch("trl.GRPOTrainer", OtherLoss):
        return learn(rank, size, folder, run)


def test_a_class_of_the_users(ranks: Ranks, tmp_path: Path) -> None:
    compare(ranks, tmp_path, Run(groups=2), learn_otherwise)


class OwnAdvantages(GRPOTrainer):
    """A class of the user's whose advantages differ by rank, as those of a judge that draws."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        found = super()._generate_and_score_completions(inputs)
        return found | {"advantages": found["advantages"] + dist.get_rank()}


def learn_from_own_advantages(rank: int, size: int, folder: str) -> None:
    with mock.patch("trl.GRPOTrainer", OwnAdvantages):
        learn(rank, size, folder, Run())


def test_advantages_that_differ_between_ranks_are_told(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(learn_from_own_advantages, str(tmp_path))
    for error in caught.value.errors:
        assert pytest.RaisesExc(RankMismatchError, match="advantages.*your class of the trainer overrides").matches(
            error
        ), error


def learn_by_other_losses(rank: int, size: int, folder: str) -> None:
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    with mock.patch.multiple("trl", GRPOTrainer=GMPOTrainer, GRPOConfig=GMPOConfig):
        make_trainer(Run(), folder).train()


def learn_from_own_pairs(rank: int, size: int, folder: str) -> None:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    reset_accelerate()
    mesh = hf_burst.BurstParallelismConfig()
    settings = OnlineDPOConfig(folder, use_cpu=True, bf16=False, max_steps=1, report_to=[], parallelism_config=mesh)
    model, reference = (hf_burst.patch_model(models.make_model("llama", seed=seed)) for seed in (0, 3))
    data = datasets.Dataset.from_list([{"prompt": "w5 w6"}] * 8)
    options: Any = {"train_dataset": data, "processing_class": trainers.tokenizer()}
    OnlineDPOTrainer(model, reference, [reward_length], args=settings, **options).train()


@pytest.mark.parametrize("learn_else", [learn_by_other_losses, learn_from_own_pairs])
def test_other_trainers_that_generate_are_refused(
    ranks: Ranks, tmp_path: Path, learn_else: Callable[..., None]
) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(learn_else, str(tmp_path))
    for error in caught.value.errors:
        assert pytest.RaisesExc(ConfigError, match="generates what it learns from").matches(error), error


def doubled(self: Groups, tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([OF_GROUPS[0](self, tensor)] * 2)


def doubled_objects(self: Groups, objects: list[Any]) -> list[Any]:
    return [each for each in OF_GROUPS[1](self, objects) for _ in range(2)]


def counted_by_ranks(self: GroupTraining, trainer: Any, accelerator: Any, size: int) -> None:
    INIT(self, trainer, accelerator, size)
    trainer.args.generation_batch_size *= size


def normalised_by_ranks(self: GroupTraining, trainer: Any, accelerator: Any, size: int) -> None:
    INIT(self, trainer, accelerator, size)
    self.groups.num_processes = accelerator.num_processes


def called_by_ranks(self: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return method(*args, **kwargs)


OF_GROUPS, INIT = (Groups.gather, Groups.gather_object), GroupTraining.__init__
FIRST = property(lambda self: 0, lambda self, value: None)
UNEQUAL = {"scale_rewards": "batch"}
CISPO = {"loss_type": "cispo", "epsilon_high": 2.0}
# what is broken, by what, and the run that must notice it; letters as in the list of TRL's places
TRAPS: dict[str, tuple[Any, str, Any, Run]] = {
    "a: seeds by rank": (generating, "set_seed", lambda seed: None, Run(groups=2)),
    "b: shuffles by rank": (torch, "set_rng_state", lambda state: None, Run()),
    "c: ranks in generation_batch_size": (
        GroupTraining,
        "__init__",
        counted_by_ranks,
        Run(options={"num_iterations": 2}),
    ),
    "d: advantages of another rank": (Groups, "process_index", FIRST, Run(groups=2)),
    "e: duplicates in deviations": (Groups, "gather", doubled, Run(options=UNEQUAL)),
    "f: rewards and rollouts on all ranks": (GroupTraining, "on_first", called_by_ranks, Run()),
    "g: normalised by ranks": (GroupTraining, "__init__", normalised_by_ranks, Run(options=CISPO)),
    "h: duplicates in tables": (Groups, "gather_object", doubled_objects, Run()),
    "i: prompts of all ranks": (
        GroupTraining,
        "on_first",
        called_by_ranks,
        Run(rollouts=False, options=SERVER),
    ),
    "j: engines of all ranks": (GroupTraining, "ask_engine", called_by_ranks, VLLM["colocated"]),
    "l: whole prompts on a rank": (first_rank, "check", mock.Mock(side_effect=BatchError), RUNS["2 x 2, generated"]),
}


def learn_broken(rank: int, size: int, folder: str, run: Run, trap: str) -> dict[str, Any]:
    owner, name, broken, _ = TRAPS[trap]
    with mock.patch.object(owner, name, broken, create=True):
        return learn(rank, size, folder, run)


@pytest.mark.slow
@pytest.mark.parametrize("trap", TRAPS)
def test_traps_are_noticed(ranks: Ranks, tmp_path: Path, trap: str) -> None:
    with pytest.raises((AssertionError, RankError)):
        compare(ranks, tmp_path, TRAPS[trap][-1], learn_broken, trap)


def test_prompts_with_images_in_a_list_are_not_given_once() -> None:
    model = models.make_model("llama")
    given = {"input_ids": torch.ones(4, 3, dtype=torch.long), "do_sample": True}
    assert len(first_rank._each_once(model, given)["input_ids"]) == 1
    given["pixel_values"] = [torch.ones(3, 2, 2)] * 4
    assert len(first_rank._each_once(model, given)["input_ids"]) == 4
