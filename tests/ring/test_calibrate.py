"""Measuring a machine: fits with known answers, one result for all ranks, and a cache that may be broken."""

import logging
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_burst.errors import RankMismatchError
from hf_burst.plan import KernelRate, Machine
from hf_burst.plan.machine import cpu
from hf_burst.ranks.group import ContextGroup
from hf_burst.ranks.host import host_id, misplaced
from hf_burst.ring import calibrate as calibration
from hf_burst.ring.calibrate import (
    calibrate,
    default_kernel,
    fit_link,
    machine_for,
    machine_of,
    profile_path,
    ranks_per_host,
)
from tests.support.ranks import RankError

CPU = torch.device("cpu")
SMALL = calibration._Sizes(torch.float32, 4, 2, 64, (16, 32, 64), (1 << 12, 1 << 16, 1 << 20), 1 << 20)


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-4, 3.6e11), (0.0, 1e9), (2e-3, 1e6)])
def test_a_link_that_is_a_line_is_found(latency, bandwidth):
    points = [(size, latency + size / bandwidth) for size in (1 << 16, 1 << 20, 1 << 27)]
    found = fit_link(points)
    assert found == (pytest.approx(latency, abs=1e-12), pytest.approx(bandwidth, rel=1e-6))


def test_noise_makes_no_link_impossible():
    # the larger the faster
    latency, bandwidth = fit_link([(1000, 3.0), (2000, 2.0), (4000, 1.0)])
    assert latency == 0
    assert 1000 / 3 < bandwidth < 4000
    # a line that would meet 0 bytes before 0 seconds
    latency, bandwidth = fit_link([(1000, 0.5), (2000, 2.0), (4000, 8.0)])
    assert latency == 0
    assert 500 < bandwidth < 2000


def test_ranks_on_one_host_are_neighbours():
    assert ranks_per_host(["a"]) == 1
    assert ranks_per_host("aaaa") == 4
    assert ranks_per_host("aaaabbbb") == 4
    assert ranks_per_host("abab") == 1
    assert ranks_per_host("aaaabb") == 2  # blocks of 2 lie on one host each
    assert ranks_per_host("aab") == 1


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
def test_hosts_are_told_apart_as_nccl_does(environments, equal, monkeypatch, tmp_path):
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
        ("abab", 2, "rank 0 on a, rank 1 on b, rank 2 on a"),
        ("abab", 4, "--distribution=block"),
        ("abba", 2, "not neighbours"),
        ("aabbaabb", 2, None),  # no group crosses
        ("aabbaabb", 4, "not neighbours"),
        ("aabbaabb", 8, "not neighbours"),
        ("aaabbb", 2, "ranks 2 to 3 reaches over 2 hosts (3 on a, 3 on b)"),
    ],
)
def test_groups_that_cross_hosts_without_need(hosts, size, words):
    problem = misplaced(hosts, size)
    assert problem is None if words is None else words in problem


def test_where_a_machine_is_remembered(monkeypatch):
    monkeypatch.setenv("HF_HOME", "/somewhere/huggingface")
    path = profile_path("NVIDIA H200", "flash_attn_4", 8, 4)
    assert path.parent == Path("/somewhere/huggingface/hf_burst")
    assert path.name.startswith("NVIDIA_H200-flash_attn_4-8x4-torch")
    assert path.suffix == ".json"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert profile_path("CPU", "cpu_flash", 1, 1).parent == Path("/cache/hf_burst")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profile_path("CPU", "cpu_flash", 1, 1).parent == Path.home() / ".cache" / "hf_burst"
    assert len({profile_path("CPU", *rest) for rest in (("a", 2, 1), ("a", 2, 2), ("a", 4, 2), ("b", 4, 2))}) == 4


@pytest.fixture
def home(monkeypatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_CPU", SMALL)
    return tmp_path


def test_one_process_measures_its_kernel_and_remembers(home):
    group = ContextGroup()
    before = machine_for(group, CPU)
    assert before.source == "built in"
    assert before.rates == cpu().rates
    measured = calibrate(group, CPU, default_kernel(CPU))
    assert measured.source.startswith("measured on 2")
    assert [rate.scores for rate in measured.rates] == [rows * (rows + 1) // 2 * 4 for rows in SMALL.rows]
    assert all(1e6 < speed < 1e13 for rate in measured.rates for speed in (rate.forward, rate.backward))
    assert 1e-8 < measured.launch < 1e-2
    assert 1e7 < measured.memory_bandwidth < 1e13
    assert measured.p2p == cpu().p2p  # nothing to measure
    assert machine_for(group, CPU) == measured == machine_of(CPU, 1, 1)
    (path,) = (home / "hf_burst").iterdir()
    assert Machine.from_json(path.read_text()) == measured
    assert machine_of(CPU, 4, 4).source == "built in"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"device": "CPU"}', "\0"])
def test_a_broken_file_is_ignored_and_said(home, caplog, text):
    path = profile_path("CPU", default_kernel(CPU).capabilities.name, 1, 1)
    path.parent.mkdir()
    path.write_text(text)
    with caplog.at_level(logging.WARNING, logger="hf_burst"):
        assert machine_for(ContextGroup(), CPU).source == "built in"
    assert str(path) in caplog.text
    assert path.read_text() == text


def test_files_that_cannot_be_read_or_written_do_not_stop_anyone(home, caplog):
    path = profile_path("CPU", default_kernel(CPU).capabilities.name, 1, 1)
    path.mkdir(parents=True)  # reading and replacing it fail, whoever the user is
    with caplog.at_level(logging.WARNING, logger="hf_burst"):
        assert machine_for(ContextGroup(), CPU).source == "built in"
        assert calibrate(ContextGroup(), CPU, default_kernel(CPU)).source.startswith("measured")
    assert "ignores what it had measured" in caplog.text
    assert "cannot remember" in caplog.text


def measure_on_ranks(rank: int, size: int, home: str, hosts: str, speeds: tuple[float, ...]) -> dict[str, Any]:
    """Calibrates, with a kernel that looks `speeds[rank]` times as fast and a name for the host of every rank."""
    os.environ["HF_HOME"] = f"{home}/{rank}"
    group = ContextGroup.from_mesh(None)
    gathers = mock.Mock(side_effect=dist.all_gather_object)
    alone = calibration._measure_alone

    def measured(*arguments: Any) -> dict[str, Any]:
        own = alone(*arguments)
        own["rates"] = tuple(KernelRate(rate.scores, 1e9 * speeds[rank], 2e9 * speeds[rank]) for rate in own["rates"])
        return own

    with (
        mock.patch.object(calibration, "_CPU", SMALL),
        mock.patch("socket.gethostname", return_value=hosts[rank]),
        mock.patch.object(calibration, "_measure_alone", measured),
    ):
        machine = calibrate(group, CPU, default_kernel(CPU))
        with mock.patch.object(dist, "all_gather_object", gathers):
            later = machine_for(group, CPU)
    files = sorted(path.name for path in Path(home, str(rank)).rglob("*"))
    return {
        "machine": machine.to_json(),
        "later": later.to_json(),
        "collectives": gathers.call_count,
        "files": files,
    }


def test_all_ranks_are_told_of_the_slowest(ranks, tmp_path):
    results = ranks(2).run(measure_on_ranks, str(tmp_path), "aa", (1.0, 0.25))
    assert len({result[key] for result in results for key in ("machine", "later")}) == 1
    machine = Machine.from_json(results[0]["machine"])
    assert [(rate.forward, rate.backward) for rate in machine.rates] == [(0.25e9, 0.5e9)] * 3
    assert machine.ranks_per_host == 2
    assert machine.p2p != cpu().p2p
    assert 1e6 < machine.p2p.bandwidth < 1e12
    assert 0 <= machine.p2p.drag <= 1
    assert machine.between_hosts == cpu().between_hosts
    # the file lies where rank 0 looks, and rank 1 is told what it says; one collective
    assert len(results[0]["files"]) == 2
    assert results[1]["files"] == []
    assert all(result["collectives"] == 1 for result in results)


def test_hosts_are_measured_apart(ranks, tmp_path):
    machine = Machine.from_json(ranks(2).run(measure_on_ranks, str(tmp_path), "ab", (1.0, 1.0))[0]["machine"])
    assert machine.ranks_per_host == 1
    assert machine.p2p == cpu().p2p
    assert machine.between_hosts != cpu().between_hosts
    four = Machine.from_json(ranks(4).run(measure_on_ranks, str(tmp_path / "four"), "aabb", (1.0,) * 4)[3]["machine"])
    assert four.ranks_per_host == 2
    assert four.p2p != cpu().p2p
    assert four.between_hosts != cpu().between_hosts


def fail_on_one(rank: int, size: int) -> None:
    broken = mock.Mock(side_effect=MemoryError("no memory for the measurement"))
    with mock.patch.object(calibration, "_CPU", SMALL):
        if rank == 1:
            with mock.patch.object(calibration, "_measure_alone", broken):
                calibrate(ContextGroup.from_mesh(None), CPU, default_kernel(CPU))
        calibrate(ContextGroup.from_mesh(None), CPU, default_kernel(CPU))


def test_a_rank_that_cannot_measure_stops_all(ranks):
    with pytest.raises(RankError) as raised:
        ranks(2).run(fail_on_one, timeout=60)
    other, own = raised.value.errors
    assert isinstance(own, MemoryError)
    assert isinstance(other, RankMismatchError)
    assert "no memory for the measurement" in str(other)
