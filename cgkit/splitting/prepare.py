"""What an operator between recorded pieces may work out before the first step: its prepared launch.

Between pieces every tensor is static (a recorded piece wrote it, at the address of its recording), so most of
what an operator does on the host is the same at each step. ``register_op(..., prepare=fn)`` lets it do that
part once, when a replay plan is laid out: ``fn`` gets what the operator will get, and gives callables that are called
without arguments in its place.

The article has no such hook: there every call goes through the operator and its forward context (heading
"切分算子：splitting_ops 与「铰链」", splitting operators). The metadata of a step is refilled in place on a recorded
path, which is what makes it possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

#: ``prepare(coming, *args, **kwargs)``: the operator's own arguments behind a :class:`ComingStep`. Returns a
#: callable without arguments, several to be called in order, or None: nothing can be prepared, call the operator.
Prepare = Callable[..., "Callable[[], Any] | Sequence[Callable[[], Any]] | None"]


@dataclass
class ComingStep:
    """What is known of the steps that a plan will serve, for ``prepare`` functions.

    Attributes:
        metadata: the ``attn_metadata`` of such a step. Its tensors stay where they are: a plan compares their
            addresses once a step, and takes no step whose tensors lie elsewhere. What else of it a prepared call
            depends on must be read through :meth:`fixed`.
        stream: which CUDA stream the plan runs on, kept up to date once a step; None where there is none.
    """

    metadata: Any
    stream: Any = None
    #: Names of the metadata's attributes that a prepared call takes for given.
    fixed_names: set[str] = field(default_factory=set)

    def fixed(self, name: str) -> Any:
        """``metadata.<name>``, a number or a flag: steps in which it differs do not take this plan."""
        self.fixed_names.add(name)
        return getattr(self.metadata, name)
