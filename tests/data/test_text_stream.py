"""Pieces of a growing text: nothing shown is ever taken back, and nothing is held back without reason."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ember.data.text_stream import TextStream

WORDS = st.text("ab", min_size=1, max_size=4)


@given(st.lists(WORDS, max_size=8), st.lists(WORDS, max_size=3))
def test_pieces_make_the_text_up_to_the_first_stop(tokens: list[str], stop: list[str]) -> None:
    """A stop string over several tokens must not show its beginning; what only looks like one must come out whole."""
    stream, text, shown = TextStream(stop), "", ""
    for token in tokens:
        text += token
        hits = [at for s in stop if (at := text.find(s)) >= 0]
        if hits:
            text = text[: min(hits)]
            break
        shown += stream.take(text)
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert not held or any(s.startswith(held) for s in stop)
    assert shown + stream.rest(text) == text


def test_without_stop_strings_all_is_shown_at_once() -> None:
    stream = TextStream([])
    assert [stream.take("a"), stream.take("abc"), stream.rest("abcd")] == ["a", "bc", "d"]
