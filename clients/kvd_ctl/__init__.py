"""The `kvd-ctl` command."""

# The exit status of a command that Ctrl-C ended.
INTERRUPTED = 130
