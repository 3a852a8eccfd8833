"""Command line: parse, call one library function, print."""
