"""Tokens to text: characters split over tokens, stop strings wherever they fall, and what a result says."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ember.core.sequence import FinishReason
from ember.data.output import IncrementalDecoder, OutputProcessor
from ember.model.decoder import Leading, Spelling
from tests.fakes import FakeTokenizer, make_sequence

FACE = "😀".encode()


def tokenizer_of(*pieces):
    return FakeTokenizer(dict(enumerate(pieces)))


def decode(*pieces):
    """The text after each piece, and after the end."""
    decoder = IncrementalDecoder(tokenizer_of(*pieces))
    texts = []
    for token in range(len(pieces)):
        decoder.push(token)
        texts.append(decoder.text)
    decoder.finish()
    return [*texts, decoder.text]


def run_stops(pieces, stop, min_tokens=0):
    """Push pieces until a stop string is complete: (stop string or None, tokens taken, final text)."""
    outputs = OutputProcessor(tokenizer_of(*pieces))
    sequence = make_sequence(0, 1, 50, stop=stop, min_tokens=min_tokens)
    outputs.add(sequence)
    hit = None
    for token in range(len(pieces)):
        sequence.token_ids.append(token)
        hit = outputs.push(0, token)
        if hit is not None:
            break
    return hit, sequence.num_output_tokens, outputs.finish(sequence).text


def test_a_character_split_over_tokens_appears_whole():
    """Half a character shown as U+FFFD would stay in the text for good."""
    assert decode(b"a", FACE[:1], FACE[1:3], FACE[3:] + b"b") == ["a", "a", "a", "a😀b", "a😀b"]


def test_a_stop_string_that_byte_tokens_spell():
    """Byte fallback was only text once another token came: the stop was found a token late, and that token kept."""
    pieces = [b"a", *(bytes([byte]) for byte in FACE), b"b"]
    tokenizer = tokenizer_of(*pieces)
    tokenizer.spelling = Spelling(frozenset(range(1, 1 + len(FACE))), Leading.STRIP_ONE)
    outputs, sequence = OutputProcessor(tokenizer), make_sequence(0, 1, 50, stop=["😀"])
    outputs.add(sequence)
    hits = []
    for token in range(1 + len(FACE)):
        sequence.token_ids.append(token)
        hits.append(outputs.push(0, token))
    assert hits == [None] * len(FACE) + ["😀"]
    assert outputs.finish(sequence).text == "a"


def test_half_a_character_at_the_end_shows_only_there():
    """Output that ends inside a character shows U+FFFD at the very end, not before."""
    assert decode(b"a", FACE[:2]) == ["a", "a", "a\ufffd"]


def test_bytes_that_are_no_utf8_do_not_stick():
    """A broken byte becomes U+FFFD as soon as it is known to be broken, and what follows is text again."""
    pieces = (b"\xff", b"a", b"\xe2\x82", b"z")
    assert decode(*pieces) == ["\ufffd", "\ufffda", "\ufffda", "\ufffda\ufffdz", "\ufffda\ufffdz"]


def test_empty_tokens_change_nothing():
    """Special tokens have no text, also in the middle of a character."""
    assert decode(b"", FACE[:2], b"", FACE[2:]) == ["", "", "", "😀", "😀"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=12))
def test_any_split_of_any_bytes_decodes_alike(data, cuts):
    """How the bytes fall into tokens must not change one character; a lost or doubled byte would."""
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(bounds)]
    texts = decode(*pieces)
    assert texts[-1] == data.decode(errors="replace")
    assert all(texts[-1].startswith(text) for text in texts)


STOPS = [
    # pieces, stop, (which, tokens, text)
    (["ab", "c", "d"], ["c"], ("c", 2, "ab")),
    (["ab", "cd", "e"], ["bc"], ("bc", 2, "a")),
    (["a", "b", "c", "d"], ["abc"], ("abc", 3, "")),
    (["x", "EN", "D", "y"], ["END"], ("END", 3, "x")),
    (["abcabd"], ["abd"], ("abd", 1, "abc")),
    (["one END two END"], ["END"], ("END", 1, "one ")),
    (["aab", "c"], ["zz", "q"], (None, 2, "aabc")),
    (["xaby"], ["by", "ab"], ("ab", 1, "x")),
    (["xab", "c"], ["abc", "b"], ("b", 1, "xa")),
    (["a", "a", "a"], ["aa"], ("aa", 2, "")),
    (["x\n", "\ny"], ["\n\n"], ("\n\n", 2, "x")),
    (["x", "yz"], "z", ("z", 2, "xy")),
    (["EN", "EN", "D"], ["END"], ("END", 3, "EN")),
]


@pytest.mark.parametrize(("pieces", "stop", "expected"), STOPS)
def test_stop_strings(pieces, stop, expected):
    """Within a token, at its edge, across tokens, twice, overlapping: the earliest wins and the text ends before it."""
    assert run_stops([piece.encode() for piece in pieces], stop) == expected


def test_the_earlier_of_two_wins_whatever_their_order():
    """The stop that begins first counts, not the one listed first."""
    for stop in (["cd", "bcd"], ["bcd", "cd"]):
        assert run_stops([b"abcd"], stop) == ("bcd", 1, "a")


def test_two_stops_that_begin_together():
    """Either is true; it must always be the same one, and the text the same."""
    assert run_stops([b"xabc"], ["abc", "ab"]) == run_stops([b"xabc"], ["ab", "abc"])


def test_a_stop_string_of_split_characters():
    """A stop may consist of bytes of several tokens; it is complete when its last byte is there."""
    assert run_stops([b"a", FACE[:2], FACE[2:], b"b"], ["😀"]) == ("😀", 3, "a")


def test_bytes_held_back_do_not_show_after_a_stop():
    """What follows the stop within its token is cut, half a character too."""
    assert run_stops([b"aSTOP" + FACE[:2]], ["STOP"]) == ("STOP", 1, "a")


def test_stop_strings_wait_for_min_tokens():
    """A stop that completes within min_tokens is ignored for good; one that completes after counts."""
    assert run_stops([b"END", b"a", b"END"], ["END"], min_tokens=1) == ("END", 3, "ENDa")
    assert run_stops([b"END", b"a", b"b"], ["END"], min_tokens=1) == (None, 3, "ENDab")
    assert run_stops([b"EN", b"D", b"x"], ["END"], min_tokens=1) == ("END", 2, "")
    assert run_stops([b"EN", b"D", b"x"], ["END"], min_tokens=2) == (None, 3, "ENDx")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text("ab😀", max_size=3).map(str.encode), min_size=1, max_size=10),
    stops=st.lists(st.text("ab😀", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stops_are_found_at_the_first_token_that_completes_one(pieces, stops):
    """The search looks only at the end of the text; it must find what a search of the whole would."""
    hit, taken, text = run_stops(pieces, stops)
    for count in range(1, len(pieces) + 1):
        whole = b"".join(pieces[:count]).decode()
        found = [stop for stop in stops if stop in whole]
        if found:
            cut = min(map(whole.find, found))
            assert (taken, text) == (count, whole[:cut])
            assert whole.startswith(hit, cut)
            return
    assert (hit, taken, text) == (None, len(pieces), b"".join(pieces).decode())


def finished(sequence):
    sequence.finish_reason = FinishReason.LENGTH
    return sequence


def test_a_result_carries_its_sequence():
    """Every field of a result comes from its own sequence."""
    outputs = OutputProcessor(FakeTokenizer())
    sequence = finished(make_sequence(4, 3, 9, seed=77))
    outputs.add(sequence)
    for token in (0, 1):
        sequence.token_ids.append(token)
        assert outputs.push(4, token) is None
    sequence.num_preemptions, sequence.sample_index, sequence.num_cached_tokens = 2, 3, 1
    sequence.arrival_s, sequence.admitted_s, sequence.first_token_s, sequence.finished_s = 10.0, 10.5, 11.0, 13.0
    result = outputs.finish(sequence)
    assert (result.index, result.text, result.token_ids) == (3, "ab", [0, 1])
    assert (result.finish_reason, result.stop_reason, result.error, result.error_kind) == ("length", None, None, None)
    assert (result.num_cached_tokens, result.num_preemptions) == (1, 2)
    assert (result.queue_s, result.ttft_s, result.latency_s) == (0.5, 1.0, 3.0)


def test_times_that_never_came_are_none():
    """A request given up while waiting has no first token; 0 - arrival would be nonsense."""
    outputs = OutputProcessor(FakeTokenizer())
    sequence = finished(make_sequence(4))
    outputs.add(sequence)
    result = outputs.finish(sequence)
    assert (result.queue_s, result.ttft_s, result.latency_s) == (None, None, None)


def test_requests_do_not_share_text():
    """Two live requests, one of them in the middle of a character."""
    outputs = OutputProcessor(FakeTokenizer({0: FACE[:2], 1: FACE[2:], 2: b"x"}))
    first, second = finished(make_sequence(1)), finished(make_sequence(2))
    outputs.add(first)
    outputs.add(second)
    for request_id, token in ((1, 0), (2, 2), (1, 1)):
        outputs.push(request_id, token)
    assert outputs.finish(first).text == "😀"
    assert outputs.finish(second).text == "x"


def test_a_discarded_id_can_be_used_again():
    """A request given up must leave neither text nor an entry behind; an unknown id is no error."""
    outputs = OutputProcessor(FakeTokenizer())
    sequence = finished(make_sequence(1))
    outputs.add(sequence)
    outputs.push(1, 0)
    outputs.discard(1)
    outputs.discard(1)
    outputs.add(sequence)
    assert outputs.finish(sequence).text == ""


def test_what_ends_the_output_shows_where_asked():
    """`include_stop_str_in_output`: the stop string whole, or the stop token, at the end of the text."""
    for shown, texts in ((False, ("a", "ab")), (True, ("abcd", "abc"))):
        outputs = OutputProcessor(tokenizer_of(b"ab", b"cde", b"b", b"c"))
        string = make_sequence(0, 1, 9, stop=["bcd"], include_stop_str_in_output=shown)
        token = make_sequence(1, 1, 9, stop_token_ids=[3], include_stop_str_in_output=shown)
        for sequence, tokens in ((string, (0, 1)), (token, (0, 3))):
            outputs.add(sequence)
            for token_id in tokens:
                sequence.token_ids.append(token_id)
                outputs.push(sequence.request_id, token_id)
        assert (outputs.finish(string).text, outputs.finish(token).text) == texts


def test_a_stop_token_before_min_tokens_shows():
    """It ends nothing there, so it is text (the sampler keeps it away; a forced one would be lost)."""
    outputs = OutputProcessor(tokenizer_of(b"a", b"b"))
    sequence = make_sequence(0, 1, 9, stop_token_ids=[1], min_tokens=2)
    outputs.add(sequence)
    for token_id in (1, 0, 1):
        sequence.token_ids.append(token_id)
        outputs.push(0, token_id)
    assert outputs.finish(sequence).text == "ba"


def test_special_tokens_show_where_asked():
    """`skip_special_tokens=false` shows <|x|>; half a character before it is U+FFFD, not glued to it."""
    for skip, text in ((True, "a"), (False, "a<|x|>")):
        outputs = OutputProcessor(FakeTokenizer({0: b"a", 9: b""}), {"<|x|>": 9})
        sequence = make_sequence(0, 1, 9, skip_special_tokens=skip)
        outputs.add(sequence)
        for token_id in (0, 9):
            sequence.token_ids.append(token_id)
            outputs.push(0, token_id)
        assert outputs.finish(sequence).text == text
