"""On which versions the hooks were run, and what is said where one is gone."""

import torch

from cgkit.errors import UnsupportedTorchError

RUN_ON = "torch 2.11 (CUDA, H200) and 2.13 (CPU)"


def gone(hook: str) -> UnsupportedTorchError:
    """The error to raise where the running torch has no ``hook`` as cgkit knows it."""
    return UnsupportedTorchError(
        f"torch {torch.__version__} has no {hook} as cgkit knows it (run on {RUN_ON}); "
        "install one of these versions, or adapt cgkit/torch_hooks/"
    )
