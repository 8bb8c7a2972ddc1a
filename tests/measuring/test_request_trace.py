from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgkit import events
from cgkit.errors import CgkitError
from cgkit.measuring.histogram_file import HistogramFileError, read_histogram
from cgkit.measuring.request_trace import RequestTraceError, read_requests

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(tmp_path, text, name="trace.csv"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 10**6)),
        min_size=1,
        max_size=20,
    )
)
def test_what_was_written_is_read(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    start, at, lines = datetime(2024, 2, 28, 23, 59, 59, 500_000), 0, [HEADER]
    expected = []
    for micros, prompt, output in rows:
        at += micros
        lines.append(f"{start + timedelta(microseconds=at)}0,{prompt},{output}")  # Azure writes 7 digits
        expected.append((at - rows[0][0], prompt, output))
    path.write_text("\n".join(lines))
    found = read_requests(path)
    assert [
        (round(a * 1e6), p, o) for a, p, o in zip(found.arrivals, found.prompts, found.outputs)
    ] == expected
    assert found.to_frame().shape == (len(rows), 3)
    assert f"{len(rows)} requests" in repr(found)


def test_other_names_orders_times_and_line_ends(tmp_path):
    text = "output_tokens,arrival_s,x,prompt_tokens\r\n5,1.5,,7\r\n\r\n6,2.25,,8\r\n"
    found = read_requests(write(tmp_path, text))
    assert (found.arrivals, found.prompts, found.outputs) == ([0.0, 0.75], [7, 8], [5, 6])
    aware = read_requests(
        write(tmp_path, f"{HEADER}\n2024-05-10 00:00:00.009930+00:00,1,1\n2024-05-10T01:00:01+01:00,1,1\n")
    )
    assert aware.arrivals == [0.0, pytest.approx(0.99007)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        (HEADER, "no request under it"),
        ("TIMESTAMP,ContextTokens\n", "line 1: the column GeneratedTokens is missing"),
        ("a,b\n1,2\n", "line 1: the columns .*are missing"),
        (f"{HEADER}\n2.0,1,1\n1.0,1,1\n", "line 3, column TIMESTAMP: '1.0' is earlier"),
        (f"{HEADER}\n2.0,0,1\n", "line 2, column ContextTokens: 0 tokens"),
        (f"{HEADER}\n2.0,99999999999,1\n", "line 2, column ContextTokens: 99999999999 tokens; .* below"),
        (f"{HEADER}\n2.0,1,-4\n", "line 2, column GeneratedTokens: -4 tokens"),
        (f"{HEADER}\n2.0,1,1\n\n3.0,1,two\n", "line 4, column GeneratedTokens: 'two' is no whole"),
        (f"{HEADER}\n2.0,1\n", "line 2, column GeneratedTokens: '' is no whole"),
        (f"{HEADER}\n2.0,1.5,1\n", "line 2, column ContextTokens: '1.5'"),
        (f"{HEADER}\nsoon,1,1\n", "line 2, column TIMESTAMP: 'soon' is neither"),
        (f"{HEADER}\nnan,1,1\n", "line 2, column TIMESTAMP: 'nan' is no time"),
        (f"{HEADER}\n1700157711163,1,1\n", "line 2, column TIMESTAMP: '1700157711163' seconds .* not milli-"),
        (
            f"{HEADER}\n0,{'9' * 5000},1\n",
            r"line 2, column ContextTokens: '9{59}\.\.\. \(5,002 characters\) is no",
        ),
    ],
)
def test_bad_files_name_line_and_column(tmp_path, text, said):
    with pytest.raises(RequestTraceError, match=said):
        read_requests(write(tmp_path, text))


def test_files_that_are_none(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00abc")
    for read in (read_requests, read_histogram):
        with pytest.raises(CgkitError, match=r"UTF-8 .*; unpack a compressed file first"):
            read(tmp_path / "x.csv")
    with pytest.raises(RequestTraceError, match="No such file"):
        read_requests(tmp_path / "nowhere.csv")
    with pytest.raises(CgkitError, match="cannot be read"):
        read_requests(tmp_path)


def test_it_says_how_far_it_is(tmp_path):
    path = write(tmp_path, HEADER + "\n" + "\n".join(f"{n},1,1" for n in range(120_000)))
    seen = []
    undo = events.subscribe(events.Progress, seen.append)
    read_requests(path)
    undo()
    assert [event.done < event.total for event in seen] == [True, True, False]


# --- histograms ------------------------------------------------------------------------------------------


def test_histograms_of_every_form(tmp_path):
    expected = [(1, 10.0), (8, 5.0)]
    forms = {
        "a.csv": "batch_size,count\n1,10\n8,5\n",
        "b.csv": "count,batch\n10,1\n5,8\n",
        "a.json": '{"1": 10, "8": 5}',
        "b.json": '[{"batch_size": 1, "count": 10}, {"batch_size": 8, "count": 5}]',
    }
    for name, text in forms.items():
        frame = read_histogram(write(tmp_path, text, name))
        assert list(frame.itertuples(index=False, name=None)) == expected, name
    kinds = read_histogram(write(tmp_path, "batch_size,count,kind\n1,10,decode\n300,5,mixed\n", "k.csv"))
    assert list(kinds["kind"]) == ["decode", "mixed"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "", "is empty"),
        ("a.csv", "batch_size,count\n", "no steps"),
        ("a.csv", "batch_size,count\n4,0\n", "no steps"),
        ("a.csv", "size,n\n1,1\n", "line 1: the columns batch_size, count are missing"),
        ("a.csv", "batch_size,count\n1,1\n0,5\n", "line 3, column batch_size: '0'"),
        ("a.csv", "batch_size,count\n2,-1\n", "line 2, column count: '-1'"),
        ("a.csv", "batch_size,count\n2\n", "line 2, column count: ''"),
        ("a.csv", "batch_size,count,kind\n2,1,prefil\n", "line 2, column kind: 'prefil'"),
        ("a.json", "{", "no JSON"),
        ("a.json", "3", "give an object"),
        ("a.json", "[{}]", "entry 1"),
        ("a.json", '{"x": 2}', "entry 1, column batch_size: 'x'"),
        ("a.json", '[{"batch": 2, "count": null}]', "entry 1, column count"),
        ("a.csv", f"batch_size,count\n1,{'1' * 200_000}\n", "a.csv: this is no CSV .field larger"),
        (
            "a.csv",
            "batch_size,count\n1,1e308\n",
            "line 2, column count: '1e308' is no number of steps .* below",
        ),
        (
            "a.csv",
            f"batch_size,count\n{2**31},1\n",
            "line 2, column batch_size: '2147483648' .* below 2,147,483,648",
        ),
        (
            "a.csv",
            "batch,count,kind\n1,2,decode\n2,3,\n",
            "1 of 2 rows have no kind, .* row 2; give each decode or",
        ),
        ("a.json", "[" * 100_000, "no JSON"),
        ("a.JSON", "3", "give an object"),
        ("a.json", '{"8": 1, "8": 2}', "a.json: '8' stands there twice"),
    ],
)
def test_bad_histograms_name_where(tmp_path, name, text, said):
    with pytest.raises(HistogramFileError, match=said):
        read_histogram(write(tmp_path, text, name))
