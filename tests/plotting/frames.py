"""Frames as the stages give them, for a Llama of any depth."""

import pandas as pd

from cgkit.plotting.tour_page import TourData


def pieces(layers: int = 30, keys: bool = True) -> pd.DataFrame:
    last = 2 * layers
    rows = []
    for i in range(last + 1):
        splitting = i % 2 == 1
        key = "" if splitting else "first" if i == 0 else "last" if i == last else "middle"
        operators = {
            "": "cgkit::unified_attention_with_output",
            "first": "aten.embedding, aten.linear, aten.linear, aten.rsqrt",
            "middle": "aten.linear, aten.linear, aten.linear, aten.silu, aten.mul",
            "last": "aten.linear, aten.silu, aten.rsqrt",
        }[key]
        row = {
            "piece": f"submod_{i}",
            "kind": "splitting" if splitting else "capturable",
            "nodes": 1 if splitting else 20,
            "inputs": 4,
            "outputs": 0 if splitting else 4,
            "operators": operators,
        }
        rows.append({**row, "key": key} if keys else row)
    return pd.DataFrame(rows)


def compilations(layers: int = 30) -> pd.DataFrame:
    frame = pieces(layers)
    frame = frame[frame["kind"] != "splitting"]
    seconds = []
    for key, first in zip(frame["key"], ~frame["key"].duplicated()):
        seconds.append({"first": 9.0, "middle": 3.0, "last": 1.0}[key] if first else 0.0)
    return frame[["piece", "key"]].assign(shape="general", compile_s=seconds)


def captures(layers: int = 30, sizes: tuple[int, ...] = (8, 4, 2, 1)) -> pd.DataFrame:
    rows = []
    reserved = 0
    for mode, graphs in (("PIECEWISE", layers + 1), ("FULL", 1)):
        for size in sizes:
            for i in range(graphs):
                reserved += 4096 * size
                rows.append((f"submod_{2 * i}", mode, size, 0.002, reserved))
    columns = ["name", "mode", "num_tokens", "seconds", "reserved_after_bytes"]
    frame = pd.DataFrame(rows, columns=columns).assign(uniform_decode=False, nodes=3, emulated=True)
    frame["peak_allocated_bytes"] = frame["num_tokens"] * 4096
    return frame


def memory() -> pd.DataFrame:
    parts = ["weights", "KV cache", "activations", "graph pool", "context and other", "free"]
    sizes = [2_000, 3_000, 500, 200, 0, 4_000]
    starts = [sum(sizes[:i]) for i in range(6)]
    return pd.DataFrame({"part": parts, "bytes": sizes, "start_bytes": starts, "how": ["counted"] * 6})


def padding(sizes: tuple[int, ...] = (1, 2, 4, 8), most: int = 12, ladder: str = "toy") -> pd.DataFrame:
    rows = []
    for batch in range(1, most + 1):
        padded = next((size for size in sizes if size >= batch), batch)
        extra = padded - batch
        rows.append((ladder, batch, batch <= sizes[-1], padded, extra, extra / batch, extra / padded))
    columns = ["ladder", "batch", "captured", "padded", "padding_tokens", "waste_of_real", "waste_of_padded"]
    return pd.DataFrame(rows, columns=columns)


def coverage() -> pd.DataFrame:
    modes = ["FULL"] * 6 + ["PIECEWISE"] * 2 + ["not captured"] * 2
    rows = [(kind, n + 1, mode, n + 1) for kind in ("decode", "mixed") for n, mode in enumerate(modes)]
    return pd.DataFrame(rows, columns=["kind", "batch", "mode", "padded"])


def ladders() -> pd.DataFrame:
    return pd.concat([padding(), padding((1, 4, 12), ladder="coarse"), padding((6,), ladder="short")])


def expected() -> pd.DataFrame:
    columns = ["ladder", "sizes", "waste_of_real", "waste_of_padded", "captured_steps", "captured_tokens"]
    return pd.DataFrame(
        [("fine", 8, 0.02, 0.0196, 1.0, 1.0), ("coarse", 3, 0.25, 0.2, 0.9, 0.8)], columns=columns
    )


def orders() -> pd.DataFrame:
    down, up = captures(2), captures(2, (1, 2, 4, 8))
    both = [down.assign(order_of_sizes="large to small"), up.assign(order_of_sizes="small to large")]
    return pd.concat(both, ignore_index=True)


def segments() -> pd.DataFrame:
    rows = [
        (0, 4096, "small", 0, 512, "live"),
        (0, 4096, "small", 512, 3584, "free"),
        (1, 8192, "large", 0, 8192, "live"),
    ]
    columns = ["segment", "segment_bytes", "pool", "offset_bytes", "block_bytes", "state"]
    return pd.DataFrame(rows, columns=columns)


def lifetimes() -> tuple[pd.DataFrame, list[str]]:
    rows = [
        (0, "submod_0", "hidden", 0, 1, 2),
        (0, "submod_2", "out", 1, None, 3),
        (1, "submod_0", "hidden", 2, 3, None),
    ]
    columns = ["step", "name", "output", "written_at", "last_read_at", "overwritten_at"]
    return pd.DataFrame(rows, columns=columns), [
        "submod_0 @ 8",
        "submod_2 @ 8",
        "submod_0 @ 4",
        "submod_2 @ 4",
    ]


def steps() -> pd.DataFrame:
    rows = [("prefill", 5, 167, 167, "NONE", 310.0)]
    rows += [("decode", 5, 5, 8, "FULL", 70.0)] * 20 + [("decode", 1, 1, 1, "FULL", 60.0)] * 5
    return pd.DataFrame(rows, columns=["kind", "num_reqs", "num_tokens", "num_padded_tokens", "mode", "ms"])


def times() -> pd.DataFrame:
    modes = ["eager", "compiled", "PIECEWISE", "FULL"]
    return pd.DataFrame(
        {"mode": modes, "ms_per_token": [92.0, 71.0, 72.0, 70.5], "low_ms": [90.0] * 4, "high_ms": [99.0] * 4}
    )


def counters(seen: int = 1) -> pd.DataFrame:
    rows = [
        ("=" if seen == 1 else "≠", "num_graphs_seen", 1, seen, "one graph <a model>"),
        ("·", "num_models_seen", pd.NA, 1, "who knows"),
    ]
    return pd.DataFrame(rows, columns=["sign", "counter", "expected", "seen", "law"])


def edges(layers: int = 30) -> pd.DataFrame:
    """What crosses in :func:`pieces`: q to attention, its output on, the residual past it."""
    columns = ["value", "from_piece", "to_piece", "written_by", "role", "shape", "dtype", "source"]
    tensor = ("value", "(s0, 9, 64)", "bfloat16")
    rows = [("l_x_", "", "submod_0", "", "value", "(s0)", "int64", "L['tokens']")]
    rows.append(("l_w_", "", "submod_0", "", "weight", "(64, 64)", "bfloat16", "layers.0.weight"))
    for i in range(0, 2 * layers, 2):
        rows.append((f"q_{i}", f"submod_{i}", f"submod_{i + 1}", "", *tensor, ""))
        rows.append((f"out_{i}", f"submod_{i}", f"submod_{i + 1}", "", *tensor, ""))
        rows.append((f"out_{i}", f"submod_{i}", f"submod_{i + 2}", f"submod_{i + 1}", *tensor, ""))
        rows.append((f"rest_{i}", f"submod_{i}", f"submod_{i + 2}", "", *tensor, ""))
    rows.append(("last", f"submod_{2 * layers}", "", "", *tensor, ""))
    return pd.DataFrame(rows, columns=columns)


def nodes() -> pd.DataFrame:
    """The nodes of a small piece: y = linear(x, w) + 1."""
    columns = ["node", "role", "operator", "constants", "text", "shape", "dtype", "reads_from", "source"]
    rows = [
        ("s0", "number", "", "", "", "s0", "int", [], ""),
        ("x", "value", "", "", "", "(s0, 64)", "float32", [], "L['x']"),
        ("w", "weight", "", "", "", "(64, 64)", "float32", [], "layers.0.weight"),
        ("lin", "call", "aten::linear", "", "linear(x, w)", "(s0, 64)", "float32", ["x", "w"], ""),
        ("y", "call", "aten::add.Tensor", "1", "add(lin, 1)", "(s0, 64)", "float32", ["lin"], ""),
        ("output", "output", "", "", "return y", "", "", ["y"], ""),
    ]
    return pd.DataFrame(rows, columns=columns)


def log() -> pd.DataFrame:
    """A trace, a split, three compilations that 31 pieces use, and two sizes."""
    rows = [
        {"stage": "trace", "what": "Toy", "start_s": 3.0, "seconds": 2.0},
        {"stage": "split", "what": "Toy: 61 pieces", "start_s": 5.0, "seconds": 0.05},
    ]
    at = 5.1
    for name, seconds, cache in (
        ("submod_0", 4.0, "miss"),
        ("submod_2", 2.0, "hit"),
        ("submod_60", 1.0, "miss"),
    ):
        more = {"piece": name, "shape": "general", "cache": cache, "shared_with": "", "key": name}
        rows.append({"stage": "compile", "what": name, "start_s": at, "seconds": seconds, **more})
        at += seconds
        if name == "submod_2":
            for i in range(4, 60, 2):
                shared = {
                    "piece": f"submod_{i}",
                    "shape": "general",
                    "cache": "shared",
                    "shared_with": name,
                    "key": name,
                }
                rows.append(
                    {"stage": "compile", "what": f"submod_{i}", "start_s": at, "seconds": 0.0, **shared}
                )
    for size in (8, 4):
        more = {"mode": "PIECEWISE", "num_tokens": size, "graphs": 31, "recording_s": 0.3, "emulated": True}
        rows.append({"stage": "capture", "what": f"PIECEWISE {size}", "start_s": at, "seconds": 0.5, **more})
        at += 0.5
    return pd.DataFrame(rows)


def tour_data(**changes) -> TourData:
    nodes = pd.DataFrame({"op": ["placeholder", "call_function"], "operator": ["", "aten.mul"]})
    fields = {
        "model": "toy-llama",
        "device": "cpu",
        "emulated": True,
        "layers": 30,
        "sizes": [1, 2, 4, 8],
        "mode": "FULL",
        "dtype": "float32",
        "requests": 5,
        "tokens": 26,
        "tokens_equal": True,
        "nodes": nodes,
        "pieces": pieces(keys=False),
        "edges": edges(),
        "log": log(),
        "compilations": compilations(),
        "captures": captures(),
        "memory": memory(),
        "padding": padding(),
        "coverage": coverage(),
        "steps": steps(),
        "times": times(),
        "counters": counters(),
        "stages": pd.DataFrame({"stage": ["trace"], "seconds": [5.0]}),
        "answers": pd.DataFrame({"prompt": ["<b>Why?</b>"], "answer": ["Because & so"]}),
        "stitch_source": "def execute(x):\n    return (x,)\n",
    }
    return TourData(**{**fields, **changes})


def static(subjects: int = 2) -> pd.DataFrame:
    """Made up: nobody measured these."""
    rows = []
    places = [("product", "8x2048x3072", 8)]
    shapes = ("llama-3.2-1b", "llama-3.1-8b")[:subjects]
    places += [(s, piece, b) for s in shapes for piece in ("first", "middle", "last") for b in (1, 8, 32)]
    for number, place in enumerate(places):
        general = 20.0 + 15 * number
        for name, factor, seconds in (
            ("general", 1.0, 2.0),
            ("static", 0.97, 3.0),
            ("static, tuned", 0.8 + 0.01 * number, 90.0),
            ("cuBLAS", 0.9, 0.0),
        ):
            us = general * factor
            row = dict(zip(("subject", "piece", "batch"), place), callable=name, us=us, low_us=us * 0.9)
            rows.append({**row, "compile_s": seconds, "kernels": 2, "times_general": 1 / factor})
    return pd.DataFrame(rows)


def candidates(of: int = 20) -> pd.DataFrame:
    """Made up: a product's candidates; the library is the slowest but one, and the last one failed."""
    rows = [
        {
            "operator": "mm",
            "inputs": "8x2048, 2048x3072",
            "candidate": f"triton_mm_{i}",
            "backend": "Triton",
            "parameters": f"ACC_TYPE='tl.float32', BLOCK_K={32 << i % 3}, BLOCK_M=16, BLOCK_N={32 << i % 2}, "
            f"num_stages={1 + i % 4}, num_warps={2 << i % 3}",
            "ms": 0.010 + 0.001 * i,
            "chosen": i == 0,
        }
        for i in range(of)
    ]
    library = {"candidate": "mm", "backend": "ATen", "parameters": "", "ms": 0.0095 + 0.001 * of}
    rows.append({**rows[0], **library, "chosen": False})
    rows[-2]["ms"] = float("inf")
    return pd.DataFrame(rows)


def passes(gpu: bool = True) -> pd.DataFrame:
    """Made up: seven variants of ``cgkit bench passes``."""
    variants = ("off", "noop", "norm", "norm + act", "norm, no noop", "whole, off", "whole, all")
    rows = []
    for batch in (1, 32):
        for number, name in enumerate(variants):
            row = {"variant": name, "batch": batch, "wall_ms": 1.5 + 0.2 * (batch > 1) - 0.05 * number}
            row |= {"compile_s": 9.0 + number, "generated_kernels": 22 - number}
            row |= {"bytes_at_16_tokens": (60 - 5 * number) << 20, "max_difference": 0.01 * number}
            if gpu:
                row |= {"kernels_a_layer": 13.1 - number, "gpu_busy_ms": row["wall_ms"] * 0.9}
            rows.append(row)
    return pd.DataFrame(rows)


def starts() -> pd.DataFrame:
    """Made up: two models, cold and twice warm."""
    rows = []
    for model, layers in (("toy-llama-4", 4), ("toy-llama-80", 80)):
        for cache, compile_s in (("cold", 15.0), ("warm", 1.5), ("warm", 1.75)):
            parts = {"import_s": 2.0, "compiler_import_s": 3.0, "model_s": 0.1, "trace_s": layers / 5}
            parts |= {"split_s": layers / 100, "compile_s": compile_s, "answer_s": 0.1}
            row = {"cache": cache, "model": model, "compiler": "inductor", **parts}
            rows.append({**row, "start_s": sum(parts.values())})
    return pd.DataFrame(rows)


def adaptors() -> pd.DataFrame:
    """Made up: two adaptors, two cold starts and a warm one each."""
    rows = []
    for compiler, handle, kept in (("inductor", "artefact", 3), ("eager", "", 0)):
        for cache, seconds in (("empty", 16.0), ("full", 2.0), ("empty", 18.0)):
            row = {"compiler": compiler, "cache": cache, "compile_s": seconds if kept else 0.5}
            row |= {"handle": handle, "handles": kept, "files": 12 * kept, "file_bytes": kept << 20}
            rows.append(row)
    return pd.DataFrame(rows)


def dedup() -> pd.DataFrame:
    """Made up: a depth a row; a layer costs the trace 0.2 s and the compile stage nothing."""
    return pd.DataFrame(
        {"layers": n, "pieces": n + 1, "compilations": 3, "trace_s": n / 5, "split_s": n / 99, "compile_s": s}
        for n, s in ((4, 10.0), (16, 10.5), (80, 11.0))
    )


def by_largest():
    """Reserved bytes over the largest size, for three ways."""
    ways = {"large to small": [1024, 2048], "small to large": [1024, 3072], "owned outputs": [2048, 8192]}
    return pd.DataFrame(ways, index=[1, 2])


def by_number():
    """The best cost for a number of sizes, and two lists."""
    best = pd.DataFrame({"sizes": [1, 2, 3], "expected_step_cost": [9.0, 5.02, 5.0]})
    return best, pd.DataFrame({"list": ["a", "b"], "sizes": [2, 3], "expected_step_cost": [6.0, 5.5]})
