"""What every test stands on: a fixed seed, and nothing of the reader's own cache or environment."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
