"""The course as web pages, without a server or a kernel: ``make site``, then open site/index.html.

nbconvert turns each notebook, as it is stored, into a page; the README becomes the index. Links between
notebooks lead to pages. A slider needs a kernel; its static twin stands above it. MathJax, which the
browser fetches, sets formulas. The words that `plot.Figure` stores with a picture become its alternative
text, which nbconvert does not do.
"""

import re
import shutil
import sys
from html import escape
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html

ROOT = Path(__file__).parent.parent
WIDGET = "application/vnd.jupyter.widget-view+json"
SLIDER = "*A slider stands here in JupyterLab. It moves the figure above.*"
PAGE = """<!DOCTYPE html>
<html lang="en"><head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ max-width: 65rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif }}
img {{ max-width: 100%; background: white }}
table {{ border-collapse: collapse }}
th, td {{ border: 1px solid #999; padding: .3rem .6rem }}
pre {{ overflow-x: auto; background: #8881; padding: .6rem; font-size: .8rem }}
.anchor-link {{ display: none }}
</style></head><body>
{body}
</body></html>
"""


def to_pages(html: str) -> str:
    """The same with links to notebooks leading to their pages."""
    return re.sub(r'href="([^":#]+)\.ipynb(#[^"]*)?"', r'href="\1.html\2"', html)


def to_page(notebook: Path) -> str:
    """A notebook as a page that bears its heading as title and leads back to the index."""
    content = nbformat.read(notebook, as_version=4)
    content.metadata.title = content.cells[0].source.partition("\n")[0].lstrip("# ")
    outputs = [output for cell in content.cells for output in cell.get("outputs", []) if "data" in output]
    for output in outputs:
        if WIDGET in output.data:
            output.data = {"text/markdown": SLIDER}
    page, _ = HTMLExporter().from_notebook_node(content)
    words = (o.metadata.get("image/png", {}).get("alt") for o in outputs if "image/png" in o.data)
    page = re.sub('(?<=<img alt=")No description[^"]*', lambda missing: escape(next(words) or missing[0]), page)
    up = "../" * len(notebook.parent.relative_to(ROOT).parts)
    assert page.count("<main>") == 1
    link = f'<p style="padding-left: 1rem"><a href="{up}index.html">Index</a></p>'
    return to_pages(page.replace("<main>", "<main>" + link))


def build(folder: Path) -> list[Path]:
    """Write the site into a folder, laid out as the repository, and return its pages; it replaces an older site.

    Raises:
        FileExistsError: the folder holds something else.
    """
    if folder.exists() and not (folder / "notebooks" / "01_standard_residuals.html").exists():
        raise FileExistsError(f"{folder} is not a site; accepted: a new folder, or an older site, which is replaced")
    shutil.rmtree(folder, ignore_errors=True)
    pages = []
    for notebook in sorted(ROOT.glob("notebooks/**/[0-9]*.ipynb")):
        page = folder / notebook.relative_to(ROOT).with_suffix(".html")
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(to_page(notebook), encoding="utf-8")
        pages.append(page)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", readme):  # what the index shows or names, as it is
        source, target = ROOT / link, folder / link
        if source.is_file() and source.suffix != ".ipynb":
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        elif source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    index = folder / "index.html"
    index.write_text(PAGE.format(title="mhar-minimal", body=to_pages(markdown2html(readme))), encoding="utf-8")
    return [index, *pages]


if __name__ == "__main__":
    for path in build(Path(sys.argv[1])):
        print(path)
