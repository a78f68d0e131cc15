"""Runs users' functions of a trainer on the first rank of a group, for all of its ranks.

The other ranks wait for the result. If the function makes the model generate, they take part.
"""

import asyncio
import functools
import inspect
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...errors import BatchError
from ...ranks.group import ContextGroup


class ToolError(Exception):
    """The error text of a tool on the first rank, which TRL shows to the model."""


class FirstRank:
    """The first rank of a group, from the view of all ranks.

    Args:
        group ([`ContextGroup`]): The group.
        device (`torch.device`): The device for communication.
    """

    def __init__(self, group: ContextGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.calls: dict[str, Callable[..., Any]] = {}  # calls by users' functions that all ranks run
        self.later: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []  # calls for after the function
        self.leads = 0  # users' functions that run on the first rank, as far as this rank knows
        self.problem: BaseException | None = None  # an error of ranks, which TRL takes for one of a tool
        self.turn = threading.Lock()  # held by the user's thread whose call all ranks run
        # a lock for each event loop, which keeps the ends of async functions in order
        self.orders = WeakKeyDictionary[Any, asyncio.Lock]()

    def once(
        self, function: Callable[..., Any], given: Callable[[dict[str, Any]], dict[str, Any]] = dict, tool: bool = False
    ) -> Callable[..., Any]:
        """Wraps a user's function so that only the first rank calls it. Async calls overlap, and end in order.

        Args:
            function (callable): The function; other ranks do not call it.
            given (callable, *optional*): Changes its keyword arguments on all ranks.
            tool (`bool`, defaults to `False`): Whether TRL continues after its errors.
        """
        name = getattr(function, "__name__", type(function).__name__)

        def end(run: Callable[[], Any]) -> Any:
            if not tool:
                return self.result(run, name)
            try:
                result, problem = self.result(functools.partial(_shown, run), name)
            except BaseException as error:
                self.problem = error
                raise
            if problem is not None:
                raise ToolError(problem)
            return result

        def call(*args: Any, **kwargs: Any) -> Any:
            run = functools.partial(function, *args, **given(kwargs))
            return run() if self.leads else end(run)

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            run = functools.partial(function, *args, **given(kwargs))
            order = self.orders.setdefault(asyncio.get_running_loop(), asyncio.Lock())
            if self.group.rank:
                async with order:
                    return end(run)
            cancelled: list[BaseException] = []

            async def lead() -> Any:
                self.leads += 1
                try:
                    return await run()
                finally:
                    self.leads -= 1

            def result() -> Any:
                if cancelled:
                    raise cancelled[0]
                return answer.result()

            async def end_in_turn() -> Any:
                async with order:
                    await asyncio.wait([answer])
                    return end(result)

            answer = asyncio.ensure_future(lead())
            turn = asyncio.ensure_future(end_in_turn())
            try:
                return await asyncio.shield(turn)
            except asyncio.CancelledError as problem:  # the other ranks wait for the end of this call
                cancelled.append(problem)
                answer.cancel()
                return await turn

        return functools.wraps(function)(call_async if _is_async(function) else call)

    def result(self, run: Callable[[], Any], doing: str, alone: bool = True) -> Any:
        """Returns the first rank's result of `run` on all ranks, and gives them its random state. Its error ends all
        ranks, and so does an earlier one that a tool loop has caught.

        Args:
            run (callable): A function without arguments.
            doing (`str`): Its name, for errors on other ranks.
            alone (`bool`, defaults to `True`): Whether only the first rank runs it; the others then join its calls.
        """
        self.check()
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
            except BaseException as problem:  # including KeyboardInterrupt
                error = problem
            self.leads -= alone
        later = self.later
        self.later = []
        while True:
            name, content = self._send(written, doing, error)
            if not name:
                break
            try:
                self._call(name, *content[0], **content[1])
            except BaseException as problem:  # the first rank has this error, too, and decides what follows
                if self.group.broken:
                    raise
                error = None if isinstance(problem, Exception) else problem
        if self.group.rank:
            result, later, state = content
            torch.set_rng_state(state)
        for name, args, kwargs in later:
            self.calls[name](*args, **kwargs)
        return result

    def after(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Schedules one of [`calls`] on all ranks for after the user's function has returned."""
        self.later.append((name, args, kwargs))

    def check(self) -> None:
        """Raises the error of ranks that a tool loop has caught."""
        if self.problem is not None:
            raise self.problem

    def together(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Runs one of [`calls`], on all ranks if a user's function on the first rank makes it."""
        self.check()
        if not self.leads:
            return self.calls[name](*args, **kwargs)
        with self.turn:
            self._send(self._packed(name, (args, kwargs)), name)
            return self._call(name, *args, **kwargs)

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a call on all ranks, then raises any rank's error on all of them."""
        result = None
        error: BaseException | None = None
        self.leads += 1
        try:
            result = self.calls[name](*args, **kwargs)
        except BaseException as problem:  # including KeyboardInterrupt
            error = problem
        self.leads -= 1
        self.group.agree({"call": "end"}, error, self.device, doing=name)
        return result

    def _send(self, written: bytes, doing: str, error: BaseException | None = None) -> tuple[str, Any]:
        """Returns the first rank's message on all other ranks. Raises on all ranks if one of them has an error."""
        sent = self.group.first_says(written, self.device, doing, error)
        return _unpacked(sent, self.device) if self.group.rank else ("", None)

    def _packed(self, name: str, content: tuple[Any, ...]) -> bytes:
        """Pickles the name of a call and its objects (rows, images, tensors), and checks that they can be restored.

        Raises:
            BatchError: If an object cannot be sent, such as a streamer or an open file.
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
    """Returns whether a call returns a coroutine, for the forms that TRL knows."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)


def _shown(run: Callable[[], Any]) -> tuple[Any, str | None]:
    """Returns what TRL shows to the model: a tool's result, or its error."""
    try:
        result = run()
    except Exception as problem:
        return None, str(problem)
    return result if isinstance(result, list) else str(result), None


def _unpacked(written: bytes, device: torch.device) -> Any:
    """Restores the objects, with GPU tensors on this rank's device."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(written), place, weights_only=False)
