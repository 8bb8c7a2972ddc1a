"""The exercises of notebook 04 tell right from nearly right and from wrong."""

from tests.exercises.solved import check, pytest, solutions, well_formed

SOLVED = solutions("04")
HITS, OWN_KEY, CHOOSE = SOLVED["solution_04_1"], SOLVED["solution_04_3"], SOLVED["solution_04_4"]


@pytest.mark.slow
def test_the_solutions_are_right():
    well_formed("04")


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        ({**HITS, "cut at nothing": "hit"}, "nearly", "cut at nothing"),
        (dict.fromkeys(HITS, "hit"), "wrong", "2 of 6"),
        ({}, "wrong", "no answer for"),
        ({name: outcome.upper() for name, outcome in HITS.items()}, "right", "All of them"),
    ],
)
def test_predict_hits(answer, outcome, says):
    verdict = check("04-1", answer)
    assert verdict.outcome == outcome and says in verdict.say


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (lambda kinds: 3, "nearly", "all layers are alike"),
        (
            lambda kinds: 2 + len(set(kinds)),
            "nearly",
            "all layers are alike",
        ),  # the last layer's MLP counted twice
        (lambda kinds: 2 + max(len(set(kinds[:-1])), 1), "nearly", "from two layers on. For [0]"),
        (lambda kinds: 2.0 + len(set(kinds[:-1])), "right", "every model"),
        (lambda kinds: len(kinds) + 1, "wrong", "were compiled"),
    ],
)
def test_different_pieces(answer, outcome, says):
    verdict = check("04-2", answer)
    assert verdict.outcome == outcome and says in verdict.say


def joined(files, traced, options):
    texts = [files[name] for name in sorted(traced)]
    return "".join(texts) + repr(sorted(options.items())) + str(len(traced))


def greedy(files, traced, options):
    """Right, and takes apart what it is given."""
    traced.sort()
    held = [(name, files.pop(name)) for name in traced]
    return repr((held, sorted(options.items())))


def ordered(files, traced, options):
    return repr(([(name, files[name]) for name in traced], options))


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (ordered, "nearly", "misses without need"),
        (joined, "nearly", "moved from the end of one file"),
        (lambda files, traced, options: repr(sorted(options.items())), "wrong", "old code"),
        (greedy, "right", "Every edit"),
        (lambda files, traced, options: 7, "wrong", "same string"),
    ],
)
def test_own_key(answer, outcome, says):
    verdict = check("04-3", answer)
    assert verdict.outcome == outcome and says in verdict.say


def without_ends(tokens, sizes, ends):
    return CHOOSE(tokens, sizes, ends) if tokens not in ends or tokens in sizes else "general"


def without_sizes(tokens, sizes, ends):
    return CHOOSE(tokens, [], ends)


@pytest.mark.parametrize(
    ("answer", "outcome", "says"),
    [
        (without_ends, "nearly", "ends of ranges"),
        (without_sizes, "nearly", "exact sizes"),
        (lambda tokens, sizes, ends: "general", "wrong", "cases are off"),
    ],
)
def test_choose_callable(answer, outcome, says):
    verdict = check("04-4", answer)
    assert verdict.outcome == outcome and says in verdict.say
