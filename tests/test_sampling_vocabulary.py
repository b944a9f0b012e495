"""Log-probabilities, penalties and the like on the embedded model: right, and the same however the row is run."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ember import LLM, SamplingParams
from ember.config import JobConfig
from ember.core.sequence import FinishReason
from ember.job import run_job

BASE = {"device": "cpu", "dtype": "float32", "num_threads": 1}
SPEECH = "Fellow citizens of the Senate and of the House of Representatives, in the course of the war the people "
PRESSED = {"max_model_len": 128, "block_size": 4, "pool_size": "180tok", "max_num_seqs": 6}
WAYS = [
    {"scheduler": "mixed", "max_num_batched_tokens": 24},
    {"scheduler": "prefill_first", "prefix_cache": False},
    {"scheduler": "mixed", "speculative": "ngram"},
]
VOCABULARY = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.8, "presence_penalty": 0.4, "temperature": 1.0},
    {"logit_bias": {262: 2.0, 13: -100.0}, "temperature": 0.8, "top_p": 0.9},
    {"bad_words": ["the", "of", "United States"], "repetition_penalty": 1.1},
    {"allowed_token_ids": list(range(200, 700)), "temperature": 1.0},
    {"min_tokens": 10, "stop_token_ids": [13, 11], "frequency_penalty": -0.5, "min_p": 0.05, "temperature": 1.0},
]


@pytest.fixture(scope="module")
def llm():
    return LLM(**BASE, max_num_seqs=16, max_model_len=160, pool_size="2560tok")


@pytest.fixture(scope="module")
def log_softmax(llm):
    """Token ids -> log-probabilities [T, V], by transformers."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(llm.plan.folder.path, dtype=torch.float32).eval()

    @torch.no_grad()
    def compute(ids):
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return compute


def prompts_of(llm):
    """Of many lengths, sharing beginnings: the cache has much to give."""
    words = llm.plan.tokenizer.encode(SPEECH * 4)
    return [words[:length] for length in (1, 2, 15, 16, 17, 33, 40, 40, 63)]


def entries(output):
    """What is kept of one output, as plain numbers."""
    return [
        [None if p is None else [(t, e.logprob, e.rank) for t, e in p.items()] for p in positions or []]
        for positions in (output.logprobs, output.prompt_logprobs)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_are_those_of_transformers(llm, log_softmax, temperature):
    """Of the network's own distribution: temperature, filters, biases and penalties don't touch them."""
    params = SamplingParams(
        max_tokens=12,
        temperature=temperature,
        top_k=50,
        seed=5,
        logprobs=3,
        prompt_logprobs=2,
        repetition_penalty=1.4,
        logit_bias={262: 5.0},
        ignore_eos=True,
    )
    for output in llm.generate(prompts_of(llm), params):
        ids = output.prompt_token_ids + output.token_ids
        theirs = log_softmax(ids)
        assert output.prompt_logprobs[0] is None
        found = [*output.prompt_logprobs[1:], *output.logprobs]
        for position, (kept, count) in enumerate(
            zip(found, [2] * (len(output.prompt_logprobs) - 1) + [3] * 12, strict=True)
        ):
            row = theirs[position]
            assert next(iter(kept)) == ids[position + 1]
            assert set(kept) == {ids[position + 1], *row.topk(count).indices.tolist()}
            for token, entry in kept.items():
                assert entry.logprob == pytest.approx(row[token].item(), abs=2e-4)
                assert entry.rank == int((row > row[token]).sum()) + 1
                assert entry.decoded_token == llm.plan.tokenizer.decode([token])
        total = sum(entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True))
        assert output.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_logprobs_are_the_same_however_the_row_is_run(llm, way):
    """Stale or missing ones: prompts from the cache, in chunks, computed again after a preemption, scored twice."""
    prompts = prompts_of(llm)
    params = [
        SamplingParams(
            max_tokens=20, temperature=i % 2, seed=i, logprobs=i % 3, prompt_logprobs=i % 3 or None, n=1 + i % 2
        )
        for i in range(len(prompts))
    ]
    alone = [llm.generate([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    pressed = LLM(**BASE, **PRESSED, **way)
    for _ in range(2):  # again with a full cache
        outputs = pressed.generate(prompts, params)
        assert [entries(s) for o in outputs for s in o.outputs] == [entries(s) for o in alone for s in o.outputs]
    assert sum(sample.num_preemptions for output in outputs for sample in output.outputs) > 0


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_vocabularys_tokens_are_the_same_however_the_row_is_run(llm, way):
    """A count that a preemption loses, or that a proposed token changes, moves the next token."""
    prompts = prompts_of(llm)[:8]
    params = [SamplingParams(max_tokens=48, seed=i, n=1 + i % 3, **VOCABULARY[i % 6]) for i in range(8)]
    alone = [llm.generate([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    outputs = LLM(**BASE, **PRESSED, **way).generate(prompts, params)
    assert [s.token_ids for o in outputs for s in o.outputs] == [s.token_ids for o in alone for s in o.outputs]
    assert sum(sample.num_preemptions for output in outputs for sample in output.outputs) > 0


def test_a_prompt_that_is_only_scored(llm):
    """`max_tokens=0`: the same log-probabilities, no token; a prompt may fill the context, or be one token."""
    words = llm.plan.tokenizer.encode(SPEECH * 12)
    prompts = [words[:1], words[:40], words[:160], words[5:45]]
    scored = llm.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=1, n=2))
    for prompt, output in zip(prompts, scored, strict=True):
        for sample in output.outputs:
            assert (sample.finish_reason, sample.token_ids, sample.text) == (FinishReason.LENGTH, [], "")
            assert len(sample.prompt_logprobs) == len(prompt)
    full = llm.generate([prompts[1]], SamplingParams(max_tokens=3, prompt_logprobs=1))[0]
    assert full.prompt_logprobs == scored[1].prompt_logprobs
    plain = llm.generate([prompts[1]], SamplingParams(max_tokens=0))[0]
    assert (plain.finish_reason, plain.prompt_logprobs) == (FinishReason.LENGTH, None)
    assert (
        llm.generate([words[:161]], SamplingParams(max_tokens=0, prompt_logprobs=1))[0].error_kind == "prompt_too_long"
    )


def test_bad_words_do_not_come(llm):
    """Neither at the start, nor after a space, nor over several tokens."""
    plain, banned = (
        llm.generate("The people of the", SamplingParams(max_tokens=60, bad_words=words))[0]
        for words in ([], [" United States", "the", "government"])
    )
    assert "the" in plain.text.split()
    assert not {"the", "government"} & set(banned.text.split())
    assert "United States" not in banned.text


def test_a_prompt_is_truncated_from_the_left(llm):
    words = llm.plan.tokenizer.encode(SPEECH * 12)
    kept, fits = llm.generate(
        [words, words],
        [
            SamplingParams(max_tokens=2, truncate_prompt_tokens=9),
            SamplingParams(max_tokens=30, truncate_prompt_tokens=-1),
        ],
    )
    assert kept.prompt_token_ids == words[-9:]
    assert fits.prompt_token_ids == words[-130:]
    assert len(fits.token_ids) <= 30


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"logprobs": 4097}, "logprobs=4097: the model's vocabulary has 4096 tokens"),
        ({"prompt_logprobs": 9999}, "prompt_logprobs=9999"),
        ({"allowed_token_ids": [3, 4096]}, "allowed_token_ids=[4096]: the model's vocabulary ends at 4095"),
        ({"logit_bias": {"5000": 1}}, "logit_bias=[5000]"),
    ],
)
def test_what_the_vocabulary_has_not_is_that_rows_error(llm, params, says):
    bad, good = llm.generate(["a", "b"], [SamplingParams(**params), SamplingParams(max_tokens=1)])
    assert bad.error_kind == "bad_sampling"
    assert says in bad.error
    assert good.error is None


def test_a_penalty_that_leaves_no_numbers_is_to_blame_itself(llm):
    """Dividing by next to nothing gave infinite logits, and the row's error spoke of the network's."""
    tiny = SamplingParams(repetition_penalty=1e-38, max_tokens=2)
    (output,) = llm.generate(["Call me"], [tiny])
    assert (output.error_kind, output.error.split(": ")[0]) == ("bad_sampling", "repetition_penalty=1e-38")


def test_null_sets_nothing_where_it_has_no_meaning():
    """`n: null` was an error in JSON, and nothing in Parquet."""
    job = SamplingParams(temperature=0.5, n=2, logprobs=3)
    same = job.override({"n": None, "temperature": None, "ignore_eos": None, "early_stopping": None})
    assert same == job
    assert job.override({"max_tokens": None, "logprobs": None}) == replace(job, max_tokens=None, logprobs=None)


def test_all_of_the_vocabulary(llm):
    output = llm.generate("The", SamplingParams(max_tokens=1, logprobs=-1, temperature=1.0))[0]
    assert len(output.logprobs[0]) == 4096
    assert sum(math.exp(entry.logprob) for entry in output.logprobs[0].values()) == pytest.approx(1.0, abs=1e-4)


ROWS = [
    {"prompt": "Call me", "sampling": {"logprobs": 2, "max_tokens": 3}},
    {"prompt": "Call me Ish", "sampling": {"prompt_logprobs": 0, "max_tokens": 0}},
    {"prompt": "Call me", "sampling": {"logprobs": 5000}},
    {"prompt": "Call me", "sampling": {"logit_bias": {"13": -200}}},
    {"prompt": "Call me", "sampling": {"choice": ["Ahab", "Ishmael"]}},
    {"prompt": "Call me", "sampling": {"json_schema": {"type": "nothing"}}},
]


@pytest.mark.parametrize("output_format", ["parquet", "jsonl", "openai_batch"])
def test_the_columns_of_a_job(tmp_path, output_format):
    """Their types are fixed, asked for or not; wrong values cost their row; the other formats lose nothing."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    output = str(tmp_path / "out")
    config = JobConfig(
        data=str(tmp_path / "rows.jsonl"), output=output, output_format=output_format, progress=False, num_threads=1
    )
    assert run_job(config).num_errors == 3
    rows = rows_of(tmp_path / "out", output_format)
    assert [row["error"] is None for row in rows] == [True, True, False, False, True, False]
    assert "logit_bias" in rows[3]["error"] and "[-100, 100]" in rows[3]["error"]
    assert [len(position) for position in rows[0]["logprobs"]] == [2, 2, 2]
    assert rows[0]["cumulative_logprob"] == pytest.approx(sum(p[0]["logprob"] for p in rows[0]["logprobs"]))
    assert rows[0]["prompt_logprobs"] is rows[1]["logprobs"] is None
    assert rows[1]["prompt_logprobs"][0] is None
    assert len(rows[1]["prompt_logprobs"]) == rows[1]["num_prompt_tokens"]
    assert "".join(p[0]["token"] for p in rows[0]["logprobs"]) == rows[0]["completion"]
    assert rows[4]["completion"] in ("Ahab", "Ishmael")


def test_a_job_with_a_mapping_goes_on(tmp_path):
    """JSON has no numbers as keys: read back from the manifest, the same bias looked like another."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Call me"}\n' * 2)
    for limit in (1, 2):
        sampling = SamplingParams(max_tokens=1, logit_bias={198: -5, 13: 2.5}, json_schema={"enum": [1, 2]})
        where = {"data": str(tmp_path / "rows.jsonl"), "output": str(tmp_path / "out"), "num_threads": 1}
        assert run_job(JobConfig(**where, sampling=sampling, limit=limit, progress=False)).num_rows_done == limit


def rows_of(folder, output_format):
    (part,) = (folder / "completions").iterdir()
    if output_format == "parquet":
        table = pq.read_table(part)
        entry = pa.struct(
            [("token_id", pa.int32()), ("token", pa.string()), ("logprob", pa.float32()), ("rank", pa.int32())]
        )
        for name in ("logprobs", "prompt_logprobs"):
            assert table.schema.field(name).type == pa.list_(pa.list_(entry))
        assert table.schema.field("cumulative_logprob").type == pa.float64()
        return sorted(table.to_pylist(), key=lambda row: row["row_index"])
    lines = [json.loads(line) for line in part.read_text().splitlines()]
    rows = lines if output_format == "jsonl" else [sample for line in lines for sample in line["ember"]]
    return sorted(rows, key=lambda row: row["row_index"])
