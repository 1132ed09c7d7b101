"""Delta MHAR: a routed branch grafted onto a trained model, which at first computes exactly what it did before.

The residual stream x stays, and so does its update, ``x ← x + f(norm(h))``. What changes is what the sublayer behind
site s reads (arXiv:2607.27230)::

    h = x + gate[s] · route(query[s], gain[s], sources, heads, eps)

The sources are a learnable null vector, the deltas of the finished blocks (a delta is the sum of the raw outputs of
``block_size`` sublayers), and the running delta of the current block once it holds a sublayer. There are 2L sites, one
before every sublayer, and no read-out site. Gates start at zero.

The model's own code is neither copied nor changed: a pre-hook on each norm puts h in the place of x, a hook on each
sublayer collects what it wrote. A trained model is loaded by its name, converted, trained, saved and loaded again by ::

    model = convert(Qwen3ForCausalLM.from_pretrained("Qwen/Qwen3-8B"), block_size=8, heads=8)
    optimizer = AdamW(parameter_groups(model), ...)  # of train.py; transformers' Trainer would let the branch decay
    model.save_pretrained(folder)
    model = load_converted(folder)

and one of ours is made and converted before its state dict is loaded, as it was before that was saved.
"""

import threading
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path

from torch import Tensor, nn

from mhar_minimal.model import Model
from mhar_minimal.route import route

HUGGING_FACE = ("Qwen3ForCausalLM", "LlamaForCausalLM")

# The pass in progress in this thread: whose it is, the site to come, and the sources of that site. A backward pass that
# computes layers again leaves the sources of one layer here, until the next such pass.
_in_progress = threading.local()


class Branch(nn.Module):
    """The parameters of a model's branch, and the hooks that read and write.

    ``query`` (zero at start) and ``gain`` (one) are a vector [D] per site, ``gate`` (zero) is a scalar per site, in one
    vector [2L], and ``null`` (zero) is one vector [D] for the model, all in the dtype and on the device of its norms.

    Behind a gate of zero nothing has a gradient, so the first step opens gates only, and not that of site 0, which
    reads nothing but the null vector. The second moves the null vector and the queries too; the third the gains and
    the gate of site 0. The query and the gain of site 0 have one source to choose from, and never a gradient.
    """

    def __init__(self, norm_weight: Tensor, sites: int, block_size: int, heads: int, eps: float):
        super().__init__()
        self.block_size, self.heads, self.eps = block_size, heads, eps
        start = norm_weight.detach()
        self.query = nn.ParameterList(nn.Parameter(start.new_zeros(start.shape)) for _ in range(sites))
        self.gain = nn.ParameterList(nn.Parameter(start.new_ones(start.shape)) for _ in range(sites))
        self.gate = nn.Parameter(start.new_zeros(sites))
        self.null = nn.Parameter(start.new_zeros(start.shape))
        self.handles = []  # of the hooks

    def read(self, site: int, norm: nn.Module, args: tuple[Tensor]) -> Tensor:
        """The pre-hook of a norm: h for x, both [B, T, D]."""
        (x,) = args
        if site == 0:
            sources = (self.null.to(x.dtype).expand_as(x),)
        elif hasattr(x, "mhar_sources"):  # gradient checkpointing computes the layer again, from the same tensor
            sources = x.mhar_sources
        else:
            sources = x.mhar_sources = self.collected(site)
        _in_progress.value = self, site, sources
        return x + self.gate[site] * route(self.query[site], self.gain[site], sources, self.heads, self.eps)

    def write(self, site: int, sublayer: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        """The hook of a sublayer: its raw output [B, T, D] opens a block, or joins the running delta."""
        output = output[0] if isinstance(output, tuple) else output  # attention returns its weights, too
        sources = self.collected(site)
        opens = site % self.block_size == 0
        sources = (*sources, output) if opens else (*sources[:-1], sources[-1] + output)
        _in_progress.value = self, site + 1, sources

    def collected(self, site: int) -> tuple[Tensor, ...]:
        """The sources of a site, from the pass in progress. RuntimeError if that is not the site to come."""
        branch, to_come, sources = getattr(_in_progress, "value", None) or (None, None, None)
        if branch is not self or to_come != site:
            raise RuntimeError(
                f"site {site} has no sources: the sublayers before it did not run in this pass; accepted: calls of the "
                f"whole model, and gradient checkpointing with use_reentrant=False that keeps its inputs where they are"
            )
        return sources


def _one_pass(forward: Callable, *args, **kwargs):
    """Call ``forward``, and leave no source behind, however it ends; the pass around it, if any, then goes on."""
    around = getattr(_in_progress, "value", None)
    try:
        return forward(*args, **kwargs)
    finally:
        _in_progress.value = around


def convert(model: nn.Module, block_size: int, heads: int) -> nn.Module:
    """Graft the branch onto a model, in place, as ``model.mhar``; what the model computes does not change by a bit.

    That holds in every dtype, with a KV cache and without, in padded batches too: a zero gate adds zero to whatever is
    finite. (Gradients of the model's own weights are equal up to rounding: autograd sums them in another order.)
    Nothing passes from token to token, so a cache needs to know nothing of the branch. A Hugging Face config keeps
    ``mhar_block_size`` and ``mhar_heads``, for `load_converted`.

    Args:
        model: a `Model` of the standard scheme, or a Qwen3ForCausalLM or LlamaForCausalLM of transformers; on any
            device and in any floating dtype.
        block_size: sublayers per block, 1 to 2L; the last block may be ragged.
        heads: number of depth heads H; divides the model's width.

    Returns:
        The same model.

    Raises:
        ValueError: an argument out of range, a model of another kind, or converted already. The model is as it was.
    """
    if hasattr(model, "mhar"):
        raise ValueError("model is converted already; accepted: one that is not, see unconvert")
    if hasattr(getattr(model, "config", None), "mhar_heads"):
        raise ValueError(
            f"config.mhar_heads={model.config.mhar_heads}, but the model has no branch: it was left out in loading, or "
            f"a converted model shares the config; accepted: load_converted, or a config of its own"
        )
    return _graft(model, block_size, heads)


def unconvert(model: nn.Module) -> nn.Module:
    """Take the branch off again, in place: the model, its state dict and its config are as before `convert`.

    Returns:
        The same model.

    Raises:
        ValueError: the model is not converted, or has an open gate: without its branch it would compute something else.
    """
    if not hasattr(model, "mhar"):
        raise ValueError("model is not converted; accepted: what convert or load_converted returned")
    for site, gate in enumerate(model.mhar.gate.tolist()):
        if gate != 0:
            raise ValueError(f"gate={gate} at site {site}; accepted: a model whose gates are all zero")
    for handle in model.mhar.handles:
        handle.remove()
    base = _parts(model)[0]
    del base.forward, model.mhar
    if base is not model:
        del model.config.mhar_block_size, model.config.mhar_heads
    return model


def load_converted(folder: str | PathLike, **options) -> nn.Module:
    """A converted Hugging Face model, as ``save_pretrained`` wrote it, with its trained branch.

    The plain ``from_pretrained`` leaves the branch out, and says of its weights only that it did not expect them.

    Args:
        folder: of the checkpoint.
        options: of ``from_pretrained``: dtype, device_map, …

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: the checkpoint is not of a converted model, or lacks weights.
        ImportError: transformers, the extra ``hf``, is not installed.
    """
    import transformers  # here, because it is an extra

    config_file = Path(folder, "config.json")
    if not config_file.is_file():
        raise FileNotFoundError(f"{config_file} does not exist; accepted: the folder of a converted model")
    config = transformers.AutoConfig.from_pretrained(folder)
    if not hasattr(config, "mhar_heads"):
        raise ValueError(f"{config_file} has no mhar_heads; accepted: the folder of a converted model")
    plain = getattr(transformers, config.architectures[0])

    def init(self: nn.Module, config: object) -> None:
        plain.__init__(self, config)
        _graft(self, config.mhar_block_size, config.mhar_heads)

    # from_pretrained must find the branch in place; transformers takes the kind of loss from the class's name.
    converted = type(plain.__name__, (plain,), {"__init__": init})
    model, report = converted.from_pretrained(folder, output_loading_info=True, **options)
    if report["missing_keys"]:
        raise ValueError(f"{folder} lacks {', '.join(sorted(report['missing_keys']))}; accepted: a whole checkpoint")
    model.__class__ = plain
    return model


def _graft(model: nn.Module, block_size: int, heads: int) -> nn.Module:
    base, sublayers, eps = _parts(model)
    norm_weight = sublayers[0][0].weight
    width = len(norm_weight)
    for name, value, most in (("block_size", block_size, len(sublayers)), ("heads", heads, width)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ValueError(f"{name}={value!r}; accepted: an integer from 1 to {most}")
    if width % heads:
        raise ValueError(f"heads={heads} does not divide the model's width {width}; accepted: a divisor of it")
    model.mhar = Branch(norm_weight, len(sublayers), block_size, heads, eps)
    for site, (norm, sublayer) in enumerate(sublayers):
        # Of bound methods a copy of the model makes its own; closures would go on reading this model's branch.
        read, write = partial(model.mhar.read, site), partial(model.mhar.write, site)
        model.mhar.handles += [norm.register_forward_pre_hook(read), sublayer.register_forward_hook(write)]
    base.forward = partial(_one_pass, base.forward)
    if base is not model:
        model.config.mhar_block_size, model.config.mhar_heads = block_size, heads
    return model


def _parts(model: nn.Module) -> tuple[nn.Module, list[tuple[nn.Module, nn.Module]], float]:
    """The module that runs the layers, their 2L norms and sublayers in order of depth, and the norms' ε."""
    if isinstance(model, Model):
        if model.config.residual != "standard":
            raise ValueError(f"residual={model.config.residual!r}; accepted: 'standard', whose stream can stay")
        base, eps = model, model.config.eps
        names = (("attn_norm", "attn"), ("mlp_norm", "mlp"))
    elif type(model).__name__ in HUGGING_FACE:
        base, eps = model.model, model.config.rms_norm_eps
        names = (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp"))
    else:
        raise ValueError(f"model is a {type(model).__name__}; accepted: Model, {', '.join(HUGGING_FACE)}")
    return base, [(getattr(layer, n), getattr(layer, f)) for layer in base.layers for n, f in names], eps
