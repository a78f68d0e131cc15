"""On GPUs, over NCCL: experts that lie on several ranks beside one process."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import hf_burst
from tests.gpu.test_gpu import Ranks, gpus  # noqa: F401
from tests.hf.parts import test_expert_ranks as experts
from tests.support import models
from tests.support.expert_ranks import over_ranks
from tests.support.ranks import gpu_of

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def compare(rank: int, size: int, name: str, burst: int, dtype: torch.dtype) -> tuple[float, float]:
    """How far losses of three steps, and the gradients of the first one, are from those of one process."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = experts.make_model(experts.Case(name, 2, burst)).to(gpu_of(rank), dtype)
    model.set_experts_implementation("eager" if dtype == torch.float32 else "grouped_mm")
    placed, groups = over_ranks(model, 2), size // burst

    def batch(seed: int) -> dict[str, Tensor]:
        return {key: value.to(model.device) for key, value in models.make_batch("plain", 509, seed).items()}

    steps = [[batch(groups * step + group) for group in range(groups)] for step in range(experts.STEPS)]
    wanted = experts.train(model, [[{**batch, "use_cache": False} for batch in batches] for batches in steps])
    mesh = init_device_mesh("cuda", (groups, burst), mesh_dim_names=("dp", "cp"))
    hf_burst.patch_model(placed, group=mesh["cp"])
    found = experts.train(placed, [[batches[rank // burst]] for batches in steps], experts.mean_over_ranks)
    loss = max(float(abs(one - other)) for one, other in zip(found["losses"], wanted["losses"], strict=True))
    gradients = found["gradients"][0], wanted["gradients"][0]
    return loss, max(distance(gradients[0][name], exact) for name, exact in gradients[1].items())


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).float().norm() / wanted.float().norm())


@pytest.mark.parametrize(("ranks", "burst"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_three_steps_equal_one_process(gpus: Ranks, ranks: int, burst: int, name: str) -> None:  # noqa: F811
    if ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    for loss, gradient in gpus(ranks).run(compare, name, burst, torch.float32):
        assert loss < 1e-4
        assert gradient < 1e-3
    for loss, gradient in gpus(ranks).run(compare, name, burst, torch.bfloat16):  # in which routers choose unlike
        assert loss < 0.1
        assert gradient < 0.4, "of experts that are divided twice, half of the gradient is gone"
