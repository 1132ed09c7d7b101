"""Every notebook in JupyterLab in a real browser: all cells run, and every slider, moved by keyboard, redraws."""

from urllib.parse import quote

import pytest
from conftest import NOTEBOOKS

NAMES = sorted(file.relative_to(NOTEBOOKS).as_posix() for file in NOTEBOOKS.rglob("*.ipynb"))
WRONG = [f'[data-mime-type="application/vnd.jupyter.{kind}"]' for kind in ("error", "stderr")]
RUNNING = (
    """() => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].some(p => p.textContent.includes('*'))"""
)
FINGERPRINT = """async image => {
    const bytes = await (await fetch(image.src)).arrayBuffer()
    return [...new Uint8Array(await crypto.subtle.digest('SHA-1', bytes))].join()
}"""


def run_all(page, lab, name):
    page.goto(lab.format(quote(name)))
    page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').first.wait_for(timeout=120_000)
    page.locator('[data-command="notebook:restart-run-all"]').first.click()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    page.wait_for_function(RUNNING, timeout=60_000)
    page.wait_for_function(f"() => !({RUNNING})()", timeout=240_000)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_its_sliders_redraw(name, page, lab):
    run_all(page, lab, name)
    for kind in WRONG:
        assert page.locator(kind).all_inner_texts() == []
    for handle in page.locator(".jp-OutputArea .noUi-handle").all():
        image = handle.locator("xpath=ancestor::*[contains(@class, 'widget-vbox')][1]").locator("img").first
        before, was = image.evaluate(FINGERPRINT), handle.get_attribute("aria-valuenow")
        handle.focus()
        handle.press("ArrowRight")
        if handle.get_attribute("aria-valuenow") == was:  # it stood at its end
            handle.press("ArrowLeft")
        for _ in range(100):
            page.wait_for_timeout(100)
            if image.evaluate(FINGERPRINT) != before:
                break
        else:
            pytest.fail(f"{name}: the figure of the slider at {was} did not change")
