"""The probe, against SciPy, against autograd by hand, and against sources rebuilt from the outputs."""

import gc
import math
import weakref
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import softmax
from scipy.stats import entropy as scipy_entropy

from mhar_minimal import Model, preset, probe, route

SMALL = {"dim": 16, "layers": 3, "attn_heads": 2, "kv_heads": 1, "ffn": 24, "vocab": 32, "context": 8}
SCHEMES = {
    "standard": {"residual": "standard"},
    "hyper": {"residual": "hyper"},
    "full-1": {"residual": "full"},
    "full-4": {"residual": "full", "heads": 4},
    "block-1": {"residual": "block", "block_size": 4},  # 6 sublayers: a ragged last block of 2
    "block-4": {"residual": "block", "block_size": 4, "heads": 4},
    "block-even": {"residual": "block", "block_size": 3},  # the last site reads finished blocks only
}
ROUTED = [name for name in SCHEMES if name.startswith(("full", "block"))]


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Model:
    """A model whose every parameter has moved away from its start, so that nothing is equal by symmetry."""
    model = Model(preset("tiny", **SMALL, **SCHEMES[name])).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens_of(seed: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(32, (2, length), generator=torch.Generator().manual_seed(seed))


def sources_by_hand(model: Model, embedding: torch.Tensor, outputs: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Per site what it may read, from the definition: embedding, sums of whole blocks, the sum of the block so far."""
    size = model.config.block_size or 1
    sites = []
    for s in range(len(outputs) + 1):
        starts = range(0, s, size)
        sites.append([embedding, *(torch.stack(outputs[a : min(a + size, s)]).sum(0) for a in starts)])
    return sites


# --- trace -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
def test_the_trace_explains_the_logits(name):
    model, tokens = model_of(name), tokens_of()
    t = probe.trace(model, tokens)
    assert (len(t.readouts), len(t.outputs)) == (7, 6)
    assert torch.equal(t.readouts[0], model.embedding(tokens)) or name == "hyper"
    assert torch.equal(F.linear(model.norm(t.readouts[-1]), model.embedding.weight), model(tokens))
    for i, layer in enumerate(model.layers):
        attn = layer.attn(layer.attn_norm(t.readouts[2 * i]), model.rotation[:, : tokens.shape[1]])
        assert torch.equal(t.outputs[2 * i], attn)
        assert torch.equal(t.outputs[2 * i + 1], layer.mlp(layer.mlp_norm(t.readouts[2 * i + 1])))


@pytest.mark.parametrize("name", ROUTED)
def test_weights_and_readouts_are_those_of_route_over_sources_rebuilt_by_hand(name):
    model, tokens = model_of(name), tokens_of()
    t = probe.trace(model, tokens)
    by_hand = sources_by_hand(model, model.embedding(tokens).detach(), t.outputs)
    assert len(t.weights) == len(t.sources) == len(by_hand) == 7
    for s, sources in enumerate(by_hand):
        readout, weights = route(
            model.depth.query[s], model.depth.gain[s], sources, model.config.heads, model.config.eps, True
        )
        assert t.weights[s].shape == (len(sources), 2, 5, model.config.heads)
        torch.testing.assert_close(t.weights[s], weights, rtol=0, atol=1e-13)
        torch.testing.assert_close(t.readouts[s], readout, rtol=0, atol=1e-12)
        for recorded, source in zip(t.sources[s], sources, strict=True):
            torch.testing.assert_close(recorded, source, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["standard", "hyper"])
def test_no_depth_weights_is_said_and_not_papered_over(name):
    t = probe.trace(model_of(name), tokens_of())
    assert t.weights is None
    assert t.sources is None
    for function in (probe.entropy, probe.heatmap, probe.head_deviation):
        with pytest.raises(ValueError, match=r"weights=None; accepted: those of a full or block model"):
            function(t.weights)
    with pytest.raises(ValueError, match=f"residual='{name}'; accepted: full, block"):
        probe.slice_disagreement(model_of(name), tokens_of())


def hooks(model: Model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model, tokens = model_of("block-1").train(training), tokens_of()
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    before = {n: (p.detach().clone(), p.grad.clone(), p.requires_grad) for n, p in model.named_parameters()}
    t = probe.trace(model, tokens)
    probe.gradient_norms(model, tokens, tokens)
    probe.slice_disagreement(model, tokens)
    assert torch.is_grad_enabled()
    assert not any(x.requires_grad for x in t.readouts + t.outputs + t.weights + t.sources[-1])
    assert all(m.training is training for m in model.modules())
    assert hooks(model) == 0
    for n, p in model.named_parameters():
        value, grad, requires_grad = before[n]
        assert torch.equal(p, value)
        assert torch.equal(p.grad, grad)
        assert p.requires_grad is requires_grad


def test_hooks_go_even_when_the_forward_raises():
    model = model_of("full-1")
    for call in (
        lambda: probe.trace(model, tokens_of(length=9)),
        lambda: probe.gradient_norms(model, tokens_of(length=9), tokens_of(length=9)),
    ):
        with pytest.raises(ValueError, match="context=8"):
            call()
        assert hooks(model) == 0
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", SCHEMES)
def test_a_trace_is_freed_as_soon_as_it_is_dropped(name):
    """No reference cycle keeps the tensors of a pass until the garbage collector comes by."""
    gc.disable()
    try:
        output = weakref.ref(probe.trace(model_of(name), tokens_of()).outputs[3])
        assert output() is None
    finally:
        gc.enable()


# --- magnitudes ------------------------------------------------------------------------------------------------------


def test_norms_by_hand():
    x = torch.tensor([[[3.0, 4.0], [0.0, 0.0]]])  # RMS sqrt(12.5) and 0
    assert probe.norms([x, 2 * x]) == pytest.approx([math.sqrt(12.5) / 2, math.sqrt(12.5)], rel=1e-6)
    assert probe.norms([torch.full((1, 1, 4), 300.0, dtype=torch.float16)]) == [300.0]  # 300² overflows float16


def test_branch_share_by_hand():
    e, a, b = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.0, 5.0]]]), torch.tensor([[[6.0, 8.0]]])
    t = probe.Trace(readouts=[e, e + a, e + a + b], outputs=[a, b], weights=None, sources=None)
    # |a| = 5 beside |(3, 9)|, then |b| = 10 beside |(9, 17)|
    assert probe.branch_share(t) == pytest.approx([5 / math.sqrt(90), 10 / math.sqrt(370)], rel=1e-6)


@pytest.mark.parametrize("name", SCHEMES)
def test_gradient_norms_are_the_directional_derivatives(name):
    """Finite differences: nudging output i along its own gradient changes the loss by the gradient's norm."""
    model, tokens, targets = model_of(name), tokens_of(), tokens_of(3)
    found = probe.gradient_norms(model, tokens, targets)
    sublayers = [m for layer in model.layers for m in (layer.attn, layer.mlp)]
    nudges = [torch.zeros(2, 5, 16, dtype=torch.float64, requires_grad=True) for _ in sublayers]
    handles = [
        m.register_forward_hook(lambda module, args, y, n=n: y + n) for m, n in zip(sublayers, nudges, strict=True)
    ]

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    loss().backward()
    assert found == pytest.approx([n.grad.norm().item() for n in nudges], rel=1e-10)
    for nudge, norm in zip(nudges, found, strict=True):
        step = 1e-5 * nudge.grad / nudge.grad.norm()
        with torch.no_grad():
            nudge += step
            up = loss()
            nudge -= 2 * step
            down = loss()
            nudge += step
        assert (up - down).item() / 2e-5 == pytest.approx(norm, rel=1e-6)
    for handle in handles:
        handle.remove()


def test_gradient_norms_of_a_frozen_caller():
    model, tokens = model_of("full-1"), tokens_of()
    with torch.no_grad():
        inside = probe.gradient_norms(model, tokens, tokens)
    assert inside == probe.gradient_norms(model, tokens, tokens)


# --- depth weights ---------------------------------------------------------------------------------------------------


def test_entropy_is_scipys():
    w = torch.rand(5, 2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w[0] = 0  # a weight that underflowed counts nothing
    w = w / w.sum(0)
    expected = scipy_entropy(w.numpy(), axis=0).mean((0, 1))
    np.testing.assert_allclose(probe.entropy(w), expected, rtol=1e-13)
    assert probe.entropy(torch.full((4, 1, 1, 1), 0.25)).item() == pytest.approx(math.log(4))


def test_heatmap_by_hand():
    """Two sites, two heads, two tokens: means over tokens, and a gap where site 0 cannot read source 1."""
    first = torch.ones(1, 1, 2, 2)
    second = torch.tensor([[[[0.2, 0.5], [0.4, 0.5]]], [[[0.8, 0.5], [0.6, 0.5]]]])  # [N=2, B=1, T=2, H=2]
    nan = math.nan
    expected = torch.tensor([[[1, nan], [0.3, 0.7]], [[1, nan], [0.5, 0.5]]])
    torch.testing.assert_close(probe.heatmap([first, second]), expected, equal_nan=True)
    deviation = torch.tensor([[[0, nan], [-0.1, 0.1]], [[0, nan], [0.1, -0.1]]])
    torch.testing.assert_close(probe.head_deviation([first, second]), deviation, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "live"),
    [("full-4", [1, 2, 3, 4, 5, 6, 7]), ("block-4", [1, 2, 2, 2, 2, 3, 3]), ("block-even", [1, 2, 2, 2, 3, 3, 3])],
)
def test_heatmap_has_gaps_exactly_at_impossible_cells(name, live):
    cells = probe.heatmap(probe.trace(model_of(name), tokens_of()).weights)
    assert cells.dtype == torch.float32
    assert cells.shape == (preset("tiny", **SMALL, **SCHEMES[name]).heads, 7, max(live))
    assert torch.equal(~cells.isnan(), (torch.arange(max(live)) < torch.tensor(live)[:, None]).expand_as(cells))
    torch.testing.assert_close(cells.nansum(-1), torch.ones(cells.shape[:2]))


# --- slice disagreement ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full-1", "block-1", "block-even"])
@pytest.mark.parametrize("slices", [1, 4])
def test_slice_disagreement_is_scipys_over_sources_rebuilt_by_hand(name, slices):
    model, tokens, seed = model_of(name), tokens_of(), 7
    t = probe.trace(model, tokens)
    sites = sources_by_hand(model, model.embedding(tokens).detach(), t.outputs)
    generator = torch.Generator().manual_seed(seed)
    expected = np.zeros(2)
    for s in range(1, 7):
        v = torch.stack(sites[s]).numpy()  # [N, B, T, D]
        key = v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-6) * model.depth.gain[s].detach().numpy()
        own = model.depth.query[s].detach().numpy()
        null = torch.randn(16, generator=generator, dtype=torch.float64).numpy()
        for which, query in enumerate((own, null * np.linalg.norm(own) / np.linalg.norm(null))):
            p = softmax(key @ query, axis=0)
            if which == 0:
                np.testing.assert_allclose(p, t.weights[s][..., 0], rtol=0, atol=1e-13)
            for piece in np.split(np.arange(16), slices):
                p_h = softmax(key[..., piece] @ query[piece], axis=0)
                expected[which] += scipy_entropy(p_h, p, axis=0).mean() / slices / 6
    assert probe.slice_disagreement(model, tokens, slices, seed) == pytest.approx(expected, rel=1e-10, abs=1e-15)
    assert slices == 1 or min(expected) > 0.01  # otherwise the comparison says little


def test_slice_disagreement_by_hand():
    """One layer, two channels, queries (3, -1): the logits of the slices, and their sum, written out."""
    model = Model(preset("tiny", **{**SMALL, "dim": 2, "attn_heads": 1, "layers": 1}, residual="full")).double()
    with torch.no_grad():
        for q in model.depth.query:
            q.copy_(torch.tensor([3.0, -1.0]))
        model.embedding.weight.copy_(torch.tensor([1.0, 1.0]))
        model.layers[0].attn.out.weight.zero_()  # site 1 reads (1, 1) and (0, 0): logits 3, -1 against 0, 0
        model.layers[0].mlp.down.weight.zero_()  # site 2 reads one more (0, 0)
    unit = 1 / math.sqrt(1 + 1e-6)

    def kl(n: int, own: float) -> float:
        p_h, p = softmax([own * unit] + [0.0] * n), softmax([2.0 * unit] + [0.0] * n)
        return sum(a * math.log(a / b) for a, b in zip(p_h, p, strict=True))

    expected = (kl(1, 3.0) + kl(1, -1.0) + kl(2, 3.0) + kl(2, -1.0)) / 4
    trained, random = probe.slice_disagreement(model, torch.zeros(1, 3, dtype=torch.int64), slices=2)
    assert trained == pytest.approx(expected, rel=1e-12)
    assert random != trained


def test_slice_disagreement_depends_on_its_arguments_alone():
    model, tokens = model_of("full-1"), tokens_of()
    first = probe.slice_disagreement(model, tokens, seed=0)
    torch.manual_seed(99)
    assert probe.slice_disagreement(model, tokens, seed=0) == first
    other = probe.slice_disagreement(model, tokens, seed=1)
    assert other[0] == first[0]
    assert other[1] != first[1]


def test_zero_queries_agree():
    model = Model(preset("tiny", **SMALL, residual="full"))
    assert probe.slice_disagreement(model, tokens_of()) == (0.0, 0.0)


def test_slice_disagreement_refuses():
    with pytest.raises(ValueError, match="heads=4; accepted: 1"):
        probe.slice_disagreement(model_of("full-4"), tokens_of())
    for slices in (3, 0):
        with pytest.raises(ValueError, match=f"slices={slices} does not divide dim=16"):
            probe.slice_disagreement(model_of("full-1"), tokens_of(), slices=slices)


# --- causal check ----------------------------------------------------------------------------------------------------


def loss_with(model: Model, tokens: torch.Tensor, targets: torch.Tensor, cells: set, replacement: str) -> float:
    """The loss by `route` over a history kept by hand, with the weights of the (site, head) in cells replaced."""
    size, heads = model.config.block_size or 1, model.config.heads
    values, readouts = [model.embedding(tokens)], []
    sublayers = [
        (n, m) for layer in model.layers for n, m in ((layer.attn_norm, layer.attn), (layer.mlp_norm, layer.mlp))
    ]
    for s in range(len(sublayers) + 1):
        sums = [torch.stack(values[1 + a : 1 + min(a + size, s)]).sum(0) for a in range(0, s, size)]
        sources = [values[0], *sums]
        _, alpha = route(model.depth.query[s], model.depth.gain[s], sources, heads, model.config.eps, True)
        own = [alpha[..., h] for h in range(heads)]
        for h in range(heads):
            if (s, h) in cells:
                alpha[..., h] = sum(own) / heads if replacement == "mean" else 1 / len(sources)
        matrix = alpha.repeat_interleave(16 // heads, -1)  # [N, B, T, D]
        readouts.append((matrix * torch.stack(sources)).sum(0))
        if s < len(sublayers):
            norm, sublayer = sublayers[s]
            more = (model.rotation[:, : tokens.shape[1]],) if s % 2 == 0 else ()
            values.append(sublayer(norm(readouts[-1]), *more))
    logits = F.linear(model.norm(readouts[-1]), model.embedding.weight)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


@pytest.mark.parametrize("replacement", ["mean", "uniform"])
@pytest.mark.parametrize("name", ["full-1", "full-4", "block-1", "block-4"])
@torch.no_grad()
def test_the_causal_check_is_the_model_written_out_with_other_weights(name, replacement):
    model, tokens, targets = model_of(name), tokens_of(), tokens_of(3)
    heads = model.config.heads
    whole, everywhere, alone = probe.causal_check(model, tokens, targets, replacement)
    assert whole == pytest.approx(loss_with(model, tokens, targets, set(), replacement), rel=1e-12)
    for h in range(heads):
        cells = {(s, h) for s in range(7)}
        expected = loss_with(model, tokens, targets, cells, replacement) - whole
        assert everywhere[h].item() == pytest.approx(expected, abs=1e-12)
        for s in range(7):
            expected = loss_with(model, tokens, targets, {(s, h)}, replacement) - whole
            assert alone[s, h].item() == pytest.approx(expected, abs=1e-12)
    assert alone.shape == (7, heads)
    assert torch.equal(alone[0], torch.zeros(heads).double())  # one source, weight 1 whatever replaces it
    if name.endswith("1") and replacement == "mean":  # the mean over one head is the head
        assert torch.equal(alone, torch.zeros(7, 1).double())
        assert torch.equal(everywhere, torch.zeros(1).double())
    else:
        assert everywhere.abs().min() > 1e-4
        assert alone[1:].abs().min() > 1e-6


def test_the_causal_check_by_hand():
    """Two heads of one channel, one token, sublayers that write nothing: only the final read-out reaches the loss."""
    model = Model(
        preset("tiny", **{**SMALL, "dim": 2, "attn_heads": 1, "layers": 1, "vocab": 2}, residual="full", heads=2)
    )
    model = model.double()
    with torch.no_grad():
        for site, query in enumerate(model.depth.query):
            query[0] = math.log(3) if site == 2 else 0
        model.embedding.weight.copy_(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
        model.layers[0].attn.out.weight.zero_()
        model.layers[0].mlp.down.weight.zero_()  # both write (0, 0), so the read-out is α_0 of each head
    unit = 1 / math.sqrt(1 + 1e-6)

    def loss(first: float, second: float) -> float:
        r = 1 / math.sqrt((first**2 + second**2) / 2 + 1e-6)
        return math.log(1 + math.exp(r * ((first - second) - (first + second))))  # target 0

    own, other = 3**unit / (3**unit + 2), 1 / 3
    mean = (own + other) / 2
    token = torch.zeros(1, 1, dtype=torch.int64)
    whole, everywhere, alone = probe.causal_check(model, token, token)
    assert whole == pytest.approx(loss(own, other), rel=1e-12)
    expected = [loss(mean, other) - whole, loss(own, mean) - whole]
    assert everywhere.tolist() == pytest.approx(expected, rel=1e-9)
    assert alone.tolist() == [[0, 0], [0, 0], pytest.approx(expected, rel=1e-9)]
    _, everywhere, _ = probe.causal_check(model, token, token, "uniform")
    assert everywhere.tolist() == [pytest.approx(loss(1 / 3, other) - whole, rel=1e-9), pytest.approx(0, abs=1e-15)]


def test_heads_that_agree_change_nothing():
    model = Model(preset("tiny", **SMALL, residual="full", heads=4))  # zero queries: every weight is 1/N
    for replacement in ("mean", "uniform"):
        _, everywhere, alone = probe.causal_check(model, tokens_of(), tokens_of(3), replacement)
        assert everywhere.abs().max() < 1e-6
        assert alone.abs().max() < 1e-6


def test_the_causal_check_leaves_the_model_as_it_was_and_refuses_the_rest():
    model, tokens = model_of("full-4"), tokens_of()
    before = probe.trace(model, tokens).weights
    probe.causal_check(model, tokens, tokens)
    assert hooks(model) == 0
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(probe.trace(model, tokens).weights, before, strict=True))
    with pytest.raises(ValueError, match="replacement='zero'; accepted: mean, uniform"):
        probe.causal_check(model, tokens, tokens, "zero")
    for fields in ({"residual": "hyper"}, {"residual": "full", "impl": "fused"}):
        with pytest.raises(ValueError, match=r"residual=.*; accepted: full or block, eager"):
            probe.causal_check(Model(preset("tiny", **SMALL, **fields)), tokens, tokens)


@pytest.mark.parametrize("name", ["full-1", "full-4", "block-4"])
def test_findings_are_those_of_the_probes(name):
    model = model_of(name)
    tokens, targets = tokens_of(), tokens_of(3)
    found = {(f.probe, f.site, f.head): f.value for f in probe.findings(model, tokens, targets)}
    weights, heads = probe.trace(model, tokens).weights, range(model.config.heads)
    sites = range(len(weights))
    wanted = {}
    mean = [w.mean((1, 2)) for w in weights]  # [N, H]
    for s, h in product(sites, heads):
        if s:
            wanted["entropy", s, h] = scipy_entropy(weights[s][..., h]).mean() / math.log(len(weights[s]))
            wanted["deviation", s, h] = (mean[s][:, h] - mean[s].mean(1)).abs().sum().item() / 2
    for replacement in ("mean", "uniform"):
        whole, everywhere, alone = probe.causal_check(model, tokens, targets, replacement)
        wanted |= {(f"causal {replacement}", None, h): everywhere[h].item() for h in heads}
        wanted |= {(f"causal {replacement}", s, h): alone[s, h].item() for s, h in product(sites, heads)}
    wanted["loss", None, None] = whole
    if model.config.heads == 1:
        own, random = probe.slice_disagreement(model, tokens, 4)
        wanted["slice disagreement", None, None] = own
        wanted["slice disagreement, random queries", None, None] = random
    assert found == pytest.approx(wanted, abs=1e-6)  # heatmap is float32


def test_a_width_that_four_slices_do_not_divide_has_no_slice_disagreement():
    model = Model(preset("tiny", **SMALL | {"dim": 18, "attn_heads": 3}, residual="full"))
    found = {f.probe for f in probe.findings(model, tokens_of(), tokens_of(3))}
    assert found == {"loss", "entropy", "deviation", "causal mean", "causal uniform"}


def test_findings_need_depth_weights():
    with pytest.raises(ValueError, match="weights=None; accepted: those of a full or block model"):
        probe.findings(model_of("standard"), tokens_of(), tokens_of(3))
