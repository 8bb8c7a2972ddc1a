"""``profile_step(fn)``: one step under torch's profiler, with the pieces and stages of cgkit's own runs marked.

The profiler names kernels and calls; which piece of a model a kernel belongs to it cannot know. So for
as long as it runs, every callable that a step goes through is swapped for the same callable inside
a named range (:mod:`cgkit.marks`), and put back afterwards, also after an exception. A step that nobody
profiles runs the very code that it ran before.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cgkit import __version__, marks, torch_hooks
from cgkit.errors import CgkitError
from cgkit.measuring.trace_cut import cut_to_steps

if TYPE_CHECKING:
    from cgkit.measuring.timeline import Timeline

#: The range around a whole step, its end on the GPU included.
STEP = "cgkit step"
_one_at_a_time = threading.Lock()
_here = threading.local()  # .profiles: this thread holds the lock


def profile_step(
    fn: Callable[[], Any],
    *,
    steps: int = 3,
    warmup: int = 2,
    python: bool = False,
    about: Mapping[str, Any] | None = None,
    modules: nn.Module | None = None,
) -> Timeline:
    """Runs ``fn`` under torch's profiler and returns the timeline of its steps.

    ::

        timeline = cgkit.profile_step(lambda: model(input_ids, positions))
        timeline.bill()

    Each step begins when the GPU has nothing to do and ends when it has nothing to do any more: the
    window of a step holds the GPU's end, and the CPU's wait for it. The garbage collector is held
    off. Without a GPU there are CPU lanes only, and ``timeline.about["note"]`` says so.

    **Do not measure after it.** In a process in which the profiler has run once, every later graph launch costs more
    (19 us before and 121 us after were seen on an H200, torch 2.11), and profiled steps themselves are slower on the
    CPU side: the profiler's own work and a mark for each piece (about 2 us) are in them. What is to be
    compared to the microsecond is measured without a profiler, in a process of its own
    (``cgkit bench modes`` does so; a closure cannot be handed to another process, so this function does not).

    Args:
        fn: called without arguments: the step.
        steps: how many are recorded.
        warmup: runs before the profiler is on; then one more with it, which is cut away.
        python: also record Python functions (most of a trace, and slower).
        about: what the timeline should say of itself, over what was found: ``model``, ``mode``, ``batch``, ...
        modules: an eager model whose layers are to be marked. None: modules that ``fn`` is, or names itself
            (a closure, a global, a ``functools.partial``), if they run eagerly.

    Raises:
        CgkitError: a profiler is running already, or ``steps`` is no positive number. What ``fn`` raises goes through.

    Source: the article's "一次 decode 步的 CPU 账单" (the CPU bill of one decode step).
    """
    from cgkit.measuring.timeline import Timeline

    trace = trace_steps(fn, steps=steps, warmup=warmup, python=python, about=about, modules=modules)
    return Timeline.from_events(trace.pop("traceEvents"), python=python, name="cgkit.profile_step", **trace)


def trace_steps(
    fn: Callable[[], Any],
    *,
    steps: int = 3,
    warmup: int = 2,
    python: bool = False,
    about: Mapping[str, Any] | None = None,
    modules: nn.Module | None = None,
) -> dict[str, Any]:
    """What :func:`profile_step` makes its timeline of: a chrome trace as plain data.

    ``traceEvents`` as Kineto wrote them, cut to the steps; ``cgkit``: what the run says of itself
    (device, model, mode, batch, emulated, versions). Arguments and errors as there.
    """
    if steps < 1 or warmup < 0:
        raise CgkitError(f"steps={steps}, warmup={warmup}: profile at least one step")
    if torch_hooks.profiler_runs():
        raise CgkitError(
            "a torch profiler is running in this process already, and there is only one: end it first, or write "
            "its trace and read that with Timeline.from_trace(path)"
        )
    if getattr(_here, "profiles", False):
        raise CgkitError(
            "fn calls profile_step itself, and there is only one profiler: profile what fn calls"
        )
    with _one_at_a_time, _profiling_here():
        marker = _Marker()
        roots = [modules] if modules is not None else _eager_modules(fn)
        for _ in range(warmup):
            fn()
        with ExitStack() as undo:
            undo.callback(marker.end)
            for markable in marks.alive():
                markable.put_marks(marker, undo)
            for root in roots:
                marks.mark_modules(root, marker, undo, model=type(root).__name__, mode="eager")
            outer = _outer_stage(fn, roots)
            trace = _profile(marker.function(fn, outer), steps, python)
    found = marker.about()
    if outer != "step" and not found.get("mode"):
        found["mode"] = "torch.compile" if outer == "compiled" else outer
    trace["cgkit"] = _machine() | found | {"steps": steps} | dict(about or {})
    return trace


@contextmanager
def _profiling_here() -> Iterator[None]:
    """Lets this thread know that it holds the lock: it would wait for itself."""
    _here.profiles = True
    try:
        yield
    finally:
        _here.profiles = False


class _Marker:
    """Puts ranges around callables, and notes what those that were really called say of themselves."""

    def __init__(self) -> None:
        self._on = True
        self._called: dict[str, dict[str, Any]] = {}

    def function(
        self, function: Callable[..., Any], stage: str, piece: str = "", **facts: Any
    ) -> Callable[..., Any]:
        """See :class:`cgkit.marks.Marker`."""
        name, called, new_range = _name(stage, piece), self._called, torch_hooks.profiler_range
        key = f"{name}:{facts.get('batch')}"

        def marked(*args: Any, **kwargs: Any) -> Any:
            if not self._on:  # somebody kept the marked callable: it goes on as the plain one
                return function(*args, **kwargs)
            called[key] = facts
            with new_range(name):
                return function(*args, **kwargs)

        return marked

    def block(self, stage: str, piece: str = "") -> Callable[[], AbstractContextManager[Any]]:
        """See :class:`cgkit.marks.Marker`."""
        return functools.partial(torch_hooks.profiler_range, _name(stage, piece))

    def end(self) -> None:
        """From now on marked callables that somebody kept do nothing of their own."""
        self._on = False

    def about(self) -> dict[str, Any]:
        """What was called: the model, its mode, the batch, and whether graphs were emulated."""
        found: dict[str, Any] = {}
        for name in ("model", "mode", "batch"):
            values = {facts[name]: None for facts in self._called.values() if facts.get(name) is not None}
            if values:
                found[name] = next(iter(values)) if len(values) == 1 else " and ".join(map(str, values))
        found["emulated"] = any(facts.get("emulated") for facts in self._called.values())
        return found


def _name(stage: str, piece: str) -> str:
    return f"cgkit:{stage}:{piece}" if piece else f"cgkit:{stage}"


def _outer_stage(fn: Any, roots: list[nn.Module]) -> str:
    """The stage of what lies in no inner range."""
    if torch_hooks.is_compiled(fn):
        return "compiled"
    return "eager" if roots else "step"


def _eager_modules(fn: Any) -> list[nn.Module]:
    """The modules that ``fn`` is or names, as far as they run eagerly and nothing else marks them."""
    if isinstance(fn, functools.partial):
        return _eager_modules(fn.func)
    if isinstance(fn, nn.Module):
        named: list[Any] = [fn]
    elif inspect.ismethod(fn):
        named = [fn.__self__]
    elif inspect.isfunction(fn):
        named = _named_by(inspect.unwrap(fn))  # a step is often decorated: ``@torch.no_grad()``
    else:
        named = []
    return [module for module in named if isinstance(module, nn.Module) and _runs_eagerly(module)]


def _named_by(function: Any) -> list[Any]:
    """The values of the closure and of the globals that a function names."""
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            continue
    known = function.__globals__
    return found + [known[name] for name in code.co_names if name in known]


def _runs_eagerly(module: nn.Module) -> bool:
    """Whether the module's parts may be given another ``forward`` for a while: no compiler knows them."""
    decorated = hasattr(type(module), "_cgkit_options")
    return not (decorated or torch_hooks.is_compiled(module) or isinstance(module, torch.jit.ScriptModule))


def _profile(step: Callable[[], Any], steps: int, python: bool) -> dict[str, Any]:
    """The chrome trace of ``steps`` steps, as data."""
    from torch.profiler import ProfilerAction, ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes its own progress to standard error
    activities, synchronize = [ProfilerActivity.CPU], _nothing
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        synchronize = torch.cuda.synchronize

    def schedule(number: int) -> ProfilerAction:
        return ProfilerAction.RECORD if number else ProfilerAction.WARMUP

    # There is one cycle: with acc_events torch does not warn that each clears the events of the one before.
    options: dict[str, Any] = {"schedule": schedule, "with_stack": python, "acc_events": True}
    with _no_collection(), profile(activities=activities, **options) as profiler:
        step()
        synchronize()
        profiler.step()  # from here on it records
        for number in range(-1, steps):  # the first one finds the profiler's own caches cold
            synchronize()
            with torch_hooks.profiler_range(STEP if number >= 0 else "cgkit warm-up"):
                step()
                synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_bytes())
    return cut_to_steps(trace, STEP)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage collector is held off: a collection in one of three steps would be its bill."""
    gc.collect()
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _nothing() -> None:
    pass


def _machine() -> dict[str, Any]:
    """Device and versions."""
    gpu = torch.cuda.is_available()
    facts: dict[str, Any] = {
        "source": "cgkit.profile_step",
        "device": torch.cuda.get_device_name() if gpu else f"cpu ({torch.get_num_threads()} threads)",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "python": sys.version.split()[0],
        "cgkit": __version__,
    }
    if not gpu:
        facts["note"] = "no GPU in this process: there are CPU lanes only"
    return facts
