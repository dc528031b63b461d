"""Parameters, buffers and optimizer state of a model: their names, places and requirements."""
