"""Solutions of the exercises of notebook 04."""

import hashlib

#: Only what changes the kernels of a piece is a miss. Exact sizes are compiled besides the general version, under its key.
solution_04_1 = {
    "record only batches of 1 and 2": "hit",
    "compile 8 tokens exactly, too": "hit",
    "record full graphs": "hit",
    "turn Inductor's shape padding off": "miss",
    "cut at nothing": "miss",
    "debug checks at replay": "hit",
}


def solution_04_2(kinds):
    """The first piece holds no MLP; the last holds the last layer's MLP and the final norm, and no next layer. So each is
    one of its own. Between them a piece holds the MLP of every layer but the last."""
    return 2 + len(set(kinds[:-1]))


def solution_04_3(files, traced, options):
    parts = sorted((name, files[name]) for name in traced), sorted(options.items())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def solution_04_4(tokens, sizes, ends):
    if tokens in sizes:
        return f"size {tokens}"
    start = 1
    for end in ends:
        if start <= tokens <= end:
            return f"range {start}-{end}"
        start = end + 1
    return "general"
