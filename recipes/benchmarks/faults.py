"""Faults in a real training of several CPU processes: how every process ends, and whether the same command goes on.

    python recipes/benchmarks/faults.py --out recipes/benchmarks/results/faults_2xCPU.json --page docs/faults.md

Processes run recipes/finetune_long_document.py. They are started without a launcher, which would end the others as soon
as one is gone. So their own ends are seen, as those on another host are. After each fault the same command runs again,
and its losses and weights are compared with those of a run without faults, bit by bit.

Processes are forks of a server that has imported what they need. `--kills` processes are killed at random moments.
"""

import argparse
import hashlib
import io
import json
import multiprocessing as mp
import os
import pydoc_data.topics
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]  # runs from a checkout too

if TYPE_CHECKING:
    from transformers import Trainer

PRELOAD = ["recipes.benchmarks.faults", "trl.trainer.sft_trainer", "hf_burst.hf.patch", "matplotlib.figure"]
CHARACTERS = 6000
LIMIT = 15  # seconds after which ranks give up waiting (ddp_timeout)
GRACE = 45.0  # seconds more, in which all processes must have ended
SLOW = 5.0
MARKS = ("<!-- faults: by recipes/benchmarks/faults.py -->", "<!-- end of faults -->")  # in a page
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
]


def happen(fault: Fault, folder: Path) -> None:
    """The fault itself, in the process that it meets; the file tells the time."""
    (folder / "fault").touch()
    if fault.signal:
        time.sleep(GRACE)  # until it comes from outside
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


def work(rank: int, ranks: int, port: int, folder: Path, options: dict[str, Any], fault: Fault) -> None:
    """A process of the training: the recipe, as its command runs it."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "faults"}  # by which torch knows a launcher
    os.chdir(folder)
    import finetune_long_document
    import settings
    import torch
    import training

    torch.set_num_threads(1)

    def main(arguments: list[str]) -> None:
        trainer, burst = finetune_long_document.make_trainer(arguments)
        (folder / f"ready_{rank}").touch()
        if fault.what != "none" and fault.rank == rank:
            prepare(trainer, fault, folder)
        training.train(trainer, burst)

    sys.argv = ["finetune_long_document.py", *(word for key, value in options.items() for word in (f"--{key}", value))]
    try:
        settings.run(main)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise SystemExit(1) from None


@dataclass
class Outcome:
    """How a run ended."""

    exit_codes: list[int | None]  # None: it did not end by itself
    seconds: float  # from the fault to the last end
    sentences: list[str]  # the last that each process wrote to stderr
    resumed_from: str | None = None
    killed: int | None = None


@dataclass
class Job:
    """A command, in its folder. `run` runs it; run again, it goes on."""

    folder: Path
    ranks: int = 2
    options: dict[str, str] = field(default_factory=dict)

    def run(self, fault: Fault, kill: tuple[int, float] | None = None) -> Outcome:
        """Runs the command until all processes have ended.

        Args:
            kill (`tuple[int, float]`, *optional*): A rank, and the seconds after its preparation when it is killed.
        """
        from torch.distributed import TCPStore

        self.folder.mkdir(parents=True, exist_ok=True)
        for old in ("fault", *(f"ready_{rank}" for rank in range(self.ranks))):
            (self.folder / old).unlink(missing_ok=True)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # where torchrun has it
        given = {name: str(value) for name, value in {**OPTIONS, "output_dir": "out", **self.options}.items()}
        given.setdefault("dataset", str(text(self.folder)))
        arguments = (self.ranks, store.port, self.folder, given, fault)
        processes = [server().Process(target=work, args=(rank, *arguments)) for rank in range(self.ranks)]
        for process in processes:
            process.start()
        if kill is not None:
            wait_for(self.folder / f"ready_{kill[0]}", processes)
            time.sleep(kill[1])
            processes[kill[0]].kill()
            (self.folder / "fault").touch()
        if fault.signal and wait_for(self.folder / "fault", processes):
            for process in processes:
                os.kill(process.pid or 0, fault.signal)
        return self.ended(processes, fault)

    def ended(self, processes: list[BaseProcess], fault: Fault) -> Outcome:
        """Waits for the ends of the processes. One that is stalled is ended when the others are done."""
        mark = self.folder / "fault"
        begun, ends, left = time.time(), dict[int, float](), list[int]()
        while len(ends) < len(processes):
            for rank, process in enumerate(processes):
                if rank not in ends and not process.is_alive():
                    ends[rank] = time.time()
            limit = LIMIT + GRACE + (mark.stat().st_mtime if mark.exists() else begun + 600)
            left = [rank for rank in range(len(processes)) if rank not in ends]
            if time.time() > limit or (fault.what == "stalled" and left == [fault.rank] and mark.exists()):
                break
            time.sleep(0.02)
        if [rank for rank in left if rank != fault.rank or fault.what != "stalled"]:
            ends[len(processes)] = time.time()  # it hangs
        codes = [process.exitcode if rank in ends else None for rank, process in enumerate(processes)]
        for process in processes:
            process.kill()
            process.join()
        since = mark.stat().st_mtime if mark.exists() else begun
        said = (self.folder / "0.out").read_text().splitlines()
        resumed = next((line.rpartition("/")[2] for line in said if line.startswith("goes on from ")), None)
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
    file.write_text("\n".join(pydoc_data.topics.topics.values())[:CHARACTERS])
    return file


def sentence(written: str) -> str:
    """The last line that is neither a progress bar nor a remark of Transformers; empty if there is none."""
    remark = re.compile(r"^\[trans|\d%\||examples \[")
    lines = [line for line in re.split(r"[\r\n]+", written) if line.strip() and not remark.search(line)]
    return lines[-1].strip() if lines else ""


def wait_for(file: Path, processes: list[BaseProcess]) -> bool:
    """Whether the file came while all processes ran."""
    while not file.exists() and all(process.is_alive() for process in processes):
        time.sleep(0.01)
    return file.exists()


def server() -> Any:
    """Starts processes as forks of a server that has imported what takes seconds."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    os.environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    forkserver.ensure_running()
    return context


def provoke(fault: Fault, folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """A fault, and the same command again."""
    job = Job(folder)
    ended = job.run(fault)
    again = job.run(Fault()) if set(ended.exit_codes) != {0} else None
    equal = (again is None or set(again.exit_codes) == {0}) and job.result == wanted
    resumed = again.resumed_from if again is not None else None
    return {**asdict(fault), **asdict(ended), "resumed_from": resumed, "bit_equal": equal}


def kill_at_random(kills: int, folder: Path, wanted: dict[str, Any], seconds: float, seed: int) -> dict[str, Any]:
    """Kills a process again and again; the same command goes on each time, until its training is done."""
    from hf_burst import last_checkpoint

    chance, done, equal = random.Random(seed), list[Outcome](), list[bool]()
    job = Job(folder / "0")
    while len(done) < kills:
        rank = chance.randrange(job.ranks)
        ended = replace(job.run(Fault(), (rank, chance.uniform(0, seconds))), killed=rank)
        if ended.exit_codes[rank] == -signal.SIGKILL:
            done.append(ended)
            print(json.dumps(asdict(ended)), flush=True)
        if last_checkpoint(job.folder / "out") is None:  # one that was cut off as the first is not passed over
            shutil.rmtree(job.folder / "out", ignore_errors=True)
        if set(ended.exit_codes) == {0} or len(done) == kills:  # it was done before, or the last kill was
            finished = job.run(Fault())
            equal.append(set(finished.exit_codes) == {0} and job.result == wanted)
            job = Job(folder / str(len(equal)))
    return {"seed": seed, "kills": [asdict(kill) for kill in done], "trainings": len(equal), "bit_equal": all(equal)}


def table(result: dict[str, Any]) -> str:
    """The faults as a table of Markdown."""
    lines = ["| fault | where | rank | exit codes | seconds | what another rank says | goes on from | losses |"]
    lines += ["|---|---|---|---|---:|---|---|---|"]
    for row in result["faults"]:
        stalled = row["rank"] if row["what"] == "stalled" else None
        codes = [str(code) for code in row["exit_codes"]]
        codes = ["stalled" if rank == stalled else code.replace("None", "hangs") for rank, code in enumerate(codes)]
        others = [text for rank, text in enumerate(row["sentences"]) if rank != row["rank"] and not row["signal"]]
        said = re.sub(r"\[[^]]*\]:?\d* ?|\|", "", others[0])[:90].strip() if others and set(codes) != {"0"} else ""
        where, rank = ("a step", "all") if row["signal"] else (row["where"], row["rank"])
        cells = [row["what"], where, rank, ", ".join(codes), row["seconds"], said or "nothing"]
        cells += [row["resumed_from"] or "no need", "bit-equal" if row["bit_equal"] else "different"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def write(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes what is known so far, and the table into a page of Markdown, between its marks."""
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.page is not None:
        before, _, rest = arguments.page.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        arguments.page.write_text(f"{before}{MARKS[0]}\n{table(result)}{MARKS[1]}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="processes killed at random moments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="part of the names of the faults to provoke")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    parser.add_argument("--page", type=Path, help="the page whose table of faults is written anew")
    arguments = parser.parse_args()
    import torch

    import hf_burst
    from recipes.benchmarks.provenance import git_commit, hardware, versions

    result: dict[str, Any] = {"schema": 1, "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])}
    result |= {"git_commit": git_commit(ROOT), "hardware": hardware(torch.device("cpu"), 2, 1)}
    result |= {"versions": {"hf_burst": hf_burst.__version__, **versions(cuda=False)}, "time_limit_s": LIMIT}
    with TemporaryDirectory() as temporary:
        folder, whole = Path(temporary), Job(Path(temporary) / "whole")
        undisturbed = whole.run(Fault())
        if set(undisturbed.exit_codes) != {0}:
            raise SystemExit(f"the run without faults failed: {undisturbed.sentences}")
        began = (whole.folder / "ready_0").stat().st_mtime
        seconds = (whole.folder / "out/training_log.json").stat().st_mtime - began
        result |= {"undisturbed": whole.result, "undisturbed_seconds": round(seconds, 1), "faults": []}
        result["random"] = kill_at_random(arguments.kills, folder / "random", whole.result, seconds, arguments.seed)
        for number, fault in enumerate(FAULTS):
            write(arguments, result)
            if arguments.only is None or arguments.only in fault.name:
                result["faults"].append(provoke(fault, folder / f"fault_{number}", whole.result))
                print(json.dumps(result["faults"][-1]), flush=True)
    write(arguments, result)
    equal = [row["bit_equal"] for row in result["faults"]] + [result["random"]["bit_equal"]]
    print(f"{len(result['random']['kills'])} random kills; all bit-equal: {all(equal)}")
    return 0 if all(equal) else 1


if __name__ == "__main__":
    from recipes.benchmarks import faults  # by this name processes find what they run

    sys.exit(faults.main())
