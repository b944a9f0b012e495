"""Tokenizers that the `tokenizers` library runs: ids and texts are transformers', whatever a text holds."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ember.errors import UserError
from ember.model.decoder import IncrementalDecoder
from ember.model.library_tokenizer import LibraryTokenizer
from ember.model.tokenizer_folder import load_tokenizer
from ember.model.tokenizer_settings import TokenizerSettings
from tests.chat_models import KINDS, tokenizer_folder, tokenizer_json

TEXTS = [
    "The capital of France is",
    " leading, trailing ",
    "  two  spaces   three\n\n\t tab",
    "def f(x):\n    return x ** 2  # 1234567890",
    "naïve e\u0301 中文 😀 👨‍👩‍👧 ▁▁ <0x41>",
    "text <|im_end|> as </s>  text <s><tool> x<tool>",
    "",
    " ",
]


@cache
def ours(kind: str) -> LibraryTokenizer:
    return LibraryTokenizer(json.loads(tokenizer_json(kind)), TokenizerSettings(), "tokenizer.json")


@cache
def library(kind: str):
    return pytest.importorskip("tokenizers").Tokenizer.from_str(tokenizer_json(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_same_ids_and_text_as_the_library(kind: str) -> None:
    """Another place of the BOS, prefix space or control token gives a model ids that it was not trained on."""
    for text in TEXTS:
        ids = ours(kind).encode(text, allow_special_tokens=True)
        assert ids == library(kind).encode(text).ids, repr(text)
        assert ours(kind).decode(ids) == library(kind).decode(ids), repr(text)
        assert ours(kind).min_tokens(text) <= len(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_same_ids_as_transformers(tmp_path: Path, kind: str) -> None:
    """What transformers adds to the library (BOS, special tokens of the settings) was lost."""
    transformers = pytest.importorskip("transformers")
    folder = tokenizer_folder(tmp_path, kind)
    theirs, loaded = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in TEXTS:
        assert loaded.encode(text, allow_special_tokens=True) == theirs.encode(text), repr(text)


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_in_text_are_text(kind: str) -> None:
    """A prompt that says `<|im_end|>` ended its own message."""
    text = "a <|im_end|> b <s> </s> c <|im_start|>"
    ids = ours(kind).encode(text)
    body = ids[len(ours(kind)._before) :]
    assert not set(body) & set(ours(kind).special.values())
    assert ours(kind).decode(ids) == text
    assert (
        ours(kind).encode_parts(["a ", ours(kind).special["<|im_end|>"], " b"])
        == library(kind).encode("a <|im_end|> b", add_special_tokens=False).ids
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_comes_back_a_token_at_a_time(kind: str, text: str) -> None:
    """Byte fallback split over tokens gave U+FFFD, and the space before a text stayed or went with another token."""
    ids = ours(kind).encode(text)
    assert ours(kind).decode(ids) == library(kind).decode(ids)
    decoder = IncrementalDecoder(ours(kind))
    for token_id in ids:
        before = decoder.text
        decoder.push(token_id)
        assert decoder.text.startswith(before)
    decoder.finish()
    assert decoder.text == library(kind).decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_tokens_decode_as_in_the_library(kind: str, data: st.DataObject) -> None:
    """A model emits what no text encodes to: stray bytes, control tokens amid a character, spaces first."""
    tokenizer = ours(kind)
    fallback = tokenizer.spelling.byte_tokens
    plain = st.sampled_from([i for i in range(tokenizer.vocab_size) if i not in fallback])
    ids = data.draw(st.lists(plain, max_size=12))
    if fallback:  # whole characters in bytes, and stray bytes alone; a mix of both in one run see below
        byte_id = {tokenizer.token_bytes(i): i for i in fallback}
        pieces = [[byte_id[bytes([b])] for b in char.encode()] for char in "é中😀 a"] + [[byte_id[b"\xe4"]]]
        for piece in data.draw(st.lists(st.sampled_from(pieces), max_size=4)):
            spot = tokenizer.special["</s>"] + 3 + 256  # some token that is text
            ids = [*ids, spot, *piece]
    assert tokenizer.decode(ids) == library(kind).decode(ids)


def test_whole_characters_stay_when_a_run_of_bytes_ends_badly() -> None:
    """The library takes back characters that were whole: what a stream has shown can't be taken back."""
    tokenizer = ours("llama2")
    byte_id = {tokenizer.token_bytes(i): i for i in tokenizer.spelling.byte_tokens}
    ids = [byte_id[bytes([b])] for b in "😀".encode() + "中".encode()[:2]]
    assert tokenizer.decode(ids) == "😀\ufffd\ufffd"


@pytest.mark.parametrize("kind", ["llama2", "metaspace"])
def test_the_first_space_of_a_completion(kind: str) -> None:
    """`▁Paris` after a prompt is " Paris", but "Paris" where nothing stands before it: the library's own difference."""
    tokenizer = ours(kind)
    prompt = tokenizer.encode("The capital is")
    word = tokenizer.encode("x return")[-1]
    assert tokenizer.token_bytes(word).startswith(b" ")
    for before in (prompt, tokenizer.encode("")):
        decoder = IncrementalDecoder(tokenizer, before)
        decoder.push(word)
        whole = library(kind).decode([*before, word])
        assert decoder.text == whole.removeprefix(library(kind).decode(before))


def test_the_least_number_of_tokens_is_never_too_high() -> None:
    """Prompts were refused as too long by their bytes, where the tokenizer drops most of them."""
    long = " " * 10_000 + "a"
    for kind in KINDS:
        bounded = ours(kind).min_tokens(long)
        assert bounded <= len(ours(kind).encode(long))
    data = json.loads(tokenizer_json("llama2"))
    for change in (
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
    ):
        tokenizer = LibraryTokenizer(data | change, TokenizerSettings(), "tokenizer.json")
        assert tokenizer.min_tokens(long) == 0 < len(tokenizer.encode(long))


def test_bos_of_the_settings_goes_before_the_files(tmp_path: Path) -> None:
    """`add_bos_token: false` beside a tokenizer.json that adds one: transformers follows the former."""
    off = load_tokenizer(tokenizer_folder(tmp_path / "off", "llama2", add_bos_token=False))
    both = load_tokenizer(tokenizer_folder(tmp_path / "both", "llama2", add_bos_token=True, add_eos_token=True))
    plain = ours("llama2").encode("a")
    assert plain[0] == 1 and off.encode("a") == plain[1:]
    assert both.encode("a") == [*plain, both.special["<|im_end|>"]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "decoder"),
        ({"decoder": None}, "decoder"),
        ({"model": 5}, "model must be an object"),
        ({"normalizer": {"type": "Nonsense"}}, "can't read it"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "can't read it"),
        ({"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "?"}}, "can't run it"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, change: dict, says: str) -> None:
    """A decoder that is not followed would give wrong texts without a word."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer_json("llama2")) | change))
    with pytest.raises(UserError, match=says) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value) and "tokenizer.json" in str(caught.value)


def test_a_normalizer_that_the_library_knows_by_its_keys() -> None:
    """Without a type it was read, and then not found."""
    data = json.loads(tokenizer_json("llama2")) | {"normalizer": {"prepend": "\u2581"}}
    assert LibraryTokenizer(data, TokenizerSettings(), "tokenizer.json").min_tokens("a" * 99) == 0


def test_special_tokens_that_are_no_text() -> None:
    """A lone surrogate in tokenizer_config.json: a traceback."""
    data = json.loads(tokenizer_json("llama2"))
    with pytest.raises(UserError, match=r"tokenizer.json: .*special tokens"):
        LibraryTokenizer(data, TokenizerSettings(named={"bos_token": "\udcff"}), "tokenizer.json")


def test_random_ids_are_refused(tmp_path: Path) -> None:
    """BPE dropout makes the same prompt other ids at every run."""
    data = json.loads(tokenizer_json("llama2"))
    data["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"model\.dropout=0\.1"):
        load_tokenizer(tmp_path)


def test_a_plain_byte_level_file_alone_is_enough_for_any_kind_of_model(tmp_path: Path) -> None:
    """It was taken for GPT-2's own, and then missed a vocab.json beside it."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, "ab", "unused"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path, gpt2s_by_default=False)
    assert list(loaded.encode("cab é")) == tokenizer.encode("cab é").ids
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json; a model of this kind needs one"):
        load_tokenizer(tmp_path, gpt2s_by_default=False)


def test_the_package_is_named_when_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that needs an extra ended in a traceback."""
    import sys

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'ember-batch\[hf\]'"):
        load_tokenizer(tokenizer_folder(tmp_path, "byte_level"))
