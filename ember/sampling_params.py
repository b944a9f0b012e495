"""How one request is sampled: one dataclass for jobs, rows and the Python API."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from ember.checks import at_least, boolean, real, text_list, token_ids, whole
from ember.errors import ConfigError
from ember.output_form import OUTPUT_FORMS, check_output_form

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it could only widen the gap to the best token."""

MOST_SAMPLES = 16_384
MOST_BEAMS = 256
"""Of one prompt."""
_OF_BEAMS = (
    *("n", "beam_width", "length_penalty", "early_stopping", "max_tokens", "min_tokens", "stop_token_ids"),
    *("ignore_eos", "seed", "include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens"),
)
"""What a beam search heeds."""


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """Sampling settings of one request.

    Attributes:
        temperature: 0 is greedy (so is anything under 1e-5); else logits are divided by it.
        top_p: keep the smallest set of tokens whose probabilities sum to `top_p`; 1.0 is off.
        top_k: keep the `top_k` best tokens; 0, or more than the vocabulary, is off.
        min_p: drop tokens less likely than `min_p` times the likeliest; 0.0 is off.
        presence_penalty: taken from the logit of every token that the output has already.
        frequency_penalty: taken as often as the output has the token.
        repetition_penalty: positive logits of tokens in prompt or output are divided by it, negative ones multiplied.
        logit_bias: token id -> number added to its logit, in [-100, 100].
        bad_words: texts that the output may not spell in their usual tokens, at its start or after a space.
        allowed_token_ids: the only tokens that may come; None allows all.
        max_tokens: most output tokens; None means to the end of `max_model_len`.
        logprobs: keep each output token's log-probability and that of the so many likeliest; -1: of all.
        prompt_logprobs: the same for the prompt's tokens; with `max_tokens=0` the prompt is scored only.
        truncate_prompt_tokens: keep the prompt's last so many tokens; -1: what fits beside `max_tokens`.
        min_tokens: no EOS, stop id or stop string ends the output before this many tokens.
        stop: a string or list of strings; the text is cut before the first that appears.
        stop_token_ids: token ids that end the output.
        include_stop_str_in_output: leave the stop string, or stop token, at the end of the text.
        skip_special_tokens: special tokens show nothing in the text.
        ignore_eos: EOS is a token like any other.
        json_schema, regex, choice, grammar: what the whole output must match, at most one of them: a JSON schema (an
            object or its text), a regular expression, one of some texts, a grammar in llguidance's form of Lark's.
        seed: the row's own seed; None derives one from the job's seed and the row's index.
        n: samples of a prompt, each with random numbers of its own, which do not depend on `n`.
        best_of: draw so many samples and keep the `n` with the highest sum of log-probabilities, best first.
        beam_width: search with so many beams and keep the `n` best hypotheses (see `ember.beam_search`).
        length_penalty, early_stopping: of that search.

    Raises:
        ConfigError: a value of the wrong type or out of range; names the key.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Any = None
    bad_words: Any = None
    allowed_token_ids: list[int] | None = None
    max_tokens: int | None = 128
    min_tokens: int = 0
    stop: Any = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    json_schema: Any = None
    regex: str | None = None
    choice: Any = None
    grammar: str | None = None
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: Any = False

    def __post_init__(self) -> None:
        self._check_logits()
        self._check_draw()
        self._check_ends()
        self.logprobs = _count("logprobs", self.logprobs)
        self.prompt_logprobs = _count("prompt_logprobs", self.prompt_logprobs)
        if self.truncate_prompt_tokens not in (None, -1):
            allowed = "must be a whole number >= 1, -1 (what fits), or null"
            self.truncate_prompt_tokens = whole("truncate_prompt_tokens", self.truncate_prompt_tokens, allowed, low=1)
        check_output_form(self)
        if self.seed is not None:
            self.seed = whole("seed", self.seed, "must be a whole number in 0 .. 2^63-1, or null")
        self._check_samples()

    def _check_logits(self) -> None:
        for key in ("presence_penalty", "frequency_penalty"):
            setattr(self, key, real(key, getattr(self, key), "must be in [-2, 2]", low=-2.0, high=2.0))
        self.repetition_penalty = real(
            "repetition_penalty", self.repetition_penalty, "must be in (0, 100] (1 is off)", high=100.0, open_low=True
        )
        self.logit_bias = _biases(self.logit_bias)
        self.bad_words = text_list("bad_words", self.bad_words, "must be a list of texts, none empty")
        if any(not word.strip() for word in self.bad_words):
            raise ConfigError("bad_words", self.bad_words, "must be texts that are not all space")
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ConfigError("allowed_token_ids", [], "must name a token at least, or be null")

    def _check_draw(self) -> None:
        self.temperature = real("temperature", self.temperature, "must be a number >= 0")
        self.top_p = real("top_p", self.top_p, "must be in (0, 1]", high=1.0, open_low=True)
        self.min_p = real("min_p", self.min_p, "must be in [0, 1]", high=1.0)
        self.top_k = whole("top_k", self.top_k, "must be a whole number >= 0 (0 is off)")

    def _check_ends(self) -> None:
        if self.max_tokens is not None:
            self.max_tokens = whole("max_tokens", self.max_tokens, "must be a whole number >= 0, or null")
        self.min_tokens = whole("min_tokens", self.min_tokens, "must be a whole number >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self.stop = text_list("stop", stop, "must be a non-empty string or a list of them")
        self.stop_token_ids = token_ids("stop_token_ids", self.stop_token_ids)
        for key in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"):
            boolean(key, getattr(self, key))

    def _check_samples(self) -> None:
        self.n = at_least("n", self.n, 1, high=MOST_SAMPLES)
        if self.best_of is not None:
            self.best_of = at_least("best_of", self.best_of, self.n, high=MOST_SAMPLES)
        self.length_penalty = real("length_penalty", self.length_penalty, "must be in [-8, 8]", low=-8.0, high=8.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ConfigError("early_stopping", self.early_stopping, "must be true, false or never")
        if self.beam_width is None:
            self._check_without_beams()
            return
        self.beam_width = at_least("beam_width", self.beam_width, self.n, high=MOST_BEAMS)
        plain = SamplingParams()
        for key in (f.name for f in fields(self) if f.name not in _OF_BEAMS):
            if getattr(self, key) != getattr(plain, key):
                raise ConfigError(key, getattr(self, key), "has no meaning with beam_width; remove one of the two")

    def _check_without_beams(self) -> None:
        if self.length_penalty != 1.0:
            raise ConfigError("length_penalty", self.length_penalty, "has a meaning with beam_width only; set that too")
        if self.early_stopping is not False:
            raise ConfigError("early_stopping", self.early_stopping, "has a meaning with beam_width only; set that too")

    @property
    def num_sequences(self) -> int:
        """Sequences that are computed for the `n` samples."""
        return self.beam_width or self.best_of or self.n

    @property
    def ranked(self) -> bool:
        """Whether the samples are the best of all that is computed, so that they only come together."""
        return self.beam_width is not None or self.best_of is not None

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken, with no random number drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalises(self) -> bool:
        """Whether tokens that were there before count."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed before a token is chosen (bad words and output forms apart)."""
        masks = self.logit_bias or self.min_tokens or self.allowed_token_ids is not None
        return bool(masks) or self.penalises

    def override(self, changes: dict[str, Any]) -> SamplingParams:
        """These settings with a row's own on top. Null sets nothing where it has no meaning, as in OpenAI's API.

        Raises:
            ConfigError: an unknown key or a value that is not allowed.
        """
        known = [f.name for f in fields(self)]
        for key, value in changes.items():
            if key not in known:
                raise ConfigError(key, value, f"no such sampling setting (there are: {', '.join(known)})")
        changes = {key: value for key, value in changes.items() if value is not None or key not in _NEVER_NULL}
        if any(changes.get(key) is not None for key in OUTPUT_FORMS):  # a row's own form replaces the job's
            changes = {**dict.fromkeys(OUTPUT_FORMS), **changes}
        return replace(self, **changes)


_NEVER_NULL = frozenset(f.name for f in fields(SamplingParams) if f.type in ("float", "int", "bool")) | {
    "early_stopping"
}
"""Settings for which null is no value."""


def _count(key: str, value: int | None) -> int | None:
    if value is None:
        return None
    return whole(key, value, "must be a whole number >= 0, -1 (the whole vocabulary), or null", low=-1)


def _biases(value: Any) -> dict[int, float]:
    """Token ids may be text, as in JSON; pairs are Arrow's maps."""
    allowed = "must be a mapping of token ids to numbers in [-100, 100]"
    pairs = {} if value is None else value
    if isinstance(pairs, (list, tuple)) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        pairs = dict(pairs)
    if not isinstance(pairs, dict):
        raise ConfigError("logit_bias", value, allowed)
    ids = [int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key for key in pairs]
    biases = [real("logit_bias", bias, allowed, low=-100.0, high=100.0) for bias in pairs.values()]
    return {whole("logit_bias", token, allowed): bias for token, bias in zip(ids, biases, strict=True)}
