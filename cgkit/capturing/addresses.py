"""Where tensors lie, and the error when one has moved.

A recorded graph reads the addresses that it was recorded with. A tensor that moved is not noticed:
the replay reads what is left at the old place (vLLM PR#53915: garbage tokens, no error). The article
checks only in debug runs (heading "捕获一次的成本与 weak ref 技巧", the cost of one capture and the
weak-ref trick); cgkit checks what is cheap at every replay, and the weights at the lock.

Cheap means: which tensors there are, and how they are reached, is found once, at recording, and
becomes one generated expression; a replay evaluates it and compares two tuples of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgkit.errors import MovedInputError, ReplayError

Addresses = tuple[int, ...]


class AddressReader:
    """Reads the addresses of the same tensors again and again.

    ``roots`` are the names under which values are handed to ``read`` (in that order), ``paths`` the
    expressions found by :func:`cgkit.tensor_trees.tensor_leaves`, each beginning with a root's name.
    """

    __slots__ = ("names", "paths", "read", "roots")

    def __init__(
        self, roots: Sequence[str], paths: Sequence[str], names: Sequence[str] = (), absent: str = ""
    ) -> None:
        self.roots, self.paths = tuple(roots), tuple(paths)
        self.names = tuple(names) or self.paths  # as shown in an error
        body = "".join(f"{path}.data_ptr(), " for path in self.paths)
        if absent:  # a root that was None must stay None
            self.names = (*self.names, absent)
            body += f"{absent} is not None, "
        source = f"lambda {', '.join(self.roots)}: ({body})"
        self.read: Callable[..., Addresses] = eval(source, {"__builtins__": {}})  # our own text

    def moved(self, where: str, recorded: Addresses, *values: Any) -> MovedInputError:
        """The error for the first of the tensors that is not where it was recorded."""
        for name, old, new in zip(self.names, recorded, self.read(*values)):
            if old != new and isinstance(old, bool):
                return MovedInputError(
                    f"{where}: {name} was None when it was recorded and is given now, which the recorded graph "
                    "does not look at: record with it (capture(..., context=...)), or leave it out"
                )
            if old != new:
                return moved_input(where, name, old, new)
        raise AssertionError("nothing has moved")  # the caller compared before

    def changed(self, where: str, error: Exception) -> ReplayError:
        """The error for arguments that are built otherwise than those of the recording."""
        return ReplayError(
            f"{where}: the arguments are built otherwise than when it was recorded ({type(error).__name__}: "
            f"{error}); tensors were expected at {', '.join(self.names)}. Pass the same structure, "
            "or capture again"
        )


def moved_input(where: str, name: str, old: int, new: int) -> MovedInputError:
    """The error for one tensor that moved from ``old`` to ``new``."""
    return MovedInputError(
        f"{where}: input {name} was recorded at address {old:#x} and now lies at {new:#x}; a replay "
        "would read what is left at the old address. Write into the recorded buffer instead "
        "(`buffer.copy_(value)`), let cgkit copy (cudagraph_copy_inputs=True), or capture again"
    )


class WeightLedger:
    """The addresses of everything that graphs hold and no step passes: parameters, buffers, attributes.

    ``find`` lists them by name, as they are at the moment. Compared when capturing ends (the lock)
    and, under debug, at each step: loading a checkpoint into new tensors after capture is the
    classic way to serve the old weights for ever.
    """

    def __init__(self, find: Callable[[], Sequence[tuple[str, torch.Tensor]]]) -> None:
        self._find = find
        self.names, self.addresses = self._read()

    def _read(self) -> tuple[tuple[str, ...], Addresses]:
        found = list(self._find())
        return tuple(name for name, _ in found), tuple(tensor.data_ptr() for _, tensor in found)

    def now(self) -> list[tuple[str, int, int]]:
        """(name, where it lay when the ledger was made, where it lies now), a row a weight."""
        names, addresses = self._read()
        return list(zip(names, self.addresses, addresses))

    def check(self, where: str) -> None:
        """Raises MovedInputError if a weight lies elsewhere than when the ledger was made."""
        names, addresses = self._read()
        if addresses == self.addresses:
            return
        for name, old, new in zip(names, self.addresses, addresses):
            if old != new:
                raise moved_input(where, name, old, new)
