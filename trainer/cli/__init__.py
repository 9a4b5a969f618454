"""The command line, `rolloutbus`."""
