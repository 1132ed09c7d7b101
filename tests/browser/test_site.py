"""The static edition in a real browser, without a network: pictures and their words are there, links lead somewhere."""

import importlib.util
from urllib.parse import unquote, urlparse

import pytest
from conftest import NOTEBOOKS

NAMELESS = "images => images.filter(i => !i.alt || i.alt.startsWith('No description')).length"
CUT = "all => all.filter(pre => pre.scrollWidth > pre.clientWidth).map(pre => pre.innerText)"
LINKS = "elements => elements.map(element => element.getAttribute('href'))"


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("build_site", NOTEBOOKS / "build_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build(tmp_path_factory.mktemp("site") / "mit Leerzeichen")


def test_every_page(page, pages):
    assert len(pages) == 1 + len(list(NOTEBOOKS.rglob("[0-9]*.ipynb")))
    page.route(lambda url: url.startswith("http"), lambda route: route.abort())
    for path in pages:
        page.goto(path.as_uri())
        assert page.locator("h1").count() >= 1, path
        assert not page.locator("img").evaluate_all("images => images.filter(i => !i.naturalWidth).map(i => i.src)"), (
            path
        )
        assert page.locator("img").evaluate_all(NAMELESS) == 0, f"{path.name}: a wordless picture, store it again"
        assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0, path
        for link in page.locator("a[href]").evaluate_all(LINKS):
            address = urlparse(link)
            if not address.scheme:
                target = (path.parent / unquote(address.path)).resolve() if address.path else path
                assert target.exists(), f"{path.name}: {link}"
        page.set_viewport_size({"width": 1280, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280, f"{path.name} is wider than a laptop"
        assert page.locator("pre").evaluate_all(CUT) == [], path.name


def test_a_picture_has_its_own_words_and_a_slider_is_announced(page, pages):
    [path] = [path for path in pages if path.name.startswith("03")]
    page.goto(path.as_uri())
    for size in (1, 5, 12):
        cell = page.locator(".jp-CodeCell", has=page.locator(f"img[alt*='(block size {size}: ']"))
        assert cell.count() == 1
        assert "display(*map(draw, (1, 5, 12)))" in cell.inner_text()
    assert "It moves the figure above" in page.locator(".jp-CodeCell", has_text="slider(draw").inner_text()
