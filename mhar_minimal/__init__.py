"""Attention Residuals, Block AttnRes and Multi-Head Attention Residuals: a reference to read, run and measure."""

from mhar_minimal.config import PRESETS, Config, preset
from mhar_minimal.model import Model
from mhar_minimal.route import route

__version__ = "0.1.0"
__all__ = ["PRESETS", "Config", "Model", "preset", "route"]
