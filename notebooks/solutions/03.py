"""Solutions of notebook 03, "Splitting the graph"."""

import operator

# Twelve cuts. Gaps by (epsilon of the layer before, norm after it?): most layers are followed by a norm, those before a
# mixer by none; the sixth layer has another epsilon and is followed by a norm. With the first piece and the last: five.
solution_03_1 = {"pieces": 25, "capturable": 13, "different": 5}

# nb03::scale depends on its tensors alone; the other two read the length of the step.
solution_03_2 = ["nb03::attend", "nb03::mix"]


def solution_03_3(steps, values, returned):
    last_use = {name: index for index, step in enumerate(steps) for name in step.inputs}

    def one(index, step):  # a function, so that no local variable lives on
        made = step.run(*[values[name] for name in step.inputs])
        values.update(zip(step.outputs, made))
        for name in {*step.inputs, *step.outputs} - set(returned):
            if last_use.get(name, -1) <= index:
                del values[name]

    for index, step in enumerate(steps):
        one(index, step)
    return [values[name] for name in returned]


def solution_03_4(lines):
    place = {line.name: index for index, line in enumerate(lines)}
    rows = []
    for line in lines:
        arguments = tuple((where, place[node] if node else text) for where, text, node in line.arguments)
        role = "value" if line.role == "weight" else line.role
        rows.append((role, line.operator, arguments, line.shape, line.dtype))
    return tuple(rows)


def solution_03_5(graph, is_splitting):
    number, after_cut, piece_of = 0, False, {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem:
            piece_of[node] = piece_of[node.args[0]]  # in the graph's order its tuple came before
            continue
        if is_splitting(node) != after_cut:
            number, after_cut = number + 1, is_splitting(node)
        piece_of[node] = number
    return piece_of
