"""Presentation on a terminal: tables, live views, progress, plots, and keys."""
