"""Eighty layers are compiled in about the time of four."""

from __future__ import annotations

import pytest

from cgkit import torch_hooks
from cgkit.errors import CgkitError
from cgkit.measuring import bench_dedup


@pytest.mark.slow
def test_three_compilations_whatever_the_depth():
    table = bench_dedup.run((2, 6), width=8, compiler="eager")
    assert table["pieces"].tolist() == table["requests"].tolist() == [3, 7]
    assert table["compilations"].tolist() == [3, 3]
    assert table["ratio"].iloc[0] == 1.0 and (table[["trace_s", "split_s", "compile_s"]] > 0).all().all()


def test_a_case_that_fails_says_what_it_printed():
    with pytest.raises(CgkitError, match=r"(?s)2 layers failed.*compiler='nobody'"):
        bench_dedup.run((2,), compiler="nobody")


@pytest.mark.slow
@pytest.mark.skipif(torch_hooks.find_cpp_compiler() is None, reason="needs a C++ compiler")
def test_eighty_layers_compile_three_pieces_with_inductor():
    """How long that takes against four layers is a benchmark (``cgkit bench dedup``), not a test."""
    table = bench_dedup.run((4, 80))
    assert table["pieces"].tolist() == [5, 81] and table["compilations"].tolist() == [3, 3]
