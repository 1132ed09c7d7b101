"""The command line from end to end, on a small text and with few steps."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

import mhar_minimal.__main__ as commands
from mhar_minimal import Config
from mhar_minimal.__main__ import ARMS, main, report
from mhar_minimal.cpt import read_cpt
from mhar_minimal.data import load_corpus
from mhar_minimal.train import CHECKPOINT, HISTORY, Recipe, metadata


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    """A small corpus, and a cache of the test's own."""
    monkeypatch.setenv("MHAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the processes it starts: nothing here is worth two
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"Paragraph {i}: {i * i} sheep, {i**3} goats and no wolf at all." for i in range(100)))
    return file


def options(text, folder, *more):
    return ["--corpus", str(text), "--out", str(folder), "--batch-size", "2", *more]


SHORT = ["--steps", "3", "--eval-every", "2", "--eval-windows", "2", "--checkpoint-every", "2", "--floor", "0.25"]


def test_train_resume_and_generate(text, tmp_path, capsys):
    folder = tmp_path / "run"
    scheme = ["--residual", "block", "--block-size", "3", "--heads", "2", "--query-init", "random", "--seed", "7"]
    arguments = ["train", *options(text, folder, *scheme, *SHORT, "--lr", "0.002")]
    assert main(arguments) == 0
    meta = metadata(folder / CHECKPOINT)
    assert {"residual": "block", "block_size": 3, "heads": 2, "query_init": "random"}.items() <= meta["config"].items()
    wanted = Recipe(3, 2, 0.002, 7, 2, 2, 2, 0.25)
    assert Recipe(**meta["recipe"]) == wanted
    assert [row.split(",")[0] for row in (folder / HISTORY).read_text().splitlines()] == ["step", "0", "2", "3"]
    out = capsys.readouterr()
    assert f"validation loss {meta['rows'][-1][-1]:.4f}" in out.out
    assert "tokens/s" in out.err

    assert main(arguments) == 2
    assert "belongs to a run" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    assert main([*arguments, "--resume", "--lr", "0.1"]) == 2
    err = capsys.readouterr().err
    assert "error: recipe lr=0.1, but the run in" in err
    assert "Traceback" not in err

    generation = ["generate", "Paragraph", "--checkpoint", str(folder), "--length", "5", "--temperature", "0"]
    assert main(generation) == 0
    first = capsys.readouterr().out
    assert first.startswith("Paragraph")
    assert main([*generation, "--checkpoint", str(folder / CHECKPOINT)]) == 0
    assert capsys.readouterr().out == first


def test_cpt_of_what_train_has_written(text, tmp_path, capsys):
    assert main(["train", *options(text, tmp_path / "base", *SHORT)]) == 0
    out, evaluation = tmp_path / "cpt", ["--eval-every", "2", "--eval-windows", "3"]
    arguments = ["cpt", str(tmp_path / "base"), "--block-size", "3", "--heads", "8", "--seeds", "4", "1"]
    arguments += options(text, out, "--steps", "3", "--lr", "0.002", *evaluation)
    assert main(arguments) == 0
    assert f"wrote {out / 'results'}.csv, gates.csv, items.csv and study.json" in capsys.readouterr().out
    found = read_cpt(out)
    assert {arm: list(of) for arm, of in found.rows.items()} == {"plain": [4, 1], "mhar": [4, 1]}
    assert [len(of) for of in found.items["plain"].values()] == [3, 3]
    about = found.about
    assert (about["block_size"], about["heads"], about["seeds"]) == (3, 8, [4, 1])
    assert Recipe(**about["recipe"]) == Recipe(3, 2, 0.002, eval_every=2, eval_windows=3)
    assert about["sessions"][0]["command"].startswith("python -m mhar_minimal cpt ")
    assert main(arguments) == 2
    assert "is not empty; accepted: a folder that is new or empty" in capsys.readouterr().err


def test_cpt_that_is_interrupted_keeps_nothing_and_says_so(monkeypatch, capsys):
    def press(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mhar_minimal.cpt.cpt", press)
    assert main(["cpt", "anything"]) == 130
    assert capsys.readouterr().err == "interrupted; nothing is kept\n"


def test_corpus(text, capsys):
    assert main(["corpus", str(text)]) == 0
    corpus = load_corpus(text)
    assert capsys.readouterr().out.splitlines() == [str(corpus), f"sha256 {corpus.sha256}", f"path {corpus.path}"]
    assert f"{len(corpus.train):,} bytes" in str(corpus)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--residual", "other"], "residual='other'; accepted: standard"),
        (["train", "--heads", "3", "--residual", "full"], "heads=3 does not divide dim=64"),
        (["train", "--residual", "block"], "block_size=None with residual='block'"),
        (["train", "--preset", "2B"], "preset='2B'; accepted: tiny"),
        (["train", "--steps", "0"], "steps=0; accepted"),
        (["train", "--device", "nonsense", *SHORT], "device='nonsense' cannot be used"),
        (["train", "--resume", *SHORT], "does not exist"),
        (["generate", "a"], "checkpoint .* does not exist"),
        (["corpus", "missing.txt"], "missing.txt"),
        (["compare", "fool"], "arm='fool'; accepted: residual"),
        (["compare", "full:"], "arm='full:'; accepted: residual"),
        (["compare", "full:x"], "arm='full:x'; accepted: residual"),
        (["compare", "standard:2"], "heads=2 with residual='standard'; accepted: 1"),
        (["compare", "--block-size", "99"], "block_size=99"),
        (["compare", "--seeds", "0"], "seeds=0; accepted"),
        (["compare", *(f"full:{2**i}" for i in range(7)), "standard"], "8 arms; accepted: up to 7"),
        (["cpt", "missing"], "checkpoint missing does not exist"),
        (["cpt", "missing", "--steps", "0"], "steps=0; accepted"),
        (["cpt", "missing", "--seeds", "1", "1"], r"seeds=\[1, 1\]; accepted: at least one"),
        (["train", "--steps", "many"], "invalid int value: 'many'"),
        ([], "the following arguments are required"),
    ],
)
def test_errors_of_the_user_are_one_line(arguments, says, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if arguments and arguments[0] in ("train", "compare"):
        arguments = [arguments[0], "--corpus", str(text), *arguments[1:]]
    try:
        code = main(arguments)
    except SystemExit as exit:  # argparse's own
        code = exit.code
    err = capsys.readouterr().err
    assert code == 2
    assert re.search(says, err.splitlines()[-1])
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


DEFAULTS = {
    "ablate": {"--out": "runs/ablate", "--only": None, "--device": "cpu"},
    "compare": {"--preset": "tiny", "ARM": ARMS, "--block-size": 4, "--seeds": 1, "--out": "runs/compare"},
    "cpt": {
        "--block-size": 4,
        "--heads": 4,
        "--seeds": [0, 1, 2],
        "--eval-every": Recipe.eval_every,
        "--eval-windows": Recipe.eval_windows,
        "--out": "runs/cpt",
    },
    "train": {
        "--preset": "tiny",
        "--residual": Config.residual,
        "--heads": Config.heads,
        "--block-size": None,
        "--query-init": Config.query_init,
        "--seed": Recipe.seed,
        "--eval-every": Recipe.eval_every,
        "--eval-windows": Recipe.eval_windows,
        "--checkpoint-every": Recipe.checkpoint_every,
        "--floor": Recipe.floor,
        "--out": "runs/train",
        "--resume": False,
    },
    "generate": {"--checkpoint": "runs/train", "--length": 200, "--temperature": 1.0, "--seed": 0},
    "corpus": {"corpus": "prose"},
}
SHARED = {
    "--steps": Recipe.steps,
    "--batch-size": Recipe.batch_size,
    "--lr": Recipe.lr,
    "--corpus": "prose",
    "--device": "cpu",
}


@pytest.mark.parametrize("command", DEFAULTS)
def test_help_explains_every_option_with_its_default(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    assert exit.value.code == 0
    _, *entries = re.split(r"\n  (?=[-a-zA-Z])", capsys.readouterr().out)  # an entry may take two lines
    shown = {entry.split()[0]: " ".join(entry.split()) for entry in entries}
    wanted = DEFAULTS[command] | (SHARED if command in ("train", "compare", "cpt") else {})
    for option, default in wanted.items():
        assert f"(default: {default})" in shown[option]
        assert len(shown[option].split("(default")[0]) > len(option) + 15  # there is a text, too
    assert shown.keys() - wanted.keys() <= {"-h,", "prompt", "PLAN", "CHECKPOINT"}


def fabricated(losses, speed, memory):
    """Metadata of finished runs, by scheme and seed; ten steps of 100 tokens."""
    rows = {key: [[0, 0, 0.0, 5.0, 5.0], [10, 1000, 1000 / speed, loss, loss]] for key, loss in losses.items()}
    return {key: {"rows": rows[key], "parameters": 1234, "peak_memory": memory, "seed": key[1]} for key in losses}


def test_the_table_has_means_and_paired_differences(text, tmp_path, capsys):
    losses = {
        ("standard", 0): 2.0,
        ("full:1", 0): 1.9,
        ("hyper", 0): 2.5,
        ("standard", 1): 3.0,
        ("full:1", 1): 2.6,
        ("standard", 2): 4.0,
        ("full:1", 2): 3.9,
    }
    args = Namespace(out=str(tmp_path), argv=["compare"])
    report(fabricated(losses, 500, 2.5e8), ["standard", "full:1", "hyper", "full:4"], load_corpus(text), args)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    # By hand: differences -0.1, -0.4, -0.1 have mean -0.2 and standard deviation sqrt(0.06 / 2) = 0.1732.
    assert lines[1] == ["standard", "3.0000", "1,234", "500", "250"]
    assert lines[2] == ["full:1", "2.8000", "-0.2000", "±", "0.1732", "1,234", "500", "250"]
    assert lines[3] == ["hyper", "2.5000", "+0.5000", "1,234", "500", "250"]  # its one seed, against that seed
    assert "full:4" not in str(lines)
    with open(tmp_path / "compare.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["scheme"], int(row["seed"])) for row in table] == list(losses)
    assert [float(row["val_loss"]) for row in table] == list(losses.values())
    assert {(row["tokens_per_second"], row["peak_memory_mb"]) for row in table} == {("500.0", "250.0")}
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.glob("*.partial")) == []


def test_memory_that_is_not_known_stays_blank(text, tmp_path, capsys):
    results = fabricated({("standard", 0): 2.0}, 500, None)
    report(results, ["standard"], load_corpus(text), Namespace(out=str(tmp_path), argv=["compare"]))
    out = capsys.readouterr().out
    assert "no peak memory on this system" in out
    assert (tmp_path / "compare.csv").read_text().splitlines()[1].endswith(",")


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_compare_is_interrupted_goes_on_skips_and_refuses(text, tmp_path, monkeypatch, capfd):
    out = tmp_path / "compare"
    command = ["compare", "standard", "full:4", *options(text, out, "--steps", "60")]
    process = subprocess.Popen([sys.executable, "-m", "mhar_minimal", *command])
    second = out / "full-4-seed0" / CHECKPOINT
    while not second.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)  # to this process alone; the one it started must be told
    assert process.wait() == 130
    streams = capfd.readouterr()
    assert "Traceback" not in streams.err
    assert "[2/2] full:4, seed 0" in streams.out
    assert schemes(out) == ["standard"]
    assert metadata(second)["step"] < 60
    first = (out / "standard-seed0" / CHECKPOINT).read_bytes()

    assert main(command) == 0
    streams = capfd.readouterr()
    assert "[1/2] standard, seed 0: finished before" in streams.out
    assert schemes(out) == ["standard", "full:4"]
    assert metadata(second)["step"] == 60
    assert (out / "standard-seed0" / CHECKPOINT).read_bytes() == first
    about = json.loads((out / "compare.json").read_text())
    assert about["command"].startswith("python -m mhar_minimal compare standard full:4")
    assert about["corpus"]["sha256"] == load_corpus(text).sha256
    assert [run["scheme"] for run in about["runs"]] == ["standard", "full:4"]
    assert {"versions", "machine", "recipe", "config", "rows"} <= about["runs"][0].keys()
    assert about["git"] is None or len(about["git"]) == 40

    with monkeypatch.context() as patch:
        patch.setattr(commands, "train_apart", None)  # would be an error to call
        assert main(command) == 0
    capfd.readouterr()

    written = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for change, says in (
        (["--steps", "61"], "recipe steps=61, but the run in"),
        (["--lr", "0.1"], "recipe lr=0.1, but the run in"),
        (["--corpus", str(Path(__file__))], "corpus="),
        (["--device", "cuda"], "machine device='cuda', but the run in"),
    ):
        assert main([*command, *change]) == 2
        assert says in capfd.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == written


def schemes(out):
    with open(out / "compare.csv", newline="") as file:
        return [row["scheme"] for row in csv.DictReader(file)]


def test_an_arm_that_fails_is_an_error(text, tmp_path, capfd):
    out = tmp_path / "compare"
    assert main(["compare", "standard", *options(text, out, "--steps", "3", "--lr", "1e18")]) == 2
    err = capfd.readouterr().err
    assert "error: loss=nan" in err
    assert "standard-seed0 is not finished (exit code 2)" in err
    assert not (out / "compare.csv").exists()


def test_compare_hands_every_arm_its_seed_and_its_blocks(text, tmp_path):
    folder = tmp_path / "compare"
    arguments = ["compare", "block:2", "--block-size", "3", "--seeds", "2", "--steps", "2"]
    assert main([*arguments, *options(text, folder)]) == 0
    runs = [metadata(folder / f"block-2-seed{seed}" / CHECKPOINT) for seed in (0, 1)]
    assert [run["recipe"]["seed"] for run in runs] == [0, 1]
    assert all((run["config"]["heads"], run["config"]["block_size"]) == (2, 3) for run in runs)
    assert runs[0]["rows"][-1][-1] != runs[1]["rows"][-1][-1]


def test_generate_takes_its_seed(text, tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["train", *options(text, folder, *SHORT)]) == 0
    written = []
    for seed in ("1", "2"):
        capsys.readouterr()
        assert main(["generate", "sheep", "--checkpoint", str(folder), "--length", "20", "--seed", seed]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] != written[1]
