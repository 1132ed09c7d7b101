"""A run that ends early in a cell that keeps nothing on disk, as those of the notebooks: the cell can be run again."""

import signal

import pytest
import torch
from test_train import RECIPE, SCHEMES, corpus, stop_at

from mhar_minimal.train import train


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),  # Interrupt Kernel
        (lambda: torch.empty(0).new_empty(2**62), RuntimeError),  # out of memory
    ],
)
def test_a_cell_that_was_stopped_can_be_run_again(end, error, monkeypatch):
    cell = SCHEMES["full"], RECIPE, corpus(), None, "cpu", False
    model, rows = train(*cell)
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        stop_at(patch, 5, end)
        with pytest.raises(error):
            train(*cell)
    assert signal.getsignal(signal.SIGINT) is handler
    again, more = train(*cell)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    assert [row._replace(seconds=0) for row in rows] == [row._replace(seconds=0) for row in more]
