"""A byte-level BPE vocabulary as a model folder stores it: tokens, their ids, the order of the merges.

Read from `tokenizer.json` (all that recent transformers save), else from `vocab.json` + `merges.txt`, else GPT-2's own
from `gpt2_bpe/`. What would make ids differ from Hugging Face's (another kind of tokenizer, a prefix space, automatic
BOS) is refused by name, or is left to the `tokenizers` library where there is a tokenizer.json (see `is_plain`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ember.errors import UserError
from ember.model.gpt2_config import TOKENIZERS
from ember.model.json_file import read_json_object, show

GPT2_BPE = Path(__file__).parent / "gpt2_bpe"
MAX_ID = 2**24
_CHANGES_IDS = ("add_prefix_space", "add_bos_token", "add_eos_token")
_RULES = ("lstrip", "rstrip", "single_word")
_OTHER_KINDS = ("vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


@dataclass(slots=True)
class Vocabulary:
    """Tokens by what they are made of.

    Attributes:
        pieces: id -> bytes of the single bytes and merged tokens, bytes first, then in the order of their merges.
        added: text -> id of tokens that text always turns into, where it occurs.
        special: text -> id of control tokens (`<|endoftext|>`), which text turns into only when allowed.
    """

    pieces: dict[int, bytes]
    added: dict[str, int] = field(default_factory=dict)
    special: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def from_folder(folder: Path) -> Vocabulary:
        """The folder's vocabulary; GPT-2's own if it brings none.

        Raises:
            UserError: a file is missing, broken or contradicts itself, or the tokenizer is of a kind that is not
                supported. Names the file.
        """
        settings = _settings(folder / "tokenizer_config.json")
        vocabulary = _from_files(folder)
        listed = settings.get("added_tokens_decoder") or {}
        if not isinstance(listed, dict) or not all(isinstance(entry, dict) for entry in listed.values()):
            raise UserError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must be an object of objects")
        entries = [{"id": int(key) if key.isdecimal() else key, **entry} for key, entry in listed.items()]
        vocabulary.add(entries, folder / "tokenizer_config.json")
        return vocabulary

    def add(self, entries: Iterable[Any], source: Path) -> None:
        """Take added tokens, each an object with `id`, `content` and perhaps `special`, as Hugging Face lists them."""
        for entry in entries:
            text, token_id, special = _added_token(entry, source)
            known = {**self.special, **self.added}
            if known.get(text, token_id) != token_id:
                raise UserError(f"{source}: {show(text)} is token {token_id} here, but {known[text]} elsewhere")
            if self.pieces.get(token_id, text.encode()) != text.encode():
                raise UserError(f"{source}: token {token_id} is {show(text)} here, but another token in the vocabulary")
            self.special.pop(text, None)
            (self.special if special else self.added)[text] = token_id


def _settings(path: Path) -> Mapping[str, Any]:
    """tokenizer_config.json, checked for what would change the ids."""
    settings = read_json_object(path) if path.exists() else {}
    for key in _CHANGES_IDS:
        if settings.get(key):
            raise UserError(f"{path}: {key}={show(settings[key])} is not supported; ember tokenises text as it stands")
    kind = settings.get("tokenizer_class") or TOKENIZERS[0]
    if kind not in TOKENIZERS:
        raise UserError(
            f"{path}: tokenizer_class={show(kind)} is not supported; must be one of {', '.join(TOKENIZERS)}"
        )
    return settings


def _from_files(folder: Path) -> Vocabulary:
    vocab, merges, both = folder / "vocab.json", folder / "merges.txt", folder / "tokenizer.json"
    if both.exists():
        return _tokenizer_json(read_json_object(both), both)
    if vocab.exists() != merges.exists():
        there, absent = (vocab, merges) if vocab.exists() else (merges, vocab)
        raise UserError(
            f"{folder}: has {there.name} but not {absent.name}; a tokenizer needs both (or neither: GPT-2's)"
        )
    if vocab.exists():
        return _build(read_json_object(vocab), _merges_txt(merges), vocab)
    for name in _OTHER_KINDS:
        if (folder / name).exists():
            raise UserError(
                f"{folder}: {name} is a tokenizer of a kind that is not supported; a tokenizer.json is (transformers' "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) makes one)"
            )
    return _build(read_json_object(GPT2_BPE / "vocab.json"), _merges_txt(GPT2_BPE / "merges.txt"), GPT2_BPE)


def _merges_txt(path: Path) -> list[list[str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read ({str(error)[:100]})") from None
    lines = text.replace("\r\n", "\n").split("\n")
    return _pairs([line.split(" ") for line in lines if line and not line.startswith("#version")], path)


def is_plain(data: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json, with its tokenizer_config.json, is GPT-2's byte-level BPE and nothing more."""
    listed = settings.get("added_tokens_decoder")
    added = [data.get("added_tokens"), list(listed.values()) if isinstance(listed, dict) else None]
    entries = [entry for some in added if isinstance(some, list) for entry in some if isinstance(entry, dict)]
    return (
        _beyond_plain(data) is None
        and not any(settings.get(key) for key in _CHANGES_IDS)
        and not any(entry.get(key) for entry in entries for key in _RULES)
    )


def _beyond_plain(data: Mapping[str, Any]) -> str | None:
    """The key of a tokenizer.json that asks for more than GPT-2's byte-level BPE."""
    model, before = _object(data.get("model")), _object(data.get("pre_tokenizer"))
    after = _object(data.get("post_processor"))
    checks = {
        "model.type": model.get("type", "BPE") == "BPE",
        "normalizer": data.get("normalizer") is None,
        "pre_tokenizer": before.get("type") == "ByteLevel" and before.get("use_regex", True) is True,
        "add_prefix_space": not before.get("add_prefix_space"),
        "post_processor": after.get("type", "ByteLevel") == "ByteLevel" or _adds_nothing(after),
        **{key: not model.get(key) for key in ("byte_fallback", "ignore_merges", "dropout", "end_of_word_suffix")},
        "continuing_subword_prefix": not model.get("continuing_subword_prefix"),
    }
    return next((key for key, is_fine in checks.items() if not is_fine), None)


def _tokenizer_json(data: Mapping[str, Any], path: Path) -> Vocabulary:
    """The `tokenizers` library's file, if all that it does is GPT-2's byte-level BPE."""
    if key := _beyond_plain(data):
        raise UserError(f"{path}: its {key} is not supported here; only GPT-2's plain byte-level BPE is")
    model = _object(data.get("model"))
    vocab, merges, added = model.get("vocab"), model.get("merges"), data.get("added_tokens") or []
    if not isinstance(vocab, dict) or not isinstance(merges, list) or not isinstance(added, list):
        raise UserError(f"{path}: model.vocab must be an object, model.merges and added_tokens lists")
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    vocabulary = _build(vocab, _pairs(pairs, path), path)
    vocabulary.add(added, path)
    return vocabulary


def _adds_nothing(template: Mapping[str, Any]) -> bool:
    """A template of the text alone, as transformers 5 writes for GPT-2: no BOS before it, no EOS after."""
    single = template.get("single")
    return isinstance(single, list) and [list(_object(part)) for part in single] == [["Sequence"]]


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _pairs(merges: list[Any], path: Path) -> list[list[str]]:
    for merge in merges:
        if not isinstance(merge, list) or len(merge) != 2 or not all(isinstance(part, str) for part in merge):
            raise UserError(f"{path}: {show(merge)} is not a merge of two tokens")
    return merges


def _build(vocab: Mapping[str, Any], merges: list[list[str]], path: Path) -> Vocabulary:
    """Sort tokens into bytes, merges (in their order) and the rest, which are special."""
    _check_ids(vocab, path)
    spelt = {char: bytes([byte]) for char, byte in byte_alphabet().items()}
    pieces = {vocab[char]: byte for char, byte in spelt.items() if char in vocab}
    for left, right in merges:
        merged = left + right
        if left not in spelt or right not in spelt or merged not in vocab:
            raise UserError(f"{path}: the merge {show(left + ' ' + right)} is of tokens that do not exist by then")
        spelt[merged] = spelt[left] + spelt[right]
        pieces.setdefault(vocab[merged], spelt[merged])
    special = {text: token_id for text, token_id in vocab.items() if token_id not in pieces}
    for text in special:
        _check_text(text, path)
    return Vocabulary(pieces, special=special)


def _check_ids(vocab: Mapping[str, Any], path: Path) -> None:
    for text, token_id in vocab.items():
        if type(token_id) is not int or not 0 <= token_id < MAX_ID:
            raise UserError(
                f"{path}: {show(text)} has id {show(token_id)}; must be a whole number in 0 .. {MAX_ID - 1}"
            )
    if len(set(vocab.values())) < len(vocab):
        raise UserError(f"{path}: two tokens have the same id")


def _added_token(entry: Any, source: Path) -> tuple[str, int, bool]:
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise UserError(f"{source}: an added token must be an object with id and content, not {show(entry)}")
    _check_text(entry["content"], source)
    _check_ids({entry["content"]: entry.get("id")}, source)
    for key in _RULES:
        if entry.get(key):
            raise UserError(f"{source}: the added token {show(entry['content'])} has {key}, which is not supported")
    return entry["content"], entry["id"], bool(entry.get("special"))


def _check_text(text: str, path: Path) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: the token {show(text)} is not Unicode text") from None


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each of the 256 bytes -> the byte: itself if printable, else U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
