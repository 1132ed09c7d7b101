"""What holds the house together: versions named twice agree, the import is light, links lead somewhere."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("notebooks/**/[0-9]*.ipynb"))]


def requirements(lines):
    """Name to the rest of the requirement, of pip lines; comments and editable installs left out."""
    stripped = [line.split(" #")[0].strip() for line in lines]
    pairs = [re.match(r"([A-Za-z0-9_-]+)(.*)", line) for line in stripped if line and line[0] not in "#-"]
    return {m[1].lower(): m[2].strip() for m in pairs}


PINS = requirements((ROOT / "requirements.txt").read_text().splitlines())


def test_environment_yml_names_the_pinned_versions():
    text = (ROOT / "environment.yml").read_text()
    pip = [line.strip().removeprefix("- ") for line in text.split("- pip:")[1].splitlines()]
    assert requirements(pip) == PINS
    assert "- -e ." in text
    assert "python=3.11" in text
    assert "://" not in text  # channels and packages by name
    assert all(rest.startswith("==") for rest in PINS.values())


def test_pyproject_admits_the_pinned_versions_and_pins_all_it_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = requirements(project["dependencies"] + project["optional-dependencies"]["test"])
    assert set(wanted) <= set(PINS)
    for name, bound in wanted.items():
        low = re.match(r">=([\d.]+)", bound)[1]
        pin = re.match(r"==([\d.]+)", PINS[name])[1]
        assert [int(x) for x in pin.split(".")] >= [int(x) for x in low.split(".")], name


def test_the_import_brings_no_plotting_no_widgets_and_no_triton():
    code = "import sys, torch; before = set(sys.modules); import mhar_minimal; print(*set(sys.modules) - before)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "mhar_minimal.route" in out
    assert not {name.split(".")[0] for name in out} & {"matplotlib", "ipywidgets", "triton", "tqdm", "scipy"}


def anchors(text):
    """What a Markdown page can be entered at: its headings, as GitHub and JupyterLab spell them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = {re.sub(r"[^\w -]", "", heading.lower()) for heading in headings}
    return {heading.replace(" ", "-") for heading in [*headings, *plain]}


def prose(path):
    """The text of a Markdown file, or of a notebook's Markdown cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_within_the_repository_lead_somewhere(path):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", prose(path), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        address, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", address):
            assert address.startswith("https:"), link
            continue
        target = path.parent / address if address else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(prose(target)), link
    for section in re.findall(r"[Ss]ection (\d+)\b(?! of arXiv)", text) if path.suffix == ".ipynb" else ():
        assert re.search(rf"^## {section} · ", text, re.MULTILINE), f"section {section} is not on this page"
    for notebook in re.findall(r"[Nn]otebooks? (\d\d)\b", text):
        assert list((ROOT / "notebooks").glob(f"**/{notebook}_*.ipynb")), f"notebook {notebook}"
