"""The contenders of training.py on one GPU: what others offer there for long sequences."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from hf_burst.errors import ConfigError
from recipes.benchmarks.training_contenders import Contender, Loss, Way, fused_loss, on_cudnn
from recipes.benchmarks.training_job import Job, checkpoint_layers, hooks_removed


@contextmanager
def plain(
    job: Job, kernel: str = "flash_attention_4", fused: bool = False, tiled: bool = False, offloaded: str = ""
) -> Iterator[Loss]:
    """Trains with an attention of Transformers, with checkpoints.

    Args:
        job ([`Job`]): What is trained.
        kernel (`str`): A name of Transformers.
        fused (`bool`): Whether the loss is Liger's, which holds few logits at a time.
        tiled (`bool`): Whether MLPs run in Liger's tiles.
        offloaded (`str`): Who offloads what is kept: nobody, `"transformers"` or `"trl"`.
    """
    if (tiled or offloaded) and not job.ranks.cuda:
        raise ConfigError("Liger's tiles and offloading need a GPU")
    job.base.set_attn_implementation(kernel)
    with ExitStack() as stack:
        stack.enter_context(on_cudnn(job, kernel))
        if fused:
            stack.enter_context(fused_loss(job))
        if tiled:
            stack.enter_context(tiled_mlps(job))
        if offloaded == "transformers":
            job.base.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
            stack.callback(checkpoint_layers, job.base)
        if offloaded == "trl":
            from accelerate import PartialState
            from trl.models.activation_offloading import get_act_offloading_ctx_manager

            PartialState()  # which its log asks for
            stack.enter_context(hooks_removed(job.model))
            stack.enter_context(get_act_offloading_ctx_manager(job.model, warn_if_no_head=False))
        yield lambda job: job.model(**job.batch, **packing(job, kernel), use_cache=False).loss


def packing(job: Job, kernel: str) -> dict[str, Any]:
    """The boundaries of packed documents as flash kernels take them; without these, Transformers gives flash-attn 4 the
    longest as a tensor, which it refuses."""
    if job.document is None or not kernel.startswith("flash"):
        return {}
    tokens = job.tokens.shape[1]
    bounds = torch.tensor([*range(0, tokens, job.document), tokens], dtype=torch.int32, device=job.tokens.device)
    longest = min(job.document, tokens)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


@contextmanager
def tiled_mlps(job: Job) -> Iterator[None]:
    """Runs every MLP in tiles, as many as `LigerTiledSwiGLUMLP` takes, around the forward that it has."""
    from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

    mlps = [layer.mlp for layer in job.base.model.layers]
    own = [vars(mlp).get("forward") for mlp in mlps]
    for mlp in mlps:
        forward = mlp.forward
        mlp.forward = partial(apply_tiled_mlp, lambda _, part, forward=forward: forward(part), mlp)
    try:
        yield
    finally:
        for mlp, forward in zip(mlps, own, strict=True):
            del mlp.forward
            if forward is not None:
                mlp.forward = forward


LIGER = partial(plain, fused=True)
TILED = partial(LIGER, tiled=True)
WAYS: dict[str, Way] = {
    "Transformers, cuDNN": partial(plain, kernel="sdpa"),
    "Transformers, flash-attn 4": plain,
    "Transformers, Liger's loss": LIGER,
    "Transformers, Liger's loss and tiles": TILED,
    "Transformers' offloading, Liger's loss and tiles": partial(TILED, offloaded="transformers"),
    "TRL's offloading, Liger's loss": partial(LIGER, offloaded="trl"),
    "TRL's offloading, Liger's loss and tiles": partial(TILED, offloaded="trl"),
}
SINGLE = {name: Contender(way, hybrids=None, several=False) for name, way in WAYS.items()}
