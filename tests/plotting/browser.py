"""A headless Chromium for tests; they are skipped, saying why, where there is none."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@contextmanager
def tab(**options) -> Iterator:
    """A tab that keeps ``requests`` (of addresses) and ``errors`` (of the console and of the page)."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no chromium on the path (Debian: apt-get install chromium)")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--force-color-profile=srgb"]
        )
        page = browser.new_page(**({"viewport": {"width": 1280, "height": 900}} | options))
        page.requests, page.errors = [], []
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda m: page.errors.append(m.text) if m.type == "error" else None)
        try:
            yield page
        finally:
            browser.close()


@contextmanager
def jupyter_lab(folder: Path) -> Iterator[str]:
    """A JupyterLab that serves ``folder`` on this machine alone; gives its address."""
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {f"JUPYTER_{name}_DIR": str(folder / f".{name.lower()}") for name in ("CONFIG", "RUNTIME")}
    own |= {
        "PYTHONPATH": str(ROOT),
        "MPLBACKEND": "Agg",
        "JUPYTERLAB_SETTINGS_DIR": str(folder / ".settings"),
    }
    own |= {"JUPYTERLAB_WORKSPACES_DIR": str(folder / ".workspaces")}
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
    ]
    command += [f"--ServerApp.root_dir={folder}", "--IdentityProvider.token=", "--ServerApp.password="]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.news_url="]
    quiet = folder / ".settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    log = folder / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            command, cwd=folder, env=os.environ | own, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_until_it_answers(f"{address}/api", server, log)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


def _wait_until_it_answers(url: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(240):
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(url, timeout=2).read()
            return
        except OSError:
            time.sleep(0.25)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")
