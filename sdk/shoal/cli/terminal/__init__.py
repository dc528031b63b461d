"""Output on a terminal (tables, live views, progress bars, plots) and input of single keys."""
