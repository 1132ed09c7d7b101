"""What the GPU benchmark counts, and that it refuses to time what is wrong; its timings need a GPU."""

import functools

import pytest
import torch
from kernel_checks import DEVICE

from mhar_minimal import Config
from mhar_minimal.kernels import benchmark

CONFIG = Config(residual="full", heads=2, dim=16, layers=1, attn_heads=2, kv_heads=1, ffn=16)


@pytest.mark.parametrize("sites", [1, 2, 7, 16])
def test_fewest_rows_is_the_best_of_all_block_lengths(sites):
    """Counted row by row: what is read and written at every site, and again in the backward."""

    def counted(size):
        forward = backward = 0
        for site in range(sites):
            start = site - site % size
            if site == start:
                forward += start + 1  # phase 1 reads what is finished, once for the block
                backward += sites - min(start + size, sites)  # and its mirror image the later blocks' gradients
            forward += (site - start) + 3
            backward += min(start + size, sites) - site + 6
        return forward, backward

    assert benchmark.fewest_rows(sites) == min(map(counted, range(1, sites + 1)), key=sum)


@pytest.mark.parametrize("norms", ["none", "apart", "fused"])
def test_what_is_wrong_is_not_timed(norms, monkeypatch):
    monkeypatch.setattr(benchmark, "Routing", functools.partial(benchmark.Routing, device=DEVICE))
    benchmark.check(CONFIG, "two_phase", norms)
    own = benchmark.Routing.func.forward_and_backward

    def wrong(routing):
        readouts, *gradients = own(routing)
        if routing.depth.impl == "two_phase":
            gradients[-1] = 1.02 * gradients[-1]  # of the last gain
        return [readouts, *gradients]

    monkeypatch.setattr(benchmark.Routing.func, "forward_and_backward", wrong)
    with pytest.raises(RuntimeError, match=r"two_phase, tensor \d+: error .* accepted: up to"):
        benchmark.check(CONFIG, "two_phase", norms)


def test_a_machine_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["benchmark", "routing"])
    with pytest.raises(SystemExit, match="no CUDA GPU"):
        benchmark.main()
