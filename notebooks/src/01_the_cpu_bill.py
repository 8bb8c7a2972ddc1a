# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · The CPU bill of a decode step
#
# **The question.** A GPU that can do 10¹⁵ operations a second makes one token in sixteen milliseconds, and works for two of
# them. What is it waiting for?
#
# **Afterwards you can**
# - read a timeline of a step: which lane is the CPU, which the GPU, and which call started which kernel;
# - write a bill: how much of a step is Python, how much launching, how much computing;
# - say which of three costs each of three tools removes, and from what numbers;
# - tell a step that is bound by the CPU from one that is not, and predict the time of both.
#
# **Time**: 30 minutes to read; the cells run in about a minute on two cores.
# **Needs**: cgkit. No GPU: steps recorded on an H200 are read from `data/recordings`, and their pictures say "recorded on ...".
#
# Two words. A *kernel* is one program that the GPU runs. A *launch* is the call by which the CPU asks for it. The call returns
# at once, before the kernel has run: launches go into a *queue*, and the GPU takes them from there in order. If the CPU needs longer
# to launch than the GPU to run, the GPU waits for the CPU: such a step is *launch-bound*, or bound by the CPU.

# %% tags=["setup"]
# Only Colab needs this cell: it fetches cgkit there. Anywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    get_ipython().system("test -d /content/cgkit || git clone -q --depth 1 -b main https://github.com/OWNER/NAME /content/cgkit")
    get_ipython().run_line_magic("cd", "-q /content/cgkit/notebooks")
    get_ipython().run_line_magic("run", "colab.py")

# %%
import tempfile
from pathlib import Path

import ipywidgets
import pandas as pd
import torch
from IPython.display import Image, display

import cgkit
from cgkit import recordings
from cgkit.measuring import bill
from cgkit.measuring.crossover import Crossover
from cgkit.measuring.pacing import pacing, queued_us, sum_of_max_us
from cgkit.plotting import Picture, launch_charts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the one setting: it decides by itself
DEVICE

# %% [markdown]
# ## 1 · What one call costs
#
# Before anything else, because a profiler that has once run makes launches dearer. **What do you expect**: how long does it
# take the CPU to ask for one kernel? To call an empty `nn.Module`, ten deep? Write two numbers down, in microseconds.
#
# Three names in the table: torch's *dispatcher* looks at each call which kernel fits the tensors. *Triton* is the language in which
# torch's compiler writes kernels for a GPU. *Guards* are checks that `torch.compile` makes at every call (notebook 02).

# %%
here = cgkit.measure_launch_overhead(rounds=10)
here

# %% [markdown]
# A call through torch's dispatcher is microseconds on any machine. What a launch costs needs a GPU; here is one, recorded:

# %%
recorded_costs = recordings.find("h200-launch-overhead")
costs = pd.DataFrame(recorded_costs["rows"])
Picture(launch_charts.launch_overhead(costs, recordings.about("h200-launch-overhead")))

# %% [markdown]
# Look at the two ends. Ten nested modules cost more than a kernel. And `cudaGraphLaunch`, which starts a whole recorded graph,
# costs about the same for 1 node and for 256: that is the whole idea of a CUDA graph in one measurement.

# %%
us = costs.set_index(["what", "count"])["median_us"]
operator = us["torch operator, an empty kernel", 1]
triton = us["empty Triton kernel, kernel[grid](...)", 1]
one_node, many_nodes = us["cudaGraphLaunch", 1], us["cudaGraphLaunch", 256]
print(f"one operator {operator:.1f} us, one Triton kernel {triton:.1f} us; a graph of 1: {one_node:.1f} us, of 256: {many_nodes:.1f} us")

# %% [markdown]
# ## 2 · A step of your own
#
# `profile_step` runs a step under torch's profiler and keeps what happened when. On this machine, a tiny Llama with random
# weights. First, how many steps make how many tokens?

# %%
from cgkit import events
from cgkit.serving import Runner, load_model

loaded = load_model("tiny-llama")
plain = cgkit.CompilationConfig(level=0)
runner = Runner(loaded.model.to(DEVICE), config=plain, max_num_seqs=4, max_model_len=64)
with events.record(events.StepRan) as log:
    (made,) = runner.generate([[1, 2, 3, 4]], max_tokens=6)
decode = [step for step in log if step.kind == "decode"]
print(f"{len(made.token_ids)} tokens: {len(log)} steps, {len(decode)} of them decode steps of {decode[0].num_tokens} token")

# %% [markdown]
# The first step reads the whole prompt and makes the first token; each further token costs one more pass through all layers.
# Nothing of it can be done ahead: the next token's input *is* this token.

# %%
inputs = runner.inputs


def step():
    with cgkit.set_forward_context(inputs.fill_dummy(1, decode_only=True)), torch.no_grad():
        loaded.model(inputs.input_ids[:1], inputs.positions[:1])


mine = cgkit.profile_step(step, about={"model": loaded.config.name})
mine

# %%
Picture(mine.plot(step=0))

# %% [markdown]
# Time goes from left to right. A lane holds operators inside of operators: the outer ones are what the model's code called, the
# inner ones what torch called for them. Without a GPU there is no lane for it, and the operator computes where it is called.
#
# ## 3 · The same on an H200
#
# Now a real size: the Llama-3.2-1B shape, 16 layers, random weights, one request. These are the ways to run the same step that
# this notebook compares:
# - *eager*: Python calls one operator after the other;
# - *compiled*: `forward` was turned into one graph and its kernels were made by a compiler, each still launched by itself;
# - *PIECEWISE*: the compiled kernels between two attentions are launched together, as one recorded *CUDA graph*; attention is not;
# - *FULL*: the whole step is one CUDA graph;
# - *reduce-overhead*: torch.compile's own mode that compiles and records (notebook 06 says why an engine does not take it).
#
# Three of them, on one time axis. **What do you expect**: which share of the *eager* step is the GPU busy? 90 %, 50 %, 10 %?

# %%
MODES = ["eager", "compiled", "PIECEWISE", "FULL", "reduce-overhead"]
traces = {mode: recordings.load(f"h200-trace-llama-3.2-1b-b1-{mode}") for mode in MODES}
three = Picture(cgkit.Timeline.plot_against([traces[mode] for mode in ("eager", "compiled", "FULL")]))
Image(three.save(Path(tempfile.mkdtemp()) / "three.png"), alt=three.alt)  # thousands of rectangles: smaller as PNG

# %% [markdown]
# The GPU's lane of the eager step is nearly empty. Most kernels are there for a microsecond or two, and then the GPU waits until
# the CPU has made its way to the next one. With a large batch it would be otherwise. A matrix product that runs for 200 microseconds
# gives the CPU time for twenty launches more, so the queue never runs empty and a launch costs nobody anything.
#
# Nothing is drawn wider than it is: what is shorter than a pixel shows as a column, as high as the share of the time that it fills.
#
# A picture of a step is only worth something if it is complete. A timeline says so of itself: which kernels could be tied to the
# launch that asked for them, and which events are not drawn.

# %%
print(traces["eager"])

# %% [markdown]
# A timeline shows; a *bill* adds up. The CPU's side cuts the time of the step into what the CPU was doing; the GPU's side into
# busy and idle, and asks of each idle moment what the CPU was doing then:

# %%
bills = {mode: traces[mode].bill() for mode in MODES}
Picture(bill.plot(list(bills.values())))

# %%
bill.Bill.compare(list(bills.values()))

# %% [markdown]
# Mind one thing: **the profiler itself costs CPU time**. The eager step takes 33 ms under it and half as long without. So
# bills say what the *shares* are; times to compare were measured without a profiler, in processes of their own (recorded on the
# H200, as are all tables from here on). The recording is older than that of notebook 06, where this eager step takes 8.3 ms: the
# model had more kernels then, and the host was slower. Compare the rows.

# %%
measured = pd.DataFrame(recordings.load("h200-crossover-llama-3.2-1b")["rows"])
one = measured[measured["batch"] == 1].set_index("mode")
one[["wall_ms", "cpu_ms", "gpu_busy_ms", "gpu_nodes"]].round(3)

# %%
eager, best = one.loc["eager"], one.loc["FULL"]
idle = 1 - eager["gpu_busy_ms"] / eager["wall_ms"]
per_launch_us = eager["cpu_ms"] / eager["gpu_nodes"] * 1e3
call_us = bills["eager"].facts()["median_launch_us"]
times = traces["eager"].kernels["dur_us"]
products = traces["eager"].kernels
products = products[products["name"].str.contains("gemm|gemv|nvjet")]["dur_us"]
cgkit.claim(
    [
        {
            "id": "bill-heading",
            "measured": f"recorded on an H200, 1B shape, batch 1, eager: {eager['wall_ms']:.1f} ms a step, the GPU busy for "
            f"{eager['gpu_busy_ms']:.1f} of them, the CPU for {eager['cpu_ms']:.1f}",
            "outcome": eager["cpu_ms"] > 2 * eager["gpu_busy_ms"],
        },
        {
            "id": "bill-one-forward-a-token",
            "measured": f"{len(made.token_ids)} tokens took {len(log)} passes",
            "outcome": len(log) == len(made.token_ids),
        },
        {
            "id": "bill-gpu-waits",
            "measured": f"half of the kernels run for less than {times.median():.1f} us; the GPU is idle for {idle:.0%} of the step",
            "outcome": idle > 0.5,
        },
        {
            "id": "bill-launch-microseconds",
            "measured": f"the launch call alone {call_us:.1f} us (median), a whole operator {operator:.1f} us",
            "outcome": 1 < call_us < 100,
        },
        {
            "id": "bill-launch-5-to-10-us",
            "measured": f"the launch call alone {call_us:.1f} us; with the operator around it {operator:.1f} us; all the CPU's "
            f"time of the step by its kernels {per_launch_us:.1f} us",
            "outcome": 5 <= operator <= 10,
            "why": "The bare call is in that range. What a step pays for each kernel is more, because Python and torch's "
            "dispatcher come before the call. And the post that is named as the source holds no such number.",
        },
        {
            "id": "bill-big-kernel-3-percent",
            "measured": f"{call_us:.1f} us are {call_us / 200:.1%} of 200 us",
            "outcome": call_us / 200 < 0.05,
        },
        {
            "id": "bill-small-gemm-duration",
            "measured": f"{len(products)} products of three steps: {products.min():.1f} to {products.max():.1f} us, median "
            f"{products.median():.1f} us",
            "outcome": products.min() < 1,
            "why": "None takes less than a microsecond: at batch 1 a product reads its whole weight from memory, and that takes "
            "longer than computing with it. They are still shorter than what launching them costs.",
        },
    ]
)

# %% [markdown]
# ## 4 · How many kernels?
#
# The article counts five or six kernels a layer and at least 448 for 80 layers. We have two depths with layers of the same kind:
# 16 and 32. **What do you expect** for one layer, eager and compiled?

# %%
deep = pd.DataFrame(recordings.load("h200-crossover-llama-3.1-8b")["rows"])
nodes = pd.DataFrame({16: one["gpu_nodes"], 32: deep[deep["batch"] == 1].set_index("mode")["gpu_nodes"]})
nodes["a layer, of 32"] = nodes[32] / 32
nodes.loc[["eager", "compiled"]].round(1)

# %%
per_layer = nodes["a layer, of 32"]
cgkit.claim(
    [
        {
            "id": "bill-kernels-a-layer",
            "measured": f"recorded on an H200, 8B shape: {per_layer['eager']:.0f} kernels a layer eager, {per_layer['compiled']:.0f} compiled",
            "outcome": 5 <= per_layer["compiled"] <= 6,
            "why": "The count leaves out rotary embedding, residual sums, reshapes that copy, writing to the KV cache, and "
            "products that the library splits in two.",
        },
        {
            "id": "bill-448-kernels",
            "measured": f"with 80 such layers {80 * per_layer['compiled']:.0f} compiled and {80 * per_layer['eager']:.0f} eager; "
            f"measured at 32 layers: {nodes.loc['compiled', 32]:.0f} and {nodes.loc['eager', 32]:.0f}",
            "outcome": bool(448 <= 80 * per_layer["compiled"] < 2 * 448),
            "why": "As a lower bound it holds, as a size it is far off: 32 layers have more than that.",
        },
        {
            "id": "bill-layers-80",
            "outcome": "not measured",
            "why": "A fact about a model that does not fit on one GPU in bfloat16. Here the shapes of 1B (16 layers) and 8B (32) "
            "stand for it.",
        },
    ]
)

# %% [markdown]
# ## 5 · What would the step take?
#
# The article has a formula: the step is the sum, over its kernels, of the larger of launch time and run time. `pacing` has both
# numbers for each launch: what the CPU spent until the launch returned (all Python included), and what the GPU then ran. But
# launches *queue*. If one kernel is long, the CPU runs ahead meanwhile and the next short ones find their launches done.
# **What do you expect**: where is the formula right, where not?

# %%
rows = []
for mode, trace in traces.items():
    paced = pacing(trace)
    both = paced["cpu_us"], paced["gpu_us"]
    rows.append({"mode": mode, "launches": len(paced), "wall": bills[mode].wall_us, "sum of max": sum_of_max_us(*both)})
    rows[-1] |= {"queued": queued_us(*both), "CPU longer": (both[0] > both[1]).mean()}
paces = pd.DataFrame(rows).set_index("mode")
paces.assign(**{"formula / wall": paces["sum of max"] / paces["wall"], "queued / wall": paces["queued"] / paces["wall"]}).round(2)

# %% [markdown]
# All of it in microseconds, under the profiler. Eager and compiled: the CPU is slower at *every* launch, so both sums are the
# CPU's time, and right. With graphs some launches are long and others short. The formula then counts time twice in one
# place (PIECEWISE: what the CPU does while a piece still runs is free) and leaves it out in another (FULL: the one launch has to
# return before the GPU starts). `queued` plays the queue through; what it still lacks is the wait at the end.

# %%
formula, queue = paces["sum of max"] / paces["wall"] - 1, paces["queued"] / paces["wall"] - 1
cgkit.claim(
    [
        {
            "id": "bill-sum-of-max",
            "measured": "formula against wall time, recorded on an H200: " + ", ".join(f"{m} {v:+.0%}" for m, v in formula.items())
            + f"; played through as a queue, at most {queue.abs().max():.0%} off",
            "outcome": bool(formula.abs().max() < 0.05),
            "why": "It holds where each launch waits for the kernel before it, or where one side is always slower. Launches queue.",
        },
        {
            "id": "bill-launch-dominates",
            "measured": f"eager: the CPU takes longer at {paces.loc['eager', 'CPU longer']:.0%} of the launches; full graph: at "
            f"{paces.loc['FULL', 'CPU longer']:.0%}",
            "outcome": paces.loc["eager", "CPU longer"] > 0.5,
        },
    ]
)

# %% [markdown]
# ## 6 · Three costs, three tools
#
# An eager step has three costs, and each has a tool of its own:
# 1. **Python and dispatch**: loops, module calls, the search for the kernel. *Tracing* takes it away: the model's Python runs once.
# 2. **Launches**: one call of the driver for each kernel. *Recording* takes it away: one call starts hundreds of them.
# 3. **The kernels themselves**: many small ones, each reading from memory what the one before has just written. *Compiling* takes
#    it away, by *fusing* several into one.
#
# No tool does the work of another. A recorded graph replays the kernels that it was given, good or bad; a compiled model launches
# its kernels one by one. That is why "CUDA graph" and "`torch.compile`" are two things, and engines use both.
#
# Now go through the table of part 3 from top to bottom. Each row takes something away.
#
# **eager → compiled.** Tracing replaces the model's Python by one straight line of calls, and Inductor makes fewer and better
# kernels. **compiled → PIECEWISE → FULL.** Nothing is computed differently; launches are replayed instead of made.
# **What do you expect** of GPU busy time in the second arrow?

# %%
busy, launched = one["gpu_busy_ms"], {mode: each.facts() for mode, each in bills.items()}
python_us = {mode: each.parts["python"] + each.parts["dispatch"] for mode, each in bills.items()}
calls = {mode: facts["launches"] + facts["graph_launches"] for mode, facts in launched.items()}
gaps = {mode: 1 - busy[mode] / one.loc[mode, "wall_ms"] for mode in one.index}
pd.DataFrame({"Python and dispatch (us)": python_us, "launch calls": calls, "GPU busy (ms)": busy, "GPU idle": gaps}).loc[MODES].round(2)

# %%
wall = one["wall_ms"]
cgkit.claim(
    [
        {
            "id": "three-heading",
            "measured": f"eager -> compiled -> full graph: Python and dispatch {python_us['eager'] / 1e3:.1f} -> "
            f"{python_us['compiled'] / 1e3:.1f} -> {python_us['FULL'] / 1e3:.2f} ms, launches {calls['eager']} -> {calls['compiled']} -> "
            f"{calls['FULL']}, GPU busy {busy['eager']:.2f} -> {busy['compiled']:.2f} -> {busy['FULL']:.2f} ms (recorded on an H200)",
            "outcome": python_us["eager"] > python_us["compiled"] > python_us["FULL"] and calls["eager"] > calls["FULL"],
        },
        {
            "id": "three-python",
            "measured": f"Python and dispatch: eager {python_us['eager']:.0f} us, compiled {python_us['compiled']:.0f} us",
            "outcome": python_us["compiled"] < 0.1 * python_us["eager"],
            "why": "Less, but far from gone: compiled code is Python too, and launching each kernel goes through Triton's own "
            "launcher. It is gone only once launches are replayed.",
        },
        {
            "id": "three-launch",
            "measured": f"launch calls: compiled {calls['compiled']}, PIECEWISE {calls['PIECEWISE']}, FULL {calls['FULL']}",
            "outcome": calls["FULL"] == 1,
        },
        {
            "id": "three-kernels",
            "measured": f"kernels {one.loc['eager', 'gpu_nodes']:.0f} -> {one.loc['compiled', 'gpu_nodes']:.0f}, GPU busy "
            f"{busy['eager']:.2f} -> {busy['compiled']:.2f} ms",
            "outcome": busy["compiled"] < busy["eager"],
        },
        {
            "id": "three-gaps-close",
            "measured": f"GPU idle: compiled {gaps['compiled']:.0%}, PIECEWISE {gaps['PIECEWISE']:.0%}, FULL {gaps['FULL']:.0%}",
            "outcome": gaps["FULL"] < gaps["compiled"],
        },
        {
            "id": "three-additive",
            "measured": f"compiling alone {wall['compiled']:.2f} ms; recording eager kernels could give {busy['eager']:.2f} ms at best; "
            f"both {wall['FULL']:.2f} ms",
            "outcome": wall["FULL"] < min(wall["compiled"], busy["eager"]),
            "why": "Recording leaves the kernels as they are, compiling leaves the launches. So neither gets there alone.",
        },
        {
            "id": "bill-gain-is-cpu",
            "measured": f"compiled -> PIECEWISE: {wall['compiled'] - wall['PIECEWISE']:.2f} ms less a step, GPU busy "
            f"{busy['PIECEWISE'] - busy['compiled']:+.2f} ms",
            "outcome": abs(busy["PIECEWISE"] - busy["compiled"]) < 0.1 * (wall["compiled"] - wall["PIECEWISE"]),
        },
    ]
)

# %% [markdown]
# ### The headline, again
# The article says "one forward pass" of OPT-125M takes 0.41 s without and 0.21 s with piecewise graphs. **What do you expect** of
# one forward pass? And of a whole answer of 128 tokens, for eight requests at a time?

# %%
opt = recordings.load("h200-headline-opt-125m")
shown = opt[opt["mode"].isin(MODES) & (opt["batch"] == 8)]
shown.pivot(index="mode", columns="case", values="wall_ms").loc[["eager", "compiled", "PIECEWISE", "FULL"]].round(2)

# %%
took = shown.set_index(["case", "mode"])["wall_ms"]
answer = took["generate"]
eight = deep[deep["batch"] == 1].set_index("mode")["wall_ms"]
cgkit.claim(
    [
        {
            "id": "bill-opt-125m",
            "measured": f"recorded on an H200: one forward pass {took['decode', 'eager']:.1f} -> {took['decode', 'PIECEWISE']:.2f} ms; "
            f"a whole answer (32 in, 128 out, batch 8) {answer['eager'] / 1e3:.2f} -> {answer['PIECEWISE'] / 1e3:.2f} s",
            "outcome": "wrong",
            "why": "The cited numbers are times of whole answers (benchmark_latency.py), not of one pass. For those the size is right.",
        },
        {
            "id": "bill-llama-8b",
            "measured": f"recorded on an H200: one decode step of the 8B shape {eight['compiled']:.1f} ms compiled, "
            f"{eight['PIECEWISE']:.1f} ms with piecewise graphs",
            "outcome": "wrong",
            "why": "1.26 and 1.04 s are times of whole answers too. One step is two orders of magnitude shorter.",
        },
    ]
)

# %% [markdown]
# ## 7 · When it does not matter
#
# Larger batches give the GPU more to do and the CPU hardly more. So there is a batch from which a mode is no longer bound by
# the CPU. **What do you expect**: which one, eager and with piecewise graphs? Choose a batch and see (the picture below shows all of them,
# for where no widget runs):

# %%
def show(batch=1):
    part = measured[measured["batch"] == batch].set_index("mode")[["wall_ms", "cpu_ms", "gpu_busy_ms"]]
    display(part.assign(bound_by=["CPU" if each.cpu_ms > each.gpu_busy_ms else "GPU" for each in part.itertuples()]).round(2))


ipywidgets.interact(show, batch=sorted(measured["batch"].unique().tolist()));

# %%
crossing = Crossover.from_facts(
    recordings.load("h200-crossover-llama-3.2-1b"), recorded=recordings.about("h200-crossover-llama-3.2-1b").recorded
)
Picture(crossing.plot())

# %% [markdown]
# Eager and compiled never get there up to 256 requests. With piecewise graphs the GPU is the slower side from the first request on:
# the bill is paid. What is left is the GPU's own time, and how far that is above the time to read all weights once (the dotted floor, called
# *roofline*). The predictions in the legend set the CPU's time against that floor, which no kernel reaches: hence the 7.
#
# ## Exercises
# `check` says whether an answer is right, nearly right or wrong, and why. `hint("01-1")` helps; `solution("01-1")` says where
# ours stands. Put your answer in the place of `...`.

# %%
from cgkit.exercises import check, hint, question, solution

question("01-1")

# %%
check("01-1", ...)

# %% [markdown]
# Now the queue, the heart of part 5:

# %%
question("01-2")

# %%
check("01-2", ...)

# %%
question("01-3")

# %%
check("01-3", ...)

# %% [markdown]
# And the counter that an engineer looks at first:

# %%
question("01-4")

# %%
check("01-4", ...)

# %% [markdown]
# **Next**: notebook 02 makes the first of the three tools, one trace of the whole model, and asks what may go wrong when nobody
# checks any more whether it fits.

# %% tags=["stamp"]
from cgkit.measuring.stamp import stamp

print(stamp())
