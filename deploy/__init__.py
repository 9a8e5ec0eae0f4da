"""The command line, and a local fleet in the foreground. May import every other folder; none imports this
one."""
