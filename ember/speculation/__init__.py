"""Guessing the next tokens; the engine only knows `ember.core.speculation.Proposer`."""
