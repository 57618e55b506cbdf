"""The commands, by what they are for. None imports anything heavy before it runs."""
