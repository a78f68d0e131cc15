"""Where a thread stands, seen from another one."""

import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from unittest import mock

import pytest

from hf_burst.ranks.watch import stack


@pytest.fixture
def collecting() -> Iterator[None]:
    yield
    gc.enable()


def waits(over: threading.Event) -> None:
    over.wait(30)


def test_the_line_of_the_user_is_found() -> None:
    over = threading.Event()
    thread = threading.Thread(target=waits, args=(over,))
    thread.start()
    try:
        stand = stack.stand_of(thread.ident or 0)
    finally:
        over.set()
        thread.join()
    assert stand.line.startswith("test_stack.py:")
    assert stand.line.endswith(", in waits")
    assert stack.stand_of(0) == stack.Stand(), "a thread that has ended"


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_frames_are_walked(collects: bool, collecting: None) -> None:
    """A collection in their middle crashes Python 3.11."""
    seen: list[bool] = []

    def frames() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        return current()

    def walk(frame: FrameType | None) -> stack.Stand:
        seen.append(gc.isenabled())
        raise KeyError("provoked")

    current = sys._current_frames
    (gc.enable if collects else gc.disable)()
    with mock.patch.object(sys, "_current_frames", frames):
        stack.stand_of(threading.get_ident())
        with mock.patch.object(stack, "_stand", walk), pytest.raises(KeyError):
            stack.stand_of(threading.get_ident())
    assert seen == [False] * 3
    assert gc.isenabled() is collects
