"""For all tests: nobody's own compile cache is read or written, and each test compiles for itself."""

from __future__ import annotations

import pytest

from cgkit.compiling import compiled_graph
from cgkit.compiling.cache.store import open_cache


@pytest.fixture(autouse=True)
def cache_dir(tmp_path_factory, monkeypatch):
    """A cache folder for this test and the processes it starts; in the test itself the cache is off."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CGKIT_CACHE_DIR", str(folder))
    monkeypatch.setattr(compiled_graph, "open_cache", lambda key: None)
    return folder


@pytest.fixture
def compile_cache(cache_dir, monkeypatch):
    """The cache on, in an empty folder."""
    monkeypatch.setattr(compiled_graph, "open_cache", open_cache)
    return cache_dir
