"""Builds the documentation site from docs/ (`make docs`): generates reference pages from the code,
and extends MkDocs.

`commands` and `environment` generate pages of docs/reference (`python -m docsite`). They need an
environment in which Shoal is installed. `diagrams` draws the Mermaid diagrams of all pages, and
`recording` draws an animated terminal; both are run by hand. `hooks` runs in MkDocs.
"""
