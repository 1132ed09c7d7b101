"""Studies on a small text: plans and their refusals, runs that are train()'s, kills, failures, and the stored plans."""

import csv
import hashlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

import mhar_minimal.ablate as package_ablate
import mhar_minimal.train as package_train
from mhar_minimal import Config, Model
from mhar_minimal.__main__ import main
from mhar_minimal.ablate import Cell, Trial, read_plan, read_probes, read_study, step_seconds, worker_processes
from mhar_minimal.config import MIXINGS
from mhar_minimal.data import load_corpus, windows
from mhar_minimal.probe import findings
from mhar_minimal.stats import FLAT, last_drop
from mhar_minimal.train import CHECKPOINT, HISTORY, Recipe, evaluate, finished, load, metadata, train

RESULTS = Path(__file__).parent.parent / "notebooks" / "results"
TINY = {"dim": 16, "layers": 2, "attn_heads": 2, "kv_heads": 1, "ffn": 32, "context": 16}
SHORT = {"steps": 4, "batch_size": 2, "eval_every": 2, "eval_windows": 4, "checkpoint_every": 3}
MAIN = [{"residual": ["standard", "hyper"]}, {"residual": "full", "heads": [1, 4]}]
MODEL = ["residual", "heads", "block_size", "query_init", "impl", "mixing", "kv_heads"]
COLUMNS = ["grid", *MODEL, "corpus", "lr", "steps", "seed", "step", "tokens", "seconds", "train_loss", "val_loss"]


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    """A small corpus, and a cache of the test's own."""
    monkeypatch.setenv("MHAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"Paragraph {i}: {i * i} sheep, {i**3} goats and no wolf at all." for i in range(100)))
    return file


@pytest.fixture
def here(monkeypatch):
    """Runs in threads of this process: no start to wait for, and they can be watched."""
    in_threads(monkeypatch)


def in_threads(monkeypatch):
    monkeypatch.setattr(package_ablate, "ProcessPoolExecutor", lambda count, *spawning: ThreadPoolExecutor(count))


def inline(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline(inner)}" for key, inner in value.items()) + "}"
    return f"[{', '.join(map(inline, value))}]" if isinstance(value, list) else json.dumps(value)


def written(tmp_path, name="plan.toml", **changes):
    """A plan's file; a change to None leaves the key out."""
    plan = {
        "hypotheses": "Heads differ.",
        "metric": "The last evaluation.",
        "difference": "0.1 nats per byte.",
        "corpus": str(tmp_path / "text.txt"),
        "model": TINY,
        "recipe": SHORT,
        "grids": {"main": {"seeds": [0, 1], "cells": MAIN}},
    } | changes
    file = tmp_path / name
    file.write_text("".join(f"{key} = {inline(value)}\n" for key, value in plan.items() if value is not None))
    return file


def grid(cells, seeds=(0,)):
    return {"main": {"seeds": list(seeds), "cells": cells}}


def command(file, out, *more):
    return ["ablate", str(file), "--out", str(out), *more]


def table(out):
    """results.csv without its seconds."""
    with open(out / "results.csv", newline="") as file:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Plans


def test_a_plan_by_hand(tmp_path):
    cells = [
        {"residual": "standard"},
        {"residual": "full", "heads": [2, 4], "lr": [0.1, 0.2]},
        {"residual": "block", "block_size": 3, "query_init": "random", "corpus": "code", "steps": 9, "kv_heads": 2},
    ]
    plan = read_plan(written(tmp_path, grids=grid(cells, [5, 3]), model=TINY | {"preset": "tiny", "eps": 1e-5}))
    base, recipe, own = Config(**TINY, eps=1e-5), Recipe(**SHORT), str(tmp_path / "text.txt")
    block = replace(base, residual="block", block_size=3, query_init="random", kv_heads=2)
    wanted = [Trial(base, recipe, own)]
    for heads, lr in ((2, 0.1), (2, 0.2), (4, 0.1), (4, 0.2)):
        wanted.append(Trial(replace(base, residual="full", heads=heads), replace(recipe, lr=lr), own))
    wanted.append(Trial(block, replace(recipe, steps=9), "code"))
    seeds = [replace(trial, recipe=replace(trial.recipe, seed=seed)) for trial in wanted for seed in (5, 3)]
    assert plan.trials("main") == seeds
    assert (plan.at_once, plan.precision, plan.keep_weights) == (1, "highest", False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speed": 3}, r"plan .*plan\.toml has the unknown key speed; accepted: hypotheses, metric"),
        ({"metric": None}, r"plan .*plan\.toml lacks the key metric"),
        ({"model": {"width": 3}}, "model has the unknown key width; accepted: preset, residual"),
        ({"model": {"preset": "huge"}}, "preset='huge'; accepted: tiny"),
        ({"model": {"preset": ["tiny"]}}, r"preset=\['tiny'\]; accepted: a text"),
        ({"recipe": {"seed": 3}}, "recipe has the unknown key seed; accepted: steps"),
        ({"recipe": {"steps": 0}}, "grids.main: steps=0; accepted"),
        ({"grids": {"main": {"seeds": [0]}}}, "grids.main lacks the key cells"),
        ({"grids": {"main": {"seeds": [0], "cells": [{}], "steps": 3}}}, "grids.main has the unknown key steps"),
        ({"grids": {"main": 3}}, "grids.main=3; accepted: a table"),
        ({"grids": {'"a/b"': {}}}, "grids.a/b; accepted: letters"),
        ({"grids": grid([{"head": 3}])}, "grids.main.cells has the unknown key head; accepted: residual, heads"),
        ({"grids": grid([{"seed": 3}])}, "unknown key seed"),
        ({"grids": grid([{"residual": "full", "heads": 3}])}, "grids.main: heads=3 does not divide dim=16"),
        ({"grids": grid([{"heads": [1, 2]}])}, "grids.main: heads=2 with residual='standard'"),
        ({"grids": grid([{"residual": "full", "heads": [2, 2]}])}, "'heads': 2.*, seed=0, twice"),
        ({"grids": grid([{}], [])}, r"grids.main.seeds=\[\]; accepted: a list of integers"),
        ({"grids": grid([{}], [0, 0])}, "seed=0, twice"),
        ({"grids": grid([{}], [-1])}, "grids.main: seed=-1; accepted: an integer of at least 0"),
        ({"grids": grid([{}], [0.5])}, r"grids.main.seeds=\[0.5\]"),
        ({"grids": grid([3])}, r"grids.main.cells=\[3\]; accepted: a list of tables"),
        ({"grids": grid([{"corpus": 3}])}, "corpus=3; accepted: a text"),
        ({"grids": {}}, "grids={}; accepted: a table"),
        ({"hypotheses": ""}, "hypotheses=''; accepted: a text"),
        ({"at_once": 0}, "at_once=0; accepted: an integer of at least 1"),
        ({"at_once": True}, "at_once=True; accepted: an integer"),
        ({"keep_weights": 1}, "keep_weights=1; accepted: true or false"),
        ({"precision": "low"}, "precision='low'; accepted: highest, high, medium"),
        ({"corpus": "missing.txt"}, "missing.txt is no file"),
    ],
)
def test_a_plan_that_makes_no_study_is_refused_in_a_line(changes, says, tmp_path, capsys):
    file = written(tmp_path, **changes)
    assert main(command(file, tmp_path / "out")) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(says, line)
    assert not (tmp_path / "out").exists()


def test_other_refusals_of_the_command(tmp_path, capsys):
    file = written(tmp_path)
    (tmp_path / "broken.toml").write_text("metric = ")
    for arguments, says in (
        (command(tmp_path / "none.toml", tmp_path / "out"), "none.toml does not exist"),
        (command(tmp_path / "broken.toml", tmp_path / "out"), "broken.toml is not TOML"),
        (command(file, tmp_path / "out", "--only", "side"), "only='side'; accepted: main"),
        (command(file, tmp_path / "out", "--device", "nonsense"), "device='nonsense' cannot be used"),
    ):
        assert main(arguments) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert says in line
    assert not (tmp_path / "out").exists()


# Results


def test_every_run_is_that_of_train(here, tmp_path, capsys):
    out, corpus = tmp_path / "out", load_corpus(tmp_path / "text.txt")
    cells = [*MAIN, {"residual": "block", "block_size": 3, "query_init": "random", "lr": 0.01, "steps": 5}]
    file = written(tmp_path, grids=grid(cells, [1, 0]), keep_weights=True)
    assert main(command(file, out)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("wrote")
    with open(out / "results.csv", newline="") as opened:
        header, *lines = csv.reader(opened)
    assert header == COLUMNS
    wanted = []
    folders = sorted((out / "runs").iterdir())
    trials = read_plan(file).trials("main")
    for trial, folder in zip(trials, folders, strict=True):
        model, rows = train(trial.config, trial.recipe, corpus, progress=False)
        c, r = trial.config, trial.recipe
        block_size = c.block_size or ""
        about = ["main", c.residual, c.heads, block_size, c.query_init, "eager", "softmax", 1, trial.corpus]
        wanted += [list(map(str, [*about, r.lr, r.steps, r.seed, *row[:2], *row[3:]])) for row in rows]
        assert finished(folder)
        assert (folder / HISTORY).read_text().splitlines()[-1].startswith(f"{r.steps},")
        assert metadata(folder / CHECKPOINT)["peak_memory"] is None
        if r.seed == 1:  # the first seed of the grid
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), load(folder).parameters(), strict=True))
            assert (folder / CHECKPOINT).stat().st_size < 4.5 * model.parameter_count() + 20_000  # no optimizer
        else:
            assert (folder / CHECKPOINT).stat().st_size < 20_000
            with pytest.raises(ValueError, match=r"has no weights; accepted: one with them .*keep_weights = true"):
                load(folder)
    seconds = COLUMNS.index("seconds")
    assert [line[:seconds] + line[seconds + 1 :] for line in lines] == wanted
    assert all(float(line[seconds]) > 0 for line in lines if line[COLUMNS.index("step")] != "0")
    last = [float(line[-1]) for line in lines if line[COLUMNS.index("step")] == line[COLUMNS.index("steps")]][-2:]
    label = "residual=block, heads=1, block_size=3, query_init=random, lr=0.01, steps=5"
    mean, spread = sum(last) / 2, abs(last[0] - last[1]) / 2**0.5  # of two numbers
    assert printed[-2] == f"main: {label}: last validation loss {mean:.4f} ± {spread:.4f} (2 seeds)"
    assert len(printed) == 6


def test_arms_of_a_seed_share_trunk_and_batches(here, tmp_path):
    cells = [*MAIN, {"residual": "block", "block_size": 2}]
    file = written(tmp_path, grids=grid(cells, [0, 1]), model=TINY | {"eps": 1e-12})
    assert main(command(file, tmp_path / "out")) == 0
    start = [row for row in table(tmp_path / "out") if row["step"] == "0"]
    first = {seed: [row for row in start if row["seed"] == seed] for seed in "01"}
    assert [len(rows) for rows in first.values()] == [5, 5]
    for column in ("train_loss", "val_loss"):  # of the first batch; with zero queries all start as the same function
        a, b = ([float(row[column]) for row in first[seed]] for seed in "01")
        assert a == pytest.approx([a[0]] * 5, abs=1e-5)
        assert b == pytest.approx([b[0]] * 5, abs=1e-5)
        assert abs(a[0] - b[0]) > 1e-3
    ends = {row["val_loss"] for row in table(tmp_path / "out") if row["step"] == "4"}
    assert len(ends) == 10


def test_the_table_does_not_depend_on_the_order_of_the_runs(here, tmp_path, monkeypatch):
    order, carry_out = [], package_ablate.carry_out

    def slow_at_first(trial, *arguments):
        time.sleep(0.3 if not order else 0)
        order.append(trial)
        carry_out(trial, *arguments)

    monkeypatch.setattr(package_ablate, "carry_out", slow_at_first)
    tables = []
    for at_once in (1, 3):
        order.clear()
        file = written(tmp_path, f"{at_once}.toml", at_once=at_once, grids=grid([{}, *MAIN[1:]], [0, 1]))
        assert main(command(file, tmp_path / str(at_once))) == 0
        tables.append(table(tmp_path / str(at_once)))
        if at_once == 1:  # all cells of a seed, then the next seed
            assert [(t.recipe.seed, t.config.heads) for t in order] == [(s, h) for s in (0, 1) for h in (1, 1, 4)]
    assert tables[0] == tables[1]
    assert [(row["heads"], row["seed"]) for row in tables[0][::3]] == [(h, s) for h in "114" for s in "01"]


def test_processes_give_what_threads_give_bit_for_bit(tmp_path, monkeypatch):
    file = written(tmp_path, at_once=2, keep_weights=True)
    assert main(command(file, tmp_path / "processes")) == 0
    in_threads(monkeypatch)
    assert main(command(file, tmp_path / "threads")) == 0
    assert table(tmp_path / "processes") == table(tmp_path / "threads")
    for folder in (tmp_path / "threads" / "runs").glob("*seed0"):
        pairs = zip(load(folder).parameters(), load(tmp_path / "processes" / "runs" / folder.name).parameters())
        assert all(torch.equal(p, q) for p, q in pairs)
    assert not list(tmp_path.rglob("*.partial"))


def test_grids_one_at_a_time_share_what_they_have_in_common(here, tmp_path, monkeypatch):
    done, carry_out = [], package_ablate.carry_out
    monkeypatch.setattr(package_ablate, "carry_out", lambda t, *more: (done.append(t), carry_out(t, *more)))
    grids = grid(MAIN, [0, 1]) | {"side": {"seeds": [0], "cells": [{"residual": "full", "heads": [4, 8]}]}}
    file, out = written(tmp_path, grids=grids), tmp_path / "out"
    assert main(command(file, out, "--only", "side")) == 0
    assert [(row["grid"], row["heads"], row["step"]) for row in table(out)] == [
        *(("main", "4", step) for step in "024"),  # the one run that main has, too
        *(("side", heads, step) for heads in "48" for step in "024"),
    ]
    assert [trial.config.heads for trial in done] == [4, 8]
    assert main(command(file, out)) == 0
    assert len(done) == len(set(done)) == 8 + 1
    assert [row["grid"] for row in table(out)] == ["main"] * 24 + ["side"] * 6
    before = (out / "results.csv").read_bytes(), (out / "timing.csv").read_bytes()
    assert main(command(file, out)) == 0
    assert len(done) == 9
    assert before == ((out / "results.csv").read_bytes(), (out / "timing.csv").read_bytes())


def test_steps_are_timed_alone_once_per_model(here, tmp_path, monkeypatch):
    spans, lock = [], threading.Lock()

    def watched(name):
        function = getattr(package_ablate, name)

        def watching(*arguments):
            start = time.perf_counter()
            result = function(*arguments)
            with lock:
                spans.append((name, start, time.perf_counter()))
            return result

        monkeypatch.setattr(package_ablate, name, watching)

    watched("carry_out")
    watched("step_seconds")
    cells = [{"residual": "full", "heads": [1, 4], "lr": [0.001, 0.002]}]
    assert main(command(written(tmp_path, at_once=4, grids=grid(cells)), tmp_path / "out")) == 0
    assert [name for name, *_ in sorted(spans, key=lambda span: span[1])] == ["carry_out"] * 4 + ["step_seconds"] * 2
    for name, start, end in spans:
        if name == "step_seconds":
            assert [span for span in spans if span[1] < end and span[2] > start] == [(name, start, end)]
    with open(tmp_path / "out" / "timing.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == [*MODEL, "seconds_per_step"]
    assert [row[:-1] for row in rows] == [["full", heads, "", "zero", "eager", "softmax", "1"] for heads in "14"]
    assert all(0 < float(row[-1]) < 1 for row in rows)


def test_seconds_of_a_step_are_a_median_without_the_first(tmp_path, monkeypatch):
    now, drawn = [0.0], []

    def batch(*arguments):
        drawn.append(arguments)
        now[0] += len(drawn) if len(drawn) < 25 else 1000  # slower and slower, and a hiccup
        return package_batch(*arguments)

    package_batch = package_train.batch
    monkeypatch.setattr(package_train, "batch", batch)
    monkeypatch.setattr(package_train.time, "perf_counter", lambda: now[0])
    trial = Trial(Config(**TINY), Recipe(**SHORT), str(tmp_path / "text.txt"))
    assert step_seconds(trial, "cpu") == 15.5  # between the 15 and the 16 of 6, 7, ..., 24 and 1000
    assert len(drawn) == 25


def test_what_a_study_says_of_itself(here, tmp_path):
    file, out = written(tmp_path), tmp_path / "out"
    assert main(command(file, out)) == 0
    assert main(command(file, out, "--only", "main")) == 0
    assert (out / "plan.toml").read_bytes() == file.read_bytes()
    study = json.loads((out / "study.json").read_text())
    assert study["plan"] == hashlib.sha256(file.read_bytes()).hexdigest()
    corpus = load_corpus(tmp_path / "text.txt")
    assert study["corpora"] == {str(tmp_path / "text.txt"): {"python": None, "sha256": corpus.sha256}}
    first, second = study["sessions"]
    assert first["command"] == f"python -m mhar_minimal ablate {file} --out {out}"
    assert second["command"].endswith("--only main")
    assert first["machine"]["device"] == "cpu"
    assert first["versions"]["torch"] == torch.__version__
    assert first["git"] is None or len(first["git"]) == 40
    assert first["seconds"] > second["seconds"] >= 0


def test_what_is_read_back_is_what_was_trained(here, tmp_path):
    out, corpus = tmp_path / "out", load_corpus(tmp_path / "text.txt")
    cells = [*MAIN, {"residual": "block", "block_size": 3, "query_init": "random", "lr": 0.01, "steps": 5}]
    grids = grid(cells, [1, 0]) | {
        "side": {"seeds": [1], "cells": [{"residual": "full", "mixing": ["window", "softmax"]}]}
    }
    file = written(tmp_path, grids=grids)
    assert main(command(file, out)) == 0
    lines = [line.rpartition(",") for line in (out / "timing.csv").read_text().splitlines()]
    timed = [f"{model},{i}.5" for i, (model, _, _) in enumerate(lines[1:], 1)]
    (out / "timing.csv").write_text("\n".join(["".join(lines[0]), *timed]) + "\n")  # 1.5, 2.5, … s per step
    study, plan = read_study(out), read_plan(file)
    for name in ("main", "side"):
        trials = plan.trials(name)
        assert list(study[name]) == list(dict.fromkeys(trial.cell for trial in trials))
        assert [list(seeds) for seeds in study[name].values()] == [grids[name]["seeds"]] * len(study[name])
        for trial in trials:
            rows = train(trial.config, trial.recipe, corpus, progress=False)[1]
            read = study[name][trial.cell][trial.recipe.seed]
            assert [row._replace(seconds=0) for row in read] == [row._replace(seconds=0) for row in rows]
    seconds = [seeds[1][-1].seconds for seeds in study["main"].values()]
    assert seconds == [4 * 1.5, 4 * 2.5, 4 * 3.5, 4 * 4.5, 5 * 5.5]
    assert study["main"][Cell("full", 4, None, "zero", "eager", "softmax", 1, str(tmp_path / "text.txt"), 3e-3, 4)]

    (out / "timing.csv").write_text("\n".join(["".join(lines[0]), *timed[1:]]) + "\n")
    with pytest.raises(ValueError, match=r"timing.csv lacks \{'residual': 'standard'.*; accepted: a finished study"):
        read_study(out)


def test_the_first_seeds_of_routed_cells_are_probed(here, tmp_path):
    out, corpus = tmp_path / "out", load_corpus(tmp_path / "text.txt")
    cells = [*MAIN, {"residual": "block", "block_size": 3}, {"residual": "full", "mixing": "window"}]
    assert main(command(written(tmp_path, grids=grid(cells, [1, 0]), keep_weights=True), out)) == 0
    inputs, targets = windows(corpus.val, 16, TINY["context"])
    wanted = {}
    for trial in read_plan(out / "plan.toml").trials("main"):
        if trial.recipe.seed == 1 and trial.config.routed and trial.config.mixing == "softmax":
            model, _ = train(trial.config, trial.recipe, corpus, progress=False)
            wanted[trial.cell] = findings(model, inputs, targets)
    assert len(wanted) == 3
    assert read_probes(out) == wanted
    with open(out / "probes.csv", newline="") as file:
        assert {line["seed"] for line in csv.DictReader(file)} == {"1"}


def test_a_cell_that_grids_share_is_probed_once_and_with_its_first_grid(here, tmp_path):
    side = {"seeds": [0, 1], "cells": [{"residual": "full", "heads": [4, 8]}]}
    file = written(tmp_path, grids=grid(MAIN, [1, 0]) | {"side": side})
    probed = [("1", "1"), ("4", "1"), ("8", "0")]  # heads and seeds
    ways = {"all": [[]], "main": [["--only", "main"]], "side first": [["--only", "side"], []]}
    for name, calls in ways.items():
        assert [main(command(file, tmp_path / name, *more)) for more in calls] == [0] * len(calls)
        with open(tmp_path / name / "probes.csv", newline="") as opened:
            losses = [line for line in csv.DictReader(opened) if line["probe"] == "loss"]
        assert [(line["heads"], line["seed"]) for line in losses] == (probed[:2] if name == "main" else probed)
    with pytest.raises(KeyError):  # not an empty list, as of a model in which nothing was found
        read_probes(tmp_path / "all")[read_plan(file).trials("main")[0].cell]


def test_models_of_the_kernels_are_probed_in_eager_and_in_ieee_arithmetic(tmp_path, monkeypatch):
    corpus, config = load_corpus(tmp_path / "text.txt"), Config(**TINY, residual="full", heads=4, query_init="random")
    model, seen = Model(replace(config, impl="two_phase"), 3), []

    def watch(*arguments):
        seen.append(torch.get_float32_matmul_precision())
        return findings(*arguments)

    monkeypatch.setattr(package_ablate, "findings", watch)
    torch.set_float32_matmul_precision("high")
    try:
        found = package_ablate.probed(model, corpus)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == ["highest"]
    assert found == findings(Model(config, 3), *windows(corpus.val, 16, 16))
    assert model.config.impl == "two_phase"


def test_probes_that_fail_leave_the_precision_as_it_was(tmp_path, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(package_ablate, "findings", fail)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ZeroDivisionError):
            package_ablate.probed(Model(Config(**TINY, residual="full")), load_corpus(tmp_path / "text.txt"))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("keep", [True, False])
def test_weights_stay_if_wanted_and_a_study_that_is_done_stays_so(here, tmp_path, keep):
    file, out = written(tmp_path, grids=grid(MAIN[1:]), keep_weights=keep), tmp_path / "out"
    assert main(command(file, out)) == 0
    before = contents(out / "runs")
    for folder in (out / "runs").iterdir():
        with nullcontext() if keep else pytest.raises(ValueError, match="has no weights"):
            load(folder)
    assert main(command(file, out)) == 0
    assert contents(out / "runs") == before


def test_a_run_killed_between_its_last_step_and_its_probes_gets_them(here, tmp_path, monkeypatch):
    file, out = written(tmp_path, grids=grid(MAIN[1:])), tmp_path / "out"

    def killed(*_):
        raise OSError("pulled the plug")

    with monkeypatch.context() as patch:
        patch.setattr(package_ablate, "lighten", killed)
        assert main(command(file, out)) == 2
    heavy = [path.stat().st_size for path in sorted(out.rglob(CHECKPOINT))]
    assert main(command(file, out)) == 0
    assert all(path.stat().st_size < size / 2 for path, size in zip(sorted(out.rglob(CHECKPOINT)), heavy, strict=True))
    assert len(read_probes(out)) == len(heavy) == 2


# Other plans, and runs that fail


def test_another_plan_is_refused_by_its_first_difference(here, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(command(written(tmp_path), out)) == 0
    before = contents(out)
    for changes, says in (
        ({"metric": "another"}, "metric='another'"),
        ({"recipe": SHORT | {"lr": 0.1}}, "recipe.lr=0.1"),
        ({"grids": grid([MAIN[0], {"residual": "full", "heads": [1, 2]}], [0, 1])}, "grids.main.cells[1].heads[1]=2"),
        ({"grids": grid(MAIN)}, "grids.main.seeds[1]=None"),  # a seed less
        ({"at_once": 2}, "at_once=2"),
    ):
        capsys.readouterr()
        assert main(command(written(tmp_path, "other.toml", **changes), out)) == 2
        assert f"error: {says}, but {out / 'plan.toml'} has" in capsys.readouterr().err
    assert contents(out) == before
    commented = tmp_path / "commented.toml"
    commented.write_text("# a comment\n" + written(tmp_path).read_text())
    assert main(command(commented, out)) == 0
    assert (out / "plan.toml").read_bytes() == before[out / "plan.toml"]


def test_another_text_under_the_same_name_and_another_device_are_refused(here, tmp_path, text, capsys):
    file, out = written(tmp_path), tmp_path / "out"
    assert main(command(file, out)) == 0
    before = contents(out)
    assert main(command(file, out, "--device", "cuda")) == 2
    assert "machine device='cuda', but the run in" in capsys.readouterr().err
    text.write_text(text.read_text() + "\n\nOne more.")
    assert main(command(file, out)) == 2
    assert "corpus=text" in capsys.readouterr().err
    assert contents(out) == before


def test_a_run_that_diverges_is_reported_and_the_others_are_kept(here, tmp_path, capsys):
    cells = [{"residual": "full", "lr": [1e18, 0.01]}, {"residual": "standard"}]
    file, out = written(tmp_path, grids=grid(cells)), tmp_path / "out"
    for _ in range(2):  # again: it fails again, and nothing is lost
        assert main(command(file, out)) == 2
        err = capsys.readouterr().err
        assert "main-000-full-1-seed0 failed: FloatingPointError: loss=nan" in err
        assert err.splitlines()[-1].startswith("error: 1 runs failed: main-000-full-1-seed0; what was finished is kept")
        assert [(row["residual"], row["lr"], row["step"]) for row in table(out)] == [
            (residual, lr, step) for residual, lr in (("full", "0.01"), ("standard", "0.003")) for step in "024"
        ]
        assert len((out / "timing.csv").read_text().splitlines()) == 3


# Ends that nobody planned


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A plan of two runs, and its results."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "text.txt").write_text("\n\n".join(f"{i} foxes jump over {i * i} lazy dogs." for i in range(100)))
    recipe = SHORT | {"steps": 200, "eval_every": 50, "checkpoint_every": 20}
    file = written(folder, recipe=recipe, grids=grid(MAIN[1:]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MHAR_CACHE", str(folder / "cache"))
        in_threads(patch)
        assert main(command(file, folder / "out")) == 0
    return file, table(folder / "out")


def processes(pid):
    """A process's children, by Linux."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for processes")
@pytest.mark.parametrize(
    ("victim", "number", "code"),
    [("study", signal.SIGKILL, -9), ("study", signal.SIGINT, 130), ("worker", signal.SIGKILL, 2)],
)
def test_a_study_that_is_ended_in_the_middle_goes_on(victim, number, code, uninterrupted, tmp_path, monkeypatch, capfd):
    (file, whole), out = uninterrupted, tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-m", "mhar_minimal", *command(file, out)])
    first, second = (out / "runs" / name / CHECKPOINT for name in ("main-000-full-1-seed0", "main-001-full-4-seed0"))
    while not second.exists() and process.poll() is None:
        time.sleep(0.01)
    children = processes(process.pid)
    assert children
    os.kill(process.pid if victim == "study" else children[-1], number)
    assert process.wait() == code
    wait_until = time.monotonic() + 10
    while any(map(alive, children)) and time.monotonic() < wait_until:
        time.sleep(0.01)
    assert not any(map(alive, children))
    err = capfd.readouterr().err
    assert "Traceback" not in err
    if victim == "worker":
        assert "error: a worker was killed; what was finished is kept" in err
    assert metadata(first)["step"] == 200
    assert metadata(second)["step"] < 200
    if code != -9:
        assert {row["heads"] for row in table(out)} == {"1"}
    sessions = json.loads((out / "study.json").read_text())["sessions"]
    assert [session["seconds"] is None for session in sessions] == [code == -9]
    kept = first.read_bytes()

    in_threads(monkeypatch)
    assert main(command(file, out)) == 0
    assert first.read_bytes() == kept
    assert table(out) == whole
    assert {row["heads"] for row in table(out)} == {"1", "4"}
    assert len(json.loads((out / "study.json").read_text())["sessions"]) == 2


def test_workers_take_the_gpus_in_turn(monkeypatch):
    taken, order = [], multiprocessing.Value("i", 0)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for _ in range(5):
        package_ablate.take_gpu(2, order)
    assert taken == [0, 1, 0, 1, 0]


def test_workers_share_the_threads_and_have_the_precision(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    plan = read_plan(written(tmp_path, at_once=2, precision="high"))
    with worker_processes(plan, "cpu") as pool:
        assert pool.submit(torch.get_float32_matmul_precision).result() == "high"
        assert pool.submit(worker_threads).result() == 2
        assert pool.submit(determinism).result() == (0, None)
        assert pool.submit(determinism_on_a_gpu).result() == (2, ":4096:8")  # errors, not warnings


def worker_threads():
    return torch.get_num_threads()


def determinism():
    return torch.get_deterministic_debug_mode(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def determinism_on_a_gpu():
    package_ablate.take_gpu = lambda *_: None  # there need be none
    package_ablate.prepare_worker(1, "high", 1, None)
    return determinism()


# The stored plans


def test_the_plan_of_the_recorded_study_is_what_was_asked_for():
    plan = read_plan(RESULTS / "plan_h200.toml")
    main_row = plan.trials("main")
    assert len(plan.grids["main"]["seeds"]) >= 5
    schemes = {(t.config.residual, t.config.heads) for t in main_row}
    wanted = {("standard", 1), ("hyper", 1)} | {(r, h) for r in ("full", "block") for h in (1, 2, 4, 8, 16)}
    assert schemes == wanted
    assert len(main_row) == 12 * len(plan.grids["main"]["seeds"])
    with torch.device("meta"):
        model = Model(main_row[0].config)
    assert model.parameter_count() - model.embedding.weight.numel() >= 10_000_000
    rates = pilot_tail_means()
    assert set(rates) == wanted
    assert {len(of_arm) for of_arm in rates.values()} == {3}
    for t in main_row:
        of_arm = rates[t.config.residual, t.config.heads]
        assert t.recipe.lr == min(of_arm, key=of_arm.get)
    pilot = read_plan(RESULTS / "pilot" / "plan.toml").trials("pilot")
    assert not {t.recipe.seed for t in pilot} & {t.recipe.seed for t in main_row}
    assert {trunk(t.config) for t in pilot} == {trunk(t.config) for t in main_row}
    init = {(t.config.heads, t.config.query_init, t.corpus) for t in plan.trials("init")}
    assert init == {(h, i, c) for h in (1, 8) for i in ("zero", "random") for c in ("prose", "code")}
    kv = {(t.config.heads, t.config.kv_heads) for t in plan.trials("kv")}
    assert len(kv) == len({h for h, _ in kv}) * len({k for _, k in kv}) >= 6
    assert {t.config.mixing for t in plan.trials("variants")} == set(MIXINGS)
    assert {len(plan.grids[name]["seeds"]) for name in ("init", "kv", "variants")} == {3}
    for trial in main_row:  # evaluated on the last step, and often enough for a tail
        assert trial.recipe.steps % trial.recipe.eval_every == 0
        assert trial.recipe.steps >= 20 * trial.recipe.eval_every


def trunk(config):
    return replace(config, residual="standard", heads=1, block_size=None, impl="eager", autocast=False)


def pilot_tail_means():
    """By arm and rate, the mean of the pilot's last five validation losses."""
    losses = defaultdict(lambda: defaultdict(list))
    with open(RESULTS / "pilot" / "results.csv", newline="") as file:
        for line in csv.DictReader(file):
            losses[line["residual"], int(line["heads"])][float(line["lr"])].append(float(line["val_loss"]))
    assert {len(values) for of_arm in losses.values() for values in of_arm.values()} == {16}
    return {arm: {lr: fmean(values[-5:]) for lr, values in of_arm.items()} for arm, of_arm in losses.items()}


def test_the_plan_of_rates_is_the_recorded_studys_models_at_other_rates_and_seeds():
    plan, rates = read_plan(RESULTS / "plan_h200.toml"), read_plan(RESULTS / "plan_rates_h200.toml")
    assert (rates.model, rates.corpus, rates.precision) == (plan.model, plan.corpus, plan.precision)
    main_row, trials = plan.trials("main"), rates.trials("main")
    assert {t.config for t in trials} < {t.config for t in main_row}
    assert not {t.recipe.seed for t in trials} & {t.recipe.seed for t in main_row}
    arms = defaultdict(set)
    for t in trials:
        arms[t.config.residual, t.config.heads].add(t.recipe.lr)
        assert t.recipe.steps >= 20 * t.recipe.eval_every
    assert set(arms) == {(residual, heads) for residual in ("full", "block") for heads in (1, 8)}
    assert len({frozenset(of_arm) for of_arm in arms.values()}) == 1


def test_the_plan_for_a_cpu_is_small():
    plan = read_plan(RESULTS / "plan_cpu.toml")
    trials = [trial for name in plan.grids for trial in plan.trials(name)]
    assert {"standard", "hyper", "full", "block"} == {trial.config.residual for trial in trials}
    assert set(MIXINGS) == {trial.config.mixing for trial in trials}
    assert sum(trial.recipe.steps for trial in set(trials)) <= 10_000
    assert {trial.config.dim for trial in trials} == {64}


def test_the_shipped_models_are_those_of_their_plan():
    """Two small files that load, with the loss of their last evaluation on the text that lies beside them."""
    folder = RESULTS / "checkpoint"
    assert (folder / "plan.toml").read_bytes() == (RESULTS / "plan_checkpoint.toml").read_bytes()
    text = torch.tensor(list((folder / "held_out.bin").read_bytes())).view(64, 65)
    trials = read_plan(folder / "plan.toml").trials("main")
    assert len(trials) == len(list(folder.glob("*.safetensors"))) == 2
    for trial in trials:
        file = folder / f"full-{trial.config.heads}.safetensors"
        assert load(file).config == trial.config
        meta, rows = metadata(file), read_study(folder)["main"][trial.cell][trial.recipe.seed]
        assert Recipe(**meta["recipe"]) == trial.recipe
        assert meta["rows"][-1][-1] == rows[-1].val_loss
        assert evaluate(load(file), text[:, :-1], text[:, 1:]) == pytest.approx(rows[-1].val_loss, abs=1e-4)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 3e6


@pytest.mark.parametrize("name", ["checkpoint", "study_cpu", "study_h200", "rates_cpu", "rates_h200"])
def test_a_stored_study_is_whole_and_says_what_it_is(name):
    folder = RESULTS / name
    plan, about, study = (
        read_plan(folder / "plan.toml"),
        json.loads((folder / "study.json").read_text()),
        read_study(folder),
    )
    assert about["plan"] == hashlib.sha256((folder / "plan.toml").read_bytes()).hexdigest()
    assert set(about["corpora"]) == {trial.corpus for grid in plan.grids for trial in plan.trials(grid)}
    for grid in plan.grids:
        for trial in plan.trials(grid):
            assert study[grid][trial.cell][trial.recipe.seed][-1].step == trial.recipe.steps


def test_the_recorded_study_is_that_of_its_plan_in_one_form_of_the_code():
    """Its runs are of two revisions, whose models train alike, bit for bit; a remark says how that was seen."""
    folder = RESULTS / "study_h200"
    assert (folder / "plan.toml").read_bytes() == (RESULTS / "plan_h200.toml").read_bytes()
    about, study, probes = json.loads((folder / "study.json").read_text()), read_study(folder), read_probes(folder)
    assert {session["machine"]["device"] for session in about["sessions"]} == {"NVIDIA H200"}
    assert len({(*session["versions"].values(),) for session in about["sessions"]}) == 1
    main = [session for session in about["sessions"] if session["command"].endswith("main")]
    first, second = dict.fromkeys(session["git"] for session in about["sessions"])
    assert [session["git"] for session in main] == [first] * 4 + [second]
    [seen] = [session["remark"] for session in about["sessions"] if "bit for bit" in session.get("remark", "")]
    assert f"at {first[:7]}, bit for bit" in seen
    assert sum(session["seconds"] for session in main) < 25 * 60
    assert all(last_drop(rows) < FLAT for seeds in study["main"].values() for rows in seeds.values())
    assert set(probes) == {
        cell
        for cells in study.values()
        for cell in cells
        if cell.residual in ("full", "block") and cell.mixing == "softmax"
    }
    for seed in range(5):  # the same function at the start, up to ε, on the same batches
        starts = [seeds[seed][0].val_loss for seeds in study["main"].values()]
        assert max(starts) - min(starts) < 1e-3
