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
# # 05 · Graph passes and fusion
#
# **The question.** Inductor fuses what it knows. An engine knows more: what quantisation means, which operators write in
# place. It puts that knowledge into *graph passes*, which change the graph while Inductor works. What do they change, and is
# it still worth it?
#
# **Afterwards you can**
# - read a pass's report, and say from the diff what was matched and what it became;
# - predict how often each fusion matches in a Llama of *L* layers;
# - say what auto-functionalisation does to an operator that writes in place, and what it costs today;
# - write a pass of your own in ten lines;
# - decide whether a layer should be a hand-written operator or plain torch code, and from which numbers.
#
# **Time**: 45 minutes to read; the cells run in about two minutes on two cores.
# **Needs**: cgkit and a C++ compiler (without one the passes are shown as they are, and what they do to kernels is not measured); no
# GPU. What only a GPU can show is read from a recording, whose title says "recorded on ...". What was compiled is kept: a second run,
# or one after `cgkit cache unpack`, does not wait for it again.
#
# A *pass* is a function that takes a graph, changes it, and says how many places it matched. Ours stand in Inductor's
# **post-grad** hook: the graph is functional there (no operator writes into its inputs), decomposed into small operators, and
# Inductor's own patterns have been applied. After it comes Inductor's lowering, which decides about kernels.

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

import cgkit
from cgkit import recordings
from cgkit.compiling.passes import functionalization_cost, preview_passes
from cgkit.kernels.custom_op import apply_custom_ops
from cgkit.plotting import compile_charts
from cgkit.serving.llama import PRESETS
from cgkit.serving.llama_fp8 import quantize
from cgkit.serving.weights import build_model, random_weights

# %% [markdown]
# The passes are for **FP8**: numbers of eight bits, so that a matrix product reads half the bytes of bfloat16. Weights are
# quantised once. Activations are quantised before *every* product: divide by a scale, clamp to ±448, convert. That is a
# little work on a lot of data, four times a layer, always right after a norm, an activation or attention. So the wish:
# let the kernel that wrote the data quantise it on the way out.
#
# A Llama of two layers with random weights, quantised in two ways: with a fixed scale (*static*), and with a scale for each
# token, computed at every step.

# %%
shape = PRESETS["tiny-llama"].scaled(num_hidden_layers=2)
plain = build_model(shape, random_weights(shape, torch.bfloat16), dtype=torch.bfloat16)
fp8, per_token = quantize(plain, "static"), quantize(plain, "per_token")
ids = torch.arange(8)


def split_of(model, custom_ops=("none",), splitting_ops=None):
    """The model traced with these forms of its layers, and split ([]: not cut at all)."""
    apply_custom_ops(model, cgkit.CompilationConfig(custom_ops=custom_ops))
    with cgkit.set_forward_context(None):
        traced = cgkit.trace(model, ids, ids, dynamic_arg_dims={"input_ids": 0, "positions": 0})
    return cgkit.split_graph(traced, splitting_ops)


pieces = split_of(fp8)
pieces

# %% [markdown]
# `preview_passes` takes every piece to the hook, runs the passes, keeps a report of each, and stops Inductor there: nothing is
# generated. Three passes at once; the fourth, `fix_functionalization`, comes with any fusion and is explained below.

# %%
reports = preview_passes(pieces, ["noop", "fuse_norm_quant", "fuse_act_quant"])
reports["submod_2"]

# %% [markdown]
# ## 1 · NoOpElimination: what does nothing, goes
#
# A pattern matches only if the graph looks exactly like it. A reshape to the shape that a tensor already has computes nothing,
# and still stands between a norm and its quantisation. By hand, on a graph full of such noise:

# %%
from torch.fx.experimental.proxy_tensor import make_fx

from cgkit.compiling.passes import NoOpElimination, run_pass

aten = torch.ops.aten


def noisy(x, y):
    x = aten.view(aten.view(x, [24]), [4, 6])  # a chain of reshapes that ends where it began
    x = aten.view(x, [-1, 6]) * 2  # an identity, its first size inferred
    x = aten.slice(x, 0, 0, 4)  # a slice of everything
    return aten.slice_scatter(x, y + 1, 0, 0, 4) * 3  # a full-width write: all of x is overwritten


noise = make_fx(noisy, tracing_mode="fake")(torch.ones(4, 6), torch.ones(4, 6))
cleared = run_pass(NoOpElimination(), noise.graph)
cleared

# %% [markdown]
# When are two sizes equal? Numbers are easy, and -1 means "what is left over". The third case is the one that matters here: the
# number of tokens is a *symbol*, and to compare it with `==` would ask for a number that nobody knows yet. The same symbol is
# the same size:

# %%
from cgkit.compiling.passes.graphs import same_sizes

values = [node.meta.get("example_value") for node in pieces.traced.graph_module.graph.nodes]
tokens = next(value for value in values if isinstance(value, torch.SymInt))  # how many rows: a symbol
equal = {"[4, 6] and [4, 6]": same_sizes([4, 6], [4, 6]), "[s, 6] and [s, 6]": same_sizes([tokens, 6], [tokens, 6])}
unequal = {"[4, 6] and [6, 4]": same_sizes([4, 6], [6, 4]), "[s, 6] and [2 s, 6]": same_sizes([tokens, 6], [tokens * 2, 6])}
print(equal, unequal)

# %%
cgkit.claim(
    [
        {
            "id": "passes-noop",
            "measured": f"{cleared.matched} no-ops removed from a graph of {len(cleared.before.splitlines())} lines",
            "outcome": cleared.matched > 0,
        },
        {
            "id": "passes-noop-three",
            "measured": f"a chain, an identity reshape, a slice of all and a full-width write: {cleared.matched} matches",
            "outcome": cleared.matched >= 4,
            "why": "The full-width write (slice_scatter) is a fourth case here.",
        },
        {
            "id": "passes-noop-equal-dims",
            "measured": f"equal: {equal}; not: {unequal}; the inferred -1 above was removed",
            "outcome": all(equal.values()) and not any(unequal.values()),
        },
    ]
)

# %% [markdown]
# And in the real Llama? The article says that the fusion *needs* it: without it, noise hides the pattern. cgkit warns, as
# vLLM does. **What do you expect**: how many no-ops are there in the traced Llama, and how many norms are still fused without the
# pass?

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    without = preview_passes(pieces, ["fuse_norm_quant"])
print("warning:", str(caught[0].message).split(":")[1].strip(), "...\n")
pd.DataFrame(
    {
        "no-ops found": {piece: each["noop"].matched for piece, each in reports.items()},
        "norms fused, with noop": {piece: each["fuse_norm_quant"].matched for piece, each in reports.items()},
        "norms fused, without": {piece: each["fuse_norm_quant"].matched for piece, each in without.items()},
    }
)

# %%
recorded = recordings.find("h200-bench-passes")
if recorded is None:
    print("There is no recording of the passes here.")
else:
    bare = [name for name in dict.fromkeys(recorded["variant"]) if name.endswith(", no noop")]
    pairs = [name for each in bare for name in (each.removesuffix(", no noop"), each)]
    columns = ["matched_noop", "matched_fuse_norm_quant", "wall_ms"]
    matched_rows = recorded[recorded["batch"] == 1].set_index("variant").loc[pairs, columns]
    print(f"recorded on an H200, torch 2.11, 16 layers:\n{matched_rows}")

# %%
found = sum(each["noop"].matched for each in reports.values())
matched, alone = (sum(each["fuse_norm_quant"].matched for each in every.values()) for every in (reports, without))
cgkit.claim(
    [
        {
            "id": "passes-noop-first",
            "measured": f"{found} no-ops in the traced Llama; norms fused with the pass {matched}, without it {alone}",
            "outcome": "confirmed" if alone < matched else "overtaken",
            "why": "Inductor removes these no-ops by itself before the hook (seen on torch 2.11 and 2.13). The pass is kept as a "
            "guard against graphs that are noisy in another way.",
        },
        {
            "id": "passes-fusion-without-noop",
            "measured": f"fusion alone warns: {str(caught[0].message).split(':')[1].strip()}",
            "outcome": len(caught) > 0,
        },
    ]
)

# %% [markdown]
# ## 2 · RMSNorm + quantisation
#
# The first piece ends in a norm, a quantisation and the products for q, k and v. The report shows the graph's lines that went
# (red) and those that came (green):

# %%
reports["submod_0"]["fuse_norm_quant"]

# %% [markdown]
# Thirteen small operators became one call that writes into a buffer (why it is written `auto_functionalized`, part 5 says). In
# a layer, the norm comes after a residual sum, and there is an operator for all three (`fused_add_rms_norm_static_fp8_quant`).
# It has two results: the quantised activations, and the sum, which the next residual needs. In this piece it matches twice,
# before the MLP and before the next layer's q, k and v:

# %%
reports["submod_2"]["fuse_norm_quant"]

# %% [markdown]
# **What do you expect** for *L* layers: how often does the fusion match, and with a sum how often? (The very first norm has no
# sum before it. The last norm is followed by no quantisation.)

# %%
matches = {piece: each["fuse_norm_quant"].matched for piece, each in reports.items()}
sums = sum(each[-1].after.count("fused_add_rms_norm_static_fp8_quant.default(") for each in reports.values())
print(matches, "->", sum(matches.values()), "=", "2 L;", sums, "of them with a sum = 2 L - 1")

# %%
layers = shape.num_hidden_layers
cgkit.claim(
    "passes-fusion",
    measured=f"{layers} layers: {sum(matches.values())} norms fused with their quantisation, {sums} of them with a sum before",
    outcome=sum(matches.values()) == 2 * layers and sums == 2 * layers - 1,
)

# %% [markdown]
# With a scale for each token the quantisation also needs the row's largest magnitude. The pattern is another one, the places are
# the same:

# %%
dynamic = preview_passes(split_of(per_token), ["noop", "fuse_norm_quant"])
print({piece: each["fuse_norm_quant"].matched for piece, each in dynamic.items()})
dynamic["submod_0"]["fuse_norm_quant"]

# %% [markdown]
# ## 3 · Activation + quantisation
#
# The MLP computes `silu(gate) * up`, and quantises it for the product that follows:

# %%
reports["submod_2"]["fuse_act_quant"]

# %%
activations = sum(each["fuse_act_quant"].matched for each in reports.values())
cgkit.claim("passes-activation-quant", f"{activations} matches in {layers} layers", outcome=activations == layers)

# %% [markdown]
# ## 4 · Attention + quantisation
#
# What attention writes is quantised as well. But attention is where the graph is *cut*: attention is in no piece, and its
# quantisation stands at the beginning of the next one. So this fusion can only match where nothing is cut, and is off by
# default. **What do you expect** from the same passes on the whole graph of two layers?

# %%
whole = preview_passes(split_of(fp8, splitting_ops=[]), ["noop", "fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant"])
print(whole["submod_0"].matched)
whole["submod_0"]["fuse_attn_quant"]

# %% [markdown]
# Two of two. The attention operator got an *output scale*: its kernel divides and converts before it writes.

# %%
cgkit.claim(
    [
        {
            "id": "passes-attention-quant",
            "measured": f"{whole['submod_0']['fuse_attn_quant'].matched} matches in {layers} layers, not cut",
            "outcome": whole["submod_0"]["fuse_attn_quant"].matched == layers,
        },
        {
            "id": "passes-four",
            "measured": f"matched here: {', '.join(whole['submod_0'].matched)}",
            "outcome": "overtaken",
            "why": "Engines have more by now: rotary with the cache write, norms of q and k, sequence parallelism. The four "
            "named are still there.",
        },
        {
            "id": "passes-place",
            "measured": f"the graph at the hook holds {reports['submod_0'][0].before.count('aten.')} small aten operators and no "
            "generated kernel: Inductor was stopped before it wrote one",
            "outcome": "aten." in reports["submod_0"][0].before,
        },
        {
            "id": "passes-domain-knowledge",
            "measured": "what came into the graph, rms_norm_static_fp8_quant, is an operator of ours: "
            + str("rms_norm_static_fp8_quant" in reports["submod_0"]["fuse_norm_quant"].after),
            "outcome": "rms_norm_static_fp8_quant" in reports["submod_0"]["fuse_norm_quant"].after,
        },
    ]
)

# %% [markdown]
# ## 5 · fix_functionalization
#
# Our operators write into an `out` parameter that the caller allocates. Before Inductor sees a graph, torch makes it
# *functional*, that is, free of writes. In such a graph only who takes what from whom counts, so operators may be moved and fused
# without asking who overwrites what. Such a call becomes `auto_functionalized(op, ...)`, which writes nothing and returns new
# tensors. Read literally, each one copies what it would have written: for training, which needs the old values for its gradients, that
# is right, and for serving it is memory traffic for nothing. The pass turns the calls back where nobody can tell the difference, that is,
# where nobody reads the old contents of the buffer afterwards:

# %%
from cgkit.splitting import register_op


def double_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


register_op("double_into", double_into, ["out"], namespace="course")


class Doubles(torch.nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        torch.ops.course.double_into(x, out)
        return out + 1


graph = cgkit.split_graph(cgkit.trace(Doubles(), torch.ones(4, 16), dynamic_arg_dims={"x": 0}), [])
preview_passes(graph, ["fix_functionalization"])["submod_0"][0]

# %% [markdown]
# On a whole Llama whose layers are all operators of ours (two norms, rotary, activation, attention; *rotary* turns queries and keys
# by an angle that depends on the position) there are 5 a layer and the last norm. The article says that leaving them functional,
# as torch's default (*V2*) does, turns each write into a copy.
# **What do you expect**: how many copies are left with V2, and how many with the pass?

# %%
operators = split_of(plain, ("all",), [])
cost = functionalization_cost(operators, num_tokens=8)
cost.to_frame()[["variant", "wrapped", "written", "written_bytes", "copies", "copied_bytes"]]

# %% [markdown]
# `written` is what would be copied if nothing were undone (11 tensors, 15 KB for eight tokens); `copies` is what is really left
# when Inductor is finished: one, with the pass and without.
#
# The pass is still needed for the fusions, whose patterns speak the language of the first version (V1). And V1 *without*
# it is not safe: on torch 2.13 (CPU) Inductor's lowering of it gives wrong numbers for an operator that writes a slice of a
# computed buffer.

# %%
table = cost.to_frame().set_index("variant")
left = table["copies"].to_dict()
v2 = torch._inductor.config.enable_auto_functionalized_v2
cgkit.claim(
    [
        {
            "id": "functional-heading",
            "measured": f"{int(table['written'].max())} tensors are written in place; copies left: {left}",
            "outcome": min(left.values()) < table["written"].max(),
        },
        {
            "id": "functional-v2-default",
            "measured": f"torch {torch.__version__.split('+')[0]}: enable_auto_functionalized_v2 = {v2}",
            "outcome": bool(v2),
        },
        {
            "id": "functional-copies",
            "measured": f"{int(table['written'].max())} writes; copies really left: {left}",
            "outcome": "confirmed" if max(left.values()) >= table["written"].max() else "overtaken",
            "why": "Read literally each write is a copy (vLLM's RFC #14703). Today Inductor's own re-inplacing takes them out again.",
        },
        {
            "id": "functional-switched-off",
            "measured": f"copies left: {left}",
            "outcome": "overtaken",
            "why": "For the copies alone it is no longer needed. Fusions still need it: their patterns are written for V1.",
        },
    ]
)

# %% [markdown]
# ## 6 · A pass of your own
#
# A function that takes the graph and returns how often it matched. Its source is hashed into the cache's key, so that editing
# it is a miss:

# %%
def double_negation(graph):
    """-(-x) is x."""
    neg, matched = torch.ops.aten.neg.default, 0
    for node in list(graph.nodes):
        if node.target is neg and node.args[0].target is neg:
            node.replace_all_uses_with(node.args[0].args[0])
            graph.erase_node(node)
            matched += 1
    return matched


class Negations(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(-(-x)) * 3


small = cgkit.split_graph(cgkit.trace(Negations(), torch.ones(4, 16), dynamic_arg_dims={"x": 0}), [])
compiled = cgkit.compile_pieces(small, cgkit.CompilationConfig(passes=[double_negation], cudagraph_mode="NONE"))
x = torch.randn(5, 16)
print("equal:", torch.allclose(compiled(x), Negations()(x)))
reported = compiled.pass_reports or preview_passes(small, [double_negation])  # nothing was compiled: what it would do
reported["submod_0"]["double_negation"]

# %% [markdown]
# ## 7 · Does it compute the same?
#
# FP8 keeps three bits after the leading one, and whoever rounds at another place gets another neighbour. So the fused graph is
# not asked to be equal to the unfused one, but to be as near to the truth. The truth here is the model before it was
# quantised. **What do you expect**: which is nearest, the FP8 model in eager mode, compiled, or compiled and fused?

# %%
def hidden(**options):
    built = cgkit.compile_pieces(pieces, cgkit.CompilationConfig(cudagraph_mode="NONE", **options))
    with cgkit.set_forward_context(None), torch.no_grad():
        return built(ids, ids).double(), cgkit.explain(built).to_frame()


fusions = ["noop", "fuse_norm_quant", "fuse_act_quant"]
(unfused, before), (fused, after) = hidden(), hidden(passes=fusions)
with cgkit.set_forward_context(None), torch.no_grad():
    reference, eager = plain(ids, ids).double(), fp8(ids, ids).double()
off = {"eager": eager - reference, "compiled": unfused - reference, "compiled and fused": fused - reference}
off |= {"fused - compiled": fused - unfused, "fused - eager": fused - eager}
print(f"mean size of the reference: {float(reference.abs().mean()):.2f}")
pd.DataFrame({name: {"mean": float(d.abs().mean()), "largest": float(d.abs().max())} for name, d in off.items()}).T

# %% [markdown]
# All three are off by what eight bits cost (against the mean size above). Our fused operators round to bfloat16 where the
# model says so, as eager does; Inductor keeps float32 inside a kernel and leaves those roundings out. So the fused graph is
# to be judged beside eager. (The tests hold it against float64: at most 1.1 times as far off as the worse of the two.)
#
# And what one run of a piece starts, on this machine:

# %%
columns = ["piece", "own_kernels", "extern_kernels", "operators", "kernels"]
before[columns].merge(after[columns], on="piece", suffixes=(" off", " on"))

# %% [markdown]
# Look closely, because it is the answer to this notebook's question: with the passes *off*, Inductor has already put norm and
# quantisation into one kernel of its own (`own_kernels`). What a fusion gains is not a kernel fewer; it puts ours in the place
# of Inductor's. In the first piece there is even one more: Inductor had the embedding in the same kernel, and it now stands alone.
#
# ## 8 · Is it worth it? On an H200
#
# The FP8 Llama-3.2-1B shape with 16 layers, one full graph a step. **What do you expect** from all fusions: 1 %, 5 %, 15 %?
# (vLLM's blog of 2025-08-20 says up to 8 % for activation + quantisation and up to 7 % for attention + quantisation.)

# %%
recordings.picture("h200-bench-passes", compile_charts.passes)

# %%
if recorded is not None:
    step = recorded.pivot(index="variant", columns="batch", values="wall_ms")
    print("time of a step over that with the passes off (recorded on an H200):")
    print((step.div(step.loc["off"]) - 1).map("{:+.1%}".format).loc[list(dict.fromkeys(recorded["variant"]))])

# %% [markdown]
# Inductor makes that fusion itself, since it sees the quantisation as plain operators. A gain has to come from where norm and
# quantisation are *separate hand-written kernels*, which Inductor cannot see into: the walls of part 9. Attention is such a wall. So
# compare `whole, all` with `whole, off`: nothing is cut there, and the attention kernel itself quantises what it writes. That
# makes the step 3 to 4 % shorter (recorded); the other fusions change it by about 1 %, in either direction.

# %%
if recorded is not None:
    change = (step.div(step.loc["off"]) - 1).loc["norm + act"]
    gains = ", ".join(f"{value:+.1%} at batch {batch}" for batch, value in change.items())
    cgkit.claim(
        [
            {
                "id": "passes-fusion-gain",
                "measured": f"recorded on an H200: a step with the fusions takes {gains}",
                "outcome": "confirmed" if change.max() < -0.02 else "overtaken",
                "why": "Inductor fuses norm and quantisation into one kernel of its own before the pass comes, so that no kernel "
                "and no round trip through memory is left to save.",
            },
            {
                "id": "passes-heading",
                "measured": f"passes match ({matched} norms, {activations} activations); the step takes {gains} (recorded on an H200)",
                "outcome": "overtaken" if change.abs().max() < 0.02 else "confirmed",
                "why": "Engines still have the passes. What they buy depends on what Inductor does by now without them.",
            },
        ]
    )

# %% [markdown]
# Beware of the middle panel. It is Inductor's own *count* of bytes, and nobody measured them. A kernel that looks rows up in a
# table is counted as if it read the whole table. Look where the large differences come from:

# %%
if recorded is not None:
    moved = next(name for name in recorded if name.endswith("bytes_at_16_tokens"))
    counted = recorded[recorded["batch"] == 1].set_index("variant")[moved]
    table = PRESETS["llama-3.2-1b"].vocab_size * PRESETS["llama-3.2-1b"].hidden_size * 2  # bfloat16: two bytes
    print(f"the embedding table: {table:,} bytes")
    print(f"off - norm: {(counted['off'] - counted['norm']) / table:.2f} tables")
    print(f"whole, off - whole, all: {(counted['whole, off'] - counted['whole, all']) / table:.2f} tables")

# %% [markdown]
# Nearly all of it is the embedding table, which the count takes for read whenever a kernel has the look-up fused into it; sixteen
# tokens really read sixteen rows. Without it, the passes move as many bytes as none. A number that falls while the time
# stays is to be asked what it counts.
#
# ## 9 · Hand-written or torch code: custom_ops
#
# The same question the other way round. Norm, activation and rotary exist in two forms: a kernel written by hand, one operator
# in the graph, and plain torch code. `custom_ops=["all"]`, `["none"]`, `["+rms_norm"]` choose; with Inductor the default is
# none. What does the compiler see?

# %%
one_layer = shape.scaled(num_hidden_layers=1)
little = build_model(one_layer, random_weights(one_layer, torch.bfloat16), dtype=torch.bfloat16)
rows = []
for custom_ops in (("none",), ("all",)):
    both = split_of(little, custom_ops)
    built = cgkit.compile_pieces(both, cgkit.CompilationConfig(custom_ops=custom_ops, cudagraph_mode="NONE"))
    calls = cgkit.explain(built).to_frame()[["calls_before", "own_kernels", "extern_kernels", "operators"]].sum()
    loaded = built.to_frame()["loaded"].all()  # then compile_s is what reading took
    rows.append({"custom_ops": custom_ops[0], **calls, "compile_s": round(built.seconds, 1), "loaded": loaded})
pd.DataFrame(rows)

# %% [markdown]
# Fewer operators to compile, and each of ours is a wall: nothing can be fused across it (`operators` are called as they are).
# **What do you expect** on the H200: which is faster, and which compiles faster?

# %%
recordings.picture("h200-bench-custom-ops", compile_charts.custom_ops)

# %%
custom = recordings.find("h200-bench-custom-ops")
if custom is not None:
    custom_step = custom.pivot(index="variant", columns="batch", values="wall_ms").loc[list(dict.fromkeys(custom["variant"]))]
    print("time of a step over that of torch code (recorded on an H200):")
    print((custom_step.div(custom_step.loc["none"]) - 1).map("{:+.1%}".format))

# %% [markdown]
# Torch code is faster, because the norm is fused with the sum before it, and hand-written it is two kernels a layer more. What
# the operators do save is compile time. (The first row also holds what the process loads once: compare the others. Where `loaded` is
# true, nothing was compiled: `cgkit cache list` names the folder to empty.)

# %%
seen = pd.DataFrame(rows).set_index("custom_ops")
defaults = {f"level {level}": cgkit.CompilationConfig(level=level).custom_op_enabled("rms_norm") for level in (0, 3)}
walls = seen["operators"].to_dict()
cgkit.claim(
    [
        {
            "id": "levels-black-boxes",
            "measured": f"operators that Inductor cannot look into, one layer: {walls}; its own kernels: {seen['own_kernels'].to_dict()}",
            "outcome": (walls["all"] > walls["none"] and seen.loc["all", "own_kernels"] < seen.loc["none", "own_kernels"])
            if seen["own_kernels"].any()
            else "not measured",
            "why": "" if seen["own_kernels"].any() else "Without a C++ compiler Inductor writes no kernels here.",
        },
        {
            "id": "levels-custom-ops-off",
            "measured": f"the hand-written norm, if nothing is said: {defaults} (cgkit's default is vLLM's)",
            "outcome": defaults["level 0"] and not defaults["level 3"],
        },
    ]
)

# %%
if custom is not None:
    slower = custom_step.div(custom_step.loc["none"]).loc["all"] - 1
    cgkit.claim(
        "levels-custom-ops-trade",
        measured=f"recorded on an H200: hand-written operators take {', '.join(f'{v:+.1%} at batch {b}' for b, v in slower.items())}",
        outcome=bool(slower.min() > 0),
        why="The price, the hand-written kernels' own speed, is not seen at these sizes.",
    )

# %% [markdown]
# ## Exercises
# `check` says whether an answer is right, nearly right or wrong, and why. `hint("05-1")` helps; `solution("05-1")` says where
# ours stands. Put your answer in the place of `...`.

# %%
from cgkit.exercises import check, hint, question, solution

question("05-1")

# %%
check("05-1", ...)

# %% [markdown]
# When does a reshape do nothing? Part 1 says it in words; now in code, with symbols:

# %%
question("05-2")

# %%
check("05-2", ...)

# %% [markdown]
# And a pass. It is run on random graphs, and what they compute is compared:

# %%
question("05-3")

# %%
check("05-3", ...)

# %% [markdown]
# **Next**: notebook 06 records what the pieces start, so that a step need not start it piece by piece. More to try:
# - Make `fuse_norm_quant` miss one norm by using its result unquantised as well, and read the report's `notes`.

# %% tags=["stamp"]
from cgkit.measuring.stamp import stamp

print(stamp())
