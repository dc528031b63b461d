"""Trainers of other libraries, made to run elastic: one package a library, each with an extra of
its own (`'shoal[transformers]'`).

Nothing is imported here: it is `import shoal.integrations.transformers` that needs transformers.
"""
