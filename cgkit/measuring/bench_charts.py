"""``cgkit bench NAME --out FILE.png|svg``: the chart of what was measured. Which benchmark has which chart."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

#: Benchmark -> module of :mod:`cgkit.plotting` and the function in it that takes the benchmark's frame.
CHARTS: dict[str, tuple[str, str]] = {
    "adaptors": ("start_charts", "adaptors"),
    "custom-ops": ("compile_charts", "custom_ops"),
    "dedup": ("start_charts", "dedup"),
    "passes": ("compile_charts", "passes"),
    "startup": ("start_charts", "startup"),
    "static": ("compile_charts", "static"),
}
PICTURES = (".png", ".svg", ".pdf")


def add_out(parser: argparse.ArgumentParser, bench: str) -> None:
    """Adds ``--out`` to the options of a benchmark that has a chart."""
    if bench in CHARTS:
        parser.add_argument(
            "--out",
            dest="picture",
            type=picture_file,
            metavar="FILE.png|svg|pdf",
            help="draw the chart there",
        )


def picture_file(text: str) -> Path:
    """A path that ends as a picture does, for argparse: said before anything is measured."""
    path = Path(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(
            f"{text!r} does not end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
        )
    return path


def save_chart(bench: str, frame: Any, facts: Mapping[str, Any], out: Path) -> Path:
    """Draws ``frame`` as ``bench`` is drawn, with what ``facts`` say of model and device in the title; writes it."""
    from cgkit.plotting import save
    from cgkit.plotting.style import About

    module, name = CHARTS[bench]
    draw = getattr(import_module(f"cgkit.plotting.{module}"), name)
    model = " ".join(str(facts[key]) for key in ("shape", "scheme") if facts.get(key))
    about = About(model, device=str(facts.get("device", "")), emulated=facts.get("emulated"))
    out.parent.mkdir(parents=True, exist_ok=True)
    return save(draw(frame, about), out)
