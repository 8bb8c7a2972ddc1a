"""Linear attention with a recurrent state: a splitting operator of another kind.

It shows that nothing in splitting and capturing is made for softmax attention alone: this mixer keeps no
keys, but one matrix per request and head, and it gets that state as an argument (a buffer of the model)
and not through a KV cache. After Katharopoulos et al., "Transformers are RNNs" (ICML 2020), with the
decay of Sun et al., "Retentive Network" (2023); see the article's "切分算子：splitting_ops 与「铰链」"
(splitting operators), where vLLM's list holds several operators of this kind.

For each token t of a request and each head::

    S_t = decay * S_(t-1) + k_t v_t^T            (head_dim, head_dim)
    output_t = scale * q_t S_t
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cgkit.errors import ServingError
from cgkit.forward_context import get_forward_context
from cgkit.serving.attention import AttentionMetadata
from cgkit.splitting import register_op


def linear_attention_with_output(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, output: Tensor, decay: float, scale: float
) -> None:
    """Fills ``output`` and moves ``state`` on, for all requests of the step.

    ``query``, ``key``, ``value``, ``output`` (tokens, heads, head_dim); ``state`` (num_slots, heads,
    head_dim, head_dim), floating point. Reads an AttentionMetadata from the forward context, of it
    ``block_table[:, 0]`` (a request's first block is also the number of its state; 0: padding, whose state
    stays zero), ``seq_lens``, ``query_start_loc`` and ``token_to_req``. A request whose tokens are all new
    starts from zero. Without metadata the output is zeros and no state moves.

    The same code for decode and prefill, and safe to record: every size is that of a buffer. It holds a
    (tokens, tokens) and a (max_reqs, tokens) matrix of weights, so it suits small batches.
    """
    metadata = get_forward_context().attn_metadata
    if metadata is None:
        output.zero_()
        return
    with torch.no_grad():
        _mix(query, key, value, state, output, decay, scale, metadata)


def _mix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    output: Tensor,
    decay: float,
    scale: float,
    metadata: AttentionMetadata,
) -> None:
    """The parallel form of the recurrence, see :func:`linear_attention_with_output`."""
    if state.shape[1:] != (*query.shape[1:], value.shape[-1]) or query.shape != value.shape:
        raise ServingError(
            f"state {tuple(state.shape)} must be (num_slots, heads, head_dim, head_dim) for query "
            f"{tuple(query.shape)} and value {tuple(value.shape)}"
        )
    tokens, device = query.shape[0], query.device
    starts, ends = metadata.query_start_loc[:-1], metadata.query_start_loc[1:]
    request = metadata.token_to_req[:tokens]
    token = torch.arange(tokens, dtype=torch.int32, device=device)
    real = token < ends[-1]
    zero = state.new_zeros(())
    # A padding token may be NaN: it must be gone before anything is summed.
    q, k, v = (torch.where(real[:, None, None], x.to(state.dtype), zero) for x in (query, key, value))

    fresh = (metadata.seq_lens <= ends - starts)[:, None, None, None]
    slots = torch.where(metadata.seq_lens > 0, metadata.block_table[:, 0], 0)
    before = torch.where(fresh, zero, state.index_select(0, slots))  # (max_reqs, heads, dim, dim)

    # What the request held before this step, faded by the tokens since.
    since = token - starts.index_select(0, request) + 1
    carried = before.index_select(0, request) * _power(decay, since, zero)[:, None, None, None]
    # What this step's earlier tokens of the same request add.
    apart = token[:, None] - token
    weights = torch.where((request[:, None] == request) & (apart >= 0), _power(decay, apart, zero), zero)
    scores = torch.einsum("thi,shi->hts", q, k) * weights
    mixed = torch.einsum("thi,thij->thj", q, carried) + torch.einsum("hts,shj->thj", scores, v)
    output.copy_(mixed * scale)

    rows = torch.arange(starts.shape[0], device=device, dtype=torch.int32)
    left = ends[:, None] - 1 - token  # tokens of the request still to come
    weights = torch.where((request == rows[:, None]) & (left >= 0), _power(decay, left, zero), zero)
    added = torch.einsum("rt,thi,thj->rhij", weights, k, v)
    after = before * _power(decay, ends - starts, zero)[:, None, None, None] + added
    owned = (slots > 0)[:, None, None, None]
    state.index_copy_(0, slots.long(), torch.where(owned, after, zero))


def _power(decay: float, exponent: Tensor, like: Tensor) -> Tensor:
    """``decay ** exponent`` in the dtype of ``like``; 1 where the exponent is negative (masked later)."""
    return torch.pow(decay, exponent.clamp(min=0).to(like.dtype))


register_op("linear_attention_with_output", linear_attention_with_output, mutates_args=["state", "output"])


class LinearAttention(nn.Module):
    """Projections around the operator; keeps the state of ``num_slots - 1`` requests (slot 0: padding)."""

    state: Tensor

    def __init__(self, hidden: int, heads: int, num_slots: int, decay: float = 0.9) -> None:
        super().__init__()
        if hidden % heads or not 0 < decay <= 1:
            raise ServingError(f"hidden={hidden} must be a multiple of heads={heads}, 0 < decay={decay} <= 1")
        self.heads, self.head_dim, self.decay = heads, hidden // heads, decay
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        shape = (num_slots, heads, self.head_dim, self.head_dim)
        self.register_buffer("state", torch.zeros(shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (tokens, hidden)
        query, key, value = self.qkv(x).view(-1, 3, self.heads, self.head_dim).unbind(1)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        torch.ops.cgkit.linear_attention_with_output(
            query, key, value, self.state, output, self.decay, self.head_dim**-0.5
        )
        return self.out(output.flatten(1))


class TinyLinearAttentionModel(nn.Module):
    """Embedding, ``num_layers`` linear-attention layers with residuals, logits. Random weights."""

    def __init__(
        self, vocab: int = 64, hidden: int = 32, heads: int = 2, num_layers: int = 2, num_slots: int = 9
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(LinearAttention(hidden, heads, num_slots) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(num_layers))
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:  # (tokens,) -> (tokens, vocab)
        x = self.embed(input_ids)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.head(x)
