"""Every notebook in JupyterLab in a real browser: all cells run, and every slider, moved by keyboard, redraws."""

import re
from urllib.parse import quote

import pytest
from conftest import NOTEBOOKS
from playwright.sync_api import expect

NAMES = sorted(file.relative_to(NOTEBOOKS).as_posix() for file in NOTEBOOKS.rglob("*.ipynb"))
STDERR = '[data-mime-type="application/vnd.jupyter.stderr"]'  # Lab gives a traceback the same type
PROMPT = ".jp-CodeCell .jp-InputPrompt"
QUEUED = f"() => [...document.querySelectorAll('{PROMPT}')].some(prompt => prompt.textContent.includes('*'))"
FINGERPRINT = """async image => {
    const bytes = await (await fetch(image.src)).arrayBuffer()
    return [...new Uint8Array(await crypto.subtle.digest('SHA-1', bytes))].join()
}"""


def open_notebook(page, lab, name):
    page.goto(lab.format(quote(name)))
    # Only the status bar tells that Lab is connected to a kernel; the notebook's own indicator calls one idle that is
    # still starting. What is clicked then, a restart above all, gets lost.
    page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for(timeout=120_000)


def menu_run(page, command):
    page.locator(".lm-MenuBar-itemLabel", has_text="Run").click()
    page.locator(f'.lm-Menu-item[data-command="{command}"]').click()
    page.wait_for_function(QUEUED)


def wait_for_the_end(page):
    # Without an interval Playwright asks at every frame, which costs the kernels a good part of a core.
    page.wait_for_function(f"() => !({QUEUED})()", timeout=240_000, polling=500)


def check_all_ran(page):
    assert page.locator(STDERR).all_inner_texts() == []
    assert [text for text in page.locator(PROMPT).all_inner_texts() if not re.search(r"\d", text)] == []


def move_every_slider(page):
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
            pytest.fail(f"the figure of the slider at {was} did not change")


@pytest.mark.parametrize("name", NAMES[2:])  # the first two: at once, below
def test_a_notebook_runs_and_its_sliders_redraw(name, page, lab):
    open_notebook(page, lab, name)
    menu_run(page, "runmenu:run-all")
    wait_for_the_end(page)
    check_all_ran(page)
    move_every_slider(page)


def test_two_notebooks_at_once_twice_in_the_same_kernels(new_page, lab):
    pages = [new_page(), new_page()]
    for page, name in zip(pages, NAMES[:2]):
        open_notebook(page, lab, name)
    for _ in range(2):
        for page in pages:
            menu_run(page, "runmenu:run-all")
        for page in pages:
            wait_for_the_end(page)
            check_all_ran(page)
            move_every_slider(page)


def test_training_is_interrupted_run_again_and_all_restarted(page, lab):
    open_notebook(page, lab, "01_standard_residuals.ipynb")
    training = page.locator(".jp-CodeCell", has_text="progress=False")
    training.locator(".jp-InputPrompt").click()
    menu_run(page, "notebook:run-all-above")
    wait_for_the_end(page)
    training.press("Control+Enter")
    page.wait_for_function(QUEUED)
    page.wait_for_timeout(2000)  # in the middle of it
    page.locator('[data-command="notebook:interrupt-kernel"]').first.click()
    expect(training.locator(STDERR)).to_contain_text("KeyboardInterrupt", timeout=30_000)
    wait_for_the_end(page)
    training.press("Control+Enter")
    page.wait_for_function(QUEUED)
    wait_for_the_end(page)
    expect(training.locator(STDERR)).to_have_count(0)
    page.locator('[data-command="notebook:restart-run-all"]').first.click()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    page.wait_for_function(QUEUED)
    wait_for_the_end(page)
    check_all_ran(page)
