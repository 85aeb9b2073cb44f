"""The `kvd-ctl` command."""
