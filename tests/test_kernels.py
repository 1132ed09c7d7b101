"""Both kernel paths, `fused` and `two_phase`, as parts of PyTorch: extreme inputs, autograd, checkpointing, compiling.

Interpreted without a GPU, native with one.
"""

import collections
import inspect
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from kernel_checks import (
    DEVICE,
    DTYPES,
    EPS,
    all_sites,
    assert_as_exact_as_eager,
    assert_equal,
    assert_nothing_outside,
    draw,
    error,
    errors,
    guarded_allocations,
    impl,
    one_site,
    results,
    scheduled,
)
from torch.utils.checkpoint import checkpoint

from mhar_minimal import Config, Model
from mhar_minimal.data import load_corpus
from mhar_minimal.fast import applicable
from mhar_minimal.kernels import fused, launch, two_phase
from mhar_minimal.probe import trace
from mhar_minimal.train import Recipe, train

IMPLS = ["fused", "two_phase"]
RESIDUALS = ["full", "block"]
SMALL = Config(residual="full", heads=2, dim=8, layers=2, attn_heads=1, kv_heads=1, ffn=8, vocab=11, context=2)
TOKENS = torch.tensor([[1, 5]], device=DEVICE)
either = pytest.mark.parametrize("name", IMPLS)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Of two sites: Full's own schedule would give models as small as these no phase 1."""
    monkeypatch.setattr("mhar_minimal.fast.schedule", lambda sites: 2)


def small(residual="full", **fields):
    return replace(SMALL, residual=residual, block_size=3 if residual == "block" else None, **fields)


def model(config, seed=1):
    """With queries and gains that route."""
    torch.manual_seed(seed)
    made = Model(config)
    for p in made.depth.parameters():
        p.data += 0.5 * torch.randn(p.shape)
    return made.to(DEVICE)


def logits_and_gradients(made, run=None):
    logits = (made if run is None else run)(TOKENS)
    made.zero_grad()
    logits.float().square().sum().backward()
    return [logits.detach(), *(p.grad for p in made.parameters())]


# extreme inputs


@either
def test_query_gradients_do_not_suffer_from_a_rounded_read_out(name):
    """δ = dout · read-out takes the read-out before it was rounded to 16 bits."""
    inputs = draw(5, 5, 24, 1, shape=(1, 3), dtype=torch.bfloat16)
    truth = results(all_sites(impl("eager", "full"), 1), inputs.fresh(torch.float64))
    far = errors(results(all_sites(impl(name, "full"), 1), inputs), truth)
    assert max(far["query"], far["gain"]) < 1e-3  # measured 1e-5, and 2e-3 with the rounded read-out


@either
@pytest.mark.parametrize("residual", RESIDUALS)
def test_sources_are_stored_in_the_embeddings_dtype(residual, name):
    """Whatever sublayers write; their gradients come back in the dtype in which they wrote."""
    inputs = draw(4, 4, 12, 1, shape=(1, 1))
    inputs.source[0] = inputs.source[0].detach().bfloat16().requires_grad_()
    inputs.upstream = [u.bfloat16() for u in inputs.upstream]
    got = results(all_sites(impl(name, residual), 1, 2 if residual == "block" else None), inputs)
    assert all(readout.dtype == torch.bfloat16 for readout in got["readout"])
    assert [grad.dtype for grad in got["source"]] == [source.dtype for source in inputs.source]


@either
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_large_and_small_sources(scale, dtype, name):
    assert_as_exact_as_eager(
        all_sites(impl(name, "full"), 1), all_sites(impl("eager", "full"), 1), dtype,
        sites=3, sources=3, dim=12, heads=1, shape=(1, 2), scale=scale,
    )  # fmt: skip


@either
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_and_duplicate_sources(dtype, name):
    """Equal sources share their weight, whatever the query; zeros have r = 1 / sqrt(ε), not infinity."""
    inputs = draw(3, 3, 12, 2, shape=(1, 2), dtype=dtype)
    with torch.no_grad():
        for source in inputs.source[1:]:
            source.copy_(inputs.source[0])
    got = results(all_sites(impl(name, "full"), 2), inputs)
    for readout in got["readout"]:
        assert error(readout, inputs.source[0].double()) <= torch.finfo(dtype).eps
    upstream = [u.double() for u in inputs.upstream]
    assert error(sum(g.double() for g in got["source"]), sum(upstream)) <= 2 * torch.finfo(dtype).eps
    zeros = inputs.fresh()
    with torch.no_grad():
        for source in zeros.source:
            source.zero_()
    got = results(all_sites(impl(name, "full"), 2), zeros)
    assert not any(readout.any() for readout in got["readout"])
    for i, grad in enumerate(got["source"]):
        share = sum(upstream[s] / (s + 1) for s in range(i, 3))
        assert error(grad, share) <= 2 * torch.finfo(dtype).eps


@either
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_one_hot_softmax_selects(dtype, name):
    """A gradient's rounding is multiplied by the query, so 1e-3 is allowed."""
    inputs = draw(3, 3, 12, 1, shape=(1, 2), dtype=dtype, seed=1)
    with torch.no_grad():
        for query in inputs.query:
            query *= 1000
    truth = results(all_sites(impl("eager", "full"), 1), inputs.fresh(torch.float64))
    for readout in truth["readout"]:
        away = torch.stack([(readout - source).abs().amax(-1) for source in inputs.source])  # [N, B, T]
        assert away.amin(0).max() < 1e-9
    got = results(all_sites(impl(name, "full"), 1), inputs)
    far = errors(got, truth)
    assert far["readout"] <= 2 * torch.finfo(dtype).eps
    assert far["source"] <= max(1e-3, 2 * torch.finfo(dtype).eps)
    assert all(grad.isfinite().all() for grads in got.values() for grad in grads)


@either
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
def test_a_broken_token_stays_alone(poison, name):
    clean = draw(4, 4, 12, 2, shape=(1, 3))
    broken = clean.fresh()
    with torch.no_grad():
        broken.source[1][0, 1, 5] = poison
    run = all_sites(impl(name, "full"), 2)
    expected, got = results(run, clean), results(run, broken)
    assert not got["readout"][1][0, 1].isfinite().all()
    assert torch.equal(got["readout"][0], expected["readout"][0])  # site 0 does not read the broken source
    for kind in ("readout", "source"):
        for g, e in zip(got[kind], expected[kind], strict=True):
            assert torch.equal(g[:, ::2], e[:, ::2])


@either
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_tokens(shape, name):
    inputs = draw(3, 3, 12, 2, shape=shape)
    got = results(all_sites(impl(name, "full"), 2), inputs)
    assert all(x.shape == (*shape, 12) for kind in ("readout", "source") for x in got[kind])
    assert not any(grad.any() for kind in ("query", "gain") for grad in got[kind])


@either
@pytest.mark.parametrize("residual", RESIDUALS)
def test_inputs_in_any_layout(residual, name):
    """Transposed sources, rows of a larger tensor, a first element anywhere in memory; gradients come back expanded."""
    inputs = draw(4, 4, 12, 1, shape=(2, 2))
    inputs.upstream = [torch.ones(1, device=DEVICE).expand(2, 2, 12)] * 4
    run = all_sites(impl(name, residual), 1, 2 if residual == "block" else None)
    expected = results(run, inputs)
    odd, (a, b, c, d) = inputs.fresh(), [source.detach() for source in inputs.source]
    odd.upstream = inputs.upstream
    odd.source[0] = a.transpose(0, 1).contiguous().transpose(0, 1)
    odd.source[1] = torch.cat([b, b], -1)[..., :12]
    odd.source[2] = torch.cat([c.flatten()[:1], c.flatten()])[1:].view(2, 2, 12)
    odd.source[3] = d.repeat_interleave(2, -1)[..., ::2]
    odd.query[1] = inputs.query[1].detach().repeat_interleave(2)[::2]
    for leaf in odd.leaves():
        leaf.requires_grad_()
    assert_equal(results(run, odd), expected)


# autograd


@either
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("used", [[0], [2], [1, 3], [4]])
def test_a_loss_of_some_read_outs_only(used, residual, name, monkeypatch):
    block_size = 2 if residual == "block" else None
    monkeypatch.setattr("mhar_minimal.fast.schedule", lambda *_: 2)  # blocks of 2, 2 and 1 sites
    inputs = draw(5, 5, 12, 1, shape=(1, 2))

    def gradients(which, inputs):
        outputs = all_sites(impl(which, residual), 1, block_size)(inputs)
        upstream = [inputs.upstream[s] for s in used]
        grads = torch.autograd.grad([outputs[s] for s in used], inputs.leaves(), upstream, allow_unused=True)
        return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, inputs.leaves(), strict=True)]

    truth = gradients("eager", inputs.fresh(torch.float64))
    with guarded_allocations(monkeypatch):  # what later sites never entered in the ledger is not read
        grads = gradients(name, inputs)
    for got, true in zip(grads, truth, strict=True):
        assert (got - true).abs().max() < 1e-5  # measured 2e-6


@either
@pytest.mark.parametrize("residual", RESIDUALS)
def test_nothing_outside_is_read_or_written(residual, name, monkeypatch):
    """Three heads of 44 channels: neither they nor their tails fill a tile."""
    inputs = draw(6, 6, 132, 3, shape=(1, 3))
    run = all_sites(impl(name, residual), 3, 2 if residual == "block" else None)
    assert_nothing_outside(run, inputs, monkeypatch)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_no_section_of_a_ledger_runs_into_the_next(residual, monkeypatch):
    """One allocation, so the margins around it do not see this: the room between its sections must stay as it was.

    Three heads, which fill no tile of four, and blocks of six sources.
    """
    monkeypatch.setattr(two_phase, "APART", 256)
    two_phase.sections.cache_clear()
    ledgers, opens = [], two_phase.open_ledger.forward
    keep = lambda *args: ledgers.append((opens(*args), args)) or ledgers[-1][0]  # noqa: E731
    monkeypatch.setattr(two_phase.open_ledger, "forward", keep)
    inputs, block_size = draw(7, 7, 24, 3, shape=(1, 3), normed=True), 2 if residual == "block" else None
    with guarded_allocations(monkeypatch):
        results(all_sites(scheduled(6) if block_size is None else impl("two_phase", "block"), 3, block_size), inputs)
    two_phase.sections.cache_clear()
    ledger, (like, _, sites, room, heads) = ledgers[-1]
    tokens, dim, parts = 3, 24, two_phase.parts_of(3)
    at = two_phase.sections_for(like, sites, room, heads)
    lengths = dict(
        part=room * tokens * dim, stats=2 * tokens * heads * sites,
        radial=room * tokens * heads, dlr=room * tokens * heads, dq=parts * sites * dim, dgain=parts * sites * dim,
    )  # fmt: skip
    assert list(lengths) == list(at._fields[:-1])
    for (name, length), begin, end in zip(lengths.items(), at, at[1:], strict=False):
        written, between = ledger[begin : begin + length], ledger[begin + length : end]
        assert len(between) >= 256, name
        assert not written[: length // 2].isnan().any(), name  # of dlr, what the last site wrote
        assert (between == 0 if name in ("dq", "dgain") else between.isnan()).all(), name  # those two start from zero


@pytest.mark.parametrize("residual", RESIDUALS)
def test_more_reads_than_sites_are_refused(residual):
    """A kernel would read past the end of the queries."""
    with pytest.raises(ValueError, match="read 3 of a pass over 2 sites; accepted: one read per site"):
        all_sites(impl("two_phase", residual), 2, 2)(draw(2, 3, 12, 2))


def test_gradients_of_gradients_are_refused():
    for run, sites in ((one_site(fused.route, 2), 1), (all_sites(impl("two_phase", "full"), 2), 3)):
        inputs = draw(sites, 3, 12, 2)
        outputs = run(inputs)
        with pytest.raises(RuntimeError, match="gradients of gradients need impl='eager'"):
            torch.autograd.grad(outputs, inputs.source, inputs.upstream, create_graph=True)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_byte_holds_what_rounding_took(dtype):
    """To 2⁻¹⁵ of the number, or the smallest step of the format over 127; zeros, halves and extremes included."""
    if fused.INTERPRETED and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter cannot round to bfloat16; float16 once more
    limits = torch.finfo(dtype)
    exact = torch.cat(
        [torch.randn(500) * 10.0**e for e in range(-7, 5)]
        + [
            torch.tensor(
                [
                    0.0,
                    -0.0,
                    1.0,
                    limits.tiny,
                    max(limits.smallest_normal, 1e-30) / 3,
                    0.99 * limits.max,
                    1 + limits.eps / 2,
                ]
            )
        ]
    ).to(DEVICE)
    exact = exact.clamp(-0.999 * limits.max, 0.999 * limits.max)
    n, back = exact.numel(), torch.empty_like(exact)
    stored, rest = exact.to(dtype), torch.empty(n, dtype=torch.int8, device=DEVICE)
    there_and_back[(1,)](exact, stored, rest, back, n, 8192)
    assert (back - exact).abs().sub(2.0**-15 * exact.abs()).max() <= max(
        limits.smallest_normal, 1e-30
    ) * limits.eps / 127
    assert (stored.float() - exact).abs().max() > 100 * (back - exact).abs().max()


def test_a_byte_holds_what_rounding_to_bfloat16_took():
    """The interpreter truncates to bfloat16; so numbers that rounding truncates, too."""
    exact = torch.cat([torch.randn(500) * 10.0**e for e in range(-7, 5)] + [torch.tensor([0.0, -0.0, 1 + 2.0**-9])])
    truncated = exact.bfloat16().float().view(torch.int32) == exact.view(torch.int32) & -65536
    exact = exact[truncated].to(DEVICE)
    n, back = exact.numel(), torch.empty_like(exact)
    assert n > 2500
    stored, rest = exact.bfloat16(), torch.empty(n, dtype=torch.int8, device=DEVICE)
    there_and_back[(1,)](exact, stored, rest, back, n, 8192)
    assert ((back - exact).abs() <= 2.0**-15 * exact.abs()).all()
    assert (stored.float() - exact).abs().max() > 100 * (back - exact).abs().max()


@triton.jit
def there_and_back(exact_ptr, stored_ptr, rest_ptr, back_ptr, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    mask = at < n
    fused.write_rest(rest_ptr + at, mask, tl.load(exact_ptr + at, mask=mask), stored_ptr.dtype.element_ty)
    tl.debug_barrier()
    tl.store(back_ptr + at, fused.read_exact(stored_ptr, rest_ptr, at, mask, True), mask=mask)


@either
@pytest.mark.parametrize("residual", RESIDUALS)
def test_gradients_of_some_inputs_only(residual, name):
    """Frozen queries, a frozen embedding, one source alone: what is asked for is what it would be otherwise."""
    inputs = draw(5, 5, 12, 1, shape=(1, 2))
    run = all_sites(impl(name, residual), 1, 2 if residual == "block" else None)
    expected = torch.autograd.grad(run(inputs), inputs.leaves(), inputs.upstream)
    c = len(inputs.query)
    for wanted in ([*range(2 * c, 3 * c)], [*range(2 * c), *range(2 * c + 1, 3 * c)], [2 * c + 2], [1], [*range(c)]):
        some = inputs.fresh()
        for i, leaf in enumerate(some.leaves()):
            leaf.requires_grad_(i in wanted)
        pairs = [(o, u) for o, u in zip(run(some), some.upstream, strict=True) if o.requires_grad]
        grads = torch.autograd.grad([o for o, _ in pairs], [some.leaves()[i] for i in wanted], [u for _, u in pairs])
        for grad, i in zip(grads, wanted, strict=True):
            assert torch.equal(grad, expected[i]), i


@either
def test_a_second_backward_over_a_retained_graph(name):
    inputs = draw(4, 4, 12, 1, shape=(1, 2))
    outputs = all_sites(impl(name, "full"), 1)(inputs)
    first = torch.autograd.grad(outputs, inputs.leaves(), inputs.upstream, retain_graph=True)
    second = torch.autograd.grad(outputs, inputs.leaves(), inputs.upstream)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@either
def test_without_gradients_the_read_outs_are_the_same(name):
    inputs = draw(4, 4, 12, 1, shape=(1, 2))
    run = all_sites(impl(name, "full"), 1)
    expected = run(inputs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for a, b in zip(run(inputs), expected, strict=True):
                assert torch.equal(a, b)
                assert not a.requires_grad


# models


@either
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_model_without_gradients_gives_the_same_logits(residual, dtype, name):
    """Norms included; the kernels then write less."""
    made = model(small(residual, impl=name)).to(dtype)
    expected = made(TOKENS)
    with torch.no_grad():
        assert torch.equal(made(TOKENS), expected)


def test_without_gradients_two_phase_reads_keep_nothing_for_a_backward(monkeypatch):
    kept, forward = [], two_phase.read_forward

    def watched(grid, constants, *args):
        kept.append(constants["KEEP"])
        forward(grid, constants, *args)

    monkeypatch.setattr(two_phase, "read_forward", watched)
    made = model(small("full", impl="two_phase"))
    made(TOKENS)
    with torch.no_grad():
        made(TOKENS)
    half = len(kept) // 2
    assert kept == [True] * half + [False] * half != []


@either
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_model_is_the_eager_model(residual, heads, name):
    """In logits and in the gradients of every kind of parameter, at most 3 times as far from float64 as the worst of
    three eager models. One parameter's gradient can be a difference of equal numbers, those of all layers are not.
    """

    def far(which, seed):
        config = small(residual, heads=heads)
        made, worst, size = model(config, seed), collections.Counter(), collections.Counter()
        kinds = ["logits", *(re.sub(r"\.\d+", "", parameter) for parameter, _ in made.named_parameters())]
        truth = logits_and_gradients(made.double())
        got = logits_and_gradients(model(replace(config, impl=which), seed))
        for kind, t, g in zip(kinds, truth, got, strict=True):
            worst[kind] = max(worst[kind], (g.double() - t).abs().max().item())
            size[kind] = max(size[kind], t.abs().max().item())
        return {kind: worst[kind] / size[kind] for kind in size}

    ours, eager = far(name, 1), [far("eager", seed) for seed in (1, 2, 3)]
    assert ours["logits"] < 5e-7  # measured 1.2e-7
    assert max(ours.values()) <= 3 * max(max(kinds.values()) for kinds in eager)  # measured 2e-6 to 7e-6


@either
def test_gradients_accumulate(name):
    made = model(small(impl=name))
    once = logits_and_gradients(made)[1:]
    once = [g.clone() for g in once]
    made.zero_grad()
    for _ in range(2):
        made(TOKENS).square().sum().backward()
    for p, g in zip(made.parameters(), once, strict=True):
        assert torch.equal(p.grad, 2 * g)


@either
@pytest.mark.parametrize("residual", RESIDUALS)
def test_checkpointed_sublayers(residual, name):
    made = model(small(residual, impl=name))
    expected = [x.clone() for x in logits_and_gradients(made)]
    for layer in made.layers:
        for part in (layer.attn, layer.mlp):
            part.forward = lambda *args, inner=part.forward: checkpoint(inner, *args, use_reentrant=False)
    for a, b in zip(logits_and_gradients(made), expected, strict=True):
        assert torch.equal(a, b)


def test_checkpointed_sites():
    inputs = draw(1, 3, 12, 2)
    expected = results(one_site(fused.route, 2), inputs.fresh())
    again = one_site(lambda *args: checkpoint(fused.route, *args, use_reentrant=False), 2)
    assert_equal(results(again, inputs), expected)


@either
@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_whole_forward_pass_checkpointed(residual, name):
    made = model(small(residual, impl=name))
    expected = [x.clone() for x in logits_and_gradients(made)]
    got = logits_and_gradients(made, lambda tokens: checkpoint(made, tokens, use_reentrant=False))
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@either
@pytest.mark.parametrize("residual", RESIDUALS)
def test_autocast(residual, name):
    """Sublayers write bfloat16; sources stay in the embedding's dtype, as far from float64 as eager's."""
    config = small(residual)
    truth = logits_and_gradients(model(config).double())
    with torch.autocast(DEVICE, torch.bfloat16):
        eager, fast = (logits_and_gradients(model(replace(config, impl=i))) for i in ("eager", name))
    for f, e, t in zip(fast, eager, truth, strict=True):
        assert error(f, t) <= 3 * error(e, t) + torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(("residual", "name"), [("full", "fused"), ("full", "two_phase"), ("block", "two_phase")])
def test_compiled_as_one_graph(residual, name):
    """As far from float64 as eager's: two-phase kernels leave the norms behind sites to the compiler."""
    torch._dynamo.reset()
    config = small(residual)
    truth, eager = logits_and_gradients(model(config).double()), logits_and_gradients(model(config))
    made = model(replace(config, impl=name))
    got = logits_and_gradients(made, torch.compile(made, fullgraph=True, backend="aot_eager"))
    for g, e, t in zip(got, eager, truth, strict=True):
        assert error(g, t) <= 3 * error(e, t) + 1e-5


def test_compiled_nothing_is_kept_beside_a_source_and_its_read_out():
    """That is as much as the standard model's stream and norms (in float32, where a read-out has no rest)."""

    def kept(config):
        torch._dynamo.reset()
        tensors = {}
        run = torch.compile(model(config), backend="aot_eager_decomp_partition")  # partitioned as for inductor
        with torch.autograd.graph.saved_tensors_hooks(lambda x: tensors.setdefault(x.data_ptr(), x), lambda x: x):
            run(TOKENS)
        return sum(x.numel() == TOKENS.numel() * config.dim for x in tensors.values())

    routed = small(impl="two_phase", ffn=12, layers=4)
    standard = kept(replace(routed, residual="standard", impl="eager", heads=1))
    assert standard - 2 <= kept(routed) <= standard + 2


@pytest.mark.parametrize("residual", RESIDUALS)
def test_training_is_eager_training(residual, tmp_path, monkeypatch):
    monkeypatch.setenv("MHAR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("".join(f"fox {i} jumps over {i * i % 97} dogs.\n\n" for i in range(99)))
    corpus = load_corpus(tmp_path / "text.txt")
    config = replace(small(residual, heads=1), vocab=256)
    recipe = Recipe(steps=3, batch_size=2, eval_every=3, eval_windows=2)
    rows = [
        train(replace(config, impl=i), recipe, corpus, device=DEVICE, progress=False)[1] for i in ("eager", "two_phase")
    ]
    for a, b in zip(*rows, strict=True):
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-5)
        assert a.val_loss == pytest.approx(b.val_loss, abs=1e-5)


# the operators, and what they launch


@pytest.mark.parametrize("normed", [False, True])
def test_operators_are_what_they_declare(normed):
    """PyTorch's own check of schema, fake tensors and autograd; `start`, `begin` and `read` return dummies of random
    content, so the comparison of compiled with direct results is left to the models above.
    """
    ops, opcheck = torch.ops.mhar, torch.library.opcheck
    static = ("test_schema", "test_autograd_registration", "test_faketensor")
    c, heads, shape, room, cut = 5, 2, (1, 1, 12), 2, 3
    q = torch.randn(c, 12, device=DEVICE)
    gains = torch.randn(c, 12, device=DEVICE) if normed else None
    sources = [torch.randn(shape, device=DEVICE) for _ in range(3)]
    dout = torch.randn(shape, device=DEVICE)
    for weigh in (False, True):
        leaves = [s.clone().requires_grad_() for s in sources]
        opcheck(ops.site, (q[0].clone().requires_grad_(), leaves, heads, EPS, weigh))
    readout, rest, lse, _ = ops.site(q[0], sources, heads, EPS, False)
    opcheck(ops.site_backward, (q[0], sources, dout, readout, rest, lse, heads, EPS))
    leaves = [None if x is None else x.clone().requires_grad_() for x in (q, gains)]
    opcheck(ops.start, (*leaves, sources[0], cut, room, heads), test_utils=static)
    ledger, front, back = (x.requires_grad_() for x in ops.start(q, gains, sources[0], cut, room, heads))
    opcheck(ops.open_ledger, (dout, 3, c, room, heads), test_utils=static)
    opcheck(ops.open_rows, (dout, 0, c - cut), test_utils=static)
    real = ops.open_ledger(dout, 3, c, room, heads).zero_()
    rows = [torch.randn_like(ops.open_rows(dout, -1, n)) for n in (cut, c - cut)]  # of zeros nothing is entered
    halves, scale = two_phase.halves_of(q, torch.float32)
    rs = [torch.ones(1, 1, device=DEVICE)] * 2
    for newest in (sources[2].clone().requires_grad_(), None):
        args = (halves, scale, sources[:2], rs, 1, 2, 4, room, heads)
        opcheck(ops.begin, (ledger, front, back, newest, *args, EPS), test_utils=static)
        *_, early, early_ml, _ = ops.begin(ledger, front, back, newest, *args, EPS)
        opcheck(ops.begin_backward, (real, *rows, halves, scale, sources[:2], rs, newest is not None, 2, room, heads))
        args = (sources[0], q, gains, early, early_ml, sources[:1], rs[:1], 3, 1, 4, cut, 0, room, heads, EPS, EPS)
        for keep in (False, True):
            opcheck(ops.read, (ledger, back, newest, *args, keep), test_utils=static)
        _, _, given, r, readout, rest, lse, rho = (x.detach() for x in ops.read(ledger, back, newest, *args, True))
        newest = None if newest is None else newest.detach()
        args = (readout if normed else given, rest, lse, rho, q, gains, newest, r, 3, 4, 0, 0, room, heads)
        opcheck(ops.read_backward, (real, rows[1], dout, *args))


@pytest.fixture
def launches(monkeypatch):
    """How often each kernel was launched, by name."""
    counted, call = collections.Counter(), launch.Kernel.__call__

    def counting(kernel, *args, **kwargs):
        counted[kernel.jit.fn.__name__] += 1
        return call(kernel, *args, **kwargs)

    monkeypatch.setattr(launch.Kernel, "__call__", counting)
    return counted


def test_every_integer_argument_of_a_kernel_is_named(monkeypatch):
    """Triton would compile for the value that it meets first, and a later one would get the wrong code."""
    called, seen = launch.Kernel.__call__, set()

    def watched(kernel, grid, constants, *arguments):
        jit = kernel.jit
        named = jit.kwargs["do_not_specialize"] if launch.INTERPRETED else jit.do_not_specialize
        names = inspect.signature(jit.fn).parameters
        assert {name for name, x in zip(names, arguments, strict=False) if type(x) is int} <= set(named), jit.fn
        seen.add(jit.fn.__name__)
        called(kernel, grid, constants, *arguments)

    monkeypatch.setattr(launch.Kernel, "__call__", watched)
    for name in ("fused", "two_phase"):
        results(all_sites(impl(name, "full"), 1), draw(3, 3, 300, 1, shape=(1, 1), normed=True))
    assert len(seen) == 12  # all of them


def launched(counter, name, residual, heads=1, dim=12, block_size=None):
    """By a forward, and by a backward over 7 sites; addresses aside."""
    inputs = draw(7, 7, dim, heads, shape=(1, 1))
    counter.clear()
    outputs = all_sites(impl(name, residual), heads, block_size)(inputs)
    forward = dict(counter)
    counter.clear()
    torch.autograd.grad(outputs, inputs.leaves(), inputs.upstream)
    backward = dict(counter)
    for counted in (forward, backward):
        counted.pop("addresses_kernel", None)
    return forward, backward


@pytest.mark.parametrize("residual", RESIDUALS)
def test_what_runs_is_kernels(residual, launches, monkeypatch):
    """Eager launches none; the others launch so many that nothing else can pose as a kernel."""
    block_size = 3 if residual == "block" else None
    assert launched(launches, "eager", residual, block_size=block_size) == ({}, {})
    assert launched(launches, "fused", residual, block_size=block_size) == (
        {"site_forward": 7}, {"site_backward": 7},
    )  # fmt: skip
    monkeypatch.setattr("mhar_minimal.fast.schedule", lambda sites: 3)
    # Blocks of 2, 3 and 2 sites under Full, the first without a phase 1; of 3, 3 and 1 under Block. How many phases 1,
    # and sites at which a source of their own block, or its partial sum, is read:
    phases, with_source = (2, 5) if residual == "full" else (3, 4)
    for dim, chunked in ((12, {}), (300, {"block_scores": phases})):
        forward, backward = launched(launches, "two_phase", residual, dim=dim, block_size=block_size)
        assert forward == {"norm_forward": phases, "block_forward": phases, "read_forward": 7} | chunked
        assert backward == {
            "source_backward": 7, "block_backward": phases, "norm_backward": phases,
            "query_backward": with_source + phases,
        } | {f"{kernel}_backward": count for kernel, count in chunked.items()}  # fmt: skip


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("name", ["eager", *IMPLS])
def test_a_model_runs_what_its_impl_says(name, residual, launches):
    model(small(residual, impl=name))(TOKENS)
    kernels = {"site_forward", "block_forward", "read_forward"} & launches.keys()
    assert kernels == {"eager": set(), "fused": {"site_forward"}, "two_phase": {"block_forward", "read_forward"}}[name]


@pytest.mark.parametrize("residual", RESIDUALS)
def test_hooks_on_the_norms_are_called(residual):
    """Otherwise the kernels apply the norms themselves: `trace` sees what the sites read, by either."""
    eager, ours = (trace(model(small(residual, impl=i)), TOKENS).readouts for i in ("eager", "two_phase"))
    assert len(ours) == 5
    for a, b in zip(ours, eager, strict=True):
        assert error(a, b.double()) < 1e-6  # measured 1e-7


@pytest.mark.parametrize("change", ["none", "eps", "kind", "hook", "backward hook"])
def test_a_norm_that_no_kernel_can_stand_in_for_is_called_itself(change, monkeypatch):
    """Such a model's logits and gradients are eager's all the same."""
    found, calls = [], []
    for name in ("eager", "two_phase"):
        made = model(small(impl=name))
        norm = made.layers[1].mlp_norm
        if change == "eps":
            norm.eps = 0.5
        elif change == "kind":
            made.layers[1].mlp_norm = torch.nn.LayerNorm(8, device=DEVICE)
        elif change == "hook":
            norm.register_forward_hook(lambda module, args, output: 2 * output)
        elif change == "backward hook":
            norm.register_full_backward_hook(lambda *args: calls.append(args))
        found.append(logits_and_gradients(made))
    for a, b in zip(*found, strict=True):
        assert error(b, a.double()) < 1e-4  # measured 1.2e-5, and 2e-3 with the wrong norm
    assert len(calls) == (2 if change == "backward hook" else 0)
    norms = [norm for layer in made.layers for norm in (layer.attn_norm, layer.mlp_norm)]
    assert applicable(norms, torch.float32) == (norms if change == "none" else ())
    assert applicable(norms, torch.bfloat16) == ()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert applicable(norms, torch.float32) == ()  # the compiler's own kernels stand in


# where kernels cannot run


@either
def test_without_a_gpu_and_without_the_interpreter_there_is_an_error_and_no_fallback(name, monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match=r"cannot run on device 'cpu': .*impl='eager', or set TRITON_INTERPRET=1"):
        model(small(impl=name)).cpu()(TOKENS.cpu())


def test_another_gpu_than_the_current_one_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    launch.check_runnable(torch.float32, torch.device("cuda:0"))
    with pytest.raises(RuntimeError, match=r"the sources are on cuda:1, Triton launches on cuda:0; accepted: .*device"):
        launch.check_runnable(torch.float32, torch.device("cuda:1"))


def test_another_distribution_may_be_called_kernels(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("mine = False\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import kernels, mhar_minimal.kernels.fused as fused\n"
        "print(kernels.mine, fused.__name__, fused.route.__module__)"
    )
    root = Path(__file__).parent.parent
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "mhar_minimal.kernels.fused", "mhar_minimal.kernels.fused"]
