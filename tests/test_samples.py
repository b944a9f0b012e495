"""Jobs with several samples a prompt: their rows, what goes on where a job stopped, and what comes together."""

from __future__ import annotations

import json
import os
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ember import LLM, SamplingParams
from ember.config import JobConfig
from ember.data.export import export
from ember.errors import UserError
from ember.job import run_job
from ember.runners.shared_engine import SharedEngine
from tests.fakes import POLICIES

PROMPTS = ["The whale and the captain", "", "In the course of the war the people", "x"]
OWN = [None, None, {"n": 2}, {"temperature": -1, "n": 2}]
KEYS = [*((0, i) for i in range(4)), *((1, i) for i in range(4)), (2, 0), (2, 1), (3, 0), (3, 1)]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"r{i}", "prompt": p, "sampling": own} for i, (p, own) in enumerate(zip(PROMPTS, OWN, strict=True))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def job(prompts, output, *, n=4, sampling=None, **settings):
    chosen = {"temperature": 0.9, "max_tokens": 6, "n": n, "ignore_eos": True, **(sampling or {})}
    defaults = {"progress": False, "commit_every": 1, "pool_size": "2000tok", "max_model_len": 256}
    return JobConfig(
        data=str(prompts), output=str(output), sampling=SamplingParams(**chosen), **{**defaults, **settings}
    )


def parts(output):
    return sorted((output / "completions").glob("part-*.parquet"))


def rows_of(output):
    """(completion, token ids, error) by (row_index, sample_index)."""
    rows = [row for part in parts(output) for row in pq.read_table(part, partitioning=None).to_pylist()]
    found = {(r["row_index"], r["sample_index"]): (r["completion"], r["token_ids"], r["error"]) for r in rows}
    assert len(found) == len(rows), "a sample is there twice"
    return found


def test_every_sample_is_a_row_and_does_not_depend_on_n(prompts, tmp_path):
    """Samples that overwrite each other; a row that can't run with one error row, or with none for its last samples."""
    summary = run_job(job(prompts, tmp_path / "four"))
    four = rows_of(tmp_path / "four")
    assert sorted(four) == KEYS
    assert {key for key, (_, _, error) in four.items() if error} == {key for key in KEYS if key[0] in (1, 3)}
    assert len({completion for key, (completion, _, _) in four.items() if key[0] == 0}) == 4
    assert (summary.num_rows_done, summary.num_samples_done, summary.num_errors) == (4, 12, 6)
    assert summary.num_prompt_tokens == sum(len(t) for t in prompt_tokens(tmp_path / "four").values())
    run_job(job(prompts, tmp_path / "two", n=2))
    assert rows_of(tmp_path / "two") == {key: row for key, row in four.items() if key[1] < 2}


def prompt_tokens(output):
    rows = [row for part in parts(output) for row in pq.read_table(part, partitioning=None).to_pylist()]
    return {row["row_index"]: row["prompt_token_ids"] for row in rows}


def without(part, *keys):
    """Take samples out of a part, as if they had never been committed."""
    table = pq.read_table(part, partitioning=None)
    kept = [i for i, row in enumerate(table.to_pylist()) if (row["row_index"], row["sample_index"]) not in keys]
    pq.write_table(table.take(pa.array(kept, pa.int64())), part)


def test_a_job_goes_on_sample_by_sample(prompts, tmp_path):
    """A half-done row taken for done, or computed whole again so that samples are there twice."""
    run_job(job(prompts, tmp_path / "out"))
    whole = rows_of(tmp_path / "out")
    missing = {(0, 1), (0, 3), (1, 2), (2, 0)}
    for part in parts(tmp_path / "out"):
        without(part, *missing)
    assert rows_of(tmp_path / "out").keys() == whole.keys() - missing
    summary = run_job(job(prompts, tmp_path / "out"))
    assert rows_of(tmp_path / "out") == whole
    assert (summary.num_rows_before, summary.num_rows_done, summary.num_samples_done) == (1, 4, 12)
    assert summary.num_output_tokens_new == 3 * 6
    assert run_job(job(prompts, tmp_path / "out")).num_steps == 0


def test_errors_are_tried_again_sample_by_sample(prompts, tmp_path):
    """retry_errors that computes the good samples of a row again."""
    run_job(job(prompts, tmp_path / "out"))
    whole = rows_of(tmp_path / "out")
    summary = run_job(job(prompts, tmp_path / "out", retry_errors=True))
    assert rows_of(tmp_path / "out") == whole
    assert (summary.num_rows_before, summary.num_output_tokens_new) == (2, 0)


def test_samples_that_fail_one_after_the_other_are_one_error(tmp_path):
    """Each of them counted for max_errors when they ran in turns, and ended the job."""
    data = tmp_path / "one.jsonl"
    data.write_text(json.dumps({"prompt": "Call me"}) + "\n")
    impossible = {"n": 3, "max_tokens": 2, "repetition_penalty": 1e-38}
    summary = run_job(job(data, tmp_path / "out", sampling=impossible, max_num_seqs=1, max_errors=1))
    assert (summary.num_errors, summary.exit_code) == (3, 3)


@pytest.mark.parametrize("sampling", [{"best_of": 5, "n": 2}, {"beam_width": 3, "n": 2, "temperature": 0.0}])
def test_the_best_of_a_row_come_together(prompts, tmp_path, sampling):
    """A kill between two rows of one ranking: the rest would be ranked anew."""
    run_job(job(prompts, tmp_path / "out", sampling=sampling))
    found = rows_of(tmp_path / "out")
    assert sorted(key for key, (_, _, error) in found.items() if not error) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    for part in parts(tmp_path / "out"):
        rows = pq.read_table(part, partitioning=None).to_pylist()
        keys = [(row["row_index"], row["sample_index"]) for row in rows]
        assert all((row_index, 1 - sample_index) in keys for row_index, sample_index in keys)
        good = sorted(
            (row["row_index"], row["sample_index"], row["cumulative_logprob"]) for row in rows if not row["error"]
        )
        assert all(first[2] >= second[2] for first, second in zip(good[::2], good[1::2], strict=True))


def test_best_of_keeps_the_likeliest_of_the_very_samples_that_n_draws(llm):
    """Ranked by another number, or drawn otherwise than without ranking."""
    params = {"temperature": 1.0, "max_tokens": 8, "logprobs": 0}
    (drawn,) = llm.generate("The whale", SamplingParams(n=6, **params))
    (best,) = llm.generate("The whale", SamplingParams(n=3, best_of=6, **params))
    ranked = sorted(drawn.outputs, key=lambda sample: -sample.cumulative_logprob)
    assert [sample.token_ids for sample in best.outputs] == [sample.token_ids for sample in ranked[:3]]
    assert [sample.index for sample in best.outputs] == [0, 1, 2]


@pytest.mark.parametrize("form", ["jsonl", "openai_batch"])
def test_lines_have_all_samples_and_can_be_gone_on_with(prompts, tmp_path, form):
    """Answers of a batch that a client, which looks them up by custom_id, would lose all but one of."""
    out = tmp_path / "out"
    run_job(job(prompts, out, output_format=form, limit=2))
    run_job(job(prompts, out, output_format=form))
    lines = [json.loads(line) for part in sorted((out / "completions").iterdir()) for line in part.open()]
    if form == "jsonl":
        assert sorted((line["row_index"], line["sample_index"]) for line in lines) == KEYS
        return
    answers = {line["custom_id"]: line for line in lines}
    assert len(lines) == len(answers) == 4
    body = answers["r0"]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 24
    assert answers["r1"]["response"] is None
    assert answers["r1"]["error"]["code"] == "bad_row"


def test_an_export_has_all_samples_in_order(prompts, tmp_path):
    """Samples of a row in the order they finished in, or a half-done row passed as whole."""
    run_job(job(prompts, tmp_path / "out"))
    assert export(str(tmp_path / "out"), str(tmp_path / "all.parquet")).num_rows == 12
    table = pq.read_table(tmp_path / "all.parquet")
    assert list(zip(table["row_index"].to_pylist(), table["sample_index"].to_pylist(), strict=True)) == KEYS
    export(str(tmp_path / "out"), str(tmp_path / "all.jsonl"), form="openai_batch")
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 4
    with pytest.raises(UserError, match="samples of a row may lie apart"):
        export(str(tmp_path / "out"), str(tmp_path / "torn.jsonl"), form="openai_batch", order="as_written")
    without(parts(tmp_path / "out")[-1], *KEYS)
    done = export(str(tmp_path / "out"), str(tmp_path / "some.parquet"), partial=True)
    assert done.num_missing >= 1


@pytest.fixture(scope="module")
def llm():
    return LLM(device="cpu", dtype="float32", max_model_len=160, pool_size="3000tok")


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_what_waits_is_given_up_and_what_runs_goes_on(steps):
    """A signal between two samples of a row: pending ones forgotten, or a ranking of half the samples."""
    llm = LLM(device="cpu", dtype="float32", max_model_len=96, pool_size="1000tok", max_num_seqs=3)
    llm.add(7, "The whale", SamplingParams(n=6, temperature=1.0, max_tokens=9, ignore_eos=True), together=False)
    llm.add(8, "The whale and", SamplingParams(best_of=3, temperature=1.0, max_tokens=9))
    llm.add(9, "The", SamplingParams(beam_width=3, max_tokens=9))
    for _ in range(steps):
        llm.step()
    assert llm.abort_waiting() == {7, 8, 9}
    outputs = []
    while llm.engine.num_unfinished:
        outputs += llm.step()[0]
    assert [(output.request_id, [s.index for s in output.outputs]) for output in outputs] == [
        (7, [i]) for i in range(3)
    ]
    assert llm.engine.scheduler.blocks.num_used == 0
    assert len(llm.generate("The sea", SamplingParams(n=2, temperature=1.0, max_tokens=3))[0].outputs) == 2


def test_a_job_whose_last_samples_were_given_up_is_not_finished(prompts, tmp_path, monkeypatch):
    """A signal while the last row's samples run and wait: the row lacks some, and the job said it was finished."""
    steps = iter(range(1000))
    step = LLM.step

    def signalled(llm):
        if next(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(llm)

    prompts.write_text('{"prompt": "The whale"}\n')
    with monkeypatch.context() as patched:
        patched.setattr(LLM, "step", signalled)
        summary = run_job(job(prompts, tmp_path / "out", max_num_seqs=2))
    assert (summary.exit_code, summary.num_rows_done, sorted(rows_of(tmp_path / "out"))) == (143, 0, [(0, 0), (0, 1)])
    assert run_job(job(prompts, tmp_path / "out")).exit_code == 0
    assert sorted(rows_of(tmp_path / "out")) == [(0, i) for i in range(4)]


def test_a_search_whose_beams_wait_is_given_up_whole():
    """Beams held for others that will never come."""
    llm = LLM(device="cpu", dtype="float32", max_model_len=96, pool_size="1000tok", max_num_seqs=2)
    llm.add(0, "The whale", SamplingParams(beam_width=4, max_tokens=9))
    for _ in range(3):
        llm.step()
    assert llm.abort_waiting() == {0}
    assert llm.engine.num_unfinished == 0
    assert not llm.engine.scheduler.held
    assert llm.engine.scheduler.blocks.num_used == 0


def test_an_engine_of_a_cluster_gives_rows_whole(llm):
    """A chunk's result with one sample of a row, and the others nowhere."""
    from ember.data.reader import PromptRow

    config = JobConfig(data="x", sampling=SamplingParams(n=3, max_tokens=4, temperature=1.0))
    rows = [PromptRow(i, "x", None, "The whale", {}, {}, None) for i in range(3)]
    rows[1].samples_done = frozenset({1})
    done = SharedEngine(llm, config, lambda: False).compute(rows)
    assert [[sample.index for sample in output.outputs] for _, output in done] == [[0, 1, 2], [0, 2], [0, 1, 2]]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("prefix_cache", "speculative"), [(True, "ngram"), (False, "off")])
def test_nothing_but_speed_changes(policy, prefix_cache, speculative):
    """Samples, rankings and searches side by side in a pool that preempts and evicts, against each in a roomy one."""
    prompts = ["The people of the United States " * 4, "The whale", "In the course of the war " * 6]
    params = [
        SamplingParams(n=5, temperature=1.0, max_tokens=14, repetition_penalty=1.1),
        SamplingParams(n=2, best_of=4, temperature=0.8, max_tokens=14),
        SamplingParams(n=2, beam_width=3, max_tokens=14),
    ]
    roomy = LLM(device="cpu", dtype="float32", max_model_len=96, pool_size="4000tok", prefix_cache=False)
    alone = [roomy.generate([p] * 3, q)[i] for i, (p, q) in enumerate(zip(prompts, params, strict=True))]
    settings = {"block_size": 4, "pool_size": "104tok", "max_num_batched_tokens": 40, "max_num_seqs": 6}
    crowded = LLM(
        device="cpu",
        dtype="float32",
        max_model_len=96,
        scheduler=policy,
        prefix_cache=prefix_cache,
        speculative=speculative,
        **settings,
    )
    preempted, blocks = 0, crowded.engine.scheduler.blocks
    for i, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
        crowded.add(i, prompt, chosen)
    results = {}
    while crowded.engine.num_unfinished:
        outputs, step = crowded.step()
        results.update({output.request_id: output for output in outputs})
        preempted += step.stats.num_preempted
        blocks.check_integrity()
    assert preempted
    assert blocks.num_used == 0
    for i, expected in enumerate(alone):
        assert [s.token_ids for s in results[i].outputs] == [s.token_ids for s in expected.outputs]
