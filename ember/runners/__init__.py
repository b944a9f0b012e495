"""Runners besides the engine in this process: they compute rows elsewhere and hand them to the same Recorder."""
