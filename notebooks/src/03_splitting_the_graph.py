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
# # 03 · Splitting the graph
#
# **The question.** A traced model is one graph, and a CUDA graph could record all of it at once. Why then cut it into pieces, where,
# and how, without changing what it computes?
#
# **Afterwards you can**
# - say why attention is not recorded, and show what happens if it is;
# - write an operator at which a graph can be cut, and say why it writes into a buffer that it is given;
# - cut a graph by hand, node by node, and say what each piece takes and gives;
# - predict how many pieces a model has, how many of them are compiled, and how many are different;
# - tell a good place to cut from a bad one.
#
# **Time**: 45 minutes to read; the cells run in about a minute on two cores.
# **Needs**: cgkit. No C++ compiler: the pieces stay uncompiled here. Without a GPU the recordings are **emulated**: the same rules,
# not the same speed; the cells say which it is.
#
# **What the article claims here**: attention is a cut because what it does changes while its output's shape does not; it must write into a buffer;
# one pass over the graph is enough, if the order stays; 80 layers give 161 pieces. Each is measured below.
#
# Three words. *Dynamo* goes through a model's Python once and gives one **graph** of operators (notebook 02). *Recording* (a CUDA graph)
# writes down the kernels that a piece of code starts, with their arguments and the addresses of their tensors, and *replaying*
# starts all of them at once, without any Python (notebook 06). *Compiling* makes faster kernels of a graph (notebook 04).

# %% tags=["setup"]
# Only Colab needs this cell: it fetches cgkit there. Anywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    get_ipython().system("test -d /content/cgkit || git clone -q --depth 1 -b main https://github.com/OWNER/NAME /content/cgkit")
    get_ipython().run_line_magic("cd", "-q /content/cgkit/notebooks")
    get_ipython().run_line_magic("run", "colab.py")

# %%
import warnings

import pandas as pd
import torch
from torch import nn

import cgkit
from cgkit import plotting
from cgkit.exercises import check, hint, question, solution
from cgkit.plotting import Picture, scan_charts

# %% tags=["parameters"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1 · What cannot be recorded
#
# Attention lets a new token look at the keys and values of all tokens before it. These were computed in earlier steps and lie in
# the *KV cache*. So attention has an input that is no tensor of the graph: **how many entries of the cache count** in this step. Here it
# is as an operator, small, with one head; keys and values are one tensor, and writing the new ones into it is left out.


# %%
STEP = {"length": 3}  # what the host knows of a step: so many entries of the cache are valid


def attend(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
    keys = cache[: STEP["length"]]  # (length, width)
    out.copy_(torch.softmax(q @ keys.T, -1) @ keys)


cgkit.register_op("attend", attend, mutates_args=["out"], namespace="course")


# %% [markdown]
# `register_op` makes it `torch.ops.course.attend`; section 2 says what that is good for. And a model around it: an embedding, and layers of
# norm, query, attention, output product, MLP.


# %%
class Layer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.q, self.o, self.mlp = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.register_buffer("cache", torch.randn(16, width))

    def forward(self, x):
        q = self.q(self.norm(x))
        out = torch.empty_like(q)
        torch.ops.course.attend(q, self.cache, out)
        x = x + self.o(out)
        return x + torch.relu(self.mlp(x))


class Decoder(nn.Module):
    def __init__(self, layers, width=8):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


ids = torch.arange(4, device=DEVICE)
two_layers = Decoder(2).to(DEVICE)
traced = cgkit.trace(two_layers, ids)
print(traced)

# %% [markdown]
# Let us record this model twice at length 3: the whole step at once (`FULL`), and only what lies between the attentions
# (`PIECEWISE`). Then replay both at length 3, and at length 9. **What do you expect**: which of the four results are right?


# %%
def recorded(split, mode):
    config = cgkit.CompilationConfig(compiler="eager", cudagraph_copy_inputs=False)
    compiled = cgkit.compile_pieces(split, config)
    return cgkit.capture(
        compiled, [4], mode=mode, make_inputs=lambda size: ids[:size], context=lambda key: None
    )


def replay(captured):
    mode, key = captured.dispatcher.dispatch(cgkit.BatchDescriptor(4))
    with cgkit.set_forward_context(None, cudagraph_runtime_mode=mode, batch_descriptor=key), torch.no_grad():
        return captured.run(ids)


# %% slideshow={"slide_type": "subslide"}
cut_at_attention = cgkit.split_graph(traced, ["course::attend"])
right = {}
for mode in ("FULL", "PIECEWISE"):
    STEP["length"] = 3
    captured = recorded(cut_at_attention, mode)
    for STEP["length"] in (3, 9):
        with torch.no_grad():
            right[mode, STEP["length"]] = torch.allclose(replay(captured), two_layers(ids), atol=1e-4)
print("emulated" if captured.platform.emulated else "real CUDA graphs")
pd.Series(right).rename_axis(["recorded", "length"]).unstack().rename(columns="at length {}".format)

# %% [markdown]
# `cache[:3]` was Python. While recording it ran once, and what was written down is "read three rows". The replay at length 9 reads three
# rows, and nothing is raised. In pieces, attention runs anew at each step, as Python, with the length of that step.
#
# (A whole step can be recorded if attention's kernels read the length from a *tensor*, at an address that stays, and do as much work as the
# longest case needs. Some attention kernels can. That is the mode `FULL`, in notebook 07; it needs an attention that was written so.)

# %% tags=["hide-input"]
cgkit.claim(
    "why-not-attention",
    measured=f"recorded whole at length 3, replayed at 9: {'right' if right['FULL', 9] else 'wrong, without an error'}; in pieces: {'right' if right['PIECEWISE', 9] else 'wrong'}",
    outcome="confirmed" if right["PIECEWISE", 9] and not right["FULL", 9] else "wrong",
    why="a Python number is frozen into the recording. An attention that takes its lengths from tensors can be recorded, and engines now do so for decode steps",
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2 · The hinge: an operator to cut at
#
# If Dynamo looked *into* attention, it would find Python on numbers that change. **What do you expect** in the graph, if the same function is
# called directly, without `register_op`?


# %%
class LooksInside(nn.Module):
    def forward(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        attend(q, cache, out)
        return out


q, cache = torch.ones(4, 8), torch.ones(16, 8)
inside = cgkit.trace(LooksInside(), q, cache, dynamic_arg_dims={"q": 0})
calls = inside.to_frame().query("role == 'call'")
calls[["operator", "constants", "shape", "source"]].set_index("operator")

# %% [markdown]
# Dynamo walked in, and the length is in the graph as a constant (`getitem` with `:9`, the last value of `STEP["length"]`). As an operator it is a **black
# box**: one node. But how can Dynamo go on behind a box that it may not open? It needs the *shape* of what comes out. For attention that
# is known without computing: it is the shape of the query. Whoever writes an operator says this with a *fake implementation*, a function
# that gets stand-ins (no data) and returns stand-ins of the right shape. Ours returns nothing, so there is nothing to say.
#
# That is what makes attention a good **hinge**: what it does changes from step to step, and what it looks like from outside does not.
#
# ### Where does the operator find the length?
# Not among the model's arguments. An argument of the model is an input of the graph: a Python number would be frozen into it, or be one
# more thing that a guard has to watch, and there are no guards any more. Nobody would notice a new length. So the length travels *beside*
# the call. Here that is the dictionary `STEP`. In an engine it is the **forward context**: before each step the engine writes down there
# which token belongs to which request, how long each is and where its blocks of the KV cache lie. Attention opens it each time
# it runs. Dynamo never sees it, because it never looks into the operator. Everything that changes from step to step, except the
# number of tokens, goes this way. (Later the context also carries which recorded graph the step takes: notebooks 06 and 07.)
#
# ### Why does it write into `out`?
# A natural attention *returns* a new tensor. Here is one (now it needs a fake implementation), with the same model around it:


# %%
def attend_new(q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(q)
    attend(q, cache, out)
    return out


cgkit.register_op("attend_new", attend_new, [], lambda q, cache: torch.empty_like(q), namespace="course")


class ReturningLayer(Layer):
    def forward(self, x):
        x = x + self.o(torch.ops.course.attend_new(self.q(self.norm(x)), self.cache))
        return x + torch.relu(self.mlp(x))


returning = Decoder(0).to(DEVICE)
returning.layers.append(ReturningLayer().to(DEVICE))
returning_split = cgkit.split_graph(cgkit.trace(returning, ids), ["course::attend_new"])

# %% [markdown]
# **What do you expect** when its pieces are recorded and replayed? Think of the piece *after* attention: from which address does it read?

# %% slideshow={"slide_type": "subslide"}
captured = recorded(returning_split, "PIECEWISE")
taken = [
    torch.empty(4, 8, device=DEVICE) for _ in range(200)
]  # others take memory meanwhile, as in a real step
moved = ""
try:
    replay(captured)
except cgkit.CgkitError as error:
    moved = type(error).__name__
    where = str(error).split(": ", 1)[1].split(" was recorded")[0]
    print(f"{moved}: {where} lies at another address than when it was recorded")

# %% [markdown]
# The piece after attention was recorded with the address that the result had then. At the next step the result lies elsewhere, and the
# replay would read the old place: whatever is left there. (A real CUDA graph says nothing about it, and computes garbage. cgkit compares
# addresses at each replay.) With `out`, the buffer is made by the piece *before* attention. That piece is recorded, so its buffers stay where
# they are: attention writes into it, the next piece reads from it, at one and the same address in all steps.
#
# The operator must *declare* what it writes (`mutates_args=["out"]`), or a compiler may move a read of `out` before the call. This
# is the operator's whole contract, as torch sees it:

# %%
op = torch.ops.course.attend.default
print(op._schema)
print("cut at, unless something else is said:", *cgkit.config.DEFAULT_SPLITTING_OPS)

# %% tags=["hide-input"]
constant = "9" in str(calls.loc[calls["operator"].str.contains("getitem"), "constants"].tolist())
once = traced.operators.count("course.attend")
cgkit.claim(
    [
        dict(
            id="splitting-fake-impl",
            measured=f"one graph with {once} nodes course.attend for 2 layers; without an operator the length is a constant of the graph: {constant}",
            outcome="confirmed" if once == 2 else "wrong",
        ),
        dict(
            id="splitting-why-attention",
            measured=f"lengths 3 and 9 give other results of one shape {tuple(two_layers(ids).shape)}; cut there, both are right: {right['PIECEWISE', 3] and right['PIECEWISE', 9]}",
            outcome="confirmed" if right["PIECEWISE", 3] and right["PIECEWISE", 9] else "wrong",
        ),
        dict(
            id="splitting-out-parameter",
            measured=f"schema: {op._schema}",
            outcome="confirmed" if op._schema.is_mutable else "wrong",
        ),
        dict(
            id="splitting-why-out",
            measured=f"an attention that returns its result: {moved or 'no error'} at the first replay; one that writes into out: right at each",
            outcome="confirmed" if moved == "MovedInputError" else "wrong",
        ),
        dict(
            id="splitting-default-ops",
            measured=f"{len(cgkit.config.DEFAULT_SPLITTING_OPS)} in cgkit, which has no form of attention that returns its result",
            outcome="overtaken",
            why="vLLM 0.33 lists 17 operators that are like attention, and by ns::name instead of ns.name",
        ),
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3 · The cut, node by node
#
# The graph is a list of nodes, in the order in which Python came by. Cutting means: give each node the number of its piece. The article's way fits in ten
# lines. Go through the nodes once; an operator to cut at gets a number of its own; what comes after it gets the next.


# %%
def number_nodes(graph, cut_at):
    piece, numbers = 0, {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):  # inputs and the result belong to no piece
            continue
        if str(node.target) in cut_at:
            numbers[node] = piece + 1
            piece += 2
        else:
            numbers[node] = piece
    return numbers


# %% [markdown]
# **What do you expect** for two layers: how many pieces, and to which one does `empty_like` belong, which makes attention's buffer?

# %% slideshow={"slide_type": "subslide"}
graph = traced.graph_module.graph
numbers = number_nodes(graph, ["course.attend"])
operator = traced.to_frame().set_index("node")["operator"]
rows = [(node.name, operator[node.name], piece, "attend" in node.name) for node, piece in numbers.items()]
scanned = pd.DataFrame(rows, columns=["node", "operator", "piece", "splitting"])
Picture(scan_charts.scan(scanned, plotting.About("two layers")))

# %% [markdown]
# Five pieces: 0, 2 and 4 can be recorded; 1 and 3 hold one attention each. `empty_like` stands before the cut, so the buffer is made in a
# recorded piece, which is what section 2 asked for. Step through the scan yourself:

# %%
from ipywidgets import IntSlider, interact

slider = IntSlider(8, 0, len(scanned), description="scanned", continuous_update=False)
_ = interact(
    lambda upto: Picture(scan_charts.scan(scanned, plotting.About("two layers"), upto=upto)), upto=slider
)

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### The order must stay
# torch has a function that makes modules of such numbers: `torch.fx.passes.split_module`. Unless told otherwise, it sorts the pieces by who
# *takes a value* from whom. Now look at attention: its node returns nothing, and nobody takes anything from it. It writes. **What do you expect** if the
# pieces are sorted so?

# %%
from torch.fx.passes.split_module import split_module

single = cgkit.trace(Decoder(1).to(DEVICE), ids)
for keep in (True, False):
    module, of = single.graph_module, number_nodes(single.graph_module.graph, ["course.attend"])
    cut = split_module(module, None, lambda node: of[node], keep_original_order=keep)
    order = [node.name for node in cut.graph.nodes if node.op == "call_module"]
    print(f"keep_original_order={keep}:", *order, "<- attention last" * (order[-1] == "submod_1"))

# %% [markdown]
# Piece 2 reads the buffer before attention has written into it. A graph with writes in place is not only who-takes-from-whom: the **order is
# part of its meaning**. So nothing is moved.
#
# ### What the ten lines do not know
# A model may have two operators to cut at, one after the other, with only the second one's buffer between them. **What do you expect** of the
# ten lines, and what should come out?


# %%
class TwoInARow(nn.Module):
    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        first = torch.empty_like(x)
        torch.ops.course.attend(x, cache, first)
        second = torch.empty_like(x)
        torch.ops.course.attend(x, cache, second)
        return first + second


row = cgkit.trace(TwoInARow(), q, cache, dynamic_arg_dims={"x": 0})
print("the ten lines:", len(set(number_nodes(row.graph_module.graph, ["course.attend"]).values())), "pieces")
cgkit.split_graph(row, ["course::attend"])

# %% [markdown]
# The ten lines make five pieces, and the one in the middle holds nothing but `empty_like`: a recorded graph with no work in it, replayed at each step. cgkit's
# `split_graph` (as vLLM's does today) puts neighbouring operators into one piece, and the lone allocation into the recorded piece before.
#
# Two more rules, which you will meet in exercise 5 and in graphs that were not made by Dynamo: only tensors and numbers may cross a cut, so an
# element of a tuple (`getitem`) goes to the piece that made the tuple, wherever it is taken; and a tensor's size is read as a symbol.

# %% tags=["hide-input"]
alone = all(
    list(numbers.values()).count(piece) == 1 for node, piece in numbers.items() if "attend" in node.name
)
cgkit.claim(
    [
        dict(
            id="split-one-scan",
            measured=f"one pass numbers {len(numbers)} nodes in {len(set(numbers.values()))} pieces; each attention has a piece to itself: {alone}",
            outcome="confirmed" if alone and len(set(numbers.values())) == 5 else "wrong",
            why="today's engines let neighbouring operators share a piece, and give a lone allocation to the piece before",
        ),
        dict(
            id="split-original-order",
            measured=f"sorted by who takes from whom, the pieces run as {', '.join(order)}",
            outcome="confirmed" if order[-1] == "submod_1" else "wrong",
            why="attention writes into a buffer and returns nothing, so that only the order says that it comes before the reader",
        ),
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4 · The pieces
#
# `split_graph` gives an object that holds the pieces and shows itself. Open a piece to see its operators; pieces of one colour and letter are equal.

# %%
model = Decoder(4).to(DEVICE)
split = cgkit.split_graph(cgkit.trace(model, ids), ["course::attend"])
split

# %% [markdown]
# What does a piece need to be a thing of its own? A list of what it takes, and of what it gives. **What do you expect** for the piece between two
# attentions: what goes in, besides weights? What comes out, and why more than one tensor?

# %% slideshow={"slide_type": "subslide"}
edges = split.edges_frame()
crossing = edges[(edges["to_piece"] == "submod_2") | (edges["from_piece"] == "submod_2")]
crossing[["value", "role", "from_piece", "to_piece", "written_by", "shape", "source"]].replace(
    "l_self.*_", "(weight)", regex=True
)

# %% [markdown]
# Into `submod_2` go: the symbol of the batch size (always first: the next stages ask it which size to run), the buffer `out`, made by `submod_0` and
# *written by* `submod_1`, the residual `x`, and the weights of two half layers. Out come the next query, the next buffer, and the residual for the piece after.
#
# A piece in the middle is not a layer. It is the end of one (output product, MLP) and the beginning of the next (norm, query).
#
# The pieces are put together again by plain Python, generated once. Attention stands in it as a call; `del` lets go of what nobody needs any more:

# %%
import re

short = re.sub(
    r"l_self_modules_\w+?_parameters_weight_|l_self_modules_\w+?_buffers_cache_", "w", split.source
)
print("\n".join(line[:130] for line in short.splitlines()[:12]), "\n    ...")

# %% [markdown]
# Uncompiled, the pieces together are the model:

# %%
with torch.no_grad():
    print(
        "pieces equal model, at 1, 4 and 9 tokens:",
        [torch.equal(split(t), model(t)) for t in (ids[:1], ids, torch.arange(9, device=DEVICE))],
    )

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5 · How many?
#
# **What do you expect** for *L* layers: how many pieces, how many of them can be recorded, and how many of those are *different*?

# %% slideshow={"slide_type": "subslide"}
counts = []
for layers in (1, 2, 4, 8, 80):
    deep = cgkit.split_graph(cgkit.trace(Decoder(layers), torch.arange(4)), ["course::attend"])
    frame = deep.to_frame()
    capturable = frame[frame["kind"] == "capturable"]
    counts.append(
        (layers, len(frame), len(capturable), len(frame) - len(capturable), capturable["content"].nunique())
    )
counts = pd.DataFrame(counts, columns=["layers", "pieces", "recorded", "attention", "different recorded"])
counts.set_index("layers")

# %% [markdown]
# *L* cuts make *L + 1* pieces between them: **2 L + 1** in all. And from two layers on only **three** of those that are recorded are different: the first (embedding, first
# query), the middle ones, and the last. For 80 layers the picture folds them:

# %%
print(deep)
deep.draw()

# %% tags=["hide-input"]
last = counts.set_index("layers").loc[80]
middle = capturable["content"].value_counts().max()
laws = [pieces == 2 * layers + 1 for layers, pieces in zip(counts["layers"], counts["pieces"])]
cgkit.claim(
    [
        dict(
            id="split-161",
            measured=f"80 layers: {last['pieces']} pieces; 2 L + 1 at every depth tried: {all(laws)}",
            outcome="confirmed" if last["pieces"] == 161 else "wrong",
        ),
        dict(
            id="split-81-80",
            measured=f"{last['recorded']} to compile and record, {last['attention']} with one attention each",
            outcome="confirmed" if (last["recorded"], last["attention"]) == (81, 80) else "wrong",
        ),
        dict(
            id="split-79-middle",
            measured=f"one first, {middle} equal ones in the middle, one last",
            outcome="confirmed" if middle == 79 else "wrong",
        ),
        dict(
            id="split-heading",
            measured=f"80 layers are cut in {deep.seconds:.1f} s, after a trace of {deep.traced.seconds:.1f} s",
            outcome="confirmed" if last["pieces"] == 161 else "wrong",
        ),
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ### What does "equal" mean?
# Two middle pieces, line by line, without the inputs. Look for what differs:

# %%
one, other = (
    pd.Series([line.text() for line in split.lines(name) if line.role == "call"])
    for name in ("submod_2", "submod_4")
)
pair = pd.DataFrame({"submod_2": one, "submod_4": other}).replace(
    r"l_self_modules_layers_modules_(\d)_modules_(\w+?)_parameters_weight_", r"layers.\1.\2", regex=True
)
pair.style.hide(axis="index")

# %% [markdown]
# Only *names*. And names are only there for us: `x_3` means "what that line up there gave". So take away the names. Say of each input *the place* of
# the line that made it. Take weights as inputs, since a piece does the same with other weights. Keep operators, constants, shapes and
# wiring. A hash of that is the piece's **content**; you will write it in exercise 4. cgkit has it as a column:

# %%
split.to_frame().set_index("piece")[["kind", "nodes", "inputs", "outputs", "content"]]

# %% [markdown]
# Equal pieces get equal hashes, and are compiled once (notebook 04). One constant is enough to keep two apart. **What do you expect** if the *second* layer's
# norm gets another epsilon: how many different recorded pieces now, and which one is new?

# %% slideshow={"slide_type": "subslide"}
model.layers[1].norm.eps = 1e-3
uneven = cgkit.split_graph(cgkit.trace(model, ids), ["course::attend"])
model.layers[1].norm.eps = 1e-5
contents = {
    name: each.to_frame().set_index("piece")["content"]
    for name, each in (("equal layers", split), ("second epsilon", uneven))
}
both = pd.DataFrame(contents).loc[[piece.name for piece in split.capturable]]
both.assign(changed=both["equal layers"] != both["second epsilon"])

# %% [markdown]
# Four: the second layer's norm stands in the piece *before* its attention, `submod_2`.
#
# ## 6 · Cutting elsewhere
#
# `splitting_ops` may name any operator. **What do you expect** of these choices, for four layers? What would each cost at every step, and is
# it right?

# %% slideshow={"slide_type": "subslide"}
CHOICES = {
    "nothing": [],
    "attention": ["course::attend"],
    "norms": ["aten::rms_norm"],
    "attention and norms": ["course::attend", "aten::rms_norm"],
    "every product": ["course::attend", "aten::linear"],
}


def cut_with(ops, layers=4):
    return cgkit.split_graph(cgkit.trace(Decoder(layers), torch.arange(4)), ops)


rows = []
for choice, ops in CHOICES.items():
    frame = cut_with(ops).to_frame()
    ours = frame[frame["kind"] == "capturable"]
    inside = "yes" if ours["operators"].str.contains("attend").any() else "no"
    rows.append((choice, len(ours), len(frame) - len(ours), ours["content"].nunique(), inside))
ways = pd.DataFrame(rows, columns=["cut at", "recorded", "between", "different", "attention recorded"])
Picture(scan_charts.ways_to_cut(ways, plotting.About("4 layers")))

# %%
ways.set_index("cut at")

# %% [markdown]
# - **nothing**: one piece, the cheapest step, and attention is inside the recording: wrong after the first step, as section 1 showed.
# - **attention**: what is needed, and no more.
# - **norms**: as many pieces, and attention is inside again. Cutting is no virtue in itself.
# - **attention and norms**, **every product**: right, and slow. Each piece between is Python again, each recorded one a launch of its own, and Inductor cannot
#   fuse across a cut (a norm with the product after it).
#
# How much is a launch? On an H200, for Llama-3.2-1B with its 17 recorded pieces:

# %%
from cgkit import recordings

host = recordings.find("h200-host-llama-3.2-1b")
if host is None:
    print("There is no recording of the host's time here.")
else:
    one = host.query("path == 'as traced' and batch == 1").set_index("part").loc["graph replays"]
    took = (
        f"{one['count']:.0f} replays take {one['step_us']:.0f} us of the host, {one['each_us']:.1f} us each"
    )
    print(f"recorded on an {one['device']}: {took}")

# %% [markdown]
# Choose for yourself. Which choice makes all middle pieces equal? Which makes the most pieces?

# %%
from ipywidgets import Dropdown

_ = interact(
    lambda cut_at, layers: cut_with(CHOICES[cut_at], layers).draw(),
    cut_at=Dropdown(options=list(CHOICES), value="attention and norms"),
    layers=IntSlider(2, 1, 6),
)

# %% [markdown]
# The same as a picture, for "attention and norms" and two layers:

# %%
cut_with(CHOICES["attention and norms"], 2).draw()

# %% [markdown] slideshow={"slide_type": "subslide"}
# ### Two traps
# **A name that matches nothing.** The ten lines of section 3 compare text. **What do you expect** if the name is written `course::attend` there, as torch
# itself writes it?

# %%
print("the ten lines:", len(set(number_nodes(graph, ["course::attend"]).values())), "piece(s)")
try:
    cgkit.split_graph(traced, ["course::atend"])
except cgkit.CgkitError as error:
    print(type(error).__name__, "-", error)

# %% [markdown]
# One piece, silently: everything is recorded, attention too. cgkit takes both ways of writing, and a name that the graph does not hold is an error.
#
# **An empty list.** There is nothing to cut, so `PIECEWISE` means nothing. What becomes of it?

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    empty = cgkit.CompilationConfig(splitting_ops=[], cudagraph_mode="PIECEWISE")
    print("mode:", empty.mode.name, *{str(w.message) for w in caught}, sep="\n")

# %% [markdown]
# ### On disk
# `debug_dump_path` makes the compile stage write down what was traced and cut, as Python that can be read (vLLM has the same). First look whether the number of pieces is
# what the layers promise, then what each piece became:

# %%
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
dumped = cgkit.compile_pieces(split, cgkit.CompilationConfig(compiler="eager", debug_dump_path=str(folder)))
files = sorted(path for path in folder.rglob("*") if path.is_file())
print(
    *[
        f"{path.relative_to(folder)}: {len(path.read_text().splitlines())} lines"
        for path in files
        if path.suffix in (".py", ".txt", ".html")
    ][:8],
    sep="\n",
)
dumped.to_frame()[["piece", "shape", "key", "shared_with"]]

# %% tags=["hide-input"]
text = "\n".join(path.read_text() for path in files if path.suffix == ".py")
named = len(set(re.findall(r"\bsubmod_\d+\b", text)))
cgkit.claim(
    [
        dict(
            id="splitting-empty-list",
            measured=f"cgkit: PIECEWISE with an empty list is {empty.mode.name}",
            outcome="overtaken",
            why="true of the article's version, which cgkit follows here with a warning; vLLM 0.33 makes it NONE, and only FULL_AND_PIECEWISE becomes FULL",
        ),
        dict(
            id="splitting-heading",
            measured="; ".join(
                f"{choice}: {recorded} recorded, {between} between"
                for choice, recorded, between in zip(ways["cut at"], ways["recorded"], ways["between"])
            ),
            outcome="confirmed" if ways["recorded"].nunique() > 1 else "wrong",
        ),
        dict(
            id="debug-graph-dump",
            measured=f"{len(files)} files; the Python among them names {named} pieces",
            outcome="confirmed" if named else "wrong",
        ),
        dict(
            id="debug-read-it",
            measured=f"4 layers: {len(split.pieces)} pieces = 2 x 4 + 1; {len(dumped.backends)} of them have a callable of their own, attention is called as it is",
            outcome="confirmed" if len(split.pieces) == 9 and len(dumped.backends) == 5 else "wrong",
        ),
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What to remember
# - Attention reads how long each request is. As Python it would be frozen into a recording, so it stays outside.
# - A good hinge is opaque, has an output of known shape, and writes into a buffer that the piece before it made.
# - The cut is one pass; nothing is moved, because writes make the order the meaning.
# - *L* layers: 2 *L* + 1 pieces, *L* + 1 recorded, three different. Equal means: the same once the names are gone.
#
# ## Exercises
# Put your answer in the place of `...`. `hint("03-1")` gives a hint, `solution("03-1")` says where the solution stands.
#
# **1 · Predict the pieces of a hybrid** (sections 4 and 5)

# %%
from cgkit.exercises import nb03
from cgkit.exercises.source import source_of

print(question("03-1"), source_of(nb03.Layer, nb03.Hybrid), sep="\n\n")

# %%
check("03-1", ...)

# %% [markdown]
# **2 · Choose where to cut** (sections 1 and 6)

# %%
print(question("03-2"), source_of(nb03.ThreeOperators, *nb03.IMPLEMENTATIONS.values()), sep="\n\n")

# %%
check("03-2", ...)

# %% [markdown]
# **3 · Stitch the pieces together** (section 4)

# %%
question("03-3")

# %%
check("03-3", ...)

# %% [markdown]
# **4 · Tell equal pieces from different ones** (section 5)

# %%
question("03-4")

# %%
check("03-4", ...)

# %% [markdown]
# **5 · Write split_graph** (section 3). It is tried on sixty random graphs. This is one:

# %%
from cgkit.exercises.random_graphs import random_graph

print(question("03-5"), random_graph(3), sep="\n\n")

# %%
check("03-5", ...)

# %%
hint("03-5"), solution("03-5")

# %% [markdown]
# ## What comes next
# The pieces are graphs and no kernels yet: **04 · Compiling the pieces**. How they are recorded: **06 · Recording and replaying a CUDA
# graph**. When the whole step may be recorded after all: **07 · Which graph?**
#
# `cgkit.reset()` frees what was recorded here.

# %% tags=["stamp"]
from cgkit.measuring.stamp import stamp

print(stamp())
