"""One image file: read it, turn it upright (exif), know its size, find out whether it is whole."""
