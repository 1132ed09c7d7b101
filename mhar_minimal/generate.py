"""Text from a trained model, one byte at a time."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mhar_minimal.data import decode, encode
from mhar_minimal.model import Cache, Model


@torch.inference_mode()
def generate(
    model: Model,
    prompt: str | Sequence[str],
    length: int,
    temperature: float = 1.0,
    seed: int = 0,
    stop: str | None = None,
    prefill_chunk: int = 1024,
) -> str | list[str]:
    """Continue one prompt, or several of any lengths at once, each as if it were alone (up to rounding).

    A byte sees the last ``context`` bytes. While that is the whole text, only the newest byte is computed, with what
    attention keeps of the others in a `Cache`. Beyond, the whole window is computed for every byte: what attention has
    kept of its bytes depends on bytes that are no longer in it.

    Args:
        model: a model of bytes; on any device.
        prompt: at least one character, or a sequence of such prompts.
        length: bytes to add, at least 1.
        temperature: divides the logits before sampling; 0 takes the likeliest byte.
        seed: of the sampling; of several prompts the i-th has ``seed + i``, so that equal ones differ.
        stop: a row ends with the first occurrence of this text among its new bytes.
        prefill_chunk: bytes of a prompt that are computed at once; it bounds the memory and changes rounding alone.

    Returns:
        The prompt and its continuation; bytes that are no UTF-8 appear as U+FFFD. A list for several prompts.

    Raises:
        ValueError: an argument out of range, or a vocabulary that does not hold all bytes.
        FloatingPointError: logits that are not finite.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not prompts or not all(prompts):
        raise ValueError(f"prompt is empty: {prompt!r}; accepted: at least one character, or several such prompts")
    for name, value in (("length", length), ("prefill_chunk", prefill_chunk)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}; accepted: an integer of at least 1, in bytes")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature!r}; accepted: a finite number of at least 0")
    if stop == "":
        raise ValueError("stop is empty; accepted: at least one character, or None")
    context, vocab, device = model.config.context, model.config.vocab, model.embedding.weight.device
    if vocab < 256:
        raise ValueError(f"vocab={vocab}; accepted: at least 256, tokens are bytes")

    rows = [encode(text).long() for text in prompts]
    tokens = pad_sequence(rows, batch_first=True, padding_side="left").to(device)  # [B, bytes of the longest prompt]
    start = tokens.shape[1]
    padding = torch.tensor([start - len(row) for row in rows], device=device)
    ending = None if stop is None else encode(stop).to(device)
    ends = torch.full_like(padding, length)  # new bytes of each row
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(rows))]
    cache = None
    for written in range(1, length + 1):
        if cache is None or cache.length == context:
            new = tokens[:, -context:]
            cache = Cache((padding - (tokens.shape[1] - new.shape[1])).clamp(min=0))
        else:
            new = tokens[:, -1:]
        for piece in new.split(prefill_chunk, dim=1):
            logits = model(piece, cache)[:, -1, :256].double()  # ids from 256 on are no bytes
        if not logits.isfinite().all():
            raise FloatingPointError(f"logits of new byte {written} are not finite; accepted: finite numbers")
        tokens = torch.cat((tokens, choose(logits, temperature, generators).unsqueeze(1)), dim=1)
        if ending is not None and written >= len(ending):
            found = (tokens[:, -len(ending) :] == ending).all(1)
            ends = torch.where(found, ends.clamp(max=written), ends)  # the first one counts
            if (ends <= written).all():
                break
    texts = [text + decode(row[:end]) for text, row, end in zip(prompts, tokens[:, start:], ends)]
    return texts[0] if isinstance(prompt, str) else texts


def choose(logits: Tensor, temperature: float, generators: Sequence[torch.Generator]) -> Tensor:
    """The next byte of every row, int64 [B]: the likeliest, or one drawn with the row's own (CPU) generator."""
    if temperature == 0:
        return logits.argmax(1)
    # The maximum goes first: a tiny temperature must not turn the logits into inf - inf.
    weights = ((logits - logits.amax(1, keepdim=True)) / temperature).softmax(1)
    # The largest of w_i / E_i, with E_i drawn from Exp(1), is i with probability w_i. Only the E_i come from the CPU,
    # where a seed means the same for every device.
    race = torch.stack([torch.empty(256, dtype=logits.dtype).exponential_(generator=g) for g in generators])
    return (weights / race.to(logits.device)).argmax(1)
