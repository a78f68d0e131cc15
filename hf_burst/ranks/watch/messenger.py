"""A thread that asks the store for others, since a lost connection may hold a thread up for long."""

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread

logger = logging.getLogger(__name__)


class Messenger:
    """Runs errands, one after another. It is started early: when the interpreter ends, Python starts no thread."""

    def __init__(self) -> None:
        self.errands: SimpleQueue[tuple[Callable[[], object], Event, Event] | None] = SimpleQueue()
        self.thread = Thread(target=self._run, name="hf_burst messenger", daemon=True)
        self.thread.start()

    def within(self, seconds: float, errand: Callable[[], object]) -> bool:
        """Whether an errand ended well in time."""
        well, over = Event(), Event()
        if self.thread.is_alive():
            self.errands.put((errand, well, over))
            over.wait(seconds)
        return well.is_set()

    def end(self) -> None:
        self.errands.put(None)

    def _run(self) -> None:
        while True:
            asked = self.errands.get()
            if asked is None:
                return
            errand, well, over = asked
            try:
                errand()
                well.set()
            except RuntimeError as problem:
                logger.debug("hf_burst cannot reach the store of the job: %s", problem)
            except Exception:
                logger.exception("hf_burst failed to tell the other ranks where this one stands.")
            over.set()
            del asked, errand  # whose owner may go
