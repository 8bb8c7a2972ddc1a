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
# # 11 · Bring your own model
#
# **The question.** Eleven notebooks used models that were made for this road. What has to change in a model of yours, so that it
# is traced once, split, compiled, recorded and replayed, and how do you find out before it computes nonsense?
#
# **Afterwards you can**
# - serve a causal language model of `transformers` without editing it, and say which ones cannot be served so, and why;
# - take any other `nn.Module` down the road with two lines, and say what belongs into an operator of your own;
# - read the doctor's report on a model and repair what it names;
# - look at a step of your own model in time, and at what the compiler made of each piece.
#
# **Time**: 40 minutes to read; the cells run in about one minute on two cores.
# **Needs**: cgkit with `transformers`, and a C++ compiler for part 5. No GPU: without one, recorded graphs are *emulated* (they
# repeat the recorded calls on the recorded addresses, and are no faster). Weights are random, and nothing is downloaded.

# %% tags=["setup"]
# Only Colab needs this cell: it fetches cgkit there. Anywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    get_ipython().system("test -d /content/cgkit || git clone -q --depth 1 -b main https://github.com/OWNER/NAME /content/cgkit")
    get_ipython().run_line_magic("cd", "-q /content/cgkit/notebooks")
    get_ipython().run_line_magic("run", "colab.py")

# %%
import os
import tempfile
import warnings

import ipywidgets
import pandas as pd
import torch
import transformers
from torch import nn

import cgkit
from cgkit.plotting import Picture

warnings.filterwarnings("ignore", message="TensorFloat32")  # torch's advice to speed such GPUs up with less precision
os.environ["CGKIT_CACHE_DIR"] = tempfile.mkdtemp(prefix="cgkit-")  # so that what is compiled here really is
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the one setting; the doctor looks at copies on the CPU
pd.set_option("display.max_colwidth", 120)

# %% [markdown]
# ## 1 · A model of transformers, as it is
#
# Between its tokens, a language model mixes them in one place: attention. Everything else works on each token alone. So the
# road needs one thing from a model: that its attention can be replaced by an operator that reads a paged KV cache, and at which
# the graph can be cut. `transformers` looks its attention up by name, and `cgkit.adopt` uses that door. It copies the modules
# around the same weights, puts its operator there, and holds the result against the model's own forward.
#
# **What do you expect**: in a Qwen2 of two layers, how many pieces come out, and how many of them are attention?

# %%
sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
torch.manual_seed(0)
original = transformers.AutoModelForCausalLM.from_config(
    transformers.Qwen2Config(vocab_size=259, num_hidden_layers=2, **sizes)
).eval().to(DEVICE)
adopted = cgkit.adopt(original)
config = cgkit.CompilationConfig(cudagraph_capture_sizes=[1, 2, 4], compiler="eager")
runner = cgkit.Runner(adopted, adopted.tokenizer, config).capture_model()
split = runner.executor.captured.compiled.split
print(len(split.pieces), "pieces,", sum(piece.is_splitting for piece in split.pieces), "of them attention")

# %% [markdown]
# `L` cuts leave `L + 1` pieces between them: `2 L + 1` in all. (`compiler="eager"` runs the pieces operator by operator: their
# number and the recorded graphs are the same, and you do not wait for a compiler. Part 5 uses Inductor.)
#
# Does it say the same? The original generates with its own loop, one request at a time; the adopted model serves both requests
# in one batch from recorded graphs. Each new token depends on all before it, so one wrong number would show.

# %%
prompts = [[7, 8, 9], [5]]
served = [each.token_ids for each in runner.generate(prompts, max_tokens=8)]
with torch.no_grad():
    asked = [torch.tensor([prompt], device=DEVICE) for prompt in prompts]
    own = [original.generate(one, max_new_tokens=8, do_sample=False)[0, one.shape[1] :].tolist() for one in asked]
print("the same tokens:", served == own)

# %% [markdown]
# **Why can this work at all?** The class was not edited, and the copy holds the same tensors (not equal ones), so it costs no
# memory for weights:

# %%
mine_now = {weight.data_ptr() for weight in adopted.parameters()}
shared = [weight.data_ptr() in mine_now for weight in original.parameters()]
print(sum(shared), "of", len(shared), "weights are the original's own")

# %%
cgkit.claim(
    "bill-no-model-change",
    measured=f"a Qwen2 of transformers, its class not edited: {sum(shared)} of {len(shared)} weights shared; the tokens from "
    f"recorded graphs {'equal' if served == own else 'differ from'} its own generate",
    outcome=served == own and all(shared),
    why="True where the attention is looked up. A model that does not look it up, or that branches on values, needs changes: "
    "see parts 2 to 4.",
)

# %% [markdown]
# ## 2 · What is refused, and why
#
# The operator knows one attention: causal, softmax of scaled products, over a request's own tokens. If a model does more and the
# operator leaves it out, the tokens are wrong, and nothing says so. A refusal is cheaper. **What do you expect** of these three?
# Gemma 2 limits each score with a tanh. BLOOM has no position embedding and adds a number to each score that grows with distance.
# Mamba has no attention.

# %%
small = {"vocab_size": 64, "hidden_size": 64}
strangers = {
    "Gemma 2": transformers.Gemma2Config(num_hidden_layers=2, head_dim=16, vocab_size=64, **sizes),
    "BLOOM": transformers.BloomConfig(n_layer=2, n_head=4, **small),
    "Mamba": transformers.MambaConfig(num_hidden_layers=2, **small),
}
for name, stranger in strangers.items():
    try:
        cgkit.adopt(stranger)
    except cgkit.CgkitError as refusal:
        print(f"{name}: {str(refusal).split(': ', 1)[1].split('. A model')[0]}\n")

# %% [markdown]
# Each reason comes with the line of the model that it was read from. The first two are missing arithmetic: somebody could add a
# soft cap to the kernel. Mamba is another kind: it carries a *state* from token to token, and a KV cache does not hold that.
#
# ## 3 · Any other module: two lines
#
# What is not a language model of `transformers` takes two lines. The first says **what must stay out of the graph**: work that
# depends on more than the shapes of its inputs (how long is each request? where are its blocks?) becomes an operator. It
# is a black box to the compiler, and the graph is cut there. The second decorates the class.
#
# The operator *fills* an output that it is given, and returns nothing. That output is allocated in the piece before, which is
# recorded, so its address is the same in every replay. An operator that returned a new tensor would give it a new address at each
# step, and the next piece would read the old one.

# %%
def my_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    output.copy_(attend(query[None], key[None], value[None], is_causal=True)[0])


cgkit.register_op("my_attention", my_attention, mutates_args=["output"])  # line 1


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        mixed = torch.empty_like(query)
        torch.ops.cgkit.my_attention(query, key, value, mixed)
        return x + self.out(mixed)


@cgkit.support_torch_compile  # line 2
class MyModel(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # the annotation says: dimension 0 may change
        for layer in self.layers:
            x = layer(x)
        return x


def configured(compiler):
    return cgkit.CompilationConfig(splitting_ops=["cgkit::my_attention"], compiler=compiler)


# %% [markdown]
# Nothing has happened yet. The first call traces and compiles; `capture_model` records. **What do you expect** of a batch of six
# rows, when graphs for 1, 2, 4 and 8 rows are recorded?

# %%
model = MyModel(compilation_config=configured("eager")).eval().to(DEVICE)
x = torch.randn(6, 16, device=DEVICE)
with torch.no_grad():
    expected = MyModel.forward(model, x)  # the class's own code, eagerly
first = model(x)
captured = cgkit.capture_model(model, [1, 2, 4, 8])
replayed = model(x)
print("graphs recorded:", len(captured.to_frame()))
print("rows out:", replayed.shape[0], "| largest difference from eager:", float((replayed - expected).abs().max()))
captured

# %% [markdown]
# Six rows were copied into a buffer of eight, the graphs of 8 were replayed, and six rows were handed out. What the two padding
# rows hold is nobody's business *as long as no row reads a later one*. Here a row sees only rows before it. A model
# that takes a mean over all rows would be wrong, and no error would tell at the call. (The doctor of part 4 tells beforehand: it
# runs the model with and without padding, and calls the difference `mixed-rows`.) Then the number of real rows has to be an
# input of yours.
#
# The pieces, with the cuts in their own colour:

# %%
cgkit.compiled_model(model).split.draw()

# %% [markdown]
# Move the number of layers. (Without a running kernel: the picture above is the position at 2.)

# %%
def pieces_of(layers):
    with torch.no_grad():
        traced = cgkit.trace(MyModel(layers, compilation_config=configured("eager")).to(DEVICE), x)
    return cgkit.split_graph(traced, ["cgkit::my_attention"])


counts = {layers: len(pieces_of(layers).pieces) for layers in (1, 2, 3)}
print("pieces by layers:", counts)
ipywidgets.interact(lambda layers: pieces_of(layers).draw(), layers=[1, 2, 3]);

# %%
law = all(pieces == 2 * layers + 1 for layers, pieces in counts.items())
same = bool(torch.allclose(replayed, expected, atol=1e-5))
cgkit.claim(
    "three-automatic",
    measured=f"a module of one's own took two lines (an operator, a decorator): {len(captured.to_frame())} graphs recorded, pieces "
    f"by layers {counts}, results of a replay {'equal' if same else 'differ from'} eager's",
    outcome=law and same,
    why="No graph code was written. But somebody has to say what must stay out of the graph: line 1 is knowledge of the model.",
)

# %% [markdown]
# ## 4 · What is wrong with my model?
#
# A recorded graph repeats kernels. Python does not run again. So there are three kinds of trouble: what cannot be traced, what
# cannot be recorded, and what *can* and then computes something else. The last is the worst. Two models, one line each that
# people really write. **What do you expect**: which of the two fails loudly?

# %%
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            y = y * 2
        return y


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.linear(x) + self.seen


reports = {type(each).__name__: cgkit.doctor(each, x.cpu()) for each in (Branches(), Counts())}
found = pd.concat({name: report.to_frame() for name, report in reports.items()}, names=["model", ""])
found[["severity", "code", "source", "what", "fix"]]

# %% [markdown]
# `Branches` fails loudly: the branch asks for a *value* on the CPU, so there is no one graph, and a stream that is
# being recorded refuses to be waited for. `Counts` traces well and would be recorded. But `seen` is written at every warm-up as well,
# so that it counts something that nobody asked for (notebook 09). That is why cgkit looks for writes by itself.
#
# The doctor also lists what was *assumed*. A trace is made under conditions (guards), and cgkit checks none of them afterwards,
# since checking costs time at every step. `would_fail` tries them on a new call. **What do you expect** for seven rows, for
# float64, and for rows of 8 numbers?

# %%
class Fine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


fine = cgkit.doctor(Fine(), x.cpu())
calls = {"7 rows": torch.ones(7, 16), "float64": torch.ones(6, 16, dtype=torch.float64), "rows of 8": torch.ones(6, 8)}
for name, other in calls.items():
    print(f"{name}: {len(fine.would_fail(other))} assumptions would fail")

# %% [markdown]
# Seven rows are no surprise: dimension 0 was declared dynamic. A type or a width is part of the kernels that were chosen.
#
# ## 5 · Where does my step spend its time, and what became of my code?
#
# Both are questions about *your* model, and both answers take one line. First Inductor instead of the eager pieces:

# %%
compiled = MyModel(compilation_config=configured("inductor")).eval().to(DEVICE)
compiled(x)
explained = cgkit.explain(cgkit.compiled_model(compiled))
explained.to_frame()[["piece", "shared_with", "calls_before", "own_kernels", "extern_kernels", "operators"]]

# %% [markdown]
# `calls_before` operators of the trace became `own_kernels` (written by Inductor) and `extern_kernels` (matrix products of a
# library). If a piece equals an earlier one, `shared_with` says so. Here all three differ: the first has no attention before it,
# the last none after it. With a third layer, the two in the middle would be the same.
#
# And the time. `profile_step` takes any call of yours, and marks cgkit's own pieces in it. **What do you expect** of a model as small as
# this, compiled and not recorded: for which share of the step is a GPU busy?

# %%
timeline = cgkit.profile_step(lambda: compiled(x))
timeline.bill()

# %%
Picture(timeline.plot(step=0))

# %% [markdown]
# On a CPU there is one lane: the operators *are* the work, and there is no launch to save. The same line on a GPU shows launches
# above kernels, as in notebook 01, and whether your model is one that waits for them. A trace that `torch.profiler` wrote
# elsewhere is read by `cgkit.Timeline.from_trace("trace.json.gz")`.
#
# **The road in order**, for a model of yours: `cgkit.doctor` first; repair what is an error; decide what must stay out of the graph
# and register it; decorate; `profile_step` before and after, and compare results with eager at a size that needs padding.
#
# ## Exercises
# `check` says whether an answer is right, nearly right or wrong, and why. `hint("11-1")` helps; `solution("11-1")` says where
# ours stands. Put your answer in the place of `...`.

# %%
from cgkit.exercises import check, hint, question, solution

question("11-1")

# %%
check("11-1", ...)

# %%
question("11-2")

# %%
check("11-2", ...)

# %%
question("11-3")

# %%
check("11-3", ...)

# %%
question("11-4")

# %%
check("11-4", ...)

# %% [markdown]
# **Next**: this was the last notebook. Take a model that you use, run `cgkit doctor` on it, and read notebook 09 again for each
# code that it finds.

# %% tags=["stamp"]
from cgkit.measuring.stamp import stamp

print(stamp())
