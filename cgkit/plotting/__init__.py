"""DataFrames -> pictures: charts, tables, the split graph, one HTML page.

Plotting knows no stage: it is given DataFrames (and draws artefacts through their ``to_frame()``).
Needs the extra ``cgkit[plot]``.
"""

from cgkit.plotting.charts import (
    capture_seconds,
    compile_times,
    memory,
    ms_per_token,
    padding_staircase,
    padding_steps,
)
from cgkit.plotting.compile_gantt import compile_gantt
from cgkit.plotting.folding import fold
from cgkit.plotting.picture import Picture
from cgkit.plotting.split_graph import GraphPicture, split_graph
from cgkit.plotting.style import About, save, style, svg, title_of
from cgkit.plotting.tables import human_bytes, table, text_table

__all__ = [
    "About",
    "GraphPicture",
    "Picture",
    "capture_seconds",
    "compile_gantt",
    "compile_times",
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
    "title_of",
]
