"""Ablation studies: a plan in TOML, paired runs, one table. ``python -m mhar_minimal ablate PLAN``.

The plan says why and what: see `Plan`. A study's folder holds

- ``plan.toml``: the plan; another one is refused there.
- ``results.csv``: a line per evaluation of every finished run, in the plan's order whatever the order of the runs.
- ``timing.csv``: seconds of one training step, each model measured alone on the machine after the runs; those in
  results.csv were measured while up to ``at_once`` runs shared it.
- ``probes.csv``: what `mhar_minimal.probe.findings` sees in the model of a cell's first seed, on 16 windows spread
  over the validation text; of the cells with softmax over depth.
- ``study.json``: the plan's SHA-256, the corpora, and of every session the command, machine, versions, git revision
  and seconds (null after a kill).
- ``runs/``: the runs. A finished one keeps its history and metadata, without its weights unless the plan wants them.

A study that was stopped, even killed, goes on with the same command: finished runs are kept, the others resume from
their checkpoints. On one machine a cell and a seed make the same numbers, bit for bit, seconds apart.
"""

import csv
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import tomllib
from collections import defaultdict, namedtuple
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from itertools import pairwise, product
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from statistics import fmean, median, stdev

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from mhar_minimal.config import Config, preset
from mhar_minimal.data import Corpus, load_corpus, windows
from mhar_minimal.model import Model
from mhar_minimal.probe import Finding, findings
from mhar_minimal.train import (
    CHECKPOINT,
    REMEDY,
    Recipe,
    Row,
    Run,
    check_run,
    finished,
    metadata,
    train,
    usable_device,
    versions,
    write_rows,
    written_whole,
)

MODEL = ("residual", "heads", "block_size", "query_init", "impl", "mixing", "kv_heads")
CELL = (*MODEL, "corpus", "lr", "steps")  # what may differ between the cells of a grid
Cell = namedtuple("Cell", CELL)
CONFIG_FIELDS, RECIPE_FIELDS = ([field.name for field in fields(kind)] for kind in (Config, Recipe))
WARM_UP, TIMED = 5, 20  # steps
PROBED = 16  # windows of the validation text
KINDS = {str: "a text", int: "an integer of at least 1", dict: "a table", bool: "true or false"}


@dataclass(frozen=True)
class Trial:
    """One run of a study."""

    config: Config
    recipe: Recipe
    corpus: str

    @property
    def cell(self) -> Cell:
        known = asdict(self.config) | asdict(self.recipe) | {"corpus": self.corpus}
        return Cell(*(known[name] for name in CELL))


@dataclass(frozen=True)
class Plan:
    """A study before its results: the keys of the TOML file.

    A grid is a table of ``seeds`` and ``cells``. A cell is a table of fields of `CELL`; a list as a value stands for
    one cell per entry, several lists for their product. What a cell does not name is the plan's. A run that several
    grids have in common is done once.

    Raises:
        ValueError: a key or a value that makes no study; the message names it and what would be accepted.
    """

    hypotheses: str
    metric: str  # how a run becomes one number
    difference: str  # which difference would count
    corpus: str  # prose, code, or a path
    model: dict  # "preset", and the fields of Config that differ from it
    recipe: dict  # fields of Recipe, but for the seed
    grids: dict
    at_once: int = 1  # runs at a time, each in a process of its own; with several GPUs, on every one
    precision: str = "highest"  # of float32 matrix products: highest, high (TF32 on a GPU) or medium, PyTorch's words
    keep_weights: bool = False  # of the first seed of every cell

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not field.type or value in ("", {}):
                raise ValueError(f"{field.name}={value!r}; accepted: {KINDS[field.type]}")
        if self.at_once < 1:
            raise ValueError(f"at_once={self.at_once}; accepted: {KINDS[int]}")
        if self.precision not in ("highest", "high", "medium"):
            raise ValueError(f"precision={self.precision!r}; accepted: highest, high, medium")
        check_keys("model", self.model, ["preset", *CONFIG_FIELDS])
        check_keys("recipe", self.recipe, [name for name in RECIPE_FIELDS if name != "seed"])
        for name, grid in self.grids.items():
            self.check_grid(f"grids.{name}", name, grid)

    def check_grid(self, where: str, name: str, grid: dict) -> None:
        if not name.isidentifier():
            raise ValueError(f"{where}; accepted: letters, digits and _, it names folders")
        check_keys(where, grid, ("seeds", "cells"), required=("seeds", "cells"))
        for key, kind, what in (("seeds", int, "integers"), ("cells", dict, "tables")):
            values = grid[key]
            if type(values) is not list or not values or any(type(value) is not kind for value in values):
                raise ValueError(f"{where}.{key}={values!r}; accepted: a list of {what}")
        for cell in grid["cells"]:
            check_keys(f"{where}.cells", cell, CELL)
        try:
            trials = self.trials(name)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        for trial in trials:
            if trials.count(trial) > 1:
                raise ValueError(
                    f"{where} has {dict(zip(CELL, trial.cell))}, seed={trial.recipe.seed}, twice; accepted: once"
                )

    def trials(self, grid: str) -> list[Trial]:
        """The runs of a grid, cell by cell, and of a cell seed by seed."""
        return [self.trial(cell, s) for cell in expand(self.grids[grid]["cells"]) for s in self.grids[grid]["seeds"]]

    def trial(self, cell: dict, seed: int) -> Trial:
        given = {"preset": "tiny", "corpus": self.corpus} | self.model | self.recipe | cell
        for name in ("preset", "corpus"):
            if type(given[name]) is not str:
                raise ValueError(f"{name}={given[name]!r}; accepted: {KINDS[str]}")
        config = preset(given["preset"], **{name: given[name] for name in CONFIG_FIELDS if name in given})
        recipe = Recipe(**{name: given[name] for name in RECIPE_FIELDS if name in given}, seed=seed)
        return Trial(config, recipe, given["corpus"])


def expand(cells: list[dict]) -> Iterator[dict]:
    for cell in cells:
        choices = [value if isinstance(value, list) else [value] for value in cell.values()]
        yield from (dict(zip(cell, chosen)) for chosen in product(*choices))


def check_keys(where: str, table: dict, accepted: Collection[str], required: Collection[str] = ()) -> None:
    if type(table) is not dict:
        raise ValueError(f"{where}={table!r}; accepted: a table")
    for key in table:
        if key not in accepted:
            raise ValueError(f"{where} has the unknown key {key}; accepted: {', '.join(accepted)}")
    for key in required:
        if key not in table:
            raise ValueError(f"{where} lacks the key {key}")


def read_toml(file: Path) -> dict:
    if not file.is_file():
        raise FileNotFoundError(f"plan {file} does not exist; accepted: a TOML file")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of the syntax, or of the encoding
        raise ValueError(f"plan {file} is not TOML ({error})") from error


def read_plan(file: Path) -> Plan:
    """The plan of a TOML file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not TOML, or makes no study.
    """
    table = read_toml(file)
    required = [field.name for field in fields(Plan) if field.default is MISSING]
    check_keys(f"plan {file}", table, [field.name for field in fields(Plan)], required)
    return Plan(**table)


def check_same_plan(file: Path, kept: Path) -> None:
    """Raise ValueError, naming the first difference, where a study's folder keeps another plan; comments may differ."""
    wanted, had = (dict(leaves(read_toml(plan))) for plan in (file, kept))
    for name in wanted | had:
        if wanted.get(name) != had.get(name):
            raise ValueError(f"{name}={wanted.get(name)!r}, but {kept} has {had.get(name)!r}; {REMEDY}")


def leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Everything in nested tables and lists that is neither, with its place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from leaves(inner, f"{name}[{i}]")
    else:
        yield name, value


def ablate(plan_file: Path, out: Path, device: str, only: str | None, session: dict) -> None:
    """Carry out a study, or what is missing of it; what its folder then holds is said above.

    Args:
        plan_file: the plan.
        out: the study's folder.
        device: cpu or cuda.
        only: one grid of the plan; None for all.
        session: what study.json keeps of this call, beside the versions and the seconds it took.

    Raises:
        ValueError: a plan that makes no study, or not the one in ``out``; runs that failed, after all others.
        OSError: a process was killed.
        KeyboardInterrupt: after Ctrl-C; runs in progress keep their last checkpoint.
    """
    plan, start = read_plan(plan_file), time.perf_counter()
    if only not in (None, *plan.grids):
        raise ValueError(f"only={only!r}; accepted: {', '.join(plan.grids)}")
    kept = out / "plan.toml"
    if kept.exists():
        check_same_plan(plan_file, kept)
    folders = run_folders(plan, out)
    corpora = {name: load_corpus(name) for name in sorted({trial.corpus for trial in folders})}
    for trial, folder in folders.items():
        check_run(folder, trial.config, trial.recipe, corpora[trial.corpus], device)
    machine = session["machine"] | {"device": device_name(device), "threads": torch.get_num_threads()}

    out.mkdir(parents=True, exist_ok=True)
    if not kept.exists():
        with written_whole(kept) as file:
            file.write_bytes(plan_file.read_bytes())
    study = {
        "plan": hashlib.sha256(kept.read_bytes()).hexdigest(),
        "corpora": {name: {"python": c.python, "sha256": c.sha256} for name, c in corpora.items()},
        "sessions": json.loads((out / "study.json").read_text())["sessions"] if (out / "study.json").exists() else [],
    }
    study["sessions"].append(session | {"machine": machine, "versions": versions(), "seconds": None})  # yet: if killed
    write_study(study, out)
    try:
        with worker_processes(plan, device) as pool:
            failed = train_all(pool, plan, [only] if only else list(plan.grids), folders, device)
            time_steps(pool, folders, out, device)
    finally:
        write_results(plan, folders, out)
        study["sessions"][-1]["seconds"] = round(time.perf_counter() - start, 1)
        write_study(study, out)
    if failed:
        raise ValueError(f"{len(failed)} runs failed: {', '.join(failed)}; what was finished is kept")
    for line in summary(plan, folders):
        print(line)
    print(f"wrote {out / 'results'}.csv, timing.csv, probes.csv and study.json")


def summary(plan: Plan, folders: dict[Trial, Path]) -> Iterator[str]:
    """A line per cell of the finished runs: in what it differs from others of its grid, and its last losses."""
    for grid in plan.grids:
        losses = defaultdict(list)
        for trial in plan.trials(grid):
            if finished(folders[trial]):
                losses[trial.cell].append(Row(*metadata(folders[trial] / CHECKPOINT)["rows"][-1]).val_loss)
        named = [name for i, name in enumerate(CELL) if len({cell[i] for cell in losses}) > 1]
        for cell, of_cell in losses.items():
            label = ", ".join(f"{name}={getattr(cell, name)}" for name in named if getattr(cell, name) is not None)
            spread = f" ± {stdev(of_cell):.4f}" if len(of_cell) > 1 else ""
            of = f"{len(of_cell)} seed" + "s" * (len(of_cell) > 1)
            yield f"{grid}: {label or cell.residual}: last validation loss {fmean(of_cell):.4f}{spread} ({of})"


def run_folders(plan: Plan, out: Path) -> dict[Trial, Path]:
    """The folder of every run of a plan, whichever grid is to be done."""
    folders = {}
    for grid in plan.grids:
        for i, trial in enumerate(plan.trials(grid)):
            name = f"{grid}-{i:03}-{trial.config.residual}-{trial.config.heads}-seed{trial.recipe.seed}"
            folders.setdefault(trial, out / "runs" / name)
    return folders


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if usable_device(device).type == "cuda" else "cpu"


@contextmanager
def worker_processes(plan: Plan, device: str) -> Iterator[ProcessPoolExecutor]:
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    workers = plan.at_once * max(1, gpus)
    threads = max(1, torch.get_num_threads() // workers)
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    order = spawn.Value("i", 0)
    pool = ProcessPoolExecutor(workers, spawn, prepare_worker, (threads, plan.precision, gpus, order))
    try:
        yield pool
    except BaseException as error:
        for worker in multiprocessing.active_children():  # or leaving would wait for their runs
            worker.terminate()
        if isinstance(error, BrokenProcessPool):
            raise OSError("a worker was killed; what was finished is kept, the same command goes on") from error
        raise
    finally:
        pool.shutdown()


def train_all(
    pool: ProcessPoolExecutor, plan: Plan, grids: list[str], folders: dict[Trial, Path], device: str
) -> list[str]:
    """Do the runs of some grids, all cells of a seed before the next seed; return the names of those that failed."""
    wanted, firsts = {}, first_trials(plan)  # wanted: a dict for its order
    for grid in grids:
        seeds = plan.grids[grid]["seeds"]
        wanted |= dict.fromkeys(sorted(plan.trials(grid), key=lambda trial: seeds.index(trial.recipe.seed)))
    futures, failed = {}, []
    for trial in wanted:
        if not carried_out(folders[trial]):
            future = pool.submit(carry_out, trial, folders[trial], device, plan, trial in firsts)
            futures[future] = folders[trial].name
    with tqdm(total=len(wanted), initial=len(wanted) - len(futures), unit="run") as bar:
        for future in as_completed(futures):
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                raise error
            if error:
                failed.append(futures[future])
                bar.write(f"{futures[future]} failed: {type(error).__name__}: {error}", file=sys.stderr)
            bar.update()
    return failed


def first_trials(plan: Plan) -> set[Trial]:
    """Of every cell the run of the first seed, in the first grid that has the cell, whichever is done first."""
    first = {}
    for grid in plan.grids:
        for trial in plan.trials(grid):
            first.setdefault(trial.cell, trial)
    return set(first.values())


def time_steps(pool: ProcessPoolExecutor, folders: dict[Trial, Path], out: Path, device: str) -> None:
    """Measure every model of a finished run that timing.csv does not have yet, one at a time."""
    file, seconds = out / "timing.csv", {}
    if file.exists():
        with open(file, newline="") as opened:
            seconds = {tuple(row[:-1]): row[-1] for row in csv.reader(opened)}
    rows = {}
    for trial, folder in folders.items():
        model = tuple("" if value is None else str(value) for value in trial.cell[: len(MODEL)])
        if model not in seconds and finished(folder):
            seconds[model] = pool.submit(step_seconds, trial, device).result()
        if model in seconds:
            rows[model] = [*model, seconds[model]]
    with written_whole(file) as part:
        write_rows(part, [[*MODEL, "seconds_per_step"], *rows.values()], "w")


def write_results(plan: Plan, folders: dict[Trial, Path], out: Path) -> None:
    rows = [["grid", *CELL, "seed", *Row._fields]]
    for grid in plan.grids:
        for trial in plan.trials(grid):
            if finished(folders[trial]):
                about = [grid, *trial.cell, trial.recipe.seed]
                rows += [about + row for row in metadata(folders[trial] / CHECKPOINT)["rows"]]
    with written_whole(out / "results.csv") as file:
        write_rows(file, rows, "w")
    probes = [[*CELL, "seed", *Finding._fields]]
    for trial, folder in folders.items():
        if finished(folder):
            about = [*trial.cell, trial.recipe.seed]
            probes += [about + finding for finding in metadata(folder / CHECKPOINT).get("probes", [])]
    with written_whole(out / "probes.csv") as file:
        write_rows(file, probes, "w")


def read_study(out: Path) -> dict[str, dict[Cell, dict[int, list[Row]]]]:
    """What `ablate` has written: by grid, cell and seed the rows of a run, as `mhar_minimal.stats` takes them.

    Their seconds are steps × the seconds of a step timed alone, of timing.csv: those of results.csv were measured while
    runs shared the machine.

    Args:
        out: the study's folder, of which results.csv and timing.csv are read.

    Raises:
        FileNotFoundError: one of them is missing.
        ValueError: timing.csv lacks a model of results.csv; the study is not finished.
    """
    study = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with open(out / "timing.csv", newline="") as file:
        timing = {tuple(line[:-1]): float(line[-1]) for line in csv.reader(file) if line[:-1] != list(MODEL)}
    with open(out / "results.csv", newline="") as file:
        for line in csv.DictReader(file):
            model = tuple(line[name] for name in MODEL)
            if model not in timing:
                raise ValueError(f"{out / 'timing.csv'} lacks {dict(zip(MODEL, model))}; accepted: a finished study")
            cell = Cell(*(parsed(name, line[name]) for name in CELL))
            row = Row(*(int(line[name]) if name in ("step", "tokens") else float(line[name]) for name in Row._fields))
            row = row._replace(seconds=row.step * timing[model])
            study[line["grid"]][cell][int(line["seed"])].append(row)
    return {grid: {cell: dict(seeds) for cell, seeds in cells.items()} for grid, cells in study.items()}


def read_probes(out: Path) -> dict[Cell, list[Finding]]:
    """What `ablate` has written of the models it probed, by cell.

    Raises:
        FileNotFoundError: the study has no probes.csv.
    """
    probes = defaultdict(list)
    with open(out / "probes.csv", newline="") as file:
        for line in csv.DictReader(file):
            at = (int(line[name]) if line[name] else None for name in ("site", "head"))
            cell = Cell(*(parsed(name, line[name]) for name in CELL))
            probes[cell].append(Finding(line["probe"], *at, float(line["value"])))
    return dict(probes)


def parsed(name: str, text: str) -> str | int | float | None:
    """A value of a cell, as it was before it was written."""
    if name in ("heads", "block_size", "kv_heads", "steps"):
        return int(text) if text else None
    return float(text) if name == "lr" else text


def write_study(study: dict, out: Path) -> None:
    with written_whole(out / "study.json") as file:
        file.write_text(json.dumps(study, indent=1) + "\n")


# What the worker processes do

cached_corpus = cache(load_corpus)


def prepare_worker(threads: int, precision: str, gpus: int, order: Synchronized) -> None:
    if gpus:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what determinism asks for, before the GPU is used
        torch.use_deterministic_algorithms(True)  # warning only, attention would stay as it is
        torch.utils.deterministic.fill_uninitialized_memory = False
        take_gpu(gpus, order)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which then ends its workers
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def take_gpu(gpus: int, order: Synchronized) -> None:
    """Make the next GPU in turn this worker's; ``order`` counts the workers that came before."""
    with order.get_lock():
        torch.cuda.set_device(order.value % gpus)
        order.value += 1


def end_with_parent() -> None:
    """Otherwise a worker would outlive a parent that was killed, and train in a folder that the next one works in."""
    multiprocessing.parent_process().join()
    os._exit(1)


def carry_out(trial: Trial, folder: Path, device: str, plan: Plan, first: bool) -> None:
    resume = (folder / CHECKPOINT).exists()
    corpus = cached_corpus(trial.corpus)
    model, _ = train(trial.config, trial.recipe, corpus, folder, device, progress=False, resume=resume)
    probes = probed(model, corpus) if first and trial.config.routed and trial.config.mixing == "softmax" else []
    lighten(folder / CHECKPOINT, plan.keep_weights and first, probes)


def probed(model: Model, corpus: Corpus) -> list[Finding]:
    """What the probes see in a model: routing in eager PyTorch and IEEE float32, sublayers as they were trained."""
    eager = Model(replace(model.config, impl="eager"))
    eager.load_state_dict(model.state_dict())
    device, precision = model.embedding.weight.device, torch.get_float32_matmul_precision()
    inputs, targets = (side.to(device) for side in windows(corpus.val, PROBED, model.config.context))
    torch.set_float32_matmul_precision("highest")
    try:
        return findings(eager.to(device), inputs, targets)
    finally:
        torch.set_float32_matmul_precision(precision)


def carried_out(folder: Path) -> bool:
    """Whether a run is finished and its checkpoint lightened."""
    if not finished(folder):
        return False
    with safe_open(folder / CHECKPOINT, "pt") as checkpoint:
        return not any(name.startswith("exp_avg.") for name in checkpoint.keys())  # noqa: SIM118


def lighten(file: Path, keep_weights: bool, probes: list[Finding]) -> None:
    """Drop from a finished run's checkpoint what only resuming needs, and the weights too unless they are kept.

    And its peak memory, which is that of a process that has trained other runs before. Add what the probes found.
    """
    with safe_open(file, "pt") as checkpoint:
        meta = checkpoint.metadata() | {"peak_memory": "null", "probes": json.dumps(probes)}
        names = [name for name in checkpoint.keys() if keep_weights and name.startswith("model.")]  # noqa: SIM118
        tensors = {name: checkpoint.get_tensor(name).clone() for name in names}  # the file is about to be replaced
    with written_whole(file) as part:
        save_file(tensors, part, meta)


def step_seconds(trial: Trial, device: str) -> float:
    """Median seconds of a training step, the first ones left out."""
    recipe = replace(trial.recipe, steps=WARM_UP + TIMED)
    run = Run(trial.config, recipe, cached_corpus(trial.corpus), device)
    at = [0.0]
    for _ in range(recipe.steps):
        run.advance()
        at.append(run.seconds)
    return median(b - a for a, b in pairwise(at[WARM_UP:]))
