"""Training: the recipe against its formulas, runs that stop and go on bit for bit, and refusals that lose nothing."""

import csv
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import mhar_minimal.train as package_train
from mhar_minimal import Config, Model
from mhar_minimal.data import Corpus, batch, encode, windows
from mhar_minimal.train import (
    CHECKPOINT,
    HISTORY,
    Recipe,
    Run,
    check_settings,
    evaluate,
    load,
    metadata,
    parameter_groups,
    schedule,
    train,
)

TINY = Config(dim=16, layers=2, attn_heads=2, kv_heads=1, ffn=32, context=16)
SCHEMES = {
    "standard": TINY,
    "full": replace(TINY, residual="full", heads=4, query_init="random"),
    "block": replace(TINY, residual="block", heads=2, block_size=3),
    "hyper": replace(TINY, residual="hyper"),
}
# Checkpoints and rows fall on different steps, so that one is always ahead of the other.
RECIPE = Recipe(steps=11, batch_size=4, seed=3, eval_every=3, eval_windows=5, checkpoint_every=4)


def corpus(word="fox"):
    text = encode("".join(f"{word} {i} jumps over {i * i % 97} lazy dogs. " for i in range(200)))
    train_part, val = text[:4000], text[4000:]
    return Corpus("test", train_part, val, 1, 1, None, Path("nowhere"), hashlib.sha256(text.numpy()).hexdigest())


def quiet(config, recipe, folder=None, text=None, **more):
    torch.manual_seed(99 if more.get("resume") else 0)  # a resumed run must bring its generator's state back
    return train(config, recipe, text or corpus(), folder, progress=False, **more)


def table(folder):
    """history.csv without its seconds, as text."""
    with open(folder / HISTORY, newline="") as file:
        return [[cell for name, cell in row.items() if name != "seconds"] for row in csv.DictReader(file)]


def assert_same_run(folder, other):
    """Weights, optimizer, generator and history of two finished runs, bit for bit."""
    a, b = load_file(folder / CHECKPOINT), load_file(other / CHECKPOINT)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert any(name.startswith("exp_avg_sq.") for name in a)
    assert table(folder) == table(other)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# The recipe


def test_schedule_by_hand():
    r = Recipe(steps=41)  # warm-up: ceil(2.05) = 3 steps; 38 steps of cosine
    assert [schedule(s, r) for s in (0, 1, 2)] == pytest.approx([1 / 3, 2 / 3, 1], abs=1e-12)
    assert schedule(21, r) == pytest.approx(0.55, abs=1e-12)  # halfway down, (41 - 3) / 2 steps after the peak
    assert schedule(40, r) == pytest.approx(0.1, abs=1e-12)
    to_zero = Recipe(steps=41, floor=0.0)
    assert [schedule(s, to_zero) for s in (2, 21, 40)] == pytest.approx([1, 0.5, 0], abs=1e-12)
    assert schedule(40, Recipe(steps=41, floor=1)) == 1
    assert schedule(19, Recipe(steps=400)) == 1 > schedule(18, Recipe(steps=400))  # exactly 5 %
    assert schedule(0, Recipe(steps=1)) == 1


def test_the_optimizer_has_the_rates_of_the_schedule_down_to_the_floor():
    run, rates = Run(TINY, replace(RECIPE, steps=3, lr=0.01, floor=0.25), corpus(), "cpu"), []
    for _ in range(3):
        run.advance()
        rates.append([group["lr"] for group in run.optimizer.param_groups])
    assert rates == [pytest.approx([rate, rate]) for rate in (0.01, 0.00625, 0.0025)]  # the peak, half way, the floor


@pytest.mark.parametrize("name", SCHEMES)
def test_exactly_the_trunks_matrices_decay(name):
    model = Model(SCHEMES[name])
    of_layer = [f"attn.{m}" for m in ("q", "k", "v", "out")] + [f"mlp.{m}" for m in ("gate", "up", "down")]
    wanted = {"embedding.weight", *(f"layers.{i}.{m}.weight" for i in range(2) for m in of_layer)}
    names = {id(p): n for n, p in model.named_parameters()}
    decay, keep = ({names[id(p)] for p in group["params"]} for group in parameter_groups(model))
    assert decay == wanted
    assert decay | keep == set(names.values())
    assert [group["weight_decay"] for group in parameter_groups(model)] == [0.1, 0]


def test_two_steps_are_adamw_by_its_formula():
    # The first update alone would not see the clipping: Adam's first step does not depend on the gradient's scale.
    config, recipe, text = SCHEMES["full"], replace(RECIPE, steps=40, lr=0.01), corpus()
    run, model = Run(config, recipe, text, "cpu"), Model(config, seed=recipe.seed)
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in model.named_parameters()}
    norms = []
    for step, lr in ((0, 0.005), (1, 0.01)):  # warm-up over 2 of 40 steps
        x, y = batch(text.train, recipe.batch_size, config.context, recipe.seed, step)
        loss = F.cross_entropy(model(x).transpose(1, 2), y)
        grads = dict(zip(moments, torch.autograd.grad(loss, list(model.parameters()))))
        norms.append(math.sqrt(sum(g.double().square().sum() for g in grads.values())))
        for (name, p), g in zip(model.named_parameters(), grads.values()):
            g = g * min(1, 1 / norms[-1])
            m, v = moments[name]
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
            moments[name] = m, v
            hat_m, hat_v = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.95 ** (step + 1))
            decay = 0.1 if p.ndim == 2 and "depth" not in name else 0
            p.data = p.data * (1 - lr * decay) - lr * hat_m / (hat_v.sqrt() + 1e-8)
        assert run.advance() == pytest.approx(loss.item(), rel=1e-6)
    assert norms[0] < 1 < 1.05 < norms[1]  # the second is clipped, and by enough to be seen
    for (name, p), q in zip(model.named_parameters(), run.model.parameters()):
        torch.testing.assert_close(q, p, rtol=0, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_a_step_replays_what_was_recorded_with_its_batch_where_the_recording_reads():
    """What a GPU does, by a stand-in for the graph."""
    run, read = Run(TINY, RECIPE, corpus(), "cpu"), []
    places = run.inputs, run.targets
    run.replay = lambda: (read.append([place.clone() for place in places]), run.differentiate())
    for step in range(2):
        run.advance()
        assert all(map(torch.equal, read[step], batch(run.corpus.train, 4, 16, 3, step)))


def test_schemes_at_one_seed_share_trunk_and_batches(monkeypatch):
    seen, starts = {}, {}

    def spy(*arguments):
        drawn = batch(*arguments)
        seen.setdefault(name, []).append(drawn)
        return drawn

    monkeypatch.setattr(package_train, "batch", spy)
    for name, config in SCHEMES.items():
        starts[name] = Run(config, RECIPE, corpus(), "cpu").model.state_dict()
        quiet(config, replace(RECIPE, steps=3))
        trunk = {n: p for n, p in starts["standard"].items() if not n.startswith("depth.")}
        assert all(torch.equal(starts[name][n], p) for n, p in trunk.items())
        assert len(seen[name]) == 4  # one for the row at step 0, three to train on
        for (x, y), (u, v) in zip(seen["standard"], seen[name], strict=True):
            assert torch.equal(x, u)
            assert torch.equal(y, v)
    assert not torch.equal(seen["full"][1][0], seen["full"][2][0])
    other = Run(TINY, replace(RECIPE, seed=4), corpus(), "cpu")
    assert not torch.equal(other.model.embedding.weight, starts["standard"]["embedding.weight"])
    assert not torch.equal(other.batch()[0], seen["standard"][0][0])


@pytest.mark.parametrize("name", SCHEMES)
def test_the_loss_starts_at_chance_and_falls(name):
    _, rows = quiet(SCHEMES[name], replace(RECIPE, steps=40, eval_every=20))
    assert [row.step for row in rows] == [0, 20, 40]
    assert rows[0].val_loss == pytest.approx(math.log(256), abs=0.02)
    assert rows[0].train_loss == pytest.approx(math.log(256), abs=0.02)
    assert rows[2].val_loss < rows[1].val_loss < rows[0].val_loss - 0.2
    assert rows[2].train_loss < rows[1].train_loss < rows[0].train_loss
    assert rows[2].tokens == 40 * 4 * 16


def test_evaluate_is_the_mean_over_all_bytes_whatever_the_chunks():
    model = Model(TINY, seed=1)
    x, y = windows(corpus().val, 5, 16)
    logp = model.double()(x).log_softmax(-1)
    wanted = -logp.gather(-1, y.unsqueeze(-1)).mean().item()
    model.float()
    for batch_size in (1, 2, 5, 16):  # 2 leaves a chunk of one window
        assert evaluate(model, x, y, batch_size) == pytest.approx(wanted, rel=1e-6)


def test_train_loss_is_the_mean_since_the_last_row():
    _, every = quiet(TINY, replace(RECIPE, eval_every=1))
    _, third = quiet(TINY, RECIPE)
    assert [row.step for row in third] == [0, 3, 6, 9, 11]
    losses = [row.train_loss for row in every[1:]]
    wanted = [sum(losses[a:b]) / (b - a) for a, b in ((0, 3), (3, 6), (6, 9), (9, 11))]
    assert [row.train_loss for row in third[1:]] == pytest.approx(wanted, rel=1e-12)
    assert third[0].train_loss == pytest.approx(losses[0], rel=1e-6)  # the first batch, before any step


def test_seconds_are_those_of_training_steps(monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(package_train.time, "perf_counter", lambda: now[0])

    def taking(seconds, function):
        def slow(*arguments, **more):
            now[0] += seconds
            return function(*arguments, **more)

        return slow

    for name, seconds in (("batch", 1), ("evaluate", 100), ("save_file", 1000)):
        monkeypatch.setattr(package_train, name, taking(seconds, getattr(package_train, name)))
    crashed(monkeypatch, 7, TINY, tmp_path)
    _, rows = quiet(TINY, RECIPE, tmp_path, resume=True)
    assert [row.seconds for row in rows] == [0, 3, 6, 9, 11]


# Stopping and going on


class Crash(Exception):
    pass


def stop_at(monkeypatch, step, action):
    """Do something in the middle of the training step that follows ``step`` finished ones."""
    clip = package_train.nn.utils.clip_grad_norm_
    count = [0]

    def clipping(*arguments):
        count[0] += 1
        if count[0] == step + 1:
            action()
        return clip(*arguments)

    monkeypatch.setattr(package_train.nn.utils, "clip_grad_norm_", clipping)


def crash():
    raise Crash


def crashed(monkeypatch, step, config, folder):
    """A run that crashes in the step that follows ``step`` finished ones."""
    with monkeypatch.context() as patch:
        stop_at(patch, step, crash)
        with pytest.raises(Crash):
            quiet(config, RECIPE, folder)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_crash_between_checkpoints_loses_not_a_bit(name, tmp_path, monkeypatch):
    config = SCHEMES[name]
    model, rows = quiet(config, RECIPE, tmp_path / "whole")
    crashed(monkeypatch, 7, config, tmp_path / "parts")
    assert metadata(tmp_path / "parts" / CHECKPOINT)["step"] == 4
    assert [row[0] for row in table(tmp_path / "parts")] == ["0", "3", "6"]  # 6 is to be dropped, and to come again
    resumed, more = quiet(config, RECIPE, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters()))
    assert [row._replace(seconds=0) for row in rows] == [row._replace(seconds=0) for row in more]


def test_a_crash_before_the_first_checkpoint_or_after_the_last(tmp_path, monkeypatch):
    quiet(TINY, RECIPE, tmp_path / "whole")
    crashed(monkeypatch, 0, TINY, tmp_path / "parts")
    (tmp_path / "parts" / HISTORY).unlink()  # the checkpoint knows it
    quiet(TINY, RECIPE, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    before = contents(tmp_path / "parts")
    quiet(TINY, RECIPE, tmp_path / "parts", resume=True)  # finished: nothing to do
    assert contents(tmp_path / "parts") == before


@pytest.mark.parametrize("step", [5, 8, 10])  # between checkpoints, on one, and the last step of all
def test_ctrl_c_in_a_step_waits_for_its_end(step, tmp_path, monkeypatch):
    quiet(TINY, RECIPE, tmp_path / "whole")
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        stop_at(patch, step, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            quiet(TINY, RECIPE, tmp_path / "parts")
    assert signal.getsignal(signal.SIGINT) is handler
    assert metadata(tmp_path / "parts" / CHECKPOINT)["step"] == step + 1
    quiet(TINY, RECIPE, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


CHILD = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_train as t
clip, count = t.package_train.nn.utils.clip_grad_norm_, [0]
def clipping(*arguments):
    count[0] += 1
    if count[0] == 8:
        os.kill(os.getpid(), {number})
    return clip(*arguments)
t.package_train.nn.utils.clip_grad_norm_ = clipping
t.torch.manual_seed(0)
t.torch.set_num_threads({threads})
t.quiet(t.TINY, t.RECIPE, t.Path({folder!r}))
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(("number", "saved"), [(signal.SIGKILL, 4), (signal.SIGINT, 8)])
def test_a_process_that_is_killed_can_be_resumed(number, saved, tmp_path):
    quiet(TINY, RECIPE, tmp_path / "whole")
    parts = tmp_path / "parts"
    code = CHILD.format(
        tests=str(Path(__file__).parent), number=int(number), folder=str(parts), threads=torch.get_num_threads()
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if number == signal.SIGKILL:
        assert child.returncode == -number, child.stderr
    else:  # the exit code after it differs between versions of Python
        assert child.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert metadata(parts / CHECKPOINT)["step"] == saved
    quiet(TINY, RECIPE, parts, resume=True)
    assert_same_run(tmp_path / "whole", parts)


def test_training_in_a_thread_leaves_ctrl_c_alone():
    results = []
    thread = threading.Thread(target=lambda: results.append(quiet(TINY, RECIPE)))
    thread.start()
    thread.join()
    _, rows = quiet(TINY, RECIPE)
    assert results[0][1][-1].val_loss == rows[-1].val_loss


def test_a_checkpoint_says_what_it_is(tmp_path):
    model, rows = quiet(SCHEMES["block"], RECIPE, tmp_path)
    meta = metadata(tmp_path / CHECKPOINT)
    assert (meta["step"], meta["tokens"], meta["seconds"]) == (11, 11 * 4 * 16, rows[-1].seconds)
    assert (meta["config"]["block_size"], meta["recipe"]["lr"]) == (3, RECIPE.lr)
    assert meta["corpus"]["sha256"] == corpus().sha256
    assert meta["machine"] == {"device": "cpu", "threads": torch.get_num_threads()}
    assert meta["versions"]["torch"] == torch.__version__
    assert meta["parameters"] == sum(p.numel() for p in model.parameters())
    assert meta["peak_memory"] is None or 5e7 < meta["peak_memory"] < 5e10  # bytes, of a process that holds PyTorch
    tokens = torch.randint(256, (2, 16))
    for path in (tmp_path, tmp_path / CHECKPOINT):
        assert torch.equal(load(path)(tokens), model(tokens))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_peak_memory_is_that_of_the_process_and_not_of_the_one_that_started_it():
    held = b"1" * 10**9
    code = "import sys, torch; from mhar_minimal.train import peak_memory; print(peak_memory(torch.device('cpu')))"
    code += "; assert 'matplotlib' not in sys.modules"  # and it is the only place that starts without it
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 5e7 < int(out) < len(held)


# Refusals, each of which leaves a run as it was


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    quiet(SCHEMES["full"], RECIPE, folder)
    return folder


@pytest.mark.parametrize(
    ("config", "recipe", "word", "error", "text"),
    [
        ({"heads": 2}, {}, "fox", ValueError, "config heads=2, but .* has 4"),
        ({"query_init": "zero"}, {}, "fox", ValueError, "config query_init='zero', but .* has 'random'"),
        ({"ffn": 48}, {}, "fox", ValueError, "config ffn=48"),
        ({}, {"lr": 1e-3}, "fox", ValueError, "recipe lr=0.001, but .* has 0.003"),
        ({}, {"seed": 4}, "fox", ValueError, "recipe seed=4"),
        ({}, {"steps": 12}, "fox", ValueError, "recipe steps=12"),
        ({}, {}, "cat", ValueError, "corpus="),
    ],
)
def test_other_settings_are_not_resumed(finished, config, recipe, word, error, text):
    before = contents(finished)
    with pytest.raises(error, match=text):
        quiet(replace(SCHEMES["full"], **config), replace(RECIPE, **recipe), finished, corpus(word), resume=True)
    assert contents(finished) == before


def test_a_run_from_before_a_field_was_there_goes_on_with_its_default(tmp_path, monkeypatch):
    quiet(TINY, RECIPE, tmp_path / "whole")
    crashed(monkeypatch, 7, TINY, tmp_path / "parts")
    rewritten(tmp_path / "parts" / CHECKPOINT, lambda t, m: m["config"].pop("autocast"))
    with pytest.raises(ValueError, match=r"config autocast=True, but .* has False"):
        quiet(replace(TINY, autocast=True), RECIPE, tmp_path / "parts", resume=True)
    quiet(TINY, RECIPE, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_run_is_not_overwritten(finished, tmp_path):
    before = contents(finished)
    with pytest.raises(FileExistsError, match=r"checkpoint\.safetensors belongs to a run"):
        quiet(SCHEMES["full"], RECIPE, finished)
    assert contents(finished) == before
    (tmp_path / HISTORY).write_text("somebody's\n")
    with pytest.raises(FileExistsError, match=r"history\.csv belongs to a run"):
        quiet(TINY, RECIPE, tmp_path)
    assert contents(tmp_path) == {HISTORY: b"somebody's\n"}


def test_resume_needs_a_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"checkpoint .* does not exist"):
        quiet(TINY, RECIPE, tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="folder=None"):
        quiet(TINY, RECIPE, resume=True)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(tmp_path)


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.999])
def test_a_truncated_checkpoint_is_refused_and_left_alone(share, finished, tmp_path):
    whole = (finished / CHECKPOINT).read_bytes()
    (tmp_path / CHECKPOINT).write_bytes(whole[: int(share * len(whole))])
    (tmp_path / HISTORY).write_bytes((finished / HISTORY).read_bytes())
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors is truncated"):
        quiet(SCHEMES["full"], RECIPE, tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors is truncated"):
        load(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("meta", [None, {"about": "something"}, {"about": json.dumps({"name": "prose"})}])
def test_another_safetensors_file_is_not_a_checkpoint(meta, tmp_path):
    save_file({"train": torch.zeros(3)}, tmp_path / "other.safetensors", meta)
    with pytest.raises(ValueError, match=r"other\.safetensors is truncated, or not a checkpoint"):
        load(tmp_path / "other.safetensors")


def save_half(tensors, file, meta):
    Path(file).write_bytes(b"half")
    raise OSError("no space left")


def refuse(*_):
    raise OSError("no space left")


@pytest.mark.parametrize(
    ("where", "name", "failing"),
    [
        (package_train, "save_file", save_half),
        (package_train.os, "fsync", refuse),
        (package_train.os, "replace", refuse),
    ],
)
def test_a_failed_write_keeps_the_checkpoint_before(where, name, failing, tmp_path, monkeypatch):
    quiet(TINY, RECIPE, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 5, lambda: patch.setattr(where, name, failing))  # the next checkpoint, at step 8, fails
        with pytest.raises(OSError, match="no space left"):
            quiet(TINY, RECIPE, tmp_path / "parts")
    assert sorted(contents(tmp_path / "parts")) == [CHECKPOINT, HISTORY]
    assert metadata(tmp_path / "parts" / CHECKPOINT)["step"] == 4
    load(tmp_path / "parts")
    quiet(TINY, RECIPE, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    recipe = replace(RECIPE, lr=1e18, checkpoint_every=1)
    with pytest.raises(FloatingPointError, match=r"loss=nan.*lr=1e\+18"):
        quiet(TINY, recipe, tmp_path)
    assert all(p.isfinite().all() for p in load(tmp_path).parameters())


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    # The loss would show it one step, and one checkpoint, later.
    recipe = replace(RECIPE, checkpoint_every=1)
    model = []
    original = Run.__init__
    monkeypatch.setattr(Run, "__init__", lambda run, *a: (original(run, *a), model.append(run.model))[0])
    stop_at(monkeypatch, 5, lambda: model[0].norm.weight.grad.fill_(math.inf))
    with pytest.raises(FloatingPointError, match=r"gradient norm inf after 5 steps"):
        quiet(TINY, recipe, tmp_path)
    assert metadata(tmp_path / CHECKPOINT)["step"] == 5
    assert all(p.isfinite().all() for p in load(tmp_path).parameters())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("steps", 1.5),
        ("batch_size", True),
        ("eval_every", -1),
        ("eval_windows", 0),
        ("checkpoint_every", 0),
        ("seed", -1),
        ("lr", 0),
        ("lr", math.nan),
        ("lr", math.inf),
        ("lr", "1"),
        ("floor", -0.1),
        ("floor", 1.1),
        ("floor", math.nan),
        ("floor", "0"),
    ],
)
def test_recipe_names_the_field_and_the_value(field, value):
    with pytest.raises(ValueError, match=f"^{field}={value!r}; accepted: "):
        Recipe(**{field: value})


def test_what_no_run_can_start_with_leaves_no_folder(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="vocab=100; accepted: at least 256"):
        quiet(replace(TINY, vocab=100), RECIPE, folder)
    with pytest.raises(ValueError, match="device='nonsense' cannot be used"):
        quiet(TINY, RECIPE, folder, device="nonsense")
    with pytest.raises(ValueError, match="length="):
        quiet(replace(TINY, context=5000), RECIPE, folder)
    assert not folder.exists()


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="device='cuda:99' cannot be used"):
        quiet(TINY, RECIPE, device="cuda:99")


def test_check_settings_names_the_first_difference():
    check_settings({"recipe": {"lr": 1, "steps": 2}}, {"recipe": {"lr": 1}}, Path("runs"))
    with pytest.raises(ValueError, match="recipe lr=2, but the run in runs has 1; accepted: the same, another folder"):
        check_settings({"recipe": {"lr": 1}}, {"recipe": {"lr": 2}}, Path("runs"))


@pytest.mark.parametrize(("part", "field"), [("config", "autocast"), ("recipe", "floor")])
def test_a_checkpoint_older_than_a_field_has_its_default(part, field):
    wanted = {"config": asdict(TINY), "recipe": asdict(RECIPE)}
    saved = {name: dict(values) for name, values in wanted.items()}
    del saved[part][field]
    check_settings(saved, wanted, Path("runs"))
    with pytest.raises(ValueError, match=f"{part} {field}=0.5, but the run in runs has "):
        check_settings(saved, {part: wanted[part] | {field: 0.5}}, Path("runs"))


def test_validation_is_the_validation_text():
    run = Run(TINY, RECIPE, corpus(), "cpu")
    inputs, targets = windows(corpus().val, RECIPE.eval_windows, TINY.context)
    assert torch.equal(run.validation[0], inputs)
    assert torch.equal(run.validation[1], targets)


def rewritten(file, change):
    """Apply ``change(tensors, metadata)`` to a checkpoint."""
    with safe_open(file, "pt") as opened:
        meta = {key: json.loads(value) for key, value in opened.metadata().items()}
    tensors = load_file(file)
    change(tensors, meta)
    save_file(tensors, file, {key: json.dumps(value) for key, value in meta.items()})


@pytest.mark.parametrize(
    "change",
    [
        lambda t, m: t.pop("exp_avg.norm.weight"),
        lambda t, m: [t.pop(name) for name in list(t) if name.startswith(("step.", "exp_avg"))],
        lambda t, m: t.update({"exp_avg.norm.weight": torch.zeros(3)}),
        lambda t, m: t.pop("rng"),
        lambda t, m: m.pop("rows"),
        lambda t, m: m.pop("corpus"),
        lambda t, m: m.update(rows=[[1, 2]]),
        lambda t, m: t.pop("model.norm.weight"),
    ],
)
def test_a_checkpoint_that_lacks_something_is_refused_by_name(change, tmp_path):
    quiet(TINY, RECIPE, tmp_path)
    rewritten(tmp_path / CHECKPOINT, change)
    with pytest.raises(ValueError, match=r"checkpoint .*checkpoint\.safetensors is damaged"):
        quiet(TINY, RECIPE, tmp_path, resume=True)


def test_a_model_cannot_be_loaded_from_a_checkpoint_of_other_fields(tmp_path):
    quiet(TINY, RECIPE, tmp_path)
    rewritten(tmp_path / CHECKPOINT, lambda t, m: m["config"].update(depth_heads=3))
    with pytest.raises(ValueError, match="is damaged, or not one of ours"):
        load(tmp_path)


def test_a_full_gpu_is_no_damage(tmp_path, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    quiet(TINY, RECIPE, tmp_path)
    monkeypatch.setattr(Model, "load_state_dict", full)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        quiet(TINY, RECIPE, tmp_path, resume=True)


def test_a_disk_that_is_full_is_an_error_of_the_system(tmp_path, monkeypatch):
    def no_room(*args):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(package_train, "save_file", no_room)
    with pytest.raises(OSError, match=r"cannot be written .*No space left"):
        quiet(TINY, RECIPE, tmp_path / "run")
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("device", ["meta", "xpu"])
def test_only_cpu_and_cuda_are_devices(device):
    with pytest.raises(ValueError, match=f"device='{device}' cannot be used .*accepted: cpu, or cuda"):
        quiet(TINY, RECIPE, device=device)


def test_a_seed_that_pytorch_would_cut_is_refused():
    with pytest.raises(ValueError, match="seed=4294967296; accepted: up to 4294967295"):
        Recipe(seed=2**32)
