"""The figures of README.md and data/README.md are those of data/recordings: each is computed here from its file."""

import re
from pathlib import Path

import pytest

from cgkit import recordings

ROOT = Path(__file__).parent.parent


def words(path: str) -> str:
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


README, DATA = words("README.md"), words("data/README.md")


def table(head: str) -> dict[str, list[str]]:
    """First cell (without what is in brackets) -> the other cells, of README's table whose head line begins so."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, *others = [cell.strip() for cell in line.strip("|").split("|")]
        rows[re.sub(r" \(.*(?<!\"\))$", "", first).strip("`")] = others
    return rows


def steps(shape: str):
    frame = recordings.load(f"h200-headline-{shape}")
    return frame[frame["case"] == "decode"].set_index(["mode", "batch"])


def test_the_table_of_the_1b_step():
    found, rows = steps("llama-3.2-1b"), table("| ms, synchronised every step |")
    names = {
        "compiled, no graphs": "compiled",
        'torch.compile(mode="reduce-overhead")': "reduce-overhead",
    }
    busy = rows.pop("GPU busy in a FULL_AND_PIECEWISE step")
    assert busy[:2] == [f"{found.loc[('FULL_AND_PIECEWISE', b), 'gpu_busy_ms']:.2f}" for b in (1, 32)]
    assert len(rows) == 7
    for name, cells in rows.items():
        one, many = (found.loc[(names.get(name, name), batch)] for batch in (1, 32))
        assert cells == [
            f"{one['wall_ms']:.2f}",
            f"{many['wall_ms']:.2f}",
            f"{one['cpu_ms']:.2f}",
            f"{int(one['kernels'])}",
        ], name


def test_the_table_of_the_8b_shape():
    frame = recordings.load("h200-headline-llama-3.1-8b").set_index(["case", "batch", "mode"])
    modes = ["compiled", "torch.compile", "PIECEWISE", "FULL_AND_PIECEWISE", "reduce-overhead"]
    rows = table("| ms | compiled, no graphs |")
    cases = {
        "step, batch 1": ("decode", 1, ".2f"),
        "step, batch 32": ("decode", 32, ".2f"),
        "answers, batch 8": ("generate", 8, ".0f"),
    }
    assert list(rows) == list(cases)
    for name, (case, batch, form) in cases.items():
        walls = [f"{frame.loc[(case, batch, mode), 'wall_ms']:{form}}" for mode in modes]
        assert rows[name] == [*walls, f"{frame.loc[(case, batch, 'eager'), 'floor_ms']:{form}}"]


def cuts(shape: str) -> list[float]:
    """By how many percent PIECEWISE is above a full decode graph, at each batch."""
    wall = steps(shape)["wall_ms"]
    return [100 * (wall["PIECEWISE", b] / wall["FULL_AND_PIECEWISE", b] - 1) for b in wall["PIECEWISE"].index]


def static_us(batch: int, callable_: str) -> float:
    rows = recordings.load("h200-bench-static").set_index(["subject", "batch", "callable"])
    return float(rows.loc[("llama-3.1-8b", batch, callable_), "us"])


def test_what_is_not_reached_and_by_how_much():
    small, large = steps("llama-3.2-1b"), steps("llama-3.1-8b")
    loss = 1e3 * (small.loc[("PIECEWISE", 1), "wall_ms"] - small.loc[("FULL_AND_PIECEWISE", 1), "wall_ms"])
    expected = [
        f"{min(cuts('llama-3.1-8b')):.1f} to {max(cuts('llama-3.1-8b')):.1f} % at the 8B shape, but "
        f"{min(cuts('llama-3.2-1b')):.1f} to {max(cuts('llama-3.2-1b')):.1f} % at 1B, {loss:.0f} µs of a step"
    ]
    full = large.loc[("FULL_AND_PIECEWISE", 1)]
    expected += [
        f"(8B, batch 1): {100 * (full['ratio_to_floor'] - 1):.0f} %",
        f"adds {100 * (full['ratio_to_busy'] - 1):.1f} %",
    ]
    products = 2 * (4096 * (6144 + 4096 + 28672) + 14336 * 4096)  # bfloat16: q, k, v; o; gate, up; down
    floor = products / full["copy_bytes_per_s"] * 1e6
    library, tuned = static_us(1, "cuBLAS"), static_us(1, "static, tuned")
    expected += [
        f"take {100 * (library / floor - 1):.0f} % more than their weights with cuBLAS, "
        f"{100 * (tuned / floor - 1):.0f} % with",
        f"{library:.0f} and {tuned:.0f} µs; {products / 1e6:.0f} MB at the copy rate are {floor:.0f})",
    ]
    answers = recordings.load("h200-headline-llama-3.1-8b").query("case == 'generate'").set_index("mode")
    bare = large.loc[("compiled", 8)]
    expected += [
        f"{answers.loc['compiled', 'wall_ms'] / answers.loc['PIECEWISE', 'wall_ms']:.2f} times (the article",
        f"takes {bare['wall_ms']:.1f} ms, of which the GPU is busy for {bare['gpu_busy_ms']:.1f}: no way of launching "
        f"can make more than {bare['ratio_to_busy']:.2f} of that",
    ]
    trees = [small.loc[("reduce-overhead", b)] for b in (1, 32)]
    own = [row["twin_ms"] / row["wall_ms"] for row in trees]
    graphs = [small.loc[("FULL_AND_PIECEWISE", b), "wall_ms"] for b in (1, 32)]
    here = [mine / row["wall_ms"] for mine, row in zip(graphs, trees)]
    expected += [
        f"{here[0]:.2f} at batch 1 and {here[1]:.2f} at batch 32 against the full graph's row",
        f"but {own[0]:.2f} and {own[1]:.2f} in that row's own process",
    ]
    assert [text for text in expected if text not in README] == []


def test_the_host_s_time_a_piece():
    plan = recordings.load("h200-host-llama-3.2-1b").query("path == 'plan' and batch == 1").set_index("part")
    launch, check = plan.loc["graph replays", "piece_us"], plan.loc["address check", "piece_us"]
    rest = plan.loc[["entry", "input slices"], "piece_us"].sum()
    cut = recordings.load("h200-bench-boundaries").set_index("way")
    again, different = (
        cut.loc[way, "host_us_a_launch"] for way in ("one piece again and again", "different graphs")
    )
    expected = [
        f"{launch + check + rest:.1f}. Of these `cuGraphLaunch` itself takes {launch:.1f}",
        f"`boundaries`: {again:.1f} against {different:.1f} µs",
        f"one a step, is {check:.1f}, the rest {rest:.1f}",
        f"costs the device {cut.loc['graphs and launches between', 'each_boundary_us']:.1f} µs",
    ]
    assert [text for text in expected if text not in README] == []


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "llama-3.1-8b"])
def test_the_gaps_at_a_cut(shape):
    gaps = []
    for batch in (1, 32):
        events = recordings.load(f"h200-trace-{shape}-b{batch}-PIECEWISE").events
        kernels = events[events["kind"] == "kernel"].sort_values("start_us")
        idle = kernels["start_us"].shift(-1) - kernels["start_us"] - kernels["dur_us"]
        graph, following = kernels["graph_launch"], kernels["graph_launch"].shift(-1)
        gaps.append(
            [
                idle[inside].median()
                for inside in (
                    (graph >= 0) & (following == graph),
                    (graph >= 0) & (following == -1),
                    (graph == -1) & (following >= 0),
                )
            ]
        )
    within, before, after = ({f"{value:.1f}" for value in kind} for kind in zip(*gaps))
    assert within == {"0.1"} and "follow each other within 0.1 µs" in README
    assert len(before) == len(after) == 1
    low, high = re.search(r"follows a graph after (\S+) to (\S+) µs", README).groups()
    assert before == {high if shape == "llama-3.2-1b" else low}
    eight, one = re.search(r"a graph an attention after (\S+) \(8B\) to (\S+) µs \(1B", README).groups()
    assert after == {one if shape == "llama-3.2-1b" else eight}


def changes(name: str, variant: str, base: str) -> list[float]:
    """Percent of the step's time that ``variant`` takes more than ``base``, at batch 1 and 32."""
    wall = recordings.load(name).set_index(["variant", "batch"])["wall_ms"]
    return [100 * (wall[variant, b] / wall[base, b] - 1) for b in (1, 32)]


def test_passes_and_custom_ops():
    cut = [changes("h200-bench-passes", v, "off") for v in ("norm", "norm + act", "norm + act, no noop")]
    whole = changes("h200-bench-passes", "whole, all", "whole, off")
    hand = changes("h200-bench-custom-ops", "all", "none")
    expected = [
        f"norms and activations change a step by {max(abs(each) for pair in cut for each in pair):.1f} % at most",
        f"a step takes {-whole[0]:.1f} % (batch 1) and {-whole[1]:.1f} % (batch 32) less",
        f"it takes {hand[0]:.1f} and {hand[1]:.1f} % more than with torch code",
    ]
    assert [text for text in expected if text not in README] == []
    assert (
        f"take {1 + hand[0] / 100:.2f} (batch 1) and {1 + hand[1] / 100:.2f} (batch 32) times as long" in DATA
    )


def test_starts_and_ledgers():
    frame = recordings.load("cpu-bench-startup")
    warm = frame[frame["cache"] == "warm"]
    names = {2: "two", 3: "three", 4: "four", 5: "five"}
    alt = (
        f"Starts of {names[warm['model'].nunique()]} models, cold and warm, in parts; of the compile stage at most "
        f"{100 * warm['compile_share'].max():.0f} % is left"
    )
    assert alt in README
    shares = warm.set_index("model").loc[["tiny-llama", "smollm2-135m", "toy-llama-80"]]
    first, whole = (100 * shares[name] for name in ("first_call_share", "start_share"))
    assert (
        f"takes {first.iloc[0]:.0f} % of the cold one for tiny-llama, {first.iloc[1]:.0f} % for SmolLM2's shape "
        f"and {first.iloc[2]:.0f} % for 80 layers" in DATA
    )
    imports, calls = 100 * shares["import_share"], 100 * shares["call_share"]
    assert "start {:.0f}, {:.0f} and {:.0f} %".format(*whole) in DATA
    assert f"{imports.min():.0f} to {imports.max():.0f} % of it is importing" in DATA
    assert f"take {calls.min():.0f} to {calls.max():.0f} % of the cold start's" in DATA
    on_gpu = recordings.load("h200-bench-startup").set_index("cache")
    cold, warm = (
        on_gpu.loc[which, ["trace_s", "split_s", "compile_s", "answer_s"]].sum() for which in ("cold", "warm")
    )
    left = on_gpu.loc["warm"]
    assert f"a full cache leaves {100 * warm / cold:.0f} %, {warm:.1f} s of {cold:.1f}" in README
    assert (
        f"takes {100 * left['start_share']:.0f} % of the cold one: {100 * left['import_share']:.0f} % of what"
        in README
    )
    alone = left["import_s"] / on_gpu.loc["cold", "start_s"]
    assert alone > 0.15
    assert f"takes {100 * alone:.0f} % of the cold start: no cache" in README
    ledgers = recordings.load("h200-bench-ledgers").set_index(["path", "part"])["ratio"]
    plan, module = (100 * (ledgers[path, "all ledgers"] - 1) for path in ("plan", "module"))
    assert f"cost a step: {plan:.1f} % of a 1B step" in README
    assert f"{plan:.1f} % by the replay plan, {module:.1f} % by the module path" in DATA
