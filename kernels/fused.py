"""One site of depth routing in one kernel, forward and backward: a drop-in for `mhar_minimal.route.route`.

The forward reads every source once. A program holds a few tokens, all heads at once, and walks over the sources with an
online softmax: running maximum m, normaliser l and numerator acc per token and head (arXiv:1805.02867). The backward
walks over the sources once more and needs no stored weights: with the log-normaliser lse = m + log l,

    α_i = exp(logit_i - lse)        dlogit_i = α_i (dout · v_i - δ)        δ = Σ_i α_i (dout · v_i) = dout · read-out

    dv_i = α_i dout + dlogit_i r_i (q ⊙ g) - (r_i² / D) (Σ_heads dlogit_i logit_i) v_i

where r_i = 1 / sqrt(mean(v_i²) + ε); the last term is the norm's own. The query's gradient is a sum over tokens: every
program writes its part, and the parts are added in a fixed order, so two runs agree bit for bit.

Sources are separate tensors, so a kernel gets a table of their addresses (`mhar_minimal.kernels.launch.addresses`).

In 16-bit storage δ needs more of the read-out than is stored: dlogit is a difference of δ and a number near it. So the
forward also writes what rounding took away, the *rest*, as one signed byte: 254ths of the last binary place.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mhar_minimal.kernels.launch import (
    INTERPRETED,
    addresses,
    ceil,
    check_runnable,
    kernel,
    laid_out,
    operation,
    site_constants,
    stored,
    together,
    tokens_of,
)
from mhar_minimal.kernels.tiles import channels_of_a_token, places


@triton.jit
def unit(rounded, LEAST: tl.constexpr):
    """The power of two at or below numbers that a 16-bit format holds, float32, and not below its least normal one."""
    return tl.maximum((rounded.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), LEAST)


@triton.jit
def write_rest(rest_ptr, mask, exact, dtype: tl.constexpr):
    """The rest of float32 numbers that are stored in this dtype."""
    STEPS: tl.constexpr = 127 * 2**7 if dtype == tl.bfloat16 else 127 * 2**10
    LEAST: tl.constexpr = 2**-126 if dtype == tl.bfloat16 else 2**-14
    rounded = exact.to(dtype).to(tl.float32)
    # 2 / unit; 1 / unit may be below the least normal number.
    inverse = (0x7F800000 - unit(rounded, LEAST).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    # Behind 1.5 · 2²³ the last binary place is 1: adding it rounds, and the last byte is the integer.
    steps = (exact - rounded) * inverse * STEPS + 12582912.0
    tl.store(rest_ptr, steps.to(tl.int32, bitcast=True).to(tl.int8), mask=mask)


@triton.jit
def read_exact(stored_ptr, rest_ptr, at, mask, REST: tl.constexpr):
    """The numbers at ``at`` as they were before they were rounded, to 16 binary places at least."""
    rounded = tl.load(stored_ptr + at, mask=mask, other=0.0)
    exact = rounded.to(tl.float32)
    if REST:
        rest = tl.load(rest_ptr + at, mask=mask, other=0).to(tl.float32)
        if rest_ptr.dtype.element_ty == tl.int8:
            STEP: tl.constexpr = 2**-8 / 127 if rounded.dtype == tl.bfloat16 else 2**-11 / 127
            LEAST: tl.constexpr = 2**-126 if rounded.dtype == tl.bfloat16 else 2**-14
            rest *= STEP * unit(exact, LEAST)
        exact += rest
    return exact


@triton.jit
def merge(v, r, q, m, l, acc):
    """One more source v [TT, HP, KP] for the online softmax: its logit [TT, HP], and the new m, l and acc."""
    # r goes in before the sum: a product at the end would be fused with the subtraction below, and then the largest
    # logit minus itself is not zero.
    logit = tl.sum((v * r[:, None, None]) * q, 2)
    new = tl.maximum(m, logit)
    old = tl.exp(m - new)
    p = tl.exp(logit - new)
    return logit, new, l * old + p, acc * old[:, :, None] + p[:, :, None] * v


@kernel("tokens", "count")
def site_forward(
    table,  # int64 [count]: addresses of the sources, each [tokens, D]
    like_ptr,  # anything of the sources' dtype
    q_ptr,  # q ⊙ g, float32 [D]
    readout_ptr,  # out, storage dtype [tokens, D]
    rest_ptr,  # out, its rest, int8 [tokens, D]; None without REST
    lse_ptr,  # out, float32 [tokens, H]
    weights_ptr,  # out, depth weights, float32 [count, tokens, H]; None without WEIGHTS
    tokens,
    count,
    eps,
    REST: tl.constexpr,
    WEIGHTS: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,  # D / H
    TT: tl.constexpr,  # tokens per program
    HP: tl.constexpr,  # H and K, rounded up to powers of two
    KP: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT)
    channel, inside = channels_of_a_token(H, K, HP, KP, 1)  # one tile
    row, here, head, head_here = places(t, t < tokens, channel, inside, D, H, HP)
    row, here = row[0], here[0]
    plane = tokens.to(tl.int64) * H
    q = tl.load(q_ptr + channel[0], mask=inside[0], other=0.0)
    m = tl.full([TT, HP], float("-inf"), tl.float32)
    l = tl.zeros([TT, HP], tl.float32)
    acc = tl.zeros([TT, HP, KP], tl.float32)
    for i in range(count):
        source = tl.multiple_of(tl.load(table + i).to(like_ptr.dtype), 16)
        v = tl.load(source + row, mask=here, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(tl.sum(v * v, 2), 1) / D + eps)  # [TT], over the full width
        logit, m, l, acc = merge(v, r, q, m, l, acc)
        if WEIGHTS:
            tl.store(weights_ptr + i * plane + head, logit, mask=head_here)
    acc = acc * (1 / l)[:, :, None]
    lse = m + tl.log(l)
    tl.store(readout_ptr + row, acc, mask=here)
    tl.store(lse_ptr + head, lse, mask=head_here)
    if REST:
        write_rest(rest_ptr + row, here, acc, like_ptr.dtype.element_ty)
    if WEIGHTS:
        tl.debug_barrier()  # the logits stored above are read again
        for i in range(count):
            at = weights_ptr + i * plane + head
            tl.store(at, tl.exp(tl.load(at, mask=head_here, other=0.0) - lse), mask=head_here)


@kernel("tokens", "count", "chunk")
def site_backward(
    table,  # int64 [count]: addresses of the sources
    like_ptr,
    q_ptr,  # q ⊙ g, float32 [D]
    dout_ptr,  # gradient of the read-out, [tokens, D]
    readout_ptr,
    rest_ptr,
    lse_ptr,
    dv_ptr,  # out, gradients of the sources, [count, tokens, D]
    dq_ptr,  # out, every program's part of the gradient of q ⊙ g, float32 [programs, D]
    tokens,
    count,
    chunk,  # tokens of one program
    eps,
    REST: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    TT: tl.constexpr,
    HP: tl.constexpr,
    KP: tl.constexpr,
):
    channel, inside = channels_of_a_token(H, K, HP, KP, 1)  # one tile
    plane = tokens.to(tl.int64) * D
    q = tl.load(q_ptr + channel[0], mask=inside[0], other=0.0)
    dq = tl.zeros([1, HP, KP], tl.float32)
    first = tl.program_id(0) * chunk
    for start in range(first, tl.minimum(first + chunk, tokens), TT):
        t = start + tl.arange(0, TT).to(tl.int64)
        there = (t < tokens) & (t < first + chunk)
        row, here, head, head_here = places(t, there, channel, inside, D, H, HP)
        row, here = row[0], here[0]
        dout = tl.load(dout_ptr + row, mask=here, other=0.0).to(tl.float32)
        readout = read_exact(readout_ptr, rest_ptr, row, here, REST)
        lse = tl.load(lse_ptr + head, mask=head_here, other=0.0)
        delta = tl.sum(dout * readout, 2)  # [TT, HP]
        for i in range(count):
            source = tl.multiple_of(tl.load(table + i).to(like_ptr.dtype), 16)
            v = tl.load(source + row, mask=here, other=0.0).to(tl.float32)
            r = tl.rsqrt(tl.sum(tl.sum(v * v, 2), 1) / D + eps)
            logit = tl.sum((v * r[:, None, None]) * q, 2)
            p = tl.exp(logit - lse)
            dlogit = p * (tl.sum(dout * v, 2) - delta)
            if count == 1:  # one source weighs 1 whatever the query, and whatever lse lost to rounding
                p = tl.full([TT, HP], 1.0, tl.float32)
                dlogit = tl.zeros([TT, HP], tl.float32)
            radial = tl.sum(dlogit * logit, 1) * r * r / D  # [TT]
            scaled = (dlogit * r[:, None])[:, :, None]
            dv = p[:, :, None] * dout + scaled * q - radial[:, None, None] * v
            tl.store(dv_ptr + i * plane + row, dv, mask=here)
            dq += tl.sum(scaled * v, 0)[None]
    tl.store(dq_ptr + tl.program_id(0) * D + channel[0], dq, mask=inside[0])


def room_for_rest(readout: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Where a kernel writes the rest: for 16-bit storage, natively."""
    return None if INTERPRETED or dtype == torch.float32 else torch.empty_like(readout, dtype=torch.int8)


def rounded(readout: Tensor, rest: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The read-out in the storage dtype, and its rest (empty for float32).

    In the interpreter, which rounds to bfloat16 wrongly, the kernel wrote all of it; the rest then is a number.
    """
    if dtype == torch.float32:
        return readout, readout.new_empty(0)
    if rest is None:
        rest = (readout - readout.to(dtype).float()).to(dtype)
    return readout.to(dtype), rest


@operation("site")
def site(
    q: Tensor, sources: list[Tensor], heads: int, eps: float, weigh: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read-out [B, T, D], what rounding took from it, lse [B, T, H], and (if ``weigh``) weights [N, B, T, H]."""
    like = sources[0]
    tokens = tokens_of(like)
    readout = torch.empty_like(like, dtype=stored(like))
    rest = room_for_rest(readout, like.dtype)
    lse = like.new_empty(*like.shape[:-1], heads, dtype=torch.float32)
    weights = lse.new_empty(len(sources), *lse.shape) if weigh else lse.new_empty(0)
    if tokens:
        tt = together(tokens)
        site_forward(
            (ceil(tokens, tt), 1, 1), site_constants(like.shape[-1], heads, tt, REST=rest is not None, WEIGHTS=weigh),
            addresses(sources), like, q, readout, rest, lse, weights if weigh else None, tokens, len(sources), eps,
        )  # fmt: skip
    return *rounded(readout, rest, like.dtype), lse, weights


@site.fake
def _(q, sources, heads, eps, weigh):
    like = sources[0]
    lse = like.new_empty(*like.shape[:-1], heads, dtype=torch.float32)
    weights = lse.new_empty(len(sources), *lse.shape) if weigh else lse.new_empty(0)
    return torch.empty_like(like), fake_rest(like), lse, weights


def fake_rest(like: Tensor) -> Tensor:
    if like.dtype == torch.float32:
        return like.new_empty(0)
    return torch.empty_like(like, dtype=like.dtype if INTERPRETED else torch.int8)


PROGRAMS = 512  # of the backward: as many parts of the query's gradient, added in a fixed order


@operation("site_backward")
def site_gradients(
    q: Tensor, sources: list[Tensor], dout: Tensor, readout: Tensor, rest: Tensor, lse: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of q ⊙ g, float32 [D], and of the sources, [N, B, T, D]."""
    like = sources[0]
    tokens = tokens_of(like)
    tt = together(tokens)
    chunk = max(1, ceil(tokens, PROGRAMS * tt)) * tt
    parts = ceil(tokens, chunk)
    dv = torch.empty(len(sources), *like.shape, dtype=stored(like), device=like.device)
    dq = q.new_empty(parts, like.shape[-1])
    if tokens:
        site_backward(
            (parts, 1, 1), site_constants(like.shape[-1], heads, tt, REST=rest.numel() > 0),
            addresses(sources), like, q, dout, readout, rest if rest.numel() else None, lse, dv, dq,
            tokens, len(sources), chunk, eps,
        )  # fmt: skip
    return dq.sum(0), dv.to(like.dtype)


@site_gradients.fake
def _(q, sources, dout, readout, rest, lse, heads, eps):
    return torch.empty_like(q), sources[0].new_empty(len(sources), *sources[0].shape)


def _setup(ctx, inputs, output):
    q, sources, ctx.heads, ctx.eps, _ = inputs
    readout, rest, lse, weights = output
    ctx.mark_non_differentiable(rest, lse, weights)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, readout, rest, lse, *sources)


def _backward(ctx, dout, *_):
    q, readout, rest, lse, *sources = ctx.saved_tensors
    dq, dv = site_gradients.inside(ctx)(q, sources, dout.contiguous(), readout, rest, lse, ctx.heads, ctx.eps)
    return dq, list(dv.unbind())


site.differentiable(_setup, _backward, first=2)


def route(
    query: Tensor, gain: Tensor, sources: Sequence[Tensor], heads: int, eps: float, return_weights: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """What `mhar_minimal.route.route` computes, with the same arguments, by one kernel each way.

    Sources of several dtypes are promoted to one first, oddly laid out ones copied. The depth weights are for looking
    at: they carry no gradient.

    Raises:
        ValueError: as `mhar_minimal.route.route`, or sources that are not float32, bfloat16 or float16.
        RuntimeError: no GPU, and no interpreter in its place.
    """
    check_shapes(query, gain, sources, heads)
    if not eps > 0:
        raise ValueError(f"eps={eps}; accepted: a number above 0")
    dtype = sources[0].dtype
    for source in sources[1:]:
        dtype = torch.promote_types(dtype, source.dtype)
    check_runnable(dtype, sources[0].device)
    sources = [laid_out(source, dtype) for source in sources]
    readout, _, _, weights = site((query * gain).float(), sources, heads, eps, return_weights)
    return (readout, weights) if return_weights else readout


def check_shapes(query: Tensor, gain: Tensor, sources: Sequence[Tensor], heads: int) -> None:
    """Raise ValueError, naming the argument, unless they fit together: a kernel would read past their ends."""
    if len(sources) == 0:
        raise ValueError("sources is empty; a site reads at least one source, the embedding")
    shape = sources[0].shape
    if len(shape) != 3:
        raise ValueError(f"sources[0] has shape {tuple(shape)}; accepted: [B, T, D]")
    for i, source in enumerate(sources):
        if source.shape != shape:
            raise ValueError(f"sources[{i}] has shape {tuple(source.shape)}; accepted: {tuple(shape)}, as sources[0]")
    for name, vector in (("query", query), ("gain", gain)):
        if vector.shape != shape[-1:]:
            raise ValueError(f"{name} has shape {tuple(vector.shape)}; accepted: [{shape[-1]}], the sources' width")
    if heads < 1 or shape[-1] % heads:
        raise ValueError(f"heads={heads} does not divide the width {shape[-1]}")
