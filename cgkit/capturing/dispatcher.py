"""Which recorded graph a batch takes, decided once a step.

Implements the article's "BatchDescriptor 与 forward context：回放 key 的设计" (BatchDescriptor and
forward context: the design of the replay key): an exact FULL key, then a FULL key for any batch,
then a PIECEWISE key, then none. The article asks up to three sets at every step; here the answers
are worked out when keys are added, so that a step costs one look-up, and the keys that come out
are always the same objects, which lets a wrapper compare by identity.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cgkit.capturing.sizes import CaptureSizes
from cgkit.config import CUDAGraphMode
from cgkit.display import Shown
from cgkit.forward_context import BatchDescriptor

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


class Route(NamedTuple):
    """Where a batch goes: its mode, the key of its graph (None without one), and its padded size."""

    mode: CUDAGraphMode
    key: BatchDescriptor | None
    num_tokens: int


class CudagraphDispatcher(Shown):
    """Holds the keys of FULL and PIECEWISE graphs and finds the best one for a batch.

    ``mode`` may be a composite. With ``initialize_cudagraph_keys`` not called yet every batch gets
    (NONE, None), as in the article: a warm-up before capture must not replay.
    """

    def __init__(self, mode: CUDAGraphMode | str = NONE, sizes: CaptureSizes | None = None) -> None:
        self.mode: CUDAGraphMode = CUDAGraphMode.parse(mode, "cudagraph_mode")
        self.sizes = sizes
        self.cudagraph_keys: dict[CUDAGraphMode, set[BatchDescriptor]] = {PIECEWISE: set(), FULL: set()}
        self.keys_initialized = False
        self._answers: dict[BatchDescriptor, tuple[CUDAGraphMode, BatchDescriptor | None]] = {}
        # By uniform_decode, then num_tokens: the route, and how often it was asked for (None: a decode batch that
        # no graph serves, so that counting it raises and the slow way takes over).
        self._routes: tuple[tuple[list[Route], list[Any]], ...] = (([], []), ([], []))
        self._without: Counter[tuple[int, bool]] = Counter()
        self._dispatched: Counter[BatchDescriptor] = Counter()
        self._warned = False

    def planned_keys(
        self, *, uniform_sizes: Sequence[int] | None = None, largest_first: bool = True
    ) -> list[tuple[CUDAGraphMode, BatchDescriptor]]:
        """What is to be recorded, in that order: batches of any kind first, then decode batches of
        a separate FULL routine; each from large to small, so that small graphs reuse large buffers.

        ``uniform_sizes`` limits the sizes of decode batches (a runner knows its ``max_num_seqs``).
        ``largest_first=False`` turns the sizes round (it takes more memory, and shows why).
        """
        if self.sizes is None:
            return []
        ordered = self.sizes.sizes[:: -1 if largest_first else 1]
        keys: list[tuple[CUDAGraphMode, BatchDescriptor]] = []
        if self.mode.mixed_mode():
            keys += [(self.mode.mixed_mode(), BatchDescriptor(size, False)) for size in ordered]
        if self.mode.separate_routine() and self.mode.decode_mode() is FULL:
            allowed = set(ordered if uniform_sizes is None else uniform_sizes)
            keys += [(FULL, BatchDescriptor(size, True)) for size in ordered if size in allowed]
        return keys

    def initialize_cudagraph_keys(
        self, keys: Iterable[tuple[CUDAGraphMode, BatchDescriptor]] | None = None
    ) -> None:
        """Sets the keys (default: :meth:`planned_keys`) and works out every answer."""
        for held in self.cudagraph_keys.values():
            held.clear()
        for mode, key in self.planned_keys() if keys is None else keys:
            self.cudagraph_keys[mode].add(key)
        self.keys_initialized = True
        self._work_out()

    def clear(self) -> None:
        """Forgets every key: nothing is replayed until they are set again."""
        self.__init__(self.mode, self.sizes)  # type: ignore[misc]

    def dispatch(self, batch_descriptor: BatchDescriptor) -> tuple[CUDAGraphMode, BatchDescriptor | None]:
        """The mode and the key for a *padded* batch; (NONE, None) where no graph fits."""
        self._dispatched[batch_descriptor] += 1
        return self._answers.get(batch_descriptor, (NONE, None))

    def route(self, num_tokens: int, uniform_decode: bool = False) -> Route:
        """Padding and dispatch in one table look-up, for a batch before padding.

        Above the largest size, or where no graph fits, the route is NONE at the size that
        :meth:`CaptureSizes.pad` gives above the largest one, and unpadded below it. Each question is counted
        (:meth:`decisions`): one addition, and no look-up beside the one for the route.
        """
        routes, asked = self._routes[uniform_decode]
        if num_tokens >= 0:
            try:
                asked[num_tokens] += 1
                return routes[num_tokens]
            except (IndexError, TypeError):
                pass
        return self._without_graph(num_tokens, uniform_decode)

    def _without_graph(self, num_tokens: int, uniform_decode: bool) -> Route:
        """The route of a batch above the ladder, or of a decode batch that no graph serves."""
        self._without[num_tokens, uniform_decode] += 1
        if uniform_decode:
            self.warn_off_ladder(num_tokens, "a decode batch")
        return self.route_of(num_tokens, uniform_decode)

    def warn_off_ladder(self, num_tokens: int, what: str) -> None:
        """Warns, once, that ``what`` of ``num_tokens`` runs without a graph although graphs are recorded."""
        if self._warned or not self.keys_initialized or self.sizes is None:
            return
        self._warned = True
        reason = self.tries(BatchDescriptor(self.sizes.pad(num_tokens), what == "a decode batch"))[-2][
            "outcome"
        ]
        warnings.warn(
            f"{what} of {num_tokens} tokens runs without a graph ({reason}; the recorded sizes end at "
            f"{self.sizes.largest}), and so will others: add sizes to cudagraph_capture_sizes, or send smaller "
            "batches (max_num_seqs). Said once; cgkit.ledgers(...) counts them all",
            stacklevel=4,
        )

    def explain(self, batch_descriptor: BatchDescriptor) -> Any:
        """A DataFrame of the keys that are tried for ``batch_descriptor``, in order, and the outcome.

        The last row is the answer; rows before it say why they are not.
        """
        import pandas as pd

        return pd.DataFrame(self.tries(batch_descriptor))

    def tries(self, batch_descriptor: BatchDescriptor) -> list[dict[str, Any]]:
        """The rows of :meth:`explain`, as data."""
        relaxed = batch_descriptor.non_uniform
        tries = [(FULL, batch_descriptor, "exact key"), (FULL, relaxed, "key for any batch")]
        tries += [(PIECEWISE, relaxed, "key for any batch")]
        rows: list[dict[str, Any]] = []
        for mode, key, rule in tries:
            found = key in self.cudagraph_keys[mode]
            why = "taken" if found else self._why_not(mode, key)
            row = {"mode": mode.name, "rule": rule, "num_tokens": key.num_tokens}
            rows.append({**row, "uniform_decode": key.uniform_decode, "found": found, "outcome": why})
            if found:
                break
        else:
            row = {"mode": NONE.name, "rule": "no graph", "num_tokens": batch_descriptor.num_tokens}
            uniform = batch_descriptor.uniform_decode
            rows.append({**row, "uniform_decode": uniform, "found": True, "outcome": "runs without a graph"})
        return rows

    def decisions(self) -> list[tuple[int, bool, int, Route]]:
        """What was asked since the keys were set: (tokens before padding, uniform decode, how often, the route).

        For :meth:`dispatch` the tokens are those that it was asked for, padded already.
        """
        counts = Counter(self._without)
        for uniform, (_, asked) in enumerate(self._routes):
            counts.update({(n, bool(uniform)): count for n, count in enumerate(asked) if count})
        for key, count in self._dispatched.items():
            counts[key.num_tokens, key.uniform_decode] += count
        return [
            (n, uniform, count, self.route_of(n, uniform)) for (n, uniform), count in sorted(counts.items())
        ]

    def route_of(self, num_tokens: int, uniform: bool) -> Route:
        """As :meth:`route`, uncounted."""
        routes, _ = self._routes[uniform]
        if 0 <= num_tokens < len(routes):
            return routes[num_tokens]
        return Route(NONE, None, self.sizes.pad(num_tokens) if self.sizes else num_tokens)

    def _why_not(self, mode: CUDAGraphMode, key: BatchDescriptor) -> str:
        if not self.keys_initialized:
            return "keys are not initialised"
        held = self.cudagraph_keys[mode]
        if not held:
            return f"no {mode.name} graphs under {self.mode.name}"
        if not any(other.uniform_decode == key.uniform_decode for other in held):
            kind = "any batch" if key.uniform_decode else "decode batches"
            return f"{mode.name} graphs exist only for {kind}"
        if key.num_tokens > max(other.num_tokens for other in held):
            return f"above the largest {mode.name} size"
        return "not a recorded size: pad first"

    def _work_out(self) -> None:
        full, piecewise = self.cudagraph_keys[FULL], self.cudagraph_keys[PIECEWISE]
        held = {key: key for key in [*full, *piecewise]}  # one object a key, for comparing by identity
        self._answers = {}
        for size in {key.num_tokens for key in held}:
            for asked in (BatchDescriptor(size, False), BatchDescriptor(size, True)):
                relaxed = asked.non_uniform
                tries = ((FULL, asked, full), (FULL, relaxed, full), (PIECEWISE, relaxed, piecewise))
                answer = next(((mode, held[key]) for mode, key, keys in tries if key in keys), None)
                if answer is not None:
                    self._answers[asked] = answer
        top = self.sizes.largest + 1 if self.sizes else 0
        plain, uniform = ([self._route(n, decode) for n in range(top)] for decode in (False, True))
        served = bool(self.mode) and self.keys_initialized
        self._routes = (
            (plain, [0] * top),
            (uniform, [None if served and n and route.key is None else 0 for n, route in enumerate(uniform)]),
        )
        self._without.clear()
        self._dispatched.clear()

    def _route(self, num_tokens: int, uniform: bool) -> Route:
        assert self.sizes is not None
        padded = self.sizes.pad(num_tokens)
        mode, key = self._answers.get(BatchDescriptor(padded, uniform), (NONE, None))
        return Route(mode, key, padded if mode else num_tokens)

    def to_frame(self) -> Any:
        """A row a key: ``mode``, ``num_tokens``, ``uniform_decode``."""
        import pandas as pd

        rows = [
            {"mode": mode.name, "num_tokens": key.num_tokens, "uniform_decode": key.uniform_decode}
            for mode, keys in self.cudagraph_keys.items()
            for key in sorted(keys)
        ]
        return pd.DataFrame(rows, columns=["mode", "num_tokens", "uniform_decode"])

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(keys)} {mode.name}" for mode, keys in self.cudagraph_keys.items())
        ready = "" if self.keys_initialized else ", not initialised"
        return f"CudagraphDispatcher({self.mode.name}: {counts} keys{ready})"
