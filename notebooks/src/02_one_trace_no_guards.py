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
# # 02 · One trace, no guards
#
# **The question.** A model is Python. A compiler and a recorded graph need a list of operators. How does one become the
# other, once, for every batch size, and what is risked by never looking again?
#
# **Afterwards you can**
# - say what a trace holds and what it has forgotten, and read a `TracedGraph`;
# - say what a *guard* is, and predict when `torch.compile` will compile again;
# - read the bytecode that Dynamo wrote, and run it without a guard before it;
# - say of a change to a model or a call whether it is followed, refused, or silently not noticed;
# - make a model traceable for any number of tokens, and find what it assumed about that number.
#
# **Time**: 45 minutes to read; the cells run in about a minute on two cores.
# **Needs**: cgkit. No GPU and no C++ compiler: everything here is about the host, that is, about what Python does before
# any kernel starts. It is measured on the CPU of the machine that runs it, also where there is a GPU.
#
# **What the article claims here**: that the decorator finds out by itself which sizes change; that the first call makes the one
# and only trace; that guards cost tens of microseconds a call and can go; that running the bytecode directly is what makes
# the hot path fast. Each is measured below, and a card says what came out.

# %% tags=["setup"]
# Only Colab needs this cell: it fetches cgkit there. Anywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    get_ipython().system("test -d /content/cgkit || git clone -q --depth 1 -b main https://github.com/OWNER/NAME /content/cgkit")
    get_ipython().run_line_magic("cd", "-q /content/cgkit/notebooks")
    get_ipython().run_line_magic("run", "colab.py")

# %%
import dis

import pandas as pd
import torch
from torch import nn

import cgkit
from cgkit import plotting
from cgkit.exercises import check, hint, question, solution
from cgkit.plotting import Picture, trace_charts

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1 · What a trace is
#
# This is a model as anybody would write it: a loop over layers, an `if`, a number that is kept as an attribute.


# %%
class Net(nn.Module):
    def __init__(self, layers=3, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scale = 2.0
        self.residual = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = torch.relu(layer(x))
            x = x + y if self.residual else y
        return x * self.scale


net, x = Net(), torch.ones(4, 8)

# %% [markdown]
# Called as usual (*eager*), Python runs `forward` line by line, at every call. The loop, the `if`, the search for
# `self.layers[1].weight`, the call of `layer.__call__` with its hooks: all of that happens again for each token of each
# answer, and none of it computes anything. What computes are the few torch operators in between.
#
# *Tracing* separates the two. **Dynamo**, the front half of `torch.compile`, takes the compiled Python of `forward` (its
# *bytecode*, the instructions that Python's interpreter executes) and goes through it instruction by instruction, with
# stand-ins for the tensors. A stand-in (a *fake tensor*) has a shape, a dtype and a device, and no data. Python's own
# work is really done: the loop runs, the `if` is decided. Operators on stand-ins are not computed but written down.
#
# **What do you expect**: how many operators are written down for three layers? And what is left of the loop and of the `if`?

# %% slideshow={"slide_type": "subslide"}
traced = cgkit.trace(net, x)
traced

# %% [markdown]
# Ten: `linear`, `relu` and `add` three times, and `mul`. The loop is *unrolled*, the `if` is gone, and so is its other
# branch. A graph like this is called an **FX graph**; each node knows which line of ours it comes from:

# %%
calls = traced.to_frame().query("role == 'call'")
calls[["node", "operator", "reads_from", "shape", "constants", "source"]].set_index("node")

# %% [markdown]
# Look at `constants` in the last row: `self.scale` was 2.0 when the model was traced, and 2.0 is what the graph holds. At
# `shape`: the first number is no number but a symbol (`s...`), the token count. Section 5 is about it.
#
# The weights are not in the graph. They are **inputs** of it, like `x`:

# %%
rows = [(i.index, i.kind, i.source, ", ".join(i.shape)) for i in traced.inputs]
pd.DataFrame(rows, columns=["input", "kind", "fetched from", "shape"]).set_index("input")

# %% [markdown]
# That is why equal layers will have equal graphs (notebook 03), and why a weight may be replaced later. Somebody has to fetch
# these inputs from the model at each call. That somebody is bytecode which Dynamo writes; section 3 shows it.
#
# The trace computed nothing, and it can be called like the model:

# %%
with torch.no_grad():
    print(
        "same as eager, at 1, 4 and 33 tokens:",
        [torch.equal(traced(t), net(t)) for t in map(torch.ones, [(1, 8), (4, 8), (33, 8)])],
    )

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Where it ends: a graph break
# A branch on what a tensor *contains* cannot be decided, since a stand-in contains nothing. Plain `torch.compile` then ends the
# graph there, lets Python decide, and begins a second graph after it: a *graph break*. **What do you expect** from cgkit?


# %%
class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        if y.sum() > 0:
            y = y * 2
        return y + 1


graphs = []
torch.compile(Breaks(), backend=lambda graph, _: (graphs.append(graph), graph.forward)[1])(x)
print(f"torch.compile: {len(graphs)} graphs\n")
try:
    cgkit.trace(Breaks(), x)
except cgkit.CgkitError as error:
    print(
        "\n".join(line for line in str(error).splitlines() if "Hint" not in line and "ipykernel" not in line)
    )

# %% [markdown]
# An engine wants one graph, because everything after this (splitting, recording) is done to *the* graph. So it asks for
# `fullgraph=True`, and a break is an error with a line number. (Notebook 09 comes back to what a silent break would cost.)
#
# ## 2 · Guards
#
# The graph above is right only as long as the world is as it was: three layers, `residual` true, `scale` 2.0, `x` a float32
# matrix of width 8. `torch.compile` is made for any program, so it must not believe that. For everything that Dynamo looked at
# it writes a **guard**, a small check, and evaluates all guards at *every call*. If one fails, the function is traced again.
#
# **What do you expect**: how many guards for `Net`, with its ten operators?

# %% slideshow={"slide_type": "subslide"}
guards = pd.DataFrame(traced.guards, columns=["what is looked at", "kind", "key"])
print(f"{len(guards)} guards for {len(traced.operators)} operators")
guards[guards["what is looked at"].str.contains("self|'x'")].drop(columns="key").drop_duplicates("kind").head(
    12
)

# %% [markdown]
# `CONSTANT_MATCH` on `residual`, `TENSOR_MATCH` on each weight and on `x`, and many that nobody would think of: that no
# layer got a forward hook, that `torch.relu` is still the same function. They grow with the number of layers.
#
# ### When is it traced again?
# A service gets batches of these sizes, in this order. The graphs are not compiled here, only counted.
#
# **What do you expect**: how many graphs has `torch.compile` made after the last one?

# %% tags=["parameters"]
SIZES = [4, 4, 7, 9, 1, 1, 30, 3]

# %% slideshow={"slide_type": "subslide"}
from cgkit.measuring.retraces import count_traces

counted = count_traces(net, [(torch.ones(size, 8),) for size in SIZES])
Picture(trace_charts.traces_by_call(counted, plotting.About("Net, 3 layers")))

# %% [markdown]
# Why:
# - `dynamic=False`: each new size is a new graph. That is what the guards on shapes ask for.
# - plain `torch.compile` believes the first size. The second size that differs teaches it that the dimension changes: it traces
#   once more, with a symbol. From then on other sizes fit. But 1 does not: **0 and 1 are always traced for themselves**
#   (section 5 says why).
# - `dynamic=True` begins with the symbol, and still makes one for 1.
# - `cgkit.trace` makes one graph, and nothing can make a second.
#
# Every step of a staircase is a compilation in the middle of service: seconds on a real model, and all requests wait.
# The knob: change the sizes and see.

# %%
from ipywidgets import Text, interact


def staircase(sizes):
    calls = [(torch.ones(int(size), 8),) for size in sizes.split()]
    return Picture(trace_charts.traces_by_call(count_traces(net, calls), plotting.About("Net, 3 layers")))


_ = interact(staircase, sizes=Text("8 16 8 1 16", continuous_update=False))

# %% tags=["hide-input"]
last = counted.groupby("way")["graphs"].max()
cgkit.claim(
    "why-not-recompiles",
    measured=f"{len(SIZES)} calls: torch.compile made {last['torch.compile']} graphs, cgkit.trace {last['cgkit.trace']}",
    outcome="confirmed" if last["torch.compile"] > last["cgkit.trace"] else "wrong",
    why="each graph beyond the first is traced and compiled during a call",
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ### What do guards cost when they hold?
# To see the guards alone, put a graph that does nothing in the place of the real one, so that only the way to it is timed. Three ways
# to the same empty graph:
# - `torch.compile`: guards are checked, then Dynamo's bytecode runs;
# - `torch.compile` told to keep no guard (*guards filtered out*; today's vLLM);
# - the bytecode alone, taken out of Dynamo (the article's way).
#
# **What do you expect**: how do they grow with the number of layers, and is dropping the guards all that there is to gain?

# %%
from cgkit.measuring.bench_dedup import toy_example, toy_llama
from cgkit.measuring.dispatch_cost import BYTECODE, FILTERED, GUARDS, dispatch_cost

LAYERS = (2, 6, 12)
costs = [dispatch_cost(toy_llama(n, width=16), *toy_example()).assign(layers=n) for n in LAYERS]
cost = pd.concat(costs, ignore_index=True)
Picture(trace_charts.dispatch(cost, plotting.About("a small Llama", device="this machine's CPU")))

# %%
us = cost[cost["layers"] == LAYERS[-1]].set_index("way")["us"]
print(f"{LAYERS[-1]} layers, {cost['guards'].max()} guards:", {way: f"{t:.0f} us" for way, t in us.items()})

# %% [markdown]
# Three things lie between a call and its graph. The guards (the first line against the second). `torch.compile`'s own entry,
# which switches modes on and off around each call (the second against the third). And fetching the weights from the model, which
# all three do. The bytecode alone saves the first two. How much the first is depends on torch: 2.11 passes over the guards of modules
# that nobody has touched since, so that there they cost next to nothing; 2.13 asks all of them. (The values of notebook 01 lie in a list,
# and are asked one by one in both.)

# %% tags=["hide-input"]
wide = cost.pivot(index="layers", columns="way", values="us")
guard_us = wide[GUARDS] - wide[FILTERED]
at_80 = guard_us.iloc[-1] + (80 - LAYERS[-1]) * (guard_us.iloc[-1] - guard_us.iloc[0]) / (
    LAYERS[-1] - LAYERS[0]
)
cgkit.claim(
    [
        dict(
            id="dispatch-guard-cost",
            measured=f"{guard_us.iloc[-1]:.0f} us a call for {LAYERS[-1]} small layers; along a straight line {at_80:.0f} us for the article's 80",
            outcome="confirmed" if 10 <= at_80 < 100 else "wrong",
            why="it is no fixed number: each layer brings its own guards. For real models vLLM's developers measured 310 to 840 us (PR #11217)",
        ),
        dict(
            id="why-not-guards",
            measured=f"{us[GUARDS]:.0f} us with guards, {us[BYTECODE]:.0f} us without, at every call",
            outcome="confirmed" if us[GUARDS] > us[BYTECODE] else "wrong",
        ),
        dict(
            id="dispatch-usual-chain",
            measured=f"{last['torch.compile']} graphs for sizes {SIZES}: a call whose guards fail is traced again, one whose guards hold is not",
            outcome="confirmed" if last["torch.compile"] > 1 else "wrong",
        ),
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3 · The bytecode, and how to run it without guards
#
# Python keeps the instructions of a function in its `__code__`. Dynamo does not change our function. It writes a *new* code
# object, and has the interpreter run that one when the guards hold. A **hook** is told of each: `hook(old_code, new_code)`. This is
# what was handed over for `Net`. (Where it can be decompiled, depyf shows it as Python; else it is a listing.)

# %%
from cgkit.measuring.explain import Bytecode
from cgkit.tracing import decompile

two_codes = Bytecode(*decompile(traced.original_code), *decompile(traced.code))
two_codes

# %% [markdown]
# Read it from the inside: `__compiled_fn_...` is the graph. It gets the weights, one attribute after the other, the size of `x` as a
# number, and `x`. What comes out is returned. No loop, no `if`, and no guard: guards stand *before* this code, in Dynamo,
# and not in it. So whoever has this code object can run it, and nobody asks anything. That is the whole trick.
#
# The article's engine puts it into the class: `Net.forward.__code__ = new_code`, call, and put the old one back. Python allows
# that if both codes take the same arguments and the same outer variables, since these are what the function hands to its code. (Outer
# variables are those that a nested function shares with the one around it. Python calls them *free* in the inner one and *cell*
# variables in the outer one.) Local variables are the code's own affair:

# %%
old, new = traced.original_code, traced.code
layout = {
    "arguments": (old.co_varnames[: old.co_argcount], new.co_varnames[: new.co_argcount]),
    "cell variables": (old.co_cellvars, new.co_cellvars),
    "free variables": (old.co_freevars, new.co_freevars),
    "local variables": (old.co_varnames, new.co_varnames),
}
pd.DataFrame(
    [(what, a, b, a == b) for what, (a, b) in layout.items()], columns=["", "before", "after", "equal"]
)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### What goes wrong with the swap
# `Net.forward` belongs to the *class*. Here the code of a model with two layers is in place, as it is during a call, and a second
# instance with three layers is called (in an engine: from another thread). **What do you expect?**

# %%
from cgkit.tracing import TorchCompileWrapperWithCustomDispatcher

torch.manual_seed(0)  # with other weights the third layer can give zeros, and leaving it out changes nothing
two_layers, three_layers = Net(2), Net(3)
dispatcher = TorchCompileWrapperWithCustomDispatcher(two_layers)
dispatcher(x)  # the first call compiles, and the hook keeps the code
own_code = Net.forward.__code__
with torch.no_grad():
    expected = three_layers(x)
    Net.forward.__code__ = dispatcher.compiled_codes[0]  # as the article does
    swapped = three_layers(x)
    Net.forward.__code__ = own_code
    only_two = (lambda y: [y := y + torch.relu(layer(y)) for layer in three_layers.layers[:2]][-1])(x) * 2
print(
    "as without the swap:",
    torch.allclose(swapped, expected),
    "| what its first two layers give:",
    torch.allclose(swapped, only_two),
)

# %% [markdown]
# The third layer was left out, and nothing said so. cgkit therefore gives each instance a copy of `forward` with a code object of its
# own, and makes a *function* of Dynamo's code. No class is touched, and a call has one step instead of three.

# %% tags=["hide-input"]
same = {what: a == b for what, (a, b) in layout.items()}
wrong_by_swap = not torch.allclose(swapped, expected)
cgkit.claim(
    [
        dict(
            id="dispatch-bytecode-hook",
            measured=f"{len(dispatcher.compiled_codes)} code object after the first call",
            outcome="confirmed" if len(dispatcher.compiled_codes) == 1 else "wrong",
        ),
        dict(
            id="dispatch-swap-code",
            measured=f"with the class's code swapped, another instance is {'silently wrong' if wrong_by_swap else 'right'}",
            outcome="overtaken",
            why="vLLM can still do it, but has Dynamo drop the guards itself where it can (guard_filter_fn); cgkit calls the code as a function of its own",
        ),
        dict(
            id="dispatch-same-layout",
            measured=", ".join(f"{k}: {'equal' if v else 'not equal'}" for k, v in same.items()),
            outcome="confirmed" if list(same.values())[:3] == [True] * 3 else "wrong",
            why="local variables may differ, and need not be equal",
        ),
        dict(
            id="dispatch-three-steps",
            measured="one step here: a function that holds the new code is called",
            outcome="overtaken",
            why="without the swap there is nothing to swap back",
        ),
        dict(
            id="dispatch-heading",
            measured=f"{us[BYTECODE]:.0f} us to the graph by the bytecode, {us[GUARDS]:.0f} us by torch.compile, {LAYERS[-1]} layers",
            outcome="confirmed" if us[BYTECODE] < us[GUARDS] else "wrong",
        ),
        dict(
            id="debug-bytecode",
            measured=f"shown above, by {two_codes.how_after}: {len(two_codes.after.splitlines())} lines, {len(list(dis.get_instructions(new)))} instructions",
            outcome="confirmed" if "__compiled_fn" in two_codes.after else "wrong",
        ),
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4 · What is assumed now
#
# A guard that is dropped becomes an **assumption**. An engine can drop them because it makes all calls itself, and makes them alike:
# token ids, positions, buffers of its own; only the number of tokens changes. (More does change from step to step: which token
# belongs to which request, how long each request is. But that is no argument. Attention is an operator that Dynamo does not look
# into, and fetches it at each step from a note beside the call, the *forward context*: notebook 03.) Whoever does not keep to that gets no error
# from the bytecode. So it is worth knowing what happens to a change. There are three fates:
# - **followed**: the bytecode fetches it anew at each call, so the trace does what the changed model does;
# - **refused**: it is an argument, and cgkit compares arguments with the first call (about a microsecond), and raises;
# - **unnoticed**: Dynamo made it part of the graph. The trace goes on with what was.
#
# **What do you expect** of each of these?
#
# | change after the trace | followed, refused, unnoticed? |
# |---|---|
# | 1 another tensor in the place of a weight | |
# | 2 a weight changed in place | |
# | 3 `net.scale = 3.0` | |
# | 4 `net.residual = False` | |
# | 5 nine tokens instead of four | |
# | 6 a forward hook on the first layer | |
# | 7 the optional argument `bias` given, which was None | |
# | 8 `power=3`, which was 2 | |


# %%
class WithOptions(Net):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None, power: int = 2) -> torch.Tensor:
        y = super().forward(x)
        return y**power if bias is None else (y + bias) ** power


CHANGES = {
    "1 another weight tensor": lambda net, args: setattr(net.layers[0], "weight", nn.Parameter(torch.eye(8))),
    "2 a weight in place": lambda net, args: net.layers[0].weight.mul_(3),
    "3 net.scale = 3.0": lambda net, args: setattr(net, "scale", 3.0),
    "4 net.residual = False": lambda net, args: setattr(net, "residual", False),
    "5 nine tokens": lambda net, args: (torch.ones(9, 8),),
    "6 a hook on a layer": lambda net, args: net.layers[0].register_forward_hook(
        lambda module, given, out: out * 0
    ),
    "7 bias is given": lambda net, args: (args[0], torch.ones(8)),
    "8 power=3": lambda net, args: (args[0], None, 3),
}

# %% slideshow={"slide_type": "subslide"}
from cgkit.measuring.after_trace import after_trace

fate = {what: after_trace(WithOptions(), (x,), change) for what, change in CHANGES.items()}
pd.DataFrame(fate.items(), columns=["change after the trace", "fate"]).set_index("change after the trace")

# %% [markdown]
# Tensors that the model holds are followed (1, 2), because they are inputs. Numbers, flags, the structure of the model and its hooks are
# frozen (3, 4, 6). What a call brings is compared (7, 8). (Should you see `without effect`, the *model* gave what it
# gave before, which says nothing of the trace. With random weights that can happen to the second: if what the first layer gives is negative
# before and after the change, `relu` makes zeros of both.) This is how a refusal reads:

# %%
optional = cgkit.trace(WithOptions(), x)
try:
    optional(x, bias=torch.ones(8))
except cgkit.CgkitError as error:
    print(type(error).__name__, "-", error)

# %% [markdown]
# So `None` for one call means `None` for life: the two ways through `if bias is None` are two graphs, and there is only one.
# The fate *unnoticed* is the dangerous one. Rule: change nothing of a model after its first call but its weights. If a switch is needed,
# trace one instance for each position, or make the number a tensor.
#
# `cgkit.doctor` lists every guard that is gone, and tries the ones that can be tried:

# %%
report = cgkit.doctor(net, x)
report.guards_frame().query("kind in ('CONSTANT_MATCH', 'TENSOR_MATCH')").iloc[:, :2]

# %% tags=["hide-input"]
frozen = [what for what, one in fate.items() if one == "unnoticed"]
cgkit.claim(
    [
        dict(
            id="dispatch-why-safe",
            measured=f"{len(frozen)} of {len(fate)} changes go unnoticed ({'; '.join(frozen)}); another token count is {fate['5 nine tokens']}",
            outcome="confirmed" if fate["5 nine tokens"] == "followed" and frozen else "wrong",
            why="it is safe for whoever keeps to it; nothing enforces it, so cgkit checks the arguments of each call",
        ),
        dict(
            id="decorator-none-forever",
            measured=f"an argument that was None and is given later: {fate['7 bias is given']}",
            outcome="confirmed" if fate["7 bias is given"] == "refused" else "wrong",
            why="cgkit says so at the call; the article leaves it to the caller",
        ),
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5 · One graph for every number of tokens
#
# ### Which dimensions change?
# Nobody can tell from one example whether 4 is *the* size or *a* size. An engine uses a convention: whatever is annotated as a
# tensor has the tokens in dimension 0. The annotation `x: torch.Tensor` in `forward` was not decoration:

# %%
from cgkit.tracing import infer_dynamic_arg_dims

infer_dynamic_arg_dims(WithOptions.forward)

# %% [markdown]
# (`power: int` is no tensor. Something else? `cgkit.trace(..., dynamic_arg_dims={"x": 1})`.) Those dimensions are *marked* before the
# trace: Dynamo gives each a **symbol** instead of a number. Shapes are then computed with symbols: `(s77, 8)` times `(8, 8)` is
# `(s77, 8)`, and concatenating two gives `(2*s77, 8)`. The symbol goes into the graph as one more input (the `symint` above).
#
# ### What forces a symbol to be a number
# Anything in Python that needs to know it. **What do you expect** of these three?


# %%
class ViewWithNumber(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(4, 2, 4).sum(1)


class LoopOverTokens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[i] / (i + 1) for i in range(x.shape[0])])


class BranchOnSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] <= 16 else x / x.shape[0]


# %% slideshow={"slide_type": "subslide"}
for model in (ViewWithNumber(), LoopOverTokens(), BranchOnSize()):
    try:
        print(f"{type(model).__name__}: traced; dropped guards: {cgkit.trace(model, x).dropped_guards}")
    except cgkit.CgkitError as error:
        reason = next(line for line in str(error).splitlines() if "specialized" in line)
        print(f"{type(model).__name__}: {type(error).__name__}: {reason.strip(' -').split('. ')[0]}")

# %% [markdown]
# The first two need the number itself: the symbol would have to be 4 (it is *specialised*), and since we said that it changes, Dynamo
# refuses. Use `x.shape[0]` or `-1` for the number, and whole-tensor operators for the loop.
#
# The third is the one to fear. A comparison needs only a yes or no. Dynamo answers for the example, writes a guard for it, goes on, **and
# the guard is dropped**. **What do you expect** at 40 tokens?

# %%
branchy = cgkit.trace(BranchOnSize(), x)
many = torch.ones(40, 8)
print("model:", BranchOnSize()(many)[0, 0].item(), " trace:", branchy(many)[0, 0].item())
branchy

# %% [markdown]
# A wrong number, and no error. The trace says what it assumed, in its last line; `.dropped_guards` has it as text. The doctor
# goes further: it runs the model and the trace at sizes that break the assumption, and tells whether it matters:

# %%
print(cgkit.doctor(BranchOnSize(), x).errors[0].what)
print([broken.split(", at ")[0] for broken in cgkit.doctor(BranchOnSize(), x).would_fail(many)])

# %% [markdown] slideshow={"slide_type": "slide"}
# ### Why 0 and 1 are special
# A size of 1 *broadcasts*: `(1, 8) + (5, 8)` is allowed, `(4, 8) + (5, 8)` is not. Whether a dimension is 1 also decides whether a
# tensor counts as contiguous. Asking "is it 1?" at each operator would leave a guard at each. So Dynamo decides once: 0 and 1 are
# numbers, and a symbol stands for **2 and more**. The first batch of a service is often one request, so an engine must not trace at 1.
# **What do you expect** if the example has one token?

# %%
first_of_one = cgkit.trace(net, torch.ones(1, 8))
print(
    first_of_one.enlarged,
    "|",
    [torch.equal(first_of_one(t), net(t)) for t in (torch.ones(1, 8), torch.ones(7, 8))],
)

# %% [markdown]
# cgkit traces it as 2 (only the shape matters), and says so. The graph for 2 and more gives the right result at 1 as well, as long as
# no Python asks. If it does, no guard is even written, because for Dynamo the answer is known:


# %%
class AsksForOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 100 if x.shape[0] == 1 else x * 2


asks, one = cgkit.trace(AsksForOne(), x), torch.ones(1, 8)
print(
    "model:",
    AsksForOne()(one)[0, 0].item(),
    " trace:",
    asks(one)[0, 0].item(),
    " dropped guards:",
    asks.dropped_guards,
)

# %% [markdown]
# Silently wrong, and not in the list. Do not branch on the number of tokens.

# %% tags=["hide-input"]
class Served(Net):
    """A class of its own: decorating ``Net`` itself would change the class under the cells above."""


decorated = cgkit.support_torch_compile(Served)
cgkit.claim(
    [
        dict(
            id="decorator-annotations",
            measured=f"WithOptions: {infer_dynamic_arg_dims(WithOptions.forward)}",
            outcome="confirmed"
            if infer_dynamic_arg_dims(WithOptions.forward) == {"x": (0,), "bias": (0,)}
            else "wrong",
        ),
        dict(
            id="decorator-mro",
            measured=f"here the bases stay as they are: {[cls.__name__ for cls in decorated.__mro__[:2]]}",
            outcome="overtaken",
            why="cgkit gives each instance a dispatcher of its own instead of a common base class, since the swap in the class is what mixed instances up",
        ),
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6 · All of it in one line: the decorator, and its levels
#
# `@cgkit.support_torch_compile` above a model class does what was done by hand here, at the first call. How far it goes is one
# number, the article's *level*. To see the levels, count how often Dynamo runs (the hook of section 3 is told of each time) over calls
# of 4, 4, 7 and 9 tokens. What comes after Dynamo is switched off. **What do you expect** at each level?

# %% slideshow={"slide_type": "subslide"}
from cgkit.measuring.retraces import dynamo_runs_by_level

levels = dynamo_runs_by_level(net, [(torch.ones(tokens, 8),) for tokens in (4, 4, 7, 9)])
levels

# %% [markdown]
# - 0: eager.
# - 1: plain `torch.compile`, guards and all: the second size makes it trace again, and no call after that.
# - 2: one trace, no guards, compiled whole.
# - 3: the same, split into pieces (the default, and the subject of the next notebooks).

# %% tags=["hide-input"]
runs = levels.set_index("level")["dynamo_runs"]
default = cgkit.CompilationConfig()
cgkit.claim(
    [
        dict(
            id="levels-heading",
            measured=f"Dynamo ran {runs.to_dict()} times by level",
            outcome="confirmed" if runs[0] == 0 < runs[3] else "wrong",
        ),
        dict(
            id="levels-four",
            measured=f"{len(levels)} levels: {', '.join(levels['name'])}",
            outcome="confirmed" if len(levels) == 4 else "wrong",
        ),
        dict(
            id="levels-default-3",
            measured=f"the default here: level {default.level.value}, {default.cudagraph_mode.name}",
            outcome="overtaken",
            why="as in the vLLM of the article; vLLM 0.33 calls the setting mode, keeps its strongest level as the default, and records FULL_AND_PIECEWISE",
        ),
        dict(
            id="levels-1-traces-each-call",
            measured=f"{runs[1]} Dynamo runs in 4 calls at level 1",
            outcome="confirmed" if runs[1] == 4 else "wrong",
            why="level 1 is plain torch.compile with its guards: it traces again only when one fails",
        ),
        dict(
            id="levels-2-traces-once",
            measured=f"{runs[2]} Dynamo run in 4 calls of 3 sizes",
            outcome="confirmed" if runs[2] == 1 else "wrong",
        ),
        dict(
            id="decorator-first-call",
            measured=f"{runs[3]} Dynamo run at level 3, in the first of 4 calls",
            outcome="confirmed" if runs[3] == 1 else "wrong",
        ),
        dict(
            id="decorator-heading",
            measured="support_torch_compile(Net) and a call: traced, and run by the kept bytecode",
            outcome="confirmed" if runs[3] == 1 else "wrong",
        ),
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What to remember
# - A trace keeps the operators and forgets the Python. Weights are inputs, numbers are frozen, sizes are symbols.
# - A guard is a check of something that the trace relied on. `torch.compile` checks all of them at each call and traces again if one fails.
# - Dynamo's bytecode has no guard in it. Run by itself it is fast, and right only for calls like the first.
# - What is dropped is assumed: arguments are compared, weights are followed, everything else is frozen. A branch on the number of
#   tokens is silently wrong.
#
# ## Exercises
# Put your answer in the place of `...`. `hint("02-1")` gives a hint, `solution("02-1")` says where the solution stands.
#
# **1 · Predict a counter** (section 2)

# %%
question("02-1")

# %%
check("02-1", ...)

# %% [markdown]
# **2 · Followed, refused, unnoticed** (section 4). The model and the changes:

# %%
from cgkit.exercises import nb02
from cgkit.exercises.source import source_of

print(source_of(nb02.Small), *nb02.CHANGES, sep="\n")

# %%
question("02-2")

# %%
check("02-2", ...)

# %% [markdown]
# **3 · Repair a model that has one size** (section 5)

# %%
print(question("02-3"), source_of(nb02.OneSize), sep="\n\n")

# %%
check("02-3", ...)

# %% [markdown]
# **4 · Put the guards back, those that matter** (sections 2 and 5)

# %%
print(question("02-4"), source_of(nb02.LongOrShort), sep="\n\n")

# %%
check("02-4", ...)

# %% [markdown]
# **5 · The dispatcher, by your own hand** (section 3)

# %%
print(question("02-5"), source_of(nb02.Switch), sep="\n\n")

# %%
check("02-5", ...)

# %%
hint("02-5"), solution("02-5")

# %% [markdown]
# ## What comes next
# The graph holds the whole step, attention included, and attention does not fit into a recording for any batch. **03 · Splitting the
# graph** cuts it into pieces. What a trace's result is worth when the process starts again is a matter of the cache: **04 · Compiling the
# pieces**. Writes to buffers, graph breaks and other traps: **09 · When it goes wrong**.
#
# `cgkit.reset()` frees what was made here.

# %% tags=["stamp"]
from cgkit.measuring.stamp import stamp

print(stamp())
