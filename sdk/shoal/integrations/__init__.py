"""Elastic versions of other libraries' trainers: one package per library, each with its own extra
(`'shoal[transformers]'`).

This package itself imports nothing; only `import shoal.integrations.transformers` needs
transformers.
"""
