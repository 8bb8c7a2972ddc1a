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
# # 06 · Recording and replaying a CUDA graph
#
# **The question.** A decode step starts hundreds of kernels, and starting them costs more than running them. A *CUDA graph*
# writes the starts down once and repeats them with a single call. What exactly is written down, what is not, and what goes
# wrong when the two are confused?
#
# **Afterwards you can**
# - say of each line of a forward whether a replay repeats it;
# - explain why inputs need fixed addresses, and build the buffers that give them some;
# - predict which numbers a stale address, a frozen Python number or an overwritten output will show;
# - read the three layers that run for a piece, and say what the *replay plan* leaves out of them;
# - tell what cannot be recorded, and how to write it so that it can.
#
# **Time**: 60 minutes to read; the cells run in about one minute on two cores.
# **Needs**: cgkit. With a GPU real CUDA graphs are recorded, without one *emulated* ones: they keep the same rules and make the
# same mistakes, but are no faster. What only a GPU can show is read from a recording, and says so.

# %% tags=["setup"]
# Only Colab needs this cell: it fetches cgkit there. Anywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    get_ipython().system("test -d /content/cgkit || git clone -q --depth 1 -b main https://github.com/OWNER/NAME /content/cgkit")
    get_ipython().run_line_magic("cd", "-q /content/cgkit/notebooks")
    get_ipython().run_line_magic("run", "colab.py")

# %%
import re
import time

import ipywidgets
import pandas as pd
import torch
from IPython.display import display

import cgkit
from cgkit import events, plotting, recordings
from cgkit.capturing.emulated import EmulatedPlatform
from cgkit.exercises import check, hint, question, solution
from cgkit.plotting import Picture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the one setting; everything follows from it
platform = cgkit.get_platform("auto", DEVICE)
pd.set_option("display.max_colwidth", 90)
platform

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1 · Why bother
#
# The processor of the computer (the *host*) runs Python and tells the GPU (the *device*) what to do: one *launch* for each
# kernel, that is for each function that runs on the GPU. A launch takes the host some microseconds, and before it come
# Python, the module's `__call__`, and torch's search for the right kernel. At a small batch the GPU is done with each
# kernel long before the host has sent the next one. Notebook 01 measures that bill.
#
# A *CUDA graph* is a list of launches with all their arguments. Sending the whole list is one call.
#
# **What do you expect?** One decode step of a Llama of 16 layers, batch 1. "compiled" means: Inductor's kernels, each started
# by itself. The graph modes start the very same kernels out of recorded graphs. How many times faster is the step?

# %%
headline = recordings.load("h200-headline-llama-3.2-1b")
decode = headline[headline["case"] == "decode"].set_index(["batch", "mode"]).sort_index()
print(f"recorded on {headline.attrs['recorded']}")
decode.loc[1, ["wall_ms", "cpu_ms", "gpu_busy_ms", "kernels"]].loc[["eager", "compiled", "PIECEWISE", "FULL_AND_PIECEWISE"]]

# %% [markdown]
# The columns: how long the step took, how long the host was busy with it, how long the GPU was, and how many kernels it ran.
# Look at the last two: the compiled step and the recorded ones run **as many kernels in nearly the same time**. All that was gained
# is the host's time. The eager row has more kernels because nothing is fused there.
#
# `torch.compile` can do all of this by itself, with `mode="reduce-overhead"`: it traces, compiles and records. Why does an engine not
# take it? For four reasons:
# - it keeps the guards, and looks at them and at where each input lies at every call;
# - each new size is traced or recorded when it first comes, so a request waits for it;
# - it records what was traced, attention with it, and attention depends on more than shapes (notebook 03);
# - it decides by itself what is recorded when, and which memory that takes. An engine has to know both beforehand.
#
# What the first of these costs:

# %%
compiled_ms, graph_ms = (decode.loc[(1, mode), "wall_ms"] for mode in ("compiled", "FULL_AND_PIECEWISE"))
stock_ms, stock_host_ms = decode.loc[(1, "reduce-overhead"), "wall_ms"], decode.loc[(1, "reduce-overhead"), "cpu_ms"]
print(f"compiled {compiled_ms:.2f} ms, recorded {graph_ms:.2f} ms: {compiled_ms / graph_ms:.1f} times faster")
cgkit.claim(
    "why-not-heading",
    measured=f'one step, batch 1: "reduce-overhead" {stock_ms:.2f} ms ({stock_host_ms:.2f} on the host), cgkit {graph_ms:.2f} ms',
    outcome="confirmed" if stock_ms > graph_ms else "wrong",
    why="The stock mode does record graphs and wins most of the way. What remains is the look at guards and inputs at "
    "each call; and a new size is traced, compiled and recorded while a request waits (notebooks 02 and 07).",
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2 · The smallest graph
#
# A *platform* records and replays. `record(function, pool)` calls the function once and writes down what it would do on the
# device. The *pool* is the memory in which its results lie: it must not be given to anyone else as long as the graph lives.
#
# The function below multiplies, cuts negative numbers off, and adds one. It also notes that Python ran it.
#
# **What do you expect?** After recording, before any replay: what is in `y`? After three replays: how often did Python run the
# function?

# %%
x = torch.tensor([1.0, -2.0, 3.0, 4.0], device=DEVICE)
w = torch.full((4,), 10.0, device=DEVICE)
python_ran = []


def step():
    python_ran.append("yes")
    return torch.relu(x * w) + 1


step()  # a warm-up; section 6 says why
python_ran.clear()
pool = platform.new_pool()
step_graph, y = platform.record(step, pool)
print("after recording:  ", y.tolist(), "| Python ran", len(python_ran), "time")
for _ in range(3):
    step_graph.replay()
print("after 3 replays:  ", y.tolist(), "| Python ran", len(python_ran), "time")

# %% [markdown]
# Recording **ran nothing on the device**. The emulated platform fills the result with NaN ("not a number"), so that whoever
# believes it too early sees it; on a GPU it is whatever lay there. Python ran once, while recording, and never again.
#
# What is in the list? The emulated platform can show its own (a CUDA graph is the same kind of list, of kernels):

# %%
emulated = EmulatedPlatform()
cpu_x, cpu_w = x.detach().to("cpu", copy=True), w.detach().to("cpu", copy=True)
tape, _ = emulated.record(lambda: torch.relu(cpu_x * cpu_w) + 1, emulated.new_pool())
print("emulated; x lies at", hex(cpu_x.data_ptr()), "and w at", hex(cpu_w.data_ptr()))
tape.to_frame()[["name", "reads", "numbers", "writes"]]

# %% [markdown]
# (The third call writes where the first one did: by then nobody needs the product any more, and the pool lent its memory again.)
#
# Five things stand in the list: the operators, the **addresses** that they read, the addresses that they write, the shapes,
# and the **numbers** (the 1 of `+ 1`). Five things do not: Python, its variables, its branches, anything that the host
# computes, and the *contents* of tensors. Everything that follows in this notebook is a consequence of these two sentences.

# %%
cgkit.claim([
    dict(id="recording-heading", measured=f"recording called Python {len(python_ran)} time and computed nothing; 3 replays "
         "called it no more", outcome="confirmed" if len(python_ran) == 1 else "wrong"),
    dict(id="why-not-static", measured=f"each of the {len(tape.to_frame())} recorded calls holds its addresses and shapes as "
         "plain numbers", outcome="confirmed" if tape.to_frame()["reads"].str.startswith("0x").all() else "wrong"),
])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3 · An address is not a variable
#
# The list holds `0x55...`, not the name `x`. So there are two ways to "change x", and only one of them reaches the graph:
#
# | line | what it does | does the graph see it? |
# |---|---|---|
# | `x.copy_(new)` | writes new numbers to the old address | ? |
# | `x = new` | lets the name `x` mean another tensor, elsewhere | ? |
#
# **What do you expect?** `scale` is a Python number. The cell replays four times: at first, after `buffer.copy_(...)`, after
# `scale = 1000`, and after `buffer = ...`. Write four results down before you run it.

# %%
buffer = torch.ones(3, device=DEVICE)
scale = 10


def multiply():
    return buffer * scale


first_tensor = buffer
multiply()
blind_graph, result = platform.record(multiply, platform.new_pool())
rows = []


def replayed(what, expected):
    blind_graph.replay()
    rows.append({"after": what, "replay says": result.tolist(), "Python would say": expected.tolist()})


replayed("nothing", multiply())
buffer.copy_(torch.full((3,), 2.0))
replayed("buffer.copy_(2, 2, 2)", multiply())
scale = 1000
replayed("scale = 1000", multiply())
buffer = torch.full((3,), 7.0, device=DEVICE)
replayed("buffer = another tensor of 7s", multiply())
seen = pd.DataFrame(rows)
seen.assign(right=seen["replay says"] == seen["Python would say"])

# %% [markdown]
# - `copy_` reaches the graph: same address, new contents.
# - The number 10 was copied into the list. That Python's `scale` is 1000 now concerns nobody.
# - The new `buffer` lies elsewhere. The graph goes on reading the old address, finds the 2s that still lie there, and
#   computes. **There is no error.** This is the stale input: wrong numbers, in silence.
#
# In a model it is worse than here. The old tensor may have been freed and its memory given to someone else; then the replay
# computes with someone else's data, and the text that comes out is nonsense, or nearly right.

# %%
stale = seen.iloc[-1]
cgkit.claim([
    dict(id="inputs-heading", measured=f"after copy_ into the buffer the replay says {seen['replay says'][1][0]:g}",
         outcome="confirmed" if seen["replay says"][1] == seen["Python would say"][1] else "wrong"),
    dict(id="inputs-fixed-address", measured=f"input elsewhere: the replay says {stale['replay says'][0]:g}, Python "
         f"{stale['Python would say'][0]:g}", outcome="confirmed" if stale["replay says"] == seen["replay says"][1] else "wrong"),
])

# %% [markdown]
# A **branch** is frozen in the same way. The function below asks a Python flag. Which of the two multiplications is in the
# graph, if it was recorded with `training = False`? The one that ran while recording, for ever:

# %%
ones, training = torch.ones(2, device=DEVICE), False


def branch():
    return ones * 2 if training else ones * 3


branch()
branch_graph, branch_result = platform.record(branch, platform.new_pool())
training = True
branch_graph.replay()
print("replay:", branch_result.tolist(), " Python now:", branch().tolist())

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4 · Static buffers
#
# A server gets other tokens at each step, in other tensors. The remedy follows from section 3: make a buffer once, record the
# graph on *it*, and copy each step's input in. A smaller batch goes into the buffer's front; the graph of the next larger
# recorded size runs, and the rest of the rows is *padding*, whose results are cut off.
#
# `cgkit.capture` does this for a compiled model. A small one, without attention, so that the step needs no other inputs.
# The road to it (trace, split, compile) is that of notebooks 02 to 04; `compiler="eager"` leaves the operators as they are.


# %%
class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, shift):
        return torch.relu(self.linear(x)) + shift


torch.manual_seed(0)
small = Small().to(DEVICE)
example = torch.randn(8, 4, device=DEVICE), torch.randn(8, 4, device=DEVICE)
whole = cgkit.split_graph(cgkit.trace(small, *example, dynamic_arg_dims={"x": 0, "shift": 0}), [])


def captured_small(**options):
    config = cgkit.CompilationConfig(level=2, compiler="eager", cudagraph_mode="FULL", **options)
    given = {} if config.cudagraph_copy_inputs else {"make_inputs": lambda n: (example[0][:n], example[1][:n])}
    return cgkit.capture(cgkit.compile_pieces(whole, config), [2, 4, 8], **given)


captured = captured_small()
captured

# %% [markdown]
# **What do you expect?** Three rows are given; sizes 2, 4 and 8 are recorded. Does the model's answer equal eager's? Where
# does the input of size 2 lie, and that of size 8?

# %%
three = torch.randn(3, 4, device=DEVICE), torch.randn(3, 4, device=DEVICE)
with torch.no_grad():
    difference = float((captured(*three) - small(*three)).abs().max())
print(f"largest difference to eager: {difference:.1e}, shape {tuple(captured(*three).shape)}")
places = pd.DataFrame([
    {"size": size, "input": name, "address": hex(tensor.data_ptr()), "rows": len(tensor)}
    for size in captured.sizes
    for name, tensor in zip(("x", "shift"), captured.inputs.at(size)[0])
])
places

# %% [markdown]
# One buffer for each input, made for the largest size; every smaller size is its *front*, at the same address. A step costs
# one copy for each input that follows the number of tokens. The weights are inputs of the graph as well, but they lie still:

# %%
args, kwargs = captured.inputs.at(captured.sizes.largest)
weights = captured.model_inputs.weights(args, kwargs)
print("copied at each step:", captured.inputs.paths)
print("not copied:         ", [name for name, _ in weights])

# %% [markdown]
# A caller whose own buffers never move needs no copy at all: `cudagraph_copy_inputs=False` says that. Then it is the caller's
# promise, and cgkit checks that it is kept (it compares the addresses before each replay, which is cheap):

# %%
uncopied = captured_small(cudagraph_copy_inputs=False)
promised = uncopied(example[0][:4], example[1][:4])
try:
    uncopied(example[0][:4].clone(), example[1][:4])
    said = ""
except cgkit.CgkitError as error:
    said = type(error).__name__
    print(f"{said}: {error}")

# %%
host = recordings.load("h200-host-llama-3.2-1b")
copies = float(host.query("path == 'plan' and batch == 1 and part == 'input copies'")["step_us"].iloc[0])
saved = 1e3 * float(decode.loc[(1, "compiled"), "cpu_ms"] - decode.loc[(1, "PIECEWISE"), "cpu_ms"])
per_input = places.groupby("input")["address"].nunique()
buffers = [tensor.untyped_storage().nbytes() // tensor[0].nbytes for tensor in captured.inputs.at(2)[0]]
cgkit.claim([
    dict(id="inputs-prefix-copy", measured=f"sizes {list(captured.sizes)}: {per_input.max()} address for each input",
         outcome="confirmed" if per_input.max() == 1 else "wrong"),
    dict(id="inputs-symbolic-only", measured=f"{len(captured.inputs.paths)} inputs are copied, {len(weights)} weights are not",
         outcome="confirmed" if len(captured.inputs.paths) == 2 else "wrong"),
    dict(id="inputs-largest-first", measured=f"the buffers have room for {buffers[0]} rows, also where 2 are asked for",
         outcome="confirmed" if buffers[0] >= captured.sizes.largest else "wrong",
         why="cgkit makes them for the largest recorded size; it need not assume that the first call is the largest."),
    dict(id="inputs-two-copies", measured=f"Llama-3.2-1B on an H200 (recorded): {copies:.0f} us for sending a step's inputs, "
         f"{saved:,.0f} us of host time saved", outcome="confirmed" if copies < 0.1 * saved else "wrong"),
    dict(id="inputs-flag", measured=f"with cudagraph_copy_inputs=False a moved input gives {said or 'no error'}",
         outcome="confirmed" if said == "MovedInputError" else "wrong"),
])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5 · The wrapper: record once, then replay
#
# `CUDAGraphWrapper` puts all this around a callable. It decides nothing. It looks into the *forward context*, a note that
# every step carries and that says: which **mode** this step runs in, and which **key** (padded size, kind of batch) it has.
#
# - The mode is not the wrapper's own, or there is no step at all: call the callable as it is.
# - The key is new: record. The key is known: compare addresses and replay.
#
# **What do you expect?** The callable notes each call from Python. Which of the five calls below does it notice?

# %%
ran = []
fixed = torch.ones(4, device=DEVICE)


def double(tensor):
    ran.append(1)
    return tensor * 2


lock = cgkit.CaptureLock("the demo")
wrapper = cgkit.CUDAGraphWrapper(double, "FULL", platform, platform.new_pool(), name="double", lock=lock)


def in_step(mode, tokens, tensor=fixed):
    before, key = len(ran), cgkit.BatchDescriptor(tokens)
    with cgkit.set_forward_context(cudagraph_runtime_mode=cgkit.CUDAGraphMode[mode], batch_descriptor=key):
        wrapper(tensor)
    return {"mode": mode, "tokens": tokens, "Python ran it": len(ran) > before, "graphs held": len(wrapper.entries)}


pd.DataFrame([in_step("NONE", 4), in_step("PIECEWISE", 4), in_step("FULL", 4), in_step("FULL", 4), in_step("FULL", 8)])

# %% [markdown]
# The third and the fifth call recorded, the fourth replayed. Recording in the middle of serving would make a request wait, so
# when all sizes are recorded the **lock** is closed; a new key is an error from then on. A moved input is one always:

# %%
lock.locked = True
refused = []
for attempt in (lambda: in_step("FULL", 16), lambda: in_step("FULL", 4, torch.zeros(4, device=DEVICE))):
    try:
        attempt()
    except cgkit.CgkitError as error:
        refused.append(type(error).__name__)
        print(f"{refused[-1]}: {error}\n")
lock.locked = False

# %% [markdown]
# Note what the wrapper does *not* do: it owns no buffer and copies nothing in. Buffers are the caller's (section 4). So the
# same wrapper fits any way to bring the inputs in.
#
# ### Three layers deep
# Now a Llama, of four layers and with random weights. Its graph is cut at attention (notebook 03), so it has five pieces that
# are recorded and, between them, four attentions that are not. This is what one of the five consists of:

# %%
from cgkit.serving import Runner, load_model

llama = load_model("tiny-llama", device=DEVICE)
sizes = [1, 2, 4, 8, 16]
options = dict(compiler="eager", cudagraph_capture_sizes=sizes)


def new_runner(mode, **more):
    return Runner(llama.model, config=cgkit.CompilationConfig(cudagraph_mode=mode, **options, **more), max_num_seqs=8, max_model_len=64)


runner = new_runner("PIECEWISE").capture_model()
graphs = runner.executor.captured
piece = graphs.pieces[0]
layers = [piece, piece.runnable, piece.runnable.general.runnable]
for depth, layer in enumerate(layers):
    print("  " * depth + type(layer).__name__)

# %% [markdown]
# 1. `CUDAGraphWrapper`: record or replay, by key.
# 2. `PiecewiseBackend`: which compiled version serves this number of tokens (notebook 04).
# 3. the compiled code: here the piece as it is, since `compiler="eager"`; else Inductor's.
#
# Once a key is recorded, layers 2 and 3 are never entered again: the graph holds the kernels that they started.

# %%
wrapped = [type(each.runnable).__name__ for each in graphs.pieces]
cgkit.claim([
    dict(id="wrappers-heading", measured=f"{len(graphs.pieces)} pieces, each " + " > ".join(type(each).__name__ for each in layers),
         outcome="confirmed" if wrapped == ["PiecewiseBackend"] * len(wrapped) else "wrong"),
    dict(id="wrappers-three-layers", measured=f"{len(layers)} layers", outcome="confirmed" if len(layers) == 3 else "wrong"),
    dict(id="interpreter-wraps", measured=f"{len(wrapped)} of {len(graphs.compiled.backends)} compiled pieces are wrapped",
         outcome="confirmed" if len(wrapped) == len(graphs.compiled.backends) else "wrong",
         why="cgkit puts the graph wrapper on when graphs are recorded, not while compiling: so one compiled model can be "
         "recorded in several modes."),
    dict(id="wrappers-platforms", measured=f"the wrapper calls record() and replay() of the {platform.name} platform",
         outcome="not measured", why="A HIP graph needs a GPU of another vendor. That the emulated and the CUDA platform serve "
         "the same wrapper is shown here."),
    dict(id="recording-no-buffers", measured=f"the wrapper refused a moved input ({refused[-1]}) and copied nothing",
         outcome="confirmed" if refused[-1] == "MovedInputError" else "wrong"),
])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6 · `capture_model`: the runner's part
#
# A wrapper records when it is called with a new key. Someone has to call it with all keys, before the first request. In
# which order, with which inputs? A runner with two routes: pieces for any batch, a whole graph for decode.

# %%
both = new_runner("FULL_AND_PIECEWISE")
cache_before = [part.clone() for pair in both.kv_cache.caches.values() for part in pair]
with events.record(events.GraphCaptured) as log:
    both.capture_model()
recorded = pd.DataFrame(log)
order = recorded.groupby(["mode", "num_tokens", "uniform_decode"], sort=False).size().rename("graphs").reset_index()
order

# %% [markdown]
# From the table:
# - **Large sizes first.** The memory that the large graph needs for its intermediate results is lent to the smaller ones
#   afterwards (notebook 08).
# - **Decode apart.** First the pieces, one graph a piece, for batches of any kind. Then whole steps, for decode batches only
#   (`uniform_decode`: each request has one new token), and only up to 8, because 8 requests are the most here.
#
# The inputs are made up. What must they not do? Attention really runs while pieces are recorded (it is not in them), and it
# writes keys and values into the KV cache. So the dummy batch has no place in the cache:

# %%
dummy = both.inputs.fill_dummy(8, True)
mixed = both.inputs.fill_dummy(16, False)
cache_after = [part for pair in both.kv_cache.caches.values() for part in pair]
untouched = all(torch.equal(one, other) for one, other in zip(cache_before, cache_after))
print("the KV cache is as it was before recording:", untouched)
print("tokens of the longest query in the dummy batch: decode, 8 tokens:", dummy.max_query_len, "| any batch, 16 tokens:", mixed.max_query_len)

# %% [markdown]
# The last line matters more than it looks. A *query* is the new tokens of one request: its whole prompt at first, one token at
# each decode step. Attention chooses its kernel on the host, from the longest query of the batch: one new token a request
# takes a kernel made for decode. That choice is a Python branch, so a FULL graph freezes it (section 3).
# Recorded with a batch that looks like a prompt, every decode step would run the slow general kernel, without an error.
#
# ### Warm-up
# Before each size is recorded it is run once unrecorded. **What do you expect** of a function that makes a table at its
# first call, if it is recorded *without* a warm-up? How many calls are in the graph, with and without?


# %%
class Lazy:
    def __init__(self):
        self.table = None

    def __call__(self):
        if self.table is None:  # the first call sets up
            self.table = torch.arange(4.0).cos() * 2
        return cpu_x + self.table


cold, warm = Lazy(), Lazy()
warm()
cold_graph, _ = emulated.record(cold, emulated.new_pool())
warm_graph, _ = emulated.record(warm, emulated.new_pool())
print(f"emulated. without warm-up: {cold_graph.num_nodes()} calls, the table holds {cold.table.tolist()}")
print(f"          after a warm-up: {warm_graph.num_nodes()} call,  the table holds {[round(v, 2) for v in warm.table.tolist()]}")

# %% [markdown]
# Without the warm-up, making the table was recorded: each replay makes it anew, and until the first replay everybody who
# reads the table finds rubbish. Real set-up of this kind: Triton compiles a kernel at its first call, cuBLAS asks for its
# workspace, a library loads its code. The first of these would even fail: it waits for the device, which section 9 forbids.
#
# The warm-up runs in the mode NONE. In any other the wrappers would meet a new key and record at once, and the set-up would be in the
# recording after all.
#
# How many warm-ups are there really? The operator below notes each call from Python. It stands between two pieces, where
# nothing is recorded, so it runs at each warm-up and at each recording:

# %%
from cgkit.splitting import register_op

noted = []


def note(x: torch.Tensor, out: torch.Tensor) -> None:
    noted.append(len(x))
    out.copy_(x)


register_op("note06", note, ["out"], lambda x, out: None, namespace="course")


class Noted(torch.nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        torch.ops.course.note06(x * 2, out)
        return out + 1


cut = cgkit.split_graph(cgkit.trace(Noted(), example[0], dynamic_arg_dims={"x": 0}), ["course::note06"])
config = cgkit.CompilationConfig(compiler="eager", cudagraph_mode="PIECEWISE", replay_path="module")
calls = {}
for warmups in (0, 1, 2):
    noted.clear()
    cgkit.capture(cgkit.compile_pieces(cut, config), [2, 4, 8], num_warmups=warmups)
    calls[warmups] = len(noted)
print({f"{warmups} warm-ups": f"{count} calls for 3 sizes" for warmups, count in calls.items()})
print("the default:", config.cudagraph_num_of_warmups)

# %%
descending = all(part["num_tokens"].is_monotonic_decreasing for _, part in order.groupby("mode"))
none = new_runner("NONE").capture_model()
apart = order[order["mode"] == "FULL"]
cgkit.claim([
    dict(id="capture-heading", measured=f"{len(recorded)} graphs of {len(order)} keys, from large to small: {descending}",
         outcome="confirmed" if descending else "wrong"),
    dict(id="capture-decode-apart", measured=f"{len(apart)} FULL keys after the pieces, all decode: {apart['uniform_decode'].all()}",
         outcome="confirmed" if apart["uniform_decode"].all() and order["mode"].iloc[-1] == "FULL" else "wrong"),
    dict(id="capture-skip-none", measured=f"mode NONE: captured is {none.executor.captured}, a line in the log says so",
         outcome="confirmed" if none.executor.captured is None else "wrong"),
    dict(id="capture-dummy-run", measured=f"the KV cache is bit for bit as before: {untouched}",
         outcome="confirmed" if untouched else "wrong"),
    dict(id="capture-decode-kernel", measured=f"longest query of the dummy decode batch: {dummy.max_query_len}",
         outcome="confirmed" if dummy.max_query_len == 1 else "wrong"),
    dict(id="capture-lock", measured=f"locked after capture: {both.executor.compiled.lock.locked}; a new key gave {refused[0]}",
         outcome="confirmed" if both.executor.compiled.lock.locked and refused[0] == "CaptureLockedError" else "wrong"),
    dict(id="capture-warm-ups", measured=f"{calls[1] - calls[0]} more calls for 3 sizes with one warm-up; the default is "
         f"{config.cudagraph_num_of_warmups}", outcome="confirmed" if calls[1] - calls[0] == 3 else "wrong"),
    dict(id="capture-warm-up-why", measured=f"a lazy table: {cold_graph.num_nodes()} recorded calls without warm-up, "
         f"{warm_graph.num_nodes()} with", outcome="confirmed" if cold_graph.num_nodes() > warm_graph.num_nodes() else "wrong"),
])

# %% [markdown]
# ### How long does recording take?
# Here, on this machine, by size (all pieces of it together):

# %%
about = plotting.About("tiny-llama", "FULL_AND_PIECEWISE", device=DEVICE, emulated=platform.emulated)
Picture(plotting.capture_seconds(recorded, about))

# %% [markdown]
# And on a GPU, recorded: a Llama-3.2-1B shape, 11 sizes, twice in one process. The second time is shorter, because the warm-ups
# have nothing left to set up.

# %%
speed = recordings.load("h200-recording-llama-3.2-1b")
print(f"recorded on {speed.attrs['recorded']}")
speed[["mode", "graphs", "sizes", "total_s", "recording_s"]]

# %% [markdown]
# What would it be without care? The *garbage collector* of Python frees objects that refer to one another, at moments of its own
# choosing. If that happens during a recording and a tensor is freed, the recording may break. So it is held off. Running it
# before each graph instead would be safe too, and slow. **What do you expect**: how long is one collection here?

# %%
import gc

started = time.perf_counter()
gc.collect()
collection_s = time.perf_counter() - started
recording_s = float(recorded["seconds"].sum())
each_here_ms = 1e3 * recording_s / len(recorded)
print(f"one collection: {1e3 * collection_s:.0f} ms; recording {len(recorded)} graphs: {1e3 * recording_s:.0f} ms on {platform.name}")
each_ms = 1e3 * float(speed["recording_s"].iloc[-1]) / float(speed["graphs"].iloc[-1])
print(f"on an H200 (recorded) one graph takes {each_ms:.1f} ms to record, without collection")

# %%
longest = float(speed["total_s"].max())
large = 81 * len(cgkit.CaptureSizes.resolve(cgkit.CompilationConfig(max_num_seqs=256), "vllm-0.10.1"))
cgkit.claim([
    dict(id="recording-gc", measured=f"here: one collection {1e3 * collection_s:.0f} ms, recording one graph "
         f"{each_here_ms:.0f} ms", outcome="confirmed" if collection_s > recording_s / len(recorded) else "wrong",
         why="cgkit collects once before it begins and keeps the collector off until all is recorded."),
    dict(id="capture-5-to-20-s", measured=f"{int(speed['graphs'].max())} graphs in at most {longest:.1f} s on an H200",
         outcome="confirmed" if 5 <= longest <= 20 else "wrong",
         why=f"The time follows the number of graphs, and 16 layers with 11 sizes are few. 81 pieces with vLLM 0.10.1's ladder are "
         f"{large} graphs: {large * each_ms / 1e3:.0f} s of recording at {each_ms:.1f} ms each, plus warm-ups. So the order of "
         "magnitude fits a large model, not every model."),
    dict(id="memory-12-s", measured="", outcome="not measured", why="One line of one log, of a model and a ladder that the article "
         f"does not name. At {each_ms:.1f} ms a graph, 12 s would be some {12e3 / each_ms:,.0f} graphs."),
])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7 · A step of many graphs: module path, plan, one graph
#
# In PIECEWISE mode a step replays one graph a piece, with attention between them. How does the host get from one to the next?
# cgkit has two ways and, in FULL mode, a third:
#
# - **module** (the article's): generated *stitching code* calls piece after piece. Each call goes into the wrapper: read the
#   context, look the key up, compare addresses, replay. Then the attention operator goes through torch's dispatcher.
# - **plan** (cgkit's default): all of that gives the same result at every step of a key. So it is done *once*, at capture, and
#   what is left to do is written into a flat tuple of ready-made calls: `for call in calls: call()`.
# - **full**: the attention is in the graph too; one replay a step.
#
# The plan of 4 tokens, as it lies there:

# %%
runner.executor.captured.plans.calls_frame(4, "decode")

# %% [markdown]
# Before a plan is taken the step is compared with the one that it was laid out for: the same buffers, the same metadata.
# If something differs, the module path serves the step and is counted, so nothing is ever replayed on an assumption.
#
# **What do you expect?** The host's time of a decode step of 17 pieces, in microseconds: module, plan, full. Which part is the
# largest on each path?

# %%
recordings.picture("h200-host-llama-3.2-1b", plotting.host_chart.host_time, query="batch == 1 and path != 'as traced'")

# %%
step_us = host[host["batch"] == 1].drop_duplicates("path").set_index("path")["whole_us"]
parts = host[(host["batch"] == 1) & (host["path"] != "as traced")].pivot_table(index="part", columns="path", values="step_us", sort=False)
print(f"recorded on {host.attrs['recorded']}: us a step, 17 pieces, batch 1")
print({path: float(round(us)) for path, us in step_us.items()})
parts[["module", "plan", "full"]].round(1).astype(object).fillna("")

# %% [markdown]
# Read it from top to bottom.
# - *Attention launches* shrink most: a plan holds each launch with its arguments in place, and no Python has to collect them.
# - *Graph replays* shrink a little: the driver's own call instead of torch's wrapper around it.
# - *Wrapper* and *stitching code* vanish. What comes instead is *one address check* for the whole step. It compares the
#   attention's metadata as well, and takes about as long as the wrappers' 17 look-ups and checks together.
# - *Input preparation and copies* stay the same on every path: the tokens must get into the buffers.
# - **full** has one replay and no attention launches, and is the shortest by far.
#
# (Part 1 counts less host time: there the inputs lie ready, and it is another recording. `as traced` is the module path with nothing
# prepared: weights fetched at each step.)
#
# ### And does the whole step get faster?
# Only as far as the host was what the step waited for. Move the batch size. (Where no kernel runs, the picture below the
# slider shows batch 8.)


# %%
def whole_step(batch):
    part = headline[(headline["case"] == "decode") & (headline["batch"] == batch)]
    ax = plotting.headline_chart.panel(part)
    about = [f"One decode step at batch {batch}: wall time (ms), × faster than eager",
             "dark: GPU busy · tick: host busy · Llama-3.2-1B shape", f"recorded on {headline.attrs['recorded']}"]
    ax.set_title("\n".join(about), fontsize=8, loc="left")
    return Picture(ax, f"one decode step at batch {batch}, a bar a mode")

# %%
batches = ipywidgets.SelectionSlider(options=[1, 8, 32, 128], value=8)
_ = ipywidgets.interact(whole_step, batch=batches)

# %%
whole_step(8)

# %%
waits = decode["wall_ms"] - decode["gpu_busy_ms"]
table = pd.DataFrame({mode: waits.xs(mode, level="mode") for mode in ("eager", "compiled", "PIECEWISE", "FULL_AND_PIECEWISE")})
print(f"ms of a step in which the GPU does nothing, recorded on {headline.attrs['recorded']}")
table.round(2)

# %% [markdown]
# From *compiled* to *PIECEWISE* almost everything is gained. From PIECEWISE to a whole graph comes a little more, the gaps
# between the pieces. (At batch 8 the host was slower than at the others: compare the modes of a row.) Why are pieces used at all, then?
# Because a whole graph freezes attention too, and attention depends on more than the number of tokens: notebook 07.
#
# ## 8 · The next replay overwrites what this one returned
#
# A replay returns *the same tensor* each time. **What do you expect** of a list that collects the outputs of three replays?

# %%
counter = torch.zeros(1, device=DEVICE)
next_graph, out = platform.record(lambda: counter + 1, platform.new_pool())
kept, copied = [], []
counter.zero_()
for _ in range(3):
    next_graph.replay()
    kept.append(out)
    copied.append(out.clone())
    counter.copy_(out)
print("kept:  ", [float(value) for value in kept])
print("cloned:", [float(value) for value in copied])

# %% [markdown]
# `captured(x)` therefore copies its outputs out; `captured.run(x)`, made for a runner that reads them at once, does not.
#
# ### The shared pool, and weak references
# Graphs that replay one after the other can use the same memory, if no output is needed once the next graph runs. A *strong*
# reference to an output says "I still need it": its memory stays taken. A *weak* one is a tensor that points at the memory and
# owns nothing: the pool may lend the memory out again. Two graphs in one pool, the outputs held strongly, then weakly. **What do you
# expect** of the first output once the second graph was replayed?

# %%
ones_, twos = torch.ones(1000, device=DEVICE), torch.full((1000,), 2.0, device=DEVICE)


def two_graphs(weak, pool):
    first_graph, first_out = platform.record(lambda: ones_ + 10, pool)
    first_out = platform.weak_ref(first_out, pool) if weak else first_out
    second_graph, second_out = platform.record(lambda: twos + 20, pool)
    first_graph.replay()
    before = float(first_out[0])
    second_graph.replay()
    return {"first output, then": before, "after the second replay": float(first_out[0]),
            "same address": first_out.data_ptr() == second_out.data_ptr(),
            "pool allocated": platform.pool_bytes(pool).allocated}


pd.DataFrame([two_graphs(weak, platform.new_pool()) for weak in (False, True)], index=["strong", "weak"])

# %% [markdown]
# With the weak reference both results lie at one address, and half the memory is in use. The price: the second replay wrote over
# the first result. That is right as long as whoever needed the first result has used it by then, and in a step it has: piece
# 2 reads piece 1's output before piece 3 runs. Two rules follow.
# - All graphs of a pool replay **on one stream**, those of one step in the order in which they were recorded, and no other step
#   in between. (A stream is a queue of work on the GPU; two streams run at the same time.)
# - Nobody keeps an output past the next replay without copying it.
#
# Notebook 08 counts what it saves. In PIECEWISE mode it must not be done too early: while piece 2 is being *recorded* it still has
# to own piece 1's output, or the recording of piece 2 would put its intermediate results on top of its own input.
#
# ## 9 · What capture forbids
#
# Recording runs nothing, so there is no result to look at. Whatever needs one *while* recording cannot be recorded. **What do you
# expect**: which of the eight functions below can?

# %%
def nested():
    return emulated.record(lambda: cpu_x + 1, emulated.new_pool())


attempts = {
    "x.sum().item()": lambda: cpu_x * cpu_x.sum().item(),
    "if x.sum() > 0": lambda: cpu_x if cpu_x.sum() > 0 else -cpu_x,
    "x[x > 0]": lambda: cpu_x[cpu_x > 0],
    "print(x)": lambda: print(cpu_x),
    "x.numpy()": lambda: torch.from_numpy(cpu_x.numpy() * 2),
    "a recording in a recording": nested,
    "torch.where(x > 0, x, 0)": lambda: torch.where(cpu_x > 0, cpu_x, torch.zeros_like(cpu_x)),
    "torch.rand(4)": lambda: torch.rand(4) + cpu_x,
}
outcomes = []
for what, function in attempts.items():
    try:
        made, _ = emulated.record(function, emulated.new_pool())
        outcomes.append({"in the function": what, "outcome": f"recorded, {made.num_nodes()} calls"})
    except cgkit.CgkitError as error:
        outcomes.append({"in the function": what, "outcome": type(error).__name__})
print("emulated (CUDA refuses the same ones, with less to say about where)")
pd.DataFrame(outcomes)

# %% [markdown]
# | forbidden | why | instead |
# |---|---|---|
# | `.item()`, `if tensor`, `print` | the host waits for a number that does not exist yet | keep it a tensor; pass numbers in as Python numbers |
# | `x[x > 0]`, `nonzero` | the *shape* of the result depends on the contents | `torch.where`, a mask: the same shape always |
# | `.numpy()`, `.cpu()` | Python computes outside of the graph, once | torch operators on the device |
# | a recording inside a recording | the stream is already being written down | one graph, or two after each other |
# | allocating outside the pool, waiting for another stream (CUDA) | not repeatable | set it up in the warm-up |
#
# Random numbers are allowed: the graph draws new ones at each replay. And the error has the line in it:

# %%
try:
    emulated.record(attempts["x.sum().item()"], emulated.new_pool())
except cgkit.CgkitError as error:
    print(re.sub(r"/\S*ipykernel\S*py", "this notebook, line", str(error)))

# %% [markdown]
# What is *not* in that list is the dangerous half: what is recorded without a word and replays something else than you meant.
# You met all of it: the stale address, the frozen number, the frozen branch, the overwritten output. Notebook 09 hunts them
# in whole models.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Your turn
#
# `check` says right, nearly or wrong, and what is off. `hint("06-1")` gives a hint, `solution("06-1")` says where one stands.
# Put your answer in the place of `...`.
#
# ### 06-1 · Predict the numbers

# %%
question("06-1")

# %%
check("06-1", ...)

# %% [markdown]
# ### 06-2 · How many graphs?
# `FULL_DECODE_ONLY` records whole steps for decode batches and nothing else (notebook 07).

# %%
question("06-2")

# %%
check("06-2", ...)

# %% [markdown]
# ### 06-3 · Fix a stale-buffer bug

# %%
question("06-3")


# %%
def make_fast(function, example, platform):
    """Has two bugs: the first one shows at the second call."""
    graph, output = platform.record(lambda: function(example), platform.new_pool())

    def fast(x):
        example = x
        graph.replay()
        return output

    return fast

# %%
check("06-3", ...)  # yours in place of the three dots; as it stands: check("06-3", make_fast)

# %% [markdown]
# ### 06-4 · Make it recordable

# %%
question("06-4")

# %%
check("06-4", ...)

# %% [markdown]
# ### 06-5 · A graph wrapper of your own

# %%
question("06-5")

# %%
check("06-5", ...)

# %% [markdown]
# ## What comes next
# A graph is for one size. Which sizes, then, and what happens to a batch in between? **07 · Which graph?** And what does all
# of it take in memory? **08 · Memory.** `cgkit.reset()` frees every graph that was recorded here.

# %% tags=["stamp"]
from cgkit.measuring.stamp import stamp

print(stamp())
