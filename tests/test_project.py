"""What holds the house together: versions named twice agree, the import is light, links lead somewhere,
and README's answers are its studies'.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mhar_minimal.ablate import read_study
from mhar_minimal.stats import paired_differences, readings, tail_mean

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


def test_the_readmes_answers_are_those_of_the_recorded_study():
    """Means and intervals of the table, computed again from results.csv and timing.csv."""
    main = read_study(ROOT / "notebooks" / "results" / "study_h200")["main"]
    runs = {(cell.residual, cell.heads): seeds for cell, seeds in main.items()}
    losses = {arm: {seed: tail_mean(rows, 5) for seed, rows in seeds.items()} for arm, seeds in runs.items()}
    standard, hyper = ("standard", 1), ("hyper", 1)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("## Questions and answers") : text.index("## What it costs")]

    def said(difference):
        numbers = (difference.mean, *difference.t_interval)
        return "{:+.3f} ({:+.3f} to {:+.3f})".format(*numbers).replace("-", "−")

    by_standard = paired_differences(losses, standard)
    answers = [by_standard["full", 1], by_standard["block", 1], by_standard["block", 8]]
    answers += paired_differences({arm: losses[arm] for arm in (hyper, ("full", 1), ("block", 1))}, hyper).values()
    for scheme in ("full", "block"):
        answers += paired_differences({arm: x for arm, x in losses.items() if arm[0] == scheme}, (scheme, 1)).values()
    heads = [d.detectable for d in answers[-8:]]
    assert f"{min(heads):.3f} to {max(heads):.3f} with power 0.8" in " ".join(table.split())
    for arm in (("full", 1), ("full", 8)):
        pairs = {s: readings(runs[arm][s], runs[standard][s])["seconds"] for s in range(5)}
        equal = {arm: {s: a for s, (_, a, _) in pairs.items()}, standard: {s: b for s, (_, _, b) in pairs.items()}}
        answers += paired_differences(equal, standard, alpha=0.05 / 11).values()
    assert len(answers) == 15
    for answer in map(said, answers):
        assert answer in table, answer
