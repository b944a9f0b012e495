"""Every benchmark runs, at a size that says nothing about speed: a script that nobody runs rots."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from ember.model.gpt2_config import GPT2Config
from tests.benchmarks import gpu, workloads
from tests.benchmarks.continuous_vs_static import padded
from tests.benchmarks.costs import TokenCost, Work
from tests.benchmarks.machine import Machine, matmul_rate, read_rate
from tests.benchmarks.models import network_of
from tests.benchmarks.runs import Bench, check_lengths
from tests.benchmarks.table import Table
from tests.benchmarks.workloads import Request

SMALL = ["--model", "tiny", "--quick"]
COMMANDS = {
    "throughput": ["--workload", "w3", "--configuration", "fp32", "--configuration", "fp32 static"],
    "block_size": ["--workload", "w3", "--size", "1", "--size", "512", "--pool", "1024tok"],
    "continuous_vs_static": ["--requests", "16", "--max-num-seqs", "2"],
    "prefix": ["--workload", "w2"],
    "forks": ["--samples", "3"],
    "speculation": ["--batch", "2"],
    "overhead": ["--sequences", "1", "--sequences", "3"],
    "sampling": [],
    "serving": ["--workload", "w3", "--clients", "2"],
    "peers.__main__": ["--workload", "w3", "--peer", "openvino"],
}
ROWS = {
    "throughput": 2,
    "block_size": 2,
    "continuous_vs_static": 6,
    "overhead": 2,
    "sampling": 10,
    "serving": 1,
    "prefix": 2,
    "forks": 4,
    "speculation": 3,
    "peers.__main__": 2,
}


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    """Nothing is kept, and measuring the machine takes no time."""
    monkeypatch.setenv("EMBER_BENCHMARKS", str(tmp_path))
    monkeypatch.setattr(Machine, "measure", staticmethod(lambda: Machine(matmul_rate(1, 64), read_rate(1, 2**16))))


def rows_of(output: str) -> list[str]:
    """The lines below the table's rule."""
    lines = output.splitlines()
    rule = next(i for i, line in enumerate(lines) if line and set(line) == {"-"})
    return lines[rule + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_each_prints_a_table_with_a_row_for_each_choice(name, capsys):
    """A script that no longer fits the engine's parts."""
    import_module(f"tests.benchmarks.{name}").main([*SMALL, *COMMANDS[name]])
    rows = rows_of(capsys.readouterr().out)
    assert len(rows) == ROWS[name], rows
    assert not [row for row in rows if "skipped" in row]


@pytest.mark.slow
@pytest.mark.triton
def test_the_gpus_benchmark_runs_to_its_end_and_says_that_it_needs_a_gpu(monkeypatch, capsys):
    """All of it, tiny: a script that fails after a minute of a rented card."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton: pip install '.[triton]'")
    gpu.main(["--smoke", "--quick"])
    rows = rows_of(capsys.readouterr().out)
    kinds = Counter(row.split()[0] for row in rows)
    assert [kinds[kind] for kind in ("decode", "prompt", "ember", "transformers,")] == [3, 3, 2, 2]
    loads = gpu.SMOKE.checks
    assert (loads[1].flops, loads[0].kv_numbers) == (4 * sum(range(14, 21)) * 2 * 16, 2 * 2 * 20 * 2 * 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        gpu.main([])


def test_workloads_are_those_that_were_measured(capsys):
    """Figures of other requests under the same name."""
    workloads.main()
    rows = [row.split() for row in rows_of(capsys.readouterr().out)]
    assert [row[:3] for row in rows[:3]] == [["w1", "128", "17,373"], ["w2", "64", "18,432"], ["w3", "1", "32"]]
    assert [row[5] for row in rows[:3]] == ["18,508", "4,096", "128"]
    prefixes = {tuple(request.prompt[:256]) for request in workloads.load("w2")}
    assert len(prefixes) == 1
    assert all(t < workloads.VOCAB_SIZE for name in workloads.NAMES for r in workloads.load(name) for t in r.prompt)


def test_requests_shrink_into_a_smaller_model_in_proportion():
    """A small model's run fails, or has no prompt or no output left."""
    long, short = workloads.fitted([Request([7] * 900, 100), Request([300], 2)], vocab_size=256, max_len=100)
    assert (len(long.prompt), long.out) == (90, 10)
    assert short == Request([44], 2)


def test_padded_batches_run_to_their_longest_within_the_context():
    """A baseline that is handicapped: batches other than the static policy's, or output past the context."""
    asked = [Request([1] * 3, out) for out in (2, 5, 1, 4, 3)]
    assert [request.out for request in padded(asked, 2, 100)] == [5, 5, 4, 4, 3]
    assert [request.out for request in padded(asked, 3, 7)] == [4, 4, 4, 4, 4]


def test_work_is_the_sum_over_its_tokens():
    """A roof that is too low or too high by a factor."""
    network = GPT2Config(
        vocab_size=11, max_position=16, n_embd=4, n_layer=3, n_head=2, n_kv_head=2, n_inner=16, **_rest_of_gpt2()
    )
    cost = TokenCost.of(network)
    assert cost.linear_flops == 2 * 3 * (4 * 12 + 4 * 4 + 2 * 4 * 16)
    assert cost.head_flops == 2 * 4 * 11
    assert cost.kv_bytes == 2 * 3 * 4 * 4
    work = Work.of(network, [Request([1, 2], 3)])  # computes 1 2 a b; b reads 4 slots, a reads 3
    assert work == Work(4 * cost.linear_flops + 3 * cost.head_flops, 7 * cost.kv_bytes)


def _rest_of_gpt2() -> dict[str, object]:
    tiny = network_of("tiny")
    sizes = ("vocab_size", "max_position", "n_embd", "n_layer", "n_head", "n_kv_head", "n_inner")
    return {name: getattr(tiny, name) for name in tiny.__dataclass_fields__ if name not in sizes}


def test_the_split_covers_the_whole_run():
    """Time that no column shows, or that two show."""
    bench = Bench("tiny", max_num_seqs=2)
    run = bench.run([Request([1, 2, 3], 4), Request([5], 2)])
    split = [getattr(run.split, name) for name in run.split.__dataclass_fields__]
    assert sum(split) == pytest.approx(run.seconds)
    assert all(seconds > 0 for seconds in split)
    assert [len(tokens) for tokens in run.tokens] == [4, 2]


def test_a_second_run_finds_nothing_of_the_first():
    """Prompts found in the prefix cache would make all rounds but the first look faster than any job is."""
    bench, requests = Bench("tiny", max_num_seqs=2), [Request(list(range(40)), 3), Request(list(range(50, 90)), 3)]
    for _ in range(2):
        assert sum(step.num_prefill_tokens for step in bench.run(requests).steps) == 80


def test_a_run_with_a_wrong_number_of_tokens_is_refused():
    """A peer that stops early looks fast."""
    with pytest.raises(RuntimeError, match="1 of 2 requests have a wrong length: request 1 got 1 tokens, not 2"):
        check_lengths([Request([1], 1), Request([1], 2)], [[5], [5]])


def test_a_configuration_that_this_version_does_not_know_is_skipped_by_name(monkeypatch, capsys):
    """One new setting in the list ends the whole comparison."""
    throughput = import_module("tests.benchmarks.throughput")
    monkeypatch.setitem(throughput.CONFIGURATIONS, "odd", {"no_such_setting": 1})
    throughput.main([*SMALL, "--workload", "w3", "--configuration", "odd"])
    assert "skipped: this version of ember has no setting no_such_setting" in capsys.readouterr().out


def test_a_short_row_ends_in_a_note(capsys):
    """A reason that is cut off, or that moves the numbers of other rows."""
    table = Table("name ", "tok/s", "roof")
    table.add("a", 1.5, "9%")
    table.add("b", "skipped: a long reason")
    expected = ["name       tok/s     roof", "-" * 25, "a            1.5       9%", "b        skipped: a long reason"]
    assert capsys.readouterr().out.splitlines() == expected
