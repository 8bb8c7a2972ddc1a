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
# # 07 · Which graph? Sizes, padding, keys
#
# **The question.** A recorded graph is for one number of tokens. A server meets any number. Which sizes should be recorded, what
# happens to a batch in between, and who decides which graph a step replays?
#
# **Afterwards you can**
# - say for any batch what it is padded to, in which mode it runs and under which key, or why it has no graph;
# - read the ladders of vLLM, SGLang and TensorRT-LLM, and see where each is coarse;
# - tell the two ratios that are both called "waste" apart;
# - choose between NONE, PIECEWISE, FULL, FULL_DECODE_ONLY and FULL_AND_PIECEWISE;
# - choose sizes for your own traffic under a memory budget.
#
# **Time**: 50 minutes to read; the cells run in about one minute on two cores.
# **Needs**: cgkit. Sizes, keys and plans need no GPU at all. Where something is recorded on a CPU, the graphs are *emulated*:
# the same rules, not the speed. Measured times come from recordings, which say where they were made.
#
# What notebook 06 showed, in two sentences: a graph is a list of kernel launches with fixed shapes and fixed addresses. To run
# it on fewer tokens than it was recorded for, the input's unused rows are filled with *padding*, and their results dropped.

# %% tags=["setup"]
# Only Colab needs this cell: it fetches cgkit there. Anywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    get_ipython().system("test -d /content/cgkit || git clone -q --depth 1 -b main https://github.com/OWNER/NAME /content/cgkit")
    get_ipython().run_line_magic("cd", "-q /content/cgkit/notebooks")
    get_ipython().run_line_magic("run", "colab.py")

# %%
import ipywidgets
import pandas as pd
import torch
from IPython.display import display

import cgkit
from cgkit import BatchDescriptor, CaptureSizes, CudagraphDispatcher, plotting, recordings
from cgkit.capturing import ladder
from cgkit.exercises import check, hint, question, solution
from cgkit.measuring.padding import expected_waste, padding, planned_coverage
from cgkit.plotting import Picture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the one setting

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1 · One size, one graph
#
# Why not record every size from 1 to 512? Each takes time and memory, and each piece of the model has one: 81 pieces (80 layers)
# times 512 sizes are 41,472 graphs. So some sizes are recorded, and every batch is padded to the next. The list is a *ladder*.
#
# **What do you expect?** With 1, 2, 4 and every multiple of 8: what becomes of a batch of 3, 33, 250, 257?

# %%
article = CaptureSizes.resolve(cgkit.CompilationConfig(max_num_seqs=256), "article")
print(article)
article.to_frame([3, 9, 33, 250, 256, 257])

# %% [markdown]
# Mind the two ratios. *Waste of real* divides the padding by the tokens that were asked for; *waste of padded* by those that run.
# 33 to 40 is 21 % by the first and 17.5 % by the second. Both are in use, so a chart must name its divisor.
#
# Why are the steps finer at the bottom? Because waste is relative. Seven rows of padding are little beside 249, and seven times what was
# asked for beside 1. And decode steps are often small: as many tokens as there are requests at that moment.
#
# What do the padding rows do? They are computed like the others, and nobody reads what comes out. They belong to no request and have
# no place in the KV cache, so attention stores nothing of theirs where a request would find it.
#
# 257 is above the largest size. It runs compiled, without a graph: no padding, and the whole price of the launches. (Where several GPUs
# share each layer, which is called *tensor parallelism*, engines pad it to a multiple of the number of GPUs.)
#
# How is the size found? Not by searching: a table made beforehand has one entry for each batch size.

# %%
table = article.bs_to_padded_graph_size
print(f"{len(table)} entries; table[33] = {table[33]}, table[250] = {table[250]}")
try:
    article.pad_for_cudagraph(257)
except cgkit.CgkitError as error:
    print(error)

# %%
rows = article.to_frame(range(1, 257)).set_index("batch")
most_padding = int(rows["padding_tokens"].max())
small, large = rows["waste_of_real"][5], rows["waste_of_real"][249]
off = {33: rows.loc[33], 250: rows.loc[250]}
v1, today = (CaptureSizes.resolve(cgkit.CompilationConfig(max_num_seqs=256), name) for name in ("vllm-0.10.1", "vllm-0.33"))
steps_of_8 = set(article) == {1, 2, 4, *range(8, 257, 8)}
cgkit.claim([
    dict(id="sizes-heading", measured=f"{len(article)} sizes serve {article.largest} batch sizes",
         outcome="confirmed" if len(article) < article.largest else "wrong"),
    dict(id="sizes-ladder", measured=f"1, 2, 4 and every 8: {steps_of_8}; {len(ladder('article', 8192))} sizes at 8192 requests, "
         f"and {len(v1)} sizes in 0.10.1's V1 engine at 256", outcome="overtaken" if steps_of_8 else "wrong",
         why="This is the list of vLLM's older V0 engine. V1 goes up to twice max_num_seqs, at most 512; 0.33 takes steps of "
         "16 above 256."),
    dict(id="sizes-upper-end", measured=f"max_num_seqs 250 ends at {ladder('article', 250)[-1]}, 256 at {article.largest}",
         outcome="overtaken", why=f"V1 ends at {v1.largest}, 0.33 at {today.largest}."),
    dict(id="sizes-35", measured=f"{len(article)} sizes; 0.10.1's V1 {len(v1)}, 0.33 {len(today)}",
         outcome="overtaken" if len(article) == 35 else "wrong", why="35 is right for the printed list, which V1 does not use."),
    dict(id="sizes-fine-small", measured=f"5 to 8 is {small:.0%} of the real tokens, 249 to 256 {large:.1%}",
         outcome="confirmed" if small > large else "wrong"),
    dict(id="sizes-33-to-40", measured=f"{off[33]['waste_of_real']:.1%} of the real tokens, {off[33]['waste_of_padded']:.1%} of the "
         "padded", outcome="confirmed" if round(100 * off[33]["waste_of_real"]) == 21 else "wrong",
         why="With the real tokens as the divisor."),
    dict(id="sizes-250-to-256", measured=f"{off[250]['waste_of_real']:.1%} of the real tokens",
         outcome="confirmed" if round(100 * off[250]["waste_of_real"], 1) == 2.4 else "wrong"),
    dict(id="sizes-at-most-7", measured=f"at most {most_padding} tokens", outcome="confirmed" if most_padding == 7 else "wrong"),
    dict(id="sizes-lookup-table", measured=f"{len(table)} entries for sizes up to {article.largest}",
         outcome="confirmed" if all(table[n] == min(s for s in article if s >= n) for n in range(1, 257)) else "wrong"),
    dict(id="sizes-beyond-largest", measured=f"captured at 257: {article.is_captured(257)}; it runs {article.pad(257)} tokens",
         outcome="confirmed" if not article.is_captured(257) else "wrong"),
    dict(id="sizes-tensor-parallel", measured=f"by the table alone: 257 tokens at size 4 give {CaptureSizes([8], tensor_parallel_size=4).pad(257)}",
         outcome="not measured", why="There is no tensor parallelism on one GPU."),
])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2 · The ladders of the engines
#
# The same idea in five hands. Move the slider: how many sizes, and how fine where? (Where no kernel runs, the pictures below it
# show 64.)


# %%
def stairs(most):
    picked = padding(["article", "vllm-0.33", "sglang", "tensorrt-llm"], max_num_seqs=most)
    return Picture(picked.plot())


slider = ipywidgets.IntSlider(value=64, min=8, max=512, step=8, description="requests")
_ = ipywidgets.interact(lambda most: display(stairs(most)), most=slider)

# %%
stairs(64)

# %%
ladders = padding(max_num_seqs=256)
ladders.summary()

# %% [markdown]
# - **TensorRT-LLM** doubles up to 128: few sizes, and a batch of 65 runs as 128. It records token counts for prompts too, so it
#   reaches 3072.
# - **SGLang** is fine at the bottom (12 is a size) and grows coarser.
# - **vLLM** had 67 sizes in 0.10.1's V1 engine and has fewer today, coarser above 256.
#
# The waste by batch size. **What do you expect**: for which batches is it largest, and with which ladder?

# %%
Picture(padding(["article", "sglang", "tensorrt-llm"], max_num_seqs=128).plot_waste("padded"))

# %% [markdown]
# Such a curve counts each batch once. Your traffic does not: it has a *distribution*. Here a server is simulated, for requests
# that arrive at random, with the step times of a recording. It gives how often each batch size comes. The rate below is a choice: 220 requests a second
# spread the batches over the whole ladder. At 60 a second nearly all of them are small, and whatever list one plans for them gains
# next to nothing. Change it and run on from here.

# %%
from cgkit.measuring.make_requests import synthetic_requests
from cgkit.measuring.simulate_traffic import simulate_traffic
from cgkit.measuring.step_cost import recorded_step_cost

step_cost = recorded_step_cost("llama-3.2-1b")
requests = synthetic_requests(600, rate=220, prompt_tokens=64, output_tokens=128, seed=7)
traffic = simulate_traffic(requests, step_cost, max_num_seqs=64)
expected = expected_waste(traffic.to_frame().query("kind == 'decode'"), padding(max_num_seqs=64))
Picture(expected.plot("padded"))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3 · Modes: one graph or several
#
# Two kinds of batch come. A **decode** batch: every request has one new token. A **mixed** batch: some requests bring a whole
# prompt. The shape "40 tokens" fits both, but attention's work does not. In a decode batch it is always one query a request. In a
# mixed batch it depends on how the 40 tokens fall on requests, and a *whole* graph freezes what the host decides from one such split: which
# kernel is started, and how it is laid out. (How long each request is changes in a decode batch too. An attention that may be
# recorded reads that from a tensor at a fixed address, which is filled anew before each step: notebook 03. In the mode FULL
# mixed batches are recorded whole as well, with a kernel that is laid out for any split. Not every attention has one.)
#
# A *piecewise* graph leaves attention out, so it serves both. A whole (*full*) graph is cheaper. Hence five modes:

# %%
modes = pd.DataFrame([
    {"mode": mode.name, "decode batches": mode.decode_mode().name, "mixed batches": mode.mixed_mode().name,
     "two routes": mode.separate_routine()} for mode in cgkit.CUDAGraphMode
])
modes

# %% [markdown]
# **What do you expect?** Sizes up to 16, at most 8 requests, a Llama of four layers. Which mode records the most graphs, and
# which batches have none? All five are recorded below, one after the other (on a CPU: emulated).

# %%
from cgkit.serving import Runner, load_model

llama = load_model("tiny-llama", device=DEVICE)
config = cgkit.CompilationConfig(compiler="eager", cudagraph_capture_sizes=[1, 2, 4, 8, 16])
runner = Runner(llama.model, config=config, max_num_seqs=8, max_model_len=64)
modes_table = cgkit.capture_modes(runner)
modes_table.modes_frame()[["asked", "decode", "mixed", "keys", "graphs", "total_s", "pool_reserved_bytes", "emulated"]]

# %%
Picture(modes_table.plot())

# %% [markdown]
# Which batches get what, as a strip. Move the mode:


# %%
def strip(mode):
    return Picture(planned_coverage([1, 2, 4, 8, 16, 24, 32, 64], mode, max_num_seqs=32, most=72).plot())


names = [mode.name for mode in cgkit.CUDAGraphMode if mode]
_ = ipywidgets.interact(lambda mode: display(strip(mode)), mode=ipywidgets.Dropdown(options=names, value="FULL_AND_PIECEWISE"))

# %%
strip("FULL_AND_PIECEWISE")

# %%
strip("FULL_DECODE_ONLY")

# %% [markdown]
# FULL_DECODE_ONLY is for a server that only decodes (another one reads the prompts): no graphs for mixed batches, and their
# memory saved. **What do you expect**: which mode is the fastest, and by how much? Recorded on an H200 (batch 8 on a slower host:
# compare the modes of a row):

# %%
headlines = [recordings.load(f"h200-headline-{shape}") for shape in ("opt-125m", "llama-3.2-1b")]
both = pd.concat(headlines)
fastest = both[both["mode"].isin(["compiled", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])]
wall = fastest.pivot_table(index=["model", "case", "batch"], columns="mode", values="wall_ms")
print(f"ms, recorded on {headlines[0].attrs['recorded']}")
wall.round(3).assign(best=wall.idxmin(axis=1))

# %%
best = wall.idxmin(axis=1)
by_mode = modes_table.modes_frame().set_index("asked")["graphs"]
wins = int((best == "FULL_AND_PIECEWISE").sum())
routes = modes_table.routes_frame()
pair = routes[routes["asked"] == "FULL_AND_PIECEWISE"]
taken = {kind: set(pair[(pair["batch"] == kind) & (pair["to_tokens"] <= 8)]["runtime_mode"]) for kind in ("decode", "mixed")}
mixed_sizes = traffic.to_frame().query("kind == 'mixed'")["batch"].nunique()
decode_sizes = traffic.to_frame().query("kind == 'decode'")["batch"].nunique()
cgkit.claim([
    dict(id="mode-heading", measured=f"graphs by mode: {by_mode.to_dict()}",
         outcome="confirmed" if by_mode["PIECEWISE"] > by_mode["FULL"] > 0 else "wrong"),
    dict(id="mode-five-values", measured=f"{len(modes)} modes, {int(modes['two routes'].sum())} of them pairs",
         outcome="confirmed" if (len(modes), int(modes["two routes"].sum())) == (5, 2) else "wrong"),
    dict(id="mode-two-routes", measured=f"up to 8 tokens decode takes {taken['decode']}, mixed {taken['mixed']}",
         outcome="confirmed" if taken == {"decode": {"FULL"}, "mixed": {"PIECEWISE"}} else "wrong"),
    dict(id="mode-decode-stable", measured=f"simulated traffic: decode batches have {decode_sizes} different sizes, all at most 64",
         outcome="confirmed" if decode_sizes <= 64 else "wrong"),
    dict(id="mode-mixed-varies", measured=f"simulated traffic: {mixed_sizes} different mixed sizes, {decode_sizes} decode sizes",
         outcome="confirmed" if mixed_sizes > decode_sizes else "wrong"),
    dict(id="mode-both-best", measured=f"fastest in {wins} of {len(best)} recorded cases", outcome="confirmed" if wins > len(best) / 2 else "wrong",
         why="Of two model shapes on one GPU. vLLM has made it the default since."),
])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4 · The key and the dispatcher
#
# When may two batches share a graph? When their **key** is equal. It has two fields, and no more, because every further field
# divides the batches into more kinds, each with graphs of its own:

# %%
key = BatchDescriptor(num_tokens=8, uniform_decode=True)
print(key._fields, key, "-> relaxed:", key.non_uniform)

# %% [markdown]
# `num_tokens` counts *after* padding, since that is what the shapes of all operators depend on. `uniform_decode` says that every
# request has one new token: then a graph may hold the attention kernel made for decode. The *dispatcher* tries, in this order: a
# FULL graph of this very key; a FULL graph for any batch of the size (the *relaxed* key); a PIECEWISE graph for any batch; none.
# A decode batch may take a graph for any batch: its general kernel gives the same result, a little slower, and any replay is
# cheaper than none. The other way round is wrong, since the decode kernel knows only one query a request.
#
# **What do you expect?** FULL_AND_PIECEWISE, whole graphs for decode up to 8. Which graph does a decode batch of 16 get?

# %%
dispatcher = CudagraphDispatcher("FULL_AND_PIECEWISE", CaptureSizes([1, 2, 4, 8, 16]))
early = dispatcher.dispatch(key)
dispatcher.initialize_cudagraph_keys(dispatcher.planned_keys(uniform_sizes=[1, 2, 4, 8]))
dispatcher.explain(BatchDescriptor(16, uniform_decode=True))

# %%
pd.DataFrame([
    {"tokens": tokens, "decode": uniform, **dispatcher.route(tokens, uniform)._asdict()}
    for tokens, uniform in [(5, True), (5, False), (13, True), (17, False)]
])

# %% [markdown]
# `route` does padding and dispatch at once. It is asked once a step, and its answer is written into the step's *forward context*.
# Wrappers ask nobody: they compare the mode that stands there with their own, and act if it is theirs. So a FULL wrapper can
# stand around the PIECEWISE ones on the same way through the model, and only one kind is awake in a step:

# %%
fixed, calls = torch.ones(4, device=DEVICE), []
platform = cgkit.get_platform("auto", DEVICE)
pool = platform.new_pool()
inner = cgkit.CUDAGraphWrapper(lambda x: calls.append("inner") or x * 2, "PIECEWISE", platform, pool, name="piece")
outer = cgkit.CUDAGraphWrapper(lambda x: calls.append("outer") or inner(x), "FULL", platform, pool, name="step")


def graphs_after(mode):
    with cgkit.set_forward_context(cudagraph_runtime_mode=cgkit.CUDAGraphMode[mode], batch_descriptor=BatchDescriptor(4)):
        outer(fixed)
    return {"mode of the step": mode, "FULL graphs": len(outer.entries), "PIECEWISE graphs": len(inner.entries)}


outer.clear(), inner.clear()
awake = pd.DataFrame([graphs_after(mode) for mode in ("NONE", "PIECEWISE", "FULL")])
awake

# %%
full_keys = len(modes_table.to_frame().query("asked == 'FULL'"))
tries = dispatcher.explain(BatchDescriptor(64, uniform_decode=True))
held = [tuple(row) for row in awake.drop(columns="mode of the step").itertuples(index=False)]
fallback = dispatcher.route(16, True)
decode_meta, mixed_meta = runner.inputs.fill_dummy(8, True).decode_only, runner.inputs.fill_dummy(8, False).decode_only
cgkit.claim([
    dict(id="key-heading", measured=f"5 and 7 tokens have one key, {tuple(dispatcher.route(5, False).key)}: one graph",
         outcome="confirmed" if dispatcher.route(5, False).key == dispatcher.route(7, False).key else "wrong"),
    dict(id="key-two-fields", measured=f"{key._fields}", outcome="overtaken" if len(key._fields) == 2 else "wrong",
         why="As in 0.10.1. vLLM's key has grown since: requests and LoRA adapters are in it."),
    dict(id="key-minimal", measured=f"PIECEWISE: decode and mixed batches of 16 share {dispatcher.route(16, False).key}",
         outcome="confirmed" if dispatcher.route(16, False).key == fallback.key else "wrong"),
    dict(id="key-uniform", measured=f"the metadata asks for the decode kernel: uniform {decode_meta}, mixed {mixed_meta}",
         outcome="confirmed" if decode_meta and not mixed_meta else "wrong"),
    dict(id="key-fallback", measured=f"a decode batch of 16 takes {fallback.mode.name} {tuple(fallback.key)}",
         outcome="confirmed" if fallback.key == BatchDescriptor(16, False) else "wrong"),
    dict(id="key-order", measured=f"{len(tries)} tries: " + ", ".join(tries["mode"]), outcome="confirmed" if len(tries) == 4 else "wrong"),
    dict(id="key-not-initialised", measured=f"before the keys were set: {early[0].name}",
         outcome="confirmed" if early[0].name == "NONE" else "wrong"),
    dict(id="key-trust", measured="the wrappers above recorded what the context said, although no dispatcher was asked",
         outcome="confirmed" if held[-1] == (1, 1) else "wrong", why="cgkit still compares addresses, whoever decided."),
    dict(id="key-mode-compare", measured=f"(FULL, PIECEWISE) graphs after NONE, PIECEWISE, FULL: {held}",
         outcome="confirmed" if held == [(0, 0), (0, 1), (1, 1)] else "wrong"),
    dict(id="key-coexist", measured="both kinds lie on one call: step around piece",
         outcome="confirmed" if held[-1] == (1, 1) else "wrong"),
    dict(id="sizes-one-graph-each", measured=f"{full_keys} FULL keys for 5 sizes",
         outcome="confirmed" if full_keys == 5 else "wrong"),
])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5 · Sizes for your traffic, under a budget
#
# A ladder is a guess at everybody's traffic. With the distribution of your own, the best list can be computed:
# `plan_capture_sizes` takes how often each batch comes, what a step of each size costs with and without a graph, and what a
# size takes in memory. It returns the list with the least expected cost that fits.
#
# **What do you expect?** With only six graphs allowed: where do the six sizes lie, and by how much does the article's list,
# cut to six, lose?

# %%
decode_only = traffic.to_frame().query("kind == 'decode'")
plan = cgkit.plan_capture_sizes(decode_only, step_cost, max_graphs=6)
print(plan)
Picture(plan.plot())

# %%
from cgkit.measuring.compare_sizes import compare_sizes

comparison = compare_sizes(plan, max_num_seqs=64)
Picture(comparison.plot())

# %% [markdown]
# Lists that are cut lose their *largest* sizes, as the engines' own option for the largest size does it. Batches above run
# without a graph, and that is the expensive mistake: padding costs some per cent, a missing graph several times the step.
# (The stroke in each bar is the cost with the *best* sizes of that list instead of its smallest: most of the loss is gone.)
# The plan puts its largest size where the largest batches are, and spends the rest where batches are frequent.
#
# Move the number of graphs: from when on does another one no longer pay?

# %%
budgets = pd.DataFrame([
    {"graphs allowed": most, "expected step, ms": cgkit.plan_capture_sizes(decode_only, step_cost, max_graphs=most).expected_step_cost}
    for most in (1, 2, 3, 4, 6, 8, 12, 16, 32)
])
_ = ipywidgets.interact(
    lambda most: display(Picture(cgkit.plan_capture_sizes(decode_only, step_cost, max_graphs=most).plot())),
    most=ipywidgets.IntSlider(value=4, min=1, max=16, description="graphs"),
)
budgets.round(4)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Your turn
# `check` says right, nearly or wrong. `hint("07-1")` helps, `solution("07-1")` says where a solution stands.
# Put your answer in the place of `...`.
#
# ### 07-1 · Pad

# %%
question("07-1")

# %%
check("07-1", ...)

# %% [markdown]
# ### 07-2 · Predict mode and key

# %%
question("07-2")

# %%
check("07-2", ...)

# %% [markdown]
# ### 07-3 · Write the dispatcher

# %%
question("07-3")

# %%
check("07-3", ...)

# %% [markdown]
# ### 07-4 · Beat the ladder
# `cgkit.exercises.nb07` holds the traffic (`HISTOGRAM`, steps by tokens), `step_ms(tokens, captured)`, the bytes of a size and
# the budget.

# %%
question("07-4")

# %%
check("07-4", ...)

# %% [markdown]
# ## What comes next
# A size was "some bytes" here. What are they, which of them are shared, and why is the large size recorded first? **08 · Memory.**

# %% tags=["stamp"]
from cgkit.measuring.stamp import stamp

print(stamp())
