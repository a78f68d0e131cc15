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
    model: PreTrainedModel, config: BurstConfig, group: ContextGroup | None, cut_point: CutPoint
) -> tuple[Part, ...]:
    """The parts of a model in the order of their steps. The model is not changed."""
    return (
        Request(),
        Attention(model),
        Tokens(model, cut_point),
        LongestPosition(model),
        SavedAttention(config.attention_keep),
        RouterLogits(model),
        Loss(model, group),
        Outputs(),  # gathers after the loss was computed from the outputs of this rank
        DropoutStreams(),  # draws seeds last, when nothing stops the pass any more
    )
