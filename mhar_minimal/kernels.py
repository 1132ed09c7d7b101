"""Makes the folder `kernels/` importable as ``mhar_minimal.kernels``, from a checkout and when installed.

The folder is no package of its own, because another distribution has the import name ``kernels``.
"""

from pathlib import Path

_installed = Path(__file__).with_name("kernel_files")  # where a wheel puts them
__path__ = [str(_installed if _installed.is_dir() else Path(__file__).parent.parent / "kernels")]
