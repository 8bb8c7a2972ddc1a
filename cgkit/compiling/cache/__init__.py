"""The compile cache: a second process with nothing changed compiles nothing.

Implements the article's "影响编译产物的所有因子都要进 hash" (every factor of what is compiled
belongs into the hash).
"""

from cgkit.compiling.cache.explain import explain_cache, why_miss
from cgkit.compiling.cache.factors import CacheKey, cache_key
from cgkit.compiling.cache.folder import cache_root, entries
from cgkit.compiling.cache.pack import pack, unpack
from cgkit.compiling.cache.store import CompileCache
from cgkit.compiling.cache.traces import trace_misses

__all__ = [
    "CacheKey",
    "CompileCache",
    "cache_key",
    "cache_root",
    "entries",
    "explain_cache",
    "pack",
    "trace_misses",
    "unpack",
    "why_miss",
]
