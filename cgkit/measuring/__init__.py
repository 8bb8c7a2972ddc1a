"""What happened, measured: timelines, the CPU's bill, and the benchmarks behind ``cgkit bench``.

Everything gives DataFrames; :mod:`cgkit.plotting` draws them. Reads the stages; no stage imports it.
"""

from cgkit.measuring.timeline import Timeline

__all__ = ["Timeline"]
