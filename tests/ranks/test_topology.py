"""What a run knows of its machines: ranks tell each other their hosts once, and measure nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from hf_burst.ranks.group import ContextGroup
from hf_burst.ranks.host import host_id, misplaced, neighbours_per_host
from hf_burst.ring.resources import resources_of
from tests.support.ranks import RankPool
from tests.support.shared_memory import forget_resources

Ranks = Callable[[int], RankPool]
CPU = torch.device("cpu")


def test_ranks_on_one_host_are_neighbours() -> None:
    assert neighbours_per_host(["a"]) == 1
    assert neighbours_per_host("aaaa") == 4
    assert neighbours_per_host("aaaabbbb") == 4
    assert neighbours_per_host("abab") == 1
    assert neighbours_per_host("aaaabb") == 2  # blocks of 2 lie on one host each
    assert neighbours_per_host("aab") == 1


def topologies(rank: int, size: int, hosts: str) -> tuple[list[int], list[bool], int]:
    """What a rank knows at first and again; how often it asked for its host."""
    group = ContextGroup.from_mesh(None)
    forget_resources(group)
    resources = resources_of(group)
    known = [resources.knows_hosts]
    with mock.patch("hf_burst.ring.resources.host_id", return_value=hosts[rank]) as asked:
        found = [resources.ranks_per_host(CPU) for _ in range(2)]
    known.append(resources.knows_hosts)
    forget_resources(group)
    return found, [*known, resources_of(group).knows_hosts], asked.call_count


@pytest.mark.parametrize(("hosts", "per_host"), [("aaaa", 4), ("aabb", 2), ("abab", 1), ("aaab", 1)])
def test_ranks_agree_on_their_hosts_once(ranks: Ranks, hosts: str, per_host: int) -> None:
    for found, known, asked in ranks(4).run(topologies, hosts):
        assert found == [per_host, per_host]
        assert known == [False, True, False], "forgotten with the group"
        assert asked == 1


def test_one_process_asks_nobody() -> None:
    resources = resources_of(ContextGroup())
    assert resources.knows_hosts
    assert resources.ranks_per_host(CPU) == 1


@pytest.mark.parametrize(
    ("environments", "equal"),
    [
        (({}, {}), True),
        (({"name": "a"}, {"name": "b"}), False),  # also containers of one host, as NCCL has it
        (({"boot": "1"}, {"boot": "2"}), False),  # hosts from one image, which share a name
        (({"NCCL_HOSTID": "x", "name": "a"}, {"NCCL_HOSTID": "x", "name": "b"}), True),
        (({"NCCL_HOSTID": "x"}, {"NCCL_HOSTID": "y"}), False),
        (({"NCCL_HOSTID": "", "name": "a"}, {"NCCL_HOSTID": "", "name": "b"}), True),  # set, although to nothing
    ],
)
def test_hosts_are_told_apart_as_nccl_does(
    environments: Sequence[dict[str, str]], equal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []
    for environment in environments:
        monkeypatch.delenv("NCCL_HOSTID", raising=False)
        if "NCCL_HOSTID" in environment:
            monkeypatch.setenv("NCCL_HOSTID", environment["NCCL_HOSTID"])
        name = environment.get("name", "same")
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        monkeypatch.setattr("hf_burst.ranks.host._BOOT", tmp_path / environment.get("boot", "none"))
        (tmp_path / "1").write_text("first\n")
        (tmp_path / "2").write_text("second\n")
        found.append(host_id())
    assert (found[0] == found[1]) is equal


@pytest.mark.parametrize(
    ("hosts", "size", "words"),
    [
        ("aaaa", 4, None),
        ("aabb", 1, None),
        ("abab", 1, None),
        ("aabb", 2, None),
        ("aabb", 4, None),
        ("aaaabbbbcccc", 6, None),  # a rank of each has to cross
        ("abab", 2, "Ranks 0 to 1 share a sequence over a, b"),
        ("abab", 4, "--distribution=block"),
        ("abba", 2, "not neighbours"),
        ("aabbaabb", 2, None),  # no group crosses
        ("aabbaabb", 4, "not neighbours"),
        ("aabbaabb", 8, "not neighbours"),
        ("aaabbb", 2, "Ranks 2 to 3 share a sequence over a, b"),
    ],
)
def test_groups_that_cross_hosts_without_need(hosts: str, size: int, words: str | None) -> None:
    problem = misplaced(hosts, size)
    assert problem is None if words is None else words in problem
