"""Evaluates a model on long texts, each shared by several processes, offline.

It draws three things, and writes their numbers beside them:

* recall: facts are hidden at every depth of texts of every length (recipes/needles.py);
* perplexity by the position in the document;
* RULER's generated tasks, made by lm-eval (recipes/ruler.py), if it is installed.

Settings come from YAML files, then from the command line. Two CPU processes:

    ACCELERATE_USE_CPU=1 accelerate launch --config_file recipes/configs/accelerate_2_processes.yaml \
        recipes/evaluate.py --config recipes/configs/evaluate_cpu.yaml --model_name_or_path outputs/text

Four GPUs:

    accelerate launch --num_processes 4 recipes/evaluate.py --config recipes/configs/evaluate_4gpu.yaml \
        --model_name_or_path meta-llama/Llama-3.1-8B
"""

import json
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import product
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import data
import models
import report
import settings
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from needles import KEYS, TASKS, Needles, read_haystack
from pictures import draw_positions, draw_recall
from scoring import SHARDED, Cell, Groups, Score, losses_by_position, score_answers, text_windows
from settings import BurstSettings, ModelSettings
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

import hf_burst


@dataclass
class Evaluation:
    """What is evaluated."""

    output_dir: str = field(
        default="outputs/evaluation", metadata={"help": "Folder for results.json and the pictures."}
    )
    tasks: list[str] = field(
        default_factory=lambda: ["single", "multikey"],
        metadata={"help": f"Recall tasks: {', '.join(TASKS)}; or none."},
    )
    lengths: list[int] = field(
        default_factory=lambda: [2048, 4096, 8192, 16384], metadata={"help": "Tokens of the texts."}
    )
    depths: int = field(default=5, metadata={"help": "Depths, from the start of the text to its end."})
    samples: int = field(default=10, metadata={"help": "Texts of each task, length and depth."})
    digits: int = field(default=5, metadata={"help": "Of the numbers that are hidden."})
    facts: int = field(default=4, metadata={"help": "Facts of a text where a task hides several."})
    haystack: list[str] = field(
        default_factory=lambda: ["python_topics"], metadata={"help": "Text files to hide facts in, or python_topics."}
    )
    chat: bool = field(default=False, metadata={"help": "Ask by the chat template of the tokenizer."})
    documents: list[str] = field(
        default_factory=lambda: ["python_topics"],
        metadata={"help": "Text for the perplexity: files, folders, a hub name, python_topics; or none."},
    )
    documents_split: str = field(default="train", metadata={"help": "Split of the documents."})
    windows: int = field(default=8, metadata={"help": "Pieces of documents for the perplexity, of the longest length."})
    ruler: list[str] = field(
        default_factory=list, metadata={"help": "Tasks of RULER by lm-eval, such as niah_single_1."}
    )
    ruler_by: str = field(
        default="answer",
        metadata={"choices": ("answer", "generation"), "help": "Score answers over ranks, or generate on each rank."},
    )
    batch_size: int = field(default=1, metadata={"help": "Texts that are read at once."})
    seed: int = field(default=0, metadata={"help": "Of all that is drawn."})

    def __post_init__(self) -> None:
        """Checks what needs neither a model nor data."""
        for name in ("tasks", "lengths", "haystack", "documents", "ruler"):
            value = getattr(self, name)
            listed = value if isinstance(value, list) else [value]  # YAML may give one without brackets
            if name != "lengths" and not all(isinstance(item, str) for item in listed):
                raise SystemExit(f"{name} is {value!r}; give names{'' if name == 'haystack' else ', or none'}.")
            setattr(self, name, [] if listed == ["none"] and name != "haystack" else listed)
        if unknown := sorted(set(self.tasks) - set(TASKS)):
            raise SystemExit(f"tasks has {unknown[0]!r}; give some of {', '.join(TASKS)}, or none.")
        if not self.lengths or any(type(length) is not int or length < 2 for length in self.lengths):
            raise SystemExit(f"lengths is {self.lengths!r}; give whole numbers of tokens, such as 4096 8192.")
        self.lengths = sorted(set(self.lengths))
        for name, least in {"depths": 1, "samples": 1, "digits": 1, "facts": 2, "windows": 1, "batch_size": 1}.items():
            if type(value := getattr(self, name)) is not int or value < least:
                raise SystemExit(f"{name} is {value!r}; give a whole number, at least {least}.")

        if self.facts > len(KEYS):
            raise SystemExit(f"facts is {self.facts}; give at most {len(KEYS)}, as many keys as there are.")

    @property
    def depth_values(self) -> list[float]:
        """Depths of the text, 0 to 1."""
        return [index / max(1, self.depths - 1) for index in range(self.depths)]


def place(model: torch.nn.Module, accelerator: Accelerator) -> torch.nn.Module:
    """The model on its device, its weights sharded under FSDP2."""
    if accelerator.distributed_type == DistributedType.FSDP:  # accelerate shards none without an optimizer
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        return model.eval()
    return model.to(accelerator.device).eval()


def load_model(model: ModelSettings, burst: BurstSettings, vocabulary: int, seed: int) -> torch.nn.Module:
    """The patched model; of a folder with an adapter, its base model with the adapter."""
    name = model.model_name_or_path
    if name is not None and (Path(name) / "adapter_config.json").exists():
        defaults = ModelSettings()
        for setting in ("load_in_4bit", "load_in_8bit", "rope_scaling", "model_revision"):
            if getattr(model, setting) != getattr(defaults, setting):
                raise SystemExit(
                    f"{setting} is set, but {name!r} is an adapter, whose base is loaded as its files say. Leave it "
                    "out, or merge the adapter (recipes/merge_adapter.py)."
                )
        with settings.using(f"model_name_or_path {name!r}"):
            return hf_burst.patch_model(models.load_adapter(name, model.dtype), burst.config)
    return models.load_model(model, models.load_config(model, vocabulary), burst, seed)


def recall(model: torch.nn.Module, needles: Needles, wanted: Evaluation, groups: Groups) -> list[Cell]:
    """The squares of the heat maps, of all tasks."""
    squares = list(product(wanted.tasks, wanted.lengths, wanted.depth_values))
    numbers = range(wanted.seed, wanted.seed + wanted.samples)
    batches = [numbers[start : start + wanted.batch_size] for start in range(0, wanted.samples, wanted.batch_size)]
    own = groups.own(list(product(squares, batches)))
    results = []
    for (square, batch), counts in tqdm(own, "recall", disable=not groups.accelerator.is_main_process):
        samples = [needles.sample(*square, number) for number in batch]
        scores = score_answers(model, [sample.input_ids for sample in samples], [sample.answer for sample in samples])
        results += [(square, score) for score in scores if counts]
    scores_of: dict[Any, list[Score]] = {square: [] for square in squares}
    for square, score in groups.gather(results):
        scores_of[square].append(score)
    return [Cell(*square, *map(fmean, zip(*scores, strict=True)), len(scores)) for square, scores in scores_of.items()]


def read_windows(tokenizer: PreTrainedTokenizerBase, wanted: Evaluation) -> list[list[int]]:
    """Pieces of the documents, of the longest length."""
    rows = data.load_rows(wanted.documents, wanted.documents_split)
    if "text" not in rows.column_names or not data.is_text(rows, "text"):
        raise SystemExit(f"documents {wanted.documents} has no column of text called text: {rows.column_names}.")
    return text_windows(rows["text"], tokenizer, wanted.lengths[-1], wanted.windows)


def read(
    tokenizer: PreTrainedTokenizerBase, wanted: Evaluation, sharded: bool
) -> tuple[Needles | None, list[list[int]]]:
    """What the model is asked: facts in texts, and pieces of documents; raises for all that cannot be asked."""
    if wanted.ruler and find_spec("lm_eval") is None:
        raise SystemExit('ruler needs lm-eval with its word lists: pip install "lm_eval[ruler]"')
    if wanted.ruler and wanted.ruler_by == "generation" and sharded:
        raise SystemExit(f"ruler_by is 'generation': {SHARDED}")
    needles = None
    if wanted.tasks:
        needles = Needles(tokenizer, read_haystack(wanted.haystack), wanted.digits, wanted.facts, wanted.chat)
        for square in product(wanted.tasks, wanted.lengths, wanted.depth_values):
            for number in range(wanted.seed, wanted.seed + wanted.samples):
                needles.check(*square, number)
    windows = read_windows(tokenizer, wanted) if wanted.documents else []
    if wanted.ruler:
        import ruler  # which needs lm-eval

        ruler.check(tokenizer, wanted.ruler, wanted.lengths)
    return needles, windows


def evaluate(arguments: list[str]) -> Groups:
    """Evaluates what the settings say, and writes each part when it is done; the processes stay joined."""
    model_settings, burst, wanted = settings.parse(arguments, (ModelSettings, BurstSettings, Evaluation), {})
    if burst.merge_to is not None:
        raise SystemExit("merge_to is for training; recipes/merge_adapter.py merges an adapter that was saved.")
    groups = Groups(Accelerator(parallelism_config=burst.parallelism))
    with settings.using(f"output_dir {wanted.output_dir!r}"):
        folder = Path(wanted.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer = models.load_tokenizer(model_settings)
    needles, windows = read(tokenizer, wanted, groups.accelerator.distributed_type == DistributedType.FSDP)
    model = place(load_model(model_settings, burst, len(tokenizer), wanted.seed), groups.accelerator)
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    first, say = groups.accelerator.is_main_process, groups.accelerator.print
    say(f"{groups.count} x {groups.size} processes (groups x processes of a text); the model has {positions} positions")
    title = f"{model_settings.model_name_or_path or config.model_type}, over {groups.size} processes"
    results: dict[str, Any] = {"model": model_settings.model_name_or_path, "positions": positions}
    results |= {"settings": asdict(wanted), **report.made_by(groups.accelerator.num_processes)}

    def write(part: str, values: Any) -> None:
        results[part] = values
        if first:
            (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")

    if needles is not None:
        cells = recall(model, needles, wanted, groups)
        write("recall", [asdict(cell) for cell in cells])
        if first:
            draw_recall(cells, positions, title, folder / "recall.png")
        for task in wanted.tasks:
            say(f"{task}: {fmean(cell.right for cell in cells if cell.task == task):.1%} right")
    if windows:
        curve = losses_by_position(model, wanted.lengths[-1], windows, groups)
        write("perplexity", asdict(curve))
        if first:
            marks = {"positions of the model": positions} if positions else {}
            draw_positions({"perplexity": curve}, marks, title, folder / "perplexity.png")
        say(f"perplexity: {exp(curve.mean(1, wanted.lengths[-1])):.3f}")
    if wanted.ruler:
        from ruler import ShardedLM, evaluate_ruler  # which needs lm-eval

        lm = ShardedLM(model, tokenizer, max(wanted.lengths))
        options = wanted.lengths, wanted.samples, wanted.ruler_by, wanted.chat
        write("ruler", evaluate_ruler(lm, wanted.ruler, *options))
        say(json.dumps(results["ruler"], indent=1))
    say(f"results.json and pictures are in {folder}")
    return groups


def main(arguments: list[str]) -> None:
    accelerator = evaluate(arguments).accelerator
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    settings.run(main)
