"""What the tests of the kernels share: inputs, one pass through a scheme, and the yardstick for its errors.

The truth is the plain PyTorch definition in float64 on the very numbers that the kernels get. The yardstick is that
definition in the kernels' own dtype: a read-out may be 1.5 times as far from the truth, a gradient 3 times, or 2 units
in the last place of the storage dtype if that is more. Errors are of all sites, or sources, as one tensor.

One float32 error is luck: over 30 seeds the largest is three to five times the median, for the definition and for the
kernels. So the yardstick is the largest of many seeds, and where the kernels' first draw is above it, the median of
three decides. Queries are drawn so that logits are of order 1, because the gradient behind a softmax that is nearly
one-hot is a difference of equal numbers, whose relative error says nothing.
"""

import collections
import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from mhar_minimal import depth, fast
from mhar_minimal.kernels.two_phase import TwoPhase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6
NORM_EPS = 0.1  # of the sublayers' norms; another number, so that the two cannot be mixed up
MARGIN = 1024  # numbers
ALLOWED = {"readout": 1.5, "source": 3, "query": 3, "gain": 3, "norm": 3}


@dataclass
class Inputs:
    """Leaves of a graph: C queries and gains [D], sources [B, T, D], gains [D] of the norms behind the read-outs or
    none; and what comes back for every read-out.
    """

    query: list[Tensor]
    gain: list[Tensor]
    source: list[Tensor]
    upstream: list[Tensor]
    norm: list[nn.Parameter] = field(default_factory=list)

    def leaves(self) -> list[Tensor]:
        return [*self.query, *self.gain, *self.source, *self.norm]

    def fresh(self, dtype: torch.dtype | None = None) -> "Inputs":
        """The same numbers as new leaves; all in float64, or with the sources stored in ``dtype``."""
        vectors = torch.float64 if dtype == torch.float64 else torch.float32
        own = [[x.detach().clone().to(vectors) for x in xs] for xs in (self.query, self.gain)]
        wide = [[x.detach().clone().to(dtype or x.dtype) for x in xs] for xs in (self.source, self.upstream)]
        norm = [nn.Parameter(x.detach().clone().to(dtype or x.dtype)) for x in self.norm]
        inputs = Inputs(*own, *wide, norm)
        for leaf in inputs.leaves():
            leaf.requires_grad_()
        return inputs


def draw(
    sites: int, sources: int, dim: int, heads: int, *, shape=(1, 3), dtype=torch.float32, scale=1.0, seed=0,
    normed=False,
) -> Inputs:  # fmt: skip
    """Random numbers, the same on every device; logits of order 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(DEVICE)

    inputs = Inputs(
        [(heads / dim) ** 0.5 * normal(dim) for _ in range(sites)],
        [1 + 0.3 * normal(dim) for _ in range(sites)],
        [scale * normal(*shape, dim) for _ in range(sources)],
        [normal(*shape, dim) for _ in range(sites)],
        [1 + 0.3 * normal(dim) for _ in range(sites if normed else 0)],
    )
    return inputs.fresh(dtype)


def one_site(function: Callable, heads: int) -> Callable[[Inputs], list[Tensor]]:
    """A pass that is one call of `route` or of its drop-in."""
    return lambda inputs: [function(inputs.query[0], inputs.gain[0], inputs.source, heads, EPS)]


def all_sites(scheme: Callable, heads: int, block_size: int | None = None) -> Callable[[Inputs], list[Tensor]]:
    """A pass through a scheme of `mhar_minimal.depth` or `mhar_minimal.fast`, sublayer i writing source i + 1.

    Where there are norm gains, every read-out is taken behind its norm.
    """

    def read_outs(inputs: Inputs) -> list[Tensor]:
        parameters = SimpleNamespace(
            query=inputs.query, gain=inputs.gain, heads=heads, block_size=block_size, eps=EPS
        )  # what a scheme wants of `Depth`
        norms = [nn.RMSNorm(len(gain), NORM_EPS) for gain in inputs.norm]
        for norm, gain in zip(norms, inputs.norm, strict=True):
            norm.weight = gain

        def read() -> Tensor:
            return depth.read_normed(run, norms[len(outputs)]) if norms else run.read()

        run, outputs = scheme(parameters, inputs.source[0], norms), []
        for source in inputs.source[1:]:
            outputs.append(read())
            run.write(source)
        return [*outputs, read()]

    return read_outs


def scheduled(block: int) -> Callable:
    """Full AttnRes by the two-phase kernels with so many sites a block."""
    return lambda d, embedding, norms: TwoPhase(fast.scaled_queries(d), embedding, d.heads, d.eps, block, norms)


def impl(name: str, residual: str) -> Callable:
    if name == "eager":
        return lambda d, embedding, norms: depth.SCHEMES[residual](d, embedding)
    return fast.SCHEMES[residual, name]


def results(read_outs: Callable[[Inputs], list[Tensor]], inputs: Inputs) -> dict[str, list[Tensor]]:
    """Read-outs, and the gradients of every leaf, by kind."""
    outputs = read_outs(inputs)
    grads = list(torch.autograd.grad(outputs, inputs.leaves(), inputs.upstream))
    sites = len(inputs.query)
    return {
        "readout": [output.detach() for output in outputs],
        "query": grads[:sites],
        "gain": grads[sites : 2 * sites],
        "source": grads[2 * sites : 2 * sites + len(inputs.source)],
    } | ({"norm": grads[2 * sites + len(inputs.source) :]} if inputs.norm else {})


def error(got: Tensor, truth: Tensor) -> float:
    """The largest error in units of the largest true number; zeros must be met exactly."""
    worst, size = (got.double() - truth).abs().max().item(), truth.abs().max().item()
    return 0.0 if worst == 0 else worst / size if size else float("inf")


def errors(got: dict[str, list[Tensor]], truth: dict[str, list[Tensor]]) -> dict[str, float]:
    return {kind: error(torch.stack(got[kind]), torch.stack(truth[kind])) for kind in truth}


def assert_as_exact_as_eager(kernels: Callable, eager: Callable, dtype: torch.dtype, **shape) -> None:
    """The criterion at the top. ``kernels`` and ``eager`` are passes, ``shape`` is that of `draw`."""
    seeds = max(6, 120 // shape["sites"]) if dtype == torch.float32 else 3
    yardstick, truths = collections.Counter(), []
    for seed in range(seeds):
        inputs = draw(**shape, dtype=dtype, seed=seed)
        truths.append(results(eager, inputs.fresh(torch.float64)))
        for kind, far in errors(results(eager, inputs), truths[-1]).items():
            yardstick[kind] = max(yardstick[kind], far)
    allowed = {kind: max(ALLOWED[kind] * far, 2 * torch.finfo(dtype).eps) for kind, far in yardstick.items()}
    draws = []
    for seed, truth in enumerate(truths[:3]):
        got = results(kernels, draw(**shape, dtype=dtype, seed=seed))
        assert all(output.dtype == dtype for output in got["readout"])
        draws.append(errors(got, truth))
        if seed == 0 and all(far <= allowed[kind] for kind, far in draws[0].items()):
            return  # interpreted draws are slow
    for kind in allowed:
        far = median(errors[kind] for errors in draws)
        assert far <= allowed[kind], f"{kind}: {far:.1e}, eager {yardstick[kind]:.1e}"


def assert_equal(got: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> None:
    """Bitwise."""
    for kind in expected:
        for g, e in zip(got[kind], expected[kind], strict=True):
            assert torch.equal(g, e), kind


@contextmanager
def guarded_allocations(monkeypatch):
    """All memory that is allocated holds NaN and lies between margins of NaN; in the end the margins still do.

    Yields a function that moves a tensor to such a place. What reads a number nobody wrote, or past an end, gives NaN.
    """
    guards = []

    def guarded(like: Tensor) -> Tensor:
        blank = math.nan if like.is_floating_point() else -1
        room = torch.full((like.numel() + 2 * MARGIN,), blank, dtype=like.dtype, device=like.device)
        guards.append(room)
        return room[MARGIN : MARGIN + like.numel()].view(like.shape)

    with monkeypatch.context() as patch:
        for owner, name in [(torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")]:
            allocate = getattr(owner, name)
            patch.setattr(owner, name, lambda *a, allocate=allocate, **k: guarded(allocate(*a, **k)))
        yield lambda tensor: guarded(tensor).copy_(tensor)
    assert guards
    for room in guards:
        for margin in (room[:MARGIN], room[-MARGIN:]):
            assert (margin.isnan() if room.is_floating_point() else margin == -1).all()


def assert_nothing_outside(run: Callable, inputs: Inputs, monkeypatch) -> None:
    """The same results when every tensor lies between guards that nobody may read or write."""
    expected = results(run, inputs.fresh())
    with guarded_allocations(monkeypatch) as guarded:
        inputs.source = [guarded(source.detach()).requires_grad_() for source in inputs.source]
        got = results(run, inputs)
    assert_equal(got, expected)
