"""The parts of the OpenAI-compatible server that know HTTP's words: settings, requests, answers, errors, metrics."""
