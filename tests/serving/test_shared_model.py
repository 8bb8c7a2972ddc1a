"""A runner leaves the model that it was given as it was; and under ``debug=True`` each step runs beside the model."""

from dataclasses import replace

import pytest
import torch

from cgkit.config import CompilationConfig
from cgkit.errors import WrongResultError
from cgkit.kernels.custom_op import CustomOp
from cgkit.serving.runner import Runner
from tests.serving.helpers import TOY, prompts_of, toy

SMALL = replace(TOY, num_hidden_layers=1)


def forms(model):
    return [layer.enabled for layer in model.modules() if isinstance(layer, CustomOp)]


def tokens_of(runner, prompts):
    return [each.token_ids for each in runner.generate(prompts, max_tokens=3)]


def served(model, **config):
    settings = CompilationConfig(**{"compiler": "eager", "cudagraph_capture_sizes": [2, 4], **config})
    return Runner(model, config=settings, max_num_seqs=2, max_model_len=32)


@pytest.mark.parametrize(
    ("options", "was"),
    [
        ({"level": 0}, False),
        ({"level": 0}, True),
        pytest.param({"level": 1}, False, marks=pytest.mark.slow),
        ({"cudagraph_mode": "PIECEWISE"}, False),
    ],
    ids=str,
)
def test_a_runner_does_not_change_which_form_a_shared_models_layers_take(options, was, monkeypatch):
    model = toy(SMALL)
    for layer in model.modules():
        if isinstance(layer, CustomOp):
            layer.enabled = was
    assert len(forms(model)) > 2
    prompts, calls = prompts_of([3, 5]), []
    for kind in {type(layer) for layer in model.modules() if isinstance(layer, CustomOp)}:
        own = kind.forward_custom
        monkeypatch.setattr(
            kind, "forward_custom", lambda self, *a, own=own: (calls.append(1), own(self, *a))[1]
        )
    other = served(model, level=0, custom_ops=("none",))
    want = tokens_of(other, prompts)
    assert not calls
    runner = served(model, custom_ops=("all",), **options)
    if options.get("cudagraph_mode") == "PIECEWISE":
        runner.capture_model()
    assert tokens_of(runner, prompts) == want
    assert calls, "the runner's layers took the other form"
    calls.clear()
    assert set(forms(model)) == {was}
    assert tokens_of(other, prompts) == want
    assert not calls, "the other runner's layers took the form of this one"


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
def test_steps_beside_the_model_are_right(mode):
    model = toy(SMALL)
    want = tokens_of(served(model, level=0), prompts_of([3, 5, 1]))
    runner = served(model, cudagraph_mode=mode, debug=True)
    runner.capture_model()
    assert tokens_of(runner, prompts_of([3, 5, 1])) == want


def test_what_a_trace_left_out_is_seen_in_a_runners_step(monkeypatch):
    model = toy(SMALL)
    cls, forward = type(model), type(model).forward

    def branching(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = forward(self, input_ids, positions)
        return hidden * 2 if input_ids.shape[0] == 1 else hidden

    monkeypatch.setattr(cls, "forward", branching)
    runner = served(model, cudagraph_mode="NONE", debug=True)
    with pytest.raises(WrongResultError, match="The trace itself computes something else"):
        runner.generate([[5]], max_tokens=2)
    assert served(model, cudagraph_mode="NONE").generate([[5]], max_tokens=2)  # and nobody sees it without


def test_a_level_without_pieces_keeps_its_forward_and_looks_for_layers_once(monkeypatch):
    """Eager steps are what others are compared with: nothing of the model is searched in one."""
    model = toy(SMALL)
    executor = served(model, level=0, custom_ops=("all",)).executor
    executor.use(None)
    seen = []

    def forward(*args):
        seen.append({layer.enabled for layer in layers})

    layers = [module for module in model.modules() if isinstance(module, CustomOp)]
    monkeypatch.setattr(type(model), "forward", lambda self, *args: forward(*args))
    monkeypatch.setattr(type(model), "modules", lambda self: pytest.fail("a step goes through the model"))
    executor.forward(1, 2)
    assert seen == [{True}] and {layer.enabled for layer in layers} == {False}
