"""The parts of a patched model, see [`Part`]: a new capability is a new part and a line here."""

from transformers import PreTrainedModel

from ...config import BurstConfig
from ...mesh import ContextGroup
from ..cutting import CutPoint
from .attention import Attention
from .base import Part
from .checkpointing import SavedAttention
from .dropout import DropoutStreams
from .experts import RouterLogits
from .loss import Loss
from .outputs import Outputs
from .request import Request
from .rope import LongestPosition
from .tokens import Tokens


def make_parts(
    model: PreTrainedModel,
    config: BurstConfig,
    group: ContextGroup | None,
    cut_point: CutPoint,
    under_check: bool,
) -> tuple[Part, ...]:
    """The parts of a model in the order of their steps.

    Args:
        model (`PreTrainedModel`): The model, which is not changed.
        config ([`BurstConfig`]): The knobs.
        group ([`ContextGroup`], *optional*): The ranks that the user named.
        cut_point ([`CutPoint`]): Where its tokens are cut.
        under_check (`bool`): Whether its class is being compared with one process.
    """
    return (
        Request(model, under_check),
        Attention(model),
        Tokens(model, cut_point),
        LongestPosition(model),
        SavedAttention(config.attention_keep),
        RouterLogits(model),
        Loss(model, group),
        Outputs(),  # gathers after the loss was computed from the outputs of this rank
        DropoutStreams(),  # draws seeds last, when nothing stops the pass any more
    )
