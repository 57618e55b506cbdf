"""Scenes in a real browser, which is the fixtures' package: it is closed when the last scene is over."""
