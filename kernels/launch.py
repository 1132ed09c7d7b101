"""What every kernel here shares: launching it, making an operation of PyTorch out of it, and what it may be given."""

import functools
import os
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}  # of sources
BATCH = 16  # addresses that one launch lays out
NONE: dict = {}  # constants


class Kernel:
    """A Triton kernel: ``kernel(grid, constants, *arguments)``.

    At every launch Triton looks at each argument, to find the machine code compiled for arguments of that kind. A model
    launches hundreds of kernels a step, and the looking takes longer than the launching. So it is done once per kind,
    and the compiled kernel is called directly. The constants are the compile-time parameters and Triton's launch
    options: a dict that lives for ever, since it is known by its identity.
    """

    def __init__(self, function: Callable, changing: Sequence[str]):
        self.jit = triton.jit(do_not_specialize=changing)(function)
        self.compiled: dict[tuple, tuple] = {}

    def __call__(self, grid: tuple[int, int, int], constants: dict, *arguments) -> None:
        if INTERPRETED:
            self.jit[grid](*arguments, **constants)
            return
        kinds = [(x.dtype, x.data_ptr() & 15) if x.__class__ is Tensor else kind(x) for x in arguments]
        key = torch.cuda.current_device(), id(constants), *kinds
        found = self.compiled.get(key)
        if found is None:
            compiled = self.jit[grid](*arguments, **constants)
            self.compiled[key] = compiled, [constants[name] for name in self.jit.arg_names[len(arguments) :]]
        else:
            compiled, rest = found
            compiled[grid](*arguments, *rest)


def kind(argument) -> object:
    """What Triton compiles for: of a tensor its dtype, and where it begins within 16 bytes."""
    if argument.__class__ is int:
        return argument > 0x7FFFFFFF
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15
    return tuple(map(kind, argument)) if isinstance(argument, tuple) else argument.__class__


def kernel(*changing: str) -> Callable[[Callable], Kernel]:
    """Decorator that makes a function a `Kernel`. All its integers must be named: it is not compiled for values."""
    return lambda function: Kernel(function, changing)


def ceil(a: int, b: int) -> int:
    """The quotient rounded up; `triton.cdiv` takes ten times as long."""
    return -(-a // b)


@kernel()
def addresses_kernel(pointers, out_ptr):
    for i in tl.static_range(16):
        tl.store(out_ptr + i, pointers[i].to(tl.int64))


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Where the data of contiguous tensors lie: int64 [N rounded up to 16], on their device.

    A kernel cannot index its arguments at run time; a table in memory it can (the grouped matmul of Triton's tutorials
    does the same).
    """
    count = ceil(len(tensors), BATCH)
    out = torch.empty(count * BATCH, dtype=torch.int64, device=tensors[0].device)
    for n in range(count):
        batch = tuple(tensors[n * BATCH : (n + 1) * BATCH])
        addresses_kernel((1, 1, 1), NONE, batch + batch[-1:] * (BATCH - len(batch)), out[n * BATCH :])
    return out


class Operation:
    """A custom op of torch.library under torch.compile; otherwise the same functions, called directly.

    The library's checks and its handling of lists take several times longer than our own Python, so eager code goes
    around them, and the op is registered without the ones that `torch.library.custom_op` makes at every call. Forward,
    set-up and backward are the same Python functions either way.
    """

    def __init__(self, name: str, forward: Callable, mutates: Sequence[str]):
        self.forward, self.direct, self.shown = forward, None, None
        self.name = f"mhar::{name}"
        torch.library.define(self.name, torch.library.infer_schema(forward, mutates_args=mutates))
        torch.library.impl(self.name, "CompositeExplicitAutograd", forward)
        self.op = getattr(torch.ops.mhar, name).default

    def fake(self, function: Callable) -> None:
        """Register what gives outputs of the right shapes without computing."""
        torch.library.register_fake(self.name, function)

    def differentiable(self, setup: Callable, backward: Callable, first: int, shown: int | None = None) -> None:
        """Register ``setup(ctx, inputs, output)`` and ``backward(ctx, *gradients)``.

        Only the ``first`` arguments, tensors or lists of tensors, may need gradients; ``backward`` returns these. Of
        the outputs the caller gets those up to ``shown``; the others are for ``setup``.
        """
        self.shown, run = shown, self.forward

        def padded(ctx, *gradients):
            return *backward(ctx, *gradients), *([None] * n if n is not None else None for n in ctx.others)

        def noted(ctx, inputs, output):
            ctx.others = [len(x) if isinstance(x, list) else None for x in inputs[first:]]
            setup(ctx, inputs, output)

        torch.library.register_autograd(self.name, padded, setup_context=noted)

        class Direct(torch.autograd.Function):
            @staticmethod
            def forward(ctx, inputs, *differentiable):
                output = run(*inputs)
                ctx.direct = True
                setup(ctx, inputs, output)
                return output if shown is None else output[:shown]

            @staticmethod
            def backward(ctx, *gradients):
                if torch.is_grad_enabled():
                    raise RuntimeError("gradients of gradients need impl='eager'; here create_graph=False is accepted")
                return None, *flattened(backward(ctx, *gradients))

        self.direct, self.first = Direct, first

    def __call__(self, *inputs):
        if self.direct is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self.direct.apply(inputs, *flattened(inputs[: self.first]))
        output = self.op(*inputs) if torch.compiler.is_compiling() else self.forward(*inputs)
        return output if self.shown is None else output[: self.shown]

    def inside(self, ctx) -> Callable:
        """How the backward of an operation calls this one: in the way that its forward was called."""
        return self.forward if getattr(ctx, "direct", False) else self.op


def flattened(values: Sequence) -> list:
    """Autograd does not look into lists."""
    return [x for value in values for x in (value if isinstance(value, list) else [value])]


def operation(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable], Operation]:
    """Decorator that makes a function of tensors the operation ``mhar::name``."""
    return lambda forward: Operation(name, forward, mutates)


def tokens_of(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


@functools.cache
def site_constants(dim: int, heads: int, together: int, **flags: bool | int) -> dict:
    """The compile-time constants of kernels whose programs hold whole tokens; flags are a kernel's own."""
    width = dim // heads
    hp, kp = triton.next_power_of_2(heads), triton.next_power_of_2(width)
    warps = max(1, min(16, hp * kp // 512))
    return {**flags, "D": dim, "H": heads, "K": width, "TT": together, "HP": hp, "KP": kp, "num_warps": warps}


def together(tokens: int) -> int:
    """Tokens per program. The interpreter takes a program's time per operation, not per number: there many."""
    return min(64, triton.next_power_of_2(max(1, tokens))) if INTERPRETED else 1


def stored(like: Tensor) -> torch.dtype:
    """What a kernel writes: the storage dtype, or float32 in the interpreter, whose rounding to bfloat16 is wrong."""
    return torch.float32 if INTERPRETED else like.dtype


def laid_out(source: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as kernels read it: of that dtype, contiguous, from a multiple of 16 bytes on (copied if need be)."""
    if source.dtype != dtype or not source.is_contiguous():
        source = source.to(dtype).contiguous()
    if torch.compiler.is_compiling():  # which aligns its inputs itself
        return source
    return source.clone() if source.storage_offset() * source.itemsize & 15 else source


def check_runnable(dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless kernels can run on tensors of this dtype and device."""
    if dtype not in DTYPES:
        raise ValueError(f"sources have dtype {dtype}; accepted: float32, bfloat16, float16")
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"the kernels cannot run on device {device.type!r}: Triton compiles for a CUDA GPU. Move the model to one, "
            f"use impl='eager', or set TRITON_INTERPRET=1 before Python starts (slow, for tests and for looking inside)"
        )
    if device.type == "cuda" and not torch.compiler.is_compiling() and device.index != torch.cuda.current_device():
        raise RuntimeError(
            f"the sources are on {device}, Triton launches on cuda:{torch.cuda.current_device()}; accepted: sources on "
            f"the current device, see torch.cuda.set_device"
        )
