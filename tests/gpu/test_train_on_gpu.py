"""A run on a GPU trains, records the GPU's memory, and goes on after a crash."""

import csv
from dataclasses import replace

import pytest

import mhar_minimal.train as package_train
from mhar_minimal import Model
from mhar_minimal.ablate import ablate, read_probes
from mhar_minimal.config import MIXINGS, Config
from mhar_minimal.convert import convert
from mhar_minimal.data import encode, load_corpus
from mhar_minimal.train import CHECKPOINT, Recipe, Run, metadata, train

CONFIG = Config(residual="full", heads=4, dim=16, layers=2, attn_heads=2, kv_heads=1, ffn=32, context=16)
RECIPE = Recipe(steps=11, batch_size=4, seed=3, eval_every=3, eval_windows=5, checkpoint_every=4)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("MHAR_CACHE", str(tmp_path / "cache"))
    paragraphs = [f"fox {i} jumps over {i * i % 97} lazy dogs.\n\n" for i in range(200)]
    (tmp_path / "text.txt").write_text("".join(paragraphs), encoding="utf-8")
    assert len(encode("".join(paragraphs))) > 5000
    return load_corpus(tmp_path / "text.txt")


def test_on_a_gpu_a_run_trains_and_resumes(corpus, tmp_path, monkeypatch):
    advance = Run.advance

    def crash(run):
        if run.step == 7:
            raise RuntimeError("pulled the plug")
        return advance(run)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "advance", crash)
        with pytest.raises(RuntimeError, match="pulled the plug"):
            train(CONFIG, RECIPE, corpus, tmp_path / "run", "cuda", progress=False)
    model, rows = train(CONFIG, RECIPE, corpus, tmp_path / "run", "cuda", progress=False, resume=True)
    on_cpu = train(CONFIG, RECIPE, corpus, progress=False)[1]
    assert model.embedding.weight.is_cuda
    assert rows[-1].val_loss == pytest.approx(on_cpu[-1].val_loss, abs=1e-2)
    assert metadata(tmp_path / "run" / CHECKPOINT)["peak_memory"] > 0


@pytest.mark.parametrize(
    "fields",
    [
        dict(residual="standard", heads=1),
        dict(residual="hyper", heads=1),
        *(dict(residual="full", impl=impl) for impl in ("eager", "fused", "two_phase")),
        *(dict(residual="block", block_size=2, impl=impl) for impl in ("eager", "two_phase")),
        *(dict(residual="full", mixing=mixing) for mixing in MIXINGS[1:]),
        *(dict(residual=residual, heads=1, autocast=True) for residual in ("standard", "hyper", "full")),
        dict(residual="full", impl="two_phase", autocast=True),
    ],
    ids=lambda fields: "-".join(str(value) for value in fields.values()),
)
def test_recorded_steps_are_the_steps(fields, corpus, monkeypatch):
    """On a GPU a step's launches are recorded once and replayed: the same numbers, bit for bit."""

    def losses():
        run = Run(replace(CONFIG, **fields), RECIPE, corpus, "cuda")
        return [run.advance() for _ in range(5)]

    recorded = losses()
    monkeypatch.setattr(package_train, "record", lambda job: job)
    assert recorded == losses()
    assert len(set(recorded)) == 5


@pytest.mark.parametrize("residual", ["standard", "hyper", "full"])
def test_with_autocast_it_learns_as_without(residual, corpus):
    """Over many recorded steps, on the width of the recorded study."""

    def loss(autocast):
        fields = dict(residual=residual, heads=1, dim=384, attn_heads=6, kv_heads=6, ffn=256, context=64)
        config = replace(CONFIG, autocast=autocast, **fields)
        rows = train(config, replace(RECIPE, steps=150, lr=6e-4, batch_size=16), corpus, None, "cuda", progress=False)[
            1
        ]
        return rows[-1].val_loss

    assert loss(True) == pytest.approx(loss(False), rel=0.1)


def test_recorded_steps_of_a_converted_model(corpus, monkeypatch):
    """Its hooks are recorded with it."""

    def losses():
        config = replace(CONFIG, residual="standard", heads=1)
        run = Run(config, replace(RECIPE, lr=0.1), corpus, "cuda", convert(Model(config), 2, 4))
        return [run.advance() for _ in range(5)], run.model.mhar.gate.tolist()

    recorded = losses()
    monkeypatch.setattr(package_train, "record", lambda job: job)
    assert recorded == losses()
    assert any(recorded[1])


PLAN = """
hypotheses = "none"
metric = "none"
difference = "none"
corpus = {corpus!r}
at_once = 2
precision = "high"

[model]  # of the recorded study
dim = 384
layers = 8
attn_heads = 6
kv_heads = 6
ffn = 1024
context = 256
autocast = {autocast}

[recipe]
steps = 12
batch_size = 32
eval_every = 6
eval_windows = 8

[grids.main]
seeds = [0]
cells = [
    {{residual = ["standard", "hyper"]}},
    {{residual = "full", impl = "two_phase", heads = [1, 8]}},
    {{residual = "block", impl = "two_phase", block_size = 4, heads = 2}},
    {{residual = "full", mixing = ["softmax", "input_dependent", "window"]}},
]
"""


@pytest.mark.parametrize("autocast", ["false", "true"])
def test_a_cell_and_a_seed_make_the_same_numbers(autocast, corpus, tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN.format(corpus=str(tmp_path / "text.txt"), autocast=autocast))

    def numbers(folder):
        ablate(tmp_path / "plan.toml", tmp_path / folder, "cuda", None, {"machine": {}})
        with open(tmp_path / folder / "results.csv", newline="") as file:
            return [line | {"seconds": None} for line in csv.DictReader(file)], read_probes(tmp_path / folder)

    first = numbers("first")
    assert first == numbers("second")
    assert len({line["val_loss"] for line in first[0]}) > 8  # every cell has learnt its own
    assert len(first[1]) == 4  # of the routed cells with softmax
