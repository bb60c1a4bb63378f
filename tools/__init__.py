"""Commands, each a file with its usage on top; `python tools/NAME.py --help` tells the rest.

approval/ and experiments/ are their libraries.
"""
