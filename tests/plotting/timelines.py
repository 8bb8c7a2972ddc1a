"""Frames as ``Timeline.events`` gives them. SYNTHETIC: made by arithmetic, measured nowhere."""

import numpy as np
import pandas as pd

from cgkit.measuring.event_kinds import KINDS

COLUMNS = [
    "lane", "kind", "name", "start_us", "dur_us", "correlation", "stream", "device", "process", "thread",
    "launched_by", "graph_launch", "piece", "stage",
]  # fmt: skip
CPU_LANE, GPU_LANE = "thread 1 (main)", "GPU 0 stream 7"


class Builder:
    """Collects rows; a kernel names the row of its launch, which sorting then renumbers."""

    def __init__(self) -> None:
        self.rows: list[list] = []

    def cpu(self, kind, name, start, dur, correlation=-1, piece="", stage="", lane=CPU_LANE) -> int:
        self.rows.append(
            [lane, kind, name, start, dur, correlation, -1, -1, 0, 1, -1, -1, piece, stage]
        )  # fmt: skip
        return len(self.rows) - 1

    def gpu(self, name, start, dur, launched_by, graph=False, piece="", stage="", kind="kernel", stream=7):
        lane = f"GPU 0 stream {stream}"
        correlation = self.rows[launched_by][5] if launched_by >= 0 else -1
        tie = launched_by if graph else -1
        self.rows.append(
            [lane, kind, name, start, dur, correlation, stream, 0, 0, -1, launched_by, tie, piece, stage]
        )
        return len(self.rows) - 1

    def frame(self) -> pd.DataFrame:
        frame = pd.DataFrame(self.rows, columns=COLUMNS)
        order = np.lexsort((-frame["dur_us"], frame["start_us"]))
        new = np.empty(len(order), dtype=int)
        new[order] = np.arange(len(order))
        frame = frame.iloc[order].reset_index(drop=True)
        for column in ("launched_by", "graph_launch"):
            frame[column] = [new[i] if i >= 0 else -1 for i in frame[column]]
        frame["kind"] = pd.Categorical(frame["kind"], KINDS)
        for column in ("lane", "name", "piece", "stage"):
            frame[column] = frame[column].astype("category")
        return frame


KERNELS = ("nvjet_tst_64x8_qkv", "flash_fwd_splitkv_kernel", "nvjet_tst_64x8_out", "elementwise_kernel<silu>")


def eager(kernels: int = 40, cpu_us: float = 12.0, gpu_us: float = 4.0) -> pd.DataFrame:
    """Every kernel launched singly, the GPU starving between them."""
    build = Builder()
    t = 10.0
    build.cpu("annotation", "cgkit step", 0.0, kernels * cpu_us + 30)
    for i in range(kernels):
        name = KERNELS[i % len(KERNELS)]
        build.cpu("op", "aten::linear", t, cpu_us - 1)
        build.cpu("op", "aten::mm", t + 2, cpu_us - 4)
        launch = build.cpu("launch", "cudaLaunchKernel", t + cpu_us - 6, 3.0, correlation=100 + i)
        build.gpu(name, t + cpu_us - 1, gpu_us, launch)
        t += cpu_us
    build.cpu("sync", "cudaDeviceSynchronize", t, 10.0)
    return build.frame()


def pieces(layers: int = 4, nodes: int = 5) -> pd.DataFrame:
    """One graph launch a compiled piece, attention launched singly between them."""
    build = Builder()
    t, g = 5.0, 12.0
    build.cpu("annotation", "cgkit step", 0.0, 40.0 * layers + 60)
    for i in range(2 * layers + 1):
        piece, attention = f"submod_{i}", i % 2 == 1
        stage = "attention" if attention else "replay"
        build.cpu("annotation", f"cgkit:{stage}:{piece}", t, 10.0, piece=piece, stage=stage)
        if attention:
            launch = build.cpu("launch", "cuLaunchKernelEx", t + 3, 4, 500 + i, piece=piece, stage=stage)
        else:
            launch = build.cpu("graph_launch", "cudaGraphLaunch", t + 1, 8, 500 + i, piece=piece, stage=stage)
        g = max(g, t + 9)
        for k in range(1 if attention else nodes):
            name = "paged_attention_kernel" if attention else KERNELS[(0, 2, 3)[k % 3]]
            build.gpu(name, g, 3.0, launch, graph=not attention, piece=piece, stage=stage)
            g += 3.2
        t += 12.0
    build.cpu("sync", "cudaStreamSynchronize", t, max(g - t, 1.0) + 1)
    return build.frame()


def many(events: int = 100_000) -> pd.DataFrame:
    """About ``events`` events of an eager run: operators two deep, a launch and a kernel each."""
    return eager(kernels=events // 4, cpu_us=11.0, gpu_us=3.0)
