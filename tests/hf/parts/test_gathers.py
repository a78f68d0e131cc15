"""FSDP2 gathers no weights for a backward pass that does not need them, and all that it needs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import hf_burst
from hf_burst.hf.generation.generate import _groups
from tests.hf.test_wrappers import flat, make_trainee, whole
from tests.support import models
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
BATCH = "packed"


class Collectives(TorchDispatchMode):
    """Counts gathers of whole tensors."""

    gathers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gathers += "allgather_base" in func.name()
        return func(*args, **(kwargs or {}))


def gathered(rank: int, size: int, lora: bool, asked: bool, between: bool) -> tuple[int, Any, Any]:
    """How many units a second step gathers in its backward pass; the loss and the gradients of that step. Embeddings,
    layers and head are units, as accelerate makes them. `between`: a pass without gradients comes before the backward
    pass, as that of a reference model that is the same model."""
    model = make_trainee(lora)
    if asked:
        model.enable_input_require_grads()
    mesh = init_device_mesh("cpu", (size,))
    models.patch(model, group=dist.group.WORLD)
    base = model.get_base_model() if lora else model
    units: Any = (base.model.embed_tokens, *base.model.layers, base.lm_head, model)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=unit is not model)
    batch = models.make_batch(BATCH)
    for _ in range(2):
        model.zero_grad()
        loss = model(**batch).loss
        if between:
            with torch.no_grad():
                model(**batch)
        with Collectives() as seen:
            loss.backward()
    hf_burst.unpatch_model(model)
    assert all(group.unshard_in_backward for unit in units for group in _groups(unit._get_fsdp_state()))
    return seen.gathers, whole(loss), [whole(weight.grad) for weight in model.parameters() if weight.requires_grad]


@pytest.mark.parametrize("between", [False, True], ids=["", "between"])
@pytest.mark.parametrize(("lora", "asked", "units"), [(True, False, 3), (True, True, 4), (False, False, 4)])
def test_a_backward_pass_gathers_the_units_that_it_reaches(
    ranks: Ranks, lora: bool, asked: bool, units: int, between: bool
) -> None:
    """Two layers and the head, and embeddings whose output or weights have gradients."""
    model = make_trainee(lora)
    wanted = models.plain_loss(model, models.make_batch(BATCH))
    wanted.backward()
    gradients = flat([weight.grad for weight in model.parameters() if weight.requires_grad])
    for count, loss, found in ranks(2).run(gathered, lora, asked, between):
        assert count == units
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(flat(found), gradients, rtol=1e-5, atol=1e-6)
