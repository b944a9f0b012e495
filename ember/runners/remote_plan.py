"""The plan of a job that a server computes: which server, and which of its models."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from ember.config import JobConfig
from ember.data.hashes import FileHashes
from ember.errors import ConfigError
from ember.runners.openai_client import OpenAIClient


@dataclass(frozen=True, slots=True)
class RemotePlan:
    """A server that speaks OpenAI's completions, and the id of its model."""

    base_url: str
    model_name: str
    concurrency: int

    @staticmethod
    def resolve(config: JobConfig) -> RemotePlan:
        """Ask the server for its models.

        Raises:
            UserError: it can't be reached, refuses the key, lacks the model, or has several and none was chosen.
        """
        models = asyncio.run(_models(config))
        asked = config.served_model
        if asked is None and len(models) == 1:
            return RemotePlan(str(config.base_url), models[0], config.concurrency)
        if asked is None or (models and asked not in models):
            listed = ", ".join(models[:10]) or "none"
            raise ConfigError("served_model", asked, f"choose one of the server's models: {listed}")
        return RemotePlan(str(config.base_url), asked, config.concurrency)

    @property
    def why_not_exact(self) -> str | None:
        """Nothing is known of a server's arithmetic."""
        return "another server computes the rows (engine=http)"

    def identity(self, hashes: FileHashes) -> dict[str, Any]:
        """See `JobPlan`: the URL and the model's id are all there is to know."""
        return {"engine": "http", "base_url": self.base_url, "served_model": self.model_name}

    def facts(self) -> dict[str, Any]:
        """See `JobPlan`."""
        return {"model": self.model_name, "base_url": self.base_url}

    def settings(self) -> dict[str, Any]:
        """See `JobPlan`."""
        return {"engine": "http", "base_url": self.base_url, "model": self.model_name, "concurrency": self.concurrency}


async def _models(config: JobConfig) -> list[str]:
    async with OpenAIClient.of(config) as client:
        return await client.models()
