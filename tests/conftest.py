"""What every test stands on: a fixed seed, and one thread, because two tests may share two cores."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
