"""What the doctor says of several hosts that do not fit together, each said of the host that it is true for."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread
from unittest import mock

import pytest
import torch.distributed as dist

from hf_burst.cli import hosts
from hf_burst.cli.hosts import Report, by_rank, chosen, obstacles, remarks
from hf_burst.errors import ConfigError
from tests.support.hosts import Network, refusal

ROOT = Path(__file__).parents[2]
INTERFACES = ("lo", "eth0", "eth1", "eth10", "docker0")


def place(host: str, backend: str = "nccl", **changes: object) -> Report:
    one = Report(
        host=host,
        name=host,
        backend=backend,
        facts={},
        interfaces=INTERFACES,
        address="10.0.0.1",
    )
    facts = {"NCCL_DEBUG": "WARN"}
    for kind, usual in (("versions", {"torch": "2.13.0", "transformers": "5.23.0", "trl": ""}), ("environment", {})):
        own = changes.pop(kind, usual)
        assert isinstance(own, dict)
        facts |= own
    return replace(one, facts=facts, **changes)


def texts(*reports: Report) -> list[str]:
    firsts = by_rank(reports)
    return [*obstacles(firsts), *remarks(firsts)]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_nothing_is_said_of_hosts_that_fit(backend):
    assert texts(*(place(host, backend) for host in "aabb")) == []
    assert texts(place("a", backend, address="127.0.0.1", environment={"GLOO_SOCKET_IFNAME": "lo"})) == []
    with_ids = [place(host, backend, environment={"NCCL_HOSTID": host}) for host in "aabb"]
    assert texts(*with_ids) == []
    named = {"NCCL_SOCKET_IFNAME": "^lo,docker", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5"}
    assert texts(*(place(host, backend, environment=named) for host in "aabb")) == []


@pytest.mark.parametrize(
    ("backend", "changes", "words"),
    [
        ("gloo", {"environment": {"GLOO_SOCKET_IFNAME": "lo"}}, "GLOO_SOCKET_IFNAME is lo on b"),
        ("gloo", {"environment": {"GLOO_SOCKET_IFNAME": "eth2"}}, "eth2 on b, where no such interface is up"),
        ("gloo", {"environment": {"GLOO_SOCKET_IFNAME": "eth"}}, "eth on b, where no such interface is up"),
        ("gloo", {"environment": {"GLOO_SOCKET_IFNAME": "eth0,eth2"}}, "eth0,eth2 on b, where no such interface"),
        ("gloo", {"address": "127.0.1.1"}, "name of b has the address 127.0.1.1"),
        ("gloo", {"address": ""}, "name of b has no address"),
        ("gloo", {"address": "::1"}, "name of b has the address ::1"),
        ("nccl", {"environment": {"NCCL_SOCKET_IFNAME": "lo"}}, "NCCL_SOCKET_IFNAME is lo on b"),
        ("nccl", {"environment": {"NCCL_SOCKET_IFNAME": "=eth"}}, "where no such interface is up"),
    ],
)
def test_interfaces_that_no_other_host_reaches(backend, changes, words):
    (found,) = obstacles([place("a", backend), place("b", backend, **changes)])
    assert words in found
    assert "Set " in found


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_hosts_that_have_only_ipv6(backend):
    address = mock.Mock(family=socket.AF_INET6, address="2001:db8::7")
    link, own = (mock.Mock(family=socket.AF_INET6, address=one) for one in ("fe80::1%eth0", "::1"))
    entries = [(0, 0, 0, "", (one, 0, 0, 0)) for one in ("2001:db8::7", "2001:db8::9")]
    has = {"lo": [own], "eth0": [link, address], "eth1": [link]}
    with (
        mock.patch.object(hosts.psutil, "net_if_addrs", return_value=has),
        mock.patch.object(hosts.psutil, "net_if_stats", return_value=dict.fromkeys(has, mock.Mock())),
        mock.patch.object(socket, "getaddrinfo", return_value=entries),
    ):
        one = hosts.report(backend)
    assert one.interfaces == ["eth0", "lo"]
    assert one.address == "2001:db8::7"
    assert texts(*(replace(one, host=host, name=host) for host in "ab")) == []
    named = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    assert texts(*(replace(one, host=host, name=host, facts=named) for host in "ab")) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"versions": {"torch": "2.12.0", "transformers": "5.23.0"}},
            "torch differs: 2.13.0 on a; 2.12.0 on b.",
        ),
        ({"versions": {"torch": "2.13.0"}}, "transformers differs: 5.23.0 on a; nothing on b"),
        ({"versions": {"torch": "2.13.0", "transformers": "5.23.0", "GPU": "H100"}}, "GPUs of one kind"),
        (
            {"versions": {"torch": "2.13.0", "transformers": "5.23.0", hosts._LINKED: "1"}},
            "cards with a link differs: nothing on a; 1 on b. All wait for the host with the fewest",
        ),
        ({"environment": {"NCCL_ALGO": "Ring"}}, "NCCL_ALGO differs: nothing on a; Ring on b. Install or set"),
        ({"environment": {"HF_BURST_SIZE": "2"}}, "HF_BURST_SIZE differs: nothing on a; 2 on b"),
    ],
)
def test_what_differs_between_hosts(changes, words):
    (found,) = remarks([place("a"), place("a"), place("b", **changes), place("b", **changes)])
    assert words in found


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HF_BURST_SIZE": "3"}, "does not divide 4 ranks"),
        ({"HF_BURST_SIZE": "many"}, "does not divide 4 ranks"),
    ],
)
def test_settings_that_are_wrong_everywhere(environment, words):
    found = texts(*(place(host, environment=environment) for host in "aabb"))
    assert all("differs" not in text for text in found)
    assert words in found[0]


def test_hosts_of_one_name_are_told_apart():
    first, second = place("a", name="node"), place("b", name="node", versions={"torch": "2.12.0"})
    assert "torch differs: 2.13.0 on node (rank 0); 2.12.0 on node (rank 1)" in texts(first, second)[0]
    assert hosts.describe(by_rank([first, second])) == "hosts: 2, 1 ranks on node (rank 0), 1 ranks on node (rank 1)"


def test_places_of_ranks():
    assert "different numbers of ranks: 3 on a, 1 on b" in texts(*map(place, "aaab"))[0]
    assert "not neighbours" in texts(*map(place, "abab"))[0]
    assert "Ranks 2 to 3 share" in texts(*(place(host, environment={"HF_BURST_SIZE": "2"}) for host in "aaabbb"))[0]


@pytest.mark.parametrize(
    ("variable", "taken"),
    [
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("^eth1", ["lo", "eth0", "docker0"]),
        ("^=eth1", ["lo", "eth0", "eth10", "docker0"]),
        ("x,eth0", ["eth0"]),
    ],
)
def test_names_are_read_as_nccl_reads_them(variable, taken):
    assert chosen(variable, INTERFACES, "nccl") == taken


def test_cards_with_a_link(tmp_path):
    for card, states in {
        "mlx5_1": ["1: DOWN", "4: ACTIVE"],
        "mlx5_2": ["1: DOWN"],
        "mlx5_0": ["4: ACTIVE"] * 2,
    }.items():
        for port, state in enumerate(states):
            (tmp_path / card / "ports" / str(port)).mkdir(parents=True)
            (tmp_path / card / "ports" / str(port) / "state").write_text(f"{state}\n")
    with mock.patch.object(hosts, "_CARDS", tmp_path):
        assert hosts.report("nccl").facts[hosts._LINKED] == "2"


def test_ranks_meet_in_a_store():
    store, answers = dist.HashStore(), {}

    def meet(rank):
        answers[rank] = hosts.gather(place("ab"[rank]), rank, 2, store)

    threads = [Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[0] == answers[1]
    assert [one.host for one in answers[0]] == ["a", "b"]
    assert texts(*answers[0]) == []


def test_a_rank_that_is_missing_is_named():
    with (
        mock.patch.object(hosts, "_REPORTED", 0.2),
        pytest.raises(ConfigError, match=r"\[1, 2\] of 3"),
    ):
        hosts.gather(place("a"), 0, 3, dist.HashStore())


@pytest.mark.slow
def test_the_doctor_over_two_hosts():
    """Real hosts, of which the second takes its loopback: without the doctor the ranks wait until their time limit."""
    problem = refusal()
    if problem:
        pytest.skip(problem)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    wrong = [{}, {"GLOO_SOCKET_IFNAME": "lo", "HF_BURST_SIZE": "2"}]
    with Network(2) as network:
        launch += ["--master_addr", network.addresses[0], "--master_port", "29500"]
        processes = []
        for host, changes in enumerate(wrong):
            command = network.command(host, [*launch, "--node_rank", str(host), "-m", "hf_burst.cli", "doctor"])
            environment = {**os.environ, "ACCELERATE_USE_CPU": "1", **network.environment(host), **changes}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
        said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert said[0].splitlines()[0] == "hosts: 2, 1 ranks on host0, 1 ranks on host1"
    assert "Not usable: GLOO_SOCKET_IFNAME is lo on host1: no other host reaches it by its loopback." in said[0]
    assert "Check: HF_BURST_SIZE differs: nothing on host0; 2 on host1." in said[0]
    assert "Usable." not in said[0]
    assert said[1] == ""
