"""The guards that the no-guard dispatch drops, replayed on each new shape; and constants of the model, at each step.

A guard that fails is not yet a wrong result: a branch may give the same on both sides. So the model itself and its
trace are run on copies of the call, and only a difference raises.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from cgkit import forward_context, torch_hooks
from cgkit.capturing.debugging.copies import Kept, copied
from cgkit.capturing.debugging.eager import undisturbed
from cgkit.errors import DroppedGuardError
from cgkit.numerics import first_apart
from cgkit.tensor_trees import tensor_leaves
from cgkit.tracing.assumptions import CONSTANTS
from cgkit.tracing.traced_graph import TracedGraph, plain_source

logger = logging.getLogger(__name__)


class DroppedGuards:
    """The guards of one trace.

    Attributes:
        replayed: one sentence a guard that failed on some shape and made no difference there.
        shapes: how many different shapes were looked at.

    A shape on which all guards hold is not looked at again. One on which a guard fails is tried at each call: that it
    made no difference for these numbers (the zeros of a recording, say) says nothing of the next ones.
    """

    def __init__(self, traced: TracedGraph | None) -> None:
        self.traced = traced
        self.replayed: list[str] = []
        self.seen: set[Any] = set()
        self._hold: set[Any] = set()
        self._guards: list[torch_hooks.SizeGuard] | None = None
        self._constants = self._read_constants()
        self._told: set[str] = set()

    @property
    def shapes(self) -> int:
        """How many different shapes were looked at."""
        return len(self.seen)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Replays the guards on a call.

        Raises:
            DroppedGuardError: one fails, and the trace gives something else than the model.
        """
        if self.traced is None:
            return
        changed = self._changed_constants()
        shapes = tuple(tuple(tensor.shape) for _, tensor in tensor_leaves((args, kwargs)))
        if shapes in self._hold and not changed:
            return
        self.seen.add(shapes)
        broken = self.broken_sizes(args, kwargs)
        if not broken:
            self._hold.add(shapes)
        if changed or broken:
            self._try([*changed, *broken], args, kwargs)

    # --- sizes -----------------------------------------------------------------------------------

    def broken_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """The guards on sizes that do not hold for a call, each a sentence."""
        assert self.traced is not None
        if self._guards is None:
            self._guards = torch_hooks.size_guards(self.traced.fake_mode)
        sizes, failed = self._sizes(args, kwargs)
        for guard in self._guards:
            if guard.holds(sizes) is False:
                # torch keeps the end of the file's name
                where = "" if guard.where is None else " (...{}:{}: {})".format(*guard.where)
                numbers = ", ".join(f"{s} = {n}" for s, n in sizes.items() if s in guard.text)
                failed.append(f"{_said(guard)} does not hold for {numbers}{where}")
        return failed

    def _sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
        """What each symbol is in this call; and dimensions that were one symbol and are two sizes now."""
        assert self.traced is not None
        inputs: list[Any] = []
        self._collect(inputs, args, kwargs)
        sizes: dict[str, int] = {}
        failed = []
        for entry, value in zip(self.traced.inputs, inputs):
            if entry.kind == "symint":
                found = [(entry.shape[0], value, entry.source)]
            elif isinstance(value, torch.Tensor):
                found = [
                    (s, n, f"{entry.source}.shape[{d}]")
                    for d, (s, n) in enumerate(zip(entry.shape, value.shape))
                ]
            else:
                continue
            for symbol, number, source in found:
                if symbol.isdecimal() or not symbol.isidentifier():
                    if symbol.isdecimal() and int(symbol) != number:
                        failed.append(f"{plain_source(source)} was {symbol} and is {number}")
                elif sizes.setdefault(symbol, int(number)) != number:
                    failed.append(
                        f"{plain_source(source)} is {number}, and was the same size as another dimension, which is "
                        f"{sizes[symbol]}"
                    )
        return sizes, failed

    def _collect(self, into: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.traced is not None

        class Taken(Exception):  # noqa: N818 - ends the call
            """The graph's inputs are known."""

        def take(*inputs: Any) -> Any:
            into.extend(inputs)
            raise Taken

        with suppress(Taken):
            self.traced.bind(take)(*args, **kwargs)

    # --- constants of the model ------------------------------------------------------------------

    def _read_constants(self) -> list[tuple[str, Callable[[Any], Any], Any]]:
        """(source, how to read it of the model, what it is now) of what Dynamo looked at and baked in."""
        traced = self.traced
        model = traced.wrapper.owner if traced is not None and traced.wrapper is not None else None
        found: dict[str, tuple[str, Callable[[Any], Any], Any]] = {}
        if traced is None or model is None or traced.wrapper is None:
            return []
        root = f"L['{traced.wrapper.self_name}']"
        again = getattr(traced, "again", traced)  # of a trace that was loaded: it is made here after all
        for source, kind, _ in again.guards:
            if not (kind.endswith("_MATCH") and source.startswith(root)) or source in found:
                continue
            try:
                read = eval(
                    f"lambda model: model{source[len(root) :]}", {"__builtins__": {}}
                )  # Dynamo's text
                value = read(model)
            except Exception:  # sources that only Dynamo can read (iterators, types)
                continue
            if isinstance(value, CONSTANTS):
                found[source] = (plain_source(source, traced.wrapper.self_name), read, value)
        return list(found.values())

    def _changed_constants(self) -> list[str]:
        if not self._constants:
            return []
        assert self.traced is not None and self.traced.wrapper is not None
        model = self.traced.wrapper.owner
        changed = []
        for source, read, was in self._constants:
            try:
                now = read(model)
            except Exception as error:
                changed.append(f"{source} was {was!r} and cannot be read now ({error})")
                continue
            if type(now) is not type(was) or (now != was and not (now != now and was != was)):
                changed.append(f"{source} was {was!r} when the model was traced and is {now!r} now")
        return changed

    # --- the verdict -----------------------------------------------------------------------------

    def _try(self, failed: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs model and trace on this call: does it make a difference?"""
        assert self.traced is not None
        said = "; ".join(failed)
        try:
            expected = self._run(self._model_forward(), args, kwargs)
        except Exception as error:
            logger.debug("the model itself", exc_info=True)
            expected, refused = None, f"the model itself refuses this call ({type(error).__name__}: {error})"
        else:
            refused = ""
        apart: Any = refused
        if not refused:
            try:
                apart = first_apart(expected, self._run(self.traced, args, kwargs))
            except Exception as error:
                apart = f"the trace cannot run it ({type(error).__name__}: {error})"
        if apart:
            raise DroppedGuardError(
                f"{self.traced.model_name} was traced under an assumption that this call breaks, and nobody checks "
                f"it any more: {said}. It makes a difference: {apart}. Write the code so that it is the same for every "
                "call (no branch on a size, no number that changes), pass what changes as a tensor, or trace a second "
                "model"
            )
        new = [what for what in failed if what not in self._told]
        if not new:
            return
        self._told.update(new)
        self.replayed += new
        logger.warning("%s: %s; on this call it makes no difference", self.traced.model_name, "; ".join(new))

    def _model_forward(self) -> Callable[..., Any]:
        assert self.traced is not None and self.traced.wrapper is not None
        return self.traced.wrapper.forward

    def _run(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context = forward_context.current_forward_context()
        metadata = context.attn_metadata if context is not None else None
        owner = (
            self.traced.wrapper.owner if self.traced is not None and self.traced.wrapper is not None else None
        )
        held = list(owner.buffers()) if isinstance(owner, torch.nn.Module) else []
        kept = Kept([*(tensor for _, tensor in tensor_leaves(metadata)), *held])
        own_args, own_kwargs = copied((args, kwargs))
        with undisturbed((args, kwargs)), torch.no_grad():
            try:
                return copied(run(*own_args, **own_kwargs))
            finally:
                kept.restore()


def _said(guard: torch_hooks.SizeGuard) -> str:
    """A guard with ``x.shape[0]`` for its symbols."""
    text = guard.text
    for symbol, source in guard.sources.items():
        plain = re.sub(r"\.size\(\)\[(\d+)\]$", r".shape[\1]", plain_source(source))
        text = re.sub(rf"\b{symbol}\b", re.sub(r"^L\['(\w+)'\]", r"\1", plain), text)
    return text
