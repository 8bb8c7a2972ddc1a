"""Two results compared: is it the same but for rounding, measured against a float64 reference?

Two programs that compute one thing in another order differ in the last bits, and by how much depends on the numbers.
So nothing is compared with a fixed tolerance alone: ``expected`` (the eager result) is itself so far from the
reference, computed in float64, and ``got`` may be some times as far.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cgkit.tensor_trees import tensor_leaves

#: By how many units of the last place of the largest value (of a row) two results may differ, whatever the reference
#: says: operators of one library differ so much from those of another.
UNITS: dict[torch.dtype, float] = {
    torch.float64: 64.0,
    torch.float32: 8.0,
    torch.float16: 2.0,
    torch.bfloat16: 2.0,
}
#: Which memory was made and need not have been filled: the types of it; True where that is not known, False for none.
Unwritten = bool | Collection[torch.dtype]
#: How many times as far from the reference as the eager result is.
TIMES = 4.0
#: What :data:`UNITS` is multiplied by where there is no reference.
WITHOUT_REFERENCE = 8.0


@dataclass(frozen=True)
class Apart:
    """How one tensor differs from what was expected.

    ``path``: where it is in the result. ``error``: the largest distance to the reference (to the expected tensor where
    there is none) of an element that is too far, ``allowed``: how far it may be. ``elements``: how many are too far.
    """

    path: str
    what: str
    error: float = 0.0
    allowed: float = 0.0
    elements: int = 0

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit (NaNs too)."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is not torch.strided:
        return torch.equal(one, other)
    plain = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in (one, other)]
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in plain))


def first_apart(
    expected: Any,
    got: Any,
    reference: Callable[[], Any] | None = None,
    path: str = "output",
    *,
    unwritten: Unwritten = False,
) -> Apart | None:
    """The first tensor of ``got`` that is not ``expected`` but for rounding; None if all are.

    Args:
        reference: the same in float64, asked for only if bits differ; it may raise or return something built otherwise:
            then there is none.
        unwritten: NaN in ``expected`` stands for memory that nobody wrote: there anything will do. What stands in
            integers and flags may be a result too, so there it counts only for the types that were left unwritten.
    """
    wanted, found = list(tensor_leaves(expected, path)), list(tensor_leaves(got, path))
    if [place for place, _ in wanted] != [place for place, _ in found]:
        return Apart(path, f"{len(found)} tensors in place of {len(wanted)}")
    differing = [i for i, ((_, a), (_, b)) in enumerate(zip(wanted, found)) if not same_bits(a, b)]
    if not differing:
        return None
    references = _leaves_of(reference, len(wanted))
    for index in differing:
        (place, a), (_, b) = wanted[index], found[index]
        apart = tensors_apart(a, b, references[index], place, unwritten=unwritten)
        if apart is not None:
            return apart
    return None


def _leaves_of(reference: Callable[[], Any] | None, count: int) -> Sequence[torch.Tensor | None]:
    if reference is None:
        return [None] * count
    try:
        found = [tensor for _, tensor in tensor_leaves(reference())]
    except Exception:  # operators that know no float64, numbers that were baked in: no reference, then
        return [None] * count
    return found if len(found) == count else [None] * count


def tensors_apart(
    expected: torch.Tensor,
    got: torch.Tensor,
    reference: torch.Tensor | None,
    path: str = "output",
    *,
    unwritten: Unwritten = False,
) -> Apart | None:
    """How ``got`` differs from ``expected`` by more than rounding, or None."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return Apart(path, f"{_kind(got)} in place of {_kind(expected)}")
    if expected.numel() == 0:
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        return _exactly(expected, got, path, unwritten)
    a, b = _wide(expected), _wide(got)
    r = None if reference is None or reference.shape != a.shape else _wide(reference)
    if r is not None and not torch.equal(r.isfinite(), a.isfinite()):
        r = None  # float64 goes further than the model's own numbers: no yardstick
    ignored = a.isnan() if unwritten else torch.zeros_like(a, dtype=torch.bool)
    special = ~(a.isfinite() & b.isfinite()) & ~ignored
    wrong = special & ~((a == b) | (a.isnan() & b.isnan()))
    if bool(wrong.any()):
        return Apart(path, f"{int(wrong.sum())} of {a.numel()} values are NaN or infinite in one of the two",
                     float("inf"), 0.0, int(wrong.sum()))  # fmt: skip
    ignored = ignored | special
    if expected.dtype.itemsize == 1:
        return _neighbours(a, b, ignored, expected.dtype, path)
    error = (b - (a if r is None else r)).abs().masked_fill(ignored, 0.0)
    own = torch.zeros_like(error) if r is None else (a - r).abs().masked_fill(ignored, 0.0)
    size = a.abs().masked_fill(ignored, 0.0)
    units = UNITS.get(expected.dtype, 1.0) * (WITHOUT_REFERENCE if r is None else 1.0)
    step = torch.finfo(expected.dtype).eps
    allowed = TIMES * _of_rows(own) + units * step * _of_rows(size) + torch.finfo(expected.dtype).tiny
    far = error > allowed
    if not bool(far.any()):
        return None
    worst = int((error / allowed).reshape(-1).argmax())
    most, least = float(error.reshape(-1)[worst]), float(allowed.expand_as(error).reshape(-1)[worst])
    to = "the eager result" if r is None else "the float64 reference"
    return Apart(
        path,
        f"{int(far.sum())} of {a.numel()} values are too far from {to}: up to {most:.3g}, and {least:.3g} is rounding",
        most,
        least,
        int(far.sum()),
    )


def _neighbours(
    a: torch.Tensor, b: torch.Tensor, ignored: torch.Tensor, dtype: torch.dtype, path: str
) -> Apart | None:
    """For numbers of one byte: rounding leads to the next such number at most, whatever the others of a row are."""
    error = (b - a).abs().masked_fill(ignored, 0.0)
    size = torch.maximum(a.abs(), b.abs()).masked_fill(ignored, 0.0)
    info = torch.finfo(dtype)
    allowed = (size * info.eps).clamp(min=info.tiny * info.eps) * (1 + 1e-6)
    far = error > allowed
    if not bool(far.any()):
        return None
    worst = int((error / allowed).reshape(-1).argmax())
    most, least = float(error.reshape(-1)[worst]), float(allowed.reshape(-1)[worst])
    count = int(far.sum())
    what = f"{count} of {a.numel()} values are not the next one either: up to {most:.3g} apart"
    return Apart(path, f"{what}, and {least:.3g} is rounding", most, least, count)


def _exactly(expected: torch.Tensor, got: torch.Tensor, path: str, unwritten: Unwritten) -> Apart | None:
    differs = expected != got
    if unwritten is True or (unwritten and expected.dtype in unwritten):
        differs &= expected != _pattern_of(expected.dtype)
    count = int(differs.sum())
    if not count:
        return None
    return Apart(path, f"{count} of {expected.numel()} values are other ones", elements=count)


def _of_rows(values: torch.Tensor) -> torch.Tensor:
    """The largest of each row, or of the middle row where that is more: a row may be small by chance, and padded rows
    may hold anything."""
    if values.dim() < 2:
        return values.max()
    rows = values.amax(dim=-1, keepdim=True)
    return torch.maximum(rows, rows.median())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """As float64, complex numbers as pairs of them."""
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().to(torch.complex128).resolve_neg())
    return tensor.to(torch.float64)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# --- memory that nobody wrote ----------------------------------------------------------------------


def mark_unwritten(tensor: torch.Tensor) -> None:
    """Fills ``tensor`` with what shows that nobody wrote it: NaN, or bytes that are no index."""
    tensor = once(tensor)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8).fill_(0x7F)  # NaN in every FP8 that has one
    elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(_pattern_of(tensor.dtype))


def once(tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` that has each place in memory once: of an expanded dimension its first element."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _pattern_of(dtype: torch.dtype) -> Any:
    """What stands in unwritten integers: bytes of 0x5A; True in flags."""
    return True if dtype is torch.bool else int.from_bytes(b"\x5a" * dtype.itemsize, "little")


def random_states() -> list[torch.Tensor]:
    """The states of torch's default generators: of the CPU, and of the current GPU if there is one."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_available() else states


@contextmanager
def python_random_put_back() -> Iterator[Callable[[], bool]]:
    """The states of ``random`` and of NumPy's old generator are after the block as before; yields a function that says
    whether somebody drew."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)  # whoever did not import it draws nothing of it

    def states() -> tuple[Any, Any]:
        return random.getstate(), numpy.get_state(legacy=False) if numpy is not None else None

    before = states()
    as_bytes = pickle.dumps(before)
    try:
        yield lambda: pickle.dumps(states()) != as_bytes
    finally:
        random.setstate(before[0])
        if numpy is not None:
            numpy.set_state(before[1])
