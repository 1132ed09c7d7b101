"""One site of depth routing in one kernel, forward and backward: a drop-in for `mhar_minimal.route.route`.

The forward reads every source once. A program holds a few tokens, all heads at once, and walks over the sources with an
online softmax: running maximum m, normaliser l and numerator acc per token and head (arXiv:1805.02867). The backward
walks over the sources once more and needs no stored weights: with the log-normaliser lse = m + log l,

    α_i = exp(logit_i - lse)        dlogit_i = α_i (dout · v_i - δ)        δ = Σ_i α_i (dout · v_i) = dout · read-out

    dv_i = α_i dout + dlogit_i r_i (q ⊙ g) - (r_i² / D) (Σ_heads dlogit_i logit_i) v_i

where r_i = 1 / sqrt(mean(v_i²) + ε); the last term is the norm's own. The query's gradient is a sum over tokens: every
program writes its part, and the parts are added in a fixed order, so two runs agree bit for bit.

Sources are separate tensors. A kernel cannot index its arguments at run time, so `addresses` first lays their addresses
out in memory (the grouped matmul of Triton's tutorials does the same).
"""

import os
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCH = 16  # addresses that one launch lays out


@triton.jit
def addresses_kernel(pointers, out_ptr):
    for i in tl.static_range(16):
        tl.store(out_ptr + i, pointers[i].to(tl.int64))


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Where the data of contiguous tensors lie: int64 [N rounded up to 16], on their device."""
    count = triton.cdiv(max(len(tensors), 1), BATCH)
    out = torch.empty(count * BATCH, dtype=torch.int64, device=tensors[0].device)
    for n in range(count):
        batch = list(tensors[n * BATCH : (n + 1) * BATCH])
        batch += batch[-1:] * (BATCH - len(batch))
        addresses_kernel[(1,)](tuple(batch), out[n * BATCH :])
    return out


@triton.jit(do_not_specialize=["tokens", "count", "chunk"])
def site_forward(
    table,  # int64 [count]: addresses of the sources, each [tokens, D]
    like_ptr,  # anything of the sources' dtype
    q_ptr,  # q ⊙ g, float32 [D]
    early_ptr,  # the read-out over sources merged before, float32 [tokens, D], and
    early_lse_ptr,  # its log-normaliser, float32 [tokens, H]; both None without EARLY
    readout_ptr,  # out, storage dtype [tokens, D]
    rest_ptr,  # out, what rounding took from the read-out, [tokens, D]; None without REST
    lse_ptr,  # out, float32 [tokens, H]
    r_ptr,  # out, r of the last source, float32 [tokens]
    weights_ptr,  # out, depth weights, float32 [count, tokens, H]; None without WEIGHTS
    tokens,
    count,
    eps,
    EARLY: tl.constexpr,
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
    h = tl.arange(0, HP)
    k = tl.arange(0, KP)
    channel = h[:, None] * K + k[None, :]  # [HP, KP]
    inside = (h < H)[:, None] & (k < K)[None, :]
    row = t[:, None, None] * D + channel[None]  # [TT, HP, KP]
    here = (t < tokens)[:, None, None] & inside[None]
    head = t[:, None] * H + h[None, :]  # [TT, HP]
    head_here = (t < tokens)[:, None] & (h < H)[None, :]
    plane = tokens.to(tl.int64) * H
    q = tl.load(q_ptr + channel, mask=inside, other=0.0)
    if EARLY:
        m = tl.load(early_lse_ptr + head, mask=head_here, other=0.0)
        l = tl.full([TT, HP], 1.0, tl.float32)
        acc = tl.load(early_ptr + row, mask=here, other=0.0)
    else:
        m = tl.full([TT, HP], float("-inf"), tl.float32)
        l = tl.zeros([TT, HP], tl.float32)
        acc = tl.zeros([TT, HP, KP], tl.float32)
    for i in range(count):
        source = tl.multiple_of(tl.load(table + i).to(like_ptr.dtype), 16)
        v = tl.load(source + row, mask=here, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(tl.sum(v * v, 2), 1) / D + eps)  # [TT], over the full width
        # r goes in before the sum: a product at the end would be fused with the subtraction below, and then the largest
        # logit minus itself is not zero.
        logit = tl.sum((v * r[:, None, None]) * q[None], 2)  # [TT, HP]
        new = tl.maximum(m, logit)
        old = tl.exp(m - new)
        p = tl.exp(logit - new)
        l = l * old + p
        acc = acc * old[:, :, None] + p[:, :, None] * v
        m = new
        if WEIGHTS:
            tl.store(weights_ptr + i * plane + head, logit, mask=head_here)
        if i == count - 1:
            tl.store(r_ptr + t, r, mask=t < tokens)
    acc = acc * (1 / l)[:, :, None]
    lse = m + tl.log(l)
    tl.store(readout_ptr + row, acc, mask=here)
    tl.store(lse_ptr + head, lse, mask=head_here)
    if REST:
        rounded = acc.to(like_ptr.dtype.element_ty).to(tl.float32)
        tl.store(rest_ptr + row, acc - rounded, mask=here)
    if WEIGHTS:
        tl.debug_barrier()  # the logits stored above are read again
        for i in range(count):
            at = weights_ptr + i * plane + head
            tl.store(at, tl.exp(tl.load(at, mask=head_here, other=0.0) - lse), mask=head_here)


@triton.jit(do_not_specialize=["tokens", "count", "chunk"])
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
    h = tl.arange(0, HP)
    k = tl.arange(0, KP)
    channel = h[:, None] * K + k[None, :]
    inside = (h < H)[:, None] & (k < K)[None, :]
    plane = tokens.to(tl.int64) * D
    q = tl.load(q_ptr + channel, mask=inside, other=0.0)
    dq = tl.zeros([HP, KP], tl.float32)
    first = tl.program_id(0) * chunk
    for start in range(first, tl.minimum(first + chunk, tokens), TT):
        t = start + tl.arange(0, TT).to(tl.int64)
        there = (t < tokens) & (t < first + chunk)
        row = t[:, None, None] * D + channel[None]
        here = there[:, None, None] & inside[None]
        head = t[:, None] * H + h[None, :]
        head_here = there[:, None] & (h < H)[None, :]
        dout = tl.load(dout_ptr + row, mask=here, other=0.0).to(tl.float32)
        readout = tl.load(readout_ptr + row, mask=here, other=0.0).to(tl.float32)
        if REST:
            readout += tl.load(rest_ptr + row, mask=here, other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + head, mask=head_here, other=0.0)
        delta = tl.sum(dout * readout, 2)  # [TT, HP]
        for i in range(count):
            source = tl.multiple_of(tl.load(table + i).to(like_ptr.dtype), 16)
            v = tl.load(source + row, mask=here, other=0.0).to(tl.float32)
            r = tl.rsqrt(tl.sum(tl.sum(v * v, 2), 1) / D + eps)
            logit = tl.sum((v * r[:, None, None]) * q[None], 2)
            p = tl.exp(logit - lse)
            dlogit = p * (tl.sum(dout * v, 2) - delta)
            if count == 1:  # one source weighs 1 whatever the query, and whatever lse lost to rounding
                p = tl.full([TT, HP], 1.0, tl.float32)
                dlogit = tl.zeros([TT, HP], tl.float32)
            radial = tl.sum(dlogit * logit, 1) * r * r / D  # [TT]
            scaled = (dlogit * r[:, None])[:, :, None]
            dv = p[:, :, None] * dout + scaled * q[None] - radial[:, None, None] * v
            tl.store(dv_ptr + i * plane + row, dv, mask=here)
            dq += tl.sum(scaled * v, 0)
    tl.store(dq_ptr + tl.program_id(0) * D + channel, dq, mask=inside)


def site_shape(like: Tensor, heads: int) -> dict:
    """The compile-time constants of the two kernels above for sources like this one."""
    dim = like.shape[-1]
    width = dim // heads
    hp, kp = triton.next_power_of_2(heads), triton.next_power_of_2(width)
    # The interpreter takes a program's time per operation, not per number: there one program holds many tokens.
    tokens = min(64, triton.next_power_of_2(max(1, like.numel() // dim))) if INTERPRETED else 1
    warps = max(1, min(16, hp * kp // 512))
    return {"D": dim, "H": heads, "K": width, "TT": tokens, "HP": hp, "KP": kp, "num_warps": warps}


def stored(like: Tensor) -> torch.dtype:
    """What a kernel writes: the storage dtype, or float32 in the interpreter, whose rounding to bfloat16 is wrong."""
    return torch.float32 if INTERPRETED else like.dtype


class Operation:
    """A custom op of torch.library under torch.compile; otherwise the same functions, called directly.

    The library's checks and its handling of lists take several times longer than our own Python, so eager code goes
    around them. Forward, set-up and backward are the same Python functions either way.
    """

    def __init__(self, name: str, forward: Callable, mutates: Sequence[str]):
        self.forward, self.direct = forward, None
        self.op = torch.library.custom_op(f"mhar::{name}", forward, mutates_args=mutates)

    def fake(self, function: Callable) -> None:
        """Register what gives outputs of the right shapes without computing."""
        self.op.register_fake(function)

    def differentiable(self, setup: Callable, backward: Callable) -> None:
        """Register the backward: ``setup(ctx, inputs, output)`` and ``backward(ctx, *gradients)``."""
        self.op.register_autograd(backward, setup_context=setup)
        forward = self.forward

        class Direct(torch.autograd.Function):
            @staticmethod
            def forward(ctx, lengths, *flat):
                values = iter(flat)
                inputs = [next(values) if n is None else [next(values) for _ in range(n)] for n in lengths]
                output = forward(*inputs)
                ctx.direct = True
                setup(ctx, inputs, output)
                return output

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx, *gradients):
                return None, *flattened(backward(ctx, *gradients))

        self.direct = Direct

    def __call__(self, *inputs):
        if torch.compiler.is_compiling():
            return self.op(*inputs)
        if self.direct is None or not torch.is_grad_enabled():
            return self.forward(*inputs)
        lengths = [len(x) if isinstance(x, list) else None for x in inputs]  # autograd does not look into lists
        return self.direct.apply(lengths, *flattened(inputs))

    def inside(self, ctx) -> Callable:
        """How the backward of an operation calls this one: in the way that its forward was called."""
        return self.forward if getattr(ctx, "direct", False) else self.op


def flattened(values: Sequence) -> list:
    return [x for value in values for x in (value if isinstance(value, list) else [value])]


def operation(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable], Operation]:
    """Decorator that makes a function of tensors the operation ``mhar::name``."""
    return lambda forward: Operation(name, forward, mutates)


def has_rest(like: Tensor) -> bool:
    """Whether `site_forward` writes the rest: 16-bit storage, natively."""
    return like.dtype != torch.float32 and not INTERPRETED


def rounded(readout: Tensor, rest: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The read-out in the storage dtype, and what rounding took from it (empty for float32).

    δ = dout · read-out needs both, since dlogit is a difference of δ and a number near it; tests/test_kernels.py
    measures what is lost without.
    """
    if dtype == torch.float32:
        return readout, readout.new_empty(0)
    if rest is None:  # interpreted: the exact read-out was stored in float32
        rest = (readout - readout.to(dtype).float()).to(dtype)
    return readout.to(dtype), rest


@operation("site")
def site(
    q: Tensor, sources: list[Tensor], heads: int, eps: float, weigh: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read-out [B, T, D], what rounding took from it, lse [B, T, H], and (if ``weigh``) weights [N, B, T, H]."""
    like = sources[0]
    shape, tokens = site_shape(like, heads), like[..., 0].numel()
    readout = torch.empty_like(like, dtype=stored(like))
    rest = torch.empty_like(like) if has_rest(like) else None
    lse = like.new_empty(*like.shape[:-1], heads, dtype=torch.float32)
    weights = lse.new_empty(len(sources), *lse.shape) if weigh else lse.new_empty(0)
    if tokens:
        site_forward[(triton.cdiv(tokens, shape["TT"]),)](
            addresses(sources), like, q, None, None, readout, rest, lse, torch.empty_like(lse[..., 0]),
            weights if weigh else None, tokens, len(sources), eps,
            EARLY=False, REST=rest is not None, WEIGHTS=weigh, **shape,
        )  # fmt: skip
    return *rounded(readout, rest, like.dtype), lse, weights


@site.fake
def _(q, sources, heads, eps, weigh):
    like = sources[0]
    lse = like.new_empty(*like.shape[:-1], heads, dtype=torch.float32)
    weights = lse.new_empty(len(sources), *lse.shape) if weigh else lse.new_empty(0)
    rest = torch.empty_like(like) if like.dtype != torch.float32 else like.new_empty(0)
    return torch.empty_like(like), rest, lse, weights


PROGRAMS = 512  # of the backward: as many parts of the query's gradient, added in a fixed order


@operation("site_backward")
def site_gradients(
    q: Tensor, sources: list[Tensor], dout: Tensor, readout: Tensor, rest: Tensor, lse: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of q ⊙ g, float32 [D], and of the sources, [N, B, T, D]."""
    like = sources[0]
    shape, tokens = site_shape(like, heads), like[..., 0].numel()
    chunk = triton.cdiv(tokens, PROGRAMS * shape["TT"]) * shape["TT"]
    dv = torch.empty(len(sources), *like.shape, dtype=stored(like), device=like.device)
    programs = triton.cdiv(tokens, chunk) if tokens else 0
    dq = q.new_empty(programs, shape["D"])
    if tokens:
        site_backward[(programs,)](
            addresses(sources), like, q, dout, readout, rest if rest.numel() else None, lse, dv, dq,
            tokens, len(sources), chunk, eps, REST=rest.numel() > 0, **shape,
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
    return dq, list(dv.unbind()), None, None, None


site.differentiable(_setup, _backward)


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
    dtype = sources[0].dtype
    for source in sources[1:]:
        dtype = torch.promote_types(dtype, source.dtype)
    check_runnable(dtype, sources[0].device)
    sources = [laid_out(source, dtype) for source in sources]
    readout, _, _, weights = site((query * gain).float(), sources, heads, eps, return_weights)
    return (readout, weights) if return_weights else readout


def laid_out(source: Tensor, dtype: torch.dtype) -> Tensor:
    """The source as kernels read it: of that dtype, contiguous, from a multiple of 16 bytes on (copied if need be)."""
    source = source.to(dtype).contiguous()
    if torch.compiler.is_compiling():  # which aligns its inputs itself
        return source
    return source.clone() if source.storage_offset() * source.element_size() % 16 else source


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


def check_runnable(dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless kernels can run on tensors of this dtype and device."""
    if dtype not in DTYPES:
        raise ValueError(f"sources have dtype {dtype}; accepted: float32, bfloat16, float16")
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"the kernels cannot run on device {device.type!r}: Triton compiles for a CUDA GPU. Move the model to one, "
            f"use impl='eager', or set TRITON_INTERPRET=1 before Python starts (slow, for tests and for looking inside)"
        )
