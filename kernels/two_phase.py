"""Depth routing for a block of sites at a time, exact, forward and backward.

Pseudo-queries do not depend on the input. So all sites of a block read the sources that were finished before it in ONE
pass (phase 1, `block_forward`), and each site then merges in what was written inside its block (phase 2,
`read_forward`); for an online softmax that is exact. Under Full the first block's sites read all they need themselves.

The backward is the same schedule mirrored. A source needs its gradient only when its own sublayer is differentiated,
and by then the gradient of every later read-out is known. So gradients are gathered, not scattered: at a block's
boundary the block's sources read the gradients of all later blocks' read-outs in one pass (`block_backward`), and each
source then adds what its own block's sites send it (`source_backward`). So a source's gradient is written twice, the
later blocks' part and the whole, however many sites read it.

What the gathering needs travels backwards along the autograd graph as gradients of dummies, of zero size in memory,
that the forward hands from one operation to the next: every later site's dout as that of its *rows*, and its lse,
δ = dout · read-out and what is small beside a row as that of the *ledger*, with the `Sections` below. In the backward
the last site allocates them, and every site before makes its entries. There is no state beside the graph:
checkpointing, a second backward and torch.compile see ordinary operations. The price is that all rows live until the
backward ends. So there are two tensors of them, front and back. A backward needs most memory when it begins: only the
last quarter of the sites, the back, has its rows then. The others' are allocated when that quarter's activations are
gone, several rows a site: its source, its read-out with the rest, what is behind its norm, and what its sublayer keeps.

Heads are independent programs: r = 1 / sqrt(mean(v²) + ε) is computed once per source, and then a head needs its own
channels only. The block kernels' matmuls take the stored 16-bit values as they are and split what is float32 (queries,
weights) into two 16-bit parts, so they are exact to about twice the precision of what is stored.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mhar_minimal.kernels.fused import fake_rest, read_exact, room_for_rest, rounded, write_rest
from mhar_minimal.kernels.launch import (
    DTYPES,
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
from mhar_minimal.kernels.tiles import (
    add,
    channels_of_a_token,
    floats,
    inner,
    load,
    mean_square,
    only,
    places,
    scaled,
    store,
    tiles_of,
    times,
)

STEP = 16  # sources, or later sites, per step of the block kernels
LARGEST = 16  # sites that one phase 1 serves
APART = 32  # numbers between the sections of a ledger


@triton.jit
def section(ledger_ptr, at, STORED: tl.constexpr):
    """Where a section of the ledger begins that holds this dtype."""
    return tl.multiple_of((ledger_ptr + at).to(tl.int64).to(tl.pointer_type(STORED)), 16)


@kernel("tokens")
def norm_forward(
    v_ptr,  # a source, [tokens, D]
    r_ptr,  # out, its r, float32 [tokens]
    tokens,
    eps,
    D: tl.constexpr,
    H: tl.constexpr,  # a whole token is one head here
    K: tl.constexpr,
    TT: tl.constexpr,
    HP: tl.constexpr,
    KP: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT)
    d = tl.arange(0, KP)
    mask = (t < tokens)[:, None] & (d < D)[None, :]
    v = tl.load(v_ptr + t[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(r_ptr + t, tl.rsqrt(tl.sum(v * v, 1) / D + eps), mask=t < tokens)


@kernel("tokens", "part", "radial", "slot", "heads")
def norm_backward(
    v_ptr,  # a source that no site of its block reads, [tokens, D], and its r
    r_ptr,
    ledger_ptr,  # with what later blocks send the block's sources, in the storage dtype [room, tokens, D], and with
    part,  # the norm's share of it, float32 [room, tokens, H]; at these offsets
    radial,
    dv_ptr,  # out, [tokens, D]
    tokens,
    slot,  # of this source in the block
    HEADS: tl.constexpr,  # depth heads, rounded up to a power of two, and as they are
    DEPTH: tl.constexpr,
    STORED: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,  # a whole token is one head here
    K: tl.constexpr,
    TT: tl.constexpr,
    HP: tl.constexpr,
    KP: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT)
    d = tl.arange(0, KP)
    h = tl.arange(0, HEADS)
    row = t[:, None] * D + d[None, :]
    mask = (t < tokens)[:, None] & (d < D)[None, :]
    behind = slot * tokens.to(tl.int64)
    v = tl.load(v_ptr + row, mask=mask, other=0.0).to(tl.float32)
    dv = tl.load(section(ledger_ptr, part, STORED) + behind * D + row, mask=mask, other=0.0).to(tl.float32)
    r = tl.load(r_ptr + t, mask=t < tokens, other=0.0)
    head = (behind + t)[:, None] * DEPTH + h[None, :]
    here = (t < tokens)[:, None] & (h < DEPTH)[None, :]
    turned = tl.sum(tl.load(ledger_ptr + radial + head, mask=here, other=0.0), 1)
    tl.store(dv_ptr + row, dv - (turned * r * r / D)[:, None] * v, mask=mask)


@kernel("tokens", "site", "nth")
def read_forward(
    sources,  # COUNT sources written inside the block before this site, oldest first, [tokens, D] each
    rs,  # r of all but the newest, float32 [tokens] each
    q_ptr,  # all queries q ⊙ g, float32 [sites, D]
    gain_ptr,  # of the norms behind the sites, float32 [sites, D]; None without NORM
    early_ptr,  # phase 1 of the block, an online softmax to go on with: acc, float32 [block, tokens, D], and
    early_ml_ptr,  # m and l, float32 [block, tokens, H, 2]; None without EARLY
    readout_ptr,  # out, storage dtype [tokens, D]; None with NORM but without KEEP
    rest_ptr,  # out, its rest, int8 [tokens, D]; None without REST
    normed_ptr,  # out, the read-out behind the norm, storage dtype [tokens, D]; None without NORM
    lse_ptr,  # out, float32 [tokens, H]; None without KEEP
    r_ptr,  # out, r of the newest source, float32 [tokens]
    rho_ptr,  # out, of the norm, float32 [tokens]; None without NORM or KEEP
    tokens,
    site,
    nth,  # of the site in the block
    eps,
    norm_eps,
    COUNT: tl.constexpr,
    EARLY: tl.constexpr,  # whether the block has a phase 1
    KEEP: tl.constexpr,  # whether there will be a backward
    REST: tl.constexpr,
    NORM: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,  # D / H
    TT: tl.constexpr,  # tokens per program
    HP: tl.constexpr,  # H rounded up to a power of two
    KP: tl.constexpr,  # a head's channels lie in so many tiles of this side
    TILES: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT)
    channel, inside = channels_of_a_token(H, K, HP, KP, TILES)
    row, here, head, head_here = places(t, t < tokens, channel, inside, D, H, HP)
    q = load(q_ptr + site * D, channel, inside)
    if EARLY:
        behind = nth * tokens.to(tl.int64)
        early = early_ml_ptr + 2 * (behind * H + head)
        m = tl.load(early, mask=head_here, other=0.0)
        l = tl.load(early + 1, mask=head_here, other=1.0)
        acc = load(early_ptr + behind * D, row, here)
    values = ()  # all loads first: none may pass the barriers of a reduction
    for i in tl.static_range(COUNT):
        values += (load(sources[i], row, here),)
    for i in tl.static_range(COUNT):
        v = floats(values[i])
        if i == COUNT - 1:
            r = tl.rsqrt(mean_square(v, D) + eps)  # [TT]
            tl.store(r_ptr + t, r, mask=t < tokens)
        else:
            r = tl.load(rs[i] + t, mask=t < tokens, other=0.0)
        logit = inner(v, q) * r[:, None]
        if EARLY or i > 0:
            # The larger of the two weighs 1 without a look at the difference: product and subtraction will be fused,
            # and then a logit minus itself is not zero.
            less = tl.exp(-tl.abs(logit - m))
            old, p = tl.where(logit > m, less, 1.0), tl.where(logit > m, 1.0, less)
            m, l, acc = tl.maximum(m, logit), l * old + p, add(scaled(acc, old), scaled(v, p))
        else:
            m, l, acc = logit, tl.full([TT, HP], 1.0, tl.float32), v
    acc = scaled(acc, 1 / l)
    if KEEP or not NORM:
        store(readout_ptr, row, acc, here)
    if KEEP:
        tl.store(lse_ptr + head, m + tl.log(l), mask=head_here)
    if REST:
        for i in tl.static_range(len(acc)):
            write_rest(rest_ptr + row[i], here[i], acc[i], readout_ptr.dtype.element_ty)
    if NORM:
        gain = load(gain_ptr + site * D, channel, inside)
        rho = tl.rsqrt(mean_square(acc, D) + norm_eps)  # [TT]
        if KEEP:
            tl.store(rho_ptr + t, rho, mask=t < tokens)
        store(normed_ptr, row, times(scaled(acc, rho[:, None]), gain), here)


@kernel("part", "stats", "radial", "dlr", "tokens", "site", "entry", "slot", "count", "sites")
def source_backward(
    dout_ptr,  # gradient of what this site gave, [tokens, D]: of its read-out, with NORM of that behind the norm
    readout_ptr,
    rest_ptr,
    lse_ptr,
    v_ptr,  # the source written before this site, [tokens, D], and its r; None without SOURCE
    r_ptr,
    q_ptr,  # all queries, float32 [sites, D]
    gain_ptr,  # of the norms, float32 [sites, D], and of this one rho, float32 [tokens]; None without NORM
    rho_ptr,
    rows_ptr,  # in and out: the read-outs' gradients, stored [front's or back's sites, tokens, D]
    ledger_ptr,  # in and out, its sections at these offsets:
    part,  # what later blocks send the block's sources, stored [room, tokens, D]
    stats,  # lse and δ, float32 [tokens, H, sites, 2]
    radial,  # the norm's share of part, float32 [room, tokens, H]
    dlr,  # dlogit · r of this source, float32 [H, count, tokens]
    dv_ptr,  # out, [tokens, D]
    tokens,
    site,
    entry,  # of the site among the rows
    slot,  # of the source in its block
    count,  # sites of this block that read the source, this one first
    sites,
    SOURCE: tl.constexpr,
    PART: tl.constexpr,  # whether later blocks read the source
    REST: tl.constexpr,
    NORM: tl.constexpr,
    STORED: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    TT: tl.constexpr,
    HP: tl.constexpr,
    KP: tl.constexpr,
    TILES: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT)
    channel, inside = channels_of_a_token(H, K, HP, KP, TILES)
    row, here, head, head_here = places(t, t < tokens, channel, inside, D, H, HP)
    plane = tokens.to(tl.int64) * D
    rows_ptr += entry * plane
    stat = ledger_ptr + stats + head * (2 * sites)
    dlr_ptr = ledger_ptr + dlr + tl.arange(0, HP)[None, :] * (count * tokens.to(tl.int64)) + t[:, None]
    # Loads first: none may pass the barriers of a reduction. So a later site's gradient is read a round ahead, too.
    dout = floats(load(dout_ptr, row, here))
    readout = ()
    for i in tl.static_range(len(row)):
        readout += (read_exact(readout_ptr, rest_ptr, row[i], here[i], REST),)
    lse = tl.load(lse_ptr + head, mask=head_here, other=0.0)
    if NORM:
        gain = load(gain_ptr + site * D, channel, inside)
        rho = tl.load(rho_ptr + t, mask=t < tokens, other=0.0)
    if SOURCE:
        value = load(v_ptr, row, here)
        r = tl.load(r_ptr + t, mask=t < tokens, other=0.0)
        q = load(q_ptr + site * D, channel, inside)
        ahead = load(rows_ptr + plane, row, only(inside, (t < tokens) & (count > 1)))
        if PART:
            sent = load(section(ledger_ptr, part, STORED) + slot * plane, row, here)
            sent_along = tl.load(ledger_ptr + radial + slot * tokens.to(tl.int64) * H + head, mask=head_here, other=0.0)
    if NORM:
        dout = times(dout, gain)
        same = tl.sum(inner(dout, readout), 1) * rho * rho / D  # [TT]
        dout = scaled(add(dout, scaled(readout, -same[:, None])), rho[:, None])
    delta = inner(dout, readout)
    store(rows_ptr, row, dout, here)
    tl.store(stat + 2 * site, lse, mask=head_here)
    tl.store(stat + 2 * site + 1, delta, mask=head_here)
    if SOURCE:
        v = floats(value)
        p, dlr, along = weights(v, r, q, dout, lse, delta, site > 0, dlr_ptr, head_here)
        dv = add(scaled(dout, p), scaled(q, dlr))
        for i in range(1, count):
            dout = floats(ahead)
            ahead = load(rows_ptr + (i + 1) * plane, row, only(inside, (t < tokens) & (i + 1 < count)))
            q = load(q_ptr + (site + i) * D, channel, inside)
            lse = tl.load(stat + 2 * (site + i), mask=head_here, other=0.0)
            delta = tl.load(stat + 2 * (site + i) + 1, mask=head_here, other=0.0)
            dlr_ptr += tokens.to(tl.int64)
            p, dlr, turned = weights(v, r, q, dout, lse, delta, True, dlr_ptr, head_here)
            dv = add(add(dv, scaled(dout, p)), scaled(q, dlr))
            along += turned
        if PART:
            dv = add(dv, floats(sent))
            along += sent_along
        shrink = tl.sum(along, 1) * r * r / D  # [TT]: the norm's backward
        store(dv_ptr, row, add(dv, scaled(v, -shrink[:, None])), here)


@triton.jit
def weights(v, r, q, dout, lse, delta, others, dlr_ptr, head_here):
    """What a source v weighs at a site, [TT, HP], and dlogit · r, which is written, too; and dlogit · logit.

    Without others it weighs 1 whatever q is.
    """
    logit = inner(v, q) * r[:, None]
    p = tl.exp(logit - lse)
    dlogit = tl.where(others, p * (inner(dout, v) - delta), 0.0)
    dlr = dlogit * r[:, None]
    tl.store(dlr_ptr, dlr, mask=head_here)
    return p, dlr, dlogit * logit


@triton.jit
def columns(
    high_ptr,
    low_ptr,
    h,
    start,
    K: tl.constexpr,
    KC: tl.constexpr,
    SP: tl.constexpr,
    FULL: tl.constexpr,
    DOT: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The same of the queries of one block of sites, stored [D, SP]: [KC, SP] twice."""
    k = start + tl.arange(0, KC)
    at = (h * K + k)[:, None] * SP + tl.arange(0, SP)[None, :]
    if FULL:
        high = tl.load(high_ptr + at).to(DOT)
        low = tl.load(low_ptr + at).to(DOT) if SPLIT else high
    else:
        high = tl.load(high_ptr + at, mask=(k < K)[:, None], other=0.0).to(DOT)
        low = tl.load(low_ptr + at, mask=(k < K)[:, None], other=0.0).to(DOT) if SPLIT else high
    return high, low


@triton.jit
def queries(
    high_ptr,
    low_ptr,
    s,
    h,
    start,
    D: tl.constexpr,
    K: tl.constexpr,
    KC: tl.constexpr,
    FULL: tl.constexpr,
    DOT: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Channels start to start + KC of head h of the queries s: [SP, KC] twice, the high and the low part."""
    k = start + tl.arange(0, KC)
    at = s[:, None] * D + h * K + k[None, :]
    if FULL:
        high = tl.load(high_ptr + at).to(DOT)
        low = tl.load(low_ptr + at).to(DOT) if SPLIT else high
    else:
        high = tl.load(high_ptr + at, mask=(k < K)[None, :], other=0.0).to(DOT)
        low = tl.load(low_ptr + at, mask=(k < K)[None, :], other=0.0).to(DOT) if SPLIT else high
    return high, low


@triton.jit
def channels(base, h, start, K: tl.constexpr, KC: tl.constexpr, FULL: tl.constexpr, DOT: tl.constexpr):
    """Channels start to start + KC of head h of the rows that begin at the pointers base [N]: [N, KC]."""
    k = start + tl.arange(0, KC)
    at = base[:, None] + (h * K + k)[None, :]
    if K % 8 == 0:  # Triton cannot see it; said of base it would be forgotten, an argument of an inlined function
        at = tl.multiple_of(at, (16, 16))
    if FULL:
        return tl.load(at).to(DOT)
    return tl.load(at, mask=(k < K)[None, :], other=0.0).to(DOT)


@triton.jit
def dot2(a, high, low, acc, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """The sum acc + a @ (high + low)."""
    acc = tl.dot(a, high, acc, input_precision=PRECISION)
    if SPLIT:
        acc = tl.dot(a, low, acc, input_precision=PRECISION)
    return acc


@triton.jit
def entered(front_ptr, back_ptr, site, cut, t, tokens, D: tl.constexpr):
    """Where the read-outs' gradients of these sites begin, of token t."""
    rows_ptr = tl.where(site < cut, front_ptr, back_ptr - cut * tokens.to(tl.int64) * D)
    return rows_ptr + (site.to(tl.int64) * tokens + t) * D


@kernel("count")
def block_scores(
    table,
    like_ptr,
    high_ptr,
    low_ptr,
    scores_ptr,
    count,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,  # D / H
    KM: tl.constexpr,  # a head's channels are taken in chunks: NC of KM, or one of KM and a tail of KT
    KT: tl.constexpr,
    NC: tl.constexpr,
    SP: tl.constexpr,  # sites of a block, and sources of a block, rounded up
    GP: tl.constexpr,  # sources (forward) or sites (backward) per step of the loop
    DOT: tl.constexpr,  # dtype of the matmuls' operands
    SPLIT: tl.constexpr,  # float32 operands as the sum of two of that dtype
    PRECISION: tl.constexpr,
    STORED: tl.constexpr,  # the storage dtype
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    i = tl.program_id(2) * GP + tl.arange(0, GP)
    base = tl.load(table + tl.minimum(i, count - 1)).to(like_ptr.dtype) + t * D
    logit = tl.zeros([GP, SP], tl.float32)
    for c in range(NC):
        high, low = columns(high_ptr, low_ptr, h, c * KM, K, KM, SP, KM * NC == K, DOT, SPLIT)
        logit = dot2(channels(base, h, c * KM, K, KM, KM * NC == K, DOT), high, low, logit, SPLIT, PRECISION)
    to = scores_ptr + ((t * H + h) * count + i)[:, None] * SP + tl.arange(0, SP)[None, :]
    tl.store(to, logit, mask=(i < count)[:, None])


@kernel("tokens", "count", "site", "sites")
def block_forward(
    table,  # int64 [count]: addresses of the finished sources, each [tokens, D]
    like_ptr,  # anything of the sources' dtype
    r_ptr,  # float32 [count, tokens]
    high_ptr,  # the block's queries, float32 [D, SP] as high + low in the storage dtype, times scale
    low_ptr,
    scale_ptr,
    scores_ptr,  # float32 [tokens, H, count, SP], from block_scores where NC > 1
    acc_ptr,  # out, float32 [sites, tokens, D]
    ml_ptr,  # out, float32 [sites, tokens, H, 2]
    tokens,
    count,
    site,  # the first
    sites,  # of this block
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,  # D / H
    KM: tl.constexpr,  # a head's channels are taken in chunks: NC of KM, or one of KM and a tail of KT
    KT: tl.constexpr,
    NC: tl.constexpr,
    SP: tl.constexpr,  # sites of a block, and sources of a block, rounded up
    GP: tl.constexpr,  # sources (forward) or sites (backward) per step of the loop
    DOT: tl.constexpr,  # dtype of the matmuls' operands
    SPLIT: tl.constexpr,  # float32 operands as the sum of two of that dtype
    PRECISION: tl.constexpr,
    STORED: tl.constexpr,  # the storage dtype
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    mine = tl.program_id(2) * KM
    FM: tl.constexpr = KM * NC <= K
    FT: tl.constexpr = KM + KT == K
    s = tl.minimum(tl.arange(0, SP), sites - 1)
    scale = tl.load(scale_ptr + site + s)
    if NC == 1:
        high, low = columns(high_ptr, low_ptr, h, 0, K, KM, SP, FM, DOT, SPLIT)
        if KT:
            high_t, low_t = columns(high_ptr, low_ptr, h, KM, K, KT, SP, FT, DOT, SPLIT)
    m = tl.full([SP], float("-inf"), tl.float32)
    l = tl.zeros([SP], tl.float32)
    acc = tl.zeros([KM, SP], tl.float32)
    if KT:
        acc_t = tl.zeros([KT, SP], tl.float32)
    for start in range(0, count, GP):
        i = start + tl.arange(0, GP)
        at = tl.minimum(i, count - 1)  # past the end the last source once more, with weight zero
        base = tl.load(table + at).to(like_ptr.dtype) + t * D
        r = tl.load(r_ptr + at * tokens + t)
        logit = tl.zeros([GP, SP], tl.float32)
        if NC == 1:
            v = channels(base, h, 0, K, KM, FM, DOT)
            logit = dot2(v, high, low, logit, SPLIT, PRECISION)
            if KT:
                v_t = channels(base, h, KM, K, KT, FT, DOT)
                logit = dot2(v_t, high_t, low_t, logit, SPLIT, PRECISION)
        else:
            v = channels(base, h, mine, K, KM, FM, DOT)
            logit = tl.load(scores_ptr + ((t * H + h) * count + at)[:, None] * SP + tl.arange(0, SP)[None, :])
        logit = tl.where((i < count)[:, None], logit * (r[:, None] * scale[None, :]), float("-inf"))
        new = tl.maximum(m, tl.max(logit, 0))
        old = tl.exp(m - new)
        p = tl.exp(logit - new[None, :])
        l = l * old + tl.sum(p, 0)
        p_high = p.to(DOT)
        p_low = (p - p_high.to(tl.float32)).to(DOT)
        acc = dot2(tl.trans(v), p_high, p_low, acc * old[None, :], SPLIT, PRECISION)
        if KT:
            acc_t = dot2(tl.trans(v_t), p_high, p_low, acc_t * old[None, :], SPLIT, PRECISION)
        m = new
    site = tl.arange(0, SP)
    row = site.to(tl.int64) * tokens + t
    k = mine + tl.arange(0, KM)
    to = acc_ptr + (row * D + h * K)[None, :] + k[:, None]
    tl.store(to, acc, mask=(site < sites)[None, :] & (k < K)[:, None])
    if KT:
        k_t = KM + tl.arange(0, KT)
        to_t = acc_ptr + (row * D + h * K)[None, :] + k_t[:, None]
        tl.store(to_t, acc_t, mask=(site < sites)[None, :] & (k_t < K)[:, None])
    first = (site < sites) & (mine == 0)
    tl.store(ml_ptr + 2 * (row * H + h), m, mask=first)
    tl.store(ml_ptr + 2 * (row * H + h) + 1, l, mask=first)


@kernel("tokens", "count", "site", "cut", "sites")
def block_scores_backward(
    table,
    like_ptr,
    front_ptr,  # the read-outs' gradients, stored [cut, tokens, D] and [sites - cut, tokens, D]
    back_ptr,
    high_ptr,
    low_ptr,
    scores_ptr,  # out, float32 [tokens, H, later sites, 2, SP]: q · v and dout · v
    tokens,
    count,
    site,
    cut,
    sites,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,  # D / H
    KM: tl.constexpr,  # a head's channels are taken in chunks: NC of KM, or one of KM and a tail of KT
    KT: tl.constexpr,
    NC: tl.constexpr,
    SP: tl.constexpr,  # sites of a block, and sources of a block, rounded up
    GP: tl.constexpr,  # sources (forward) or sites (backward) per step of the loop
    DOT: tl.constexpr,  # dtype of the matmuls' operands
    SPLIT: tl.constexpr,  # float32 operands as the sum of two of that dtype
    PRECISION: tl.constexpr,
    STORED: tl.constexpr,  # the storage dtype
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    s = site + tl.program_id(2) * GP + tl.arange(0, GP)
    at = tl.minimum(s, sites - 1)
    j = tl.arange(0, SP)
    base = tl.load(table + tl.minimum(j, count - 1)).to(like_ptr.dtype) + t * D
    back = entered(front_ptr, back_ptr, at, cut, t, tokens, D)
    logit = tl.zeros([GP, SP], tl.float32)
    dov = tl.zeros([GP, SP], tl.float32)
    for c in range(NC):
        high, low = queries(high_ptr, low_ptr, at, h, c * KM, D, K, KM, KM * NC == K, DOT, SPLIT)
        v = tl.trans(channels(base, h, c * KM, K, KM, KM * NC == K, DOT))
        logit = tl.dot(high, v, logit, input_precision=PRECISION)
        if SPLIT:
            logit = tl.dot(low, v, logit, input_precision=PRECISION)
        dov = tl.dot(channels(back, h, c * KM, K, KM, KM * NC == K, DOT), v, dov, input_precision=PRECISION)
    score = scores_ptr + ((t * H + h) * (sites - site) + s - site)[:, None] * (2 * SP) + j[None, :]
    tl.store(score, logit, mask=(s < sites)[:, None])
    tl.store(score + SP, dov, mask=(s < sites)[:, None])


@kernel("stats", "part", "radial", "tokens", "count", "site", "cut", "sites")
def block_backward(
    table,  # int64 [count]: addresses of the block's sources
    like_ptr,
    r_ptr,  # float32 [count, tokens]
    front_ptr,  # the read-outs' gradients, stored [cut, tokens, D] and [sites - cut, tokens, D]
    back_ptr,
    ledger_ptr,  # in and out, its sections at these offsets:
    stats,  # lse and δ, float32 [tokens, H, sites, 2]
    part,  # out: what these sites send the sources, stored [count, tokens, D]
    radial,  # out: Σ over the sites of dlogit · logit, float32 [count, tokens, H]
    high_ptr,  # all queries, [sites, D]
    low_ptr,
    scale_ptr,
    scores_ptr,
    dlr_ptr,  # out, float32 [tokens, H, later sites, count]: dlogit · r
    tokens,
    count,
    site,  # the first later site
    cut,
    sites,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,  # D / H
    KM: tl.constexpr,  # a head's channels are taken in chunks: NC of KM, or one of KM and a tail of KT
    KT: tl.constexpr,
    NC: tl.constexpr,
    SP: tl.constexpr,  # sites of a block, and sources of a block, rounded up
    GP: tl.constexpr,  # sources (forward) or sites (backward) per step of the loop
    DOT: tl.constexpr,  # dtype of the matmuls' operands
    SPLIT: tl.constexpr,  # float32 operands as the sum of two of that dtype
    PRECISION: tl.constexpr,
    STORED: tl.constexpr,  # the storage dtype
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    mine = tl.program_id(2) * KM
    FM: tl.constexpr = KM * NC <= K
    FT: tl.constexpr = KM + KT == K
    j = tl.arange(0, SP)
    own = tl.minimum(j, count - 1)
    base = tl.load(table + own).to(like_ptr.dtype) + t * D
    r = tl.load(r_ptr + own * tokens + t)
    if NC == 1:
        v = tl.trans(channels(base, h, 0, K, KM, FM, DOT))
        if KT:
            v_t = tl.trans(channels(base, h, KM, K, KT, FT, DOT))
    dv = tl.zeros([KM, SP], tl.float32)
    if KT:
        dv_t = tl.zeros([KT, SP], tl.float32)
    turned = tl.zeros([SP], tl.float32)
    for start in range(site, sites, GP):
        s = start + tl.arange(0, GP)
        at = tl.minimum(s, sites - 1)
        back = entered(front_ptr, back_ptr, at, cut, t, tokens, D)
        logit = tl.zeros([GP, SP], tl.float32)
        dov = tl.zeros([GP, SP], tl.float32)
        if NC == 1:
            high, low = queries(high_ptr, low_ptr, at, h, 0, D, K, KM, FM, DOT, SPLIT)
            dout = channels(back, h, 0, K, KM, FM, DOT)
            logit = tl.dot(high, v, logit, input_precision=PRECISION)
            if SPLIT:
                logit = tl.dot(low, v, logit, input_precision=PRECISION)
            dov = tl.dot(dout, v, dov, input_precision=PRECISION)
            if KT:
                high_t, low_t = queries(high_ptr, low_ptr, at, h, KM, D, K, KT, FT, DOT, SPLIT)
                dout_t = channels(back, h, KM, K, KT, FT, DOT)
                logit = tl.dot(high_t, v_t, logit, input_precision=PRECISION)
                if SPLIT:
                    logit = tl.dot(low_t, v_t, logit, input_precision=PRECISION)
                dov = tl.dot(dout_t, v_t, dov, input_precision=PRECISION)
        else:
            high, low = queries(high_ptr, low_ptr, at, h, mine, D, K, KM, FM, DOT, SPLIT)
            dout = channels(back, h, mine, K, KM, FM, DOT)
            score = scores_ptr + ((t * H + h) * (sites - site) + at - site)[:, None] * (2 * SP) + j[None, :]
            logit = tl.load(score)
            dov = tl.load(score + SP)
        scale = tl.load(scale_ptr + at)
        stat = ledger_ptr + stats + (t * H + h) * (2 * sites) + 2 * at
        lse = tl.load(stat)
        delta = tl.load(stat + 1)
        logit = logit * (scale[:, None] * r[None, :])
        p = tl.where((s < sites)[:, None], tl.exp(logit - lse[:, None]), 0.0)
        dl = tl.where((s > 0)[:, None], p * (dov - delta[:, None]), 0.0)  # site 0: one source, weight 1 whatever q
        turned += tl.sum(dl * logit, 0)
        dlr = dl * r[None, :]
        to = dlr_ptr + (t * H + h) * ((sites - site) * count) + (s - site)[:, None] * count + j[None, :]
        tl.store(to, dlr, mask=(s < sites)[:, None] & (j < count)[None, :] & (mine == 0))
        p_high = p.to(DOT)
        p_low = (p - p_high.to(tl.float32)).to(DOT)
        d = dlr * scale[:, None]
        d_high = d.to(DOT)
        d_low = (d - d_high.to(tl.float32)).to(DOT)
        dv = dot2(tl.trans(dout), p_high, p_low, dv, SPLIT, PRECISION)
        dv = dot2(tl.trans(high), d_high, d_low, dv, SPLIT, PRECISION)
        if KT:
            dv_t = dot2(tl.trans(dout_t), p_high, p_low, dv_t, SPLIT, PRECISION)
            dv_t = dot2(tl.trans(high_t), d_high, d_low, dv_t, SPLIT, PRECISION)
    out = j.to(tl.int64) * tokens + t
    part_ptr = section(ledger_ptr, part, STORED)
    k = mine + tl.arange(0, KM)
    tl.store(part_ptr + (out * D + h * K)[None, :] + k[:, None], dv, mask=(j < count)[None, :] & (k < K)[:, None])
    if KT:
        k_t = KM + tl.arange(0, KT)
        tl.store(
            part_ptr + (out * D + h * K)[None, :] + k_t[:, None], dv_t, mask=(j < count)[None, :] & (k_t < K)[:, None]
        )
    tl.store(ledger_ptr + radial + out * H + h, turned, mask=(j < count) & (mine == 0))


@kernel("dlr", "dq", "dgain", "tokens", "count", "site", "later", "sites", "chunk")
def query_backward(
    table,  # int64 [count]: addresses of sources; with ONE the source itself; None without SOURCE
    like_ptr,
    dlr_ptr,  # dlogit · r, float32 [tokens, H, later, count] (with ONE [H, later, tokens]), begins here
    dlr,  # plus so many numbers
    ledger_ptr,  # in and out, its sections at these offsets:
    dq,  # the queries' gradient, float32 [parts, sites, D]
    dgain,  # the norm gains', likewise
    rho_ptr,  # of the norm behind the first of the sites, float32 [tokens]; None without NORM
    dout_ptr,  # gradient of what one site gave behind its norm, [tokens, D]; None without NORM
    readout_ptr,
    tokens,
    count,
    site,  # the first of the later sites
    later,
    sites,
    chunk,  # tokens of one part
    SOURCE: tl.constexpr,
    ONE: tl.constexpr,
    NORM: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    KC: tl.constexpr,
    NC: tl.constexpr,
    SP: tl.constexpr,  # later sites per program
    TM: tl.constexpr,  # tokens and
    JP: tl.constexpr,  # sources that one matmul sums over
    PRECISION: tl.constexpr,
):
    h = tl.program_id(1) // NC
    k = tl.program_id(1) % NC * KC + tl.arange(0, KC)
    part = tl.program_id(2)
    s = tl.program_id(0) * SP + tl.arange(0, SP)
    x = tl.arange(0, TM * JP)
    j = x % JP
    here = (k < K)[None, :]
    to = (part.to(tl.int64) * sites + site) * D + h * K + k
    if SOURCE:
        base = table + 0 * j if ONE else tl.load(table + tl.minimum(j, count - 1)).to(like_ptr.dtype)
        dq_ptr = ledger_ptr + dq + to[None, :] + s[:, None] * D
        mask = (s < later)[:, None] & here
        acc = tl.load(dq_ptr, mask=mask, other=0.0)
    if NORM:
        gained = tl.zeros([KC], tl.float32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, tokens), TM):
        t = (start + x // JP).to(tl.int64)
        inside = (t < tokens) & (t < (part + 1) * chunk) & (j < count)
        t = tl.minimum(t, tokens - 1)  # a token outside is one inside once more, with weight zero
        at = (t * D)[:, None] + (h * K + k)[None, :]
        if SOURCE:
            v = tl.load(tl.multiple_of(base, 16)[:, None] + at, mask=here, other=0.0)
            if ONE:
                given = dlr_ptr + dlr + t[None, :] + (h * later + s)[:, None] * tokens.to(tl.int64)
            else:
                given = dlr_ptr + dlr + ((t * H + h) * (later * count) + j)[None, :] + s[:, None] * count
            sent = tl.load(given, mask=(s < later)[:, None] & inside[None, :], other=0.0)
        if NORM:
            dout = tl.load(dout_ptr + at, mask=here, other=0.0)
            readout = tl.load(readout_ptr + at, mask=here, other=0.0)
            rho = tl.load(rho_ptr + t, mask=inside, other=0.0)
        if SOURCE:
            acc = tl.dot(sent, v.to(tl.float32), acc, input_precision=PRECISION)
        if NORM:
            gained += tl.sum(dout.to(tl.float32) * readout.to(tl.float32) * rho[:, None], 0)
    if SOURCE:
        tl.store(dq_ptr, acc, mask=mask)
    if NORM:
        tl.store(ledger_ptr + dgain + to, gained, mask=k < K)  # a site gives once in a backward


@functools.cache
def block_constants(dtype: torch.dtype, dim: int, heads: int, block: int, backward: bool) -> dict:
    """The compile-time constants of the block kernels for blocks of up to ``block`` sites or sources."""
    width = dim // heads
    padded, tail = max(16, triton.next_power_of_2(width)), 0
    if padded > (128 if dtype == torch.float32 else 256):  # or numbers of the backward spill into memory
        padded = 128
    elif 16 < width < padded and triton.next_power_of_2(width - padded // 2) < padded // 2:
        padded, tail = padded // 2, max(16, triton.next_power_of_2(width - padded // 2))
    # The interpreter multiplies 16-bit matrices wrongly; it gets float32, of which no split is needed.
    dot = DTYPES[torch.float32 if INTERPRETED else dtype]
    narrow = dot != tl.float32
    sites = max(8, triton.next_power_of_2(block))
    # Fewer registers than the compiler would take, as long as it spills hardly a number: more programs at a time. What
    # it needs goes with the accumulators, and the backward holds a block's sources as well.
    held = (padded + tail) * sites
    registers = 128 if held <= (512 if backward else 1024) else 168 if held <= 1280 else None
    return {
        "D": dim, "H": heads, "K": width, "KM": padded, "KT": tail, "NC": 1 if tail else ceil(width, padded),
        "SP": sites, "GP": STEP,
        "DOT": dot, "SPLIT": narrow, "PRECISION": "ieee", "STORED": dot, "num_warps": 1, "num_stages": 1,
        "maxnreg": registers if narrow else None,
        "enable_fp_fusion": False,  # or a logit minus itself is not zero: it is a product, and would be fused
    }  # fmt: skip


@functools.cache
def row_constants(dim: int, heads: int, together: int, **flags: bool | int) -> dict:
    """The compile-time constants of the site kernels; flags are a kernel's own."""
    hp, (side, tiles) = triton.next_power_of_2(heads), tiles_of(dim // heads)
    sides = {"D": dim, "H": heads, "K": dim // heads, "TT": together, "HP": hp, "KP": side, "TILES": tiles}
    # Eight numbers of a row a thread, but four of a tile, or its loads are narrow.
    warps = max(1, min(16, hp * side * tiles // 256, hp * side // 128))
    return {**flags, **sides, "num_warps": triton.next_power_of_2(warps)}


@functools.cache
def query_constants(dtype: torch.dtype, dim: int, heads: int, count: int, **flags: bool) -> dict:
    """The compile-time constants of `query_backward` for so many sources."""
    width, several = dim // heads, triton.next_power_of_2(count)
    padded = min(max(16, triton.next_power_of_2(width)), 64)
    return {
        **flags, "D": dim, "H": heads, "K": width, "KC": padded, "NC": ceil(width, padded), "SP": STEP,
        "TM": max(1, 32 // several), "JP": several, "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": 1,
    }  # fmt: skip


class Sections(NamedTuple):
    """Where the parts of a ledger's gradient begin in it, and its length, counted in float32 numbers."""

    part: int  # what later blocks send a block's sources, stored [room, tokens, D]
    stats: int  # lse and δ, float32 [tokens, H, sites, 2]
    radial: int  # the norm's share of part, float32 [room, tokens, H]
    dlr: int  # dlogit · r of one source, float32 [H, room, tokens]
    dq: int  # the queries' gradient, float32 [parts, sites, D]
    dgain: int  # the norm gains', float32 [parts, sites, D]
    end: int


def parts_of(tokens: int) -> int:
    """Into how many parts the tokens are cut for the queries' gradient; the parts are added in a fixed order."""
    return 2 if INTERPRETED else min(64, ceil(tokens, 64))


@functools.cache
def sections(tokens: int, dim: int, dtype: torch.dtype, sites: int, room: int, heads: int) -> Sections:
    """For storage in this dtype. Every section begins at a multiple of 16 bytes, and has room behind it."""
    part = ceil(room * tokens * dim * dtype.itemsize, 4)
    lengths = part, 2 * tokens * heads * sites, room * tokens * heads, tokens * heads * room
    parameters = parts_of(tokens) * sites * dim
    padded = [4 * ceil(n, 4) + APART for n in (*lengths, parameters, parameters)]
    return Sections(*itertools.accumulate(padded, initial=0))


def sections_for(like: Tensor, sites: int, room: int, heads: int) -> Sections:
    return sections(tokens_of(like), like.shape[-1], stored(like), sites, room, heads)


def passed_on(dummy: Tensor) -> Tensor:
    """The dummy that stands for this one from here on: one number, which nobody reads."""
    return dummy.new_empty(()).expand(dummy.shape)


@operation("open_rows")
def open_rows(dout: Tensor, entry: int, count: int) -> Tensor:
    """The gradient of ``count`` rows, stored [count, B, T, D], from the last that the loss depends on, ``entry``.

    Its gradient ``dout`` [B, T, D] is an argument so that a compiler does not allocate before that is known.
    """
    rows = dout.new_empty(count, *dout.shape, dtype=stored(dout))
    rows[entry + 1 :] = 0
    return rows


@open_rows.fake
def _(dout, entry, count):
    return dout.new_empty(count, *dout.shape, dtype=stored(dout))


@operation("open_ledger")
def open_ledger(dout: Tensor, site: int, sites: int, room: int, heads: int) -> Tensor:
    """The gradient of a ledger, from the last site that the loss depends on; later sites weigh nothing.

    ``dout`` is an argument as in `open_rows`.
    """
    tokens, at = tokens_of(dout), sections_for(dout, sites, room, heads)
    ledger = dout.new_empty(at.end, dtype=torch.float32)
    ledger[at.dq :] = 0
    if site + 1 < sites:
        stats = ledger[at.stats :][: 2 * tokens * heads * sites].view(tokens, heads, sites, 2)
        stats[:, :, site + 1 :, 0] = torch.inf  # lse
        stats[:, :, site + 1 :, 1] = 0  # δ
        ledger[: at.stats] = 0
        ledger[at.radial : at.dlr] = 0
    return ledger


@open_ledger.fake
def _(dout, site, sites, room, heads):
    return dout.new_empty(sections_for(dout, sites, room, heads).end, dtype=torch.float32)


# start: queries and norm gains in, ledger and rows out; their gradients come out of the ledger at the very end --------


@operation("start")
def start(
    q: Tensor, gains: Tensor | None, like: Tensor, cut: int, room: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Ledger, front and back for queries q ⊙ g, norm gains (both float32 [sites, D]) and sources like this one.

    The front has the rows of the sites before ``cut``.
    """
    ledger = q.new_empty(()).expand(sections_for(like, q.shape[0], room, heads).end)
    rows = (like.new_empty((), dtype=stored(like)).expand(n, *like.shape) for n in (cut, q.shape[0] - cut))
    return ledger, *rows


start.fake(start.forward)  # it computes nothing


def _start_setup(ctx, inputs, output):
    q, gains, like, _, room, heads = inputs
    ctx.set_materialize_grads(False)
    ctx.shape, ctx.gains = (parts_of(tokens_of(like)), *q.shape), gains is not None
    ctx.at = sections_for(like, q.shape[0], room, heads)


def _start_backward(ctx, ledger, *_):
    if ledger is None:
        return None, None
    length = math.prod(ctx.shape)
    dq, dgain = (ledger[at:][:length].view(ctx.shape).sum(0) for at in (ctx.at.dq, ctx.at.dgain))
    return dq, dgain if ctx.gains else None


start.differentiable(_start_setup, _start_backward, first=2)


# begin: phase 1 of a block of sites. In the backward, the sources published here gather from all sites after them ----


@operation("begin")
def begin(
    ledger: Tensor, front: Tensor, back: Tensor, newest: Tensor | None, halves: Tensor, scale: Tensor,
    sources: list[Tensor], rs: list[Tensor], fresh: int, site: int, end: int, room: int, heads: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What the online softmax of the sites from ``site`` to ``end`` has come to behind all finished sources.

    Args:
        ledger, front, back: as they were passed on.
        newest: the source that was written last and that no site has read yet, [B, T, D], or None.
        halves, scale: all queries, `halves_of` them.
        sources, rs: the older finished sources, [B, T, D] each, and r of each, float32 [B, T].
        fresh: how many of these, the last, become readable for later blocks here; newest is another.
        site, end: sites that share this phase 1, at most 16.
        room, heads, eps: sources that become readable at once, at most; as in `route`.

    Returns:
        Ledger, front and back; acc, float32 [end - site, B, T, D]; m and l, float32 [end - site, B, T, H, 2]; r of
        ``newest``.
    """
    like = sources[0] if newest is None else newest
    count, dim, tokens = end - site, like.shape[-1], tokens_of(like)
    acc = like.new_empty(count, *like.shape, dtype=torch.float32)
    ml = like.new_empty(count, *like.shape[:-1], heads, 2, dtype=torch.float32)
    r = like.new_empty(like.shape[:-1], dtype=torch.float32)
    if tokens:
        if newest is not None:
            tt = together(tokens)
            norm_forward((ceil(tokens, tt), 1, 1), site_constants(dim, 1, tt), newest, r, tokens, eps)
            sources, rs = [*sources, newest], [*rs, r]
        constants, scores, n = block_constants(like.dtype, dim, heads, count, False), None, len(sources)
        columns = halves.new_zeros(2, dim, constants["SP"])
        columns[..., :count] = halves[:, site:end].transpose(1, 2)
        table, (high, low) = addresses(sources), columns.unbind()
        if constants["NC"] > 1:
            scores = like.new_empty(tokens, heads, n, constants["SP"], dtype=torch.float32)
            block_scores((tokens, heads, ceil(n, STEP)), constants, table, like, high, low, scores, n)
        block_forward(
            (tokens, heads, constants["NC"]), constants,
            table, like, torch.stack(rs), high, low, scale, scores, acc, ml, tokens, n, site, count,
        )  # fmt: skip
    return *map(passed_on, (ledger, front, back)), acc, ml, r


@begin.fake
def _(ledger, front, back, newest, halves, scale, sources, rs, fresh, site, end, room, heads, eps):
    like = sources[0] if newest is None else newest
    acc = like.new_empty(end - site, *like.shape, dtype=torch.float32)
    ml, r = acc.new_empty(*acc.shape[:-1], heads, 2), acc.new_empty(like.shape[:-1])
    return *map(passed_on, (ledger, front, back)), acc, ml, r


@operation("begin_backward", mutates=("ledger",))
def begin_backward(
    ledger: Tensor, front: Tensor | None, back: Tensor, halves: Tensor, scale: Tensor, sources: list[Tensor],
    rs: list[Tensor], newest: bool, site: int, room: int, heads: int,
) -> Tensor:  # fmt: skip
    """Enter what the sites from ``site`` on send the sources; returns the gradient of the last if it is ``newest``.

    ``front`` is None where none of these sites has its rows there.
    """
    like, count, sites = sources[0], len(sources), halves.shape[1]
    front, cut = back if front is None else front, sites - len(back)
    dim, tokens, later = like.shape[-1], tokens_of(like), sites - site
    dv = torch.empty_like(like, dtype=stored(like)) if newest else like.new_empty(0, dtype=stored(like))
    if tokens:
        at = sections_for(like, sites, room, heads)
        constants, scores = block_constants(like.dtype, dim, heads, count, True), None
        table, r, (high, low) = addresses(sources), torch.stack(rs), halves.unbind()
        dlr = scale.new_empty(tokens, heads, later, count)
        if constants["NC"] > 1:
            scores = scale.new_empty(tokens, heads, later, 2, constants["SP"])
            block_scores_backward(
                (tokens, heads, ceil(later, STEP)), constants,
                table, like, front, back, high, low, scores, tokens, count, site, cut, sites,
            )  # fmt: skip
        block_backward(
            (tokens, heads, constants["NC"]), constants,
            table, like, r, front, back, ledger, at.stats, at.part, at.radial, high, low, scale, scores, dlr,
            tokens, count, site, cut, sites,
        )  # fmt: skip
        constants = query_constants(like.dtype, dim, heads, count, SOURCE=True, ONE=False, NORM=False)
        parts = parts_of(tokens)
        query_backward(
            (ceil(later, STEP), heads * constants["NC"], parts), constants,
            table, like, dlr, 0, ledger, at.dq, at.dgain, None, None, None,
            tokens, count, site, later, sites, ceil(tokens, parts),
        )  # fmt: skip
        if newest:
            tt, padded = together(tokens), triton.next_power_of_2(heads)
            constants = site_constants(dim, 1, tt, HEADS=padded, DEPTH=heads, STORED=DTYPES[dv.dtype])
            norm_backward(
                (ceil(tokens, tt), 1, 1), constants,
                sources[-1], rs[-1], ledger, at.part, at.radial, dv, tokens, count - 1,
            )  # fmt: skip
    return dv.to(like.dtype)


@begin_backward.fake
def _(ledger, front, back, halves, scale, sources, rs, newest, site, room, heads):
    return torch.empty_like(sources[0]) if newest else sources[0].new_empty(0)


def _begin_setup(ctx, inputs, output):
    _, _, back, newest, halves, scale, sources, rs, fresh, site, _, room, heads, _ = inputs
    *_, acc, ml, r = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(acc, ml, r)
    published = len(sources) - fresh
    sources, rs = sources[published:], rs[published:]
    if newest is not None:
        sources, rs = [*sources, newest], [*rs, r]
    ctx.numbers, ctx.back = (newest is not None, site, room, heads), len(back)
    ctx.save_for_backward(halves, scale, *sources, *rs)


def _begin_backward(ctx, ledger, front, back, *_):
    halves, scale, *both = ctx.saved_tensors
    if ledger is None or not both:  # no later site has a gradient, or nothing was published
        return ledger, front, back, None
    if back is None:  # none of its sites has one
        back = open_rows.inside(ctx)(both[0], -1, ctx.back)
    n = len(both) // 2
    dv = begin_backward.inside(ctx)(ledger, front, back, halves, scale, both[:n], both[n:], *ctx.numbers)
    return ledger, front, back, dv if ctx.numbers[0] else None


begin.differentiable(_begin_setup, _begin_backward, first=4)


# read: one site; in the backward it enters its row, and finishes its newest source ----------------------------------


@operation("read")
def read(
    ledger: Tensor, rows: Tensor, newest: Tensor | None, like: Tensor, q: Tensor, gains: Tensor | None,
    early: Tensor | None, early_ml: Tensor | None, local: list[Tensor], rs: list[Tensor], site: int, nth: int,
    end: int, cut: int, slot: int, room: int, heads: int, eps: float, norm_eps: float, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The read-out of one site, phase 1 merged with the sources of its own block.

    Args:
        ledger, rows: as they were passed on; the rows are the front for the sites before ``cut``, else the back.
        newest: the source written before this site, [B, T, D], or None.
        like: of the shape and dtype of a source.
        q: all queries q ⊙ g, float32 [sites, D].
        gains: of the RMSNorms behind the sites, float32 [sites, D]: the read-out is given behind its norm; or None.
        early, early_ml: phase 1 of the block, from `begin`; None in a block without one, where a source is needed.
        local, rs: the older sources of the block, [B, T, D] each, and r of each, float32 [B, T]; their gradients are
            their own sites' business.
        site, nth: this site, in the model and in the block.
        end: the first site that does not read ``newest`` within the block.
        cut: the first site whose row is in the back.
        slot: of ``newest`` among the sources that the next block publishes; -1 if it is none of them.
        room, heads, eps, norm_eps: as in `begin`; of the RMSNorms.
        keep: whether there will be a backward.

    Returns:
        Ledger and rows; the read-out in the storage dtype, [B, T, D], with ``gains`` behind the norm; r of ``newest``;
        and for the backward (empty without ``keep``) the read-out itself (with ``gains``, else empty), its rest, lse
        [B, T, H], and the norm's rho [B, T] (with ``gains``, else empty).
    """
    sources, tokens = local if newest is None else [*local, newest], tokens_of(like)
    norm, tt = gains is not None, together(tokens)
    readout, normed = (torch.empty_like(like, dtype=stored(like)) if x else None for x in (keep or not norm, norm))
    rest = room_for_rest(readout, like.dtype) if keep else None
    lse = like.new_empty(*like.shape[:-1], heads, dtype=torch.float32) if keep else None
    r = like.new_empty(like.shape[:-1], dtype=torch.float32)
    rho = torch.empty_like(r) if keep and norm else None
    if tokens:
        flags = dict(COUNT=len(sources), EARLY=early is not None, KEEP=keep, REST=rest is not None, NORM=norm)
        constants = row_constants(like.shape[-1], heads, tt, **flags)
        read_forward(
            (ceil(tokens, tt), 1, 1), constants, tuple(sources) or (like,), tuple(rs) or (r,),
            q, gains, early, early_ml, readout, rest, normed, lse, r, rho, tokens, site, nth, eps, norm_eps,
        )  # fmt: skip
    if not keep:
        given = (normed if norm else readout).to(like.dtype)
        return passed_on(ledger), passed_on(rows), given, r, *(like.new_empty(0) for _ in range(4))
    readout, rest = rounded(readout, rest, like.dtype)
    if norm:
        return passed_on(ledger), passed_on(rows), normed.to(like.dtype), r, readout, rest, lse, rho
    return passed_on(ledger), passed_on(rows), readout, r, like.new_empty(0), rest, lse, like.new_empty(0)


@read.fake
def _(ledger, rows, newest, like, q, gains, early, early_ml, local, rs, site, nth, end, cut, slot, room, heads, *more):
    given, r = torch.empty_like(like), q.new_empty(like.shape[:-1])
    if not more[-1]:  # keep
        return passed_on(ledger), passed_on(rows), given, r, *(like.new_empty(0) for _ in range(4))
    readout, rho = (like.new_empty(0) if gains is None else torch.empty_like(x) for x in (like, r))
    dummies, lse = (passed_on(ledger), passed_on(rows)), q.new_empty(*like.shape[:-1], heads)
    return *dummies, given, r, readout, fake_rest(like), lse, rho


@operation("read_backward", mutates=("ledger", "rows"))
def read_backward(
    ledger: Tensor, rows: Tensor, dout: Tensor, readout: Tensor, rest: Tensor, lse: Tensor, rho: Tensor, q: Tensor,
    gains: Tensor | None, newest: Tensor | None, r: Tensor, site: int, end: int, entry: int, slot: int,
    room: int, heads: int,
) -> Tensor:  # fmt: skip
    """Enter this site's row; returns the gradient of the newest source (empty without one)."""
    tokens, dim, sites, count = tokens_of(readout), readout.shape[-1], q.shape[0], end - site
    source, norm = newest is not None, gains is not None
    dv = torch.empty_like(readout, dtype=stored(readout)) if source else readout.new_empty(0, dtype=stored(readout))
    if tokens:
        at, tt = sections_for(readout, sites, room, heads), together(tokens)
        held = rest if rest.numel() else None
        flags = dict(SOURCE=source, NORM=norm)
        own = dict(REST=held is not None, PART=slot >= 0, STORED=DTYPES[dv.dtype])
        constants = row_constants(dim, heads, tt, **flags, **own)
        source_backward(
            (ceil(tokens, tt), 1, 1), constants,
            dout, readout, held, lse, newest, r if source else None, q, gains, rho if norm else None,
            rows, ledger, at.part, at.stats, at.radial, at.dlr, dv, tokens, site, entry, slot, count, sites,
        )  # fmt: skip
        if source or norm:
            constants = query_constants(readout.dtype, dim, heads, 1, ONE=True, **flags)
            parts = parts_of(tokens)
            query_backward(
                (1, heads * constants["NC"], parts), constants,
                newest, readout, ledger, at.dlr, ledger, at.dq, at.dgain, rho if norm else None, dout, readout,
                tokens, 1, site, count, sites, ceil(tokens, parts),
            )  # fmt: skip
    return dv.to(readout.dtype)


@read_backward.fake
def _(ledger, rows, dout, readout, rest, lse, rho, q, gains, newest, *numbers):
    return torch.empty_like(readout) if newest is not None else readout.new_empty(0)


def _read_setup(ctx, inputs, output):
    _, rows, newest, _, q, gains, _, _, _, _, site, _, end, cut, slot, room, heads, *_ = inputs
    _, _, given, r, readout, rest, lse, rho = output
    ctx.numbers, ctx.rows = (site, end, site if site < cut else site - cut, slot, room, heads), len(rows)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(r)
    ctx.save_for_backward(q, gains, given if gains is None else readout, rest, lse, rho, newest, r)


def _read_backward(ctx, ledger, rows, dout, *_):
    q, gains, readout, rest, lse, rho, newest, r = ctx.saved_tensors
    site, _, entry, _, room, heads = ctx.numbers
    dout = torch.zeros_like(readout) if dout is None else laid_out(dout, readout.dtype)
    if ledger is None:
        ledger = open_ledger.inside(ctx)(dout, site, q.shape[0], room, heads)
    if rows is None:
        rows = open_rows.inside(ctx)(dout, entry, ctx.rows)
    dv = read_backward.inside(ctx)(ledger, rows, dout, readout, rest, lse, rho, q, gains, newest, r, *ctx.numbers)
    return ledger, rows, None if newest is None else dv


read.differentiable(_read_setup, _read_backward, first=3, shown=4)


def halves_of(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries q ⊙ g, float32 [sites, D], as (high + low) · scale: [2, sites, D] of the storage dtype, and [sites].

    The scale is a power of two, so the parts are exact and no query is too large or too small for float16.
    """
    dtype = torch.float32 if INTERPRETED else dtype
    scale = torch.exp2(torch.ceil(torch.log2(q.abs().amax(1, keepdim=True).clamp_min(1e-30))))
    q = q / scale
    high = q.to(dtype)
    return torch.stack((high, (q - high.float()).to(dtype))), scale.flatten()


class TwoPhase:
    """The schedule for one forward pass over Full AttnRes, any number of heads.

    Args:
        q: the queries times the gains, q ⊙ g, float32 [sites, D].
        embedding: the first source, [B, T, D].
        heads, eps: as in `route`.
        block: sites that share a phase 1, 1 to 16 (the first, one less, need none); it changes the order of the work,
            not the result.
        norms: the RMSNorm behind every site, of the embedding's dtype, for `read_normed`.
    """

    def __init__(
        self, q: Tensor, embedding: Tensor, heads: int, eps: float, block: int, norms: Sequence[nn.RMSNorm] = ()
    ):
        check_runnable(embedding.dtype, embedding.device)
        embedding = laid_out(embedding, embedding.dtype)
        gains = torch.stack([norm.weight for norm in norms]).float() if norms else None
        self.norms, self.gains = norms, gains.detach() if norms else None
        self.norm_eps = norms[0].eps if norms else 0.0
        self.q, self.heads, self.eps, self.block = q.detach(), heads, eps, block
        self.like = embedding.detach()  # every source has its shape, layout and dtype
        self.cut = self.last_quarter(len(q))
        self.ledger, self.front, self.back = start(q, gains, self.like, self.cut, self.room, heads)
        self.halves, self.scale = halves_of(self.q, embedding.dtype)
        self.site = self.first = 0  # the next site, and the first of its block
        self.end = min(block - 1, len(q))  # of that block, the first, so that phase 1 reads full blocks of sources,
        self.early = self.early_ml = None  # and none before there is one: it would read the embedding alone
        self.done: list[Tensor] = []  # the sources that are read in phase 1,
        self.local: list[Tensor] = []  # those of this block that were read since,
        self.rs: list[Tensor] = []  # and r of all of them
        self.write(embedding)

    @property
    def room(self) -> int:
        """Sources that become readable at once, at most."""
        return self.block

    def last_quarter(self, sites: int) -> int:
        """Where the back's rows begin: with a block, whose rows are read as one, in the last quarter of the sites."""
        return min(self.block * (3 * sites // 4 // self.block + 1) - 1, sites)

    def write(self, output: Tensor) -> None:
        self.newest: Tensor | None = laid_out(output, self.like.dtype)

    def read(self) -> Tensor:
        """The read-out of the next site, [B, T, D]."""
        return self.next(None)

    def read_normed(self, norm: nn.RMSNorm) -> Tensor:
        """``norm(read())``, by one kernel if the norm is the next of ``norms``.

        torch.compile makes kernels of norms itself, and computes this one again in the backward: a read-out and what is
        behind its norm would both be kept, a row of [B, T, D] more per site. That costs a hundredth of a step's time.
        """
        if torch.compiler.is_compiling():
            return checkpoint(norm, self.read(), use_reentrant=False)
        return self.next(self.gains) if self.norms and norm is self.norms[self.site] else norm(self.read())

    def next(self, gains: Tensor | None) -> Tensor:
        newest = self.newest
        if self.site == self.end:
            self.begin(newest, min(self.site + self.block, len(self.q)))
            newest = None
        published = newest is not None and self.end < len(self.q)
        readout, r = self.merge(newest, self.end, len(self.local) if published else -1, gains)
        if newest is not None:
            self.local.append(newest.detach())
            self.rs.append(r)
        return readout

    def begin(self, newest: Tensor | None, end: int) -> None:
        """Publish the block's sources to all later sites, and make phase 1 for the sites up to ``end``."""
        if self.site == len(self.q):
            raise ValueError(f"read {self.site + 1} of a pass over {self.site} sites; accepted: one read per site")
        sources, fresh = self.done + self.local, len(self.local)
        self.ledger, self.front, self.back, self.early, self.early_ml, r = begin(
            self.ledger, self.front, self.back, newest, self.halves, self.scale, sources, self.rs, fresh,
            self.site, end, self.room, self.heads, self.eps,
        )  # fmt: skip
        if newest is not None:
            sources.append(newest.detach())
            self.rs.append(r)
        self.done, self.local, self.first, self.end = sources, [], self.site, end

    def merge(self, newest: Tensor | None, end: int, slot: int, gains: Tensor | None) -> tuple[Tensor, Tensor]:
        """The read-out of this site, and r of ``newest``."""
        rows = self.front if self.site < self.cut else self.back
        self.ledger, rows, readout, r = read(
            self.ledger, rows, newest, self.like, self.q, gains, self.early, self.early_ml, self.local,
            self.rs[len(self.done) :], self.site, self.site - self.first, end, self.cut, slot, self.room, self.heads,
            self.eps, self.norm_eps, torch.is_grad_enabled(),
        )  # fmt: skip
        if self.site < self.cut:
            self.front = rows
        else:
            self.back = rows
        self.site += 1
        return readout, r


class TwoPhaseBlock(TwoPhase):
    """The same for Block AttnRes with blocks of ``block`` sublayers: a block's sites share a phase 1, 16 at a time."""

    def __init__(self, *arguments):
        self.partial: Tensor | None = None
        self.written = -1  # sublayers in the partial sum; the embedding, written first, is a source by itself
        super().__init__(*arguments)

    @property
    def room(self) -> int:
        return 1

    def last_quarter(self, sites: int) -> int:
        return 3 * sites // 4

    def write(self, output: Tensor) -> None:
        self.partial = output if self.partial is None else self.partial + output
        self.written += 1
        self.newest = laid_out(self.partial, self.like.dtype)
        if self.written in (0, self.block):
            self.partial, self.written, self.end = None, 0, self.site

    def next(self, gains: Tensor | None) -> Tensor:
        newest, finished = self.newest, self.partial is None
        if self.site == self.end:
            end = self.site + min(self.block - self.written, LARGEST)
            self.begin(newest if finished else None, min(end, len(self.q)))
        return self.merge(None if finished else newest, self.site + 1, -1, gains)[0]
