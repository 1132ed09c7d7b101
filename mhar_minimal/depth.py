"""The residual schemes: what a sublayer reads, and what becomes of what it writes.

A scheme is a short class with ``read()`` and ``write(output)``. One object lives for one forward pass::

    depth = model.depth(embedding)
    for layer in model.layers:
        depth.write(layer.attn(layer.attn_norm(depth.read())))
        depth.write(layer.mlp(layer.mlp_norm(depth.read())))
    hidden = depth.read()

A source is what can be read across depth: the embedding, or what a sublayer wrote. A site is a place that reads: one
before each of the 2L sublayers, and the final read-out. Full and Block compute what `mhar_minimal.route.route` defines,
in an order that does less work: pseudo-queries do not depend on the input, so a source is scored against every site
that will read it as soon as it is written, in one matmul, and is never stacked.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mhar_minimal.config import Config
from mhar_minimal.route import score_dtype, storage_dtype

STREAMS = 4  # n of static Hyper-Connections


class Standard:
    """PreNorm's residual stream: ``h ← h + f(norm(h))``, every output with weight one, for ever."""

    def __init__(self, depth: "Depth", embedding: Tensor):
        self.stream = embedding

    def read(self) -> Tensor:
        return self.stream

    def write(self, output: Tensor) -> None:
        self.stream = self.stream + output


class Full:
    """Full AttnRes: a site attends, by a softmax over depth, to the embedding and to every earlier sublayer's output.

    One head is arXiv:2603.15031, several are arXiv:2607.27230. ``weights`` keeps the depth weights of the sites read
    so far, one [N, B, T, H] each.
    """

    def __init__(self, depth: "Depth", embedding: Tensor):
        self.eps = depth.eps
        scaled = torch.stack(tuple(depth.query)) * torch.stack(tuple(depth.gain))  # q_s ⊙ g_s, [C, D]
        self.queries = scaled.unflatten(-1, (depth.heads, -1)).permute(1, 2, 0)  # [H, D/H, C]
        self.sources: list[Tensor] = []
        self.logits: list[list[Tensor]] = [[] for _ in depth.query]  # per site, one [B, T, H] per source
        self.weights: list[Tensor] = []
        self.add_source(embedding)

    @property
    def site(self) -> int:
        """The next site to be read."""
        return len(self.weights)

    def read(self) -> Tensor:
        return self.mix(self.sources, self.logits[self.site])

    def write(self, output: Tensor) -> None:
        self.add_source(output)

    def add_source(self, source: Tensor) -> None:
        self.sources.append(source)
        later = slice(self.site, None)
        for logits, logit in zip(self.logits[later], self.score(source, self.queries[..., later]), strict=True):
            logits.append(logit)

    def score(self, source: Tensor, queries: Tensor) -> Sequence[Tensor]:
        """The logits of a source [B, T, D] at the sites of ``queries`` [H, D/H, C']: C' times [B, T, H]."""
        v = source.to(score_dtype(source.dtype))
        with torch.autocast(
            "cpu" if v.is_meta else v.device.type, enabled=False
        ):  # scores stay float32 whatever the sublayers run in
            r = self.scale(v)
            slices = v.flatten(0, 1).unflatten(-1, (queries.shape[0], -1)).transpose(0, 1)  # [H, B·T, D/H]
            logits = (slices @ queries.to(v.dtype)).unflatten(1, r.shape) * r.unsqueeze(-1)  # [H, B, T, C']
        return logits.permute(3, 1, 2, 0).unbind()

    def scale(self, v: Tensor) -> Tensor:
        """What the key norm multiplies a source [B, T, D] by: 1 / RMS over the full width, [B, T]."""
        return torch.rsqrt(v.square().mean(-1) + self.eps)

    def weigh(self, logits: Tensor) -> Tensor:
        """The depth weights of logits [N, B, T, H]."""
        return logits.softmax(0)

    def mix(self, sources: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
        weights = self.weigh(torch.stack(tuple(logits)))  # [N, B, T, H]
        self.weights.append(weights)
        slices = [source.unflatten(-1, (weights.shape[-1], -1)) for source in sources]  # N times [B, T, H, D/H]
        readout = sum(w * v for w, v in zip(weights.unsqueeze(-1).unbind(), slices, strict=True))
        return readout.flatten(-2).to(storage_dtype(sources))


class Block(Full):
    """Block AttnRes: the same over the embedding, the finished blocks' sums and the current block's running sum."""

    def __init__(self, depth: "Depth", embedding: Tensor):
        super().__init__(depth, embedding)
        self.block_size = depth.block_size
        self.partial: Tensor | None = None
        self.written = 0  # sublayers in the partial sum

    def read(self) -> Tensor:
        if self.partial is None:
            return super().read()
        here = self.score(self.partial, self.queries[..., self.site : self.site + 1])
        return self.mix([*self.sources, self.partial], [*self.logits[self.site], *here])

    def write(self, output: Tensor) -> None:
        self.partial = output if self.partial is None else self.partial + output
        self.written += 1
        if self.written == self.block_size:
            self.add_source(self.partial)
            self.partial, self.written = None, 0


class Hyper:
    """Static Hyper-Connections (arXiv:2409.19606, section 2) with n = 4 streams.

    Sublayer s reads ``Σ_j read_mix[s, j] stream_j``; then, for every k,
    ``stream_k ← Σ_j streams[s, j, k] stream_j + write_mix[s, k] output``. The final read-out is the streams' average.
    """

    def __init__(self, depth: "Depth", embedding: Tensor):
        self.depth, self.sublayer = depth, 0
        self.streams = embedding.expand(STREAMS, *embedding.shape)  # [n, B, T, D]

    def read(self) -> Tensor:
        if self.sublayer == len(self.depth.read_mix):
            return self.streams.mean(0)
        return torch.einsum("j,jbtd->btd", self.depth.read_mix[self.sublayer], self.streams)

    def write(self, output: Tensor) -> None:
        mixed = torch.einsum("jk,jbtd->kbtd", self.depth.streams[self.sublayer], self.streams)
        self.streams = mixed + self.depth.write_mix[self.sublayer].view(-1, 1, 1, 1) * output
        self.sublayer += 1


SCHEMES = {"standard": Standard, "full": Full, "block": Block, "hyper": Hyper}


class Depth(nn.Module):
    """The parameters of one residual scheme; called with the embedding, it starts one forward pass of that scheme.

    full, block: ``query`` (zero at start, or N(0, 0.02²)) and ``gain`` (one), each a vector [D] per site, 2L + 1 sites.
    Two variants have no ``query``: input_dependent has ``query_matrix`` [D, D] per site beside ``gain``,
    input_independent only ``scores``, [s + 1, H] for site s; all zero at start.
    hyper: ``read_mix`` [n], ``streams`` [n, n], ``write_mix`` [n] per sublayer, started so that the model is PreNorm's.
    standard: none.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.residual, self.routed = config.residual, config.routed
        self.heads, self.block_size = config.heads, config.block_size
        self.query_init, self.eps, self.impl, self.mixing = config.query_init, config.eps, config.impl, config.mixing

        def vectors(count: int, *shape: int) -> nn.ParameterList:
            return nn.ParameterList(nn.Parameter(torch.empty(shape)) for _ in range(count))

        if config.mixing == "input_independent":
            self.scores = nn.ParameterList(nn.Parameter(torch.empty(s + 1, config.heads)) for s in range(config.sites))
        elif config.mixing == "input_dependent":
            self.query_matrix = vectors(config.sites, config.dim, config.dim)
            self.gain = vectors(config.sites, config.dim)
        elif self.routed:
            self.query = vectors(config.sites, config.dim)
            self.gain = vectors(config.sites, config.dim)
        elif self.residual == "hyper":
            self.read_mix = vectors(config.sublayers, STREAMS)
            self.streams = vectors(config.sublayers, STREAMS, STREAMS)
            self.write_mix = vectors(config.sublayers, STREAMS)
        self.init(torch.Generator().manual_seed(0))

    @torch.no_grad()
    def init(self, generator: torch.Generator) -> None:
        """Set every parameter to its start; only ``query_init="random"`` draws from the (CPU) generator."""
        if self.routed:
            for name, parameter in self.named_parameters():
                parameter.fill_(1 if name.startswith("gain") else 0)
            if self.query_init == "random":
                for query in self.query:
                    query.copy_(0.02 * torch.randn(query.shape, generator=generator, device="cpu"))
        elif self.residual == "hyper":
            for s, (read, streams, write) in enumerate(zip(self.read_mix, self.streams, self.write_mix, strict=True)):
                read.zero_()[s % STREAMS] = 1
                streams.copy_(torch.eye(STREAMS))
                write.fill_(1)

    def forward(self, embedding: Tensor, norms: Sequence[nn.RMSNorm] = ()):
        """One forward pass over the embedding [B, T, D]: an object with ``read()`` and ``write(output)``.

        Args:
            embedding: the first source.
            norms: the norm behind every site, for an ``impl`` that can apply it as it reads, see `read_normed`.

        Raises:
            RuntimeError: an ``impl`` other than eager where Triton is not installed or cannot run.
        """
        if self.mixing != "softmax":
            from mhar_minimal import variants  # here, because it builds on this file

            return variants.SCHEMES[self.mixing](self, embedding)
        if self.impl == "eager":
            return SCHEMES[self.residual](self, embedding)
        try:
            from mhar_minimal import fast  # here, because it imports Triton
        except ImportError as error:
            raise RuntimeError(
                f"impl={self.impl!r} needs Triton, which exists for Linux ({error}); accepted here: impl='eager'"
            ) from error
        return fast.SCHEMES[self.residual, self.impl](self, embedding, norms)


def read_normed(scheme, norm: nn.RMSNorm) -> Tensor:
    """``norm(scheme.read())``; two-phase kernels do both at once."""
    return scheme.read_normed(norm) if hasattr(scheme, "read_normed") else norm(scheme.read())
