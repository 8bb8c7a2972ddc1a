"""Marks: what is swapped comes back, whatever others did meanwhile."""

from __future__ import annotations

import gc
from contextlib import ExitStack

import pytest
from torch import nn

from cgkit import marks


class Recording:
    """A marker that only notes."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str]] = []

    def function(self, function, stage, piece="", **facts):
        self.made.append((stage, piece))
        return lambda *args, **kwargs: function(*args, **kwargs)

    def block(self, stage, piece=""):
        raise AssertionError("no block here")


class Owner:
    def __init__(self) -> None:
        self.own = "old"

    def method(self):
        return "method"


def test_an_attribute_comes_back_and_a_method_is_the_classes_again():
    owner = Owner()
    with ExitStack() as undo:
        marks.swap_attribute(owner, "own", "new", undo)
        marks.swap_attribute(owner, "method", lambda: "marked", undo)
        assert (owner.own, owner.method()) == ("new", "marked")
    assert (owner.own, owner.method()) == ("old", "method") and vars(owner) == {"own": "old"}


def test_what_was_set_meanwhile_stays():
    owner, table = Owner(), {"a": 1, "b": 2}
    with ExitStack() as undo:
        marks.swap_attribute(owner, "own", "new", undo)
        marks.swap_item(table, "a", 10, undo)
        marks.swap_item(table, "b", 20, undo)
        owner.own = "mine"
        table["a"] = 5
        del table["b"]
    assert owner.own == "mine" and table == {"a": 5}


def test_swaps_of_one_thing_come_back_in_reverse():
    owner = Owner()
    with ExitStack() as undo:
        marks.swap_attribute(owner, "own", "first", undo)
        marks.swap_attribute(owner, "own", "second", undo)
    assert owner.own == "old"


def test_who_is_gone_is_found_no_more():
    owner = Owner()
    marks.register(owner)
    assert owner in marks.alive()
    count = len(marks.alive())
    del owner
    gc.collect()
    assert len(marks.alive()) < count


def test_the_parts_of_a_model_that_are_worth_a_mark():
    layer = nn.Module()
    layer.attention, layer.mlp = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    inner = nn.Module()
    inner.embed, inner.layers = nn.Embedding(2, 2), nn.ModuleList([layer, nn.ReLU()])
    model = nn.Module()
    model.body, model.head = inner, nn.Linear(2, 2)
    paths = [path for path, _ in marks.module_parts(model)]
    assert paths == [
        "body",
        "body.embed",
        "body.layers.0",
        "body.layers.0.attention",
        "body.layers.1",
        "head",
    ]


def test_a_module_with_a_forward_of_its_own_is_left_alone():
    model, marker = nn.Module(), Recording()
    model.one, model.two = nn.Linear(2, 2), nn.Linear(2, 2)
    model.two.forward = lambda x: x
    with ExitStack() as undo:
        marks.mark_modules(model, marker, undo, model="Model")
        assert marker.made == [("eager", "one")] and "forward" in vars(model.one)
    assert "forward" not in vars(model.one) and "forward" in vars(model.two)


def test_an_error_while_marking_puts_back_what_was_marked():
    class Broken:
        def put_marks(self, marker, undo):
            raise ZeroDivisionError

    owner = Owner()
    with pytest.raises(ZeroDivisionError), ExitStack() as undo:
        marks.swap_attribute(owner, "own", "new", undo)
        Broken().put_marks(None, undo)
    assert owner.own == "old"
