"""The settings of `evaluate.py`, and their checks, which need neither torch nor a model."""

from dataclasses import dataclass

import settings
from needles import KEYS, TASKS
from transformers.hf_argparser import HfArg


@dataclass
class Evaluation:
    """What is evaluated."""

    output_dir: str = HfArg(default="outputs/evaluation", help="Folder for results.json and the pictures.")
    tasks: list[str] = HfArg(
        default_factory=lambda: ["single", "multikey"], help=f"Recall tasks: {', '.join(TASKS)}; or none."
    )
    lengths: list[int] = HfArg(default_factory=lambda: [2048, 4096, 8192, 16384], help="Tokens of the texts.")
    depths: int = HfArg(default=5, help="Depths, from the start of the text to its end.")
    samples: int = HfArg(default=10, help="Texts of each task, length and depth.")
    digits: int = HfArg(default=5, help="Of the numbers that are hidden.")
    facts: int = HfArg(default=4, help="Facts of a text where a task hides several.")
    haystack: list[str] = HfArg(
        default_factory=lambda: ["python_topics"], help="Text files to hide facts in, or python_topics."
    )
    chat: bool = HfArg(default=False, help="Ask by the chat template of the tokenizer.")
    documents: list[str] = HfArg(
        default_factory=lambda: ["python_topics"],
        help="Text or chats for the perplexity: files, folders, a hub name, python_topics; or none.",
    )
    documents_split: str = HfArg(default="train", help="Split of the documents.")
    dataset_text_field: str = HfArg(default="text", help="The column of text.")
    windows: int = HfArg(default=8, help="The most pieces of text for the perplexity, each of the longest length.")
    assistant_only_loss: bool = HfArg(
        default=True, help="Of chats, whether the perplexity is that of the assistant's tokens alone."
    )
    completion_only_loss: bool = HfArg(default=True, help="The same of prompts with completions.")
    chat_template_path: str | None = HfArg(default=None, help="A .jinja file for chats, as in sft.py.")
    ruler: list[str] = HfArg(default_factory=list, help="Tasks of RULER by lm-eval, such as niah_single_1.")
    ruler_by: str = HfArg(
        default="answer", help="Score answers, or generate them.", metadata={"choices": ("answer", "generation")}
    )
    batch_size: int = HfArg(default=1, help="Texts that are read at once.")
    seed: int = HfArg(default=0, help="Of all that is drawn.")

    def __post_init__(self) -> None:
        """Checks what needs neither a model nor data."""
        for name in ("tasks", "lengths", "haystack", "documents", "ruler"):
            if name != "haystack" and getattr(self, name) == ["none"]:
                setattr(self, name, [])
        self.haystack = settings.sources("haystack", self.haystack)
        self.documents = settings.sources("documents", self.documents) if self.documents else []
        if unknown := sorted(set(self.tasks) - set(TASKS)):
            raise SystemExit(f"tasks has {unknown[0]!r}; give some of {', '.join(TASKS)}, or none.")
        if not self.lengths or any(type(length) is not int or length < 2 for length in self.lengths):
            raise SystemExit(f"lengths is {self.lengths!r}; give whole numbers of tokens, such as 4096 8192.")
        self.lengths = sorted(set(self.lengths))
        least = {"depths": 1, "samples": 1, "digits": 1, "facts": 2, "windows": 1, "batch_size": 1}
        settings.check_counts(self, least)
        if self.facts > len(KEYS):
            raise SystemExit(f"facts is {self.facts}; give at most {len(KEYS)}, as many keys as there are.")

    @property
    def depth_values(self) -> list[float]:
        """Depths of the text, 0 to 1."""
        return [index / max(1, self.depths - 1) for index in range(self.depths)]
