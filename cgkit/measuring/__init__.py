"""What happened, measured: timelines, the CPU's bill, and the benchmarks behind ``cgkit bench``.

Everything gives DataFrames; :mod:`cgkit.plotting` draws them. Reads the stages; no stage imports it.
"""

from cgkit.measuring.crossover import Crossover, crossover
from cgkit.measuring.launch_overhead import LaunchOverhead, measure_launch_overhead
from cgkit.measuring.profile_step import profile_step
from cgkit.measuring.timeline import Timeline

__all__ = [
    "Crossover",
    "LaunchOverhead",
    "Timeline",
    "crossover",
    "measure_launch_overhead",
    "profile_step",
]
