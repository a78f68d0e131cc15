"""A thread that asks the store for others, since a lost connection may hold a thread up for long."""

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread

logger = logging.getLogger(__name__)


class Worker:
    """Runs tasks, one after another. It is started early: when the interpreter ends, Python starts no thread."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[tuple[Callable[[], object], Event, Event] | None] = SimpleQueue()
        self.thread = Thread(target=self._run, name="hf_burst worker", daemon=True)
        self.thread.start()

    def within(self, seconds: float, task: Callable[[], object]) -> bool:
        """Whether a task ended well in time."""
        well, over = Event(), Event()
        if self.thread.is_alive():
            self.tasks.put((task, well, over))
            over.wait(seconds)
        return well.is_set()

    def end(self) -> None:
        self.tasks.put(None)

    def _run(self) -> None:
        while True:
            asked = self.tasks.get()
            if asked is None:
                return
            task, well, over = asked
            try:
                task()
                well.set()
            except RuntimeError as problem:
                logger.debug("hf_burst cannot reach the store of the job: %s", problem)
            except Exception:
                logger.exception("hf_burst failed to tell the other ranks where this one stands.")
            over.set()
            del asked, task  # whose owner may go
