"""The decoder: parameters counted by hand, paired initialisation, causality, the cache, queries that stay zero."""

import math
import sys

import pytest
import torch
from torch import nn

from mhar_minimal import PRESETS, Config, Model, preset
from mhar_minimal.model import Cache, rope, rotate

SCHEMES = [
    dict(residual="standard"),
    dict(residual="full"),
    dict(residual="full", heads=4),
    dict(residual="block", heads=2, block_size=5),
    dict(residual="hyper"),
]
ROUTED = SCHEMES[1:4]


def small(**fields):
    return Config(**(dict(dim=16, layers=3, attn_heads=2, kv_heads=1, ffn=24, vocab=31, context=12) | fields))


def trunk(model):
    return {name: p for name, p in model.state_dict().items() if not name.startswith("depth.")}


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("fields", [{}, dict(residual="full"), dict(residual="full", heads=8), dict(residual="hyper")])
def test_parameters_match_a_count_by_hand(name, fields):
    config = preset(name, **fields)
    with torch.device("meta"):
        model = Model(config)
    d, k = config.dim, config.dim * config.kv_heads // config.attn_heads
    attention = d * d + 2 * d * k + d * d + 2 * (d // config.attn_heads)  # q, k and v, out, two head norms
    mlp = 3 * d * config.ffn
    by_hand = config.vocab * d + config.layers * (attention + mlp + 2 * d) + d
    by_hand += {"full": 2 * d * (2 * config.layers + 1), "hyper": 24 * 2 * config.layers}.get(config.residual, 0)
    assert all(p.is_meta for p in model.parameters())
    assert model.parameter_count() == by_hand
    known = {"tiny": 312_320, "100M": 115_554_304, "350M": 533_123_072, "1B": 1_079_313_280}
    if not fields:
        assert by_hand == known[name]


def test_heads_add_no_parameter():
    assert len({Model(small(residual="full", heads=h)).parameter_count() for h in (1, 2, 4, 8, 16)}) == 1


@pytest.mark.parametrize("fields", SCHEMES)
def test_the_trunk_is_drawn_identically_under_every_scheme(fields):
    reference, model, other = trunk(Model(small(), 7)), trunk(Model(small(**fields), 7)), trunk(Model(small(), 8))
    assert list(model) == list(reference)
    assert all(torch.equal(model[name], reference[name]) for name in reference)
    assert not torch.equal(model["embedding.weight"], other["embedding.weight"])


def test_the_seed_alone_decides_and_the_global_generator_does_not():
    torch.manual_seed(1)
    a = Model(small(residual="full", query_init="random"), 3).state_dict()
    torch.manual_seed(2)
    b = Model(small(residual="full", query_init="random"), 3).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_weights_have_the_recipes_spread():
    model = Model(preset("tiny", residual="full", query_init="random"))
    for name, p in model.named_parameters():
        if p.ndim == 2:
            assert abs(p.std().item() / 0.02 - 1) < 5 / math.sqrt(p.numel()), name
        elif "query" not in name:
            assert torch.equal(p, torch.ones_like(p)), name
    queries = torch.cat(list(model.depth.query))
    assert abs(queries.std().item() / 0.02 - 1) < 5 / math.sqrt(queries.numel())


def generic_init(module):
    """What a training script's init pass typically does to everything it knows."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight)
    for p in module.parameters(recurse=False):
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)


@pytest.mark.parametrize("fields", ROUTED)
def test_queries_stay_zero(fields):
    """Trap 4: after construction, after a generic init pass, after load, after a new draw."""
    model = Model(small(**fields))

    def zero():
        return all(torch.equal(q, torch.zeros_like(q)) for q in model.depth.query)

    assert zero()
    model.apply(generic_init)
    assert zero()
    model.load_state_dict(Model(small(**fields), 1).state_dict())
    assert zero()
    for q in model.depth.query:
        nn.init.normal_(q)
    model.init(5)
    assert zero()


@pytest.mark.parametrize("fields", SCHEMES)
def test_no_token_sees_a_later_one(fields):
    model = Model(small(**fields)).double()
    for p in model.depth.parameters():
        p.data = torch.randn_like(p)
    tokens = torch.randint(0, 31, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 31
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert ((before - after)[:, 7:].abs().amax(-1) > 1e-9).all()


@pytest.mark.parametrize("fields", ROUTED)
def test_every_parameter_learns_but_the_first_query_whose_gradient_is_exactly_zero(fields):
    """Trap 8: site 0 reads one source. Gains wait for a query that is not zero."""
    model = Model(small(**fields))
    model(torch.randint(0, 31, (2, 12))).square().mean().backward()
    for name, p in model.named_parameters():
        still = name == "depth.query.0" or name.startswith("depth.gain.")
        assert (p.grad.abs().max() == 0) == still, name


def attention_by_hand(attn, x, theta):
    """One head, one pair of positions, one pair of channels at a time, as complex rotations in float64."""
    length, width = x.shape[1], attn.head_dim
    norm = nn.functional.rms_norm
    frequency = theta ** (-2 * torch.arange(width // 2, dtype=torch.float64) / width)

    def heads(linear, gain):
        y = linear(x).unflatten(-1, (-1, width))
        return y if gain is None else norm(y, (width,), gain, 1e-6)

    def turn(y, t):
        turned = torch.complex(*y.chunk(2, -1)) * torch.polar(torch.ones_like(frequency), t * frequency)
        return torch.cat((turned.real, turned.imag), -1)

    q, k, v = heads(attn.q, attn.q_norm.weight), heads(attn.k, attn.k_norm.weight), heads(attn.v, None)
    group, out = q.shape[2] // k.shape[2], torch.zeros_like(q)
    for h in range(q.shape[2]):
        for t in range(length):
            scores = torch.stack(
                [(turn(q[:, t, h], t) * turn(k[:, u, h // group], u)).sum(-1) / math.sqrt(width) for u in range(t + 1)]
            )
            out[:, t, h] = (scores.softmax(0)[..., None] * v[:, : t + 1, h // group].transpose(0, 1)).sum(0)
    return attn.out(out.flatten(-2))


def test_attention_against_a_loop():
    config = Config(dim=24, attn_heads=6, kv_heads=2, context=5)
    model = Model(config).double()
    attn = model.layers[0].attn
    for norm in (attn.q_norm, attn.k_norm):
        norm.weight.data = 1 + 0.3 * torch.randn(4, dtype=torch.float64)
    for linear in (attn.q, attn.k, attn.v, attn.out):
        linear.weight.data = torch.randn_like(linear.weight)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    rotation = rope(5, 4, config.rope_theta)
    # cosines are stored in float32, hence 1e-6 and not 1e-13
    torch.testing.assert_close(attn(x, rotation), attention_by_hand(attn, x, config.rope_theta), rtol=0, atol=2e-5)


def test_rotary_scores_depend_on_the_distance_alone():
    rotation = rope(32, 8, 1e4).double()
    q, k = torch.randn(8).double().expand(32, 8), torch.randn(8).double().expand(32, 8)
    scores = rotate(q, rotation) @ rotate(k, rotation).T
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), rtol=0, atol=1e-5)


def test_embedding_is_tied_and_listed_once():
    model = Model(small())
    assert sum(name.endswith("embedding.weight") for name, _ in model.named_parameters()) == 1
    with torch.no_grad():
        model.embedding.weight[5] = 0
    assert torch.equal(model(torch.tensor([[1, 2]]))[..., 5], torch.zeros(1, 2))


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="tokens has length 13; accepted: up to context=12"):
        Model(small())(torch.zeros(1, 13, dtype=torch.int64))


def sharp(**fields):
    """A model in float64 whose every weight matters: as drawn, attention and depth weights are nearly uniform."""
    model = Model(small(**fields)).double()
    for p in model.parameters():
        p.data = torch.randn_like(p) * (0.5 if p.ndim == 2 else 1)
    return model


def no_padding(rows):
    return Cache(torch.zeros(rows, dtype=torch.int64))


@pytest.mark.parametrize("sizes", [(12,), (7, 5), (1,) * 12, (4, 1, 6, 1)], ids=str)
@pytest.mark.parametrize("fields", SCHEMES, ids=str)
def test_a_cache_goes_on_where_the_last_call_ended(fields, sizes):
    model = sharp(**fields)
    tokens, cache = torch.randint(0, 31, (2, 12)), no_padding(2)
    logits = torch.cat([model(piece, cache) for piece in tokens.split(sizes, dim=1)], dim=1)
    whole = model(tokens)
    torch.testing.assert_close(logits, whole, rtol=0, atol=1e-11)
    assert whole.std() > 1
    assert cache.length == 12


@pytest.mark.parametrize("sizes", [(12,), (2, 3, 6, 1)], ids=str)
@pytest.mark.parametrize("fields", SCHEMES, ids=str)
def test_a_padded_row_has_the_logits_it_has_alone(fields, sizes):
    """And what stands in the padding does not count. In pieces, the first of them is padding and nothing else."""
    model, padding = sharp(**fields), [0, 5, 11, 2]
    tokens = torch.randint(0, 31, (4, 12))
    blank = torch.arange(12) < torch.tensor(padding)[:, None]
    runs = []
    for content in (0, 17):
        cache = Cache(torch.tensor(padding))
        pieces = tokens.masked_fill(blank, content).split(sizes, dim=1)
        runs.append(torch.cat([model(piece, cache) for piece in pieces], dim=1))
        assert cache.mask.any(-1).all()  # nobody's softmax is over nothing, whatever a backend makes of that
    assert torch.equal(runs[0][~blank], runs[1][~blank])
    assert runs[0].isfinite().all()
    for row, own, missing in zip(runs[0], tokens, padding, strict=True):
        torch.testing.assert_close(row[missing:], model(own[None, missing:])[0], rtol=0, atol=1e-11)


def test_attention_alone_keeps_anything_and_as_much_under_every_scheme():
    sizes = set()
    for fields in SCHEMES:
        model, cache = Model(small(**fields)), no_padding(2)
        for piece in torch.randint(0, 31, (2, 7)).split((4, 3), dim=1):
            model(piece, cache)
        assert list(cache.kept) == [layer.attn for layer in model.layers]
        sizes.add(sum(tensor.numel() for pair in cache.kept.values() for tensor in pair))
    assert sizes == {3 * 2 * 2 * 1 * 7 * 8}  # layers, keys and values, rows, kv_heads, columns, head_dim


@pytest.mark.parametrize("fields", SCHEMES, ids=str)
def test_a_scheme_carries_nothing_from_token_to_token(fields):
    """Why there is nothing else to keep: token by token, through a scheme of its own each, the read-outs are the same.

    Sublayers are stood in for by functions of a single token, so that only the scheme could mix tokens.
    """
    model, embedding = sharp(**fields), torch.randn(2, 5, 16, dtype=torch.float64)

    def pass_through(embedding):
        scheme, readouts = model.depth(embedding), []
        for s in range(model.config.sublayers):
            readouts.append(scheme.read())
            scheme.write(torch.roll(readouts[-1], s, dims=-1).tanh())
        return torch.stack([*readouts, scheme.read()])  # [sites, B, T, D]

    alone = torch.cat([pass_through(token) for token in embedding.split(1, dim=1)], dim=2)
    torch.testing.assert_close(alone, pass_through(embedding), rtol=0, atol=1e-12)


def test_what_does_not_go_with_the_cache_is_refused():
    model, cache = Model(small()), no_padding(2)
    model(torch.zeros(2, 10, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match=r"tokens has 3 rows; accepted: 2, as the cache"):
        model(torch.zeros(3, 1, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match="tokens has length 3 after 10 in the cache; accepted: up to context=12"):
        model(torch.zeros(2, 3, dtype=torch.int64), cache)
    assert model(torch.zeros(2, 2, dtype=torch.int64), cache).shape == (2, 2, 31)  # a refusal leaves it as it was


@pytest.mark.parametrize("fields", SCHEMES)
def test_float64_and_bfloat16_forward(fields):
    tokens = torch.randint(0, 31, (2, 12))
    exact = Model(small(**fields)).double()(tokens)
    half = Model(small(**fields)).bfloat16()(tokens)
    assert half.dtype == torch.bfloat16
    assert (half.double() - exact).norm() / exact.norm() < 0.05  # measured 0.01


@pytest.mark.parametrize("fields", SCHEMES)
def test_autocast_multiplies_in_bfloat16_and_keeps_the_rest_in_float32(fields):
    exact, model = Model(small(**fields)), Model(small(**fields, autocast=True))
    written, tokens = [], torch.arange(12).view(2, 6)
    model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: written.append((inputs[0], output)))
    logits = model(tokens)
    logits.square().mean().backward()
    ((read, output),) = written
    assert (read.dtype, output.dtype, logits.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        assert torch.equal(model(tokens), logits)
        far = (logits - exact(tokens)).abs().max() / logits.abs().max()
    assert 1e-4 < far < 3e-2  # rounded, and no more than that
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("fields", SCHEMES, ids=str)
def test_autocast_with_a_cache_goes_on_where_the_last_call_ended(fields):
    model, cache = Model(small(**fields, autocast=True)), no_padding(2)
    tokens = torch.randint(0, 31, (2, 12))
    with torch.no_grad():
        whole = model(tokens)
        logits = torch.cat([model(piece, cache) for piece in tokens.split((7, 1, 4), dim=1)], dim=1)
    assert {tensor.dtype for pair in cache.kept.values() for tensor in pair} == {torch.bfloat16}
    assert (logits - whole).abs().max() < 3e-2 * whole.abs().max()  # pieces that forget: 0.3


def test_autocast_norms_and_rotates_in_float32_and_rounds_once():
    model, cache, projected = Model(small(autocast=True)), no_padding(2), []
    attn = model.layers[0].attn
    attn.k_norm.weight.data = 1 + 0.3 * torch.randn(8)
    attn.k.register_forward_hook(lambda module, inputs, output: projected.append(output.double()))
    model(torch.randint(0, 31, (2, 12)), cache)
    heads = projected[0].unflatten(-1, (1, 8)).transpose(1, 2)
    exact = rotate(nn.functional.rms_norm(heads, (8,), attn.k_norm.weight.double(), 1e-6), model.rotation.double())
    keys, _ = cache.kept[attn]
    torch.testing.assert_close(keys.double(), exact, rtol=2**-8, atol=1e-6)  # bfloat16 has 8 bits


def test_random_queries_are_numbers_of_their_own_and_follow_the_seed():
    config = small(residual="full", query_init="random")
    queries = [torch.stack(list(Model(config, seed).depth.query)) for seed in (0, 1)]
    assert not torch.equal(queries[0], queries[1])
    drawn = Model(config, 0).embedding.weight.flatten()
    assert not torch.isin(queries[0].flatten(), drawn).any()


@pytest.mark.parametrize("fields", [*SCHEMES, dict(autocast=True)])
def test_a_model_from_meta_is_a_model(fields):
    tokens = torch.randint(0, 31, (2, 12))
    with torch.device("meta"):
        model = Model(small(**fields))
    assert model(tokens.to("meta")).shape == (2, 12, 31)
    model = model.to_empty(device="cpu")
    model.init(4)
    assert torch.equal(model(tokens), Model(small(**fields), 4)(tokens))
    assert "rotation" not in model.state_dict()


def test_init_resets_gains_too():
    model = Model(small(residual="full"), 2)
    for p in model.parameters():
        p.data.fill_(3)
    model.init(2)
    assert all(map(torch.equal, model.parameters(), Model(small(residual="full"), 2).parameters()))


def test_the_configuration_reaches_every_norm_and_the_rotation():
    model = Model(small(residual="full", eps=0.25, rope_theta=100.0))
    assert {m.eps for m in model.modules() if isinstance(m, nn.RMSNorm)} == {0.25}
    assert model.depth.eps == 0.25
    assert torch.equal(model.rotation, rope(12, 8, 100.0))


def test_the_mlp_is_swiglu():
    mlp = Model(small()).layers[0].mlp
    for linear in (mlp.gate, mlp.up, mlp.down):
        linear.weight.data = torch.randn_like(linear.weight)
    x = torch.randn(2, 3, 16)
    gate, up = x @ mlp.gate.weight.T, x @ mlp.up.weight.T
    torch.testing.assert_close(mlp(x), (gate * gate.sigmoid() * up) @ mlp.down.weight.T, rtol=1e-4, atol=1e-3)


def test_what_is_no_batch_of_tokens_or_no_seed_is_refused():
    with pytest.raises(ValueError, match=r"tokens has shape \(12,\); accepted: \[B, T\]"):
        Model(small())(torch.zeros(12, dtype=torch.int64))
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=f"seed={seed}; accepted: 0 to 4294967295"):
            Model(small(), seed)


def test_kernels_without_triton_are_refused_with_the_reason(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("mhar_minimal.fast", "mhar_minimal.kernels."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("mhar_minimal.fast", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match=r"impl='fused' needs Triton, .*accepted here: impl='eager'"):
        Model(small(residual="full", impl="fused"))(torch.zeros(1, 4, dtype=torch.int64))
