"""Makes docs/ a site (`make docs`): reference pages that are written from the code, and what MkDocs
is told beside mkdocs.yml.

`commands` and `environment` write pages of docs/reference, `diagrams` draws what Markdown pages
have as Mermaid; these run where Shoal is installed (`python -m docsite`). `hooks` runs in MkDocs.
"""
