"""Generation: greedy and sampled against the model's own logits, the crop, and refusals."""

import math

import pytest
import torch

from mhar_minimal import Config, Model
from mhar_minimal.generate import generate

TINY = Config(dim=16, layers=2, attn_heads=2, kv_heads=1, ffn=32, context=8, residual="full", heads=4)


@pytest.fixture
def model():
    model = Model(TINY, seed=5)
    with torch.no_grad():  # as drawn, all bytes are nearly as likely, and a byte mostly follows itself
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(50)
        model.embedding.weight[128:] = 0  # ASCII only, which decodes byte by byte
    return model


def likeliest(model, text):
    """The next byte's logits, by one call of the model on the last ``context`` bytes."""
    with torch.no_grad():
        return model(torch.tensor([list(text.encode())[-8:]]))[0, -1]


def test_greedy_takes_the_likeliest_byte_of_the_cropped_context(model):
    text = prompt = "a prompt longer than the context"
    for _ in range(20):
        text += chr(likeliest(model, text).argmax())
    assert generate(model, prompt, 20, temperature=0) == text
    assert len(set(text[len(prompt) :])) > 2
    assert generate(model, prompt[-8:], 20, temperature=0) == text[-28:]  # what is out of the context has no say
    assert generate(model, prompt, 20, temperature=1e-300) == text


def test_sampling_follows_the_softmax_at_its_temperature(model):
    wanted = (likeliest(model, "ab").double() / 0.03).softmax(0)
    assert 0.1 < wanted.max() < 0.9
    assert likeliest(model, "ab").softmax(0).max() < 0.01
    draws = 600
    hits = sum(generate(model, "ab", 1, 0.03, seed) == "ab" + chr(wanted.argmax()) for seed in range(draws))
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
    model = Model(Config(dim=16, layers=1, attn_heads=2, kv_heads=1, ffn=32, context=8, vocab=300))
    with torch.no_grad():
        model.embedding.weight[256:] *= 1000
        model.embedding.weight[128:256] = 0
    logits = likeliest(model, "ab")
    assert logits.argmax() >= 256
    assert generate(model, "ab", 1, temperature=0) == "ab" + chr(logits[:256].argmax())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"length": 0}, "length=0; accepted"),
        ({"length": 2.0}, "length=2.0; accepted"),
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
