"""Dropout over sharded activations: each rank of a group draws its own masks.

Trainers seed all ranks alike, so the masks of one shard would repeat on all others. Therefore a rank's generators get
their own seed while a model with dropout runs forward. It derives from a number that the first rank draws from its
default CPU generator, which advances alike on all ranks: data order stays in step, and a resumed run draws the same
masks. Ranks that were seeded differently share the number, too.
"""

from collections.abc import Iterable

import torch

from ...errors import UnsupportedModelError
from ..forward_pass import Batch, Call, ForwardPass
from .base import Part

# what one process decides once for a whole sequence: skipping a layer, dropping weights
_SHARED = ("layerdrop", "rank_dropout", "module_dropout", "multiplicativedropoutlayer")


class DropoutStreams(Part):
    """Gives each rank its own random stream for every forward pass; changes nothing without dropout."""

    def __init__(self) -> None:
        self.outer: list[tuple[torch.Generator, torch.Tensor]] = []
        self.seed = self.shared = 0

    def check(self, call: Call, batch: Batch) -> None:
        if call.group.size > 1 and call.random_rates:
            check_shared_dropout(call.random_rates)
            call.agreement.seed = _draw(torch.default_generator.clone_state())  # drawn when all ranks continue

    def begin(self, run: ForwardPass) -> None:
        if run.group.size == 1 or not run.call.random_rates:
            return
        _draw(torch.default_generator)
        drawn = torch.Generator("cpu").manual_seed(run.seed)
        seeds = [_draw(drawn) for _ in range(run.group.size)]
        self.seed, self.shared = seeds[run.group.rank], sum(seeds) % 2**63
        accelerator = torch.accelerator.current_accelerator()
        devices = () if accelerator is None else getattr(torch.get_device_module(accelerator), "default_generators", ())
        self.outer = [(generator, generator.get_state()) for generator in (torch.default_generator, *devices)]
        for generator, _ in self.outer:
            generator.manual_seed(self.seed)

    def share(self) -> None:
        """Makes all ranks draw the same masks from here on, because they hold the whole batch."""
        if self.outer and self.seed != self.shared:
            self.seed = self.shared
            for generator, _ in self.outer:
                generator.manual_seed(self.seed)

    def end(self) -> None:
        for generator, state in self.outer:
            if generator.initial_seed() == self.seed:  # else seeded anew, after an interrupted pass
                generator.set_state(state)
        self.outer = []


def _draw(generator: torch.Generator) -> int:
    return int(torch.randint(2**63 - 1, (), generator=generator, device="cpu"))


def check_shared_dropout(rates: Iterable[tuple[str, float]]) -> None:
    """Raises for dropout that must be the same for the whole sequence, because each rank draws its own masks."""
    refused = sorted({f"{name}={rate}" for name, rate in rates if name in _SHARED})
    if refused:
        raise UnsupportedModelError(
            f"The model trains with {', '.join(refused)}, which drops layers or weights for a whole sequence, and its "
            "shards would disagree. Set it to 0.0 (in peft's OFTConfig module_dropout, in BOFTConfig boft_dropout)."
        )
