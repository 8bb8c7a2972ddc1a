"""DataFrames -> pictures: charts, tables, the split graph, one HTML page.

Plotting knows no stage: it is given DataFrames (and draws artefacts through their ``to_frame()``).
Needs the extra ``cgkit[plot]``.
"""

from cgkit.plotting import (
    compile_charts,
    hazard_charts,
    headline_chart,
    host_chart,
    memory_charts,
    mode_charts,
    padding_charts,
    plan_charts,
    scan_charts,
    serve_charts,
    start_charts,
    trace_charts,
)
from cgkit.plotting.charts import (
    capture_seconds,
    compile_times,
    ms_per_token,
    padding_steps,
)
from cgkit.plotting.compile_gantt import compile_gantt
from cgkit.plotting.folding import fold
from cgkit.plotting.launch_charts import against_nodes, crossover, launch_costs, launch_overhead
from cgkit.plotting.picture import Picture
from cgkit.plotting.split_graph import GraphPicture, split_graph
from cgkit.plotting.style import About, save, style, svg, title_of
from cgkit.plotting.tables import human_bytes, table, text_table
from cgkit.plotting.timeline_chart import compare_timelines, timeline

__all__ = [
    "About",
    "GraphPicture",
    "Picture",
    "against_nodes",
    "capture_seconds",
    "compare_timelines",
    "compile_charts",
    "compile_gantt",
    "compile_times",
    "crossover",
    "fold",
    "hazard_charts",
    "headline_chart",
    "host_chart",
    "human_bytes",
    "launch_costs",
    "launch_overhead",
    "memory_charts",
    "mode_charts",
    "ms_per_token",
    "padding_charts",
    "padding_steps",
    "plan_charts",
    "save",
    "scan_charts",
    "serve_charts",
    "split_graph",
    "start_charts",
    "style",
    "svg",
    "table",
    "text_table",
    "timeline",
    "title_of",
    "trace_charts",
]
