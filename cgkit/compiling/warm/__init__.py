"""The trace cache: a second process with nothing changed does not trace either.

``compile_model`` goes through stages 1 to 3, and comes back with a stored start where all that it depended on
is what it was. See README.md of the folder above.
"""

from cgkit.compiling.warm.road import compile_model

__all__ = ["compile_model"]
