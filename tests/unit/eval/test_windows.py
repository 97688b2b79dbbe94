"""Windows of both protocols, token by token."""

import pytest
from fixtures_models import write_tokenizer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from compressor.calibration.packing import added_bos
from compressor.errors import CompressorError
from compressor.eval.windows import encode_text, make_windows


@pytest.fixture
def tokenizer(tmp_path):
    write_tokenizer(tmp_path)
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def with_template(tokenizer, single):
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    return tokenizer


def test_llama_cpp_scores_the_second_half_of_each_window():
    windows = make_windows(list(range(100)), context=8, chunks=None, protocol="llama.cpp")
    assert windows.tokens.shape == (12, 8)  # 100 // 8, four tokens dropped
    assert windows.tokens.flatten().tolist() == list(range(96))
    assert windows.first == 4
    assert windows.scored == 12 * 3  # positions 4, 5, 6 predict tokens 5, 6, 7


def test_512_scores_255():
    windows = make_windows([0] * 1100, context=512, chunks=None, protocol="llama.cpp")
    assert windows.scored == 2 * 255


def test_gptq_scores_every_position():
    windows = make_windows(list(range(30)), context=10, chunks=2, protocol="gptq", bos=0)
    assert windows.tokens.tolist() == [list(range(10)), list(range(10, 20))]  # BOS replaces nothing here
    assert (windows.first, windows.scored) == (0, 18)


def test_bos_replaces_the_first_token_of_every_window():
    ids = list(range(10, 30))
    windows = make_windows(ids, context=5, chunks=3, protocol="llama.cpp", bos=1)
    assert windows.tokens[:, 0].tolist() == [1, 1, 1]
    assert windows.tokens[:, 1:].tolist() == [[11, 12, 13, 14], [16, 17, 18, 19], [21, 22, 23, 24]]
    assert ids == list(range(10, 30))


def test_exactly_one_window_is_enough_and_one_token_less_is_not():
    assert len(make_windows([1] * 8, context=8, chunks=5, protocol="gptq").tokens) == 1
    with pytest.raises(CompressorError, match="my text: too short") as caught:
        make_windows([1] * 7, context=8, chunks=None, protocol="gptq", label="my text")
    assert (caught.value.got, caught.value.expected) == ("7 tokens", "at least 8 (one window)")


@pytest.mark.parametrize(("context", "protocol"), [(3, "gptq"), (8, "strided")])
def test_wrong_options_are_refused(context, protocol):
    with pytest.raises(CompressorError, match=r"--context|--protocol"):
        make_windows([1] * 99, context=context, chunks=None, protocol=protocol)


def test_one_trailing_newline_is_stripped(tokenizer):
    once, _ = encode_text(tokenizer, "the end\n")
    assert once == encode_text(tokenizer, "the end")[0]
    assert len(encode_text(tokenizer, "the end\n\n")[0]) == len(once) + 1


def test_special_tokens_in_the_text_are_plain_text(tokenizer):
    ids, bos = encode_text(tokenizer, "a<s>b</s>")
    assert not {0, 1} & set(ids)
    assert bos is None
    assert tokenizer.decode(ids) == "a<s>b</s>"
    assert tokenizer.encode("<s>", add_special_tokens=False).ids == [0]  # the tokenizer is left as it was


@pytest.mark.parametrize(("template", "bos"), [("<s> $A", 0), ("<s> $A </s>", 0), ("$A </s>", None), ("$A", None)])
def test_bos_is_what_the_tokenizer_puts_before_a_text(tokenizer, template, bos):
    plain, _ = encode_text(tokenizer, "the sea")
    tokenizer = with_template(tokenizer, template)
    assert added_bos(tokenizer) == bos
    assert encode_text(tokenizer, "the sea") == (([bos] if bos is not None else []) + plain, bos)


def test_a_truncating_tokenizer_reads_the_whole_text(tokenizer):
    tokenizer.enable_truncation(4)
    assert len(encode_text(tokenizer, "abcdefghijkl")[0]) == 12
