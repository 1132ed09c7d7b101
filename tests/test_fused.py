"""`fused.route` against `route`: read-out, depth weights and every gradient, for any shape, size and number of sources.

Interpreted without a GPU, native with one.
"""

import pytest
import torch
from kernel_checks import (
    DEVICE,
    DTYPES,
    EPS,
    all_sites,
    assert_as_exact_as_eager,
    assert_equal,
    draw,
    error,
    impl,
    one_site,
    results,
)

from mhar_minimal import route
from mhar_minimal.kernels import fused

SHAPES = [(20, 1), (160, 1), (24, 3), (36, 12), (20, 4), (24, 24)]  # D and H; D/H is a power of two in two of them


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "heads"), SHAPES)
def test_read_out_and_every_gradient(dim, heads, dtype):
    assert_as_exact_as_eager(
        one_site(fused.route, heads), one_site(route, heads), dtype,
        sites=1, sources=5, dim=dim, heads=heads, shape=(2, 3),
    )  # fmt: skip


@pytest.mark.parametrize(("sources", "dtype"), [*zip([1, 2, 16, 31, 32, 33, 73, 200], DTYPES * 3)])
def test_any_number_of_sources(sources, dtype):
    """Trap 9: none beyond some padded maximum is dropped."""
    assert_as_exact_as_eager(
        one_site(fused.route, 2), one_site(route, 2), dtype, sites=1, sources=sources, dim=20, heads=2, shape=(1, 3)
    )


def test_many_tokens():
    """More than one program's, and an odd number of them."""
    assert_as_exact_as_eager(
        one_site(fused.route, 3), one_site(route, 3), torch.float32, sites=1, sources=3, dim=12, heads=3, shape=(3, 67)
    )


@pytest.mark.parametrize(("dim", "heads"), SHAPES)
@pytest.mark.parametrize("sources", [1, 33])
def test_depth_weights(sources, dim, heads):
    """And asking for them changes nothing else."""
    inputs = draw(1, sources, dim, heads, shape=(2, 3))
    query, gain = inputs.query[0], inputs.gain[0]
    readout, weights = fused.route(query, gain, inputs.source, heads, EPS, return_weights=True)
    exact = [query.double(), gain.double(), [v.double() for v in inputs.source]]
    truth = route(*exact, heads, EPS, return_weights=True)[1]
    assert weights.shape == (sources, 2, 3, heads)
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    assert error(weights, truth) < 2e-6  # measured 5e-7
    assert error(weights.sum(0), torch.ones_like(truth[0])) < 1e-6  # measured 4e-7
    assert torch.equal(readout, fused.route(query, gain, inputs.source, heads, EPS))


@pytest.mark.parametrize("residual", ["full", "block"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_model_deep(residual, dtype):
    block_size = 3 if residual == "block" else None  # 8 sublayers, so the last block is ragged
    assert_as_exact_as_eager(
        all_sites(impl("fused", residual), 3, block_size), all_sites(impl("eager", residual), 3, block_size), dtype,
        sites=9, sources=9, dim=24, heads=3,
    )  # fmt: skip


def test_sources_of_several_dtypes_are_promoted():
    inputs = draw(1, 3, 20, 4)
    mixed = [inputs.source[0].bfloat16(), inputs.source[1], inputs.source[2].half()]
    readout = fused.route(inputs.query[0], inputs.gain[0], mixed, 4, EPS)
    expected = route(inputs.query[0], inputs.gain[0], mixed, 4, EPS)
    assert readout.dtype == torch.float32
    assert error(readout, expected.double()) < 1e-6


def test_one_source_passes_unchanged_and_gives_query_and_gain_exactly_zero_gradients():
    """Trap 8."""
    for dtype in DTYPES:
        inputs = draw(1, 1, 20, 4, dtype=dtype)
        got = results(one_site(fused.route, 4), inputs)
        assert torch.equal(got["readout"][0], inputs.source[0])
        assert torch.equal(got["source"][0], inputs.upstream[0])
        assert not got["query"][0].any()
        assert not got["gain"][0].any()


def test_two_runs_agree_bitwise():
    inputs = draw(1, 5, 20, 4, shape=(3, 67))  # several programs, each with its part of the query's gradient
    run = one_site(fused.route, 4)
    assert_equal(results(run, inputs.fresh()), results(run, inputs.fresh()))


def test_bad_input_is_named():
    good = dict(
        query=torch.zeros(12, device=DEVICE), gain=torch.ones(12, device=DEVICE),
        sources=[torch.zeros(2, 3, 12, device=DEVICE)], heads=3, eps=EPS,
    )  # fmt: skip
    for change, message in [
        ({"sources": []}, "sources is empty"),
        ({"sources": [torch.zeros(3, 12)]}, r"sources\[0\] has shape \(3, 12\); accepted: \[B, T, D\]"),
        ({"sources": [torch.zeros(2, 3, 12), torch.zeros(2, 4, 12)]}, r"sources\[1\] has shape \(2, 4, 12\)"),
        ({"query": torch.zeros(11)}, r"query has shape \(11,\); accepted: \[12\]"),
        ({"gain": torch.ones(1, 12)}, r"gain has shape \(1, 12\)"),
        ({"heads": 5}, "heads=5 does not divide the width 12"),
        ({"heads": 0}, "heads=0"),
        ({"eps": 0.0}, r"eps=0.0; accepted: a number above 0"),
        ({"eps": float("nan")}, "eps=nan"),
        ({"sources": [torch.zeros(2, 3, 12, dtype=torch.float64)]}, "dtype torch.float64; accepted: float32, bfloat16"),
        ({"sources": [torch.zeros(2, 3, 12, dtype=torch.int64)]}, "dtype torch.int64; accepted: float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            fused.route(**(good | change))
