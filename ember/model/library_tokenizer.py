"""Any tokenizer that a `tokenizer.json` describes, run by the `tokenizers` library (the extra `hf`).

Prompts come from anyone, so the library is told to take control tokens for plain text. Where one is wanted, a sentinel
stands for it in the text that the library sees: an added token of our own, unguessable, with the same rules for the
space around it. So the library cuts the text exactly as it would at the control token itself, and only there.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ember.errors import UserError
from ember.model.decoder import Leading, Spelling
from ember.model.json_file import one_line, show
from ember.model.tokenizer import Tokenizer, check_text, finder
from ember.model.tokenizer_settings import TokenizerSettings
from ember.model.vocabulary import byte_alphabet

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_GROWING = {"Prepend": 1, "Replace": 1, "NFC": 4}
"""Normalizers that keep at least this part of a text's bytes; others may shrink it to nothing."""
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation")
"""Pre-tokenizers that keep all of a text, unless told to remove what they cut at."""


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    Args:
        data: the content of a tokenizer.json.
        settings: the folder's other settings.
        source: what errors call the file.

    Raises:
        UserError: the library is missing or can't read it, or it does what ember can't follow. Names file and key.
    """

    def __init__(self, data: Mapping[str, Any], settings: TokenizerSettings, source: str) -> None:
        _check(data, source)
        self._run = _load(data, source)
        with _failing_as(f"{source}: the tokenizers library can't add its special tokens"):
            _add_missing(self._run, settings, source)
        added = self._run.get_added_tokens_decoder()
        if odd := next((token.content for token in added.values() if token.special and token.single_word), None):
            raise UserError(f"{source}: the special token {show(odd)} has single_word, which is not supported")
        self.special = {token.content: token_id for token_id, token in added.items() if token.special}
        self._find = finder(token.content for token in added.values())
        style = _style(data.get("decoder"), source)
        vocab = self._run.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        pieces = {token_id: style.piece(text) for text, token_id in vocab.items() if token_id not in added}
        self.spelling = Spelling(frozenset(style.byte_tokens(vocab)), style.leading)
        self._bytes: dict[int, bytes] = pieces | {
            i: b"" if token.special else token.content.encode() for i, token in added.items()
        }
        self._missing = _missing_bytes(data, vocab, style, source)
        self._bytes_per_token = _most_bytes(data, [*self._bytes.values(), *(t.encode() for t in self.special)], added)
        with _failing_as(f"{source}: the tokenizers library can't run it"):
            self._before, self._after = _surroundings(self._run, settings, source)
        self._sentinels = _add_sentinels(self._run, {i: t for i, t in added.items() if t.special})
        self._sentinel_ids = {self._run.token_to_id(text) for text in self._sentinels.values()}
        self._run.encode_special_tokens = True

    def encode(self, text: str, *, allow_special_tokens: bool = False) -> list[int]:
        """See Tokenizer; with the BOS (and EOS) that the folder says every text gets."""
        return [*self._before, *super().encode(text, allow_special_tokens=allow_special_tokens), *self._after]

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """See Tokenizer."""
        for part in parts:
            if isinstance(part, str):
                self._check(part)
        text = "".join(part if isinstance(part, str) else self._sentinels[part] for part in parts)
        wanted = iter([part for part in parts if isinstance(part, int)])
        with _failing_as("the text can't be tokenised"):
            ids = self._run.encode(text, add_special_tokens=False).ids
        return [next(wanted) if token_id in self._sentinel_ids else token_id for token_id in ids]

    def split_special(self, text: str) -> list[str | int]:
        """See Tokenizer."""
        if self._find is None:
            return [text]
        parts = self._find.split(text)
        return [self.special.get(part, part) if i % 2 else part for i, part in enumerate(parts) if part]

    def token_bytes(self, token_id: int) -> bytes:
        """See Tokenizer."""
        return self._bytes.get(token_id, b"")

    def min_tokens(self, text: str) -> int:
        """Its bytes over the most that a token can spell; 0 where a token can spell any number."""
        if self._bytes_per_token is None:
            return 0
        return -(-len(text.encode(errors="surrogatepass")) // self._bytes_per_token)

    def _check(self, text: str) -> None:
        check_text(text)
        if self._missing and (bad := self._missing.intersection(text.encode())):
            raise UserError(f"the text can't be tokenised: the vocabulary has no token for byte 0x{min(bad):02X}")


class _Style:
    """What a tokenizer.json's decoder makes of tokens."""

    def __init__(self, *, byte_level: bool, byte_fallback: bool = False, leading: Leading = Leading.KEEP) -> None:
        self.byte_level, self.byte_fallback, self.leading = byte_level, byte_fallback, leading
        self._alphabet = byte_alphabet() if byte_level else {}

    def piece(self, token: str) -> bytes:
        """The bytes of a token of the model's own vocabulary."""
        if self.byte_level:
            spelt = [self._alphabet.get(char) for char in token]
            return token.encode() if None in spelt else bytes(byte for byte in spelt if byte is not None)
        if self.byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        return token.replace(_SPACE, " ").encode()

    def byte_tokens(self, vocab: Mapping[str, int]) -> list[int]:
        """The ids of the byte-fallback tokens."""
        if not self.byte_fallback:
            return []
        return [token_id for token, token_id in vocab.items() if _BYTE_TOKEN.fullmatch(token)]


@contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """Whatever the library makes of a stranger's file or text is one line.

    A panic in its Rust is no Exception, and would end the job.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(f"{what}: {one_line(error)}") from None
        raise


def _load(data: Mapping[str, Any], source: str) -> Any:
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise UserError(f"{source}: needs the package tokenizers to read it; pip install 'ember-batch[hf]'") from None
    with _failing_as(f"{source}: the tokenizers library can't read it"):
        library = Library.from_str(json.dumps(data))
    library.no_truncation()
    library.no_padding()
    return library


def _check(data: Mapping[str, Any], source: str) -> None:
    model = data.get("model")
    if not isinstance(model, dict):
        raise UserError(f"{source}: model must be an object")
    if model.get("dropout"):
        raise UserError(f"{source}: model.dropout={show(model['dropout'])} makes ids random; set it to null")


def _add_missing(library: Any, settings: TokenizerSettings, source: str) -> None:
    """Take the added tokens that only the settings list, as transformers does."""
    from tokenizers import AddedToken

    known = library.get_added_tokens_decoder()
    for key, entry in sorted(settings.added.items()):
        text, special = entry.get("content"), bool(entry.get("special"))
        if not key.isdecimal() or not isinstance(text, str) or not text:
            raise UserError(f"{source}: the added token {show(key)} of tokenizer_config.json has no id or content")
        if int(key) in known:
            continue
        rules = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
        library.add_tokens([AddedToken(text, special=special, **rules)])
        if library.token_to_id(text) != int(key):
            raise UserError(f"{source}: {show(text)} is token {key} in tokenizer_config.json, but not here")
    marked = {token.content for token in known.values()}
    for text in dict.fromkeys([*settings.named.values(), *settings.extra]):
        if text not in marked and library.token_to_id(text) is not None:
            library.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _style(decoder: Any, source: str) -> _Style:
    """The decoder's steps, if they are ones whose result can be made a token at a time."""
    steps = decoder.get("decoders") if isinstance(decoder, dict) and decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") if isinstance(step, dict) else None for step in steps] if isinstance(steps, list) else []
    by_kind = dict(zip(kinds, steps or [], strict=False))
    if kinds == ["ByteLevel"]:
        return _Style(byte_level=True)
    fallback = "ByteFallback" in kinds
    if "Metaspace" in kinds and set(kinds) <= {"Metaspace", "ByteFallback", "Fuse"}:
        space = by_kind["Metaspace"]
        if space.get("replacement", _SPACE) == _SPACE:
            never = space.get("prepend_scheme", "always" if space.get("add_prefix_space", True) else "never") == "never"
            leading = Leading.KEEP if never else Leading.STRIP_FIRST_TOKEN
            return _Style(byte_level=False, byte_fallback=fallback, leading=leading)
    if "Replace" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replace, strip = by_kind["Replace"], by_kind.get("Strip", {"content": " ", "start": 0, "stop": 0})
        spaces = replace.get("pattern") == {"String": _SPACE} and replace.get("content") == " "
        strips = strip.get("content") == " " and strip.get("start") in (0, 1) and strip.get("stop") == 0
        if spaces and strips and kinds.count("Replace") == 1 and (not strip["start"] or "Fuse" in kinds):
            leading = Leading.STRIP_ONE if strip["start"] else Leading.KEEP
            return _Style(byte_level=False, byte_fallback=fallback, leading=leading)
    raise UserError(f"{source}: its decoder {show(kinds)} is not supported; byte-level and SentencePiece-like ones are")


def _missing_bytes(data: Mapping[str, Any], vocab: Mapping[str, int], style: _Style, source: str) -> frozenset[int]:
    """Bytes that a byte-level vocabulary has no token for: the library would drop them without a word."""
    if style.byte_level:
        return frozenset(byte for char, byte in byte_alphabet().items() if char not in vocab)
    model = data["model"]
    if model.get("unk_token") is None and model.get("unk_id") is None and len(style.byte_tokens(vocab)) < 256:
        raise UserError(f"{source}: has no token for characters that its vocabulary lacks, which would vanish")
    return frozenset()


def _most_bytes(data: Mapping[str, Any], pieces: list[bytes], added: Mapping[int, Any]) -> int | None:
    """The most bytes of a text that one token can spell; None where there is no such number."""
    steps = _steps(data.get("normalizer"), "normalizers")
    kinds = [str(step.get("type")) for step in steps]
    fuses = data["model"].get("fuse_unk") and not data["model"].get("byte_fallback")
    trims = any(token.lstrip or token.rstrip for token in added.values())
    replaces = any(step.get("content") != _SPACE for step in steps if step.get("type") == "Replace")
    if fuses or trims or replaces or not set(kinds) <= _GROWING.keys():
        return None
    cuts = _steps(data.get("pre_tokenizer"), "pretokenizers")
    if any(step.get("type") not in _KEEPING or step.get("behavior") == "Removed" for step in cuts):
        return None
    return max(map(len, (*pieces, b"."))) * max((_GROWING[kind] for kind in kinds), default=1)


def _steps(part: Any, name: str) -> list[Any]:
    """The steps of a part of a tokenizer.json: one, several or none. The library knows some without a type."""
    if part is None:
        return []
    return list(part[name]) if name in part else [part]


def _surroundings(library: Any, settings: TokenizerSettings, source: str) -> tuple[list[int], list[int]]:
    """The ids before and after every text: the folder's settings go before the post-processor of tokenizer.json."""
    if settings.add_bos is not None or settings.add_eos is not None:
        return _named(library, settings, "bos_token", settings.add_bos), _named(
            library, settings, "eos_token", settings.add_eos
        )
    bare = library.encode("a", add_special_tokens=False).ids
    whole = library.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    raise UserError(f"{source}: its post_processor changes the text's own tokens, which is not supported")


def _named(library: Any, settings: TokenizerSettings, name: str, wanted: bool | None) -> list[int]:
    token_id = library.token_to_id(settings.named[name]) if wanted and name in settings.named else None
    return [] if token_id is None else [token_id]


def _add_sentinels(library: Any, special: Mapping[int, Any]) -> dict[int, str]:
    """Control token id -> the text that stands for it."""
    from tokenizers import AddedToken

    name = secrets.token_hex(8)
    sentinels = {i: f"\ufdd0{name}{'l' * t.lstrip}{'r' * t.rstrip}\ufdd1" for i, t in special.items()}
    rules = {sentinels[i]: (bool(t.lstrip), bool(t.rstrip)) for i, t in special.items()}
    library.add_tokens(
        [AddedToken(text, lstrip=left, rstrip=right, normalized=False) for text, (left, right) in rules.items()]
    )
    return sentinels
