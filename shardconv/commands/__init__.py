"""One verb a file, a library call each."""
