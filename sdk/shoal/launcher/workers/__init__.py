"""The worker processes of one launcher: their settings, environment and output, and the decisions
to start and restart them."""
