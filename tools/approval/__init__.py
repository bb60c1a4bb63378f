"""The staged approval behind tools/approve.py: six stages of checks, each with a report for a person to judge.

Read in this order: stages (which files an approval is about, who approved what), setup (how the runs of a stage train,
how a check tells what it found), checks (stages 1, 5, 6), loader_checks (stages 2 to 4), report (what is written).
"""
