"""`hf-burst calibrate`: measures kernel, memory and links in seconds, and remembers them for predicted seconds."""

import argparse

from ..ring.calibrate import calibrate, default_kernel
from .doctor import describe_machine
from .launch import joined


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""
    parser.epilog = "Start it under torchrun or accelerate launch with all ranks that are to share a sequence."


def run(arguments: argparse.Namespace) -> int:
    """Measures on all ranks of this launch and prints the numbers on rank 0; the exit status."""
    with joined() as (group, device):
        machine = calibrate(group, device, default_kernel(device))
        if group.rank == 0:
            print("\n".join(describe_machine(machine, group.size)))
    return 0
