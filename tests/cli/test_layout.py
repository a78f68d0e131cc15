"""`hf-burst layout`: its picture is the mask, its numbers are those of the plan, and what cannot be is said."""

import re

import numpy as np
import pytest

from hf_burst.cli import layout, main
from hf_burst.plan import Mask, make_plan, make_sharding
from tests.support.oracle import admitted_pairs


@pytest.mark.parametrize(("ranks", "hosts"), [(3, 1), (4, 2)])
@pytest.mark.parametrize("chunking", ["zigzag", "contiguous"])
@pytest.mark.parametrize(
    ("causal", "window", "documents"),
    [(True, None, ()), (False, None, (0, 5, 47)), (True, 6, ()), (True, None, (0, 1, 2, 20, 33, 47)), (False, 3, ())],
)
def test_the_picture_of_a_plan_is_its_mask(monkeypatch, causal, window, documents, chunking, ranks, hosts):
    """Each admitted pair is that of the rank that holds its query."""
    sharding = make_sharding(47, ranks, chunking)
    plan = make_plan((Mask(47, causal, window, documents),), sharding, hosts=hosts)
    monkeypatch.setattr(layout, "_POINTS", 47)
    found = np.array([line.split() for line in layout.picture(plan).splitlines()[1:]])
    admitted = np.array(admitted_pairs(47, causal, window, documents or (0, 47)))
    owners = np.array([str(sharding.owner(token)) for token in range(47)])
    assert np.array_equal(found, np.where(admitted, owners[:, None], "."))
    assert [sum(own) for own in layout.steps_of(plan)] == [int((found == str(rank)).sum()) for rank in range(ranks)]


def test_a_layout_is_told_and_drawn(capsys):
    words = ["layout", "--documents", "300", "1700", "96", "2000", "--ranks", "4", "--schedule", "kv_ring"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert told.startswith("4,096 tokens in 4 documents over 4 ranks, 4 a host, by kv_ring: asked for\n")
    assert "3,496,656 pairs of 4,096 tokens; the busiest rank has 9.9% more than an even share." in told
    assert "Step by step, each as long as its busiest rank, it is 20.0% more." in told
    assert re.search(r"^0 +1024 +27.5% +0: 21%  1: 25%  2: 27%  3: 27% +0-511, 3584-4095$", told, re.MULTILINE)
    picture = told.splitlines()[-32:]
    assert picture[0] == "  0" + " ." * 31
    assert picture[-1] == "  " + ". " * 16 + " ".join("0" * 16)


def test_ranks_that_exchange_heads_share_what_they_hold(capsys):
    assert main(["layout", "--ranks", "4", "--kv-heads", "2"]) == 0
    told = capsys.readouterr().out
    assert "by ulysses_2+kv_ring: 2 ranks of one host divide the 32 query and 2 key heads" in told
    assert "2 neighbouring ranks exchange heads: each computes what they hold, for its own heads." in told
    assert [line.split()[2] for line in told.splitlines()[2:6]] == ["25.0%"] * 4
    assert main(["layout", "--length", "65536", "--ranks", "1"]) == 0
    assert "the busiest rank has 0.0% more" in capsys.readouterr().out


def test_documents_that_stay_whole(capsys):
    assert main(["layout", "--documents", "7000", "20000", "13000", "--ranks", "2", "--chunking", "documents"]) == 0
    told = capsys.readouterr().out
    assert "documents mostly stay on their ranks: a rank needs 0% of the others' keys" in told
    lines = told.splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["0", "20000"], ["1", "20000"]]
    assert all("0: 100%" in line for line in lines[2:4]), "nothing is fetched"


def test_steps_over_hosts_follow_each_other(capsys):
    assert main(["layout", "--ranks", "4", "--ranks-per-host", "2", "--schedule", "kv_ring", "--mask", "full"]) == 0
    told = capsys.readouterr().out
    assert "4 ranks, 2 a host" in told
    assert told.count("0: 25%  1: 25%  2: 25%  3: 25%") == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--documents", "10", "20", "--length", "64"], "have 30 tokens together and --length is 64; give one"),
        (["--documents", "10", "0"], "(0, 10, 10) do not fit a sequence of 10 tokens"),
        (["--length", "3"], "too short for 4 ranks"),
        (["--length", "0"], "at least 1 token, got length=0"),
        (["--ranks", "0"], "--ranks is 0; it must be 1 to 256"),
        (["--ranks", "1000"], "--ranks is 1000; it must be 1 to 256"),
        (["--ranks-per-host", "3"], "4 ranks do not lie on hosts of 3 each"),
        (["--window", "-2"], "window=-2 is negative; give the tokens"),
        (["--q-heads", "8", "--kv-heads", "3"], "8 query heads cannot share 3 key heads"),
        (["--schedule", "ulysses_3+burst"], "--schedule ulysses_3+burst cannot run"),
        (["--schedule", "spiral"], "no schedule 'spiral'"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(words, said, capsys):
    assert main(["layout", *words]) == 1
    told = capsys.readouterr()
    assert said in told.err
    assert told.out == ""


def test_one_rank_of_a_launch_tells_the_layout(monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main(["layout"]) == 0
    assert capsys.readouterr().out == ""
