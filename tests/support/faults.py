"""Faults in a real training of several CPU processes: how every process ends, and whether the same command goes on.

    python -m tests.support.faults --out recipes/benchmarks/results/faults_2xCPU.json \
        --page recipes/benchmarks/results/faults_2xCPU.md

Each process is a command that runs recipes/finetune_long_document.py as users do. There is no launcher, which would end
the others as soon as one is gone. So their own ends are seen, as those on another host are. After each fault the same
command runs again, and its losses and weights are compared with those of a run without faults, bit by bit. Network
namespaces stand for hosts, where root may make them.
"""

import argparse
import hashlib
import io
import json
import os
import pydoc_data.topics
import re
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]  # runs from a checkout too

if TYPE_CHECKING:
    from transformers import Trainer

    from tests.support.hosts import Network

RECIPE = ROOT / "recipes/finetune_long_document.py"
CHARACTERS = 6000
LIMIT = 15  # seconds after which ranks give up waiting (ddp_timeout)
GRACE = 45.0  # seconds more, in which all processes must have ended
SLOW = 5.0
MARKS = ("<!-- faults: by tests/support/faults.py -->", "<!-- end of faults -->")  # in a page
OPTIONS = {
    "config": ROOT / "recipes/configs/text_cpu.yaml",
    "max_length": 128,
    "max_steps": 12,
    "warmup_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "ddp_timeout": LIMIT,
    "disable_tqdm": "true",
}
NETWORK = {  # what happens to host 1, by programs of Linux; a second one after SLOW seconds
    "network down": ["ip -n {switch} link set port1 down"],
    "network stalls": ["ip -n {switch} link set port1 down", "ip -n {switch} link set port1 up"],
    "packets lost": ["tc -n {switch} qdisc replace dev port1 root tbf rate 20mbit burst 16kb limit 16kb"],
}
ADVICE = re.compile(r" (Look (for|at)|Start the job|If a rank was slow).*")  # how they go on, the same for many


@dataclass(frozen=True)
class Fault:
    """What happens where, to one rank or, by a signal from outside, to all."""

    what: str = "none"
    where: str = "forward"
    rank: int = 1
    step: int = 5  # steps done before
    signal: int = 0  # that all processes get, as by Ctrl-C

    @property
    def name(self) -> str:
        return f"{self.what}, {self.where}, rank {self.rank}" if not self.signal else f"{self.what}, all ranks"


FAULTS = [
    Fault("kill -9", "forward"),
    Fault("kill -9", "backward"),
    Fault("kill -9", "optimizer step"),
    Fault("kill -9", "forward", rank=0),
    Fault("kill -9", "saving", rank=0),
    Fault("kill -9", "saving, before its random state"),
    Fault("full disk", "saving", rank=0),
    Fault("an error", "forward"),
    Fault("stalled", "forward"),
    Fault("slow", "forward"),
    Fault("SIGTERM", "forward"),
    Fault("Ctrl-C", signal=signal.SIGINT),
    Fault("SIGTERM", signal=signal.SIGTERM),
    Fault("network down", "forward"),
    Fault("network stalls", "forward"),
    Fault("packets lost", "forward"),
]


def happen(fault: Fault, folder: Path) -> None:
    """The fault itself, in the process that it meets; the file tells the time."""
    (folder / "fault").touch()
    if fault.signal:
        time.sleep(GRACE)  # until it comes from outside
    elif fault.what in NETWORK:
        while not (folder / "happened").exists():
            time.sleep(0.01)
    elif fault.what == "slow":
        time.sleep(SLOW)
    elif fault.what == "an error":
        raise RuntimeError("an error of this rank alone")
    else:
        signals = {"stalled": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}
        os.kill(os.getpid(), signals.get(fault.what, signal.SIGKILL))


def prepare(trainer: "Trainer", fault: Fault, folder: Path) -> None:
    """Makes the fault happen when its step comes."""
    import torch
    from transformers import TrainerCallback

    def due(*_: Any) -> None:
        if trainer.model.training and trainer.state.global_step == fault.step:
            happen(fault, folder)

    class OptimizerStep(TrainerCallback):
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            due()

    layer = trainer.model.model.layers[-1]
    if fault.where == "forward":
        layer.register_forward_pre_hook(due)
    elif fault.where == "backward":
        layer.register_full_backward_pre_hook(due)
    elif fault.where == "optimizer step":
        trainer.add_callback(OptimizerStep())
    else:
        cut_off, save = ("rng_state" if "random" in fault.where else "optimizer"), torch.save

        def cut(value: Any, file: Any, **options: Any) -> None:
            if cut_off not in str(file) or trainer.state.global_step <= fault.step:
                return save(value, file, **options)
            if fault.what == "full disk":
                (folder / "fault").touch()
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
                try:
                    return save(value, file, **options)
                finally:  # what is said needs room
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            save(value, buffer := io.BytesIO(), **options)
            Path(file).write_bytes(buffer.getvalue()[: buffer.tell() // 2 * ("random" not in fault.where)])
            return happen(fault, folder)

        torch.save = cut


def work(rank: int, folder: Path, fault: Fault, words: list[str]) -> None:
    """A process of the training: the recipe, as its command runs it."""
    import training

    train = training.train

    def with_faults(trainer: "Trainer", *others: Any) -> None:
        if fault.what != "none" and fault.rank == rank:
            prepare(trainer, fault, folder)
        train(trainer, *others)

    training.train = with_faults
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    sys.argv = [str(RECIPE), *words]
    runpy.run_path(str(RECIPE), run_name="__main__")


@dataclass
class Outcome:
    """How a run ended."""

    exit_codes: list[int | None]  # None: it did not end by itself
    seconds: float  # from the fault to the last end
    sentences: list[str]  # the last that each process wrote to stderr
    resumed_from: str | None = None


@dataclass
class Job:
    """A command, in its folder. `run` runs it; run again, it goes on."""

    folder: Path
    ranks: int = 2
    options: dict[str, str] = field(default_factory=dict)

    def run(self, fault: Fault) -> Outcome:
        """Runs the command until all processes have ended."""
        from torch.distributed import TCPStore

        self.folder.mkdir(parents=True, exist_ok=True)
        for old in ("fault", "happened"):
            (self.folder / old).unlink(missing_ok=True)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # where torchrun has it
        with hosts(self.ranks) if fault.what in NETWORK else nullcontext() as network:
            processes = [self.start(rank, fault, store.port, network) for rank in range(self.ranks)]
            try:
                if (fault.signal or network) and self.began(processes):
                    for process in processes if fault.signal else ():
                        process.send_signal(fault.signal)
                    for number, line in enumerate(NETWORK[fault.what] if network else ()):
                        time.sleep(SLOW * number)
                        subprocess.run(line.format(switch=network.switch).split(), check=True)
                        (self.folder / "happened").touch()
                return self.ended(processes, fault)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()

    @property
    def words(self) -> list[str]:
        """What the recipe is given."""
        given = {name: str(value) for name, value in {**OPTIONS, "output_dir": "out", **self.options}.items()}
        given.setdefault("dataset", str(text(self.folder)))
        return [word for key, value in given.items() for word in (f"--{key}", value)]

    def start(self, rank: int, fault: Fault, port: int, network: "Network | None") -> subprocess.Popen[bytes]:
        """Starts a process; on a host of its own if there is a network."""
        command = [sys.executable, __file__, "work", str(rank), str(self.folder), json.dumps(asdict(fault))]
        command += self.words
        local, per_host = (0, 1) if network else (rank, self.ranks)
        own: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_RANK": local}
        own |= {"LOCAL_WORLD_SIZE": per_host, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own |= {"TORCHELASTIC_RUN_ID": "faults", "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": 1}  # torch knows launchers so
        own |= {"OMP_NUM_THREADS": 1, "ACCELERATE_USE_CPU": 1, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": 1}
        if network:
            command, own = network.command(rank, command), own | network.environment(rank)
        own["TORCHELASTIC_USE_AGENT_STORE"] = network is None  # else rank 0 has the store
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        with (self.folder / f"{rank}.out").open("w") as out, (self.folder / f"{rank}.err").open("w") as err:
            return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=out, stderr=err)

    def began(self, processes: Sequence[subprocess.Popen[bytes]]) -> bool:
        """Waits for the moment of the fault; `False` if a process ended before it."""
        while all(process.poll() is None for process in processes):
            if (self.folder / "fault").exists():
                return True
            time.sleep(0.002)
        return False

    def ended(self, processes: list[subprocess.Popen[bytes]], fault: Fault) -> Outcome:
        """Waits for the ends of the processes. One that is stalled is not waited for when the others are done."""
        mark = self.folder / "fault"
        begun, ends, left = time.time(), dict[int, float](), list[int]()
        while len(ends) < len(processes):
            for rank, process in enumerate(processes):
                if rank not in ends and process.poll() is not None:
                    ends[rank] = time.time()
            limit = LIMIT + GRACE + (mark.stat().st_mtime if mark.exists() else begun + 600)
            left = [rank for rank in range(len(processes)) if rank not in ends]
            if time.time() > limit or (fault.what == "stalled" and left == [fault.rank] and mark.exists()):
                break
            time.sleep(0.02)
        if [rank for rank in left if rank != fault.rank or fault.what != "stalled"]:
            ends[len(processes)] = time.time()  # it hangs
        codes = [process.returncode if rank in ends else None for rank, process in enumerate(processes)]
        since = mark.stat().st_mtime if mark.exists() else begun
        said = (self.folder / "0.out").read_text().splitlines()
        resumed = next((line.split()[3] for line in said if line.startswith("goes on from ")), None)
        sentences = [sentence((self.folder / f"{rank}.err").read_text()) for rank in range(len(processes))]
        return Outcome(codes, round(max(ends.values(), default=since) - since, 1), sentences, resumed)

    @property
    def result(self) -> dict[str, Any]:
        """Losses, and a digest of the weights."""
        log = json.loads((self.folder / "out/training_log.json").read_text())
        weights = (self.folder / "out/model.safetensors").read_bytes()
        return {"losses": [step["loss"] for step in log["steps"]], "weights": hashlib.sha256(weights).hexdigest()}


def text(folder: Path) -> Path:
    """A document of a job's own: Python's documentation, or the beginning of it."""
    file = folder / "document.txt"
    if not file.exists():  # a process may read it
        file.write_text("\n".join(pydoc_data.topics.topics.values())[:CHARACTERS])
    return file


def sentence(written: str) -> str:
    """The last line that is neither a progress bar nor a remark of Transformers; empty if there is none."""
    remark = re.compile(r"^\[trans|^\[W|^Failed to load CPU|\d%\||examples \[")
    lines = [line for line in re.split(r"[\r\n]+", written) if line.strip() and not remark.search(line)]
    return lines[-1].strip() if lines else ""


def hosts(number: int) -> "Network":
    """Hosts on this machine, joined by a switch."""
    from tests.support.hosts import Network

    return Network(number)


def provoke(fault: Fault, folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """A fault, and the same command again."""
    job = Job(folder)
    ended = job.run(fault)
    again = job.run(Fault()) if set(ended.exit_codes) != {0} else None
    equal = (again is None or set(again.exit_codes) == {0}) and job.result == wanted
    resumed = again.resumed_from if again is not None else None
    return {**asdict(fault), **asdict(ended), "resumed_from": resumed, "bit_equal": equal}


def said(sentences: list[str], rank: int) -> str:
    """What the ranks beside one said, without the advice that all sentences end with."""
    others = [text for other, text in enumerate(sentences) if other != rank]
    return ADVICE.sub("", re.sub(r"\[[^]]*\]:?\d* ?(\. )?|\||^hf_burst: ", "", others[0]))[:250].strip() or "nothing"


def table(result: dict[str, Any]) -> str:
    """The faults as a table of Markdown."""
    lines = ["| fault | where | rank | exit codes | seconds | what another rank says | goes on from | losses |"]
    lines += ["|---|---|---|---|---:|---|---|---|"]
    for row in result["faults"]:
        stalled = row["rank"] if row["what"] == "stalled" else None
        codes = [str(code) for code in row["exit_codes"]]
        codes = ["stalled" if rank == stalled else code.replace("None", "hangs") for rank, code in enumerate(codes)]
        where, rank = ("a step", "all") if row["signal"] else (row["where"], row["rank"])
        told = "nothing" if row["signal"] or set(codes) == {"0"} else said(row["sentences"], row["rank"])
        cells = [row["what"], where, rank, ", ".join(codes), row["seconds"], told]
        cells += [row["resumed_from"] or "no need", "bit-equal" if row["bit_equal"] else "different"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def write(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes what is known so far, and the table into a page of Markdown, between its marks."""
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.page is not None:
        before, mark, rest = arguments.page.read_text().partition(MARKS[0])
        if not mark:
            raise SystemExit(f"{arguments.page} has no line {MARKS[0]}, behind which the table is written.")
        after = rest.partition(MARKS[1])[2]
        arguments.page.write_text(f"{before}{MARKS[0]}\n{table(result)}{MARKS[1]}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--only", help="part of the names of the faults to provoke")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    parser.add_argument("--page", type=Path, help="the page whose table of faults is written anew")
    arguments = parser.parse_args()
    import torch

    from recipes.benchmarks.provenance import git_commit, hardware, versions
    from tests.support.hosts import refusal

    refused = refusal()
    result: dict[str, Any] = {"schema": 1, "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])}
    result |= {"git_commit": git_commit(ROOT), "hardware": hardware(torch.device("cpu"), 2, 1)}
    result |= {"versions": versions(cuda=False), "time_limit_s": LIMIT}
    with TemporaryDirectory() as temporary:
        folder, whole = Path(temporary), Job(Path(temporary) / "whole")
        undisturbed = whole.run(Fault())
        if set(undisturbed.exit_codes) != {0}:
            raise SystemExit(f"the run without faults failed: {undisturbed.sentences}")
        result |= {"undisturbed": whole.result, "faults": []}
        for number, fault in enumerate(FAULTS):
            write(arguments, result)
            if refused and fault.what in NETWORK:
                print(f"{fault.name} is left out: {refused}")
            elif arguments.only is None or arguments.only in fault.name:
                result["faults"].append(provoke(fault, folder / f"fault_{number}", whole.result))
                print(json.dumps(result["faults"][-1]), flush=True)
    write(arguments, result)
    equal = all(row["bit_equal"] for row in result["faults"])
    print(f"all bit-equal: {equal}")
    return 0 if equal else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        rank, folder, fault, *words = sys.argv[2:]
        work(int(rank), Path(folder), Fault(**json.loads(fault)), words)
    else:
        sys.exit(main())
