"""A predicted pool beside the measured one, with the reason of each difference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgkit.plotting.tables import human_bytes

if TYPE_CHECKING:
    import pandas as pd

_STEP = ["mode", "num_tokens", "uniform_decode"]


def compare(
    predicted: pd.DataFrame, measured: pd.DataFrame, after: pd.DataFrame | None = None
) -> pd.DataFrame:
    """A row a step (mode and size): predicted and measured peak of allocated bytes while its graphs were recorded,
    ``allocated_ratio`` (predicted over measured), predicted and measured reserved bytes after it, ``reason``.

    Args:
        predicted: :meth:`PoolPrediction.to_frame`.
        measured: :meth:`cgkit.measuring.memory.Ledger.to_frame` of a capture of the same modes and sizes.
        after: blocks of the pool when all was recorded (:func:`cgkit.measuring.segments.pool_segments`).
    """
    import pandas as pd

    left, right = _by_step(predicted), _by_step(measured)
    frame = left.merge(right, on=_STEP, how="outer", suffixes=("_predicted", "_measured"), sort=False)
    order = {tuple(key): n for n, key in enumerate(right[_STEP].itertuples(index=False))}
    frame["_order"] = [order.get(tuple(key), len(order)) for key in frame[_STEP].itertuples(index=False)]
    frame = frame.sort_values("_order", kind="stable").reset_index(drop=True)
    live = 0 if after is None else int(after.loc[after["state"] == "live", "block_bytes"].sum())
    out = pd.DataFrame(frame[_STEP])
    out["predicted_allocated_bytes"] = frame["peak_predicted"]
    out["measured_allocated_bytes"] = frame["peak_measured"]
    out["allocated_ratio"] = frame["peak_predicted"] / frame["peak_measured"]
    out["predicted_reserved_bytes"] = frame["reserved_predicted"]
    out["measured_reserved_bytes"] = frame["reserved_measured"]
    out["reason"] = [_reason(row, live) for row in out.to_dict("records")]
    return out


def _by_step(frame: pd.DataFrame) -> pd.DataFrame:
    grouped = frame.groupby(_STEP, sort=False)
    return grouped.agg(
        peak=("peak_allocated_bytes", "max"), reserved=("reserved_after_bytes", "last")
    ).reset_index()


def _reason(row: dict[str, Any], live: int) -> str:
    """Why this row's measured figures are not the predicted ones; "" where they are."""
    if any(row[name] != row[name] for name in ("predicted_allocated_bytes", "measured_allocated_bytes")):
        return "recorded on one side only: the sizes or modes differ"
    allocated = row["measured_allocated_bytes"] - row["predicted_allocated_bytes"]
    reserved = row["measured_reserved_bytes"] - row["predicted_reserved_bytes"]
    found = []
    if allocated > 0:
        named = f", of which {human_bytes(live)} stay after capture (workspaces of a library)" if live else ""
        found.append(
            f"{human_bytes(allocated)} allocated inside recordings that the generated code does not show: temporaries "
            f"of operators{named}"
        )
    elif allocated < 0:
        found.append(f"{human_bytes(-allocated)} of the generated code's buffers are not live at once here")
    if reserved and not allocated:
        found.append(
            f"segments: {human_bytes(abs(reserved))} {'more' if reserved > 0 else 'less'} for the same blocks "
            "(which of several equal free blocks is taken depends on addresses)"
        )
    elif reserved:
        found.append(
            f"segments: {human_bytes(abs(reserved))} {'more' if reserved > 0 else 'less'}, because of the above"
        )
    return "; ".join(found)
