"""Tokenizer metadata: what is found by structure, what is padded, what is refused."""

import json
from copy import deepcopy

import pytest
from fixtures_models import write_tokenizer

from compressor.errors import CompressorError
from compressor.export import gguf_tokenizer as tokenizer

CONFIG = {"bos_token_id": 0, "eos_token_id": [1, 2]}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """tokenizer.json and tokenizer_config.json, parsed."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return {p.name: json.loads(p.read_text()) for p in folder.iterdir()}


def load(files, rows=256, pretokenizer=None, config=CONFIG, **changes):
    """Load with keys of tokenizer.json changed."""
    files = deepcopy(files)
    files["tokenizer.json"] |= changes
    encoded = {name: json.dumps(content).encode() for name, content in files.items()}
    return tokenizer.load(encoded, config, rows, pretokenizer)


def test_byte_level_bpe(files):
    found = load(files, rows=260)
    assert (found.model, found.pre, found.scores) == ("gpt2", "gpt-2", [])
    assert found.tokens[:4] == ["<s>", "</s>", "<pad>", "Ā"]
    assert found.types[:4] == [3, 3, 3, 1]
    assert found.tokens[255:] == ["nd", "[PAD256]", "[PAD257]", "[PAD258]", "[PAD259]"]
    assert found.types[255:] == [1, 5, 5, 5, 5]
    assert found.merges[:2] == ["Ġ t", "h e"]
    assert found.special == {"bos": 0, "eos": 1, "pad": 2}
    assert (found.add_bos, found.add_eos, found.add_space_prefix) == (False, False, False)


def test_added_tokens_that_are_not_special_are_user_defined(files):
    added = [*files["tokenizer.json"]["added_tokens"], {"id": 257, "content": "<x>", "special": False}]
    found = load(files, rows=258, added_tokens=added)
    assert found.tokens[256:] == ["[PAD256]", "<x>"]
    assert found.types[256:] == [5, 4]


def test_merges_with_spaces_are_spelled_as_byte_level_does(files):
    model = {**files["tokenizer.json"]["model"], "merges": [["a b", "c"], ["d", "e"]]}
    assert load(files, model=model).merges == ["aĠb c", "d e"]
    model["merges"] = ["d e"]
    assert load(files, model=model).merges == ["d e"]


def template(*names):
    parts = [{"SpecialToken": {"id": name}} if name != "A" else {"Sequence": {"id": "A"}} for name in names]
    return {
        "type": "Sequence",
        "processors": [{"type": "ByteLevel"}, {"type": "TemplateProcessing", "single": parts}],
    }


@pytest.mark.parametrize(
    ("names", "adds"),
    [(("<s>", "A"), (True, False)), (("A", "</s>"), (False, True)), (("<s>", "A", "</s>"), (True, True))],
)
def test_the_post_processor_tells_what_is_added(files, names, adds):
    found = load(files, post_processor=template(*names))
    assert (found.add_bos, found.add_eos) == adds


def test_without_a_post_processor_the_settings_tell(files):
    files = deepcopy(files)
    files["tokenizer_config.json"]["add_bos_token"] = True
    assert load(files).add_bos


def test_a_post_processor_that_adds_something_else_is_refused(files):
    with pytest.raises(CompressorError, match="adds a token that is not bos_token"):
        load(files, post_processor=template("<pad>", "A"))


def test_special_ids_come_from_the_config_where_the_tokenizer_is_silent(files):
    files = deepcopy(files)
    files["tokenizer_config.json"] = {"bos_token": {"content": "<pad>"}}
    assert load(files).special == {"bos": 2, "eos": 1}
    assert load(files, config={"eos_token_id": 5}).special == {"bos": 2, "eos": 5}
    with pytest.raises(CompressorError, match="no end-of-text token"):
        load(files, config={"eos_token_id": 256})


def test_chat_templates(files):
    assert load(files).chat_template is None
    settings = {**files["tokenizer_config.json"], "chat_template": "{{ a }}"}
    assert load({**files, "tokenizer_config.json": settings}).chat_template == "{{ a }}"
    encoded = {name: json.dumps(content).encode() for name, content in files.items()}
    encoded["chat_template.jinja"] = b"{{ b }}"
    assert tokenizer.load(encoded, CONFIG, 256, None).chat_template == "{{ b }}"


DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False}
BARE = {**BYTES, "use_regex": False}


def split(regex, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def sequence(*steps):
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)}}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([BYTES], (tokenizer._GPT2,)),
        ([DIGITS, BYTES], (r"\p{N}", tokenizer._GPT2)),
        ([split("x"), BARE], ("x",)),
        ([split("x", "Removed", True), BARE], ("x",)),
        ([split("[\r\n]"), BARE], (r"[\r\n]",)),
        ([split("x", "Removed"), BARE], None),
        ([split("x")], None),
        ([{**DIGITS, "individual_digits": False}, BYTES], None),
        ([{**BYTES, "add_prefix_space": True}], None),
        ([BARE, split("x")], None),
        ([{"type": "Whitespace"}, BARE], None),
    ],
)
def test_splits(steps, expected):
    assert tokenizer.splits(sequence(*steps)) == expected


@pytest.mark.parametrize(("ignore", "name"), [(True, "llama-bpe"), (False, "smaug-bpe")])
def test_ignoring_merges_tells_names_apart(files, ignore, name):
    model = {**files["tokenizer.json"]["model"], "ignore_merges": ignore}
    assert load(files, model=model, **sequence(split(tokenizer._LLAMA3), BARE)).pre == name


def test_an_unknown_structure_is_refused_unless_named(files):
    unknown = sequence(split(r"\w+"), BARE)
    with pytest.raises(CompressorError, match=r"none of those llama.cpp is known to have") as error:
        load(files, **unknown)
    assert "--pretokenizer" in error.value.hint
    assert "llama-bpe" in error.value.hint
    assert load(files, pretokenizer="tekken", **unknown).pre == "tekken"


def test_nfc_is_noted(files):
    assert load(files).notes == []
    assert "NFC" in load(files, normalizer={"type": "NFC"}).notes[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "Unigram"}}, "its model is no BPE"),
        ({"normalizer": {"type": "Lowercase"}}, "no such normalizer"),
        ({"added_tokens": [{"id": 9, "content": "<x>"}]}, "two tokens have id 9"),
        ({"added_tokens": [{"id": 256, "content": "the"}]}, "more tokens than the embedding has rows"),
    ],
)
def test_what_llama_cpp_cannot_do_is_refused(files, changes, message):
    with pytest.raises(CompressorError, match=message):
        load(files, **changes)


@pytest.mark.parametrize(("option", "value"), [("end_of_word_suffix", "</w>"), ("merges", [])])
def test_models_that_are_no_plain_byte_level_bpe_are_refused(files, option, value):
    with pytest.raises(CompressorError, match=r"cannot be told to llama.cpp"):
        load(files, model={**files["tokenizer.json"]["model"], option: value})


def test_equal_token_strings_are_refused(files):
    added = [*files["tokenizer.json"]["added_tokens"], {"id": 256, "content": "the"}, {"id": 257, "content": "the"}]
    with pytest.raises(CompressorError, match="same token string") as error:
        load(files, rows=258, added_tokens=added)
    assert error.value.got == ["the"]


def test_missing_and_broken_files():
    with pytest.raises(CompressorError, match=r"tokenizer.json is missing"):
        tokenizer.load({}, CONFIG, 256, None)
    with pytest.raises(CompressorError, match="not valid JSON"):
        tokenizer.load({"tokenizer.json": b"{"}, CONFIG, 256, None)


SPM_VOCAB = {"<unk>": 0, "<0x0A>": 1, "▁": 2, "a": 3, "b": 4, "ab": 5, "▁ab": 6, "▁a": 7}
PREPEND = {
    "type": "Sequence",
    "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "content": "▁"}],
}


def spm(merges, normalizer=PREPEND, pre=None):
    model = {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "vocab": SPM_VOCAB, "merges": merges}
    added = [{"id": 8, "content": "▁x", "special": False}]
    content = {"model": model, "normalizer": normalizer, "pre_tokenizer": pre, "added_tokens": added}
    encoded = {"tokenizer.json": json.dumps(content).encode()}
    return tokenizer.load(encoded, {"eos_token_id": 0}, 9, None)


MERGES = [["a", "b"], ["▁", "ab"], ["▁a", "b"], ["▁", "a"]]


def test_sentencepiece_merges_become_scores():
    found = spm(MERGES)
    assert (found.model, found.pre, found.merges) == ("llama", "default", [])
    assert found.types == [2, 6, 1, 1, 1, 1, 1, 1, 4]
    assert found.tokens[8] == " x"
    assert found.scores[5:8] == [0.0, -1.0, -3.0]
    assert max(found.scores[:5]) < -3.0
    assert found.add_space_prefix
    metaspace = {"type": "Metaspace", "prepend_scheme": "never", "split": False}
    assert not spm(MERGES, normalizer=None, pre=metaspace).add_space_prefix


@pytest.mark.parametrize(
    ("merges", "got"),
    [
        ([["▁", "ab"], ["a", "b"], ["▁a", "b"], ["▁", "a"]], "'▁ab' merged at two ranks"),
        (MERGES[:2] + MERGES[3:], "('▁a', 'b') is no merge"),
        (MERGES[:3], "('▁', 'a') is no merge"),
    ],
)
def test_merges_that_no_scores_can_tell_are_refused(merges, got):
    with pytest.raises(CompressorError, match="no equivalent in scores") as error:
        spm(merges)
    assert error.value.got == got


def test_sentencepiece_with_other_splits_is_refused():
    with pytest.raises(CompressorError, match="no equivalent"):
        spm(MERGES, pre={"type": "Metaspace", "split": True}, normalizer=None)
