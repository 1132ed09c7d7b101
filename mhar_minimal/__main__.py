"""The command line: ``python -m mhar_minimal compare | ablate | train | cpt | generate | corpus``."""

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
from argparse import Namespace
from dataclasses import asdict, fields
from pathlib import Path
from statistics import fmean, stdev

from mhar_minimal.config import PRESETS, RESIDUALS, Config, preset
from mhar_minimal.data import Corpus, load_corpus
from mhar_minimal.generate import generate
from mhar_minimal.train import (
    CHECKPOINT,
    Recipe,
    Row,
    check_run,
    finished,
    load,
    metadata,
    train,
    write_rows,
    written_whole,
)

ARMS = ("standard", "full:1", "full:4", "block:4")


def run_train(args: Namespace) -> None:
    scheme = {name: getattr(args, name) for name in ("residual", "heads", "block_size", "query_init")}
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
    config, folder = preset(args.preset, **scheme), Path(args.out)
    model, rows = train(config, recipe, load_corpus(args.corpus), folder, args.device, resume=args.resume)
    print(
        f"{model.parameter_count():,} parameters, validation loss {rows[-1].val_loss:.4f} nats/byte; saved in {folder}"
    )


def run_generate(args: Namespace) -> None:
    print(generate(load(args.checkpoint), args.prompt, args.length, args.temperature, args.seed))


def run_corpus(args: Namespace) -> None:
    corpus = load_corpus(args.corpus)
    print(corpus, f"sha256 {corpus.sha256}", f"path {corpus.path}", sep="\n")


def run_compare(args: Namespace) -> None:
    from mhar_minimal.plot import PALETTE  # here, so that no other command waits for matplotlib

    if args.seeds < 1:
        raise ValueError(f"seeds={args.seeds}; accepted: an integer of at least 1")
    configs = {arm_name(config): config for config in (arm_config(arm, args) for arm in args.arms)}
    if len(configs) > len(PALETTE):
        raise ValueError(f"{len(configs)} arms; accepted: up to {len(PALETTE)}, the colours of the figure")
    corpus, out = load_corpus(args.corpus), Path(args.out)
    runs = {}  # by name and seed, in the order they are trained: all arms of a seed, then the next seed
    for seed in range(args.seeds):
        recipe = Recipe(args.steps, args.batch_size, args.lr, seed, eval_every=max(1, args.steps // 16))
        for name, config in configs.items():
            folder = out / f"{name.replace(':', '-')}-seed{seed}"
            runs[name, seed] = config, recipe, folder
            check_run(folder, config, recipe, corpus, args.device)
    try:
        for i, ((name, seed), (config, recipe, folder)) in enumerate(runs.items(), 1):
            done = finished(folder)
            print(f"[{i}/{len(runs)}] {name}, seed {seed}{': finished before' if done else ''}", flush=True)
            if not done:
                train_apart(config, recipe, folder, args)
    finally:
        results = {key: metadata(folder / CHECKPOINT) for key, (_, _, folder) in runs.items() if finished(folder)}
        if results:
            report(results, list(configs), corpus, args)


def run_ablate(args: Namespace) -> None:
    from mhar_minimal.ablate import ablate

    ablate(Path(args.plan), Path(args.out), args.device, args.only, session(args))


def run_cpt(args: Namespace) -> None:
    from mhar_minimal.cpt import cpt

    recipe = Recipe(args.steps, args.batch_size, args.lr, eval_every=args.eval_every, eval_windows=args.eval_windows)
    branch = args.block_size, args.heads
    cpt(Path(args.checkpoint), Path(args.out), recipe, args.seeds, *branch, args.corpus, args.device, session(args))


def arm_config(arm: str, args: Namespace) -> Config:
    residual, colon, heads = arm.partition(":")
    if residual not in RESIDUALS or (colon and not heads.isdecimal()):
        raise ValueError(f"arm={arm!r}; accepted: residual[:heads], residual one of {', '.join(RESIDUALS)}")
    block_size = args.block_size if residual == "block" else None
    return preset(args.preset, residual=residual, heads=int(heads or 1), block_size=block_size)


def arm_name(config: Config) -> str:
    return f"{config.residual}:{config.heads}" if config.routed else config.residual


def train_apart(config: Config, recipe: Recipe, folder: Path, args: Namespace) -> None:
    """Run ``train`` in a process of its own, so that its peak memory is its own; it goes on where it was stopped."""
    options = asdict(recipe) | {name: getattr(config, name) for name in ("residual", "heads", "block_size")}
    options |= {"preset": args.preset, "corpus": args.corpus, "device": args.device, "out": folder}
    command = [sys.executable, "-m", "mhar_minimal", "train"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    command += ["--resume"] if (folder / CHECKPOINT).exists() else []
    with subprocess.Popen(command) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            if os.name == "posix":  # a terminal tells both processes; `kill -INT` only this one
                process.send_signal(signal.SIGINT)
            process.wait()
            raise
    if code:
        raise ValueError(f"{folder} is not finished (exit code {code}); accepted: 0. What was finished before is kept")


def report(results: dict[tuple[str, int], dict], names: list[str], corpus: Corpus, args: Namespace) -> None:
    """Print the table and write compare.csv, compare.png and compare.json from the finished runs' metadata."""
    from mhar_minimal.plot import loss_curves

    out, columns = Path(args.out), ("val_loss", "parameters", "tokens_per_second", "peak_memory_mb")
    figures = {}
    for key, meta in results.items():
        last, memory = Row(*meta["rows"][-1]), meta["peak_memory"]
        megabytes = None if memory is None else memory / 1e6
        figures[key] = last.val_loss, meta["parameters"], last.tokens / last.seconds, megabytes
    with written_whole(out / "compare.csv") as file:
        write_rows(file, [["scheme", "seed", *columns], *([*key, *values] for key, values in figures.items())], "w")

    first, histories = names[0], {}
    print(f"\n{'scheme':10}{'val loss':>9}{f'minus {first}':>20}{'parameters':>12}{'tokens/s':>10}{'peak MB':>9}")
    for name in names:
        mine = {seed: values for (other, seed), values in figures.items() if other == name}
        if not mine:
            continue
        paired = [
            v[0] - figures[first, seed][0] for seed, v in mine.items() if name != first and (first, seed) in figures
        ]
        minus = f"{fmean(paired):+.4f}" if paired else ""
        minus += f" ± {stdev(paired):.4f}" if len(paired) > 1 else ""
        loss, parameters, speed, memory = (None if None in values else fmean(values) for values in zip(*mine.values()))
        shown = "" if memory is None else f"{memory:.0f}"
        print(f"{name:10}{loss:9.4f}{minus:>20}{parameters:12,.0f}{speed:10,.0f}{shown:>9}")
        histories[name] = [Row(*map(fmean, zip(*rows))) for rows in zip(*(results[name, s]["rows"] for s in mine))]
    print("nats/byte, mean over the seeds finished, ± standard deviation of the paired differences over them;")
    print("equal steps on equal data are not equal time" + ("; no peak memory on this system" if not shown else ""))

    with written_whole(out / "compare.png") as file:
        loss_curves({name: rows[1:] for name, rows in histories.items()}).savefig(file, format="png")
    about = session(args) | {
        "corpus": {"name": corpus.name, "python": corpus.python, "sha256": corpus.sha256},
        "runs": [{"scheme": name, **meta} for (name, _), meta in results.items()],  # each with seed and versions
    }
    with written_whole(out / "compare.json") as file:
        file.write_text(json.dumps(about, indent=1))
    print(f"wrote {out / 'compare'}.csv, .png and .json")


def session(args: Namespace) -> dict:
    return {
        "command": shlex.join(["python", "-m", "mhar_minimal", *args.argv]),
        "machine": {"system": platform.system(), "processor": processor(), "cores": os.cpu_count()},
        "git": git_revision(),
    }


def processor() -> str:
    """The processor's name where Linux tells it, otherwise its kind."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def git_revision() -> str | None:
    """The commit of the checkout that this file lies in; None outside one, or without git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD", "--show-prefix"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return None
    return lines[0] if lines[1:] == ["mhar_minimal/"] else None  # not that of a repository around an installed copy


def parser() -> argparse.ArgumentParser:
    training = argparse.ArgumentParser(add_help=False)
    option = training.add_argument
    option("--steps", type=int, default=Recipe.steps, help="training steps")
    option("--batch-size", type=int, default=Recipe.batch_size, help="windows per step")
    option("--lr", type=float, default=Recipe.lr, help="peak learning rate")
    option("--corpus", default="prose", help="prose, code, or a file or folder of your own text")
    size = {"default": "tiny", "help": f"size of the model: {', '.join(PRESETS)}"}
    device = {"default": "cpu", "help": "cpu or cuda"}
    option("--device", **device)

    top = argparse.ArgumentParser("python -m mhar_minimal", description=sys.modules["mhar_minimal"].__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(run, text: str, *parents: argparse.ArgumentParser):
        name = run.__name__.removeprefix("run_")
        layout = argparse.ArgumentDefaultsHelpFormatter
        sub = commands.add_parser(name, help=text, description=text, parents=parents, formatter_class=layout)
        sub.set_defaults(run=run)
        return sub.add_argument

    option = command(run_compare, "Train several residual schemes on the same batches and tabulate them.", training)
    option("--preset", **size)
    option("arms", nargs="*", metavar="ARM", default=ARMS, help=f"residual[:heads], of {', '.join(RESIDUALS)}")
    option("--block-size", type=int, default=4, help="sublayers per block, of the block arms")
    option("--seeds", type=int, default=1, help="number of seeds, 0 and up, for every arm")
    option("--out", default="runs/compare", help="folder for the table, the figure and the runs")

    option = command(run_ablate, "Carry out the study that a plan describes, or go on with it.")
    option("plan", metavar="PLAN", help="a TOML file, such as notebooks/results/plan_cpu.toml")
    option("--out", default="runs/ablate", help="folder for the results and the runs")
    option("--only", metavar="GRID", help="one grid of the plan; all without it")
    option("--device", **device)

    option = command(run_train, "Train one model.", training)
    option("--preset", **size)
    option("--residual", default=Config.residual, help=f"residual scheme: {', '.join(RESIDUALS)}")
    option("--heads", type=int, default=Config.heads, help="depth heads, of full and block")
    option("--block-size", type=int, default=Config.block_size, help="sublayers per block, of block")
    option("--query-init", default=Config.query_init, help="start of the pseudo-queries: zero, random")
    option("--seed", type=int, default=Recipe.seed, help="of the initial weights and of the batches")
    option("--eval-every", type=int, default=Recipe.eval_every, help="steps between evaluations")
    option("--eval-windows", type=int, default=Recipe.eval_windows, help="windows of validation text")
    option("--checkpoint-every", type=int, default=Recipe.checkpoint_every, help="steps between checkpoints")
    option("--floor", type=float, default=Recipe.floor, help="share of --lr that the last step has, 0 to 1")
    option("--out", default="runs/train", help="folder of the run: checkpoint and history")
    option("--resume", action="store_true", help="continue the unfinished run in that folder")

    option = command(
        run_cpt, "Train a model on, as it is and converted to delta MHAR. Stopped, it keeps nothing.", training
    )
    option("checkpoint", metavar="CHECKPOINT", help="folder of a run of the standard scheme, or its checkpoint file")
    option("--block-size", type=int, default=4, help="sublayers per block")
    option("--heads", type=int, default=4, help="depth heads")
    option(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED", help="of the batches, one pair of runs each"
    )
    option("--eval-every", type=int, default=Recipe.eval_every, help="steps between evaluations")
    option("--eval-windows", type=int, default=Recipe.eval_windows, help="windows of validation text")
    option("--out", default="runs/cpt", help="folder for the results, new or empty")

    option = command(run_generate, "Continue a prompt with a trained model.")
    option("prompt", help="at least one character")
    option("--checkpoint", default="runs/train", help="folder of a run, or its checkpoint file")
    option("--length", type=int, default=200, help="bytes to add")
    option("--temperature", type=float, default=1.0, help="divides the logits; 0 takes the likeliest byte")
    option("--seed", type=int, default=0, help="of the sampling")

    option = command(run_corpus, "Build a corpus if it is not there yet, and describe it.")
    option("corpus", nargs="?", default="prose", help="prose, code, or a file or folder of your own text")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a command line; 0, or 2 after an error of the user, or 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if hasattr(sys.stdout, "reconfigure"):  # not where a notebook or a test has replaced it
        sys.stdout.reconfigure(errors="replace")  # generated text may have what a terminal cannot show
    args = parser().parse_args(argv, Namespace(argv=argv))
    try:
        args.run(args)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = {run_train: "with --resume the run", run_compare: "the same command", run_ablate: "the same command"}
        kept = f"what was finished is kept: {goes_on[args.run]} goes on" if args.run in goes_on else "nothing is kept"
        print(f"interrupted; {kept}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
