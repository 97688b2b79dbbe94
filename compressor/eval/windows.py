"""Text to windows of tokens, by the two protocols in use.

``llama.cpp``: the text is tokenized whole, cut into independent windows (default 512), the remainder
dropped; where the tokenizer adds BOS the first token of each window is replaced by it; the second half
of each window is scored (255 of 512 predictions). ``gptq``: the GPTQ papers' windows (2048 there), every
position scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compressor.calibration.packing import added_bos
from compressor.errors import CompressorError

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

PROTOCOLS = ("llama.cpp", "gptq")


@dataclass(frozen=True)
class Windows:
    """Tokens to score.

    Attributes:
        tokens: int64 [windows, context].
        first: Logits at positions first..context-2 are scored, each against the token after it.
        protocol: One of PROTOCOLS.
    """

    tokens: torch.Tensor
    first: int
    protocol: str

    @property
    def context(self) -> int:
        """Tokens per window."""
        return int(self.tokens.shape[1])

    @property
    def scored(self) -> int:
        """Predictions scored in all."""
        return int(self.tokens.shape[0]) * (self.context - 1 - self.first)


def encode_text(tokenizer: Tokenizer, text: str) -> tuple[list[int], int | None]:
    """Token ids of a text as llama-perplexity sees it, and the BOS id if the tokenizer adds one.

    One trailing newline is stripped; special tokens in the text are plain text.
    """
    bos = added_bos(tokenizer)
    tokenizer.no_truncation()
    parsed = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True  # the library's name for taking them as plain text
    try:
        ids = list(tokenizer.encode(text.removesuffix("\n"), add_special_tokens=False).ids)
    finally:
        tokenizer.encode_special_tokens = parsed
    return (ids, None) if bos is None else ([bos, *ids], bos)


def make_windows(
    ids: list[int], *, context: int, chunks: int | None, protocol: str, bos: int | None = None, label: str = "text"
) -> Windows:
    """Cut tokens into windows.

    Raises:
        CompressorError: unknown protocol, or fewer tokens than one window.
    """
    import torch

    if protocol not in PROTOCOLS:
        raise CompressorError("--protocol", got=repr(protocol), expected=" or ".join(PROTOCOLS))
    if context < 4:
        raise CompressorError("--context", got=context, expected="at least 4")
    count = len(ids) // context
    if count == 0:
        raise CompressorError(
            f"{label}: too short to score",
            got=f"{len(ids)} tokens",
            expected=f"at least {context} (one window)",
            hint="a longer text, or a smaller --context",
        )
    count = min(count, chunks or count)
    tokens = torch.tensor(ids[: count * context]).view(count, context).clone()
    if protocol == "llama.cpp" and bos is not None:
        tokens[:, 0] = bos
    return Windows(tokens, context // 2 if protocol == "llama.cpp" else 0, protocol)
