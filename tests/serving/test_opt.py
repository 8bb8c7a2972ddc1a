"""OPT against ``transformers``, and through every mode of the runner."""

from __future__ import annotations

import pytest
import torch

from cgkit.config import CompilationConfig
from cgkit.errors import ServingError
from cgkit.serving.kv_cache import PagedKVCache
from cgkit.serving.opt import OPT_PRESETS, OPTConfig
from cgkit.serving.runner import Runner
from cgkit.serving.weights import named_shape, random_model

from .helpers import prompts_of
from .test_llama import step

TOY = OPTConfig("toy-opt", 97, 48, 112, 3, 6, 128)


def test_prefill_and_decode_equal_transformers():
    import transformers

    model = random_model(TOY)
    fields = {k: v for k, v in TOY.to_hf().items() if k != "model_type"}
    config = transformers.OPTConfig(**fields, attn_implementation="eager", dropout=0.0, layerdrop=0.0)
    reference = transformers.OPTForCausalLM(config).eval()
    reference.load_state_dict(model.state_dict())
    cache = PagedKVCache(3, 20, 4, 6, 8, layer_names=model.attention_layers)
    prompts, blocks = prompts_of([5, 13]), [[7, 3], [5, 11, 8, 12]]
    with torch.no_grad():
        wanted = [reference(torch.tensor([p])).logits[0] for p in prompts]
    done = [3, 10]
    got = [[x] for x in step(model, cache, [(p[:n], 0, b) for p, n, b in zip(prompts, done, blocks)])]
    while rows := [r for r in (0, 1) if done[r] < len(prompts[r])]:
        for r, logits in zip(
            rows, step(model, cache, [(prompts[r][: done[r] + 1], done[r], blocks[r]) for r in rows])
        ):
            got[r].append(logits)
            done[r] += 1
    for mine, theirs in zip(got, wanted):
        torch.testing.assert_close(torch.cat(mine), theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", sorted(OPT_PRESETS))
def test_the_count_of_parameters_is_that_of_the_model(name):
    shape = OPT_PRESETS[name].scaled(num_hidden_layers=1)
    assert sum(p.numel() for p in random_model(shape).parameters()) == shape.num_parameters


def test_opt_125m_has_125_million():
    assert 124e6 < OPT_PRESETS["opt-125m"].num_parameters < 126e6


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_every_mode_gives_the_eager_models_tokens(mode):
    prompts = prompts_of([3, 9, 5])
    eager = Runner(random_model(TOY), config=CompilationConfig(level=0), max_num_seqs=4, max_model_len=64)
    config = CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 4, 8], compiler="eager")
    runner = Runner(random_model(TOY), config=config, max_num_seqs=4, max_model_len=64)
    runner.capture_model()
    answers = [r.generate(prompts, max_tokens=8, stop_at_eos=False) for r in (eager, runner)]
    assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ServingError, match="multiple"):
        TOY.scaled(num_attention_heads=5)
    with pytest.raises(ServingError, match="opt-125m"):
        named_shape("opt-126m")
    for layers in (0, -2):  # 0 is not "all of them"
        with pytest.raises(ServingError, match=f"layers={layers}"):
            named_shape("opt-125m", layers)
