"""A wrong combination is refused when the configuration is made, with the field, its value and what is accepted."""

import dataclasses

import pytest

from mhar_minimal import PRESETS, Config, preset


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"residual": "dense"}, "residual='dense'; accepted: standard, full, block, hyper"),
        ({"residual": "full", "heads": 3}, "heads=3 does not divide dim=64"),
        ({"residual": "full", "heads": 0}, "heads=0; accepted: an integer of at least 1"),
        ({"residual": "full", "heads": 2.0}, "heads=2.0; accepted: an integer"),
        ({"residual": "full", "heads": True}, "heads=True; accepted: an integer"),
        ({"heads": 4}, "heads=4 with residual='standard'; accepted: 1"),
        ({"residual": "hyper", "heads": 4}, "heads=4 with residual='hyper'; accepted: 1"),
        ({"residual": "block"}, "block_size=None with residual='block'; accepted: 1 to 12 sublayers"),
        ({"residual": "block", "block_size": 0}, "block_size=0 with residual='block'; accepted: 1 to 12"),
        ({"residual": "block", "block_size": 13}, "block_size=13 with residual='block'; accepted: 1 to 12"),
        ({"residual": "block", "block_size": 2.5}, "block_size=2.5 with residual='block'"),
        ({"residual": "block", "block_size": True}, "block_size=True with residual='block'"),
        ({"residual": "full", "block_size": 4}, "block_size=4 with residual='full'; accepted: None"),
        ({"residual": "full", "query_init": "normal"}, "query_init='normal'; accepted: zero, random"),
        ({"query_init": "random"}, "query_init='random' with residual='standard'; accepted: zero"),
        ({"residual": "full", "impl": "triton"}, "impl='triton'; accepted: eager, fused, two_phase"),
        ({"impl": "fused"}, "impl='fused' with residual='standard'; accepted: eager"),
        ({"residual": "hyper", "impl": "two_phase"}, "impl='two_phase' with residual='hyper'; accepted: eager"),
        ({"attn_heads": 5}, "attn_heads=5 with dim=64"),
        ({"attn_heads": 64, "kv_heads": 64}, "attn_heads=64 with dim=64"),
        ({"kv_heads": 3}, "kv_heads=3; accepted: a divisor of attn_heads=4"),
        ({"layers": 0}, "layers=0"),
        ({"context": -1}, "context=-1"),
        ({"eps": "1e-6"}, "eps='1e-6'; accepted: a number above 0"),
        ({"eps": 0.0}, "eps=0.0; accepted: a number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"autocast": 1}, "autocast=1; accepted: True, False"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        Config(**fields)


@pytest.mark.parametrize("block_size", range(1, 13))
def test_every_block_size_is_accepted_ragged_or_not(block_size):
    assert preset("tiny", residual="block", heads=4, block_size=block_size).block_size == block_size


def test_presets_are_those_of_the_paper():
    sizes = {name: (c.dim, c.layers, c.attn_heads, c.kv_heads, c.ffn, c.context) for name, c in PRESETS.items()}
    assert sizes["100M"] == (512, 12, 8, 4, 1536, 2048)
    assert sizes["350M"] == (1024, 24, 16, 8, 4096, 1024)
    assert sizes["1B"] == (1280, 36, 16, 8, 5120, 1024)
    assert all(PRESETS[name].vocab == 151_936 for name in ("100M", "350M", "1B"))


def test_preset_names_what_it_has_and_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="preset='2B'; accepted: tiny, 100M, 350M, 1B"):
        preset("2B")
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset("tiny").heads = 4
