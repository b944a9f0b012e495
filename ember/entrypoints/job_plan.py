"""What a job needs to know of that which computes its rows: an engine in this process or a cluster, or a server."""

from __future__ import annotations

from typing import Any, Protocol

from ember.data.hashes import FileHashes


class JobPlan(Protocol):
    """Resolved before the first row: `EnginePlan` or `RemotePlan`."""

    @property
    def model_name(self) -> str:
        """The model as the user or the server calls it."""

    @property
    def why_not_exact(self) -> str | None:
        """Why results may depend on the batch; None where they never do."""

    def identity(self, hashes: FileHashes) -> dict[str, Any]:
        """What of it determines results, for the fingerprint.

        Raises:
            UserError: a file can't be read.
        """

    def facts(self) -> dict[str, Any]:
        """Where it comes from, for the manifest; never compared."""

    def settings(self) -> dict[str, Any]:
        """What speeds depend on, for the summary."""
