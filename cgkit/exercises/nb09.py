"""The exercises of notebook 09: what goes wrong in silence. All checks run on the CPU, graphs are emulated."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cgkit.capturing.emulated import EmulatedPlatform
from cgkit.exercises.core import Verdict, exercise, nearly, package, right, wrong

# --- 09-1: what will the doctor say? ---------------------------------------------------------------------


class A(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / len(x) if len(x) < 4 else x


class B(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return x * self.n


class C(nn.Module):
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache[0] = 1
        return x + self.cache


class D(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(8, 2, 2).sum(1)


class E(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x if x.min() < 0 else x


class F(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = {"rows": len(x)}
        seen.update(columns=4)
        return torch.where(x > 0, x, x * seen["columns"])


PATIENTS = (A, B, C, D, E, F)
NONE = "none"


@functools.cache
def diagnoses() -> dict[str, tuple[str, ...]]:
    """The codes of the errors and warnings that the doctor reports of each of the six, worst first."""
    found = {}
    for patient in PATIENTS:
        report = package().doctor(patient(), torch.ones(8, 4))
        found[patient.__name__] = tuple(
            dict.fromkeys(each.code for each in report if each.severity != "info")
        )
    return found


def _forwards() -> str:
    """The six as they stand, for the question."""
    lines = []
    for patient in PATIENTS:
        source = inspect.cleandoc("\n" + inspect.getsource(patient.forward)).splitlines()[1:]
        lines += [f"    # {patient.__name__}", *source, ""]
    return "\n".join(lines)


@exercise(
    "09-1",
    question=f"""The example has 8 rows of 4 numbers, and the number of rows changes from call to call. Which code
does the doctor report of each of these six forwards? (In B, `n` is a Python number; in C, `cache` is a buffer of 4
numbers.) Answer with a dictionary from the letter to one of "buffer-write", "dropped-guard", "frozen-number",
"graph-break", "specialised-dim", and "none".

{_forwards()}""",
    hints=(
        "Ask of each: is it one graph for all sizes? Does it write what it keeps? Does Python change something?",
        "len(x) in a comparison leaves a guard. A tensor in a comparison asks for a value. `update` is only a word.",
    ),
)
def predict_findings(answer: Mapping[str, str]) -> Verdict:
    said = {name: str(answer[name]).lower() if name in answer else "(nothing)" for name in diagnoses()}
    off = [name for name, codes in diagnoses().items() if said[name] not in (codes or (NONE,))]
    if not off:
        return right(
            "Two of the six cannot be one graph for all sizes, three are one and wrong, one is harmless."
        )
    if len(off) == 1:
        return nearly(f"Five of six. Look at {off[0]} again, for which you say {said[off[0]]!r}.")
    return wrong(
        f"{6 - len(off)} of six. Not so: {', '.join(f'{name} ({said[name]})' for name in off)}. "
        "Run cgkit.doctor on one of them."
    )


# --- 09-2: fix a stale buffer ----------------------------------------------------------------------------


class Gate(nn.Module):
    """What 09-2 asks to repair: it reads a table and a number that others set between the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(8))
        self.strength: Any = 1.0

    def load(self, values: torch.Tensor) -> None:
        self.table = values.clone()

    def set_strength(self, number: float) -> None:
        self.strength = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table * self.strength


@exercise(
    "09-2",
    question="""This gate is recorded once. Between the replays somebody calls `load` and `set_strength`, and no
replay ever notices. Give a class with the same four methods for which replays are right. The caller may change
`values` after `load`.

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(8))
            self.strength = 1.0

        def load(self, values):
            self.table = values.clone()

        def set_strength(self, number):
            self.strength = number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table * self.strength""",
    hints=(
        "Which address does the graph read for `table`, and what lies there after `load`?",
        "A Python number is copied into the graph. Where must `strength` live, so that a replay reads it?",
        "`self.table.copy_(values)`; `register_buffer('strength', torch.ones(1))` and `self.strength.fill_(number)`.",
    ),
)
def fix_stale_buffer(answer: type[Any]) -> Verdict:
    x, first, second = torch.ones(3, 8), torch.arange(8.0), torch.arange(8.0) * -2
    called = answer()
    called.load(first)
    called.set_strength(3.0)
    if not torch.allclose(called(x), x * first * 3):
        return wrong("Called by Python it does not give x * values * number. Mind what forward returns.")
    model, platform = answer(), EmulatedPlatform()
    model(x)
    graph, output = platform.record(lambda: model(x), platform.new_pool())
    off = []
    model.load(first)
    graph.replay()
    if not torch.allclose(output, x * first):
        off.append("load")
    model.load(torch.ones(8))
    model.set_strength(3.0)
    graph.replay()
    if not torch.allclose(output, x * 3):
        off.append("set_strength")
    if off:
        say = f"A replay after {' and after '.join(off)} gives the old result."
        return nearly(f"{say} The other one is right.") if len(off) == 1 else wrong(say)
    model.load(second)
    second.fill_(0)
    graph.replay()
    if not output.any():
        return nearly("Replays are right until the caller changes `values`: they are read, and not copied.")
    report = package().doctor(answer(), torch.ones(3, 8))
    if report.errors:
        return nearly(f"Replays are right, but the doctor finds {report.errors[0].code} in forward.")
    return right("New numbers at the old address, and what changes is a tensor: two of the three habits.")


# --- 09-3: which piece? ----------------------------------------------------------------------------------

_FUNCTIONS = (torch.relu, torch.sin, torch.relu, torch.tanh, torch.relu, torch.sin, torch.relu)


class Suspect(nn.Module):
    """Seven layers, cut after each; no two neighbours call the same function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in _FUNCTIONS)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, function in zip(self.layers, _FUNCTIONS):
            mixed = torch.empty_like(x)
            torch.ops.cgkit_hazards.attention_into(function(layer(x)), mixed)
            x = x + mixed
        return x


def suspect() -> tuple[nn.Module, tuple[torch.Tensor], dict[str, Any]]:
    """A model, its inputs, and with which options it comes out wrong: ``cgkit.bisect(model, *inputs, **options)``."""
    from cgkit.hazards.addresses import ATTENTION_INTO
    from cgkit.hazards.faults import WrongCompiler

    torch.manual_seed(4)
    config = package().CompilationConfig(
        splitting_ops=[ATTENTION_INTO], compiler="eager", cudagraph_mode="NONE"
    )
    adaptor = WrongCompiler({torch.tanh: torch.sigmoid, torch.sin: torch.cos})
    return Suspect(), (torch.randn(4, 8),), {"config": config, "adaptor": adaptor}


@functools.cache
def guilty_pieces() -> tuple[str, ...]:
    """The pieces in which the compiler of :func:`suspect` takes one function for another."""
    model, inputs, options = suspect()
    cgkit, mistakes = package(), options["adaptor"].mistakes
    split = cgkit.split_graph(cgkit.trace(model, *inputs), options["config"].splitting_ops)
    return tuple(
        piece.name
        for piece in split.pieces
        if any(node.target in mistakes for node in piece.graph_module.graph.nodes)
    )


@exercise(
    "09-3",
    question="""A compiler makes mistakes, and more than one. Which pieces come out wrong?

    from cgkit.exercises.nb09 import suspect
    model, inputs, options = suspect()
    found = cgkit.bisect(model, *inputs, **options)

Answer with the list of all pieces that this compiler gets wrong, as bisect names them. `options["adaptor"].mistakes`
says which functions it confuses; an entry that is deleted is repaired.""",
    hints=(
        "bisect ends at the first piece that differs. What hides behind it?",
        "Repair what it found (`del options['adaptor'].mistakes[...]`), and search again.",
        "A repair heals a function everywhere. Which other pieces call the function that you have just repaired? "
        "`cgkit.split_graph(cgkit.trace(model, *inputs), options['config'].splitting_ops)` has the pieces; "
        "`piece.graph_module.code` is a piece's text.",
    ),
)
def find_the_pieces(answer: str | Sequence[str]) -> Verdict:
    guilty = set(guilty_pieces())
    said = {answer} if isinstance(answer, str) else {str(each) for each in answer}
    innocent, missing = sorted(said - guilty), guilty - said
    if innocent:
        return wrong(f"Compiled rightly: {', '.join(innocent)}. Is it a piece, and does bisect name it?")
    if not said:
        return wrong("No piece is named, and the model does come out wrong.")
    if missing:
        return nearly(
            f"All that you name are wrong, and so {'is' if len(missing) == 1 else 'are'} {len(missing)} more."
        )
    return right(
        "bisect names the first one. What lies behind it shows once that is repaired, or by its function."
    )


# --- 09-4: a check of one's own --------------------------------------------------------------------------


class _Case:
    """One recorded function and what eager gives now: ``step(make)`` builds the answer's check and runs it."""

    def __init__(self, recorded: Callable[[], torch.Tensor], eager: Callable[[], torch.Tensor]) -> None:
        platform = EmulatedPlatform()
        self.graph, self.output = platform.record(recorded, platform.new_pool())
        self.eager = eager
        self.other: Exception | None = None  # what it raised in place of a ValueError

    def raises(self, make: Callable[..., Any]) -> bool:
        step = make(self.graph.replay, self.output, self.eager)
        try:
            step()
        except ValueError:
            return True
        except Exception as error:
            self.other = error
            return True
        return False


def _cases() -> dict[str, tuple[_Case, bool]]:
    """What happens -> (case, whether a check must raise)."""
    torch.manual_seed(9)
    a, b, c = (torch.randn(64) * 1e3 for _ in range(3))
    small = torch.rand(64) + 1
    holes = torch.where(small > 1.5, small, torch.full_like(small, torch.nan))
    state = {"x": small.clone()}
    stale = _Case(lambda: state["x"] * 2, lambda: state["x"] * 2)
    frozen = {"factor": 1.0}
    number = _Case(lambda: small * frozen["factor"], lambda: small * frozen["factor"])
    kept = state["x"]
    state["x"], frozen["factor"], state["kept"] = small + 5, 1.001, kept
    return {
        "the same": (_Case(lambda: small * 3, lambda: small * 3), False),
        "another order": (_Case(lambda: (a * b) * c, lambda: a * (b * c)), False),
        "NaN in both": (_Case(lambda: holes + 1, lambda: holes + 1), False),
        "a stale address": (stale, True),
        "a frozen number": (number, True),
        "NaN in one": (_Case(lambda: holes + 1, lambda: small + 1), True),
    }


@exercise(
    "09-4",
    question="""Write the heart of `debug=True`. `make_checked(replay, output, eager)` returns a function `step()`. It
calls `replay()`, whose result lies in the tensor `output` afterwards; `eager()` computes what it should be *now*.
`step()` returns the result, or raises a ValueError where it is wrong. It must

- find a stale address, and a number that froze at 1 and is 1.001 now;
- be silent where only the last bits differ (numbers up to 10^9, added or multiplied in another order, float32);
- be silent where both have NaN at the same place, and not where one has;
- return something that the next replay does not overwrite.""",
    hints=(
        "torch.equal is too strict: compiled code computes in another order. A fixed distance is too lax for small "
        "numbers, and too strict for large ones.",
        "float32 has 24 bits: rounding is about 1e-7 of the number. torch.allclose has `rtol`, `atol` and `equal_nan`.",
        "`output` lies in the graph's memory: `.clone()` what you return.",
    ),
)
def own_check(answer: Callable[..., Any]) -> Verdict:
    cases = _cases()
    found = {what: case.raises(answer) == must for what, (case, must) in cases.items()}
    off = [what for what, good in found.items() if not good]
    others = [case.other for case, _ in cases.values() if case.other is not None]
    if others and len(off) > 1:
        raise others[0]
    if "the same" in off:
        return wrong("It raises where the replay gives exactly what eager gives. Is replay() called first?")
    if "a stale address" in off:
        return wrong("It lets a stale address pass: the replay gives another number than eager.")
    if off:
        says = {
            "another order": "raises where only the last bits differ",
            "NaN in both": "raises where both have NaN at the same place",
            "a frozen number": "lets 1.000 pass where 1.001 is right",
            "NaN in one": "lets a NaN pass where eager has a number",
        }
        return nearly(f"Stale addresses are found. But it {', and '.join(says[what] for what in off)}.")
    if others:
        return nearly(
            f"It finds what it should, but raises {type(others[0]).__name__}: a ValueError is asked for."
        )
    x = torch.ones(4)
    case = _Case(lambda: x * 10, lambda: x * 10)
    step = answer(case.graph.replay, case.output, case.eager)
    first = step()
    x.fill_(2)
    second = step()
    if first is None or not torch.equal(second, torch.full((4,), 20.0)):
        return nearly("The check is right, but step() does not return the result.")
    if not torch.equal(first, torch.full((4,), 10.0)):
        return nearly("The check is right, but the next step overwrites the result that was returned.")
    return right("Replay, compare by relative distance, copy out. Debug does it piece by piece.")
