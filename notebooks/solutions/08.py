"""Solutions of notebook 08."""

import itertools


def solution_08_1(frame):
    last = frame[frame["growth_bytes"] > 0].iloc[-1]
    return last["name"], last["num_tokens"]


def solution_08_2(pieces):
    after = {name: index for index, (_, writes) in enumerate(pieces) for name in writes}
    for index, (reads, _) in enumerate(pieces):
        after |= dict.fromkeys(reads, index)  # a later reader overwrites an earlier one
    return after


def solution_08_3(run, batches):
    return [run(batch).clone() for batch in batches]


#: Above 10 MiB a block has a segment of its own, which is too small for the larger one.
solution_08_4 = ([12 * 2**20], [24 * 2**20])


def solution_08_5(events):
    blocks = []  # [segment, offset, size, name or None], sorted
    segments = itertools.count()
    reserved = 0
    for name, nbytes in events:
        if nbytes == 0:
            next(block for block in blocks if block[3] == name)[3] = None
            blocks = merged(blocks)
            continue
        size = -(-nbytes // 512) * 512
        fitting = [block for block in blocks if block[3] is None and block[2] >= size]
        if fitting:
            block = min(fitting, key=lambda block: (block[2], block[0], block[1]))
        else:
            block = [next(segments), 0, size, None]
            blocks.append(block)
            reserved += size
        if block[2] > size:
            blocks.append([block[0], block[1] + size, block[2] - size, None])
        block[2:] = [size, name]
        blocks.sort(key=lambda block: block[:2])
    return reserved


def merged(blocks):
    """Free neighbours of one segment become one block."""
    joined = []
    for block in blocks:
        before = joined[-1] if joined else None
        if before and before[0] == block[0] and before[3] is None and block[3] is None:
            before[2] += block[2]
        else:
            joined.append(block)
    return joined
