"""Choose how each part of the model is stored, among several options and within a budget of bytes.

A plugin `compress/allocate/methods/<name>.py` defines `Config` (a frozen dataclass: recipe keys), `allocate` and
`needs`. It is given a `Problem` (problem.py) and never sees a weight, a method or a format. It may have `METRICS`: name
of what it needs -> function that measures it, beside those of metrics.py. Published methods behind the frontier lie in
compress/papers/allocate.

    decide, forecast     a job with open bits -> one without; what that takes, where nothing is measured
    session              the measurements of a recipe in a folder: cost, quantize_options, sensitivity, metrics
    table, problem       units with their entries and damages; bytes of a target
    solver, hull         least damage within the bytes
    decision, pareto     the choice for a target, and the front of choices
    cache_*              units of the key-value cache in the same problem
    joint_kl             divergence of many variants of a model (prefix_tree, memory_split, variants)
"""
