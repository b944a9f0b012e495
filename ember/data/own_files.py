"""Which files below a folder of inputs are results of ember: they are input only where `data` names them itself.

A job's output may lie inside the folder that it reads, or be that folder. Without this, a job that is run again would
read what it wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from ember.data.file_kinds import shown_path
from ember.data.manifest import MANIFEST

REPORT, PAGE = "report", "report.html"
"""The folder of a report, in an output or a sweep's folder, and its page."""
_RESULTS = re.compile(
    r"completions|steps|report|stdin\.jsonl|manifest\.json|summary(-s\d+of\d+)?\.json|old-\d{8}-\d{6}(-\d+)?"
)


def fixed_part(pattern: str) -> str:
    """The folder of a path or glob that is spelled out, without its last slash."""
    return re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0]


class OwnFiles:
    """Finds results in folders; remembers in which.

    Attributes:
        folders: the outputs of which something was passed over, in the order they were met.

    Args:
        read: the bytes of a file by its path; raises FileNotFoundError.
        scheme: what makes a URL of a path, if it lacks that.
    """

    def __init__(self, read: Callable[[str], bytes], scheme: str = "") -> None:
        self._read, self._scheme = read, scheme
        self._is_output: dict[str, bool] = {}
        self.folders: dict[str, None] = {}

    def has(self, folder: str, name: str) -> bool:
        """Whether a job wrote `name` as a result in `folder`."""
        if name == REPORT and self._is_report(folder):
            return True
        if not _RESULTS.fullmatch(name) or not self._output(folder):
            return False
        self.folders[folder] = None
        return True

    def on_the_way(self, path: str, pattern: str) -> bool:
        """Whether a glob's match, or a folder on the way to it, is a result that the pattern does not spell out."""
        fixed = len(fixed_part(pattern))
        spelled = pattern[fixed:].split("/")
        while len(path) > fixed:
            parent, slash, name = path.rpartition("/")
            if name not in spelled and self.has(parent if parent or not slash else "/", name):
                return True
            path = parent
        return False

    @property
    def notes(self) -> list[str]:
        """One line on what was passed over and how to read it all the same; none if nothing was."""
        first = next(iter(self.folders), None)
        if first is None:
            return []
        folder = shown_path(self._scheme + (first or "."))
        more = f" and {len(self.folders) - 1} more" if len(self.folders) > 1 else ""
        return [f"results of ember in {folder}{more} are passed over; to read them, name {folder}/completions"]

    def _is_report(self, folder: str) -> bool:
        """Whether a report lies in a folder: that of a sweep is in no job's output."""
        try:
            return bool(self._read(f"{folder}/{REPORT}/{PAGE}" if folder else f"{REPORT}/{PAGE}"))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _output(self, folder: str) -> bool:
        if folder not in self._is_output:
            self._is_output[folder] = self._has_manifest(folder)
        return self._is_output[folder]

    def _has_manifest(self, folder: str) -> bool:
        try:
            value = json.loads(self._read(f"{folder}/{MANIFEST}" if folder else MANIFEST))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return False
        return isinstance(value, dict) and {"fingerprint", "facts"} <= value.keys()
