"""Solutions of the exercises of notebook 00."""


def solution_00_1(layers, sizes):
    """L cuts make L + 1 pieces and L pieces of attention. The first and the last are unlike the others; between them are L - 1
    equal ones, none if there is one layer."""
    return {"pieces": 2 * layers + 1, "compilations": min(layers + 1, 3), "graphs": len(sizes) * (layers + 1)}


def solution_00_2(batch, sizes):
    padded = min((size for size in sizes if size >= batch), default=batch)
    return (padded - batch) / padded


def solution_00_3(step, batches):
    return [step(batch).clone() for batch in batches]
