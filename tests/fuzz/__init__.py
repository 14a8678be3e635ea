"""Fuzzers: seeded hostile inputs of five classes, and runs that are killed and resumed.

    make fuzz CASES=20000 SEED=1      a campaign over all classes; prints a table and every kind of failure
    make kills KILLS=200 SEED=1       runs that are killed at every stage must write the bytes of uninterrupted ones

A case is plain JSON that says all of itself, so that it can be kept in regressions.json, whatever becomes of the
generators.
"""
