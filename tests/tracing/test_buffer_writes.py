"""Writes of kept tensors are found with their line; what is allowed is left alone."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from cgkit import torch_hooks
from cgkit.errors import BufferWriteError
from cgkit.tracing import article_check, decompile, find_buffer_writes, raise_on_buffer_writes, trace
from cgkit.tracing.exhibit import buffer_check_exhibit


class Base(nn.Module):
    buf: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("buf", torch.zeros(4))
        self.register_buffer("other", torch.zeros(4))
        self.last = None
        self.kept = torch.zeros(4)
        self.history = []
        self.table = {"a": torch.zeros(4), "b": torch.zeros(4)}
        self.count = 0
        self.child = nn.Identity()


def remember(module, y):
    module.last = y  # in a helper


class Add(Base):
    def forward(self, x: torch.Tensor):
        self.buf.add_(1)  # here
        return x + self.buf


class SetItem(Base):
    def forward(self, x: torch.Tensor):
        self.buf[0] = 1.0  # here
        return x + self.buf


class View(Base):
    def forward(self, x: torch.Tensor):
        self.buf.view(-1).mul_(2)  # here
        return x + self.buf


class Data(Base):
    def forward(self, x: torch.Tensor):
        self.buf.data.mul_(2)  # here
        return x + self.buf


class OutArgument(Base):
    def forward(self, x: torch.Tensor):
        torch.add(self.other, 1, out=self.kept)  # here
        return x + self.kept


class InTable(Base):
    def forward(self, x: torch.Tensor):
        self.table["b"].copy_(x[0])  # here
        return x + self.table["b"]


class AugmentedAssign(Base):
    def forward(self, x: torch.Tensor):
        self.kept += 1  # here
        return x + self.kept


class Assign(Base):
    def forward(self, x: torch.Tensor):
        y = x * 2
        self.last = y  # here
        return y


class AssignBuffer(Base):
    def forward(self, x: torch.Tensor):
        self.buf = self.buf + 1  # here
        return x + self.buf + self.other


class AssignNone(Base):
    def forward(self, x: torch.Tensor):
        y = x + self.kept
        self.kept = None  # here
        return y


class AssignChild(Base):
    def forward(self, x: torch.Tensor):
        y = x * 2
        self.child.last = y  # here
        return y


class AssignInHelper(Base):
    def forward(self, x: torch.Tensor):
        y = x * 2
        remember(self, y)
        return y


class Append(Base):
    def forward(self, x: torch.Tensor):
        y = x * 2
        self.history.append(y)  # here
        return y


class TableItem(Base):
    def forward(self, x: torch.Tensor):
        self.table["a"] = x * 2  # here
        return self.table["a"] + self.table["b"]


class SetAttr(Base):
    def forward(self, x: torch.Tensor):
        y = x * 2
        setattr(self, "last", y)  # noqa: B010  # here
        return y


class BatchNorm(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor):
        return self.norm(x)  # here


FOUND = {
    Add: ("buf", "in place: aten::add_.Tensor"),
    SetItem: ("buf", "in place: aten::"),
    View: ("buf", "in place: aten::mul_.Tensor"),
    Data: ("buf", "in place: aten::mul_.Tensor"),
    OutArgument: ("kept", "in place: aten::add.out"),
    InTable: ("table['b']", "in place: aten::copy_"),
    AugmentedAssign: ("kept", "in place: aten::add_.Tensor"),
    Assign: ("last", "assigned"),
    AssignBuffer: ("buf", "assigned"),
    AssignNone: ("kept", "assigned"),
    AssignChild: ("child.last", "assigned"),
    AssignInHelper: ("last", "assigned"),
    Append: ("history", "contents changed"),
    TableItem: ("table['a']", "assigned"),
    SetAttr: ("last", "assigned"),
    BatchNorm: ("norm.running_mean", "in place: aten::"),
}


def line_of(cls):
    """The line with the mark in the class, or in the helper."""
    for source in (cls, remember):
        lines, first = inspect.getsourcelines(source)
        for offset, text in enumerate(lines):
            if "# here" in text or "# in a helper" in text:
                return first + offset, text.strip()
    raise AssertionError


@pytest.mark.parametrize("cls", FOUND, ids=lambda cls: cls.__name__)
def test_a_write_is_found_with_its_line(cls):
    name, how = FOUND[cls]
    traced = trace(cls(), torch.randn(3, 4))
    writes = [write for write in find_buffer_writes(traced) if write.holds_tensor]
    (write,) = [write for write in writes if write.name == name and write.how.startswith(how)]
    assert (write.line, write.source) == line_of(cls)
    assert write.file == __file__
    if cls is not BatchNorm:  # which writes running_var and a counter as well
        assert len({write.name for write in writes}) == 1, writes
    with pytest.raises(BufferWriteError, match=rf"{__file__}:{write.line}"):
        raise_on_buffer_writes(traced)


class LocalDict(Base):
    def forward(self, x: torch.Tensor):
        d = {}
        d.update(y=x * 2)
        return d["y"] + self.buf


class LocalInPlace(Base):
    def forward(self, x: torch.Tensor):
        y = x + self.buf
        y.add_(1)
        y[0] = 3.0
        z = self.buf.clone()
        return z.mul_(2) + y


class WritesArgument(Base):
    def forward(self, x: torch.Tensor, out: torch.Tensor):
        out.copy_(x + self.buf)
        return out


class WritesArgumentsAttribute(Base):
    def forward(self, x: torch.Tensor, out: torch.Tensor, holder=None):
        holder.result = x + out
        return holder.result


class Holder:
    result = None


@pytest.mark.parametrize("cls", [LocalDict, LocalInPlace, WritesArgument, WritesArgumentsAttribute])
def test_what_is_allowed_is_left_alone(cls):
    args = [torch.randn(3, 4), torch.randn(3, 4)][: 1 if cls in (LocalDict, LocalInPlace) else 2]
    kwargs = {"holder": Holder()} if cls is WritesArgumentsAttribute else {}
    traced = trace(cls(), *args, check_buffer_writes=True, **kwargs)
    assert find_buffer_writes(traced) == []
    args = [torch.randn(5, 4) for _ in args]
    torch.testing.assert_close(traced(*args, **kwargs), cls()(*[a.clone() for a in args], **kwargs))


def test_a_number_is_reported_and_not_refused():
    class Counts(Base):
        def forward(self, x: torch.Tensor):
            self.count += 1
            return x + 1

    traced = trace(Counts(), torch.randn(3, 4), check_buffer_writes=True)
    (write,) = find_buffer_writes(traced)
    assert (write.name, write.holds_tensor) == ("count", False)


def test_the_error_holds_line_way_out_and_bytecode():
    with pytest.raises(BufferWriteError) as caught:
        trace(Assign(), torch.randn(3, 4), check_buffer_writes=True)
    text = str(caught.value)
    for part in ("self.last = y", "cgkit.register_op", "The compiled forward (", "__compiled_fn_"):
        assert part in text


def test_without_depyf_the_listing_is_shown_and_says_so(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "depyf", None)
    how, text = decompile(Assign.forward.__code__)
    assert how == "dis" and "RETURN_VALUE" in text


def test_checking_leaves_the_trace_as_it_was():
    model = AssignBuffer()
    traced = trace(model, torch.randn(3, 4))
    shapes = [str(getattr(example, "shape", example)) for example in traced.example_inputs]
    find_buffer_writes(traced)
    assert model.buf.sum() == 0
    assert [str(getattr(example, "shape", example)) for example in traced.example_inputs] == shapes
    x = torch.randn(5, 4)
    torch.testing.assert_close(traced(x), x + 1)
    assert model.buf.tolist() == [1.0] * 4  # the bytecode still does it, call by call


def test_a_write_after_the_shape_of_a_buffer_changed():
    class Transposes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("m", torch.zeros(2, 4))

        def forward(self, x: torch.Tensor):
            self.m.t().mul_(2)
            return x + self.m[0]

    (write,) = find_buffer_writes(trace(Transposes(), torch.randn(3, 4)))
    assert write.name == "m"


def test_the_articles_check_as_an_exhibit():
    frame = buffer_check_exhibit()
    assert (frame.cgkit_fires == frame.writes).all()
    verdicts = frame.article_is.tolist()
    assert verdicts.count("misses it") >= 2 and "fires for nothing" in verdicts and "right" in verdicts
    assert article_check(trace(LocalDict(), torch.randn(3, 4)).code)
    assert not article_check(trace(Assign(), torch.randn(3, 4)).code)


def test_looking_for_writes_fixes_no_size():
    asks = [False]

    @torch.library.custom_op("cgkit_test::asks_a_size", mutates_args=())
    def asks_a_size(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @asks_a_size.register_fake
    def _(x):
        return x.new_empty(int(x.shape[0]) if asks[0] else x.shape[0], x.shape[1])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.cgkit_test.asks_a_size(x) * self.weight

    traced = trace(Model(), torch.ones(6, 4))
    asks[0] = True
    assert find_buffer_writes(traced) == []
    (x,) = [e for e in traced.example_inputs if isinstance(e, torch.Tensor) and e.dim() == 2]
    assert not torch_hooks.symbolic_expression(x.shape[0]).is_number
