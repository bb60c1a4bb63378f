"""What the user gives a run: flags, hyper-parameters, the data yaml.

Read in this order: limits (what a number may be), flags (a row for each flag of train.py and test.py), options (the
command lines, their checks, opt.yaml), hyp (a row for each hyper-parameter), data_yaml, resize_schedule.
"""
