"""Hold the tasks of `compress eval`, one file each, found by their file names.

A task `compress/evaluate/tasks/<name>.py` defines

    Config                   a frozen dataclass of settings, each with a default and a comment: `seed` and `count`
                             (items) where items are drawn; `file` where they are read from a file of the user's
    items(config, material)  the items, a list of `compress.evaluate.items.Item`; the same for the same settings and
                             material; empty where the model is too short for the task. CalibrationError for a file
                             that cannot be used
    WAY                      "likelihood", "greedy" or "written" (`compress/evaluate/items.py` says what they are)
    SUITES                   {suite: settings that differ from the defaults}: the suites that run it, a literal; empty
                             for a task that runs only where it is named
    correct(item, text)      whether what was written is right; where WAY is "written"

and may define

    figures(item, text)      more figures of what was written, by name
    BY                       the name of a fact of its items; the result has a table over its values
    remark(scores)           a sentence on the scores (`TaskScore`) of all tasks of a run together, or ""

Tasks of papers are files of `compress/papers/tasks` with the same contract.

The first line of its docstring says what it asks. A task knows no other task and no model.
"""
