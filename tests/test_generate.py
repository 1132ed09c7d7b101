"""Generation: every byte against the model's logits without a cache, rows, stops, what is computed, and refusals."""

import gc
import importlib.util
import math
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from mhar_minimal import Config, Model
from mhar_minimal.generate import generate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = Config(dim=16, layers=2, attn_heads=2, kv_heads=1, ffn=32, context=8)
SCHEMES = [
    dict(residual="standard"),
    dict(residual="hyper"),
    dict(residual="full"),
    dict(residual="full", heads=4),
    dict(residual="block", heads=2, block_size=3),
]
KERNELS = ["fused", "two_phase"] if importlib.util.find_spec("triton") else []
IMPLS = [scheme | dict(impl=impl) for scheme in SCHEMES[2:] for impl in KERNELS]


def drawn(**fields):
    """A model that finds some bytes likely and others not; as drawn, all are nearly as likely."""
    model = Model(replace(TINY, **fields), seed=5)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.weight.mul_(50)
        for parameter in model.depth.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        model.embedding.weight[128:] = 0  # hardly ever but ASCII, which decodes byte by byte
    return model.to(DEVICE)


@pytest.fixture
def model():
    return drawn(residual="full", heads=4)


def from_scratch(model, prompt, length, temperature=0.0, seed=0):
    """What generation means: every byte by one call of the model, on the last ``context`` bytes and with no cache.

    Also the least lead that a greedy choice had over the next.
    """
    generator, tokens, lead = torch.Generator().manual_seed(seed), list(prompt.encode()), math.inf
    with torch.no_grad():
        for _ in range(length):
            logits = model(torch.tensor([tokens[-model.config.context :]], device=DEVICE))[0, -1].double().cpu()
            if temperature:
                token = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
            else:
                (first, second), (token, _) = logits.topk(2)
                lead = min(lead, (first - second).item())
            tokens.append(int(token))
    return prompt + bytes(tokens[-length:]).decode(errors="replace"), lead


@contextmanager
def recorded(model):
    """The shapes [B, T] of the tokens that each call of the model embeds, and its residual schemes, weakly."""
    shapes, schemes = [], []

    def record(module, args, scheme):
        shapes.append(tuple(args[0].shape[:2]))
        schemes.append(weakref.ref(scheme))

    hook = model.depth.register_forward_hook(record)
    yield shapes, schemes
    hook.remove()


def likeliest(model, text):
    """The next byte's logits, by one call of the model on the last ``context`` bytes."""
    with torch.no_grad():
        return model(torch.tensor([list(text.encode())[-8:]], device=DEVICE))[0, -1].cpu()


def test_greedy_takes_the_likeliest_byte_of_the_cropped_context(model):
    text = prompt = "a prompt longer than the context"
    for _ in range(20):
        text += chr(likeliest(model, text).argmax())
    assert generate(model, prompt, 20, temperature=0) == text
    assert len(set(text[len(prompt) :])) > 2
    assert generate(model, prompt[-8:], 20, temperature=0) == text[-28:]  # what is out of the context has no say
    assert generate(model, prompt, 20, temperature=1e-308) == text


def test_sampling_follows_the_softmax_at_its_temperature(model):
    wanted = (likeliest(model, "ab").double() / 2).softmax(0)
    assert 0.1 < wanted.max() < 0.5
    assert likeliest(model, "ab").softmax(0).max() > wanted.max() + 0.2
    draws = 600
    hits = sum(generate(model, "ab", 1, 2, seed) == "ab" + chr(wanted.argmax()) for seed in range(draws))
    p = wanted.max().item()
    assert abs(hits - draws * p) < 4 * math.sqrt(draws * p * (1 - p))


def test_a_seed_is_a_text(model):
    a = generate(model, "once", 40, temperature=1, seed=1)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    assert generate(model, "once", 40, temperature=1, seed=1) == a
    assert generate(model, "once", 40, temperature=1, seed=2) != a
    torch.set_rng_state(state)
    assert a.startswith("once")


def test_the_prompt_comes_back_as_it_was_and_half_a_character_is_replaced(model):
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.embedding.weight[0xC3] = 1  # the first byte of "é" has the largest logit after itself
    text = generate(model, "é", 2, temperature=0)
    assert text.startswith("é")
    assert generate(model, "Ã".encode()[:1].decode("latin-1"), 1, temperature=0)[0] == "Ã"


def test_ids_that_are_no_bytes_are_never_drawn():
    model = Model(replace(TINY, vocab=300)).to(DEVICE)
    with torch.no_grad():
        model.embedding.weight[256:] *= 1000
        model.embedding.weight[128:256] = 0
    logits = likeliest(model, "ab")
    assert logits.argmax() >= 256
    assert generate(model, "ab", 1, temperature=0) == "ab" + chr(logits[:256].argmax())


@pytest.mark.parametrize("prompt", ["a", "eight by", "longer than the context"])
@pytest.mark.parametrize("fields", SCHEMES, ids=str)
def test_every_byte_is_that_of_recomputing_from_scratch(fields, prompt):
    """Token for token in float64, up to the end of the context and past it."""
    model = drawn(**fields).double()
    text, lead = from_scratch(model, prompt, 40)
    assert lead > 1e-6
    assert generate(model, prompt, 40, temperature=0) == text
    for temperature, seed in ((1.0, 0), (0.3, 1), (3.0, 2)):
        text, _ = from_scratch(model, prompt, 40, temperature, seed)
        assert generate(model, prompt, 40, temperature, seed) == text
        assert len(set(text[len(prompt) :])) > 5


@pytest.mark.parametrize("fields", SCHEMES + IMPLS, ids=str)
def test_kernels_write_what_the_definition_writes(fields):
    """Greedily in float32, where no choice is close; one prompt, then rows of several lengths in pieces."""
    model, definition = drawn(**fields, context=16), drawn(**(fields | dict(impl="eager")), context=16).double()
    prompts = ["a", "one two three", "some"]
    texts, leads = zip(*(from_scratch(definition, prompt, 5) for prompt in prompts))
    assert min(leads) > 1e-3  # logits differ by up to 3e-5
    assert generate(model, prompts[0], 5, temperature=0) == texts[0]
    assert generate(model, prompts, 5, temperature=0, prefill_chunk=6) == list(texts)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("fields", SCHEMES, ids=str)
def test_a_row_is_what_it_is_alone(fields, temperature):
    model = drawn(**fields, context=24).double()
    prompts = ["a", "Some words", "a", "longer than the context of 24", "exactly twenty-four byte"]
    texts = generate(model, prompts, 30, temperature, seed=3)
    for i, prompt in enumerate(prompts):
        assert texts[i] == from_scratch(model, prompt, 30, temperature, 3 + i)[0]
    assert (texts[0] == texts[2]) == (temperature == 0)  # equal prompts draw numbers of their own
    assert generate(model, prompts[1:2], 30, temperature, seed=4) == texts[1:2]
    assert generate(model, prompts[1], 30, temperature, seed=4) == texts[1]


@pytest.mark.parametrize("fields", SCHEMES, ids=str)
def test_a_prompt_in_pieces_is_the_prompt(fields):
    model = drawn(**fields, context=24).double()
    prompts = ["a", "Some words", "longer than the context of 24"]
    whole = generate(model, prompts, 20, temperature=1)
    for chunk in (1, 5, 24, 1000):
        assert generate(model, prompts, 20, temperature=1, prefill_chunk=chunk) == whole


def test_only_new_bytes_are_computed_while_the_context_lasts(model):
    with recorded(model) as (shapes, _):
        generate(model, "abc", 8)
    assert shapes == [(1, 3), (1, 1), (1, 1), (1, 1), (1, 1), (1, 1), (1, 8), (1, 8)]  # the context is 8
    with recorded(model) as (shapes, _):
        generate(model, ["abcde", "a"], 3, prefill_chunk=2)
    assert shapes == [(2, 2), (2, 2), (2, 1), (2, 1), (2, 1)]


@pytest.mark.parametrize("fields", SCHEMES + IMPLS, ids=str)
def test_no_scheme_outlives_its_call(fields):
    """Attention Residuals carry nothing from token to token: each has its own scheme, gone when the next begins."""
    model = drawn(**fields)
    gc.disable()  # gone at once, not when it happens to be collected
    try:
        with recorded(model) as (shapes, schemes):
            alive = []
            hook = model.depth.register_forward_pre_hook(
                lambda module, args: alive.append(sum(scheme() is not None for scheme in schemes))
            )
            generate(model, "abc", 5)
            hook.remove()
    finally:
        gc.enable()
    assert shapes == [(1, 3)] + 4 * [(1, 1)]
    assert alive == 5 * [0]


def cut(text, prompt, stop):
    """The text up to the first ``stop`` after the prompt."""
    head, found, _ = text[len(prompt) :].partition(stop)
    return prompt + head + found


def test_a_stop_ends_the_text_and_the_work(model):
    prompt = "abc"
    text = generate(model, prompt, 40, seed=1)
    new = text[len(prompt) :]
    for stop in (new[0], new[7], new[3:6], new[:2], new[-2:], new):
        wanted = cut(text, prompt, stop)
        with recorded(model) as (shapes, _):
            assert generate(model, prompt, 40, seed=1, stop=stop) == wanted
        assert len(shapes) == len(wanted) - len(prompt)
    assert generate(model, prompt, 40, seed=1, stop="\0\0\0") == text


def test_a_stop_is_looked_for_among_new_bytes_alone(model):
    text = generate(model, "abc", 10, seed=1)
    assert text.count("abc") == text.count("c" + text[3]) == 1
    assert generate(model, "abc", 10, seed=1, stop="abc") == text
    assert generate(model, "abc", 10, seed=1, stop="c" + text[3]) == text


def test_every_row_has_its_own_stop(model):
    prompts = ["abc", "a longer one", "x"]
    texts = generate(model, prompts, 60, seed=1)
    stop = next(c for c in texts[0][3:] if sum(c in t[len(p) :] for t, p in zip(texts, prompts)) == 2)
    wanted = [cut(text, prompt, stop) for text, prompt in zip(texts, prompts)]
    assert len({len(w) - len(p) for w, p in zip(wanted, prompts)}) == 3  # one of them the full length
    assert generate(model, prompts, 60, seed=1, stop=stop) == wanted


def test_a_stop_is_compared_as_utf_8(model):
    text = generate(model, "abc", 20, temperature=0)
    x, y = text[8:10]
    assert len({x, y} - set("abc")) == 2
    ids = torch.arange(256)
    ids[[ord(x), 0xC3]], ids[[ord(y), 0xA9]] = ids[[0xC3, ord(x)]], ids[[0xA9, ord(y)]]
    model.embedding.weight.data = model.embedding.weight[ids]  # the same model, but x and y are the two bytes of é
    assert generate(model, "abc", 20, temperature=0, stop="é") == text[: text.index(x + y)] + "é"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"prompt": ""}, "prompt is empty: ''; accepted"),
        ({"prompt": []}, r"prompt is empty: \[\]; accepted"),
        ({"prompt": ["a", ""]}, r"prompt is empty: \['a', ''\]; accepted"),
        ({"length": 0}, "length=0; accepted"),
        ({"length": 2.0}, "length=2.0; accepted"),
        ({"length": True}, "length=True; accepted"),
        ({"prefill_chunk": 0}, "prefill_chunk=0; accepted"),
        ({"prefill_chunk": 1.5}, "prefill_chunk=1.5; accepted"),
        ({"stop": ""}, "stop is empty; accepted"),
        ({"temperature": -1}, "temperature=-1; accepted"),
        ({"temperature": math.nan}, "temperature=nan; accepted"),
        ({"temperature": math.inf}, "temperature=inf; accepted"),
    ],
)
def test_refusals(model, arguments, text):
    with pytest.raises(ValueError, match=text):
        generate(model, **({"prompt": "a", "length": 1} | arguments))


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab=100"):
        generate(Model(Config(dim=16, layers=1, vocab=100)), "a", 1)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_model_that_is_not_finite_is_refused(model, temperature):
    with torch.no_grad():
        model.norm.weight[3] = math.nan
    with pytest.raises(FloatingPointError, match="logits of new byte 1 are not finite"):
        generate(model, "a", 2, temperature)
