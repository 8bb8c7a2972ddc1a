"""The trace cache across processes, with Inductor: nothing traced, nothing compiled, equal to the bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from cgkit.torch_hooks import find_cpp_compiler
from tests.compiling.cache import project

pytestmark = [
    pytest.mark.skipif(find_cpp_compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(os.name == "nt", reason="permissions and signals of POSIX"),
]

MODEL = """
import hashlib, json, sys, warnings
import torch
from torch import nn
import cgkit
from cgkit.compiling.cache import trace_misses
from helper import scale

options = json.loads(sys.argv[1])
changes, recorded = options.pop("changes", {}), options.pop("recorded", [])


@cgkit.support_torch_compile
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(changes.get("layers", 2)))
        self.factor = changes.get("factor", 2.0)

    def forward(self, x: torch.Tensor):
        y = self.layers[0](x)
        for layer in self.layers[1:]:
            out = torch.empty_like(y)
            torch.ops.project.cut(y, out)
            y = torch.tanh(scale(layer(out))) * self.factor
        return y


def cut(y: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(y + 1)


cgkit.register_op("cut", cut, mutates_args=["out"], namespace="project")
torch.manual_seed(0)
torch.set_num_threads(1)
mode = "PIECEWISE" if recorded else "NONE"
config = cgkit.CompilationConfig(
    splitting_ops=["project::cut"], cudagraph_mode=mode, cudagraph_capture_sizes=recorded or None, **options
)
with warnings.catch_warnings(record=True) as caught, torch.no_grad():
    warnings.simplefilter("always")
    net = Net(compilation_config=config)
    net.to(getattr(torch, changes.get("dtype", "float32")))
    if changes.get("hook"):
        net.layers[0].register_forward_hook(lambda module, args, output: output + 1)
    x = torch.linspace(-1, 1, 40, dtype=net.layers[0].weight.dtype).view(5, 8)
    result = net(x)
    captured = cgkit.capture(cgkit.compiled_model(net).compiled) if recorded else None
    # A replay pads 5 rows to 8, and a product of 8 rows need not be that of 5 to the last bit.
    padded = net(torch.cat([x, x.new_zeros(3, 8)]))[:5] if recorded else None
    replayed = captured is not None and torch.equal(captured(x), padded)
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    eager = Net.forward(net, x)
print(json.dumps({
    "counters": {name: count for name, count in cgkit.compilation_counter.as_dict().items() if count},
    "frames": frames,
    "replayed": replayed,
    "graphs": captured and captured.num_graphs,
    "equal": torch.allclose(result, eager, rtol=1e-3, atol=1e-5),
    "output": hashlib.sha256(result.float().numpy().tobytes()).hexdigest(),
    "origin": cgkit.compiled_model(net).traced.origin,
    "missed": [each[0] for found in trace_misses().values() for each in found],
    "warnings": [str(w.message) for w in caught if "cache" in str(w.message)],
}))
"""


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """A project that was started once: its folder, the cache, and what the process said."""
    root = tmp_path_factory.mktemp("cold")
    folder = project.write(root / "checkout")
    (folder / "model.py").write_text(MODEL)
    return folder, root / "cache", project.run(folder, root / "cache")


def copied(cold, tmp_path) -> tuple[Path, Path, dict]:
    folder, cache, first = cold
    shutil.copytree(folder, tmp_path / "moved", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(cache, tmp_path / "cache")
    return tmp_path / "moved", tmp_path / "cache", first


def counted(found, name):
    return found["counters"].get(name, 0)


@pytest.mark.slow
def test_a_second_process_elsewhere_traces_nothing_and_compiles_nothing(cold, tmp_path):
    folder, cache, first = copied(cold, tmp_path)
    assert first["equal"] and counted(first, "num_graphs_seen") == counted(first, "num_traces_saved") == 1
    assert first["frames"] > 0 and not first["warnings"]
    again = project.run(folder, cache)
    assert again["equal"] and again["output"] == first["output"]
    assert again["frames"] == 0 and counted(again, "num_graphs_seen") == 0
    assert counted(again, "num_inductor_compiles") == 0 and counted(again, "num_traces_loaded") == 1
    assert counted(again, "num_piecewise_capturable_graphs_seen") == 2 and not again["warnings"]
    changed = project.run(folder, cache, {"changes": {"factor": 3.0, "hook": True}})
    assert changed["equal"] and counted(changed, "num_graphs_seen") == 1
    assert "model.factor" in changed["missed"] and any("_forward_hooks" in name for name in changed["missed"])


@pytest.mark.slow
def test_a_changed_line_in_a_helper_and_a_broken_entry(cold, tmp_path):
    folder, cache, first = copied(cold, tmp_path)
    (folder / "helper.py").write_text(project.HELPER.replace("* 2.0", "* 3.0"))
    changed = project.run(folder, cache)
    assert changed["equal"] and counted(changed, "num_graphs_seen") == 1
    assert changed["output"] != first["output"] and "code helper" in changed["missed"]
    for entry in cache.rglob("trace_*.bin"):
        entry.write_bytes(entry.read_bytes()[:-40])
    broken = project.run(folder, cache)
    assert (
        broken["equal"] and broken["output"] == changed["output"] and counted(broken, "num_graphs_seen") == 1
    )
    assert any("not loaded" in warning for warning in broken["warnings"])


@pytest.mark.slow
def test_a_second_process_records_and_replays_without_a_trace(cold, tmp_path):
    folder, cache, _ = copied(cold, tmp_path)
    first, again = (project.run(folder, cache, {"recorded": [2, 8]}) for _ in range(2))
    assert first["equal"] and again["equal"] and again["output"] == first["output"]
    assert counted(first, "num_graphs_seen") == counted(again, "num_traces_loaded") == 1
    assert again["frames"] == 0 and counted(again, "num_graphs_seen") == 0
    for name in ("num_cudagraph_captured", "num_replay_plans_built"):
        assert counted(first, name) == counted(again, name) > 0
    for name in ("num_inductor_compiles", "num_replay_plans_refused", "num_module_path_steps"):
        assert counted(again, name) == 0
    assert again["replayed"] and again["graphs"] == 4
    assert again["warnings"] == []


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"layers": 3}, {"dtype": "bfloat16"}, {"factor": 2}, {"hook": True}])
def test_each_change_is_traced(cold, tmp_path, changes):
    folder, cache, _ = copied(cold, tmp_path)
    found = project.run(folder, cache, {"changes": changes})
    assert (
        found["equal"] and counted(found, "num_graphs_seen") == 1 and counted(found, "num_traces_loaded") == 0
    )
    again = project.run(folder, cache, {"changes": changes})
    assert again["output"] == found["output"] and counted(again, "num_traces_loaded") == 1


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_the_runners_way(tmp_path, device):
    (tmp_path / "model.py").write_text(
        "import json, cgkit, torch\n"
        "from cgkit.serving.runner import Runner\n"
        "from cgkit.serving.weights import load_model\n"
        f"model = load_model('tiny-llama', device={device!r}).model\n"
        "config = cgkit.CompilationConfig(cudagraph_capture_sizes=[1, 2])\n"
        "runner = Runner(model, config=config, max_num_seqs=2, max_model_len=64)\n"
        "runner.capture_model()\n"
        "tokens = [list(r.token_ids) for r in runner.generate([[1, 2, 3], [4]], max_tokens=6)]\n"
        "counters = cgkit.compilation_counter.as_dict()\n"
        "frames = torch._dynamo.utils.counters['stats']['unique_graphs']\n"
        "refused = runner.executor.captured.plans.refused\n"
        "print(json.dumps({'counters': counters, 'tokens': tokens, 'frames': frames, 'refused': refused}))\n"
    )
    first, again = (project.run(tmp_path, tmp_path / "cache") for _ in range(2))
    assert first["frames"] > again["frames"] == 0 and first["refused"] == again["refused"] == {}
    assert first["tokens"] == again["tokens"] and counted(again, "num_traces_loaded") == 1
    assert counted(again, "num_inductor_compiles") == counted(again, "num_graphs_seen") == 0
    assert counted(again, "num_replay_plans_built") == counted(first, "num_replay_plans_built") > 0
    assert counted(again, "num_cudagraph_captured") == counted(first, "num_cudagraph_captured") > 0
