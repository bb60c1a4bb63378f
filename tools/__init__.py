"""Commands, each a file with its usage on top; `python tools/NAME.py --help` tells the rest.

approval/, coco/ and experiments/ are their libraries.
"""
