"""The configuration: what it takes, what it turns into what, and what it refuses."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from cgkit.config import (
    CompilationConfig,
    CompilationLevel,
    CUDAGraphMode,
)
from cgkit.errors import ConfigError

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE


def test_levels_are_the_articles():
    assert [level.name for level in CompilationLevel] == [
        "NO_COMPILATION",
        "DYNAMO_AS_IS",
        "DYNAMO_ONCE",
        "PIECEWISE",
    ]
    assert [level.value for level in CompilationLevel] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        (NONE, NONE, NONE),
        (PIECEWISE, PIECEWISE, PIECEWISE),
        (FULL, FULL, FULL),
        (DECODE_ONLY, FULL, NONE),
        (BOTH, FULL, PIECEWISE),
    ],
)
def test_composite_modes_are_pairs(mode, decode, mixed):
    assert mode.decode_mode() is decode and mode.mixed_mode() is mixed
    assert mode.separate_routine() == (decode is not mixed)
    assert [m for m in (NONE, PIECEWISE, FULL) if mode.has_mode(m)] == sorted(
        {decode, mixed}, key=lambda m: m.value
    )
    assert bool(mode) == (mode is not NONE)


def test_strings_and_numbers_are_taken_for_enums():
    config = CompilationConfig(level="piecewise", cudagraph_mode=" full_and_piecewise ")
    assert config.level is CompilationLevel.PIECEWISE and config.mode is BOTH
    assert CompilationConfig(level=2).level is CompilationLevel.DYNAMO_ONCE


def test_graphs_are_on_by_default_only_where_there_are_pieces():
    assert [CompilationConfig(level=level).mode for level in range(4)] == [NONE, NONE, NONE, PIECEWISE]


def test_it_is_immutable_and_shows_what_was_changed():
    config = CompilationConfig(compile_sizes=[4, 2, 4], cudagraph_capture_sizes=[8, 1, 8])
    assert config.compile_sizes == (2, 4) and config.cudagraph_capture_sizes == (1, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.level = CompilationLevel.NO_COMPILATION
    assert "compile_sizes=(2, 4)" in repr(config) and "debug" not in repr(config)
    assert dataclasses.replace(config, debug=True).compile_sizes == (2, 4)


@pytest.mark.parametrize("mode", [PIECEWISE, BOTH])
def test_nothing_to_split_at_becomes_full_and_says_so(mode):
    with pytest.warns(UserWarning, match=f"{mode.name} becomes FULL"):
        assert CompilationConfig(splitting_ops=[], cudagraph_mode=mode).mode is FULL


@pytest.mark.parametrize("mode", [NONE, FULL, DECODE_ONLY])
def test_nothing_to_split_at_is_fine_otherwise(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CompilationConfig(splitting_ops=[], cudagraph_mode=mode).mode is mode


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"level": "turbo"}, "level='turbo'.*DYNAMO_ONCE"),
        ({"level": 7}, "level=7"),
        ({"cudagraph_mode": "some"}, "cudagraph_mode='some'.*FULL_DECODE_ONLY"),
        ({"level": 0, "cudagraph_mode": "FULL"}, "level 0"),
        ({"level": 1, "cudagraph_mode": "FULL"}, "level 1.*level 2 or 3"),
        ({"level": 2, "cudagraph_mode": "PIECEWISE"}, "does not split.*use level 3"),
        ({"level": 2, "splitting_ops": ["a::b"]}, "splitting_ops.*no effect at level 2"),
        ({"level": 2, "compile_sizes": [4]}, "compile_sizes.*no effect at level 2"),
        ({"splitting_ops": "a::b"}, "splitting_ops='a::b' is not a list"),
        ({"cudagraph_capture_sizes": "vllm"}, "use one of article"),
        ({"cudagraph_capture_sizes": []}, "records nothing"),
        ({"cudagraph_capture_sizes": [4, 0]}, "has 0"),
        ({"cudagraph_capture_sizes": [4, -2]}, "has -2"),
        ({"cudagraph_capture_sizes": [4, 2.5]}, "has 2.5, which is not a whole number"),
        ({"cudagraph_capture_sizes": [True]}, "has True"),
        ({"compile_sizes": [0]}, "compile_sizes has 0"),
        ({"compiler": "gcc"}, "compiler='gcc'.*inductor"),
        ({"dispatch": "none"}, "dispatch='none'"),
        ({"compile_at": "later"}, "compile_at='later'"),
        ({"graph_platform": "hip"}, "graph_platform='hip'"),
        ({"cudagraph_num_of_warmups": -1}, "cudagraph_num_of_warmups"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"tensor_parallel_size": 2}, "one device; use 1"),
        ({"custom_ops": ["rms_norm"]}, "custom_ops has 'rms_norm'"),
        ({"custom_ops": ["all", "none"]}, "keep one"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_field_value_and_way_out(changes, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        CompilationConfig(**changes)
