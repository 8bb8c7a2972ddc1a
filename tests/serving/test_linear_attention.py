"""The linear-attention operator against its recurrence, and a model cut at it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cgkit.errors import ServingError
from cgkit.forward_context import set_forward_context
from cgkit.serving.attention import AttentionMetadata, build_metadata
from cgkit.serving.linear_attention import TinyLinearAttentionModel, linear_attention_with_output

HEADS, DIM, DECAY, SCALE = 2, 4, 0.8, 0.5


def recurrence(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One request, token by token, in float64; the outputs and the state after."""
    state, rows = state.double().clone(), []
    for t in range(len(q)):
        state = DECAY * state + k[t].double()[:, :, None] * v[t].double()[:, None, :]
        rows.append(SCALE * torch.einsum("hi,hij->hj", q[t].double(), state))
    return torch.stack(rows), state


def step(qkv: list[Tensor], state: Tensor, metadata: AttentionMetadata) -> Tensor:
    output = torch.full_like(qkv[0], torch.nan)
    with set_forward_context(metadata):
        torch.ops.cgkit.linear_attention_with_output(*qkv, state, output, DECAY, SCALE)
    return output


def batch(news: list[int], totals: list[int], slots: list[int], padding: int) -> AttentionMetadata:
    # The block size is out of play: one block is one state.
    return build_metadata(
        news, totals, [[s] for s in slots], 1000, max_reqs=len(news) + 2, max_tokens=sum(news) + padding
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_it_is_the_recurrence(data: st.DataObject) -> None:
    news = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    pasts = [data.draw(st.sampled_from([0, 3])) for _ in news]
    padding = data.draw(st.integers(0, 3))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    slots = (torch.randperm(6, generator=rng) + 1).tolist()[: len(news)]
    state = torch.randn(7, HEADS, DIM, DIM, generator=rng)
    state[0] = 0
    qkv = [torch.randn(sum(news) + padding, HEADS, DIM, generator=rng) for _ in range(3)]
    for x in qkv:
        x[sum(news) :] = torch.nan
    before, start = state.clone(), 0
    output = step(qkv, state, batch(news, [p + n for p, n in zip(pasts, news)], slots, padding))
    for new, past, slot in zip(news, pasts, slots):
        held = before[slot] if past else torch.zeros(HEADS, DIM, DIM)
        rows, after = recurrence(*(x[start : start + new] for x in qkv), held)
        torch.testing.assert_close(output[start : start + new].double(), rows, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state[slot].double(), after, rtol=1e-5, atol=1e-5)
        start += new
    assert not output[start:].any()
    others = [s for s in range(7) if s not in slots]
    assert torch.equal(state[others], before[others])


def test_without_metadata_zeros_and_no_state_moves() -> None:
    state, qkv = torch.ones(3, HEADS, DIM, DIM), [torch.ones(2, HEADS, DIM)] * 3
    with set_forward_context(None):
        output = torch.full_like(qkv[0], torch.nan)
        linear_attention_with_output(*qkv, state, output, DECAY, SCALE)
    assert not output.any()
    assert (state == 1).all()


def test_one_recording_serves_every_batch_of_its_size() -> None:
    first, second = batch([1, 1, 1], [9, 1, 5], [2, 5, 1], 2), batch([2, 1, 1], [2, 7, 1], [6, 3, 4], 1)
    names = ["block_table", "seq_lens", "query_start_loc", "token_to_req"]

    def run(q: Tensor, k: Tensor, v: Tensor, state: Tensor, *tensors: Tensor) -> Tensor:
        for name, tensor in zip(names, tensors):
            setattr(first, name, tensor)
        output = torch.empty_like(q)
        with set_forward_context(first):
            linear_attention_with_output(q, k, v, state, output, DECAY, SCALE)
        return output

    qkv, state = [torch.randn(5, HEADS, DIM) for _ in range(3)], torch.randn(7, HEADS, DIM, DIM)
    recorded = make_fx(run)(*qkv, state.clone(), *(getattr(first, n) for n in names))
    ours, theirs = state.clone(), state.clone()
    output = recorded(*qkv, ours, *(getattr(second, n) for n in names))
    assert torch.equal(output, step(qkv, theirs, second))
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, state)


def test_a_state_of_another_shape_is_refused() -> None:
    qkv = [torch.zeros(1, HEADS, DIM)] * 3
    with pytest.raises(ServingError, match="num_slots"):
        step(qkv, torch.zeros(2, HEADS, DIM, DIM + 1), batch([1], [1], [1], 0))


def test_the_model_gives_the_same_token_by_token_and_at_once() -> None:
    torch.manual_seed(0)
    model, ids = TinyLinearAttentionModel(), torch.arange(6)
    with torch.no_grad():
        with set_forward_context(batch([6], [6], [1], 2)):
            at_once = model(torch.cat([ids, ids[:2]]))[:6]
        rows = []
        for i in range(6):
            with set_forward_context(batch([1], [i + 1], [2], 1)):
                rows.append(model(ids[i : i + 1].repeat(2))[0])
    torch.testing.assert_close(torch.stack(rows), at_once, rtol=1e-4, atol=1e-4)


def test_the_model_can_be_cut_at_it() -> None:
    from torch import fx

    from cgkit.splitting import split_graph

    model, graphs = TinyLinearAttentionModel(num_layers=3), []

    def backend(graph: fx.GraphModule, inputs: list) -> object:
        graphs.append((graph, inputs))
        return graph

    ids, metadata = torch.arange(4), batch([4], [4], [1], 0)
    with torch.no_grad(), set_forward_context(metadata):
        torch.compile(model, backend=backend, fullgraph=True)(ids)
        graph, inputs = graphs[0]
        split = split_graph(graph, ["cgkit::linear_attention_with_output"])
        assert [piece.is_splitting for piece in split.pieces] == [False, True] * 3 + [False]
        (whole,), cut = graph(*inputs), split.stitch()(*inputs)
    assert torch.equal(cut[0], whole)
