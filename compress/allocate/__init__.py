"""Choose how each part of the model is stored, among several options and within a budget of bytes.

A plugin `compress/allocate/methods/<name>.py` defines `Config` (a frozen dataclass: recipe keys), `allocate` and
`needs`. It is given a `Problem` (problem.py) and never sees a weight, a method or a format.
"""
