"""Text from a trained model, one byte at a time."""

import math

import torch

from mhar_minimal.data import decode, encode
from mhar_minimal.model import Model


@torch.inference_mode()
def generate(model: Model, prompt: str, length: int, temperature: float = 1.0, seed: int = 0) -> str:
    """Continue a prompt; every byte recomputes the whole sequence, cropped to the last ``context`` bytes.

    Args:
        model: a model of bytes; on any device.
        prompt: at least one character.
        length: bytes to add, at least 1.
        temperature: divides the logits before sampling; 0 takes the likeliest byte.
        seed: of the sampling.

    Returns:
        The prompt and its continuation; bytes that are no UTF-8 appear as U+FFFD.

    Raises:
        ValueError: an argument out of range, or a vocabulary that does not hold all bytes.
    """
    if not prompt:
        raise ValueError("prompt is empty; accepted: at least one character")
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"length={length!r}; accepted: an integer of at least 1, in bytes")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature!r}; accepted: a finite number of at least 0")
    if model.config.vocab < 256:
        raise ValueError(f"vocab={model.config.vocab}; accepted: at least 256, tokens are bytes")
    generator = torch.Generator().manual_seed(seed)
    device = model.embedding.weight.device
    tokens = encode(prompt).long()  # [prompt bytes]
    start = len(tokens)
    for _ in range(length):
        context = tokens[-model.config.context :].to(device)
        logits = model(context.unsqueeze(0))[0, -1, :256].double().cpu()  # ids from 256 on are no bytes
        if temperature == 0:
            token = logits.argmax(0, keepdim=True)
        else:
            # The maximum goes first: a tiny temperature must not turn the logits into inf - inf.
            token = torch.multinomial(((logits - logits.max()) / temperature).softmax(0), 1, generator=generator)
        tokens = torch.cat((tokens, token))
    return prompt + decode(tokens[start:].to(torch.uint8))
