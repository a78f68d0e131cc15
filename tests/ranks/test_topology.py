"""What a run knows of its machines: ranks tell each other their hosts once, and measure nothing."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from hf_burst.errors import ConfigError
from hf_burst.plan import GPU_SLICE_BLOCKS
from hf_burst.ranks.group import ContextGroup
from hf_burst.ranks.host import Topology, neighbours_per_host
from hf_burst.ring.resources import resources_of
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
CPU = torch.device("cpu")


def test_ranks_on_one_host_are_neighbours() -> None:
    assert neighbours_per_host(["a"]) == 1
    assert neighbours_per_host("aaaa") == 4
    assert neighbours_per_host("aaaabbbb") == 4
    assert neighbours_per_host("abab") == 1
    assert neighbours_per_host("aaaabb") == 2  # blocks of 2 lie on one host each
    assert neighbours_per_host("aab") == 1


def topologies(rank: int, size: int, hosts: str) -> tuple[list[Topology], list[bool], int]:
    """What a rank knows at first, again, and with another number of ranks a host; how often it asked for its host."""
    resources = resources_of(ContextGroup.from_mesh(None))
    resources.close()
    known = [resources.knows_hosts]
    with mock.patch("hf_burst.ring.resources.host_id", return_value=hosts[rank]) as asked:
        found = [resources.topology(CPU), resources.topology(CPU), resources.topology(CPU, 1)]
        with pytest.raises(ConfigError, match=rf"ranks_per_host=3 does not divide the {size} ranks"):
            resources.topology(CPU, 3)
    known.append(resources.knows_hosts)
    resources.close()
    return found, [*known, resources.knows_hosts], asked.call_count


@pytest.mark.parametrize(("hosts", "per_host"), [("aaaa", 4), ("aabb", 2), ("abab", 1), ("aaab", 1)])
def test_ranks_agree_on_their_hosts_once(ranks: Ranks, hosts: str, per_host: int) -> None:
    for found, known, asked in ranks(4).run(topologies, hosts):
        assert found == [Topology(per_host), Topology(per_host), Topology(1)]
        assert known == [False, True, False], "forgotten with the group"
        assert asked == 1


def test_one_process_asks_nobody() -> None:
    resources = resources_of(ContextGroup())
    assert resources.knows_hosts
    assert resources.topology(CPU) == Topology()


def test_slices_have_a_least_size_on_gpus_alone() -> None:
    assert resources_of(ContextGroup()).topology(torch.device("cuda", 0)).slice_blocks == GPU_SLICE_BLOCKS
    assert Topology(8).slice_blocks == 0
