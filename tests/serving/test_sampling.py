"""Greedy and drawn tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgkit.errors import ServingError
from cgkit.serving.sampling import GREEDY, SamplingParams, filtered_probabilities, sample

logits_of = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12).map(torch.tensor)


def draw(logits, params, count, seed=0):
    return [int(sample(logits[None], [params], [seed], [number])) for number in range(count)]


def test_greedy_takes_the_largest_and_mixes_with_drawing_rows():
    logits = torch.tensor([[0.0, 3.0, 1.0], [9.0, 0.0, 0.0], [0.0, 0.0, 50.0]])
    params = [GREEDY, GREEDY, SamplingParams(temperature=1.0, seed=1)]
    assert sample(logits, params, [0, 0, 1], [5, 5, 5]).tolist() == [1, 0, 2]


@settings(deadline=None, max_examples=60)
@given(logits_of, st.integers(0, 14), st.floats(0.05, 1.0), st.floats(0.1, 4.0))
def test_what_is_kept_is_the_smallest_likely_set(logits, top_k, top_p, temperature):
    kept = filtered_probabilities(logits, SamplingParams(temperature, top_k, top_p))
    full = torch.softmax(logits.float() / temperature, -1)
    inside = kept > 0
    assert inside.any()
    torch.testing.assert_close(kept[inside], full[inside])
    if not inside.all():  # nothing outside is likelier than what is inside
        assert full[~inside].max() <= full[inside].min()
    if top_k:
        assert inside.sum() <= top_k
    allowed = full.sort(descending=True).values[: top_k or None].sum()
    reached = full[inside].sum()
    assert reached >= top_p * allowed - 1e-5  # enough ...
    assert reached - full[inside].min() < top_p * allowed + 1e-5  # ... and not one more than that


def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    drawn = draw(logits, SamplingParams(temperature=1.0), 3000)
    shares = [drawn.count(token) / 3000 for token in range(3)]
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.04)


def test_a_seed_belongs_to_the_request_and_not_to_the_batch():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=1.5, seed=11)
    alone = [int(sample(logits[1:2], [params], [11], [number])) for number in range(30)]
    others = [SamplingParams(temperature=1.0, top_k=7), SamplingParams(temperature=0.3, top_p=0.8)]
    batch = [others[0], params, others[1]]
    together = [sample(logits, batch, [1, 11, 2], [9 - number, number, 4]) for number in range(30)]
    assert [tokens[1].item() for tokens in together] == alone and len(set(alone)) > 5
    assert draw(logits[0], params, 20, seed=3) != draw(logits[0], params, 20, seed=4)


def test_draws_of_neighbouring_seeds_numbers_and_tokens_are_independent():
    """Uniform logits: each of 8 tokens an eighth of the time along every axis, and no axis follows another."""
    hot, size, count = SamplingParams(temperature=1.0), 8, 64
    rows = torch.zeros(count, size)
    drawn = torch.stack([sample(rows, [hot] * count, range(count), [n] * count) for n in range(count)])
    expected = count * count / size
    for table in (drawn, drawn[1:] * size + drawn[:-1], drawn[:, 1:] * size + drawn[:, :-1]):
        cells = torch.bincount(table.flatten(), minlength=size if table is drawn else size * size)
        expected = table.numel() / len(cells)
        chi = float(((cells - expected) ** 2 / expected).sum())
        degrees = len(cells) - 1
        assert abs(chi - degrees) < 5 * (2 * degrees) ** 0.5


def test_top_k_1_is_greedy_at_any_temperature():
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5))
    assert set(draw(logits, SamplingParams(temperature=5.0, top_k=1), 20)) == {int(logits.argmax())}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 10**400},
        {"temperature": 1e39},
        {"temperature": 1e-40},
        {"temperature": 1e-320},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": 2**31},
        {"top_k": 2**63},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": 1e-50},
        {"top_p": float("nan")},
        {"seed": -3},
        {"seed": 1.0},
    ],
)
def test_wrong_parameters_are_refused_by_name(wrong):
    with pytest.raises(ServingError, match=next(iter(wrong))):
        SamplingParams(**wrong)
