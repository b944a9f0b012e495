"""Shared by the tests of the engine: fake runners and tokenizers, small sequences, and ways to drive the parts."""

from __future__ import annotations

import json
import random
import shutil
from array import array
from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from ember.attention.base import make_backend
from ember.cache.block_manager import BlockManager
from ember.cache.kv_pool import KVPool, KVShape
from ember.cache.prefix_cache import PrefixCache, strong_digest
from ember.core.batch import ScheduledSequence, SchedulerOutput
from ember.core.engine import Engine
from ember.core.model_runner import ModelRunner
from ember.core.sampler import Sampler
from ember.core.scheduler import Scheduler
from ember.core.sequence import Sequence
from ember.model.decoder import Spelling
from ember.model.network import make_network, network_config
from ember.model.presets import TINY
from ember.sampling_params import SamplingParams

VOCAB = 101
EOS = 100
POLICIES = ("prefill_first", "mixed", "static")
CPU = torch.device("cpu")

torch.set_num_threads(1)  # on tensors this small threads only wait for each other; on shared cores 5 times as long


def make_sequence(request_id, prompt_len=4, max_tokens=4, *, shared=0, stop_ids=(), **params):
    """A request with a prompt that no other id has, but for the first `shared` tokens, which all have.

    `stop_ids` are those besides its stop_token_ids.
    """
    chosen = SamplingParams(max_tokens=max_tokens, **params)
    prompt = [i % EOS if i < shared else (7 * request_id + 3 * i + 1) % EOS for i in range(prompt_len)]
    stops = frozenset(stop_ids) | frozenset(chosen.stop_token_ids)
    return Sequence(request_id, prompt, chosen, chosen.seed or request_id, max_tokens, stop_ids=stops)


def next_token(context):
    """What the fake network continues a context with: any changed, lost or swapped token changes it."""
    return (sum((i + 1) * (token + 1) for i, token in enumerate(context)) + len(context)) % EOS


def continuation(prompt, count):
    """What the fake network makes of a prompt: the tokens that any engine, however it batches, must give."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def looping_token(context):
    """As `next_token`, but text that mostly repeats itself: often the token of three places before comes again."""
    wanders = len(context) < 4 or next_token(context) % 4 == 0
    return next_token(context) if wanders else context[-3]


class FakeRunner:
    """A network that reads its context out of the slots it wrote, as attention does, so a block mix-up shows.

    The best token is `best` of the context; the others fall off from there on, cyclically.
    """

    def __init__(self, block_size, best=next_token):
        self.block_size = block_size
        self.best = best
        self.slots = {}
        self.steps = []

    def execute(self, scheduled: list[ScheduledSequence]) -> torch.Tensor:
        self.steps.append([(s.sequence.request_id, s.start, s.num_new_tokens) for s in scheduled])
        for s in scheduled:
            for source, destination in s.copies:
                for offset in range(self.block_size):
                    self.slots[destination, offset] = self.slots.get((source, offset))
        for s in scheduled:
            tokens = s.sequence.token_ids + s.proposed
            for position in range(s.start, s.start + s.num_new_tokens):
                self.slots[self._slot(s, position)] = tokens[position]
        ends = [(s, s.start + s.num_new_tokens) for s in scheduled]
        rows = [self._logits(s, length) for s, end in ends for length in range(end - s.num_logits + 1, end + 1)]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _slot(self, s, position):
        return s.block_table[position // self.block_size], position % self.block_size

    def _logits(self, s, length):
        context = [self.slots[self._slot(s, p)] for p in range(length)]
        return -((torch.arange(VOCAB) - self.best(context)) % VOCAB).float()


def make_engine(
    policy="prefill_first",
    *,
    num_blocks=64,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    runner=None,
    proposer=None,
    prefix_cache=True,
    digest=strong_digest,
    plans_ahead=False,
):
    """An engine over the fake runner; `digest` is the prefix cache's."""
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size, PrefixCache(block_size, digest=digest) if prefix_cache else None),
        policy=policy,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        proposer=proposer,
    )
    return Engine(scheduler, runner or FakeRunner(block_size), Sampler(), plans_ahead=plans_ahead)


def run_engine(engine, on_token=None, max_steps=10_000):
    """Step until nothing is left; every step's output."""
    outs = []
    while engine.num_unfinished:
        assert len(outs) < max_steps, "the engine does not come to an end"
        outs.append(engine.step(on_token))
        engine.scheduler.blocks.check_integrity()
    return outs


def advance(plan: SchedulerOutput):
    """Do to the sequences what an engine does after a step, without one; returns those that end."""
    ended = []
    for s in plan.scheduled:
        sequence = s.sequence
        sequence.num_computed_tokens = s.start + s.num_new_tokens
        sequence.max_computed_tokens = max(sequence.max_computed_tokens, sequence.num_computed_tokens)
        if s.samples:
            sequence.token_ids.append(1)
            if sequence.num_output_tokens == sequence.max_tokens:
                ended.append(sequence)
    return ended


class FakeTokenizer:
    """Token ids that stand for given bytes; id -> the letter `a` + id where nothing is given."""

    spelling = Spelling()

    def __init__(self, pieces=None):
        self.pieces = pieces or {}

    def token_bytes(self, token_id):
        return self.pieces.get(token_id, b"%c" % (97 + token_id % 26))


class RecordingRunner:
    """Passes everything on to a real runner, and keeps every row of logits by request and position."""

    def __init__(self, runner):
        self.runner = runner
        self.logits = {}

    def execute(self, scheduled):
        logits = self.runner.execute(scheduled)
        for key, row in zip(logit_positions(scheduled), logits, strict=True):
            self.logits[key] = row.clone()
        return logits


def logit_positions(scheduled):
    """(request, position of the token) of each row of a step's logits."""
    ends = [(s, s.start + s.num_new_tokens) for s in scheduled]
    return [(s.sequence.request_id, p) for s, end in ends for p in range(end - s.num_logits, end)]


def ember_logits(
    config, weights, token_ids: Seq[int], chunks: Seq[int], *, block_size=4, attention="reference", dtype=torch.float32
):
    """Logits [len(chunks), V] of ember's network at the end of each chunk; the K/V lies in shuffled blocks."""
    shape = KVShape(
        n_layer=config.n_layer,
        n_kv_head=config.n_kv_head,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    num_blocks = -(-len(token_ids) // block_size) + 2
    table = array("i", torch.randperm(num_blocks, generator=torch.Generator().manual_seed(5)).tolist())
    runner = ModelRunner(
        make_network(config, dict(weights)), KVPool(shape, num_blocks, CPU), make_backend(attention, shape.dtype), CPU
    )
    sequence = Sequence(0, list(token_ids), SamplingParams(temperature=1.0), 0, 1)  # greedy rows need no other logits
    rows, start = [], 0
    for count in chunks:
        rows.append(runner.execute([ScheduledSequence(sequence, start, count, table, True, 1)]))
        start += count
    assert start == len(token_ids)
    return torch.cat(rows)


@cache
def golden():
    """The recorded continuations of the embedded model, made by another implementation."""
    return json.loads((Path(__file__).parent / "golden" / "golden-tiny.json").read_text())


def prompts_of_many_lengths(vocab_size: int = 4095) -> list[list[int]]:
    """Token ids of lengths at and around the borders of blocks and tiles: 1, 16, 17, 63 to 65, 129, 300."""
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in (1, 2, 15, 16, 17, 63, 64, 65, 129, 300)]


def random_llama(folder: Path) -> Path:
    """A folder with a small random Qwen3 (four query heads share a K/V head, one layer has a window) and tiny's BPE."""
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 8}
    windows = {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1, "attention_bias": True}
    config = {"model_type": "qwen3", "vocab_size": 4096, "max_position_embeddings": 512, "tie_word_embeddings": True}
    config |= {**sizes, **windows, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 4095}
    (folder / "config.json").write_text(json.dumps(config))
    rng = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=rng) * (0.25 if len(shape) > 1 else 0.1) + ("norm" in name)
        for name, shape in network_config(folder).weight_layout.shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return folder
