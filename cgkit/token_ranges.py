"""A range of token counts, and what a piece may be compiled for: data that events and configuration share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenRange:
    """Token counts from ``start`` to ``end``, both included, that one compilation serves."""

    start: int
    end: int

    def __contains__(self, num_tokens: object) -> bool:
        return isinstance(num_tokens, int) and self.start <= num_tokens <= self.end

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"


#: For what a piece is compiled: one token count, a range, or None: any (the general shape).
Shape = int | TokenRange | None
