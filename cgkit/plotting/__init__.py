"""DataFrames -> pictures: charts, tables, the split graph, one HTML page.

Plotting knows no stage: it is given DataFrames (and draws artefacts through their ``to_frame()``).
Needs the extra ``cgkit[plot]``.
"""

from cgkit.plotting.charts import (
    capture_seconds,
    compile_times,
    counters,
    memory,
    ms_per_token,
    padding_staircase,
    padding_steps,
)
from cgkit.plotting.folding import fold
from cgkit.plotting.picture import Picture
from cgkit.plotting.split_graph import split_graph
from cgkit.plotting.style import About, save, style, svg, title_of
from cgkit.plotting.tables import human_bytes, table, text_table
from cgkit.plotting.timeline_chart import compare_timelines, timeline

__all__ = [
    "About",
    "Picture",
    "capture_seconds",
    "compare_timelines",
    "compile_times",
    "counters",
    "fold",
    "human_bytes",
    "memory",
    "ms_per_token",
    "padding_staircase",
    "padding_steps",
    "save",
    "split_graph",
    "style",
    "svg",
    "table",
    "text_table",
    "timeline",
    "title_of",
]
