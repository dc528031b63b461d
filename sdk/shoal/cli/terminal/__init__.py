"""Output on a terminal (tables, live views, progress, plots) and input of single keys."""
