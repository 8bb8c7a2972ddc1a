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
# # 08 · Memory: where the bytes go
#
# **The question.** A recorded graph writes its results to the same addresses at every replay, so memory must be kept for it,
# for good. An engine records hundreds of graphs. What do they cost, why is it not hundreds of times one graph, and what can be
# done if it is still too much?
#
# **Afterwards you can**
# - say what a *pool*, a *segment* and a *block* are, and tell *reserved* from *allocated* bytes;
# - explain why graphs may share one pool, and name the two rules that make it right;
# - read a memory ledger, and predict it before anything is recorded;
# - say which part of the bill is not in the pool at all;
# - choose between the two ways to save memory: a shorter list of sizes, or graphs for decode steps only.
#
# **Time**: 45 minutes to read; the cells run in about one minute on two cores.
# **Needs**: cgkit and what notebook 06 taught: what recording and replaying a graph is. No GPU. Here graphs are *emulated*
# (every address is real and every hazard happens; nothing is faster), and charts say so. Figures of a real GPU are read from
# recordings, whose titles say "recorded on ..."; where this machine has a GPU they are measured on it.

# %% tags=["setup"]
# Only Colab needs this cell: it fetches cgkit there. Anywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    get_ipython().system("test -d /content/cgkit || git clone -q --depth 1 -b main https://github.com/OWNER/NAME /content/cgkit")
    get_ipython().run_line_magic("cd", "-q /content/cgkit/notebooks")
    get_ipython().run_line_magic("run", "colab.py")

# %%
import pandas as pd
import torch

import cgkit
from cgkit import recordings
from cgkit.capturing.emulated import EmulatedPlatform
from cgkit.exercises import check, hint, question, solution
from cgkit.measuring.lifetimes import output_lifetimes
from cgkit.measuring.memory import Ledger
from cgkit.measuring.record_memory import memory_here
from cgkit.measuring.segments import blocks_of
from cgkit.plotting import About, Picture, human_bytes, memory_charts
from cgkit.serving.llama import PRESETS
from cgkit.serving.runner import Runner
from cgkit.serving.weights import build_model, random_weights

# The one setting: on a machine with a GPU the 1B shape is measured there, now; without one HERE is None, and recordings
# of an H200 are read.
HERE = memory_here("llama-3.2-1b")
pd.set_option("display.width", 160)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1 · Pool, segment, block
#
# Asking a GPU's driver for memory is slow, so PyTorch asks for large stretches, *segments*, and cuts *blocks* from them when
# a tensor is made. What was taken from the driver is **reserved**; what some tensor owns now is **allocated**. When a tensor
# dies its block is free for the next tensor, and stays reserved.
#
# A recorded graph needs more than that. Its kernels were written down *with the addresses* of the tensors that they read and
# write, temporary ones included. If such an address were given to another tensor of the program, each replay would
# overwrite that tensor. So graphs are recorded into a **pool**: segments of their own, from which nobody else is served.
#
# The smallest example: record a function into a new pool and look inside. The function makes two temporary tensors and
# returns a third.

# %%
platform = EmulatedPlatform()
x = torch.ones(1024)  # 4096 bytes, outside of the pool


def three_steps(x):
    a = x + 1
    b = a * 2
    return b - 3


pool = platform.new_pool()
graph, out = platform.record(lambda: three_steps(x), pool)
print(platform.pool_bytes(pool))
blocks_of(platform, pool)

# %% [markdown]
# Three tensors of 4096 bytes were made, and the pool reserved three times 4096. Only the result is still owned (`live`).
# While `b - 3` ran, the names `a` and `b` held their tensors, so the result needed a third block.
#
# **What do you expect** from the same arithmetic without names, where each temporary dies as soon as it was read?

# %%
pool = platform.new_pool()
graph, out = platform.record(lambda: (x + 1).mul(2).sub(3), pool)
nameless = platform.pool_bytes(pool)
print(nameless)
blocks_of(platform, pool)

# %% [markdown]
# Two blocks: the third tensor was put where the first one had lain. So *reserved* follows the most bytes that were owned **at
# once** (the peak), not the number of tensors. That the first tensor is destroyed by this is no harm: at every replay the
# kernels run in the order of the recording, so whoever read it has read it by then.
#
# This argument is the whole notebook: *memory may be given out again if everybody who reads it has read it before, at
# recording and therefore at each replay.*

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2 · Weak outputs
#
# The result `out` is what the graph is for; somebody keeps it in order to read it after each replay. If they *own* it, its
# block stays live, and the next recording needs another. An engine that generates text runs a *step* for each new token, over all
# requests at once: 1, 2, 4, 8, ... tokens. A graph is for one size, so it records one for each, and in one step only one of them runs.
# So the results of all sizes may lie in the same memory.
#
# How can one hold a tensor without owning its memory? By a **weak output**: a second tensor object over the same
# addresses that does not count as an owner. cgkit (as vLLM) keeps only these. Three recordings, owned and weak.
# **What do you expect**: how many bytes are still allocated after each of them?

# %%
def three_sizes(weak):
    pool, kept = platform.new_pool(), []
    for size in (1024, 512, 256):
        graph, out = platform.record(lambda part=x[:size]: (part + 1).mul(2).sub(3), pool)
        kept.append((graph, platform.weak_ref(out, pool) if weak else out))
        del out
        print(f"{'weak' if weak else 'owned'}, after size {size:>4}: {platform.pool_bytes(pool)}")
    return platform.pool_bytes(pool)


owned, weak = three_sizes(weak=False), three_sizes(weak=True)

# %% [markdown]
# With owned outputs every size leaves its result behind in `allocated`. With weak ones *nothing* is allocated afterwards, although all
# three results can still be read. The pool's reserve is the same here because there was room between the blocks; on the
# model below it will not be.
#
# ### Too early
# Engines split a step into pieces (notebook 03), each a graph of its own. The result of one piece is the input of the next.
# When is *that* output made weak? Two pieces: the second computes `h * 10 + h` of what the first gives, so for `x = 1` the
# answer is 22. **What do you expect** if the first piece's output is made weak as soon as it is recorded?

# %%
def two_pieces(weak_at_once):
    pool, x = platform.new_pool(), torch.ones(4)
    first, h = platform.record(lambda: x + 1, pool)
    h = platform.weak_ref(h, pool) if weak_at_once else h
    second, y = platform.record(lambda: h * 10 + h, pool)
    first.replay()
    second.replay()
    return y[0].item()


kept_value, early_value = two_pieces(weak_at_once=False), two_pieces(weak_at_once=True)
print("owned until the second piece is recorded:", kept_value)
print("weak at once:", early_value)

# %% [markdown]
# 40. While the second piece was recorded, nobody owned `h`, so the pool gave its bytes to `h * 10`. At replay, `h * 10`
# overwrites `h`, and the sum adds 20 and 20. No error, no warning: a wrong number. So while recording, an output that a later piece
# reads must be owned until *that piece* was recorded. Only the last piece of a step may let go at once. Afterwards all are weak.
#
# Now the model that the rest of this notebook uses: a Llama of 4 layers with random weights. Attention stands between the
# pieces, so 4 layers make 5 pieces to record (mode PIECEWISE: each piece is a graph of its own). It stays on the CPU on any machine: the emulated pool counts to the byte, and a GPU's
# allocator takes 2 MiB at once, in which all of so small a model would vanish.

# %%
SIZES = [1, 2, 4, 8, 16, 32, 64]
shape = PRESETS["tiny-llama"]
model = build_model(shape, random_weights(shape, torch.float32), dtype=torch.float32)
config = cgkit.CompilationConfig(compiler="eager", cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=SIZES)
runner = Runner(model, config=config, max_num_seqs=64, max_model_len=64, kv_cache_tokens=1024)
inputs, executor = runner.inputs, runner.executor
executor.compile(inputs)
compiled = executor.compiled


def record(sizes=SIZES, mode="PIECEWISE", **options):
    """Records the model; the ledger notes what each recording did to the pool."""
    options.setdefault("context", lambda key: inputs.fill_dummy(key.num_tokens, key.uniform_decode))
    options.setdefault("make_inputs", lambda size: inputs.front(size, keep=True))
    with Ledger() as ledger:
        captured = cgkit.capture(compiled, sizes, mode=mode, **options)
    return captured, ledger


captured, ledger = record()
print(f"{captured.num_graphs} graphs recorded: {len(captured.pieces)} pieces at {len(SIZES)} sizes (emulated)")

# %%
last_only = [wrapper.options.weak_ref_output for wrapper in captured.pieces]
print("lets go of its output while recording, piece by piece:", last_only)
cgkit.claim(
    [
        {
            "id": "recording-weak-output",
            "measured": f"three sizes: {owned.allocated:,} bytes stay allocated with owned outputs, {weak.allocated:,} with weak ones",
            "outcome": "confirmed" if weak.allocated < owned.allocated else "wrong",
            "why": "A weak output is a tensor over the same bytes that does not own them.",
        },
        {
            "id": "recording-weak-last-only",
            "measured": f"two pieces: {kept_value:g} with the first output owned until the second was recorded, {early_value:g} without",
            "outcome": "confirmed" if early_value != kept_value and last_only == [False] * 4 + [True] else "wrong",
            "why": "The next recording takes the bytes that nobody owns, also those that it is about to read.",
        },
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3 · The ledger
#
# A `Ledger` listens while something is recorded and writes a row for each graph: the pool's reserved bytes before and
# after, what was allocated inside the recording at most, and what is still owned right after it. Summed up by size, in the order of recording.
# **What do you expect**: by how much does the pool grow for the second size, 32 tokens?

# %%
by_size = ledger.to_frame().groupby("num_tokens", sort=False)
by_size.agg(graphs=("name", "size"), growth_bytes=("growth_bytes", "sum"), peak_bytes=("peak_allocated_bytes", "max"))

# %%
Picture(ledger.plot())

# %% [markdown]
# By nothing. The first size took all the memory (grey: reserved); each later size needs about half of what the one before did
# (hatched: allocated at most) and finds it free. This is why engines record **from large to small**.
#
# ### What does a size still have of its own?
# The article says: static buffers for inputs and outputs. Look at the addresses. `front(size)` gives what a step of that size
# reads; a weak output is what the last piece of that size writes.

# %%
read = {size: captured.inputs.at(size)[0][0].data_ptr() for size in SIZES}
written = {key.num_tokens: entry.output for key, entry in captured.pieces[-1].entries.items()}
written = {size: (out[0] if isinstance(out, (tuple, list)) else out).data_ptr() for size, out in written.items()}
pd.DataFrame({"input_ids at": {n: hex(read[n]) for n in SIZES}, "result at": {n: hex(written[n]) for n in SIZES}})

# %%
growth = by_size["growth_bytes"].sum()
largest, smaller = int(growth.loc[max(SIZES)]), int(growth.drop(max(SIZES)).sum())
one_buffer = len(set(read.values()))
cgkit.claim(
    [
        {
            "id": "capture-large-first",
            "measured": f"growth of the pool: {largest:,} bytes for size {max(SIZES)}, {smaller:,} for the {len(SIZES) - 1} smaller sizes",
            "outcome": "confirmed" if smaller < largest / 10 else "wrong",
        },
        {
            "id": "memory-each-size-own",
            "measured": f"{len(SIZES)} sizes read their ids at {one_buffer} address(es); {smaller:,} bytes of pool for the smaller sizes",
            "outcome": "wrong" if one_buffer == 1 and smaller < largest / 10 else "confirmed",
            "why": "There is one input buffer, as long as the largest size; a smaller size reads its first rows, from the same "
            "address. Results are weak and lie in the shared pool.",
        },
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4 · From small to large
#
# **What do you expect** if the order is turned round? The article says: then sharing saves nothing at all.
# For comparison two more ways: outputs that stay owned, and a pool for each piece (predicted; section 7 says how).

# %%
upward, upward_ledger = record(largest_first=False)
strong, _ = record(weak_outputs=False)
apart = cgkit.predict_pool(compiled, SIZES, mode="PIECEWISE", shared=False)
ways = {"large to small": captured.pool_bytes.reserved, "small to large": upward.pool_bytes.reserved}
ways |= {"a pool for each piece (predicted)": apart.reserved_bytes, "owned outputs": strong.pool_bytes.reserved}
print("emulated graphs")
pd.DataFrame({"reserved_bytes": ways, "times": {way: round(n / ways["large to small"], 2) for way, n in ways.items()}})

# %%
both = [ledger.to_frame().assign(order_of_sizes="large to small")]
both.append(upward_ledger.to_frame().assign(order_of_sizes="small to large"))
Picture(memory_charts.orders(pd.concat(both), About("tiny-llama", "PIECEWISE", emulated=True)))

# %% [markdown]
# Small to large costs more, because a free block of 32 tokens is too small for a tensor of 64, and a new one is taken while the
# old one lies idle. But "saves nothing" it is not: the pieces of a size still share among each other, and where two free blocks
# lie side by side they merge into one that is large enough.
#
# And on a real GPU? A 16-layer Llama (the 1B shape), 11 sizes up to 64 tokens, 187 graphs, in both orders. **What do you expect?**

# %%
LEDGER = "h200-memory-ledger-llama-3.2-1b"
real = recordings.load(LEDGER, HERE)
about = recordings.about(LEDGER, HERE)
ends = real[real["mode"] == "PIECEWISE"].groupby("run", sort=False)["reserved_after_bytes"].last()
print(f"recorded on {real.attrs['recorded']}\n{ends.map(human_bytes).to_string()}")
Picture(memory_charts.orders(real[real["run"] != "first of the process"], about))

# %% [markdown]
# Both orders end at the same number of MiB. Nothing is wrong with the argument; the *granularity* is coarser. PyTorch's CUDA allocator
# takes segments of 2 MiB for all blocks up to 1 MiB (and of 20 MiB for blocks above, up to 10 MiB). The small blocks of a decode step of
# 64 tokens fit into one or two segments of 2 MiB in either order. If a block is larger than 1 MiB, one segment of 20 MiB comes with it,
# in either order too. The order matters when the blocks that are alive at once no longer fit into such segments: wide models, sizes of
# hundreds of tokens. Recording from large to small is still right, since it costs nothing.

# %%
saved = 1 - ways["small to large"] / ways["owned outputs"]
ratio, pieces = ways["a pool for each piece (predicted)"] / ways["large to small"], len(captured.pieces)
gpu_rules = {shared: cgkit.predict_pool(compiled, SIZES, allocator="cuda", shared=shared).reserved_bytes for shared in (True, False)}
at_least = gpu_rules[False] // pieces * 81
cgkit.claim(
    [
        {
            "id": "capture-small-first-gains-nothing",
            "measured": f"small to large takes {ways['small to large'] / ways['large to small']:.2f} times large to small, and still "
            f"{saved:.0%} less than owned outputs; recorded on a GPU: {human_bytes(ends['small to large'])} against {human_bytes(ends['large to small'])}",
            "outcome": "wrong" if saved > 0.1 else "confirmed",
            "why": "Pieces of one size share with each other in either order, and free neighbours merge. On a GPU, segments of 2 MiB "
            "hide the difference for small steps.",
        },
        {
            "id": "pool-shared",
            "measured": f"{captured.num_graphs} graphs in one pool of {human_bytes(ways['large to small'])}; all but those of the first size grew it by {smaller:,} bytes",
            "outcome": "confirmed" if smaller < largest / 10 else "wrong",
        },
        {
            "id": "memory-pool-shares",
            "measured": f"one pool takes {ways['large to small'] / ways['owned outputs']:.0%} of what owned outputs take",
            "outcome": "confirmed" if ways["large to small"] < 0.5 * ways["owned outputs"] else "wrong",
        },
        {
            "id": "pool-own-explodes",
            "measured": f"{pieces} pieces with a pool each: {ratio:.1f} times the shared one; by the GPU allocator's rules "
            f"{human_bytes(gpu_rules[False])} against {human_bytes(gpu_rules[True])}, so 81 pieces take {human_bytes(at_least)} at least",
            "outcome": "confirmed" if ratio > 2 else "wrong",
            "why": "Without sharing every piece keeps its own peak, and on a GPU at least a segment of 2 MiB. It grows with the number of "
            "pieces, where a shared pool does not.",
        },
    ]
)

# %% [markdown]
# **A knob.** Choose the largest size, the order, and whether outputs are weak, and read the predicted pool. (Below it, a picture of all
# of these for those who read without a kernel.)

# %%
from ipywidgets import Checkbox, Dropdown, interact


def pool_of(largest, order, weak, shared):
    chosen = [size for size in SIZES if size <= largest]
    options = {"largest_first": order == "large to small", "weak_outputs": weak, "shared": shared}
    print(cgkit.predict_pool(compiled, chosen, mode="PIECEWISE", allocator="emulated", **options))


orders, on = Dropdown(options=["large to small", "small to large"]), lambda name: Checkbox(True, description=name)
_ = interact(pool_of, largest=Dropdown(options=SIZES[::-1]), order=orders, weak=on("weak"), shared=on("one pool"))

# %%
options = {"large to small": {}, "small to large": {"largest_first": False}}
options |= {"a pool for each piece": {"shared": False}, "owned outputs": {"weak_outputs": False}}
curves = {
    way: [cgkit.predict_pool(compiled, SIZES[:n], mode="PIECEWISE", allocator="emulated", **chosen).reserved_bytes for n in range(1, 8)]
    for way, chosen in options.items()
}
Picture(memory_charts.by_largest(pd.DataFrame(curves, index=SIZES), About("tiny-llama", "PIECEWISE", emulated=True)))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5 · Reserved is not allocated
#
# The pool of the 1B shape on the GPU when it was fullest, block by block. Each bar is a segment. **What do you expect**: how much of it is
# still allocated when all is recorded?

# %%
recordings.picture("h200-memory-segments-llama-3.2-1b", memory_charts.segments, HERE)

# %%
facts = recordings.load("h200-memory-llama-3.2-1b", HERE)["runs"]["large to small"]
print("reserved:", human_bytes(facts["pool_reserved_bytes"]), "  allocated at most, inside a recording:",
      human_bytes(facts["pool_peak_allocated_bytes"]), "  allocated when all is recorded:", facts["pool_live_after_bytes"])  # fmt: skip

# %% [markdown]
# The last figure is the one that surprises: **0 bytes**. Every output is weak, so as far as the allocator knows the pool is empty, and
# yet it must never be given back: the graphs write into it at each replay. Whoever watches `memory_allocated()` does not
# see the graphs at all; look at *reserved*.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6 · How long an output lasts
#
# Shared memory has a price: what a replay wrote is valid until another replay writes there. Steps of 8, 4 and again 8 tokens
# (the picture names a replay `piece @ tokens`):

# %%
lives = output_lifetimes(captured, [8, 4, 8])
Picture(lives.plot())

# %% [markdown]
# Blue: from the replay that writes an output to the last piece of the same step that reads it. Pale: nobody needs it any more. A cross: it
# is overwritten. **No blue bar has a cross in it**, for every order of steps, and for either order of recording. That is what the rule of
# section 2 guarantees (an output is owned until its last reader was recorded), as long as a step runs to its end before the next begins.
#
# And if it does not? With two streams (two queues on which a GPU works at the same time) nothing keeps a step of one size from
# running between two pieces of another. The same two pieces as in section 2, and a third graph recorded later, as for another
# size. **What do you expect** when it is replayed in between?

# %%
def step_with(something_between):
    pool, x = platform.new_pool(), torch.ones(4)
    first, h = platform.record(lambda: x + 1, pool)
    second, y = platform.record(lambda: h * 10 + h, pool)
    h, y = platform.weak_ref(h, pool), platform.weak_ref(y, pool)
    other, _ = platform.record(lambda: [x - 7, x - 8, x - 9], pool)  # three results: all that the others let go
    for graph in (first, other, second) if something_between else (first, second):
        graph.replay()
    return y[0].item()


alone, mixed = step_with(something_between=False), step_with(something_between=True)
print("one step after the other:", alone, "  another size in between:", mixed)
cgkit.claim(
    "pool-one-stream",
    measured=f"a step of two pieces gives {alone:g}; with another graph of the pool replayed between them {mixed:g}",
    outcome="confirmed" if alone != mixed else "wrong",
    why="The pool gave the memory out again because of the order of the recordings. Replays in another order, which a second stream "
    "allows, read what somebody else wrote.",
)

# %% [markdown]
# This also happens to you, on one stream, if you keep what a replay returned. Results must be copied before the next replay (cgkit's
# `captured(x)` does; `captured.run(x)`, for engines, does not). Exercise 08-3 is about that.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7 · Predicting the pool
#
# Engines must know the pool's size *before* they record, since the rest of the memory goes to the KV cache. vLLM records two graphs,
# measures them, and extrapolates. `predict_pool` goes through every recording without a device: how many bytes each piece asks for and
# when they die is read from the compiled code, and a model of the allocator answers. **What do you expect**: how far off is it?

# %%
predicted = cgkit.predict_pool(compiled, SIZES, mode="PIECEWISE")
compared = predicted.compare(ledger)
compared[["num_tokens", "predicted_allocated_bytes", "measured_allocated_bytes", "allocated_ratio", "reason"]]

# %%
prediction = "h200-memory-prediction-llama-3.2-1b"
recordings.picture(prediction, lambda frame, about: memory_charts.prediction(frame, about=about), HERE)

# %% [markdown]
# To the byte, on the emulated pool and, for these pieces, on the GPU too. Where the two differ, the column `reason` says why (mostly temporaries
# that an operator allocates inside itself, which the generated code does not show).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8 · The bill
#
# Where does the memory of the whole device go? **What do you expect**: which share have the graphs? For the 8B shape, on a GPU with
# about 140 GiB:

# %%
recordings.picture("h200-memory-waterfall-llama-3.1-8b", memory_charts.waterfall)

# %% [markdown]
# The pool is a sliver. But "context and other" is not small, and graphs have a part in it that no pool shows. The recorded totals, of both
# shapes; *first* is the first capture of the process, *again* the same one once more after it was freed:

# %%
def bill(shape, path=None):
    runs = recordings.load(f"h200-memory-{shape}", path)["runs"]
    first, again = runs["first of the process"], runs["large to small"]
    row = {"graphs": first["graphs"], "pool": first["pool_reserved_bytes"]}
    row["rest of torch"] = first["torch_reserved_growth_bytes"] - row["pool"]
    row["outside of torch, first"] = first["driver_bytes"] - first["torch_reserved_growth_bytes"]
    row["outside of torch, again"] = again["driver_bytes"] - again["torch_reserved_growth_bytes"]
    return row | {"driver": first["driver_bytes"]}


bills = pd.DataFrame({"llama-3.2-1b": bill("llama-3.2-1b", HERE), "llama-3.1-8b": bill("llama-3.1-8b")}).T
bills.map(lambda n: human_bytes(n) if n > 10000 else n)

# %% [markdown]
# Reading it from left to right:
# - **pool**: intermediate buffers and results of all graphs.
# - **rest of torch**: workspaces, the scratch memory of the matrix product library (cuBLAS). They are taken by the *warm-ups*: before each
#   recording the step runs once unrecorded, so that nothing is recorded that happens at a first use only.
# - **outside of torch**: the driver's own memory. It holds the *executable graphs* (what each kernel is launched with), and code of kernels that is
#   loaded at first use. Captured again in the same process it is nothing that can be seen: most of it was loaded code, or is kept by the
#   driver and reused. (The 8B shape was recorded in the process of the 1B shape, after it: much was loaded already.)

# %%
eight = bills.loc["llama-3.1-8b"]
sizes_8b = len(recordings.load("h200-memory-llama-3.1-8b")["sizes"])
each_mb = eight["driver"] / sizes_8b / 1e6
deep = recordings.load("h200-memory-ledger-llama-3.1-8b").query("run == 'large to small'")
sizes_then = deep.groupby("num_tokens", sort=False)["growth_bytes"].sum() / 1e6
added_mb = sizes_then.iloc[1:].mean() + eight["outside of torch, again"] / sizes_8b / 1e6
cgkit.claim(
    [
        {
            "id": "memory-heading",
            "measured": f"8B shape, {int(eight['graphs'])} graphs of {sizes_8b} sizes: {human_bytes(eight['driver'])} by the driver's count",
            "outcome": "confirmed" if eight["driver"] > 0 else "wrong",
        },
        {
            "id": "memory-two-parts",
            "measured": f"8B: pool {human_bytes(eight['pool'])}, workspaces {human_bytes(eight['rest of torch'])}, outside of torch "
            f"{human_bytes(eight['outside of torch, first'])} at first and {human_bytes(eight['outside of torch, again'])} when captured again",
            "outcome": "wrong" if (bills["rest of torch"] > bills["pool"]).any() else "confirmed",
            "why": "There is a third part, and here it is larger than the pool: workspaces of libraries, which the warm-ups take.",
        },
        {
            "id": "memory-per-size",
            "measured": f"8B shape, {sizes_8b} sizes: {sizes_then.iloc[0]:.1f} MB of pool for the first size, {added_mb:.1f} MB for each further "
            f"one; all that recording took, workspaces and loaded code included, is {each_mb:.1f} MB a size",
            "outcome": "confirmed" if added_mb >= 10 else "wrong",
            "why": "With weak outputs in one pool a size adds hardly any memory; what recording costs comes with the first one. So an "
            "average a size says little: it falls with every size that is added.",
        },
        {
            "id": "memory-2-gib",
            "measured": f"8B shape, {sizes_8b} sizes to 64 tokens: {human_bytes(eight['driver'])}",
            "outcome": "not measured",
            "why": "The log is of one start of vLLM 0.10.1 with a model and a GPU that are not named; ours is another model with fewer sizes.",
        },
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 9 · The peak, and running out
#
# Recording needs its peak while it records. If memory runs out, it runs out here, at start-up, after weights and KV cache were given all the rest.
# Let the pool be no larger than what size 64 needs, less 512 bytes. **What do you expect**: after how many graphs does
# recording fail, large to small, and small to large? (Emulated on any machine: a network of two layers on the CPU.)

# %%
network = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(2)]).requires_grad_(False)
traced = cgkit.trace(network, torch.ones(4, 64), dynamic_arg_dims={"input": 0})
settings = cgkit.CompilationConfig(compiler="eager", cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=SIZES)
little = cgkit.compile_pieces(cgkit.split_graph(traced, []), settings)
enough = cgkit.predict_pool(little, SIZES, mode="PIECEWISE", allocator="emulated").reserved_bytes


def fails_after(largest_first):
    tight = EmulatedPlatform(limit_bytes=enough - 512)
    with Ledger(keep_blocks=False) as noted:
        try:
            cgkit.capture(little, SIZES, mode="PIECEWISE", platform=tight, largest_first=largest_first).free()
        except cgkit.CgkitError as error:
            print(f"{type(error).__name__}: {error}\n")
    return len(noted.to_frame())


failed = {"large to small": fails_after(True), "small to large": fails_after(False)}
failed

# %% [markdown]
# Both fail. But from large to small it fails *at once*, at the size that needs the most: if the first size fits, all the others will. From small
# to large it fails at the very end, after all the time was spent. The message says what was asked for and what would fit.

# %%
peaks = by_size["peak_allocated_bytes"].max()
gpu = real[real["run"] == "large to small"].groupby("num_tokens")["peak_allocated_bytes"].max()
cgkit.claim(
    [
        {
            "id": "memory-peak",
            "measured": f"recorded on a GPU: {human_bytes(facts['pool_peak_allocated_bytes'])} of the pool allocated at the peak, {facts['pool_live_after_bytes']} bytes "
            f"when all was recorded; the warm-ups beside it left {human_bytes(facts['torch_reserved_growth_bytes'] - facts['pool_reserved_bytes'])} of workspaces",
            "outcome": "confirmed" if facts["pool_peak_allocated_bytes"] > facts["pool_live_after_bytes"] else "wrong",
        },
        {
            "id": "memory-largest-first-peak",
            "measured": f"the peak is at size {int(peaks.idxmax())} here and at {int(gpu.idxmax())} on the GPU; with too little memory, large to small fails "
            f"after {failed['large to small']} graphs, small to large after {failed['small to large']}",
            "outcome": "confirmed" if failed["large to small"] < failed["small to large"] else "wrong",
            "why": "It does not lower the peak. It moves it to the beginning, where it is noticed.",
        },
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 10 · Two ways to save memory
#
# **A shorter list.** `[1, 2, 4, 8]` instead of all sizes up to 64. **What do you expect**: does the pool shrink because there are fewer
# sizes, or because the largest one is smaller?

# %%
lists = {"all": SIZES, "without 1 to 16": [32, 64], "trimmed": [1, 2, 4, 8]}
pools = {name: cgkit.predict_pool(compiled, chosen, mode="PIECEWISE") for name, chosen in lists.items()}
pd.DataFrame({"sizes": {k: str(v) for k, v in lists.items()}, "reserved_bytes": {k: p.reserved_bytes for k, p in pools.items()}})

# %% [markdown]
# Because of the largest. Five sizes fewer save nothing in the pool as long as 64 is among them; the trimmed list ends at 8. What every size
# does cost is time at start-up and the driver's executable graphs.
#
# **Graphs for decode steps only** (`FULL_DECODE_ONLY`): one graph for the whole step instead of one for each piece, only for steps in
# which every request has one token, and so for no more tokens than there may be requests. Steps with a prompt in them run compiled, without a graph.
#
# What do both cost? That depends on the traffic. Here: 300 made-up requests (8 a second; prompts of 200 and answers of 100 tokens on average),
# and how many tokens each step would hold (simulated; notebook 10 serves such traffic). What a step costs, in milliseconds, and what a size
# takes are those of the 8B shape, recorded on an H200. **What do you expect**: which way saves more, and which has more steps without a graph?

# %%
from cgkit.capturing.sizes import ladder
from cgkit.measuring.make_requests import synthetic_requests
from cgkit.measuring.plan_sizes import two_ways_to_save_memory
from cgkit.measuring.pool_model import recorded_memory
from cgkit.measuring.simulate_traffic import simulate_traffic
from cgkit.measuring.step_cost import recorded_step_cost

cost = {mode: recorded_step_cost("llama-3.1-8b", mode) for mode in ("PIECEWISE", "FULL")}
room = {mode: recorded_memory("llama-3.1-8b", mode) for mode in ("PIECEWISE", "FULL")}
requests = synthetic_requests(300, rate=8, prompt_tokens=200, output_tokens=100)
traffic = simulate_traffic(requests, cost["FULL"], max_num_seqs=64)
saving = two_ways_to_save_memory(traffic, cost, memory=room, sizes=ladder("vllm-0.33", 64), splits=32, max_num_seqs=64)
saving

# %% [markdown]
# `captured_steps` is the share of steps that replay a graph; `waste` the share of padding in the tokens that ran. The trimmed list saves most and loses
# the steps above 8 tokens, one step in fifty here. Decode steps only: the largest graph is that of 64 tokens, not of 128, and the mean step costs
# even less than before, because one full graph a step is cheaper than 33 pieces with attention between them.

# %%
whole, trimmed, decode = (saving.iloc[row] for row in range(3))
decode_graphs, _ = record(mode="FULL_DECODE_ONLY")
cgkit.claim(
    [
        {
            "id": "memory-fewer-sizes",
            "measured": f"8B shape: {human_bytes(trimmed['saved_bytes'])} of {human_bytes(whole['pool_bytes'])} saved; {trimmed['captured_steps']:.1%} of "
            f"the steps replay instead of {whole['captured_steps']:.1%}",
            "outcome": "confirmed"
            if trimmed["saved_bytes"] > 0 and trimmed["captured_steps"] < whole["captured_steps"]
            else "wrong",
            "why": "It saves because it ends at 8, not because it is short.",
        },
        {
            "id": "memory-decode-only",
            "measured": f"{decode['graphs']} graphs instead of {whole['graphs']}, {human_bytes(decode['saved_bytes'])} saved, {decode['captured_steps']:.1%} of the "
            f"steps replay; here {decode_graphs.num_graphs} graphs instead of {captured.num_graphs}",
            "outcome": "confirmed" if decode["graphs"] < whole["graphs"] and decode["saved_bytes"] > 0 else "wrong",
            "why": "Mixed steps run compiled, without a graph: they are those that do not replay.",
        },
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Your turn
#
# `check(id, answer)` says whether an answer is right, nearly right or wrong, and what is off. `hint(id)` helps, `solution(id)` says where the
# solution stands.
#
# ### 08-1 · Who made the pool grow?

# %%
question("08-1")

# %%
check("08-1", ...)

# %% [markdown]
# ### 08-2 · When may the memory go?

# %%
question("08-2")

# %%
check("08-2", ...)

# %% [markdown]
# ### 08-3 · All answers are the same

# %%
question("08-3")


# %%
def collect(run, batches):
    return [run(batch) for batch in batches]


check("08-3", ...)

# %% [markdown]
# ### 08-4 · When the order does not matter

# %%
question("08-4")

# %%
check("08-4", ...)

# %% [markdown]
# ### 08-5 · An allocator of your own

# %%
question("08-5")

# %%
check("08-5", ...)

# %% [markdown]
# ## What comes next
# Shared memory is one way in which a graph can silently compute nonsense. **09 · When it goes wrong** has the others, and what finds them.
# **10 · Serving real traffic** chooses the sizes to record from real batches, under a budget of bytes. `cgkit.reset()` frees every graph of this notebook.

# %% tags=["stamp"]
from cgkit.measuring.stamp import stamp

print(stamp())
