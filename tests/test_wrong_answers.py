"""Every exercise of the notebooks, with the mistakes that readers make: each gets a line that speaks of the mistake.

A new exercise is entered in WRONG with at least one wrong answer, under the words of the line that set it right.
"""

import ast
import math
import statistics

import pytest
import torch
from test_notebooks import NOTEBOOKS, RUNNABLE, run, source, tagged

from mhar_minimal import stats
from mhar_minimal.exercise import check


def zeroed_in_place(sources, s, k):
    sources[k] = 0
    return sources[: s + 1].sum(0)


def mean_in_place(head, alpha, v):
    alpha[:, head] = alpha.mean(-1)
    return (alpha.repeat_interleave(v.shape[-1] // alpha.shape[-1], dim=-1) * v).sum(0)


def readout_repeated(head, alpha, v):
    alpha = alpha.clone()
    alpha[:, head] = alpha.mean(-1)
    return (alpha.repeat(1, v.shape[-1] // alpha.shape[-1]) * v).sum(0)


def query_gradient_of(query, keys, values, upstream, alpha=None, h=None, last=None):
    weights = (keys @ query).softmax(0)
    h = weights @ values if h is None else h
    alpha = weights if alpha is None else alpha
    return (alpha * ((values - h) @ upstream)) @ (keys if last is None else last)


def depth_weights_of(q, g, v, heads, r, dim=0):
    return (r * ((q * g) * v).unflatten(-1, (heads, -1)).sum(-1)).softmax(dim)


def rms_per_slice(v, heads):
    return torch.rsqrt(v.unflatten(-1, (heads, -1)).square().mean(-1) + 1e-6)


def rms_of_all(v):
    return torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)


def rows_of_blocks(sites, size, first, inside):
    starts = range(0, sites, size)
    return sum(first(k, start) + inside(min(size, sites - start)) for k, start in enumerate(starts))


def z_test(sd, difference):
    return max(2, math.ceil(((1.96 + 0.84) * sd / difference) ** 2))


def counted_from(sd, difference, n):
    while stats.smallest_difference(sd, n) > difference:
        n += 1
    return n


def interval_of(d, comparisons, sd=statistics.stdev, root=math.sqrt):
    reach = stats.t_critical(0.05 / comparisons, len(d) - 1) * sd(d) / root(len(d))
    return statistics.fmean(d) - reach, statistics.fmean(d) + reach


def last_loss(run, step):
    return [loss for at, loss in run if at <= step][-1]


# name of the exercise: {words that its reader has to see: the answer}
WRONG = {
    # 01
    "last_share": {
        "squares add, not sizes": lambda sizes: sizes[-1] / sum(sizes),
        "the last one counts too": lambda sizes: sizes[-1] / math.hypot(*sizes[:-1]),
        "a root gives back a size": lambda sizes: sizes[-1] ** 2 / sum(size**2 for size in sizes),
        "raised IndexError": lambda sizes: sizes[len(sizes)],
    },
    "count": {
        "k and v have kv_heads · head_dim rows": lambda c: (
            c.vocab * c.dim + c.layers * (4 * c.dim**2 + 2 * c.head_dim + 3 * c.dim * c.ffn + 2 * c.dim) + c.dim
        ),
        "count the norms of queries and keys": lambda c: (
            c.vocab * c.dim
            + c.layers * (2 * c.dim * (c.dim + c.kv_heads * c.head_dim) + 3 * c.dim * c.ffn + 2 * c.dim)
            + c.dim
        ),
        "raised AttributeError: 'Config' object has no attribute 'heads_kv'": lambda c: c.heads_kv,
    },
    "read_without": {
        "site s sums sources 0 to s": lambda sources, s, k: sources.sum(0) - sources[k],
        "what does a site before source k lose": lambda sources, s, k: sources[: s + 1].sum(0) - sources[k],
        "changes its arguments": zeroed_in_place,
        "gives 0, not tensor([[[0, 0, 0]]]), in case 4 of 4": lambda sources, s, k: sum(
            v for i, v in enumerate(sources[: s + 1]) if i != k
        ),
    },
    # 02
    "needed_logit": {
        "Write the softmax for that source": lambda n, p: math.log(p * n),
        "solve for e to the logit": lambda n, p: p * (n - 1) / (1 - p),
    },
    "query_gradient": {
        "(v_i - h)": lambda *a: query_gradient_of(*a, h=0),
        "α_i (": lambda *a: query_gradient_of(*a, alpha=1),
        "d logit_i / d q = k_i": lambda q, k, v, u: query_gradient_of(q, k, v, u, last=v),
        "gives shape (1, 8), not (8,)": lambda *a: query_gradient_of(*a)[None],
    },
    "tokens_that_fit": {
        "the embedding is one of them": lambda memory, layers, dim, size: memory // (2 * layers * dim * size),
        "Count the sources of one token": lambda memory, layers, dim, size: memory // (layers * dim * size),
        "gives 45964.9": lambda memory, layers, dim, size: memory / ((2 * layers + 1) * dim * size),
    },
    # 03
    "outputs_summed": {
        "gives [5, 2], not [0, 5, 2]": lambda s, S: [S] * (s // S) + [s % S] * (s % S > 0),
        "gives [0, 0], not [0]": lambda s, S: [0] + [S] * (s // S) + [s % S],
        "site s comes after s outputs": lambda s, S: [0] + [S] * ((s + 1) // S) + [(s + 1) % S] * ((s + 1) % S > 0),
    },
    "shares": {
        "bring every l to one common maximum": lambda m, l: l / l.sum(),
        "common maximum before adding, as merge does": lambda m, l: l * m.exp() / (l * m.exp()).sum(),
        "bring every l": lambda m, l: m.softmax(0),
    },
    "block_rows": {
        "block k starts with k + 1 sources": lambda C, S: rows_of_blocks(
            C, S, lambda k, start: start + 1, lambda n: 4 * n - 1
        ),
        "all but the first": lambda C, S: rows_of_blocks(C, S, lambda k, start: k + 1, lambda n: 4 * n),
        "gives 0, not 4": lambda C, S: sum(k + 4 * S for k in range(C // S)),
    },
    # 04
    "alpha_without_keys": {
        "r comes from v before it is cut": lambda q, g, v, H: depth_weights_of(q, g, v, H, rms_per_slice(v, H)),
        "softmax over sources": lambda q, g, v, H: depth_weights_of(q, g, v, H, rms_of_all(v), dim=-1),
        "gives shape (3, 6), not (3, 1)": lambda q, g, v, H: ((q * g) * v * rms_of_all(v)).softmax(0),
    },
    "shared_weights": {
        "what do their exponentials do?": lambda alpha: alpha.mean(-1),
        "the weights add up to 1": lambda alpha: alpha.prod(-1),
    },
    "readout_without": {
        "changes its arguments": mean_in_place,
        "head by head": readout_repeated,
        "raised RuntimeError: The size of tensor a": lambda head, alpha, v: (alpha * v).sum(0),
    },
    # 05
    "bytes_of_read": {
        "and what goes out?": lambda N, tokens, dim, size: (2 * N + 3) * tokens * dim * size,
        "not 1163919360": lambda N, tokens, dim, size: (3 * N + 3) * tokens * dim,
    },
    "merged_readout": {
        "a group with m = lse": lambda a, lse1, b, lse2: (a + b) / 2,
        "raised OverflowError": lambda a, lse1, b, lse2: (
            (math.exp(lse1) * a + math.exp(lse2) * b) / (math.exp(lse1) + math.exp(lse2))
        ),
    },
    "scattered_rows": {
        "k gradients, k - 1 additions": lambda C: (C + 1) * (C + 2) - 2 + 3 * C * (C + 1) // 2,
        "gives 11, not 13": lambda C: (C + 1) * (C + 2) - 2 + C * (C - 1) // 2,
        "2 rows more": lambda C: C * (C + 1) + 3 * C * (C - 1) // 2,
    },
    # 06
    "seeds_needed": {
        "smallest_difference(sd, n) falls with n": z_test,
        "count up from 2": lambda sd, difference: counted_from(sd, difference, 1),
        "gives 6, not 5": lambda sd, difference: counted_from(sd, difference, 2) + 1,
    },
    "interval": {
        "with n - 1 in the sd": lambda d, c: interval_of(d, c, sd=statistics.pstdev),
        "sd / √n": lambda d, c: interval_of(d, c, root=lambda n: 1),
        "0.05 / comparisons": lambda d, c: interval_of(d, 1),
        "mean ±": lambda d, c: interval_of(d, c)[1] - statistics.fmean(d),
    },
    "ahead": {
        "seconds / seconds per step is a step": lambda a, ta, b, tb, s: last_loss(a, s) - last_loss(b, s),
        "then interpolate": lambda a, ta, b, tb, s: last_loss(a, s / ta) - last_loss(b, s / tb),
        "gives 0.5, not -0.5": lambda a, ta, b, tb, s: last_loss(b, s / tb) - last_loss(a, s / ta),
    },
    # 07
    "sources_of": {
        "one more if the current block has begun": lambda site, block: 2 + site // block,
        "the null vector": lambda site, block: math.ceil(site / block),
    },
    "share_of_branch": {
        "pair by seed, not by position": lambda base, plain, mhar: statistics.fmean(
            (p - m) / (base - m) for p, m in zip(plain.values(), mhar.values())
        ),
        "for a seed": lambda base, plain, mhar: (
            (statistics.fmean(plain.values()) - statistics.fmean(mhar.values()))
            / (base - statistics.fmean(mhar.values()))
        ),
        "(base - mhar)": lambda base, plain, mhar: statistics.fmean(plain[s] - mhar[s] for s in plain),
    },
    "item_test": {
        "count the items that each wins": lambda a, b: stats.mcnemar(sum(a), sum(b)),
        "leave the ties out": lambda a, b: stats.mcnemar(
            sum(x >= y for x, y in zip(a, b)), sum(y >= x for x, y in zip(a, b))
        ),
    },
    # 08
    "cache_bytes": {
        "a key and a value": lambda layers, kv, dim, batch, tokens, size: layers * kv * dim * batch * tokens * size,
        "prompt and token": lambda layers, kv, dim, batch, tokens, size: 2 * layers * kv * dim * tokens * size,
    },
    "largest_chunk": {
        "(blocks + 1)": lambda budget, blocks, batch, dim, size: budget // (blocks * batch * dim * size),
        "round down": lambda budget, blocks, batch, dim, size: round(budget / ((blocks + 1) * batch * dim * size)),
    },
    "step_needed": {
        "gives 45500.0, not 45.5": lambda us, sites, share: us * sites / share,
        "it shall be share times the step": lambda us, sites, share: us * sites / 1000 * share,
    },
}


def name(exercise):
    return next(node.name for node in ast.parse(source(exercise)).body if isinstance(node, ast.FunctionDef))


def test_every_exercise_has_a_wrong_answer():
    assert sorted(name(cell) for path in NOTEBOOKS for cell in tagged(path, "exercise")) == sorted(WRONG)
    assert all(WRONG.values())


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda p: p.stem)
def test_a_wrong_answer_gets_a_line_that_helps(path, capsys):
    namespace, asked = {}, []
    run(*tagged(path, "imports"), namespace=namespace)
    namespace["check"] = lambda answer, cases, hint: asked.append((cases, hint))
    for exercise, cell in zip(tagged(path, "exercise"), tagged(path, "check"), strict=True):
        run(exercise, cell, namespace=namespace)
        for words, answer in WRONG[name(exercise)].items():
            answer.__name__ = name(exercise)
            check(answer, *asked[-1])
            line = capsys.readouterr().out
            assert line.startswith(f"Not yet: {name(exercise)} ")
            assert words in line
            assert line.count("\n") == 1
            assert len(line) < 300
