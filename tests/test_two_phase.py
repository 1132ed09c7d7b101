"""The two-phase schedule against eager Full and Block in float64: every read-out, every gradient.

Interpreted without a GPU, native with one. A program of the block kernels is one token and head, and costs the
interpreter some ten milliseconds; hence few tokens, few sites.
"""

import pytest
import torch
import triton
import triton.language as tl
from kernel_checks import (
    DEVICE,
    DTYPES,
    all_sites,
    assert_as_exact_as_eager,
    assert_equal,
    draw,
    error,
    impl,
    results,
    scheduled,
)

from mhar_minimal import fast
from mhar_minimal.kernels import launch, two_phase
from mhar_minimal.kernels.tiles import tiles_of
from mhar_minimal.kernels.two_phase import block_constants

# D and H. The block kernels take a head's D/H channels in one piece, in a piece and a tail (160 only in 16 bits), or in
# chunks.
ONE_PIECE, WITH_TAIL, IN_CHUNKS = [(4, 4), (36, 3), (32, 2)], [(20, 1), (48, 1), (160, 1)], [(300, 1), (768, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "heads"), ONE_PIECE + WITH_TAIL + IN_CHUNKS)
def test_full(dim, heads, dtype):
    assert_as_exact_as_eager(
        all_sites(scheduled(2), heads), all_sites(impl("eager", "full"), heads), dtype,
        sites=5, sources=5, dim=dim, heads=heads, shape=(1, 1 if dim > 256 or heads > 2 else 2),
    )  # fmt: skip


@pytest.mark.parametrize(("dim", "heads", "dtype"), [(36, 3, DTYPES[0]), (160, 1, DTYPES[1]), (300, 1, DTYPES[2])])
def test_block(dim, heads, dtype):
    """Blocks of 2, 2 and, ragged, 1 sublayer."""
    assert_as_exact_as_eager(
        all_sites(impl("two_phase", "block"), heads, 2), all_sites(impl("eager", "block"), heads, 2), dtype,
        sites=6, sources=6, dim=dim, heads=heads, shape=(1, 1 if dim > 256 or heads > 2 else 2),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "of_float32", "of_16_bits"),
    [
        (96, (64, 32, 1), (64, 32, 1)),
        (128, (128, 0, 1), (128, 0, 1)),
        (160, (128, 0, 2), (128, 32, 1)),
        (256, (128, 0, 2), (256, 0, 1)),
        (300, (128, 0, 3), (128, 0, 3)),
    ],
)
def test_pieces_that_registers_hold(width, of_float32, of_16_bits, dtype):
    """Channels of the piece, of its tail, and chunks. What is too wide for the registers is as exact, and slow."""
    constants = block_constants(dtype, 3 * width, 3, 8, True)
    pieces = tuple(constants[name] for name in ("KM", "KT", "NC"))
    assert pieces == (of_float32 if dtype == torch.float32 else of_16_bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("residual", "dim", "heads"), [("full", 36, 3), ("full", 160, 1), ("block", 24, 2)])
def test_behind_norms(residual, dim, heads, dtype):
    """The sublayers' norms, applied as the sites read: also the gradients of their gains."""
    kernels = scheduled(2) if residual == "full" else impl("two_phase", "block")
    assert_as_exact_as_eager(
        all_sites(kernels, heads, 2), all_sites(impl("eager", residual), heads, 2), dtype,
        sites=5, sources=5, dim=dim, heads=heads, shape=(1, 2), normed=True,
    )  # fmt: skip


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_that_fill_no_tile(dtype, normed):
    """Three heads of 44 channels, in three tiles of 4 × 16; several older sources, an odd token."""
    assert_as_exact_as_eager(
        all_sites(scheduled(4), 3), all_sites(impl("eager", "full"), 3), dtype,
        sites=4, sources=4, dim=132, heads=3, shape=(1, 3), normed=normed,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("width", "cut"),
    [(1, (1, 1)), (12, (16, 1)), (24, (8, 3)), (40, (8, 5)), (44, (16, 3)), (100, (128, 1)), (128, (128, 1)),
     (160, (32, 5)), (200, (256, 1)), (256, (256, 1)), (300, (64, 5)), (1280, (256, 5)), (8192, (8192, 1))],
)  # fmt: skip
def test_tiles_hold_a_head(width, cut):
    """In one tile, or three quarters or five eighths of it where that is enough."""
    assert tiles_of(width) == cut
    side, tiles = cut
    assert side * (tiles - 1) < width <= side * tiles


def test_the_widest_model():
    """D = 8192 in one head: 64 chunks."""
    assert_as_exact_as_eager(
        all_sites(scheduled(2), 1), all_sites(impl("eager", "full"), 1), torch.bfloat16,
        sites=3, sources=3, dim=8192, heads=1, shape=(1, 1),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sites", "block"), [(1, 2), (5, 6), (7, 8), (8, 5), (13, 7), (16, 6), (25, 7), (49, 8), (73, 8)]
)
def test_fulls_schedule(sites, block):
    """Up to 7 sites no phase 1 at all."""
    assert fast.schedule(sites) == block


@pytest.mark.parametrize(
    ("sites", "block", "cut"),
    [(1, 1, 0), (5, 8, 5), (13, 5, 9), (25, 7, 20), (49, 8, 39), (73, 8, 55), (1, None, 0), (13, None, 9)],
)
def test_the_front_is_allocated_when_the_back_is_done(sites, block, cut, monkeypatch):
    """A backward needs most memory when it begins, so three quarters of the rows come later. Under Full a block's are
    together; None: under Block, where a site reads no other's row before a block is finished.
    """
    events, opens, backward = [], two_phase.open_rows.forward, two_phase.read_backward.forward

    def opening(dout, entry, count):
        events.append(("open", count))
        return opens(dout, entry, count)

    def reading(*arguments):
        events.append("read")
        return backward(*arguments)

    monkeypatch.setattr(two_phase.open_rows, "forward", opening)
    monkeypatch.setattr(two_phase.read_backward, "forward", reading)
    run = all_sites(scheduled(block), 1) if block else all_sites(impl("two_phase", "block"), 1, 4)
    results(run, draw(sites, sites, 4, 1, shape=(1, 1)))
    back, front = [("open", sites - cut), *["read"] * (sites - cut)], [("open", cut), *["read"] * cut]
    assert events == [*(back if cut < sites else []), *(front if cut else [])]
    assert block is None or cut == sites or (cut + 1) % block == 0


@triton.jit(do_not_specialize=["site", "cut", "tokens"])
def places_of_rows(front_ptr, back_ptr, out_ptr, site, cut, tokens, D: tl.constexpr):
    sites = site + tl.arange(0, 2)
    rows = two_phase.entered(front_ptr, back_ptr, sites, cut, 1, tokens, D)
    tl.store(out_ptr + tl.arange(0, 2), rows.to(tl.int64))


def test_rows_lie_in_the_front_up_to_the_cut_and_then_in_the_back():
    """Where both may be larger than an int32 counts: token 1 of the front's last row and of the back's first."""
    front, back = torch.empty(0, device=DEVICE), torch.empty(1, device=DEVICE)
    tokens, dim, cut = 2**14, 2**13, 55
    found = torch.empty(2, dtype=torch.int64, device=DEVICE)
    places_of_rows[(1,)](front, back, found, cut - 1, cut, tokens, dim)
    numbers = [((cut - 1) * tokens + 1) * dim, dim]
    assert found.tolist() == [x.data_ptr() + 4 * n for x, n in zip((front, back), numbers, strict=True)]


def test_rows_are_stored_as_the_sources_are(monkeypatch):
    """Not in float32, which only the interpreter needs: autograd would convert them without a word."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    like = torch.zeros(1, 2, 4, dtype=torch.bfloat16, device=DEVICE)
    _, front, back = two_phase.start.forward(torch.zeros(4, 4, device=DEVICE), None, like, 3, 1, 1)
    assert front.dtype == back.dtype == two_phase.open_rows.forward(like, 0, 3).dtype == torch.bfloat16


@pytest.mark.parametrize("block", range(1, 17))
def test_every_length_of_a_block(block):
    """A schedule changes the order of the work, not the result."""
    sites = min(17, 2 * block + 1)  # two blocks at least
    assert_as_exact_as_eager(
        all_sites(scheduled(block), 1), all_sites(impl("eager", "full"), 1), DTYPES[block % 3],
        sites=sites, sources=sites, dim=6, heads=1, shape=(1, 1),
    )  # fmt: skip


@pytest.mark.parametrize("block_size", [1, 3, 4, 10, 17, 20])
def test_every_kind_of_block(block_size):
    """Of one sublayer, ragged, even, more than the 16 sites that one phase 1 serves, and everything in one."""
    sublayers = max(10, min(20, block_size + 3))
    assert_as_exact_as_eager(
        all_sites(impl("two_phase", "block"), 2, block_size), all_sites(impl("eager", "block"), 2, block_size),
        DTYPES[block_size % 3], sites=sublayers + 1, sources=sublayers + 1, dim=12, heads=2, shape=(1, 1),
    )  # fmt: skip


@pytest.mark.parametrize(("sources", "block"), [(33, 1), (73, 16)])
def test_many_sources(sources, block):
    """Trap 9. Blocks of one make a phase 1 over every number of sources from 1 to 33."""
    assert_as_exact_as_eager(
        all_sites(scheduled(block), 1), all_sites(impl("eager", "full"), 1), torch.float32,
        sites=sources, sources=sources, dim=6, heads=1, shape=(1, 1),
    )  # fmt: skip


def test_many_tokens():
    """More than a program of the site kernels takes, and an odd number in every part of the queries' gradient."""
    assert_as_exact_as_eager(
        all_sites(scheduled(3), 1), all_sites(impl("eager", "full"), 1), torch.float32,
        sites=3, sources=3, dim=6, heads=1, shape=(1, 67), normed=True,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_site_0_passes_the_embedding_and_gives_its_query_an_exactly_zero_gradient(dtype):
    """Trap 8."""
    inputs = draw(3, 3, 12, 2, shape=(1, 2), dtype=dtype)
    got = results(all_sites(scheduled(2), 2), inputs)
    assert torch.equal(got["readout"][0], inputs.source[0])
    assert not got["query"][0].any()
    assert not got["gain"][0].any()
    assert all(q.any() for q in got["query"][1:])


def test_site_0_gives_its_query_no_gradient_however_sums_are_rounded(monkeypatch):
    """On a GPU δ and dout · v may differ in their last bit; here they differ by more."""
    backward = two_phase.read_backward.forward

    def inexact(ledger, rows, dout, readout, *arguments):
        return backward(ledger, rows, dout, 1.01 * readout, *arguments)

    monkeypatch.setattr(two_phase.read_backward, "forward", inexact)
    inputs = draw(1, 1, 12, 2, shape=(1, 2))
    got = results(all_sites(scheduled(2), 2), inputs)
    assert not got["query"][0].any()
    assert error(got["source"][0], inputs.upstream[0].double()) < 1e-6  # nor its source one through r


@pytest.mark.parametrize(("sites", "block"), [(1, 1), (1, 16), (2, 3), (3, 16)])
def test_a_model_shorter_than_a_block(sites, block):
    """Its only block ends with it: no site behind the last is asked for gradients, and none can be read."""
    run = all_sites(scheduled(block), 2)
    assert_as_exact_as_eager(
        run, all_sites(impl("eager", "full"), 2), torch.float32,
        sites=sites, sources=sites, dim=12, heads=2, shape=(1, 2), normed=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"read {sites + 1} of a pass over {sites} sites"):
        run(draw(sites, sites + 1, 12, 2))


def test_a_part_has_64_tokens_or_more(monkeypatch):
    """Of the queries' gradient, on a GPU; up to 64 parts."""
    monkeypatch.setattr(two_phase, "INTERPRETED", False)
    assert [two_phase.parts_of(n) for n in (0, 1, 64, 65, 4096, 9999)] == [0, 1, 1, 2, 64, 64]


def test_two_runs_agree_bitwise():
    inputs = draw(3, 3, 20, 1, shape=(1, 5))
    run = all_sites(scheduled(2), 1)
    assert_equal(results(run, inputs.fresh()), results(run, inputs.fresh()))


def test_float64_is_refused():
    inputs = draw(3, 3, 12, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"dtype torch.float64; accepted: float32, bfloat16, float16"):
        all_sites(scheduled(2), 2)(inputs)
    assert inputs.source[0].device.type == DEVICE
