"""How fast the kernels are: ``python -m mhar_minimal.kernels.benchmark`` on a machine with a CUDA GPU.

``routing`` times all 2L + 1 routing reads of one micro-batch, without sublayers, as replays of a CUDA graph, beside the
fewest bytes that the schedule can move and the copy bandwidth of the same run. ``training`` times whole optimizer
steps. An implementation is timed only after its read-outs and gradients have been compared with float64. Rows of
several calls are merged into one JSON file; each call measures its own baseline.
"""

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from mhar_minimal import Config, Model, preset
from mhar_minimal.depth import Depth
from mhar_minimal.model import rope

MICRO_BATCH = {"100M": 8, "350M": 4, "1B": 2}  # windows of the preset's context, as in arXiv:2607.27230
ULP = 2**-8  # of bfloat16, relative


def routing(config: Config, batch: int, tokens: int, dtype: torch.dtype, device: str, seed: int = 0):
    """Sources, queries and gains of one micro-batch, and the gradients of its read-outs."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return mean + std * torch.randn(shape, generator=generator, device=device, dtype=dtype)

    depth = Depth(config).to(device, torch.promote_types(dtype, torch.float32))
    for query, gain in zip(depth.query, depth.gain):
        query.data.copy_(draw(config.dim, std=config.dim**-0.5))
        gain.data.copy_(draw(config.dim, std=0.1, mean=1.0))
    values = [draw(batch, tokens, config.dim).requires_grad_() for _ in range(config.sites)]
    upstream = [draw(batch, tokens, config.dim) for _ in range(config.sites)]
    return depth, values, upstream


def read_all(depth: Depth, values: list[Tensor]) -> list[Tensor]:
    """The read-outs of all sites, source s + 1 being written after site s whatever it read."""
    scheme, readouts = depth(values[0]), []
    for output in values[1:]:
        readouts.append(scheme.read())
        scheme.write(output)
    return [*readouts, scheme.read()]


def forward_and_backward(depth: Depth, values: list[Tensor], upstream: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(read_all(depth, values), [*values, *depth.parameters()], upstream)


def check(config: Config) -> None:
    """Compare with float64 on 33 tokens of this width and depth; RuntimeError where the bounds are not met.

    The bounds are those of the tests: 1.5 times the eager definition's error in the same dtype for read-outs, 3 times
    for gradients, or 2 units in the last place.
    """
    found = {}
    for name, impl, dtype in (
        ("exact", "eager", torch.float64),
        ("eager", "eager", torch.bfloat16),
        ("ours", config.impl, torch.bfloat16),
    ):
        depth, values, upstream = routing(replace(config, impl=impl), 1, 33, torch.bfloat16, "cuda")
        if dtype == torch.float64:
            depth, values = depth.double(), [v.detach().double().requires_grad_() for v in values]
            upstream = [u.double() for u in upstream]
        readouts = read_all(depth, values)
        gradients = torch.autograd.grad(readouts, [*values, *depth.parameters()], upstream)
        found[name] = [torch.stack(readouts), *gradients]
    for i, exact in enumerate(found["exact"]):
        if exact.abs().max() == 0:
            continue
        eager, ours = (
            ((found[n][i].double() - exact).abs().max() / exact.abs().max()).item() for n in ("eager", "ours")
        )
        bound = max((1.5 if i == 0 else 3) * eager, 2 * ULP)
        if not ours <= bound:
            raise RuntimeError(f"impl={config.impl!r}, tensor {i}: error {ours:.2e}; accepted: up to {bound:.2e}")


def milliseconds(function: Callable, repeats: int = 15) -> float:
    """Median time of a replay of the function's CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return median(event_times(graph.replay, repeats))


def event_times(function: Callable, repeats: int) -> Iterator[float]:
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        yield start.elapsed_time(end)


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy of 2 GiB, read and written bytes counted."""
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    list(event_times(lambda: target.copy_(source), 3))
    return 2 * source.nbytes / (1e-3 * median(event_times(lambda: target.copy_(source), 15)))


def fewest_rows(sites: int) -> tuple[int, int]:
    """Rows of B·T·D that the two-phase schedule moves at its best block length, forward and backward.

    Forward, per block of n sites: the sources finished before it, n(n - 1)/2 sources inside it, and 3n (phase 1 written
    and read, the read-out written). Backward, per block of n sources: the later blocks' gradients, n(n + 1)/2 of its
    own, and 6n (read-out; the source twice; its partial gradient written and read; its gradient written).
    """

    def rows(size: int) -> tuple[int, int]:
        forward = backward = 0
        for start in range(0, sites, size):
            n = min(size, sites - start)
            forward += start + 1 + n * (n - 1) // 2 + 3 * n
            backward += sites - start - n + n * (n + 1) // 2 + 6 * n
        return forward, backward

    return min((rows(size) for size in range(1, sites + 1)), key=sum)


def routing_rows(names: list[str], heads: list[int], impls: list[str], bandwidth: float) -> Iterator[dict]:
    for name in names:
        for h in heads:
            for impl in impls:
                config = preset(name, residual="full", heads=h, impl="eager" if impl == "compile" else impl)
                check(config)
                depth, values, upstream = routing(config, MICRO_BATCH[name], config.context, torch.bfloat16, "cuda")
                read = torch.compile(read_all) if impl == "compile" else read_all

                def forward(read=read, depth=depth, values=values) -> None:
                    with torch.no_grad():
                        read(depth, values)

                def both(read=read, depth=depth, values=values, upstream=upstream) -> None:
                    torch.autograd.grad(read(depth, values), [*values, *depth.parameters()], upstream)

                once, twice = milliseconds(forward), milliseconds(both)
                rows, row_bytes = fewest_rows(config.sites), values[0].nbytes
                yield {
                    "setting": name,
                    "heads": h,
                    "impl": impl,
                    "fwd_ms": round(once, 3),
                    "fwdbwd_ms": round(twice, 3),
                    "fewest_bytes_fwd": rows[0] * row_bytes,
                    "fewest_bytes_fwdbwd": sum(rows) * row_bytes,
                    "share_of_copy_bandwidth": round(sum(rows) * row_bytes / (1e-3 * twice) / bandwidth, 3),
                }
                del depth, values, upstream
                torch.cuda.empty_cache()


def training_rows(names: list[str], schemes: list[str], modes: list[str]) -> Iterator[dict]:
    """Whole steps in bfloat16, parameters too, with fused AdamW: tokens/s and peak memory."""
    for name in names:
        for mode in modes:
            for scheme in schemes:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                changes = {} if scheme == "standard" else {"residual": "full", "heads": 8, "impl": scheme}
                config = preset(name, **changes)
                with torch.device("meta"):
                    model = Model(config)
                model = model.to_empty(device="cuda")
                model.rotation = rope(config.context, config.head_dim, config.rope_theta).cuda()
                for parameter in model.parameters():  # on the GPU: a billion draws take long on a CPU
                    torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim == 2 else parameter.data.fill_(1)
                if scheme != "standard":
                    for query in model.depth.query:
                        query.data.zero_()
                model = model.bfloat16()
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
                shape = MICRO_BATCH[name], config.context + 1
                tokens = torch.randint(
                    config.vocab, shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)
                )

                def loss_of(model=model, tokens=tokens) -> Tensor:
                    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

                loss_of = torch.compile(loss_of) if mode == "compiled" else loss_of

                def step(loss_of=loss_of, optimizer=optimizer) -> None:
                    loss_of().backward()
                    optimizer.step()
                    optimizer.zero_grad()

                list(event_times(step, 4))
                ms = median(event_times(step, 10))
                count = shape[0] * config.context
                yield {
                    "setting": name,
                    "scheme": scheme,
                    "mode": mode,
                    "step_ms": round(ms, 2),
                    "tokens_per_s": round(count / (1e-3 * ms)),
                    "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
                }
                del model, optimizer, loss_of, step


def main() -> None:
    """Run one part and merge its rows into the JSON file."""
    layout = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m mhar_minimal.kernels.benchmark", description=__doc__, formatter_class=layout
    )
    parser.add_argument("part", choices=("routing", "training"), help="what to time")
    parser.add_argument("--settings", nargs="+", default=list(MICRO_BATCH), help="presets")
    parser.add_argument("--heads", nargs="+", type=int, default=[1, 8], help="depth heads, of routing")
    parser.add_argument("--impl", nargs="+", default=["two_phase", "fused", "eager"], help="also: compile (of eager)")
    parser.add_argument(
        "--schemes", nargs="+", default=["standard", "two_phase"], help="of training; also fused, eager"
    )
    parser.add_argument("--modes", nargs="+", default=["eager"], help="of training: eager, compiled")
    parser.add_argument("--out", default="notebooks/results/kernels_gpu.json", help="JSON file that the rows go into")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: no CUDA GPU; accepted: a machine with one")
    bandwidth = copy_bandwidth()
    out = Path(args.out)
    stored = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"parts": []}
    part = {
        "command": shlex.join(["python", "-m", "mhar_minimal.kernels.benchmark", *sys.argv[1:]]),
        "machine": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "seed": 0,
        "copy_tb_per_s": round(bandwidth / 1e12, 3),
        args.part: [],
    }
    stored["parts"].append(part)
    print(f"{part['machine']}, copy {part['copy_tb_per_s']} TB/s")
    if args.part == "routing":
        rows = routing_rows(args.settings, args.heads, args.impl, bandwidth)
    else:
        rows = training_rows(args.settings, args.schemes, args.modes)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        part[args.part].append(row)
        out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")  # what was measured is kept


if __name__ == "__main__":
    main()
