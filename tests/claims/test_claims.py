"""The list of claims, the card, and the record that it leaves."""

import json

import pytest

import cgkit
from cgkit import claims
from cgkit.claims import card

SOME = "bill-heading"


def test_a_card_says_all_of_it_and_leaves_a_record():
    shown = cgkit.claim(SOME, measured="9.5 ms of CPU", outcome="confirmed", why="x < y")
    says = claims.read()[SOME].says
    assert says in repr(shown) and "9.5 ms of CPU" in repr(shown)
    bundle = shown._bundle()
    assert "x &lt; y" in bundle["text/html"]
    record = json.loads(json.dumps(bundle[claims.MIME]))
    assert record == [{"id": SOME, "measured": "9.5 ms of CPU", "outcome": "confirmed", "why": "x < y"}]


def test_several_on_one_card():
    rows = [
        {"id": SOME, "measured": "1", "outcome": "confirmed"},
        {"id": SOME, "measured": "2", "outcome": "wrong", "why": "z"},
    ]
    assert [row["outcome"] for row in cgkit.claim(rows)._bundle()[claims.MIME]] == ["confirmed", "wrong"]


def test_a_comparison_decides():
    rows = cgkit.claim(
        [{"id": SOME, "measured": "1", "outcome": 2 > 1}, {"id": SOME, "measured": "1", "outcome": 1 > 2}]
    ).rows
    assert [row.outcome for row in rows] == ["confirmed", "wrong"]
    assert rows[1].why


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"id": "bill-headin", "measured": "1", "outcome": "confirmed"}, "near it: bill-heading"),
        ({"id": SOME, "measured": "1", "outcome": "true"}, "none of confirmed"),
        ({"id": SOME, "measured": "", "outcome": "confirmed"}, "by which measurement"),
        ({"id": SOME, "measured": "", "outcome": "not measured"}, "and why"),
    ],
)
def test_a_record_that_says_nothing_is_refused(given, message):
    with pytest.raises(claims.ClaimError, match=message):
        cgkit.claim(**given)


def test_a_cell_shows_a_card_once_and_a_later_cell_again():
    shell = pytest.importorskip("IPython.testing.globalipapp").start_ipython()
    from IPython.utils.capture import capture_output

    def run(code):
        with capture_output() as captured:
            shell.run_cell(code, store_history=True)
        return [out for out in captured.outputs if claims.MIME in out.data]

    assert len(run(f"import cgkit; a = cgkit.claim({SOME!r}, '1', 'confirmed')")) == 1
    assert len(run(f"cgkit.claim({SOME!r}, '1', 'confirmed')")) == 1
    assert len(run("a")) == 1


def write(folder, monkeypatch, *rows):
    path = folder / "claims.csv"
    path.write_text("\n".join(["id,heading,kind,says,unit,notebook,not_measured", *rows]))
    monkeypatch.setattr("cgkit.claims.listing.CSV", path)
    claims.read.cache_clear()


@pytest.fixture
def own_list(tmp_path, monkeypatch):
    yield lambda *rows: write(tmp_path, monkeypatch, *rows)
    claims.read.cache_clear()


def test_two_rows_with_one_id_are_refused(own_list):
    own_list("a,h,number,s,,01,", "a,h,number,s,,01,")
    with pytest.raises(claims.ClaimError, match="two rows"):
        claims.read()


def test_an_unknown_kind_is_refused(own_list):
    own_list("a,h,fact,s,,01,")
    with pytest.raises(claims.ClaimError, match="fact"):
        claims.read()


def test_outcomes_have_a_colour_each():
    assert set(card._COLOURS) == set(claims.OUTCOMES)


def test_the_list_holds_every_heading_with_something_under_it():
    rows = list(claims.read().values())
    assert len(rows) >= 100
    headings = [row.heading for row in rows if row.kind == "heading"]
    assert len(headings) == len(set(headings)) == 25  # the article's title and its 24 headings
    assert {row.heading for row in rows} == set(headings)
    under = {row.heading for row in rows if row.kind != "heading"}
    assert set(headings) - under == {"The two layers of mechanism, in the title"}


def test_every_row_says_something_and_knows_its_notebook():
    for row in claims.read().values():
        assert len(row.says) > 20 and not row.says.endswith(".")
        assert row.notebook in {f"{number:02}" for number in range(12)}
        assert bool(row.unit) == (row.kind == "number"), row.id
        assert row.id == row.id.lower() and " " not in row.id
    assert {row.notebook for row in claims.read().values()} == {f"{number:02}" for number in range(12)}
