"""``adopt``: a causal LM of ``transformers`` as it is -> a model that a runner serves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cgkit.serving.adopt.check import check_against_own
from cgkit.serving.adopt.interface import (
    LAYER_NAME,
    PAGED,
    PROBE,
    AttentionCall,
    noted_calls,
    register,
    use_attention,
)
from cgkit.serving.adopt.limits import longest_request
from cgkit.serving.adopt.model import AdoptedConfig, AdoptedModel, LogitsHead, copy_sharing_weights
from cgkit.serving.adopt.refusals import check_calls, check_model, place_in, refuse, text_config
from cgkit.serving.adopt.sources import find_model

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 5


def adopt(
    model: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    check: bool = True,
) -> AdoptedModel:
    """Takes a ``transformers`` causal LM through cgkit's road, paged KV cache included. Its code is not edited.

    ::

        adopted = cgkit.adopt("folder")              # or a model object, or a configuration (random weights)
        runner = cgkit.Runner(adopted, adopted.tokenizer, config)
        runner.capture_model()
        runner.generate(["Hello"])

    The model's attention is looked up through ``transformers``' AttentionInterface; in a copy of its modules (around
    the same weights, so ``model`` itself goes on as before) it is cgkit's splitting operator. One run over a few tokens
    shows how each layer calls it; whatever the operator does not do is refused.

    Args:
        model: a causal LM object; a folder with ``config.json`` and ``*.safetensors``; a ``.gguf`` file (Llama), or
            ``"smollm2-135m-instruct"``, the one that ``make tour`` uses; or a configuration of ``transformers``, for
            random weights. Nothing is downloaded.
        dtype, device: of the weights, where they are read or made here; None: float32 on the CPU. A model object is
            used as it is.
        seed: of random weights.
        check: hold the adopted model against ``model``'s own forward, on a few tokens of two requests, in two steps
            through a paged cache. Costs a few small forward passes, and catches what no rule foresaw.

    Raises:
        AdoptError: its attention cannot be replaced (ALiBi, cross attention, soft caps, sinks, recurrent states, an
            attention that is not looked up), or the check found another result. The message has file and line.
        ServingError: nothing is found at ``model``, or it cannot be read.
    """
    found = find_model(model, dtype, device, seed)
    original = found.model
    check_model(original)
    register()
    whole = copy_sharing_weights(original)
    use_attention(whole, PROBE)
    calls, path, output = _probe(whole, original)
    check_calls(whole, calls, _PROBE_TOKENS)
    names = _name_layers(whole, calls)
    use_attention(whole, PAGED)
    body = whole.get_submodule(path)
    config = _config(whole, calls, found.name)
    adopted = AdoptedModel(
        body, LogitsHead(whole, body, output), config, whole.config, names, found.source, found.tokenizer
    )
    adopted.eval()
    if check and next(original.parameters()).device.type != "meta":
        check_against_own(adopted, original)
    if config.limited_by:
        logger.warning("%s: %s", config.name, config.limited_by)
    return adopted


@torch.no_grad()
def _probe(model: Any, original: Any) -> tuple[list[AttentionCall], str, type]:
    """How each layer calls its attention, and the part that ends at the last norm: its name, its output's class.

    That part is the first ``PreTrainedModel`` inside of ``model`` that ``model`` itself calls.
    """
    entered: list[str] = []
    left: dict[str, Any] = {}
    hooks = []
    for name, part in model.named_modules():
        if name and hasattr(part, "config") and hasattr(part, "get_input_embeddings"):
            hooks.append(part.register_forward_pre_hook(lambda *_, name=name: entered.append(name)))
            hooks.append(part.register_forward_hook(lambda _, __, out, name=name: left.setdefault(name, out)))
    device = model.get_output_embeddings().weight.device
    tokens = torch.arange(_PROBE_TOKENS, device=device)[None]
    inputs = {"input_ids": torch.zeros_like(tokens), "position_ids": tokens, "use_cache": False}
    try:
        with noted_calls() as calls:
            model(**inputs)
    except Exception as error:  # whatever its code raises
        if not calls and _runs(original, inputs):  # it misses the mask that its own attention needs
            check_calls(model, calls, _PROBE_TOKENS)
        refuse(
            model,
            f"a run over {_PROBE_TOKENS} tokens failed: {type(error).__name__}: {error}",
            place_in(error),
        )
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        check_calls(model, calls, _PROBE_TOKENS)
    if not entered or not hasattr(left.get(entered[0]), "last_hidden_state"):
        refuse(model, "no part of it gives the hidden states after the last norm (last_hidden_state)")
    return calls, entered[0], type(left[entered[0]])


def _runs(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether ``model``, with its own attention, takes ``inputs``."""
    try:
        copy_sharing_weights(model)(**inputs)
    except Exception:  # whatever its code raises
        return False
    return True


def _name_layers(model: nn.Module, calls: Sequence[AttentionCall]) -> list[str]:
    """Gives each attention module the name of its KV cache: its own, as the checkpoint has it."""
    names = {id(module): name for name, module in model.named_modules()}
    for call in calls:
        setattr(call.module, LAYER_NAME, names[id(call.module)])
    return [names[id(call.module)] for call in calls]


def _config(model: Any, calls: Sequence[AttentionCall], name: str) -> AdoptedConfig:
    config, first = text_config(model), calls[0]
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    eos = getattr(config, "eos_token_id", None) if eos is None else eos
    longest, why = longest_request(config, calls)
    return AdoptedConfig(
        name=name,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        hidden_size=config.hidden_size,
        num_hidden_layers=len(calls),
        num_attention_heads=first.query[1],
        num_key_value_heads=first.key[1],
        head_dim=first.key[3],
        max_position_embeddings=longest,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
        limited_by=why,
    )
