"""An adopted model: a ``transformers`` causal LM behind the interface that a runner serves.

It plays the part of the article's ``LlamaModel`` ("模型侧的接入点：support_torch_compile 装饰器", the model's side: the
decorator) for a model whose code nobody wrote for it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class AdoptedConfig:
    """What a runner needs to know of a model. Immutable.

    ``max_position_embeddings`` is the longest request that the paged kernel serves rightly; where it is less than
    the model's own, ``limited_by`` says why in a sentence.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    #: A request stops at any of these.
    eos_token_ids: tuple[int, ...] = ()
    limited_by: str = ""


class AdoptedModel(nn.Module):
    """A ``transformers`` model on a flat stream of tokens; what :func:`cgkit.serving.adopt.adopt` returns.

    ``forward`` is what gets traced, split, compiled and recorded: the model up to its last norm, its code as it is. The
    output projection stands outside of the graph for the reasons of :class:`cgkit.serving.llama.Llama`.

    Attributes:
        config: an :class:`AdoptedConfig`; ``hf_config`` is the model's own.
        body: the part up to the last norm. It shares the weights of the model that was adopted.
        attention_layers: the names under which the layers ask for their KV cache, in order.
        tokenizer: what lay beside the weights, else None.
        source: where the weights come from, for a reader.
    """

    def __init__(
        self,
        body: nn.Module,
        head: LogitsHead,
        config: AdoptedConfig,
        hf_config: Any,
        attention_layers: Sequence[str],
        source: str,
        tokenizer: Any = None,
    ) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.run_body = undecorated(body)
        self.config, self.hf_config = config, hf_config
        self.attention_layers = list(attention_layers)
        self.source, self.tokenizer = source, tokenizer

    @property
    def lm_head(self) -> nn.Linear:
        """The output projection, (rows, hidden) -> (rows, vocabulary); its type and device are the KV cache's."""
        return cast(nn.Linear, self.head.projection)  # or what has a weight as one

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states after the last norm, (tokens, hidden_size), of a flat stream of tokens.

        Args:
            input_ids: (tokens,), whole numbers.
            positions: (tokens,), each token's place in its own request.

        Runs inside :class:`cgkit.set_forward_context` with an ``AttentionMetadata`` that says which token belongs
        to which request.
        """
        out = self.run_body(
            self.body, input_ids=input_ids[None], position_ids=positions[None], use_cache=False
        )
        return out.last_hidden_state[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size) -> (rows, vocab_size), scaled and capped as the model does. Outside of the graph."""
        return self.head(hidden)


def undecorated(body: nn.Module) -> Any:
    """The function ``forward`` of ``body``'s class, without the decorators that ``transformers`` puts around it.

    They fill in what a caller left out and collect the layers' outputs if asked to. To that end they write
    attributes (of a global, of the configuration) in each call, and a step whose forward writes attributes has
    bytecode to run and cannot become a flat replay plan.
    """
    forward = type(body).forward
    return inspect.unwrap(forward) if type(body).__module__.startswith("transformers.") else forward


class _Given(nn.Module):
    """Stands where a body stood and returns the hidden states that it was given."""

    def __init__(self, output: type) -> None:
        super().__init__()
        self.output = output
        self.hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output(last_hidden_state=self.hidden)


class LogitsHead(nn.Module):
    """What a causal LM does after its body: the projection and, in some families, a scale or a cap.

    The model's own ``forward`` computes it, with a stand-in for the body that returns the given hidden states; so
    nothing of a family has to be known here. Where that is the bare projection to the bit, the projection alone
    is called (``plain``). ``output``: the class of what the body returns.
    """

    def __init__(self, model: Any, body: nn.Module, output: type) -> None:
        super().__init__()
        self._given = _Given(output)
        self._whole = copy_sharing_weights(model, {id(body): self._given})
        self._whole.generation_config = None  # not needed, and it counts objects anew in each process
        names = {id(part): name for name, part in model.named_modules()}
        self.projection: nn.Module = self._whole.get_submodule(names[id(model.get_output_embeddings())])
        self.plain = False

    def settle(self, hidden: Tensor) -> None:
        """Finds out, on ``hidden`` (rows, hidden_size), whether the projection alone does."""
        self.plain = torch.equal(self.projection(hidden), self._through_model(hidden))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.projection(hidden) if self.plain else self._through_model(hidden)

    def _through_model(self, hidden: Tensor) -> Tensor:
        self._given.hidden = hidden[None]
        rows = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)  # only to be passed on
        try:
            return self._whole(input_ids=rows, use_cache=False).logits[0]
        finally:
            self._given.hidden = None


def copy_sharing_weights(model: nn.Module, replaced: dict[int, Any] | None = None) -> Any:
    """A copy of ``model``'s modules and configuration, in eval mode, around the very same weights.

    So the original keeps its attention and goes on working, and no weight is there twice. Parameters of the copy
    want no gradient. ``replaced``: by the id of a part of ``model``, what stands there in the copy.
    """
    memo: dict[int, Any] = dict(replaced or {})
    for parameter in model.parameters():
        learns = parameter.requires_grad and type(parameter) is nn.Parameter
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False) if learns else parameter
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, memo).eval()
