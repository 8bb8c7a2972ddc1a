"""The table of claims: on notebooks made for the purpose, and as it is committed."""

import json
from pathlib import Path

import pytest

from cgkit.claims import MIME, listing, read, table

FOLDER = Path(__file__).parents[2] / "notebooks"
ROWS = ["a,First,number,nine | ten,us,01,", "b,First,mechanism,it is so,,01,", "c,Second,heading,later,,02,"]
ROWS.append("d,Second,mechanism,two of them,,01,needs two GPUs")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for notebooks, and a list of four claims."""
    path = tmp_path / "claims.csv"
    path.write_text("\n".join(["id,heading,kind,says,unit,notebook,not_measured", *ROWS]))
    monkeypatch.setattr(listing, "CSV", path)
    read.cache_clear()
    yield tmp_path
    read.cache_clear()


def write(folder, name, *rows):
    outputs = [{"output_type": "display_data", "data": {MIME: list(rows)}}]
    cells = [
        {"cell_type": "markdown", "source": ["# 01\n", "\n", "## 1 · Count"]},
        {"cell_type": "code", "source": "", "outputs": outputs},
    ]
    (folder / name).write_text(json.dumps({"cells": cells}))


def row(id, outcome="confirmed", measured="7 us", why=""):
    return {"id": id, "measured": measured, "outcome": outcome, "why": why}


def test_a_claim_of_a_notebook_that_is_not_there_is_open(folder):
    assert table.missing(folder) == [] and table.still_open(folder) == ["a", "b", "c"]
    assert "4 claims: 1 not measured, 3 open." in table.markdown(folder)


def test_what_a_notebook_leaves_out_is_missing(folder):
    write(folder, "01_x.ipynb", row("a"))
    assert table.missing(folder) == ["b"] and table.still_open(folder) == ["c"]


def test_another_notebook_may_cover_it(folder):
    write(folder, "01_x.ipynb", row("a"), row("c"))
    write(folder, "03_y.ipynb", row("b"))
    assert table.missing(folder) == table.still_open(folder) == []


def test_a_row_says_where_and_what_came_out(folder):
    write(folder, "01_x.ipynb", row("a", "wrong", "12 us", "no, | more"))
    write(folder, "02_y.ipynb", row("a", "confirmed", "9 us"))
    text = table.markdown(folder)
    assert (
        "| `a` nine \\| ten | [01](01_x.ipynb) 1 · Count<br>[02](02_y.ipynb) 1 · Count "
        "| **wrong**: 12 us. no, \\| more<br>**confirmed**: 9 us |" in text
    )
    assert "| `d` two of them | – | **not measured**: needs two GPUs |" in text
    assert "1 wrong, 1 not measured, 2 open" in text


def test_every_claim_of_a_notebook_that_is_there_is_covered():
    assert table.missing(FOLDER) == []


def test_the_committed_table_is_in_step_with_the_notebooks():
    assert (FOLDER / "CLAIMS.md").read_text(encoding="utf-8") == table.markdown(FOLDER)


def test_every_record_is_of_a_listed_claim_and_gives_what_it_must():
    for record in table.records(FOLDER):
        assert record.id in read()
        assert record.measured or record.outcome in ("overtaken", "not measured"), record.id
        assert record.why or record.outcome == "confirmed", record.id
