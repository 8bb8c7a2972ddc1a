"""Stage 5: recorded graphs -> tokens (models, paged KV cache, runner with ``capture_model``)."""

from __future__ import annotations

from cgkit.serving.runner import Runner as Runner
