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
# # 10 · Serving real traffic
#
# **The question.** Until now *we* decided how many tokens a step has. In a service the requests decide. Which steps come up, which graph
# does each take, how much of the work is padding, and which sizes should have been recorded?
#
# **Afterwards you can**
# - follow a request through an engine: admission, prefill, decode, the last token;
# - say from a step's *batch descriptor* which recorded graph it takes, and why not another;
# - read latencies as a service states them (time to first token, time per output token, p50 and p99);
# - turn a histogram of batches into a list of sizes under a budget of memory, and paste it into vLLM, SGLang or TensorRT-LLM;
# - say what a cold start consists of, and what a split deployment saves.
#
# **Time**: 50 minutes to read; the cells run in about one minute on two cores.
# **Needs**: cgkit; of the notebooks before, 07 (sizes and padding) and 08 (memory). No GPU. The engine, its scheduler and its batches are real. Without
# a GPU its graphs are *emulated* and every time measured here is this CPU's, which charts say; where times of a GPU matter they are recorded ones.

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
from IPython.display import display

import cgkit
from cgkit import BatchDescriptor, Engine, recordings
from cgkit.exercises import check, hint, question, solution
from cgkit.exercises.nb10 import busy_hour
from cgkit.measuring.compare_sizes import compare_sizes, readable
from cgkit.measuring.make_requests import fit_requests, synthetic_requests
from cgkit.measuring.plan_sizes import price_sizes, two_ways_to_save_memory
from cgkit.measuring.pool_model import recorded_memory
from cgkit.measuring.serve_traffic import serve_traffic
from cgkit.measuring.simulate_traffic import simulate_traffic
from cgkit.measuring.step_clock import StepClock, recorded_step_ms
from cgkit.measuring.step_cost import recorded_step_cost
from cgkit.plotting import About, Picture, human_bytes, plan_charts, serve_charts, start_charts
from cgkit.serving.llama import PRESETS
from cgkit.serving.runner import Runner
from cgkit.serving.weights import build_model, random_weights

GPU = torch.cuda.is_available()  # the one setting
DEVICE, DTYPE, COMPILER = ("cuda", torch.bfloat16, "inductor") if GPU else ("cpu", torch.float32, "eager")
pd.set_option("display.width", 200, "display.max_colwidth", 90)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 1 · An engine, step by step
#
# A request is a prompt and a wish for so many tokens. Answering it has two phases:
# - **prefill**: all tokens of the prompt go through the model at once. Their keys and values are kept in the **KV cache**, and the last one gives the
#   first token of the answer;
# - **decode**: one token a step, the one that was just made, until the answer is long enough.
#
# One decode step for one request reads all weights to make a single token. For twenty requests it reads them just the same and makes twenty. So an engine puts
# all requests that are there into one step. Whoever finishes leaves, whoever arrives joins at the next step. This is **continuous batching**.
#
# At most `max_num_seqs` requests run at once: the *seats*. A step may hold at most `max_num_batched_tokens` tokens. A longer prompt is cut and prefilled over several steps (**chunked prefill**), so that the
# others are not kept waiting. The limit also says up to which size graphs are worth recording: no step is larger. (Here it is 64, and so is the largest
# recorded size.)
#
# A tiny Llama with random weights (what it says is nonsense, how it is served is not), and three ways to run a step: compiled, but without graphs (NONE); each piece recorded, with attention
# between the pieces (PIECEWISE); and FULL_AND_PIECEWISE, where decode steps have a graph of the whole step.

# %%
SIZES, SEATS, LONGEST = [1, 2, 4, 8, 16, 32, 64], 32, 256
shape = PRESETS["tiny-llama"].scaled(num_hidden_layers=2)
model = build_model(shape, random_weights(shape, DTYPE, DEVICE), dtype=DTYPE, device=DEVICE)
runners = {}
for mode in ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE"):
    sizes = None if mode == "NONE" else SIZES
    config = cgkit.CompilationConfig(compiler=COMPILER, cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
    limits = {"max_num_seqs": SEATS, "max_num_batched_tokens": 64, "max_model_len": LONGEST}
    runners[mode] = Runner(model, config=config, **limits)
    runners[mode].capture_model()

# %% [markdown]
# Three requests at once: prompts of 5, 90 and 3 tokens; 4, 3 and 6 tokens wanted; at most 64 tokens a step. **What do you expect**: how many
# tokens does each of the first three steps hold?

# %%
engine = Engine(runners["FULL_AND_PIECEWISE"], async_scheduling=False)
for prompt, wanted in ((5, 4), (90, 3), (3, 6)):
    engine.add_request(list(range(1, prompt + 1)), max_tokens=wanted, stop_at_eos=False)
answers = [output for output in engine.run() if output.finished]
steps = engine.to_frame()
steps[["step", "kind", "num_reqs", "num_tokens", "admitted", "new_tokens", "waiting"]]

# %% [markdown]
# The first step holds the whole prompt of 5 and the first 59 tokens of the prompt of 90: that makes 64. The third request has to wait for a step. In the
# second one, the first request already decodes (1 token), the second prompt's last 31 tokens follow, and the third prompt comes in (3): 35 tokens. Steps with a
# part of a prompt in them are called *mixed*; if every request has one token it is a *decode* step. From then on there is one token for each request, and the
# step shrinks as answers are finished.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 2 · Which graph does a step take?
#
# Once a step the engine asks the dispatcher. It pads the number of tokens to the next recorded size and describes the step by a **BatchDescriptor**: (padded
# tokens, is it a decode step?). It then tries *keys*, from the most special to the most general:
# 1. a FULL graph for exactly this descriptor; 2. a FULL graph for any batch of this size; 3. the PIECEWISE graphs of this size; else no graph.
#
# **What do you expect** for the mixed steps above, and for the decode steps?

# %%
steps[["step", "kind", "num_tokens", "descriptor", "keys_tried", "mode"]]

# %% [markdown]
# A mixed step has no FULL graph here: attention for a prompt of any length is another kernel than attention for one token, and only the latter was recorded. It
# still takes the recorded pieces, with attention run in between. All decode steps replay one graph, the whole step. The same table, asked by hand for a step that
# nobody has had yet, larger than the largest size:

# %%
runners["FULL_AND_PIECEWISE"].executor.captured.dispatcher.explain(BatchDescriptor(65, False))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 3 · Nobody notices the others
#
# An answer must not depend on who else is served. Not even if memory runs out: then the engine takes the KV blocks of the youngest request (**preemption**), and computes
# them again later. A cache so small that this must happen, and six requests. **What do you expect**: how many answers differ from those of each request served alone?

# %%
tight = Runner(model, config=runners["NONE"].executor.config, max_num_seqs=6, max_model_len=64, kv_cache_tokens=128)
prompts = [[7 * number + k for k in range(1, 9)] for number in range(6)]
alone = [tight.generate([prompt], max_tokens=24, stop_at_eos=False)[0].token_ids for prompt in prompts]
crowded = Engine(tight, async_scheduling=False)
names = [crowded.add_request(prompt, max_tokens=24, stop_at_eos=False) for prompt in prompts]
together = {output.request_id: output.token_ids for output in crowded.run() if output.finished}
equal = sum(list(together[name]) == list(answer) for name, answer in zip(names, alone))
print(f"{crowded.num_preemptions} preemptions; {equal} of {len(prompts)} answers are token for token the same as alone")

# %% [markdown]
# (One can count on that in float32, as this notebook has it on a CPU. In bfloat16, as on a GPU, a batch of another size may round the last bit of a product
# differently, and where two tokens are nearly equally likely that can decide between them. It need not happen.)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 4 · Requests that arrive over time
#
# Real traffic is not polite. Arrivals come in bunches; a few prompts and answers are very long. cgkit reads traces in the format of Azure's public ones (`TIMESTAMP,ContextTokens,
# GeneratedTokens`), and makes up traffic of that character: independent arrivals (a *Poisson process*) and *log-normal* lengths, from a seed.

# %%
made_up = synthetic_requests(80, rate=30, prompt_tokens=24, output_tokens=40, seed=1)
requests = fit_requests(made_up, LONGEST).trace  # what is longer than the model allows is cut
frame = requests.to_frame()
print(requests)
frame.describe().loc[["mean", "50%", "max"]].round(2)

# %% [markdown]
# Served in real time: the engine waits for each arrival. What a user sees is the **time to first token** (TTFT: waiting, and prefill) and from then on the **time per output
# token** (TPOT). *p50* is the median; *p99* is what only one request of a hundred exceeds. (The same from a terminal: `cgkit bench serve --synthetic 80 --rate 30`.)
#
# Before that, a look at the counters of compilation, and after it another. **What do you expect**: what was traced, compiled or recorded while requests were served?

# %%
COUNTED = ["num_graphs_seen", "num_backend_compilations", "num_inductor_compiles", "num_eager_compiles", "num_cudagraph_captured"]


def counted():
    return pd.Series({name: getattr(cgkit.compilation_counter, name) for name in COUNTED})


before = counted()
live = serve_traffic(Engine(runners["FULL_AND_PIECEWISE"]), fit_requests(requests, LONGEST, limit=30).trace, label="FULL_AND_PIECEWISE")
during = counted() - before
kind = "real graphs" if GPU else "emulated graphs: every time here is this CPU's"
print(f"{kind}\n{live}\n\nwhile serving: {during.to_dict()}")

# %%
tokens, shapes = live.steps["num_tokens"], live.steps["num_padded_tokens"].nunique()
cgkit.claim(
    [
        {
            "id": "why-not-tokens-vary",
            "measured": f"{len(tokens)} steps had {tokens.nunique()} different numbers of tokens (from {tokens.min()} to {tokens.max()}), and the number "
            f"changed {(tokens.diff().fillna(0) != 0).sum()} times; padded, they are {shapes}",
            "outcome": "confirmed" if tokens.nunique() > shapes else "wrong",
            "why": "Not at every single step, as decode steps repeat while nobody comes or leaves; but all the time.",
        },
        {
            "id": "why-not-no-surprise",
            "measured": f"{int(during.sum())} traces, compilations and recordings during {len(tokens)} steps",
            "outcome": "confirmed" if during.sum() == 0 else "wrong",
            "why": "Everything was done by capture_model. Afterwards a lock makes a recording an error.",
        },
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 5 · The same traffic, by a GPU's clock
#
# With so tiny a model, or on a CPU, the three modes tell nothing about a real service. But *whom* a step serves depends on how long the steps before took. So let the engine serve for real and let a
# clock decide when a step is over: `StepClock` moves by what an H200 took for a step of the same mode and size (8B shape, recorded). Batches, queues and latencies are then what
# that GPU would have had, as far as a step's time depends on mode and size alone.
#
# **What do you expect**: graphs make a decode step of 8 tokens about twice as fast. What happens to the time per token, to the time to first token, and to the *number* of steps?

# %%
served = {}
for mode, runner in runners.items():
    engine = Engine(runner, async_scheduling=False)
    clock = StepClock(engine, recorded_step_ms("llama-3.1-8b"))
    served[mode] = serve_traffic(engine, requests, label=mode, clock=clock, sleep=clock.sleep)
made_on = recordings.about("h200-crossover-llama-3.1-8b").recorded
columns = ["steps", "full_steps", "piecewise_steps", "uncaptured_steps", "mean_decode_batch", "padding_of_computed"]
columns += ["ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"]
print(f"step times: 8B shape, recorded on {made_on}")
pd.DataFrame({mode: each.summary() for mode, each in served.items()}).loc[columns].T.astype(float).round(2)

# %%
everyone = pd.concat([each.requests.assign(mode=mode) for mode, each in served.items()])
every_step = pd.concat([each.steps.rename(columns={"mode": "taken"}).assign(mode=mode) for mode, each in served.items()])
clocked = About(batch=f"{len(requests)} made-up requests, 30 a second", device=f"served here; step times: 8B shape on {made_on}")
Picture(serve_charts.latencies(everyone, "ttft_ms", clocked))

# %%
Picture(serve_charts.steps_taken(every_step, clocked))

# %% [markdown]
# Three things to see.
# - Without graphs there are **fewer** steps: each lasts longer, more requests arrive meanwhile, so the batches are larger. An engine does not get slower by the factor of its step; it
#   serves more people at once and each waits longer.
# - PIECEWISE and FULL_AND_PIECEWISE are close: at this size of model attention between the pieces costs little.
# - A quarter of what is computed with graphs is **padding**. That is the price of recording few sizes, and the next section's subject.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 6 · The histogram, and what is padded
#
# Which steps came up? `histogram()` counts them by kind and by tokens before padding.

# %%
histogram = served["FULL_AND_PIECEWISE"].histogram().rename(columns={"batch_size": "batch"})
decode_cost = recorded_step_cost("llama-3.1-8b", "FULL")
priced = price_sizes(SIZES, histogram, decode_cost)
Picture(priced.plot(clocked))

# %% [markdown]
# A bar is a number of tokens, a line a recorded size: every step runs as the next line to its right. **What do you expect**: at which size is most of the padding?

# %%
print(f"{priced.waste:.1%} of the tokens that run are padding; {priced.waste_of_real:.1%} of those that were asked for")
priced.to_frame()[["size", "from_batch", "to_batch", "count", "padded_tokens", "padding_tokens", "waste"]].round(3)

# %% [markdown]
# And the share of steps with at most so many tokens, for the three modes (without graphs the batches are larger, as section 5 said):

# %%
Picture(serve_charts.batch_sizes(every_step, clocked))

# %% [markdown]
# Padding is reported in two ways, which differ: over the tokens that *ran*, or over those that were *asked for*. 33 tokens padded to 40: 7/40 = 17.5 %, or 7/33 = 21 %. cgkit means the first
# unless it says otherwise.
#
# And does padding cost time? A decode step reads all weights whatever its size, so up to a point the padded rows are nearly free:

# %%
print(f"milliseconds a step, {decode_cost.source}")
decode_cost.to_frame()

# %% [markdown]
# From 1 to 32 tokens the replayed step grows by a few per cent. So a coarse list is cheap where sizes are small. What is *not* cheap is to have no graph at all (`uncaptured`): about twice the time at 8 and 32 tokens, more at 1. **Which
# sizes are worth recording is decided by where the histogram ends, more than by how fine the list is.**

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 7 · Which sizes should I record?
#
# For every list of sizes one can work out what a step costs on average: each batch runs as the least size that holds it, or without a graph above the largest. And what the list takes of the device's memory: the pool (by its
# largest size) and what each size adds. `plan_capture_sizes` finds the list of least cost under a budget. It is exact: the best list that ends at a size extends a best list that ends at a smaller one, so all lists
# need not be tried (*dynamic programming*; exercise 10-3).
#
# The traffic: 600 made-up requests, 30 a second, prompts of 200 and answers of 100 tokens on average, 64 seats (simulated on the scheduler's rules, with recorded step times). The budget: 48 MiB. **What do you expect**:
# how much does the best list save against vLLM's: 1 %, 4 %, 20 %?

# %%
traffic, cost, memory = busy_hour()
BUDGET = 48 * 2**20
plan = cgkit.plan_capture_sizes(traffic, cost, memory_budget=BUDGET, memory=memory)
comparison = compare_sizes(plan, max_num_seqs=64)
print(traffic)
readable(comparison.to_frame()).assign(pool_bytes=lambda frame: frame["pool_bytes"].map(human_bytes))

# %%
Picture(comparison.overview())

# %% [markdown]
# How to read it. The article's, vLLM's and SGLang's lists are fine and end near the number of seats: they were made for decode steps, and every step with a prompt in it is above them and runs without a graph. (Cut to the budget; with
# more memory vLLM's goes on to twice the seats.) The plan takes fewer small sizes and spends the rest on a few large ones. TensorRT-LLM's list is made for prefill too, and is the nearest. The *trimmed* list of notebook 08 is the cheapest in memory,
# and misses nearly all of this traffic.
#
# The plan is for **this** histogram. Plan with yours: `cgkit plan --trace file.csv`, or `--histogram` with what `cgkit bench serve --histogram` wrote.
#
# **A knob.** How many sizes are worth it?

# %%
from ipywidgets import IntSlider, interact


def best_of(number):
    chosen = cgkit.plan_capture_sizes(traffic, cost, max_graphs=number, memory=memory)
    display(Picture(chosen.plot()))


_ = interact(best_of, number=IntSlider(8, 1, 24, description="sizes", continuous_update=False))

# %%
by_number = [cgkit.plan_capture_sizes(traffic, cost, max_graphs=n, memory=memory) for n in range(1, 25)]
curve = pd.DataFrame({"sizes": range(1, 25), "expected_step_cost": [each.expected_step_cost for each in by_number]})
ladders = comparison.to_frame().query("list not in ['plan', 'trimmed']")
about = About("llama-3.1-8b", "FULL", "600 requests, 30 a second", recorded=f"{made_on} (step times, memory)")
Picture(plan_charts.by_number(curve, ladders, about))

# %% [markdown]
# ### To paste
# The plan as the option that an engine takes. The mode must fit: this plan is for FULL, where one graph of the whole step serves *any* step, also one with prompts in it. vLLM can be told so (if its attention can be recorded
# that way). The lists of SGLang and TensorRT-LLM are for decode steps, so they get a plan for decode steps only; a size above the number of seats would never be used there.

# %%
decode_plan = cgkit.plan_capture_sizes(traffic, cost, memory_budget=BUDGET, memory=memory, mode="FULL_DECODE_ONLY")
for engine_name, option in {"vLLM": plan.vllm, "vLLM, decode only": decode_plan.vllm, "SGLang": decode_plan.sglang}.items():
    print(f"{engine_name}:\n  {option}\n")
print(f"TensorRT-LLM:\n{decode_plan.tensorrt_llm}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 8 · A split deployment
#
# Large services compute prompts on one set of machines and decode on another (*disaggregated*, or P/D). On the decode half **every** step is a decode step. So PIECEWISE graphs, there for mixed steps, are not
# needed: FULL_DECODE_ONLY records one graph a size, up to the number of seats. **What do you expect**: which share of the steps replays a graph, before the split and after it? And what could the saved memory hold?

# %%
together_or_split = {}
costs = {mode: recorded_step_cost("llama-3.1-8b", mode) for mode in ("PIECEWISE", "FULL")}
rooms = {mode: recorded_memory("llama-3.1-8b", mode) for mode in ("PIECEWISE", "FULL")}
hour = synthetic_requests(600, rate=30, prompt_tokens=200, output_tokens=100, seed=0)
for name, split in (("one deployment", False), ("decode half", True)):
    steps_of = simulate_traffic(hour, costs["FULL"], max_num_seqs=64, split=split)
    sizes = cgkit.CaptureSizes.resolve(cgkit.CompilationConfig(max_num_seqs=64), "vllm-0.33").sizes
    ways = two_ways_to_save_memory(steps_of, costs, memory=rooms, sizes=sizes, splits=32, max_num_seqs=64)
    together_or_split[name] = ways.drop(columns="waste")
pd.concat(together_or_split).round(3)

# %%
big = PRESETS["llama-3.1-8b"]
kv_bytes = 2 * big.num_hidden_layers * big.num_key_value_heads * big.head_dim * 2  # keys and values, bfloat16: two bytes
decode_half, one = (together_or_split[name].iloc[2] for name in ("decode half", "one deployment"))
cgkit.claim(
    "memory-disaggregated",
    measured=f"FULL_DECODE_ONLY replays {decode_half['captured_steps']:.1%} of the steps of a decode half, {one['captured_steps']:.1%} where prompts come too; it saves "
    f"{human_bytes(decode_half['saved_bytes'])}, room for the KV cache of {decode_half['saved_bytes'] / kv_bytes:,.0f} tokens (8B shape, recorded)",
    outcome="confirmed" if decode_half["captured_steps"] > one["captured_steps"] and decode_half["saved_bytes"] > 0 else "wrong",
    why="It suits, for the reason given. The memory is little beside a KV cache of many GiB.",
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## 9 · The start
#
# All of this is paid before the first request. What takes longest: to trace and compile the model, or to record its graphs? **What do you expect** for the 1B shape on a GPU, 11 sizes?

# %%
start = recordings.load("h200-recording-llama-3.2-1b")
print(f"recorded on {start.attrs['recorded']}; first_call_s: trace, split and compile; total_s: recording, with warm-ups")
start[["mode", "graphs", "sizes", "first_call_s", "total_s", "recording_s"]]

# %% [markdown]
# Compiling. (The first row of each mode also loads its kernels.) So what a restart wants is a **compile cache**: the second process loads what the first one compiled. These starts were measured on a CPU:

# %%
recordings.picture("cpu-bench-startup", start_charts.startup)

# %%
first = start.iloc[:2]
compile_s, record_s = first["first_call_s"].max(), first["total_s"].max()
deep = recordings.load("h200-memory-llama-3.1-8b")["compile_s"]
caches = recordings.load("cpu-bench-startup").set_index(["model", "cache"])["first_call_cpu_s"].unstack()
gain = caches["warm"] / caches["cold"]
cgkit.claim(
    [
        {
            "id": "capture-start-up",
            "measured": f"1B shape on a GPU: {record_s:.1f} s to record {int(first['graphs'].max())} graphs, {compile_s:.1f} s to trace and compile",
            "outcome": "confirmed" if record_s > compile_s else "wrong",
            "why": "Recording writes down launches and computes nothing; hundreds of graphs take seconds. Tracing and compiling take longer.",
        },
        {
            "id": "wrong-compile-minutes",
            "measured": f"8B shape on a GPU: {deep:.0f} s to compile; with a full cache the first call takes {gain.min():.0%} to {gain.max():.0%} of the processor time (CPU, three models)",
            "outcome": "confirmed" if deep > 60 else "wrong",
            "why": "Not minutes here, since equal layers are compiled once (notebook 04). That the cache is worth it holds all the same.",
        },
    ]
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Your turn
#
# ### 10-1 · Be the dispatcher

# %%
question("10-1")

# %%
check("10-1", ...)

# %% [markdown]
# ### 10-2 · How much is padding?

# %%
question("10-2")

# %%
check("10-2", ...)

# %% [markdown]
# ### 10-3 · The planner

# %%
question("10-3")

# %%
check("10-3", ...)

# %% [markdown]
# ### 10-4 · Beat the ladders

# %%
question("10-4")

# %%
check("10-4", ...)

# %% [markdown]
# ## What comes next
# All of this with a model of your own: **11 · Bring your own model**. `cgkit.reset()` frees every graph of this notebook.

# %% tags=["stamp"]
from cgkit.measuring.stamp import stamp

print(stamp())
