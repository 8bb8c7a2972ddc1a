"""How much memory a pool of recorded graphs takes."""

from __future__ import annotations

from typing import NamedTuple


class PoolBytes(NamedTuple):
    """Bytes of one pool: ``reserved`` from the device, of which ``allocated`` are in use."""

    reserved: int
    allocated: int
