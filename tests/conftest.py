"""What every test stands on: a fixed seed, and one thread, because two tests may share two cores."""

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, as constructing an optimizer does

torch.set_num_threads(1)

# Triton exists for Linux; elsewhere there are no kernels to test.
TRITON = importlib.util.find_spec("triton") is not None
collect_ignore = [] if TRITON else ["test_kernels.py", "test_fused.py", "test_two_phase.py"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
