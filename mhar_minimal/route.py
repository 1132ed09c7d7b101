"""The definition of depth routing, in plain PyTorch: every other implementation is tested against it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def route(
    query: Tensor,
    gain: Tensor,
    sources: Sequence[Tensor],
    heads: int,
    eps: float,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Read the sources by a softmax over depth, one softmax per token and head.

    With ``key(v) = v / sqrt(mean(v²) + eps) * gain``, the mean taken over the FULL width D, and the slices of head
    ``h`` written ``[h]``::

        logit_i[h] = query[h] · key(v_i)[h]        α[h] = softmax_i(logit[h])        read-out[h] = Σ_i α_i[h] v_i[h]

    One head is Attention Residuals (arXiv:2603.15031, section 3); more heads are Multi-Head Attention Residuals
    (arXiv:2607.27230, section 3), with the same parameters. There is no 1/sqrt(D) factor and the values are not
    normalised.

    Args:
        query: the pseudo-query of the site, [D].
        gain: the gain of the key norm, [D].
        sources: N ≥ 1 tensors [B, T, D]: the embedding and what was written since. Any floating dtype.
        heads: number of depth heads H; divides D.
        eps: added to the mean square, > 0.
        return_weights: also return the depth weights.

    Returns:
        The read-out [B, T, D] in the sources' (promoted) dtype; with ``return_weights`` also α, [N, B, T, H]. Scores,
        softmax and mix are computed, and α returned, in float32 (float64 when a source is).

    Raises:
        ValueError: no sources, shapes that do not agree, heads that do not divide D, or an eps that is not above 0.
    """
    check_route(query, gain, sources, heads)
    if not eps > 0:
        raise ValueError(f"eps={eps}; accepted: a number above 0")
    dtype = storage_dtype(sources)
    v = torch.stack([s.to(score_dtype(dtype)) for s in sources])  # [N, B, T, D]
    r = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)  # [N, B, T, 1]
    keys = (v * r * gain).unflatten(-1, (heads, -1))  # [N, B, T, H, D/H]
    logits = (keys * query.unflatten(-1, (heads, -1))).sum(-1)  # [N, B, T, H]
    weights = logits.softmax(0)
    values = v.unflatten(-1, (heads, -1))  # [N, B, T, H, D/H]
    readout = (weights.unsqueeze(-1) * values).sum(0).flatten(-2).to(dtype)  # [B, T, D]
    return (readout, weights) if return_weights else readout


def storage_dtype(sources: Sequence[Tensor]) -> torch.dtype:
    """The dtype all sources promote to; a read-out is stored in it."""
    dtype = sources[0].dtype
    for source in sources[1:]:
        dtype = torch.promote_types(dtype, source.dtype)
    return dtype


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, softmax and mix for sources stored in ``dtype``: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def check_route(query: Tensor, gain: Tensor, sources: Sequence[Tensor], heads: int) -> None:
    """Raise ValueError, naming the argument, unless they fit together as `route` needs them."""
    if len(sources) == 0:
        raise ValueError("sources is empty; a site reads at least one source, the embedding")
    shape = sources[0].shape
    if len(shape) != 3:
        raise ValueError(f"sources[0] has shape {tuple(shape)}; accepted: [B, T, D]")
    for i, source in enumerate(sources):
        if source.shape != shape:
            raise ValueError(f"sources[{i}] has shape {tuple(source.shape)}; accepted: {tuple(shape)}, as sources[0]")
        if not source.is_floating_point():
            raise ValueError(f"sources[{i}] has dtype {source.dtype}; accepted: a floating dtype")
    for name, vector in (("query", query), ("gain", gain)):
        if vector.shape != shape[-1:]:
            raise ValueError(f"{name} has shape {tuple(vector.shape)}; accepted: [{shape[-1]}], the sources' width")
    if heads < 1 or shape[-1] % heads:
        raise ValueError(f"heads={heads} does not divide the width {shape[-1]}")
