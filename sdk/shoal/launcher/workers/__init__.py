"""The worker processes of one launcher: their settings, environment and output, and when they are
started and restarted."""
