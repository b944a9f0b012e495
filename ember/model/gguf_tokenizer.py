"""A GGUF file's tokenizer, as the tokenizer.json and the settings that it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ember.errors import UserError
from ember.model.gguf_file import GgufFile
from ember.model.json_file import show
from ember.model.tokenizer_settings import TokenizerSettings

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_KEY = "tokenizer.ggml"
_NAMED: Mapping[str, str] = MappingProxyType(
    {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
)
_SPACE = "\u2581"
_BYTE_LEVEL: Mapping[str, Any] = MappingProxyType(
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
)
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(digits: str) -> dict[str, Any]:
    """Words, runs of digits and the rest, as Llama 3 and Qwen cut a text."""
    pattern = {"Regex": _WORDS + digits + _REST}
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},
            {**_BYTE_LEVEL, "use_regex": False},
        ],
    }


def _digits_apart() -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, dict(_BYTE_LEVEL)]}


_CUTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {"pre_tokenizer": dict(_BYTE_LEVEL)},
        "gpt-2": {"pre_tokenizer": dict(_BYTE_LEVEL)},
        "smollm": {"pre_tokenizer": _digits_apart()},
        "llama-bpe": {"pre_tokenizer": _split(r"\p{N}{1,3}"), "ignore_merges": True},
        "qwen2": {"pre_tokenizer": _split(r"\p{N}"), "normalizer": {"type": "NFC"}},
    }
)
"""How a text is cut before the merges, by the file's name for it."""


def gguf_tokenizer(file: GgufFile) -> dict[str, Any]:
    """The content of a tokenizer.json.

    Raises:
        UserError: the file has no tokenizer, a broken one, or one of a kind that is not supported.
    """
    kind = file.text(f"{_KEY}.model")
    tokens = file.items(f"{_KEY}.tokens", str)
    types = file.items(f"{_KEY}.token_type", int) or [1] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise UserError(f"{file.path}: it has {len(tokens)} tokens and {len(types)} types of them")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"{file.path}: {_KEY}.model={show(kind)} is not supported; must be gpt2 or llama")
    whole = _byte_level(file, tokens) if kind == "gpt2" else _sentence_piece(file, tokens)
    return {"version": "1.0", "added_tokens": _added(tokens, types), **whole}


def gguf_settings(file: GgufFile) -> TokenizerSettings:
    """Names of special tokens, automatic BOS and EOS, the chat template.

    Raises:
        UserError: a value is of another type than it should be.
    """
    tokens = file.items(f"{_KEY}.tokens", str)
    ids = {name: file.metadata.get(f"{_KEY}.{key}_token_id") for key, name in _NAMED.items()}
    add = {key: file.metadata.get(f"{_KEY}.add_{key}_token") for key in ("bos", "eos")}
    if not all(flag is None or isinstance(flag, bool) for flag in add.values()):
        raise UserError(f"{file.path}: {_KEY}.add_bos_token and add_eos_token must be true or false")
    is_pieces = file.metadata.get(f"{_KEY}.model") == "llama"
    return TokenizerSettings(
        named={name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)},
        add_bos=is_pieces if add["bos"] is None else add["bos"],
        add_eos=False if add["eos"] is None else add["eos"],
        chat_template=file.text("tokenizer.chat_template"),
    )


def _added(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Control tokens, and those that text always turns into where it spells them."""
    rules = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": token, "special": kind != _USER_DEFINED, **rules}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _byte_level(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """GPT-2's byte-level BPE, with one of several ways to cut a text first."""
    cut = file.text(f"{_KEY}.pre") or "default"
    if cut not in _CUTS:
        raise UserError(f"{file.path}: {_KEY}.pre={show(cut)} is not supported; must be one of {', '.join(_CUTS)}")
    merges = [merge.split(" ") for merge in file.items(f"{_KEY}.merges", str)]
    return {
        "normalizer": _CUTS[cut].get("normalizer"),
        "pre_tokenizer": _CUTS[cut]["pre_tokenizer"],
        "post_processor": None,
        "decoder": dict(_BYTE_LEVEL),
        "model": _model(tokens, merges, ignore_merges=_CUTS[cut].get("ignore_merges", False)),
    }


def _sentence_piece(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """SentencePiece's BPE with byte fallback; the merges follow from the pieces' scores, as transformers has it."""
    scores = file.items(f"{_KEY}.scores", float)
    if len(scores) != len(tokens):
        raise UserError(f"{file.path}: it has {len(tokens)} tokens and {len(scores)} scores of them")
    prefix = file.metadata.get(f"{_KEY}.add_space_prefix", True)
    first: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip: list[dict[str, Any]] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = file.metadata.get(f"{_KEY}.unknown_token_id", 0)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            **_model(tokens, _merges(tokens, scores)),
            "unk_token": tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Every way to put a piece together from two others, best piece first."""
    known = set(tokens)
    ways: list[tuple[tuple[float, int, int], list[str]]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            if token[:cut] in known and token[cut:] in known:
                ways.append(((-score, -cut, cut - len(token)), [token[:cut], token[cut:]]))
    return [parts for _, parts in sorted(ways, key=lambda way: way[0])]


def _model(tokens: list[str], merges: list[list[str]], *, ignore_merges: bool = False) -> dict[str, Any]:
    return {
        "type": "BPE",
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges,
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
    }
