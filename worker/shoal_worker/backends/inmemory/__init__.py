"""Ranks that are threads of one process: for tests, debugging and notebooks."""
