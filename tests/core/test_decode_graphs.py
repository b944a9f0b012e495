"""Steps that only decode, from captured graphs: here from works that are done again on the very same tensors."""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ember import LLM, SamplingParams
from ember.config import EngineConfig
from ember.core import decode_graphs
from ember.core.batch import ScheduledSequence
from ember.core.decode_graphs import CudaCapture, DecodeGraphs, resolve_cuda_graphs
from ember.core.model_runner import ModelRunner
from ember.entrypoints.plan import EnginePlan
from ember.errors import ConfigError
from tests.fakes import RecordingRunner, make_sequence, random_llama

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCK = 4
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install '.[triton]'")


class Rerun:
    """Does a work again, on the tensors that it was captured with, into one and the same result."""

    def __init__(self):
        self.num_captured = self.num_replayed = 0

    def __call__(self, work):
        self.num_captured += 1
        work()
        out = work().clone()

        def replay():
            self.num_replayed += 1
            return out.copy_(work())

        return replay


class Pool:
    """A pool and a network in one: it adds up what each sequence's slots hold, and writes down where it was told to."""

    shape = SimpleNamespace(block_size=BLOCK)
    layers = ()

    def __init__(self, num_blocks):
        self.slots = torch.zeros(num_blocks * BLOCK, dtype=torch.long)

    def prepare(self, metadata):
        self.meta = metadata

    def forward(self, input_ids, positions, layers, attention):
        meta = self.meta
        real = meta.slot_mapping >= 0
        self.slots[meta.slot_mapping[real]] = input_ids[real] * 1000 + positions[real]
        rows = []
        for s, (length, table) in enumerate(zip(meta.context_lens.tolist(), meta.block_tables.tolist(), strict=True)):
            count = int(meta.query_start_loc[s + 1] - meta.query_start_loc[s])
            for end in range(length - count + 1, length + 1):
                held = [int(self.slots[table[p // BLOCK] * BLOCK + p % BLOCK]) for p in range(end)]
                rows.append([sum((p + 1) * x for p, x in enumerate(held)), len(held)])
        return torch.tensor(rows, dtype=torch.float64)

    def logits(self, hidden, best_only):
        return hidden


def runner_of(graphs):
    pool = Pool(200)
    return ModelRunner(pool, pool, pool, CPU, graphs)


def step_of(lengths, new=1):
    """Sequences of these lengths, each in blocks of its own, that compute their last `new` tokens."""
    step = []
    for i, length in enumerate(lengths):
        sequence = make_sequence(i, length)
        table = array("i", [5 * i + n for n in range(-(-length // BLOCK))])
        count = min(new, length)
        step.append(ScheduledSequence(sequence, length - count, count, table, True, 1))
    return step


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(st.lists(st.integers(1, 5 * BLOCK), min_size=1, max_size=12), st.sampled_from([1, 1, 3])),
        min_size=1,
        max_size=6,
    ),
    most=st.integers(1, 12),
)
def test_a_step_gives_the_rows_of_the_plain_one(steps, most):
    """Rows of a larger step before it, padding that takes a slot, a table that is read beyond its end."""
    plain, graphed = runner_of(None), runner_of(DecodeGraphs(Rerun(), most=most, width=5))
    for lengths, new in steps:
        for runner in (plain, graphed):
            runner.execute(step_of(lengths, 99))  # the prompts
        step = step_of(lengths, new)
        assert torch.equal(graphed.execute(step), plain.execute(step))
        assert torch.equal(graphed.pool.slots, plain.pool.slots)


def test_sizes_are_filled_up_and_captured_once():
    """A graph for every number of sequences takes memory and time; one for few of them computes padding."""
    capture = Rerun()
    graphs = DecodeGraphs(capture, most=30, width=5)
    assert graphs.sizes == [1, 2, 4, 8, 16, 24, 30]
    assert DecodeGraphs(capture, most=1, width=5).sizes == [1]
    assert DecodeGraphs(capture, most=1000, width=5).sizes[-2:] == [248, 256]
    runner = runner_of(graphs)
    for count in (3, 4, 3, 1, 8, 7, 5):
        runner.execute(step_of([3] * count))
    assert (capture.num_captured, capture.num_replayed) == (3, 7)
    for lengths, new in (([3] * 31, 1), ([3, 3], 2), ([5 * BLOCK + 1], 1)):  # too many; several tokens; a long table
        runner.execute(step_of(lengths, new))
    assert capture.num_replayed == 7


def test_longer_contexts_have_graphs_of_their_own():
    """A grid captured for short contexts leaves out the splits of a long one."""
    capture, reaches = Rerun(), []

    def compute(input_ids, positions, metadata):
        reaches.append(metadata.max_context_len)
        return input_ids

    graphs = DecodeGraphs(capture, most=2, width=2000)
    for longest in (1, 512, 513, 1024, 5000):
        runner = ModelRunner(None, Pool(1), None, CPU)
        step = runner.pack(step_of([2]))
        step.context_lens[0] = longest
        meta = decode_graphs.AttentionMetadata(
            step.slot_mapping, step.query_start_loc, step.context_lens, step.block_tables, BLOCK, 1, longest
        )
        reaches.clear()
        graphs.run(step.input_ids, step.positions, meta, compute)
        assert set(reaches) == {max(512, 1 << (longest - 1).bit_length())}
    assert capture.num_captured == 3


def test_another_pool_has_other_graphs(monkeypatch):
    """A graph writes to the addresses it was captured with, whoever has that memory now."""
    capture = Rerun()
    runner = runner_of(DecodeGraphs(capture, most=2, width=5))
    runner.execute(step_of([3]))
    monkeypatch.setattr("ember.core.model_runner.KVPool", lambda shape, num_blocks, device: Pool(num_blocks))
    runner.set_pool(32)
    runner.execute(step_of([3]))
    assert capture.num_captured == 2


def test_what_can_not_be_captured_is_computed_plainly(caplog):
    """A job that would have run without graphs must not end for want of them."""

    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing\nlong advice")

    plain, graphed = runner_of(None), runner_of(DecodeGraphs(refuse, most=8, width=5))
    for lengths in ([3, 5, 2], [4, 6, 3]):
        step = step_of(lengths)
        assert torch.equal(graphed.execute(step), plain.execute(step))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.endswith("singly: operation not permitted when stream is capturing")


def test_cuda_captures_after_a_warm_up_beside_the_stream(monkeypatch):
    """What compiles kernels must not be captured; graphs with memory of their own each would fill the device."""
    said = []

    class Stream:
        def wait_stream(self, other):
            said.append("wait")

    class Graph:
        def replay(self):
            said.append("replay")

    @contextlib.contextmanager
    def note(name, *args, **kwargs):
        said.append((name, *args, *kwargs.items()))
        yield
        said.append(f"end of {name}")

    graph, stream = Graph(), Stream()
    fake = SimpleNamespace(
        graph_pool_handle=lambda: "pool",
        device=lambda device: note("device", device),
        stream=lambda stream: note("stream"),
        graph=lambda graph, **kwargs: note("graph", graph, **kwargs),
        current_stream=lambda: stream,
        Stream=Stream,
        CUDAGraph=lambda: graph,
    )
    monkeypatch.setattr(decode_graphs, "cuda", fake)
    out = torch.zeros(1)

    def work():
        said.append("work")
        return out

    replay = CudaCapture(CUDA)(work)
    warm_up = ["wait", ("stream",), "work", "work", "end of stream", "wait"]
    options = ("pool", "pool"), ("capture_error_mode", "thread_local")
    captured = [("graph", graph, *options), "work", "end of graph"]
    assert said == [("device", CUDA), *warm_up, *captured, "end of device"]
    said.clear()
    assert replay() is out
    assert said == ["replay"]


def test_where_graphs_go_and_where_not():
    """A setting that does nothing, or one that fails in the first step."""
    assert resolve_cuda_graphs("auto", CUDA, "triton", 1)
    assert resolve_cuda_graphs("true", CUDA, "triton", 1)
    assert not resolve_cuda_graphs("false", CUDA, "triton", 1)
    for where, why in (
        ((CPU, "triton", 1), "graphs are CUDA's, this is cpu; use auto"),
        ((CUDA, "batched", 1), "needs attention=triton: batched plans on the host"),
        ((CUDA, "triton", 2), "needs tensor_parallel_size=1"),
    ):
        assert not resolve_cuda_graphs("auto", *where)
        with pytest.raises(ConfigError, match=f"cuda_graphs=true: {why}"):
            resolve_cuda_graphs("true", *where)


def test_the_setting_reaches_the_runner(monkeypatch):
    """As YAML and Python spell it."""
    assert [EngineConfig(cuda_graphs=value).cuda_graphs for value in (True, False, "auto")] == ["true", "false", "auto"]
    with pytest.raises(ConfigError, match="cuda_graphs"):
        EngineConfig(cuda_graphs="maybe")
    monkeypatch.setattr("ember.entrypoints.plan.resolve_device", lambda name: CUDA)
    monkeypatch.setattr("ember.entrypoints.plan.resolve_attention", lambda *args: "triton")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (2**34, 2**34))
    spec = EnginePlan.resolve(EngineConfig(max_num_seqs=5, max_model_len=100)).runner_spec()
    assert (spec.cuda_graphs, spec.max_num_seqs, spec.max_model_len) == (True, 5, 100)
    monkeypatch.setattr(decode_graphs, "cuda", SimpleNamespace(graph_pool_handle=lambda: "pool"))
    assert spec._graphs(CUDA).sizes == [1, 2, 4, 5]
    assert not EnginePlan.resolve(EngineConfig(cuda_graphs=False)).runner_spec().cuda_graphs


WAYS = {
    "roomy": {},
    "preempted": {"pool_size": "20", "block_size": 2, "longer": 8},
    "speculation": {"speculative": "ngram", "ngram_min": 1},
    "prefill first": {"scheduler": "prefill_first", "block_size": 16},
    "int8 pool": {"kv_dtype": "int8"},
    "one at a time": {"max_num_seqs": 1},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("llama"))


def generate(folder, graphs, longer=0, **chosen):
    """Tokens, the logits after every token, and the statistics of the steps."""
    fixed = {"device": "cpu", "dtype": "float32", "attention": "triton", "max_model_len": 40, "block_size": 8}
    llm = LLM(folder, **{**fixed, "pool_size": "400tok", "max_num_seqs": 6, "max_num_batched_tokens": 64, **chosen})
    llm._runner.graphs = graphs
    recorder = llm.engine.runner = RecordingRunner(llm._runner)
    prompts = [[(31 * i + 7 * p) % 4000 for p in range(length)] for i, length in enumerate((5, 19, 2))]
    prompts.append([9, 8, 7] * 4)
    params = [
        SamplingParams(max_tokens=3 + 2 * i + longer, ignore_eos=True, n=1 + i % 2, seed=i) for i in range(len(prompts))
    ]
    params = [p.override({"temperature": 0.7}) if p.n > 1 else p for p in params]
    outputs, steps = [], []
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        llm.add(i, prompt, p)
    while llm.engine.num_unfinished:
        done, out = llm.step()
        outputs += done
        steps.append(out.stats)
    outputs.sort(key=lambda output: output.request_id)
    return [[o.token_ids for o in output.outputs] for output in outputs], recorder.logits, steps


@needs_triton
@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_jobs_have_the_logits_of_the_plain_path(llama, way):
    """Forks, preemptions, copied blocks, proposals that are withdrawn: all between two replays of one graph."""
    capture, chosen = Rerun(), WAYS[way]
    blocks = -(-40 // chosen.get("block_size", 8))
    graphs = DecodeGraphs(capture, most=chosen.get("max_num_seqs", 6), width=blocks)
    tokens, logits, steps = generate(llama, graphs, **chosen)
    expected, expected_logits, plain_steps = generate(llama, None, **chosen)
    assert tokens == expected
    assert logits.keys() == expected_logits.keys()
    assert all(torch.equal(logits[key], expected_logits[key]) for key in logits)
    assert len(steps) == len(plain_steps)
    assert capture.num_replayed > capture.num_captured > 0
    if way == "preempted":
        assert sum(s.num_preempted for s in steps)
    if way == "speculation":
        assert sum(s.num_proposed_tokens for s in steps)


@torch.inference_mode()
def poison(static):
    """Let the tensors name blocks far outside of the pool, and slots and contexts of others."""
    static.tables.fill_(10**6)
    static.positions.fill_(3)
    static.slots.fill_(17)
    static.contexts.fill_(90)


@needs_triton
@pytest.mark.triton
def test_what_is_left_in_the_tensors_changes_nothing(llama):
    """Rows of a step with more sequences, and whatever lay in memory: block numbers far outside of the pool."""
    graphs = DecodeGraphs(Rerun(), most=6, width=12)
    settings = {"device": "cpu", "dtype": "float32", "attention": "triton", "max_model_len": 96, "block_size": 8}
    plain, graphed = (LLM(llama, **settings, pool_size="400tok")._runner for _ in range(2))
    graphed.graphs = graphs
    rows = Counter()
    for lengths in ([5, 20, 9, 1, 3], [5, 20, 9], [30], [8, 16]):
        tables = [array("i", [6 * i + n for n in range(-(-length // 8))]) for i, length in enumerate(lengths)]
        sequences = [make_sequence(i, length) for i, length in enumerate(lengths)]
        prompts = [ScheduledSequence(s, 0, s.num_tokens, t, True, 1) for s, t in zip(sequences, tables, strict=True)]
        last = [ScheduledSequence(s, s.num_tokens - 1, 1, t, True, 1) for s, t in zip(sequences, tables, strict=True)]
        for runner in (plain, graphed):
            runner.execute(prompts)
        if (static := graphs._static) is not None:
            poison(static)
        assert torch.equal(graphed.execute(last), plain.execute(last))
        for mine, its in zip(graphed.pool.layers, plain.pool.layers, strict=True):
            assert torch.equal(mine.k, its.k)
            assert torch.equal(mine.v, its.v)
        rows[len(lengths)] += 1
    assert len(rows) == 4
