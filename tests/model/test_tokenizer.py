"""The tokenizer against transformers' on the same files, and against what a stranger's prompt or folder may hold."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ember
from ember.errors import UserError
from ember.model import byte_pairs
from ember.model.decoder import IncrementalDecoder
from ember.model.presets import TINY
from ember.model.tokenizer import Tokenizer
from ember.model.tokenizer_folder import load_tokenizer
from ember.model.vocabulary import GPT2_BPE, byte_alphabet

ROOT = Path(ember.__file__).parent.parent
EOT = "<|endoftext|>"
TEXTS = [
    "",
    "The capital of France is",
    " leading and trailing ",
    "I'm you're they'll we've he'd she's can't 'S 'LL o'clock ''s '",
    "a  b   c    d\t\te\n\nf\r\n\r\ng \n h\n \ni",
    "   ",
    "\n\n\n",
    " \n",
    "x \n\n   y",
    "0 1 12 123 1234567890 3.14159 1,000,000 ½ ² Ⅷ ٣٤٥ 十二",
    "naïve café Ünïcödé ångström",
    "Ελληνικά Русский עברית العربية हिन्दी ไทย",
    "中文字符 日本語テキスト 한국어 텍스트",
    "👍🏽 👨‍👩‍👧‍👦 🇫🇷 😀😀😀 ☃️",
    "e\u0301 zero\u200bwidth non\u00a0breaking\u3000ideographic\u2028line\u0085next",
    "\x00\x01\x1c\x1d\x1e\x1f\x7f control",
    "def f(x):\n    return x ** 2  # comment\n\n\nclass A:\n\tpass\n",
    "!!! ??? ... --- ___ /// @#$%^&*() <html></html> {}[]",
    f"text {EOT} as text",
    "\ufeffBOM \ufffd",
    "a" * 1000,
    " " * 1000 + "x",
    "antidisestablishmentarianism Donaudampfschifffahrtsgesellschaft",
]


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return load_tokenizer(GPT2_BPE)


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return load_tokenizer(TINY)


def prompts() -> list[str]:
    lines = [line for name in ("humaneval", "mtbench") for line in (ROOT / f"jobs/prompts/{name}.jsonl").open()]
    return [json.loads(line)["prompt"] for line in lines]


def reference(folder: Path):
    """transformers' tokenizer of a folder, special tokens in text left as text."""
    transformers = pytest.importorskip("transformers")
    vocab, merges = str(folder / "vocab.json"), str(folder / "merges.txt")
    if int(transformers.__version__.split(".")[0]) >= 5:
        vocab, merges = json.loads(Path(vocab).read_text()), Path(merges).read_text().split("\n")
        merges = [tuple(line.split(" ")) for line in merges if line and not line.startswith("#version")]
        return transformers.GPT2Tokenizer(vocab=vocab, merges=merges)
    return transformers.GPT2Tokenizer(vocab, merges)


def write(folder: Path, vocab: dict[str, int], merges: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return folder


def small(merges: tuple[str, ...] = ("t h", "th e", "a b")) -> tuple[dict[str, int], list[str]]:
    tokens = [*sorted(byte_alphabet()), *(merge.replace(" ", "") for merge in merges)]
    return {token: i for i, token in enumerate(tokens)}, list(merges)


def test_gpt2_of_the_readme(gpt2: Tokenizer) -> None:
    """Guards the vendored files: the five ids that everyone knows."""
    assert gpt2.encode("The capital of France is") == [464, 3139, 286, 4881, 318]
    assert gpt2.vocab_size == 50257


def test_folder_without_tokenizer_files_means_gpt2s(tmp_path: Path, gpt2: Tokenizer) -> None:
    """An export without tokenizer files failed to load, or got the tiny model's vocabulary."""
    assert load_tokenizer(tmp_path).encode("Hello world") == gpt2.encode("Hello world") == [15496, 995]


@pytest.mark.parametrize("folder", [GPT2_BPE, TINY], ids=["gpt2", "tiny"])
def test_same_ids_as_transformers(folder: Path) -> None:
    """Another pre-tokenizer, merge order or special-token treatment gives a model other ids than it was trained on."""
    theirs, ours = reference(folder), load_tokenizer(folder)
    for text in [*TEXTS, *prompts()]:
        assert ours.encode(text) == theirs.encode(text, split_special_tokens=True), repr(text[:80])
        assert ours.encode(text, allow_special_tokens=True) == theirs.encode(text), repr(text[:80])


def test_same_ids_as_transformers_on_random_text(gpt2: Tokenizer) -> None:
    """Unicode classes (letters, numbers, spaces) that differ between regex engines shift token borders."""
    theirs, rng = reference(GPT2_BPE), random.Random(0)
    points = [p for p in range(0x20, 0x3100)] + [0x0A, 0x09, 0x0D, 0x85, 0x1F600, 0x1D7CE, 0x10400]
    for _ in range(300):
        text = "".join(rng.choice(["", " ", "  "]) + chr(rng.choice(points)) for _ in range(20))
        assert gpt2.encode(text) == theirs.encode(text, split_special_tokens=True), repr(text)


@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_round_trip(tiny: Tokenizer, text: str) -> None:
    """A byte lost or doubled on the way would change a prompt; both decoders must give the text back."""
    ids = tiny.encode(text)
    decoder = IncrementalDecoder(tiny)
    for token_id in ids:
        decoder.push(token_id)
    decoder.finish()
    assert tiny.decode(ids) == decoder.text == text
    assert tiny.min_tokens(text) <= len(ids)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 5000), max_size=30))
def test_incremental_decoding_of_any_ids_equals_decode(tiny: Tokenizer, ids: list[int]) -> None:
    """Models emit halves of characters and padding ids: the streamed text must still be the decoded one."""
    decoder = IncrementalDecoder(tiny)
    for token_id in ids:
        decoder.push(token_id)
    decoder.finish()
    assert decoder.text == tiny.decode(ids)


def test_special_tokens_are_text_unless_allowed(gpt2: Tokenizer) -> None:
    """A prompt that quotes <|endoftext|> would end the context for whoever wrote it."""
    assert 50256 not in gpt2.encode(f"a{EOT}b")
    assert gpt2.encode(f"a{EOT}b", allow_special_tokens=True) == [64, 50256, 65]
    assert gpt2.decode(gpt2.encode(f"a{EOT}b")) == f"a{EOT}b"


def test_special_and_padding_ids_have_no_bytes(gpt2: Tokenizer) -> None:
    """A vocabulary padded to 50304 makes the model able to emit ids that no token has."""
    assert gpt2.token_bytes(50256) == gpt2.token_bytes(50303) == gpt2.token_bytes(-1) == b""
    assert gpt2.token_bytes(464) == b"The"


def test_ids_that_do_not_follow_the_merges(tmp_path: Path) -> None:
    """tiktoken merges by rank: with ids for ranks, a shuffled vocabulary would merge in another order."""
    vocab = json.loads((TINY / "vocab.json").read_text())
    ids = random.Random(1).sample(range(len(vocab)), len(vocab))
    shuffled = {token: ids[i] for token, i in vocab.items()}
    merges = (TINY / "merges.txt").read_text().split("\n")[1:-1]
    ours = load_tokenizer(write(tmp_path, shuffled, merges))
    theirs, plain = reference(tmp_path), load_tokenizer(TINY)
    for text in [*TEXTS, *prompts()[:50]]:
        assert (
            ours.encode(text) == theirs.encode(text, split_special_tokens=True) == [ids[i] for i in plain.encode(text)]
        )
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode(EOT, allow_special_tokens=True) == [ids[vocab[EOT]]]


def test_trained_with_special_tokens_first(tmp_path: Path) -> None:
    """The tokenizers library puts special tokens at the low ids and sorts the bytes: every id is off by a few."""
    tokenizers = pytest.importorskip("tokenizers")
    before = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = before
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<pad>", EOT], initial_alphabet=before.alphabet(), show_progress=False
    )
    theirs.train_from_iterator(prompts()[:60], trainer)
    theirs.model.save(str(tmp_path))
    ours = load_tokenizer(tmp_path)
    for text in TEXTS:
        expected = theirs.encode(text.replace(EOT, "")).ids
        assert ours.encode(text.replace(EOT, "")) == expected
    assert ours.encode(f"<pad>{EOT}", allow_special_tokens=True) == [0, 1]


def test_tokenizer_json_alone(tmp_path: Path) -> None:
    """transformers 5 saves tokenizer.json only: falling back to GPT-2's vocabulary would be silently wrong."""
    theirs = reference(TINY)
    theirs.add_tokens(["<|plain|>"])
    theirs.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    theirs.save_pretrained(tmp_path)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).unlink(missing_ok=True)
    ours = load_tokenizer(tmp_path)
    for text in [*TEXTS, *prompts()[:30], "a<|plain|>b", f"<|user|>hi{EOT}<|plain|>"]:
        assert ours.encode(text, allow_special_tokens=True) == theirs.encode(text)
    assert ours.decode(ours.encode("a<|plain|>b<|user|>")) == "a<|plain|>b<|user|>"
    assert ours.token_bytes(theirs.convert_tokens_to_ids("<|user|>")) == b""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": {"type": "BPE", "vocab": [], "merges": []}}, "model.vocab"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": [["a"]]}}, "merge of two"),
        ({"added_tokens": [{"id": 1}]}, "added token"),
    ],
)
def test_broken_tokenizer_json(tmp_path: Path, change: dict, says: str) -> None:
    """A stranger's file of the right kind with parts of wrong types ended in a traceback."""
    data = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": {"type": "ByteLevel"}} | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=says) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_added_tokens_of_tokenizer_config(tmp_path: Path) -> None:
    """Chat markers that were added after training are only listed in tokenizer_config.json."""
    folder = write(tmp_path, *small())
    listed = {"259": {"content": "<|user|>", "special": True}, "260": {"content": "<tab>", "special": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    ours = load_tokenizer(folder)
    assert ours.encode("<|user|><tab>", allow_special_tokens=True) == [259, 260]
    assert ours.encode("<tab>") == [260]
    assert (ours.decode([259, 260]), ours.vocab_size) == ("<tab>", 261)


@pytest.mark.parametrize(
    "settings_file", [{"add_prefix_space": True}, {"add_bos_token": True}, {"tokenizer_class": "BertTokenizer"}]
)
def test_settings_that_would_change_ids_are_refused(tmp_path: Path, settings_file: dict) -> None:
    """Ignoring a prefix space or an automatic BOS shifts every prompt of the model."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_file))
    with pytest.raises(UserError, match=next(iter(settings_file))):
        load_tokenizer(tmp_path)


def test_a_folder_with_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    """A Chinese GPT-2 with BERT's vocab.txt would be run on GPT-2's ids."""
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    with pytest.raises(UserError, match=r"vocab\.txt"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_one_of_the_two_files(tmp_path: Path, name: str) -> None:
    """A half-copied folder must not fall back to GPT-2's vocabulary."""
    (tmp_path / name).write_text((TINY / name).read_text())
    with pytest.raises(UserError, match="needs both"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("vocab", "merges", "says"),
    [
        ({"a": 0, "b": 0}, [], "same id"),
        ({"a": -1}, [], "has id -1"),
        ({"a": 2**40}, [], "has id"),
        ({"a": True}, [], "has id"),
        ({"a": "0"}, [], "has id"),
        ({"a": 0, "b": 1}, ["a b"], "do not exist"),
        ({"a": 0, "b": 1, "ab": 2}, ["a b c"], "merge of two"),
        ({"a": 0, "\ud800": 1}, [], "not Unicode"),
    ],
)
def test_broken_vocabularies(tmp_path: Path, vocab: dict, merges: list[str], says: str) -> None:
    """A stranger's vocabulary made tiktoken panic or the ids collide."""
    with pytest.raises(UserError, match=says) as caught:
        load_tokenizer(write(tmp_path, vocab, merges))
    assert "\n" not in str(caught.value)


def test_a_byte_without_a_token_is_an_error_of_that_text(tmp_path: Path) -> None:
    """tiktoken panics on a byte that it has no rank for; that must cost one row, not the job."""
    vocab, merges = small()
    del vocab["z"]
    ours = load_tokenizer(write(tmp_path, vocab, merges))
    assert ours.decode(ours.encode("the cab")) == "the cab"
    with pytest.raises(UserError, match="0x7A"):
        ours.encode("buzz")


def test_lone_surrogates_are_refused(gpt2: Tokenizer) -> None:
    r"""JSON's "\ud800" reaches us as a lone surrogate, which tiktoken quietly turns into U+FFFD."""
    with pytest.raises(UserError, match=r"U\+D800 at character 2"):
        gpt2.encode("ab\ud800")
    assert gpt2.min_tokens("ab\ud800") >= 1


@pytest.mark.parametrize(
    ("text", "end"),
    [
        *((text, "") for text in ("a", " ", "\n", "é", "1", "'", "\n a")),
        *((text, end) for text in (" ", "\n", "\t \n", "\u00a0") for end in ("x", EOT)),
    ],
)
def test_a_million_repeated_characters(gpt2: Tokenizer, text: str, end: str) -> None:
    """10^6 spaces before a word overflow tiktoken's regex stack, which panics past every `except Exception`."""
    whole, start = text * (1_000_002 // len(text)) + end, time.perf_counter()
    ids = gpt2.encode(whole, allow_special_tokens=True)
    assert time.perf_counter() - start < 30
    assert gpt2.min_tokens(whole) <= len(ids)
    assert b"".join(map(gpt2.token_bytes, ids)) == whole.removesuffix(EOT).encode()


def test_cutting_long_runs_changes_no_token(gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut that spares tiktoken's stack must lie on a token's border, whatever stands around the run."""
    texts = [f"{left}{space * n}{right}" for left in ("", "a", "1", "!") for right in ("", "b", "2", "?", "\x1c", "'s")
             for space in (" ", "\n", "\t ", "\u00a0", " \x85\u2028", "\u3000") for n in (1, 2, 5, 9)]  # fmt: skip
    expected = [gpt2.encode(text + "\n\n  " + text) for text in texts]
    monkeypatch.setattr(byte_pairs, "LONG_RUN", 1)
    short = byte_pairs._LONG_RUN_OF_SPACE.pattern.replace("100000", "2")
    assert "{2,}" in short
    monkeypatch.setattr(byte_pairs, "_LONG_RUN_OF_SPACE", byte_pairs.re.compile(short))
    assert [gpt2.encode(text + "\n\n  " + text) for text in texts] == expected


def test_a_panic_is_an_error_of_that_text(gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Rust panic is a BaseException: it would end the process, with every finished row's writer in it."""
    panic = type("PanicException", (BaseException,), {})

    class Panics:
        def encode_ordinary(self, text: str) -> list[int]:
            raise panic("StackOverflow")

    monkeypatch.setattr(gpt2, "_bpe", Panics())
    with pytest.raises(UserError, match="gave up"):
        gpt2.encode("x")


def test_loading_is_fast_and_needs_no_network() -> None:
    """tiktoken downloads its named encodings: a machine without network could not tokenise."""
    code = (
        "import socket\n"
        "def refuse(*args, **kwargs): raise AssertionError('network')\n"
        "socket.socket = socket.create_connection = socket.getaddrinfo = refuse\n"
        "from pathlib import Path\n"
        "from ember.model.tokenizer_folder import load_tokenizer\n"
        "print(load_tokenizer(Path('nowhere')).encode('The capital of France is'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.strip() == "[464, 3139, 286, 4881, 318]", done.stderr
