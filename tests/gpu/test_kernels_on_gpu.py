"""What the kernels do on a GPU alone: CUDA graphs, native torch.compile, and sizes no interpreter can run."""

import pytest
import torch
from kernel_checks import all_sites, assert_equal, assert_nothing_outside, draw, error, impl, results

from mhar_minimal import Config, Model

IMPLS = ["fused", "two_phase"]
either = pytest.mark.parametrize("name", IMPLS)


@either
@pytest.mark.parametrize("residual", ["full", "block"])
def test_a_cuda_graph_replays_forward_and_backward(residual, name):
    inputs = draw(9, 9, 160, 2, shape=(2, 37), dtype=torch.bfloat16)
    run = all_sites(impl(name, residual), 2, 3 if residual == "block" else None)
    results(run, inputs)  # compiles
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        results(run, inputs)
        with torch.cuda.graph(graph, stream=stream):
            replayed = results(run, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.no_grad():
        for leaf, other in zip(inputs.leaves(), draw(9, 9, 160, 2, shape=(2, 37), seed=1).leaves(), strict=True):
            leaf.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(replayed, results(run, inputs))


@either
@pytest.mark.parametrize("residual", ["full", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:TensorFloat32")  # the compiler's advice; float32 stays float32 here
def test_natively_compiled_as_one_graph(dtype, residual, name):
    torch._dynamo.reset()
    config = dict(residual=residual, heads=4, block_size=3 if residual == "block" else None, context=64, vocab=256)
    tokens = torch.randint(256, (2, 64), device="cuda")

    def logits_and_gradients(which, dtype, compiled=False):
        torch.manual_seed(1)
        model = Model(Config(**config, impl=which))
        for p in model.depth.parameters():
            p.data += 0.5 * torch.randn(p.shape)
        model.to("cuda", dtype)
        run = torch.compile(model, fullgraph=True) if compiled else model
        logits = run(tokens)
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        return [logits.detach(), *(p.grad for p in model.parameters())]

    truth = logits_and_gradients("eager", torch.float64)
    far = {}
    for which in ("eager", name):
        got = logits_and_gradients(which, dtype, compiled=which == name)
        far[which] = max(error(g, t) for g, t in zip(got, truth, strict=True))
    assert far[name] <= 3 * far["eager"]


@either
@pytest.mark.parametrize("heads", [1, 8])
def test_two_runs_of_a_real_size_agree_bitwise(heads, name):
    inputs = draw(17, 17, 1280, heads, shape=(2, 1001), dtype=torch.bfloat16)
    run = all_sites(impl(name, "full"), heads)
    assert_equal(results(run, inputs.fresh()), results(run, inputs.fresh()))


@either
@pytest.mark.parametrize(("dim", "heads"), [(1280, 8), (1280, 1), (36, 12), (20, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_outside_is_read_or_written(dtype, dim, heads, name, monkeypatch):
    inputs = draw(9, 9, dim, heads, shape=(1, 131), dtype=dtype)
    run = all_sites(impl(name, "full"), heads)
    assert_nothing_outside(run, inputs, monkeypatch)


@either
def test_more_numbers_than_an_int32_counts(name):
    """9 sites of 2²⁸ numbers: the last tokens of a long sequence fare as they do in a short one."""
    long = draw(9, 9, 1024, 8, shape=(1, 8), dtype=torch.bfloat16)
    short = long.fresh()
    for tensors in (long.source, long.upstream):
        for i, end in enumerate(tensors):
            tensors[i] = torch.cat([torch.randn(1, 2**18, 1024, device="cuda").bfloat16(), end.detach()], 1)
    for source in long.source:
        source.requires_grad_()
    run = all_sites(impl(name, "full"), 8)
    got, expected = results(run, long), results(run, short)
    for kind in ("readout", "source"):
        for g, e in zip(got[kind], expected[kind], strict=True):
            assert torch.equal(g[:, -8:], e)
