"""Every scheme, site by site, against `route` on a history kept by hand; the limits; and what zero queries mean."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhar_minimal import Config, Model, route
from mhar_minimal.depth import STREAMS, Depth

SUBLAYERS = 6
SMALL = dict(dim=24, layers=3, attn_heads=2, kv_heads=1, ffn=16, vocab=17, context=8)


def config(**fields):
    return Config(**(SMALL | fields))


def make(**fields):
    """A `Depth` in float64 with random queries and gains."""
    depth = Depth(config(**fields)).double()
    for name, p in depth.named_parameters():
        p.data = torch.randn_like(p) + (1 if "gain" in name else 0)
    return depth


def history(depth, batch=2, length=3):
    shape = (batch, length, depth.query[0].numel() if hasattr(depth, "query") else SMALL["dim"])
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(SUBLAYERS + 1)]


def run(depth, values):
    """All 2L + 1 read-outs, sublayer i writing ``values[i + 1]`` whatever it read."""
    scheme, readouts = depth(values[0]), []
    for output in values[1:]:
        readouts.append(scheme.read())
        scheme.write(output)
    return [*readouts, scheme.read()], scheme


def sources_at(site, values, block_size):
    """What spec and papers say site reads: embedding, finished blocks' sums, the running sum of the current block."""
    outputs = values[1 : site + 1]
    blocks = [outputs[i : i + block_size] for i in range(0, site, block_size)]
    return [values[0], *(sum(block[1:], block[0]) for block in blocks)]


@pytest.mark.parametrize("heads", [1, 3, 24])
@pytest.mark.parametrize("block_size", [None, 1, 2, 4, 5, 6])
def test_full_and_block_are_route_at_every_site_with_every_gradient(block_size, heads):
    """Traps 2, 3 and 7: raw outputs as sources, nothing twice or missing, no block dropped, boundaries in place."""
    depth = make(residual="full" if block_size is None else "block", heads=heads, block_size=block_size)
    values = history(depth)
    upstream = torch.randn(SUBLAYERS + 1, *values[0].shape, dtype=torch.float64)
    leaves = [*values, *depth.parameters()]

    readouts, scheme = run(depth, values)
    grads = torch.autograd.grad((torch.stack(readouts) * upstream).sum(), leaves)

    expected, expected_weights = [], []
    for s in range(SUBLAYERS + 1):
        sources = sources_at(s, values, block_size or 1)
        readout, weights = route(depth.query[s], depth.gain[s], sources, heads, depth.eps, return_weights=True)
        expected.append(readout)
        expected_weights.append(weights)
    expected_grads = torch.autograd.grad((torch.stack(expected) * upstream).sum(), leaves)

    for a, b in zip([*readouts, *scheme.weights, *grads], [*expected, *expected_weights, *expected_grads], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)  # measured 3e-14


@settings(deadline=None, max_examples=25)
@given(
    batch=st.integers(1, 2),
    length=st.sampled_from([1, 3, 5]),
    shape=st.sampled_from([(1, 2), (5, 2), (12, 1), (3, 10)]),
    block_size=st.integers(1, SUBLAYERS),
)
def test_any_shape_in_any_block(batch, length, shape, block_size):
    heads, width = shape
    depth = make(residual="block", heads=heads, block_size=block_size, dim=heads * width, attn_heads=1)
    values = history(depth, batch, length)
    for s, readout in enumerate(run(depth, values)[0]):
        expected = route(depth.query[s], depth.gain[s], sources_at(s, values, block_size), heads, depth.eps)
        torch.testing.assert_close(readout, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 4])
def test_blocks_of_one_are_full_bitwise(heads):
    block = make(residual="block", block_size=1, heads=heads)
    full = Depth(config(residual="full", heads=heads)).double()
    full.load_state_dict(block.state_dict())
    values = history(block)
    for a, b in zip(run(block, values)[0], run(full, values)[0], strict=True):
        assert torch.equal(a, b)


def test_one_block_is_a_two_way_mix_of_embedding_and_standard_sum():
    depth = make(residual="block", block_size=SUBLAYERS, heads=2)
    values = history(depth)
    readouts, scheme = run(depth, values)
    assert torch.equal(readouts[0], values[0])
    for s in range(1, SUBLAYERS + 1):
        embedding_share, sum_share = (w.repeat_interleave(12, -1) for w in scheme.weights[s])
        expected = embedding_share * values[0] + sum_share * sum(values[1 : s + 1])
        torch.testing.assert_close(readouts[s], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("block_size", "counts"), [(4, [1, 2, 2, 2, 2, 3, 3]), (5, [1, 2, 2, 2, 2, 2, 3])])
def test_number_of_sources_by_site_with_a_ragged_last_block(block_size, counts):
    depth = make(residual="block", block_size=block_size)
    assert [w.shape[0] for w in run(depth, history(depth))[1].weights] == counts


@pytest.mark.parametrize("residual", ["standard", "hyper"])
def test_standard_and_hyper_connections_at_start_are_the_running_sum(residual):
    depth = Depth(config(residual=residual)).double()
    values = history(depth)
    for s, readout in enumerate(run(depth, values)[0]):
        torch.testing.assert_close(readout, sum(values[: s + 1]), rtol=0, atol=1e-14)


def test_hyper_connections_by_hand():
    """Four streams written out as loops, random weights."""
    depth = make(residual="hyper")
    values = history(depth)
    streams, expected = [values[0]] * STREAMS, []
    for s in range(SUBLAYERS):
        expected.append(sum(depth.read_mix[s][j] * streams[j] for j in range(STREAMS)))
        streams = [
            sum(depth.streams[s][j, k] * streams[j] for j in range(STREAMS)) + depth.write_mix[s][k] * values[s + 1]
            for k in range(STREAMS)
        ]
    expected.append(sum(streams) / STREAMS)
    for a, b in zip(run(depth, values)[0], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_storage_dtype_is_kept_and_scores_are_float32(dtype):
    depth = make(residual="full", heads=3)
    values = [v.detach().to(dtype) for v in history(depth)]
    readouts, scheme = run(depth, values)
    for s, (readout, weights) in enumerate(zip(readouts, scheme.weights, strict=True)):
        exact, exact_weights = route(
            depth.query[s], depth.gain[s], [v.double() for v in values[: s + 1]], 3, depth.eps, return_weights=True
        )
        assert readout.dtype == dtype
        assert (weights - exact_weights).abs().max() < 2e-6  # measured 5e-7 with float32 scores
        rounding = max(torch.finfo(dtype).eps, 1e-6)  # float32: measured 2e-7
        assert (readout - exact).abs().max() <= rounding * exact.abs().max()


def test_autocast_leaves_the_scores_in_float32():
    depth = make(residual="full", heads=3).float()
    values = [v.detach().float() for v in history(depth)]
    expected = run(depth, values)[1].weights
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = run(depth, values)[1].weights
    for a, b in zip(weights, expected, strict=True):
        assert torch.equal(a, b)


def zero_query_logits(seed=0, **fields):
    """Logits and trunk gradients of a float64 model with the shared trunk of that seed."""
    model = Model(config(**fields), seed).double()
    tokens = torch.arange(16).view(2, 8)
    logits = model(tokens)
    trunk = [p for name, p in model.named_parameters() if not name.startswith("depth.")]
    return logits, torch.autograd.grad(logits.square().mean(), trunk)


@pytest.mark.parametrize(
    "fields",
    [
        dict(residual="full"),
        dict(residual="full", heads=4),
        dict(residual="block", block_size=SUBLAYERS),
        dict(residual="block", block_size=4, heads=2),
        dict(residual="hyper"),
    ],
)
def test_at_the_start_the_model_is_prenorms_function_up_to_eps(fields):
    """Trap 5, second half: the mean is the sum over N, and a scale-free norm follows every read-out."""
    logits, grads = zero_query_logits(eps=1e-14, **fields)
    expected, expected_grads = zero_query_logits(eps=1e-14)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_and_it_stops_being_prenorms_when_eps_is_not_small_beside_the_sources():
    """With N(0, 0.02²) embeddings the mean square is 4e-4 or less, so already ε = 1e-6 shows, and ε = 1e-2 rules."""
    apart = {}
    for eps in (1e-14, 1e-6, 1e-2):
        logits, expected = zero_query_logits(eps=eps, residual="full")[0], zero_query_logits(eps=eps)[0]
        apart[eps] = ((logits - expected).norm() / expected.norm()).item()
    assert apart[1e-14] < 1e-9 < 1e-4 < apart[1e-6] < 0.1 < apart[1e-2]


def test_without_a_norm_after_the_readout_zero_queries_are_not_prenorm():
    depth = Depth(config(residual="full")).double()
    values = history(depth)
    routed, standard = run(depth, values)[0], run(Depth(config()).double(), values)[0]
    for s in range(SUBLAYERS + 1):
        torch.testing.assert_close(routed[s] * (s + 1), standard[s], rtol=0, atol=1e-13)
    assert (routed[-1] - standard[-1]).abs().max() > 1


@pytest.mark.parametrize("fields", [dict(residual="full"), dict(residual="block", block_size=1)])
def test_no_source_is_forgotten_in_a_deep_model(fields):
    """Trap 9, for schemes: 41 sources, more than any cap of 32."""
    depth = Depth(config(layers=20, heads=2, eps=0.1, **fields)).double()
    for q in depth.query:
        q.data = torch.randn_like(q)
    values = [torch.randn(1, 2, 24, dtype=torch.float64) for _ in range(41)]
    for s, readout in enumerate(run(depth, values)[0]):
        expected = route(depth.query[s], depth.gain[s], values[: s + 1], 2, 0.1)
        torch.testing.assert_close(readout, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("order", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_sources_of_two_dtypes_promote(order):
    depth = make(residual="full", heads=3).float()
    first, second = (torch.randn(2, 3, 24, dtype=dtype) for dtype in order)
    scheme = depth(first)
    scheme.read()
    scheme.write(second)
    readout = scheme.read()
    expected = route(depth.query[1], depth.gain[1], [first, second], 3, depth.eps)
    assert readout.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(readout, expected, rtol=1e-5, atol=1e-5)


def test_depth_weights_carry_gradients():
    depth = make(residual="full")
    assert run(depth, history(depth))[1].weights[-1].requires_grad


def test_hyper_connections_start_as_the_paper_has_them():
    """Sublayer s reads stream s mod n, streams are not mixed, every output goes to all of them."""
    depth = Depth(config(residual="hyper"))
    for s in range(SUBLAYERS):
        assert torch.equal(depth.read_mix[s], torch.eye(STREAMS)[s % STREAMS])
        assert torch.equal(depth.streams[s], torch.eye(STREAMS))
        assert torch.equal(depth.write_mix[s], torch.ones(STREAMS))
