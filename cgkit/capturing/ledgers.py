"""The ledgers that are always on, because they are free: where inputs lie, what was dispatched, what came too late.

Nothing is written per step but one number: which size was asked for (:meth:`CudagraphDispatcher.route`). All else is
known from the recording (addresses, keys, routes) or noted where a step ends in an error anyway, and is put
together here when somebody looks.

Implements what the article leaves to counters and logs (heading "调试与观测：两个官方入口", debugging and
observing: two official ways in).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cgkit.capturing.dispatcher import CudagraphDispatcher
from cgkit.config import CUDAGraphMode
from cgkit.display import Shown
from cgkit.forward_context import BatchDescriptor

if TYPE_CHECKING:
    from cgkit.capturing.captured import CapturedGraphs
    from cgkit.capturing.wrapper import CUDAGraphWrapper

_ADDRESSES = ("graph", "mode", "num_tokens", "uniform_decode", "input", "captured_at", "replayed_at", "moved")


class Ledgers(Shown):
    """What one :class:`~cgkit.CapturedGraphs` has noted, as it stands when it is asked; ``runner.ledgers``,
    ``captured.ledgers`` or :func:`cgkit.ledgers`.

    Attributes:
        captured: whose ledgers they are. Recording again begins anew.
    """

    def __init__(self, captured: CapturedGraphs) -> None:
        self.captured = captured
        self.model_name = captured.compiled.model_name

    @property
    def platform(self) -> Any:
        """Which recorded; a table says if it was emulated."""
        return self.captured.platform

    # --- modes and decisions ---------------------------------------------------------------------

    @property
    def modes(self) -> dict[str, int]:
        """How many steps were sent where: ``FULL``, ``PIECEWISE``, ``NONE``."""
        counts = Counter(
            {mode.name: 0 for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE)}
        )
        for _, _, count, route in self.captured.dispatcher.decisions():
            counts[route.mode.name] += count
        return dict(counts)

    def dispatch_rows(self) -> list[dict[str, Any]]:
        """A row a kind of batch that came: ``num_tokens``, ``uniform_decode``, ``steps``, ``mode``,
        ``num_padded_tokens``, ``replayed_key``, ``keys_tried``, ``why_missed`` (of the last key before none)."""
        dispatcher = self.captured.dispatcher
        rows = []
        for num_tokens, uniform, steps, route in dispatcher.decisions():
            tries = dispatcher.tries(self._asked(dispatcher, num_tokens, uniform))
            missed = (
                ""
                if route.key is not None
                else tries[-2]["outcome"]
                if len(tries) > 1
                else tries[-1]["outcome"]
            )
            rows.append(
                {
                    "num_tokens": num_tokens,
                    "uniform_decode": uniform,
                    "steps": steps,
                    "mode": route.mode.name,
                    "num_padded_tokens": route.num_tokens,
                    "replayed_key": "" if route.key is None else str(tuple(route.key)),
                    "keys_tried": "; ".join(tried(tries)),
                    "why_missed": missed,
                }
            )
        return rows

    @staticmethod
    def _asked(dispatcher: CudagraphDispatcher, num_tokens: int, uniform: bool) -> BatchDescriptor:
        padded = dispatcher.sizes.pad(num_tokens) if dispatcher.sizes else num_tokens
        return BatchDescriptor(padded, uniform)

    @property
    def off_the_ladder(self) -> int:
        """Steps that ran without a graph."""
        return self.modes["NONE"]

    @property
    def module_steps(self) -> dict[str, int]:
        """PIECEWISE steps that no replay plan served although plans were asked for, by reason."""
        return dict(self.captured.plans.module_steps)

    # --- addresses -------------------------------------------------------------------------------

    def address_rows(self) -> list[dict[str, Any]]:
        """A row an input of each recording, then one a weight: ``graph``, ``mode``, ``num_tokens``,
        ``uniform_decode``, ``input``, ``captured_at``, ``replayed_at`` (of the last refused replay; else where it was
        captured, since a replay of anything else is refused; of weights: now) and ``moved`` (refused replays; of
        weights: 1 if it lies elsewhere now)."""
        rows = [row for wrapper in self.captured.wrappers for row in self._of_wrapper(wrapper)]
        ledger = self.captured.weights
        for name, captured_at, now in ledger.now() if ledger is not None else ():
            place = (
                "weights",
                self.captured.mode.name,
                None,
                None,
                name,
                captured_at,
                now,
                int(now != captured_at),
            )
            rows.append(dict(zip(_ADDRESSES, place)))
        return rows

    @staticmethod
    def _of_wrapper(wrapper: CUDAGraphWrapper) -> Iterator[dict[str, Any]]:
        moved = Counter((key, name) for key, name, _ in wrapper.moved)
        latest = {(key, name): address for key, name, address in wrapper.moved}
        for key, entry in wrapper.entries.items():
            for name, address in zip(entry.reader.names, entry.addresses):
                if isinstance(address, bool):  # whether there is metadata at all
                    continue
                seen = latest.get((key, name), address)
                place = (wrapper.name, wrapper.runtime_mode.name, *key, name, address, seen, moved[key, name])
                yield dict(zip(_ADDRESSES, place))

    @property
    def moved(self) -> list[dict[str, Any]]:
        """The rows of :meth:`address_rows` whose tensor lay, or lies, elsewhere than at capture."""
        return [row for row in self.address_rows() if row["moved"]]

    # --- after the lock --------------------------------------------------------------------------

    @property
    def after_lock(self) -> list[tuple[str, str]]:
        """What was to be recorded or compiled after the lock: (what, "refused" or "unlocked on purpose")."""
        return list(self.captured.lock.after)

    # --- showing ---------------------------------------------------------------------------------

    def modes_frame(self) -> Any:
        """A DataFrame with the columns ``mode`` and ``steps``."""
        import pandas as pd

        return pd.DataFrame(list(self.modes.items()), columns=["mode", "steps"])

    def dispatch_frame(self) -> Any:
        """:meth:`dispatch_rows` as a DataFrame."""
        import pandas as pd

        columns = ["num_tokens", "uniform_decode", "steps", "mode", "num_padded_tokens", "replayed_key"]
        return pd.DataFrame(self.dispatch_rows(), columns=[*columns, "keys_tried", "why_missed"])

    def addresses_frame(self) -> Any:
        """:meth:`address_rows` as a DataFrame."""
        import pandas as pd

        frame = pd.DataFrame(self.address_rows(), columns=list(_ADDRESSES))
        return frame.astype({"num_tokens": "Int64", "uniform_decode": "boolean"})

    def after_lock_frame(self) -> Any:
        """A DataFrame with the columns ``what`` and ``outcome``."""
        import pandas as pd

        return pd.DataFrame(self.after_lock, columns=["what", "outcome"])

    def to_frame(self) -> Any:
        """:meth:`dispatch_frame`."""
        return self.dispatch_frame()

    def __repr__(self) -> str:
        modes = ", ".join(f"{count} {mode}" for mode, count in self.modes.items())
        addresses = self.address_rows()
        lines = [
            f"Ledgers of {self.model_name}: steps by mode: {modes}",
            f"  addresses: {len(addresses)} captured, {sum(bool(row['moved']) for row in addresses)} found elsewhere",
        ]
        lines += [
            f"    {row['input']} of {row['graph']}: captured at {row['captured_at']:#x}, "
            f"then at {row['replayed_at']:#x}"
            for row in addresses
            if row["moved"]
        ][:8]
        missed = [row for row in self.dispatch_rows() if not row["replayed_key"]]
        lines += [
            f"  without a graph: {row['steps']} steps of {row['num_tokens']} tokens"
            f"{' (decode)' if row['uniform_decode'] else ''}: {row['why_missed']}"
            for row in missed[:8]
        ]
        if len(missed) > 8:
            lines.append(f"  and {len(missed) - 8} more kinds of batches: .dispatch_frame()")
        lines += [f"  {count} steps took the module path: {why}" for why, count in self.module_steps.items()]
        lines += [f"  after the lock, {outcome}: {what}" for what, outcome in self.after_lock[-8:]]
        return "\n".join(lines)


def tried(tries: list[dict[str, Any]]) -> list[str]:
    """The keys that were tried, in order, the last one being the outcome."""
    said = (
        f"{row['mode']}({row['num_tokens']}, {'decode' if row['uniform_decode'] else 'any'}): {row['outcome']}"
        for row in tries
    )
    return list(
        dict.fromkeys(said)
    )  # for a batch that is not uniform, the exact key is the one for any batch
