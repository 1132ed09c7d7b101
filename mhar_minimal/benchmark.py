"""What the course costs on this machine: ``python -m mhar_minimal.benchmark``.

Ratios are taken within one run, in turns, and medians over the turns. Nothing here is a test: a busy machine is slow.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from mhar_minimal import Config, plot, preset
from mhar_minimal.__main__ import git_revision
from mhar_minimal.data import load_corpus
from mhar_minimal.train import Recipe, Run, metadata
from mhar_minimal.widgets import slider

SCHEMES = {
    "standard": preset("tiny"),
    "full H=1": preset("tiny", residual="full"),
    "full H=4": preset("tiny", residual="full", heads=4),
    "full H=8": preset("tiny", residual="full", heads=8),
    "block H=4 S=4": preset("tiny", residual="block", heads=4, block_size=4),
    "hyper": preset("tiny", residual="hyper"),
}


def training_steps(turns: int = 40) -> dict[str, float]:
    """Median seconds of one training step of the tiny preset, the schemes taking turns."""
    corpus = load_corpus()
    runs = {name: Run(config, Recipe(steps=turns), corpus, "cpu") for name, config in SCHEMES.items()}
    return {name: median(s) for name, s in in_turns({n: run.advance for n, run in runs.items()}, turns).items()}


def in_turns(jobs: dict[str, Callable], turns: int) -> dict[str, list[float]]:
    """Seconds of every call, after one warm-up turn."""
    seconds = {name: [] for name in jobs}
    for turn in range(turns):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def resident_bytes(config: Config) -> int:
    """Peak resident memory of a process that trains 20 steps."""
    with tempfile.TemporaryDirectory() as folder:
        options = [] if config.block_size is None else [f"--block-size={config.block_size}"]
        options += [f"--residual={config.residual}", f"--heads={config.heads}", "--steps=20", f"--out={folder}/run"]
        command = [sys.executable, "-m", "mhar_minimal", "train", *options]
        subprocess.run(command, check=True, capture_output=True)
        return metadata(Path(folder, "run", "checkpoint.safetensors"))["peak_memory"]


def callback_seconds() -> dict[str, float]:
    """Median time from a moved slider to the new image, for the largest figures of the notebooks."""
    weights = {heads: torch.rand(heads, 13, 13).tril() for heads in (4, 8)}
    moved = {
        "depth weights, up to 8 heads": slider(lambda h: plot.depth_weights(weights[h]), [4, 8], "H"),
        "routing diagram, 12 sublayers": slider(lambda s: plot.routing_diagram(12, s), [4, 6], "S"),
    }

    def move(box) -> Callable:
        control = box.children[0]
        return lambda: control.set_trait("index", 1 - control.index)

    return {name: median(s) for name, s in in_turns({n: move(box) for n, box in moved.items()}, 21).items()}


def import_seconds(repeats: int = 5) -> float:
    """Median time that ``import mhar_minimal`` takes once torch is imported."""
    code = "import time, torch; t = time.perf_counter(); import mhar_minimal; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(repeats)]
    return median(float(run.stdout) for run in runs)


def compare_seconds() -> float:
    """How long ``python -m mhar_minimal compare`` takes with its defaults."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, "-m", "mhar_minimal", "compare", f"--out={folder}/compare"]
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - start


def main() -> None:
    """Print a table of figures beside their goals, and write it as JSON."""
    parser = argparse.ArgumentParser("python -m mhar_minimal.benchmark", description=__doc__)
    parser.add_argument("--out", help="write the figures, the machine and the versions to this JSON file")
    out = parser.parse_args().out
    steps = training_steps()
    rows = {f"training step, {name} / standard": (s / steps["standard"], "") for name, s in steps.items()}
    rows["training step, full H=4 / standard"] = (steps["full H=4"] / steps["standard"], "≤ 1.6")
    rows["training step, standard (ms)"] = (1e3 * steps["standard"], "")
    rows["peak resident memory, full H=4 (GB)"] = (resident_bytes(SCHEMES["full H=4"]) / 1e9, "≤ 1.5")
    for name, seconds in callback_seconds().items():
        rows[f"slider callback, {name} (ms)"] = (1e3 * seconds, "≤ 100")
    rows["import mhar_minimal after torch (s)"] = (import_seconds(), "≤ 0.3")
    rows["compare with its defaults (s)"] = (compare_seconds(), "≤ 240")
    for name, (value, goal) in rows.items():
        print(f"{name:58}{value:8.2f}  {goal}")
    if out:
        about = {
            "command": f"python -m mhar_minimal.benchmark --out {out}",
            "machine": {
                "system": platform.system(),
                "processor": platform.machine(),
                "cores": os.cpu_count(),
                "threads": torch.get_num_threads(),
            },
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "git": git_revision(),
            "corpus": load_corpus().sha256,
            "seed": 0,
            "figures": {name: {"value": round(value, 3), "goal": goal} for name, (value, goal) in rows.items()},
        }
        Path(out).write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
