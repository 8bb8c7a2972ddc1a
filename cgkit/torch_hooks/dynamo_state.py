"""The state of torch that a trace bakes in, beside what it reads of the model."""

from __future__ import annotations

from typing import Any

import torch

#: The dictionaries that every ``nn.Module`` has. Run on torch 2.13 (CPU).
MODULE_DICTS = frozenset(name for name, value in vars(torch.nn.Module()).items() if isinstance(value, dict))

_CONFIG_SAYS_NOTHING = (
    "debug_dir_root",
    "log_",
    "verbose",
    "cache_size_limit",
    "recompile_limit",
    "base_dir",
)


def trace_state() -> dict[str, Any]:
    """What decides about a trace in this thread, by name: modes, defaults, hooks of all modules, Dynamo's options.

    Run on torch 2.13 (CPU).
    """
    import torch._dynamo.config as config
    import torch.nn.modules.module as modules

    facts: dict[str, Any] = {
        "inference_mode": torch.is_inference_mode_enabled(),
        "default_dtype": torch.get_default_dtype(),
        "default_device": str(torch.get_default_device()),
        "torch_function_modes": torch._C._len_torch_function_stack(),
        "torch_dispatch_modes": torch._C._len_torch_dispatch_stack(),
        "torch_function_enabled": torch._C._is_torch_function_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "optimized": __debug__,
    }
    for name in sorted(vars(modules)):
        value = getattr(modules, name)
        if name.startswith("_global_") and isinstance(value, dict) and value:
            facts[name] = value
    save = getattr(config, "save_config_portable", None)
    options = save() if save is not None else {}
    facts["dynamo"] = {
        name: value
        for name, value in options.items()
        if not any(part in name for part in _CONFIG_SAYS_NOTHING)
    }
    return facts


def fake_implementation(name: str) -> Any:
    """The Python function that makes the fakes of the operator ``ns::name``, if it is one; else None.

    Run on torch 2.13 (CPU).
    """
    try:
        from torch._library.simple_registry import singleton
    except ImportError:
        return None
    kernel = getattr(singleton.find(name).fake_impl, "kernel", None)
    return getattr(kernel, "func", kernel)


def operator_schema(target: Any) -> str:
    """The schema of an overload as text. Run on torch 2.13 (CPU)."""
    return str(getattr(target, "_schema", ""))
