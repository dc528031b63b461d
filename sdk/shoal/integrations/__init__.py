"""Elastic versions of other libraries' trainers: one package per library, each with its own extra
(`'shoal[transformers]'`).

Nothing is imported here; only `import shoal.integrations.transformers` needs transformers.
"""
