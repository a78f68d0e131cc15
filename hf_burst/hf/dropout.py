"""Dropout inside sharded activations: each rank of a group draws masks of its own.

Trainers seed all ranks alike, so the masks of one shard would repeat on all others. While a model with dropout runs
forward, a rank's generators are therefore seeded by a number of its own. The default CPU generator draws one for each
rank of the group, which advances it alike on all of them: data order stays in step, a resumed run draws the same masks,
and nothing is kept between forward passes. Checkpointing restores the generators itself when it runs a layer again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import UnsupportedModelError
from .batch import ForwardCall

# what one process decides once for a whole sequence: to skip a layer, to drop weights
_SHARED = ("layerdrop", "rank_dropout", "module_dropout", "multiplicativedropoutlayer")


def own_masks(model: nn.Module) -> list[RemovableHandle]:
    """Hooks that give a rank its own random stream for the time of a sharded forward pass."""
    stream = _Stream()
    return [
        model.register_forward_pre_hook(stream.enter, with_kwargs=True),
        model.register_forward_hook(stream.leave, always_call=True),
    ]


def check_shared_dropout(model: nn.Module) -> None:
    """Raises for dropout that must be the same for the whole sequence, which masks of each rank's own are not.

    Raises:
        UnsupportedModelError: With what would have to be switched off.
    """
    refused = sorted({f"{name}={rate}" for name, rate in _rates(model) if name in _SHARED})
    if refused:
        raise UnsupportedModelError(
            f"The model trains with {', '.join(refused)}, which drops layers or weights for a whole sequence, and its "
            "shards would disagree. Set it to 0.0 (in peft's OFTConfig module_dropout, in BOFTConfig boft_dropout)."
        )


def _rates(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Names and values of all rates above 0 by which this model's training is random.

    A dropout layer keeps its rate as `p`; for functional dropout Transformers keeps it beside the layers.
    """
    for module in model.modules():
        for name, value in vars(module).items() if module.training else ():
            name = type(module).__name__.lower() if name == "p" else name
            if "drop" in name or "jitter" in name:
                rates = value.values() if isinstance(value, dict) else (value,)
                yield from ((name, rate) for rate in rates if isinstance(rate, float) and rate > 0)


def _generators() -> list[torch.Generator]:
    """The default generators of the CPU and of the accelerator's devices."""
    accelerator = torch.accelerator.current_accelerator()
    devices = () if accelerator is None else getattr(torch.get_device_module(accelerator), "default_generators", ())
    return [torch.default_generator, *devices]


@dataclass
class _Stream:
    """A random stream for each forward pass.

    Args:
        outer (`list`): During a forward pass, the generators and their states outside of it.
    """

    outer: list[tuple[torch.Generator, torch.Tensor]] = field(default_factory=list)

    @torch.compiler.disable
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook, after the batch was cut: seeds the generators; without dropout nothing is touched."""
        call: ForwardCall | None = kwargs.get("burst_call")
        if call is None or call.group.size == 1 or next(_rates(module), None) is None:
            return
        seeds = torch.randint(2**63 - 1, (call.group.size,), device="cpu")
        self.outer = [(generator, generator.get_state()) for generator in _generators()]
        for generator, _ in self.outer:
            generator.manual_seed(int(seeds[call.group.rank]))

    @torch.compiler.disable
    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The forward hook, also called when the forward pass raised: puts the outer stream back."""
        for generator, state in self.outer:
            generator.set_state(state)
        self.outer = []
