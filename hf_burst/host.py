"""Which host a process is on, by what NCCL goes by: so both agree on which ranks reach each other without a network."""

import os
import socket
from pathlib import Path

HOST_VARIABLE = "NCCL_HOSTID"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """The host of this process: equal for two ranks if they are on one.

    This is `NCCL_HOSTID` where it is set, even to nothing. Otherwise it is the host's name and the number of its boot.
    Hosts of one name differ by that number. Containers of one host differ by their names, and NCCL joins them by the
    network. Source: `getHostHashOnce` of NCCL's `src/misc/utils.cc`.
    """
    named = os.environ.get(HOST_VARIABLE)
    if named is not None:
        return named
    try:
        boot = _BOOT.read_text().strip()
    except OSError:  # not on Linux
        boot = ""
    return f"{socket.gethostname()}{boot}"
