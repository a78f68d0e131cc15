"""Scores of a patched model whose sequences are shared by several processes; every process gets all of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, zip_longest
from typing import Any, NamedTuple

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from datasets import Dataset
from needles import first_token
from transformers import PreTrainedTokenizerBase

import hf_burst

FIRST_BIN = 16  # tokens


class Score(NamedTuple):
    """How a model scores an answer."""

    log_likelihood: float  # of all its tokens together, in nats
    greedy: bool  # whether greedy decoding would write it: each token has the highest score


@dataclass(frozen=True)
class Cell:
    """One square of the heat map."""

    task: str  # the recall task
    length: int  # tokens of the texts
    depth: float  # where the fact stands, 0 to 1
    log_likelihood: float  # the mean log-likelihood of an answer, in nats
    right: float  # share of the answers that greedy decoding would write
    samples: int  # how many texts


class Groups:
    """The processes: those of a group share each text, and groups share the texts out."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.size = accelerator.parallelism_config.burst_size or 1
        self.count = self.accelerator.num_processes // self.size
        self.index, self.place = divmod(self.accelerator.process_index, self.size)

    def own(self, items: Sequence[Any]) -> list[tuple[Any, bool]]:
        """Those that this group does, each with whether its result counts.

        Every group gets as many, for sharded weights are gathered by all groups together. Where there are too few, the
        first item is done once more, and that result does not count.
        """
        numbers = range(self.index, -(-len(items) // self.count) * self.count, self.count)
        return [(items[number], True) if number < len(items) else (items[0], False) for number in numbers]

    def gather(self, results: list[Any]) -> list[Any]:
        """The results of all groups, on every process."""
        return gather_object(results if self.place == 0 else [])

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over groups, on every process."""
        return self.accelerator.reduce(tensor) / self.size


@torch.no_grad()
def score_answers(model: torch.nn.Module, rows: Sequence[list[int]], answers: Sequence[int]) -> list[Score]:
    """Scores the answers that end some rows, which all have as many tokens: the last ones of a row, so many each. The
    logits of the answers alone are computed. All processes of a group call it with the same rows."""
    ids, most = torch.tensor(rows, device=model.device), max(answers)
    logits = model(input_ids=ids[:, :-1], logits_to_keep=most, use_cache=False).logits.double()
    targets = ids[:, -most:]
    likelihoods = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    right = logits.argmax(-1) == targets
    rows_of = zip(likelihoods, right, answers, strict=True)
    return [Score(float(values[-size:].sum()), bool(hits[-size:].all())) for values, hits, size in rows_of]


@dataclass(frozen=True)
class PositionLosses:
    """The loss by the position in the document."""

    edges: list[int]  # bin `i` holds the positions from `edges[i]` to before `edges[i + 1]`
    losses: list[float]  # the mean loss of each bin, in nats per token; its exponential is the perplexity
    tokens: list[int]  # how many tokens each bin has

    @property
    def middles(self) -> list[float]:
        """The geometric middle of each bin."""
        return [(first * end) ** 0.5 for first, end in pairwise(self.edges)]

    def mean(self, first: int, end: int) -> float:
        """The mean loss of the bins that lie within some positions."""
        inside = [first <= a and b <= end for a, b in pairwise(self.edges)]
        chosen = [(loss, size) for loss, size, is_in in zip(self.losses, self.tokens, inside, strict=True) if is_in]
        return sum(loss * size for loss, size in chosen) / sum(size for _, size in chosen)


def position_edges(length: int, marks: Iterable[int] = ()) -> list[int]:
    """Edges of bins that double every second time, from the first predicted token to `length`, and at the marks."""
    edges, edge = {1, length, *marks}, float(FIRST_BIN)
    while edge < length / 2**0.25:  # a last bin that is not too small
        edges.add(round(edge))
        edge *= 2**0.5
    return sorted(edges)


def text_windows(
    texts: Iterable[str | None], tokenizer: PreTrainedTokenizerBase, length: int, most: int
) -> tuple[list[list[int]], int]:
    """At most `most` pieces of `length` tokens, each of which lies in one text: the first of every text in turn, then
    the second, and so on. Texts that hold nothing are left out.

    Returns:
        The pieces, and of how many texts they are.

    Raises:
        SystemExit: If no text is as long.
    """
    first = tokenizer(first_token(tokenizer), add_special_tokens=False)["input_ids"]
    size = length - len(first)

    def pieces(text: str) -> numpy.ndarray:
        tokens = numpy.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=numpy.int32)
        count = min(most, len(tokens) // size)
        return tokens[: count * size].reshape(count, size)

    long = list(islice(filter(len, map(pieces, filter(None, texts))), most))
    if not long:
        raise SystemExit(
            f"No document has {length:,} tokens, the length to evaluate. Give longer ones, or shorter --lengths."
        )
    turns = (piece for turn in zip_longest(*long) for piece in turn if piece is not None)
    return [[*first, *piece.tolist()] for piece in islice(turns, most)], len(long)


@torch.no_grad()
def losses_by_position(
    model: torch.nn.Module, length: int, windows: Sequence[list[int]], groups: Groups, marks: Iterable[int] = ()
) -> PositionLosses:
    """The loss of a patched model by the position in windows of `length` tokens, which the groups share out. No bin
    lies across a mark. All processes call this, with the same windows."""
    edges = position_edges(length, marks)
    bins = torch.bucketize(torch.arange(1, length), torch.tensor(edges[1:]), right=True).to(model.device)
    totals = torch.zeros(2, len(edges) - 1, dtype=torch.float64, device=model.device)
    for window, counts in groups.own(windows):
        ids = torch.tensor([window], device=model.device)
        losses = hf_burst.token_losses(model, {"input_ids": ids, "labels": ids})[0, 1:].double()
        if counts:
            totals[0].index_add_(0, bins, losses)
            totals[1].index_add_(0, bins, torch.ones_like(losses))
    sums, tokens = groups.add(totals).cpu()
    return PositionLosses(edges, (sums / tokens).tolist(), tokens.long().tolist())


def tokens_of(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A row of tokens and labels as a batch."""
    return {key: torch.tensor([rows[0][key]]) for key in ("input_ids", "labels")}


@torch.no_grad()
def loss_of_labels(
    model: torch.nn.Module,
    rows: Dataset,
    groups: Groups,
    collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]] = tokens_of,
) -> tuple[float, int]:
    """The mean loss of the labelled tokens of some rows, in nats, and how many tokens these are. One row is in memory
    at a time. All processes call this, with the same rows."""
    totals = torch.zeros(2, dtype=torch.float64, device=model.device)
    for number, counts in groups.own(range(len(rows))):
        batch = send_to_device(collate([rows[number]]), model.device)
        losses = hf_burst.token_losses(model, batch).double()
        if counts:
            totals += torch.stack([losses.sum(), (batch["labels"][:, 1:] != -100).sum()])
    loss, tokens = groups.add(totals).tolist()
    return loss / tokens, round(tokens)
