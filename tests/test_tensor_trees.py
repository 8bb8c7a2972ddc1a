"""One walk over nested values: what is found is what is replaced, and nothing of the caller changes."""

import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from cgkit.tensor_trees import map_tensors, replace_tensors, tensor_leaves

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    inner: object
    number: int = 3


@dataclass(slots=True)
class Slotted:
    inner: object


class Plain:
    def __init__(self, inner):
        self.inner = inner


class Mode(enum.Enum):
    BOTH = (2, 1)


def wrapped(child):
    return st.one_of(
        st.lists(child, max_size=3),
        st.lists(child, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", 0]), child, max_size=2),
        st.builds(Pair, child, child),
        st.builds(Frozen, child),
        st.builds(Slotted, child),
        st.builds(Plain, child),
        st.builds(lambda inner: SimpleNamespace(inner=inner), child),
    )


plain = st.sampled_from([None, 1, "text", 2.5, torch.float32, Mode.BOTH, torch.nn.ReLU(), print])
tensors = st.builds(lambda: torch.zeros(2))
trees = wrapped(wrapped(wrapped(st.one_of(plain, tensors))))


@given(trees)
def test_every_leaf_lies_where_its_path_says(tree):
    for path, tensor in tensor_leaves(tree, "root"):
        assert eval(path, {"root": tree}) is tensor


@given(trees)
def test_what_is_found_is_what_is_replaced_and_the_original_stays(tree):
    before = list(tensor_leaves(tree, "root"))
    seen = []
    mapped = map_tensors(lambda path, tensor: seen.append((path, tensor)) or tensor + 1, tree, "root")
    assert [path for path, _ in seen] == [path for path, _ in before]
    after, still = list(tensor_leaves(mapped, "root")), list(tensor_leaves(tree, "root"))
    assert [path for path, _ in after] == [path for path, _ in before]
    assert all(torch.equal(new, torch.ones(2)) for _, new in after)
    assert all(old is same for (_, old), (_, same) in zip(before, still))
    assert type(mapped) is type(tree)


@given(trees)
def test_a_tree_in_which_nothing_is_replaced_is_shared(tree):
    assert replace_tensors(tree, {}) is tree


def test_a_dict_of_another_class_stays_one():
    x, y = torch.zeros(1), torch.ones(1)
    mapped = replace_tensors(OrderedDict(x=x, n=1), {id(x): y})
    assert type(mapped) is OrderedDict and mapped["x"] is y and mapped["n"] == 1


def test_objects_that_point_at_each_other_end_the_walk():
    loop = Plain(torch.zeros(1))
    loop.self = loop
    mapped = map_tensors(lambda _, tensor: tensor + 1, loop)
    assert mapped is not loop and mapped.inner.item() == 1 and loop.inner.item() == 0
