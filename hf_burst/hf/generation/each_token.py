"""Messages between ranks after each token: whether tokens agree, whether to stop, and errors of single ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ...errors import LostRankError, RankMismatchError
from ...ranks.group import ContextGroup
from ..parts.key_cache import same_tokens
from ..sharded_cache import ShardedCache

_NEVER: dict[Any, int] = {MaxLengthCriteria: 2**62, EosTokenCriteria: -1}  # values by which they never stop


class EachToken(StoppingCriteria):
    """Stops all ranks when the first rank's criteria say so. An error of a streamer, criterion or logits processor on
    one rank is raised on all. Every rank makes one."""

    def __init__(
        self, criteria: Sequence[StoppingCriteria], group: ContextGroup, device: torch.device, cache: ShardedCache
    ) -> None:
        self.criteria, self.group, self.device = StoppingCriteriaList(criteria), group, device
        self.error: BaseException | None = None  # this rank's error, unknown to the others
        self.length = 0
        self.cache = cache
        self.compared = cache.get_seq_length()  # cache length at the last comparison of tokens
        cache.compares = not cache.is_read  # questions to a document are compared before their pass
        ends: Any = next((each for each in criteria if hasattr(each, "eos_token_id")), None)
        kinds = [kind for kind in _NEVER if kind in map(type, criteria)]
        self.stops, pads, kinds = group.gather((bool(criteria), ends is not None, kinds), device, "generate")[0]
        self.in_place = [kind(_NEVER[kind]) for kind in kinds]  # a user's criterion replaces generate's own of its type
        if pads:  # generate pads finished rows only if this attribute exists
            self.eos_token_id = getattr(ends, "eos_token_id", None)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        done = torch.zeros(len(input_ids), dtype=torch.uint8, device=self.device)
        if self.group.rank == 0 and self.stops:
            self.note(lambda: done.copy_(self.criteria(input_ids, scores, **kwargs)))
        self._compare(input_ids[:, self.length :])
        self.length = input_ids.shape[1]
        if self.stops and self.group.size > 1:
            with self.group.messages():
                torch.distributed.broadcast(done, self.group.members[0], group=self.group.process_group)
        return done.bool().to(input_ids.device)

    def note(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls a user's function. Its error is kept until all ranks hear of it, and prevents further calls."""
        if self.error is None:
            try:
                function(*args)
            except BaseException as problem:  # including KeyboardInterrupt
                self.error = problem

    def end_others(self, problem: BaseException, begun: bool) -> None:
        """Tells the other ranks of an error between two passes, or of an interrupt anywhere.

        If no pass has `begun`, the others wait before the prompt is read. Between passes they wait where tokens are
        compared: before the pass of questions to a document, after any other. Within a pass, that pass is ended.
        """
        cache = self.cache
        if problem is self.error or isinstance(problem, RankMismatchError | LostRankError) or self.group.broken:
            return
        if not begun and not cache.is_read:
            self.group.agree({}, problem, self.device, doing="generate")
        elif not cache.is_read or cache.is_within_pass:
            if not isinstance(problem, Exception):
                self.group.interrupted(problem)
        elif not cache.compares or cache.get_seq_length() > self.compared:
            self.error = problem
            self._compare(torch.zeros(1, 0, dtype=torch.int64, device=self.device))
        else:
            self.group.interrupted(problem)

    def end(self) -> None:
        """Raises any rank's error on all ranks, after the last token."""
        self.cache.compares = False
        self.group.agree({}, self.error, self.device, doing="generate")

    def _compare(self, tokens: Tensor) -> None:
        self.compared, self.cache.compares = self.cache.get_seq_length(), True
        if not same_tokens(self.group, {"input_ids": tokens.to(self.device)}, self.error is not None):
            self.end()


class OwnStreamer(BaseStreamer):
    """A user's streamer, on the first rank. It gets the `question` instead of the first tokens, a document and it."""

    def __init__(self, streamer: BaseStreamer, each: EachToken, question: Tensor | None) -> None:
        self.streamer, self.note = streamer, each.note
        self.question = None if question is None else question.cpu()

    def put(self, value: Tensor) -> None:
        first, self.question = self.question, None
        self.note(self.streamer.put, value if first is None else first)

    def end(self) -> None:
        self.note(self.streamer.end)
