"""Optimizers that torch lacks, and those of parameter servers."""
