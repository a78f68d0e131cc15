"""Facts hidden in a long text, and a question about them at its end: the tasks of `evaluate.py`.

The tasks are those that RULER asks of long contexts (arXiv 2404.06654, section 3), in words of our own: a fact among
text, a fact among other facts, several facts of one key, and a chain of variables. Samples are made on the spot, of any
number of tokens, with the facts at any depth of the text.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, takewhile
from operator import itemgetter
from string import ascii_uppercase

from transformers import PreTrainedTokenizerBase

TASKS = ("single", "multikey", "multivalue", "variables")
INTRO = "Some facts are hidden in the following text. Remember them.\n\n"
FACT = "The secret number of the {key} is {value}.\n"
COLOURS = ("amber", "black", "blue", "brown", "golden", "green", "grey", "ivory", "orange", "pink", "purple", "red")
ANIMALS = ("badger", "bear", "crane", "eagle", "falcon", "fox", "goose", "hare", "heron", "lion", "otter", "raven")
KEYS = [f"{colour} {animal}" for colour in COLOURS for animal in ANIMALS]


def read_haystack(sources: Sequence[str]) -> str:
    """The text in which facts are hidden: of files, or Python's own documentation for `python_topics`."""
    import data  # which takes seconds

    text = "\n".join(data.load_rows(list(sources), "train")["text"])
    if not text.strip():
        raise SystemExit(f"haystack {list(sources)} holds no text; give text files, or python_topics.")
    return text


def first_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """The token by which texts of a model begin, if there is one."""
    begins = tokenizer.bos_token is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return tokenizer.bos_token if begins else ""


@dataclass(frozen=True)
class Sample:
    """One text with its question and answer."""

    input_ids: list[int]  # text, question and answer, as many tokens as were asked for
    answer: int  # how many tokens the answer has; they are the last ones


@dataclass(frozen=True)
class Prompt:
    """What is hidden and asked, as text: facts that the answer needs, facts that it does not, question and answer."""

    asked: list[str]
    others: list[str]
    question: str
    begins: str  # the sentence that the answer ends
    answer: str


@dataclass
class Needles:
    """Makes samples."""

    tokenizer: PreTrainedTokenizerBase  # of the model that is asked
    haystack: str  # the text; it begins anew where a sample is longer
    digits: int = 5  # of a secret number; a model that guesses is right once in `10 ** digits` times
    facts: int = 4  # facts of `"multikey"` and `"multivalue"`, and variables of `"variables"`
    chat: bool = False  # whether to ask by the tokenizer's chat template

    def sample(self, task: str, length: int, depth: float, seed: int) -> Sample:
        """One sample of `length` tokens, the same for the same seed.

        The fact that is asked for stands at `depth`: 0 is the start of the text, 1 its end. Where the answer needs
        several facts, the first stands there and the others follow anywhere behind it. Other facts stand anywhere.

        Raises:
            SystemExit: If the length leaves no room for text.
        """
        draw = random.Random(f"{task} {length} {depth} {seed}")
        opening, asked, others, question, ending, room = self._parts(task, length, draw)
        first = depth * room
        places = [first, *sorted(draw.uniform(first, room) for _ in asked[1:])]
        hidden = [*zip(places, asked, strict=True), *((draw.uniform(0, room), fact) for fact in others)]
        tokens = [*opening, *chain(*self._hide(self._text(room, draw), sorted(hidden, key=itemgetter(0))))]
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(question, ending, strict=False)))
        return Sample([*tokens, *ending], len(ending) - shared)

    def check(self, task: str, length: int, depth: float, seed: int) -> None:
        """Raises where a sample has no room for text."""
        self._parts(task, length, random.Random(f"{task} {length} {depth} {seed}"))

    def _parts(
        self, task: str, length: int, draw: random.Random
    ) -> tuple[list[int], list[list[int]], list[list[int]], list[int], list[int], int]:
        """Tokens of the opening, the facts that are asked for, other facts, the ending without and with its answer; and
        how many tokens are left for the text."""
        prompt = self._prompt(task, draw)
        before, between = self._frame
        opening = self._encode([before + INTRO])[0]
        asks = prompt.question + between + prompt.begins
        question, ending = self._encode([asks, f"{asks} {prompt.answer}"])
        asked, others = self._encode(prompt.asked), self._encode(prompt.others)
        room = length - sum(map(len, (opening, ending, *asked, *others)))
        if room < 1:
            raise SystemExit(f"length {length} is too short for the task {task!r}; give at least {length - room + 1}.")
        return opening, asked, others, question, ending, room

    @cached_property
    def _lines(self) -> list[list[int]]:
        """The tokens of each line of the text."""
        lines = [line for line in self._encode(self.haystack.splitlines(keepends=True)) if line]
        if not lines:
            raise SystemExit("The tokenizer makes no tokens of the haystack; give another text, or python_topics.")
        return lines

    @cached_property
    def _frame(self) -> tuple[str, str]:
        """What stands before the text, and between the question and the answer."""
        if self.chat:
            message = [{"role": "user", "content": "(text)"}]
            if not self.tokenizer.chat_template:
                raise SystemExit("chat is set, but the tokenizer has no chat template; leave it out.")
            asked = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            before, between = asked.split("(text)")
            return before, between
        return first_token(self.tokenizer), "\nAnswer: "

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def _text(self, room: int, draw: random.Random) -> list[list[int]]:
        """Lines of the haystack from anywhere in it, of `room` tokens together."""
        lines, left, line = [], room, draw.randrange(len(self._lines))
        while left:
            lines.append(self._lines[line % len(self._lines)][:left])
            left, line = left - len(lines[-1]), line + 1
        return lines

    @staticmethod
    def _hide(lines: list[list[int]], hidden: list[tuple[float, list[int]]]) -> Iterator[list[int]]:
        """Lines and facts in turn; a fact stands before the line that holds its place."""
        waiting, end = deque(hidden), 0
        for line in lines:
            end += len(line)
            while waiting and waiting[0][0] < end:
                yield waiting.popleft()[1]
            yield line
        yield from (fact for _, fact in waiting)

    def _prompt(self, task: str, draw: random.Random) -> Prompt:
        """What a sample hides and asks."""

        def number() -> str:
            return "".join(draw.choices("0123456789", k=self.digits))

        if task == "variables":
            names = ["".join(draw.sample(ascii_uppercase, 4)) for _ in range(self.facts)]
            value = number()
            asked = [f"VAR {names[0]} = {value}.\n"]
            asked += [f"VAR {name} = VAR {before}.\n" for before, name in pairwise(names)]
            begins = f"The variables with the value {value} are"
            return Prompt(asked, [], f"\nQuestion: Which variables have the value {value}?", begins, ", ".join(names))
        keys = draw.sample(KEYS, self.facts)
        values = [number() for _ in range(self.facts if task == "multivalue" else 1)]
        asked = [FACT.format(key=keys[0], value=value) for value in values]
        others = [FACT.format(key=key, value=number()) for key in keys[1:]] if task == "multikey" else []
        question = f"\nQuestion: What is the secret number of the {keys[0]}?"
        return Prompt(asked, others, question, f"The secret number of the {keys[0]} is", ", ".join(values))
