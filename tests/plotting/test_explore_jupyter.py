"""The explorer as a widget in a real JupyterLab, in headless Chromium: what is there and reacts, not pixels."""

import json
import re

import pytest

from tests.plotting.browser import ROOT, jupyter_lab, tab

pytestmark = pytest.mark.slow

CELL = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from tests.plotting import timelines
from cgkit.plotting.explore import explore
explore(timelines.pieces(6), height=300)
"""


def notebook(path):
    cell = {
        "cell_type": "code",
        "source": CELL.strip(),
        "metadata": {},
        "outputs": [],
        "execution_count": None,
        "id": "a",
    }
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.write_text(json.dumps({"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))


def span(page):
    return float(page.get_attribute(".cgx", "data-right")) - float(page.get_attribute(".cgx", "data-left"))


def test_the_widget_draws_and_reacts_in_jupyterlab(tmp_path):
    pytest.importorskip("anywidget", reason="anywidget is not installed")
    notebook(tmp_path / "look.ipynb")
    with jupyter_lab(tmp_path) as address, tab() as page:
        page.goto(f"{address}/lab/tree/look.ipynb?reset")
        page.wait_for_selector(".jp-Notebook .cm-content", timeout=90_000)
        page.wait_for_selector("text=/ipykernel\\) \\| Idle/", timeout=90_000)  # a run before that is lost
        page.click(".jp-Notebook .cm-content")
        page.keyboard.press("Shift+Enter")
        page.wait_for_selector(".jp-OutputArea-output .cgx[data-ready=yes]", timeout=90_000)
        assert page.locator(".jp-OutputArea-output canvas.cgx-canvas").count() == 1
        drawn = page.evaluate(
            "(() => { const c = document.querySelector('.cgx-canvas');"
            "return new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size })()"
        )
        assert drawn > 20  # a blank canvas has one or two values

        everything = span(page)
        page.locator(".cgx-canvas").scroll_into_view_if_needed()
        box = page.locator(".cgx-canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.wheel(0, -400)
        page.wait_for_timeout(200)
        assert span(page) == everything  # the wheel belongs to the notebook until one clicks
        page.mouse.click(box["x"] + box["width"] - 8, box["y"] + 40)
        page.mouse.wheel(0, -400)
        page.wait_for_function(f"parseFloat(document.querySelector('.cgx').dataset.right) < {everything}")
        assert span(page) < everything

        page.fill(".cgx input[type=search]", "paged_attention")
        page.wait_for_function("document.querySelector('.cgx-count').textContent === '6 found'")
        page.keyboard.press("Enter")
        page.wait_for_function("document.querySelector('.cgx').dataset.selected >= 0")
        assert "cuLaunchKernelEx" in page.inner_text(".cgx-panel")

        left = float(page.get_attribute(".cgx", "data-left"))
        page.focus(".cgx-canvas")
        page.keyboard.press("d")
        page.keyboard.press("d")  # in JupyterLab's command mode this would delete the cell
        page.wait_for_function(f"parseFloat(document.querySelector('.cgx').dataset.left) !== {left}")
        assert page.locator(".jp-CodeCell").count() == 2

        page.click(".jp-Notebook .cm-content >> nth=-1")
        page.keyboard.press("Control+s")
        page.wait_for_timeout(1500)
        outside = [
            url for url in page.requests if not re.match(rf"{address}|data:|blob:|ws://127\.0\.0\.1", url)
        ]
        assert outside == []
        page.screenshot(path=tmp_path / "jupyterlab.png")  # for whoever wants to look
    cell, _ = json.loads((tmp_path / "look.ipynb").read_text())["cells"]
    (output,) = cell["outputs"]
    assert {"image/png", "text/plain", "application/vnd.jupyter.widget-view+json"} <= set(output["data"])
    assert "Timeline" in output["metadata"]["image/png"]["alt"]


def test_a_notebook_that_was_run_elsewhere_shows_the_static_picture(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook(tmp_path / "look.ipynb")
    book = nbformat.read(tmp_path / "look.ipynb", 4)
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    nbformat.write(book, tmp_path / "look.ipynb")
    with jupyter_lab(tmp_path) as address, tab() as page:
        page.goto(f"{address}/lab/tree/look.ipynb?reset")
        page.wait_for_selector(".jp-OutputArea-output img", timeout=90_000)
        width = page.evaluate("document.querySelector('.jp-OutputArea-output img').naturalWidth")
        assert width > 600
        assert page.locator(".cgx").count() == 0
