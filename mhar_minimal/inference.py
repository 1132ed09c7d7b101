"""What inference costs: ``python -m mhar_minimal.inference``, on a CPU or, with ``--device cuda``, on a GPU.

For every setting, context (length of the prompt) and batch the schemes take turns: a prompt is computed in chunks into
a `Cache`, as `generate` does it, and then the step after it, several times over. Ratios and differences to the standard
model are those of the same turn, and medians (quartiles) over the turns. Bytes are counted, all but the peak. Weights
are random. A step copies the cache that it extends, under every scheme alike.
"""

import argparse
import copy
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor

from mhar_minimal import Config, Model, preset
from mhar_minimal.__main__ import arm_config, git_revision, processor
from mhar_minimal.depth import STREAMS
from mhar_minimal.model import INIT_STD, Cache, rope
from mhar_minimal.train import record, usable_device, versions

SCHEMES = ("standard", "full:1", "block:1", "block:8", "full:8")  # residual:heads
BASELINE = "standard", "eager"
UNITS = ("ms", "ratio", "ratio_quartiles", "us_per_site")  # of a decode step, of a prefill
BLOCKS = 8  # of Block AttnRes, at most; as in arXiv:2603.15031
STEPS = 10  # decode steps per turn
CPU_BYTES = 8 * 10**9  # what a laptop has to spare


def scheme_config(setting: str, scheme: str, impl: str, context: int) -> Config:
    """A preset under a scheme, long enough for a prompt of ``context`` tokens and the token after it."""
    block_size = -(-preset(setting).sublayers // BLOCKS)
    config = arm_config(scheme, argparse.Namespace(preset=setting, block_size=block_size))
    return replace(config, impl=impl if config.routed else "eager", context=context + 1)


def count_bytes(config: Config, batch: int, chunk: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of a prompt of T = ``config.context - 1`` tokens, computed ``chunk`` tokens at a time.

    ``cache_bytes`` are keys and values; ``source_bytes`` N·B·T·D elements, if the prompt is computed at once: N is
    2L + 1 under Full, blocks + 1 under Block, else the number of streams; ``working_bytes`` a chunk's logits and, at
    two float32 each, its attention scores, which a fused attention need not have.
    """
    with torch.device("meta"):
        parameters = Model(config).parameter_count()
    prompt, size, chunk = config.context - 1, dtype.itemsize, min(chunk, config.context - 1)
    blocks = -(-config.sublayers // (config.block_size or 1))  # of one sublayer under Full
    streams = STREAMS if config.residual == "hyper" else 1
    row = (blocks + 1 if config.routed else streams) * batch * config.dim * size
    return {
        "weight_bytes": parameters * size,
        "cache_bytes": 2 * config.layers * batch * prompt * config.kv_heads * config.head_dim * size,
        "source_bytes": row * prompt,
        "chunk_source_bytes": row * chunk,
        "working_bytes": batch * chunk * (config.vocab * size + config.attn_heads * prompt * 8),
    }


def memory_limit(on_gpu: bool) -> int:
    """Bytes that a combination may need by `count_bytes`; one that needs more is not timed."""
    return torch.cuda.mem_get_info()[1] if on_gpu else CPU_BYTES


def build(configs: dict[tuple, Config], device: str, dtype: torch.dtype) -> dict[tuple, Model]:
    """A model per configuration, all with one trunk; drawn on the device, matrices and queries as N(0, 0.02²)."""
    with torch.device("meta"):
        models = {arm: Model(config).to(dtype).requires_grad_(False) for arm, config in configs.items()}
    torch.manual_seed(0)
    trunk = ()
    for model in models.values():
        new = (model.depth if trunk else model).to_empty(device=device)
        for name, parameter in new.named_parameters():
            drawn = parameter.ndim > 1 or "query" in name
            parameter.normal_(std=INIT_STD) if drawn else parameter.fill_(1)
        trunk = model.embedding, model.layers, model.norm = trunk or (model.embedding, model.layers, model.norm)
        model.rotation = rope(model.config.context, model.config.head_dim, model.config.rope_theta).to(device)
    return models


@torch.inference_mode()
def one_turn(model: Model, tokens: Tensor, chunk: int, recorded: bool) -> tuple[float, float, int | None]:
    """Milliseconds of a decode step and of the prefill before it, and the peak of allocated bytes (None on a CPU).

    Of ``tokens``, int64 [B, T + 1], the last is the step's. Recorded, it is a CUDA graph of one length of the cache,
    good to time, not to serve.
    """
    on_gpu, newest = tokens.is_cuda, tokens[:, -1:]
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    cache = Cache(torch.zeros(len(tokens), dtype=torch.long, device=tokens.device))

    def prefill() -> None:
        for piece in tokens[:, :-1].split(chunk, dim=1):
            model(piece, cache)

    def step() -> None:
        again = copy.copy(cache)  # which stays as it is, so that the same step can be made again
        again.kept = dict(cache.kept)
        model(newest, again)

    def milliseconds(job: Callable, repeats: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            job()
        wait()
        return 1e3 * (time.perf_counter() - start) / repeats

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    prefill_ms = milliseconds(prefill, 1)
    step()
    decode_ms = milliseconds(record(step) if recorded else step, STEPS)
    return decode_ms, prefill_ms, torch.cuda.max_memory_allocated() if on_gpu else None


def measure(
    setting: str, context: int, batch: int, schemes: Sequence[str] = SCHEMES, impls: Sequence[str] = ("eager",),
    device: str = "cpu", chunk: int = 1024, recorded: bool = False, turns: int = 11,
) -> Iterator[dict]:  # fmt: skip
    """The rows of one combination: ``schemes``, the standard baseline among them, under every impl that applies.

    Every row has the same fields; what was not measured is None, and ``not_timed`` says why.

    Raises:
        ValueError: an argument that is not accepted; the message names it, and what is.
    """
    for name, value, least in (("context", context, 1), ("batch", batch, 1), ("chunk", chunk, 1), ("turns", turns, 2)):
        accept(value >= least, name, value, f"an integer of at least {least}")
    on_gpu = usable_device(device).type == "cuda"
    accept("standard" in schemes, "schemes", " ".join(schemes), "standard, the baseline, and any others")
    accept(on_gpu or not recorded, "recorded", f"True, device={device}", "False, or device=cuda, which has CUDA graphs")
    accept(on_gpu or set(impls) == {"eager"}, "impl", " ".join(impls), "eager, or device=cuda, which runs the kernels")
    every = [(scheme, scheme_config(setting, scheme, impl, context)) for impl in impls for scheme in schemes]
    configs = {(scheme, config.impl): config for scheme, config in every}  # what does not route is there once
    dtype, limit = torch.bfloat16 if on_gpu else torch.float32, memory_limit(on_gpu)
    counted = {arm: count_bytes(config, batch, chunk, dtype) for arm, config in configs.items()}
    need = {arm: sum(counted[arm].values()) - counted[arm]["source_bytes"] for arm in configs}
    models = build({arm: configs[arm] for arm in configs if need[arm] <= limit}, device, dtype)
    tokens = torch.randint(preset(setting).vocab, (batch, context + 1), device=device)
    found = {arm: [] for arm in models}
    for arm in (arm for _ in range(turns + 1) for arm in list(found)):
        try:
            found[arm].append(one_turn(models[arm], tokens, chunk, recorded))
        except torch.OutOfMemoryError:
            del found[arm]
    for arm, config in configs.items():
        row = {"setting": setting, "context": context, "batch": batch, "scheme": arm[0], "impl": arm[1]}
        row |= {"recorded": recorded, "chunk": chunk, **counted[arm], "peak_bytes": None, "not_timed": None}
        row |= {f"{what}_{unit}": None for what in ("decode", "prefill") for unit in UNITS}
        if arm in found and BASELINE in found:
            *times, peaks = zip(*found[arm][1:])  # the first turn warmed up
            row["peak_bytes"] = max(peaks) if on_gpu else None
            timed = ("decode",) if recorded else ("decode", "prefill")  # recording empties the allocator's cache
            for what, own, base in zip(timed, times, zip(*found[BASELINE][1:])):
                row[f"{what}_ms"] = round(median(own), 4)
                ratios, extra = zip(*((a / b, a - b) for a, b in zip(own, base)))
                row[f"{what}_ratio"] = round(median(ratios), 4)
                row[f"{what}_ratio_quartiles"] = [
                    round(quartile, 4) for quartile in quantiles(ratios, method="inclusive")[::2]
                ]
                row[f"{what}_us_per_site"] = round(1e3 * median(extra) / config.sites, 3)
        else:
            row["not_timed"] = f"needs {need[arm]:,} bytes of {limit:,}" if need[arm] > limit else "ran out of memory"
        yield row


def accept(good: bool, field: str, value: object, accepted: str) -> None:
    if not good:
        raise ValueError(f"{field}={value}; accepted: {accepted}")


def read_parts(out: Path, command: str) -> dict:
    """What a file holds already; nothing, if it is new.

    Raises:
        ValueError: it is not one of ours, or holds rows of the same command.
        OSError: it cannot be read, or its folder cannot be made.
    """
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        return {"parts": []}
    try:
        stored = json.loads(out.read_text(encoding="utf-8"))
        commands = [part["command"] for part in stored["parts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"out={out} is no file of this command ({error}); accepted: one, or a new one") from error
    accept(command not in commands, "out", str(out), "a file without rows of the same command; it has them already")
    return stored


def main() -> None:
    """Measure every combination and merge the rows into the JSON file."""
    parser = argparse.ArgumentParser("python -m mhar_minimal.inference", description=__doc__)
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    option = parser.add_argument
    option("--settings", nargs="+", default=["tiny"], help="presets")
    option("--context", nargs="+", type=int, default=[64, 128, 256, 512], help="tokens of the prompt")
    option("--batch", nargs="+", type=int, default=[1, 4], help="prompts at once")
    option("--schemes", nargs="+", default=list(SCHEMES), help="residual:heads; standard is the baseline")
    option("--impl", nargs="+", default=["eager"], help="of the routed schemes: eager; on a GPU also fused, two_phase")
    option("--device", default="cpu", help="cpu (float32) or cuda (bfloat16)")
    option("--chunk", type=int, default=1024, help="tokens of the prompt that are computed at once")
    option("--recorded", action="store_true", help="decode steps as replays of a CUDA graph; no prefill")
    option("--turns", type=int, default=11, help="after one to warm up")
    option("--revision", default=git_revision(), help="of the code")
    option("--out", default="runs/inference.json", help="JSON file; what it holds of other commands is kept")
    args = parser.parse_args()
    out = Path(args.out)
    part = {"command": shlex.join(["python", "-m", "mhar_minimal.inference", *sys.argv[1:]]), "git": args.revision}
    try:
        stored = read_parts(out, part["command"])
        name = torch.cuda.get_device_name() if usable_device(args.device).type == "cuda" else "cpu"
        part["machine"] = {"device": name, "system": platform.system(), "processor": processor()}
        part["machine"] |= {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
        part |= {"versions": versions(), "weights": "random, seed 0", "turns": args.turns, "rows": []}
        stored["parts"].append(part)
        for setting, context, batch in ((s, c, b) for s in args.settings for c in args.context for b in args.batch):
            common = args.schemes, args.impl, args.device, args.chunk, args.recorded, args.turns
            for row in measure(setting, context, batch, *common):
                print("  ".join(f"{key} {value}" for key, value in row.items() if value is not None), flush=True)
                part["rows"].append(row)
            out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")  # what was measured is kept
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
