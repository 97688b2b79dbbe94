"""``--substitute OLD=NEW``, shared by plan and quantize."""

from __future__ import annotations

from compressor.errors import CompressorError


def parse_substitutions(pairs: list[str]) -> dict[str, str]:
    """``["awq=gptq"]`` -> ``{"awq": "gptq"}``.

    Raises:
        CompressorError: a pair without ``=`` or with an empty side.
    """
    found = {}
    for pair in pairs:
        old, _, new = pair.partition("=")
        if not old or not new:
            raise CompressorError("--substitute", got=repr(pair), expected="OLD=NEW, e.g. awq=gptq")
        found[old] = new
    return found
