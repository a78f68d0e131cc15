"""The settings of `evaluate.py`, and their checks, which need neither torch nor a model."""

from dataclasses import dataclass, field

import settings
from needles import KEYS, TASKS


@dataclass
class Evaluation:
    """What is evaluated."""

    output_dir: str = field(
        default="outputs/evaluation", metadata={"help": "Folder for results.json and the pictures."}
    )
    tasks: list[str] = field(
        default_factory=lambda: ["single", "multikey"], metadata={"help": f"Recall tasks: {', '.join(TASKS)}; or none."}
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
        metadata={"help": "Text or chats for the perplexity: files, folders, a hub name, python_topics; or none."},
    )
    documents_split: str = field(default="train", metadata={"help": "Split of the documents."})
    dataset_text_field: str = field(default="text", metadata={"help": "The column of text."})
    windows: int = field(
        default=8, metadata={"help": "The most pieces of text for the perplexity, each of the longest length."}
    )
    assistant_only_loss: bool = field(
        default=True, metadata={"help": "Of chats, whether the perplexity is that of the assistant's tokens alone."}
    )
    completion_only_loss: bool = field(default=True, metadata={"help": "The same of prompts with completions."})
    chat_template_path: str | None = field(default=None, metadata={"help": "A .jinja file for chats, as in sft.py."})
    ruler: list[str] = field(
        default_factory=list, metadata={"help": "Tasks of RULER by lm-eval, such as niah_single_1."}
    )
    ruler_by: str = field(
        default="answer", metadata={"choices": ("answer", "generation"), "help": "Score answers, or generate them."}
    )
    batch_size: int = field(default=1, metadata={"help": "Texts that are read at once."})
    seed: int = field(default=0, metadata={"help": "Of all that is drawn."})

    def __post_init__(self) -> None:
        """Checks what needs neither a model nor data."""
        for name in ("tasks", "lengths", "haystack", "documents", "ruler"):
            value = getattr(self, name)
            listed = value if isinstance(value, list) else [value]  # YAML may give one without brackets
            setattr(self, name, [] if listed == ["none"] and name != "haystack" else listed)
        self.haystack = settings.sources("haystack", self.haystack)
        self.documents = settings.sources("documents", self.documents) if self.documents else []
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
