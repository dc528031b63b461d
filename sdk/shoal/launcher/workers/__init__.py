"""Worker processes of one launcher: their settings, environment, output, start and restarts."""
