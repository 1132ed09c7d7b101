"""JupyterLab as a reader has it: a server of its own, a copy of the course, and Debian's Chromium. `make browser`."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
LAPTOP = {"width": 1280, "height": 800}
SETTINGS = {
    # Cells outside the window are there, too; a reader scrolls to them.
    "@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {"fetchNews": "false", "checkForUpdates": False},
}


@pytest.fixture(scope="session")
def course(tmp_path_factory):
    """A copy of the notebooks at a path with spaces and letters that are not ASCII."""
    folder = tmp_path_factory.mktemp("lab") / "Kurs für Änne"
    shutil.copytree(NOTEBOOKS, folder / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    return folder / "notebooks"


@pytest.fixture(scope="session")
def lab(course):
    """The address of a running JupyterLab, with its token: a format for the path of a notebook."""
    home = course.parents[1]
    for name, content in SETTINGS.items():
        file = home / "settings" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token, folders = secrets.token_hex(16), {f"JUPYTER_{kind}_DIR": home / kind for kind in ("CONFIG", "RUNTIME")}
    folders |= {"JUPYTERLAB_SETTINGS_DIR": home / "settings", "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces"}
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}",
        "--MappingKernelManager.cull_idle_timeout=30", "--MappingKernelManager.cull_interval=10",  # of closed pages
    ]  # fmt: skip
    environment = os.environ | {name: str(folder) for name, folder in folders.items()}
    with open(home / "server.log", "w") as log:
        server = subprocess.Popen(command, cwd=course, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={token}").close()
                break
            except OSError:
                assert server.poll() is None, (home / "server.log").read_text()
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/lab/tree/{{}}?reset&token={token}"
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="session")
def browser():
    quiet = ["--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=quiet)
        yield chromium
        chromium.close()


@pytest.fixture
def new_page(browser):
    """Opens a page; at the end all that were opened are closed."""
    with ExitStack() as pages:
        yield lambda: pages.enter_context(browser.new_page(viewport=LAPTOP))


@pytest.fixture
def page(new_page):
    return new_page()
