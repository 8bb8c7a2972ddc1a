"""Solutions of the exercises of notebook 01."""


def solution_01_1(spans):
    total, counted = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, counted))
        counted = max(counted, end)
    return total


def solution_01_2(cpu, gpu):
    host = device = 0.0
    for launch, kernel in zip(cpu, gpu):
        host += launch
        device = max(host, device) + kernel
    return max(host, device)


def solution_01_3(rows, batch):
    return {
        row["mode"]: "CPU" if row["cpu_ms"] > row["gpu_busy_ms"] else "GPU" for row in rows if row["batch"] == batch
    }


def solution_01_4(layers):
    return layers + 1, layers
