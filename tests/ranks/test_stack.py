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
    thresholds = gc.get_threshold()
    yield
    gc.enable()
    gc.set_threshold(*thresholds)


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


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python collects between two instructions alone")
@pytest.mark.parametrize("thresholds", [(700, 10, 10), (0, 5, 5)])
def test_no_garbage_is_collected_while_frames_are_walked(thresholds: tuple[int, int, int], collecting: None) -> None:
    """A collection in their middle crashes Python 3.11. What the running thread does with the collector stays."""
    seen: list[int] = []

    def frames() -> dict[int, FrameType]:
        seen.append(gc.get_threshold()[0])
        gc.disable()  # as torch does where it saves
        return current()

    def walk(frame: FrameType | None) -> stack.Stand:
        seen.append(gc.get_threshold()[0])
        raise KeyError("provoked")

    current = sys._current_frames
    gc.set_threshold(*thresholds)
    with mock.patch.object(sys, "_current_frames", frames):
        stack.stand_of(threading.get_ident())
        with mock.patch.object(stack, "_stand", walk), pytest.raises(KeyError):
            stack.stand_of(threading.get_ident())
    assert seen == [0] * 3
    assert gc.get_threshold() == thresholds
    assert not gc.isenabled()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python collects between two instructions alone")
def test_a_walk_is_not_uncovered_by_the_end_of_another(collecting: None) -> None:
    inside, over = threading.Event(), threading.Event()

    def first() -> None:
        with stack.without_collections():
            inside.set()
            over.wait(30)

    thread, later = threading.Thread(target=first), threading.Thread(target=stack.stand_of, args=(0,))
    thread.start()
    assert inside.wait(30)
    later.start()
    later.join(0.2)
    waited, threshold = later.is_alive(), gc.get_threshold()[0]
    over.set()
    thread.join()
    later.join()
    assert (waited, threshold) == (True, 0)
    assert gc.get_threshold()[0] > 0
