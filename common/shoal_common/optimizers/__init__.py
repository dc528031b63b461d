"""Optimizers that torch lacks, and declarations of the optimizers of parameter servers."""
