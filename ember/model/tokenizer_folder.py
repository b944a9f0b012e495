"""The tokenizer of a model folder: which of the two that can run it."""

from __future__ import annotations

from pathlib import Path

from ember.errors import UserError
from ember.model.byte_pairs import BytePairTokenizer
from ember.model.gguf_file import GgufFile, is_gguf
from ember.model.gguf_tokenizer import gguf_tokenizer
from ember.model.json_file import read_json_object
from ember.model.library_tokenizer import LibraryTokenizer
from ember.model.tokenizer import Tokenizer
from ember.model.tokenizer_settings import TokenizerSettings
from ember.model.vocabulary import Vocabulary, is_plain


def load_tokenizer(folder: Path, *, gpt2s_by_default: bool = True) -> Tokenizer:
    """The tokenizer of a GGUF file or a model folder; GPT-2's own if it brings none, and that is allowed.

    What is GPT-2's plain byte-level BPE runs on tiktoken, whatever files it comes in; any other tokenizer.json on the
    `tokenizers` library.

    Raises:
        UserError: its files are incomplete, broken or of a kind that is not supported.
    """
    if is_gguf(folder):
        data = gguf_tokenizer(GgufFile.open(folder))
        return LibraryTokenizer(data, TokenizerSettings.from_folder(folder), str(folder))
    path = folder / "tokenizer.json"
    if path.exists():
        data = read_json_object(path)
        settings = folder / "tokenizer_config.json"
        if not is_plain(data, read_json_object(settings) if settings.exists() else {}):
            return LibraryTokenizer(data, TokenizerSettings.from_folder(folder), str(path))
    elif not gpt2s_by_default and not (folder / "vocab.json").exists():
        raise UserError(f"{folder}: has no tokenizer.json; a model of this kind needs one")
    return BytePairTokenizer(Vocabulary.from_folder(folder))
