"""Training: one recipe for every residual scheme, and runs that can stop at any moment without losing a bit."""

import csv
import gc
import json
import math
import os
import platform
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

import mhar_minimal
from mhar_minimal.config import Config
from mhar_minimal.data import Corpus, batch, windows
from mhar_minimal.model import Model

BETAS, ADAM_EPS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0
REMEDY = "accepted: the same, another folder (--out), or this one deleted"
CHECKPOINT, HISTORY = "checkpoint.safetensors", "history.csv"


@dataclass(frozen=True)
class Recipe:
    """How a model is trained; what is not a field here is a constant of this file.

    Raises:
        ValueError: a field out of range; the message names it, its value and what would be accepted.
    """

    steps: int = 400
    batch_size: int = 16  # windows of config.context bytes per step
    lr: float = 3e-3  # peak learning rate
    seed: int = 0  # of the initial weights and of the batches
    eval_every: int = 50  # steps
    eval_windows: int = 64  # windows of validation text
    checkpoint_every: int = 100  # steps
    floor: float = 0.1  # of the peak learning rate, at the last step

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name == "seed" else 1
            if name == "seed" and isinstance(value, int) and value >= 2**32:
                raise ValueError(f"seed={value}; accepted: up to {2**32 - 1}")
            whole = name not in ("lr", "floor")
            if whole and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name}={value!r}; accepted: an integer of at least {least}")
        if not (isinstance(self.lr, int | float) and 0 < self.lr < math.inf):
            raise ValueError(f"lr={self.lr!r}; accepted: a finite number above 0")
        if not (isinstance(self.floor, int | float) and 0 <= self.floor <= 1):
            raise ValueError(f"floor={self.floor!r}; accepted: a number from 0 to 1")


class Row(NamedTuple):
    """One line of a run's history, written at step 0, every ``eval_every`` steps and at the last step."""

    step: int  # steps finished
    tokens: int  # bytes trained on
    seconds: float  # spent on training steps, evaluation and checkpoints excluded
    train_loss: float  # nats per byte, mean over the batches since the row before; at step 0, of the first batch
    val_loss: float  # nats per byte


def schedule(step: int, recipe: Recipe) -> float:
    """The share of the peak learning rate for step 0 ≤ ``step`` < steps.

    Linear to 1 over the first 5 % of the steps, then a cosine that ends at ``recipe.floor`` on the last step.
    """
    warmup = math.ceil(recipe.steps / 20)
    n = step + 1  # the first step already moves
    if n <= warmup:
        return n / warmup
    cosine = (1 + math.cos(math.pi * (n - warmup) / (recipe.steps - warmup))) / 2
    return recipe.floor + (1 - recipe.floor) * cosine


def parameter_groups(model: Model) -> list[dict]:
    """AdamW's two groups: the trunk's matrices decay; norm gains and every parameter of the scheme do not.

    arXiv:2607.27230 decays everything; a decayed pseudo-query is pulled back to the plain mean of its sources.
    """
    decay, keep = [], []
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim == 2 and not name.startswith("depth.")
        (decay if matrix else keep).append(parameter)
    return [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": keep, "weight_decay": 0.0}]


@torch.inference_mode()
def evaluate(model: Model, inputs: Tensor, targets: Tensor, batch_size: int = Recipe.batch_size) -> float:
    """Mean cross-entropy, nats per byte, of windows [N, T] (int64), ``batch_size`` windows at a time."""
    device = model.embedding.weight.device
    total = 0.0
    for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
        total += F.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten(), reduction="sum").item()
    return total / targets.numel()


def record(job: Callable[[], None]) -> Callable[[], None]:
    """A replay of the job as one CUDA graph, which launches everything at once.

    The job reads and writes tensors that stay where they are. It is called twice here: a graph records no first call.
    """
    gc.collect()  # graphs that nobody replays any more; collected in the middle of a recording, they would end it
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        job()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        job()
    return graph.replay  # which keeps the graph


class Run:
    """Everything a run is at a finished step: what `save` writes, and `restore` brings back bit for bit.

    It starts from ``recipe.seed``, or goes on with a trained ``model`` of that config, which it changes.
    """

    def __init__(self, config: Config, recipe: Recipe, corpus: Corpus, device: str, model: Model | None = None):
        if config.vocab < 256:
            raise ValueError(f"vocab={config.vocab}; accepted: at least 256, tokens are bytes")
        self.config, self.recipe, self.corpus = config, recipe, corpus
        self.device = usable_device(device)
        self.validation = windows(corpus.val, recipe.eval_windows, config.context)
        self.model = (Model(config, recipe.seed) if model is None else model).to(self.device)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model), lr=recipe.lr, betas=BETAS, eps=ADAM_EPS, fused=True
        )
        self.step, self.seconds, self.peak = 0, 0.0, 0
        size = 2, recipe.batch_size, config.context
        self.inputs, self.targets = torch.zeros(size, dtype=torch.long, device=self.device)  # of the step in progress
        # A small model would make a GPU wait for its launches.
        self.replay = record(self.differentiate) if self.device.type == "cuda" else None
        self.rows: list[Row] = []
        self.losses: list[float] = []  # since the last row

    def batch(self) -> tuple[Tensor, Tensor]:
        r = self.recipe
        return batch(self.corpus.train, r.batch_size, self.config.context, r.seed, self.step)

    def differentiate(self) -> None:
        """The mean cross-entropy of the batch, nats per byte, and its gradients."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets.flatten())
        loss.backward()
        self.loss = loss.detach()

    def advance(self) -> float:
        """One training step; its loss. Raises FloatingPointError where the loss or its gradient is not finite."""
        start = time.perf_counter()
        for place, tokens in zip((self.inputs, self.targets), self.batch()):
            place.copy_(tokens)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * schedule(self.step, self.recipe)
        (self.replay or self.differentiate)()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        value = self.loss.item()  # waits for a GPU, so that the clock below has seen the whole step
        if not (math.isfinite(value) and norm.isfinite()):
            raise FloatingPointError(
                f"loss={value}, gradient norm {norm.item()} after {self.step} steps, with lr={self.recipe.lr}; "
                f"accepted: finite numbers. Of this step nothing is saved"
            )
        self.losses.append(value)
        self.step += 1
        self.seconds += time.perf_counter() - start
        return value

    def record(self) -> Row:
        """Evaluate, and add a row to the history."""
        size = self.recipe.batch_size
        train_loss = fmean(self.losses) if self.losses else evaluate(self.model, *self.batch(), size)
        val_loss = evaluate(self.model, *self.validation, size)
        self.losses.clear()
        self.rows.append(Row(self.step, self.tokens, self.seconds, train_loss, val_loss))
        return self.rows[-1]

    @property
    def tokens(self) -> int:
        return self.step * self.recipe.batch_size * self.config.context

    def save(self, folder: Path) -> None:
        self.peak = max(self.peak, peak_memory(self.device) or 0)
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{key}.{name}"] = value
        tensors["rng"] = torch.get_rng_state()
        meta = settings(self.config, self.recipe, self.corpus) | {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "rows": self.rows,
            "losses": self.losses,
            "parameters": self.model.parameter_count(),
            "peak_memory": self.peak or None,  # bytes
            "machine": {"device": self.device.type, "threads": torch.get_num_threads()},
            "versions": versions(),
        }
        with written_whole(folder / CHECKPOINT) as file:
            try:
                save_file(tensors, file, {key: json.dumps(value) for key, value in meta.items()})
            except SafetensorError as error:  # a full disk, for one
                raise OSError(f"{folder / CHECKPOINT} cannot be written ({error})") from error

    def restore(self, folder: Path) -> None:
        meta = metadata(folder / CHECKPOINT)
        with damaged(folder / CHECKPOINT):
            check_settings(meta, settings(self.config, self.recipe, self.corpus), folder)
            tensors = load_file(folder / CHECKPOINT)
            self.model.load_state_dict(model_tensors(tensors))
            self.step, self.seconds, self.peak = meta["step"], meta["seconds"], meta["peak_memory"] or 0
            self.rows, self.losses = [Row(*row) for row in meta["rows"]], meta["losses"]
            for name, parameter in self.model.named_parameters() if self.step else ():
                for key, shape in (("step", ()), ("exp_avg", parameter.shape), ("exp_avg_sq", parameter.shape)):
                    tensor = tensors[f"{key}.{name}"]
                    if tensor.shape != shape:  # the fused optimizer would not look
                        raise TypeError(f"{key}.{name} has shape {tuple(tensor.shape)}")
                    self.optimizer.state[parameter][key] = tensor.to(self.device, copy=True)
            torch.set_rng_state(tensors["rng"])


def train(
    config: Config,
    recipe: Recipe,
    corpus: Corpus,
    folder: Path | None = None,
    device: str = "cpu",
    progress: bool = True,
    resume: bool = False,
) -> tuple[Model, list[Row]]:
    """Train a model from ``recipe.seed``; runs of different schemes at one seed share trunk, batches and order.

    AdamW, cosine schedule, clipping: the constants above and `schedule`. ``folder`` receives ``history.csv``, a row as
    soon as it is known, and ``checkpoint.safetensors`` at the start, every ``checkpoint_every`` steps and at the end.
    A checkpoint replaces the one before only when it is whole. With ``resume`` the run goes on from it as if it had
    never stopped: on one machine, on its CPU, at one ``torch.get_num_threads()``, weights and history (seconds apart)
    are equal bit for bit. Ctrl-C takes effect after the step in progress and its checkpoint.

    Args:
        config: the model.
        recipe: the training.
        corpus: text of at least ``context + 1`` bytes on either side.
        folder: of this run; None keeps nothing on disk.
        device: cpu or cuda.
        progress: show a bar with loss and tokens/s.
        resume: continue the run in ``folder``.

    Returns:
        The trained model, and the history from step 0 on.

    Raises:
        ValueError: settings that do not fit together, or not with the checkpoint; a checkpoint that cannot be read.
        FileExistsError: ``folder`` holds a run, and ``resume`` is not set.
        FileNotFoundError: ``resume`` is set, and there is no checkpoint.
        FloatingPointError: the loss is no longer finite; the checkpoint before is kept.
        KeyboardInterrupt: after Ctrl-C; everything up to the last finished step is in the checkpoint.
    """
    if resume and folder is None:
        raise ValueError("resume=True with folder=None; accepted: the folder of the run to continue")
    folder = None if folder is None else Path(folder)
    if folder is not None and not resume:
        for file in (folder / CHECKPOINT, folder / HISTORY):
            if file.exists():
                raise FileExistsError(
                    f"{file} belongs to a run; accepted: resume it, name another folder, or delete this one"
                )
    run = Run(config, recipe, corpus, device)
    if resume:
        run.restore(folder)
    else:
        run.record()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            run.save(folder)  # before the history, so that whatever has a history can be resumed
        with written_whole(folder / HISTORY) as file:
            write_rows(file, [Row._fields, *run.rows], "w")
    bar = tqdm(total=recipe.steps, initial=run.step, unit="step", disable=not progress)
    with interrupts_held() as pressed, bar:
        while run.step < recipe.steps and not pressed:
            loss = run.advance()
            last = run.step == recipe.steps
            if last or run.step % recipe.eval_every == 0:
                row = run.record()
                if folder is not None:
                    write_rows(folder / HISTORY, [row], "a")
            if folder is not None and (last or run.step % recipe.checkpoint_every == 0):
                run.save(folder)
            bar.set_postfix_str(f"loss {loss:.3f}, {run.tokens / run.seconds:,.0f} tokens/s", refresh=False)
            bar.update()
        if pressed and folder is not None:
            run.save(folder)
    return run.model, run.rows


def load(path: str | Path, device: str = "cpu") -> Model:
    """The model of a checkpoint: a run's folder, or the file itself.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is truncated, not a checkpoint, or of a study that kept no weights; or the device cannot be used.
    """
    path = Path(path)
    file = path / CHECKPOINT if path.is_dir() else path
    meta, device = metadata(file), usable_device(device)
    with damaged(file):
        model, tensors = Model(Config(**meta["config"])), model_tensors(load_file(file))
        if not tensors:
            raise ValueError(
                f"checkpoint {file} has no weights; accepted: one with them (a study keeps those of the first seed of "
                f"every cell, with keep_weights = true)"
            )
        model.load_state_dict(tensors)
    return model.to(device)


def model_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = "model."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def metadata(file: Path) -> dict:
    """What a checkpoint says of itself, beside its tensors. Raises as `load` does."""
    if not file.is_file():
        raise FileNotFoundError(f"checkpoint {file} does not exist; accepted: what a training run has written")
    try:
        with safe_open(file, "pt") as opened:
            meta = {key: json.loads(value) for key, value in (opened.metadata() or {}).items()}
        if "recipe" not in meta:
            raise ValueError("it names no recipe")
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"checkpoint {file} is truncated, or not a checkpoint ({error})") from error
    return meta


@contextmanager
def damaged(file: Path) -> Iterator[None]:
    """Turn what a checkpoint lacks, or has of the wrong kind, into a ValueError that names the file."""
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError, but the file is whole
        raise
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"checkpoint {file} is damaged, or not one of ours ({type(error).__name__}: {error})"
        ) from error


def settings(config: Config, recipe: Recipe, corpus: Corpus) -> dict[str, dict]:
    """What a run that goes on must share with the one that stopped."""
    return {
        "config": asdict(config),
        "recipe": asdict(recipe),
        "corpus": {"sha256": corpus.sha256, "name": corpus.name},
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mhar_minimal": mhar_minimal.__version__,
    }


def finished(folder: Path) -> bool:
    """Whether the folder holds a run that has done all its steps."""
    file = folder / CHECKPOINT
    return file.exists() and (meta := metadata(file))["step"] == meta["recipe"]["steps"]


def check_run(folder: Path, config: Config, recipe: Recipe, corpus: Corpus, device: str) -> None:
    """Raise ValueError where the folder holds a run of other settings, or of another kind of device."""
    if (folder / CHECKPOINT).exists():
        wanted = settings(config, recipe, corpus) | {"machine": {"device": device.partition(":")[0]}}
        check_settings(metadata(folder / CHECKPOINT), wanted, folder)


def check_settings(saved: dict, wanted: dict[str, dict], folder: Path) -> None:
    """Raise ValueError, naming the first setting in which a checkpoint's metadata differ from those wanted.

    A checkpoint older than a field of `Config` or `Recipe` was made by what is now the field's default.
    """
    for part, values in wanted.items():
        if part == "corpus":  # its name is for the reader: the same text may lie under another
            texts = [f"{c['name']} (sha256 {c['sha256'][:12]})" for c in (values, saved[part])]
            if values["sha256"] != saved[part]["sha256"]:
                raise ValueError(f"corpus={texts[0]}, but the run in {folder} has {texts[1]}; {REMEDY}")
            continue
        had = {"config": asdict(Config()), "recipe": asdict(Recipe())}.get(part, {}) | saved[part]
        for name, value in values.items():
            if had.get(name) != value:
                raise ValueError(f"{part} {name}={value!r}, but the run in {folder} has {had.get(name)!r}; {REMEDY}")


def usable_device(name: str) -> torch.device:
    try:
        if torch.device(name).type not in ("cpu", "cuda"):
            raise RuntimeError("not a device that models are trained on")
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # how builds without the device say so
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={name!r} cannot be used ({reason}); accepted: cpu, or cuda with a GPU") from error


def peak_memory(device: torch.device) -> int | None:
    """The most memory held so far, in bytes: PyTorch's share of the GPU, or the resident memory of this process.

    None where the system does not say (Windows). Linux is asked for the memory of this program: ``ru_maxrss`` starts
    at the peak of the process that launched it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """A temporary name to write to; it takes the place of ``file`` once it is whole and on disk, or vanishes."""
    temporary = file.with_name(f"{file.name}.{uuid.uuid4().hex}.partial")  # its own, if two processes write at a time
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_rows(file: Path, rows: Iterable[Iterable], mode: str) -> None:
    """Write (mode "w") or append (mode "a") lines of CSV."""
    with open(file, mode, newline="") as opened:
        csv.writer(opened, lineterminator="\n").writerows(rows)


@contextmanager
def interrupts_held() -> Iterator[list]:
    """Collect Ctrl-C instead of raising it in the middle of a step; raised when the block is left.

    In a thread, and where Ctrl-C is ignored or handled outside Python, nothing is held.
    """
    pressed: list = []
    in_main = threading.current_thread() is threading.main_thread()
    if not (in_main and callable(signal.getsignal(signal.SIGINT))):
        yield pressed
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
