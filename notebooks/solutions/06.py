"""Solutions of notebook 06."""

import torch

# The graph reads the address of the recording and holds the number 3: 1 * 3, 5 * 3, 6 * 3, and 6 * 3 again.
solution_06_1 = [3.0, 15.0, 18.0, 18.0]


def solution_06_2(layers, sizes, mode, max_num_seqs):
    pieces = layers + 1  # one cut a layer
    padded = min((size for size in sizes if size >= max_num_seqs), default=max(sizes))
    decode = sum(size <= padded for size in sizes)
    return {
        "NONE": 0,
        "PIECEWISE": len(sizes) * pieces,
        "FULL": len(sizes),
        "FULL_DECODE_ONLY": decode,
        "FULL_AND_PIECEWISE": len(sizes) * pieces + decode,
    }[mode]


def solution_06_3(function, example, platform):
    buffer = example.clone()
    function(buffer)  # the warm-up
    graph, output = platform.record(lambda: function(buffer), platform.new_pool())

    def fast(x):
        buffer.copy_(x)
        graph.replay()
        return output.clone()

    return fast


def solution_06_4(x):
    x = x / torch.clamp(x.max(), min=1)
    return torch.relu(x).sum()


def solution_06_5(function, platform, pool):
    entries = {}

    def wrapped(key, x):
        if key not in entries:
            graph, output = platform.record(lambda: function(x), pool)
            entries[key] = graph, output, x.data_ptr()
        graph, output, address = entries[key]
        if x.data_ptr() != address:
            raise ValueError(f"x lies at {x.data_ptr():#x}, and key {key} was recorded at {address:#x}")
        graph.replay()
        return output

    return wrapped
