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

# %% [markdown] slideshow={"slide_type": "slide"}
# # 09 · When it goes wrong
#
# **The question.** A program that crashes tells you so. Recorded graphs and compiled code have two other ways to fail, and both
# are silent: a graph computes *nonsense*, and compilation gets *slow*. Which code does that, and how do you find it?
#
# **Afterwards you can**
# - look at a forward and say which of its lines a replay will get wrong, and how far off the numbers will be;
# - tell what is checked always, what only `debug=True` checks, and what nothing can check for you;
# - choose the tool that fits a complaint ("the text is rubbish", "the second start is slow", "it was fast yesterday");
# - read the doctor's report, and find the wrong piece of a compiled model with `bisect`.
#
# **Time**: 75 minutes to read; the cells run in about one minute on two cores.
# **Needs**: cgkit. With a GPU real CUDA graphs are recorded, without one *emulated* ones, which repeat the recorded calls on the
# recorded addresses: they make the same mistakes, and are no faster. Notebook 06 has shown what a graph holds (addresses, shapes,
# numbers) and what it does not (Python). Here whole models stumble over it.

# %% tags=["setup"]
# Only Colab needs this cell: it fetches cgkit there. Anywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    get_ipython().system("test -d /content/cgkit || git clone -q --depth 1 -b main https://github.com/OWNER/NAME /content/cgkit")
    get_ipython().run_line_magic("cd", "-q /content/cgkit/notebooks")
    get_ipython().run_line_magic("run", "colab.py")

# %%
import contextlib
import io
import os
import re
import tempfile
import time
import warnings
from pathlib import Path

import ipywidgets
import pandas as pd
import torch
from torch import nn

import cgkit
from cgkit import hazards, plotting
from cgkit.exercises import check, hint, question, solution
from cgkit.plotting import Picture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the one setting; everything follows from it
os.environ["CGKIT_CACHE_DIR"] = tempfile.mkdtemp(prefix="cgkit-")
platform = cgkit.get_platform("auto", DEVICE)
about = plotting.About(device=DEVICE, emulated=platform.emulated)
pd.set_option("display.max_colwidth", 240)
platform

# %% [markdown]
# ### The museum
#
# `cgkit.hazards` is a collection of what really hurt the users of three engines (vLLM, SGLang, TensorRT-LLM) and of PyTorch. It was
# read from their issue trackers: 25 rows and a 26th that we met ourselves. 20 *exhibits* make them happen again, each in a few
# lines: a broken code and its fixed twin. `show` runs both twice, first with no check in the way, then asking cgkit. Nothing in a
# card is written down beforehand.
#
# On a GPU a wrong address may end in an error after which the process can use the GPU no more. So there the exhibits run in a
# process of their own. Those that need a limit on memory, or no graph at all, run on the CPU everywhere; the card's first line says it.

# %%
visits = {}


def in_this_notebook(text):
    return re.sub(r"[^\s(]*ipykernel\S*?\.py:", "this notebook, line ", str(text))


def show(id):
    on_gpu = DEVICE != "cpu" and hazards.EXHIBITS[id].on_gpu
    visits[id] = hazards.show(id, DEVICE, apart=True) if on_gpu else hazards.show(id)
    return visits[id]


# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1 · Wrong, and no error
#
# Four models, each with one line that people really write. Read them first.


# %%
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1  # writes a buffer in place
        return x + self.seen


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x + self.last
        self.last = x[:1] * 2  # puts another tensor there
        return out


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1  # a Python number
        return x * self.steps


class Weighs(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


# %% [markdown]
# Before each step somebody loads new weights into `Weighs`, in the way in which a checkpoint is often loaded: a new tensor is put in
# the place of the old one. (The old ones are kept here. If they were freed, their memory would get other contents, and a replay would
# compute with *those*.)
#
# Each model is run twice, side by side: called by Python, and recorded once and then replayed. As always a warm-up goes before
# the recording. Nobody checks anything. The input is 1, 2, 3, 4, 5.
#
# **What do you expect** of each in the replay: right, off by a constant, or off by more at each step?

# %%
kept = []


def load_weights(model, number):
    if isinstance(model, Weighs):
        kept.append(model.weight)
        model.weight = nn.Parameter(torch.full_like(model.weight, float(number)), requires_grad=False)


def called_and_replayed(make, x):
    called, recorded, rows = make().to(DEVICE), make().to(DEVICE), []
    recorded(x.fill_(1))  # the warm-up
    kept.extend([*recorded.parameters(), *recorded.buffers()])
    graph, out = platform.record(lambda: recorded(x), platform.new_pool())
    for step in range(1, 6):
        [load_weights(model, step) for model in (called, recorded)]
        x.fill_(step)
        graph.replay()
        rows.append((make.__name__, step, float(called(x)[0]), float(out[0])))
    return rows, recorded


MODELS = (Counts, Remembers, Scales, Weighs)
ran = {make.__name__: called_and_replayed(make, torch.ones(4, device=DEVICE)) for make in MODELS}
steps = pd.DataFrame(
    [row for rows, _ in ran.values() for row in rows], columns=["case", "step", "python", "replay"]
)
Picture(plotting.hazard_charts.silent(steps, about), "four models: what Python would say and what the replay says, by step")

# %% [markdown]
# No exception, no warning, no NaN. Each is wrong for another reason:
#
# - **Counts** is off by one, for ever. The in-place addition *is* in the graph, and each replay repeats it. But the warm-up ran it too.
#   With warm-ups for eleven sizes it would be off by eleven.
# - **Remembers** takes the same old value at each step. `self.last = ...` is Python's doing: a name gets another meaning. No
#   replay repeats that, so the graph goes on reading the tensor that `last` meant while it was recorded.
# - **Scales** multiplies by a fixed number. 2 was the value of `steps` while recording, and it was copied into the graph.
# - **Weighs** reads the old address. The new weights lie elsewhere.
#
# Did Python really not run? `steps` counts the runs of `forward`:

# %%
replays = steps["step"].max()
python_ran = ran["Scales"][1].steps
print(f"{replays} replays; Python ran forward {python_ran} times: at the warm-up and at the recording")
apart_by = (steps["replay"] - steps["python"]).groupby(steps["case"]).agg(list)
apart_by.to_frame("replay - Python, by step")

# %%
cgkit.claim([
    dict(id="wrong-buffer-write", measured=f"no error, and off by {apart_by['Counts']} (written in place), "
         f"{apart_by['Remembers']} (another tensor put there)", outcome=any(apart_by["Counts"]) and any(apart_by["Remembers"]),
         why="In place: warm-ups write as well. Assigned: a replay does not assign."),
    dict(id="wrong-cpu-absent", measured=f"{replays} replays, and forward ran {python_ran} times in all",
         outcome=python_ran == 2),
])

# %% [markdown] slideshow={"slide_type": "slide"}
# ### What cgkit says of the four
#
# `cgkit.doctor` looks at a model *before* anything is recorded. It needs no GPU: on the CPU it follows the rules of the emulated
# platform. Then the models go the whole road (traced, compiled, recorded) and get new weights, and are called, once as usual and
# once with `debug=True`.
#
# **What do you expect**: which of the four can go wrong on cgkit's own road *without* `debug=True`?


# %%
def on_the_road(make, debug):
    settings = dict(compiler="eager", cudagraph_mode="FULL", cudagraph_capture_sizes=[4])
    decorated = cgkit.support_torch_compile(type(make.__name__, (make,), {}))
    model = decorated(compilation_config=cgkit.CompilationConfig(**settings, debug=debug)).to(DEVICE)
    x = torch.ones(4, device=DEVICE)
    try:
        model(x), cgkit.capture_model(model), load_weights(model, 5)
        return model, f"says {model(x)[0]:g}, and {make.forward(model, x)[0]:g} is right"
    except cgkit.CgkitError as error:
        return model, type(error).__name__


def findings(model, *example, **config):
    report = cgkit.doctor(model, *example, **config)
    return list(dict.fromkeys(finding.code for finding in report if finding.severity != "info"))


said = pd.DataFrame([
    {"model": make.__name__, "doctor (errors, warnings)": ", ".join(findings(make(), torch.ones(4))) or "-",
     "as usual": on_the_road(make, False)[1], "debug=True": on_the_road(make, True)[1]}
    for make in MODELS
]).set_index("model")
said

# %% [markdown]
# - A **write** of a tensor is always refused, at the first call, with the line. It can be seen in the trace.
# - A Python **number** that changes is not refused: as usual it goes through, and wrong. Many models count something for
#   their logs, and that harms nobody. The doctor says `frozen-number` (and `replay-differs`: it recorded the model, replayed it
#   twice, and compared); `debug=True` compares each call with the model's own forward.
# - A **weight** that is replaced *after* recording cannot be foreseen by any look at the model. So the doctor is silent. What
#   finds it comes in section 3.
#
# The rule behind it: cgkit checks whenever the check is free, and all the rest under `debug=True`. Debug runs the model
# eagerly beside every replay, so each step costs an eager step more. Switch it on when a number looks wrong, and in tests.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2 · The word and the deed
#
# How would *you* find out whether a forward writes to a buffer? The article's engine looks at the bytecode that Dynamo made: if
# the word `update` is among its names, it raises. (Dynamo sets attributes after the graph by such a call.) Cheap, and a word is not
# a deed. **What do you expect**: in which of these forwards does the article's check fire, and in which should it?
#
#     self.buf = self.buf + 1        self.last = x * 2        self.buf.add_(1)      self.buf[0] = 1
#     self.buf.view(-1).mul_(2)      d = {}; d.update(y=x * 2)                      return x + self.buf

# %%
from cgkit.tracing.exhibit import buffer_check_exhibit

checks = buffer_check_exhibit()
checks

# %% [markdown]
# `writes` is the truth: the model was run, and its tensors compared before and after. The word is missing where a tensor is
# written in place (an operator does that, in the graph, and no bytecode), and it is there where a dictionary of the forward's own is
# filled. cgkit looks at deeds: it reads from Dynamo what it will assign after the graph, and runs the graph once on tensors
# without data, watching which memory each operator declares to write.

# %%
missed, needless = (int((checks["article_is"] == how).sum()) for how in ("misses it", "fires for nothing"))
agrees = bool((checks["cgkit_fires"] == checks["writes"]).all())
cgkit.claim(
    "wrong-update-check",
    measured=f"of {int(checks['writes'].sum())} forwards that write it misses {missed}; of {int((~checks['writes']).sum())} that "
    f"do not, it fires for {needless}. What is really written, found in the trace, agrees with the truth: {agrees}",
    outcome=missed + needless == 0,
    why="The name `update` stands for Dynamo's way to assign an attribute. Operators that write in place are in the graph.",
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3 · Addresses
#
# A graph reads addresses. Three parties can move what lies there, and each needs another check.
#
# **What the caller gives.** cgkit copies it into a buffer that never moves. Where it must not copy (`cudagraph_copy_inputs=False`) it
# compares the addresses before each replay, always: a handful of comparisons (notebook 06).
#
# **What the model owns**, its weights. There are hundreds, and they hardly ever move. Comparing them at each step would
# not be free. But *writing down* where they lay is: the **ledgers** know it, and compare when somebody looks. **What do you expect** of
# `Weighs` as usual: a number, an error? And of its ledgers?

# %%
usual, answer = on_the_road(Weighs, debug=False)
print("as usual:", answer)
moved = cgkit.ledgers(usual).moved
[{name: row[name] for name in ("graph", "input", "moved")} for row in moved]

# %%
debugged, answer = on_the_road(Weighs, debug=True)
try:
    debugged(torch.ones(4, device=DEVICE))
except cgkit.CgkitError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# The message has all that is needed: which tensor, where it was, where it is, and three ways out. The first (`copy_`) is nearly
# always what is wanted: *new numbers at the old address*.

# %%
buffer = torch.ones(4, device=DEVICE)
promise = cgkit.CompilationConfig(
    compiler="eager", cudagraph_mode="FULL", cudagraph_capture_sizes=[4], cudagraph_copy_inputs=False
)
compiled = cgkit.compile_pieces(cgkit.split_graph(cgkit.trace(Weighs().to(DEVICE), buffer), []), promise)
uncopied = cgkit.capture(compiled, make_inputs=lambda n: (buffer[:n],))
uncopied(buffer)
try:
    uncopied(buffer.clone())
    refused = "nothing"
except cgkit.CgkitError as error:
    refused = type(error).__name__
debug_said = said.loc["Weighs", "debug=True"]
cgkit.claim(
    "recording-address-check",
    measured=f"a weight that moved: as usual the step {said.loc['Weighs', 'as usual']}; with debug=True {debug_said}. A moved "
    f"input of the caller: {refused} even without debug",
    outcome=debug_said == "MovedInputError",
    why="The article's engine checks in debug mode alone. That is when nobody needs it: the users who were hurt were serving "
    "(vLLM PR #53915). For inputs the check costs a few comparisons, so cgkit makes it always.",
)

# %% [markdown] slideshow={"slide_type": "slide"}
# **What lies between the pieces.** In PIECEWISE mode an operator runs between two recorded pieces. If it returns a *new* tensor at each
# step, the next piece reads the place where the first one lay. The broken code looks perfectly harmless:

# %%
show("fresh-tensor")

# %% [markdown]
# The second exhibit is `Weighs` as an engine's users met it. With real GPU memory, and the old tensor freed, it ended in an illegal
# address. It could as well have been strange text: that depends on who owns the memory by now.

# %%
show("replaced-buffer")

# %% [markdown]
# The third is about the way *out*. A result lies in the graph's own memory, and the next replay writes there. cgkit copies results out
# unless it is told not to. With `debug=True` a result that is looked at too late raises; a *view* of it shows NaN.

# %%
show("overwritten-output")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4 · What a recording must not hold
#
# Attention depends on how long each request is. The host knows that, and hands it over as a number. A piecewise graph
# is cut at attention for that reason (notebook 03). Now somebody writes an attention of their own, and forgets to name it as a
# splitting operator. Here is the smallest one: each token gets the mean of the tokens that are in the batch. The recording is made,
# as always, with a dummy batch: two tokens.
#
# **What do you expect** when one, two, three, four tokens come: an error at recording? At the first longer batch?

# %%
lengths = {"batch": 2}  # what the host knows of this step


def attend(x):
    return x[: lengths["batch"]].mean(0).expand_as(x)


tokens, pool = torch.arange(16.0, device=DEVICE).reshape(4, 4), platform.new_pool()
attend(tokens * 2)  # the warm-up
inside, inside_out = platform.record(lambda: attend(tokens * 2) + 1, pool)
middle = torch.empty_like(tokens)
before, doubled = platform.record(lambda: tokens * 2, pool)
after, cut_out = platform.record(lambda: middle + 1, pool)
rows = []
for length in (1, 2, 3, 4):
    lengths["batch"] = length
    inside.replay()
    before.replay(), middle.copy_(attend(doubled)), after.replay()  # piece, attention as it is, piece
    for case, out in (("attention recorded inside", inside_out), ("attention between two graphs", cut_out)):
        rows.append((case, length, float((attend(tokens * 2) + 1)[0, 0]), float(out[0, 0])))
by_length = pd.DataFrame(rows, columns=["case", "step", "python", "replay"])
attention_picture = plotting.hazard_charts.silent(by_length, about, xlabel="tokens in the batch")
Picture(attention_picture, "attention recorded inside of a graph stays at the length of the recording; cut out, it is right")

# %% [markdown]
# No error at all. Recorded like anything else, it keeps the length of the dummy batch, and it is right by accident where a batch has
# just that length. Whoever tests with such a batch sees nothing.
#
# Can a tool find that? No general check can tell: whether an operator's work depends on more than its inputs' shapes is knowledge
# about the operator. So the doctor **warns** (it does not call it an error) where a custom operator stands inside a recorded piece.
# (Emulated graphs show this in a bare recording, as above. A piece of a compiled model is one opaque call to the emulated platform, and
# what an operator inside of it asks the host is asked at each replay: there only a real GPU freezes it.)

# %%
show("attention-inside")

# %% [markdown]
# What *can* be told is the opposite case: an operator that needs a value while nothing runs.

# %%
show("forbidden-call")

# %% [markdown]
# This one stops with an error, so it is the harmless kind. The catch is *when*: CUDA notices it at recording, after the model was
# loaded and compiled, and its message names neither the operator nor the line. The doctor finds it in a second, with both.
#
# ## 5 · What a size decides
#
# One trace serves all batch sizes, because the guards were dropped (notebook 02). So what if the model asks for the size?


# %%
class Routes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) >= 4:  # many tokens take one way, few another
            return x * 2
        return x * 100


def routed(debug):
    settings = dict(compiler="eager", cudagraph_mode="FULL", cudagraph_capture_sizes=[2, 8], debug=debug)
    traced = cgkit.trace(Routes(), torch.ones(8, 4, device=DEVICE))
    compiled = cgkit.compile_pieces(cgkit.split_graph(traced, []), cgkit.CompilationConfig(**settings))
    return cgkit.capture(compiled)


# %% [markdown]
# It is traced with 8 rows, and recorded for 2 and 8. **What do you expect** for 2 rows: 2, 100, or an error? And with `debug=True`?

# %%
few = torch.ones(2, 4, device=DEVICE)
print("as usual:", routed(False)(few)[0, 0].item(), "| the model says:", Routes()(few)[0, 0].item())
try:
    routed(True)(few)
except cgkit.CgkitError as error:
    print(f"debug=True: {type(error).__name__}: {in_this_notebook(error)}")

# %% [markdown]
# As usual it is wrong without a word: the trace has one side of the branch. `debug=True` keeps the dropped guards and asks each of them
# again on every shape that comes. Where one fails, model and trace are both run on this call, and a difference raises. (The line
# in the log is from the recording for 2 rows. Its inputs are zeros, and twice zero is a hundred times zero: no difference *there*.)
#
# The doctor does the same beforehand, for all sizes that a batch may have. The exhibit has it in its smallest form, and its fix: let
# the graph compute with the size.

# %%
show("dropped-guard")

# %% [markdown]
# The second way to tie a model to a size is a number in the code. That cannot be silent: the dimension was declared dynamic and
# is not. But *which line* made it a number? torch does not say, and people asked for exactly that (pytorch#136002).

# %%
show("specialised-dim")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Batches that no graph serves
#
# Now nothing is wrong with the numbers. Sizes 1, 2 and 4 are recorded, and up to 8 requests may come. **What do you expect** of a batch of
# six: padded, refused, or something else? And who tells?

# %%
from cgkit.measuring.padding import planned_coverage

Picture(planned_coverage([1, 2, 4], "FULL_AND_PIECEWISE", max_num_seqs=8, most=10).plot())

# %%
from cgkit.serving import Runner, load_model

llama = load_model("tiny-llama", device=DEVICE)
config = cgkit.CompilationConfig(
    compiler="eager", cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=[1, 2, 4]
)
runner = Runner(llama.model, config=config, max_num_seqs=8, max_model_len=64).capture_model()
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    for requests in (1, 3, 6):
        runner.generate([[1, 2, 3]] * requests, max_tokens=5)
print("said once:", next(str(each.message) for each in warned if "without a graph" in str(each.message)), "\n")
print("steps by mode:", cgkit.ledgers(runner).modes)
cgkit.ledgers(runner).dispatch_frame()[["num_tokens", "uniform_decode", "steps", "mode", "num_padded_tokens", "why_missed"]]

# %% [markdown]
# It runs, rightly, and launches each kernel by itself: several times slower a token on a GPU (notebook 01), and exactly when the load is
# highest. Engines did this without a word until users measured it. Here a warning is said *once*, since a line at each step would be worse,
# and the ledger counts the steps. That is free: a step writes down one number, the size that was asked for; all else in
# the table is worked out when somebody looks.
#
# The exhibits: the ladder that ends too early, the ladder with a hole, and a key that is asked for and not held.

# %%
show("above-largest")

# %%
show("size-gap")

# %%
show("key-miss")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6 · Slow in silence
#
# Compilation promises: *the same numbers, faster*. When it does not work, the numbers stay right, so no test fails.
#
# ### A graph break
#
# Where Dynamo cannot go on, it may *break* the graph: compile what is before, run the line in Python, compile what is after. Each
# segment has guards of its own and is called by itself. Nobody can record it as one graph.
#
# The article names three causes: printing, checking a tensor's value, and a branch on `.item()`. **What do you expect**: how many
# graphs does each of these five make? (On the CPU everywhere: it is about Python.)


# %%
class Fine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1


class Prints(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        print("halfway")
        return y + 1


class Asserts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        assert (y < 100).all(), "too large"
        return y + 1


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if (y >= 100).any():
            raise ValueError("too large")
        return y + 1


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.sum().item() > 0:
            y = y + 5
        return y + 1


# %%
def graphs_of(make):
    made, x = [], torch.ones(8, 4)
    loose = torch.compile(make(), backend=lambda graph, inputs: made.append(graph) or graph.forward)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        loose(x)
        broken = cgkit.doctor(make(), x).of_code("graph-break")
    return {"model": make.__name__, "torch.compile: graphs": len(made), "cgkit": "one graph" if not broken else broken[0].code,
            "line": broken[0].source if broken else "", "cost": broken[0].cost.split(" (")[0] if broken else ""}


torch.compiler.reset()
breaks = pd.DataFrame([graphs_of(make) for make in (Fine, Prints, Asserts, Raises, Branches)]).set_index("model")
breaks

# %% [markdown]
# `torch.compile` as it is goes on: two graphs where there should be one, and no error. (For `.item()` torch 2.11 writes a line into its
# log, as above; the others leave no trace.) That is its purpose, to work with any code. An
# engine wants *one* graph, so it asks for it (`fullgraph=True`), and then a break is an error with its line. cgkit does that always.
#
# Two things that surprise:
# - An `assert` on a tensor does **not** break. Dynamo knows the statement and turns it into an operator that checks on the device. The
#   same check written as `if ...: raise` does break.
# - `cost` is the time of *one* step through the segments beside the eager one, with nothing compiled in them: what is left
#   is guards and bookkeeping. It is paid at every step, for ever.
#
# **How to notice it**, if a tool does it silently: count. Dynamo turns Python into a graph once for one graph. Where that number is larger
# than one, the model was cut, or traced again.

# %%
counts = breaks["torch.compile: graphs"]
try:
    cgkit.trace(Prints(), torch.ones(8, 4))
    refusal = "no error"
except cgkit.CgkitError as error:
    refusal = type(error).__name__
causes = {"printing": "Prints", "an assert": "Asserts", "if value: raise": "Raises", "a branch on .item()": "Branches"}
do_break = {cause: bool(counts[name] > 1) for cause, name in causes.items()}
cgkit.claim([
    dict(id="wrong-graph-break", measured=f"fullgraph off: {counts['Prints']} graphs and no word, {breaks.loc['Prints', 'cost']}. "
         f"One graph asked for, as the engine does by default: {refusal}", outcome=refusal == "no error",
         why="Guards do come back, and silently, if breaks are allowed. The article's own version (vLLM 0.10.1) asked for one graph by "
         "default, and then a break raises. The silent case needs that to be switched off."),
    dict(id="wrong-break-causes", measured=f"breaks the graph: {do_break}", outcome=all(do_break.values()),
         why="" if all(do_break.values()) else "Dynamo makes an operator of an assert on a tensor; the same check as an if breaks."),
    dict(id="wrong-break-found", measured=f"graphs made by Dynamo: {counts['Fine']} for the model without a break, {counts['Prints']}, "
         f"{counts['Raises']} and {counts['Branches']} with one", outcome=counts["Fine"] == 1 and counts["Prints"] > 1),
])

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Compiled again and again
#
# A guard that fails makes Dynamo trace and compile anew, in the middle of serving. Take `Scales` of section 1, `x * self.steps`. As a
# recorded graph it computed nonsense, because nobody looked. Under guards somebody does look. **What do you expect** of eight calls, for
# `steps` as a Python number, and as a tensor?

# %%
from cgkit.hazards.compiling import CountsOnTheDevice, CountsSteps


def timed_calls(way, model, given):
    made, rows = [], []
    step = torch.compile(model, backend=lambda graph, inputs: made.append(graph) or graph.forward, dynamic=False)
    for call in range(1, 9):
        arguments, before, started = given(call), len(made), time.perf_counter()
        step(*arguments)
        ms = 1e3 * (time.perf_counter() - started)
        rows.append({"way": way, "call": call, "ms": ms, "compiled": len(made) > before})
    return rows


torch.compiler.reset()
x = torch.ones(8, 4)
calls = timed_calls("a Python number", CountsSteps(), lambda call: (x,))
calls += timed_calls("a tensor", CountsOnTheDevice(), lambda call: (x, torch.tensor(float(call))))
calls = pd.DataFrame(calls)
Picture(plotting.hazard_charts.step_times(calls, plotting.About(device="this machine's CPU", mode="torch.compile with guards")))

# %%
slow, quick = (float(calls[calls["way"] == way]["ms"][-4:].median()) for way in ("a Python number", "a tensor"))
print(f"median of the last four calls: {slow:.1f} ms and {quick:.1f} ms, and no compiler was even started: that is tracing alone")
show("recompiles")

# %% [markdown]
# So the same line is *slow* with guards and *wrong* without. Neither is a mistake of the compiler: a Python number that changes has no
# place in a graph. Give it to the graph as a tensor.
#
# ### Compiled too often at the start
#
# A model has many layers that are alike. Each should be compiled once for all. What can make two equal layers different?

# %%
show("unshared-pieces")

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Compiled, and never recorded
#
# The worst of the slow ones, because everything *works*: the second start of a server loads compiled pieces out of the cache, and the
# code that loads them forgets to put the graph wrapper around. The results are right. It is "a bit slow today". **What do you
# expect** a benchmark to say? And what would you rather look at?

# %%
show("unwrapped-load")

# %% [markdown]
# A benchmark gives one number, and there are a hundred reasons why it might be larger than yesterday. A **counter** has an
# expected value that follows from the model: sizes x pieces. It is either met or not. cgkit writes the laws beside what it counted:

# %%
from cgkit.hazards.addresses import ATTENTION_INTO
from cgkit.hazards.loading import TwoLayers

cgkit.reset()
dump = tempfile.mkdtemp(prefix="dump-")
config = cgkit.CompilationConfig(
    splitting_ops=[ATTENTION_INTO], compiler="eager", cudagraph_mode="PIECEWISE", debug_dump_path=dump
)
split = cgkit.split_graph(cgkit.trace(TwoLayers(), torch.ones(4, 4, device=DEVICE)), config.splitting_ops)
captured = cgkit.capture(cgkit.compile_pieces(split, config), [2, 4])
counted = cgkit.counters_table(captured)
counted

# %% [markdown]
# That is one of the two ways to look in. The other is to have the graph written down: with `debug_dump_path` the pieces stand
# there as Python files that can be read, compared and sent to somebody. And *which* piece was not recorded? The recorded graphs
# are a table as well:

# %%
dumped = sorted(path.name for path in Path(dump).rglob("*") if path.is_file())
print(len(dumped), "files:", ", ".join(dumped[:6]), "...")
captured.to_frame().groupby("name")["num_tokens"].agg(list).to_frame("recorded sizes")

# %%
loaded = visits.get("unwrapped-load") or show("unwrapped-load")
cgkit.claim([
    dict(id="debug-heading", measured=f"{len(dumped)} files of dumped graphs; {len(counted.laws)} counters beside their laws, "
         f"{len(counted.wrong)} of them off", outcome=bool(dumped) and not counted.wrong),
    dict(id="debug-counters-better", measured=f"pieces without their wrapper: {loaded.symptom.seen}; the counters say: {loaded.says}. With "
         f"the wrapper they say {loaded.fixed_says or 'nothing'}", outcome=bool(loaded.says) and not loaded.fixed_says,
         why="A counter says how many graphs are missing; the table of recorded graphs says of which piece."),
])

# %% [markdown] slideshow={"slide_type": "slide"}
# ### The cache: too willing, or too shy
#
# A compile cache is asked with a key: environment, configuration, code, compiler (notebook 04). If a factor is *missing* in the key, two
# configurations share an entry, and the second gets the code of the first. If something is in it that makes *no* difference (a
# folder), equal things miss. **What do you expect** to be the worse of the two?

# %%
show("missing-factor")

# %%
show("moved-checkout")

# %% [markdown]
# The first: it is wrong, by the order in which things were started, and gone once you delete the cache. The second only costs a
# compilation. `cgkit.explain_cache(one, other)` compares two keys factor by factor; `cgkit.why_miss()` does it for the last one that
# missed and the nearest that is there.
#
# ## 7 · Memory that nobody had counted
#
# Recording comes last, when the weights are loaded and the KV cache has been given *all that is left*. Then the graphs' pool needs
# some. It is no nonsense and not slow; it ends the start, after minutes, at a moment when nobody expects it.

# %%
show("no-budget")

# %% [markdown]
# So the pool must be in the budget, and for that it must be known beforehand. Two ways to guess: record two small graphs and go on
# along a straight line, or go through all recordings without a device. **What do you expect** of the straight line?

# %%
show("low-estimate")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8 · The doctor
#
# Now all at once. This model was written by somebody in a hurry. **What do you expect**: read it line by line, and write down what you
# would object to. How many findings will be errors?


# %%
class InAHurry(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("total", torch.zeros(16))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.linear(x) / self.calls
        self.total.add_(y.sum(0))
        if len(x) < 3:
            y = y * 10
        return y * torch.rand(1) + self.total


report = cgkit.doctor(InAHurry(), torch.randn(8, 16))
report.to_frame()[["severity", "code", "source", "what", "fix"]]

# %% [markdown]
# Each finding has a stable code (to search and to count by), a line, what it means *there*, and a way out. `cgkit doctor
# file.py:InAHurry` prints the same in a terminal and ends with status 1 where there is an error, so that it can stand in a test. What
# could not be looked at is said too, in `report.not_checked`: a doctor who is silent about what he did not examine is worse than none.
#
# Repaired, line by line: the count comes in as a tensor, the sum is returned instead of kept, the branch is computed, the noise is given.


# %%
class TookItsTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, calls: torch.Tensor, noise: torch.Tensor, total: torch.Tensor):
        y = self.linear(x) / calls
        total = total + y.sum(0)
        few = torch.full((), len(x), device=x.device) < 3
        return torch.where(few, y * 10, y) * noise + total, total


good = cgkit.doctor(
    TookItsTime(), torch.randn(8, 16), torch.ones(1), torch.rand(1), torch.zeros(16), dynamic_arg_dims={"x": 0}
)
print(f"{len(report.errors)} errors before, {len(good.errors)} after; warnings after: {len(good.of_severity('warning'))}")
good.to_frame()[["severity", "code", "what"]]

# %% [markdown]
# One error is left, and nobody had looked for it: `mixed-rows`. The model adds up `y` over the rows, *padding rows too*. How does the doctor
# know? It tries: the same rows, with and without padding below them, must give the same result for these rows. It cannot know what you meant,
# a sum over all that runs or over the real rows only. If the real ones, their number has to be an input (notebook 11 comes back to it).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 9 · Which piece is it? `bisect`
#
# A compiled model gives other numbers than the eager one, and every look at the code says that it is right. Then the compiler may be
# wrong. It happens. Here a compiler is planted that makes one mistake: it takes `tanh` for `sigmoid`.


# %%
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            hidden, mixed = layer(x), torch.empty_like(x)
            torch.ops.cgkit_hazards.attention_into(torch.tanh(hidden) if number == 2 else torch.relu(hidden), mixed)
            x = x + mixed
        return x


from cgkit.hazards.addresses import ATTENTION_INTO
from cgkit.hazards.faults import WrongCompiler

deep = Deep().to(DEVICE)
batch = torch.randn(4, 16, device=DEVICE)
four = cgkit.CompilationConfig(splitting_ops=[ATTENTION_INTO], compiler="eager", cudagraph_capture_sizes=[4])
wrong_compiler = WrongCompiler({torch.tanh: torch.sigmoid})

# %% [markdown]
# Nine pieces, five stages. Between the input and the wrong output lie two dozen operators. **What do you expect**: how would you search?
# Compare the output of the whole model first. Then?

# %%
found = cgkit.bisect(deep, batch, config=four, adaptor=wrong_compiler)
Picture(plotting.hazard_charts.road(found.to_frame(), about))

# %%
print(in_this_notebook(repr(found)))

# %% [markdown]
# From left to right each *stage* is compared with the eager model on this very input. The first that differs is searched: piece by piece,
# each one fed what the eager model would feed it (or the first mistake would make all later pieces look guilty). In the guilty piece,
# operator by operator, halving what is left.
#
# **When are two results equal?** Compiled code adds in another order, so the last bits differ and that is no mistake. A fixed
# tolerance would be a guess. `bisect` computes the model once more in float64: what lies further from *that* than the eager model
# itself, beyond rounding in its type, is wrong. With the right compiler nothing is found:

# %%
clean = cgkit.bisect(deep, batch, config=four)
print(f"with the mistake: {found.stage}, {found.piece}, {found.operator}; without it, every stage is right: {clean.ok}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 10 · The whole museum
#
# Which tool finds what? The mark says what the hazard does if nobody looks. **What do you expect**: is there one tool that
# finds all of the silent ones?

# %%
for missing in [id for id in hazards.EXHIBITS if id not in visits]:
    show(missing)
shown = pd.DataFrame([visits[id].row() for id in hazards.EXHIBITS])
Picture(plotting.hazard_charts.museum(shown, about))

# %%
print(f"{int(shown['as_described'].sum())} of {len(shown)} exhibits did on this machine what their cards describe")
print("not so:", list(shown.loc[~shown["as_described"], "id"]) or "none", "| run as:", shown["platform"].value_counts().to_dict())
pd.Series(hazards.TOOLS, name="what it is").to_frame()

# %% [markdown]
# No single one. The doctor finds most, and beforehand. It cannot know what will be done *later*: that somebody puts new weights in the place
# of the old ones, or looks at a result too late. That is seen at the step, by `debug=True`. And neither looks at a cache's key, at
# counters or at a budget. (Each exhibit asks one tool, so a row has one mark. Another may find it too: `debug=True` found the
# dropped guard in section 5. `guarded-step` compares two times. In the run kept here guards made a call less than 1.6 times as long, which
# its card then asked for; by now it asks for 1.3.)

# %%
silent_ones = shown[(shown["kind"] == "wrong numbers") & shown["harm"]]
cgkit.claim(
    "wrong-heading",
    measured=f"{len(silent_ones)} of {len(shown)} exhibits compute something else and raise nothing ({', '.join(silent_ones['id'])}); "
    f"{int((shown['kind'] == 'slow').sum())} are slow without a word",
    outcome=len(silent_ones) > 0,
)

# %% [markdown]
# All rows of the list, with the exhibit that shows each. Two have none, and say why:

# %%
left = [{"selector": "th, td", "props": "text-align: left; vertical-align: top"}]
hazards.table().style.hide(axis="index").set_uuid("hazards").set_table_styles(left)

# %% [markdown]
# The two once more, in sentences:
# - **LoRA** (8): small additional weights that a request may ask for. Graphs that were recorded with them compute them for everybody.
#   cgkit has none; a key with a field `has_lora`, recorded with and without, would show it.
# - **Inductor's own partition** (20) is another way to cut, which cgkit does not drive; compiling one model both ways would show it.
#
# And one exhibit is smaller than what it stands for: **CUDAGraph Trees** (26), the graphs of `torch.compile(mode="reduce-overhead")`,
# beside graphs of one's own. The former clear memory (of the library for matrix products) whose address the latter hold. The exhibit
# clears a workspace that can still be read. The thing itself needs a GPU, and may spoil the process. So it runs in one of its own, if
# there is a GPU. `workspace`: whose the memory is that the recorded product will write its parts to. `equal`: the replay's own
# result is right. `kept`: none of the tensors that were made meanwhile was written. If the workspace is held no more, the graph writes
# where it has no right to. What that does is chance: it spoils a tensor of somebody else, or it is an illegal memory access and the
# process ends, or nothing is seen yet. The first is the worst: the graph that does the harm looks healthy, and another part of the
# program computes nonsense.

# %%
from cgkit.hazards.trees import replay_beside_trees

if DEVICE == "cuda":
    trees = replay_beside_trees("between", timeout=60)
    print("recorded by hand, then Trees, then replayed:", {k: v for k, v in trees.items() if k != "error"}, trees["error"][:100])
else:
    print("no GPU here, so row 26 is seen in small alone")

# %% [markdown]
# Walk through the museum yourself. (Where no kernel runs: the cards above are all of it.)

# %%
ipywidgets.interact(show, id=ipywidgets.Dropdown(options=list(hazards.EXHIBITS), value="key-miss"));

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 11 · In which order to ask
#
# | you see | ask first | because |
# |---|---|---|
# | a new model, nothing recorded yet | `cgkit.doctor(model, *example)` | what can be known beforehand costs a second now |
# | nonsense, or nearly right | `debug=True`, the same request again | it names stage, piece and operator at the first wrong step |
# | nonsense only compiled | `cgkit.bisect(model, *inputs)` | it ends at the first stage that differs |
# | right, but slow while serving | `cgkit.ledgers(runner)` | how many steps had no graph, and why |
# | right, but slow since a restart | `cgkit.counters_table(captured)` | a graph that is missing has no symptom but time |
# | a slow start | `cgkit.why_miss()`, then the doctor's `piece-not-shared` | first whether it had to compile, then how often |
# | out of memory at the start | `cgkit.predict_pool` | recording comes last and finds what is left |
#
# And three habits that prevent most of it:
# 1. **Write in place, into memory that stays.** `buffer.copy_(new)`, never `buffer = new`, for all that a graph reads.
# 2. **What changes from step to step is a tensor.** A Python number, a flag, a length in a recorded piece is what it was.
# 3. **Compare with eager once**, at a size that needs padding, and after each change of the weights.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Your turn
#
# `check` says right, nearly or wrong, and what is off. `hint("09-1")` gives a hint, `solution("09-1")` says where one stands.
# Put your answer in the place of `...`.
#
# ### 09-1 · What will the doctor say?

# %%
question("09-1")

# %%
check("09-1", ...)

# %% [markdown]
# ### 09-2 · Fix a stale buffer

# %%
question("09-2")

# %%
check("09-2", ...)

# %% [markdown]
# ### 09-3 · Which piece?

# %%
question("09-3")

# %%
check("09-3", ...)

# %% [markdown]
# ### 09-4 · A check of your own

# %%
question("09-4")

# %%
check("09-4", ...)

# %% [markdown]
# ## What comes next
# All of this for one batch after the other. What happens when requests come and go? **10 · Serving real traffic.** And your own
# model, on this road: **11 · Bring your own model.** `cgkit.reset()` frees every graph that was recorded here.

# %% tags=["stamp"]
from cgkit.measuring.stamp import stamp

print(stamp())
