"""Models strung together from moves by chance, the calls that are made of them, and the comparison with eager."""

from __future__ import annotations

import contextlib
import copy
import io
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import cgkit
from cgkit.errors import CgkitError
from cgkit.tensor_trees import tensor_leaves
from tests.fuzz.moves import ENDS, MOVES, WIDTH, FreshBetween, attend

SIZES = (2, 4, 8)
#: Outcomes of a call.
EQUAL, REFUSED, BOTH_RAISE, WRONG, CRASH = "equal", "refused", "both raise", "WRONG", "CRASH"


class Program(nn.Module):
    """Moves one after the other, an operator that is cut at in the middle, and an end."""

    def __init__(self, moves: Sequence[type[nn.Module]], end: type[nn.Module]) -> None:
        super().__init__()
        self.moves = nn.ModuleList([move() for move in moves])
        self.end = end()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        h = x
        for index, move in enumerate(self.moves):
            h = move(h, y)
            if index == 0:
                h = attend(h)
        return self.end(h, x, y)


Make = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]


def _two(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(n, WIDTH, generator=chance), torch.randn(n, WIDTH, generator=chance)


def _strided(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = _two(2 * n, 5)
    return x[::2], y.t().contiguous().t()[:n]


def _aliased(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, _ = _two(n, 6)
    return x, x


def _overlapping(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, _ = _two(n + 1, 7)
    return x[:-1], x[1:]


def _from_before(before: Any, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of what the call before returned, where that fits."""
    for _, tensor in tensor_leaves(before):
        if tensor.dtype is torch.float32 and tensor.shape == (n, WIDTH):
            return tensor[:n], tensor.view_as(tensor)
    return _two(n, 8)


#: By name: the arguments of a call, from what the call before returned.
CALLS: dict[str, Make] = {
    "first": lambda before: _two(4, 1),
    "other values": lambda before: _two(4, 2),
    "views of the output before": lambda before: _from_before(before, 4),
    "padded": lambda before: _two(3, 3),
    "one": lambda before: _two(1, 4),
    "largest": lambda before: _two(8, 9),
    "above": lambda before: _two(11, 10),
    "empty": lambda before: _two(0, 11),
    "strided": lambda before: _strided(4),
    "one tensor twice": lambda before: _aliased(4),
    "overlapping": lambda before: _overlapping(4),
    "integers": lambda before: tuple((t * 9).to(torch.int64) for t in _two(4, 12)),  # type: ignore[dict-item,return-value]
    "complex": lambda before: tuple(torch.complex(t, t) for t in _two(4, 13)),  # type: ignore[dict-item,return-value]
    "eighths": lambda before: tuple(t.to(torch.float8_e4m3fn) for t in _two(4, 14)),  # type: ignore[dict-item,return-value]
    "not alike": lambda before: (_two(4, 15)[0], _two(3, 15)[1]),
    "once more": lambda before: _two(4, 16),
}


def draw(seed: str) -> tuple[list[type[nn.Module]], type[nn.Module]]:
    """The moves and the end of program ``seed``."""
    chance = random.Random(seed)
    return chance.sample(MOVES, chance.choice([1, 2, 3])), chance.choice(ENDS)


def outcomes(
    moves: Sequence[type[nn.Module]], end: type[nn.Module], first: str = "first", **settings: Any
) -> dict[str, str]:
    """What came of each call of :data:`CALLS`, and of recording: one of the outcomes above, with a reason."""
    torch.manual_seed(0)
    plain = Program(moves, end).eval()
    cut_at = ["fuzz::attend"] + ["fuzz::fresh"] * (FreshBetween in moves)
    options: dict[str, Any] = {"compiler": "eager", "splitting_ops": cut_at}
    options |= {"cudagraph_capture_sizes": list(SIZES), **settings}
    compiled = _decorated()(moves, end, compilation_config=cgkit.CompilationConfig(**options)).eval()
    compiled.load_state_dict(plain.state_dict())
    found: dict[str, str] = {}
    before: tuple[Any, Any] = (None, None)
    names = [first, *(name for name in CALLS if name != first)]
    for number, name in enumerate(names):
        as_before = copy.deepcopy(plain)
        found[name], before = _compare(plain, compiled, CALLS[name], before)
        if not found[name].startswith(EQUAL):
            plain = as_before  # what did not happen to one must not have happened to the other
        if found[name] == BOTH_RAISE:
            compiled.load_state_dict(plain.state_dict())  # each may have come to another line
        if number == 0 and compiled._cgkit_state.compiled is None and options.get("level", 3) >= 2:
            break  # no graph came of it, and each call says so anew
        records = compiled._cgkit_state.compiled is not None and options["cudagraph_mode"] != "NONE"
        if number == 0 and records and found[name] != BOTH_RAISE:
            found["recording"] = _record(compiled)
    cgkit.reset()
    return found


def _decorated() -> Any:
    @cgkit.support_torch_compile
    class Decorated(Program):
        pass

    return Decorated


def _record(compiled: Any) -> str:
    state = {name: tensor.clone() for name, tensor in compiled.state_dict().items()}
    try:
        cgkit.capture_model(compiled)
    except CgkitError as error:
        return f"{REFUSED}: {_one_line(error)}"
    except Exception as error:
        return f"{CRASH}: {_one_line(error)}"
    changed = [name for name, tensor in compiled.state_dict().items() if not torch.equal(tensor, state[name])]
    return f"{WRONG}: recording changed {', '.join(changed)}" if changed else EQUAL


def _compare(plain: Any, compiled: Any, make: Make, before: tuple[Any, Any]) -> tuple[str, tuple[Any, Any]]:
    """The same call of both models, each on tensors of its own that lie alike."""
    wanted, wanted_error, args = _call(plain, make, before[0])
    got, error, own_args = _call(compiled, make, before[1])
    after = (wanted, got)
    if error is not None:
        if isinstance(error, CgkitError):
            return f"{REFUSED}: {_one_line(error)}", after
        if wanted_error is not None and type(error) is type(wanted_error):
            return BOTH_RAISE, after
        return f"{CRASH}: {_one_line(error)}", after
    if wanted_error is not None:
        return f"{WRONG}: eager raises {_one_line(wanted_error)}, and compiled answers", after
    for what, a, b in (("output", wanted, got), ("arguments", args, own_args)):
        differs = difference(a, b)
        if differs:
            return f"{WRONG}: {what}: {differs}", after
    if difference(plain.state_dict(), compiled.state_dict()):
        return f"{WRONG}: buffers: {difference(plain.state_dict(), compiled.state_dict())}", after
    return EQUAL, after


def _call(model: Any, make: Make, before: Any) -> tuple[Any, Exception | None, Any]:
    args = make(before)
    try:
        with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
            return model(*args), None, args
    except Exception as error:
        return None, error, args


def difference(wanted: Any, got: Any) -> str:
    """ "" or how two results differ; NaN equals NaN."""
    if isinstance(wanted, torch.Tensor):
        if not isinstance(got, torch.Tensor) or wanted.dtype != got.dtype or wanted.shape != got.shape:
            kind = getattr(got, "dtype", type(got)), tuple(getattr(got, "shape", ()))
            return f"{kind}, not {(wanted.dtype, tuple(wanted.shape))}"
        if wanted.dtype is torch.float8_e4m3fn:
            wanted, got = wanted.float(), got.float()
        return "" if torch.allclose(wanted, got, atol=1e-5, rtol=1e-5, equal_nan=True) else "values"
    if type(wanted) is not type(got):
        return f"{type(got).__name__}, not {type(wanted).__name__}"
    if isinstance(wanted, dict):
        if wanted.keys() != got.keys():
            return f"keys {list(got)}, not {list(wanted)}"
        return next((f"[{k!r}] {d}" for k in wanted if (d := difference(wanted[k], got[k]))), "")
    if isinstance(wanted, (tuple, list)):
        if len(wanted) != len(got):
            return f"{len(got)} values, not {len(wanted)}"
        return next(
            (f"[{i}] {d}" for i, (a, b) in enumerate(zip(wanted, got)) if (d := difference(a, b))), ""
        )
    return "" if wanted == got else f"{got!r}, not {wanted!r}"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
