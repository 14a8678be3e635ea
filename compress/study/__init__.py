"""Measure many recipes on one model: a grid of cells, each quantized and scored once, in any number of sittings.

`grid` lists the cells, `folder` keeps them on disk, `cell` measures one of them in a process of its own, `runner`
shares them out among processes, `summary` writes what is known as study.json and study.csv. docs/study.md describes the
files.
"""
