"""What a model does across depth: what its sites read, what its sublayers write, and how the two are weighed.

Everything is seen from outside: through forward hooks, and by watching ``mix`` or changing ``weigh`` of one forward
pass. Both are gone when a function returns. No model is changed, and its mode, its gradients and its parameters are as
they were.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhar_minimal.model import Model
from mhar_minimal.route import route

SLICES = 4  # of the disagreement that `findings` reports


@dataclass
class Trace:
    """One forward pass of a model with L layers, in the order of depth; tensors without gradients.

    ``weights`` and ``sources`` are None for a scheme without depth weights. Under block, the last source of a site
    inside a block is that block's running sum.
    """

    readouts: list[Tensor]  # what each of the 2L + 1 sites read, [B, T, D], before the norm
    outputs: list[Tensor]  # the raw output of each of the 2L sublayers, [B, T, D]
    weights: list[Tensor] | None  # per site the depth weights, [N, B, T, H]
    sources: list[list[Tensor]] | None  # per site the N sources they weigh, [B, T, D] each


@torch.no_grad()
def trace(model: Model, tokens: Tensor) -> Trace:
    """Record a forward pass over ``tokens`` [B, T] (int64)."""
    readouts, weights, sources = [], [], []
    with ExitStack() as stack:

        def record_mix(module: nn.Module, args: tuple, scheme: object) -> None:
            if not hasattr(scheme, "mix"):
                return
            mix = scheme.mix

            def recording_mix(read: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
                readout = mix(read, logits)
                sources.append(list(read))
                weights.append(scheme.weights[-1])
                return readout

            scheme.mix = recording_mix  # of this forward pass only; undone, or the cycle would keep the pass alive
            stack.callback(delattr, scheme, "mix")

        outputs = stack.enter_context(_recorded_outputs(model))
        for norm in [n for layer in model.layers for n in (layer.attn_norm, layer.mlp_norm)] + [model.norm]:
            stack.enter_context(norm.register_forward_pre_hook(lambda module, args: readouts.append(args[0])))
        stack.enter_context(model.depth.register_forward_hook(record_mix))
        model(tokens)
    return Trace(readouts, outputs, weights or None, sources or None)


@contextmanager
def _recorded_outputs(model: Model) -> Iterator[list[Tensor]]:
    """A list that a forward pass inside the ``with`` fills with the 2L raw sublayer outputs."""
    outputs = []
    with ExitStack() as stack:
        for sublayer in [m for layer in model.layers for m in (layer.attn, layer.mlp)]:
            stack.enter_context(sublayer.register_forward_hook(lambda module, args, output: outputs.append(output)))
        yield outputs


def rms(x: Tensor) -> Tensor:
    """The root mean square over the last dimension, in float32 at least: [..., D] to [...]."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1).sqrt()


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """The RMS over D of each [B, T, D], averaged over tokens: of read-outs or of outputs, by depth."""
    return [rms(x).mean().item() for x in tensors]


def branch_share(trace: Trace) -> list[float]:
    """How large each sublayer's output is beside what the next site reads: RMS(output_i) / RMS(read-out_{i+1}).

    Averaged over tokens; 2L values. Under standard residuals this is the share of the newest branch in the stream,
    which falls with depth (arXiv:2603.15031 calls it dilution). A read-out by depth weights is a weighted mean, so
    there it says how large the raw source is, before its weight, and may exceed 1.
    """
    return [(rms(y) / rms(h)).mean().item() for y, h in zip(trace.outputs, trace.readouts[1:], strict=True)]


def gradient_norms(model: Model, inputs: Tensor, targets: Tensor) -> list[float]:
    """The L2 norm of d loss / d (raw output of sublayer i), over all of [B, T, D], for the 2L sublayers.

    The loss is the mean cross-entropy in nats of ``model(inputs)`` against ``targets``, both [B, T] (int64). Gradients
    of the parameters are neither computed into ``.grad`` nor cleared.
    """
    with torch.enable_grad(), _recorded_outputs(model) as outputs:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        gradients = torch.autograd.grad(loss, outputs)
    return [g.norm().item() for g in gradients]


def entropy(weights: Tensor) -> Tensor:
    """The entropy of one site's depth weights [N, B, T, H], in nats, averaged over tokens: [H], from 0 to log N.

    Raises:
        ValueError: no weights.
    """
    return torch.special.entr(_present(weights)).sum(0).mean((0, 1))


def heatmap(weights: Sequence[Tensor]) -> Tensor:
    """Token-averaged depth weights of all sites, float32 [H, sites, sources], NaN where a site cannot read a source.

    Under block, column n > 0 is block n, finished or still running.

    Args:
        weights: per site [N, B, T, H], as `Trace` has them.

    Raises:
        ValueError: no weights.
    """
    cells = torch.full((_present(weights)[0].shape[-1], len(weights), max(map(len, weights))), torch.nan)
    for site, w in enumerate(weights):
        cells[:, site, : len(w)] = w.mean((1, 2)).T  # [N, H] to [H, N]
    return cells


def head_deviation(weights: Sequence[Tensor]) -> Tensor:
    """Each head's token-averaged weights minus their mean over heads: [H, sites, sources], NaN as in `heatmap`.

    Different heads are not yet specialised heads: this says how they weigh, not whether it matters.
    """
    cells = heatmap(weights)
    return cells - cells.mean(0)


def slice_disagreement(model: Model, tokens: Tensor, slices: int = 4, seed: int = 0) -> tuple[float, float]:
    """Would slices of a single head's query, asked alone, weigh the depth as the whole query does?

    At every site but the first the query is cut into contiguous slices. With p_h the softmax over sources of slice h's
    own logits and p the depth weights that all slices share, this is the mean of KL(p_h ‖ p), in nats, over slices,
    tokens and sites (arXiv:2607.27230, the disagreement probe).

    Args:
        model: full or block, with one head.
        tokens: [B, T], int64.
        slices: how many; divides D.
        seed: of the null's directions.

    Returns:
        The mean for the model's own queries, and for random queries of the same norm reading the same sources.

    Raises:
        ValueError: a model without depth weights, with another mixing than softmax or with several heads, or slices
            that do not divide D.
    """
    config = model.config
    if not config.routed:
        raise ValueError(f"residual={config.residual!r}; accepted: full, block (the others have no queries)")
    if config.mixing != "softmax":
        raise ValueError(f"mixing={config.mixing!r}; accepted: softmax")
    if config.heads != 1:
        raise ValueError(f"heads={config.heads}; accepted: 1 (the slices of one shared softmax are compared)")
    if slices < 1 or config.dim % slices:
        raise ValueError(f"slices={slices} does not divide dim={config.dim}; accepted: a divisor of dim")
    generator = torch.Generator().manual_seed(seed)
    trained, random = [], []
    read = list(zip(model.depth.query, model.depth.gain, trace(model, tokens).sources, strict=True))
    for query, gain, sources in read[1:]:  # the first site has one source, and nothing to disagree about
        query, gain, sources = query.detach().double(), gain.detach().double(), [v.double() for v in sources]
        direction = torch.randn(query.shape, generator=generator, dtype=torch.float64).to(query.device)
        for q, found in ((query, trained), (direction * (query.norm() / direction.norm()), random)):
            _, own = route(q, gain, sources, slices, config.eps, return_weights=True)  # a slice alone is a head
            _, shared = route(q, gain, sources, 1, config.eps, return_weights=True)
            found.append((torch.xlogy(own, own) - torch.xlogy(own, shared)).sum(0).mean())
    return torch.stack(trained).mean().item(), torch.stack(random).mean().item()


@torch.no_grad()
def causal_check(
    model: Model, inputs: Tensor, targets: Tensor, replacement: str = "mean"
) -> tuple[float, Tensor, Tensor]:
    """What a head's own weights are worth: replace them and see what the loss does.

    The head keeps its slice of the sources, and weighs it as the heads do on average at that site and token ("mean",
    itself included), or equally ("uniform", 1/N). Whatever follows sees the changed read-out, later heads too.
    Different heads are not yet specialised heads: those are what ``head_deviation`` sees, these what the loss sees.

    Args:
        model: full or block, with impl="eager".
        inputs: [B, T], int64.
        targets: [B, T], int64.
        replacement: mean or uniform.

    Returns:
        The loss of the model as it is, nats per token; by how much it rises when a head is replaced at all sites,
        float64 [H], below 0 where it falls; and the same for one site alone, float64 [sites, H].

    Raises:
        ValueError: a model that keeps no depth weights, or another replacement.
    """
    config = model.config
    if not config.routed or config.impl != "eager":
        raise ValueError(
            f"residual={config.residual!r} with impl={config.impl!r}; accepted: full or block, eager (no other keeps "
            f"depth weights)"
        )
    if replacement not in ("mean", "uniform"):
        raise ValueError(f"replacement={replacement!r}; accepted: mean, uniform")

    def loss(head: int, sites: Collection[int]) -> float:
        def change(site: int, weights: Tensor) -> Tensor:
            if site in sites:  # weights [N, B, T, H] are this pass's own
                weights[..., head] = weights.mean(-1) if replacement == "mean" else 1 / len(weights)
            return weights

        with _changed_weights(model, change):
            return F.cross_entropy(model(inputs).flatten(0, 1).double(), targets.flatten()).item()

    sites, heads = range(config.sites), range(config.heads)
    whole = loss(0, ())
    everywhere = torch.tensor([loss(h, sites) for h in heads], dtype=torch.float64)
    alone = torch.tensor([[loss(h, (s,)) for h in heads] for s in sites], dtype=torch.float64)
    return whole, everywhere - whole, alone - whole


class Finding(NamedTuple):
    """One number that a probe found in a model: of a site and a head, or, where they are None, of all."""

    probe: str
    site: int | None
    head: int | None
    value: float


def findings(model: Model, inputs: Tensor, targets: Tensor) -> list[Finding]:
    """The probes of this file for one model, as `mhar_minimal.ablate` stores them.

    - ``loss``: nats per token.
    - ``slice disagreement`` and ``slice disagreement, random queries``: for one head, with four slices, in nats;
      left out where four do not divide D.
    - ``entropy``: by site and head, over log N, so that 1 is the plain mean; the first site, with one source, has none.
    - ``deviation``: by site and head, half the sum over sources of `head_deviation` without its sign: the share of
      weight that lies elsewhere than in the heads' mean.
    - ``causal mean`` and ``causal uniform``: by head, and by site and head, the rise of the loss in `causal_check`.

    Args:
        model: full or block, with impl="eager" and mixing="softmax".
        inputs: [B, T], int64.
        targets: [B, T], int64.

    Raises:
        ValueError: a model that keeps no depth weights, or of one head with another mixing.
    """
    weights = _present(trace(model, inputs).weights)
    found, heads = [], range(model.config.heads)
    if model.config.heads == 1 and model.config.dim % SLICES == 0:
        names = "slice disagreement", "slice disagreement, random queries"
        found += [Finding(name, None, None, x) for name, x in zip(names, slice_disagreement(model, inputs, SLICES))]
    deviation = head_deviation(weights).nan_to_num().abs().sum(-1) / 2  # [H, sites]
    for site in range(1, len(weights)):
        flatness = entropy(weights[site]) / math.log(len(weights[site]))
        found += [Finding("entropy", site, head, flatness[head].item()) for head in heads]
        found += [Finding("deviation", site, head, deviation[head, site].item()) for head in heads]
    for replacement in ("mean", "uniform"):
        loss, everywhere, alone = causal_check(model, inputs, targets, replacement)
        found += [Finding(f"causal {replacement}", None, head, everywhere[head].item()) for head in heads]
        for site, rises in enumerate(alone.tolist()):
            found += [Finding(f"causal {replacement}", site, head, rise) for head, rise in enumerate(rises)]
    return [Finding("loss", None, None, loss), *found]


@contextmanager
def _changed_weights(model: Model, change: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Inside the ``with``, one forward pass weighs its sources by ``change(site, depth weights)``."""
    with ExitStack() as stack:

        def hook(module: nn.Module, args: tuple, scheme: object) -> None:
            weigh = scheme.weigh
            scheme.weigh = lambda logits: change(scheme.site, weigh(logits))
            stack.callback(delattr, scheme, "weigh")  # undone, as in `trace`

        stack.enter_context(model.depth.register_forward_hook(hook))
        yield


def _present(weights: Tensor | Sequence[Tensor] | None) -> Tensor | Sequence[Tensor]:
    if weights is None:
        raise ValueError(
            "weights=None; accepted: those of a full or block model with impl='eager' (no other keeps depth weights)"
        )
    return weights
