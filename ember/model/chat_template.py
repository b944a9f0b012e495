"""Conversations to prompts, with a model's own Jinja chat template, as transformers' `apply_chat_template` does it.

The template's control tokens become their ids; the same text in a message stays text. A conversation that ends with a
message of the assistant's is left open there, so that the completion goes on with it; any other ends with the
template's own beginning of an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import LifoQueue
from typing import Any

from ember.errors import ConfigError, UserError
from ember.model.chat_process import ChatProcess
from ember.model.content_marks import NONCHARACTERS, ContentMarks
from ember.model.conversation import Conversation
from ember.model.tokenizer import Tokenizer
from ember.model.tokenizer_settings import TokenizerSettings, template_file

NUM_WORKERS = 4
"""Templates that a server may be rendering at once."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation: its text, and the ids of the tokens."""

    text: str
    token_ids: list[int]


class ChatTemplate:
    """One model's chat template.

    Args:
        source: Jinja.
        kwargs: further variables for it (`enable_thinking=False`).
        now: an ISO date for `strftime_now`; None: the template has no such function.

    Attributes:
        digest: the source's SHA-256.
        stop_ids: the tokenizer's own EOS, which ends an answer whatever the network's settings say.

    Raises:
        UserError: the source is no text.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        settings: TokenizerSettings,
        *,
        kwargs: Mapping[str, Any] | None = None,
        now: str | None = None,
    ) -> None:
        try:
            self.digest = hashlib.sha256(source.encode()).hexdigest()
        except UnicodeEncodeError:
            raise UserError("the chat template is not UTF-8 text") from None
        self.source = source
        self._tokenizer = tokenizer
        self._marks = ContentMarks(tokenizer.special)
        self._variables = {"tools": None, "documents": None, **settings.named, **(kwargs or {})}
        if settings.extra:
            self._variables.setdefault("additional_special_tokens", list(settings.extra))
        self._processes: LifoQueue[ChatProcess] = LifoQueue()
        self._processes.put(ChatProcess(source, now))
        eos = tokenizer.special.get(settings.named.get("eos_token", ""))
        self.stop_ids = frozenset() if eos is None else frozenset([eos])

    @staticmethod
    def of_folder(
        folder: Path, tokenizer: Tokenizer, *, file: str | None, kwargs: Mapping[str, Any], now: str | None
    ) -> ChatTemplate | None:
        """The template of a model folder, or of a `file`, which wins; None if there is none.

        Raises:
            UserError: a file can't be read, or is missing.
        """
        settings = TokenizerSettings.from_folder(folder)
        source = settings.chat_template if file is None else template_file(Path(file).expanduser())
        if file is not None and source is None:
            raise ConfigError("chat_template", file, "no such file; must be a file with a Jinja chat template")
        return None if source is None else ChatTemplate(source, tokenizer, settings, kwargs=kwargs, now=now)

    def check(self) -> None:
        """See that there is such a template before a row needs it.

        Raises:
            UserError: it is no Jinja, or jinja2 is missing.
        """
        with self._process() as process:
            process.check()

    def render(self, conversation: Conversation) -> ChatPrompt:
        """The prompt of a conversation.

        Raises:
            UserError: the template fails or refuses the messages, or drops the one that is to be continued.
        """
        mark, end = self._unused(conversation)
        messages = [{**self._marks.put(m, mark), "role": m["role"]} for m in conversation.messages]
        if conversation.continues:
            messages[-1]["content"] = _open_end(messages[-1], end)
        variables = {"messages": messages, "add_generation_prompt": not conversation.continues}
        variables = {**self._variables, **self._marks.put(dict(conversation.kwargs), mark), **variables}
        with self._process() as process:
            text = process.render(variables)
        if conversation.continues:
            text = _cut(text, end)
        parts = [p.replace(mark, "") if isinstance(p, str) else p for p in self._tokenizer.split_special(text)]
        return ChatPrompt(text.replace(mark, ""), self._tokenizer.encode_parts(parts))

    def serve_strangers(self) -> None:
        """From now on, conversations come from people who have nothing to do with each other.

        One on which the template runs too long costs itself, however many there were before it, and others need not
        wait for it: they have further workers, which start when they are needed.
        """
        first = self._processes.get()
        for process in (*(first.another() for _ in range(NUM_WORKERS - 1)), first):
            process.most_deaths = None
            self._processes.put(process)

    @contextmanager
    def _process(self) -> Iterator[ChatProcess]:
        """One that nobody else uses meanwhile; of several, the one that was used last."""
        process = self._processes.get()
        try:
            yield process
        finally:
            self._processes.put(process)

    def _unused(self, conversation: Conversation) -> tuple[str, str]:
        """Two code points that occur nowhere in the conversation."""
        text = repr(conversation) + self.source
        free = [char for char in NONCHARACTERS if char not in text and f"\\u{ord(char):x}" not in text]
        if len(free) < 2:
            raise UserError("the messages hold nearly all of U+FDD0 to U+FDEF, which are no characters")
        return free[0], free[1]


def _open_end(message: Mapping[str, Any], end: str) -> str:
    """The content with its end marked; the space after the mark tells whether the template keeps spaces there."""
    if not message["content"]:
        raise UserError("the last message is the assistant's and has no text to continue")
    return f"{message['content']}{end} "


def _cut(text: str, end: str) -> str:
    """The rendered text up to the end of the last message, without the space there if the template strips it."""
    at = text.rfind(end)
    if at < 0:
        raise UserError("the chat template drops the last message, the assistant's, so it can't be continued")
    return text[:at] if text.startswith(f"{end} ", at) else text[:at].rstrip()
