"""How fast the kernels are: ``python -m mhar_minimal.kernels.benchmark`` on a machine with a CUDA GPU.

``routing`` times all 2L + 1 routing reads of one micro-batch, without sublayers, as replays of a CUDA graph, beside the
fewest bytes that the schedule can move and the copy bandwidth of the same run. ``training`` times whole optimizer
steps of several models in turn. An implementation is timed only after its read-outs and gradients have been compared
with float64. Rows of several calls are merged into one JSON file; each call measures its own baseline.
"""

import argparse
import gc
import importlib
import json
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mhar_minimal import Config, Model, preset
from mhar_minimal.__main__ import git_revision, processor
from mhar_minimal.depth import Depth, read_normed
from mhar_minimal.fast import FusedFull
from mhar_minimal.model import rope
from mhar_minimal.route import route
from mhar_minimal.train import record

MICRO_BATCH = {"100M": 8, "350M": 4, "1B": 2}  # windows of the preset's context, as in arXiv:2607.27230
ULP = 2**-8  # of bfloat16, relative


class OneSite(FusedFull):
    """Full AttnRes by another function of one site, called as `mhar_minimal.route.route` is."""

    def __init__(self, route: Callable, depth: Depth, embedding: Tensor):
        super().__init__(depth, embedding)
        self.route = route


def compiled() -> Callable:
    """The definition by torch.compile, a site at a time: all of them, as one graph, had not compiled after 400 s."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 2000
    return torch.compile(route, dynamic=False)  # for every number of sources anew


def fla() -> Callable:
    """flash-linear-attention's kernel (fla-core), of one head."""
    attnres = importlib.import_module("fla.ops.attnres")

    def one_site(query: Tensor, gain: Tensor, sources: Sequence[Tensor], heads: int, eps: float) -> Tensor:
        like = sources[0].dtype
        return attnres.fused_attnres(query.to(like), list(sources), gain.to(like), rms_eps=eps)

    return one_site


def liger() -> Callable:
    """Liger's kernel (liger-kernel), of one head."""
    functional = importlib.import_module("liger_kernel.transformers.functional")

    def one_site(query: Tensor, gain: Tensor, sources: Sequence[Tensor], heads: int, eps: float) -> Tensor:
        like = sources[0].dtype
        return functional.liger_attn_res(torch.stack(tuple(sources)), query.to(like), gain.to(like), eps)

    return one_site


PEERS = {"fla": fla, "liger": liger}
ONE_SITE = {"compile": compiled, **PEERS}


class Routing:
    """Sources, queries and gains of one micro-batch, and the gradients of its read-outs; one implementation."""

    def __init__(
        self, config: Config, impl: str, batch: int, tokens: int, device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16, norms: str = "none",
    ):  # fmt: skip
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
            numbers = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
            return (mean + std * numbers).to(dtype)

        own = impl if impl in ("eager", "fused", "two_phase") else "eager"
        self.depth = Depth(replace(config, impl=own)).to(device, torch.promote_types(dtype, torch.float32))
        self.one_site = ONE_SITE[impl]() if impl in ONE_SITE else None
        for query, gain in zip(self.depth.query, self.depth.gain):
            query.data.copy_(draw(config.dim, std=config.dim**-0.5))
            gain.data.copy_(draw(config.dim, std=0.1, mean=1.0))
        self.values = [draw(batch, tokens, config.dim).requires_grad_() for _ in range(config.sites)]
        self.upstream = [draw(batch, tokens, config.dim) for _ in range(config.sites)]
        count = 0 if norms == "none" else config.sites
        self.norms = [nn.RMSNorm(config.dim, config.eps, device=device, dtype=dtype) for _ in range(count)]
        for norm in self.norms:
            norm.weight.data.copy_(draw(config.dim, std=0.1, mean=1.0))
        self.apart = norms == "apart"
        self.leaves = [*self.values, *self.depth.parameters(), *(norm.weight for norm in self.norms)]

    def read(self) -> list[Tensor]:
        """All read-outs, behind their norms if any; source s + 1 is written after site s whatever that read."""
        embedding = self.values[0]
        one_site = self.one_site
        scheme = OneSite(one_site, self.depth, embedding) if one_site else self.depth(embedding, self.norms)
        readouts = []
        for i, output in enumerate([*self.values[1:], None]):
            if not self.norms:
                readouts.append(scheme.read())
            elif self.apart:
                readouts.append(self.norms[i](scheme.read()))
            else:
                readouts.append(read_normed(scheme, self.norms[i]))
            if output is not None:
                scheme.write(output)
        return readouts

    @torch.no_grad()
    def forward(self) -> None:
        self.read()

    def forward_and_backward(self) -> list[Tensor]:
        readouts = self.read()
        return [torch.stack(readouts).detach(), *torch.autograd.grad(readouts, self.leaves, self.upstream)]

    def both(self) -> None:
        torch.autograd.grad(self.read(), self.leaves, self.upstream)


def check(config: Config, impl: str, norms: str) -> None:
    """Compare with float64 on 33 tokens of this width and depth; RuntimeError where the bounds are not met.

    The bounds are those of the tests: 1.5 times the eager definition's error in the same dtype for read-outs, 3 times
    for gradients, or 2 units in the last place.
    """
    exact, eager, ours = (
        Routing(config, name, 1, 33, dtype=dtype, norms=norms).forward_and_backward()
        for name, dtype in (("eager", torch.float64), ("eager", torch.bfloat16), (impl, torch.bfloat16))
    )
    for i, truth in enumerate(exact):
        size = truth.abs().max()
        if size == 0:
            continue
        far = [((found[i].double() - truth).abs().max() / size).item() for found in (eager, ours)]
        bound = max((1.5 if i == 0 else 3) * far[0], 2 * ULP)
        if not far[1] <= bound:
            raise RuntimeError(f"{impl}, tensor {i}: error {far[1]:.2e}; accepted: up to {bound:.2e}")


def milliseconds(function: Callable, repeats: int = 15) -> tuple[float, str]:
    """Median time of a replay of the function's CUDA graph; of a call, where it cannot be captured; and which."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except RuntimeError:
        torch.cuda.synchronize()
        return median(event_times(function, repeats)), "call"
    return median(event_times(graph.replay, repeats)), "graph"


def event_times(function: Callable, repeats: int) -> Iterator[float]:
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        yield start.elapsed_time(end)


def profiled(function: Callable) -> dict[str, float]:
    """Milliseconds that the GPU spends in each kernel of a call: the eight largest, and the sum of the others."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    spent = Counter()
    for event in profile.key_averages():
        spent[event.key[:60]] += event.self_device_time_total / 1e3
    first = dict(spent.most_common(8))
    others = spent.total() - sum(first.values())
    return {name: round(ms, 3) for name, ms in (first | {"others": others}).items()}


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy of 2 GiB, read and written bytes counted."""
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    list(event_times(lambda: target.copy_(source), 3))
    return 2 * source.nbytes / (1e-3 * median(event_times(lambda: target.copy_(source), 15)))


def fewest_rows(sites: int) -> tuple[int, int]:
    """Rows of B·T·D that the two-phase schedule moves at its best block length, forward and backward.

    Sources are cut into blocks of ``size``; a site reads full blocks in phase 1, which sites share until the next is
    full, and what is not yet a full block itself. Forward: every phase 1 its sources; what sites read themselves; the
    read-outs, and phase 1 written and read. Backward, mirrored: every full block all later sites' gradients; what its
    own sites send a source; each read-out; each source twice, its partial gradient written and read, its gradient
    written (of a last block that never fills: source and gradient once).
    """

    def rows(size: int) -> tuple[int, int]:
        starts = range(size - 1, sites, size)  # of the blocks of sites with a phase 1
        inside = sum((site + 1) % size for site in range(sites))
        shared = max(0, sites - size + 1)  # sites that have one
        forward = sum(start + 1 for start in starts) + inside + sites + 2 * shared
        backward = sum(sites - start for start in starts) + inside + 3 * sites + 3 * size * len(starts)
        return forward, backward

    return min((rows(size) for size in range(1, sites + 1)), key=sum)


def routing_rows(
    names: Sequence[str], heads: Sequence[int], impls: Sequence[str], norms: Sequence[str], bandwidth: float
) -> Iterator[dict]:
    for name in names:
        for h in heads:
            for impl, norm in ((i, n) for i in impls for n in norms):
                if impl in PEERS and (h > 1 or norm != "none"):
                    continue
                config = preset(name, residual="full", heads=h)
                row = {"setting": name, "heads": h, "impl": impl, "norms": norm}
                try:
                    check(config, impl, norm)
                except Exception as error:
                    if impl not in PEERS:
                        raise
                    yield row | {"not_timed": f"{type(error).__name__}: {error}"[:300]}
                    continue
                run = Routing(config, impl, MICRO_BATCH[name], config.context, norms=norm)
                (once, _), (twice, timed) = milliseconds(run.forward), milliseconds(run.both)
                rows, row_bytes = fewest_rows(config.sites), run.values[0].nbytes
                yield row | {
                    "fwd_ms": round(once, 3),
                    "fwdbwd_ms": round(twice, 3),
                    "timed": timed,
                    "fewest_bytes_fwd": rows[0] * row_bytes,
                    "fewest_bytes_fwdbwd": sum(rows) * row_bytes,
                    "share_of_copy_bandwidth": round(sum(rows) * row_bytes / (1e-3 * twice) / bandwidth, 3),
                    "kernels_ms": profiled(run.both),
                }
                del run
                torch.cuda.empty_cache()


class Step:
    """An optimizer step in bfloat16, parameters too, with fused AdamW, on random tokens.

    ``run()`` makes one; ``recorded``, it replays a CUDA graph of the whole step, so that no time goes into launching.
    """

    def __init__(self, config: Config, batch: int, compiled: bool, recompute: bool, recorded: bool):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.device("meta"):
            model = Model(config)
        model = model.to_empty(device="cuda")
        model.rotation = rope(config.context, config.head_dim, config.rope_theta).cuda()
        for parameter in model.parameters():  # on the GPU: a billion draws take long on a CPU
            torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim == 2 else parameter.data.fill_(1)
        if config.routed:
            for query in model.depth.query:
                query.data.zero_()
        for sublayer in (part for layer in model.layers for part in (layer.attn, layer.mlp) if recompute):
            sublayer.forward = lambda *a, inner=sublayer.forward: checkpoint(inner, *a, use_reentrant=False)
        self.model = model.bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, capturable=recorded)
        generator = torch.Generator("cuda").manual_seed(0)
        size = batch, config.context + 1
        self.tokens = torch.randint(config.vocab, size, device="cuda", generator=generator)
        self.loss = torch.compile(self.forward) if compiled else self.forward
        start = time.perf_counter()
        for _ in range(4):
            self.launch()
        torch.cuda.synchronize()
        self.first_s = time.perf_counter() - start  # compilation above all
        self.peak = torch.cuda.max_memory_allocated() - before
        self.run = record(self.launch) if recorded else self.launch

    def forward(self) -> Tensor:
        logits = self.model(self.tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())

    def launch(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def window(self, steps: int = 10) -> tuple[float, float]:
        """Milliseconds per step of several in a row, and how long the CPU was busy with each."""
        torch.cuda.synchronize()
        start, begun = time.perf_counter(), torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        begun.record()
        for _ in range(steps):
            self.run()
        busy = time.perf_counter() - start
        ended.record()
        ended.synchronize()
        return begun.elapsed_time(ended) / steps, 1e3 * busy / steps


def training_rows(
    names: Sequence[str], layers: Sequence[int], schemes: Sequence[str], compiled: bool, recompute: bool, recorded: bool
) -> Iterator[dict]:
    """Tokens/s and peak memory; the schemes take turns, so that a machine that slows down slows all of them."""
    workspace = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (workspace @ workspace).sum().backward()  # cuBLAS's, for two threads, is the process's, not the first model's
    for name in names:
        for depth in layers or [preset(name).layers]:
            torch._dynamo.reset()  # once for all that take turns, or the earlier ones would be compiled again
            steps: dict[str, Step] = {}
            for scheme in schemes:
                changes = {} if scheme == "standard" else {"residual": "full", "heads": 8, "impl": scheme}
                config = preset(name, layers=depth, **changes)
                gc.collect()  # a step refers to itself, and would be kept with its graphs
                torch.cuda.empty_cache()
                steps[scheme] = Step(config, MICRO_BATCH[name], compiled, recompute, recorded)
            times = {scheme: [] for scheme in schemes}
            for _ in range(7):
                for scheme, step in steps.items():
                    times[scheme].append(step.window())
            for scheme, step in steps.items():
                ms = median(t for t, _ in times[scheme])
                yield {
                    "setting": name,
                    "layers": depth,
                    "scheme": scheme,
                    "mode": "compiled" if compiled else "eager",
                    "recompute": recompute,
                    "recorded": recorded,
                    "step_ms": round(ms, 2),
                    "cpu_ms": round(median(busy for _, busy in times[scheme]), 2),
                    "tokens_per_s": round(MICRO_BATCH[name] * config.context / (1e-3 * ms)),
                    "peak_gb": round(step.peak / 1e9, 3),
                    "speed_ratio": round(median(a / b for (a, _), (b, _) in zip(times[schemes[0]], times[scheme])), 3),
                    "memory_ratio": round(step.peak / steps[schemes[0]].peak, 3),
                    "first_4_steps_s": round(step.first_s, 1),
                    "kernels_ms": profiled(step.run),
                }
            del steps, step


def main() -> None:
    """Run one part and merge its rows into the JSON file."""
    layout = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m mhar_minimal.kernels.benchmark", description=__doc__, formatter_class=layout
    )
    option = parser.add_argument
    option("part", choices=("routing", "training"), help="what to time")
    option("--settings", nargs="+", default=list(MICRO_BATCH), help="presets")
    option("--heads", nargs="+", type=int, default=[1, 8], help="depth heads, of routing")
    option("--impl", nargs="+", default=["two_phase", "fused", "eager"], help="also compile (eager's), fla, liger")
    option("--norms", nargs="+", default=["none"], help="of routing: none, apart, fused (into the read-outs)")
    option("--schemes", nargs="+", default=["standard", "two_phase"], help="of training, baseline first; fused, eager")
    option("--compiled", action="store_true", help="training by torch.compile")
    option("--recorded", action="store_true", help="training by replays of a CUDA graph of the whole step")
    option("--recompute", action="store_true", help="sublayers' activations are computed again in the backward")
    option("--layers", nargs="+", type=int, default=[], help="depths in place of the preset's own, of training")
    option("--revision", default=git_revision(), help="of the code")
    option("--out", default="notebooks/results/kernels_gpu.json", help="JSON file that the rows go into")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: no CUDA GPU; accepted: a machine with one")
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    out = Path(args.out)
    stored = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"parts": []}
    part = {
        "command": shlex.join(["python", "-m", "mhar_minimal.kernels.benchmark", *sys.argv[1:]]),
        "git": args.revision,
        "machine": torch.cuda.get_device_name(),
        "processor": processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "seed": 0,
        "copy_tb_per_s": round(bandwidth / 1e12, 3),
        args.part: [],
    }
    stored["parts"].append(part)
    print(f"{part['machine']}, {part['processor']}, copy {part['copy_tb_per_s']} TB/s")
    if args.part == "routing":
        rows = routing_rows(args.settings, args.heads, args.impl, args.norms, bandwidth)
    else:
        rows = training_rows(args.settings, args.layers, args.schemes, args.compiled, args.recompute, args.recorded)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items() if key != "kernels_ms"), flush=True)
        part[args.part].append(row)
        out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")  # what was measured is kept


if __name__ == "__main__":
    main()
