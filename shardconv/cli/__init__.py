"""The command line: one verb a file, one library call inside. stdout is data, stderr is talk."""
