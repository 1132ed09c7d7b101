"""The shape of every notebook, and its exercises: the folded solutions are run here. nbval compares the outputs."""

import io
import json
import re
import statistics
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(p for p in FOLDER.rglob("[0-9]*.ipynb") if p.parent.name != ".ipynb_checkpoints")
RUNNABLE = [p for p in NOTEBOOKS if find_spec("triton") or not p.stem.startswith("05")]  # Triton exists for Linux


def cells(path, kind=None):
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [c for c in found if kind is None or c["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


def tagged(path, tag):
    return [c for c in cells(path) if tag in c["metadata"].get("tags", [])]


def test_the_course_is_here():
    numbers = [p.stem.split("_")[0] for p in NOTEBOOKS]
    assert numbers == [f"{n:02}" for n in range(1, len(numbers) + 1)]
    assert [p.parent == FOLDER for p in NOTEBOOKS].count(True) == 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_outputs_can_be_compared(path):
    """A null execution_count would switch nbval's comparison off; errors and disorder are never stored."""
    code = cells(path, "code")
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1))
    assert not [o for c in code for o in c["outputs"] if o["output_type"] == "error" or o.get("name") == "stderr"]
    ignored = [c for c in code if "NBVAL_IGNORE_OUTPUT" in source(c)]
    assert len(ignored) <= 0.15 * len(code)
    assert all("assert" in source(c) for c in ignored), "an ignored output states its bound in an assert"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_are_short_and_one_idea_long(path):
    lines = [len(source(c).splitlines()) for c in cells(path, "code")]
    assert 25 <= len(cells(path)) <= 60
    assert statistics.median(lines) <= 8
    assert max(lines) <= 30


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_opens_with_the_aim_and_the_cost_and_every_widget_has_a_static_twin(path):
    first = source(cells(path)[0])
    assert "You will be able to" in first
    assert re.search(r"\d+ s\b", first), "what it costs, in seconds"
    sliders = [i for i, c in enumerate(cells(path)) if c["cell_type"] == "code" and "slider(" in source(c)]
    assert len(sliders) <= 2
    for i in sliders:
        before = [c for c in cells(path)[:i] if c["cell_type"] == "code"][-1]
        assert any("image/png" in o.get("data", {}) for o in before["outputs"]), "a figure right above the slider"


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda p: p.stem)
def test_exercises(path):
    """The stub is "Not started", the folded solution is "Correct."; both run on the notebook's imports alone."""
    exercises, checks = tagged(path, "exercise"), tagged(path, "check")
    solutions = [c for c in cells(path, "markdown") if "<details>" in source(c)]
    assert len(exercises) == len(checks) == len(solutions) == 3
    (imports,) = tagged(path, "imports")
    for exercise, check, solution in zip(exercises, checks, solutions, strict=True):
        assert "Not started" in run(imports, exercise, check)
        (code,) = re.findall(r"```python\n(.*?)```", source(solution), re.DOTALL)
        assert run(imports, exercise, {"source": [code]}, check).strip().endswith("Correct.")


def run(*parts):
    namespace, out = {}, io.StringIO()
    with redirect_stdout(out):
        for part in parts:
            plain = "\n".join(line for line in source(part).splitlines() if not line.startswith("%"))
            exec(plain, namespace)
    return out.getvalue()


def without_triton(*paths):
    """What happens at the import cells of notebooks where Triton cannot be imported, as on macOS and Windows."""
    code = ["import sys", "sys.modules['triton'] = None"]
    code += [source(cell) for path in paths for cell in tagged(path, "imports")]
    plain = "\n".join(line for part in code for line in part.splitlines() if not line.startswith("%"))
    return subprocess.run([sys.executable, "-c", plain], capture_output=True, text=True, cwd=FOLDER)


def test_without_triton_only_the_kernels_are_missing():
    kernels = [path for path in NOTEBOOKS if path.stem.startswith("05")]
    others = without_triton(*(path for path in NOTEBOOKS if path not in kernels))
    assert others.returncode == 0, others.stderr
    error = without_triton(*kernels).stderr
    assert "this notebook needs Triton, which exists for Linux; its stored outputs can be read" in error
