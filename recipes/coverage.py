"""Which models are exact over several ranks: every causal-LM class of Transformers, tiny, patched, beside one process.

    python recipes/coverage.py                                  # all classes; prints what changed
    python recipes/coverage.py --classes LlamaForCausalLM ...   # some of them
    python recipes/coverage.py --write                          # and writes results/coverage.json and .md
"""

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import hf_burst  # noqa: E402
from hf_burst.errors import BurstError  # noqa: E402
from hf_burst.hf import support  # noqa: E402
from recipes.tiny_models import VOCABULARY, class_names, tiny_model  # noqa: E402
from tests.ranks import RankError, RankPool  # noqa: E402

RANKS = 2
LENGTH = 37
DOCUMENTS = (1, 7, 17, 12)
TOLERANCE = 1e-9
KINDS = ("one sequence", "packed")
RESULTS = Path(__file__).parent / "results" / "coverage.json"


class Double(TorchFunctionMode):
    """Casts to fp32 inside of a model become casts to fp64: norms, routers and softmaxes hide no error."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


def make_batch(kind: str) -> dict[str, torch.Tensor]:
    """Two sequences of odd length, or one row of packed documents."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (1 if kind == "packed" else 2, LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][:, :5] = -100
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(size) for size in DOCUMENTS])[None]
    return batch


def plain_loss(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of the unpatched model in one process: its own, or document by document."""
    if "position_ids" not in batch:
        return model(**batch, use_cache=False).loss
    pieces = torch.split(batch["input_ids"], DOCUMENTS, dim=1)
    logits = torch.cat([model(input_ids=piece, use_cache=False).logits for piece in pieces], dim=1)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The gradients of all weights, zero where there is none."""
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }


def compare(rank: int, size: int, name: str) -> dict[str, Any]:
    """What the run finds for a class; runs on every rank."""
    with ExitStack() as settings:
        torch.set_default_dtype(torch.float64)
        settings.callback(torch.set_default_dtype, torch.float32)
        settings.enter_context(Double())
        try:
            tiny_model(name)
        except Exception as problem:
            return {"result": "not buildable", "sentence": f"{type(problem).__name__}: {problem}"}
        settings.enter_context(mock.patch.object(support, "check_served", lambda model: None))
        return {kind: compare_batch(name, make_batch(kind)) for kind in KINDS}


def compare_batch(name: str, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The greatest error of the loss and of any gradient, relative to its greatest entry; or what was raised."""
    patched, plain = tiny_model(name), tiny_model(name)
    try:
        hf_burst.patch_model(patched)
        loss = patched(**batch).loss
    except BurstError as problem:
        return {"result": "refused", "sentence": str(problem)}
    loss.backward()
    expected = plain_loss(plain, batch)
    expected.backward()
    found, wanted = gradients(patched), gradients(plain)
    least = 1e-3 * max(gradient.abs().max() for gradient in wanted.values())
    errors = {"loss": float(abs(loss - expected) / abs(expected))}
    for key, gradient in found.items():
        dist.all_reduce(gradient)
        errors[key] = float((gradient / dist.get_world_size() - wanted[key]).abs().max() / max(wanted[key].abs().max(), least))
    worst = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
    result = "exact" if errors[worst] <= TOLERANCE else "wrong"
    return {"result": result, "error": errors[worst], "worst": worst, "loss_error": errors["loss"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="*", default=class_names())
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    pool = RankPool(RANKS)
    rows = {}
    for name in arguments.classes:
        if not pool.alive:
            pool = RankPool(RANKS)
        try:
            rows[name] = pool.run(compare, name, timeout=60.0)[0]
        except (RankError, TimeoutError, RuntimeError) as problem:
            rows[name] = {"result": "wrong", "sentence": str(problem)[-1500:]}
            pool.close()
        print(name, json.dumps(rows[name]), flush=True)
    pool.close()


if __name__ == "__main__":
    main()
