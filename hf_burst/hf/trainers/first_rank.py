"""What the first rank of a group calls for all of its ranks: functions that users hand in to a trainer.

The others wait for what such a function returns. Where it has the model generate, they take part.
"""

import asyncio
import functools
import inspect
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch

from ...errors import BatchError
from ...ranks.group import ContextGroup


class ToolError(Exception):
    """What a tool raised on the first rank, in its words, which TRL shows to the model."""


class FirstRank:
    """The first rank of a group, as all of its ranks know it.

    Args:
        group ([`ContextGroup`]): The ranks.
        device (`torch.device`): Where they communicate.
    """

    def __init__(self, group: ContextGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.calls: dict[str, Callable[..., Any]] = {}  # that all ranks make where a user's function makes one
        self.later: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []  # those for when the function has returned
        self.leads = 0  # functions of the user's that run on the first rank, as far as this one knows
        self.turn = threading.Lock()  # of one of the user's threads to have all ranks call
        self.order = asyncio.Lock()  # in which async functions end

    def once(
        self, function: Callable[..., Any], given: Callable[[dict[str, Any]], dict[str, Any]] = dict, tool: bool = False
    ) -> Callable[..., Any]:
        """A function of the user's that the first rank calls for all. Async ones run at the same time, and end in turn.

        Args:
            function (callable): It is not called on other ranks.
            given (callable, *optional*): Changes its keyword arguments, on all ranks.
            tool (`bool`, defaults to `False`): Whether TRL goes on behind its errors.
        """
        name = getattr(function, "__name__", type(function).__name__)

        def end(run: Callable[[], Any]) -> Any:
            if not tool:
                return self.told(run, name)
            result, problem = self.told(functools.partial(_shown, run), name)
            if problem is not None:
                raise ToolError(problem)
            return result

        def call(*args: Any, **kwargs: Any) -> Any:
            run = functools.partial(function, *args, **given(kwargs))
            return run() if self.leads else end(run)

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            run = functools.partial(function, *args, **given(kwargs))
            if self.group.rank:
                async with self.order:
                    return end(run)
            self.leads += 1
            answer = asyncio.ensure_future(run())
            async with self.order:
                await asyncio.wait([answer])
                self.leads -= 1
                return end(answer.result)

        return functools.wraps(function)(call_async if _is_async(function) else call)

    def told(self, run: Callable[[], Any], doing: str, alone: bool = True) -> Any:
        """What `run` returns on the first rank, on all ranks, which go on with its random numbers. What it raises there
        ends all ranks.

        Args:
            run (callable): It takes no arguments.
            doing (`str`): Its name, for errors of other ranks.
            alone (`bool`, defaults to `True`): Whether it runs on the first rank only, and others follow in its calls.
        """
        if self.leads and not alone:
            return run()
        result: Any = None
        written = b""
        error: BaseException | None = None
        if not (alone and self.group.rank):
            self.leads += alone
            try:
                result = run()
                if not self.group.rank:
                    written = self._packed("", (result, self.later, torch.get_rng_state()))
            except BaseException as problem:  # also when the user interrupts
                error = problem
            self.leads -= alone
        later = self.later
        self.later = []
        while True:
            name, content = self._tell(written, doing, error)
            if not name:
                break
            try:
                self._call(name, *content[0], **content[1])
            except BaseException as problem:  # the first rank has met an error, too, and says what follows from it
                error = None if isinstance(problem, Exception) else problem
        if self.group.rank:
            result, later, state = content
            torch.set_rng_state(state)
        for name, args, kwargs in later:
            self.calls[name](*args, **kwargs)
        return result

    def after(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Notes one of [`calls`] that all ranks are to make when the user's function has returned."""
        self.later.append((name, args, kwargs))

    def together(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """One of [`calls`], which all ranks make if the first one makes it in a function of the user's."""
        if not self.leads:
            return self.calls[name](*args, **kwargs)
        with self.turn:
            self._tell(self._packed(name, (args, kwargs)), name)
            return self._call(name, *args, **kwargs)

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Makes a call on all ranks, at the end of which the error of one rank is one of all."""
        result = None
        error: BaseException | None = None
        self.leads += 1
        try:
            result = self.calls[name](*args, **kwargs)
        except BaseException as problem:  # also when the user interrupts
            error = problem
        self.leads -= 1
        self.group.agree({"call": "end"}, error, self.device, doing=name)
        return result

    def _tell(self, written: bytes, doing: str, error: BaseException | None = None) -> tuple[str, Any]:
        """What the first rank tells all others. Raises on all ranks if one of them has met an error."""
        told = self.group.first_says(written, self.device, doing, error)
        return _unpacked(told, self.device) if self.group.rank else ("", None)

    def _packed(self, name: str, content: tuple[Any, ...]) -> bytes:
        """The name of a call and any objects, such as rows, images and tensors, as bytes. They can be made anew.

        Raises:
            BatchError: If the other ranks cannot be told of one, such as of a streamer or an open file.
        """
        written = io.BytesIO()
        try:
            torch.save((name, content), written)
        except (AttributeError, TypeError, RuntimeError, pickle.PicklingError) as problem:
            raise BatchError(
                f"What the first rank of a group called or made cannot be told to the others: {problem}. Rollouts "
                "return numbers, text, tensors and images, and give model.generate such arguments only."
            ) from problem
        _unpacked(written.getvalue(), self.device)  # raises here rather than on the other ranks
        return written.getvalue()


def _is_async(function: Any) -> bool:
    """Whether a call returns a coroutine, for the forms that TRL knows."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)


def _shown(run: Callable[[], Any]) -> tuple[Any, str | None]:
    """What TRL shows the model of a tool's result, and of its error."""
    try:
        result = run()
    except Exception as problem:
        return None, str(problem)
    return result if isinstance(result, list) else str(result), None


def _unpacked(written: bytes, device: torch.device) -> Any:
    """The objects, with tensors of another rank's GPU on the one of this rank."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(written), place, weights_only=False)
