"""A prompt longer than a rank may hold answers needles on every rank's share, by a small model that learned to copy."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hf_burst
from tests.support import copying, models
from tests.support.copying import KINDS, PLACES
from tests.support.live_memory import LiveMemory
from tests.support.ranks import RankPool

LENGTH = 701
KEYS_OF_A_TOKEN = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, their size, bytes
OPTIONS = {"max_new_tokens": PLACES, "do_sample": False}


class Limited(LiveMemory):
    """While it is active, a model and tensors of more bytes in all are out of memory."""

    def __init__(self, model: Any, most: float) -> None:
        self.most = most
        super().__init__(*model.parameters())

    def _count(self, tensor: torch.Tensor) -> None:
        super()._count(tensor)
        if self.now > self.most:
            raise torch.OutOfMemoryError(f"{self.now} bytes are more than {self.most:.0f}")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("taught") / "weights.pt"
    copying.teach(path)
    return str(path)


def shares_of(model: Any, size: int) -> list[list[int]]:
    """The positions of a document of `LENGTH` tokens on each rank, as a memory has them."""
    held = hf_burst.remember(model, torch.ones(1, LENGTH, dtype=torch.int64)).layers[0]
    assert held is not None
    shares: list[Any] = [None] * size
    dist.all_gather_object(shares, held.positions[0].tolist())
    return shares


def starts_in(shares: list[list[int]], turn: int) -> torch.Tensor:
    """Where needles begin: each kind wholly on a rank, with `turn` on another one, apart from each other."""
    size, starts = len(shares), list[int]()
    for kind in range(KINDS):
        own = set(shares[(kind + turn) % size])
        taken = {start + place for start in starts for place in range(PLACES)}
        fits = [first for first in own if all(first + place in own - taken for place in range(PLACES))]
        starts.append(sorted(fits)[len(fits) * (kind + 1) // (KINDS + 1)])
    return torch.tensor([starts])


def without(memory: hf_burst.Document, rank: int, lost: int) -> hf_burst.Document:
    """A memory of which one rank has lost the values."""
    layers = [replace(keys, values=keys.values.clone()) for keys in memory.layers if keys is not None]
    for keys in layers:
        keys.values.mul_(float(rank != lost))
    return replace(memory, layers=tuple(layers))


class Found(NamedTuple):
    """What a rank found: the kinds of needles that all ranks but the first one miss, and those that all find, for each
    turn; the bytes of keys on this rank, its tokens of the document, and the most bytes that it held."""

    missed: list[set[int]]
    found: list[list[int]]
    keys: int
    tokens: int
    peak: int


def found_under(rank: int, size: int, weights: str, most: float) -> Found:
    """Asks for needles, with each kind on every rank in turn, where ranks may hold so many bytes."""
    model, generator = models.patch(copying.taught(weights)), torch.Generator().manual_seed(7)
    shares, asked = shares_of(model, size), copying.questions()
    lost_ones, found_ones, keys, peak = list[set[int]](), list[list[int]](), 0, 0
    for turn in range(size):
        needles, starts = copying.needles_of(1, generator), starts_in(shares, turn)
        document = copying.text_with(needles, starts, LENGTH, generator)
        prompts = torch.cat([document.expand(KINDS, -1), asked], 1)
        wanted = model.generate(prompts, **OPTIONS)
        with Limited(model, most) as limited:
            memory = hf_burst.remember(model, document)
            answers = hf_burst.generate(model, asked, document=memory, **OPTIONS)
            whole = [hf_burst.generate(model, prompt[None], **OPTIONS) for prompt in prompts]
        assert torch.equal(answers, wanted[:, LENGTH:])
        assert torch.equal(torch.cat(whole), wanted)
        found_ones.append([kind for kind in range(KINDS) if torch.equal(answers[kind, 1:], needles[0, kind])])
        rest = hf_burst.generate(model, asked, document=without(memory, rank, 0), **OPTIONS)
        lost_ones.append({kind for kind in range(KINDS) if not torch.equal(rest[kind, 1:], needles[0, kind])})
        keys, peak = memory.nbytes, max(peak, limited.peak)
    return Found(lost_ones, found_ones, keys, len(shares[rank]), peak)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(2, marks=pytest.mark.full),
        pytest.param(3, marks=pytest.mark.full),
        pytest.param(4, marks=pytest.mark.full),
    ],
)
def test_needles_on_every_rank(ranks: Callable[[int], RankPool], weights: str, size: int) -> None:
    model = copying.taught(weights)
    prompt = torch.ones(1, LENGTH + 1, dtype=torch.int64)
    with LiveMemory(*model.parameters()) as whole:
        held = whole.now
        model.generate(prompt, **OPTIONS)
    most = held + 1.5 * (whole.peak - held) / size  # a memory and a prompt are held at once
    with pytest.raises(torch.OutOfMemoryError), Limited(model, most):
        model.generate(prompt, **OPTIONS)
    results = ranks(size).run(found_under, weights, most)
    of_first = [{kind for kind in range(KINDS) if (kind + turn) % size == 0} for turn in range(size)]
    for found in results:
        assert found.found == [[*range(KINDS)]] * size, "wherever they stand"
        assert all(kinds <= missed for kinds, missed in zip(of_first, found.missed, strict=True)), (
            "by keys of their rank"
        )
        assert found.keys == found.tokens * KEYS_OF_A_TOKEN
        assert found.peak <= most
    tokens = [found.tokens for found in results]
    assert sum(tokens) == LENGTH
    assert max(tokens) <= LENGTH // size + 2


def steps(model: Any) -> list[torch.Tensor]:
    """The weights after two steps of training."""
    trained = DistributedDataParallel(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(9)
    for _ in range(2):
        trained(**copying.batch_of(1, 96, generator)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def trained_after_answers(rank: int, size: int, weights: str) -> None:
    """Training has the same bits after answers and without, by DDP."""
    plain, answering = (hf_burst.patch_model(copying.taught(weights)) for _ in range(2))
    document = torch.ones(1, LENGTH, dtype=torch.int64)
    memory = hf_burst.remember(answering, document)
    hf_burst.generate(answering, copying.questions(), document=memory, **OPTIONS)
    hf_burst.generate(answering, document, num_beams=2, **OPTIONS)
    for own, other in zip(steps(answering), steps(plain), strict=True):
        assert torch.equal(own, other)


@pytest.mark.slow
def test_training_after_answers(ranks: Callable[[int], RankPool], weights: str) -> None:
    ranks(3).run(trained_after_answers, weights)
