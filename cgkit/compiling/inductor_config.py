"""How Inductor is set for one piece at one shape.

Implements the article's "set_inductor_config：动态 shape 与静态 shape 的两种编译策略"
(set_inductor_config: two strategies, for dynamic and for static shapes).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from cgkit import torch_hooks
from cgkit.config import Shape
from cgkit.errors import ConfigError

#: What cgkit sets itself: recording graphs is the next stage's work, not Inductor's.
_OURS: dict[str, Any] = {"triton.cudagraphs": False}


def set_inductor_config(config: dict[str, Any], runtime_shape: Shape) -> None:
    """Changes ``config`` (Inductor's options by name) in place for ``runtime_shape``.

    A whole number is the token count of a static compilation: only there are Triton's parameters
    tuned by measuring, because what is fastest at one size says nothing about another. None is the
    general, symbolic shape, and a range is symbolic too: both stay untuned. On the CPU the options are
    accepted and tune little.
    """
    if isinstance(runtime_shape, int):
        config["max_autotune"] = True
        config["coordinate_descent_tuning"] = True


def inductor_options_for(user: Mapping[str, Any], runtime_shape: Shape) -> dict[str, Any]:
    """All options for one compilation: cgkit's, those of ``runtime_shape``, and ``user``'s on top."""
    options = dict(_OURS)
    set_inductor_config(options, runtime_shape)
    options.update(user)
    return options


def check_inductor_options(user: Mapping[str, Any]) -> None:
    """Refuses options that Inductor does not have, or that cgkit has to set.

    Raises:
        ConfigError: names the option, and the nearest one that exists.
    """
    if not user:
        return
    for name, value in _OURS.items():
        if name in user and user[name] != value:
            raise ConfigError(
                f"inductor_compile_config[{name!r}]={user[name]!r}: graphs are recorded by cgkit's capture "
                "stage; leave the option out and choose with cudagraph_mode"
            )
    known = torch_hooks.inductor_options()
    for name in user:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; do you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ConfigError(f"inductor_compile_config has {name!r}, which Inductor does not know{hint}")
