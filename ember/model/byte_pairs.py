"""GPT-2's byte-level BPE, run by tiktoken on a model folder's own vocabulary.

No network: tiktoken is handed the vocabulary, never a name. Ids are Hugging Face's, also where a vocabulary's ids do
not follow its merges (tiktoken merges by rank, so it works on ranks and the ids are translated). A prompt comes from
anyone: no text may end the process or take unbounded time (tiktoken before 0.13 is quadratic in a word's length).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import tiktoken

from ember.errors import UserError
from ember.model.decoder import Spelling
from ember.model.tokenizer import Tokenizer, check_text, finder
from ember.model.vocabulary import Vocabulary

# GPT-2's pattern, `\s+(?!\S)|\s+` at its end, in the equivalent form that tiktoken uses because it is faster.
_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # \s as tiktoken's regex engine has it
LONG_RUN = 100_000
_LONG_RUN_OF_SPACE = re.compile(rf"(?<![{_SPACE}])[{_SPACE}]{{{LONG_RUN},}}")


class BytePairTokenizer(Tokenizer):
    """A tokenizer of GPT-2's kind. Added tokens are found in every text, control tokens only where they are allowed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.special, self.spelling = vocabulary.special, Spelling()
        named = {**vocabulary.special, **vocabulary.added}
        self._named_ids: Mapping[str, int] = named
        self._bytes = dict(vocabulary.pieces)
        for token_id in vocabulary.special.values():
            self._bytes.pop(token_id, None)
        self._bytes |= {token_id: text.encode() for text, token_id in vocabulary.added.items()}
        self.vocab_size = max((*vocabulary.pieces, *named.values()), default=-1) + 1
        self._longest = max(map(len, (*vocabulary.pieces.values(), *(text.encode() for text in named), b".")))
        self._find_added = finder(vocabulary.added)
        self._find_named = finder(named)
        ranks, self._ids = _ranks(vocabulary.pieces)
        self._unknown = _add_missing_bytes(ranks, self.vocab_size)
        self._bpe = tiktoken.Encoding("ember", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """See Tokenizer."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                continue
            check_text(part)
            for piece in self._split(part, self._find_added):
                ids += [piece] if isinstance(piece, int) else self._encode_plain(piece)
        return ids

    def split_special(self, text: str) -> list[str | int]:
        """See Tokenizer."""
        return self._split(text, self._find_named)

    def token_bytes(self, token_id: int) -> bytes:
        """See Tokenizer."""
        return self._bytes.get(token_id, b"")

    def min_tokens(self, text: str) -> int:
        """Its bytes over the longest token's."""
        return -(-len(text.encode(errors="surrogatepass")) // self._longest)

    def _split(self, text: str, find: re.Pattern[str] | None) -> list[str | int]:
        if find is None:
            return [text]
        return [self._named_ids[part] if i % 2 else part for i, part in enumerate(find.split(text))]

    def _encode_plain(self, text: str) -> list[int]:
        """Token ids of a text with no special or added tokens in it."""
        ranks = [rank for part in _parts(text) for rank in self._encode_part(part)]
        if self._unknown and not self._unknown.keys().isdisjoint(ranks):
            byte = next(self._unknown[rank] for rank in ranks if rank in self._unknown)
            raise UserError(f"the text can't be tokenised: the vocabulary has no token for byte 0x{byte:02X}")
        return ranks if self._ids is None else [self._ids[rank] for rank in ranks]

    def _encode_part(self, text: str) -> list[int]:
        try:
            return self._bpe.encode_ordinary(text)
        except BaseException as error:  # a panic in tiktoken's Rust is no Exception, and would end the job
            if type(error).__name__ != "PanicException":
                raise
            raise UserError("the text can't be tokenised: tiktoken gave up on it") from None


def _parts(text: str) -> list[str]:
    """The text cut so that no part makes tiktoken overflow its stack, with the same tokens as the whole.

    `\\s+(?!\\S)` keeps a stack entry for each character of a run of spaces that a word follows, and panics at 10^6. The
    pattern ends a token before the run's last character; cut there, the run is taken by `\\s++$`, which keeps none.
    """
    if len(text) < LONG_RUN:
        return [text]
    ends = [run.end() - 1 for run in _LONG_RUN_OF_SPACE.finditer(text) if run.end() < len(text)]
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def _ranks(pieces: Mapping[int, bytes]) -> tuple[dict[bytes, int], list[int] | None]:
    """Bytes -> rank, increasing with the merges, and rank -> id (None: they are the same)."""
    ids = list(pieces)
    merged = [token_id for token_id, piece in pieces.items() if len(piece) > 1]
    if merged == sorted(merged):
        return {piece: token_id for token_id, piece in pieces.items()}, None
    return {piece: rank for rank, piece in enumerate(pieces.values())}, ids


def _add_missing_bytes(ranks: dict[bytes, int], first: int) -> dict[int, int]:
    """tiktoken panics at a byte without a rank: give each such byte one, from `first` on. Returns rank -> byte."""
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    unknown = {first + i: byte for i, byte in enumerate(missing)}
    ranks.update({bytes([byte]): rank for rank, byte in unknown.items()})
    return unknown
