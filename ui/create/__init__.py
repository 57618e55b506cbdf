"""The Create tab: a wish, its picture, and how it is painted."""
