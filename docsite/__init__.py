"""Makes docs/ a site (`make docs`): generates reference pages from the code, and extends MkDocs.

`commands` and `environment` write pages of docs/reference, and `diagrams` draws the Mermaid blocks
of the pages; these run where Shoal is installed (`python -m docsite`). `hooks` runs in MkDocs.
"""
