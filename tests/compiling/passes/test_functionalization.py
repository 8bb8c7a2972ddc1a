"""fix_functionalization, and what auto-functionalisation costs."""

from __future__ import annotations

import pytest
import torch

import cgkit
from cgkit.compiling.passes import functionalization_cost, preview_passes
from cgkit.compiling.passes.preview import in_post_grad, traced_pieces
from cgkit.splitting import register_op
from tests.compiling.passes.models import llama, split


def double_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


def add_one_(x: torch.Tensor) -> None:
    x.add_(1)


def shift_into(x: torch.Tensor, out: torch.Tensor) -> None:
    """Reads x after it began to write out."""
    out[:, 1:] = x[:, :-1].clone()
    out.add_(x)


register_op("double_into", double_into, ["out"], namespace="passtoy")
register_op("add_one_", add_one_, ["x"], namespace="passtoy")
register_op("shift_into", shift_into, ["out"], namespace="passtoy")
ops = torch.ops.passtoy


class Fresh(torch.nn.Module):
    """The out-parameter is a buffer of its own."""

    def forward(self, x):
        out = torch.empty_like(x)
        ops.double_into(x, out)
        again = torch.empty_like(x)
        ops.double_into(out + 1, again)
        return again * 3


class ReadLater(torch.nn.Module):
    """What is written is read later as it was: nobody may write it."""

    def forward(self, x):
        y = x * 2
        z = y.clone()
        ops.add_one_(z)
        return y + z


class WritesItsInput(torch.nn.Module):
    def forward(self, x):
        ops.add_one_(x)
        return x * 2


class ReadsTheOldToo(torch.nn.Module):
    """What is written is a copy, but the compiler sees through it: the old value is read as well."""

    def forward(self, x):
        y = x * 2
        z = y.clone()
        ops.add_one_(z)
        return z, y


class Halves(torch.nn.Module):
    """Two views of one buffer are written, as rotary positions in q and k of one projection."""

    def forward(self, x):
        y = x * 2
        ops.add_one_(y[:, :8])
        ops.add_one_(y[:, 8:])
        return y


class ReadsACopyOfWhatItWrites(torch.nn.Module):
    """The compiler takes the copy away, and the operator would read what it is just writing (Inductor by itself
    lets it: wrong numbers on torch 2.13)."""

    def forward(self, x):
        y = x * 2
        ops.shift_into(y.clone(), y)
        return y


def whole(model):
    traced = cgkit.trace(model, torch.randn(4, 16), dynamic_arg_dims={"x": 0})
    return cgkit.split_graph(traced, [])


def test_a_buffer_of_its_own_is_written_in_place():
    (reports,) = preview_passes(whole(Fresh()), ["fix_functionalization"]).values()
    report = reports["fix_functionalization"]
    assert report.matched == 2 and report.notes == ()
    assert report.before.count("auto_functionalized(") == 2 and "auto_functionalized" not in report.after
    assert report.after.count("passtoy.double_into.default(") == 2


@pytest.mark.parametrize(
    ("model", "copies"), [(ReadLater, 1), (WritesItsInput, 1), (ReadsTheOldToo, 1), (Halves, 2),
                          (ReadsACopyOfWhatItWrites, 1)],
    ids=lambda m: getattr(m, "__name__", m),
)  # fmt: skip
def test_what_others_look_at_is_copied_first(model, copies):
    (reports,) = preview_passes(whole(model()), ["fix_functionalization"]).values()
    assert "auto_functionalized" not in reports[0].after
    assert len(reports[0].notes) == copies and all("writes a copy" in note for note in reports[0].notes)


@pytest.mark.parametrize(
    "model",
    [Fresh, ReadLater, WritesItsInput, ReadsTheOldToo, Halves, ReadsACopyOfWhatItWrites],
    ids=lambda m: m.__name__,
)
def test_compiled_with_the_pass_it_computes_the_same(model, monkeypatch):
    monkeypatch.setenv("CGKIT_DISABLE_COMPILE_CACHE", "1")
    config = cgkit.CompilationConfig(cudagraph_mode="NONE", passes=["fix_functionalization"])
    compiled = cgkit.compile_pieces(whole(model()), config)
    x, same = torch.randn(5, 16), None
    same = x.clone()
    got, expected = compiled(x), model()(same)
    for a, b in zip(
        got if isinstance(got, tuple) else (got,), expected if isinstance(expected, tuple) else (expected,)
    ):
        assert torch.equal(a, b)
    assert torch.equal(x, same)


def test_every_call_of_our_operators_in_a_whole_llama_is_in_place_again():
    layers = 2
    (reports,) = preview_passes(split(llama(layers, None), ("all",), []), ["fix_functionalization"]).values()
    # a layer: two norms, one rotary, one SiLU-and-multiply, attention; and the last norm
    assert reports[0].matched == 5 * layers + 1
    assert "auto_functionalized" not in reports[0].after


def test_the_second_version_reaches_inductor_only_if_it_is_let():
    (piece,) = traced_pieces(whole(Fresh()))
    texts = {}
    for v2 in (False, True):
        in_post_grad(piece, lambda graph, v2=v2: texts.update({v2: str(graph)}), functionalization_v2=v2)
    assert "auto_functionalized_v2" in texts[True] and "auto_functionalized_v2" not in texts[False]


def test_what_it_costs_is_counted():
    cost = functionalization_cost(whole(Fresh()), num_tokens=4)
    frame = cost.to_frame()
    assert list(frame["variant"]) == ["V2", "V1", "V1 + fix_functionalization"]
    assert set(frame["wrapped"]) == {2}
    assert set(frame["written"]) == {2} and set(frame["written_bytes"]) == {2 * 4 * 16 * 4}
    assert cost.totals["V1 + fix_functionalization"] == (0, 0)


def test_a_value_that_is_read_later_costs_its_copy_in_every_variant():
    class Input(torch.nn.Module):
        """Writes a copy of its input, which is returned as well."""

        def forward(self, x):
            z = x.clone()
            ops.add_one_(z)
            return z + x

    cost = functionalization_cost(whole(Input()), num_tokens=4)
    assert all(copies == 1 and size == 4 * 16 * 4 for copies, size in cost.totals.values()), cost
