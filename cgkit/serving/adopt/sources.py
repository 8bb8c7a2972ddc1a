"""Where a model to be adopted comes from: an object, a folder, a GGUF file, or a configuration and chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from cgkit.errors import ServingError
from cgkit.serving.gguf_files import bundled_smollm2
from cgkit.serving.tokenizer import load_tokenizer, need
from cgkit.serving.weights import SMOLLM2, converted, few_names


class Found(NamedTuple):
    """A model of ``transformers`` with what belongs to it."""

    model: Any
    name: str
    source: str
    tokenizer: Any


def find_model(given: Any, dtype: torch.dtype | None, device: torch.device | str | None, seed: int) -> Found:
    """The model that ``given`` stands for; see :func:`cgkit.serving.adopt.adopt`.

    Raises:
        ServingError: nothing is found, or it cannot be read.
    """
    need("transformers")
    if isinstance(given, torch.nn.Module):
        if dtype is not None or device is not None:
            raise ServingError(
                f"dtype={dtype}, device={device} for a model that is there already: move it before (model.to), as the "
                "weights are used as they are"
            )
        name = getattr(getattr(given, "config", None), "name_or_path", "") or type(given).__name__
        return Found(given, Path(name).name, "a model in memory", None)
    if isinstance(given, (str, Path)):
        return _from_files(given, dtype or torch.float32, device or "cpu")
    if hasattr(given, "to_dict") and hasattr(given, "model_type"):
        return _from_config(given, dtype or torch.float32, device or "cpu", seed)
    raise ServingError(
        f"adopt takes a causal LM of transformers, a folder, a .gguf file, {SMOLLM2!r} or a configuration of "
        f"transformers, and got {type(given).__name__}"
    )


def _from_files(given: str | Path, dtype: torch.dtype, device: torch.device | str) -> Found:
    path, source = Path(given).expanduser(), str(given)
    name = path.stem if path.suffix == ".gguf" else path.name
    if str(given) == SMOLLM2:
        path = converted(bundled_smollm2())
    elif path.is_file() and path.suffix == ".gguf":
        path = converted(path)
    elif not (path / "config.json").is_file():
        raise ServingError(
            f"no model at {source!r}: give a folder with config.json and *.safetensors as transformers writes them, a "
            f".gguf file, or {SMOLLM2!r}. Nothing is downloaded: save_pretrained makes such a folder"
        )
    transformers = need("transformers")
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # transformers, safetensors and json raise their own kinds
        raise ServingError(f"{source} cannot be read: {type(error).__name__}: {error}") from error
    if missing := sorted(report.get("missing_keys") or ()):
        raise ServingError(
            f"{source} lacks weights that its config.json asks for, and transformers would draw them at random: "
            f"{few_names(missing)}. Complete the folder, or correct config.json"
        )
    return Found(model.to(device), name, f"{source} (local files)", load_tokenizer(path))


def _from_config(config: Any, dtype: torch.dtype, device: torch.device | str, seed: int) -> Found:
    """A model with the random weights that its family starts training from; the same seed, the same weights."""
    transformers = need("transformers")
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        try:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        except ValueError as error:
            raise ServingError(
                f"{type(config).__name__} belongs to no causal LM of transformers: {error}"
            ) from error
    return Found(model, config.name_or_path or config.model_type, f"random weights, seed {seed}", None)
