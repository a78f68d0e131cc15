"""Evaluates a model on long texts, each shared by several processes, offline.

It measures, draws, and writes the numbers beside the pictures (recipes/evaluation.py):

* recall: facts are hidden at every depth of texts of every length (recipes/needles.py);
* of documents, the perplexity by the position in them;
* of chats, the perplexity of what the assistant wrote (`--documents chats.jsonl`);
* RULER's generated tasks, made by lm-eval (recipes/ruler.py), if it is installed.

Settings come from YAML files, then from the command line. The files recipes/configs/evaluate_*.yaml begin with
commands, on CPUs and on GPUs.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

import beginning
import command_line
import settings
from evaluation_settings import Evaluation
from settings import BurstSettings, ModelSettings

if TYPE_CHECKING:
    from scoring import Groups


def evaluate(arguments: list[str]) -> "Groups":
    """Evaluates what the settings say; the processes stay joined."""
    chosen = command_line.parse(arguments, (ModelSettings, BurstSettings, Evaluation), {})
    if chosen[1].merge_to is not None:
        raise SystemExit("merge_to is for training; recipes/merge_adapter.py merges an adapter that was saved.")
    if chosen[2].ruler and find_spec("lm_eval") is None:
        raise SystemExit('ruler needs lm-eval with its word lists: pip install "lm_eval[ruler]"')
    beginning.loading()
    import evaluation

    return evaluation.evaluate(*chosen)


def main(arguments: list[str]) -> None:
    settings.end(evaluate(arguments))


if __name__ == "__main__":
    settings.run(main)
