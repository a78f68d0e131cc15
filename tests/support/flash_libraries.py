"""Stand-ins for the libraries that need a GPU: the same calls, written out in fp32 on a CPU.

They insist on what the real ones take for granted (dtypes, alignment, lengths, a contiguous log-sum-exp), have their
conventions (bottom-right corners, what counts as no window, what an empty row returns), and fill what nobody asked for
with NaN.
"""

from itertools import pairwise

import torch

Tensors = tuple[torch.Tensor, ...]


def check_tensors(*tensors: torch.Tensor, ndim: int) -> None:
    for tensor in tensors:
        assert tensor.ndim == ndim
        assert tensor.dtype == tensors[0].dtype
        assert tensor.dtype in (torch.bfloat16, torch.float16)
        assert tensor.shape[-1] % 8 == 0
        assert tensor.stride(-1) == 1, "the last dimension is contiguous"
        assert tensor.data_ptr() % 16 == 0
        assert all(
            stride % 8 == 0 for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size > 1
        )


def seen_from_bottom_right(rows: int, columns: int, left: int | None, right: int | None) -> torch.Tensor:
    """Column j from row i if `i + columns - rows - left <= j <= i + columns - rows + right`."""
    diagonal = torch.arange(rows)[:, None] + columns - rows
    column = torch.arange(columns)[None]
    seen = torch.ones(rows, columns, dtype=torch.bool)
    if left is not None:
        seen &= column >= diagonal - left
    if right is not None:
        seen &= column <= diagonal + right
    return seen


def seen_from_top_left(rows: int, columns: int, causal: bool) -> torch.Tensor:
    assert rows == columns or not causal, "from which corner others are counted depends on the version"
    whole = torch.ones(rows, columns, dtype=torch.bool)
    return whole.tril() if causal else whole


def scores_of(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, scale: float, softcap: float) -> Tensors:
    """Scores `(B, H, Sq, Sk)` of `(B, S, H, D)`, and the derivative of their capping."""
    keys = k.float().repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), keys) * scale
    slope = torch.ones_like(scores)
    if softcap:
        capped = (scores / softcap).tanh()
        scores, slope = capped * softcap, 1 - capped.square()
    return scores.masked_fill(~seen, -torch.inf), slope


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float, softcap: float, empty: float
) -> Tensors:
    """`out` `(B, Sq, H, Dv)` and `lse` `(B, H, Sq)`, which is `empty` where a row sees nothing."""
    scores, _ = scores_of(q, k, seen, scale, softcap)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v.float().repeat_interleave(q.shape[2] // v.shape[2], 2))
    return out.to(q.dtype), lse.masked_fill(lse == -torch.inf, empty)


def gradients(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float,
) -> Tensors:
    """Those of `(B, S, H, D)`, from `lse` and `delta` of `(B, H, Sq)`."""
    heads, share = k.shape[2], q.shape[2] // k.shape[2]
    scores, slope = scores_of(q, k, seen, scale, softcap)
    weights = (scores - lse.unsqueeze(-1)).exp()
    values, keys = (tensor.float().repeat_interleave(share, 2) for tensor in (v, k))
    dscores = weights * (torch.einsum("bqhd,bkhd->bhqk", dout.float(), values) - delta.unsqueeze(-1)) * slope * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", dscores, keys)
    dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q.float()).unflatten(2, (heads, share)).sum(3)
    dv = torch.einsum("bhqk,bqhd->bkhd", weights, dout.float()).unflatten(2, (heads, share)).sum(3)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


class Documents:
    """The documents of a call of variable length, or its one batch."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, cu_q, cu_k, longest_q, longest_k) -> None:
        self.packed = cu_q is not None
        if not self.packed:
            assert cu_k is None
            self.spans = [(slice(None), slice(None))]
            return
        for bounds, total, longest in ((cu_q, q.shape[0], longest_q), (cu_k, k.shape[0], longest_k)):
            assert bounds.dtype == torch.int32
            assert bounds.is_contiguous()
            assert bounds[0] == 0
            assert bounds[-1] == total
            assert (bounds.diff() > 0).all()
            assert bounds.diff().max() == longest
        bounds_q, bounds_k = (pairwise(bounds.tolist()) for bounds in (cu_q, cu_k))
        self.spans = [(slice(*rows), slice(*columns)) for rows, columns in zip(bounds_q, bounds_k, strict=True)]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window, *scores: float) -> Tensors:
        if not self.packed:
            return attend(q, k, v, seen_from_bottom_right(q.shape[1], k.shape[1], *window), *scores)
        out = q.new_full((*q.shape[:2], v.shape[2]), torch.nan)
        lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
        for rows, columns in self.spans:
            seen = seen_from_bottom_right(rows.stop - rows.start, columns.stop - columns.start, *window)
            inputs = (tensor[None, span] for tensor, span in ((q, rows), (k, columns), (v, columns)))
            out[rows], lse[:, rows] = (part[0] for part in attend(*inputs, seen, *scores))
        return out, lse

    def backward(self, inputs: Tensors, lse: torch.Tensor, delta: torch.Tensor, window, *scores: float) -> Tensors:
        dout, q, k, v = inputs
        if not self.packed:
            return gradients(*inputs, lse, delta, seen_from_bottom_right(q.shape[1], k.shape[1], *window), *scores)
        totals = [torch.full_like(tensor, torch.nan) for tensor in (q, k, v)]
        for rows, columns in self.spans:
            seen = seen_from_bottom_right(rows.stop - rows.start, columns.stop - columns.start, *window)
            document = (t[None, span] for t, span in ((dout, rows), (q, rows), (k, columns), (v, columns)))
            parts = gradients(*document, lse[None, :, rows], delta[None, :, rows], seen, *scores)
            for total, part, span in zip(totals, parts, (rows, columns, columns), strict=True):
                total[span] = part[0]
        return tuple(totals)


def check_rows(q: torch.Tensor, packed: bool, *stats: torch.Tensor) -> None:
    expected = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    for stat in stats:
        assert stat.shape == expected
        assert stat.dtype == torch.float32


def delta_of(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2)


class FlashAttn4:
    """`flash_attn.cute.interface`: a missing window is `None`; `dlse` is subtracted from delta."""

    def __init__(self) -> None:
        self.backward_calls: list[dict] = []

    def _flash_attn_fwd(
        self,
        q,
        k,
        v,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        softmax_scale=None,
        causal=False,
        softcap=None,
        window_size_left=None,
        window_size_right=None,
        return_lse=False,
        out=None,
        lse=None,
    ):
        documents = Documents(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        q, k, v = self._checked(documents, q, k, v)
        assert return_lse
        window = self._window(causal, window_size_left, window_size_right)
        results = documents.forward(q, k, v, window, softmax_scale, softcap or 0.0, -torch.inf)
        out, lse = (
            result if buffer is None else buffer.copy_(result)
            for result, buffer in zip(results, (out, lse), strict=True)
        )
        return out, lse, None, None, None

    def _flash_attn_bwd(
        self,
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=None,
        causal=False,
        softcap=0.0,
        window_size_left=None,
        window_size_right=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        deterministic=False,
        dq=None,
        dk=None,
        dv=None,
        dlse=None,
    ):
        self.backward_calls.append({"out": out, "dlse": dlse, "lse": lse, "deterministic": deterministic})
        documents = Documents(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        assert out.shape == dout.shape
        q, k, v, out, dout = self._checked(documents, q, k, v, out, dout)
        check_rows(q, documents.packed, lse, *(() if dlse is None else (dlse,)))
        if q.shape[-2] != k.shape[-2]:
            assert q.shape[-1] == v.shape[-1], "GQA backward requires head_dim == head_dim_v"
        delta = delta_of(dout, out) if dlse is None else delta_of(dout, out) - dlse
        window = self._window(causal, window_size_left, window_size_right)
        results = documents.backward((dout, q, k, v), lse, delta, window, softmax_scale, softcap)
        for buffer, gradient, like in zip((dq, dk, dv), results, (q, k, v), strict=True):
            assert buffer.is_contiguous()
            assert buffer.shape == like.shape
            buffer.copy_(gradient)
        return dq, dk, dv

    @staticmethod
    def _checked(documents: Documents, *tensors: torch.Tensor) -> Tensors:
        """It copies what is not aligned, and takes strides of 0."""
        sizes = {tensor.shape[-1] for tensor in tensors}
        assert all(64 <= size <= 256 for size in sizes)
        tensors = tuple(
            tensor
            if tensor.stride(-1) == 1 and all(s % 8 == 0 for s in tensor.stride()[:-1]) and tensor.data_ptr() % 16 == 0
            else tensor.clone(memory_format=torch.contiguous_format)
            for tensor in tensors
        )
        check_tensors(*tensors, ndim=3 if documents.packed else 4)
        return tensors

    @staticmethod
    def _window(causal: bool, left: int | None, right: int | None) -> tuple[int | None, int | None]:
        assert left is None or left >= 0, "a negative window is taken at its word"
        assert right is None or right >= 0
        return left, 0 if causal else right


def flash2_window(causal: bool, left: int, right: int, longest_k: int) -> tuple[int | None, int | None]:
    """A window as long as the keys, or negative, is none."""
    right = 0 if causal else right
    return tuple(None if side < 0 or side >= longest_k else side for side in (left, right))


class FlashAttn2:
    """`flash_attn.flash_attn_interface`: a missing window is negative, an empty row has `lse` = inf."""

    def __init__(self) -> None:
        self.deterministic: list[bool] = []

    def _forward(self, q, k, v, lengths, dropout_p, scale, causal, left, right, softcap, alibi, return_softmax):
        assert (dropout_p, alibi, return_softmax) == (0.0, None, False)
        documents = Documents(q, k, *lengths)
        check_tensors(q, k, v, ndim=3 if documents.packed else 4)
        window = flash2_window(causal, left, right, lengths[3] or k.shape[1])
        return (*documents.forward(q, k, v, window, scale, softcap, torch.inf), None, None)

    def _backward(
        self, dout, q, k, v, out, lse, buffers, lengths, dropout_p, scale, causal, left, right, softcap, alibi
    ):
        assert (dropout_p, alibi) == (0.0, None)
        documents = Documents(q, k, *lengths)
        check_tensors(dout, q, k, v, out, ndim=3 if documents.packed else 4)
        check_rows(q, documents.packed, lse)
        assert lse.is_contiguous(), "its strides are not asked for"
        window = flash2_window(causal, left, right, lengths[3] or k.shape[1])
        results = documents.backward((dout, q, k, v), lse, delta_of(dout, out), window, scale, softcap)
        for buffer, gradient in zip(buffers, results, strict=True):
            assert buffer.stride(-1) == 1
            buffer.copy_(gradient)

    def _flash_attn_forward(
        self,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    ):
        window = (window_size_left, window_size_right)
        return self._forward(
            *(q, k, v, (None,) * 4, dropout_p, softmax_scale, causal, *window, softcap, alibi_slopes, return_softmax)
        )

    def _flash_attn_varlen_forward(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    ):
        lengths, window = (
            (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            (window_size_left, window_size_right),
        )
        return self._forward(
            *(q, k, v, lengths, dropout_p, softmax_scale, causal, *window, softcap, alibi_slopes, return_softmax)
        )

    def _flash_attn_backward(
        self,
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
    ):
        self.deterministic.append(deterministic)
        window = (window_size_left, window_size_right)
        self._backward(
            *(dout, q, k, v, out, softmax_lse, (dq, dk, dv), (None,) * 4),
            *(dropout_p, softmax_scale, causal, *window, softcap, alibi_slopes),
        )

    def _flash_attn_varlen_backward(
        self,
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
        zero_tensors=False,
    ):
        self.deterministic.append(deterministic)
        lengths, window = (
            (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            (window_size_left, window_size_right),
        )
        self._backward(
            *(dout, q, k, v, out, softmax_lse, (dq, dk, dv), lengths),
            *(dropout_p, softmax_scale, causal, *window, softcap, alibi_slopes),
        )


class Ffpa:
    """`ffpa_attn.cute`: whole tiles and causal squares of wide heads."""

    def _ffpa_attn_forward_sm90(self, q, k, v, softmax_scale=None, causal=False, return_lse=False, out=None, lse=None):
        self._check(q, k, v)
        assert return_lse
        seen = seen_from_top_left(q.shape[1], k.shape[1], causal)
        results = attend(q, k, v, seen, softmax_scale, 0.0, -torch.inf)
        out, lse = (
            result if buffer is None else self._written(buffer, result)
            for result, buffer in zip(results, (out, lse), strict=True)
        )
        return out, lse

    def _ffpa_attn_backward_sm90(
        self, q, k, v, out, dout, lse, softmax_scale=None, causal=False, dq=None, dk=None, dv=None
    ):
        self._check(q, k, v, out, dout)
        check_rows(q, False, lse)
        seen = seen_from_top_left(q.shape[1], k.shape[1], causal)
        results = gradients(dout, q, k, v, lse, delta_of(dout, out), seen, softmax_scale, 0.0)
        return tuple(self._written(buffer, result) for buffer, result in zip((dq, dk, dv), results, strict=True))

    @staticmethod
    def _written(buffer: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        assert (buffer.shape, buffer.dtype) == (result.shape, result.dtype)
        return buffer.copy_(result)

    @staticmethod
    def _check(*tensors: torch.Tensor) -> None:
        """It makes contiguous what is not, but does not align it."""
        check_tensors(*tensors, ndim=4)
        assert {tensor.shape[-1] for tensor in tensors} <= {320, 384, 512}


class Aten:
    """`torch.ops.aten`: FlashAttention 2, and cuDNN with its causal mask from the top left corner."""

    def __init__(self) -> None:
        self.flash2 = FlashAttn2()
        self.deterministic: list[bool] = []

    def _flash_attention_forward(
        self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right
    ):
        window = (-1 if side is None else side for side in (window_size_left, window_size_right))
        lengths = (cu_q, cu_k, max_q, max_k)
        return self.flash2._forward(q, k, v, lengths, dropout, scale, causal, *window, 0.0, None, debug)

    def _flash_attention_backward(
        self, dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng_state, unused, **scores
    ):
        window = (
            -1 if scores[f"window_size_{side}"] is None else scores[f"window_size_{side}"] for side in ("left", "right")
        )
        buffers = tuple(map(torch.empty_like, (q, k, v)))
        lengths = (cu_q, cu_k, max_q, max_k)
        self.flash2._backward(
            dout, q, k, v, out, lse, buffers, lengths, dropout, scores["scale"], causal, *window, 0.0, None
        )
        return buffers

    def _scaled_dot_product_cudnn_attention(self, q, k, v, bias, with_lse, dropout, causal, debug, *, scale):
        assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
        q, k, v = self._cudnn_tensors(q, k, v)
        out, lse = attend(q, k, v, seen_from_top_left(q.shape[1], k.shape[1], causal), scale, 0.0, -torch.inf)
        return out.transpose(1, 2), lse.unsqueeze(-1), None, None, q.shape[1], k.shape[1], None, None, None

    def _scaled_dot_product_cudnn_attention_backward(
        self, dout, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, dropout, causal, *, scale
    ):
        assert (bias, cu_q, cu_k, dropout) == (None, None, None, 0.0)
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        assert causal or max_k % 128 != 64, "keys that are not there count on Hopper"
        assert lse.shape == (*q.shape[:3], 1)
        assert lse.is_contiguous(), "the plan is not looked up by its strides"
        dout, q, k, v, out = self._cudnn_tensors(dout, q, k, v, out)
        seen = seen_from_top_left(max_q, max_k, causal)
        results = gradients(dout, q, k, v, lse.squeeze(-1), delta_of(dout, out), seen, scale, 0.0)
        return tuple(gradient.transpose(1, 2) for gradient in results)

    @staticmethod
    def _cudnn_tensors(*tensors: torch.Tensor) -> Tensors:
        tensors = tuple(tensor.transpose(1, 2) for tensor in tensors)
        check_tensors(*tensors, ndim=4)
        for tensor in tensors:
            assert tensor.is_contiguous(), "the plan is not looked up by its strides"
            assert tensor.shape[1] > 1
            assert tensor.shape[3] in (*range(8, 129, 8), 256), "heads of 256 on Hopper alone"
        return tensors

    def _efficient_attention_forward(
        self, q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout, kind, with_lse, *, scale, **rest
    ):
        assert (cu_q, cu_k, max_q, max_k, dropout, with_lse, rest) == (None, None, None, None, 0.0, True, {})
        bias = self._efficient_tensors(bias, kind, q, k, v)
        scores = self._efficient_scores(q, k, bias, kind, scale)
        lse = torch.full((*scores.shape[:2], -(-q.shape[1] // 32) * 32), torch.inf)
        lse[..., : q.shape[1]] = scores.logsumexp(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float()).to(q.dtype)
        return out, lse, None, None, q.shape[1], k.shape[1]

    def _efficient_attention_backward(
        self, dout, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, dropout, seed, offset, kind, of_bias, **options
    ):
        assert (cu_q, cu_k, dropout, of_bias) == (None, None, 0.0, False)
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        assert lse.shape == (q.shape[0], q.shape[2], -(-max_q // 32) * 32)
        assert lse.is_contiguous()
        assert out.is_contiguous()
        assert lse.dtype == torch.float32
        assert (lse[..., max_q:] == torch.inf).all()
        self.deterministic.append(options["num_splits_key"] == 1)
        bias = self._efficient_tensors(bias, kind, dout, q, k, v, out)
        scores = self._efficient_scores(q, k, bias, kind, options["scale"])
        weights = (scores - lse[..., :max_q, None]).exp()
        dweights = torch.einsum("bqhd,bkhd->bhqk", dout.float(), v.float())
        dscores = weights * (dweights - delta_of(dout, out).unsqueeze(-1)) * options["scale"]
        dq = torch.einsum("bhqk,bkhd->bqhd", dscores, k.float())
        dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q.float())
        dv = torch.einsum("bhqk,bqhd->bkhd", weights, dout.float())
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None

    @staticmethod
    def _efficient_tensors(bias, kind: int, *tensors: torch.Tensor) -> torch.Tensor | float:
        check_tensors(*tensors, ndim=4)
        assert len({tensor.shape[2] for tensor in tensors}) == 1, "no query heads share a key head"
        assert kind in (0, 2)
        if bias is None:
            return 0.0
        assert kind == 0
        assert bias.dtype == tensors[0].dtype
        assert bias.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in bias.stride()[:-1])
        return bias.float()

    @staticmethod
    def _efficient_scores(q, k, bias, kind: int, scale: float) -> torch.Tensor:
        seen = seen_from_bottom_right(q.shape[1], k.shape[1], None, 0 if kind == 2 else None)
        scores = scores_of(q, k, seen, scale, 0.0)[0]
        assert not isinstance(bias, torch.Tensor) or bias.shape == scores.shape
        scores = scores + bias
        assert (scores.amax(-1) > -torch.inf).all(), "every row sees a column"
        return scores
