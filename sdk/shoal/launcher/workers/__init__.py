"""Worker processes of one launcher: settings, environment, output, starts and restarts."""
