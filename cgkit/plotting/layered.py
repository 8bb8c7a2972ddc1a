"""A layered drawing of a directed graph without cycles: who feeds whom, from top to bottom.

The usual four steps, small: a layer for each node (the longest way from a source), long edges cut into
one bend a layer, an order within the layers that crosses few edges (barycentres), and places that
keep edges straight (least squares under "no two overlap"). Made for the operators of one piece: tens to
a few hundred nodes, the same picture on every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]
_BEND_WIDTH = 8.0


@dataclass
class Layout:
    """Where things are: the centre of each node, the points of each edge, and the size of it all."""

    centre: dict[Hashable, Point] = field(default_factory=dict)
    edges: dict[tuple[Hashable, Hashable], list[Point]] = field(default_factory=dict)
    width: float = 0.0
    height: float = 0.0


def layered(
    sizes: Mapping[Hashable, tuple[float, float]],
    edges: Sequence[tuple[Hashable, Hashable]],
    *,
    gap: float = 14.0,
    rise: float = 22.0,
    sweeps: int = 8,
) -> Layout:
    """Places the nodes of a graph.

    Args:
        sizes: width and height of each node; in an order in which every edge points forward.
        edges: (from, to); an edge that points backward, or to a node that is not there, is left out.
        gap: least distance between two nodes of a layer.
        rise: distance between two layers.
    """
    position = {node: index for index, node in enumerate(sizes)}
    edges = [
        (a, b)
        for a, b in dict.fromkeys(edges)
        if a in position and b in position and position[a] < position[b]
    ]
    rank = _ranks(list(sizes), edges)
    widths = {node: width for node, (width, _) in sizes.items()}
    layers: list[list[Hashable]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
    for node in sizes:
        layers[rank[node]].append(node)
    chains = _bends(edges, rank, layers, widths)
    above: dict[Hashable, list[Hashable]] = {node: [] for layer in layers for node in layer}
    below: dict[Hashable, list[Hashable]] = {node: [] for layer in layers for node in layer}
    for chain in chains.values():
        for a, b in itertools.pairwise(chain):
            below[a].append(b)
            above[b].append(a)
    for sweep in range(sweeps):
        _order(layers, above if sweep % 2 == 0 else below, reverse=sweep % 2 == 1)
    x = _places(layers, above, below, widths, gap, sweeps, list(chains.values()))
    return _layout(sizes, layers, chains, x, rise)


def _ranks(nodes: Sequence[Hashable], edges: Sequence[tuple[Hashable, Hashable]]) -> dict[Hashable, int]:
    """Layers: as far down as what a node needs, and a source as near as it can be to its first user."""
    rank = dict.fromkeys(nodes, 0)
    into: dict[Hashable, list[Hashable]] = {node: [] for node in nodes}
    out: dict[Hashable, list[Hashable]] = {node: [] for node in nodes}
    for a, b in edges:
        into[b].append(a)
        out[a].append(b)
    for node in nodes:
        rank[node] = max((rank[a] + 1 for a in into[node]), default=0)
    for node in reversed(nodes):
        if not into[node] and out[node]:
            rank[node] = min(rank[b] for b in out[node]) - 1
    return rank


def _bends(
    edges: Sequence[tuple[Hashable, Hashable]],
    rank: Mapping[Hashable, int],
    layers: list[list[Hashable]],
    widths: dict[Hashable, float],
) -> dict[tuple[Hashable, Hashable], list[Hashable]]:
    """Each edge as a chain from layer to layer; the links between its ends are put into ``layers``."""
    chains = {}
    for a, b in edges:
        chain: list[Hashable] = [a]
        for level in range(rank[a] + 1, rank[b]):
            bend = (a, b, level)
            layers[level].append(bend)
            widths[bend] = _BEND_WIDTH
            chain.append(bend)
        chains[a, b] = [*chain, b]
    return chains


def _order(
    layers: list[list[Hashable]], neighbours: Mapping[Hashable, list[Hashable]], reverse: bool
) -> None:
    """Sorts each layer by the middle of where its neighbours stand in the layer before it."""
    for index in range(len(layers) - 2, -1, -1) if reverse else range(1, len(layers)):
        fixed = {node: i for i, node in enumerate(layers[index + 1 if reverse else index - 1])}
        here = {node: i for i, node in enumerate(layers[index])}

        def middle(node: Hashable, fixed: dict = fixed, here: dict = here) -> float:
            spots = [fixed[other] for other in neighbours[node] if other in fixed]
            return sum(spots) / len(spots) if spots else here[node]

        layers[index].sort(key=middle)


def _places(
    layers: list[list[Hashable]],
    above: Mapping[Hashable, list[Hashable]],
    below: Mapping[Hashable, list[Hashable]],
    widths: Mapping[Hashable, float],
    gap: float,
    sweeps: int,
    chains: Sequence[list[Hashable]],
) -> dict[Hashable, float]:
    """A place from left to right for each node: near its neighbours, and long edges straight."""
    x: dict[Hashable, float] = {}
    for layer in layers:
        _spread(layer, {node: x.get(node, 0.0) for node in layer}, {}, widths, gap, x)
    for sweep in range(3 * sweeps):
        straight = {}
        if sweep >= sweeps:
            for chain in chains:
                bends = sorted(x[bend] for bend in chain[1:-1])
                straight.update(dict.fromkeys(chain[1:-1], bends[len(bends) // 2] if bends else 0.0))
        for layer in layers if sweep % 2 == 0 else layers[::-1]:
            wanted = {}
            for node in layer:
                near = above[node] + below[node]
                mean = sum(x[other] for other in near) / len(near) if near else x[node]
                wanted[node] = straight.get(node, mean)
            _spread(layer, wanted, straight, widths, gap, x)
    return x


def _spread(
    layer: Sequence[Hashable],
    wanted: Mapping[Hashable, float],
    straight: Mapping[Hashable, float],
    widths: Mapping[Hashable, float],
    gap: float,
    x: dict[Hashable, float],
) -> None:
    """Puts a layer's nodes as near to where they want to be as their widths allow (pooling neighbours
    that would overlap: isotonic regression, in which what is in ``straight`` weighs more)."""
    offset = 0.0
    offsets = []
    for before, node in zip([None, *layer], layer):
        if before is not None:
            offset += (widths[before] + widths[node]) / 2 + gap
        offsets.append(offset)
    pools: list[tuple[float, float, int]] = []  # (weighted sum of what they want, weight, how many)
    for node, shift in zip(layer, offsets):
        weight = 8.0 if node in straight else 1.0
        total, count = weight * (wanted[node] - shift), 1
        while pools and pools[-1][0] / pools[-1][1] > total / weight:
            more, heavier, number = pools.pop()
            total, weight, count = total + more, weight + heavier, count + number
        pools.append((total, weight, count))
    values = [total / weight for total, weight, count in pools for _ in range(count)]
    for node, shift, value in zip(layer, offsets, values):
        x[node] = value + shift


def _layout(
    sizes: Mapping[Hashable, tuple[float, float]],
    layers: Sequence[Sequence[Hashable]],
    chains: Mapping[tuple[Hashable, Hashable], list[Hashable]],
    x: Mapping[Hashable, float],
    rise: float,
) -> Layout:
    left = min((x[node] - width / 2 for node, (width, _) in sizes.items()), default=0.0)
    left = min(
        [left, *(x[node] - _BEND_WIDTH / 2 for layer in layers for node in layer if node not in sizes)]
    )
    layout = Layout()
    y, tops, heights = 0.0, [], []
    for layer in layers:
        height = max((sizes[node][1] for node in layer if node in sizes), default=0.0)
        tops.append(y)
        heights.append(height)
        y += height + rise
    layout.height = max(0.0, y - rise)
    level = {node: index for index, layer in enumerate(layers) for node in layer}
    for node, (width, _) in sizes.items():
        spot = level[node]
        layout.centre[node] = (x[node] - left, tops[spot] + heights[spot] / 2)
        layout.width = max(layout.width, x[node] - left + width / 2)
    for (a, b), chain in chains.items():
        points = [(layout.centre[a][0], layout.centre[a][1] + sizes[a][1] / 2)]
        for bend in chain[1:-1]:
            spot, at = level[bend], x[bend] - left
            points += [(at, tops[spot]), (at, tops[spot] + heights[spot])]
            layout.width = max(layout.width, at + _BEND_WIDTH / 2)
        points.append((layout.centre[b][0], layout.centre[b][1] - sizes[b][1] / 2))
        layout.edges[a, b] = points
    return layout
