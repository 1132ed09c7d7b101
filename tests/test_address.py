"""What is published. Badges and the first cell for Colab come from one address, and leave nothing behind without it."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "notebooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_site, set_address = script("build_site"), script("set_address")
URL = "https://github.com/someone/course"


@pytest.fixture
def copy(tmp_path):
    shutil.copy(ROOT / "README.md", tmp_path)
    for path in sorted(ROOT.glob("notebooks/**/[0-9]*.ipynb")):
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return tmp_path


def contents(folder):
    return {path.relative_to(folder): path.read_text(encoding="utf-8") for path in folder.rglob("*.*")}


def test_an_address_is_entered_everywhere_and_taken_out_without_a_trace(copy):
    before = contents(copy)
    for _ in range(2):  # the second time changes nothing
        set_address.set_address(copy, URL)
        after = contents(copy)
        assert after[Path("README.md")].count("someone/course/") == 2
        for path in before:
            if path.suffix == ".ipynb":
                cells = json.loads(after[path])["cells"]
                assert sum(URL in "".join(cell["source"]) for cell in cells) == 1
                counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
                assert counts == list(range(1, len(counts) + 1))
    published = re.search(r"/v2/gh/([^/]+/[^/]+)/HEAD", before[Path("README.md")])  # once it is, the tests still hold
    set_address.set_address(copy, f"https://github.com/{published[1]}" if published else "")
    assert contents(copy) == before


def test_with_an_address_the_notebooks_are_still_clean(copy):
    set_address.set_address(copy, f"https://github.com/{'o' * 39}/{'n' * 100}")  # as long as GitHub's can be
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--config", ROOT / "pyproject.toml", "notebooks"]
        found = subprocess.run(ruff, cwd=copy, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


def test_the_first_cell_does_nothing_elsewhere_and_fetches_the_course_on_colab(monkeypatch):
    calls = []

    class Shell:
        def system(self, line):
            calls.append(line)

        def run_line_magic(self, name, line):
            calls.append(f"{name} {line}")

    code = set_address.CELL.format(url=URL, folder="notebooks/beyond")
    exec(code, {"get_ipython": Shell})
    assert calls == []
    monkeypatch.setitem(sys.modules, "google.colab", object())
    monkeypatch.setattr("sys.path", [])
    exec(code, {"get_ipython": Shell})
    assert calls == [
        f"test -d /content/course || git clone --quiet --depth 1 {URL} /content/course",
        "pip install --quiet --no-deps -e /content/course triton",  # nothing that the running kernel has is replaced
        "cd /content/course/notebooks/beyond",
    ]


@pytest.mark.parametrize("url", ["github.com/a/b", "https://example.org/a/b", "https://github.com/a", URL + ".git"])
def test_other_addresses_are_refused_and_change_nothing(url, copy):
    before = contents(copy)
    with pytest.raises(ValueError, match=r"accepted: https://github\.com/OWNER/NAME"):
        set_address.set_address(copy, url)
    assert contents(copy) == before


def test_a_site_replaces_nothing_but_a_site(tmp_path):
    (tmp_path / "thesis.md").write_text("years of work")
    with pytest.raises(FileExistsError, match="is not a site; accepted: a new folder, or an older site"):
        build_site.build(tmp_path)
    assert (tmp_path / "thesis.md").read_text() == "years of work"


def test_on_a_page_a_picture_has_its_own_words_and_a_slider_is_a_sentence(tmp_path, monkeypatch):
    def output(kind, data, **metadata):
        return nbformat.v4.new_output("display_data", {kind: data, "text/plain": "in a terminal"}, metadata=metadata)

    png, (first, last) = "image/png", ('a "quoted" <loss> & more', "the last one")
    shown = [output("text/html", "a table"), output(png, "AAAA", **{png: {"alt": first}}), output(png, "BBBB")]
    shown += [output(build_site.WIDGET, {"model_id": "0"}), output(png, "CCCC", **{png: {"alt": last}})]
    cells = [nbformat.v4.new_markdown_cell("# 09 Pictures"), nbformat.v4.new_code_cell(outputs=shown)]
    (tmp_path / "beyond").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "beyond" / "09.ipynb")
    monkeypatch.setattr(build_site, "ROOT", tmp_path)
    page = build_site.to_page(tmp_path / "beyond" / "09.ipynb")
    pictures = [dict(re.findall(r'(\w+)="([^"]*)"', tag)) for tag in re.findall("<img.*?>", page, re.DOTALL)]
    assert [unescape(picture["alt"]) for picture in pictures] == [first, pictures[1]["alt"], last]
    assert pictures[1]["alt"].startswith("No description")  # no other picture's
    assert "<loss>" not in page
    assert "A slider stands here in JupyterLab. It moves the figure above." in page
    assert "<title>09 Pictures</title>" in page
    assert 'href="../index.html"' in page
