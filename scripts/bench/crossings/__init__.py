"""When each way to use the pool wins, and where it begins to: one file per pattern, each with a `measure`.

rounds.py    times of cases in turn, and ratios of them
section.py   a table with its crossing points, and how it gets into a document
"""
