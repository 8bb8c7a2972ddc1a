"""``doctor(model, *example_inputs, config=...)``: what goes wrong with a model on the road, and where."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from cgkit import events, torch_hooks
from cgkit.capturing.debugging.copies import attributes_put_back
from cgkit.capturing.static_inputs import as_call
from cgkit.config import CompilationConfig
from cgkit.errors import CgkitError
from cgkit.measuring.doctor import checks as checks
from cgkit.measuring.doctor.findings import Finding
from cgkit.measuring.doctor.patient import Patient, cannot
from cgkit.measuring.doctor.registry import CHECKS, NotCheckedError
from cgkit.measuring.doctor.report import Report
from cgkit.pipeline import as_written


def doctor(
    model: nn.Module,
    *example_inputs: Any,
    config: CompilationConfig | None = None,
    dynamic_arg_dims: Mapping[str, Any] | None = None,
    other_inputs: Sequence[Any] = (),
    only: Sequence[str] | None = None,
    **example_kwargs: Any,
) -> Report:
    """Tries ``model`` and reports what breaks, what will compute something else in silence, and what will be slow.

    The model is traced, split, recorded (on the emulated platform where there is no GPU) and run a few times,
    eagerly and replayed; its buffers, its attributes and the random states are put back afterwards. What forward does
    elsewhere (globals, files, objects that it was given) is done.
    Call it inside :class:`cgkit.set_forward_context` if the model's operators need metadata.

    Args:
        example_inputs, example_kwargs: one call. Values matter: the model is run with them.
        config: how the model will be compiled; default :class:`CompilationConfig`.
        dynamic_arg_dims: as for :func:`cgkit.trace`.
        other_inputs: further calls that the model will get, each a tensor, a tuple or a dict of keywords: what
            the trace of the first cannot serve is reported.
        only: names of checks (``cgkit.measuring.doctor.CHECKS``) to make; default all.

    Raises:
        CgkitError: there is no such check, or ``model`` is no module.
        TypeError: the example does not fit ``forward``.
    """
    if not isinstance(model, nn.Module):
        raise CgkitError(f"doctor looks at an nn.Module, and was given {type(model).__name__}")
    if getattr(model.forward, "__func__", None) is nn.Module.forward:
        raise CgkitError(f"{type(model).__name__} has no forward, so there is nothing to look at")
    lazy = [name for name, each in model.named_parameters() if isinstance(each, UninitializedParameter)]
    if lazy:
        raise CgkitError(
            f"{type(model).__name__} has parameters that its first call makes ({', '.join(lazy[:3])}): call it once "
            "with the example first"
        )
    unknown = sorted(set(only or ()) - set(CHECKS))
    if unknown:
        raise CgkitError(f"no such check: {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    others = tuple((tuple(call.args), dict(call.kwargs)) for call in map(as_call, other_inputs))
    given = {"config": config, "dynamic_arg_dims": dynamic_arg_dims, "other_inputs": other_inputs or None}
    said = "".join(f", {name}={name}" for name, value in given.items() if value is not None)
    said += ", **example_kwargs" if example_kwargs else ""
    config = config or CompilationConfig()
    found: list[Finding] = []
    not_checked: dict[str, str] = {}
    with (
        warnings.catch_warnings(),
        torch_hooks.stand_in_streams(),
        attributes_put_back(model),
        as_written(model),
    ):
        warnings.simplefilter("ignore")
        patient = Patient(model, example_inputs, example_kwargs, config, dynamic_arg_dims, others)
        for name in events.counted("checking", list(only or CHECKS)):
            try:
                for finding in CHECKS[name].look(patient):
                    again = f"cgkit.doctor(model, *example_inputs{said}, only=[{name!r}])"
                    found.append(replace(finding, check=name, command=again))
            except NotCheckedError as error:
                not_checked[name] = cannot(error)
    patient.discharge()
    return Report(patient, found, not_checked)
