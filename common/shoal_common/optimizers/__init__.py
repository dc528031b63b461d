"""Optimizers that torch lacks, and declarations of the optimizers that parameter servers
support."""
