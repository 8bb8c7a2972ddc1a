"""From raw columns of one or several files to the one DataFrame of a timeline.

The columns stand in :class:`cgkit.measuring.timeline.Timeline`. A process is a pid of a file: ranks
write a file each, and their pids, streams and correlation ids may be equal. GPU events name the device where a
CPU event names its pid, so they get the process of the call that launched them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cgkit.measuring import ties
from cgkit.measuring.chrome_trace import RawTrace
from cgkit.measuring.event_kinds import CALLS, CODE, GPU_KINDS, GPU_WORK, KINDS, kinds_of

if TYPE_CHECKING:
    import pandas as pd

_GPU = np.array([CODE[kind] for kind in GPU_KINDS], np.int8)
_WORK = np.array([CODE[kind] for kind in GPU_WORK], np.int8)
_CALLS = np.array([CODE[kind] for kind in CALLS], np.int8)
_OTHER = CODE["other"]
#: The marks of our own runs; with two colons it would be one of our operators.
_MARK = re.compile(r"^cgkit:(?!:)")


@dataclass
class Columns:
    """One file's events, sorted, with their ties; row numbers count within it."""

    raw: RawTrace
    kind: NDArray[np.int8]
    start_us: NDArray[np.float64]
    process: NDArray[np.int32]
    thread: NDArray[np.int64]
    stream: NDArray[np.int32]
    device: NDArray[np.int32]
    launched_by: NDArray[np.int64]
    order: NDArray[np.int64]
    lanes: list[str]
    lane: NDArray[np.int32]
    processes: list[int | str]
    warnings: list[str] = field(default_factory=list)


def frame(raws: list[RawTrace]) -> tuple[pd.DataFrame, list[int | str], list[str]]:
    """The events of all files, the pid of each process, and what is odd about them."""
    base = min(absolute_base_us(raw) for raw in raws)
    files, warnings = [], []
    processes: list[int | str] = []
    ranks = _ranks(raws)
    for number, raw in enumerate(raws):
        offset = float(absolute_base_us(raw) - base)
        columns = _file(raw, number, ranks[number], offset, len(processes), several=len(raws) > 1)
        processes += columns.processes
        warnings += columns.warnings
        files.append(columns)
    table = _join(files)
    return table, processes, warnings


def absolute_base_us(raw: RawTrace) -> Any:
    """The first event's time on the wall clock as far as the file says (exact), in microseconds."""
    from decimal import Decimal

    try:
        return raw.base_us + Decimal(int(raw.header.get("baseTimeNanoseconds") or 0)) / 1000
    except (TypeError, ValueError):
        return raw.base_us


def _file(raw: RawTrace, number: int, rank: str, offset_us: float, first: int, several: bool) -> Columns:
    kind = kinds_of(raw.categories, raw.names, raw.category, raw.name)
    gpu = np.isin(kind, _GPU)
    process, pids, warnings = _processes(raw, kind, gpu)
    thread = _numbers(raw.tids)[raw.tid]
    device = np.where(raw.device >= 0, raw.device, _numbers(raw.pids)[raw.pid].astype(np.int32))
    stream = np.where(raw.stream >= 0, raw.stream, thread.astype(np.int32))
    device = np.where(gpu, device, -1).astype(np.int32)
    stream = np.where(gpu, stream, -1).astype(np.int32)
    call = np.flatnonzero(np.isin(kind, _CALLS))
    work = np.flatnonzero(np.isin(kind, _WORK))
    if len(pids) > 1:
        process, told = _guessed(process, kind, raw, call, work, device)
        warnings += told
    tied = np.full(len(kind), -1, np.int64)
    tied[work] = ties.launched_by(kind, raw.correlation, process, raw.start_us, call, work)
    process = _processes_of_gpu(process, gpu, device, tied, len(pids))
    warnings += _skew(raw.start_us, work, tied)
    thread = np.where(gpu, -1, thread)
    lanes, lane = _lanes(raw, process, thread, device, stream, gpu, kind, pids, rank)
    if several:
        warnings = [f"{raw.source or f'file {number}'}: {text}" for text in warnings]
    process = (process + first).astype(np.int32)
    order = np.empty(0, np.int64)
    return Columns(
        raw,
        kind,
        raw.start_us + offset_us,
        process,
        thread,
        stream,
        device,
        tied,
        order,
        lanes,
        lane,
        pids,
        warnings,
    )


def _processes(
    raw: RawTrace, kind: NDArray[np.int8], gpu: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], list[int | str], list[str]]:
    """The process (a number within the file) of each CPU event; -1 for the GPU's, if there are several.

    A process is a pid that has operators, annotations or calls. Python functions of threads that torch does not
    know stand under pid 0; they belong to the process that there is.
    """
    doing = ~gpu & (kind != _OTHER) & (kind != CODE["python"])
    if not doing.any():
        doing = ~gpu & (kind != _OTHER)
    pids, count = np.unique(raw.pid[doing], return_counts=True)
    pids = pids[np.argsort(-count, kind="stable")]
    number = np.full(len(raw.pids), 0, np.int32)
    ranked = sorted(pids.tolist(), key=lambda pid: _by_number(raw.pids[pid]))
    number[ranked] = np.arange(len(ranked))
    if len(pids):
        others = np.setdiff1d(np.arange(len(raw.pids)), pids)
        number[others] = number[pids[0]]
    process = number[raw.pid]
    if len(pids) > 1:
        process = np.where(gpu, -1, process).astype(np.int32)
    return process, [raw.pids[pid] for pid in ranked] or [""], []


def _by_number(label: int | str) -> tuple[int, str]:
    return (label, "") if isinstance(label, int) else (0, label)


def _guessed(
    process: NDArray[np.int32],
    kind: NDArray[np.int8],
    raw: RawTrace,
    call: NDArray[np.int64],
    work: NDArray[np.int64],
    device: NDArray[np.int32],
) -> tuple[NDArray[np.int32], list[str]]:
    """The process of GPU work whose id several processes of one file use: that of its device."""
    calls = call[raw.correlation[call] > 0]
    pairs = np.unique(np.column_stack([raw.correlation[calls], process[calls].astype(np.int64)]), axis=0)
    ids, count = np.unique(pairs[:, 0], return_counts=True)
    shared = work[np.isin(raw.correlation[work], ids[count > 1])]
    if not len(shared):
        return process, []
    owners = ties.owners(kind, raw.correlation, process, raw.start_us, call, work, device)
    process = process.copy()
    process[shared] = [owners.get(one, -1) for one in device[shared].tolist()]
    return process, [
        f"{len(shared):,} pieces of GPU work carry ids that several processes of this file use: they were given to "
        "the process that uses their device"
    ]


def _processes_of_gpu(
    process: NDArray[np.int32],
    gpu: NDArray[np.bool_],
    device: NDArray[np.int32],
    tied: NDArray[np.int64],
    n: int,
) -> NDArray[np.int32]:
    """GPU events belong to the process of their call; untied ones to the one that uses their device most."""
    process = process.copy()
    known = np.flatnonzero(tied >= 0)
    process[known] = process[tied[known]]
    unknown = np.flatnonzero(gpu & (process < 0))
    if len(unknown):
        for one in np.unique(device[unknown]):
            users = process[known[device[known] == one]]
            owner = int(np.bincount(users, minlength=n).argmax()) if len(users) else 0
            process[unknown[device[unknown] == one]] = owner
    return process


def _skew(start_us: NDArray[np.float64], work: NDArray[np.int64], tied: NDArray[np.int64]) -> list[str]:
    """GPU work that begins before its launch: the two clocks disagree."""
    known = work[tied[work] >= 0]
    early = start_us[tied[known]] - start_us[known]
    early = early[early > 0]
    if not len(early):
        return []
    return [
        f"{len(early):,} of {len(known):,} pieces of GPU work begin before the call that launched them (up to "
        f"{early.max():,.1f} us): the clocks of CPU and GPU disagree"
    ]


def _numbers(labels: list[int | str]) -> NDArray[np.int64]:
    """Labels as whole numbers; texts that are none get negative ones, each its own."""
    numbers = []
    for i, label in enumerate(labels):
        try:
            number = int(label)
        except ValueError:
            number = -2 - i
        numbers.append(number if abs(number) < 2**62 else -2 - i)
    return np.array(numbers, np.int64)


def _ranks(raws: list[RawTrace]) -> list[str]:
    """What each file's lanes are called after; files that say the same rank (of two runs, say) stay apart."""
    ranks = [_rank(raw, number) for number, raw in enumerate(raws)]
    return [f"{rank} (file {number})" if ranks.count(rank) > 1 else rank for number, rank in enumerate(ranks)]


def _rank(raw: RawTrace, number: int) -> str:
    info = raw.header.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return f"rank {rank if isinstance(rank, int) else number}"


def _lanes(
    raw: RawTrace,
    process: NDArray[np.int32],
    thread: NDArray[np.int64],
    device: NDArray[np.int32],
    stream: NDArray[np.int32],
    gpu: NDArray[np.bool_],
    kind: NDArray[np.int8],
    pids: list[int | str],
    rank: str,
) -> tuple[list[str], NDArray[np.int32]]:
    """A lane a thread and a lane a stream, with their names."""
    a = np.where(gpu, device, raw.tid).astype(np.int64)
    key = np.column_stack([process, gpu, a, stream]).astype(np.int64)
    different, first, lane = np.unique(key, axis=0, return_index=True, return_inverse=True)
    names = []
    for (number, on_gpu, what, on_stream), row in zip(different.tolist(), first.tolist()):
        owner = f"{rank} · process {pids[number]}" if len(pids) > 1 else rank
        if on_gpu:
            names.append(f"{owner} · GPU {what} stream {on_stream}")
            continue
        tid, pid = raw.tids[what], raw.pids[raw.pid[row]]
        called = "main" if tid == pid and tid != 0 else raw.thread_names.get((pid, tid), "")
        called = "" if called.startswith("thread ") else called
        names.append(f"{owner} · thread {tid}" + (f" ({called})" if called else ""))
    return names, lane.reshape(-1).astype(np.int32)


def _join(files: list[Columns]) -> pd.DataFrame:
    """One table of all files, sorted by start; row numbers in ties follow."""
    import pandas as pd

    sizes = np.cumsum([0] + [len(one.kind) for one in files])
    start = np.concatenate([one.start_us for one in files])
    start = start - start.min()
    dur = np.concatenate([one.raw.dur_us for one in files])
    kind = np.concatenate([one.kind for one in files])
    correlation = np.concatenate([one.raw.correlation for one in files])
    tied = np.concatenate(
        [np.where(one.launched_by >= 0, one.launched_by + at, -1) for one, at in zip(files, sizes)]
    )
    lane, lanes = _merge([one.lane for one in files], [one.lanes for one in files])
    name, names = _merge([one.raw.name for one in files], [one.raw.names for one in files])
    order = _sorted(start, dur, kind, correlation, lane, lanes, name, names)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    tied = np.where(tied >= 0, rank[tied], -1)[order]
    kind = kind[order]
    graph = np.where((tied >= 0) & (kind[tied] == CODE["graph_launch"]), tied, -1)

    def column(of: str) -> NDArray[Any]:
        return np.concatenate([getattr(one, of) for one in files])[order]

    table = pd.DataFrame(
        {
            "lane": pd.Categorical.from_codes(lane[order], lanes),
            "kind": pd.Categorical.from_codes(kind, list(KINDS)),
            "name": pd.Categorical.from_codes(name[order], names),
            "start_us": start[order],
            "dur_us": dur[order],
            "correlation": correlation[order],
            "stream": column("stream"),
            "device": column("device"),
            "process": column("process"),
            "thread": column("thread"),
            "launched_by": tied,
            "graph_launch": graph,
        },
        copy=False,
    )
    table["piece"], table["stage"] = _pieces(table)
    return table


def _merge(codes: list[NDArray[Any]], names: list[list[str]]) -> tuple[NDArray[np.int32], list[str]]:
    """Codes into lists of names of several files as codes into one list."""
    if len(codes) == 1 and len(set(names[0])) == len(names[0]):
        return codes[0].astype(np.int32), names[0]
    number: dict[str, int] = {}
    parts = []
    for code, own in zip(codes, names):
        translation = np.array([number.setdefault(name, len(number)) for name in own] or [0], np.int32)
        parts.append(translation[code])
    return np.concatenate(parts), list(number)


def _sorted(
    start: NDArray[np.float64],
    dur: NDArray[np.float64],
    kind: NDArray[np.int8],
    correlation: NDArray[np.int64],
    lane: NDArray[np.int32],
    lanes: list[str],
    name: NDArray[np.int32],
    names: list[str],
) -> NDArray[np.int64]:
    """By start; of equal starts the longer first, then by what they are: the file's order never matters."""
    order = np.argsort(start, kind="stable")
    tie = np.flatnonzero(np.diff(start[order]) == 0)
    if len(tie):
        at = np.union1d(tie, tie + 1)
        rows = order[at]
        by_lane = np.argsort(np.argsort(np.array(lanes, dtype=object)))
        different, code = np.unique(name[rows], return_inverse=True)
        by_name = np.argsort(np.argsort(np.array([names[i] for i in different], dtype=object)))[code]
        keys = (by_name, by_lane[lane[rows]], correlation[rows], kind[rows], -dur[rows], start[rows])
        order[at] = rows[np.lexsort(keys)]
    return order


def _pieces(table: pd.DataFrame) -> tuple[pd.Categorical, pd.Categorical]:
    """Piece and stage of every event, from the marks ``cgkit:<stage>[:<piece>]`` around it or its launch."""
    import pandas as pd

    n = len(table)
    names = table["name"].cat.categories
    ours = np.array([_MARK.match(str(name)) is not None for name in names], bool)
    start, kind = table["start_us"].to_numpy(), table["kind"].cat.codes.to_numpy()
    cpu = ~np.isin(kind, _GPU) & (kind != _OTHER)
    code = table["name"].cat.codes.to_numpy()
    marks = np.flatnonzero(cpu & ours[code]) if ours.any() else np.empty(0, np.int64)
    if not len(marks):
        none = pd.Categorical.from_codes(np.zeros(n, np.int8), [""])
        return none, none.copy()
    lane = table["lane"].cat.codes.to_numpy()
    end = start + table["dur_us"].to_numpy()
    tied = table["launched_by"].to_numpy()
    of = np.where(tied >= 0, tied, np.where(cpu, np.arange(n), -1))  # whose marks count
    asked = np.flatnonzero(of >= 0)
    inner = ties.innermost(start[marks], end[marks], lane[marks], start[of[asked]], lane[of[asked]])
    parts = [str(names[c]).split(":", 2) for c in code[marks]]
    columns = []
    for position in (2, 1):
        labels = [part[position] if len(part) > position else "" for part in parts]
        different = sorted({"", *labels})
        number = {label: i for i, label in enumerate(different)}
        own = np.array([number[label] for label in labels], np.int32)
        codes = np.zeros(n, np.int32)
        hit = inner >= 0
        codes[asked[hit]] = own[inner[hit]]
        columns.append(pd.Categorical.from_codes(codes, different))
    return columns[0], columns[1]
