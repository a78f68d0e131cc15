"""What is compiled ahead and what is launched in a layer's forward and backward pass by flash-linear-attention.

TRITON_INTERPRET=0 PYTHONPATH=folder/of/fla python -m tests.support.fla_without_gpu passes
"""

import json
import sys
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hf_burst.kernels import tuning
from hf_burst.recurrent import fla
from hf_burst.recurrent.two_passes import Inputs, Passing
from tests.support import without_gpu
from tests.support.without_gpu import did

HEADS, KEYS, TOKENS = 8, 128, 1024


def ahead(function: Any, *tensors: Tensor | None, **settings: Any) -> None:
    did.append("ahead")
    without_gpu.ahead(function, *tensors, **settings)
    did.append("called")


def has_index(function: Any) -> Any:
    """Tensors of a call have the index of a GPU here, those of a rehearsal have none."""

    def asked(*values: Any) -> Any:
        return function(*(0 if value is None and not tuning._rehearses.get() else value for value in values))

    return asked


def main(how: str) -> None:
    torch.cuda.get_device_name = lambda *_: "NVIDIA H200"
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    hardware = import_module("fla.utils.hardware")
    for name in ("check_shared_mem", "get_multiprocessor_count"):
        asked = has_index(getattr(hardware, name))
        for module in (hardware, import_module("fla.utils")):
            setattr(module, name, asked)
    tuning.compile_ahead = ahead
    new = partial(torch.zeros, dtype=torch.bfloat16, requires_grad=True)
    x, weight = new(1, TOKENS, 3 * HEADS * KEYS), new(3 * HEADS * KEYS, 4).detach()
    mixed = fla.fla_convolution(x.transpose(1, 2), weight, None, "silu").transpose(1, 2)
    q, k, v = (part.unflatten(2, (HEADS, KEYS)) for part in mixed.chunk(3, dim=2))
    rows = (fla.unit_norm(q), fla.unit_norm(k), v, new(1, TOKENS, HEADS).float(), new(1, TOKENS, HEADS))
    if how == "passes":
        fla.compile_ahead(fla.in_two_passes, *rows)
        out = in_two_passes(*rows) + sum(rows[:3])
    else:
        package, name = ("kda", "chunk_kda") if how == "channels" else ("gated_delta_rule", "chunk_gated_delta_rule")
        rule = getattr(import_module(f"fla.ops.{package}"), name)
        bounds = {"cu_seqlens": torch.tensor([0, 100, TOKENS], dtype=torch.int32)} if how == "packed" else {}
        settings = {"output_final_state": False, "use_qk_l2norm_in_kernel": False}
        *three, decay, rate = rows
        decay = decay[..., None].expand(-1, -1, -1, KEYS).contiguous() if how == "channels" else decay
        fla.compile_ahead(rule, *three, decay, rate, packed=how == "packed", **settings)
        out, _ = rule(*three, g=decay, beta=rate, initial_state=None, **settings, **bounds)
    gated = fla.fla_gated_norm(out.view(-1, KEYS), new(TOKENS * HEADS, KEYS), new(KEYS).detach(), 1e-6, "silu")
    gated.square().sum().backward()
    print(json.dumps(did))


def in_two_passes(*rows: Tensor) -> Tensor:
    kernels, own = fla._FlaKernels(), Inputs(*(row.detach()[0] for row in rows))
    passing = Passing((0, 1), kernels.lay([0, 100, TOKENS], torch.device("cpu")))
    with torch.no_grad():
        prepared = kernels.prepare(own, passing)
        begin, _ = kernels.maps(own, prepared, passing)
        out = kernels.outputs(own, prepared, begin, passing)
        dbegin, begun = kernels.begin_backward(own, prepared[: kernels.kept], begin, out, passing)
        kernels.end_backward(own, begun, dbegin, passing)
    return out[None]


if __name__ == "__main__":
    main(sys.argv[1])
