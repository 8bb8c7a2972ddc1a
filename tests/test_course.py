"""The map of the course, its table, and that what is linked is there."""

import re
import runpy
from pathlib import Path

import pandas as pd
import pytest

from cgkit import claims
from cgkit.exercises import exercises_of
from cgkit.plotting.road import STAGES, road
from tests.plotting.browser import tab

FOLDER = Path(__file__).parent.parent / "notebooks"


@pytest.fixture(scope="module")
def overview():
    return runpy.run_path(str(FOLDER / "overview.py"))


def test_the_table_is_in_step_with_the_notebooks(overview):
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert overview["readme"](text, overview["course"]()) == text
    assert text.count("*(not there yet)*") == 12 - len(list(FOLDER.glob("[0-9][0-9]_*.ipynb")))


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert "pipeline.svg" in links
    assert [link for link in links if not (FOLDER / link).exists()] == []


def test_every_notebook_has_a_place_and_comes_after_its_own_kind(overview):
    frame = overview["course"]()
    assert list(frame["number"]) == [f"{number:02}" for number in range(12)]
    assert set(frame["stage"]) == {stage for stage, _, _ in STAGES} | {"all"}
    for row in frame.itertuples():
        assert all(before < row.number for before in row.after.split(",") if before)
    assert {each.notebook for each in claims.read().values()} == set(frame["number"])


def test_every_notebook_that_is_there_has_exercises_and_shows_them(overview):
    for row in overview["course"]().query("there").itertuples():
        text = (FOLDER / row.file).read_text(encoding="utf-8")
        assert 3 <= len(exercises_of(row.number)) <= 5, row.file
        for each in exercises_of(row.number):
            assert f'check(\\"{each.id}\\", ...)' in text, each.id


def test_the_map_draws_what_is_not_there_otherwise(overview):
    frame = overview["course"]().assign(there=[number < "05" for number in overview["course"]()["number"]])
    ax = road(frame)
    words = {text.get_text() for text in ax.texts}
    assert set(frame["number"]) <= words
    dashed = [patch for patch in ax.patches if patch.get_linestyle() == "--"]
    assert len(dashed) == 7


def test_the_committed_map_shows_every_notebook():
    drawn = (FOLDER / "pipeline.svg").read_text(encoding="utf-8")
    titles = pd.read_csv(FOLDER / "course.csv", dtype=str)["number"]
    assert [number for number in titles if f">{number}<" not in drawn] == []


def test_the_printed_page_is_in_step_and_is_one_page():
    poster = runpy.run_path(str(FOLDER / "poster.py"))
    page = FOLDER / "pipeline.html"
    assert page.read_text(encoding="utf-8") == poster["poster"]()
    assert all(len(texts) == len(STAGES) + 1 for texts in poster["ROWS"])
    with tab() as opened:
        opened.goto(page.as_uri())
        printed = opened.pdf(prefer_css_page_size=True, print_background=True)
        assert opened.requests == [page.as_uri()] and opened.errors == []
        wide = opened.evaluate(
            "[...document.querySelectorAll('td, th')].filter(e => e.scrollWidth > e.clientWidth)"
        )
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1
    size = re.search(rb"/MediaBox\s*\[0 0 ([\d.]+) ([\d.]+)\]", printed)
    assert [round(float(points) / 72 * 25.4) for points in size.groups()] == [297, 210]
    assert wide == [], "a cell's text runs over its edge"
