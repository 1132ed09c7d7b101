"""Conversion: not a bit at the start, the definition once gates are open, and everything saved, undone or refused."""

import copy
import gc
import pickle
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from mhar_minimal import Config, Model
from mhar_minimal.convert import convert, load_converted, unconvert
from mhar_minimal.generate import generate
from mhar_minimal.model import Cache
from mhar_minimal.train import parameter_groups

disable_progress_bar()
HUGGING_FACE = {"qwen3": (Qwen3ForCausalLM, Qwen3Config), "llama": (LlamaForCausalLM, LlamaConfig)}
KINDS = ["ours", *HUGGING_FACE]
DIM, LAYERS, SUBLAYERS, VOCAB = 24, 3, 6, 31
EPS = 0.02  # large enough to be missed if it is not the model's own


def plain(kind, dtype=torch.float64, **fields):
    """A model with random weights, norm gains included; the same at every call."""
    torch.manual_seed(1)
    if kind == "ours":
        sizes = dict(dim=DIM, layers=LAYERS, attn_heads=2, kv_heads=1, ffn=40, vocab=VOCAB, context=16, eps=EPS)
        model = Model(Config(**(sizes | fields)))
    else:
        sizes = dict(hidden_size=DIM, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1)
        sizes |= dict(head_dim=12, intermediate_size=40, vocab_size=VOCAB, max_position_embeddings=32)
        others = dict(rms_norm_eps=EPS, pad_token_id=0, tie_word_embeddings=kind == "qwen3")
        model_class, config_class = HUGGING_FACE[kind]
        model = model_class(config_class(**(sizes | others | fields)))
    for p in model.parameters():
        draw = torch.randn_like(p)
        p.data = (draw / p.shape[-1] ** 0.5 if p.ndim == 2 else 1 + draw / 3).to(dtype)
    return model


def open_gates(model, seed=2):
    """Give a converted model's branch random parameters, all of which matter."""
    torch.manual_seed(seed)
    for name, p in model.mhar.named_parameters():
        p.data = torch.randn_like(p) + (1 if "gain" in name else 0)
    return model


def opened(kind, dtype=torch.float64, block_size=4, heads=3, **fields):
    return open_gates(convert(plain(kind, dtype, **fields), block_size, heads))


def tokens(batch=2, length=9, seed=3):
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits(model, ids, **inputs):
    out = model(ids, **inputs)
    return out if isinstance(model, Model) else out.logits


def layers(model):
    return model.layers if isinstance(model, Model) else model.model.layers


def mean_loss(model, ids):
    return F.cross_entropy(logits(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gradients(model, ids):
    grads = torch.autograd.grad(logits(model, ids).square().mean(), list(model.parameters()))
    return {name: g for (name, _), g in zip(model.named_parameters(), grads, strict=True)}


def cached_logits(model, ids, padding=(0, 0, 0)):
    """The first five columns in one call, each later one in its own; rows with so much padding on their left."""
    padding = torch.tensor(padding)
    position = torch.arange(ids.shape[1]) - padding.unsqueeze(1)
    cache = Cache(padding) if isinstance(model, Model) else DynamicCache()
    steps = []
    for now in torch.arange(ids.shape[1]).split([5] + [1] * (ids.shape[1] - 5)):
        if isinstance(model, Model):
            steps.append(model(ids[:, now], cache))
        else:
            mask, at = (position[:, : now[-1] + 1] >= 0).long(), position[:, now].clamp(min=0)
            steps.append(model(ids[:, now], attention_mask=mask, position_ids=at, cache=cache).logits)
    return torch.cat(steps, 1)


# At the start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_conversion_changes_no_logit(kind, dtype):
    model, ids = plain(kind, dtype), tokens()
    before = logits(model, ids)
    assert convert(model, 4, 3) is model
    assert torch.equal(logits(model, ids), before)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert (logits(open_gates(model), ids) - before).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_conversion_changes_no_logit_under_autocast(kind):
    model, ids = plain(kind, torch.float32), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        before = logits(model, ids)
        assert torch.equal(logits(convert(model, 4, 3), ids), before)
        assert (logits(open_gates(model), ids) - before).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_conversion_changes_no_logit_with_a_cache(kind, dtype):
    model, ids = plain(kind, dtype), tokens(3)
    before = [cached_logits(model, ids), cached_logits(model, ids, (4, 0, 1))]
    convert(model, 4, 3)
    assert torch.equal(cached_logits(model, ids), before[0])
    assert torch.equal(cached_logits(model, ids, (4, 0, 1)), before[1])


def test_conversion_changes_no_text_of_ours():
    model, prompts = plain("ours", torch.float32, vocab=256), ["one prompt", "another"]
    before = generate(model, prompts, 20)
    assert generate(convert(model, 4, 3), prompts, 20) == before
    assert generate(open_gates(model), prompts, 20) != before


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_branch_in_float32_leaves_a_bfloat16_model_its_dtype(kind):
    model, ids = plain(kind, torch.bfloat16), tokens()
    before = logits(model, ids)
    convert(model, 4, 3).mhar.float()
    assert torch.equal(logits(model, ids), before)
    assert logits(open_gates(model), ids).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_conversion_changes_gradients_by_rounding_only(kind):
    model, ids = plain(kind), tokens()
    before = gradients(model, ids)
    after = gradients(convert(model, 4, 3), ids)
    for name, g in before.items():
        torch.testing.assert_close(after[name], g, rtol=0, atol=1e-13, msg=name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", HUGGING_FACE)
@torch.no_grad()
def test_conversion_changes_nothing_in_padded_batches_and_in_generation(kind, dtype, attention):
    model, ids = plain(kind, dtype, attn_implementation=attention), tokens(3)
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :4] = left[1, :1] = right[0, 6:] = right[2, 8:] = 0

    def computed():
        padded = [logits(model, ids * mask, attention_mask=mask) for mask in (left, right)]
        sampled = model.generate(
            ids * left, attention_mask=left, max_new_tokens=6, do_sample=True, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        labels = model(ids * left, attention_mask=left, labels=ids.masked_fill(left == 0, -100)).loss
        return [*padded, sampled.sequences, *sampled.logits, labels]

    torch.manual_seed(5)
    before = computed()
    convert(model, 4, 3)
    torch.manual_seed(5)
    assert [i for i, (a, b) in enumerate(zip(before, computed(), strict=True)) if not torch.equal(a, b)] == []


def test_the_branch_starts_as_the_specification_says():
    branch = convert(plain("ours"), 4, 3).mhar
    count = {name.split(".")[0]: 0 for name, _ in branch.named_parameters()}
    for name, p in branch.named_parameters():
        assert torch.equal(p, torch.ones_like(p) if "gain" in name else torch.zeros_like(p)), name
        count[name.split(".")[0]] += p.numel()
    assert count == {"query": SUBLAYERS * DIM, "gain": SUBLAYERS * DIM, "gate": SUBLAYERS, "null": DIM}


# With open gates


def sublayers(model, x):
    """The 2L norms and sublayers of a plain model over the stream [B, T, D], as functions."""
    if isinstance(model, Model):
        rotation = model.rotation[:, : x.shape[1]]
        for layer in model.layers:
            yield layer.attn_norm, lambda h, layer=layer: layer.attn(h, rotation)
            yield layer.mlp_norm, layer.mlp
    else:
        turns = model.model.rotary_emb(x, torch.arange(x.shape[1]).unsqueeze(0))
        for layer in model.model.layers:
            call = dict(position_embeddings=turns, attention_mask=None)
            yield layer.input_layernorm, lambda h, f=layer.self_attn, call=call: f(hidden_states=h, **call)[0]
            yield layer.post_attention_layernorm, layer.mlp


def by_hand(model, branch, ids, block_size, heads):
    """Logits of delta MHAR: a plain model's parts, and the branch written out, head by head."""
    ours, width = isinstance(model, Model), DIM // heads
    x = (model.embedding if ours else model.model.embed_tokens)(ids)
    outputs = []
    for s, (norm, sublayer) in enumerate(sublayers(model, x)):
        query, gain = branch[f"mhar.query.{s}"], branch[f"mhar.gain.{s}"]
        deltas = [sum(outputs[i : i + block_size]) for i in range(0, s, block_size)]
        sources = torch.stack([branch["mhar.null"].expand_as(x), *deltas])
        keys = sources / (sources.square().mean(-1, keepdim=True) + EPS).sqrt() * gain
        readout = []
        for c in (slice(h * width, (h + 1) * width) for h in range(heads)):
            weights = (keys[..., c] * query[c]).sum(-1, keepdim=True).softmax(0)
            readout.append((weights * sources[..., c]).sum(0))
        outputs.append(sublayer(norm(x + branch["mhar.gate"][s] * torch.cat(readout, -1))))
        x = x + outputs[-1]
    return F.linear(model.norm(x), model.embedding.weight) if ours else model.lm_head(model.model.norm(x))


@pytest.mark.parametrize(("block_size", "heads"), [(1, 1), (2, 3), (4, 3), (5, 24), (6, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_open_gates_are_the_definition_with_every_gradient(kind, block_size, heads):
    model, reference, ids = opened(kind, block_size=block_size, heads=heads), plain(kind), tokens()
    branch = {name: p.detach().clone() for name, p in model.named_parameters() if name.startswith("mhar.")}
    leaves = dict(reference.named_parameters()) | {name: p.requires_grad_() for name, p in branch.items()}
    expected = by_hand(reference, branch, ids, block_size, heads)
    wanted = torch.autograd.grad(expected.square().mean(), list(leaves.values()))
    assert (logits(reference, ids) - expected).abs().max() > 0.1
    # The Hugging Face norms compute in float32 whatever they are given.
    close = dict(rtol=0, atol=1e-12) if kind == "ours" else dict(rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(model, ids), expected, **close)
    got = gradients(model, ids)
    assert got.keys() == leaves.keys()
    for name, g in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(got[name], g, msg=lambda text, name=name: f"{name}: {text}", **close)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_with_a_cache_a_call_sees_only_its_own_tokens(kind):
    model, ids = opened(kind), tokens(3)
    close = dict(rtol=0, atol=1e-12 if kind == "ours" else 1e-5)
    torch.testing.assert_close(cached_logits(model, ids), logits(model, ids), **close)
    padding = (4, 0, 1)
    for got, row, pad in zip(cached_logits(model, ids, padding), ids, padding, strict=True):
        torch.testing.assert_close(got[pad:], logits(model, row[None, pad:])[0], **close)


@pytest.mark.parametrize("kind", HUGGING_FACE)
@torch.no_grad()
def test_generate_takes_the_likeliest_token(kind):
    model, ids = opened(kind), tokens(3)
    generated = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    for t in range(9, 17):
        assert torch.equal(logits(model, generated[:, :t])[:, -1].argmax(-1), generated[:, t])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_in_bfloat16_it_is_a_rounding_away(kind):
    model, exact, ids = opened(kind, torch.bfloat16), opened(kind), tokens()
    exact.load_state_dict(model.state_dict())
    error = (logits(model, ids) - logits(exact, ids)).norm() / logits(exact, ids).norm()
    assert 1e-4 < error < 0.05


# Training


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_wake_in_three_steps_and_the_plain_model_has_the_same_first_loss(kind):
    model, ids = convert(plain(kind, torch.float32), 4, 3), tokens(4)
    start = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=0.01)
    later = range(1, SUBLAYERS)
    queries, gains = ({f"mhar.{what}.{s}" for s in later} for what in ("query", "gain"))
    awake = [{"mhar.gate"}, {"mhar.gate", "mhar.null"} | queries, {"mhar.gate", "mhar.null"} | queries | gains]
    losses = []
    for step, expected in enumerate(awake):
        loss = mean_loss(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert {name for name, p in model.named_parameters() if "mhar" in name and p.grad.any()} == expected
        assert (model.mhar.gate.grad != 0).tolist() == [step == 2] + [True] * 5
    assert losses[0] == mean_loss(plain(kind, torch.float32), ids).item() > losses[1] > losses[2]
    assert (model.mhar.gate != 0).all()
    for name in ("mhar.query.0", "mhar.gain.0"):  # neither a gradient nor weight decay
        assert torch.equal(model.get_parameter(name), start[name])


@pytest.mark.parametrize("kind", KINDS)
def test_no_parameter_of_the_branch_decays(kind):
    model = convert(plain(kind), 4, 3)
    names = {id(p): name for name, p in model.named_parameters()}
    decay, keep = ([names[id(p)] for p in group["params"]] for group in parameter_groups(model))
    assert {name for name in names.values() if name.startswith("mhar.")} == {n for n in keep if n.startswith("mhar.")}
    assert sorted(decay) == sorted(name for name, p in plain(kind).named_parameters() if p.ndim == 2)


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_gradient_checkpointing_gives_the_same_gradients(kind):
    """Two passes before their backward passes, in either order: a layer must find the sources of its own pass again."""
    model, batches, calls = opened(kind), [tokens(seed=s) for s in (3, 4)], []
    expected = [gradients(model, ids) for ids in batches]
    for layer in layers(model):
        layer.input_layernorm.register_forward_pre_hook(lambda *args: calls.append(1))
    model.train()
    model.activation_checkpointing_enable()
    for order in ((0, 1), (1, 0)):
        values = [logits(model, ids).square().mean() for ids in batches]
        assert len(calls) == 2 * LAYERS
        for i in order:
            got = torch.autograd.grad(values[i], list(model.parameters()))
            for a, b in zip(got, expected[i].values(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        assert len(calls) == 4 * LAYERS  # every layer was computed again
        calls.clear()
    torch.testing.assert_close(gradients(model, batches[0]), expected[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_checkpointing_that_loses_the_tensor_a_layer_read_is_refused(kind):
    model = opened(kind).train()
    model.activation_checkpointing_enable()
    logits(model, tokens()).square().mean().backward()  # a layer computed again must not pass for that of another pass
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):  # as offloading does
        copied = logits(model, tokens()).square().mean()
    model.activation_checkpointing_enable({"use_reentrant": True})
    reentrant = logits(model, tokens()).square().mean()
    for value in (copied, reentrant):
        with pytest.raises(RuntimeError, match=r"site 4 has no sources: .* use_reentrant=False"):
            value.backward()


# A pass is its own


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_within_a_pass_changes_neither(kind):
    model, other, ids = opened(kind), open_gates(convert(plain(kind), 1, 2), 7), [tokens(seed=s) for s in (3, 4, 5)]
    expected = [logits(m, t) for m, t in zip((model, model, other), ids, strict=True)]
    inner = []

    def call(module, args, output):
        if not inner:
            inner.append(None)
            inner[:] = [logits(model, ids[1]), logits(other, ids[2])]

    layers(model)[1].mlp.register_forward_hook(call)
    for a, b in zip([logits(model, ids[0]), *inner], expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_read_each_others_sources(kind):
    model, batches = opened(kind), [tokens(seed=s) for s in (3, 4)]
    expected, got = [logits(model, ids) for ids in batches], [None, None]
    barrier = threading.Barrier(2, timeout=20)

    def meet(module, args):
        barrier.wait()

    for layer in layers(model):
        layer.mlp.register_forward_pre_hook(meet)

    def work(i):
        got[i] = logits(model, batches[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_pass_leaves_nothing_behind_even_one_that_fails(kind, error):
    model, ids, outputs = opened(kind, block_size=1), tokens(), []  # every output is a source
    expected = logits(model, ids)

    def fail(module, args, output):
        outputs.append(weakref.ref(output))
        if len(outputs) == 1:
            raise error

    layers(model)[1].mlp.register_forward_hook(fail)
    with pytest.raises(error):
        logits(model, ids)
    sys.last_value = None
    gc.collect()
    assert outputs[0]() is None
    assert torch.equal(logits(model, ids), expected)
    assert outputs[1]() is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_outside_a_pass_of_its_model_is_refused(kind):
    model, other, x = opened(kind), opened(kind), torch.randn(1, 2, DIM, dtype=torch.float64)
    norm, others = (layers(m)[1].attn_norm if kind == "ours" else layers(m)[1].input_layernorm for m in (model, other))
    logits(model, tokens())
    for call in (norm, layers(model)[1].mlp):
        with pytest.raises(RuntimeError, match=r"site [23] has no sources"):
            call(x)
    norm.register_forward_pre_hook(lambda *args: others(x))
    with pytest.raises(RuntimeError, match="site 2 has no sources"):
        logits(model, tokens())


def test_it_compiles_without_a_graph_break():
    model, ids = opened("ours"), tokens()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(ids), model(ids))


# Copies, checkpoints, and back


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_reads_its_own_branch_and_weights(kind, copied):
    model, ids = opened(kind), tokens()
    expected = logits(model, ids)
    twin = copied(model)
    assert torch.equal(logits(twin, ids), expected)
    open_gates(twin, seed=8)
    changed = logits(twin, ids)
    assert (changed - expected).abs().max() > 0.1
    twin.mhar.gate.data.zero_()
    assert torch.equal(logits(twin, ids), logits(plain(kind), ids))
    for p in unconvert(twin).parameters():
        p.data.zero_()
    assert torch.equal(logits(twin, ids), torch.zeros_like(expected))
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_save_pretrained_and_back(tmp_path, kind, dtype):
    model, ids = opened(kind, dtype), tokens()
    model.generation_config.max_length = 77
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_converted(tmp_path, dtype=dtype)
    state, saved = loaded.state_dict(), model.state_dict()
    assert state.keys() == saved.keys()
    assert [name for name in saved if not torch.equal(state[name], saved[name])] == []
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert torch.equal(logits(loaded, ids), logits(model.eval(), ids))
    assert torch.equal(loaded(ids, labels=ids).loss, model(ids, labels=ids).loss)
    assert type(loaded) is type(model)
    assert loaded.generation_config.max_length == 77
    assert (loaded.mhar.block_size, loaded.mhar.heads) == (4, 3)
    assert {p.dtype for p in load_converted(tmp_path, dtype=torch.float64).parameters()} == {torch.float64}
    loaded.mhar.gate.data.zero_()
    unconvert(loaded).save_pretrained(tmp_path / "plain")
    again = type(model).from_pretrained(tmp_path / "plain", dtype=dtype)
    assert torch.equal(logits(again, ids), logits(plain(kind, dtype), ids))


def test_safetensors_and_back_for_ours(tmp_path):
    model, ids = opened("ours"), tokens()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = convert(Model(model.config).double(), 4, 3)
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    with pytest.raises(RuntimeError, match="mhar"):
        Model(model.config).load_state_dict(load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
def test_unconverting_gives_back_the_original_exactly(kind):
    model, original, ids = plain(kind), plain(kind), tokens()
    convert(model, 4, 3)
    open_gates(model).mhar.gate.data.zero_()
    assert unconvert(model) is model
    state, expected = model.state_dict(), original.state_dict()
    assert list(state) == list(expected)
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []
    assert torch.equal(logits(model, ids), logits(original, ids))
    for a, b in zip(model.modules(), original.modules(), strict=True):
        assert vars(a).keys() == vars(b).keys()
        assert not a._forward_hooks
        assert not a._forward_pre_hooks
    if kind != "ours":
        assert model.config.to_dict() == original.config.to_dict()
    assert (logits(open_gates(convert(model, 6, 2)), ids) - logits(original, ids)).abs().max() > 0.1


# Refusals


@pytest.mark.parametrize("gate", [1e-30, -1.0, float("nan")])
def test_unconverting_with_an_open_gate_is_refused(gate):
    model, ids = convert(plain("ours"), 4, 3), tokens()
    model.mhar.gate.data[4] = gate
    before = logits(model, ids)
    with pytest.raises(ValueError, match=f"gate={gate} at site 4; accepted"):
        unconvert(model)
    torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(heads=5), "heads=5 does not divide the model's width 24"),
        (dict(heads=0), "heads=0; accepted: an integer from 1 to 24"),
        (dict(heads=2.0), "heads=2.0; accepted: an integer from 1 to 24"),
        (dict(heads=True), "heads=True; accepted"),
        (dict(block_size=0), "block_size=0; accepted: an integer from 1 to 6"),
        (dict(block_size=7), "block_size=7; accepted: an integer from 1 to 6"),
        (dict(block_size=None), "block_size=None; accepted"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_arguments_out_of_range_are_refused_and_nothing_is_changed(kind, arguments, text):
    model = plain(kind)
    with pytest.raises(ValueError, match=text):
        convert(model, **(dict(block_size=4, heads=3) | arguments))
    assert vars(model).keys() == vars(plain(kind)).keys()
    assert not any(m._forward_hooks or m._forward_pre_hooks or hasattr(m, "mhar") for m in model.modules())
    convert(model, 6, 24)


@pytest.mark.parametrize("kind", KINDS)
def test_converting_twice_and_unconverting_a_plain_model_are_refused(kind):
    model = convert(plain(kind), 4, 3)
    with pytest.raises(ValueError, match="model is converted already"):
        convert(model, 4, 3)
    with pytest.raises(ValueError, match="model is not converted"):
        unconvert(plain(kind))


def test_other_architectures_are_refused():
    with pytest.raises(ValueError, match="model is a Linear; accepted: Model, Qwen3ForCausalLM, LlamaForCausalLM"):
        convert(torch.nn.Linear(2, 2), 1, 1)
    with pytest.raises(ValueError, match="model is a Qwen3Model; accepted"):
        convert(plain("qwen3").model, 4, 3)
    for fields in (dict(residual="full"), dict(residual="block", block_size=2), dict(residual="hyper")):
        with pytest.raises(ValueError, match=f"residual='{fields['residual']}'; accepted: 'standard'"):
            convert(plain("ours", **fields), 4, 3)


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_a_branch_that_loading_left_out_is_not_replaced_by_a_new_one(tmp_path, kind):
    opened(kind).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"config.mhar_heads=3, but the model has no branch: .* load_converted"):
        convert(HUGGING_FACE[kind][0].from_pretrained(tmp_path), 4, 3)


def test_loading_what_is_no_converted_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist; accepted"):
        load_converted(tmp_path / "nowhere")
    plain("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="has no mhar_heads; accepted: the folder of a converted model"):
        load_converted(tmp_path / "plain")


@pytest.mark.parametrize("lost", ["mhar.null", "model.norm.weight"])
def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path, lost):
    opened("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks {lost}; accepted: a whole checkpoint"):
        load_converted(tmp_path)
