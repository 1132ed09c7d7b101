"""The benchmark of inference: rows, bytes by hand, ratios of the same turns, blanks, refusals. No time is judged."""

import json
import sys

import pytest
import torch

from mhar_minimal import Model, inference, preset
from mhar_minimal.inference import SCHEMES, build, count_bytes, measure, one_turn, scheme_config
from mhar_minimal.model import Cache

COUNTED = ["weight_bytes", "cache_bytes", "source_bytes", "chunk_source_bytes", "working_bytes"]
TIMED = [f"{what}_{unit}" for what in ("decode", "prefill") for unit in inference.UNITS]
ABOUT = ["setting", "context", "batch", "scheme", "impl", "recorded", "chunk", "peak_bytes", "not_timed"]


def small(monkeypatch, **fields):
    """Every preset becomes a model of one layer."""
    tiny = preset("tiny", **({"layers": 1, "dim": 16, "ffn": 16} | fields))
    monkeypatch.setitem(sys.modules["mhar_minimal.config"].PRESETS, "tiny", tiny)


def test_a_row_per_scheme_with_every_field(monkeypatch):
    small(monkeypatch)
    rows = list(measure("tiny", context=6, batch=2, chunk=4, turns=2))
    assert [row["scheme"] for row in rows] == list(SCHEMES)
    for row in rows:
        assert sorted(row) == sorted(ABOUT + COUNTED + TIMED)
        assert (row["setting"], row["context"], row["batch"], row["chunk"]) == ("tiny", 6, 2, 4)
        assert (row["impl"], row["recorded"], row["not_timed"], row["peak_bytes"]) == ("eager", False, None, None)
        assert all(row[name] > 0 for name in [*COUNTED, "decode_ms", "decode_ratio", "prefill_ms", "prefill_ratio"])
    assert [rows[0][name] for name in TIMED if "_ms" not in name] == [1, [1, 1], 0] * 2


def test_ratios_and_differences_are_of_the_same_turns_and_medians(monkeypatch):
    """Standard takes 1, 2, … ms, full that plus 3: a ratio of medians, or of other turns, would be another number."""
    small(monkeypatch)
    clock = {"standard": 0, "full": 0}

    def one_turn(model, *_):
        kind = model.config.residual
        clock[kind] += 1
        ms = clock[kind] if clock[kind] > 1 else 1000.0  # the first turn warms up
        return ms + 3 * (kind == "full"), 10 * ms + 6 * (kind == "full"), None

    monkeypatch.setattr(inference, "one_turn", one_turn)
    standard, full = measure("tiny", 6, 1, ["standard", "full:1"], turns=3)
    assert (standard["decode_ms"], full["decode_ms"]) == (3, 6)  # of 2, 3, 4
    assert full["decode_ratio"] == 2  # the median of 5/2, 6/3, 7/4
    assert full["decode_us_per_site"] == 1000  # 3 ms, three sites
    assert full["decode_ratio_quartiles"] == [1.875, 2.25]  # of 7/4, 2, 5/2: halfway to the least and the most
    assert full["prefill_us_per_site"] == 2000
    assert clock == {"standard": 4, "full": 4}
    clock.update(standard=0, full=1)  # full is a turn ahead: ratios 6/2, 7/3, 8/4 have the median 7/3
    _, full = measure("tiny", 6, 1, ["standard", "full:1"], turns=3)
    assert full["decode_ratio"] == round(7 / 3, 4)
    assert full["decode_us_per_site"] == round(4000 / 3, 3)


def test_schemes_take_turns(monkeypatch):
    small(monkeypatch)
    order = []
    monkeypatch.setattr(inference, "one_turn", lambda model, *_: order.append(model.config.residual) or (1, 1, None))
    list(measure("tiny", 6, 1, ["standard", "block:1", "full:1"], turns=2))
    assert order == 3 * ["standard", "block", "full"]


def test_bytes_by_hand():
    """Tiny: D = 64, L = 6, 2 kv heads of 16 channels, 4 attention heads, ffn 192, 256 bytes. B = 3, T = 10."""
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192 + 2 * 64 + 2 * 16  # q, out; k, v; MLP; norms; q and k norm
    trunk = 256 * 64 + 6 * layer + 64
    cache = 2 * 6 * 3 * 10 * 2 * 16  # keys and values, layers, B, T, kv heads, channels
    sources = {"standard": 1, "full:1": 13, "full:8": 13, "block:1": 7, "block:8": 7}  # 12 sublayers: 6 blocks of 2
    for scheme, live in sources.items():
        config = scheme_config("tiny", scheme, "eager", 10)
        own = 0 if scheme == "standard" else 13 * 2 * 64  # a query and a gain per site
        for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
            assert count_bytes(config, batch=3, chunk=4, dtype=dtype) == {
                "weight_bytes": size * (trunk + own),
                "cache_bytes": size * cache,
                "source_bytes": size * live * 3 * 10 * 64,
                "chunk_source_bytes": size * live * 3 * 4 * 64,
                "working_bytes": 3 * 4 * (size * 256 + 4 * 10 * 8),
            }
    config = scheme_config("tiny", "block:8", "eager", 10)
    assert count_bytes(config, 3, 100, torch.float32)["chunk_source_bytes"] == 4 * 7 * 3 * 10 * 64  # no more than all
    assert scheme_config("1B", "block:8", "eager", 10).block_size == 9  # 72 sublayers in 8 blocks


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_are_those_of_a_forward_pass(scheme):
    config = scheme_config("tiny", scheme, "eager", 10)
    [model] = build({scheme: config}, "cpu", torch.float32).values()
    schemes, cache = [], Cache(torch.zeros(3, dtype=torch.long))
    model.depth.register_forward_hook(lambda module, args, scheme: schemes.append(scheme))
    with torch.inference_mode():
        model(torch.zeros(3, 10, dtype=torch.long), cache)
    [one] = schemes
    kept = [one.stream] if scheme == "standard" else one.sources
    counted = count_bytes(config, 3, 10, torch.float32)
    assert counted["source_bytes"] == sum(source.nbytes for source in kept)
    assert counted["cache_bytes"] == sum(tensor.nbytes for pair in cache.kept.values() for tensor in pair)
    assert counted["weight_bytes"] == sum(parameter.nbytes for parameter in model.parameters())


def test_models_share_a_trunk_and_are_as_if_drawn():
    models = build({s: scheme_config("tiny", s, "eager", 10) for s in SCHEMES}, "cpu", torch.bfloat16)
    assert len({id(model.embedding) for model in models.values()}) == 1
    for name, model in models.items():
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        torch.testing.assert_close(model.rotation, Model(model.config).rotation)
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1 or "query" in key:
                assert 0.01 < parameter.std() < 0.03, (name, key)
            else:
                assert (parameter == 1).all(), (name, key)


def test_the_timed_step_is_the_step_after_the_whole_prompt():
    """In chunks, and the same again and again: logits as without a cache."""
    configs = {inference.BASELINE: scheme_config("tiny", "full:8", "eager", 7)}
    [model] = build(configs, "cpu", torch.float32).values()
    tokens, logits = torch.randint(256, (2, 8)), []
    model.register_forward_hook(lambda module, args, out: logits.append(out[:, -1]))
    one_turn(model, tokens, 3, False)
    assert len(logits) == 3 + 1 + inference.STEPS  # of 3 + 3 + 1 tokens; a step to warm up
    with torch.inference_mode():
        wanted = model(tokens)[:, -1]
    for step in logits[3:]:
        torch.testing.assert_close(step, wanted)


def test_what_does_not_fit_stays_as_a_blank_row(monkeypatch):
    small(monkeypatch)
    config = scheme_config("tiny", "full:1", "eager", 6)
    need = count_bytes(config, 1, 1024, torch.float32)
    limit = sum(need.values()) - need["source_bytes"] - 1  # one byte short; standard needs less
    monkeypatch.setattr(inference, "memory_limit", lambda on_gpu: limit)
    standard, full = measure("tiny", 6, 1, ["standard", "full:1"], turns=2)
    assert standard["decode_ms"] > 0
    assert full["not_timed"] == f"needs {limit + 1:,} bytes of {limit:,}"
    assert [full[name] for name in TIMED] == len(TIMED) * [None]
    assert {name: full[name] for name in COUNTED} == need
    monkeypatch.setattr(inference, "memory_limit", lambda on_gpu: 10)
    assert all(row["not_timed"] and row["decode_ms"] is None for row in measure("tiny", 6, 1))


@pytest.mark.parametrize("short", ["full", "standard"])
def test_what_runs_out_of_memory_stays_as_a_blank_row(monkeypatch, short):
    small(monkeypatch)

    def one_turn(model, *_):
        if model.config.residual == short:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1.0, 1.0, None

    monkeypatch.setattr(inference, "one_turn", one_turn)
    standard, full = measure("tiny", 6, 1, ["standard", "full:1"], turns=2)
    assert (full["not_timed"], full["decode_ms"]) == ("ran out of memory", None)
    assert (standard["not_timed"] is None) == (short == "full")  # without a baseline there is nothing to compare with


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"setting": "3B"}, "preset='3B'; accepted: tiny"),
        ({"context": 0}, "context=0; accepted: an integer of at least 1"),
        ({"batch": 0}, "batch=0; accepted"),
        ({"chunk": 0}, "chunk=0; accepted"),
        ({"turns": 1}, "turns=1; accepted: an integer of at least 2"),
        ({"schemes": ["full:1"]}, "schemes=full:1; accepted: standard, the baseline"),
        ({"schemes": ["standard", "half:1"]}, "arm='half:1'; accepted: residual"),
        ({"schemes": ["standard", "full:3"]}, "heads=3 does not divide dim=64; accepted"),
        ({"device": "abacus"}, "device='abacus' cannot be used .*; accepted: cpu, or cuda"),
        ({"impls": ["two_phase"]}, "impl=two_phase; accepted: eager, or device=cuda"),
        ({"recorded": True}, "recorded=True, device=cpu; accepted: False, or device=cuda"),
    ],
)
def test_refusals(arguments, text):
    with pytest.raises(ValueError, match=text):
        list(measure(**({"setting": "tiny", "context": 6, "batch": 1} | arguments)))


def test_the_command_merges_its_rows_and_says_how_they_were_made(monkeypatch, tmp_path, capsys):
    small(monkeypatch)
    out = tmp_path / "runs" / "inference.json"
    options = ["--context", "4", "--schemes", "standard", "full:1", "--turns", "2", "--out", str(out)]
    for batch in ("1", "2"):
        monkeypatch.setattr(sys, "argv", ["inference", "--batch", batch, *options])
        inference.main()
    first, second = json.loads(out.read_text())["parts"]
    assert first["command"] == " ".join(["python -m mhar_minimal.inference --batch 1", *options])
    assert (first["machine"]["device"], first["weights"], first["turns"]) == ("cpu", "random, seed 0", 2)
    assert first["versions"]["torch"] == torch.__version__
    assert [row["batch"] for part in (first, second) for row in part["rows"]] == [1, 1, 2, 2]
    assert "scheme full:1" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["inference", "--context", "0", "--out", str(out)])
    with pytest.raises(SystemExit, match="error: context=0; accepted"):
        inference.main()
    assert len(json.loads(out.read_text())["parts"]) == 2  # a refusal adds nothing
    monkeypatch.setattr(sys, "argv", ["inference", "--context", "0", "--out", str(tmp_path / "new.json")])
    with pytest.raises(SystemExit, match="error: context=0; accepted"):
        inference.main()
    assert not (tmp_path / "new.json").exists()


def test_every_default_scheme_exists_for_every_preset():
    for setting in ("tiny", "100M", "350M", "1B"):
        for scheme in SCHEMES:
            assert scheme_config(setting, scheme, "eager", 32768).context == 32769


def test_a_file_that_cannot_take_the_rows_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(inference, "measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "text.md").write_text("not ours")
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "folder").mkdir()
    command = ["inference", "--out"]
    for name, message in (
        ("text.md", "is no file of this command .* accepted: one, or a new one"),
        ("other.json", "is no file of this command"),
        ("folder", "Is a directory"),
        ("text.md/x.json", "Not a directory|File exists"),
    ):
        monkeypatch.setattr("sys.argv", [*command, str(tmp_path / name)])
        with pytest.raises(SystemExit, match=message):
            inference.main()
    assert (tmp_path / "text.md").read_text() == "not ours"
    done = {"parts": [{"command": f"python -m mhar_minimal.inference --out {tmp_path / 'done.json'}"}]}
    (tmp_path / "done.json").write_text(json.dumps(done))
    monkeypatch.setattr("sys.argv", [*command, str(tmp_path / "done.json")])
    with pytest.raises(SystemExit, match="accepted: a file without rows of the same command"):
        inference.main()
