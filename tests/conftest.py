"""For all tests: nobody's own compile cache is read or written, and each test compiles for itself."""

from __future__ import annotations

import random

import pytest
import torch

from cgkit.compiling import compiled_graph
from cgkit.compiling.cache import traces
from cgkit.compiling.cache.folder import disabled
from cgkit.compiling.cache.store import open_cache
from cgkit.compiling.warm import road


@pytest.fixture(scope="session", autouse=True)
def no_compile_cache(tmp_path_factory):
    """Off in the tests' process, for fixtures of every scope; in a folder of its own in others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CGKIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(compiled_graph, "open_cache", lambda key: None)
        patch.setattr(road, "cache_is_on", lambda: False)
        yield


@pytest.fixture(autouse=True)
def seeded():
    """The same random weights and inputs at each run: an outcome that depends on them is no matter of luck."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def cache_dir(no_compile_cache, tmp_path_factory, monkeypatch):
    """An empty cache folder for the processes that this test starts."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CGKIT_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def compile_cache(cache_dir, monkeypatch):
    """The cache on, in an empty folder."""
    monkeypatch.setattr(compiled_graph, "open_cache", open_cache)
    monkeypatch.setattr(road, "cache_is_on", lambda: not disabled())
    monkeypatch.setattr(traces, "_misses", {})  # what other tests of this process traced
    return cache_dir
