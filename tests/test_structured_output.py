"""Structured output on the embedded model, which writes nonsense: whatever it would say, the form holds."""

from __future__ import annotations

import json
import re
import sys

import jsonschema
import pytest

from ember import LLM, SamplingParams
from ember.core.sequence import FinishReason
from ember.errors import ConfigError

INTEGER = {"type": "integer", "minimum": -50, "maximum": 999}
WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
TEXT = {"type": "string", "maxLength": 12}


def obj(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = [
    INTEGER,
    WORD,
    TEXT,
    {"type": "boolean"},
    {"type": "null"},
    {"const": {"a": [1, None]}},
    {"const": 'quote " and \\ backslash, é漢😀'},
    {"enum": ["red", "green", 3, None, True]},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": "array", "prefixItems": [{"enum": [0.5, -1.5e3]}], "maxItems": 1},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "enum": ["yes", "yesterday", "no"]},
    {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 3},
    {"type": "array", "prefixItems": [INTEGER, WORD], "items": False, "minItems": 2},
    obj(),
    obj(a=INTEGER),
    obj(name=WORD, age=INTEGER),
    obj(name=TEXT, tags={"type": "array", "items": WORD, "maxItems": 3}),
    obj(inner=obj(deep=obj(x={"type": "boolean"}))),
    obj(kind={"const": "cat"}, lives={"type": "integer", "minimum": 1, "maximum": 9}),
    {"type": "object", "properties": {"a": INTEGER, "b": WORD}, "required": ["b"], "additionalProperties": False},
    {
        "type": "object",
        "patternProperties": {"^[a-c]{1,3}$": INTEGER},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, WORD]},
    {"oneOf": [obj(kind={"const": "a"}, x=INTEGER), obj(kind={"const": "b"}, y=WORD)]},
    {"allOf": [{"type": "integer"}, {"minimum": 10}, {"maximum": 12}]},
    {"$ref": "#/$defs/pair", "$defs": {"pair": obj(left=INTEGER, right={"type": "boolean"})}},
    obj(**{"key with space": INTEGER, 'quote"': WORD, "ünï": {"type": "null"}}),
    obj(**{f"field_{i}": INTEGER for i in range(8)}),
]
REGEXES = [r"[A-Z][a-z]{2,9} \d{4}", r"(yes|no)(, (yes|no)){0,3}", r"[^\n]{5,20}\n", r"\d{3}-\d{4}", "é{2}漢?"]


@pytest.fixture(scope="module")
def llm():
    return LLM(device="cpu", dtype="float32", max_num_seqs=64, max_model_len=512, pool_size="12000tok")


def hot(seed=0, max_tokens=300, **params):
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=seed, **params)


def test_every_json_output_parses_and_matches(llm):
    """All of 34 schemas, at temperature 1: one token past the mask and the JSON is broken."""
    asked = [hot(seed, json_schema=schema) for seed in range(2) for schema in SCHEMAS]
    outputs = llm.generate(["The President said"] * len(asked), asked)
    for output, params in zip(outputs, asked, strict=True):
        assert output.finish_reason is FinishReason.STOP, (params.json_schema, output.error, output.text)
        jsonschema.validate(json.loads(output.text), params.json_schema, cls=jsonschema.Draft202012Validator)


def test_every_other_form_matches(llm):
    """Regular expressions from first to last character; a choice is one of the texts and no more."""
    choices = [["Paris", "London is", "x"], ["a", "ab", "abc"], ['quote"', "\nline", "漢😀"]]
    grammar = 'start: "<" word (" " word)~1..3 ">"\nword: /[a-z]{1,5}/'
    asked = [hot(seed, **form) for seed in range(3) for form in [
        *({"regex": regex} for regex in REGEXES), *({"choice": choice} for choice in choices), {"grammar": grammar}
    ]]  # fmt: skip
    for output, params in zip(llm.generate(["It is"] * len(asked), asked), asked, strict=True):
        assert output.finish_reason is FinishReason.STOP, (params, output.error)
        if params.choice is not None:
            assert output.text in params.choice
        else:
            pattern = params.regex or r"<[a-z]{1,5}( [a-z]{1,5}){1,3}>"
            assert re.fullmatch(pattern, output.text), (pattern, output.text)


def test_an_output_that_is_cut_says_so(llm):
    """`length` is how a reader knows that the JSON is not whole."""
    output = llm.generate("x", hot(max_tokens=3, json_schema=SCHEMAS[-1]))[0]
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 3)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"json_schema": {"type": "intger"}}, "intger"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 1}}, "nsatisfiable"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"regex": "[a-"}, "unclosed"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"[^\x00-\U0010FFFF]"}, "no output can match"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"json_schema": '{"enum": [1e999]}'}, "expected value"),
        ({"json_schema": {"minimum": 10**400}}, "out of range"),
        ({"regex": "\ud800"}, "surrogates"),
    ],
)
def test_a_form_that_is_none_is_an_error_row(llm, form, why):
    """It costs that row, and says why in one line; what llguidance can't do is never passed over.

    Numbers beyond JSON's own, which Python reads, ended the whole job.
    """
    bad, good = llm.generate(["a", "b"], [hot(**form), hot(choice=["ok"])])
    assert (bad.error_kind, bad.text) == ("bad_sampling", "")
    assert why in bad.error and "\n" not in bad.error and next(iter(form)) in bad.error
    assert good.text == "ok"


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": [1]}, "json_schema"),
        ({"regex": ""}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": "a"}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"regex": "a", "choice": ["a"]}, "choice"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_is_no_form_at_all(params, key):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**params)
    assert caught.value.key == key


def test_a_rows_form_replaces_the_jobs():
    """A job with a schema and a row with a choice: not two forms, but the row's."""
    params = SamplingParams(json_schema='{"type": "integer"}').override({"choice": ["a"]})
    assert (params.json_schema, params.choice) == (None, ["a"])
    assert SamplingParams(json_schema='{"type": "integer"}').json_schema == {"type": "integer"}


def test_eos_does_not_end_an_incomplete_output(llm):
    """A model that wants to stop at once: EOS gets the highest logit, and comes only when the form is whole."""
    outputs = llm.generate(["x"] * 2, hot(json_schema=obj(a=INTEGER), logit_bias={4095: 100}, n=1))
    for output in outputs:
        assert INTEGER["minimum"] <= json.loads(output.text)["a"] <= INTEGER["maximum"]
        assert output.token_ids[-1] == 4095


def test_the_same_tokens_whatever_happens_to_the_row(llm):
    """A matcher that counts steps instead of reading tokens is lost after a preemption or a wrong proposal."""
    asked = [hot(i, 60, json_schema=SCHEMAS[-1 - i % 6], n=2) for i in range(8)]
    prompts = [f"In the year {i} the" for i in range(8)]
    calm = llm.generate(prompts, asked)
    small = LLM(
        device="cpu",
        dtype="float32",
        block_size=4,
        max_model_len=96,
        pool_size="120tok",
        max_num_seqs=5,
        scheduler="mixed",
        speculative="ngram",
    )
    pressed = small.generate(prompts, asked)
    assert sum(o.num_preemptions for output in pressed for o in output.outputs) > 0
    assert [[o.token_ids for o in out.outputs] for out in pressed] == [
        [o.token_ids for o in out.outputs] for out in calm
    ]


def test_without_llguidance(llm, monkeypatch):
    """The line names the extra; other rows run."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = llm.plan.structured_output()
    with pytest.raises(ConfigError, match=r"pip install 'ember-batch\[structured\]'"):
        fresh.matcher(SamplingParams(regex="a"), {4095})
    assert fresh.matcher(SamplingParams(), {4095}) is None
