"""How much memory a pool of recorded graphs holds, on every platform in the same words."""

from __future__ import annotations

from typing import NamedTuple


class PoolBytes(NamedTuple):
    """Bytes of one graph pool.

    ``reserved`` is what the pool took from the system and does not give back before it is freed;
    ``allocated`` is the part of it that live (owning) tensors occupy at this moment. What lies
    between is what weak outputs and the insides of recorded graphs use: it may be handed out again.
    """

    reserved: int
    allocated: int
