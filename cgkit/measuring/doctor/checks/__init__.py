"""The checks, in the order in which they are made: one module each."""

# ruff: noqa: F401, I001 - the order of import is the order of the checks
from cgkit.measuring.doctor.checks import graph_breaks
from cgkit.measuring.doctor.checks import dimensions
from cgkit.measuring.doctor.checks import zero_one
from cgkit.measuring.doctor.checks import dropped_guards
from cgkit.measuring.doctor.checks import recompilations
from cgkit.measuring.doctor.checks import guard_cost
from cgkit.measuring.doctor.checks import arguments
from cgkit.measuring.doctor.checks import written
from cgkit.measuring.doctor.checks import capture_rules
from cgkit.measuring.doctor.checks import streams
from cgkit.measuring.doctor.checks import random_numbers
from cgkit.measuring.doctor.checks import dynamic_operators
from cgkit.measuring.doctor.checks import outside_pool
from cgkit.measuring.doctor.checks import moving
from cgkit.measuring.doctor.checks import replayed
from cgkit.measuring.doctor.checks import mixed_rows
from cgkit.measuring.doctor.checks import sizes
from cgkit.measuring.doctor.checks import unshared
from cgkit.measuring.doctor.checks import cache
from cgkit.measuring.doctor.checks import host_copies
