"""Regular expressions that could take for ever are refused, the usual ones are not."""

import pytest

from compressor.patterns import compile_pattern


@pytest.mark.parametrize("pattern", [r"([a-z._0-9]+)+\$", r"(a|b+)*x", r"(?:x*)*", r"((a{1,3})+)+", r"(?=(a+)+)b"])
def test_nested_repeats_are_refused(pattern):
    with pytest.raises(ValueError, match="repeat inside a repeat"):
        compile_pattern(pattern)


@pytest.mark.parametrize("pattern", ["(", "*x", "a" * 20_000])
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(ValueError):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", [r"^model\.layers\.\d+\.self_attn\.(q_proj|k_proj)$", r".*(q|k|v)_proj$", r"(ab){2,3}c+d*"]
)
def test_usual_patterns_compile(pattern):
    assert compile_pattern(pattern).pattern == pattern
