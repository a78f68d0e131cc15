"""FlashAttention-4 (CuTe) from its package, `flash-attn-4`: the fastest on Hopper and Blackwell.

Read in version 4.0.0b36, whose `_flash_attn_fwd` and `_flash_attn_bwd` are private. A version whose parameters have
other names is refused. So is the old copy of the module inside the package `flash-attn`: install that package first.
It compiles a kernel for each kind of call, in a second or two, and keeps it on disk, see `_keep_compiled`.

Its backward subtracts `dlse`, the gradient of the log-sum-exp, from `rowsum(dout * out)`. So `out` = 0 and
`dlse` = -delta replace an `out` that lies elsewhere; that `out` is one vector of zeros, expanded.
"""

import os
import stat
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..plan import Band
from .base import BackwardInputs, Gradients, OutputBuffers, Outputs, Scores
from .flash import FLASH, LENGTHS, FlashKernel, gradient_buffers, library_keywords
from .library import Signatures, gpu_refusal, package_refusal
from .pieces import Piece
from .torch_cudnn import TorchCudnnKernel

_SCORES = ("softmax_scale", "causal", "softcap", "window_size_left", "window_size_right")
_TENSORS = ("q", "k", "v", "out", "dout", "lse")
_SIGNATURES: Signatures = (
    ("_flash_attn_fwd", ("q", "k", "v", *LENGTHS, *_SCORES, "return_lse", "out", "lse")),
    ("_flash_attn_bwd", (*_TENSORS, *LENGTHS, *_SCORES, "dq", "dk", "dv", "dlse", "deterministic")),
)
_SIZES = (64, 96, 128, 192, 256)  # of heads
_WIDE = 256  # of these, the one whose backward pass cuDNN computes faster on Hopper
_OLDEST_CUDNN = 91500  # that knows heads of 256, on compute capability 9.0, without known errors
_LONG_TILE = 16384  # rows and columns from which on cuDNN goes backward: it plans every shape anew
_MAX_ELEMENTS = 2**31  # of a tensor that cuDNN is given; none was tried with more
_BLOCK = 128  # keys of its blocks on Hopper
_KEEPS, _KEPT_IN = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_COMPILER_WARNING = r"(?s).*aux_data \(position.*cannot be converted"


class FlashAttn4Kernel(FlashKernel):
    """`_flash_attn_fwd` and `_flash_attn_bwd` of `flash_attn.cute.interface`.

    Head sizes other than those of its capabilities are padded: at 80 the gradient of the queries was wrong (version
    4.0.0b36, H200, bf16), and nothing says that the rest are tested. Of unequal sizes it takes 192 for q and k with 128
    for v (DeepSeek) alone, which its Hopper backward does only if no heads are shared.

    On Hopper the backward pass of long tiles with heads of 256 is cuDNN's, where `out` is there. Ulysses has none, only
    `delta`.
    """

    module = "flash_attn.cute.interface"
    capabilities = replace(FLASH, name="flash_attn_4", head_sizes=_SIZES, value_dims=((192, 128),), wants_out=False)
    cudnn = TorchCudnnKernel()

    def unavailable(self, head_dim: int, value_dim: int) -> str | None:
        refusal = gpu_refusal((9, 0), (12, 0))
        if refusal is None and max(head_dim, value_dim) > 128 and torch.cuda.get_device_capability() >= (10, 0):
            refusal = f"takes head sizes up to 128 on Blackwell, not {max(head_dim, value_dim)}"
        if refusal is None:
            _keep_compiled(self.module.partition(".")[0])
        return refusal or package_refusal("flash-attn-4", self.module, _SIGNATURES)

    @cached_property
    def library(self) -> Any:
        """See [`PiecewiseKernel.library`]; ignores a warning of its compiler, a page for each kernel."""
        warnings.filterwarnings("ignore", _COMPILER_WARNING, UserWarning)
        return import_module(self.module)

    def launch_forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Piece, scores: Scores, buffers: OutputBuffers = ()
    ) -> Outputs:
        """See [`FlashKernel.launch_forward`]; the library copies tensors that are not aligned."""
        out, lse = buffers or (None, None)
        keywords = library_keywords(call, scores, no_window=None)  # a negative one would be taken at its word
        out, lse, *_ = self.library._flash_attn_fwd(q, k, v, **keywords, return_lse=True, out=out, lse=lse)
        return out, lse

    def launch_backward(
        self, inputs: BackwardInputs, call: Piece, scores: Scores, buffers: OutputBuffers = ()
    ) -> Gradients:
        """See [`FlashKernel.launch_backward`].

        An `out` costs a read of it, a `delta` the launch that negates it. So `out` is taken where there is one.
        """
        dout, q, k, v, out, lse, delta = inputs
        dlse = None
        if out is None:
            assert delta is not None, "there is out or delta"
            out = _zeros(v.shape[-1], dout.dtype, dout.device).expand(dout.shape)
            dlse = torch.neg(delta, out=delta.new_empty(delta.shape))
        keywords = library_keywords(call, scores, no_window=None) | gradient_buffers(inputs, buffers)
        dq, dk, dv = self.library._flash_attn_bwd(
            q, k, v, out, dout, lse, **keywords, dlse=dlse, deterministic=self.deterministic
        )
        return dq, dk, dv

    def backward_piece(
        self, piece: Piece, inputs: BackwardInputs, scores: Scores, buffers: OutputBuffers = ()
    ) -> Gradients:
        """See [`PiecewiseKernel.backward_piece`]; cuDNN writes its results elsewhere."""
        if self._is_faster_by_cudnn(piece, inputs, scores):
            return self.cudnn.backward_piece(piece, inputs, scores)
        return super().backward_piece(piece, inputs, scores, buffers)

    def _is_faster_by_cudnn(self, piece: Piece, inputs: BackwardInputs, scores: Scores) -> bool:
        """Whether cuDNN can compute this backward pass, and sooner: with `out`, for heads of 256, a long causal square
        or a long tile of whole blocks, whose largest tensor has no more elements than were tried."""
        q, v = inputs.q, inputs.v
        if inputs.out is None or piece.packed or scores.softcap or self.deterministic:
            return False
        if piece.band == Band(low=0):
            whole = piece.height == piece.width
        else:
            whole = piece.band == Band() and piece.width % _BLOCK == 0
        rows = q.shape[0] * max(piece.height, piece.width)
        elements = rows * max(q.shape[2], v.shape[2]) * _WIDE  # cuDNN has gradients of keys for every query head
        fits = whole and min(piece.height, piece.width) >= _LONG_TILE and elements < _MAX_ELEMENTS
        return fits and q.shape[3] == v.shape[3] == _WIDE and _cudnn_knows_wide_heads(q.device)


@lru_cache(maxsize=1)
def _keep_compiled(package: str) -> None:
    """Has the library keep what it compiles, unless the user has decided: the first step of the next process takes 5 to
    11 s less. It reads the variables when it is imported.

    It runs what lies in the folder, so only this user may write there; not all of its files say for which GPU they are.
    """
    major, minor = torch.cuda.get_device_capability()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home, "hf_burst", f"flash_attn_4-sm{major}{minor}")
    own = {_KEEPS: "1", _KEPT_IN: str(folder)}
    given = {name: os.environ[name] for name in own if name in os.environ}  # its own, if a parent process set them
    if given not in ({}, own) or not folder.is_absolute() or find_spec(package) is None:
        return
    import fcntl

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            return
        with open(folder / "lock", "w+") as file:  # the library waits for locks, which some file systems do not have
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return
    os.environ |= own
    try:
        disk = import_module(f"{package}.cute.cache_utils")
    except Exception:  # such as a full disk; anything else `package_refusal` meets again
        for name in own:
            del os.environ[name]
        loaded: Any = sys.modules.get(f"{package}.cute.cache_utils")
        if loaded is not None:
            loaded.CUTE_DSL_CACHE_ENABLED = False
        return
    kept = getattr(disk, "JITPersistentCache", None)
    for name in ("_try_load_from_storage", "_try_export_to_storage"):
        if hasattr(kept, name):
            setattr(kept, name, _or_nothing(getattr(kept, name)))


def _or_nothing(on_disk: Callable[..., Any]) -> Callable[..., Any]:
    """A full disk, or a lock that is not given, costs a compilation and not a training."""

    def tried(*arguments: Any) -> Any:
        with suppress(OSError, RuntimeError):
            return on_disk(*arguments)
        return False

    return tried


@lru_cache(maxsize=16)
def _cudnn_knows_wide_heads(device: torch.device) -> bool:
    capability, version = torch.cuda.get_device_capability(device), torch.backends.cudnn.version() or 0
    return capability == (9, 0) and version >= _OLDEST_CUDNN


@lru_cache(maxsize=16)
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """From the host, so that they are there for every stream."""
    return torch.zeros(size, dtype=dtype).to(device)
