"""One configuration for every model and residual scheme, checked when it is made."""

from dataclasses import dataclass, replace

RESIDUALS = ("standard", "full", "block", "hyper")
MIXINGS = ("softmax", "sigmoid", "no_key_norm", "input_independent", "input_dependent", "window")


@dataclass(frozen=True)
class Config:
    """A small Qwen3-style decoder and the residual scheme that connects its sublayers.

    Raises:
        ValueError: a field, or a combination of fields, that makes no model; the message names the field, its value
            and what would be accepted.
    """

    residual: str = "standard"  # standard | full | block | hyper
    heads: int = 1  # depth heads H of full and block; divides dim
    block_size: int | None = None  # sublayers per block; block only
    query_init: str = "zero"  # zero | random: N(0, 0.02²)
    impl: str = "eager"  # eager | fused | two_phase: PyTorch, or one of the Triton kernels of full and block
    mixing: str = "softmax"  # or a variant of eager full, see mhar_minimal.variants

    dim: int = 64  # D, width of the stream
    layers: int = 6  # L; a layer is two sublayers
    attn_heads: int = 4
    kv_heads: int = 2
    ffn: int = 192  # hidden width of the SwiGLU MLP
    vocab: int = 256  # bytes
    context: int = 64  # T, the longest sequence
    rope_theta: float = 1e4
    eps: float = 1e-6  # of every RMSNorm, the key norm included
    autocast: bool = False  # sublayers multiply in bfloat16; parameters, read-outs and logits keep their dtype

    def __post_init__(self) -> None:
        for name in ("heads", "dim", "layers", "attn_heads", "kv_heads", "ffn", "vocab", "context"):
            if not _is_count(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r}; accepted: an integer of at least 1")
        if self.residual not in RESIDUALS:
            raise ValueError(f"residual={self.residual!r}; accepted: {', '.join(RESIDUALS)}")
        if self.query_init not in ("zero", "random"):
            raise ValueError(f"query_init={self.query_init!r}; accepted: zero, random")
        if self.impl not in ("eager", "fused", "two_phase"):
            raise ValueError(f"impl={self.impl!r}; accepted: eager, fused, two_phase")
        if self.mixing not in MIXINGS:
            raise ValueError(f"mixing={self.mixing!r}; accepted: {', '.join(MIXINGS)}")
        if self.dim % self.heads:
            raise ValueError(f"heads={self.heads} does not divide dim={self.dim}; accepted: a divisor of dim")
        if self.dim % self.attn_heads or self.head_dim % 2:
            raise ValueError(
                f"attn_heads={self.attn_heads} with dim={self.dim}; accepted: a divisor of dim that leaves an even "
                f"number of channels per attention head (RoPE turns pairs)"
            )
        if self.attn_heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads}; accepted: a divisor of attn_heads={self.attn_heads}")
        for name in ("rope_theta", "eps"):
            if not isinstance(getattr(self, name), int | float) or not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}; accepted: a number above 0")
        if not isinstance(self.autocast, bool):
            raise ValueError(f"autocast={self.autocast!r}; accepted: True, False")
        self._check_scheme()

    def _check_scheme(self) -> None:
        if not self.routed and self.heads != 1:
            raise ValueError(f"heads={self.heads} with residual={self.residual!r}; accepted: 1 (it has no depth heads)")
        if not self.routed and self.query_init != "zero":
            raise ValueError(
                f"query_init={self.query_init!r} with residual={self.residual!r}; accepted: zero (it has no queries)"
            )
        if not self.routed and self.impl != "eager":
            raise ValueError(f"impl={self.impl!r} with residual={self.residual!r}; accepted: eager (it routes nothing)")
        if self.mixing != "softmax":
            if self.residual != "full" or self.impl != "eager":
                raise ValueError(
                    f"mixing={self.mixing!r} with residual={self.residual!r} and impl={self.impl!r}; "
                    f"accepted: softmax (the variants are of full, eager)"
                )
            if self.query_init != "zero" and self.mixing.startswith("input"):
                raise ValueError(
                    f"query_init={self.query_init!r} with mixing={self.mixing!r}; accepted: zero (it has no queries)"
                )
        if self.residual == "block":
            if not _is_count(self.block_size) or self.block_size > self.sublayers:
                raise ValueError(
                    f"block_size={self.block_size!r} with residual='block'; accepted: 1 to {self.sublayers} sublayers "
                    f"(2 × layers)"
                )
        elif self.block_size is not None:
            raise ValueError(
                f"block_size={self.block_size!r} with residual={self.residual!r}; accepted: None (only 'block' has one)"
            )

    @property
    def routed(self) -> bool:
        """Whether sites weigh their sources by pseudo-queries."""
        return self.residual in ("full", "block")

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.dim // self.attn_heads

    @property
    def sublayers(self) -> int:
        """2L: one attention and one MLP per layer."""
        return 2 * self.layers

    @property
    def sites(self) -> int:
        """2L + 1: one before every sublayer, and the final read-out."""
        return 2 * self.layers + 1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


PRESETS = {
    "tiny": Config(),
    "100M": Config(
        dim=512, layers=12, attn_heads=8, kv_heads=4, ffn=1536, vocab=151_936, context=2048
    ),
    "350M": Config(
        dim=1024, layers=24, attn_heads=16, kv_heads=8, ffn=4096, vocab=151_936, context=1024
    ),
    "1B": Config(
        dim=1280, layers=36, attn_heads=16, kv_heads=8, ffn=5120, vocab=151_936, context=1024
    ),
}  # fmt: skip


def preset(name: str, **changes) -> Config:
    """The preset of that name with some fields changed.

    Example: ``preset("tiny", residual="block", heads=4, block_size=4)``.

    Raises:
        ValueError: unknown name, or fields that do not fit together.
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r}; accepted: {', '.join(PRESETS)}")
    return replace(PRESETS[name], **changes)
