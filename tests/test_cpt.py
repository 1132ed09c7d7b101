"""Continued pre-training: two arms that differ in nothing but the branch, and a folder that says what happened."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mhar_minimal.cpt as package_cpt
from mhar_minimal import Config, Model
from mhar_minimal.ablate import read_plan, read_study
from mhar_minimal.convert import convert
from mhar_minimal.cpt import check_step_0, cpt, items, read_cpt
from mhar_minimal.data import batch, load_corpus, windows
from mhar_minimal.train import CHECKPOINT, Recipe, Run, evaluate, load, schedule, train

CONFIG = Config(dim=16, layers=2, attn_heads=2, kv_heads=1, ffn=32, context=16)
RECIPE = Recipe(steps=5, batch_size=4, lr=0.01, eval_every=2, eval_windows=6)
STEPS, SITES, SEEDS = [0, 2, 4, 5], 4, [3, 8]
RESULTS = Path(__file__).parent.parent / "notebooks" / "results"
SESSION = {"command": "python -m mhar_minimal cpt", "machine": {"system": "test"}, "git": None}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, a base trained on it, and a finished study."""
    folder = tmp_path_factory.mktemp("cpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MHAR_CACHE", str(folder / "cache"))
        text = folder / "text.txt"
        text.write_text("\n\n".join(f"Paragraph {i}: {i * i} sheep, {i**3} goats, no wolf at all." for i in range(99)))
        train(CONFIG, replace(RECIPE, steps=20), load_corpus(text), folder / "base", progress=False)
        study(folder, folder / "study")
        yield folder


def study(place, out, **changes):
    given = dict(recipe=RECIPE, seeds=SEEDS, block_size=3, heads=4, corpus=str(place / "text.txt"), device="cpu")
    cpt(place / "base", out, session=SESSION, **(given | changes))
    return out


def timeless(folder):
    """The files' bytes, without what depends on the clock."""
    rows = [line.split(",") for line in (folder / "results.csv").read_text().splitlines()]
    at = rows[0].index("seconds")
    about = json.loads((folder / "study.json").read_text())
    for session in about["sessions"]:
        del session["seconds"]
    files = [(folder / name).read_bytes() for name in ("gates.csv", "items.csv")]
    return [row[:at] + row[at + 1 :] for row in rows], about, files


def test_the_folder_says_what_was_done(place):
    found, text = read_cpt(place / "study"), load_corpus(place / "text.txt")
    files = {"results.csv", "gates.csv", "items.csv", "study.json"}
    assert {path.name for path in (place / "study").iterdir()} == files
    assert {arm: list(of) for arm, of in found.rows.items()} == {"plain": SEEDS, "mhar": SEEDS}
    for of in found.rows.values():
        for rows in of.values():
            assert [row.step for row in rows] == STEPS
            assert [row.tokens for row in rows] == [step * 4 * 16 for step in STEPS]
            assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    assert {arm: list(of) for arm, of in found.items.items()} == {"base": [None], "plain": SEEDS, "mhar": SEEDS}
    about, config = found.about, load(place / "base").config
    assert about["base"]["sha256"] == hashlib.sha256((place / "base" / CHECKPOINT).read_bytes()).hexdigest()
    assert Config(**about["base"]["config"]) == config == CONFIG
    assert about["base"]["corpus"]["sha256"] == text.sha256
    assert [known["sha256"] for known in about["corpora"].values()] == [text.sha256]
    assert Recipe(**about["recipe"]) == RECIPE
    assert (about["seeds"], about["block_size"], about["heads"]) == (SEEDS, 3, 4)
    # The branch: a query and a gain per site, a gate per site, and the null vector.
    assert about["parameters"]["mhar"] - about["parameters"]["plain"] == 2 * 16 * SITES + SITES + 16
    [session] = about["sessions"]
    assert (session["command"], session["git"]) == (SESSION["command"], None)
    assert session["machine"] == {"system": "test", "device": "cpu", "threads": 1}
    assert session["versions"]["torch"] == torch.__version__
    assert session["seconds"] > 0


def test_at_step_0_the_arms_are_the_base_to_the_last_bit(place):
    rows = read_cpt(place / "study").rows
    base, text = load(place / "base"), load_corpus(place / "text.txt")
    val_loss = evaluate(base, *windows(text.val, 6, 16), 4)
    for seed in SEEDS:
        assert rows["plain"][seed][0][3:] == rows["mhar"][seed][0][3:]
        assert rows["plain"][seed][0].val_loss == val_loss
        assert rows["plain"][seed][-1].val_loss != rows["mhar"][seed][-1].val_loss
    assert rows["plain"][3][0].train_loss != rows["plain"][8][0].train_loss  # the seed decides the batches


def test_both_arms_read_the_batches_of_their_seed(place, tmp_path, monkeypatch):
    read = []

    class Watched(Run):
        def batch(self):
            found = super().batch()
            read.append((hasattr(self.model, "mhar"), self.recipe.seed, self.step, found))
            return found

    monkeypatch.setattr(package_cpt, "Run", Watched)
    study(place, tmp_path / "study")
    train_text = load_corpus(place / "text.txt").train
    for seed in SEEDS:
        plain, mhar = ([line for line in read if line[:2] == (arm, seed)] for arm in (False, True))
        assert [step for *_, step, _ in plain] == [step for *_, step, _ in mhar] == [0, 0, 1, 2, 3, 4]
        for _, _, step, pair in plain + mhar:
            assert all(map(torch.equal, pair, batch(train_text, 4, 16, seed, step)))


@pytest.mark.parametrize("arm", ["plain", "mhar"])
def test_an_arm_is_what_a_loop_by_hand_gives(place, arm):
    """AdamW, the schedule and the clipping written out, from the same checkpoint."""
    text, model = load_corpus(place / "text.txt"), load(place / "base")
    if arm == "mhar":
        convert(model, 3, 4)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    losses, gates = [], [[0.0] * SITES]
    for step in range(5):
        inputs, targets = batch(text.train, 4, 16, 8, step)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * schedule(step, RECIPE)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        gates.append(model.mhar.gate.tolist() if arm == "mhar" else [])
    found, held_out = read_cpt(place / "study"), windows(text.val, 6, 16)
    rows = found.rows[arm][8]
    train_losses = [losses[0], (losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2, losses[4]]
    assert [row.train_loss for row in rows] == pytest.approx(train_losses, rel=1e-6)
    assert rows[-1].val_loss == pytest.approx(evaluate(model, *held_out), rel=1e-6)
    right = (model(held_out[0]).argmax(-1) == held_out[1]).sum(1)
    assert [item.right for item in found.items[arm][8]] == right.tolist()
    if arm == "mhar":
        for step in STEPS:
            assert found.gates[8][step] == pytest.approx(gates[step], rel=1e-4, abs=1e-9)


def test_gates_open_from_zero_and_that_of_site_0_last(place, tmp_path):
    gates = read_cpt(study(place, tmp_path / "study", recipe=replace(RECIPE, eval_every=1))).gates
    assert list(gates) == SEEDS
    for of in gates.values():
        assert list(of) == [0, 1, 2, 3, 4, 5]
        assert of[0] == [0.0] * SITES
        for step in (1, 2):  # site 0 has but the null vector, which moves in step 2 and is felt in step 3
            assert of[step][0] == 0
            assert all(of[step][1:])
        assert all(of[3])


def test_items_are_the_loss_window_by_window(place):
    found, text, base = read_cpt(place / "study"), load_corpus(place / "text.txt"), load(place / "base")
    inputs, targets = windows(text.val, 6, 16)
    for item, x, y in zip(found.items["base"][None], inputs, targets, strict=True):
        assert item.loss == pytest.approx(evaluate(base, x[None], y[None]), rel=1e-5)
        assert item.right == sum(base(x[None])[0, t].argmax() == y[t] for t in range(16))
    for arm in ("plain", "mhar"):
        for seed in SEEDS:
            judged = found.items[arm][seed]
            assert [item.window for item in judged] == list(range(6))
            assert math.fsum(item.loss for item in judged) / 6 == pytest.approx(found.rows[arm][seed][-1].val_loss)
            assert all(0 <= item.right <= 16 for item in judged)
    assert len({item.right for of in found.items.values() for judged in of.values() for item in judged}) > 3
    assert items(base, inputs, targets, 4) == pytest.approx(items(base, inputs, targets, 6))


def test_the_same_command_gives_the_same_bits(place, tmp_path):
    torch.manual_seed(5)  # nothing depends on it
    assert timeless(study(place, tmp_path / "study")) == timeless(place / "study")


def test_a_branch_that_changes_the_start_is_an_error(place, tmp_path, monkeypatch):
    def ajar(model, block_size, heads):
        convert(model, block_size, heads).mhar.gate.data.fill_(1e-3)
        model.mhar.null.data.fill_(1)

    monkeypatch.setattr(package_cpt, "convert", ajar)
    with pytest.raises(FloatingPointError, match=r"seed 3 has losses .* at step 0; accepted: the same in both arms"):
        study(place, tmp_path / "study")
    assert not (tmp_path / "study").exists()
    check_step_0([["plain", 0, 0, 0, 0.0, 1.0, 2.0], ["mhar", 0, 0, 0, 0.5, 1.0, 2.0]])  # seconds may differ


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seeds": []}, r"seeds=\[\]; accepted: at least one, each once"),
        ({"seeds": [1, 1]}, r"seeds=\[1, 1\]; accepted: at least one, each once"),
        ({"seeds": [0, -1]}, "seed=-1; accepted: an integer of at least 0"),
        ({"block_size": 5}, "block_size=5; accepted: an integer from 1 to 4"),
        ({"heads": 5}, "heads=5 does not divide the model's width 16"),
        ({"corpus": "missing.txt"}, "missing.txt"),
        ({"device": "nonsense"}, "device='nonsense' cannot be used"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(changes, says, place, tmp_path, monkeypatch):
    monkeypatch.setattr(package_cpt, "evaluations", None)  # would be an error to call
    with pytest.raises((ValueError, OSError), match=says):
        study(place, tmp_path / "study", **changes)
    assert not (tmp_path / "study").exists()


def test_checkpoints_that_cannot_be_converted_are_refused(place, tmp_path):
    given = (RECIPE, SEEDS, 3, 4, str(place / "text.txt"), "cpu", SESSION)
    with pytest.raises(FileNotFoundError, match="checkpoint missing does not exist"):
        cpt(Path("missing"), tmp_path / "study", *given)
    text = load_corpus(place / "text.txt")
    train(replace(CONFIG, residual="full"), replace(RECIPE, steps=1), text, tmp_path / "full", progress=False)
    with pytest.raises(ValueError, match="residual='full'; accepted: 'standard'"):
        cpt(tmp_path / "full", tmp_path / "study", *given)


def test_a_base_that_is_not_finished_is_refused(place, tmp_path, monkeypatch):
    """A killed run leaves a checkpoint of an earlier step, whose metadata name the steps that were planned."""
    advance, recipe = Run.advance, replace(RECIPE, checkpoint_every=1)
    monkeypatch.setattr(Run, "advance", lambda run: advance(run) if run.step < 4 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(CONFIG, recipe, load_corpus(place / "text.txt"), tmp_path / "base", progress=False)
    with pytest.raises(ValueError, match="is at step 4 of 5; accepted: a finished run"):
        study(tmp_path, tmp_path / "out", corpus=str(place / "text.txt"))


def test_a_folder_with_anything_in_it_is_refused(place, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty; accepted: a folder that is new or empty"):
        study(place, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(FileExistsError):
        study(place, place / "study")


@pytest.mark.parametrize(
    ("name", "base", "changes", "lr", "seeds", "heads"),
    [
        ("cpt_cpu", "base", dict(steps=400, eval_every=50), 3e-3, [0, 1, 2, 3, 4], 4),
        ("cpt_h200", "base_h200", dict(steps=300, eval_every=25), 9e-4, [0, 1, 2], 8),
    ],
)
def test_a_stored_study_is_whole_and_starts_from_the_base_it_names(name, base, changes, lr, seeds, heads):
    found, recipe = read_cpt(RESULTS / name), Recipe(batch_size=16, lr=lr, eval_windows=256, **changes)
    about, steps = found.about, list(range(0, recipe.steps + 1, recipe.eval_every))
    assert (about["seeds"], about["block_size"], about["heads"]) == (seeds, 4, heads)
    assert Recipe(**about["recipe"]) == recipe
    for seed in seeds:
        plain, mhar = found.rows["plain"][seed], found.rows["mhar"][seed]
        assert [row.step for row in plain] == [row.step for row in mhar] == list(found.gates[seed]) == steps
        assert plain[0][3:] == mhar[0][3:]  # both losses, to the last bit
        assert plain[0].val_loss == found.rows["plain"][seeds[0]][0].val_loss  # one base
        assert not any(found.gates[seed][0])
        assert all(found.gates[seed][steps[-1]])
    assert {arm: list(of) for arm, of in found.items.items()} == {"base": [None], "plain": seeds, "mhar": seeds}
    for arm, of in found.items.items():
        for seed, judged in of.items():
            assert [item.window for item in judged] == list(range(256))
            row = found.rows["plain"][seeds[0]][0] if arm == "base" else found.rows[arm][seed][-1]
            assert math.fsum(item.loss for item in judged) / 256 == pytest.approx(row.val_loss, abs=1e-5)

    folder = RESULTS / base
    assert (folder / "plan.toml").read_bytes() == (RESULTS / f"plan_{base}.toml").read_bytes()
    [trial] = read_plan(folder / "plan.toml").trials("main")
    [row] = read_study(folder)["main"][trial.cell][trial.recipe.seed][-1:]
    assert row.step == trial.recipe.steps
    made = json.loads((folder / "study.json").read_text())["corpora"][trial.corpus]
    config, trained = Config(**about["base"]["config"]), Recipe(**about["base"]["recipe"])
    assert (config, trained) == (trial.config, trial.recipe)
    if name == "cpt_cpu":  # the other base is too large to store
        weights = (folder / "standard.safetensors").read_bytes()
        assert about["base"]["sha256"] == hashlib.sha256(weights).hexdigest()
    assert about["base"]["corpus"] == {"sha256": made["sha256"], "name": trial.corpus}
    [corpus] = about["corpora"]
    assert corpus != trial.corpus
    model = Model(config)
    assert about["parameters"]["plain"] == model.parameter_count()
    assert about["parameters"]["mhar"] == convert(model, 4, heads).parameter_count()
