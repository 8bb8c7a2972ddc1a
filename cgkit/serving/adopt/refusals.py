"""Why a model cannot be adopted: each reason with the place in the model's own code that it comes from.

cgkit's attention knows one shape of attention: causal, over one request's own tokens, softmax of scaled products, keys
and values of one head size. Whatever else a model does between tokens would be left out, and the tokens would be wrong
without a sign of it. So it is refused here, by what the configuration says and by how each layer called its attention.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from cgkit.errors import ServingError
from cgkit.serving.adopt.interface import AttentionCall

#: Layers in which cgkit's attention is the only thing that mixes tokens (or nothing does).
PLAIN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "sparse", "dense", "moe"}
#: Options of an attention call that change nothing here (a window limits the length instead: see :mod:`.limits`).
HARMLESS = {"dropout", "position_ids", "cache_position", "sliding_window", "is_causal", "use_cache"}
#: Options that do change the result, and what they are.
TELLING = {
    "softcap": "its attention caps the scores (softcap), which the paged kernel does not compute",
    "s_aux": "its attention has sinks (learned numbers in the softmax's denominator)",
    "position_bias": "its attention adds a bias to the scores (position_bias)",
    "alibi": "its attention adds ALiBi's slopes to the scores",
}
_RECURRENT = re.compile(
    r"(Mamba\w*Mixer|Rwkv\w*SelfAttention|Rglru|RgLru|[ms]LSTM\w*|GatedDeltaNet|ShortConv)$"
)


class AdoptError(ServingError):
    """A model cannot be adopted; the message has the reason and, where there is one, file and line."""


def refuse(model: Any, reason: str, place: str = "") -> NoReturn:
    """Raises :class:`AdoptError`: which model, why, where, and what else can be done."""
    raise AdoptError(
        f"{type(model).__name__} cannot be adopted: {reason}{f' ({place})' if place else ''}. A model of your own "
        "takes two lines (cgkit.register_op, @cgkit.support_torch_compile): see cgkit/serving/adopt/README.md"
    )


def place_of(cls: type, *words: str) -> str:
    """``file:line`` in the source of ``cls``: the first line with one of ``words``, else that of its name."""
    try:
        file, (lines, first) = inspect.getsourcefile(cls), inspect.getsourcelines(cls)
    except (OSError, TypeError):  # made in a notebook, or by exec
        return ""
    numbered = list(enumerate(lines, first))
    named = [number for number, line in numbered if line.lstrip().startswith("class ")]
    found = [number for number, line in numbered if any(word in line.lower() for word in words)]
    return f"{_short(file or '?')}:{[*found, *named, first][0]}"


def place_in(error: BaseException) -> str:
    """``file:line`` of the line that raised ``error``."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def _short(file: str) -> str:
    """``file`` from its package on, ``transformers/models/...``."""
    for folder in sorted(map(str, map(Path, sys.path)), key=len, reverse=True):
        if folder not in ("", ".") and file.startswith(folder.rstrip("/") + "/"):
            return file[len(folder.rstrip("/")) + 1 :]
    return file


# --- before anything runs ------------------------------------------------------------------------


def check_model(model: Any) -> None:
    """Refuses what the class and the configuration already say.

    Raises:
        AdoptError: no causal language model of ``transformers``, or one that needs more than causal attention.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings") or not hasattr(config, "to_dict"):
        refuse(model, "it is no causal language model of transformers", place_of(type(model)))
    if getattr(config, "is_encoder_decoder", False):
        refuse(
            model,
            "it is an encoder-decoder, whose decoder attends across to another stream of tokens",
            _at(model),
        )
    config = text_config(model)
    mixer = _recurrent(model)
    if getattr(model, "_is_stateful", False) or mixer:
        reason = (
            "it carries a recurrent state from token to token (state space), which a KV cache does not hold"
        )
        refuse(model, reason, place_of(type(mixer or model)))
    others = sorted({*(getattr(config, "layer_types", None) or ())} - PLAIN_LAYERS)
    if others:
        refuse(
            model,
            f"it has layers of the type {', '.join(map(repr, others))}, which mix tokens by other means",
            _at(model),
        )
    if getattr(config, "add_cross_attention", False) or getattr(config, "cross_attention_layers", None):
        refuse(model, "it has cross attention to another stream of tokens", _at(model))
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        refuse(model, "its attention is not causal: a token sees those after it", _at(model))
    _check_rope(model)
    for attention in _attention_classes(model):
        if _uses_alibi(model, attention):
            refuse(model, TELLING["alibi"], place_of(attention, "alibi"))
    if model.get_output_embeddings() is None:
        refuse(model, "it has no output projection (no language modelling head)", _at(model))
    head = model.get_output_embeddings()
    if not isinstance(getattr(head, "weight", None), Tensor):
        refuse(
            model,
            f"its output projection ({type(head).__name__}) has no tensor `weight`, which says the KV cache's type and "
            "device; torch.ao's dynamic quantization, for one, packs it away",
            _at(model),
        )
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        refuse(model, "accelerate has put hooks on it (device_map): load it whole onto one device")
    devices = {str(p.device) for p in model.parameters()}
    if len(devices) > 1:
        refuse(model, f"its weights lie on several devices ({', '.join(sorted(devices))})")


def text_config(model: Any) -> Any:
    """The configuration of the part that reads and writes text: of most models, all of it."""
    whole = model.config
    return whole.get_text_config() if hasattr(whole, "get_text_config") else whole


def _at(model: Any) -> str:
    return place_of(type(model))


def _recurrent(model: nn.Module) -> nn.Module | None:
    """The first part that is known by its class's name to carry a state, if any."""
    return next((module for module in model.modules() if _RECURRENT.search(type(module).__name__)), None)


def _check_rope(model: Any) -> None:
    """Rotary positions whose frequencies depend on the longest position of a step cannot be traced once."""
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = (
        [rope, *(each for each in rope.values() if isinstance(each, dict))] if isinstance(rope, dict) else []
    )
    for each in kinds:
        kind = each.get("rope_type") or each.get("type")
        if kind in ("dynamic", "longrope"):
            refuse(
                model,
                f"its rotary positions are {kind!r}: their frequencies follow the longest request of a step, and "
                "requests that share a step would change one another's",
                _at(model),
            )


# --- how the layers called their attention -------------------------------------------------------


def check_calls(model: Any, calls: Sequence[AttentionCall], num_tokens: int) -> None:
    """Refuses what a run over ``num_tokens`` tokens showed.

    Raises:
        AdoptError: a layer's attention cannot be replaced, or is more than cgkit's.
    """
    layers = getattr(text_config(model), "num_hidden_layers", None)
    if not calls:
        _no_calls(model)
    for call in calls:
        _check_call(model, call, num_tokens)
    first = calls[0]
    if len({id(call.module) for call in calls}) != len(calls):
        refuse(
            model, "one attention layer runs more than once a step, and a KV cache is one layer's", _of(first)
        )
    if layers is not None and len(calls) != layers:
        refuse(
            model,
            f"{len(calls)} of {layers} layers call transformers' AttentionInterface; what the others do cannot be "
            "replaced",
            _other_mixer(model, calls) or _of(first),
        )
    shapes = {(call.query[1], call.key[1], call.key[3]) for call in calls}
    if len(shapes) > 1:
        reason = f"its layers differ in (query heads, key/value heads, head size), {sorted(shapes)}; the cache has one"
        refuse(model, reason, _of(first))
    head = model.get_output_embeddings().weight.dtype
    if first.dtype != head:
        refuse(
            model,
            f"its keys are {first.dtype} and its output projection is {head}; give it one type (model.to)",
        )


def _of(call: AttentionCall, *words: str) -> str:
    return place_of(type(call.module), *words)


def _check_call(model: Any, call: AttentionCall, num_tokens: int) -> None:
    for name, option in call.options.items():
        if name in TELLING:
            refuse(model, TELLING[name], _of(call, name))
        if name == "is_causal" and option is False:
            refuse(model, "its attention is not causal: a token sees those after it", _of(call, "is_causal"))
        if name not in HARMLESS and hasattr(option, "shape"):
            refuse(
                model,
                f"its attention is given the tensor {name!r}, of which cgkit's knows nothing",
                _of(call, name),
            )
    if getattr(call.module, "sinks", None) is not None:
        refuse(model, TELLING["s_aux"], _of(call, "sinks"))
    if getattr(call.module, "is_causal", True) is False:
        refuse(model, "its attention is not causal: a token sees those after it", _of(call, "is_causal"))
    if call.mask is not None:
        refuse(model, "it makes a mask of its own for its attention", _of(call, "attention_mask"))
    if call.query[0] != 1 or call.query[2] != num_tokens or call.key[2] != num_tokens:
        refuse(
            model,
            f"of {num_tokens} tokens its attention got queries {tuple(call.query)} and keys {tuple(call.key)}, (batch, "
            "heads, tokens, head size): not one query and one key a token (cross attention, or tokens that it adds)",
            _of(call),
        )
    if call.key != call.value:
        reason = f"its keys and values differ in shape, {tuple(call.key)} and {tuple(call.value)}; the cache has one"
        refuse(model, reason, _of(call))
    if call.query[1] % call.key[1] or call.query[3] != call.key[3]:
        refuse(model, f"its queries {tuple(call.query)} do not fit its keys {tuple(call.key)}", _of(call))


def _no_calls(model: Any) -> NoReturn:
    """No layer asked for an attention by name: says what they do instead, as far as their source tells."""
    attention = next(iter(_attention_classes(model)), None)
    if attention is None:
        refuse(model, "no part of it calls an attention, so something else mixes its tokens", _at(model))
    refuse(
        model,
        f"{attention.__name__} computes its attention itself and not through transformers' AttentionInterface, "
        "so it cannot be replaced without editing its code",
        place_of(attention, "softmax", "scaled_dot_product"),
    )


def _attention_classes(model: nn.Module) -> list[type]:
    return list(dict.fromkeys(type(m) for m in model.modules() if "attention" in type(m).__name__.lower()))


def _uses_alibi(model: Any, attention: type) -> bool:
    """Whether the attention's source names ALiBi, and no setting turns it off."""
    config = text_config(model)
    inner = getattr(config, "attn_config", None)
    for holder in (config, inner):
        if holder is not None and isinstance(getattr(holder, "alibi", None), bool):
            return bool(holder.alibi)
    try:
        return "alibi" in inspect.getsource(attention).lower()
    except (OSError, TypeError):
        return False


def _other_mixer(model: Any, calls: Sequence[AttentionCall]) -> str:
    """Where the first attention-like module stands that did not call the interface."""
    called = {id(call.module) for call in calls}
    inside = {id(part) for call in calls for part in call.module.modules()}
    for module in model.modules():
        name = type(module).__name__.lower()
        around = any(id(part) in called for part in module.modules())
        if ("attention" in name or "mixer" in name) and id(module) not in inside and not around:
            return place_of(type(module))
    return ""
