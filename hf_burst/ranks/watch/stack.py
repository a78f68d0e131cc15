"""Where another thread of this process stands: the user's line, and the collective that holds it up."""

import gc
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

# Gloo's numbers count messages between two ranks as well, so they differ between ranks. They still prove something of
# collectives that no rank comes through before all have begun. Out of the others a rank may go on alone.
_MEETING = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "barrier"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
}
_COLLECTIVES = _MEETING | {
    *("all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce"),
    *("scatter", "scatter_object_list"),
}
# DistributedDataParallel calls these from C++. A rank may go on alone out of its broadcasts, but nobody sends messages
# between two ranks over its group, so gloo's numbers tell who has not begun one.
_OF_DDP = {"_distributed_broadcast_coalesced", "_sync_params_and_buffers", "_verify_param_shape_across_processes"}
_walking = threading.RLock()
_LIBRARIES = (f"{Path(__file__).parents[2]}/", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")


@dataclass(frozen=True)
class Stand:
    """Where a thread stands.

    Args:
        line (`str`): The innermost line that is neither of an installed package nor of Python's own, as
            `"train.py:41, in main"`.
        doing (`str`): The collective of torch.distributed that it has called; empty if it stands in none.
        group (`str`): The name of the process group of the collective.
        meets (`bool`): Whether no rank comes through the collective before all have begun it, or numbers of gloo serve.
    """

    line: str = ""
    doing: str = ""
    group: str = ""
    meets: bool = False


def stand_of(thread: int) -> Stand:
    """Where a thread stands now.

    Args:
        thread (`int`): As `threading.get_ident` names it.
    """
    with without_collections():
        return _stand(sys._current_frames().get(thread))


@contextmanager
def without_collections() -> Iterator[None]:
    """No garbage is collected by itself meanwhile, in Python 3.11.

    It may begin to collect while it makes an object of a frame of the running thread; what that calls lets the thread
    go on and leave the frame, and the interpreter crashes. Later versions collect between two instructions alone.

    The thresholds are set, since the running thread may itself switch the collector off and on, as torch does where it
    saves; thresholds that it sets meanwhile are lost. One thread walks at a time: the end of its walk would let another
    one's be interrupted.
    """
    if sys.version_info >= (3, 12):
        yield
        return
    with _walking:
        thresholds = gc.get_threshold()
        try:
            gc.set_threshold(0)
            yield
        finally:
            gc.set_threshold(*thresholds)


def _stand(frame: FrameType | None) -> Stand:
    """Where a thread stands whose innermost frame is given."""
    line = doing = group = ""
    meets, inside = False, True  # only calls of torch.distributed lie further in
    while frame is not None and not line:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if inside and path.endswith(("distributed/distributed_c10d.py", "distributed/c10d_logger.py")):
            if name in _COLLECTIVES:  # an outer one may be made of others
                meets = name in _MEETING
                over = frame.f_locals.get("group") or dist.group.WORLD
                doing, group = f"torch.distributed.{name}", getattr(over, "group_name", "")
        elif inside and name in _OF_DDP and path.endswith(("parallel/distributed.py", "distributed/utils.py")):
            held = frame.f_locals.get("process_group") or frame.f_locals["self"].process_group
            doing, group, meets = "a collective of DistributedDataParallel", held.group_name, True
        else:
            inside = False
            if not path.startswith(_LIBRARIES):
                line = f"{Path(path).name}:{frame.f_lineno}, in {name}"
        frame = frame.f_back
    return Stand(line, doing, group, meets)
