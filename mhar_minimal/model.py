"""A small Qwen3-style decoder whose sublayers are connected by a residual scheme, and by nothing else."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhar_minimal.config import Config
from mhar_minimal.depth import Depth, read_normed

INIT_STD = 0.02


class Cache:
    """What a model keeps of the tokens it has seen: ``model(tokens, cache)`` goes on where the last call with it ended.

    Only attention keeps anything. A site weighs what the sublayers wrote for its own token, so a residual scheme lives
    for one call, over the new tokens alone.

    Rows of different lengths have their padding on the left. So their newest tokens share a column, all rows grow
    together, and the last column has the logits of every row. Positions count from a row's own first token.

    Args:
        padding: for each row the columns before its first token, int64 [B], on the model's device.
    """

    def __init__(self, padding: Tensor):
        self.padding = padding
        self.length = 0  # columns seen
        self.mask: Tensor | None = None  # of the current call: which column sees which, [B, 1, new columns, columns]
        self.kept: dict[Attention, tuple[Tensor, Tensor]] = {}  # rotated keys, values: [B, kv_heads, columns, head_dim]

    def advance(self, tokens: Tensor) -> Tensor:
        """Set the mask for new tokens [B, T]; returns their positions, int64 [B, T].

        Raises:
            ValueError: more or fewer rows than the cache has.
        """
        if len(tokens) != len(self.padding):
            raise ValueError(f"tokens has {len(tokens)} rows; accepted: {len(self.padding)}, as the cache")
        seen, self.length = self.length, self.length + tokens.shape[1]
        position = torch.arange(self.length, device=tokens.device) - self.padding.unsqueeze(1)  # [B, columns]
        new, key = position[:, seen:], position.unsqueeze(1)
        query = new.unsqueeze(2)
        # Padding, below 0, sees itself: a softmax over nothing is 0/0, and NaN spreads even at a weight of zero.
        self.mask = ((query.clamp(max=0) <= key) & (key <= query)).unsqueeze(1)
        return new.clamp(min=0)

    def extend(self, attention: "Attention", k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new columns' keys and values, [B, kv_heads, T, head_dim]; returns those of all columns."""
        if attention in self.kept:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.kept[attention], (k, v)))
        self.kept[attention] = k, v
        return k, v


class Attention(nn.Module):
    """Causal grouped-query attention with RMSNorm on every head's queries and keys, and RoPE."""

    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.head_dim
        self.q = nn.Linear(config.dim, config.attn_heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.attn_heads * config.head_dim, config.dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.eps)

    def forward(self, x: Tensor, rotation: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] to [B, T, D]; ``rotation`` is that of `rope`, [2, T, head_dim], or [2, B, T, head_dim]."""
        rotation = rotation.unsqueeze(-3)  # the same for all heads

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, T, head_dim]

        def normed_and_rotated(y: Tensor, norm: nn.RMSNorm) -> Tensor:
            return rotate(norm(heads(y).to(norm.weight.dtype)), rotation).to(y.dtype)  # float32 within autocast

        q = normed_and_rotated(self.q(x), self.q_norm)
        k = normed_and_rotated(self.k(x), self.k_norm)
        v, mask = heads(self.v(x)), None
        if cache is not None:
            (k, v), mask = cache.extend(self, k, v), cache.mask
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=cache is None, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn, bias=False)
        self.up = nn.Linear(config.dim, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """The two sublayers of a layer with their norms. How they are connected is the residual scheme's business."""

    def __init__(self, config: Config):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim, eps=config.eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.eps)
        self.mlp = MLP(config)


class Model(nn.Module):
    """Decoder with tied embedding. The trunk is drawn from ``seed`` alone, so it is the same under every scheme.

    Args:
        config: see `Config`.
        seed: of the initial weights.
    """

    def __init__(self, config: Config, seed: int = 0):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.eps)
        self.depth = Depth(config)
        self.register_buffer("rotation", rope(config.context, config.head_dim, config.rope_theta), persistent=False)
        self.init(seed)

    @torch.no_grad()
    def init(self, seed: int) -> None:
        """Draw every weight again: matrices N(0, 0.02²), norm gains 1, the scheme's own as `Depth.init` says.

        On the meta device there is nothing to draw; call it again after ``to_empty``.

        Raises:
            ValueError: a seed outside 0 to 2³² - 1 (PyTorch's CPU generator keeps 32 bits of it).
        """
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed}; accepted: 0 to {2**32 - 1}")
        if self.embedding.weight.is_meta:
            return
        c = self.config
        self.rotation.copy_(rope(c.context, c.head_dim, c.rope_theta))
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                draw = torch.randn(module.weight.shape, generator=generator, device="cpu")
                module.weight.copy_(INIT_STD * draw)
            elif isinstance(module, nn.RMSNorm):
                module.weight.fill_(1)
        self.depth.init(generator)  # after the trunk, so that the trunk does not depend on the scheme

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits [B, T, vocab] of the tokens that follow ``tokens`` [B, T] (int64), which follow those in the cache.

        Raises:
            ValueError: tokens that are not [B, T], not the cache's B, or together more than ``config.context``.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}; accepted: [B, T]")
        seen, count = 0 if cache is None else cache.length, tokens.shape[1]
        if seen + count > self.config.context:
            after = f" after {seen} in the cache" if seen else ""
            raise ValueError(f"tokens has length {count}{after}; accepted: up to context={self.config.context}")
        positions = slice(count) if cache is None else cache.advance(tokens)
        rotation = self.rotation[:, positions]
        norms = [norm for layer in self.layers for norm in (layer.attn_norm, layer.mlp_norm)]
        depth = self.depth(self.embedding(tokens), [*norms, self.norm])
        for layer in self.layers:
            depth.write(self.output(layer.attn, read_normed(depth, layer.attn_norm), rotation, cache))
            depth.write(self.output(layer.mlp, read_normed(depth, layer.mlp_norm)))
        return F.linear(read_normed(depth, self.norm), self.embedding.weight)

    def output(self, sublayer: Attention | MLP, x: Tensor, *others) -> Tensor:
        """What a sublayer makes of its normed read-out [B, T, D]; with ``config.autocast`` in bfloat16."""
        if not self.config.autocast:
            return sublayer(x, *others)
        device = "cpu" if x.is_meta else x.device.type  # meta has no autocast
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):  # a recorded step repeats the casts
            return sublayer(x, *others)

    def parameter_count(self) -> int:
        """Number of parameters, the tied embedding counted once."""
        return sum(p.numel() for p in self.parameters())


def rope(context: int, head_dim: int, theta: float) -> Tensor:
    """What `rotate` turns by, float32, [2, context, head_dim]: rotary positions (arXiv:2104.09864).

    A position's cosines, twice over, and its sines, first with a minus.
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn channel pairs (i, i + head_dim/2) of ``x`` [..., T, head_dim] by each position's angles."""
    cos, sin = rotation.to(x.dtype)
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin
