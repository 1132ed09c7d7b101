"""Depth routing for a block of sites at a time, exact, forward and backward.

Pseudo-queries do not depend on the input. So all sites of a block read the sources that were finished before it in ONE
pass (phase 1, `block_forward`), and each site then merges in what was written inside its block (phase 2,
`mhar_minimal.kernels.fused.site_forward`); for an online softmax that is exact.

The backward is the same schedule mirrored. A source needs its gradient only when its own sublayer is differentiated,
and by then the gradient of every later read-out is known. So gradients are gathered, not scattered: at a block's
boundary the block's sources read the gradients of all later blocks' read-outs in one pass (`block_backward`), and each
source then adds what its own block's sites send it (`source_backward`). No source gradient is ever read, added to and
written again.

What the gathering needs, every later site's dout, lse and δ = dout · read-out, travels backwards along the autograd
graph as the gradient of a *ledger*: three dummies of zero size in memory, [sites, tokens, D] and so on, that the
forward hands from one operation to the next. In the backward the last site allocates their gradients, and every site
before enters its row. There is no state beside the graph: checkpointing, a second backward and torch.compile see
ordinary operations. The price is that all rows live until the backward ends.

Heads are independent programs: r = 1 / sqrt(mean(v²) + ε) is computed once per source, and then a head needs its own
channels only. The block kernels' matmuls take the stored 16-bit values as they are and split what is float32 (queries,
weights) into two 16-bit parts, so they are exact to about twice the precision of what is stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mhar_minimal.kernels.fused import (
    INTERPRETED,
    addresses,
    check_runnable,
    has_rest,
    laid_out,
    operation,
    rounded,
    site_forward,
    site_shape,
    stored,
)

STEP = 16  # sources, or later sites, per step of the block kernels
LARGEST = 16  # sites that one phase 1 serves
PARTS = 2 if INTERPRETED else 64  # of the queries' gradient, added in a fixed order


@triton.jit(do_not_specialize=["tokens"])
def norm_forward(v_ptr, r_ptr, tokens, eps, D: tl.constexpr, DP: tl.constexpr, TT: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT)
    d = tl.arange(0, DP)
    mask = (t < tokens)[:, None] & (d < D)[None, :]
    v = tl.load(v_ptr + t[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(r_ptr + t, tl.rsqrt(tl.sum(v * v, 1) / D + eps), mask=t < tokens)


@triton.jit(do_not_specialize=["tokens"])
def norm_backward(v_ptr, r_ptr, part_ptr, dr_ptr, dv_ptr, tokens, D: tl.constexpr, DP: tl.constexpr, TT: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT)
    d = tl.arange(0, DP)
    row = t[:, None] * D + d[None, :]
    mask = (t < tokens)[:, None] & (d < D)[None, :]
    v = tl.load(v_ptr + row, mask=mask, other=0.0).to(tl.float32)
    part = tl.load(part_ptr + row, mask=mask, other=0.0).to(tl.float32)
    r = tl.load(r_ptr + t, mask=t < tokens, other=0.0)
    dr = tl.load(dr_ptr + t, mask=t < tokens, other=0.0)
    tl.store(dv_ptr + row, part - (r * r * r * dr / D)[:, None] * v, mask=mask)


@triton.jit(do_not_specialize=["tokens", "site", "count", "sites"])
def source_backward(
    dout_ptr,  # gradient of this site's read-out, [tokens, D]
    readout_ptr,
    rest_ptr,
    lse_ptr,
    ledger_ptr,  # in and out, [sites, tokens, D]
    stats_ptr,  # in and out, float32 [tokens, H, sites, 2]
    v_ptr,  # the source written before this site, [tokens, D]; None without SOURCE
    r_ptr,
    q_ptr,  # queries of this and the later sites, float32 [., D]
    part_ptr,  # gradient of the source from later blocks, and of its r; None without PART
    dr_ptr,
    dv_ptr,  # out, [tokens, D]
    dlr_ptr,  # out, float32 [tokens, H, count]
    tokens,
    site,
    count,  # sites of this block that read the source, this one first
    sites,
    SOURCE: tl.constexpr,
    PART: tl.constexpr,
    REST: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    TT: tl.constexpr,
    HP: tl.constexpr,
    KP: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * TT + tl.arange(0, TT)
    h = tl.arange(0, HP)
    k = tl.arange(0, KP)
    channel = h[:, None] * K + k[None, :]
    inside = (h < H)[:, None] & (k < K)[None, :]
    row = t[:, None, None] * D + channel[None]  # [TT, HP, KP]
    here = (t < tokens)[:, None, None] & inside[None]
    head = t[:, None] * H + h[None, :]  # [TT, HP]
    head_here = (t < tokens)[:, None] & (h < H)[None, :]
    plane = tokens.to(tl.int64) * D
    stat = stats_ptr + head * (2 * sites)
    dout = tl.load(dout_ptr + row, mask=here, other=0.0).to(tl.float32)
    readout = tl.load(readout_ptr + row, mask=here, other=0.0).to(tl.float32)
    if REST:
        readout += tl.load(rest_ptr + row, mask=here, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + head, mask=head_here, other=0.0)
    delta = tl.sum(dout * readout, 2)
    tl.store(ledger_ptr + site * plane + row, dout, mask=here)
    tl.store(stat + 2 * site, lse, mask=head_here)
    tl.store(stat + 2 * site + 1, delta, mask=head_here)
    if SOURCE:
        v = tl.load(v_ptr + row, mask=here, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + t, mask=t < tokens, other=0.0)
        dv, radial = contribution(v, r, q_ptr + channel, inside, dout, lse, delta, dlr_ptr + head * count, head_here)
        for i in range(1, count):
            at = site + i
            dout = tl.load(ledger_ptr + at * plane + row, mask=here, other=0.0).to(tl.float32)
            lse = tl.load(stat + 2 * at, mask=head_here, other=0.0)
            delta = tl.load(stat + 2 * at + 1, mask=head_here, other=0.0)
            to = dlr_ptr + head * count + i
            more, turned = contribution(v, r, q_ptr + i * D + channel, inside, dout, lse, delta, to, head_here)
            dv += more
            radial += turned
        shrink = tl.sum(radial, 1) * r * r  # [TT]: r³ ∂L/∂r of the norm's backward
        if PART:
            dv += tl.load(part_ptr + row, mask=here, other=0.0).to(tl.float32)
            shrink += tl.load(dr_ptr + t, mask=t < tokens, other=0.0) * r * r * r
        tl.store(dv_ptr + row, dv - (shrink / D)[:, None, None] * v, mask=here)


@triton.jit
def contribution(v, r, q_ptr, inside, dout, lse, delta, dlr_ptr, head_here):
    """What one site sends the source v: its gradient [TT, HP, KP] without the norm's part, and dlogit · logit."""
    q = tl.load(q_ptr, mask=inside, other=0.0)
    logit = tl.sum((v * r[:, None, None]) * q[None], 2)
    p = tl.exp(logit - lse)
    dlogit = p * (tl.sum(dout * v, 2) - delta)
    dlr = dlogit * r[:, None]
    tl.store(dlr_ptr, dlr, mask=head_here)
    return p[:, :, None] * dout + dlr[:, :, None] * q[None], dlogit * logit


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
def rows(base, h, start, K: tl.constexpr, KC: tl.constexpr, FULL: tl.constexpr, DOT: tl.constexpr):
    """Channels start to start + KC of head h of the rows that begin at the pointers base [N]: [N, KC]."""
    k = start + tl.arange(0, KC)
    at = tl.multiple_of(base, 16)[:, None] + (h * K + k)[None, :]
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


@triton.jit(do_not_specialize=["count"])
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
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    i = tl.program_id(2) * GP + tl.arange(0, GP)
    base = tl.load(table + tl.minimum(i, count - 1)).to(like_ptr.dtype) + t * D
    logit = tl.zeros([GP, SP], tl.float32)
    for c in range(NC):
        high, low = columns(high_ptr, low_ptr, h, c * KM, K, KM, SP, KM * NC == K, DOT, SPLIT)
        logit = dot2(rows(base, h, c * KM, K, KM, KM * NC == K, DOT), high, low, logit, SPLIT, PRECISION)
    to = scores_ptr + ((t * H + h) * count + i)[:, None] * SP + tl.arange(0, SP)[None, :]
    tl.store(to, logit, mask=(i < count)[:, None])


@triton.jit(do_not_specialize=["tokens", "count", "site", "sites"])
def block_forward(
    table,  # int64 [count]: addresses of the finished sources, each [tokens, D]
    like_ptr,  # anything of the sources' dtype
    r_ptr,  # float32 [count, tokens]
    high_ptr,  # the block's queries, float32 [D, SP] as high + low in the storage dtype, times scale [sites]
    low_ptr,
    scale_ptr,
    scores_ptr,  # float32 [tokens, H, count, SP], from block_scores where NC > 1
    out_ptr,  # out, float32 [sites, tokens, D]
    lse_ptr,  # out, float32 [sites, tokens, H]
    tokens,
    count,
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
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    mine = tl.program_id(2) * KM
    FM: tl.constexpr = KM * NC <= K
    FT: tl.constexpr = KM + KT == K
    s = tl.minimum(tl.arange(0, SP), sites - 1)
    scale = tl.load(scale_ptr + s)
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
            v = rows(base, h, 0, K, KM, FM, DOT)
            logit = dot2(v, high, low, logit, SPLIT, PRECISION)
            if KT:
                v_t = rows(base, h, KM, K, KT, FT, DOT)
                logit = dot2(v_t, high_t, low_t, logit, SPLIT, PRECISION)
        else:
            v = rows(base, h, mine, K, KM, FM, DOT)
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
    norm = 1 / l
    k = mine + tl.arange(0, KM)
    to = out_ptr + (row * D + h * K)[None, :] + k[:, None]
    tl.store(to, acc * norm[None, :], mask=(site < sites)[None, :] & (k < K)[:, None])
    if KT:
        k_t = KM + tl.arange(0, KT)
        to_t = out_ptr + (row * D + h * K)[None, :] + k_t[:, None]
        tl.store(to_t, acc_t * norm[None, :], mask=(site < sites)[None, :] & (k_t < K)[:, None])
    tl.store(lse_ptr + row * H + h, m + tl.log(l), mask=(site < sites) & (mine == 0))


@triton.jit(do_not_specialize=["tokens", "count", "site", "sites"])
def block_scores_backward(
    table,
    like_ptr,
    ledger_ptr,
    high_ptr,
    low_ptr,
    scores_ptr,  # out, float32 [tokens, H, later sites, 2, SP]: q · v and dout · v
    tokens,
    count,
    site,
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
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    s = site + tl.program_id(2) * GP + tl.arange(0, GP)
    at = tl.minimum(s, sites - 1)
    j = tl.arange(0, SP)
    base = tl.load(table + tl.minimum(j, count - 1)).to(like_ptr.dtype) + t * D
    back = ledger_ptr + (at.to(tl.int64) * tokens + t) * D
    logit = tl.zeros([GP, SP], tl.float32)
    dov = tl.zeros([GP, SP], tl.float32)
    for c in range(NC):
        high, low = queries(high_ptr, low_ptr, at, h, c * KM, D, K, KM, KM * NC == K, DOT, SPLIT)
        v = tl.trans(rows(base, h, c * KM, K, KM, KM * NC == K, DOT))
        logit = tl.dot(high, v, logit, input_precision=PRECISION)
        if SPLIT:
            logit = tl.dot(low, v, logit, input_precision=PRECISION)
        dov = tl.dot(rows(back, h, c * KM, K, KM, KM * NC == K, DOT), v, dov, input_precision=PRECISION)
    score = scores_ptr + ((t * H + h) * (sites - site) + s - site)[:, None] * (2 * SP) + j[None, :]
    tl.store(score, logit, mask=(s < sites)[:, None])
    tl.store(score + SP, dov, mask=(s < sites)[:, None])


@triton.jit(do_not_specialize=["tokens", "count", "site", "sites"])
def block_backward(
    table,  # int64 [count]: addresses of the block's sources
    like_ptr,
    r_ptr,  # float32 [count, tokens]
    ledger_ptr,  # [sites, tokens, D]: the read-outs' gradients
    stats_ptr,  # float32 [tokens, H, sites, 2]: lse and δ
    high_ptr,  # all queries, [sites, D]
    low_ptr,
    scale_ptr,
    scores_ptr,
    dv_ptr,  # out, [count, tokens, D]
    radial_ptr,  # out, float32 [count, tokens, H]: Σ over the later sites of dlogit · logit
    dlr_ptr,  # out, float32 [tokens, H, later sites, count]: dlogit · r
    tokens,
    count,
    site,  # the first later site
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
        v = tl.trans(rows(base, h, 0, K, KM, FM, DOT))
        if KT:
            v_t = tl.trans(rows(base, h, KM, K, KT, FT, DOT))
    dv = tl.zeros([KM, SP], tl.float32)
    if KT:
        dv_t = tl.zeros([KT, SP], tl.float32)
    radial = tl.zeros([SP], tl.float32)
    for start in range(site, sites, GP):
        s = start + tl.arange(0, GP)
        at = tl.minimum(s, sites - 1)
        row = at.to(tl.int64) * tokens + t
        back = ledger_ptr + row * D
        logit = tl.zeros([GP, SP], tl.float32)
        dov = tl.zeros([GP, SP], tl.float32)
        if NC == 1:
            high, low = queries(high_ptr, low_ptr, at, h, 0, D, K, KM, FM, DOT, SPLIT)
            dout = rows(back, h, 0, K, KM, FM, DOT)
            logit = tl.dot(high, v, logit, input_precision=PRECISION)
            if SPLIT:
                logit = tl.dot(low, v, logit, input_precision=PRECISION)
            dov = tl.dot(dout, v, dov, input_precision=PRECISION)
            if KT:
                high_t, low_t = queries(high_ptr, low_ptr, at, h, KM, D, K, KT, FT, DOT, SPLIT)
                dout_t = rows(back, h, KM, K, KT, FT, DOT)
                logit = tl.dot(high_t, v_t, logit, input_precision=PRECISION)
                if SPLIT:
                    logit = tl.dot(low_t, v_t, logit, input_precision=PRECISION)
                dov = tl.dot(dout_t, v_t, dov, input_precision=PRECISION)
        else:
            high, low = queries(high_ptr, low_ptr, at, h, mine, D, K, KM, FM, DOT, SPLIT)
            dout = rows(back, h, mine, K, KM, FM, DOT)
            score = scores_ptr + ((t * H + h) * (sites - site) + at - site)[:, None] * (2 * SP) + j[None, :]
            logit = tl.load(score)
            dov = tl.load(score + SP)
        scale = tl.load(scale_ptr + at)
        stat = stats_ptr + (t * H + h) * (2 * sites) + 2 * at
        lse = tl.load(stat)
        delta = tl.load(stat + 1)
        logit = logit * (scale[:, None] * r[None, :])
        p = tl.where((s < sites)[:, None], tl.exp(logit - lse[:, None]), 0.0)
        dl = tl.where((s > 0)[:, None], p * (dov - delta[:, None]), 0.0)  # site 0: one source, weight 1 whatever q
        radial += tl.sum(dl * logit, 0)
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
    k = mine + tl.arange(0, KM)
    tl.store(dv_ptr + (out * D + h * K)[None, :] + k[:, None], dv, mask=(j < count)[None, :] & (k < K)[:, None])
    if KT:
        k_t = KM + tl.arange(0, KT)
        tl.store(
            dv_ptr + (out * D + h * K)[None, :] + k_t[:, None], dv_t, mask=(j < count)[None, :] & (k_t < K)[:, None]
        )
    tl.store(radial_ptr + out * H + h, radial, mask=(j < count) & (mine == 0))


@triton.jit(do_not_specialize=["tokens", "count", "site", "later", "sites", "chunk"])
def query_backward(
    table,  # int64 [count]: addresses of sources
    like_ptr,
    dlr_ptr,  # float32 [tokens, H, later, count]: dlogit · r
    dq_ptr,  # in and out, float32 [PARTS, sites, D]
    tokens,
    count,
    site,  # the first of the later sites
    later,
    sites,
    chunk,  # tokens of one part
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
    base = tl.load(table + tl.minimum(j, count - 1)).to(like_ptr.dtype)
    acc = tl.zeros([SP, KC], tl.float32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, tokens), TM):
        t = (start + x // JP).to(tl.int64)
        inside = (t < tokens) & (t < (part + 1) * chunk) & (j < count)
        v = tl.load(
            tl.multiple_of(base + t * D, 16)[:, None] + (h * K + k)[None, :],
            mask=inside[:, None] & (k < K)[None, :],
            other=0.0,
        ).to(tl.float32)
        at = (t * H + h) * (later * count) + j
        dlr = tl.load(
            dlr_ptr + at[None, :] + s[:, None] * count, mask=(s < later)[:, None] & inside[None, :], other=0.0
        )
        acc = tl.dot(dlr, v, acc, input_precision=PRECISION)
    to = dq_ptr + (part.to(tl.int64) * sites + site + s)[:, None] * D + (h * K + k)[None, :]
    mask = (s < later)[:, None] & (k < K)[None, :]
    tl.store(to, tl.load(to, mask=mask, other=0.0) + acc, mask=mask)


def block_shape(like: Tensor, heads: int, block: int) -> dict:
    """The compile-time constants of the block kernels for blocks of up to ``block`` sites or sources."""
    dim, width = like.shape[-1], like.shape[-1] // heads
    padded, tail = max(16, triton.next_power_of_2(width)), 0
    if padded > 256:
        padded = 128
    elif 16 < width < padded and triton.next_power_of_2(width - padded // 2) < padded // 2:
        padded, tail = padded // 2, max(16, triton.next_power_of_2(width - padded // 2))
    exact = like.dtype == torch.float32
    dot = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[like.dtype]
    return {
        "D": dim, "H": heads, "K": width, "KM": padded, "KT": tail, "NC": 1 if tail else triton.cdiv(width, padded),
        "SP": max(8, triton.next_power_of_2(block)), "GP": STEP, "PRECISION": "ieee", "num_warps": 1, "num_stages": 1,
        "enable_fp_fusion": False,  # or a logit minus itself is not zero: it is a product, and would be fused
        # The interpreter multiplies 16-bit matrices wrongly; it gets float32, of which no split is needed.
        "DOT": tl.float32 if INTERPRETED else dot, "SPLIT": not (exact or INTERPRETED),
    }  # fmt: skip


def tokens_of(x: Tensor) -> int:
    return x[..., 0].numel()


def queries_of(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries q ⊙ g, float32 [sites, D], as (high + low) · scale: high and low of the storage dtype, scale [sites].

    The scale is a power of two, so the parts are exact and no query is too large or too small for float16.
    """
    scale = torch.exp2(torch.ceil(torch.log2(q.abs().amax(1, keepdim=True).clamp_min(1e-30))))
    high = (q / scale).to(dtype)
    return high, (q / scale - high.float()).to(dtype), scale.flatten()


def columns_of(part: Tensor, block: int) -> Tensor:
    """The same part of a block's queries, [sites, D], as [D, SP], zero beyond the last site."""
    out = part.new_zeros(part.shape[1], max(8, triton.next_power_of_2(block)))
    out[:, : part.shape[0]] = part.T
    return out


def dummies(q: Tensor, like: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """A ledger going forward: three tensors of the right shape, of one number each that nobody reads."""
    (sites, dim), tokens = q.shape, tokens_of(like)
    return (
        q.new_empty((), dtype=like.dtype).expand(sites, tokens, dim),
        q.new_empty(()).expand(tokens, heads, sites, 2),
        q.new_empty(()).expand(PARTS, sites, dim),
    )


def grid(shape: dict, tokens: int) -> tuple[int]:
    return (triton.cdiv(tokens, shape["TT"]),)


# start: queries in, ledger out; the queries' gradient comes out of the ledger at the very end ------------------------


@operation("start")
def start(q: Tensor, like: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """A ledger for queries q ⊙ g, float32 [sites, D], and sources like this one."""
    return dummies(q, like, heads)


@start.fake
def _(q, like, heads):
    return dummies(q, like, heads)


def _start_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)


def _start_backward(ctx, ledger, stats, dq):
    return (None if dq is None else dq.sum(0)), None, None


start.differentiable(_start_setup, _start_backward)


# finish: a source that no site of its own block reads gets its r ----------------------------------------------------


def token_of(v: Tensor) -> Tensor:
    """Stands for a source in the graph: what is gathered for it comes back as the gradient of this."""
    return v.new_empty(()).expand(v.shape)


@operation("finish")
def finish(v: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Token of a source [B, T, D], and r = 1 / sqrt(mean(v²) + eps), float32 [B, T]."""
    r = v.new_empty(v.shape[:-1], dtype=torch.float32)
    if v.numel():
        shape = site_shape(v, 1)
        norm_forward[grid(shape, tokens_of(v))](
            v, r, tokens_of(v), eps, D=shape["D"], DP=shape["KP"], TT=shape["TT"], num_warps=shape["num_warps"]
        )
    return token_of(v), r


@finish.fake
def _(v, eps):
    return token_of(v), v.new_empty(v.shape[:-1], dtype=torch.float32)


@operation("finish_backward")
def finish_backward(v: Tensor, r: Tensor, part: Tensor, dr: Tensor) -> Tensor:
    """Gradient of a source from that of its token and of its r."""
    dv = torch.empty_like(v, dtype=stored(v))
    if v.numel():
        shape = site_shape(v, 1)
        norm_backward[grid(shape, tokens_of(v))](
            v, r, part, dr, dv, tokens_of(v), D=shape["D"], DP=shape["KP"], TT=shape["TT"], num_warps=shape["num_warps"]
        )
    return dv.to(v.dtype)


@finish_backward.fake
def _(v, r, part, dr):
    return torch.empty_like(v)


def _finish_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], output[1])


def _finish_backward(ctx, part, dr):
    if part is None:
        return None, None
    v, r = ctx.saved_tensors
    return finish_backward.inside(ctx)(v, r, part.contiguous(), dr.contiguous()), None


finish.differentiable(_finish_setup, _finish_backward)


# phase 1: forward only; its gradients are gathered by `publish` -----------------------------------------------------


@operation("phase_one")
def phase_one(q: Tensor, sources: list[Tensor], rs: list[Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """Read-outs of a block's sites over the finished sources, float32 [sites, B, T, D], and lse [sites, B, T, H].

    q: the sites' queries q ⊙ g, float32 [sites, D], at most 16 sites.
    """
    like, sites = sources[0], q.shape[0]
    shape, tokens, count = block_shape(like, heads, sites), tokens_of(like), len(sources)
    out = like.new_empty(sites, *like.shape, dtype=torch.float32)
    lse = like.new_empty(sites, *like.shape[:-1], heads, dtype=torch.float32)
    if tokens:
        high, low, scale = queries_of(q, torch.float32 if INTERPRETED else like.dtype)
        high, low, table = columns_of(high, sites), columns_of(low, sites), addresses(sources)
        scores = None
        if shape["NC"] > 1:
            scores = like.new_empty(tokens, heads, count, shape["SP"], dtype=torch.float32)
            block_scores[tokens, heads, triton.cdiv(count, STEP)](table, like, high, low, scores, count, **shape)
        block_forward[tokens, heads, shape["NC"]](
            table, like, torch.stack(rs), high, low, scale, scores, out, lse, tokens, count, sites, **shape
        )
    return out, lse


@phase_one.fake
def _(q, sources, rs, heads):
    like, sites = sources[0], q.shape[0]
    lse = like.new_empty(sites, *like.shape[:-1], heads, dtype=torch.float32)
    return like.new_empty(sites, *like.shape, dtype=torch.float32), lse


# read: one site; in the backward it enters its row in the ledger and finishes its newest source ---------------------


@operation("read")
def read(
    ledger: Tensor, stats: Tensor, dq: Tensor, q: Tensor, early: Tensor, early_lse: Tensor,
    local: list[Tensor], newest: Tensor | None, site: int, end: int, heads: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The read-out of one site, phase 1 (``early``) merged with the sources of its own block.

    Args:
        ledger, stats, dq: the ledger so far.
        q: all queries q ⊙ g, float32 [sites, D].
        early, early_lse: phase 1 of this site, [B, T, D] and [B, T, H].
        local: the older sources of the block, [B, T, D] each; their gradients are their own sites' business.
        newest: the source written before this site, or None.
        site, end: this site; the first that does not read ``newest`` within the block.
        heads, eps: as in `route`.

    Returns:
        The ledger, the read-out [B, T, D], its rounding rest, lse [B, T, H], and token and r of ``newest``.
    """
    sources = local if newest is None else [*local, newest]
    shape, tokens = site_shape(early, heads), tokens_of(early)
    like = early.new_empty(0, dtype=ledger.dtype) if newest is None else newest
    readout = torch.empty_like(early, dtype=stored(like))
    rest = torch.empty_like(readout) if has_rest(like) else None
    lse, r = torch.empty_like(early_lse), early.new_empty(early.shape[:-1])
    if tokens:
        site_forward[grid(shape, tokens)](
            addresses(sources or [early]), like, q[site], early, early_lse, readout, rest,
            lse, r, None, tokens, len(sources), eps, EARLY=True, REST=rest is not None, WEIGHTS=False, **shape,
        )  # fmt: skip
    readout, rest = rounded(readout, rest, like.dtype)
    return *dummies(q, readout, heads), readout, rest, lse, token_of(readout), r


@read.fake
def _(ledger, stats, dq, q, early, early_lse, local, newest, site, end, heads, eps):
    readout = torch.empty_like(early, dtype=ledger.dtype)
    rest = torch.empty_like(readout) if readout.dtype != torch.float32 else early.new_empty(0)
    r = early.new_empty(early.shape[:-1])
    return *dummies(q, readout, heads), readout, rest, torch.empty_like(early_lse), token_of(readout), r


@operation("read_backward", mutates=("ledger", "stats", "dq"))
def read_backward(
    ledger: Tensor, stats: Tensor, dq: Tensor, dout: Tensor, readout: Tensor, rest: Tensor, lse: Tensor, q: Tensor,
    newest: Tensor | None, r: Tensor, part: Tensor | None, dr: Tensor | None, site: int, end: int, heads: int,
) -> Tensor:  # fmt: skip
    """Enter this site's row in the ledger; returns the gradient of the newest source (empty without one)."""
    shape, tokens, count = site_shape(readout, heads), tokens_of(readout), end - site
    source, there = newest is not None, rest.numel() > 0
    dv = torch.empty_like(readout, dtype=stored(readout)) if source else readout.new_empty(0)
    if tokens:
        dlr = q.new_empty(tokens, heads, count) if source else None
        source_backward[grid(shape, tokens)](
            dout, readout, rest if there else None, lse, ledger, stats, newest, r, q[site:], part, dr, dv, dlr,
            tokens, site, count, q.shape[0], SOURCE=source, PART=part is not None, REST=there, **shape,
        )  # fmt: skip
        if source:
            add_query_gradient(dq, dlr, [newest], site, heads)
    return dv.to(readout.dtype)


@read_backward.fake
def _(ledger, stats, dq, dout, readout, rest, lse, q, newest, r, part, dr, site, end, heads):
    return torch.empty_like(readout) if newest is not None else readout.new_empty(0)


def add_query_gradient(dq: Tensor, dlr: Tensor, sources: list[Tensor], site: int, heads: int) -> None:
    """dq[:, site + s] += Σ over sources and tokens of dlr v, in PARTS parts. dlr: [tokens, H, later, sources]."""
    like, count = sources[0], len(sources)
    tokens, dim = tokens_of(like), like.shape[-1]
    later, width = dlr.numel() // (tokens * heads * count), dim // heads
    chunk, several = triton.cdiv(tokens, PARTS), triton.next_power_of_2(count)
    padded = min(max(16, triton.next_power_of_2(width)), 256)
    chunks = triton.cdiv(width, padded)
    query_backward[triton.cdiv(later, STEP), heads * chunks, PARTS](
        addresses(sources), like, dlr, dq, tokens, count, site, later, dq.shape[1], chunk,
        D=dim, H=heads, K=width, KC=padded, NC=chunks, SP=STEP, TM=max(1, 32 // several), JP=several,
        PRECISION="ieee" if like.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip


def opened(
    ledger: Tensor | None, stats: Tensor | None, dq: Tensor | None, q: Tensor, like: Tensor, heads: int, site: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a ledger, allocated by the last site that the loss depends on; later sites weigh nothing."""
    if ledger is not None:
        return ledger, stats, dq
    (sites, dim), tokens = q.shape, tokens_of(like)
    ledger = q.new_empty(sites, tokens, dim, dtype=stored(like))
    stats = q.new_empty(tokens, heads, sites, 2)
    if site + 1 < sites:
        ledger[site + 1 :] = 0
        stats[:, :, site + 1 :, 0] = torch.inf  # lse
        stats[:, :, site + 1 :, 1] = 0  # δ
    return ledger, stats, q.new_zeros(PARTS, sites, dim)


def _read_setup(ctx, inputs, output):
    _, _, _, q, _, _, local, newest, ctx.site, ctx.end, ctx.heads, _ = inputs
    ctx.local = len(local)
    _, _, _, readout, rest, lse, _, r = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rest, lse)
    ctx.save_for_backward(q, readout, rest, lse, r, newest)


def _read_backward(ctx, ledger, stats, dq, dout, _rest, _lse, part, dr):
    q, readout, rest, lse, r, newest = ctx.saved_tensors
    ledger, stats, dq = opened(ledger, stats, dq, q, readout, ctx.heads, ctx.site)
    dout = torch.zeros_like(readout) if dout is None else dout.contiguous()
    part, dr = (None, None) if part is None else (part.contiguous(), dr.contiguous())
    dv = read_backward.inside(ctx)(
        ledger, stats, dq, dout, readout, rest, lse, q, newest, r, part, dr, ctx.site, ctx.end, ctx.heads
    )
    dv = None if newest is None else dv
    return ledger, stats, dq, None, None, None, [None] * ctx.local, dv, None, None, None, None


read.differentiable(_read_setup, _read_backward)


# publish: in the backward, a block's sources gather from all later sites --------------------------------------------


@operation("publish")
def publish(
    ledger: Tensor, stats: Tensor, dq: Tensor, q: Tensor, tokens: list[Tensor], rs: list[Tensor],
    sources: list[Tensor], site: int, heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Make sources readable by the sites from ``site`` on: nothing to do forward. At most 16 sources.

    Args:
        ledger, stats, dq: the ledger so far.
        q: all queries q ⊙ g, float32 [sites, D].
        tokens, rs: of the sources; they carry the gradients.
        sources: [B, T, D] each; they carry none.
        site, heads: the first site that reads them; depth heads.
    """
    return dummies(q, sources[0], heads)


@publish.fake
def _(ledger, stats, dq, q, tokens, rs, sources, site, heads):
    return dummies(q, sources[0], heads)


@operation("publish_backward", mutates=("dq",))
def publish_backward(
    ledger: Tensor, stats: Tensor, dq: Tensor, q: Tensor, sources: list[Tensor], rs: list[Tensor], site: int, heads: int
) -> tuple[Tensor, Tensor]:
    """What later sites send the sources, [N, B, T, D], and their r, float32 [N, B, T]."""
    like, count, sites = sources[0], len(sources), q.shape[0]
    shape, tokens, later = block_shape(like, heads, count), tokens_of(like), sites - site
    dv = like.new_empty(count, *like.shape, dtype=stored(like))
    radial = q.new_empty(count, *like.shape[:-1], heads)
    r = torch.stack(rs)
    if tokens:
        high, low, scale = queries_of(q, torch.float32 if INTERPRETED else like.dtype)
        table, dlr, scores = addresses(sources), q.new_empty(tokens, heads, later, count), None
        if shape["NC"] > 1:
            scores = q.new_empty(tokens, heads, later, 2, shape["SP"])
            block_scores_backward[tokens, heads, triton.cdiv(later, STEP)](
                table, like, ledger, high, low, scores, tokens, count, site, sites, **shape
            )
        block_backward[tokens, heads, shape["NC"]](
            table, like, r, ledger, stats, high, low, scale, scores, dv, radial, dlr,
            tokens, count, site, sites, **shape,
        )  # fmt: skip
        add_query_gradient(dq, dlr, sources, site, heads)
    return dv.to(like.dtype), radial.sum(-1) / r


@publish_backward.fake
def _(ledger, stats, dq, q, sources, rs, site, heads):
    like = sources[0]
    return like.new_empty(len(sources), *like.shape), q.new_empty(len(sources), *like.shape[:-1])


def _publish_setup(ctx, inputs, output):
    _, _, _, q, _, rs, sources, ctx.site, ctx.heads = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, *sources, *rs)


def _publish_backward(ctx, ledger, stats, dq):
    q, *rest = ctx.saved_tensors
    sources, rs = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    if ledger is None:  # no later site has a gradient, so the sources get none from there
        return None, None, None, None, [None] * len(rs), [None] * len(rs), [None] * len(rs), None, None
    dv, dr = publish_backward.inside(ctx)(ledger, stats, dq, q, sources, rs, ctx.site, ctx.heads)
    return ledger, stats, dq, None, list(dv.unbind()), list(dr.unbind()), [None] * len(rs), None, None


publish.differentiable(_publish_setup, _publish_backward)


class TwoPhase:
    """The schedule for one forward pass over Full AttnRes, any number of heads.

    Args:
        q: the queries times the gains, q ⊙ g, float32 [sites, D].
        embedding: the first source, [B, T, D].
        heads, eps: as in `route`.
        block: sites that share a phase 1, 1 to 16; it changes the order of the work, not the result.
    """

    def __init__(self, q: Tensor, embedding: Tensor, heads: int, eps: float, block: int):
        check_runnable(embedding.dtype, embedding.device)
        self.dtype = embedding.dtype  # of every source
        self.scaled, self.q, self.heads, self.eps, self.block = q, q.detach(), heads, eps, block
        self.ledger = start(q, embedding, heads)
        self.site = 0
        self.end = 0  # of the block of sites
        self.done: list[tuple[Tensor, Tensor, Tensor]] = []  # source, token and r of every source of earlier blocks
        self.fresh: list[tuple[Tensor, Tensor, Tensor]] = []  # of this block
        self.write(embedding)

    def write(self, output: Tensor) -> None:
        self.newest = laid_out(output, self.dtype)

    def read(self) -> Tensor:
        newest = self.newest
        if self.site == self.end:
            self.fresh.append((newest.detach(), *finish(newest, self.eps)))
            self.begin(min(self.site + self.block, len(self.q)))
            newest = None
        readout, token, r = self.merge([v for v, _, _ in self.fresh], newest, self.end)
        if newest is not None:
            self.fresh.append((newest.detach(), token, r))
        return readout

    def begin(self, end: int) -> None:
        """Publish the block's sources to all later sites, and make phase 1 for the sites up to ``end``."""
        self.end, self.first = end, self.site
        if self.fresh:
            sources, tokens, rs = map(list, zip(*self.fresh))
            self.ledger = publish(*self.ledger, self.q, tokens, rs, sources, self.site, self.heads)
            self.done, self.fresh = self.done + self.fresh, []
        sources, _, rs = map(list, zip(*self.done))
        rs = [r.detach() for r in rs]
        self.early, self.early_lse = phase_one(self.q[self.site : end], sources, rs, self.heads)

    def merge(self, local: list[Tensor], newest: Tensor | None, end: int) -> tuple[Tensor, Tensor, Tensor]:
        k = self.site - self.first
        *ledger, readout, _, _, token, r = read(
            *self.ledger, self.q, self.early[k], self.early_lse[k], local, newest, self.site, end, self.heads, self.eps
        )
        self.ledger = ledger
        self.site += 1
        return readout, token, r


class TwoPhaseBlock(TwoPhase):
    """The same for Block AttnRes with blocks of ``block`` sublayers: a block's sites share a phase 1, 16 at a time."""

    def __init__(self, q: Tensor, embedding: Tensor, heads: int, eps: float, block: int):
        self.partial: Tensor | None = None
        self.written = block - 1  # the embedding is a source by itself
        super().__init__(q, embedding, heads, eps, block)

    def write(self, output: Tensor) -> None:
        self.partial = output if self.partial is None else self.partial + output
        self.written += 1
        if self.written == self.block:
            v = laid_out(self.partial, self.dtype)
            self.fresh.append((v.detach(), *finish(v, self.eps)))
            self.partial, self.written, self.end = None, 0, self.site

    def read(self) -> Tensor:
        if self.site == self.end:
            self.begin(min(self.site + min(self.block - self.written, LARGEST), len(self.q)))
        newest = None if self.partial is None else laid_out(self.partial, self.dtype)
        return self.merge([], newest, self.site + 1)[0]
