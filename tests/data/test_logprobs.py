"""Log-probabilities in results: by token, as structs of a column, and in OpenAI's forms."""

from __future__ import annotations

from ember.data.logprobs import Logprob, as_rows, by_token
from ember.data.openai_logprobs import chat_logprobs, completion_logprobs
from ember.sampling.token_logprobs import TokenLogprobs
from tests.fakes import FakeTokenizer

TOKENIZER = FakeTokenizer({0: b"the", 1: " fün".encode(), 2: b"\xc3", 3: b"\xbc"})
POSITIONS = [TokenLogprobs([1, 0, 2], [-2.0, -0.5, -1.0], [3, 1, 2]), TokenLogprobs([2, 3], [-0.25, -3.0], [1, 2])]


def by_tokens():
    return [by_token(entry, TOKENIZER) for entry in POSITIONS]


def test_by_token_id_the_chosen_first():
    """As in vLLM: `output.logprobs[i][token_id].logprob`."""
    first, second = by_tokens()
    assert list(first) == [1, 0, 2]
    assert first[1] == Logprob(-2.0, 3, " fün")
    assert second[2].decoded_token == "\ufffd"


def test_as_structs_of_a_column():
    rows = as_rows([None, *by_tokens()])
    assert rows[0] is None
    assert rows[2] == [
        {"token_id": 2, "token": "\ufffd", "logprob": -0.25, "rank": 1},
        {"token_id": 3, "token": "\ufffd", "logprob": -3.0, "rank": 2},
    ]
    assert as_rows(None) is None


def test_a_completions_form():
    """Offsets count characters of the text; of tokens that look alike the likeliest is told."""
    found = completion_logprobs(as_rows(by_tokens()))
    assert found == {
        "tokens": [" fün", "\ufffd"],
        "token_logprobs": [-2.0, -0.25],
        "top_logprobs": [{" fün": -2.0, "the": -0.5, "\ufffd": -1.0}, {"\ufffd": -0.25}],
        "text_offset": [0, 4],
    }
    assert completion_logprobs([]) == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def test_a_chats_form():
    """Bytes that the text does not show are null, not those of U+FFFD."""
    first, second = chat_logprobs(as_rows(by_tokens()))["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == (" fün", -2.0, list(" fün".encode()))
    assert [entry["token"] for entry in first["top_logprobs"]] == ["the", "\ufffd", " fün"]
    assert second["bytes"] is None
