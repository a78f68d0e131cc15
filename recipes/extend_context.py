"""Extends the context of a model by YaRN, and shows the perplexity by position before and after.

The model's rotary positions are stretched (YaRN, arXiv 2309.00071), which its config saves. It is then trained on long
documents, each shared by several processes. Text that is held out says what that changes beyond the old length.

The files recipes/configs/extend_*.yaml begin with commands, on CPUs and on GPUs.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

import settings
import training
from settings import BurstSettings, DataSettings, ModelSettings
from transformers.hf_argparser import HfArg

if TYPE_CHECKING:
    import torch
    from scoring import PositionLosses
    from trl import SFTConfig, SFTTrainer

DEFAULTS = {"too_long": "split", "packing": True, "output_dir": "outputs/extended"}
BEFORE, STRETCHED, TRAINED = "before", "stretched, not trained", "stretched and trained"


@dataclass
class Extension:
    """What the perplexity is measured on."""

    windows: int = HfArg(default=32, help="Pieces of held-out text for the perplexity.")

    def __post_init__(self) -> None:
        settings.check_counts(self, {"windows": 1})


def measure(trainer: "SFTTrainer", windows: list[list[int]], old: int, model: "torch.nn.Module") -> "PositionLosses":
    """The loss of a patched model by the position in held-out text, within the old length and beyond it."""
    from scoring import Groups, losses_by_position

    model = model.to(trainer.args.device).eval()
    with trainer.accelerator.autocast():  # computes as the training does
        return losses_by_position(model, trainer.args.max_length, windows, Groups(trainer.accelerator), [old])


def write(curves: Mapping[str, "PositionLosses"], old: int, args: "SFTConfig", made: dict[str, Any]) -> None:
    """Writes the curves and their picture, and prints the perplexity within the old length and beyond it."""
    from pictures import draw_positions

    folder = Path(args.output_dir)
    parts = {f"within {old:,} tokens": (1, old), "beyond": (old, args.max_length)}
    perplexity = {
        label: {part: round(exp(curve.mean(*span)), 3) for part, span in parts.items()}
        for label, curve in curves.items()
    }
    results = {"old length": old, "new length": args.max_length, "perplexity": perplexity, **made}
    results["curves"] = {label: asdict(curve) for label, curve in curves.items()}
    (folder / "extension.json").write_text(json.dumps(results) + "\n")
    title = f"Context extended from {old:,} to {args.max_length:,} tokens, over {made['processes']} processes"
    draw_positions(curves, {"old length": old}, title, folder / "extension.png")
    for label, values in perplexity.items():
        print(f"perplexity {label:>24}: " + ", ".join(f"{value:8.3f} {part}" for part, value in values.items()))


def check(model: ModelSettings, documents: DataSettings, burst: BurstSettings, args: Any, *_: Any) -> None:
    """Checks the settings before the processes are joined."""
    settings.check(model, documents, burst, args)
    if not (documents.eval_dataset or documents.eval_share):
        raise SystemExit("Set eval_share, or eval_dataset, for the text of the perplexity.")


def main(arguments: list[str]) -> None:
    start = training.begin(arguments, "SFTConfig", DEFAULTS, check, Extension)
    import data
    from benchmarks.provenance import made_by
    from trl import SFTTrainer

    from hf_burst.hf.models.positions import pretrained_length

    model, args, extension = start.model, start.args, start.more
    scaling, model.rope_scaling = model.rope_scaling, {}
    config = start.config.get_text_config()
    old, pretrained = config.max_position_embeddings, pretrained_length(config)
    if args.max_length <= old:
        raise SystemExit(
            f"max_length is {args.max_length:,}, and the model has {old:,} positions; set max_length higher."
        )
    train, held_out = data.load_tokens(start.documents, start.tokenizer, args, ends=False)
    assert held_out is not None, "checked before"
    long = (ids for ids in held_out["input_ids"] if len(ids) == args.max_length)
    windows = list(islice(long, extension.windows))
    if not windows:
        raise SystemExit(
            f"No held-out text has {args.max_length:,} tokens. Give eval_dataset, or one long text alone, whose end is "
            "held out; eval_share draws whole texts of several."
        )
    before = start.load_model()
    model.rope_scaling = scaling or {"rope_type": "yarn", "factor": args.max_length / pretrained}
    trainer = replace(start).make(SFTTrainer, (train, held_out))  # its config is read anew
    measured = partial(measure, trainer, windows, old)
    curves = {BEFORE: measured(before), STRETCHED: measured(trainer.model)}
    del before
    first, made = trainer.is_world_process_zero(), made_by(trainer.accelerator.num_processes)
    training.train(trainer, start.burst, lambda: curves.update({TRAINED: measured(trainer.model)}))
    if first:
        write(curves, old, args, made)


if __name__ == "__main__":
    settings.run(main)
