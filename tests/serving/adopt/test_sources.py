"""Where an adopted model comes from: an object, a folder, a GGUF file, a configuration."""

import json
import re
from pathlib import Path

import pytest
import torch

import cgkit
from cgkit.config import CompilationConfig
from cgkit.errors import ServingError
from cgkit.serving import Runner, load_model
from cgkit.serving.gguf_files import bundled_smollm2

from ..helpers import need_smollm2
from .families import alone, config_of, family

EAGER = CompilationConfig(level=0)


@pytest.mark.parametrize("name", ["Qwen2", "GPT2"])
def test_a_folder_as_transformers_writes_it(name, tmp_path):
    model = family(name)
    model.save_pretrained(tmp_path / "mine")
    for given in (tmp_path / "mine", str(tmp_path / "mine")):
        adopted = cgkit.adopt(given)
        assert adopted.config.name == "mine" and adopted.tokenizer is None
    (answer,) = Runner(adopted, config=EAGER, max_model_len=32).generate([[5, 6, 7]], 6, stop_at_eos=False)
    assert answer.token_ids == alone(model, [5, 6, 7], 6)


def test_weights_that_a_folder_lacks_are_not_drawn_at_random(tmp_path):
    family("OPT").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ServingError, match=r"lacks weights .*at random: model.decoder.layers.2.*and 13 more"):
        cgkit.adopt(tmp_path)


def test_random_weights_from_a_configuration_are_the_seeds():
    state = torch.random.get_rng_state()
    one, same, other = (cgkit.adopt(config_of("Phi"), seed=seed) for seed in (1, 1, 2))
    weights = [adopted.lm_head.weight for adopted in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.random.get_rng_state(), state)
    half = cgkit.adopt(config_of("Phi"), dtype=torch.bfloat16)
    assert half.lm_head.weight.dtype is torch.bfloat16
    assert (
        len(Runner(half, config=EAGER, max_model_len=32).generate([[5]], 4, stop_at_eos=False)[0].token_ids)
        == 4
    )


def test_a_model_object_is_used_as_it_is():
    with pytest.raises(ServingError, match=r"as the weights are used as they are|model.to"):
        cgkit.adopt(family("Llama"), dtype=torch.bfloat16)


@pytest.mark.parametrize("what", ["missing", "empty", "broken"])
def test_what_is_no_model_is_said(what, tmp_path):
    folder = tmp_path / what
    if what != "missing":
        folder.mkdir()
    if what == "broken":
        (folder / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ServingError, match="cannot be read" if what == "broken" else "Nothing is downloaded"):
        cgkit.adopt(folder)


def test_the_code_of_the_readme_runs(tmp_path):
    readme = Path(cgkit.__file__).parent / "serving" / "adopt" / "README.md"
    (code,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.S)
    names: dict[str, object] = {}
    exec(code, names)
    assert [len(answer.token_ids) for answer in names["answers"]] == [8, 8]
    assert names["adopted"].config.max_position_embeddings == 64 and names["adopted"].config.limited_by


@pytest.mark.slow
def test_the_gguf_of_the_tour_answers_as_our_own_llama_does():
    need_smollm2()
    adopted, ours = cgkit.adopt("smollm2-135m-instruct"), load_model("smollm2-135m-instruct")
    prompt = "The capital of France is"
    runners = [
        Runner(adopted, adopted.tokenizer, EAGER, max_model_len=64),
        Runner(ours.model, ours.tokenizer, EAGER, max_model_len=64),
    ]
    answers = [runner.generate(prompt, 12)[0] for runner in runners]
    assert answers[0].token_ids == answers[1].token_ids and answers[0].text == answers[1].text
    from_file = cgkit.adopt(bundled_smollm2())
    assert torch.equal(from_file.lm_head.weight, adopted.lm_head.weight)
