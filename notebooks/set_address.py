"""Tell the course where it is published: ``python notebooks/set_address.py https://github.com/OWNER/NAME``.

Then the README has badges that open it on Binder and Colab, and every notebook a first cell that fetches the course on
Colab and does nothing elsewhere. Without an address both are taken out again. Nothing else changes, and nothing is run.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BETWEEN = re.compile(r"(<!-- badges -->\n).*?(<!-- /badges -->)", re.DOTALL)
CELL = """import sys

if "google.colab" in sys.modules:  # a machine there starts empty; elsewhere this cell does nothing
    address = "{url}"
    get_ipython().system(f"test -d /content/course || git clone --quiet --depth 1 {{address}} /content/course")
    # Colab has PyTorch and widgets, in the versions that its page can show: they stay as they are.
    get_ipython().system("pip install --quiet --no-deps -e /content/course triton")
    sys.path.insert(0, "/content/course")
    get_ipython().run_line_magic("cd", "/content/course/{folder}")"""


def badges(url: str) -> str:
    """Two badges for a repository on GitHub; none for an empty address."""
    if not url:
        return ""
    name = url.removeprefix("https://github.com/")
    first = "notebooks/01_standard_residuals.ipynb"
    return (
        f"[![Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/{name}/HEAD?labpath={first})\n"
        f"[![Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
        f"(https://colab.research.google.com/github/{name}/blob/HEAD/{first})\n"
    )


def with_first_cell(notebook: dict, url: str, folder: str) -> dict:
    """The notebook with the cell for Colab behind its title, or without; execution counts stay 1, 2, 3 …"""
    cells = [cell for cell in notebook["cells"] if cell["id"] != "colab"]
    if url:
        source = CELL.format(url=url, folder=folder).splitlines(keepends=True)
        cell = {
            "cell_type": "code",
            "execution_count": 1,
            "id": "colab",
            "metadata": {},
            "outputs": [],
            "source": source,
        }
        cells.insert(1, cell)
    code = (cell for cell in cells if cell["cell_type"] == "code")
    for n, cell in enumerate(code, 1):
        cell["execution_count"] = n
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = n
    return notebook | {"cells": cells}


def set_address(root: Path, url: str) -> None:
    """Change the README and the notebooks below a folder.

    Raises:
        ValueError: an address that is not one of GitHub's.
    """
    if url and not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+(?<!\.git)", url):
        raise ValueError(f"address {url!r}; accepted: https://github.com/OWNER/NAME, or nothing")
    readme = root / "README.md"
    text = BETWEEN.sub(lambda found: found[1] + badges(url) + found[2], readme.read_text(encoding="utf-8"))
    readme.write_text(text, encoding="utf-8")
    for path in sorted(root.glob("notebooks/**/[0-9]*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        notebook = with_first_cell(notebook, url, path.parent.relative_to(root).as_posix())
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    set_address(ROOT, "".join(sys.argv[1:2]))
