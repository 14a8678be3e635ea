"""Every line that the documentation shows, run as it stands: command lines, Python, recipes.

    PYTHONPATH=tests python -m docs_lines [--pages docs/kv_saved.md ...]        or: make docs PAGES=docs/kv_saved.md

`lines.yaml` says what a line presumes, what makes it small, what its comment claims, and why it is not run where it is
not. Everything that no rule speaks of is run as it stands.
"""
