"""Full and Block by the Triton kernels: the ``read()`` and ``write(output)`` of `mhar_minimal.depth`, made fast.

Sources are stored in the embedding's dtype, what a sublayer writes in another (under autocast) is converted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mhar_minimal.kernels import fused
from mhar_minimal.kernels.two_phase import TwoPhase, TwoPhaseBlock

if TYPE_CHECKING:
    from mhar_minimal.depth import Depth


class FusedFull:
    """Full AttnRes, a kernel per site: every site reads every source again."""

    route = staticmethod(fused.route)  # of one site

    def __init__(self, depth: Depth, embedding: Tensor, norms: Sequence[nn.RMSNorm] = ()):
        self.depth, self.site = depth, 0
        self.sources = [embedding]

    def read(self) -> Tensor:
        depth, s = self.depth, self.site
        self.site += 1
        return self.route(depth.query[s], depth.gain[s], self.read_by_next(), depth.heads, depth.eps)

    def write(self, output: Tensor) -> None:
        self.sources.append(output.to(self.sources[0].dtype))

    def read_by_next(self) -> list[Tensor]:
        return self.sources


class FusedBlock(FusedFull):
    """Block AttnRes, a kernel per site."""

    def __init__(self, depth: Depth, embedding: Tensor, norms: Sequence[nn.RMSNorm] = ()):
        super().__init__(depth, embedding)
        self.partial: Tensor | None = None
        self.written = 0

    def write(self, output: Tensor) -> None:
        self.partial = output if self.partial is None else self.partial + output
        self.written += 1
        if self.written == self.depth.block_size:
            super().write(self.partial)
            self.partial, self.written = None, 0

    def read_by_next(self) -> list[Tensor]:
        return self.sources if self.partial is None else [*self.sources, self.partial.to(self.sources[0].dtype)]


def scaled_queries(depth: Depth) -> Tensor:
    """Queries times gains, q_s ⊙ g_s, float32 [sites, D]."""
    return (torch.stack(tuple(depth.query)) * torch.stack(tuple(depth.gain))).float()


def two_phase_full(depth: Depth, embedding: Tensor, norms: Sequence[nn.RMSNorm] = ()) -> TwoPhase:
    q = scaled_queries(depth)
    return TwoPhase(q, embedding, depth.heads, depth.eps, schedule(len(q)), applicable(norms, embedding.dtype))


def two_phase_block(depth: Depth, embedding: Tensor, norms: Sequence[nn.RMSNorm] = ()) -> TwoPhaseBlock:
    norms = applicable(norms, embedding.dtype)
    return TwoPhaseBlock(scaled_queries(depth), embedding, depth.heads, depth.eps, depth.block_size, norms)


def applicable(norms: Sequence[nn.RMSNorm], dtype: torch.dtype) -> Sequence[nn.RMSNorm]:
    """The norms, if a kernel may stand in for all of them, which knows one ε and calls no hook; otherwise none.

    Under torch.compile none: see `TwoPhase.read_normed`.
    """
    if torch.compiler.is_compiling():
        return ()

    def plain(norm: nn.Module) -> bool:
        hooks = norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
        return type(norm) is nn.RMSNorm and norm.weight is not None and norm.weight.dtype == dtype and not hooks

    return norms if all(map(plain, norms)) and len({norm.eps for norm in norms} - {None}) == 1 else ()


def schedule(sites: int) -> int:
    """Sites that share a phase 1 under Full: the fewest blocks of up to 8, and then no more sites than those need.

    A little above √sites would be least traffic, but a block's gradients fill a matmul of width 8. The first block is
    one shorter, the last what is left.
    """
    return math.ceil((sites + 1) / math.ceil((sites + 1) / 8))


SCHEMES = {
    ("full", "fused"): FusedFull,
    ("block", "fused"): FusedBlock,
    ("full", "two_phase"): two_phase_full,
    ("block", "two_phase"): two_phase_block,
}
