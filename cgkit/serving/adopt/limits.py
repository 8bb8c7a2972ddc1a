"""How long a request of an adopted model may be, and why not longer.

A layer with a sliding window sees its last ``window`` tokens, itself included. cgkit's attention sees all of them,
which is the same as long as there are no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cgkit.serving.adopt.interface import AttentionCall

#: Where a configuration names no longest position (nothing in the model then depends on one).
NO_LIMIT = 2048


def longest_request(config: Any, calls: Sequence[AttentionCall]) -> tuple[int, str]:
    """Tokens of the longest request that is served rightly, and a sentence if the model itself could do more."""
    own = getattr(config, "max_position_embeddings", None) or NO_LIMIT
    windows = [call.options.get("sliding_window") for call in calls]
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in kinds:  # some make the window in the mask alone, and pass none
        windows.append(getattr(config, "sliding_window", None))
    if "chunked_attention" in kinds:
        windows.append(getattr(config, "attention_chunk_size", None))
    least = min((window for window in windows if window), default=own)
    if least >= own:
        return own, ""
    return least, (
        f"its layers look back {least} tokens (sliding window) and cgkit's attention over all, so requests end there "
        f"and not at the model's {own} positions"
    )
