import numpy as np
import pandas as pd
import pytest

from cgkit.plotting import human_bytes, table, text_table
from cgkit.plotting.tables import human_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (2048, "2.0 KiB"), (48 * 2**20, "48.0 MiB"), (3e12, "2,794.0 GiB")],
)
def test_bytes_in_a_fitting_unit(count, text):
    assert human_bytes(count) == text


def test_units_come_from_the_column_names():
    html = table(pd.DataFrame({"pool_bytes": [2048], "dur_us": [1.26], "seconds": [0.5], "n": [1234]}))
    for part in ("2.0 KiB", "dur (µs)", "1.3", "seconds (s)", "0.50", "1,234"):
        assert part in html


def test_text_is_escaped_and_cut_with_the_whole_in_the_tooltip():
    html = table(pd.DataFrame({"name": ["<script>" + "x" * 80]}), chars=20)
    assert "<script>" not in html
    assert f'title="&lt;script&gt;{"x" * 80}"' in html
    assert "…" in html


def test_many_rows_are_folded():
    html = table(pd.DataFrame({"n": range(30)}), rows=10)
    assert "<summary>20 more rows</summary>" in html
    assert "<details>" not in table(
        pd.DataFrame({"n": range(12)}), rows=10
    )  # a fold of two rows hides nothing


def test_missing_values_are_empty_and_bools_are_words():
    html = table(pd.DataFrame({"x": [None, np.nan], "yes": [True, np.bool_(False)]}))
    assert "nan" not in html.lower()
    assert "<td>yes</td>" in html and "<td>no</td>" in html


def test_a_terminal_table_is_aligned():
    text = text_table(pd.DataFrame({"mode": ["eager", "FULL & more"], "dur_ms": [92.125, 7.0]}), indent="")
    assert text.splitlines() == ["mode         dur (ms)", "eager           92.12", "FULL & more      7.00"]


def test_a_long_text_is_cut_in_a_terminal_and_has_a_tooltip_on_a_page():
    frame = pd.DataFrame({"seen": ["<b> & " + "a" * 300]})
    row = text_table(frame, indent="").splitlines()[1]
    assert row == "<b> & " + "a" * 193 + "…"
    html = table(frame, chars=20)
    assert f'<span title="&lt;b&gt; &amp; {"a" * 300}">&lt;b&gt; &amp; {"a" * 13}…</span>' in html


def test_short_times_show_digits():
    html = table(pd.DataFrame({"seconds": [0.0, 0.00132, 1.5], "total_s": [0.0204, 7.0, 0.5]}))
    assert '<td class="cg-num">0.0013</td>' in html and '<td class="cg-num">0.0204</td>' in html
    assert '<td class="cg-num">0.00</td>' in html and '<td class="cg-num">1.50</td>' in html
    assert [human_seconds(s) for s in (0, 2.738, 0.0042, 0.00085)] == ["0.00 s", "2.74 s", "4.2 ms", "850 µs"]
