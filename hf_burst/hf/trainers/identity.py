"""What tells training data, and the frozen weights beside an adapter, from others."""

import json
from collections.abc import Mapping, Sized
from contextlib import suppress
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

COMPARED = 16  # rows of the training data, and frozen weights, from the first to the last
_VALUES = 8  # of a weight: the first ones, which the first rank has, however it is sharded
_LARGE = 1024  # elements of a weight of which any first rank has that many


def known_of(data: Any) -> dict[str, Any]:
    """What tells training data from others: the number of rows, and a digest of up to 16, from the first to the last.

    Tables of `datasets` and lists have a digest, since reading their rows changes nothing; of other data the number
    of rows is known, and of a stream nothing. Single floats do not count: losses of a reference model, which TRL adds
    to rows, differ by their rounding. Nor do objects of which it is not known what they hold.

    Args:
        data (`Dataset` or sequence): The training data, as the trainer has it.
    """
    rows, table = len(data) if isinstance(data, Sized) else None, getattr(data, "with_format", None)
    if not rows or not (table or isinstance(data, list)):
        return {"rows": rows, "digest": None}
    held, digest = table("arrow") if table else data, sha256()  # as Arrow holds them: without transforms
    for index in sorted({place * (rows - 1) // (COMPARED - 1) for place in range(COMPARED)}):
        row = held[index].to_pylist()[0] if table else held[index]
        for name, value in sorted(row.items()) if isinstance(row, Mapping) else [("", row)]:
            plain = value.tolist() if hasattr(value, "tolist") else value
            with suppress(TypeError):
                if not isinstance(plain, float):
                    digest.update(f"{name} {json.dumps(plain, default=_held)} ".encode())
    return {"rows": rows, "digest": digest.hexdigest()[:16]}


def _held(value: Any) -> Any:
    """What JSON is given for arrays and bytes."""
    if isinstance(value, bytes):
        return sha256(value).hexdigest()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(type(value))


def digest_of_frozen(model: nn.Module) -> str | None:
    """A digest of the first values of up to 16 frozen weights, on the first rank; `None` where there are none, or where
    they are not at hand (of FSDP1, and of DeepSpeed on NVMe).

    Values are rounded to bf16, so that a base model may be loaded in another dtype.

    Args:
        model (`nn.Module`): The model in training, with what its checkpoint holds.
    """
    frozen = [
        weight
        for weight in model.parameters()
        if not weight.requires_grad and getattr(weight, "ds_numel", weight.numel()) >= _LARGE
    ]
    if any(hasattr(weight, "_fsdp_flattened") for weight in frozen):  # of FSDP1: some lie on other ranks
        return None
    digest = sha256(str(len(frozen)).encode())
    for index in sorted({place * (len(frozen) - 1) // (COMPARED - 1) for place in range(COMPARED)} if frozen else ()):
        first = _first_values(frozen[index])
        if len(first) < _VALUES:
            return None
        digest.update(str(first.tolist()).encode())
    return digest.hexdigest()[:16] if frozen else None


def _first_values(weight: Any) -> Tensor:
    """The first values of a weight that may be sharded."""
    held = getattr(weight, "ds_tensor", None)  # of DeepSpeed ZeRO-3
    local = held if held is not None else weight.to_local() if isinstance(weight, DTensor) else weight
    first = local.detach().flatten()[:_VALUES]
    return first.to(torch.bfloat16).double() if first.is_floating_point() else first
