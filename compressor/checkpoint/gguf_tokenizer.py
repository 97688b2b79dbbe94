"""Tokenizer files from a GGUF's metadata: tokenizer.json, tokenizer_config.json, chat template.

Built with the ``tokenizers`` library, so that text is split as llama.cpp splits it for the named
pre-tokenizer; importers that ignore ``tokenizer.ggml.pre`` get numbers and spaces wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.checkpoint.gguf_config import special_ids
from compressor.checkpoint.gguf_header import GgufHeader
from compressor.errors import CompressorError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of ``tokenizer.ggml.token_type`` that matter here."""

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGIT_SPLITTERS = ("smollm", "starcoder", "refact", "command-r")
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
GPT2_NAMES = ("gpt-2", "default")
SPM_SPACE = "▁"


@dataclass(frozen=True)
class TokenizerFields:
    """The ``tokenizer.*`` keys, checked.

    Attributes:
        model: ``gpt2`` (byte-level BPE) or ``llama`` (SentencePiece BPE).
        pre: Name of the pre-tokenizer, or None.
        tokens, types: One per id.
        merges: ``left right`` (gpt2).
        scores: One per id (llama).
        add_bos, add_eos, add_space_prefix: What encoding adds.
        special: Token id by role (``bos``, ``eos``, ``pad``, ``unk``).
        chat_template: A Jinja text (never executed here), or None.
    """

    model: str
    pre: str | None
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    special: dict[str, int]
    chat_template: str | None

    @classmethod
    def of(cls, header: GgufHeader, path: Path) -> TokenizerFields:
        """Read them.

        Raises:
            CompressorError: lists of different lengths, duplicate tokens, ids out of range.
        """
        fields = {k.removeprefix("tokenizer.ggml."): v for k, v in header.fields.items()}
        model, pre, template = (_text(fields.get(key)) for key in ("model", "pre", "tokenizer.chat_template"))
        found = cls(
            model=model or "",
            pre=pre,
            tokens=_strings(fields.get("tokens")),
            types=_numbers(fields.get("token_type")),
            merges=_strings(fields.get("merges")),
            scores=_numbers(fields.get("scores")),
            add_bos=bool(fields.get("add_bos_token", model == "llama" or pre in LLAMA3_NAMES)),
            add_eos=bool(fields.get("add_eos_token", False)),
            add_space_prefix=bool(fields.get("add_space_prefix", model == "llama")),
            special=_special(header),
            chat_template=template,
        )
        found._check(path)
        return found

    def _check(self, path: Path) -> None:
        count = len(self.tokens)
        for name, values in (("token_type", self.types), ("scores", self.scores)):
            if values and len(values) != count:
                got, expected = len(values), f"{count}, one per token"
                raise CompressorError(f"{path}: length of tokenizer.ggml.{name}", got=got, expected=expected)
        if len(set(self.tokens)) != count:
            raise CompressorError(f"{path}: tokenizer.ggml.tokens has duplicates", expected="unique tokens")
        for role, token in self.special.items():
            if token >= count > 0:
                raise CompressorError(f"{path}: {role} token id", got=token, expected=f"below {count}")

    def notes(self) -> list[str]:
        """What the user should know about the tokenizer."""
        if not self.tokens or self.model not in ("gpt2", "llama"):
            return [f"no tokenizer files: tokenizer model {self.model!r} is not supported"]
        known = (*DIGIT_SPLITTERS, *LLAMA3_NAMES, *GPT2_NAMES, "smaug-bpe")
        if self.model == "gpt2" and self.pre not in known:
            return [f"pre-tokenizer {self.pre!r} is unknown: tokenizer.json splits text as gpt-2 does"]
        return []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _strings(value: Any) -> list[str]:
    return value if isinstance(value, list) else []


def _numbers(value: Any) -> list[Any]:
    return list(value.tolist()) if isinstance(value, np.ndarray) else []


def _special(header: GgufHeader) -> dict[str, int]:
    """Token ids by role."""
    found = {key.removesuffix("_token_id"): value for key, value in special_ids(header).items()}
    unknown = header.fields.get("tokenizer.ggml.unknown_token_id")
    return {**found, "unk": unknown} if isinstance(unknown, int) else found


def tokenizer_files(fields: TokenizerFields, header: GgufHeader, context: int) -> dict[str, bytes]:
    """The tokenizer's files by name, as transformers and the ``tokenizers`` library read them.

    Args:
        fields: The checked keys.
        header: For generation_config.json.
        context: Longest input of the model.
    """
    files = {"generation_config.json": _json({"_from_model_config": True, **special_ids(header)})}
    if fields.chat_template is not None:
        files["chat_template.jinja"] = fields.chat_template.encode()
    if not fields.tokens or fields.model not in ("gpt2", "llama"):
        return files
    names = {f"{role}_token": fields.tokens[token] for role, token in sorted(fields.special.items())}
    settings = {
        "add_bos_token": fields.add_bos,
        "add_eos_token": fields.add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
    }
    tokenizer = _byte_level(fields) if fields.model == "gpt2" else _sentencepiece(fields)
    _add_special(tokenizer, fields)
    files["tokenizer.json"] = tokenizer.to_str(pretty=True).encode()
    files["tokenizer_config.json"] = _json(settings)
    files["special_tokens_map.json"] = _json(names)
    return files


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n").encode()


def _byte_level(fields: TokenizerFields) -> Tokenizer:
    """GPT-2's byte-level BPE with the splitting the pre-tokenizer's name stands for."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(fields.tokens)}
    merges = [_pair(merge) for merge in fields.merges]
    llama3 = fields.pre in LLAMA3_NAMES
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=llama3))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if fields.pre in DIGIT_SPLITTERS:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if llama3 or fields.pre == "smaug-bpe":
        split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    """A merge's halves; the space that separates them is the first one that is not leading."""
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _sentencepiece(fields: TokenizerFields) -> Tokenizer:
    """Llama 2's BPE: spaces as ``▁``, unknown characters as byte tokens, best score merges first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: index for index, token in enumerate(fields.tokens)}
    unknown = fields.special.get("unk", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(fields, vocab),
            unk_token=fields.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prepend: list[Any] = [normalizers.Prepend(SPM_SPACE)] if fields.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPM_SPACE)])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if fields.add_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPM_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(fields: TokenizerFields, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token out of two, best score first, then in the order of the parts' ids."""
    plain = [i for i in range(len(fields.tokens)) if not fields.types or fields.types[i] not in (2, 3, 6)]
    scores = fields.scores or [-float(i) for i in range(len(fields.tokens))]
    ranked = []
    for index in plain:
        token = fields.tokens[index]
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], left, right))
    ranked.sort()
    return [(fields.tokens[left], fields.tokens[right]) for _, left, right in ranked]


def _add_special(tokenizer: Tokenizer, fields: TokenizerFields) -> None:
    """Control and user-defined tokens; BOS and EOS around a text where the model wants them."""
    from tokenizers import AddedToken, processors

    for token, kind in zip(fields.tokens, fields.types, strict=False):
        if kind in (UNKNOWN, CONTROL):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    around = {"bos": fields.add_bos, "eos": fields.add_eos}
    added = {role: fields.special[role] for role, wanted in around.items() if wanted and role in fields.special}
    if not added:
        return
    names = {role: fields.tokens[token] for role, token in added.items()}
    first, last = ([names[r]] if r in names else [] for r in ("bos", "eos"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A:0", *last],
        pair=[*first, "$A:0", *last, *(f"{t}:1" for t in first), "$B:1", *(f"{t}:1" for t in last)],
        special_tokens=[(names[role], token) for role, token in added.items()],
    )
