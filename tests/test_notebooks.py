"""The shape of every notebook, and its exercises: the folded solutions are run here. nbval compares the outputs."""

import dis
import io
import json
import re
import statistics
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(p for p in FOLDER.rglob("[0-9]*.ipynb") if p.parent.name != ".ipynb_checkpoints")
RUNNABLE = [p for p in NOTEBOOKS if find_spec("triton") or not p.stem.startswith("05")]  # Triton exists for Linux


def cells(path, kind=None):
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [c for c in found if kind is None or c["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


def code(cell):
    return "\n".join(line for line in source(cell).splitlines() if not line.startswith("%"))


def tagged(path, tag):
    return [c for c in cells(path) if tag in c["metadata"].get("tags", [])]


def test_the_course_is_here():
    numbers = [p.stem.split("_")[0] for p in NOTEBOOKS]
    assert numbers == [f"{n:02}" for n in range(1, len(numbers) + 1)]
    assert [p.parent == FOLDER for p in NOTEBOOKS].count(True) == 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_outputs_can_be_compared(path):
    """A null execution_count would switch nbval's comparison off; errors and disorder are never stored."""
    ran = cells(path, "code")
    assert [c["execution_count"] for c in ran] == list(range(1, len(ran) + 1))
    assert not [o for c in ran for o in c["outputs"] if o["output_type"] == "error" or o.get("name") == "stderr"]
    ignored = [c for c in ran if "NBVAL_IGNORE_OUTPUT" in source(c)]
    assert len(ignored) <= 0.15 * len(ran)
    assert all("assert" in source(c) for c in ignored), "an ignored output states its bound in an assert"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_are_short_and_one_idea_long(path):
    written = [c for c in cells(path) if c["id"] != "colab"]  # that one comes and goes with set_address.py
    lines = [len(source(c).splitlines()) for c in written if c["cell_type"] == "code"]
    assert 25 <= len(written) <= 60
    assert statistics.median(lines) <= 8
    assert max(lines) <= 30


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_opens_with_the_aim_and_the_cost_and_every_widget_has_a_static_twin(path):
    first = source(cells(path)[0])
    assert "You will be able to" in first
    assert re.search(r"\d+ s\b", first), "what it costs, in seconds"
    sliders = [i for i, c in enumerate(cells(path)) if c["cell_type"] == "code" and re.search("sliders?[(]", source(c))]
    assert len(sliders) <= 2
    for i in sliders:
        before = [c for c in cells(path)[:i] if c["cell_type"] == "code"][-1]
        assert any("image/png" in o.get("data", {}) for o in before["outputs"]), "a figure right above the slider"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_any_cell_can_be_run_again(path):
    """A name that a cell takes from another is bound in one cell only, so that going back never finds another's."""
    bound, taken = zip(*map(names, cells(path, "code")))
    ambiguous = {name for name in set().union(*taken) if sum(name in b for b in bound) > 1}
    assert not ambiguous


def names(cell):
    """The names that a code cell binds, and those that it takes from other cells, its functions included."""
    blocks, bound, taken = [compile(code(cell), "cell", "exec")], set(), set()
    for block in blocks:
        blocks += [constant for constant in block.co_consts if isinstance(constant, CodeType)]
        for step in dis.get_instructions(block):
            if step.opname == "STORE_NAME" and block is blocks[0]:
                bound.add(step.argval)
            elif step.opname in ("LOAD_NAME", "LOAD_GLOBAL") and step.argval not in bound:
                taken.add(step.argval)
    return bound, taken


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda p: p.stem)
def test_exercises(path):
    """The stub is "Not started", the folded solution is "Correct."; both run on the notebook's imports alone."""
    exercises, checks = tagged(path, "exercise"), tagged(path, "check")
    solutions = [c for c in cells(path, "markdown") if "<details>" in source(c)]
    assert len(exercises) == len(checks) == len(solutions) == 3
    (imports,) = tagged(path, "imports")
    for exercise, check, solution in zip(exercises, checks, solutions, strict=True):
        assert "Not started" in run(imports, exercise, check)
        (answer,) = re.findall(r"```python\n(.*?)```", source(solution), re.DOTALL)
        assert run(imports, exercise, {"source": [answer]}, check).strip().endswith("Correct.")


def run(*parts, namespace=None):
    namespace, out = {} if namespace is None else namespace, io.StringIO()
    with redirect_stdout(out):
        for part in parts:
            exec(code(part), namespace)
    return out.getvalue()


def without_triton(*paths):
    """What happens at the import cells of notebooks where Triton cannot be imported, as on macOS and Windows."""
    lines = ["import sys", "sys.modules['triton'] = None"]
    lines += [code(cell) for path in paths for cell in tagged(path, "imports")]
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=FOLDER)


def test_without_triton_only_the_kernels_are_missing():
    kernels = [path for path in NOTEBOOKS if path.stem.startswith("05")]
    others = without_triton(*(path for path in NOTEBOOKS if path not in kernels))
    assert others.returncode == 0, others.stderr
    error = without_triton(*kernels).stderr
    assert "this notebook needs Triton, which exists for Linux; its stored outputs can be read" in error
