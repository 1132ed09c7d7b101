"""Continued pre-training of a trained model: as it is, and with delta MHAR. ``python -m mhar_minimal cpt CHECKPOINT``.

A model that is converted and trained on has two reasons to get better, the branch and the training. So every seed has
two arms from one checkpoint: "plain", the model as it is, and "mhar", the converted one. The seed decides the batches;
both arms see the same ones, under the same schedule and optimizer. Base to plain is what training does, plain to mhar
what the branch adds. The folder of such a study holds

- ``results.csv``: a line per evaluation of every run; at step 0 both arms have the loss of the base, to the last bit.
- ``gates.csv``: the gates of the mhar arm at the same steps, a column per site.
- ``items.csv``: a line per held-out window of the untouched base ("base", without a seed) and of every finished arm:
  its loss, and how many of its next bytes are predicted right.
- ``study.json``: the base, the corpus, the settings, command, machine, versions, git revision and seconds.
"""

import csv
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from mhar_minimal.ablate import device_name, write_study
from mhar_minimal.convert import convert
from mhar_minimal.data import load_corpus, windows
from mhar_minimal.model import Model
from mhar_minimal.train import CHECKPOINT, Recipe, Row, Run, load, metadata, versions, write_rows, written_whole

ARMS = ("plain", "mhar")


class Item(NamedTuple):
    """How a model does on one held-out window."""

    window: int
    loss: float  # nats per byte
    right: int  # next bytes that are the likeliest to the model


class Study(NamedTuple):
    """What `cpt` has written."""

    about: dict  # study.json
    rows: dict[str, dict[int, list[Row]]]  # by arm and seed
    gates: dict[int, dict[int, list[float]]]  # by seed and step, a number per site
    items: dict[str, dict[int | None, list[Item]]]  # by arm, "base" included, and seed


def cpt(
    checkpoint: Path,
    out: Path,
    recipe: Recipe,
    seeds: list[int],
    block_size: int,
    heads: int,
    corpus: str,
    device: str,
    session: dict,
) -> None:
    """Train both arms for every seed, and write the folder that is described above.

    On one machine, on its CPU, at one ``torch.get_num_threads()``, the same arguments write the same numbers, seconds
    apart. Nothing is written before the last run has ended.

    Args:
        checkpoint: a run's folder or file; a model of the standard scheme.
        out: the folder, new or empty.
        recipe: of every run; its seed is not used.
        seeds: of the batches, one pair of runs each.
        block_size: sublayers per block.
        heads: number of depth heads H; divides the model's width.
        corpus: name or path, of `load_corpus`.
        device: cpu or cuda.
        session: what study.json keeps of this call, beside the versions and the seconds it took.

    Raises:
        ValueError: seeds that are none or not different, a run that is not finished, or arguments that make no run or
            no conversion.
        FileExistsError: ``out`` is not empty.
        FileNotFoundError: there is no checkpoint.
        FloatingPointError: a loss is no longer finite, or at step 0 the arms differ.
    """
    start = time.perf_counter()
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={seeds}; accepted: at least one, each once")
    recipes = [replace(recipe, seed=seed) for seed in seeds]
    file = checkpoint / CHECKPOINT if checkpoint.is_dir() else checkpoint
    base, about = load(file, device), metadata(file)
    if about["step"] < about["recipe"]["steps"]:
        raise ValueError(
            f"checkpoint={file} is at step {about['step']} of {about['recipe']['steps']}; accepted: a finished run"
        )
    convert(load(file), block_size, heads)  # what is wrong is said now, not after the first plain run
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        found = "not empty" if out.is_dir() else "a file"
        raise FileExistsError(f"out={out} is {found}; accepted: a folder that is new or empty")
    text = load_corpus(corpus)
    held_out = windows(text.val, recipe.eval_windows, base.config.context)

    results, gates, judged, parameters = [], [], [["base", "", *line] for line in items(base, *held_out)], {}
    with tqdm(total=len(recipes) * len(ARMS) * recipe.steps, unit="step") as bar:
        for one in recipes:
            for arm in ARMS:
                model = load(file)
                if arm == "mhar":
                    convert(model, block_size, heads)
                run = Run(base.config, one, text, device, model)
                for row in evaluations(run, bar):
                    results.append([arm, one.seed, *row])
                    if arm == "mhar":
                        gates.append([one.seed, row.step, *model.mhar.gate.tolist()])
                judged += [[arm, one.seed, *line] for line in items(model, *held_out)]
                parameters[arm] = model.parameter_count()
            check_step_0(results)

    study = {
        "base": {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        | {key: about[key] for key in ("config", "recipe", "corpus")},
        "corpora": {corpus: {"python": text.python, "sha256": text.sha256}},
        "recipe": {key: value for key, value in asdict(recipe).items() if key not in ("seed", "checkpoint_every")},
        "seeds": seeds,
        "block_size": block_size,
        "heads": heads,
        "parameters": parameters,
    }
    machine = session["machine"] | {"device": device_name(device), "threads": torch.get_num_threads()}
    ended = {"machine": machine, "versions": versions(), "seconds": round(time.perf_counter() - start, 1)}
    sites = [f"site_{site}" for site in range(base.config.sublayers)]
    out.mkdir(parents=True, exist_ok=True)
    for name, header, lines in (
        ("results", ["arm", "seed", *Row._fields], results),
        ("gates", ["seed", "step", *sites], gates),
        ("items", ["arm", "seed", *Item._fields], judged),
    ):
        with written_whole(out / f"{name}.csv") as part:
            write_rows(part, [header, *lines], "w")
    write_study(study | {"sessions": [session | ended]}, out)
    print(f"wrote {out / 'results'}.csv, gates.csv, items.csv and study.json")


def evaluations(run: Run, bar: tqdm) -> Iterator[Row]:
    """Train to the last step, and hand out every row on the way."""
    yield run.record()
    while run.step < run.recipe.steps:
        run.advance()
        bar.update()
        if run.step == run.recipe.steps or run.step % run.recipe.eval_every == 0:
            yield run.record()


def check_step_0(results: list[list]) -> None:
    """Raise FloatingPointError where the two arms of a seed do not start with the same two losses, to the last bit."""
    at_start = defaultdict(set)
    for _, seed, *row in results:
        if row[0] == 0:
            at_start[seed].add(tuple(row[-2:]))
    for seed, losses in at_start.items():
        if len(losses) > 1:
            raise FloatingPointError(f"seed {seed} has losses {losses} at step 0; accepted: the same in both arms")


@torch.inference_mode()
def items(model: Model, inputs: Tensor, targets: Tensor, batch_size: int = Recipe.batch_size) -> list[Item]:
    """Every window [N, T] (int64) judged by itself, ``batch_size`` windows at a time."""
    device, found = model.embedding.weight.device, []
    for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
        logits, y = model(x.to(device)), y.to(device)
        losses = F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)
        right = (logits.argmax(-1) == y).sum(1)
        found += zip(losses.tolist(), right.tolist())
    return [Item(window, *values) for window, values in enumerate(found)]


def read_cpt(folder: Path) -> Study:
    """What `cpt` has written there.

    Raises:
        FileNotFoundError: a file is missing.
    """
    rows, gates, judged = defaultdict(dict), defaultdict(dict), defaultdict(dict)
    for line in read_table(folder / "results.csv"):
        row = Row(*(int(line[name]) if name in ("step", "tokens") else float(line[name]) for name in Row._fields))
        rows[line["arm"]].setdefault(int(line["seed"]), []).append(row)
    for line in read_table(folder / "gates.csv"):
        seed, step, *values = line.values()
        gates[int(seed)][int(step)] = [float(value) for value in values]
    for line in read_table(folder / "items.csv"):
        seed = int(line["seed"]) if line["seed"] else None
        item = Item(int(line["window"]), float(line["loss"]), int(line["right"]))
        judged[line["arm"]].setdefault(seed, []).append(item)
    return Study(json.loads((folder / "study.json").read_text()), dict(rows), dict(gates), dict(judged))


def read_table(file: Path) -> list[dict[str, str]]:
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))
