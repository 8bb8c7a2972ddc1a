"""``cgkit bench startup``: a second process with nothing changed against the first one.

Three numbers a model: the whole start (from import to the first answer of the compiled model), the first call
alone (without torch's import and the weights), and the compile stage alone, each cold (empty cache) and warm (what
the cold one left behind). A warm start traces nothing and compiles nothing; it imports torch, and Inductor to load
what Inductor made, which no cache of ours saves: ``import_share`` says how much of each start that is. Implements
what the article's "影响编译产物的所有因子都要进 hash" (every factor belongs into the hash) buys.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from cgkit import events
from cgkit.measuring.start_case import TOY, add_device, device_of, start

#: tiny and real shape, and the depths of ``cgkit bench dedup``.
MODELS = ("tiny-llama", "smollm2-135m", f"{TOY}4", f"{TOY}16", f"{TOY}80")
#: The goal: warm over cold.
GOAL = 0.15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench startup``."""
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL", help="(default: all)")
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "inductor_patched", "eager"])
    parser.add_argument("--warm", type=int, default=2, metavar="N", help="warm starts of each (default: 2)")
    add_device(parser)
    parser.add_argument("--csv", metavar="FILE", help="write the rows as CSV too")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; ``frame`` has a row a start, with its parts in seconds and its share of the cold one.

    Columns as :func:`cgkit.measuring.start_case.start`, and ``cache`` ("cold", "warm"), ``first_call_share``,
    ``start_share``, ``call_share`` (the first call without any import) and ``compile_share`` (over the cold start's;
    1.0 for that itself), the first two in processor time as well (``_cpu_share``), ``import_share`` (of this very
    start: torch, cgkit and the compiler imported), ``same_answer``.

    Raises:
        CgkitError: a process failed.
    """
    import pandas as pd

    frame = pd.DataFrame([row for model in args.models for row in _starts(model, args)])
    if args.csv:
        frame.to_csv(args.csv, index=False, float_format="%.4g")
    warm = frame[frame["cache"] == "warm"]
    return {
        "frame": frame,
        "rows": frame.to_dict("records"),
        "goal": GOAL,
        "nothing_compiled": bool((warm["compilations"] == 0).all()),
        "nothing_traced": bool((warm["traces_loaded"] == 1).all()),
        "worst_call_share": float(warm["call_share"].max()),
        "worst_first_call_share": float(warm["first_call_share"].max()),
        "worst_start_share": float(warm["start_share"].max()),
        "worst_compile_share": float(warm["compile_share"].max()),
    }


def _starts(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        turns = events.counted(
            model, range(1 + args.warm), lambda turn: f"warm start {turn}" if turn else "cold start"
        )
        starts = [start(model, args.compiler, Path(folder), device=device_of(args)) for _ in turns]
    cold, rows = starts[0], []
    for index, one in enumerate(starts):
        answer = one.pop("answer") if index else cold["answer"]
        row = {key: value for key, value in one.items() if key != "answer"}
        rows.append(
            {
                "cache": "warm" if index else "cold",
                **row,
                "first_call_share": one["first_call_s"] / cold["first_call_s"],
                "start_share": one["start_s"] / cold["start_s"],
                "first_call_cpu_share": one["first_call_cpu_s"] / cold["first_call_cpu_s"],
                "start_cpu_share": one["start_cpu_s"] / cold["start_cpu_s"],
                "call_share": _call(one) / _call(cold),
                "compile_share": one["compile_s"] / cold["compile_s"],
                "import_share": (one["import_s"] + one["compiler_import_s"]) / one["start_s"],
                "same_answer": answer == cold["answer"],
            }
        )
    return rows


def _call(one: dict[str, Any]) -> float:
    """Seconds of the first call where everything is imported."""
    return sum(one[part] for part in ("trace_s", "split_s", "compile_s", "answer_s"))
