"""Every variant against its formula in float64, written out here; its start, its gradients and its refusals."""

import json
from dataclasses import asdict

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mhar_minimal import Config, Model, preset, probe
from mhar_minimal.data import load_corpus
from mhar_minimal.depth import Depth
from mhar_minimal.train import CHECKPOINT, Recipe, load, parameter_groups, train
from mhar_minimal.variants import SCHEMES, WINDOW

SUBLAYERS = 6
SMALL = dict(residual="full", dim=24, layers=3, attn_heads=2, kv_heads=1, ffn=16, vocab=17, context=8, eps=0.1)


def config(mixing, heads=1, **fields):
    return Config(**(SMALL | {"mixing": mixing, "heads": heads} | fields))


def make(mixing, heads):
    """A `Depth` in float64 at random parameters."""
    depth = Depth(config(mixing, heads)).double()
    for p in depth.parameters():
        p.data = torch.randn_like(p)
    return depth


def history():
    return [torch.randn(2, 3, 24, dtype=torch.float64, requires_grad=True) for _ in range(SUBLAYERS + 1)]


def run(depth, values):
    """All 2L + 1 read-outs and depth weights, sublayer i writing ``values[i + 1]`` whatever it read."""
    scheme, readouts = depth(values[0]), []
    for output in values[1:]:
        readouts.append(scheme.read())
        scheme.write(output)
    readouts.append(scheme.read())
    return readouts, scheme.weights


def by_formula(mixing, depth, values, site, heads):
    """The read-out [B, T, D] and weights [N, B, T, H] of a site, one head and one source after the other."""
    width, sources = 24 // heads, values[: site + 1]
    readout, weights = [], []
    for h in range(heads):
        own = slice(h * width, (h + 1) * width)
        logits = []
        for i, v in enumerate(sources):
            if mixing == "input_independent":
                logits.append(depth.scores[site][i, h] * torch.ones(2, 3, dtype=torch.float64))
                continue
            key = v if mixing == "no_key_norm" else v / ((v**2).mean(-1, keepdim=True) + 0.1).sqrt()
            key = (key * depth.gain[site])[..., own]
            if mixing == "input_dependent":
                newest = sources[-1]
                newest = newest / ((newest**2).mean(-1, keepdim=True) + 0.1).sqrt()
                query = torch.einsum("de,bte->btd", depth.query_matrix[site], newest) / 24
            else:
                query = depth.query[site].expand_as(v)
            logits.append((query[..., own] * key).sum(-1))
        if mixing == "sigmoid":
            alpha = [1 / (1 + torch.exp(-x)) for x in logits]
        else:
            counted = [site - i < 4 or mixing != "window" for i in range(site + 1)]
            total = sum(x.exp() for x, counts in zip(logits, counted, strict=True) if counts)
            alpha = [x.exp() / total if counts else 0 * x for x, counts in zip(logits, counted, strict=True)]
        weights.append(torch.stack(alpha))
        readout.append(sum(a.unsqueeze(-1) * v[..., own] for a, v in zip(alpha, sources, strict=True)))
    return torch.cat(readout, -1), torch.stack(weights, -1)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("mixing", ["softmax", *SCHEMES])
def test_every_site_is_the_formula_with_every_gradient(mixing, heads):
    depth, values = make(mixing, heads), history()
    leaves = [*values, *depth.parameters()]
    found, weights = run(depth, values)
    expected, expected_weights = zip(
        *(by_formula(mixing, depth, values, site, heads) for site in range(SUBLAYERS + 1)), strict=True
    )
    upstream = torch.randn(SUBLAYERS + 1, 2, 3, 24, dtype=torch.float64)
    grads, expected_grads = (
        torch.autograd.grad((torch.stack(tuple(x)) * upstream).sum(), leaves, allow_unused=False)
        for x in (found, expected)
    )
    for a, b in zip([*found, *weights, *grads], [*expected, *expected_weights, *expected_grads], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mixing", SCHEMES)
def test_variants_differ_from_softmax_and_heads_from_one(mixing):
    """Otherwise the formulas above could agree on nothing worth comparing."""
    values = history()
    softmax, one, three = make("softmax", 3), make(mixing, 1), make(mixing, 3)
    for depth in (one, three):
        same = {name: p for name, p in softmax.state_dict().items() if name in depth.state_dict()}
        depth.load_state_dict(same, strict=False)
    last = run(three, values)[0][-1]
    assert (last - run(softmax, values)[0][-1]).abs().max() > 1e-3
    assert (last - run(one, values)[0][-1]).abs().max() > 1e-3


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("mixing", SCHEMES)
def test_every_variant_starts_as_the_mean_of_what_it_reads(mixing, heads):
    depth, values = Depth(config(mixing, heads)).double(), history()
    for site, readout in enumerate(run(depth, values)[0]):
        read = values[max(0, site + 1 - WINDOW) : site + 1] if mixing == "window" else values[: site + 1]
        mean = torch.stack(read).mean(0)
        expected = mean * len(read) / 2 if mixing == "sigmoid" else mean
        torch.testing.assert_close(readout, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("mixing", SCHEMES)
def test_the_model_starts_as_prenorms_function_but_for_the_window(mixing):
    tokens = torch.arange(16).view(2, 8)
    standard = Model(Config(**(SMALL | {"residual": "standard", "eps": 1e-14}))).double()(tokens)
    apart = (Model(config(mixing, 4, eps=1e-14)).double()(tokens) - standard).abs().max()
    assert (apart > 1e-3) if mixing == "window" else (apart < 1e-9)


@pytest.mark.parametrize(
    ("mixing", "count"),
    [
        ("sigmoid", 7 * 2 * 24),
        ("no_key_norm", 7 * 2 * 24),
        ("window", 7 * 2 * 24),
        ("input_independent", 3 * 28),  # H = 3 heads times 1 + 2 + … + 7 sources
        ("input_dependent", 7 * (24 * 24 + 24)),
    ],
)
def test_parameters_are_counted_and_none_of_them_decays(mixing, count):
    model = Model(config(mixing, 3))
    assert sum(p.numel() for p in model.depth.parameters()) == count
    decay, keep = (group["params"] for group in parameter_groups(model))
    assert not {id(p) for p in model.depth.parameters()} & {id(p) for p in decay}
    assert {id(p) for p in model.depth.parameters()} <= {id(p) for p in keep}


@pytest.mark.parametrize("mixing", SCHEMES)
def test_training_moves_every_parameter_that_can_and_resumes_bit_for_bit(mixing, tmp_path, monkeypatch):
    monkeypatch.setenv("MHAR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("\n\n".join(f"{i} sheep and {i * i} goats, no wolf." for i in range(100)))
    corpus, c = load_corpus(tmp_path / "text.txt"), config(mixing, 2, vocab=256, eps=1e-6)
    recipe = Recipe(steps=4, batch_size=2, eval_every=4, eval_windows=2, checkpoint_every=2)
    model, rows = train(c, recipe, corpus, tmp_path / "run", progress=False)
    for name, p in model.depth.named_parameters():
        start = 1 if name.startswith("gain") else 0
        alone = name.endswith(".0") and mixing != "sigmoid"  # site 0 has one source, whose weight is 1
        assert (p == start).all() == alone, name
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), load(tmp_path / "run").parameters(), strict=True))
    seen = probe.trace(model, corpus.val[:8].long().unsqueeze(0))
    assert [len(w) for w in seen.weights] == [1, 2, 3, 4, 5, 6, 7]
    again, rows_again = train(c, recipe, corpus, tmp_path / "run", progress=False, resume=True)
    assert rows_again == rows
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("mixing", SCHEMES)
def test_bfloat16_sources_are_scored_in_float32(mixing):
    depth = make(mixing, 3).float()
    values = [v.detach().bfloat16() for v in history()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        readouts, weights = run(depth, values)
    exact, exact_weights = run(depth.double(), [v.double() for v in values])
    for a, b, w, exact_w in zip(readouts, exact, weights, exact_weights, strict=True):
        assert a.dtype == torch.bfloat16
        assert w.dtype == torch.float32
        assert (w - exact_w).abs().max() < 1e-5
        assert (a - b).abs().max() <= 2**-7 * b.abs().max()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixing": "mean"}, "mixing='mean'; accepted: softmax, sigmoid, no_key_norm, input_independent"),
        ({"residual": "standard", "mixing": "sigmoid"}, "mixing='sigmoid' with residual='standard'"),
        ({"residual": "block", "block_size": 2, "mixing": "window"}, "mixing='window' with residual='block'"),
        ({"impl": "fused", "mixing": "sigmoid"}, "mixing='sigmoid' with residual='full' and impl='fused'; accepted: s"),
        ({"mixing": "input_dependent", "query_init": "random"}, "query_init='random' with mixing='input_dependent'"),
        ({"mixing": "input_independent", "query_init": "random"}, "accepted: zero"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Config(**(SMALL | fields))


def test_slices_are_compared_under_softmax_only():
    with pytest.raises(ValueError, match="mixing='sigmoid'; accepted: softmax"):
        probe.slice_disagreement(Model(config("sigmoid")), torch.zeros(1, 8, dtype=torch.int64))


def test_checkpoints_from_before_the_field_load_and_resume_as_softmax(tmp_path, monkeypatch):
    monkeypatch.setenv("MHAR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("\n\n".join(f"{i} sheep and {i * i} goats, no wolf." for i in range(100)))
    corpus, c = load_corpus(tmp_path / "text.txt"), preset("tiny", residual="full", layers=1, context=16)
    recipe = Recipe(steps=2, batch_size=2, eval_every=2, eval_windows=2)
    rows = train(c, recipe, corpus, tmp_path, progress=False)[1]
    with safe_open(tmp_path / CHECKPOINT, "pt") as file:
        meta = file.metadata()
    older = {name: value for name, value in asdict(c).items() if name != "mixing"}
    tensors = {name: tensor.clone() for name, tensor in load_file(tmp_path / CHECKPOINT).items()}
    save_file(tensors, tmp_path / CHECKPOINT, meta | {"config": json.dumps(older)})
    assert load(tmp_path).config == c
    assert train(c, recipe, corpus, tmp_path, progress=False, resume=True)[1] == rows
    sigmoid = preset("tiny", residual="full", layers=1, context=16, mixing="sigmoid")
    with pytest.raises(ValueError, match=r"config mixing='sigmoid', but the run in .* has 'softmax'"):
        train(sigmoid, recipe, corpus, tmp_path, progress=False, resume=True)
