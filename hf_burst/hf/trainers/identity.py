"""What tells training data, and the frozen weights beside an adapter, from others."""

import json
from collections.abc import Mapping, Sequence, Sized
from contextlib import suppress
from hashlib import sha256
from math import isclose
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

COMPARED = 16  # rows of the training data, and frozen weights, from the first to the last
_VALUES = 4  # of a weight: the first ones, which the first rank has, however it is sharded
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


def frozen_values(model: nn.Module) -> dict[str, list[float]]:
    """The first values of up to 16 frozen weights, by their names, as the first rank has them.

    Left out are weights that are not at hand: of FSDP1 on other ranks, of DeepSpeed on NVMe, and without values.

    Args:
        model (`nn.Module`): The model in training, with what its checkpoint holds.
    """
    frozen = [
        (name, weight)
        for name, weight in model.named_parameters()
        if not weight.requires_grad
        and getattr(weight, "ds_numel", weight.numel()) >= _LARGE
        and len(getattr(weight, "ds_shape", weight.shape)) > 1  # scales of norms are all 1 in many models
    ]
    places = sorted({place * (len(frozen) - 1) // (COMPARED - 1) for place in range(COMPARED)}) if frozen else []
    values = {frozen[place][0]: _first_values(frozen[place][1]) for place in places}
    return {name: first for name, first in values.items() if len(first) == _VALUES}


def are_others(before: Mapping[str, Sequence[float]], now: Mapping[str, Sequence[float]]) -> bool:
    """Whether most of the weights of both have other values than before. Some may: heads that are drawn anew, and the
    adapters of a reference. A base model may be loaded in another dtype."""
    common = before.keys() & now.keys()
    others = [name for name in common if not all(map(_close, before[name], now[name]))]
    return 2 * len(others) > len(common)


def _close(one: float, other: float) -> bool:
    """Whether both may be one number, each rounded to bf16 or not. Bytes of quantized weights are not rounded."""
    return one == other if isinstance(one, int) else isclose(one, other, rel_tol=2**-7, abs_tol=1e-6)


def _first_values(weight: Any) -> list[float]:
    """The first values of a weight that may be sharded."""
    held = getattr(weight, "ds_tensor", None)  # of DeepSpeed ZeRO-3
    local = held if held is not None else weight.to_local() if isinstance(weight, DTensor) else weight
    first: list[float] = [] if local.is_meta else local.detach().flatten()[:_VALUES].tolist()
    return first
