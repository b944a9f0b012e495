"""Logits to token ids, vectorised over the batch; a row's token depends on that row alone.

First what changes logits (`ember.sampling.adjust`); then the best token, or temperature, top-k, min-p, and top-p over
what is left, as in vLLM's sampler. The kept probabilities are cut at the row's uniform number in order of token id
(inverse transform sampling).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from ember.core.random_stream import uniform
from ember.core.sequence import Sequence
from ember.errors import RequestError
from ember.sampling.adjust import adjust
from ember.sampling.logprobs import token_logprobs
from ember.sampling.token_logprobs import TokenLogprobs
from ember.transfer import upload

TOP_P_CANDIDATES = 256
"""Likeliest tokens that are sorted first to find where top-p cuts; the rest only where they don't reach it."""

CPU_TILE = 8
"""Rows drawn at a time on the CPU: what is made on the way stays in its caches."""

MAX_TEMPERATURE = 1e30
"""Anything above is as good as uniform, and still a float32."""


@dataclass(slots=True)
class SamplerOutput:
    """A token or an error a row, and the log-probabilities of those rows, by number, that ask for them."""

    tokens: list[int | RequestError]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """Draws the token that follows each sequence."""

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, sequences: list[Sequence], meanwhile: Callable[[], object] | None = None
    ) -> SamplerOutput:
        """From logits [R, vocab_size]; an error where a row's logits leave nothing to draw.

        `meanwhile` is called when all is launched that the tokens are waited for.
        """
        if not sequences:
            return SamplerOutput([])
        if logits.device.type == "mps":  # no float64 there
            logits = logits.cpu()
        adjusting = [i for i, s in enumerate(sequences) if s.adjusts_logits]
        asking = [i for i, s in enumerate(sequences) if s.num_logprobs is not None]
        adjusted, failed = adjust(logits, sequences, adjusting) if adjusting else (logits, {})
        tokens = _choose(adjusted, sequences, meanwhile)
        _blame(tokens, logits, sequences)
        for i, error in failed.items():
            tokens[i] = error
        return SamplerOutput(tokens, _logprobs(logits, asking, tokens, sequences) if asking else {})


def _choose(
    logits: torch.Tensor, sequences: list[Sequence], meanwhile: Callable[[], object] | None
) -> list[int | RequestError]:
    """All on the logits' device, which nothing waits for but the chosen tokens at the end."""
    tokens = _argmax(logits)
    best = logits.gather(1, tokens[:, None])[:, 0]
    drawing = [i for i, s in enumerate(sequences) if not s.params.greedy]
    tile = CPU_TILE if logits.device.type == "cpu" else len(sequences)
    for begin in range(0, len(drawing), tile):
        rows = drawing[begin : begin + tile]
        at = upload(rows, torch.long, logits.device)
        tokens[at] = _draw(logits[at], [sequences[i] for i in rows])
    chosen = torch.stack([tokens.double(), best.double()])
    if meanwhile is not None:
        meanwhile()
    found = zip(*_read(chosen), sequences, strict=True)
    return [int(token) if math.isfinite(value) else _nothing_to_draw(value, s) for token, value, s in found]


def _read(numbers: torch.Tensor) -> list[list[float]]:
    """Where a step waits for its device; elsewhere only if log-probabilities or beams are asked for."""
    rows: list[list[float]] = numbers.tolist()
    return rows


def _nothing_to_draw(best: float, sequence: Sequence) -> RequestError:
    if best == -math.inf and sequence.adjusts_logits:
        return RequestError("no_token_left", "the sampling settings together leave no token that may come next")
    return RequestError("bad_logits", "the network's logits are not finite numbers")


def _blame(tokens: list[int | RequestError], raw: torch.Tensor, sequences: list[Sequence]) -> None:
    """Where the network's own logits [R, vocab_size] were finite, it was the repetition penalty that left none."""
    for i, token in enumerate(tokens):
        if isinstance(token, RequestError) and token.kind == "bad_logits" and bool(raw[i].isfinite().all()):
            penalty = sequences[i].params.repetition_penalty
            what = f"repetition_penalty={penalty}: makes logits that are no float32; use one nearer to 1"
            tokens[i] = RequestError("bad_sampling", what, key="repetition_penalty")


def _logprobs(
    logits: torch.Tensor, asking: list[int], tokens: list[int | RequestError], sequences: list[Sequence]
) -> dict[int, TokenLogprobs]:
    """Of the rows that ask those that got a token."""
    drawn = [(i, token) for i in asking if not isinstance(token := tokens[i], RequestError)]
    rows, chosen = [i for i, _ in drawn], [token for _, token in drawn]
    counts = [count for i in rows if (count := sequences[i].num_logprobs) is not None]
    return dict(zip(rows, token_logprobs(logits[rows], chosen, counts), strict=True)) if rows else {}


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The first of each row's largest values, or of its NaNs; [R]."""
    if logits.device.type == "cpu":  # PyTorch's own takes four times as long there
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _draw(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """A token a row, [R]; any where a row's numbers are not finite."""
    device, params = logits.device, [s.params for s in sequences]
    temperature = upload([min(p.temperature, MAX_TEMPERATURE) for p in params], torch.float32, device)
    scores = (logits - logits.max(dim=-1, keepdim=True).values) / temperature[:, None]
    _keep_top_k(scores, [p.top_k for p in params])
    weights = scores.softmax(dim=-1)  # row by row: exp over the whole matrix would depend on its height
    _keep_min_p(weights, [p.min_p for p in params])
    _keep_top_p(weights, [p.top_p for p in params])
    uniforms = [uniform(s.seed, s.sample_index, s.num_output_tokens) for s in sequences]
    return _invert(weights, upload(uniforms, torch.float64, device))


def _keep_top_k(scores: torch.Tensor, top_k: list[int]) -> None:
    """Set all but the k best scores of a row to -inf, in place; ties with the k-th stay."""
    vocab_size = scores.shape[-1]
    rows = [i for i, k in enumerate(top_k) if 0 < k < vocab_size]
    if not rows:
        return
    at, last = upload([rows, [top_k[i] - 1 for i in rows]], torch.long, scores.device)
    chosen = scores[at]
    floor = chosen.topk(max(top_k[i] for i in rows), dim=-1).values.gather(1, last[:, None])
    scores[at] = chosen.masked_fill(chosen < floor, -math.inf)


def _keep_top_p(weights: torch.Tensor, top_p: list[float]) -> None:
    """Set the weights beyond the smallest set that reaches `top_p` of a row's sum to 0, in place."""
    rows = [i for i, p in enumerate(top_p) if p < 1.0]
    if not rows:
        return
    at = upload(rows, torch.long, weights.device)
    chosen = weights[at]
    share = upload([top_p[i] for i in rows], torch.float64, weights.device)
    goal = share * chosen.cumsum(dim=-1, dtype=torch.float64)[:, -1]  # in order, unlike sum()
    weights[at] = chosen.masked_fill(chosen < _top_p_floors(chosen, goal)[:, None], 0.0)


def _top_p_floors(weights: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """The smallest weight of each row [n, V] that is still needed to reach `goal` [n]."""
    if weights.device.type != "cpu":  # asking whether the likeliest are enough would be to wait for the device
        return _top_p_floor(_descending(weights), goal)[0]
    best = weights.topk(min(TOP_P_CANDIDATES, weights.shape[-1]), dim=-1).values
    floor, reached = _top_p_floor(best, goal)
    if not bool(reached.all()):
        rest = (~reached).nonzero()[:, 0]
        floor[rest] = _top_p_floor(_descending(weights[rest]), goal[rest])[0]
    return floor


def _descending(weights: torch.Tensor) -> torch.Tensor:
    """Each row from its largest value to its smallest."""
    if weights.device.type == "cpu":  # PyTorch's own takes several times as long there: it moves indices too
        return torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)
    return weights.sort(dim=-1, descending=True).values


def _top_p_floor(descending: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest weight [n] that is still needed to reach `goal` [n], and whether these weights reach it."""
    cumulative = descending.cumsum(dim=-1, dtype=torch.float64)
    index = torch.searchsorted(cumulative, goal[:, None])
    floor = descending.gather(1, index.clamp(max=descending.shape[-1] - 1))[:, 0]
    return floor, index[:, 0] < descending.shape[-1]


def _keep_min_p(weights: torch.Tensor, min_p: list[float]) -> None:
    if any(min_p):
        floor = weights.max(dim=-1).values * upload(min_p, torch.float32, weights.device)
        weights.masked_fill_(weights < floor[:, None], 0.0)


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token id at which a row's cumulative weight passes its uniform share of the sum."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    share = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, share[:, None], right=True)[:, 0]
