"""What the GPU benchmark counts, and that it refuses to time what is wrong; its timings need a GPU."""

import functools

import pytest
import torch
from kernel_checks import DEVICE

from mhar_minimal import Config
from mhar_minimal.kernels import benchmark

CONFIG = Config(residual="full", heads=2, dim=16, layers=1, attn_heads=2, kv_heads=1, ffn=16)


@pytest.mark.parametrize("sites", [1, 2, 7, 12, 31])
def test_fewest_rows_is_the_best_of_all_block_lengths(sites):
    """Counted pair by pair: a site reads full blocks of sources in phase 1, the others itself; a load that several
    pairs share counts once.
    """

    def counted(size):
        reads, gradients, shared, published = set(), set(), set(), set()
        for site in range(sites):
            for source in range(site + 1):
                block = (site + 1) // size  # the first that is not full when the site reads
                if source // size < block:
                    reads.add(("phase 1", block, source))
                    gradients.add(("phase 1", source // size, site))
                    shared.add(site)
                    published.add(source)
                else:
                    reads.add((site, source))
                    gradients.add((source, site))
        forward = len(reads) + 2 * len(shared) + sites  # phase 1 written and read, and the read-out written
        return forward, len(gradients) + 3 * len(published) + 3 * sites

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
