"""Tensors on the CPU beside a model that is on a GPU: made in forward, left behind, copied, pinned.

With no GPU it cannot be seen where a tensor would lie, unless the model lies elsewhere: its weights and arguments are
put on the "meta" device, which computes nothing and follows the rules of every device that is not the CPU. What
forward then makes without a device, and what ``.to()`` does not move, is still on the CPU.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from cgkit import torch_hooks
from cgkit.capturing.debugging.eager import as_written
from cgkit.measuring.doctor.findings import Finding
from cgkit.measuring.doctor.observe import Sight, calling_lines
from cgkit.measuring.doctor.patient import Patient, cannot_run
from cgkit.measuring.doctor.registry import NotCheckedError, check
from cgkit.tensor_trees import map_tensors, tensor_leaves
from cgkit.torch_hooks import TorchDispatchMode

_aten = torch.ops.aten
_THERE = torch.device("meta")
_TO_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)


@check("host-copy")
def host_copies(patient: Patient) -> Iterator[Finding]:
    """Runs the model on the device "meta" and notes where the CPU comes in."""
    if not patient.config.mode:
        return
    held = {id(value): name for name, value in _plain_attributes(patient.model)}
    watch = _Devices(held)
    weights = {
        name: tensor.to(_THERE)
        for named in (patient.model.named_parameters, patient.model.named_buffers)
        for name, tensor in named()
        if tensor.device.type != "cpu" or patient.device.type == "cpu"
    }
    args, kwargs = (_there(patient, value) for value in (patient.args, patient.kwargs))
    failed = ""
    with patient.unharmed(), _as_it_was(patient.model), contextlib.redirect_stdout(io.StringIO()):
        try:
            with torch_hooks.as_if_compiling(), as_written(), watch.pins, watch:
                functional_call(patient.model, weights, args, kwargs)
        except Exception as error:
            failed = cannot_run(error)
    on_a_gpu = patient.device.type != "cpu"
    for sight in watch.sights:
        yield _finding(sight, on_a_gpu)
    if failed and not watch.sights:
        raise NotCheckedError(f"run without values, {failed}")


def _there(patient: Patient, value: Any) -> Any:
    """``value`` with the tensors that would be on the GPU there."""
    own = patient.device.type == "cpu"
    return map_tensors(lambda _, t: t.to(_THERE) if own or t.device.type != "cpu" else t, value)


def _finding(sight: Sight, on_a_gpu: bool) -> Finding:
    return Finding(
        "host-copy",
        "error" if on_a_gpu else "warning",
        f"{sight.error}" + ("" if on_a_gpu else ", once the model is on a GPU"),
        "make the tensor where the model is (device=x.device), or once, before capture, as a buffer of the model; pass "
        "in what changes from step to step",
        again="torch.func.functional_call(model, {name: w.to('meta') for name, w in model.state_dict().items()}, ...)",
        stream="the stream that is capturing (the current one when the piece is recorded)",
        **sight.where(),
    )


class _Devices(TorchDispatchMode):
    """Notes what copies between the CPU and the device, and goes on as if it were there."""

    supports_higher_order_operators = True

    def __init__(self, held: dict[int, str]) -> None:
        super().__init__()
        self.held, self.sights = held, list[Sight]()
        self.pins = _Pins(self)

    def note(self, operator: str, what: str) -> None:
        frames = calling_lines()
        sight = Sight(operator, frames[-1] if frames else None, what, tuple(frames))
        if sight not in self.sights:
            self.sights.append(sight)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            self.note(str(func), f"{func} makes pinned memory in forward, which a replay no longer finds")
        if func is _aten._to_copy.default:
            return self._copy(func, args, kwargs)
        leaves = [tensor for _, tensor in [*tensor_leaves(args), *tensor_leaves(kwargs)]]
        there = any(tensor.device == _THERE for tensor in leaves)
        beside = [tensor for tensor in leaves if tensor.device.type == "cpu" and tensor.dim()]
        if there and beside:
            names = sorted({self.held[id(tensor)] for tensor in beside if id(tensor) in self.held})
            which = (
                f"the attribute {', '.join(names)}, which .to() does not move," if names else "a CPU tensor"
            )
            self.note(
                str(func),
                f"{func} takes {which} beside tensors of the device: it fails, or copies in each step",
            )
            args, kwargs = (map_tensors(lambda _, t: t.to(_THERE), value) for value in (args, kwargs))
        return func(*args, **kwargs)

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        source, target = args[0].device, kwargs.get("device") or args[0].device
        if source.type == target.type:
            return func(*args, **kwargs)
        pinned = kwargs.get("non_blocking", False)
        if target == _THERE:
            left = self.held.get(id(args[0]))
            which = f"the attribute {left}" if left else "a tensor of the CPU"
            self.note(
                str(func),
                f"{which} is copied to the device in forward: "
                + (
                    "if it is pinned, a replay copies again from that address, whatever lies there by then"
                    if pinned
                    else "from memory that is not pinned a capturing stream refuses it"
                ),
            )
            return func(*args, **kwargs)
        self.note(
            str(func),
            "a tensor of the device is copied to the CPU in forward: the host waits, or reads too soon",
        )
        return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)


class _Pins(TorchFunctionMode):
    """Notes ``pin_memory()``, which needs a GPU, and ``numpy()``, which no tensor of a device has."""

    def __init__(self, watch: _Devices) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            what = "pin_memory() in forward allocates and copies on the host, and a replay does not repeat it"
            self.watch.note("Tensor.pin_memory()", what)
            return args[0]
        if func in _TO_NUMPY and args[0].device == _THERE:
            what = f"{func.__name__}() takes a tensor of the device for one of the CPU: it fails"
            self.watch.note(f"Tensor.{func.__name__}()", what)
            return func(torch.zeros(args[0].shape, dtype=args[0].dtype), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _plain_attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that a module keeps without having registered them."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{attribute}".lstrip("."), value


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """What forward assigns to attributes inside is undone: it has no values."""
    kept = []
    for module in model.modules():
        values = vars(module)
        lists = [(value, list(value)) for value in values.values() if type(value) is list]
        maps = [(value, dict(value)) for value in values.values() if type(value) is dict]
        kept.append((values, dict(values), lists, maps))
    try:
        yield
    finally:
        for values, before, lists, maps in kept:
            values.clear()
            values.update(before)
            for now, old in lists:
                now[:] = old
            for mapping, was in maps:
                mapping.clear()
                mapping.update(was)
