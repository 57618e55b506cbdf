"""Commands of the CLI by purpose; large libraries are imported only when a command runs."""
