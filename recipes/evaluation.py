"""What `evaluate.py` measures: recall, the perplexity of documents and chats, and RULER's tasks."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import data
import images
import models
import resuming
import settings
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from benchmarks.provenance import made_by
from datasets import Dataset
from evaluation_settings import Evaluation
from needles import Needles, read_haystack
from pictures import draw_positions, draw_recall
from rows import map_rows
from scoring import Cell, Groups, Score, loss_of_labels, losses_by_position, score_answers, text_windows, tokens_of
from settings import BurstSettings, ModelSettings
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

import hf_burst


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


@dataclass
class Questions:
    """What the model is asked."""

    needles: Needles | None  # they make texts with hidden facts
    windows: list[list[int]]  # pieces of documents, of the longest length
    chats: Dataset | None  # chats, or prompts with completions, as `input_ids` and `labels`, or with images
    tasks: dict[str, Any]  # RULER's tasks with their texts


def read(
    model: ModelSettings, tokenizer: PreTrainedTokenizerBase, wanted: Evaluation, accelerator: Accelerator
) -> Questions:
    """What the model is asked; raises for all that cannot be asked."""
    needles = None
    if wanted.tasks:
        needles = Needles(tokenizer, read_haystack(wanted.haystack), wanted.digits, wanted.facts, wanted.chat)
        for square in product(wanted.tasks, wanted.lengths, wanted.depth_values):
            for number in range(wanted.seed, wanted.seed + wanted.samples):
                needles.check(*square, number)
    windows, chats = read_documents(model, tokenizer, wanted, accelerator) if wanted.documents else ([], None)
    tasks = {}
    if wanted.ruler:
        import ruler  # which needs lm-eval

        ruler.check(tokenizer, wanted.ruler, wanted.lengths)
        tasks = ruler.make_tasks(tokenizer, wanted.ruler, wanted.lengths, wanted.samples)
    return Questions(needles, windows, chats, tasks)


def read_documents(
    model: ModelSettings, tokenizer: PreTrainedTokenizerBase, wanted: Evaluation, accelerator: Accelerator
) -> tuple[list[list[int]], Dataset | None]:
    """Pieces of text of the longest length, or chats that are no longer, as `sft.py` reads them, with images too."""
    name, longest = f"documents {wanted.documents}", wanted.lengths[-1]
    rows = data.load_rows(wanted.documents, wanted.documents_split, wanted.dataset_text_field)
    reader: data.Reader = tokenizer
    if sees := images.are_in(rows):
        rows, reader = images.opened(rows, wanted.documents, "documents"), images.load_processor(model, tokenizer)
    with settings.using(name):
        function, warning = data.tokenizer_of(rows, reader, wanted)
    if not data.answer_columns(rows):
        texts = rows[wanted.dataset_text_field]
        windows, count = text_windows(texts, tokenizer, longest, wanted.windows)
        more = f"; windows asks for {wanted.windows}" if len(windows) < wanted.windows else ""
        accelerator.print(
            f"{name}: {len(windows)} pieces of {longest:,} tokens, of {count:,} of {len(rows):,} documents{more}."
        )
        return windows, None
    with settings.using(name), main_process_first(accelerator):
        tokens = map_rows(rows, partial(data.tokens_alone, function=function), wanted.documents, desc="Tokenizing")
        choose = partial(is_answered, longest=longest)
        chats = tokens.filter(choose, input_columns="labels", desc="Choosing")
    if warning:
        accelerator.print(f"WARNING: {warning}")
    if not chats:
        raise SystemExit(f"{name} hold no answer in a row of at most {longest:,} tokens; give greater lengths.")
    if len(chats) < len(rows):
        accelerator.print(
            f"{name}: {len(rows) - len(chats):,} of {len(rows):,} rows are left out; they have no answer, or more than "
            f"{longest:,} tokens, the greatest of lengths."
        )
    return [], images.sequences(chats, rows, function) if sees else chats


def is_answered(labels: list[int], longest: int) -> bool:
    """Whether a row has a label, and is not too long. datasets cannot recognise a function without a name."""
    return data.has_label(labels) and len(labels) <= longest


@contextmanager
def main_process_first(accelerator: Accelerator) -> Iterator[None]:
    """As accelerate's, whose other processes wait forever if the main one raises."""
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
    try:
        yield
    finally:
        if accelerator.is_main_process:
            accelerator.wait_for_everyone()


def of_another(folder: Path, model: str | None) -> str | None:
    """What there is to say of a folder with the results of another model, which would be lost."""
    try:
        before = json.loads((folder / "results.json").read_text())["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if before == model:
        return None
    return (
        f"output_dir {str(folder)!r} holds the evaluation of {before}, which that of {model} would replace. Set "
        "another output_dir, or take results.json away."
    )


def evaluate(model_settings: ModelSettings, burst: BurstSettings, wanted: Evaluation) -> Groups:
    """Evaluates what the settings say, and writes each part when it is done; the processes stay joined."""
    settings.probe("output_dir", wanted.output_dir)
    folder, groups = Path(wanted.output_dir), Groups(Accelerator(parallelism_config=burst.parallelism))
    resuming.end_together(of_another(folder, model_settings.model_name_or_path))
    as_set, tokenizer = asdict(wanted), models.load_tokenizer(model_settings, wanted)
    questions = read(model_settings, tokenizer, wanted, groups.accelerator)
    model = place(load_model(model_settings, burst, len(tokenizer), wanted.seed), groups.accelerator)
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    first, say = groups.accelerator.is_main_process, groups.accelerator.print
    say(f"{groups.count} x {groups.size} processes (groups x processes of a text); the model has {positions} positions")
    over = f", over {groups.size} processes" if groups.size > 1 else ""
    title = f"{model_settings.model_name_or_path or config.model_type}{over}"
    results: dict[str, Any] = {"model": model_settings.model_name_or_path, "positions": positions}
    results |= {"settings": as_set, **made_by(groups.accelerator.num_processes)}

    def write(part: str, values: Any) -> None:
        results[part] = values
        if first:
            (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")

    if questions.needles is not None:
        cells = recall(model, questions.needles, wanted, groups)
        write("recall", [asdict(cell) for cell in cells])
        if first:
            draw_recall(cells, positions, title, folder / "recall.png")
        for task in wanted.tasks:
            say(f"{task}: {fmean(cell.right for cell in cells if cell.task == task):.1%} right")
    if questions.windows:
        curve = losses_by_position(model, wanted.lengths[-1], questions.windows, groups)
        write("perplexity", asdict(curve))
        if first:
            marks = {"positions of the model": positions} if positions else {}
            draw_positions({"perplexity": curve}, marks, title, folder / "perplexity.png")
        say(f"perplexity: {exp(curve.mean(1, wanted.lengths[-1])):.3f}")
    if questions.chats is not None:
        collate = images.collate if images.are_in(questions.chats) else tokens_of
        loss, tokens = loss_of_labels(model, questions.chats, groups, collate)
        write("answers", {"loss": loss, "perplexity": exp(loss), "tokens": tokens, "rows": len(questions.chats)})
        say(f"answers: loss {loss:.4f}, perplexity {exp(loss):.3f}, {tokens:,} tokens of {len(questions.chats):,} rows")
    if questions.tasks:
        from ruler import ShardedLM, evaluate_ruler  # which needs lm-eval

        lm = ShardedLM(model, tokenizer, max(wanted.lengths))
        options = wanted.lengths, wanted.ruler_by, wanted.chat
        write("ruler", evaluate_ruler(lm, questions.tasks, *options))
        say(json.dumps(results["ruler"], indent=1))
    drawn = " and pictures are" if questions.needles is not None or questions.windows else " is"
    say(f"results.json{drawn} in {folder}")
    return groups
