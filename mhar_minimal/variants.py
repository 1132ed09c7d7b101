"""Variants of how Full AttnRes mixes its sources: those that its authors' ablation names (arXiv:2603.15031).

Each is `Full` but for the step it is named after; any number of heads, eager only, chosen by ``Config.mixing``. At the
start every logit is 0, so that all compute the mean of what they read (sigmoid: half the sum, which the norm behind
every site makes the same): the standard model's function up to ε, but for the window, which reads less.
"""

import torch
from torch import Tensor

from mhar_minimal.depth import Depth, Full
from mhar_minimal.route import score_dtype

WINDOW = 4  # sources, the outputs of two layers


class Sigmoid(Full):
    """``α_i = sigmoid(logit_i)``: sources do not compete, and the weights do not sum to 1."""

    def weigh(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()


class NoKeyNorm(Full):
    """``key(v) = v ⊙ g``: a source counts the more the larger it is."""

    def scale(self, v: Tensor) -> Tensor:
        return v.new_ones(v.shape[:-1])


class InputIndependent(Full):
    """``logit_i[h]`` of a site is a learned score: every token weighs the sources alike, and nothing has a key."""

    def __init__(self, depth: Depth, embedding: Tensor):
        self.scores = depth.scores  # per site [N, H]
        self.sources, self.weights = [embedding], []

    def read(self) -> Tensor:
        logits = self.scores[self.site].unsqueeze(1).unsqueeze(1)  # [N, 1, 1, H]
        return self.mix(self.sources, logits.expand(-1, *self.sources[0].shape[:2], -1))

    def write(self, output: Tensor) -> None:
        self.sources.append(output)


class InputDependent(Full):
    """``query = W_s v / (D · RMS(v))`` of the newest source v, per token: a matrix W_s [D, D] per site in q_s's place.

    The 1/D is ours: with it a step of Adam moves the query about as far as it moves a pseudo-query. D² parameters per
    site instead of D: no comparison of equal sizes.
    """

    def __init__(self, depth: Depth, embedding: Tensor):
        self.depth, self.eps = depth, depth.eps
        self.sources, self.keys, self.weights = [], [], []  # keys before their gain, which is the site's
        self.add_source(embedding)

    def read(self) -> Tensor:
        newest = self.keys[-1] / self.keys[-1].shape[-1]
        with torch.autocast("cpu" if newest.is_meta else newest.device.type, enabled=False):  # as in Full.score
            query = newest @ self.depth.query_matrix[self.site].T.to(newest.dtype) * self.depth.gain[self.site]
        heads = self.depth.heads
        return self.mix(self.sources, [(query * key).unflatten(-1, (heads, -1)).sum(-1) for key in self.keys])

    def add_source(self, source: Tensor) -> None:
        v = source.to(score_dtype(source.dtype))
        self.sources.append(source)
        self.keys.append(v * self.scale(v).unsqueeze(-1))  # [B, T, D]


class Window(Full):
    """Only the newest four sources are read; all older ones, the embedding too, have weight 0."""

    def weigh(self, logits: Tensor) -> Tensor:
        read = super().weigh(logits[-WINDOW:])
        return torch.cat((torch.zeros_like(logits[:-WINDOW]), read))


SCHEMES = {
    "sigmoid": Sigmoid,
    "no_key_norm": NoKeyNorm,
    "input_independent": InputIndependent,
    "input_dependent": InputDependent,
    "window": Window,
}
