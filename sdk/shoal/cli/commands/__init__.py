"""The commands of `shoal`, one module each; imported when they are called."""
