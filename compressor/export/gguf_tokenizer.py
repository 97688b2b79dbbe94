"""A Hugging Face tokenizer as GGUF metadata: tokens, types, merges or scores, special ids, pre-tokenizer.

llama.cpp carries no tokenizer files: it knows pre-tokenizers by name. The name is found by structure
(which regexes tokenizer.json splits by, in order) and never guessed: an unknown structure is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compressor.errors import CompressorError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
SPECIAL = ("bos", "eos", "unk", "pad", "sep", "mask")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL

STRUCTURES: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((_GPT2,), False): "gpt-2",
    ((r"\p{N}", _GPT2), False): "smollm",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_QWEN2,), False): "qwen2",
    ((r"|".join((*_CASED, r"\p{N}", _CASED_TAIL)),), True): "tekken",
    ((rf"{_CASED[0]}{_ENGLISH}?|{_CASED[1]}{_ENGLISH}?|\p{{N}}{{1,3}}|{_CASED_TAIL}",), False): "gpt-4o",
    ((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"), False): "deepseek-coder",
}
"""(regexes in order, ignore_merges) -> llama.cpp's name of the same behaviour."""

KNOWN = tuple(
    sorted(
        {
            *STRUCTURES.values(),
            *("bloom", "chatglm-bpe", "command-r", "dbrx", "deepseek-llm", "deepseek-r1-qwen"),
            *("deepseek-v3", "default", "exaone", "falcon", "falcon3", "granite-docling", "hunyuan"),
            *("lfm2", "mpt", "olmo", "pixtral", "poro-chat", "refact", "seed-coder", "stablelm2"),
            *("starcoder", "superbpe", "trillion", "viking"),
        }
    )
)
"""Names llama.cpp accepts and ``--pretokenizer`` offers."""


@dataclass(frozen=True)
class Vocabulary:
    """Everything GGUF stores about a tokenizer.

    Attributes:
        model: ``gpt2`` (byte-level BPE) or ``llama`` (SentencePiece BPE).
        pre: llama.cpp's name of the pre-tokenizer.
        tokens, types: One per row of the embedding; types are llama.cpp's (1 normal .. 6 byte).
        merges: ``left right``, for gpt2.
        scores: One per token, for llama.
        special: Token id by role (``bos`` ...).
        add_bos, add_eos, add_space_prefix: What encoding adds.
        chat_template: A template, a list of ``{name, template}``, or None.
        notes: Facts to tell the user.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    special: dict[str, int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | list[dict[str, str]] | None = None
    notes: list[str] = field(default_factory=list)

    def write(self, writer: Any) -> None:
        """Add the keys to a gguf.GGUFWriter."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        for role, token in self.special.items():
            getattr(writer, f"add_{role}_token_id")(token)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        writer.add_add_space_prefix(self.add_space_prefix)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


class Files:
    """The side files of a checkpoint, read on demand."""

    def __init__(self, files: Mapping[str, Path | bytes]) -> None:
        self._files = files

    def text(self, name: str) -> str | None:
        """A file's text, or None when there is no such file."""
        entry = self._files.get(name)
        if entry is None:
            return None
        return (entry if isinstance(entry, bytes) else entry.read_bytes()).decode("utf-8", "replace")

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file's object, empty when there is no such file.

        Raises:
            CompressorError: it is no JSON object.
        """
        text = self.text(name)
        if text is None:
            return {}
        try:
            value = json.loads(text)
        except ValueError as error:
            raise CompressorError(f"{name}: not valid JSON", got=error) from error
        if not isinstance(value, dict):
            raise CompressorError(f"{name}: not a JSON object", got=type(value).__name__)
        return value


def load(
    side_files: Mapping[str, Path | bytes], config: Mapping[str, Any], rows: int, pretokenizer: str | None
) -> Vocabulary:
    """The vocabulary of a model.

    Args:
        side_files: As Checkpoint.side_files delivers them.
        config: Parsed config.json (special ids that the tokenizer files do not name).
        rows: Rows of the embedding; shorter vocabularies are padded.
        pretokenizer: llama.cpp's name, or None to find it by structure.

    Raises:
        CompressorError: no tokenizer.json, or nothing llama.cpp can do the same with.
    """
    files = Files(side_files)
    tokenizer = files.json("tokenizer.json")
    if not tokenizer:
        raise CompressorError(
            "tokenizer.json is missing: GGUF needs the tokenizer",
            hint="AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL) in transformers writes it",
        )
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE":
        raise _unsupported("its model is no BPE", model.get("type"))
    settings = {**files.json("special_tokens_map.json"), **files.json("tokenizer_config.json")}
    tokens, types = _tokens(tokenizer, rows)
    parts = _sentencepiece(tokenizer, tokens, types) if model.get("byte_fallback") else _byte_level(tokenizer)
    special = _special_ids(settings, config, tokens)
    add_bos, add_eos = (_adds(tokenizer, settings, tokens, special, role) for role in ("bos", "eos"))
    return Vocabulary(
        **{**parts, "pre": _name(pretokenizer, parts)},
        tokens=tokens,
        types=types,
        special=special,
        add_bos=add_bos,
        add_eos=add_eos,
        chat_template=_chat_template(files, settings),
    )


def splits(tokenizer: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The regexes a byte-level tokenizer.json splits text by, in order; None for anything else."""
    pre = tokenizer.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    found: list[str] = []
    for index, step in enumerate(steps):
        kind = step.get("type")
        last = index == len(steps) - 1
        if kind == "ByteLevel" and last and not step.get("add_prefix_space"):
            return (*found, _GPT2) if step.get("use_regex", True) else tuple(found)
        if kind == "Digits" and step.get("individual_digits"):
            found.append(r"\p{N}")
        elif kind == "Split" and (regex := _isolated(step)):
            found.append(regex)
        else:
            return None
    return None


def _isolated(step: Mapping[str, Any]) -> str | None:
    """The regex of a Split whose matches become pieces, with line ends spelled as escapes."""
    keeps = (step.get("behavior"), bool(step.get("invert"))) in (("Isolated", False), ("Removed", True))
    regex = (step.get("pattern") or {}).get("Regex")
    return regex.replace("\r", r"\r").replace("\n", r"\n") if keeps and regex else None


def _name(asked: str | None, parts: Mapping[str, Any]) -> str:
    """The pre-tokenizer's name: as asked, else by structure."""
    if asked is not None and asked not in KNOWN:
        raise CompressorError(f"pretokenizer {asked!r} is unknown", expected="one of " + ", ".join(KNOWN))
    if parts["model"] == "llama":
        return "default"
    name = asked or parts["pre"]
    if name is None:
        raise CompressorError(
            "tokenizer.json: its pre-tokenizer is none of those llama.cpp is known to have",
            hint="name the one it was trained with by --pretokenizer: " + ", ".join(KNOWN),
        )
    return str(name)


def _byte_level(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """model, pre (None when unknown), merges, scores, add_space_prefix, notes of a byte-level BPE."""
    model = tokenizer["model"]
    for option in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(option):
            raise _unsupported(f"model.{option} is set", model[option])
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    notes = []
    if normalizer == "NFC":
        notes.append("llama.cpp does not normalize text to NFC; this tokenizer does")
    elif normalizer is not None:
        raise _unsupported("llama.cpp has no such normalizer for byte-level BPE", normalizer)
    regexes = splits(tokenizer)
    pre = STRUCTURES.get((regexes, bool(model.get("ignore_merges")))) if regexes is not None else None
    merges = [_merge(merge) for merge in model.get("merges", [])]
    if not merges:
        raise _unsupported("it has no merges", "an empty list")
    parts = {"model": "gpt2", "pre": pre, "merges": merges, "scores": []}
    return {**parts, "add_space_prefix": False, "notes": notes}


def _merge(merge: str | list[str]) -> str:
    """``left right``; a space inside a part is written as chr(288), as byte-level BPE spells it."""
    if isinstance(merge, str):
        return merge
    return " ".join(part.replace(" ", chr(288)) for part in merge)


def _sentencepiece(tokenizer: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """The same for SentencePiece BPE (byte fallback, spaces as U+2581).

    llama.cpp joins the neighbours whose union has the best score; tokenizer.json the ones with the lowest
    merge rank. They agree when a token's merges stand together and every way to split a token is listed
    (in runs of equal pieces llama.cpp then goes from the left, as SentencePiece itself does).
    """
    prefix = _space_prefix(tokenizer)
    for i, token in enumerate(tokens):
        if types[i] == NORMAL and len(token) == 6 and token.startswith("<0x"):
            types[i] = BYTE
        elif types[i] == USER_DEFINED:
            tokens[i] = token.replace(SPACE, " ")
    pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in tokenizer["model"].get("merges", [])]
    normal = [token for i, token in enumerate(tokens) if types[i] == NORMAL]
    ranks = _union_ranks(pairs, normal, tokenizer["model"]["vocab"])
    scores = [-float(ranks.get(token, len(pairs) + i)) for i, token in enumerate(tokens)]
    parts = {"model": "llama", "pre": None, "merges": [], "scores": scores, "notes": []}
    return {**parts, "add_space_prefix": prefix}


def _union_ranks(pairs: list[tuple[str, ...]], normal: list[str], vocab: Mapping[str, int]) -> dict[str, int]:
    """The rank of each merged token, where scores can say the same as these merges; refuses otherwise."""
    ranks: dict[str, int] = {}
    previous = ""
    for rank, pair in enumerate(pairs):
        union = "".join(pair)
        if union != previous and union in ranks:
            raise _unsupported("its merges have no equivalent in scores", f"{union!r} merged at two ranks")
        ranks.setdefault(union, rank)
        previous = union
    listed = set(pairs)
    for token in normal:
        ways = ((token[:i], token[i:]) for i in range(1, len(token)))
        missing = [way for way in ways if way[0] in vocab and way[1] in vocab and way not in listed]
        if missing:
            raise _unsupported("its merges have no equivalent in scores", f"{missing[0]} is no merge")
    return ranks


def _space_prefix(tokenizer: Mapping[str, Any]) -> bool:
    """Whether text gets a leading space; refuses normalizers and splits that llama.cpp does not have."""
    normalizer = tokenizer.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    kinds = [step.get("type") for step in steps]
    pre = tokenizer.get("pre_tokenizer") or {}
    if not pre and kinds in (["Prepend", "Replace"], ["Replace"]):
        return kinds == ["Prepend", "Replace"]
    if pre.get("type") == "Metaspace" and not kinds and not pre.get("split", True):
        return str(pre.get("prepend_scheme", "always")) != "never"
    raise _unsupported("llama.cpp has no equivalent", f"normalizers {kinds}, pre-tokenizer {pre.get('type')}")


def _tokens(tokenizer: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Token strings and types by id, holes and the rows above filled with ``[PAD{i}]``."""
    by_id = {int(i): str(token) for token, i in tokenizer["model"].get("vocab", {}).items()}
    types = dict.fromkeys(by_id, NORMAL)
    for added in tokenizer.get("added_tokens", []):
        if by_id.get(added["id"], added["content"]) != added["content"]:
            both = f"{by_id[added['id']]!r} and {added['content']!r}"
            raise CompressorError(f"tokenizer.json: two tokens have id {added['id']}", got=both)
        by_id[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
    unknown = tokenizer["model"].get("unk_token")
    count = max(by_id, default=-1) + 1
    if count > rows:
        raise CompressorError(
            "tokenizer.json: more tokens than the embedding has rows",
            got=f"{count} tokens, {rows} rows",
            hint="model.resize_token_embeddings(len(tokenizer)) in transformers, or the matching tokenizer",
        )
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(rows)]
    if len(set(tokens)) != rows:
        twice = sorted(token for token in set(tokens) if tokens.count(token) > 1)[:3]
        raise CompressorError("tokenizer.json: two ids have the same token string", got=twice)
    kinds = [types.get(i, UNUSED) for i in range(rows)]
    if unknown in tokens and kinds[tokens.index(unknown)] == NORMAL:
        kinds[tokens.index(unknown)] = UNKNOWN
    return tokens, kinds


def _special_ids(settings: Mapping[str, Any], config: Mapping[str, Any], tokens: list[str]) -> dict[str, int]:
    """Token id by role: the tokenizer's files first, then config.json; bos falls back to eos."""
    ids = {token: i for i, token in enumerate(tokens)}
    found: dict[str, int] = {}
    for role in SPECIAL:
        entry = settings.get(f"{role}_token")
        content = entry.get("content") if isinstance(entry, dict) else entry
        number = config.get(f"{role}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if content in ids:
            found[role] = ids[content]
        elif isinstance(number, int) and 0 <= number < len(tokens):
            found[role] = number
    if "eos" not in found:
        raise CompressorError(
            "the tokenizer has no end-of-text token: llama.cpp would take token 11 for it",
            hint="set eos_token in tokenizer_config.json",
        )
    found.setdefault("bos", found["eos"])
    return found


def _adds(
    tokenizer: Mapping[str, Any],
    settings: Mapping[str, Any],
    tokens: list[str],
    special: Mapping[str, int],
    role: str,
) -> bool:
    """Whether encoding a text adds the bos (or eos) token: the post-processor, else the settings."""
    processor = tokenizer.get("post_processor") or {}
    steps = processor.get("processors", [processor])
    templates = [step.get("single", []) for step in steps if step.get("type") == "TemplateProcessing"]
    if not templates:
        return bool(settings.get(f"add_{role}_token", False))
    end = 0 if role == "bos" else -1
    token = templates[0][end].get("SpecialToken", {}).get("id") if templates[0] else None
    if token is not None and token != tokens[special[role]]:
        raise _unsupported(f"it adds a token that is not {role}_token", token)
    return token is not None


def _chat_template(files: Files, settings: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """The chat template(s), from chat_template.jinja or tokenizer_config.json."""
    found = files.text("chat_template.jinja") or settings.get("chat_template")
    return found if isinstance(found, (str, list)) else None


def _unsupported(what: str, got: object) -> CompressorError:
    return CompressorError(
        f"tokenizer.json cannot be told to llama.cpp: {what}",
        got=got,
        hint="export to --format compressed-tensors, which keeps the tokenizer's files",
    )
