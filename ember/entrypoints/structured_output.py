"""Structured output: a JSON schema, regular expression, choice or grammar as a mask over the next tokens (llguidance).

The mask is computed on the bytes of tokens, so it needs no particular tokenizer. EOS is allowed when the output is
complete, and nothing else when it can't go on. JSON has no space but one after each comma and colon, so that a model
can't write spaces for ever; a schema that brings llguidance's `x-guidance` chooses otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ember.errors import ConfigError, RequestError
from ember.model.tokenizer import Tokenizer
from ember.output_form import output_form
from ember.sampling_params import SamplingParams

if TYPE_CHECKING:
    import llguidance

_SPACES: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class StructuredOutput:
    """Compiles the forms of outputs for one model's vocabulary. Needs `llguidance` only when there is one.

    Args:
        vocab_size: tokens that the network has, padding too.
        eos_token_ids: all tokens that may end an output of the model.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._all_eos = tokenizer, vocab_size, sorted(eos_token_ids)

    def matcher(self, params: SamplingParams, eos_token_ids: Collection[int]) -> OutputMatcher | None:
        """What keeps an output to the form of these parameters; None if they have none.

        Args:
            eos_token_ids: the tokens that end this output.

        Raises:
            ConfigError: the form is no valid one, nothing can match it, or llguidance is not installed.
        """
        form = output_form(params)
        if form is None:
            return None
        key, value = form
        if not eos_token_ids:
            raise ConfigError(key, _shown(value), "the model has no EOS token, which must end such an output")
        matcher = self._compiled(key, value)
        allowed = OutputMatcher(matcher, self._vocab_size, self._all_eos, sorted(eos_token_ids))
        if not allowed.possible():
            raise ConfigError(key, _shown(value), "no output can match it")
        return allowed

    def _compiled(self, key: str, value: Any) -> llguidance.LLMatcher:
        try:
            vocabulary = self._vocabulary
        except ImportError:
            remedy = "needs llguidance: pip install 'ember-batch[structured]'"
            raise ConfigError(key, _shown(value), remedy) from None
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(vocabulary, _grammar(key, value), log_level=0)
        except (ValueError, RecursionError) as error:  # numbers beyond a float64, lone surrogates, deep nesting
            raise ConfigError(key, _shown(value), _one_line(str(error))) from None
        if matcher.is_error():
            raise ConfigError(key, _shown(value), _one_line(matcher.get_error()))
        return matcher

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        spelling = _Spelling(self._tokenizer, self._vocab_size, self._all_eos[0])
        return LLTokenizer(TokenizerWrapper(spelling), n_vocab=self._vocab_size, eos_token=self._all_eos[0])


class OutputMatcher:
    """Which tokens may follow an output (a `TokenConstraint`). Keeps its place, and finds it again in any output."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, all_eos: list[int], eos: list[int]) -> None:
        self._matcher, self._all_eos, self._eos = matcher, all_eos, eos
        self._vocab_size = vocab_size
        self._bits = np.empty((1, -(-vocab_size // 32)), np.int32)
        self._taken: list[int] = []

    def possible(self) -> bool:
        """Whether there is an output that matches."""
        allowed = self._mask()
        return bool(allowed.any()) and (not self._matcher.is_stopped() or self._matcher.is_accepting())

    def allowed(self, output_token_ids: list[int]) -> NDArray[np.bool_]:
        """See TokenConstraint."""
        if output_token_ids[: len(self._taken)] != self._taken:
            self._matcher.reset()
            self._taken = []
        taken = self._matcher.consume_tokens(output_token_ids[len(self._taken) :])
        self._taken = output_token_ids
        allowed = self._mask()
        if not taken or self._matcher.is_error():
            raise RequestError("structured_output", _one_line(self._matcher.get_error()))
        return allowed

    def _mask(self) -> NDArray[np.bool_]:
        """With EOS of this output's own kind."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=self._vocab_size).view(np.bool_)
        complete = bool(allowed[self._all_eos[0]])
        allowed[self._all_eos] = False
        allowed[self._eos] = complete
        return allowed


class _Spelling:
    """The bytes of a vocabulary, as llguidance asks for them."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._encode: Callable[[str], list[int]] = tokenizer.encode
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [token_id for token_id, piece in enumerate(self.tokens) if not piece]
        self._ids = {piece: token_id for token_id, piece in enumerate(self.tokens) if piece}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text within an output: the tokenizer's, unless they spell something else (a space before)."""
        data = text.encode()
        ids = self._encode(text)
        return ids if b"".join(self.tokens[i] for i in ids) == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest tokens one after another; bytes without a token are left out."""
        ids, start = [], 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            ids += [] if end is None else [self._ids[data[start:end]]]
            start = start + 1 if end is None else end
        return ids


def _grammar(key: str, value: Any) -> str:
    from llguidance import LLMatcher

    if key == "json_schema":
        return LLMatcher.grammar_from_json_schema(json.dumps(value), defaults=_SPACES)
    if key == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, value)))
    return LLMatcher.grammar_from_regex(value) if key == "regex" else LLMatcher.grammar_from_lark(value)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:60]}..."


def _one_line(error: str) -> str:
    """What llguidance says, without its state."""
    return " ".join(error.partition("<state>")[0].split())[:300]
