"""A process of versions.py: one rank of one version of hf_burst.

Its PYTHONPATH names the checkout of its version. It uses only the public names of hf_burst, so that it runs with
versions whose rooms differ. Its argument is the JSON of a [`Task`].
"""

import gc
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hf_burst  # of PYTHONPATH, before the path of this checkout comes first
from hf_burst.attention import (  # of PYTHONPATH, before the path of this checkout comes first
    AttentionRequest,
    ContextGroup,
    MaskPattern,
    SequenceLayout,
    burst_attention,
)

sys.path.insert(0, str(Path(__file__).parents[2]))

from recipes.benchmarks.clock import Clock
from recipes.benchmarks.documents import Documents
from recipes.benchmarks.provenance import hardware, versions
from recipes.benchmarks.version_task import VERSIONS, Task

T = TypeVar("T")


class Turns:
    """Lets the two versions take turns: the processes of one wait while those of the other measure."""

    def __init__(self, task: Task) -> None:
        self.task, self.store = task, task.store()
        self.rounds = self.meetings = 0

    def take(self, function: Callable[[], T]) -> T:
        """Calls a function in this version's turn. The version that is first changes from round to round."""
        order = VERSIONS if self.rounds % 2 == 0 else VERSIONS[::-1]
        self.rounds += 1
        results = []
        for version in order:
            if version == self.task.version:
                results.append(function())
                if self.task.device.type == "cuda":
                    torch.cuda.synchronize()
            self._meet()
        return results[0]

    def _meet(self) -> None:
        """A barrier of all processes of both versions."""
        self.meetings += 1
        key = f"meeting/{self.meetings}"
        if self.store.add(key, 1) == 2 * self.task.ranks:
            self.store.set(f"{key}/complete", "")
        self.store.wait([f"{key}/complete"], self.task.limit)


class Subject(Protocol):
    """A timed subject: attention or training of one case."""

    def results(self) -> dict[str, str]:
        """Names of results, and their bits as text. Of the first call, which compiles."""

    def timed(self) -> dict[str, float]:
        """Seconds of the parts of a call, on this rank."""


class Attention:
    """Forward and backward passes of attention, several in a row."""

    def __init__(self, task: Task, case: dict[str, Any]) -> None:
        settings, length, device = task.settings, case["length"], task.device
        bounds = Documents(*case["documents"]).bounds(length, 2 * task.ranks) if case["documents"] else (0, length)
        self.layout = SequenceLayout.for_batch([bounds], task.ranks)
        if self.layout.padding:
            raise SystemExit(f"{length} tokens cannot be cut into equal chunks over {task.ranks} ranks.")
        self.group = ContextGroup.from_mesh(None)
        self.config = hf_burst.BurstConfig(schedule=case["schedule"], kernel=settings["kernel"])
        self.window, self.calls, self.cuda = settings["window"], settings["in_a_row"], device.type == "cuda"
        generator = torch.Generator(device).manual_seed(task.rank)
        heads = (settings["q_heads"], case["kv_heads"], case["kv_heads"], settings["q_heads"])
        shapes = [(1, length // task.ranks, count, settings["head_dim"]) for count in heads]
        dtype = getattr(torch, settings["dtype"])
        self.q, self.k, self.v, self.dout = (
            torch.randn(shape, generator=generator, dtype=dtype, device=device) for shape in shapes
        )
        self.inputs = [tensor.requires_grad_() for tensor in (self.q, self.k, self.v)]

    def results(self) -> dict[str, str]:
        """The bits of out, dq, dk and dv."""
        out = self._forward()
        gradients = torch.autograd.grad(out, self.inputs, self.dout)
        return dict(zip(("out", "dq", "dk", "dv"), map(_bits, (out, *gradients)), strict=True))

    def timed(self) -> dict[str, float]:
        """Seconds of a forward pass, a backward pass and both."""
        _align(self.dout.device)
        clock = Clock(self.cuda)
        clock.mark()
        outs = [self._forward() for _ in range(self.calls)]
        clock.mark()
        while outs:
            torch.autograd.grad(outs.pop(), self.inputs, self.dout)
        clock.mark()
        forward, backward, both = (seconds / self.calls for seconds in clock.seconds())
        return {"forward": forward, "backward": backward, "both": both}

    def _forward(self) -> torch.Tensor:
        q, k, v = self.inputs
        if not hasattr(hf_burst, "AttentionRequest"):  # a version before it
            settings = {"causal": True, "window": self.window, "config": self.config, "check": False}
            return burst_attention(q, k, v, self.layout, self.group, **settings)[0]
        request = AttentionRequest(
            group=self.group,
            pattern=MaskPattern(window=self.window),
            kernel=self.config.kernel,
            schedule=self.config.schedule,
            transport=self.config.transport,
        )
        return burst_attention(q, k, v, self.layout, request, check=False)[0]


class Training:
    """Steps of a model that FSDP2 shards and hf_burst patches: forward, backward, AdamW."""

    def __init__(self, task: Task, case: dict[str, Any]) -> None:
        from recipes.benchmarks.training_job import checkpoint_layers, make_model, shard

        settings, device, length = task.settings, task.device, case["length"]
        self.cuda = device.type == "cuda"
        dtype = torch.bfloat16 if self.cuda else torch.float32
        self.model = make_model(settings["model"], length, dtype, device, settings["changes"])
        checkpoint_layers(self.model)
        mesh = init_device_mesh(device.type, (task.ranks,), mesh_dim_names=("cp",))
        shard(self.model, self.model, mesh)
        if self.cuda:
            torch.cuda.empty_cache()  # the whole model's, since the other version needs the memory
        config = hf_burst.BurstConfig(schedule=case["schedule"], kernel=settings["kernel"])
        hf_burst.patch_model(self.model, config, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=self.cuda)
        generator = torch.Generator().manual_seed(length)
        vocabulary = self.model.config.vocab_size
        self.tokens = torch.randint(0, vocabulary, (1, length), generator=generator).to(device)

    def results(self) -> dict[str, str]:
        """The bits of the loss and of the gradients' norm."""
        loss = self._loss()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))
        self.optimizer.zero_grad()
        return {"loss": float(loss.detach()).hex(), "gradient_norm": float(norm.full_tensor()).hex()}

    def timed(self) -> dict[str, float]:
        """Seconds of the forward pass, the backward pass, the optimizer and the whole step."""
        _align(self.tokens.device)
        clock = Clock(self.cuda)
        clock.mark()
        loss = self._loss()
        clock.mark()
        loss.backward()
        clock.mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        clock.mark()
        return dict(zip(("forward", "backward", "optimizer", "step"), clock.seconds(), strict=True))

    def _loss(self) -> torch.Tensor:
        return self.model(input_ids=self.tokens, labels=self.tokens).loss


def measure(task: Task, case: dict[str, Any], turns: Turns) -> dict[str, Any]:
    """Times one case on this rank: the bits of its results, seconds of each round, and its peak of memory."""
    make: Callable[[Task, dict[str, Any]], Subject] = Training if task.settings["model"] else Attention
    subject = turns.take(lambda: make(task, case))
    bits = turns.take(subject.results)
    for _ in range(task.settings["warmup"]):
        turns.take(subject.timed)
    cuda = task.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    rounds = [turns.take(subject.timed) for _ in range(task.settings["rounds"])]
    return {
        "bits": bits,
        "seconds": {part: [seconds[part] for seconds in rounds] for part in rounds[0]},
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }


def _bits(tensor: torch.Tensor) -> str:
    """A digest of the bits of a tensor."""
    return hashlib.blake2b(tensor.detach().contiguous().view(torch.uint8).cpu().numpy(), digest_size=16).hexdigest()


def _align(device: torch.device) -> None:
    """Lets all ranks of this version start together."""
    if device.type == "cpu":
        dist.barrier()
        return
    dist.barrier(device_ids=[device.index])
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1, device=device))


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    package = Path(hf_burst.__file__).resolve().parents[1]
    if package != Path(task.folder).resolve():
        raise SystemExit(f"hf_burst of {package} was imported instead of that of {task.folder}.")
    cuda = task.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(task.device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.PrefixStore(task.version, task.store()),
        rank=task.rank,
        world_size=task.ranks,
        timeout=task.limit,
    )
    turns, measured = Turns(task), []
    for case in task.cases:
        if task.rank == 0 and task.version == VERSIONS[0]:
            print(json.dumps(case), file=sys.stderr, flush=True)
        measured.append(measure(task, case, turns))
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    report = {
        "measured": measured,
        "hardware": hardware(task.device, task.ranks, hosts=1),
        "versions": {"hf_burst": hf_burst.__version__, **versions(cuda)},
    }
    turns.store.set(f"report/{task.version}/{task.rank}", json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
