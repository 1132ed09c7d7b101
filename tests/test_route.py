"""`route` against a loop in float64 NumPy, hand-worked cases, and the traps of public implementations."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from mhar_minimal import route

EPS = 1e-6


def loop(query, gain, sources, heads, eps):
    """The definition once more, one number at a time, in float64; returns read-out and weights as arrays."""
    v = np.stack([s.detach().double().numpy() for s in sources])
    q, g = query.detach().double().numpy(), gain.detach().double().numpy()
    count, batch, length, dim = v.shape
    width = dim // heads
    readout, weights = np.zeros(v.shape[1:]), np.zeros((count, batch, length, heads))
    for b in range(batch):
        for t in range(length):
            keys = [v[i, b, t] / math.sqrt((v[i, b, t] ** 2).sum() / dim + eps) * g for i in range(count)]
            for h in range(heads):
                s = slice(h * width, (h + 1) * width)
                alpha = softmax([float(q[s] @ key[s]) for key in keys])
                weights[:, b, t, h] = alpha
                readout[b, t, s] = sum(alpha[i] * v[i, b, t, s] for i in range(count))
    return readout, weights


def draw(count, batch, length, dim, dtype=torch.float64, scale=1.0):
    sources = [scale * torch.randn(batch, length, dim, dtype=dtype) for _ in range(count)]
    return torch.randn(dim, dtype=dtype), 1 + 0.3 * torch.randn(dim, dtype=dtype), sources


def test_two_sources_by_hand():
    """RMS 1 each; logits ±ln(3)/2 differ by ln 3, so the weights are 3/4 and 1/4."""
    sources = [torch.tensor([[[1.0, 1.0]]], dtype=torch.float64), torch.tensor([[[1.0, -1.0]]], dtype=torch.float64)]
    query, gain = torch.tensor([0.0, math.log(3) / 4]).double(), torch.tensor([1.0, 2.0]).double()
    readout, weights = route(query, gain, sources, heads=1, eps=1e-30, return_weights=True)
    assert torch.allclose(weights.flatten(), torch.tensor([0.75, 0.25]).double(), atol=1e-8)  # query made in float32
    assert torch.allclose(readout.flatten(), torch.tensor([1.0, 0.5]).double(), atol=1e-8)


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(1, 7),
    batch=st.integers(1, 2),
    length=st.sampled_from([0, 1, 3, 5]),
    heads_and_width=st.sampled_from([(1, 1), (1, 6), (3, 5), (4, 2), (12, 3), (8, 1), (7, 1)]),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
)
def test_any_shape_matches_the_loop(count, batch, length, heads_and_width, scale):
    heads, width = heads_and_width
    query, gain, sources = draw(count, batch, length, heads * width, scale=scale)
    readout, weights = route(query, gain, sources, heads, EPS, return_weights=True)
    expected_readout, expected_weights = loop(query, gain, sources, heads, EPS)
    assert readout.shape == (batch, length, heads * width)
    assert weights.shape == (count, batch, length, heads)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(readout, expected_readout, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize(("count", "heads"), [(1, 1), (1, 2), (4, 1), (4, 3), (3, 6)])
def test_every_gradient(count, heads):
    query, gain, sources = draw(count, 2, 3, 6)
    leaves = [x.requires_grad_() for x in (query, gain, *sources)]
    assert torch.autograd.gradcheck(
        lambda q, g, *v: route(q, g, v, heads, EPS, return_weights=True), leaves, atol=1e-7, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_storage_dtypes_lose_no_more_than_their_own_rounding(dtype, scale):
    """Scores and mix are float32, so the only large error is the rounding of the read-out itself."""
    query, gain, sources = draw(5, 2, 7, 24, scale=scale)
    stored = [s.to(dtype) for s in sources]
    readout, weights = route(query.float(), gain.float(), stored, 4, EPS, return_weights=True)
    expected, expected_weights = loop(query, gain, stored, 4, EPS)
    assert readout.dtype == dtype
    assert weights.dtype == torch.float32
    assert np.abs(weights.double().numpy() - expected_weights).max() < 2e-6  # measured 4e-7
    rounding = torch.finfo(dtype).eps * max(1.0, torch.finfo(dtype).smallest_normal / torch.finfo(dtype).eps / scale)
    error = np.abs(readout.double().numpy() - expected).max() / np.abs(expected).max()
    assert error < max(2e-6, rounding)


def test_head_weights_come_from_the_full_width_norm():
    """Trap 1: blowing up one slice must lower the scores of the other slices; a norm per slice would not see it."""
    query, gain, sources = draw(3, 1, 1, 8)
    before = route(query, gain, sources, 2, EPS, return_weights=True)[1]
    sources[1] = sources[1] * torch.tensor([1.0] * 4 + [50.0] * 4, dtype=torch.float64)
    after = route(query, gain, sources, 2, EPS, return_weights=True)[1]
    assert (before - after)[..., 0].abs().max() > 1e-2


def test_one_head_is_attention_over_keys_and_raw_values():
    query, gain, sources = draw(6, 2, 3, 10)
    v = torch.stack(sources, 2)  # [B, T, N, D]
    keys = torch.nn.functional.rms_norm(v, (10,), gain, EPS)
    expected = torch.nn.functional.scaled_dot_product_attention(query.expand(2, 3, 1, 10), keys, v, scale=1.0)
    torch.testing.assert_close(route(query, gain, sources, 1, EPS), expected.squeeze(2), rtol=0, atol=1e-13)


def test_order_of_sources_does_not_matter():
    query, gain, sources = draw(5, 2, 3, 12)
    order = [3, 0, 4, 2, 1]
    readout, weights = route(query, gain, sources, 3, EPS, return_weights=True)
    permuted, permuted_weights = route(query, gain, [sources[i] for i in order], 3, EPS, return_weights=True)
    torch.testing.assert_close(permuted, readout, rtol=0, atol=1e-14)
    torch.testing.assert_close(permuted_weights, weights[order], rtol=0, atol=1e-15)


def test_weights_ignore_a_sources_scale_and_values_do_not():
    query, gain, sources = draw(4, 2, 3, 12)
    readout, weights = route(query, gain, sources, 3, 1e-30, return_weights=True)
    scaled = [1000 * sources[0], *sources[1:]]
    big_readout, big_weights = route(query, gain, scaled, 3, 1e-30, return_weights=True)
    torch.testing.assert_close(big_weights, weights, rtol=0, atol=1e-14)
    contribution = weights[0].repeat_interleave(4, -1) * sources[0]
    torch.testing.assert_close(big_readout - readout, 999 * contribution, rtol=1e-10, atol=1e-10)


def test_zero_query_is_the_mean_not_the_sum():
    """Trap 5, first half."""
    _, gain, sources = draw(4, 2, 3, 12)
    readout = route(torch.zeros(12, dtype=torch.float64), gain, sources, 4, EPS)
    torch.testing.assert_close(readout, sum(sources) / 4, rtol=0, atol=1e-15)


@pytest.mark.parametrize("heads", [1, 4])
def test_a_single_source_passes_unchanged_and_gives_the_query_an_exactly_zero_gradient(heads):
    """Trap 8: true of site 0 of every model."""
    query, gain, sources = draw(1, 2, 3, 12, dtype=torch.float32)
    query.requires_grad_()
    readout = route(query, gain, sources, heads, EPS)
    (readout * torch.randn_like(readout)).sum().backward()
    assert torch.equal(readout, sources[0])
    assert torch.equal(query.grad, torch.zeros(12))


def test_duplicate_and_zero_sources():
    query, gain, (v, *_) = draw(1, 2, 3, 12)
    torch.testing.assert_close(route(query, gain, [v, v, v], 4, EPS), v, rtol=0, atol=1e-15)
    zeros = torch.zeros_like(v).requires_grad_()
    readout, weights = route(query, gain, [zeros, zeros], 4, EPS, return_weights=True)
    readout.sum().backward()
    assert torch.equal(weights, torch.full_like(weights, 0.5))
    assert torch.isfinite(zeros.grad).all()


def test_a_one_hot_softmax_selects_and_stays_finite():
    query, gain, sources = draw(4, 2, 3, 12, dtype=torch.float32)
    query = (1e6 * query).requires_grad_()
    readout, weights = route(query, gain, sources, 1, EPS, return_weights=True)
    readout.sum().backward()
    chosen = weights.argmax(0).expand_as(readout)
    assert (weights.amax(0) == 1).all()
    assert torch.equal(readout, torch.stack(sources).gather(0, chosen[None])[0])
    assert torch.isfinite(query.grad).all()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_broken_token_stays_alone(poison):
    query, gain, sources = draw(4, 2, 5, 12)
    clean_sources = [s.clone().requires_grad_() for s in sources]
    clean = route(query, gain, clean_sources, 3, EPS)
    sources[2][1, 3, 5] = poison
    sources = [s.requires_grad_() for s in sources]
    readout = route(query, gain, sources, 3, EPS)
    upstream = torch.randn_like(readout)
    clean.backward(upstream)
    readout.backward(upstream)
    others = torch.ones(2, 5, dtype=torch.bool)
    others[1, 3] = False
    assert not torch.isfinite(readout[1, 3]).all()
    assert torch.equal(readout[others], clean[others])
    for s, c in zip(sources, clean_sources, strict=True):
        assert torch.equal(s.grad[others], c.grad[others])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": []}, "sources is empty"),
        ({"heads": 5}, "heads=5 does not divide the width 12"),
        ({"heads": 0}, "heads=0"),
        ({"query": torch.zeros(11)}, r"query has shape \(11,\); accepted: \[12\]"),
        ({"gain": torch.ones(1, 12)}, r"gain has shape \(1, 12\)"),
        ({"sources": [torch.zeros(2, 3, 12), torch.zeros(2, 4, 12)]}, r"sources\[1\] has shape \(2, 4, 12\)"),
        ({"sources": [torch.zeros(2, 3, 12), torch.zeros(1, 3, 12)]}, r"sources\[1\] has shape \(1, 3, 12\)"),
        ({"eps": 0.0}, "eps=0.0; accepted: a number above 0"),
        ({"eps": math.nan}, "eps=nan; accepted: a number above 0"),
        ({"sources": [torch.zeros(3, 12)]}, r"sources\[0\] has shape \(3, 12\); accepted: \[B, T, D\]"),
        ({"sources": [torch.zeros(2, 3, 12, dtype=torch.int64)]}, r"sources\[0\] has dtype torch.int64"),
    ],
)
def test_bad_input_is_named(change, message):
    good = dict(query=torch.zeros(12), gain=torch.ones(12), sources=[torch.zeros(2, 3, 12)], heads=3, eps=EPS)
    with pytest.raises(ValueError, match=message):
        route(**(good | change))
